"""What the construction is measured against: spectral and gradient-based embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator, progress
from icml25.hsdte.embedding import embed_tree
from icml25.hsdte.metrics import Distortion, distortion
from icml25.hsdte.trees import RootedTree, load_tree

__all__ = [
    "BaselinesConfig",
    "baselines",
    "classical_mds",
    "euclidean_adam",
    "h_mds",
    "riemannian_adam",
]


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

    If ``distances`` came from hyperbolic points, $\cosh$ of them would be a
    matrix with one positive eigenvalue and ``dim`` negative ones; the ``dim`` leading
    of those give space-like coordinates.

    Args:
        distances: ``(n, n)``, scaled by $\tau$.
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


@dataclass(frozen=True)
class BaselinesConfig:
    """Other embeddings of one tree in the same dimension.

    Attributes:
        tree: name for :func:`load_tree`.
        dim: dimension d.
        terms: components of the construction to compare with.
        steps: full-batch steps of the two optimisers.
        lr: their first learning rate; it falls to 0 along a cosine.
        scales: tau of Riemannian Adam and of h-MDS; each is reported.
    """

    tree: str = "carnivores"
    dim: int = 10
    terms: tuple[int, ...] = (1, 2, 4)
    steps: int = 200
    lr: float = 0.2
    scales: tuple[float, ...] = (0.5, 1.0)


def baselines(
    config: BaselinesConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Construction against Euclidean MDS, h-MDS and Riemannian optimisation.

    Returns:
        For each method ``{"d_ave", "d_max", "map", "d_wc"}``; ``d_wc`` is capped at
        1e12, where two nodes share one point.
    """
    tree = load_tree(config.tree, seed)
    target = tree.distances()
    generator = make_generator(seed)
    out: dict[str, Any] = {"nodes": len(tree)}
    for terms in config.terms:
        embedded = embed_tree(
            tree, config.dim, terms=terms, generator=generator, device=device
        )
        out[f"construction, t={terms}"] = _plain(embedded.report())
    flat = euclidean_adam(tree, config.dim, steps=config.steps, lr=config.lr / 2)
    out["Euclidean, Adam"] = _plain(distortion(tree, flat))
    for tau in config.scales:
        curved = riemannian_adam(
            tree, config.dim, tau, steps=config.steps, lr=config.lr
        )
        out[f"Riemannian Adam, tau={tau:g}"] = _plain(distortion(tree, curved, tau))
        spectral = h_mds(tau * target, config.dim)
        out[f"h-MDS, tau={tau:g}"] = _plain(distortion(tree, spectral, tau))
    return out


def _plain(report: Distortion) -> dict[str, float]:
    return {
        "d_ave": report.d_ave,
        "d_max": report.d_max,
        "d_wc": min(report.d_wc, 1e12),
        "map": report.map,
    }
