"""The chapter's experiments: one public function each, plain numbers out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from icml25.core import Experiment, data, make_generator, progress
from icml25.hsdte.baselines import euclidean_adam, h_mds, riemannian_adam
from icml25.hsdte.distances import distance_to_prototypes
from icml25.hsdte.embedding import embed_tree, max_scale
from icml25.hsdte.expansion import max_radius
from icml25.hsdte.metrics import Distortion, distortion
from icml25.hsdte.sphere import (
    direction_table,
    rankin_angle,
    smallest_angle,
    sphere_points,
)
from icml25.hsdte.trees import RootedTree

__all__ = [
    "EXPERIMENTS",
    "baselines",
    "classifier",
    "directions",
    "load_tree",
    "precision",
    "separation",
    "wall",
]

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def load_tree(name: str, seed: int = 0) -> RootedTree:
    """A tree by name, hung up at its centre.

    Args:
        name: ``"3-ary-5"`` (complete, height 5), ``"yule-200"`` (a random phylogeny of
            200 leaves), ``"mammals"`` (WordNet's, ships with the package),
            ``"carnivores"`` (its part below *carnivore*), or a file of the data set
            ``trees`` without its ending, such as ``"euro_birds"``.
        seed: of the random phylogeny.
    """
    if match := re.fullmatch(r"(\d+)-ary-(\d+)", name):
        return RootedTree.balanced(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"yule-(\d+)", name):
        return RootedTree.yule(int(match[1]), make_generator(seed)).recentered()
    if name in ("mammals", "carnivores"):
        tree = RootedTree.from_tsv(data.wordnet_mammals())
        if name == "carnivores":
            names = [label.split(".")[0] for label in tree.labels]
            tree = tree.subtree(names.index("carnivore"))
        return tree.recentered()
    return RootedTree.from_tsv(data.fetch("trees", f"{name}.tsv")).recentered()


@dataclass(frozen=True)
class PrecisionConfig:
    """How distortion falls as components are added.

    Attributes:
        tree: name for :func:`load_tree`.
        dim: dimension d.
        terms: components t to try.
        dtype: of the components.
        points: how directions are found.
        twists: with (True) and without (False) random orientation.
        margin: distance mu kept from R_max, in nats.
    """

    tree: str = "mammals"
    dim: int = 10
    terms: tuple[int, ...] = (1, 2, 4)
    dtype: str = "float64"
    points: str = "auto"
    twists: tuple[bool, ...] = (True,)
    margin: float = 3.0


def precision(
    config: PrecisionConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Embed one tree at its largest safe scale for each number of components.

    Returns:
        ``nodes``, ``map_ceiling`` and, for each run, ``tau``, ``d_ave``, ``d_wc`` and
        ``map`` under keys such as ``"d_ave t=2"`` (``"... untwisted"`` without twist).
    """
    tree = load_tree(config.tree, seed)
    generator = make_generator(seed)
    table = direction_table(
        tree.degree.tolist(), config.dim, config.points, generator=generator
    )
    out: dict[str, Any] = {"nodes": len(tree)}
    runs = [(terms, twist) for twist in config.twists for terms in config.terms]
    for terms, twist in progress(runs, "components"):
        dtype = _DTYPES[config.dtype]
        embedded = embed_tree(
            tree,
            config.dim,
            tau=max_scale(tree, terms, dtype, margin=config.margin),
            terms=terms,
            dtype=dtype,
            points=table,
            twist=twist,
            generator=generator,
            device=device,
        )
        report = embedded.report()
        name = f"t={terms}" + ("" if twist else " untwisted")
        out |= {
            f"tau {name}": embedded.tau,
            f"d_ave {name}": report.d_ave,
            f"d_wc {name}": report.d_wc,
            f"map {name}": report.map,
            "map_ceiling": report.map_ceiling,
        }
    return out


@dataclass(frozen=True)
class SeparationConfig:
    """The smallest angle that each method reaches.

    Attributes:
        cases: pairs (d, m).
        methods: names for :func:`~icml25.hsdte.sphere_points`.
    """

    cases: tuple[tuple[int, int], ...] = (
        (20, 4),
        (20, 8),
        (20, 11),
        (20, 17),
        (10, 17),
        (10, 30),
        (5, 30),
        (10, 100),
    )
    methods: tuple[str, ...] = (
        "auto",
        "softmax",
        "mam",
        "min_cos",
        "energy_0",
        "energy_1",
        "energy_2",
        "hadamard",
    )


def separation(
    config: SeparationConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Smallest angles in degrees.

    Returns:
        ``optimum``: Rankin's value by case, 0 where it is not attained (m > 2d), and
        under each method's name its angle by case, 0 where it cannot give m points.
    """
    generator = make_generator(seed)
    out: dict[str, Any] = {
        "optimum": [rankin_angle(m, d) if m <= 2 * d else 0.0 for d, m in config.cases]
    }
    for method in progress(config.methods, "methods"):
        out[method] = []
        for d, m in config.cases:
            try:
                points = sphere_points(m, d, method, generator=generator)
                out[method].append(float(smallest_angle(points.to(device))))
            except ValueError:
                out[method].append(0.0)
    return out


@dataclass(frozen=True)
class DirectionsConfig:
    """The same tree, scale and dimension with directions of different quality.

    Attributes:
        tree: name for :func:`load_tree`.
        dim: dimension d.
        terms: components t; the scale is the largest safe one.
        methods: how directions are found.
        seeds: repetitions of the methods that draw.
    """

    tree: str = "3-ary-5"
    dim: int = 20
    terms: int = 1
    methods: tuple[str, ...] = (
        "auto",
        "mam",
        "energy_0",
        "simplex_code",
        "random",
        "hadamard",
    )
    seeds: int = 3


def directions(
    config: DirectionsConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Distortion by construction, without twist.

    Returns:
        ``tau`` and, for each method, lists over seeds of ``d_ave`` and ``d_wc`` and the
        smallest angle at the largest degree, under keys such as ``"d_ave mam"``.
    """
    tree = load_tree(config.tree, seed)
    out: dict[str, Any] = {"tau": max_scale(tree, config.terms)}
    largest = int(tree.degree.max())
    for method in progress(config.methods, "constructions"):
        rows = []
        for repetition in range(config.seeds):
            generator = make_generator(seed + repetition)
            table = direction_table(
                tree.degree.tolist(), config.dim, method, generator=generator
            )
            embedded = embed_tree(
                tree,
                config.dim,
                terms=config.terms,
                points=table,
                twist=False,
                device=device,
            )
            report = embedded.report()
            angle = float(smallest_angle(table[largest]))
            rows.append((report.d_ave, report.d_wc, angle))
        for name, values in zip(
            ("d_ave", "d_wc", "angle"), zip(*rows, strict=True), strict=True
        ):
            out[f"{name} {method}"] = list(values)
    return out


@dataclass(frozen=True)
class WallConfig:
    """What happens as the tree grows towards the radius that the bits can hold.

    Attributes:
        tree: name for :func:`load_tree`.
        dim: dimension d.
        terms: components to try.
        gaps: radii tried, as nats beyond R_max (negative: inside).
    """

    tree: str = "3-ary-3"
    dim: int = 5
    terms: tuple[int, ...] = (1, 2, 4)
    gaps: tuple[float, ...] = (-24, -18, -12, -9, -7, -5, -4, -3, -2, -1, 0, 1)


def wall(config: WallConfig, *, device: torch.device, seed: int) -> dict[str, Any]:
    """The largest error of an edge, in nats, at radii around R_max.

    Returns:
        For each t a list over the gaps under ``"t=2"``; an edge that is lost (not a
        number, or infinite) counts as 1e3.
    """
    tree = load_tree(config.tree, seed)
    out: dict[str, Any] = {"gap": list(config.gaps)}
    for terms in config.terms:
        errors = []
        for gap in config.gaps:
            radius = max_radius(terms) + gap
            embedded = embed_tree(
                tree,
                config.dim,
                tau=radius / tree.eccentricity,
                terms=terms,
                twist=False,
                device=device,
                strict=False,
            )
            worst = float(embedded.edge_errors().abs().max())
            errors.append(worst if math.isfinite(worst) else 1e3)
        out[f"t={terms}"] = errors
    return out


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


_PAPER = PrecisionConfig(
    tree="euro_mammals", dim=20, terms=(1, 2, 3, 4), twists=(True, False)
)

EXPERIMENTS = {
    "precision": Experiment(
        precision,
        laptop=PrecisionConfig(),
        paper=replace(PrecisionConfig(), dim=20, terms=(1, 2, 3, 4)),
        summary="WordNet's mammals: distortion against the number of components",
    ),
    "euro-mammals": Experiment(
        precision,
        laptop=replace(_PAPER, dim=10, terms=(1, 2, 4)),
        paper=_PAPER,
        summary="European mammals (the paper's 'carnivora'), with and without twist",
    ),
    "euro-birds": Experiment(
        precision,
        laptop=replace(_PAPER, tree="euro_birds", dim=10, terms=(1, 2, 4)),
        paper=replace(_PAPER, tree="euro_birds"),
        summary="European birds: a phylogeny of 847 nodes",
    ),
    "euro-tetrapods": Experiment(
        precision,
        laptop=replace(_PAPER, tree="euro_tetrapods", dim=10, terms=(1, 2, 4)),
        paper=replace(_PAPER, tree="euro_tetrapods"),
        summary="European tetrapods: a phylogeny of 2061 nodes",
    ),
    "animals": Experiment(
        precision,
        laptop=PrecisionConfig(tree="wordnet_animal"),
        paper=PrecisionConfig(tree="wordnet_animal", dim=20, terms=(1, 2, 3, 4)),
        summary="WordNet's animals: 4017 nodes, degrees up to 55",
    ),
    "orientation": Experiment(
        precision,
        laptop=PrecisionConfig(tree="yule-200", twists=(True, False)),
        summary="a random phylogeny with and without twist",
    ),
    "separation": Experiment(
        separation,
        laptop=SeparationConfig(),
        summary="smallest angles by method",
    ),
    "directions": Experiment(
        directions,
        laptop=DirectionsConfig(),
        paper=DirectionsConfig(tree="3-ary-7"),
        summary="distortion by directions at equal tree, scale and dimension",
    ),
    "wall": Experiment(
        wall, laptop=WallConfig(), summary="errors near the radius limit"
    ),
    "baselines": Experiment(
        baselines,
        laptop=BaselinesConfig(),
        paper=BaselinesConfig(dim=20, steps=2000, scales=(0.25, 0.5, 1.0)),
        summary="against Euclidean, spectral and Riemannian embeddings",
    ),
    "classifier": Experiment(
        classifier,
        laptop=ClassifierConfig(),
        paper=ClassifierConfig(seeds=10, steps=500),
        summary="digits with tree-embedded class prototypes",
    ),
}
