"""The shortest combination of gradients: a small quadratic program on the simplex."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["min_norm_weights", "project_simplex"]

MAX_EXACT = 8  # objectives up to which all supports are enumerated


def min_norm_weights(
    gram: Tensor, pull: Tensor | None = None, *, iterations: int = 500
) -> Tensor:
    r"""The simplex weights whose combined gradient is shortest.

    .. math:: w^* = \arg\min_{w \in \Delta^m} \tfrac12 \|G (w + u)\|^2
              = \arg\min_{w \in \Delta^m} \tfrac12 w^\top M w + (M u)^\top w

    with Gram matrix :math:`M = G^\top G` and a fixed pull :math:`u` (PreCo:
    :math:`u = \lambda s`); label ``pcrl-qp`` in the book.

    Args:
        gram: :math:`M`, shape ``(..., m, m)``, symmetric positive semidefinite.
        pull: :math:`u`, shape ``(..., m)``; ``None`` is zero (MGDA). Leading sizes
            broadcast against those of ``gram``.
        iterations: accelerated projected-gradient steps, used for ``m > 8`` only.

    Returns:
        :math:`w^*`, shape ``(..., m)``, non-negative, summing to one, in the dtype of
        ``gram``. Where the minimiser is not unique, one of them.

    Raises:
        ValueError: ``gram`` is not a stack of square matrices, ``pull`` does not match
            it, or either holds a NaN or infinity.
        TypeError: ``gram`` is not floating-point.

    Notes:
        For ``m <= 8`` exact up to rounding in float64: all ``2**m - 1`` supports are
        solved at once by sweeping one pivot after the other, so the batch is the only
        long dimension and nothing is decided in Python. Adding a constant to all of
        ``M`` changes the objective by a constant on the simplex and keeps the pivots
        away from zero when the gradients can cancel, which is the case of interest.
        Time and memory :math:`O(2^m m)` per problem.
    """
    return _min_norm(*_checked(gram, pull), iterations=iterations)


def _min_norm(gram: Tensor, pull: Tensor, *, iterations: int = 500) -> Tensor:
    m = gram.shape[-1]
    dtype = gram.dtype
    gram = gram.double()
    # Scale-free: the minimiser does not change when M is divided by a number.
    scale = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)
    gram = gram / scale[..., None, None]
    linear = (gram @ pull.double()[..., None])[..., 0]
    if m <= MAX_EXACT:
        return _all_supports(gram, linear).to(dtype)
    return _projected_gradient(gram, linear, iterations=iterations).to(dtype)


def _all_supports(gram: Tensor, linear: Tensor) -> Tensor:
    """Solve every support's KKT system by sweeping; keep the best feasible one."""
    m = gram.shape[-1]
    # Pieces of this size stay in a CPU's cache; a GPU takes all at once.
    size = 256 if gram.device.type == "cpu" else 1 << 20
    pieces = zip(
        gram.reshape(-1, m, m).split(size),
        linear.reshape(-1, m).split(size),
        strict=True,
    )
    # The batch goes last: every step then runs along it, contiguously.
    found = [
        _enumerate(g.permute(1, 2, 0).contiguous(), q.mT.contiguous()).mT
        for g, q in pieces
    ]
    return torch.cat(found).reshape(linear.shape)


