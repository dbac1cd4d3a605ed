"""Beyond the paper's figures: real flights, platforms that learn, erasing at work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icml25.collusion.cars import car_signal, sample_cars
from icml25.collusion.certificates import erasing_certificate, planting_certificate
from icml25.collusion.figures import POOR, prefix_tables, settings_of, sweep
from icml25.collusion.flights import FLIGHT_LABELS, load_flights
from icml25.collusion.limits import explaining_eps
from icml25.collusion.platforms import train_platform
from icml25.collusion.tables import (
    SignalMap,
    Tables,
    count_tables,
    draw_tables,
    predict,
    relabelled,
    success,
)
from icml25.core.runtime import make_generator, progress


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
    shares: tuple[float, ...] = (0.0, 0.02, 0.05, 0.08, 0.16)
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


def flights(config: Flights, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Planting each punctuality class on real flights, with both kinds of bound."""
    found = {}
    sizes = list(range(config.step, config.largest + 1, config.step))
    for free in ("weekday", "origin"):
        signal, x, y = load_flights(free)
        generator = make_generator(seed, device)
        order = torch.randperm(len(y), generator=generator, device=device)
        x, y = x.to(device)[order], y.to(device)[order]
        counts, test = prefix_tables(signal, x, y, sizes, config)
        found[free] = {
            "elements": signal.num_elements,
            "base_mass": float(counts[-1].inside.sum() / counts[-1].size),
            "labels": {
                name: sweep(counts, test, label, config)
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
                settings = settings_of(config) | {"target": target, "eps": eps}
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
    label = torch.nn.functional.one_hot(mode, 3).double() * 0.55 + 0.15
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
                **settings_of(config) | {"population_size": size},
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
