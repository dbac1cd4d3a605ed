"""Digits with a tree over the ten classes as fixed knowledge on top of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator, progress
from icml25.hsdte.distances import distance_to_prototypes
from icml25.hsdte.embedding import embed_tree
from icml25.hsdte.trees import RootedTree

__all__ = ["ClassifierConfig", "class_tree", "classifier"]


@dataclass(frozen=True)
class ClassifierConfig:
    """Handwritten digits with a tree over the ten classes as fixed knowledge.

    Attributes:
        dim: dimension of the ball.
        tau: scale of the embedded class tree.
        temperature: factor on the distances in the soft-max.
        train: training images; the other of the 1,797 are for testing.
        hidden: width of the one hidden layer.
        steps: full-batch Adam steps.
        lr: learning rate.
        seeds: repetitions.
    """

    dim: int = 10
    tau: float = 0.5
    temperature: float = 4.0
    train: int = 100
    hidden: int = 64
    steps: int = 150
    lr: float = 0.01
    seeds: int = 3


def class_tree(means: Tensor) -> tuple[RootedTree, Tensor]:
    """A binary tree over classes by average linkage, and the leaf of each class."""
    from scipy.cluster.hierarchy import linkage

    count = len(means)
    parent = [-1] * (2 * count - 1)
    for step, pair in enumerate(linkage(means.numpy(), "average")[:, :2].tolist()):
        for child in pair:
            parent[int(child)] = count + step
    tree = RootedTree(parent)
    return tree, torch.argsort(tree.order)[:count]


def classifier(
    config: ClassifierConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """A flat soft-max against distances to tree-embedded class prototypes.

    Returns:
        For ``flat`` and ``tree``, lists over seeds of ``"error"`` (share of wrong test
        images) and ``"severity"`` (mean tree distance, in edges, of the wrong ones).
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    y = torch.tensor(labels, device=device)
    out: dict[str, Any] = {}
    for repetition in progress(range(config.seeds), "seeds"):
        generator = make_generator(seed + repetition)
        order = torch.randperm(len(x), generator=generator).to(device)
        train, test = order[: config.train], order[config.train :]
        means = torch.stack([x[train][y[train] == c].mean(0) for c in range(10)])
        tree, leaf = class_tree(means.cpu())
        hops = tree.distances()[leaf][:, leaf].to(device)
        prototypes = embed_tree(
            tree, config.dim, tau=config.tau, generator=generator, device=device
        ).points[leaf.to(device)]

        def to_ball(v: Tensor) -> Tensor:
            v = v.double()
            norm = v.norm(dim=1, keepdim=True).clamp_min(1e-9)
            return v / norm * (norm / 2).clamp_max(12).tanh()

        def distance_head(v: Tensor, prototypes=prototypes) -> Tensor:
            return -config.temperature * distance_to_prototypes(to_ball(v), prototypes)

        for name, width, head in (
            ("flat", 10, lambda v: v),
            ("tree", config.dim, distance_head),
        ):
            weights = _train(x[train], y[train], width, head, config, generator)
            with torch.no_grad():
                guess = head(_network(weights, x[test])).argmax(1)
            wrong = guess != y[test]
            cost = hops[y[test], guess][wrong].mean()
            out.setdefault(f"error {name}", []).append(float(wrong.double().mean()))
            out.setdefault(f"severity {name}", []).append(float(cost))
    return out


def _network(weights: list[Tensor], x: Tensor) -> Tensor:
    w1, b1, w2, b2 = weights
    return torch.relu(x @ w1 + b1) @ w2 + b2


def _train(x, y, width: int, head, config: ClassifierConfig, generator) -> list[Tensor]:
    sizes = [(x.shape[1], config.hidden), (config.hidden, width)]
    weights = []
    for fan_in, fan_out in sizes:
        w = torch.randn(fan_in, fan_out, generator=generator) / fan_in**0.5
        weights += [w.to(x.device), torch.zeros(fan_out, device=x.device)]
    for w in weights:
        w.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=config.lr)
    for _ in range(config.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(head(_network(weights, x)), y)
        loss.backward()
        optimizer.step()
    return weights
