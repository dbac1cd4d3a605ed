"""The L x L part of the graph filter, lean in time and memory.

The readable form is ``GraphFilter.weights``; these functions compute the same numbers
(tests hold them together). They work through the batch in slices that stay in the CPU's
cache and compute a slice again in the backward pass, so that no L x L array is kept
between the passes but one byte an edge under dropout. The release keeps about ten
arrays of four bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def row_scale(rows: Tensor) -> Tensor:
    """One over the root mean square of each row: ``(..., 1)``, no gradient."""
    size = rows.detach().square().mean(-1, keepdim=True)
    return size.add(_small(rows)).rsqrt()


def _small(x: Tensor) -> float:
    """What keeps a divisor above zero, in half precision too."""
    return max(1e-12, torch.finfo(x.dtype).tiny)


class Router(NamedTuple):
    """What :class:`FilteredMean` needs to know of a router.

    Attributes:
        noise: ``(Q, L, 3)`` draws, or ``None``.
        decide: from logits and noise to gates, row by row.
        scaled: whether rows enter at unit size.
        learns: whether the gates pass the output's gradient on.
    """

    noise: Tensor | None
    decide: Callable[[Tensor, Tensor | None], Tensor]
    scaled: bool
    learns: bool


class FilteredMean(torch.autograd.Function):
    """Route, filter, softmax, drop, renormalise and average the values.

    ``left``, ``right``, ``values`` and the mean are ``(Q, L, d)``. ``routing`` is the
    weight ``(K, L)`` of a router's logits, which are returned too, or without a router
    the gates ``(Q, L, 3)`` themselves.
    """

    @staticmethod
    def forward(ctx, left, right, values, routing, router, edges, dropout):
        out = torch.empty_like(values)
        threshold = scale = logits = drawn = None
        gates = routing
        if edges.removed:
            threshold = left.new_empty(*left.shape[:2], 1)
        if router is not None:
            gates = left.new_empty(*left.shape[:2], 3)
            logits = left.new_empty(*left.shape[:2], len(routing))
            scale = left.new_ones(*left.shape[:2], 1) if router.scaled else None
        if dropout:
            drawn = left.new_empty(*left.shape[:2], left.shape[1], dtype=torch.bool)
        for at in _slices(left):
            rows, kept = F.gelu(left[at] @ right[at].mT), None
            if edges.removed:
                threshold[at] = _threshold(rows, edges)
                kept = _kept(rows, threshold[at], edges)
                rows.mul_(kept)
            if router is not None:
                logits[at] = rows @ routing.mT
                if router.scaled:
                    scale[at] = row_scale(rows)
                    logits[at] *= scale[at]
                gates[at] = router.decide(logits[at], _part(router.noise, at))
            if dropout:
                torch.ge(torch.rand_like(rows), dropout, out=drawn[at])
            mask = _mask(kept, gates[at], edges)
            z = rows.mul_(mask) if edges.zero_mask else rows.add_(mask)
            out[at] = _weights(z, drawn, at) @ values[at]
        ctx.save_for_backward(
            left, right, values, routing, gates, logits, scale, threshold, drawn, out
        )
        ctx.how = router, edges, dropout
        return out, logits

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_logits):
        left, right, values, routing, gates, logits, scale, threshold, drawn, out = (
            ctx.saved_tensors
        )
        router, edges, dropout = ctx.how
        grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
        grad_values = torch.empty_like(values)
        grad_routing = None if router is None else torch.zeros_like(routing)
        for at in _slices(left):
            scores = left[at] @ right[at].mT
            rows, kept = F.gelu(scores), None
            if edges.removed:
                kept = _kept(rows, threshold[at], edges)
                rows.mul_(kept)
            mask = _mask(kept, gates[at], edges)
            z = rows * mask if edges.zero_mask else rows + mask
            weights = _weights(z, drawn, at)
            grad_values[at] = weights.mT @ grad[at]
            # d out_i / d z_ij = w_ij (v_j - out_i)
            gain = grad[at] @ values[at].mT
            gain.sub_((grad[at] * out[at]).sum(-1, keepdim=True))
            weights.mul_(gain)
            grad_rows = None
            if router is not None:
                to_logits = grad_logits[at]
                if router.learns:
                    if edges.zero_mask:
                        along = weights * rows
                    else:
                        # What an edge would gain with its gate open (under dropout: on
                        # average). A closed edge may outweigh all open ones: bound it.
                        along = rows - z.logsumexp(-1, keepdim=True)
                        along.clamp_(-60.0, 30.0).exp_().mul_(gain).mul_(1 - dropout)
                    if kept is not None:
                        along.mul_(kept)
                    to_logits = to_logits + _through_gates(
                        router, logits, _region_sums(along, edges.channels), at
                    )
                if scale is not None:
                    to_logits = to_logits * scale[at]
                grad_rows = to_logits @ routing
                grad_routing.addmm_(to_logits.flatten(0, 1).mT, rows.flatten(0, 1))
            if edges.zero_mask:
                weights.mul_(mask)
            if grad_rows is not None:
                weights.add_(grad_rows)
            if kept is not None:
                weights.mul_(kept)
            grad_scores = _gelu_backward(weights, scores)
            grad_left[at] = grad_scores @ right[at]
            grad_right[at] = grad_scores.mT @ left[at]
        return grad_left, grad_right, grad_values, grad_routing, None, None, None


def _part(noise: Tensor | None, at: slice) -> Tensor | None:
    return None if noise is None else noise[at]


@torch.enable_grad()
def _through_gates(router, logits, grad_gates, at):
    """The logits' gradient for the gates' one."""
    logits = logits[at].detach().requires_grad_()
    gates = router.decide(logits, _part(router.noise, at))
    return torch.autograd.grad(gates, logits, grad_gates)[0]


def _mask(kept: Tensor | None, gates: Tensor, edges: Edges) -> Tensor:
    """What kept scores are multiplied by before the softmax, or what they gain.

    Each entry is its row's value for the entry's region.
    """
    if not edges.zero_mask:
        gates = gates.log()
    tokens = gates.shape[1]
    mask = gates[..., 2:].repeat(1, 1, tokens)
    temporal, spatial, own = _views(mask, edges.channels)
    grid = gates.view(len(gates), edges.channels, -1, 3)  # (Q, c, n, region)
    spatial.copy_(grid[..., 0].unsqueeze(2))
    temporal.copy_(grid[..., 1].mT.unsqueeze(2))
    own.fill_(1.0 if edges.zero_mask else 0.0)
    if kept is not None and not edges.zero_mask:
        # The exponential of this is exactly zero, in half precision too.
        mask.add_(kept - 1, alpha=torch.finfo(mask.dtype).max)
    return mask


def _weights(z: Tensor, drawn: Tensor | None, at: slice) -> Tensor:
    weights = z.softmax(-1)
    if drawn is not None:
        weights.mul_(drawn[at].to(weights.dtype))
        # A row that lost every edge has no mean: its output is zero.
        weights.div_(weights.sum(-1, keepdim=True).clamp_(min=_small(weights)))
    return weights


def _views(z: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of same-channel, same-patch and self entries of ``z`` ``(Q, L, L)``."""
    num, tokens, _ = z.shape
    grid = z.view(num, channels, tokens // channels, channels, tokens // channels)
    temporal = grid.diagonal(dim1=1, dim2=3)  # (Q, n, n', c)
    spatial = grid.diagonal(dim1=2, dim2=4)  # (Q, c, c', n)
    return temporal, spatial, z.diagonal(dim1=1, dim2=2)


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
    return (sums + extra * values) / (count + extra).clamp(min=_small(values))


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