def _enumerate(gram: Tensor, linear: Tensor) -> Tensor:
    """``(m, m, B)`` and ``(m, B)`` to the best of all supports' solutions, ``(m, B)``.

    The tableau holds ``M + 1 1^T`` and two right-hand sides. One pivot after the other
    is swept or left out, which doubles the number of supports each time.
    """
    m, size = linear.shape
    ridge = 1e-13 * torch.eye(m, dtype=gram.dtype, device=gram.device)[..., None]
    sides = torch.stack([torch.ones_like(linear), linear], 1)  # (m, 2, B)
    table = torch.cat([gram + 1.0 + ridge, sides], 1)[None]  # (1, m, m + 2, B)
    for pivot in range(m):
        half = len(table)
        column, rest = table[:, :, :1], table[:, :, 1:]
        row = rest[:, pivot] / table[:, pivot, :1].clamp_min(1e-15)
        table = table.new_empty(2 * half, *rest.shape[1:])
        without, swept = table[:half], table[half:]
        without.copy_(rest)
        without[:, pivot] = 0.0  # outside the support the weight is zero
        torch.sub(rest, torch.mul(column, row[:, None], out=swept), out=swept)
        swept[:, pivot] = row
    # The empty support is first; leave it out.
    inverse_ones, inverse_linear = table[1:].unbind(2)
    # Stationarity on the support, M w + q = mu 1, with mu from sum(w) = 1.
    mu = (1.0 + inverse_linear.sum(1)) / inverse_ones.sum(1)
    # (supports, m, B)
    w = torch.addcmul(-inverse_linear, mu[:, None], inverse_ones)
    is_out = w.amin(1) < -1e-10
    w = w.clamp_min_(0.0)
    w /= w.sum(1, keepdim=True).clamp_min(1e-300)
    # The true objective: what KKT implies may err on ill-conditioned supports.
    objective = torch.zeros_like(mu)
    for i in range(m):
        slope = torch.addcmul(linear[i], w[:, i], 0.5 * gram[i, i])
        for j in range(i + 1, m):
            slope.addcmul_(w[:, j], gram[i, j])
        objective.addcmul_(w[:, i], slope)
    # A single objective is always feasible, so a minimum exists.
    objective = objective.masked_fill_(is_out | objective.isnan(), torch.inf)
    best = objective.argmin(0)  # (B,)
    return w.gather(0, best.expand(1, m, size))[0]


def _projected_gradient(gram: Tensor, linear: Tensor, *, iterations: int) -> Tensor:
    """FISTA on the simplex, restarted where the momentum points uphill."""
    step = 1.0 / torch.linalg.matrix_norm(gram, 2).clamp_min(1e-300)[..., None]
    w = torch.full_like(linear, 1.0 / linear.shape[-1])
    ahead, momentum = w, torch.ones_like(step)
    for _ in range(iterations):
        gradient = (gram @ ahead[..., None])[..., 0] + linear
        new = project_simplex(ahead - step * gradient)
        uphill = ((ahead - new) * (new - w)).sum(-1, keepdim=True) > 0
        momentum = torch.where(uphill, 1.0, momentum)
        faster = 0.5 * (1.0 + (1.0 + 4.0 * momentum.square()).sqrt())
        ahead = new + torch.where(uphill, 0.0, (momentum - 1.0) / faster) * (new - w)
        w, momentum = new, faster
    return w


def project_simplex(x: Tensor) -> Tensor:
    r"""Euclidean projection onto the probability simplex.

    Args:
        x: shape ``(..., m)``.

    Returns:
        The nearest point with non-negative entries that sum to one, same shape.

    Notes:
        One sort, :math:`O(m \log m)`.
    """
    ordered = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    excess = (ordered.cumsum(-1) - 1.0) / count
    last = (ordered > excess).sum(-1, keepdim=True) - 1
    return (x - excess.gather(-1, last)).clamp_min(0.0)


def _checked(gram: Tensor, pull: Tensor | None) -> tuple[Tensor, Tensor]:
    if gram.ndim < 2 or gram.shape[-1] != gram.shape[-2] or gram.shape[-1] == 0:
        raise ValueError(
            f"gram has shape {tuple(gram.shape)}; need (..., m, m), m >= 1"
        )
    if not gram.is_floating_point():  # the weights have its dtype
        raise TypeError(f"gram has dtype {gram.dtype}; give floats")
    if pull is None:
        pull = gram.new_zeros(gram.shape[:-1])
    elif pull.shape[-1] != gram.shape[-1]:
        raise ValueError(
            f"pull has {pull.shape[-1]} entries, gram is {tuple(gram.shape[-2:])}"
        )
    if not (gram.isfinite().all() & pull.isfinite().all()):
        raise ValueError("gram or pull holds a NaN or infinity; check the rewards")
    batch = _batch(gram=gram.shape[:-2], pull=pull.shape[:-1])
    return gram.expand(*batch, -1, -1), pull.expand(*batch, -1)


def _batch(**shapes: tuple[int, ...]) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        sizes = ", ".join(f"{name} {tuple(s)}" for name, s in shapes.items())
        raise ValueError(f"leading sizes do not broadcast: {sizes}") from None
