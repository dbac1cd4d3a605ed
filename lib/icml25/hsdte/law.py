"""What theory says the distortion will be: the law, its bound, Delaunay's condition."""

from __future__ import annotations

import math

__all__ = ["corner_loss", "delaunay_scale", "drift_angle", "ratio_bound"]


def corner_loss(angle: float) -> float:
    r"""Half of what a corner costs, :math:`\lambda = \log(1/\sin(\theta/2))`.

    Args:
        angle: :math:`\theta` in radians; at :math:`\pi` the path is straight and
            nothing is lost.
    """
    return -math.log(math.sin(angle / 2))


def drift_angle(angle: float, length: float) -> float:
    r"""How far the geodesic back to the start turns off the last edge, at most.

    The least fixed point of
    :math:`\cot\delta = (\sinh\ell - \cosh\ell\cos\varphi) / \sin\varphi`,
    :math:`\varphi = \theta - \delta`
    (``hsdte-eq-drift`` in the book), about :math:`2e^{-\ell}\cot(\theta/2)`.

    Args:
        angle: smallest angle :math:`\theta` between edges, radians.
        length: shortest edge :math:`\ell`, nats.

    Returns:
        :math:`\delta^*`, or NaN where :math:`\cosh(\ell/2)\sin(\theta/2) \le 1`: the
        corners are so sharp that a path may turn back, and no bound exists.
    """
    if math.cosh(length / 2) * math.sin(angle / 2) <= 1:
        return math.nan
    drift = 0.0
    for _ in range(10_000):
        rest = angle - drift
        side = math.sinh(length) - math.cosh(length) * math.cos(rest)
        after = math.atan2(math.sin(rest), side)
        if abs(after - drift) < 1e-15:
            break
        drift = after
    return drift


def ratio_bound(angle: float, length: float) -> float:
    r"""No pair loses more than this share of its distance, :math:`2\lambda/\ell`.

    ``hsdte-eq-bound`` in the book.

    Args:
        angle: smallest angle between edges of the embedded tree, radians.
        length: its shortest edge :math:`\tau w_{\min}`, nats.

    Returns:
        :math:`2\log(1/\sin((\theta-\delta^*)/2))/\ell`; NaN where :func:`drift_angle`
        is.
    """
    drift = drift_angle(angle, length)
    return math.nan if math.isnan(drift) else 2 * corner_loss(angle - drift) / length


def delaunay_scale(angle: float) -> float:
    r"""Edges this long make the tree the Delaunay graph: :math:`-2\log\tan(\theta/4)`.

    Args:
        angle: smallest angle between edges at a node, radians.
    """
    return -2 * math.log(math.tan(angle / 4))
