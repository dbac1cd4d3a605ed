"""How good a set of preference-conditioned policies is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "hull_hypervolume",
    "hypervolume",
    "nondominated",
    "score",
    "simplex_grid",
    "sparsity",
]


def simplex_grid(
    num_objectives: int, resolution: int, *, interior: bool = True
) -> Tensor:
    r"""All preferences with entries in steps of ``1 / resolution``.

    Args:
        num_objectives: :math:`m`.
        resolution: number of steps.
        interior: leave out preferences with a zero entry.

    Returns:
        ``(K, m)`` float64, rows summing to one, in lexicographic order.

    Raises:
        ValueError: no such preference exists.
    """
    from itertools import combinations

    if num_objectives < 1 or resolution < (num_objectives if interior else 1):
        raise ValueError(
            f"num_objectives={num_objectives}, resolution={resolution}: no preference"
        )
    # Stars and bars: the gaps between m - 1 chosen places are the entries.
    total = resolution if interior else resolution + num_objectives
    bars = torch.tensor(
        list(combinations(range(1, total), num_objectives - 1)), dtype=torch.float64
    ).reshape(-1, num_objectives - 1)
    ends = bars.new_zeros(len(bars), 1)
    parts = torch.cat([ends, bars, ends + total], 1).diff(dim=1)
    return (parts if interior else parts - 1) / resolution


def nondominated(points: Tensor) -> Tensor:
    """``(n,)`` mask of the points that no other point beats; all copies are kept.

    Args:
        points: ``(n, m)``, larger is better.
    """
    at_least = (points[:, None] >= points[None]).all(-1)
    better = (points[:, None] > points[None]).any(-1)
    return ~(at_least & better).any(0)


def hypervolume(
    points: Tensor,
    reference: Tensor | float = 0.0,
    *,
    num_samples: int | None = None,
) -> float:
    """Volume dominated by a set of points above a reference point (exact).

    Args:
        points: ``(n, m)``, larger is better.
        reference: ``(m,)`` or one number for all objectives.
        num_samples: estimate on so many directions instead (within 1 % at 5e4), for
            many points in many dimensions, where the exact value takes too long.

    Returns:
        The volume, by ``moocore``; 0 where no point exceeds the reference.

    Raises:
        ValueError: ``points`` is not ``(n, m)`` or holds a NaN.
    """
    import moocore

    if points.ndim != 2 or not points.isfinite().all():
        raise ValueError(f"points {tuple(points.shape)} must be (n, m) and finite")
    points = points.detach().double().cpu()
    reference = torch.as_tensor(reference, dtype=torch.float64).cpu()
    reference = reference.expand(points.shape[1])
    points = points[(points > reference).all(1)].unique(dim=0)
    if len(points) == 0:
        return 0.0
    points = points[nondominated(points)]
    sizes = (points.numpy(), reference.numpy())
    if num_samples is not None:
        return float(moocore.hv_approx(*sizes, maximise=True, nsamples=num_samples))
    return float(moocore.hypervolume(*sizes, maximise=True))


def hull_hypervolume(points: Tensor, reference: Tensor | float = 0.0) -> float:
    """Volume dominated by all *mixtures* of a set of points (exact).

    Stochastic policies attain every mixture of deterministic ones, so this is the
    ceiling for the hypervolume of any set of policies.

    Args:
        points: ``(n, m)``, larger is better.
        reference: ``(m,)`` or one number; no point may lie below it.

    Raises:
        ValueError: a point lies below the reference.

    Notes:
        Convex hull of the points and of their projections onto the faces of the
        orthant: ``2**m`` times as many points for Qhull; seconds at ``m = 6``.
    """
    from scipy.spatial import ConvexHull

    points = points.detach().double().cpu() - torch.as_tensor(reference).cpu()
    if (points < 0).any():
        raise ValueError("a point lies below the reference; mixtures need all above it")
    if points.shape[1] == 1:
        return float(points.max())
    faces = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * points.shape[1])
    shadow = (points[:, None] * faces).reshape(-1, points.shape[1])
    return float(ConvexHull(shadow.unique(dim=0).numpy()).volume)


def sparsity(points: Tensor) -> float:
    r"""Mean squared gap between neighbours on the front; small is dense.

    .. math:: \tfrac{1}{n - 1} \sum_i \sum_k (f_{(k+1), i} - f_{(k), i})^2

    over the ``n`` non-dominated points, sorted in each objective; 0 if there is one.
    """
    front = points[nondominated(points)].unique(dim=0)
    if len(front) < 2:
        return 0.0
    gaps = front.sort(0).values.diff(dim=0)
    return float(gaps.square().sum() / (len(front) - 1))


def score(
    value: Tensor, preference: Tensor, ceiling: Tensor | None = None
) -> dict[str, float]:
    r"""Controllability and diversity of one value vector per preference.

    Args:
        value: ``(K, m)``, positive: what each preference's policy attains.
        preference: ``(K, m)``, positive.
        ceiling: ``(K,)`` of :func:`~icml25.pcrl.ray_oracle`; adds ``eta``.

    Returns:
        ``cosine``: mean cosine between value and preference. ``eta``: mean attained
        share :math:`\min_i (v_i / p_i) / \tau^*(p)`; 1 exactly when no policy serves
        the worst-served objective better, which is the aligned Pareto point where the
        ray meets the front. ``hypervolume`` above 0, ``sparsity``, and ``distinct``:
        the number of value vectors that differ by more than 1 % of the largest entry.

    Raises:
        ValueError: shapes differ, or a preference is not positive.
    """
    if value.shape != preference.shape:
        raise ValueError(
            f"shapes differ: value {tuple(value.shape)}, "
            f"preference {tuple(preference.shape)}"
        )
    if not (preference > 0).all():
        raise ValueError(f"preference holds {preference.min():g}; entries must be > 0")
    result = {
        "cosine": float(torch.cosine_similarity(value, preference, dim=-1).mean()),
        "hypervolume": hypervolume(value),
        "sparsity": sparsity(value),
        "distinct": count_distinct(value, 0.01 * float(value.max())),
    }
    if ceiling is not None:
        result["eta"] = float(((value / preference).amin(-1) / ceiling).mean())
    return result


def count_distinct(points: Tensor, tolerance: float) -> int:
    """How many points remain when those within ``tolerance`` of a kept one go."""
    kept: list[Tensor] = []
    for point in points:
        if all((point - other).abs().max() > tolerance for other in kept):
            kept.append(point)
    return len(kept)
