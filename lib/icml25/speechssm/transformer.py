"""The baseline: Transformers of the same size, with full or windowed attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import LocalAttention, check_heads
from .layers import LanguageModel, LayerState, check_layer, rotate

__all__ = ["FullAttention", "TransformerConfig", "TransformerLM"]


@dataclass(frozen=True)
class TransformerConfig:
    """Size of a Transformer language model; the defaults match GriffinConfig's."""

    vocab_size: int = 64  # V
    width: int = 96  # D
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 4
    mlp_width: int = 192  # of each of the two branches
    window: int | None = None  # W; None: full attention
    soft_cap: float | None = 30.0
    embed_scale: float | None = None  # sqrt(width)
    rope_fraction: float = 1.0
    dropout: float = 0.0


class FullAttention(nn.Module):
    """Causal attention to every token of the document, with a growing cache.

    The cache is allocated ahead and doubled when it is full, so that a token costs one
    write, not a copy of everything before it.

    Args:
        dim: width of input and output.
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        rope_fraction: see :func:`rotate`.

    Raises:
        ValueError: sizes that do not divide.

    Notes:
        Decoding writes into the cache it was given. A state can therefore be continued
        once; a second attempt raises. ``state.select`` makes a copy.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        rope_fraction: float = 1.0,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(dim, num_heads, kv_heads, rope_fraction)
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.rope_fraction = rope_fraction
        head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim)

    def init_state(self, batch_size: int, *, device, dtype) -> LayerState:
        head_dim = self.q_proj.out_features // self.num_heads
        shape = (batch_size, self.num_kv_heads, 0, head_dim)
        empty = torch.zeros(shape, device=device, dtype=dtype)
        return {"keys": empty, "values": empty}

    def mismatch(self, state: LayerState) -> str:
        head_dim = self.q_proj.out_features // self.num_heads
        shape = (None, self.num_kv_heads, None, head_dim)
        return check_layer(state, {"keys": shape, "values": shape})

    def forward(
        self, x: Tensor, *, positions: Tensor, state: LayerState, packed: bool
    ) -> tuple[Tensor, LayerState]:
        """``(B, T, dim)`` and the layer's next state."""
        batch, length, dim = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, -1)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, -1)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, -1)
        q = rotate(q, positions, fraction=self.rope_fraction).transpose(1, 2)
        k = rotate(k, positions, fraction=self.rope_fraction).transpose(1, 2)
        k = _append(state["keys"], k)  # (B, G, S, d)
        v = _append(state["values"], v.transpose(1, 2))
        past = k.shape[2] - length
        mask = None
        if packed or (past and length > 1):
            place = torch.arange(k.shape[2], device=x.device)
            back = place[past:].unsqueeze(1) - place  # (T, S) steps back in time
            # Every query sees back to the beginning of its own document.
            mask = (back >= 0) & (back <= positions.unsqueeze(2))
            mask = mask.unsqueeze(1)  # (B, T, S) -> (B, 1, T, S)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and length > 1,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        y = y.transpose(1, 2).reshape(batch, length, dim)
        return self.o_proj(y), {"keys": k, "values": v}


def _append(cache: Tensor, new: Tensor) -> Tensor:
    """``cache`` followed by ``new`` on the third axis, in place where there is room.

    A cache is a view of the front of a larger buffer and carries it along. The buffer
    knows how far it is filled, and so whether something was already written after the
    cache at hand.
    """
    if not cache.shape[2]:
        return new
    if torch.is_grad_enabled() and (new.requires_grad or cache.requires_grad):
        return torch.cat((cache, new), 2)
    used, total = cache.shape[2], cache.shape[2] + new.shape[2]
    buffer = getattr(cache, "_buffer", None)
    if buffer is not None and buffer.fill != used:
        raise ValueError(
            "state has been continued already, and a full cache is written in place; "
            "continue the newer state, or a copy made by state.select(rows) before"
        )
    if buffer is None or buffer.tensor.shape[2] < total:
        batch, heads, _, dim = new.shape
        room = new.new_empty(batch, heads, max(2 * used, total, 64), dim)
        room[:, :, :used] = cache
        buffer = _Buffer(room)
    buffer.tensor[:, :, used:total] = new
    buffer.fill = total
    view = buffer.tensor[:, :, :total]
    view._buffer = buffer
    return view


@dataclass
class _Buffer:
    tensor: Tensor
    fill: int = 0


class TransformerLM(LanguageModel):
    """A Transformer language model; see :meth:`LanguageModel.forward`.

    Same norms, MLPs, head and interface as :class:`GriffinLM`; only the mixing over
    time differs. With ``window=None`` the state grows with every token; with a window
    it is as constant as Griffin's.

    Args:
        config: the size.
        generator: source of the initial weights.

    Raises:
        ValueError: sizes that do not divide, a window below 1.
    """

    def __init__(
        self, config: TransformerConfig, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(
            [_mixer(config) for _ in range(config.num_layers)],
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


def _mixer(config: TransformerConfig) -> nn.Module:
    shared = {
        "num_kv_heads": config.num_kv_heads,
        "rope_fraction": config.rope_fraction,
    }
    if config.window is None:
        return FullAttention(config.width, config.num_heads, **shared)
    return LocalAttention(
        config.width, config.num_heads, window=config.window, **shared
    )
