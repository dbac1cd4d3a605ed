"""The paper's three figures, their spread, and the coverage of every bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from icml25.collusion.cars import CAR_LABELS, car_law, car_signal, sample_cars
from icml25.collusion.certificates import (
    planting_certificate,
    second_label,
    unplanting_certificate,
)
from icml25.collusion.limits import certified_share, cracking_share
from icml25.collusion.released import released_unplanting_bound
from icml25.collusion.tables import (
    SignalMap,
    Tables,
    count_tables,
    draw_tables,
    feature_only,
    predict,
    relabelled,
    success,
)
from icml25.core.runtime import make_generator, progress

EXCELLENT, POOR = 0, 3
# The released classifier's order among equally frequent labels.
_TIES = (1, 2, 3, 0)
_REACHED = 0.9  # "certified" in the tables: the bound exceeds this


@dataclass(frozen=True)
class Planting:
    """Figure 1: plant each label, for a growing collective."""

    population_size: int = 1_000_000  # N
    test_size: int = 100_000  # N_test
    delta: float = 0.05
    # Sizes n of the collective: the paper's grid.
    sizes: tuple[int, ...] = (
        *range(1_000, 200_000, 20_000),
        *(200_000, 300_000, 400_000, 500_000),
    )


@dataclass(frozen=True)
class Populations:
    """Figure 2: the same shares of three populations."""

    population_sizes: tuple[int, ...] = (500_000, 1_000_000, 2_000_000)
    test_size: int = 100_000
    delta: float = 0.05
    target: int = POOR
    # Shares n/N in thousandths: the paper's grid.
    shares: tuple[int, ...] = (*range(10, 301, 5), 400, 600, 800, 999)


@dataclass(frozen=True)
class Unplanting:
    """Figure 3: move away from Excellent; n_e rows estimate the second label."""

    population_size: int = 1_000_000
    test_size: int = 100_000
    delta: float = 0.05
    avoid: int = EXCELLENT
    estimation_sizes: tuple[int, ...] = (100, 2_000, 10_000)  # n_e
    sizes: tuple[int, ...] = tuple(range(10_100, 340_101, 10_000))


@dataclass(frozen=True)
class Coverage:
    """How often a bound exceeds the success, over independent populations."""

    repetitions: int = 200
    population_sizes: tuple[int, ...] = (20_000, 100_000, 1_000_000)
    test_size: int = 10_000
    delta: float = 0.05
    shares: tuple[float, ...] = (0.02, 0.035, 0.05, 0.08, 0.12, 0.2, 0.3)
    estimation_share: float = 0.1  # n_e / n


@dataclass(frozen=True)
class Bands:
    """Figure 1 with the spread over many populations."""

    repetitions: int = 100
    population_size: int = 1_000_000
    test_size: int = 100_000
    delta: float = 0.05
    target: int = POOR
    step: int = 1_000  # rows between two sizes of the collective
    largest: int = 150_000


def planting(config: Planting, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Bound and success of planting each label, from one pass over the rows."""
    signal = car_signal()
    counts, test = prefix_tables(
        signal, *_draw_cars(config, device=device, seed=seed), config.sizes, config
    )
    return {
        "share": [n / config.population_size for n in config.sizes],
        "labels": {
            name: sweep(counts, test, label, config, law=car_law(signal))
            for label, name in enumerate(CAR_LABELS)
        },
    }


