"""Directions: unit vectors that are as far apart as possible.

A node with ``m`` neighbours needs ``m`` unit vectors; the smallest angle between them
sets the worst distortion (``hsdte-eq-law`` in the book).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = [
    "METHODS",
    "direction_table",
    "rankin_angle",
    "smallest_angle",
    "sphere_points",
]


def sphere_points(
    count: int,
    dim: int,
    method: str = "auto",
    *,
    generator: torch.Generator | None = None,
    start: Tensor | None = None,
) -> Tensor:
    r"""``count`` unit vectors in ``dim`` dimensions, well apart.

    Args:
        count: number of vectors $m \ge 1$.
        dim: dimension $d \ge 2$.
        method: ``"auto"`` is the best known: the simplex for $m \le d+1$, the
            orthoplex for $m \le 2d$, a regular polygon in the plane, else
            ``"softmax"``. The paper's objective is ``"mam"``; the others are
            for comparison, see ``METHODS``.
        generator: where an iterative method draws its start.
        start: ``(m, d)`` start of an iterative method instead of a drawn one; its rows
            are brought to unit length.

    Returns:
        ``(m, d)`` float64, on the device of ``start`` if a method begins there.

    Raises:
        ValueError: ``count`` < 1, ``dim`` < 2, an unknown method, one that cannot
            give so many vectors, or a start of another shape, not finite or zero.

    Notes:
        Iterative methods cost 450 to 500 products of ``(m, d)`` matrices.
    """
    whole = isinstance(count, int) and isinstance(dim, int)
    if not whole or count < 1 or dim < 2:
        raise ValueError(
            f"count={count}, dim={dim}: give whole numbers, at least 1 and 2"
        )
    if method not in METHODS:
        raise ValueError(f"method={method!r}: allowed are {', '.join(METHODS)}")
    length = None if start is None else start.norm(dim=-1, keepdim=True)
    if start is not None and (
        start.shape != (count, dim)
        or not bool(((length > 0) & length.isfinite()).all())
    ):
        raise ValueError(
            f"start of shape {tuple(start.shape)}: give ({count}, {dim}) finite "
            "vectors that are not zero"
        )
    if count == 1:
        return torch.eye(1, dim, dtype=torch.float64)
    if method == "auto":
        method = _best_method(count, dim)
    if method in _CODES:
        return _CODES[method](count, dim)
    if method == "random":
        return _unit(_normal(count, dim, generator))
    if method == "softmax":
        start = _normal(4, count, dim, generator) if start is None else start[None]
        return _anneal_softmax(_unit(start.double()))
    if start is None:
        start = _polar_start(count, dim, generator)
    else:  # unit vectors stay as they are, to the last bit
        start = torch.where((length - 1).abs() > 1e-5, start / length, start)
    return _descend(start, _GRADIENTS[method]).double()


def smallest_angle(points: Tensor) -> Tensor:
    """The smallest angle between two of ``(..., m, d)`` unit vectors, in degrees."""
    # Chords, not cosines: an arc cosine loses half the digits near 0.
    chord = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    eye = torch.eye(points.shape[-2], dtype=torch.bool, device=points.device)
    return torch.rad2deg(
        2 * torch.asin((chord.masked_fill(eye, 2).amin((-2, -1)) / 2).clamp(max=1))
    )


def rankin_angle(count: int, dim: int) -> float:
    r"""Rankin's bound on the smallest angle of ``count`` unit vectors, in degrees.

    $\arccos(-1/(m-1))$ for $m \le d + 1$, attained by the simplex alone; 90
    for $m \le 2d$, attained by the orthoplex. Beyond, 90 is not attained.
    """
    if count <= dim + 1:
        return math.degrees(math.acos(-1 / max(count - 1, 1)))
    return 90.0


def direction_table(
    degrees: Iterable[int],
    dim: int,
    method: str = "auto",
    *,
    generator: torch.Generator | None = None,
) -> dict[int, Tensor]:
    r"""Unit vectors for every degree that occurs; each degree is solved once.

    A tree with $n$ nodes has at most $(\sqrt{16n-15}-1)/2$ distinct
    degrees.
    """
    return {
        degree: sphere_points(degree, dim, method, generator=generator)
        for degree in sorted(set(degrees) - {0})
    }


def _best_method(count: int, dim: int) -> str:
    if count <= dim + 1:
        return "simplex"
    if count <= 2 * dim:
        return "orthoplex"
    return "polygon" if dim == 2 else "softmax"


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _normal(*shape_and_generator: int | torch.Generator | None) -> Tensor:
    *shape, generator = shape_and_generator
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _simplex(count: int, dim: int) -> Tensor:
    if count > dim + 1:
        raise ValueError(f"simplex: count={count} exceeds dim + 1 = {dim + 1}")
    # Row i has its own last new coordinate; all earlier rows share its opposite.
    points = torch.zeros(count, dim, dtype=torch.float64)
    for i in range(count - 1):
        left = count - i
        room = (1 - points[i, :i].square().sum()).sqrt()
        points[i, i] = room
        points[i + 1 :, i] = -room / (left - 1)
    return points


def _orthoplex(count: int, dim: int) -> Tensor:
    if count > 2 * dim:
        raise ValueError(f"orthoplex: count={count} exceeds 2 dim = {2 * dim}")
    eye = torch.eye(dim, dtype=torch.float64)
    return torch.cat([eye, -eye])[:count]


def _polygon(count: int, dim: int) -> Tensor:
    if dim != 2:
        raise ValueError(f"polygon: dim={dim}, but a polygon lies in the plane")
    angle = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    return torch.stack([angle.cos(), angle.sin()], 1)


def _hadamard(count: int, dim: int) -> Tensor:
    """Rows of Sylvester's matrix: mutually orthogonal signs, padded with zeros."""
    order = dim.bit_length() - 1
    if count > 2**order:
        raise ValueError(
            f"hadamard: count={count} exceeds the {2**order} rows that fit in dim={dim}"
        )
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(order):
        matrix = torch.cat(
            [torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]
        )
    points = torch.zeros(count, dim, dtype=torch.float64)
    points[:, : 2**order] = matrix[:count] / 2 ** (order / 2)
    return points


