"""Every experiment of the chapter by name."""

from __future__ import annotations

from icml25.collusion import beyond, figures
from icml25.core.runtime import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = {
    "planting": Experiment(
        figures.planting,
        laptop=figures.Planting(),
        summary="figure 1: plant each label",
    ),
    "populations": Experiment(
        figures.populations,
        laptop=figures.Populations(),
        summary="figure 2: three populations",
    ),
    "unplanting": Experiment(
        figures.unplanting,
        laptop=figures.Unplanting(),
        summary="figure 3: move away from a label",
    ),
    "coverage": Experiment(
        figures.coverage,
        laptop=figures.Coverage(),
        paper=figures.Coverage(repetitions=10_000),
        summary="how often a bound is violated",
    ),
    "bands": Experiment(
        figures.bands,
        laptop=figures.Bands(),
        paper=figures.Bands(repetitions=1_000, step=500),
        summary="figure 1 with its spread over populations",
    ),
    "flights": Experiment(
        beyond.flights, laptop=beyond.Flights(), summary="planting on real flights"
    ),
    "platforms": Experiment(
        beyond.platforms,
        laptop=beyond.Platforms(),
        paper=beyond.Platforms(population_size=1_000_000, test_size=100_000),
        summary="platforms that learn, cars",
    ),
    "flight-platforms": Experiment(
        beyond.flight_platforms,
        laptop=beyond.Platforms(),
        paper=beyond.Platforms(population_size=300_000, test_size=36_000),
        summary="platforms that learn, real flights",
    ),
    "erasing": Experiment(
        beyond.erasing, laptop=beyond.Erasing(), summary="erase a group"
    ),
}
