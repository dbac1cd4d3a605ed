"""The L x L part of the graph filter, lean in time and memory.

The readable form is ``GraphFilter.weights``; these functions compute the same numbers
(tests hold them together). They work through the batch in slices that stay in the CPU's
cache and compute a slice again in the backward pass, so that no L x L array is kept
between the passes but one byte an edge under dropout. The release keeps about ten
arrays of four bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Bytes of one slice, so that its handful of arrays fits a second-level cache.
_SLICE_BYTES = 2**19
_gelu_backward = torch.ops.aten.gelu_backward


class Edges(NamedTuple):
    """How edges are removed: the ``removed`` weakest of each row, and closed regions.

    With ``unranked`` removal is for good, without it by zeros. It is ``(L, L)``,
    infinite where an edge takes no part in the ranking and zero elsewhere.
    """

    channels: int
    removed: int
    unranked: Tensor | None

    @property
    def zero_mask(self) -> bool:
        return self.unranked is None


class Dropout(torch.nn.Dropout):
    """Dropout from uniform draws: on a CPU three times faster than from Bernoulli's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or x.device.type != "cpu":
            return super().forward(x)
        return x * torch.rand_like(x).ge_(self.p).div_(1 - self.p)


def _slices(left: Tensor) -> Iterator[slice]:
    num, tokens, _ = left.shape
    step = num
    if left.device.type == "cpu":
        step = max(1, _SLICE_BYTES // (tokens * tokens * left.element_size()))
    for begin in range(0, num, step):
        yield slice(begin, min(begin + step, num))


def smallest(values: Tensor, count: int) -> Tensor:
    """The ``count``-th smallest entry of each row, shape ``(..., 1)``."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        # numpy's vectorised selection takes a third of the time of topk or kthvalue.
        part = np.partition(values.detach().numpy(), count - 1, axis=-1)
        return torch.from_numpy(part[..., count - 1 : count].copy())
    return values.topk(count, largest=False, sorted=True).values[..., -1:]


def _kept(adjacency: Tensor, threshold: Tensor, edges: Edges) -> Tensor:
    """1.0 where an edge survives the k-nearest step, else 0.0."""
    kept = adjacency.clone().gt_(threshold)  # several times faster than a bool mask
    if not edges.zero_mask:
        kept.diagonal(dim1=1, dim2=2).fill_(1.0)
    return kept


def _threshold(adjacency: Tensor, edges: Edges) -> Tensor:
    if edges.unranked is not None:
        adjacency = adjacency + edges.unranked
    return smallest(adjacency, edges.removed)


class RowLogits(torch.autograd.Function):
    """``rows @ weight.T`` for the rows of kept scores; also each row's threshold."""

    @staticmethod
    def forward(ctx, left, right, weight, edges, scaled):
        logits = left.new_empty(*left.shape[:2], len(weight))
        scale = left.new_ones(*left.shape[:2], 1)
        threshold = left.new_empty(*left.shape[:2], 1)
        for at in _slices(left):
            rows = F.gelu(left[at] @ right[at].mT)
            if edges.removed:
                threshold[at] = _threshold(rows, edges)
                rows.mul_(_kept(rows, threshold[at], edges))
            if scaled:
                scale[at] = row_scale(rows)
            logits[at] = rows @ weight.mT * scale[at]
        ctx.save_for_backward(left, right, weight, scale, threshold)
        ctx.edges = edges
        ctx.mark_non_differentiable(threshold)
        return logits, threshold

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        left, right, weight, scale, threshold = ctx.saved_tensors
        grad = grad * scale
        grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
        grad_weight = torch.zeros_like(weight)
        for at in _slices(left):
            scores = left[at] @ right[at].mT
            rows = F.gelu(scores)
            grad_rows = grad[at] @ weight
            if ctx.edges.removed:
                kept = _kept(rows, threshold[at], ctx.edges)
                rows.mul_(kept)
                grad_rows.mul_(kept)
            grad_weight += (grad[at].mT @ rows).sum(0)
            grad_scores = _gelu_backward(grad_rows, scores)
            grad_left[at] = grad_scores @ right[at]
            grad_right[at] = grad_scores.mT @ left[at]
        return grad_left, grad_right, grad_weight, None, None


def row_scale(rows: Tensor) -> Tensor:
    """One over the root mean square of each row: ``(..., 1)``, no gradient."""
    return rows.detach().square().mean(-1, keepdim=True).add(1e-12).rsqrt()


class FilteredMean(torch.autograd.Function):
    """Filter, softmax, drop, renormalise and average the values: ``(Q, L, d)``."""

    @staticmethod
    def forward(ctx, left, right, values, gates, threshold, edges, dropout):
        out = torch.empty_like(values)
        if edges.removed and threshold is None:
            threshold = left.new_empty(*left.shape[:2], 1)
            for at in _slices(left):
                adjacency = F.gelu(left[at] @ right[at].mT)
                threshold[at] = _threshold(adjacency, edges)
        drawn = None
        if dropout:
            drawn = left.new_empty(*left.shape[:2], left.shape[1], dtype=torch.bool)
        for at in _slices(left):
            adjacency = F.gelu(left[at] @ right[at].mT)
            if dropout:
                torch.ge(torch.rand_like(adjacency), dropout, out=drawn[at])
            z, _ = _filtered(adjacency, gates, threshold, edges, at)
            out[at] = _weights(z, drawn, at) @ values[at]
        ctx.save_for_backward(left, right, values, gates, threshold, drawn, out)
        ctx.how = edges, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        left, right, values, gates, threshold, drawn, out = ctx.saved_tensors
        edges, dropout = ctx.how
        grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
        grad_values = torch.empty_like(values)
        grad_gates = torch.zeros_like(gates) if ctx.needs_input_grad[3] else None
        for at in _slices(left):
            scores = left[at] @ right[at].mT
            adjacency = F.gelu(scores)
            z, kept = _filtered(adjacency, gates, threshold, edges, at)
            weights = _weights(z, drawn, at)
            grad_values[at] = weights.mT @ grad[at]
            # d out_i / d z_ij = w_ij (v_j - out_i)
            gain = grad[at] @ values[at].mT
            gain.sub_((grad[at] * out[at]).sum(-1, keepdim=True))
            weights.mul_(gain)
            if grad_gates is not None:
                if edges.zero_mask:
                    along = weights * adjacency
                else:
                    # What an edge would gain with its gate open (under dropout: on
                    # average). A closed edge may outweigh all open ones: bound it.
                    along = adjacency - z.logsumexp(-1, keepdim=True)
                    along.clamp_(-60.0, 30.0).exp_().mul_(gain).mul_(1 - dropout)
                if kept is not None:
                    along.mul_(kept)
                grad_gates[at] = _region_sums(along, edges.channels)
            if edges.zero_mask:
                _by_region_(weights, gates[at], edges.channels, torch.mul)
                if kept is not None:
                    weights.mul_(kept)
            grad_scores = _gelu_backward(weights, scores)
            grad_left[at] = grad_scores @ right[at]
            grad_right[at] = grad_scores.mT @ left[at]
        return grad_left, grad_right, grad_values, grad_gates, None, None, None


def _filtered(adjacency, gates, threshold, edges, at):
    """What enters the softmax, and which edges the k-nearest step kept."""
    z, kept = adjacency.clone(), None
    if edges.removed:
        kept = _kept(adjacency, threshold[at], edges)
        if edges.zero_mask:
            z.mul_(kept)
        else:
            z.add_(kept - 1, alpha=1e30)  # exp of this is exactly zero
    if edges.zero_mask:
        _by_region_(z, gates[at], edges.channels, torch.mul)
    else:
        _by_region_(z, gates[at].log(), edges.channels, torch.add)
    return z, kept


def _weights(z: Tensor, drawn: Tensor | None, at: slice) -> Tensor:
    weights = z.softmax(-1)
    if drawn is not None:
        weights.mul_(drawn[at].to(weights.dtype))
        # A row that lost every edge has no mean: its output is zero.
        weights.div_(weights.sum(-1, keepdim=True).clamp_(min=1e-12))
    return weights


def _views(z: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of same-channel, same-patch and self entries of ``z`` ``(Q, L, L)``."""
    num, tokens, _ = z.shape
    grid = z.view(num, channels, tokens // channels, channels, tokens // channels)
    temporal = grid.diagonal(dim1=1, dim2=3)  # (Q, n, n', c)
    spatial = grid.diagonal(dim1=2, dim2=4)  # (Q, c, c', n)
    return temporal, spatial, z.diagonal(dim1=1, dim2=2)


def _by_region_(z: Tensor, gates: Tensor, channels: int, apply) -> None:
    """Multiply by, or add, each row's value for the region of each entry, in place."""
    temporal, spatial, own = _views(z, channels)
    before = temporal.clone(), spatial.clone(), own.clone()
    grid = gates.view(len(gates), channels, -1, 3)  # (Q, c, n, region)
    apply(z, gates[..., 2:], out=z)
    spatial.copy_(apply(before[1], grid[..., 0].unsqueeze(2)))
    temporal.copy_(apply(before[0], grid[..., 1].mT.unsqueeze(2)))
    own.copy_(before[2])


def _region_sums(z: Tensor, channels: int) -> Tensor:
    """Sum each row over the regions S, T, ST: ``(Q, L, L) -> (Q, L, 3)``."""
    temporal, spatial, own = _views(z, channels)
    in_channel = temporal.sum(2).mT.reshape(own.shape) - own  # (Q, n, c) -> (Q, L)
    in_patch = spatial.sum(2).reshape(own.shape) - own
    rest = z.sum(-1) - in_channel - in_patch - own
    return torch.stack((in_patch, in_channel, rest), -1)


def self_gated_mean(
    left: Tensor, right: Tensor, values: Tensor, *, removed: int, dropout: float
) -> Tensor:
    """The filter with every region closed by zeros: no softmax, no L x L array.

    ``out_i = (sum_j v_j + e_i v_i) / (L + e_i)`` with ``e = exp(self score) - 1``.
    """
    own = F.gelu((left * right).sum(-1, keepdim=True))
    if removed:
        own = own * _self_survives(left, right, removed)
    extra = torch.expm1(own)
    if not dropout:
        return (values.sum(1, keepdim=True) + extra * values) / (left.shape[1] + extra)
    sums, count, drawn = _DrawnSum.apply(values, dropout)
    extra = extra * drawn
    return (sums + extra * values) / (count + extra).clamp(min=1e-12)


@torch.no_grad()
def _self_survives(left: Tensor, right: Tensor, count: int) -> Tensor:
    """1.0 where the own score is not among the row's ``count`` smallest, else 0.0."""
    survives = left.new_empty(*left.shape[:2], 1)
    for at in _slices(left):
        adjacency = F.gelu(left[at] @ right[at].mT)
        own = adjacency.diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()
        survives[at] = adjacency.lt_(own).sum(-1, keepdim=True).ge_(count)
    return survives


class _DrawnSum(torch.autograd.Function):
    """Each row's sum of the values that dropout spares; their count; the own draw."""

    @staticmethod
    def forward(ctx, values, dropout):
        drawn = values.new_empty(*values.shape[:2], values.shape[1], dtype=torch.bool)
        sums = torch.empty_like(values)
        count = values.new_empty(*values.shape[:2], 1)
        own = torch.empty_like(count)
        for at in _slices(values):
            kept = values.new_empty(drawn[at].shape).uniform_().ge_(dropout)
            drawn[at] = kept
            sums[at] = kept @ values[at]
            count[at] = kept.sum(-1, keepdim=True)
            own[at] = kept.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        ctx.save_for_backward(drawn)
        ctx.mark_non_differentiable(count, own)
        return sums, count, own

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _count, _own):
        (drawn,) = ctx.saved_tensors
        grad_values = torch.empty_like(grad)
        for at in _slices(grad):
            grad_values[at] = drawn[at].to(grad.dtype).mT @ grad[at]
        return grad_values, None
