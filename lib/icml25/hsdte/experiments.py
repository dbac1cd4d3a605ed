"""The chapter's experiments: one public function each, plain numbers out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from icml25.core import Experiment, make_generator, progress
from icml25.hsdte.baselines import BaselinesConfig, baselines
from icml25.hsdte.classifier import ClassifierConfig, classifier
from icml25.hsdte.embedding import embed_tree, max_scale
from icml25.hsdte.expansion import max_radius
from icml25.hsdte.sphere import (
    direction_table,
    rankin_angle,
    smallest_angle,
    sphere_points,
)
from icml25.hsdte.trees import load_tree

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
        seeds: repetitions of the methods that draw a start.
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
    seeds: int = 3


def separation(
    config: SeparationConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Smallest angles in degrees.

    Returns:
        ``optimum``: Rankin's value by case, 0 where it is not attained (m > 2d), and
        under each method's name its angle by case, the mean over the seeds; 0 where it
        cannot give m points.
    """
    out: dict[str, Any] = {
        "optimum": [rankin_angle(m, d) if m <= 2 * d else 0.0 for d, m in config.cases]
    }
    for method in progress(config.methods, "methods"):
        out[method] = []
        for d, m in config.cases:
            if method == "hadamard" and m > 2 ** (d.bit_length() - 1):
                out[method].append(0.0)
                continue
            angles = [
                smallest_angle(
                    sphere_points(m, d, method, generator=make_generator(s)).to(device)
                )
                for s in range(seed, seed + config.seeds)
            ]
            out[method].append(float(torch.stack(angles).mean()))
    return out


@dataclass(frozen=True)
class DirectionsConfig:
    """The same tree, scale and dimension with directions of different quality.

    Attributes:
        tree: name for :func:`load_tree`.
        dim: dimension d.
        scale_terms: the scale is the largest safe one of this many components.
        terms: components t; more than that, so that rounding plays no part.
        methods: how directions are found.
        seeds: repetitions of the methods that draw.
    """

    tree: str = "3-ary-5"
    dim: int = 20
    scale_terms: int = 1
    terms: int = 2
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
    tau = max_scale(tree, config.scale_terms)
    out: dict[str, Any] = {"tau": tau}
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
                tau=tau,
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


_PHYLOGENY = PrecisionConfig(dim=20, terms=(1, 2, 3, 4), twists=(True, False))

EXPERIMENTS = {
    "precision": Experiment(
        precision,
        laptop=PrecisionConfig(),
        paper=replace(PrecisionConfig(), dim=20, terms=(1, 2, 3, 4)),
        summary="WordNet's mammals: distortion against the number of components",
    ),
    **{
        tree.replace("_", "-"): Experiment(
            precision,
            laptop=replace(_PHYLOGENY, tree=tree, dim=10, terms=(1, 2, 4)),
            paper=replace(_PHYLOGENY, tree=tree),
            summary=f"{words}, with and without twist",
        )
        for tree, words in (
            ("euro_mammals", "European mammals (the paper's 'carnivora'), 548 nodes"),
            ("euro_birds", "European birds, 847 nodes"),
            ("euro_tetrapods", "European tetrapods, 2061 nodes"),
        )
    },
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
