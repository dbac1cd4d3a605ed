"""What the construction is measured against: spectral and gradient-based embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from icml25.core import progress
from icml25.hsdte.trees import RootedTree

__all__ = ["classical_mds", "euclidean_adam", "h_mds", "riemannian_adam"]


def classical_mds(distances: Tensor, dim: int) -> Tensor:
    """Euclidean coordinates from the leading eigenvectors of the centred squares.

    Args:
        distances: ``(n, n)``.
        dim: coordinates kept.

    Returns:
        ``(n, dim)``.
    """
    square = distances.square()
    centred = square - square.mean(0) - square.mean(1, keepdim=True) + square.mean()
    value, vector = torch.linalg.eigh(-centred / 2)
    return vector[:, -dim:] * value[-dim:].clamp_min(0).sqrt()


def h_mds(distances: Tensor, dim: int) -> Tensor:
    r"""Hyperbolic distances of the spectral h-MDS embedding (Sala et al., 2018).

    If ``distances`` came from hyperbolic points, :math:`\cosh` of them would be a
    matrix with one positive eigenvalue and ``dim`` negative ones; the ``dim`` leading
    of those give space-like coordinates.

    Args:
        distances: ``(n, n)``, scaled by :math:`\tau`.
        dim: dimension.

    Returns:
        ``(n, n)`` distances of the embedding.
    """
    value, vector = torch.linalg.eigh(-distances.cosh())
    space = vector[:, -dim:] * value[-dim:].clamp_min(0).sqrt()
    time = (1 + space.square().sum(1)).sqrt()
    # 4 sinh^2(D/2) = |x - y|^2 - (x_0 - y_0)^2
    square = torch.cdist(space, space).square() - (time[:, None] - time).square()
    return 2 * (square.clamp_min(0).sqrt() / 2).asinh()


def euclidean_adam(
    tree: RootedTree, dim: int, *, steps: int, lr: float = 0.1
) -> Tensor:
    """Distances after Adam on the mean relative error, from classical MDS.

    The loss is the very number that ``d_ave`` reports.

    Returns:
        ``(n, n)``.
    """
    target = tree.distances()
    x = classical_mds(target, dim).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=lr)
    _minimise(x, target, optimizer, _euclidean, steps, "Euclidean Adam")
    return _euclidean(x.detach())


def riemannian_adam(
    tree: RootedTree, dim: int, tau: float, *, steps: int, lr: float = 0.1
) -> Tensor:
    r"""The same with geoopt's Riemannian Adam in the Poincare ball, at scale ``tau``.

    The start is the Euclidean solution, shrunk so that distances near the origin are
    ``tau`` times those of the tree, and kept inside the ball.

    Returns:
        ``(n, n)`` hyperbolic distances.
    """
    import geoopt

    target = tree.distances()
    flat = classical_mds(target, dim) * tau / 2
    norm = flat.norm(dim=1, keepdim=True).clamp_min(1e-12)
    ball = geoopt.PoincareBall()
    x = geoopt.ManifoldParameter(flat / norm * norm.tanh(), manifold=ball)
    optimizer = geoopt.optim.RiemannianAdam([x], lr=lr)
    _minimise(x, tau * target, optimizer, _poincare, steps, "Riemannian Adam")
    return _poincare(x.detach())


def _euclidean(x: Tensor) -> Tensor:
    square = x.square().sum(1)
    return (square[:, None] + square - 2 * x @ x.T).clamp_min(1e-16).sqrt()


def _poincare(x: Tensor) -> Tensor:
    square = x.square().sum(1)
    m = 1 - square
    gap = (square[:, None] + square - 2 * x @ x.T).clamp_min(1e-16)
    return 2 * (gap / (m[:, None] * m)).sqrt().asinh()


def _minimise(x, target, optimizer, distance, steps: int, desc: str) -> None:
    off = 1 - torch.eye(len(target), dtype=target.dtype)
    weight = off / (target + torch.eye(len(target), dtype=target.dtype)) / off.sum()
    lr = optimizer.param_groups[0]["lr"]
    for step in progress(range(steps), desc):
        optimizer.param_groups[0]["lr"] = (
            lr * (1 + math.cos(math.pi * step / steps)) / 2
        )
        optimizer.zero_grad()
        loss = ((distance(x) - target).abs() * weight).sum()
        loss.backward()
        optimizer.step()
