"""Griffin: gated linear recurrences and local attention, with an explicit state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import LocalAttention
from .layers import LanguageModel, LayerState, check_layer, keep
from .scan import linear_scan, sqrt_clipped

__all__ = [
    "GRIFFIN_2B",
    "GRIFFIN_9B",
    "MINI",
    "RGLRU",
    "GriffinConfig",
    "GriffinLM",
    "RecurrentBlock",
]


@dataclass(frozen=True)
class GriffinConfig:
    """Size of a Griffin language model; the defaults are the laptop's."""

    vocab_size: int = 64  # V, speech tokens
    width: int = 96  # D
    lru_width: int = 96  # width of the recurrence
    num_layers: int = 3
    pattern: str = "RRA"  # R recurrent, A local attention; repeated over the layers
    num_heads: int = 4  # H, heads of attention and blocks of the gates
    num_kv_heads: int = 1
    mlp_width: int = 192  # of each of the two branches
    window: int = 40  # W, keys a query sees, itself included
    conv_width: int = 4  # K
    soft_cap: float | None = 30.0
    embed_scale: float | None = None  # sqrt(width)
    rope_fraction: float = 0.5  # share of a head's channels that turn
    init: str = "code"  # of the decays: "code" or "paper", see RGLRU
    dropout: float = 0.0

    def kinds(self) -> str:
        """One letter a layer."""
        repeats = -(-self.num_layers // len(self.pattern))
        return (self.pattern * repeats)[: self.num_layers]


# The sequence models of the two SpeechSSM sizes, by their released text versions; the
# speech vocabulary is reported as "32k", and 32,768 is our reading of it.
GRIFFIN_2B = GriffinConfig(
    vocab_size=32_768,
    width=2560,
    lru_width=2560,
    num_layers=26,
    num_heads=10,
    mlp_width=7680,
    window=2048,
)
GRIFFIN_9B = GriffinConfig(
    vocab_size=32_768,
    width=4096,
    lru_width=4096,
    num_layers=38,
    num_heads=16,
    mlp_width=12_288,
    window=2048,
)
MINI = GriffinConfig(
    vocab_size=1024,
    width=512,
    lru_width=512,
    num_layers=12,
    num_heads=8,
    mlp_width=1536,
    window=512,
)


class RGLRU(nn.Module):
    r"""The real-gated linear recurrent unit of Griffin.

    .. math::

        r_t &= \sigma(W_r x_t + b_r), \quad i_t = \sigma(W_i x_t + b_i) \\
        a_t &= \exp(-c\, r_t\, \mathrm{softplus}(p)), \quad c = 8 \\
        h_t &= a_t h_{t-1} + \sqrt{1-a_t^2}\,(i_t x_t)

    The gates do not see :math:`h`, so the recurrence is linear in it and can be
    scanned. At the first token of a document :math:`a_t=0` and the root is 1.

    Args:
        width: ``D``.
        num_blocks: ``H``; the gate matrices are block-diagonal with ``H`` blocks.
        c: the constant above.
        init: ``"code"``, as released: :math:`a=\exp(-\mathrm{softplus}(p))` with
            :math:`a^2` uniform in :math:`[0.9^2, 0.999^2]`; ``"paper"``, as the
            Griffin article has it: :math:`a^c` uniform in :math:`[0.9, 0.999]`.
        method: of :func:`linear_scan`.
        generator: source of the initial parameters.

    Shapes: ``B`` batch, ``T`` tokens, ``D`` width.

    Raises:
        ValueError: ``width`` not a multiple of ``num_blocks``, or an unknown ``init``.

    Source: Griffin (De et al. 2024), and its released code where the two differ.
    """

    def __init__(
        self,
        width: int,
        num_blocks: int,
        *,
        c: float = 8.0,
        init: str = "code",
        method: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_blocks < 1 or width % num_blocks:
            raise ValueError(
                f"width must be a multiple of num_blocks, got {width} and {num_blocks}"
            )
        if init not in ("code", "paper"):
            raise ValueError(f"init must be 'code' or 'paper', got {init!r}")
        self.width, self.num_blocks, self.c = width, num_blocks, c
        self.init, self.method = init, method
        size = width // num_blocks
        self.decay = nn.Parameter(torch.empty(width))  # p
        self.input_weight = nn.Parameter(torch.empty(num_blocks, size, size))
        self.input_bias = nn.Parameter(torch.empty(num_blocks, size))
        self.recurrent_weight = nn.Parameter(torch.empty(num_blocks, size, size))
        self.recurrent_bias = nn.Parameter(torch.empty(num_blocks, size))
        self.draw(generator)

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Draw the parameters anew."""
        std = (self.num_blocks / self.width) ** 0.5
        for weight in (self.input_weight, self.recurrent_weight):
            nn.init.normal_(weight, std=std, generator=generator)
        for bias in (self.input_bias, self.recurrent_bias):
            nn.init.zeros_(bias)
        with torch.no_grad():
            low, high = (0.9, 0.999) if self.init == "paper" else (0.9**2, 0.999**2)
            self.decay.uniform_(low, high, generator=generator)
            power = self.c if self.init == "paper" else 2.0
            log_a = self.decay.log() / power
            self.decay.copy_(torch.log(torch.expm1(-log_a)))  # softplus(p) = -log a

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``log a_t`` and ``i_t``, each ``(B, T, D)``."""
        batch, length, _ = x.shape
        weight = torch.cat((self.recurrent_weight, self.input_weight), -1)
        bias = torch.cat((self.recurrent_bias, self.input_bias), -1)
        # (B, T, D) -> (H, B*T, D/H): both gates of all blocks in one product
        blocks = x.reshape(batch * length, self.num_blocks, -1).transpose(0, 1)
        both = torch.baddbmm(bias.unsqueeze(1), blocks, weight).sigmoid()
        both = both.transpose(0, 1).reshape(batch, length, self.num_blocks, 2, -1)
        recurrent, entry = both.unbind(3)  # (B, T, H, D/H) each
        recurrent, entry = recurrent.reshape(x.shape), entry.reshape(x.shape)
        return -self.c * recurrent.to(_wide(x)) * F.softplus(self.decay), entry

    def forward(
        self, x: Tensor, h0: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs and last state.

        Args:
            x: ``(B, T, D)``.
            h0: ``(B, D)``, the state of an earlier call; ``None``: a document begins.
            reset: ``(B, T)`` booleans, true where a document begins.

        Returns:
            ``(B, T, D)`` in the dtype of ``x``, and ``(B, D)`` in float32 at least.

        Raises:
            ValueError: shapes that do not fit.
        """
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ValueError(f"x must be (B, T, {self.width}), got {tuple(x.shape)}")
        if reset is not None and reset.shape != x.shape[:2]:
            raise ValueError(
                f"reset must be {tuple(x.shape[:2])}, got {tuple(reset.shape)}"
            )
        log_a, entry = self.gates(x)
        a = log_a.exp()
        scale = sqrt_clipped(-torch.expm1(2 * log_a))  # 1 - a^2 without cancellation
        if h0 is None:
            first = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            first[:, 0] = True
            reset = first if reset is None else reset | first
        if reset is not None:
            starts = reset.unsqueeze(-1)
            a, scale = a.masked_fill(starts, 0.0), scale.masked_fill(starts, 1.0)
        h = linear_scan(a, scale * (entry * x), h0, method=self.method)
        return h.to(x.dtype), h[:, -1]


class RecurrentBlock(nn.Module):
    r"""Two branches, a short convolution and the recurrence.

    .. math::

        o = W_o\bigl(\mathrm{RGLRU}(\mathrm{conv}_K(W_x x)) \odot
            \mathrm{gelu}(W_y x)\bigr)

    The convolution is depthwise and causal: a token and the ``K - 1`` before it, never
    across the beginning of a document.

    Args:
        dim: width of input and output.
        lru_width: width of the recurrence.
        num_blocks: of its gates.
        conv_width: ``K``.
        init: of the decays.

    Raises:
        ValueError: ``conv_width`` below 1, or what :class:`RGLRU` refuses.
    """

    def __init__(
        self,
        dim: int,
        lru_width: int,
        num_blocks: int,
        *,
        conv_width: int = 4,
        init: str = "code",
    ) -> None:
        super().__init__()
        if conv_width < 1:
            raise ValueError(f"conv_width must be at least 1, got {conv_width}")
        self.linear_x = nn.Linear(dim, lru_width)
        self.linear_y = nn.Linear(dim, lru_width)
        self.linear_out = nn.Linear(lru_width, dim)
        self.conv_weight = nn.Parameter(torch.empty(lru_width, conv_width))
        self.conv_bias = nn.Parameter(torch.empty(lru_width))
        self.rglru = RGLRU(lru_width, num_blocks, init=init)
        self.draw()

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Draw the convolution anew."""
        std = math.sqrt(0.01 / self.conv_weight.shape[1])
        nn.init.normal_(self.conv_weight, std=std, generator=generator)
        nn.init.zeros_(self.conv_bias)

    def init_state(self, batch_size: int, *, device, dtype) -> LayerState:
        width, taps = self.conv_weight.shape
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "conv": torch.zeros(
                batch_size, taps - 1, width, device=device, dtype=dtype
            ),
            "h": torch.zeros(batch_size, width, device=device, dtype=wide),
        }

    def mismatch(self, state: LayerState) -> str:
        width, taps = self.conv_weight.shape
        return check_layer(state, {"conv": (None, taps - 1, width), "h": (None, width)})

    def forward(
        self, x: Tensor, *, positions: Tensor, state: LayerState, packed: bool
    ) -> tuple[Tensor, LayerState]:
        """``(B, T, dim)`` and the layer's next state."""
        length, taps = x.shape[1], self.conv_weight.shape[1]
        u = torch.cat((state["conv"], self.linear_x(x)), 1)  # (B, K-1+T, D)
        v = self.conv_bias
        for back in range(taps):  # the four taps, not the time steps
            tap = u[:, taps - 1 - back : taps - 1 - back + length]
            if packed and back:
                tap = tap * (positions >= back).unsqueeze(-1)
            v = torch.addcmul(v, tap, self.conv_weight[:, taps - 1 - back])
        v, h = self.rglru(v, state["h"], positions == 0)
        out = self.linear_out(v * F.gelu(self.linear_y(x), approximate="tanh"))
        return out, {"conv": keep(u[:, length:], length), "h": keep(h, length)}


class GriffinLM(LanguageModel):
    """A Griffin language model over tokens; see :meth:`LanguageModel.forward`.

    Its :class:`LMState` has the same size after one token and after a million.

    Args:
        config: the size.
        generator: source of the initial weights.

    Raises:
        ValueError: an unknown letter in the pattern, or sizes that do not divide.

    Example:
        >>> model = GriffinLM(GriffinConfig())
        >>> logits, state = model(torch.zeros(2, 10, dtype=torch.int64))
        >>> logits, state = model(torch.ones(2, 1, dtype=torch.int64), state)
        >>> logits.shape
        torch.Size([2, 1, 64])
    """

    def __init__(
        self, config: GriffinConfig, *, generator: torch.Generator | None = None
    ) -> None:
        if not config.pattern or set(config.pattern) - set("RA"):
            raise ValueError(f"pattern is made of R and A, got {config.pattern!r}")
        super().__init__(
            [_mixer(kind, config) for kind in config.kinds()],
            vocab_size=config.vocab_size,
            width=config.width,
            mlp_width=config.mlp_width,
            soft_cap=config.soft_cap,
            embed_scale=config.embed_scale,
            dropout=config.dropout,
        )
        self.config = config
        if not self.embed.weight.is_meta:
            self.reset_parameters(generator)


def _mixer(kind: str, config: GriffinConfig) -> nn.Module:
    if kind == "R":
        return RecurrentBlock(
            config.width,
            config.lru_width,
            config.num_heads,
            conv_width=config.conv_width,
            init=config.init,
        )
    return LocalAttention(
        config.width,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        window=config.window,
        rope_fraction=config.rope_fraction,
    )


_RENAMED = {
    "model.": "",
    "embed_tokens": "embed",
    "layers.": "blocks.",
    "temporal_pre_norm": "mixer_norm",
    "channel_pre_norm": "mlp_norm",
    "temporal_block": "mixer",
    "mlp_block": "mlp",
    "conv_1d.weight": "conv_weight",
    "conv_1d.bias": "conv_bias",
    "rg_lru.recurrent_param": "rglru.decay",
    "rg_lru.input_gate_": "rglru.input_",
    "rg_lru.recurrent_gate_": "rglru.recurrent_",
}


def released_state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A RecurrentGemma checkpoint's tensors under the names of :class:`GriffinLM`.

    This is the paper's start: take the text model, drop its embedding, add one for
    speech tokens.

    Args:
        weights: ``RecurrentGemmaForCausalLM(...).state_dict()``.

    Returns:
        What ``GriffinLM.load_state_dict`` takes.
    """
    renamed = {}
    for name, tensor in weights.items():
        if name == "lm_head.weight":  # tied to the embedding
            continue
        if name.endswith("conv_1d.weight"):
            tensor = tensor.squeeze(1)  # (D, 1, K) -> (D, K)
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