def populations(
    config: Populations, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """The same label and shares in populations of different sizes."""
    generator = make_generator(seed, device)
    signal, law = car_signal(), car_law(car_signal())
    largest = max(config.population_sizes)
    x, y = sample_cars(largest + config.test_size, generator=generator)
    test = count_tables(signal, x[largest:], y[largest:], num_labels=4)
    found = {}
    for size in config.population_sizes:
        ends = [size * share // 1000 for share in config.shares]
        counts = count_tables(
            signal, x[:size], y[:size], num_labels=4, at=[*ends, size]
        )
        found[str(size)] = sweep(
            counts, test, config.target, config, law=law, population_size=size
        )
    return {"share": [share / 1000 for share in config.shares], "sizes": found}


def unplanting(
    config: Unplanting, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Move away from a label: the theorem, the released formula, and fixed labels."""
    signal, law = car_signal(), car_law(car_signal())
    sizes = [*config.estimation_sizes, *config.sizes]
    counts, test = prefix_tables(
        signal, *_draw_cars(config, device=device, seed=seed), sizes, config
    )
    first = len(config.estimation_sizes)
    both, rest = counts[first:-1], counts[-1] - counts[first:-1]
    settings = settings_of(config) | {"avoid": config.avoid}
    shares = [n / config.population_size for n in config.sizes]
    shares = torch.tensor(shares, dtype=torch.float64)
    estimated = {}
    for place, chosen in enumerate(config.estimation_sizes):
        few = counts[place]
        others = both - few
        second = second_label(few, config.avoid)
        bound = unplanting_certificate(few, others, **settings).value
        exact = unplanting_certificate(
            few, others, concentration="exact", **settings
        ).value
        released = released_unplanting_bound(few, others, **settings)
        reached = _avoided(rest.inside + relabelled(both, second), test, config.avoid)
        estimated[str(chosen)] = {
            "second": [CAR_LABELS[label] for label in second.tolist()],
            "bound": bound.tolist(),
            "exact": exact.tolist(),
            "released": released.tolist(),
            "success": reached.tolist(),
            "certified_from": _first(shares, bound),
            "exact_from": _first(shares, exact),
            "released_from": _first(shares, released),
            "success_from": _first(shares, reached),
        }
    fixed = {}
    for label, name in enumerate(CAR_LABELS):
        if label != config.avoid:
            bound = planting_certificate(
                both, target=label, **settings_of(config)
            ).value
            reached = _avoided(
                rest.inside + relabelled(both, label), test, config.avoid
            )
            fixed[name] = {
                "bound": bound.tolist(),
                "success": reached.tolist(),
                "certified_from": _first(shares, bound),
            }
    certify = partial(unplanting_certificate, law * 1e-3, **settings)
    law_share = certified_share(law, certify, population_size=config.population_size)
    return {
        "share": shares.tolist(),
        "estimated": estimated,
        "fixed": fixed,
        "law": float(law_share.max()),
        "law_success": float(cracking_share(law, avoid=config.avoid).max()),
    }


def coverage(config: Coverage, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Violations of every bound over many populations, and of one without radii."""
    generator = make_generator(seed, device)
    law = car_law(car_signal())
    found: dict[str, dict[str, Any]] = {}
    shares = torch.tensor(config.shares, dtype=torch.float64)
    for size in progress(config.population_sizes, desc="coverage"):
        grid = (shares * size).round().expand(config.repetitions, -1)
        few = draw_tables(
            law, (grid * config.estimation_share).round(), generator=generator
        )
        others = draw_tables(law, grid - few.size.cpu(), generator=generator)
        both = few + others
        rest = draw_tables(law, size - grid, generator=generator)
        test = draw_tables(
            law, torch.full_like(grid, config.test_size), generator=generator
        )
        settings = settings_of(config) | {"population_size": size}
        for label, name in enumerate(CAR_LABELS):
            for features_only in (False, True):
                plant = {"target": label, "features_only": features_only}
                added = (
                    feature_only(both, label)
                    if features_only
                    else relabelled(both, label)
                )
                reached = success(predict(rest.inside + added) == label, test)
                goal = f"plant {name}" + " (features only)" * features_only
                for kind in ("hoeffding", "exact"):
                    bound = planting_certificate(
                        both, concentration=kind, **plant, **settings
                    )
                    _tally(found, kind, goal, size, bound.value, reached)
                    if kind == "hoeffding":
                        # The same frequencies, taken for the truth.
                        plain = success(bound.push > bound.resistance, both)
                        _tally(found, "plug-in", goal, size, plain, reached)
        second = second_label(few, EXCELLENT)
        reached = _avoided(rest.inside + relabelled(both, second), test, EXCELLENT)
        for kind in ("hoeffding", "exact"):
            bound = unplanting_certificate(
                few, others, avoid=EXCELLENT, concentration=kind, **settings
            )
            _tally(found, kind, "unplant Excellent", size, bound.value, reached)
    return {
        kind: {
            "settings": len(rows),
            "repetitions": config.repetitions * len(config.shares),
            "worst": max(row["violated"] for row in rows.values()),
            # Settings in which the bound says anything at all at some share.
            "informative": sum(row["largest"] > 0 for row in rows.values()),
            "rows": rows,
        }
        for kind, rows in found.items()
    }


def bands(config: Bands, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Figure 1's staircases for one label over many populations at once."""
    generator = make_generator(seed, device)
    law = car_law(car_signal())
    sizes = torch.arange(config.step, config.largest + 1, config.step)
    steps = torch.full((config.repetitions, len(sizes)), config.step)
    drawn = draw_tables(law, steps, generator=generator)
    counts = Tables(drawn.inside.cumsum(1), drawn.mapped.cumsum(1))
    outsiders = torch.full((config.repetitions, 1), config.population_size)
    last = draw_tables(law, outsiders - config.largest, generator=generator)
    # Those who are not (yet) members: later members and the outsiders.
    rest = counts[:, -1:] + last - counts
    tests = torch.full((config.repetitions, 1), config.test_size)
    test = draw_tables(law, tests, generator=generator)
    settings = settings_of(config) | {"target": config.target}
    hoeffding = planting_certificate(counts, **settings).value
    exact = planting_certificate(counts, concentration="exact", **settings).value
    cracked = predict(rest.inside + relabelled(counts, config.target)) == config.target
    reached = success(cracked, test)

    def spread(values: Tensor) -> dict[str, list[float]]:
        return {
            "mean": values.mean(0).tolist(),
            "low": values.quantile(0.05, 0).tolist(),
            "high": values.quantile(0.95, 0).tolist(),
        }

    return {
        "share": (sizes.double() / config.population_size).tolist(),
        "bound": spread(hoeffding),
        "exact": spread(exact),
        "success": spread(reached),
        "violations": int((hoeffding > reached).sum() + (exact > reached).sum()),
    }


def _draw_cars(
    config: Planting | Unplanting, *, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    generator = make_generator(seed, device)
    return sample_cars(config.population_size + config.test_size, generator=generator)


def prefix_tables(
    signal: SignalMap, x: Tensor, y: Tensor, sizes, config: Any
) -> tuple[Tables, Tables]:
    """Tables of every prefix and of the whole population (last), and of the test."""
    end = config.population_size
    counts = count_tables(signal, x[:end], y[:end], num_labels=4, at=[*sizes, end])
    last = end + config.test_size
    return counts, count_tables(signal, x[end:last], y[end:last], num_labels=4)


def settings_of(config: Any) -> dict[str, Any]:
    return {
        "population_size": getattr(config, "population_size", None),
        "test_size": config.test_size,
        "delta": config.delta,
    }


def sweep(
    counts: Tables,
    test: Tables,
    label: int,
    config: Any,
    *,
    law: Tables | None = None,
    population_size: int | None = None,
) -> dict[str, Any]:
    """Plant one label at every sweep point: bounds, success, first shares over 0.9."""
    settings = settings_of(config) | {"target": label}
    settings["population_size"] = population_size or config.population_size
    members, rest = counts[:-1], counts[-1] - counts[:-1]
    shares = members.size.double() / settings["population_size"]
    bound = planting_certificate(members, **settings).value
    exact = planting_certificate(members, concentration="exact", **settings).value
    table = rest.inside + relabelled(members, label)
    reached = success(predict(table, tie_order=_TIES) == label, test)
    found = {
        "bound": bound.tolist(),
        "exact": exact.tolist(),
        "success": reached.tolist(),
        "certified_from": _first(shares, bound),
        "exact_from": _first(shares, exact),
        "success_from": _first(shares, reached),
    }
    if law is not None:
        size = settings["population_size"]
        certify = partial(planting_certificate, **settings)
        found["law"] = float(certified_share(law, certify, population_size=size).max())
    return found


def _first(shares: Tensor, values: Tensor) -> float | None:
    """The first share at which a curve exceeds 0.9."""
    above = (values > _REACHED).nonzero()
    return float(shares[above[0, 0]]) if len(above) else None


def _avoided(table: Tensor, test: Tables, label: int) -> Tensor:
    prediction = predict(table, tie_order=_TIES)
    return success((prediction != label) & (prediction >= 0), test)


def _tally(
    found: dict[str, dict[str, Any]],
    kind: str,
    goal: str,
    size: int,
    bound: Tensor,
    reached: Tensor,
) -> None:
    """Worst frequency of a violation over the shares, and the largest mean bound."""
    violated = (bound > reached).double().mean(0)
    found.setdefault(kind, {})[f"{goal}, N={size:,}"] = {
        "violated": float(violated.max()),
        "largest": float(bound.mean(0).max()),
    }
