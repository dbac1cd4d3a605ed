"""The experiments of the chapter."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from icml25.core import Experiment
from icml25.timefilter.model import TimeFilter
from icml25.timefilter.released import DATASETS, SETTINGS, Config
from icml25.timefilter.series import (
    Series,
    Split,
    airports,
    benchmark,
    chronological_split,
    lead_lag,
    sliding_windows,
)
from icml25.timefilter.training import Trained, predict, train

#: Hourly weather, one day ahead from four: the common base of the small experiments.
SMALL = Config(
    data="airports",
    horizon=24,
    patch_len=24,
    dim=64,
    dim_ff=128,
    num_layers=1,
    dropout=0.2,
    lr=1e-3,
    batch_size=64,
    epochs=5,
    mask="minus_inf",  # fixed filters: nothing from a closed edge
)
AIRPORTS = replace(
    SMALL,
    lr=2e-3,
    stride=2,
    models=(
        "T",
        "S+T+ST",
        "S",
        "routed",
        "repaired",
        "DLinear",
        "NLinear",
        "RLinear",
    ),
)
LEAD_LAG = replace(
    SMALL,
    models=("T", "S+T+ST", "S", "routed", "repaired"),
    dropout=0.1,
    lr=4e-3,
    stride=2,
)
LEAD_LAG_ETTH1 = replace(LEAD_LAG, data="ETTh1")
BENCHMARK = replace(
    SMALL,
    stride=2,
    data="ETTh1",
    models=("routed", "T", "S+T+ST", "S", "DLinear", "NLinear", "RLinear"),
    horizon=96,
    patch_len=16,
    dropout=0.3,
    epochs=4,
)
#: What linear models need to converge: they are cheap, so they get it.
LINEAR_BUDGET = {
    "models": ("DLinear", "NLinear", "RLinear"),
    "lr": 2e-3,
    "epochs": 10,
    "stride": 1,
}


def load(config: Config) -> Split:
    """The split series a configuration asks for.

    Raises:
        ValueError: an unknown data set, or one whose file is not there.
    """
    series = airports() if config.data == "airports" else benchmark(config.data)
    return _split(series, config)


def load_lead_lag(config: Config) -> Split:
    """Two leaders, their followers 24 and 48 rows late, and other channels.

    From ETTh1 HUFL and MUFL lead; from the airports the wind speed and the temperature
    of EWR lead.
    """
    if config.data == "airports":
        series = airports()
        names = "EWR wind_speed", "EWR temp", "JFK pressure"
    else:
        series = benchmark(config.data)
        names = "HUFL", "MUFL", "LUFL", "LULL", "OT"
    if missing := [name for name in names if name not in series.names]:
        raise ValueError(
            f"data={config.data!r} has no channel {missing[0]!r}; lead-lag data is "
            "made from airports, ETTh1 or ETTh2"
        )
    first, second, *others = (series.names.index(name) for name in names)
    made = lead_lag(series, leaders=(first, second), lags=(24, 48), others=others)
    return _split(made, config)


def _split(series: Series, config: Config) -> Split:
    known = DATASETS.get(config.data)
    return chronological_split(
        series,
        lookback=config.lookback,
        horizon=config.horizon,
        rows=known.rows if known else None,
        fractions=known.fractions if known else (0.7, 0.2),
    )


def compare(config: Config, *, device: Any, seed: int) -> dict[str, Any]:
    """Train every model of the configuration on one data set.

    Returns:
        Test MSE of the last epoch by model, and of repeating the last value or the last
        day; under ``models`` everything else.
    """
    split = load(config).to(device)
    trained = {name: train(name, split, config, seed=seed) for name in config.models}
    return _metrics(trained) | _naive(split, config)


def compare_lead_lag(config: Config, *, device: Any, seed: int) -> dict[str, Any]:
    """Train every model where a follower's future stands in its leader's recent past.

    Returns:
        As :func:`compare`; under ``models`` also what :func:`follower` finds.
    """
    split = load_lead_lag(config).to(device)
    trained = {name: train(name, split, config, seed=seed) for name in config.models}
    metrics = _metrics(trained)
    for name, done in trained.items():
        metrics["models"][name] |= follower(done, split, config)
    return metrics


def follower(done: Trained, split: Split, config: Config) -> dict[str, float]:
    """What a model makes of the first follower, whose answer is in one known token.

    The leader's last patch is the follower's next day. The last patch of the follower
    sees it over a spatial edge, its earlier patches over spatial-temporal ones.

    Returns:
        ``follower_mse``: test MSE of channel 1. For a graph model also
        ``answer_weight``: the mean weight of that token at the follower's patch that
        listens to it most, over heads and windows; ``answer_open``: the share of
        (head, window) in which at least one of those edges is open.
    """
    forecast, truth = predict(done.model, split.test, config)
    found = {"follower_mse": (forecast - truth)[..., 1].square().mean().item()}
    if isinstance(done.model, TimeFilter):
        weights, gates = first_filter(done.model, split.test, config)
        patches = done.model.patches
        own = slice(patches, 2 * patches)
        found["answer_weight"] = (
            weights[:, :, own, patches - 1].mean((0, 1)).max().item()
        )
        spatial, later = gates[:, :, 2 * patches - 1, 0], gates[:, :, own, 2][..., :-1]
        is_open = (spatial > 0.5) | (later > 0.5).any(-1)
        found["answer_open"] = is_open.double().mean().item()
    return found


@torch.no_grad()
def first_filter(
    model: TimeFilter, rows: Tensor, config: Config
) -> tuple[Tensor, Tensor]:
    """Weights ``(W, H, L, L)`` and gates ``(W, H, L, 3)`` of the first layer.

    For every twentieth window of ``rows``, at most 32.
    """
    model.eval()
    x = sliding_windows(rows, config.lookback, config.horizon)[::20][:32]
    x = x[:, : config.lookback]
    mean = x.mean(1, keepdim=True)
    spread = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    block = model.blocks[0]
    found = block.graph.weights(block.norm_graph(model.tokens((x - mean) / spread)))
    return found.weights, found.gates


def _metrics(trained: dict[str, Trained]) -> dict[str, Any]:
    metrics: dict[str, Any] = {name: done.last["mse"] for name, done in trained.items()}
    metrics["models"] = {
        name: {
            key: value
            for key, value in asdict(replace(done, model=None)).items()
            if key != "model"
        }
        for name, done in trained.items()
    }
    return metrics


def _naive(split: Split, config: Config) -> dict[str, float]:
    windows = sliding_windows(split.test, config.lookback, config.horizon)
    past, future = windows.split((config.lookback, config.horizon), 1)
    day = past[:, -24:].repeat(1, -(-config.horizon // 24), 1)[:, : config.horizon]
    return {
        "last value": (past[:, -1:] - future).square().mean().item(),
        "last day": (day - future).square().mean().item(),
    }


EXPERIMENTS = {
    "leadlag": Experiment(
        compare_lead_lag, LEAD_LAG, summary="followers of known leaders, on weather"
    ),
    "leadlag-etth1": Experiment(
        compare_lead_lag, LEAD_LAG_ETTH1, summary="the same on ETTh1"
    ),
    "airports": Experiment(
        compare, AIRPORTS, summary="weather of three airports, by filter"
    ),
    "airports-linear": Experiment(
        compare,
        replace(AIRPORTS, **LINEAR_BUDGET),
        summary="linear models on the airports, ten epochs",
    ),
    "leadlag-long": Experiment(
        compare_lead_lag,
        replace(LEAD_LAG, epochs=10, models=("S+T+ST", "S", "routed", "repaired")),
        summary="followers of known leaders, twice the epochs",
    ),
    "ETTh1-96-linear": Experiment(
        compare,
        replace(BENCHMARK, **LINEAR_BUDGET),
        summary="linear models on ETTh1, ten epochs",
    ),
    "ETTh2-96-linear": Experiment(
        compare,
        replace(BENCHMARK, data="ETTh2", **LINEAR_BUDGET),
        summary="linear models on ETTh2, ten epochs",
    ),
    "exchange-96": Experiment(
        compare,
        replace(BENCHMARK, data="exchange_rate"),
        summary="exchange rates, nearly a random walk",
    ),
    "exchange-96-linear": Experiment(
        compare,
        replace(BENCHMARK, data="exchange_rate", **LINEAR_BUDGET),
        summary="linear models on exchange rates, ten epochs",
    ),
} | {
    name: Experiment(
        compare,
        replace(BENCHMARK, data=setting.data, horizon=setting.horizon),
        paper=setting,
        summary="small models; paper scale is the released setting",
    )
    for name, setting in SETTINGS.items()
}
