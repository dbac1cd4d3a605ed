"""The construction in plain multiple-precision Python, one node at a time.

Slow and short: what the batched form is checked and timed against.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from icml25.hsdte.arithmetic import BITS
from icml25.hsdte.trees import RootedTree

__all__ = ["distance_by_mpmath", "embed_by_node"]

Vector = list[Any]  # of mpmath.mpf


def _dot(x: Vector, y: Vector) -> Any:
    import mpmath

    return mpmath.fdot(x, y)


def _inversion(v: Vector):
    """The inversion that swaps ``v`` and the origin."""
    square = _dot(v, v)
    center = [each / square for each in v]
    rho2 = 1 / square - 1

    def sigma(x: Vector) -> Vector:
        away = [a - b for a, b in zip(x, center, strict=True)]
        factor = rho2 / _dot(away, away)
        return [c + factor * a for c, a in zip(center, away, strict=True)]

    return sigma


def _scaled(x: Vector, length: Any) -> Vector:
    import mpmath

    factor = length / mpmath.sqrt(_dot(x, x))
    return [each * factor for each in x]


def _reflected(x: Vector, normal: Vector) -> Vector:
    square = _dot(normal, normal)
    if square < 1e-24:  # already aligned
        return x
    factor = 2 * _dot(x, normal) / square
    return [a - factor * n for a, n in zip(x, normal, strict=True)]


def embed_by_node(
    tree: RootedTree, *, tau: float, terms: int, points: Mapping[int, Tensor]
) -> list[Vector]:
    """Coordinates of every node, with the bits that ``terms`` doubles would have.

    Args:
        tree: the tree.
        tau: scale.
        terms: the working precision is ``53 * terms`` bits.
        points: unit vectors by degree, as for ``embed_tree``; no twist.

    Returns:
        ``n`` lists of ``d`` numbers (``mpmath.mpf``).
    """
    import mpmath

    with mpmath.workprec(BITS[points[max(points)].dtype] * terms):
        units = {
            degree: [[mpmath.mpf(each) for each in row] for row in table.tolist()]
            for degree, table in points.items()
        }
        dim = points[max(points)].shape[1]
        x: list[Vector] = [[mpmath.mpf(0)] * dim]
        parent, rank = tree.parent.tolist(), tree.rank.tolist()
        degree, weight = tree.degree.tolist(), tree.weight.tolist()
        for node in range(1, len(tree)):
            v = parent[node]
            table = units[degree[v]]
            radius = mpmath.tanh(mpmath.mpf(tau) * weight[node] / 2)
            if v == 0:
                x.append(_scaled(table[rank[node]], radius))
                continue
            if rank[node] == 0:
                sigma = _inversion(x[v])
                up = _scaled(sigma(x[parent[v]]), 1)
                normal = [p - s for p, s in zip(up, table[0], strict=True)]
            turned = _reflected(table[rank[node] + 1], normal)
            x.append(sigma(_scaled(turned, radius)))
        return x


def distance_by_mpmath(x: Vector, y: Vector) -> float:
    """Hyperbolic distance at the working precision."""
    import mpmath

    gap = [a - b for a, b in zip(x, y, strict=True)]
    t = _dot(gap, gap) / ((1 - _dot(x, x)) * (1 - _dot(y, y)))
    return float(2 * mpmath.asinh(mpmath.sqrt(t)))