def _simplex_code(count: int, dim: int) -> Tensor:
    """Codewords of the binary simplex code, repeated or cut to ``dim`` signs."""
    if count > dim:
        raise ValueError(f"simplex_code: count={count} exceeds dim = {dim}")
    bits = max((count - 1).bit_length(), 1)
    word, place = torch.arange(count)[:, None], torch.arange(dim) % (2**bits - 1) + 1
    parity = torch.zeros(count, dim, dtype=torch.int64)
    for bit in range(bits):
        parity ^= (word >> bit) & (place >> bit) & 1
    return (1 - 2 * parity).double() / math.sqrt(dim)


_CODES: dict[str, Callable[[int, int], Tensor]] = {
    "simplex": _simplex,
    "orthoplex": _orthoplex,
    "polygon": _polygon,
    "hadamard": _hadamard,
    "simplex_code": _simplex_code,
}


def _anneal_softmax(w: Tensor, steps: int = 500) -> Tensor:
    r"""Minimise a soft-max of the cosines while it hardens.

    $\frac1\beta\log\sum_{i\ne j}e^{\beta\omega_i\cdot\omega_j}$ with growing beta.

    For small beta all pairs push; for large beta only the closest do. Several starts
    run as one batch ``(starts, m, d)``; the best one is kept.
    """
    count = w.shape[-2]
    eye = torch.eye(count, dtype=torch.bool, device=w.device)
    velocity = torch.zeros_like(w)
    for step in range(steps):
        done = step / (steps - 1)
        beta = 4.0 * 500.0**done
        lr = 1.2 / beta  # the curvature grows with beta
        logits = (beta * w @ w.mT).masked_fill(eye, -math.inf)
        soft = logits.flatten(-2).softmax(-1).reshape(logits.shape)  # symmetric
        grad = 2 * count * soft @ w
        grad = grad - (grad * w).sum(-1, keepdim=True) * w
        velocity = 0.8 * velocity + grad
        w = _unit(w - lr * velocity)
    return w[smallest_angle(w).argmax()]


def _polar_start(count: int, dim: int, generator: torch.Generator | None) -> Tensor:
    """The published start: uniform polar angles (not uniform on the sphere)."""
    angles = torch.rand(count, dim - 1, generator=generator) * math.pi
    angles[:, -1] *= 2
    sines = torch.cumprod(angles.sin(), 1)
    points = torch.ones(count, dim)
    points[:, :-1] = angles.cos()
    points[:, 1:] *= sines
    return points


def _descend(w: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
    """The published schedule: 449 projected steps, the length cut twice by ten."""
    for step in range(449):
        lr = 0.01 * 0.1 ** (step // 150)
        w = _unit(w - lr * gradient(w))
    return w


def _nearest(w: Tensor) -> tuple[Tensor, Tensor]:
    return (w @ w.T).fill_diagonal_(-2).max(1)


def _pairwise_gradient(w: Tensor, partner: Tensor, slope: Tensor) -> Tensor:
    """Of ``sum_i f(w_i . w_partner(i))`` with slopes ``f'``: both ends are moved."""
    grad = slope[:, None] * w[partner]
    return grad.index_add(0, partner, slope[:, None] * w)


def _mam_gradient(w: Tensor) -> Tensor:
    """Of minus the sum of every point's angle to its nearest neighbour."""
    cosine, partner = _nearest(w)
    inside = cosine.abs() < 1 - 1e-6
    slope = torch.where(inside, (1 - cosine.clamp(-1, 1) ** 2).rsqrt(), 0.0)
    return _pairwise_gradient(w, partner, slope)


def _min_cos_gradient(w: Tensor) -> Tensor:
    cosine, partner = _nearest(w)
    return _pairwise_gradient(w, partner, torch.ones_like(cosine))


def _energy_gradient(power: int) -> Callable[[Tensor], Tensor]:
    """Of the hyperspherical energy: sum over pairs of ``|w_i - w_j|^-s``, log for 0."""

    def gradient(w: Tensor) -> Tensor:
        square = 2 - 2 * (w @ w.T)
        square.fill_diagonal_(math.inf)
        pull = -max(power, 1) * square.clamp_min(1e-12) ** (-power / 2 - 1)
        return 2 * (pull.sum(1, keepdim=True) * w - pull @ w)

    return gradient


_GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mam": _mam_gradient,
    "min_cos": _min_cos_gradient,
    "energy_0": _energy_gradient(0),
    "energy_1": _energy_gradient(1),
    "energy_2": _energy_gradient(2),
}

#: What :func:`sphere_points` can be asked for.
METHODS = ("auto", "softmax", *_GRADIENTS, *_CODES, "random")
