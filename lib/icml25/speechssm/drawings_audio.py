"""The pictures of experiment C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from icml25.core.figures import COLORS

from .joins import ReadingTask
from .windows import join_distance, tokenize_long, window_bounds

__all__ = [
    "draw_similarity",
    "draw_spectrograms",
    "draw_strip",
    "strip_data",
]


def draw_spectrograms(
    mels: Mapping[str, Tensor], *, frame_rate: float = 100.0, width: float = 7.0
):
    """Log-mel frames, one panel under the other, on one scale.

    Args:
        mels: title -> (T, M) frames.
        frame_rate: frames a second.
        width: of the figure in inches.

    Returns:
        The figure.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(mels),
        1,
        figsize=(width, 1.5 * len(mels) + 0.4),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    high = max(float(m.max()) for m in mels.values())
    for ax, (title, mel) in zip(axes[:, 0], mels.items(), strict=True):
        ax.imshow(
            mel.T.cpu().numpy(),
            origin="lower",
            aspect="auto",
            cmap="magma",
            vmin=high - 14,
            vmax=high,
            extent=(0, len(mel) / frame_rate, 0, mel.shape[1]),
            interpolation="nearest",  # sharp cells also make a small file
        )
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_ylabel("mel band")
        ax.grid(False)
    axes[-1, 0].set_xlabel("time (s)")
    return figure


def strip_data(
    task: ReadingTask, *, window: int, overlap: int, reading: int = 0, length: int = 700
) -> dict[str, Tensor]:
    """Which tokens of a reading differ from tokenising it whole.

    Args:
        task: readings and tokeniser, from ``prepare_reading``.
        window, overlap: in tokens.
        reading: number of the long reading.
        length: tokens shown.

    Returns:
        ``differs`` (length,) bool, ``cuts`` positions of the joins, and the share of
        agreement ``overall`` and ``at_join`` of this reading.
    """
    mel = task.long_mels[reading]
    whole = task.tokenizer.encode(mel)
    ids = tokenize_long(mel, task.tokenizer, window=window, overlap=overlap)
    bounds = window_bounds(len(ids), window=window, overlap=overlap)
    differs = ids != whole
    edge = join_distance(bounds) <= 1
    return {
        "differs": differs[:length],
        "cuts": torch.tensor([w.keep_from for w in bounds[1:] if w.keep_from < length]),
        "overall": (~differs).float().mean(),
        "at_join": (~differs)[edge].float().mean(),
    }


def draw_strip(data: Mapping[str, Tensor], *, title: str = "", width: float = 7.0):
    """Tokens that differ as dark marks, joins as lines above and below the strip."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(width, 1.3), layout="constrained")
    count = len(data["differs"])
    ax.imshow(
        data["differs"][None].float().numpy(),
        aspect="auto",
        cmap="Greys",
        vmin=0,
        vmax=1.15,
        extent=(0, count / 25, 0, 1),
        interpolation="nearest",
    )
    for cut in data["cuts"].tolist():
        ax.plot([cut / 25] * 2, [0, 1.25], color=COLORS["method"], clip_on=False)
    ax.set_yticks([])
    ax.set_ylim(0, 1)
    ax.grid(False)
    ax.set_xlabel("time (s)")
    ax.set_title(title, loc="left", fontsize=9, pad=12)
    return figure


def draw_similarity(result: Mapping[str, Any], *, width: float = 5.5):
    """Cosine to the prompt's voice over time, from ``run_voices``."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(width, 2.8), layout="constrained")
    styles = {
        "real": ("the reader", "black", ":"),
        "own": ("decoded with the prompt", COLORS["method"], "-"),
        "none": ("decoded without", COLORS["baseline"], "-"),
    }
    for name, (label, color, line) in styles.items():
        curve = result["similarity"][name]
        times = [result["span_s"] * (i + 0.5) for i in range(len(curve))]
        ax.plot(times, curve, line, color=color, marker="o", ms=3, label=label)
    ax.axhline(result["others"]["own"], color="black", lw=0.8, ls="--")
    ax.text(0, result["others"]["own"], "to other readers", va="bottom", fontsize=8)
    ax.set_xlabel("time after the prompt (s)")
    ax.set_ylabel("cosine to the prompt's voice")
    ax.set_xlim(left=0)
    ax.set_ylim(min(0, result["others"]["own"] - 0.05), 1.2)
    ax.legend(fontsize=8, ncols=3, loc="upper left")
    return figure
