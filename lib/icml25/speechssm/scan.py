"""The gated linear recurrence as a parallel scan, with a backward pass of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["linear_scan", "sqrt_clipped"]

METHODS = ("auto", "loop", "chunk", "logstep")
_MAX_SQRT_GRADIENT = 1000.0


def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    method: str = "auto",
    chunk: int | None = None,
) -> Tensor:
    r"""All states of a linear recurrence with a different decay at every step.

    .. math:: h_t = a_t \odot h_{t-1} + b_t, \qquad t = 1, \dots, T

    Three ways to the same numbers:

    - ``"loop"``: one step after the other, through autograd; the reference.
    - ``"chunk"``: all chunks of length :math:`C` at once, then one carry from chunk to
      chunk; :math:`C + T/C` dependent steps.
    - ``"logstep"``: :math:`\lceil\log_2 T\rceil` passes that each double the reach.

    The last two have a hand-written backward pass: the same scan, run from the end.

    Args:
        a: decays, shape ``(B, T, D)``. A zero forgets everything before it: a *reset*.
        b: inputs, shape ``(B, T, D)``.
        h0: state before the first step, shape ``(B, D)``; zero if not given.
        method: one of the above, or ``"auto"`` (which is ``"chunk"``).
        chunk: length ``C`` of a chunk; default about ``sqrt(T)``.

    Returns:
        ``(B, T, D)``, at least float32 whatever the inputs are. Its last step is the
        ``h0`` of a continuation: ``scan(x[:, :k])`` followed by ``scan(x[:, k:], h0)``
        is ``scan(x)``.

    Raises:
        ValueError: a shape that does not fit, ``T = 0``, an unknown ``method`` or a
            ``chunk`` below 1.
        TypeError: tensors that are not real floating point, or of different dtypes.

    Notes:
        Time ``O(B T D)`` (``"logstep"``: ``O(B T D log T)``); the backward pass keeps
        ``a`` and ``h`` and nothing else. No cumulative product is ever divided by.

    Example:
        >>> a = torch.full((1, 4, 1), 0.5)
        >>> linear_scan(a, torch.ones_like(a)).flatten().tolist()
        [1.0, 1.5, 1.75, 1.875]

    Source: the recurrence of Griffin (De et al. 2024), on which the paper builds.
    """
    _check(a, b, h0, method, chunk)
    # The state lives in float32 at least: it sums thousands of small terms.
    dtype = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(dtype), b.to(dtype)
    h0 = b.new_zeros(b.shape[0], b.shape[2]) if h0 is None else h0.to(dtype)
    if method == "loop":
        return _loop(a, b, h0)
    length = a.shape[1]
    if length == 1:
        return a * h0.unsqueeze(1) + b
    return _Scan.apply(a, b, h0, method, chunk or math.isqrt(length - 1) + 1)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, h0: Tensor, method: str, chunk: int):
        h = _forward_scan(a, b, h0, method, chunk)
        ctx.save_for_backward(a, h, h0)
        ctx.method, ctx.chunk = method, chunk
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        a, h, h0 = ctx.saved_tensors
        # lambda_t = g_t + a_{t+1} lambda_{t+1}: the scan, read from the end.
        later = torch.cat((a[:, 1:], torch.zeros_like(a[:, :1])), 1).flip(1)
        nothing = torch.zeros_like(h0)
        lam = _forward_scan(later, grad.flip(1), nothing, ctx.method, ctx.chunk).flip(1)
        grad_a = lam * torch.cat((h0.unsqueeze(1), h[:, :-1]), 1)
        return grad_a, lam, a[:, 0] * lam[:, 0], None, None


def _forward_scan(a: Tensor, b: Tensor, h0: Tensor, method: str, chunk: int) -> Tensor:
    return _logstep(a, b, h0) if method == "logstep" else _chunked(a, b, h0, chunk)


def _loop(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    states = []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        h0 = a_t * h0 + b_t
        states.append(h0)
    return torch.stack(states, 1)


def _chunked(a: Tensor, b: Tensor, h0: Tensor, chunk: int) -> Tensor:
    batch, length, dim = a.shape
    num_chunks = -(-length // chunk)
    # (B, T, D) -> (B, n, C, D), filled up with steps that change nothing
    h = b.new_zeros(batch, num_chunks * chunk, dim)
    reach = torch.ones_like(h)
    h[:, :length], reach[:, :length] = b, a
    h, reach = (x.view(batch, num_chunks, chunk, dim) for x in (h, reach))
    # Every chunk from a zero state, all at once; `reach` is the product of its decays.
    for step in range(1, chunk):
        h[:, :, step].addcmul_(reach[:, :, step], h[:, :, step - 1])
        reach[:, :, step].mul_(reach[:, :, step - 1])
    carry = [h0]
    for last, decay in zip(
        h[:, :, -1].unbind(1), reach[:, :, -1].unbind(1), strict=True
    ):
        carry.append(torch.addcmul(last, decay, carry[-1]))
    h.addcmul_(reach, torch.stack(carry[:-1], 1).unsqueeze(2))
    return h.view(batch, -1, dim)[:, :length]


def _logstep(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    length = a.shape[1]
    h = torch.cat((torch.addcmul(b[:, :1], a[:, :1], h0.unsqueeze(1)), b[:, 1:]), 1)
    shift = 1
    while shift < length:
        # After this pass h_t holds the inputs of the last 2*shift steps.
        h = torch.cat(
            (h[:, :shift], torch.addcmul(h[:, shift:], a[:, shift:], h[:, :-shift])), 1
        )
        a = torch.cat((a[:, :shift], a[:, shift:] * a[:, :-shift]), 1)
        shift *= 2
    return h


class _SqrtClipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u: Tensor) -> Tensor:
        root = u.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return grad / (2 * root).clamp_min(1 / _MAX_SQRT_GRADIENT)


def sqrt_clipped(u: Tensor) -> Tensor:
    r"""A square root whose derivative is at most 1000.

    :math:`\sqrt u`, with derivative :math:`1/\max(2\sqrt u, 10^{-3})`. A decay close to
    one makes :math:`u = 1 - a^2` tiny; the exact derivative then overflows in
    half precision.

    Args:
        u: non-negative numbers, any shape.

    Returns:
        The roots, same shape and dtype.

    Source: the released Griffin code.
    """
    return _SqrtClipped.apply(u)


def _check(
    a: Tensor, b: Tensor, h0: Tensor | None, method: str, chunk: int | None
) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    given = {"a": a, "b": b} | ({} if h0 is None else {"h0": h0})
    for name, tensor in given.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be real floating point, got {tensor.dtype}")
    if a.dtype != b.dtype:
        raise TypeError(f"a and b must have one dtype, got {a.dtype} and {b.dtype}")
    if a.dim() != 3 or a.shape != b.shape:
        raise ValueError(
            f"a and b must both be (B, T, D), got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.shape[1] == 0:
        raise ValueError("a and b have T = 0 steps; at least one is needed")
    expected = (a.shape[0], a.shape[2])
    if h0 is not None and h0.shape != expected:
        raise ValueError(f"h0 must be (B, D) = {expected}, got {tuple(h0.shape)}")
