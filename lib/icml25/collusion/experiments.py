"""The paper's figures and what goes beyond them, each one function."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from icml25.collusion.cars import CAR_LABELS, car_law, car_signal, sample_cars
from icml25.collusion.certificates import (
    certified_share,
    erasing_certificate,
    planting_certificate,
    released_unplanting_bound,
    second_label,
    unplanting_certificate,
)
from icml25.collusion.flights import FLIGHT_LABELS, load_flights
from icml25.collusion.limits import cracking_share, explaining_eps
from icml25.collusion.platforms import train_platform
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
from icml25.core.runtime import Experiment, make_generator, progress

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
    """Figure 3: move away from Excellent, with the second label estimated on n_e rows."""

    population_size: int = 1_000_000
    test_size: int = 100_000
    delta: float = 0.05
    avoid: int = EXCELLENT
    estimation_sizes: tuple[int, ...] = (100, 2_000, 10_000)  # n_e
    sizes: tuple[int, ...] = tuple(range(10_100, 340_101, 10_000))


@dataclass(frozen=True)
class Coverage:
    """How often a bound exceeds the success, over independent populations."""

    repetitions: int = 400
    population_sizes: tuple[int, ...] = (20_000, 100_000, 1_000_000)
    test_size: int = 10_000
    delta: float = 0.05
    shares: tuple[float, ...] = (0.02, 0.035, 0.05, 0.08, 0.12, 0.2, 0.3)
    estimation_share: float = 0.1  # n_e / n


@dataclass(frozen=True)
class Bands:
    """Figure 1 with the spread over many populations."""

    repetitions: int = 200
    population_size: int = 1_000_000
    test_size: int = 100_000
    delta: float = 0.05
    target: int = POOR
    step: int = 1_000  # rows between two sizes of the collective
    largest: int = 150_000


@dataclass(frozen=True)
class Flights:
    """Planting on real flights, for both signals and every label."""

    population_size: int = 300_000
    test_size: int = 36_000
    delta: float = 0.05
    step: int = 750  # rows between two sizes: 0.25% of the population
    largest: int = 90_000


@dataclass(frozen=True)
class Platforms:
    """Planting against platforms that learn."""

    population_size: int = 100_000
    test_size: int = 10_000
    delta: float = 0.05
    target: int = POOR
    shares: tuple[float, ...] = (0.0, 0.02, 0.05, 0.08, 0.16, 0.32)
    kinds: tuple[str, ...] = ("linear", "mlp")
    epochs: int = 2


@dataclass(frozen=True)
class Erasing:
    """Erase a group from an eight-point feature space."""

    population_sizes: tuple[int, ...] = (200_000, 1_000_000)
    test_size: int = 100_000
    delta: float = 0.05
    repetitions: int = 200
    shares: tuple[float, ...] = (0.3, 0.35, 0.36, 0.38, 0.4, 0.42, 0.45, 0.5, 0.55)


def planting(
    config: Planting, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Bound and success of planting each label, from one pass over the rows."""
    signal = car_signal()
    counts, test = _prefixes(
        signal, *_draw_cars(config, device=device, seed=seed), config.sizes, config
    )
    return {
        "share": [n / config.population_size for n in config.sizes],
        "labels": {
            name: _sweep(counts, test, label, config, law=car_law(signal))
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
        found[str(size)] = _sweep(
            counts, test, config.target, config, law=law, population_size=size
        )
    return {"share": [share / 1000 for share in config.shares], "sizes": found}


def unplanting(
    config: Unplanting, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Move away from a label: the theorem, the released formula, and fixed labels."""
    signal, law = car_signal(), car_law(car_signal())
    sizes = [*config.estimation_sizes, *config.sizes]
    counts, test = _prefixes(
        signal, *_draw_cars(config, device=device, seed=seed), sizes, config
    )
    first = len(config.estimation_sizes)
    both, rest = counts[first:-1], counts[-1] - counts[first:-1]
    settings = _settings(config) | {"avoid": config.avoid}
    shares = torch.tensor([n / config.population_size for n in config.sizes])
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
        without = _avoided(
            rest.inside + relabelled(others, second), test, config.avoid
        )
        estimated[str(chosen)] = {
            "second": [CAR_LABELS[label] for label in second.tolist()],
            "bound": bound.tolist(),
            "exact": exact.tolist(),
            "released": released.tolist(),
            "success": reached.tolist(),
            "released_success": without.tolist(),
            "certified_from": _first(shares, bound),
            "exact_from": _first(shares, exact),
            "released_from": _first(shares, released),
            "success_from": _first(shares, reached),
        }
    fixed = {}
    for label, name in enumerate(CAR_LABELS):
        if label != config.avoid:
            bound = planting_certificate(
                both, target=label, **_settings(config)
            ).value
            reached = _avoided(rest.inside + relabelled(both, label), test, config.avoid)
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


def coverage(
    config: Coverage, *, device: torch.device, seed: int
) -> dict[str, Any]:
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
        settings = _settings(config) | {"population_size": size}
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
                        plain = (both.mass * (bound.push > bound.resistance)).sum(-1)
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
            "closest": min(row["closest"] for row in rows.values()),
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
    settings = _settings(config) | {"target": config.target}
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
        "share": (sizes / config.population_size).tolist(),
        "bound": spread(hoeffding),
        "exact": spread(exact),
        "success": spread(reached),
        "violations": int((hoeffding > reached).sum() + (exact > reached).sum()),
    }


def flights(config: Flights, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Planting each punctuality class on real flights, with both kinds of bound."""
    found = {}
    sizes = list(range(config.step, config.largest + 1, config.step))
    for free in ("weekday", "origin"):
        signal, x, y = load_flights(free)
        generator = make_generator(seed, device)
        order = torch.randperm(len(y), generator=generator, device=device)
        x, y = x.to(device)[order], y.to(device)[order]
        counts, test = _prefixes(signal, x, y, sizes, config)
        found[free] = {
            "elements": signal.num_elements,
            "base_mass": float(counts[-1].inside.sum() / counts[-1].size),
            "labels": {
                name: _sweep(counts, test, label, config)
                for label, name in enumerate(FLIGHT_LABELS)
            },
        }
    return {"share": [n / config.population_size for n in sizes], "signals": found}


def platforms(config: Platforms, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Success, accuracy and explaining eps of platforms that learn, on cars."""
    generator = make_generator(seed, device)
    x, y = sample_cars(config.population_size + config.test_size, generator=generator)
    return _against_learners(car_signal(), x, y, config, generator=generator)


def flight_platforms(
    config: Platforms, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Success, accuracy and explaining eps of platforms that learn, on real flights."""
    generator = make_generator(seed, device)
    signal, x, y = load_flights("weekday")
    order = torch.randperm(len(y), generator=generator, device=device)
    return _against_learners(
        signal, x.to(device)[order], y.to(device)[order], config, generator=generator
    )


def _against_learners(
    signal: SignalMap, x: Tensor, y: Tensor, config: Platforms, *, generator
) -> dict[str, Any]:
    size, target = config.population_size, config.target
    tested = slice(size, size + config.test_size)
    test = count_tables(signal, x[tested], y[tested], num_labels=4)
    elements = signal.rows().to(x.device)
    names = ("success", "accuracy", "eps", "bound")
    found = {kind: {name: [] for name in names} for kind in ("table", *config.kinds)}
    for share in progress(config.shares, desc="training platforms"):
        n = round(share * size)
        moved = torch.cat([signal.apply(x[:n]), x[n:size]])
        labels = torch.cat([torch.full_like(y[:n], target), y[n:size]])
        table = count_tables(signal, moved, labels, num_labels=4).inside
        members = count_tables(signal, x[:n], y[:n], num_labels=4) if n else None
        for kind, row in found.items():
            if kind == "table":
                prediction, accuracy = predict(table), None
            else:
                model = train_platform(
                    moved,
                    labels,
                    sizes=list(signal.columns.values()),
                    num_labels=4,
                    kind=kind,
                    epochs=config.epochs,
                    generator=generator,
                )
                prediction = model.labels(elements)
                right = model.labels(x[tested].int()) == y[tested]
                accuracy = float(right.float().mean())
            eps = float(explaining_eps(table, prediction, size=size))
            row["success"].append(float(success(prediction == target, test)))
            row["accuracy"].append(accuracy)
            row["eps"].append(eps)
            if members is not None:
                settings = _settings(config) | {"target": target, "eps": eps}
                certificate = planting_certificate(
                    members, concentration="exact", **settings
                )
                row["bound"].append(float(certificate.value))
            else:
                row["bound"].append(None)
    return {"share": list(config.shares), "kinds": found}


def erasing_law() -> tuple[Tensor, Tensor]:
    """Eight feature values (group x city), three labels: their law and the map g.

    Groups .7/.3, cities .4/.3/.2/.1; the most frequent label holds .7 and is city mod 3
    in group 0, one further in group 1, and 0 for the last city in both. g moves
    everyone to group 0.

    Returns:
        Probabilities (8, 3), and g's image (8,).
    """
    group = torch.tensor([0.7, 0.3], dtype=torch.float64)
    city = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    mode = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 0]]).flatten()
    label = torch.nn.functional.one_hot(mode, 3) * 0.55 + 0.15
    law = torch.outer(group, city).reshape(8, 1) * label
    return law, torch.arange(8) % 4


def erasing(config: Erasing, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Erase the group: bounds where the theorem speaks, success everywhere."""
    generator = make_generator(seed, device)
    law, image = erasing_law()
    top = law.topk(2).values
    margin = float((top[:, 0] - top[:, 1]).min()) * (1 - 1e-9)  # A1 is strict
    tables = Tables(law, law)  # every row is where it is
    found = {}
    shape = (config.repetitions, len(config.shares))
    shares = torch.tensor(config.shares, dtype=torch.float64)
    for size in config.population_sizes:
        n = (shares * size).round().expand(shape)
        members = draw_tables(tables, n, generator=generator).inside
        rest = draw_tables(tables, size - n, generator=generator).inside
        test = draw_tables(
            tables, torch.full(shape, config.test_size), generator=generator
        )
        written = predict(members)[..., image]
        label = predict(rest + relabelled(Tables(members, members), written))
        reached = success(label[..., image] == label, test)
        alone = predict(rest + members)
        before = success(alone[..., image] == alone, test)
        bounds = {}
        for kind in ("hoeffding", "exact"):
            bound = erasing_certificate(
                members,
                image,
                margin=margin,
                concentration=kind,
                **_settings(config) | {"population_size": size},
            ).value
            bounds[kind] = {
                "mean": bound.mean(0).tolist(),
                "violations": int((bound > reached).sum()),
            }
        found[str(size)] = {
            "before": float(before.mean()),
            "success": reached.mean(0).tolist(),
            **bounds,
        }
    return {"share": list(config.shares), "margin": margin, "sizes": found}


def _draw_cars(
    config: Planting | Unplanting, *, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    generator = make_generator(seed, device)
    return sample_cars(config.population_size + config.test_size, generator=generator)


def _prefixes(
    signal: SignalMap, x: Tensor, y: Tensor, sizes, config: Any
) -> tuple[Tables, Tables]:
    """Tables of every prefix and of the whole population (last), and of the test."""
    end = config.population_size
    counts = count_tables(signal, x[:end], y[:end], num_labels=4, at=[*sizes, end])
    last = end + config.test_size
    return counts, count_tables(signal, x[end:last], y[end:last], num_labels=4)


def _settings(config: Any) -> dict[str, Any]:
    return {
        "population_size": getattr(config, "population_size", None),
        "test_size": config.test_size,
        "delta": config.delta,
    }


def _sweep(
    counts: Tables,
    test: Tables,
    label: int,
    config: Any,
    *,
    law: Tables | None = None,
    population_size: int | None = None,
) -> dict[str, Any]:
    """Plant one label at every sweep point: bounds, success, first shares over 0.9."""
    settings = _settings(config) | {"target": label}
    settings["population_size"] = population_size or config.population_size
    members, rest = counts[:-1], counts[-1] - counts[:-1]
    shares = members.size / settings["population_size"]
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
        found["law_success"] = float(cracking_share(law, target=label).max())
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
    """Worst frequency of a violation over the shares, and the closest approach."""
    violated = (bound > reached).double().mean(0)
    found.setdefault(kind, {})[f"{goal}, N={size:,}"] = {
        "violated": float(violated.max()),
        "closest": float((reached - bound).min()),
    }


EXPERIMENTS = {
    "planting": Experiment(
        planting, laptop=Planting(), summary="figure 1: plant each label"
    ),
    "populations": Experiment(
        populations, laptop=Populations(), summary="figure 2: three populations"
    ),
    "unplanting": Experiment(
        unplanting, laptop=Unplanting(), summary="figure 3: move away from a label"
    ),
    "coverage": Experiment(
        coverage,
        laptop=Coverage(),
        paper=Coverage(repetitions=10_000),
        summary="how often a bound is violated",
    ),
    "bands": Experiment(
        bands,
        laptop=Bands(),
        paper=Bands(repetitions=1_000, step=500),
        summary="figure 1 with its spread over populations",
    ),
    "flights": Experiment(flights, laptop=Flights(), summary="planting on real flights"),
    "platforms": Experiment(
        platforms,
        laptop=Platforms(),
        paper=Platforms(population_size=1_000_000, test_size=100_000),
        summary="linear and neural platforms, cars",
    ),
    "flight-platforms": Experiment(
        flight_platforms,
        laptop=Platforms(),
        paper=Platforms(population_size=300_000, test_size=36_000),
        summary="linear and neural platforms, real flights",
    ),
    "erasing": Experiment(erasing, laptop=Erasing(), summary="erase a group"),
}
