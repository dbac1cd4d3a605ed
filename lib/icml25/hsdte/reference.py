"""The construction in plain multiple-precision Python, one node at a time.

Slow and short: what the batched form is checked and timed against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from icml25.hsdte.arithmetic import BITS
from icml25.hsdte.expansion import Expansion
from icml25.hsdte.trees import RootedTree

__all__ = [
    "correct_bits",
    "distance_by_mpmath",
    "distances_by_pair",
    "embed_by_node",
]

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


def distances_by_pair(points: list[Vector]) -> list[float]:
    """All distances at the working precision, pair after pair.

    Returns:
        In the order of ``itertools.combinations``.
    """
    import mpmath

    deficit = [1 - _dot(x, x) for x in points]  # once for each point
    out = []
    for i, x in enumerate(points):
        for j in range(i + 1, len(points)):
            gap = [a - b for a, b in zip(x, points[j], strict=True)]
            t = _dot(gap, gap) / (deficit[i] * deficit[j])
            out.append(float(2 * mpmath.asinh(mpmath.sqrt(t))))
    return out


def correct_bits(terms: int, count: int = 150) -> dict[str, float]:
    """Correct bits of each operation of ``terms`` doubles, in the worst of many cases.

    The oracle works with 1,400 bits. Operands are square roots over 40 binades; the
    last case subtracts numbers that agree in all components but the last.

    Returns:
        Bits by the operation's name; infinite where nothing at all was lost.
    """
    import mpmath

    with mpmath.workprec(1400):
        x, y = (
            Expansion.from_mpmath(
                [
                    mpmath.sqrt(shift + 2 * i) * mpmath.mpf(2) ** (i % 40 - shift)
                    for i in range(count)
                ],
                terms,
            )
            for shift in (15, 22)
        )
        last = x.components.clone()
        last[-1] *= 1.25
        near = Expansion(last)
        a, b, c = ([z.to_mpmath(i) for i in range(count)] for z in (x, y, near))
        cases = {
            "add": (x + y, [p + q for p, q in zip(a, b, strict=True)]),
            "multiply": (x * y, [p * q for p, q in zip(a, b, strict=True)]),
            "divide": (x / y, [p / q for p, q in zip(a, b, strict=True)]),
            "root": (x.sqrt(), [mpmath.sqrt(p) for p in a]),
            "cancel": (near - x, [p - q for p, q in zip(c, a, strict=True)]),
        }
        out = {}
        for name, (ours, exact) in cases.items():
            error = [abs(ours.to_mpmath(i) - v) for i, v in enumerate(exact)]
            worst = max(
                e / abs(v) if v else e for e, v in zip(error, exact, strict=True)
            )
            out[name] = float(-mpmath.log(worst, 2)) if worst else math.inf
        return out
