"""What `python -m icml25 run id2 [name]` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from icml25.core import Experiment, make_generator, progress

from . import build, oripid
from .generators import FAMILY
from .linear import LinearIdentifier, PairScatter
from .margin import CosFaceConfig, train_cosface
from .packing import Features, load_features
from .ranking import map_acc, rank_of_positive, standard_error, unit
from .selection import LAMBDAS, choose_lambda, held_out_score
from .theory import singular_value_cosine, transfer_constant

UNSEEN = tuple(code for code in FAMILY if code != "A")
#: Chosen on held-out pairs of the seen model by `python -m icml25 run id2 select`.
CHOSEN = {
    "CosFace W": CosFaceConfig(num_steps=400),
    "2 layers": CosFaceConfig(init="default", num_layers=2, num_steps=800),
    "3 layers": CosFaceConfig(
        init="default", num_layers=3, num_steps=400, lr=1e-4, centre_lr=1e-3
    ),
}
Describe = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CompareConfig:
    """The table of methods against models."""

    lam: float = 0.0  # of W; 0: chosen on held-out seen pairs
    num_seeds: int = 1  # of each trained method
    trained: tuple[str, ...] = ("CosFace W", "2 layers", "3 layers")


LAPTOP = CompareConfig()
FULL = CompareConfig(num_seeds=5)


def fit_closed(features: Features, lam: float, **options: Any) -> LinearIdentifier:
    """W from all pairs of the seen model, in closed form."""
    return LinearIdentifier.fit(
        features.train[features.pair_owner],
        features.pair_gen,
        lam=lam,
        photos=features.train,
        **options,
    )


def fit_trained(
    train: Tensor,
    gen: Tensor,
    owner: Tensor,
    config: CosFaceConfig,
    generator: torch.Generator,
    desc: str = "CosFace",
) -> Describe:
    """W or a network by CosFace; embeddings centred on the train photos' mean.

    Centred embeddings are also scaled by one number, so that they have unit variance.
    """
    mean = train.mean(0)
    scale = (train - mean).std()
    classes, labels = owner.unique(return_inverse=True)
    network, _ = train_cosface(
        (train[classes] - mean) / scale,
        (gen - mean) / scale,
        labels,
        config=config,
        generator=generator,
        desc=desc,
    )
    return lambda z: unit(network((z - mean) / scale))


def search(describe: Describe, features: Features) -> dict[str, Tensor]:
    """Ranks of the true origins, by model."""
    gallery = describe(features.gallery)
    return {
        code: rank_of_positive(describe(z), gallery, row)
        for code, (z, row) in features.queries.items()
    }


def compare_methods(
    features: Features, config: CompareConfig = LAPTOP, *, seed: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Ranks of every method on every model; (seeds, queries) each.

    All methods see the same photos and the same pairs of model A.
    """
    mean = features.train.mean(0)
    lam = config.lam
    if not lam:
        lam, _ = choose_lambda(features.train, features.pair_gen, features.pair_owner)
    fixed: dict[str, Describe] = {
        "raw": unit,
        "centred": lambda z: unit(z - mean),
        "closed form W": fit_closed(features, lam),
    }
    ranks = {
        name: {code: r[None] for code, r in search(describe, features).items()}
        for name, describe in fixed.items()
    }
    ranks["CNN"] = {
        code: rank_of_positive(
            unit(features.cnn[code]), unit(features.cnn["gallery"]), row
        )[None]
        for code, (_, row) in features.queries.items()
    }
    for name in config.trained:
        runs = []
        for k in range(config.num_seeds):
            describe = fit_trained(
                features.train,
                features.pair_gen,
                features.pair_owner,
                CHOSEN[name],
                make_generator(1_000 * seed + k),
                desc=name,
            )
            runs.append(search(describe, features))
        ranks[name] = {code: torch.stack([r[code] for r in runs]) for code in FAMILY}
    return ranks


def gain(ours: Tensor, other: Tensor) -> tuple[float, float]:
    """Difference of two mAPs on the same queries, and its paired standard error."""
    difference = (1 / ours).mean(0) - (1 / other).mean(0)  # mean over seeds
    return difference.mean().item(), (difference.std() / len(difference) ** 0.5).item()


