"""What both families of models share: norm, MLP, rotary positions, head and state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GatedMLP", "LMState", "LanguageModel", "RMSNorm", "rotate"]

LayerState = dict[str, Tensor]


class RMSNorm(nn.Module):
    r"""Unit root mean square: :math:`(1+w)\,x/\sqrt{\overline{x^2}+10^{-6}}`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * (1 + self.weight)).to(x.dtype)


class GatedMLP(nn.Module):
    """``down(gelu(gate(x)) * up(x))``, with biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden)
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


def rotate(
    x: Tensor, positions: Tensor, *, fraction: float = 1.0, base: float = 10_000.0
) -> Tensor:
    r"""Rotary positions: turn channel pairs by an angle proportional to the position.

    Pair :math:`i` of :math:`n` turns by :math:`p\,\mathrm{base}^{-i/n}`; channel
    :math:`i` is paired with :math:`i+n`. The product of a rotated query and a rotated
    key depends on their distance only.

    Args:
        x: ``(B, T, H, d)``.
        positions: ``(B, T)`` integers.
        fraction: share of the ``d`` channels that turn; the rest pass.
        base: of the geometric series of frequencies.

    Returns:
        ``(B, T, H, d)``.
    """
    pairs = int(x.shape[-1] * fraction) // 2
    steps = torch.arange(pairs, device=x.device, dtype=torch.float64)
    # In float64, so that the angles of late positions keep their digits.
    angle = positions.unsqueeze(-1).double() * base ** (-steps / pairs)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # (B, T, pairs) -> (B, T, 1, pairs)
    first, second, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), -1)
    return torch.cat(
        (first * cos - second * sin, second * cos + first * sin, rest), dim=-1
    )


def keep(part: Tensor, length: int) -> Tensor:
    """Of ``length`` tokens, the part that a state remembers, without the rest.

    A slice holds on to all the memory that it was cut from. After a single token that
    is one entry more, and copying would cost more than it saves.
    """
    return part.clone() if length > 1 else part


@dataclass
class LMState:
    """All that a model remembers of the tokens it has read; never kept on the model.

    Attributes:
        layers: one dictionary of tensors for each layer, batch first.
        age: ``(B,)`` tokens read since the current document began.
        stored: tokens read since the state was made.
        packed: whether a document began later than the first token.
    """

    layers: list[LayerState]
    age: Tensor
    stored: int = 0
    packed: bool = False

    def nbytes(self) -> int:
        """Bytes of everything remembered, the counter of 8 bytes a row included."""
        tensors = [self.age, *(t for layer in self.layers for t in layer.values())]
        return sum(t.numel() * t.element_size() for t in tensors)

    def detach(self) -> LMState:
        """The same state, cut off from the graph that computed it."""
        return self._map(Tensor.detach)

    def select(self, rows: Tensor) -> LMState:
        """The state of some rows of the batch, in a new order; a copy."""
        return self._map(lambda tensor: tensor[rows])

    def _map(self, fn) -> LMState:
        layers = [
            {name: fn(tensor) for name, tensor in layer.items()}
            for layer in self.layers
        ]
        return LMState(layers, fn(self.age), self.stored, self.packed)


class _Block(nn.Module):
    def __init__(self, mixer: nn.Module, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = RMSNorm(dim), mixer
        self.mlp_norm, self.mlp = RMSNorm(dim), GatedMLP(dim, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, positions, state, *, packed):
        mixed, state = self.mixer(
            self.mixer_norm(x), positions=positions, state=state, packed=packed
        )
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), state


class LanguageModel(nn.Module):
    r"""Embedding, residual blocks, tied output: everything but the mixing over time.

    A *mixer* maps ``(x, positions, state, packed)`` to ``(y, state)`` and has
    ``init_state(batch, device=, dtype=)``.

    Shapes: ``B`` batch, ``T`` tokens, ``D`` width, ``V`` vocabulary.

    Args:
        mixers: one a layer, from bottom to top.
        vocab_size: ``V``.
        width: ``D``.
        mlp_width: width of each MLP branch.
        soft_cap: logits become ``cap * tanh(logits / cap)``; ``None``: as they are.
        embed_scale: factor on the embeddings; default :math:`\sqrt D`.
        dropout: on both branches of every block.
    """

    def __init__(
        self,
        mixers: list[nn.Module],
        *,
        vocab_size: int,
        width: int,
        mlp_width: int,
        soft_cap: float | None = 30.0,
        embed_scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.soft_cap = vocab_size, soft_cap
        self.embed_scale = width**0.5 if embed_scale is None else embed_scale
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            _Block(mixer, width, mlp_width, dropout) for mixer in mixers
        )
        self.final_norm = RMSNorm(width)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew, as the released Griffin does.

        Linear weights are normal with variance one over their inputs, those that write
        to the residual stream times ``2 / num_layers``; biases are zero.

        Args:
            generator: source of the numbers.
        """
        scale = 2 / len(self.blocks)
        nn.init.normal_(
            self.embed.weight, std=self.embed.weight.shape[1] ** -0.5, **_by(generator)
        )
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                gain = (
                    scale if name.endswith(("down_proj", "linear_out", "o_proj")) else 1
                )
                std = math.sqrt(gain / module.in_features)
                nn.init.normal_(module.weight, std=std, **_by(generator))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif hasattr(module, "draw"):
                module.draw(generator)

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LMState:
        """The state before the first token, for ``batch_size`` rows.

        Raises:
            ValueError: ``batch_size`` below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        like = self.embed.weight
        where = {"device": device or like.device, "dtype": dtype or like.dtype}
        layers = [block.mixer.init_state(batch_size, **where) for block in self.blocks]
        age = torch.zeros(batch_size, dtype=torch.int64, device=where["device"])
        return LMState(layers, age)

    def features(
        self, ids: Tensor, state: LMState | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, LMState]:
        """What :meth:`forward` computes, before the output matrix: ``(B, T, D)``."""
        state = self._checked(ids, state, reset)
        positions, reset_seen = _positions(ids, state.age, reset)
        packed = state.packed or reset_seen
        x = self.embed(ids) * self.embed_scale
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block(x, positions, layer, packed=packed)
            layers.append(layer)
        stored = state.stored + ids.shape[1]
        after = LMState(layers, positions[:, -1] + 1, stored, packed)
        return self.final_norm(x), after

    def head(self, features: Tensor) -> Tensor:
        """Logits ``(..., V)`` of features ``(..., D)``."""
        logits = F.linear(features, self.embed.weight)
        if self.soft_cap is None:
            return logits
        return self.soft_cap * torch.tanh(logits / self.soft_cap)

    def forward(
        self, ids: Tensor, state: LMState | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, LMState]:
        """Logits of the next token at every position, and the state after the last.

        One call for every purpose: a training row, a prompt, the next token or the next
        chunk of any length.

        Args:
            ids: ``(B, T)`` integers in ``[0, V)``.
            state: what an earlier call returned; ``None`` before the first token.
            reset: ``(B, T)`` booleans, true where a new document begins. Nothing before
                it reaches it or anything after it.

        Returns:
            Logits ``(B, T, V)`` and the state that continues the rows.

        Raises:
            IndexError: an id outside the vocabulary.
            TypeError: ids that are not integers.
            ValueError: no tokens, or a state or reset that does not fit.
        """
        features, state = self.features(ids, state, reset)
        return self.head(features), state

    def _checked(
        self, ids: Tensor, state: LMState | None, reset: Tensor | None
    ) -> LMState:
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        if ids.dim() != 2 or 0 in ids.shape:
            raise ValueError(
                f"ids must be (B, T) with B, T >= 1, got {tuple(ids.shape)}"
            )
        if ids.device.type == "cpu":  # elsewhere the look would wait for the device
            low, high = ids.aminmax()
            if low < 0 or high >= self.vocab_size:
                wrong = int(low if low < 0 else high)
                raise IndexError(f"token id {wrong} is not in [0, {self.vocab_size})")
        if reset is not None and (
            reset.shape != ids.shape or reset.dtype != torch.bool
        ):
            raise ValueError(
                f"reset must be booleans of shape {tuple(ids.shape)}, "
                f"got {reset.dtype} of shape {tuple(reset.shape)}"
            )
        if state is None:
            return self.init_state(ids.shape[0], device=ids.device)
        if len(state.age) != len(ids):
            raise ValueError(
                f"state is of a batch of {len(state.age)}, ids of {len(ids)}"
            )
        if len(state.layers) != len(self.blocks):
            raise ValueError(
                f"state has {len(state.layers)} layers, the model {len(self.blocks)}"
            )
        for at, (block, layer) in enumerate(
            zip(self.blocks, state.layers, strict=True)
        ):
            if problem := block.mixer.mismatch(layer):
                raise ValueError(f"state is of another model: layer {at} {problem}")
        return state


def _positions(ids: Tensor, age: Tensor, reset: Tensor | None) -> tuple[Tensor, bool]:
    """Each token's place in its document, ``(B, T)``."""
    steps = torch.arange(ids.shape[1], device=ids.device)
    if reset is None:
        return age.unsqueeze(1) + steps, False
    began = torch.where(reset, steps, -age.unsqueeze(1))  # the latest beginning wins
    return steps - began.cummax(1).values, True


def _by(generator: torch.Generator | None) -> dict:
    return {"generator": generator}


def check_layer(layer: LayerState, shapes: dict[str, tuple[int | None, ...]]) -> str:
    """What is wrong with a layer's state, or nothing; ``None`` fits any size."""
    if layer.keys() != shapes.keys():
        return f"holds {sorted(layer)}, not {sorted(shapes)}"
    for name, shape in shapes.items():
        found = tuple(layer[name].shape)
        fits = len(found) == len(shape) and all(
            want in (None, size) for size, want in zip(found, shape, strict=True)
        )
        if not fits:
            return f"has {name} of shape {found}"
    return ""
