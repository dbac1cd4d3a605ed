"""The thirteen data sets' settings of the authors' scripts, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Dataset:
    """A public data set and how it is split.

    The release scales each part of the PEMS sets, test rows included, by its own
    statistics and tests every twelfth window. Here every set is scaled by its training
    rows, so published PEMS errors do not compare.

    Attributes:
        channels: number of channels.
        file: usual file name.
        source: where it is distributed.
        rows: training, validation, test rows, or ``None`` for fractions.
        fractions: training and test share.
    """

    channels: int
    file: str
    source: str
    rows: tuple[int, int, int] | None = None
    fractions: tuple[float, float] = (0.7, 0.2)


_HOURS = (12 * 30 * 24, 4 * 30 * 24, 4 * 30 * 24)
_QUARTERS = tuple(4 * rows for rows in _HOURS)
_ETT = "github.com/zhouhaoyi/ETDataset"
_BUNDLE = "the iTransformer data bundle"
DATASETS = {
    "ETTh1": Dataset(7, "ETTh1.csv", _ETT, _HOURS),
    "ETTh2": Dataset(7, "ETTh2.csv", _ETT, _HOURS),
    "ETTm1": Dataset(7, "ETTm1.csv", _ETT, _QUARTERS),
    "ETTm2": Dataset(7, "ETTm2.csv", _ETT, _QUARTERS),
    "Weather": Dataset(21, "weather.csv", _BUNDLE),
    "ECL": Dataset(321, "electricity.csv", _BUNDLE),
    "Traffic": Dataset(862, "traffic.csv", _BUNDLE),
    "Solar": Dataset(137, "solar_AL.txt", _BUNDLE),
    "Climate": Dataset(1763, "climate", "not stated in the authors' repository"),
    "PEMS03": Dataset(358, "PEMS03.npz", _BUNDLE, None, (0.6, 0.2)),
    "PEMS04": Dataset(307, "PEMS04.npz", _BUNDLE, None, (0.6, 0.2)),
    "PEMS07": Dataset(883, "PEMS07.npz", _BUNDLE, None, (0.6, 0.2)),
    "PEMS08": Dataset(170, "PEMS08.npz", _BUNDLE, None, (0.6, 0.2)),
}


@dataclass(frozen=True)
class Config:
    """One training run; the defaults are the release's."""

    data: str = "ETTh1"  # a name of DATASETS, "exchange_rate" or "airports"
    models: tuple[str, ...] = ("routed",)  # see `build`
    lookback: int = 96  # T
    horizon: int = 96  # S
    patch_len: int = 16  # P
    dim: int = 128  # d
    dim_ff: int = 256
    num_heads: int = 4  # H
    num_layers: int = 2
    alpha: float = 0.1  # share of a row the k-nearest step removes
    top_p: float = 0.5  # 0 switches routing off
    positional: bool = True  # sinusoids over the token index
    dropout: float = 0.0
    mask: str = "zero"  # how fixed filters remove: "zero" (released) or "minus_inf"
    routing_weight: float = 0.05  # of the routing loss
    lr: float = 1e-4  # Adam, half a cosine down to zero
    batch_size: int = 32
    epochs: int = 10
    stride: int = 1  # between training windows


def _settings() -> dict[str, Config]:
    found: dict[str, Config] = {}

    def add(data: str, horizons: tuple[int, ...], suffix: str = "", **options) -> None:
        for horizon in horizons:
            name = f"{data}{suffix}-{horizon}"
            found[name] = replace(Config(data=data, horizon=horizon), **options)

    long, short = (96, 192, 336, 720), (12, 24, 48)
    off = {"top_p": 0.0}
    wide = {"dim": 512, "batch_size": 16, "lr": 1e-3}
    add("ETTh1", long[:3], patch_len=2, dropout=0.8, positional=False)
    add("ETTh1", (720,), patch_len=2, dim_ff=128, dropout=0.8, positional=False)
    add("ETTh2", (96,), patch_len=4, num_layers=1, dropout=0.8, **off)
    add("ETTh2", (192,), patch_len=4, num_layers=1, dropout=0.6, alpha=0.8)
    add("ETTh2", (336,), patch_len=8, dim=256, dropout=0.7, alpha=0.4, **off)
    add("ETTh2", (720,), patch_len=8, dim=256, dropout=0.3, alpha=0.9, **off)
    add("ETTm1", (96,), patch_len=8, dim=256, dropout=0.3, **off)
    add("ETTm1", (192, 336), patch_len=8, dim=256, dropout=0.5, **off)
    add("ETTm1", (720,), patch_len=16, dim=256, dropout=0.7, **off)
    add("ETTm2", long[:3], patch_len=16, dim_ff=128, dropout=0.6, **off)
    add("ETTm2", (720,), patch_len=16, dim_ff=128, dropout=0.8, **off)
    add("Weather", long, patch_len=48, dropout=0.3, lr=5e-4)
    add(
        "Weather",
        long,
        "-lookback720",
        lookback=720,
        patch_len=144,
        dim_ff=128,
        dropout=0.6,
    )
    ecl = {**wide, "dim_ff": 512, "epochs": 15}
    add("ECL", (96,), patch_len=32, dropout=0.5, **ecl)
    add("ECL", long[1:], patch_len=32, dropout=0.4, **ecl)
    add(
        "ECL",
        long,
        "-lookback512",
        lookback=512,
        patch_len=128,
        dropout=0.5,
        **ecl,
        **off,
    )
    traffic = {**wide, **off, "dim_ff": 2048, "num_layers": 3, "positional": False}
    traffic |= {"epochs": 30}
    add("Traffic", (96,), patch_len=96, dropout=0.3, **traffic)
    add("Traffic", long[1:], patch_len=96, dropout=0.5, **traffic)
    add(
        "Traffic",
        long,
        "-lookback720",
        lookback=720,
        patch_len=720,
        dropout=0.4,
        **traffic,
    )
    for horizons, dropout in (((96,), 0.2), ((192, 336), 0.3), ((720,), 0.6)):
        add(
            "Solar",
            horizons,
            patch_len=48,
            dim=256,
            dim_ff=512,
            dropout=dropout,
            lr=5e-4,
        )
    pems = {**wide, "patch_len": 48, "dim_ff": 1024, "dropout": 0.1, "epochs": 20}
    add("PEMS03", short, **pems, **off)
    add("PEMS04", short, **{**pems, "lr": 5e-4}, **off)
    add("PEMS07", short, **{**pems, "patch_len": 96}, **off)
    add("PEMS08", short, **{**pems, "dim_ff": 512})
    climate = {**wide, "lookback": 720, "patch_len": 720, "num_layers": 3}
    climate |= {"dropout": 0.3}
    add("Climate", (96, 192, 720), dim_ff=1024, **climate)
    add("Climate", (336,), dim_ff=2048, **climate)
    return found


#: Every setting of the authors' scripts by name, such as ``"ETTh1-96"``,
#: ``"ECL-lookback512-96"`` or ``"PEMS03-12"``.
SETTINGS = _settings()