def unseen_gain(
    ours: dict[str, Tensor], other: dict[str, Tensor]
) -> tuple[float, float]:
    """The same for the mean over the unseen models."""
    parts = [gain(ours[code], other[code]) for code in UNSEEN]
    mean = sum(value for value, _ in parts) / len(parts)
    return mean, sum(error**2 for _, error in parts) ** 0.5 / len(parts)


def _summary(ranks: dict[str, Tensor]) -> dict[str, list[float]]:
    """mAP, accuracy, standard error over queries, standard deviation over seeds."""
    table = {}
    for code, r in ranks.items():
        scores = torch.tensor([map_acc(row) for row in r])
        spread = scores[:, 0].std().item() if len(r) > 1 else 0.0
        over_seeds = 1 / (1 / r).mean(0)  # so that its 1/rank is the mean over seeds
        table[code] = [*scores.mean(0).tolist(), standard_error(over_seeds), spread]
    return table


def run_compare(
    config: CompareConfig = LAPTOP, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """mAP, accuracy and spread of all methods on all models, and W's gains."""
    ranks = compare_methods(_features(device), config, seed=seed)
    ours = ranks["closed form W"]
    return {
        "table": {name: _summary(by_model) for name, by_model in ranks.items()},
        "gain_seen": {name: gain(ours["A"], r["A"]) for name, r in ranks.items()},
        "gain_unseen": {name: unseen_gain(ours, r) for name, r in ranks.items()},
    }


@dataclass(frozen=True)
class SelectConfig:
    """What is tried on held-out pairs of the seen model."""

    lams: tuple[float, ...] = LAMBDAS
    lrs: tuple[float, ...] = (3e-5, 1e-4, 3e-4, 1e-3)
    num_steps: tuple[int, ...] = (100, 200, 400, 800)


def run_select(
    config: SelectConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Held-out mAP on the seen model of every setting; no unseen model is used."""
    config = config or SelectConfig()
    features = _features(device)
    seen = (features.train, features.pair_gen, features.pair_owner)
    lam, scores = choose_lambda(*seen, grid=config.lams)
    trained: dict[str, dict[str, float]] = {}
    for name, base in CHOSEN.items():
        trained[name] = {}
        for lr in config.lrs:
            for num_steps in config.num_steps:
                tried = replace(base, lr=lr, centre_lr=10 * lr, num_steps=num_steps)

                def fit(train, gen, owner, tried=tried, name=name):
                    generator = make_generator(seed)
                    return fit_trained(train, gen, owner, tried, generator, name)

                key = f"lr {lr:g}, {num_steps} steps"
                trained[name][key] = held_out_score(*seen, fit)
    return {
        "lam": lam,
        "lam_scores": {f"{key:g}": value for key, value in scores.items()},
        "trained": trained,
        "best": {name: max(tried, key=tried.get) for name, tried in trained.items()},
    }


@dataclass(frozen=True)
class SweepConfig:
    """W against the number of pairs, its rank, the ridge, strength and attacks."""

    lam: float = 1.0  # chosen on held-out seen pairs
    pairs: tuple[int, ...] = (50, 100, 200, 400, 800, 1400, 2000)
    num_subsets: int = 5  # random subsets of each size
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)


def run_sweeps(
    config: SweepConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """mAP by model for each number of pairs and rank; raw and W by strength, attack."""
    config = config or SweepConfig()
    features = _features(device)
    generator = make_generator(seed)

    def score(describe: Describe) -> dict[str, float]:
        return {code: map_acc(r)[0] for code, r in search(describe, features).items()}

    by_pairs: dict[str, list[dict[str, float]]] = {}
    total = len(features.pair_gen)
    for count in progress(config.pairs, "pairs"):
        by_pairs[str(count)] = []
        for _ in range(config.num_subsets if count < total else 1):
            rows = torch.randperm(total, generator=generator)[:count].to(
                features.train.device
            )
            w = LinearIdentifier.fit(
                features.train[features.pair_owner[rows]],
                features.pair_gen[rows],
                lam=config.lam,
                photos=features.train,
            )
            by_pairs[str(count)].append(score(w))
    by_rank = {
        str(k): score(fit_closed(features, config.lam, rank=k)) for k in config.ranks
    }
    return {"pairs": by_pairs, "rank": by_rank, **_hardships(features, config.lam)}


def _hardships(features: Features, lam: float) -> dict[str, Any]:
    """Raw and W (mAP, standard error) by strength and by attack, on the seen model."""
    describes = {"raw": unit, "closed form W": fit_closed(features, lam)}
    row = features.queries["A"][1]
    cases = {f"{s:g}": case for s, case in features.strengths.items()}
    attacked = {"none": features.queries["A"][0], **features.attacked}

    def both(z: Tensor, row: Tensor) -> dict[str, list[float]]:
        found = {}
        for name, describe in describes.items():
            ranks = rank_of_positive(describe(z), describe(features.gallery), row)
            found[name] = [map_acc(ranks)[0], standard_error(ranks)]
        return found

    return {
        "strength": {name: both(*case) for name, case in cases.items()},
        "attack": {name: both(z, row) for name, z in attacked.items()},
    }


def run_matrix(
    config: SweepConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Fit W on each model's pairs, test on all, beside kappa and Table 1's statistic.

    All fits use as many pairs as the unseen models have, so rows can be compared. A
    model's kappa to itself is taken on the very pairs of the fit and cannot exceed 1;
    ``kappa_fresh`` is A's on as many other pairs of A.
    """
    config = config or SweepConfig()
    features = _features(device)
    pairs = {"A": (features.pair_gen, features.pair_owner), **features.other_pairs}
    count = min(len(gen) for gen, _ in pairs.values())
    moments, differences, table = {}, {}, {}
    for code, (gen, owner) in pairs.items():
        origin, gen = features.train[owner[:count]], gen[:count]
        scatter = PairScatter(gen.shape[1], device=gen.device)
        moments[code] = scatter.update(origin, gen).second_moment
        differences[code] = gen - origin
        w = LinearIdentifier.fit(origin, gen, lam=config.lam, photos=features.train)
        ranks = search(w, features)
        table[code] = {other: map_acc(r)[0] for other, r in ranks.items()}
    fresh = features.pair_gen[count : 2 * count]
    fresh = fresh - features.train[features.pair_owner[count : 2 * count]]
    order = torch.randperm(len(features.train), generator=make_generator(seed))
    photos = features.train[order.to(features.train.device)]
    controls = {
        "A, fresh pairs": fresh,
        "unrelated photos": photos[:count] - photos[count : 2 * count],
        "photos alone": photos[:count] - features.train.mean(0),
        "Gaussian noise": torch.randn(fresh.shape, generator=make_generator(seed)).to(
            fresh
        ),
    }
    base = differences["A"]
    return {
        "map": table,
        "kappa": {
            code: {
                other: transfer_constant(moments[code], moments[other], lam=config.lam)
                for other in pairs
            }
            for code in pairs
        },
        "kappa_fresh": transfer_constant(
            moments["A"], (fresh.mT @ fresh / count).double(), lam=config.lam
        ),
        "singular_value_cosine": {
            name: singular_value_cosine(base, x)
            for name, x in {**differences, **controls}.items()
        },
        "num_pairs": count,
    }


def _features(device: torch.device | str) -> Features:
    """The shipped features on a device."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, tuple):
            return tuple(map(move, value))
        return {key: move(part) for key, part in value.items()}

    features = load_features()
    return Features(**{key: move(value) for key, value in vars(features).items()})


EXPERIMENTS = {
    "compare": Experiment(
        run_compare,
        laptop=LAPTOP,
        paper=FULL,
        summary="methods against models, fitted on the seen model only",
    ),
    "select": Experiment(
        run_select,
        laptop=SelectConfig(),
        summary="hyperparameters on held-out pairs of the seen model",
    ),
    "sweeps": Experiment(
        run_sweeps,
        laptop=SweepConfig(),
        summary="W against pairs, rank, strength and attacks",
    ),
    "matrix": Experiment(
        run_matrix,
        laptop=SweepConfig(),
        summary="fit on one model, test on all, beside the transfer constant",
    ),
    "build": Experiment(
        build.run_build,
        laptop=build.LAPTOP,
        paper=build.PAPER,
        summary="train the six models and make all features (needs outside data)",
    ),
    "oripid": Experiment(
        oripid.run_oripid,
        laptop=oripid.LAPTOP,
        paper=oripid.PAPER,
        summary="the paper's data set: W in one pass, seven query sets, 1M gallery",
    ),
}
