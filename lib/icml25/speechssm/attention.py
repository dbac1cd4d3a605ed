"""Attention over a window, with a ring buffer of keys and values as its state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import LayerState, check_layer, keep, rotate

__all__ = ["LocalAttention", "banded_attention", "check_heads"]


class LocalAttention(nn.Module):
    r"""Causal attention to the last ``W`` tokens, itself included.

    Keys and values have fewer heads than queries (one: multi-query). The first
    ``rope_fraction`` of every head's channels turn with the position. Time and memory
    are ``O(T W)``: queries are cut into blocks that each meet ``W - 1`` keys more than
    their own.

    Args:
        dim: width of input and output.
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        window: ``W``.
        rope_fraction: see :func:`rotate`.

    Raises:
        ValueError: sizes that do not divide, a window below 1.

    Notes:
        The released code counts the keys *before* the query: its window ``w`` is
        ``W = w + 1`` here.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        window: int = 2048,
        rope_fraction: float = 0.5,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads, num_kv_heads, rope_fraction)
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.window, self.rope_fraction = window, rope_fraction
        head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim)

    def init_state(self, batch_size: int, *, device, dtype) -> LayerState:
        head_dim = self.q_proj.out_features // self.num_heads
        shape = (batch_size, self.window - 1, self.num_kv_heads, head_dim)
        return {
            "keys": torch.zeros(shape, device=device, dtype=dtype),
            "values": torch.zeros(shape, device=device, dtype=dtype),
        }

    def mismatch(self, state: LayerState) -> str:
        head_dim = self.q_proj.out_features // self.num_heads
        shape = (None, self.window - 1, self.num_kv_heads, head_dim)
        return check_layer(state, {"keys": shape, "values": shape})

    def forward(
        self, x: Tensor, *, positions: Tensor, state: LayerState, packed: bool
    ) -> tuple[Tensor, LayerState]:
        """``(B, T, dim)`` and the layer's next state."""
        batch, length, dim = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, -1)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, -1)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, -1)
        q = rotate(q, positions, fraction=self.rope_fraction)
        k = rotate(k, positions, fraction=self.rope_fraction)
        k = torch.cat((state["keys"], k), 1)  # (B, W-1+T, G, d)
        v = torch.cat((state["values"], v), 1)
        after = {
            "keys": keep(k[:, length:], length),
            "values": keep(v[:, length:], length),
        }
        y = banded_attention(q, k, v, positions, window=self.window)
        return self.o_proj(y.reshape(batch, length, dim)), after


def banded_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, window: int
) -> Tensor:
    """Attention of ``T`` queries to the last ``W`` of ``W - 1 + T`` keys.

    Args:
        q: ``(B, T, H, d)``.
        k: ``(B, W-1+T, G, d)``, ``H`` a multiple of ``G``.
        v: like ``k``.
        positions: ``(B, T)``; a query sees no further back than its position.
        window: ``W``.

    Returns:
        ``(B, T, H, d)``.
    """
    batch, length, heads, dim = q.shape
    groups = k.shape[2]
    block = min(length, window)
    num = -(-length // block)
    extra = num * block - length
    span = block + window - 1
    if extra:
        q = F.pad(q, (0, 0, 0, 0, 0, extra))
        k, v = (F.pad(x, (0, 0, 0, 0, 0, extra)) for x in (k, v))
        positions = F.pad(positions, (0, extra), value=window)
    # (B, T, H, d) -> (B*n, G, H/G*C, d): the heads that share a key share a matrix
    q = q.view(batch, num, block, groups, heads // groups, dim)
    q = q.permute(0, 1, 3, 4, 2, 5).reshape(batch * num, groups, -1, dim)
    # (B, n*C+W-1, G, d) -> (B, n, G, d, S) -> (B*n, G, S, d)
    k, v = (
        x.unfold(1, span, block).transpose(3, 4).reshape(batch * num, groups, span, dim)
        for x in (k, v)
    )
    offset = torch.arange(block, device=q.device).unsqueeze(1) + window - 1
    back = offset - torch.arange(span, device=q.device)  # (C, S) steps back in time
    reach = positions.clamp(max=window - 1).view(batch * num, block, 1)
    seen = (back >= 0) & (back <= reach)  # (B*n, C, S)
    mask = seen.unsqueeze(1).repeat(1, 1, heads // groups, 1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    y = y.view(batch, num, groups, heads // groups, block, dim)
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, num * block, heads, dim)
    return y[:, :length]


def check_heads(dim: int, heads: int, kv_heads: int, rope_fraction: float) -> None:
    """Refuse sizes that an attention layer cannot have."""
    if heads < 1 or dim % heads:
        raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}"
        )
    turned = dim // heads * rope_fraction
    if turned <= 0 or turned % 2:
        raise ValueError(
            f"rope_fraction={rope_fraction} turns {turned:g} of {dim // heads} "
            "channels of a head; it must be an even number above zero"
        )
