"""The chapter's pictures: neighbourhoods, errors by seed, forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from icml25.core import COLORS
from icml25.timefilter.graph import region_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What the models are called on the page.
LABELS = {
    "T": "channels alone (T)",
    "S+T+ST": "all mixed (S+T+ST)",
    "S": "spatial only (S)",
    "routed": "routed, as released",
    "repaired": "routed, repaired",
    "DLinear": "DLinear",
    "NLinear": "NLinear",
    "RLinear": "RLinear",
}
MODEL_COLORS = {
    "T": COLORS["orange"],
    "S+T+ST": COLORS["yellow"],
    "S": COLORS["green"],
    "routed": COLORS["method"],
    "repaired": COLORS["sky"],
}
_REGION_COLORS = (COLORS["green"], COLORS["orange"], COLORS["pink"], COLORS["ink"])
_REGION_WORDS = (
    "S: same patch,\nother channel",
    "T: same channel,\nother patch",
    "ST: the rest",
    "the token itself",
)


def draw_regions(
    ax: Axes, channels: int, patches: int, token: int, *, legend: bool = True
) -> None:
    """All tokens on a grid of channels and patches, coloured by kind to one token."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    kinds = region_map(channels, patches)[token].view(channels, patches)
    ax.pcolormesh(
        kinds.numpy(),
        cmap=ListedColormap(_REGION_COLORS),
        vmin=0,
        vmax=3,
        edgecolors="white",
        linewidth=3,
        alpha=0.9,
    )
    _grid_axes(ax, [f"channel {c}" for c in range(channels)], patches)
    if legend:
        handles = [
            Patch(color=color, label=word)
            for color, word in zip(_REGION_COLORS, _REGION_WORDS, strict=True)
        ]
        ax.legend(
            handles=handles,
            loc="center left",
            bbox_to_anchor=(1.02, 0.5),
            handlelength=1,
        )


def draw_neighbourhood(
    ax: Axes,
    row: Sequence[float],
    names: Sequence[str],
    *,
    token: int,
    answer: int | None = None,
    top: float | None = None,
) -> None:
    """One token's weights on the grid of channels and patches.

    The token is framed in black and, where given, the token that holds the answer in
    orange.
    """
    from matplotlib.patches import Rectangle

    grid = np.asarray(row, dtype=float).reshape(len(names), -1)
    patches = grid.shape[1]
    ax.pcolormesh(
        grid, cmap="Blues", vmin=0, vmax=top or grid.max(), edgecolors="#E4E7EB"
    )
    _grid_axes(ax, names, patches)
    frames = [(token, COLORS["ink"])]
    frames += [] if answer is None else [(answer, COLORS["orange"])]
    for at, color in frames:
        place = (at % patches + 0.06, at // patches + 0.06)
        box = Rectangle(place, 0.88, 0.88, fill=False, lw=2.2, color=color)
        ax.add_patch(box)


def _grid_axes(ax: Axes, names: Sequence[str], patches: int) -> None:
    ax.set_aspect("equal")
    ax.invert_yaxis()
    ax.set_yticks(np.arange(len(names)) + 0.5, names)
    ax.set_xticks(np.arange(patches) + 0.5, [str(p) for p in range(patches)])
    ax.set_xlabel("patch")
    ax.tick_params(length=0)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)


def draw_seeds(
    ax: Axes, errors: Mapping[str, Sequence[float]], *, label: str = "test MSE"
) -> None:
    """One row a model: a dot a seed, a bar at the mean; names beside the axis."""
    names = list(errors)
    for at, name in enumerate(names):
        color = MODEL_COLORS.get(name, COLORS["baseline"])
        values = np.asarray(errors[name])
        ax.plot(values, np.full(len(values), at), "o", color=color, alpha=0.75, ms=6)
        ax.plot([values.mean()] * 2, [at - 0.32, at + 0.32], color=color, lw=2.5)
    ax.set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel(label)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def forecast_figure(
    past: Sequence[float],
    future: Sequence[float],
    forecast: Sequence[float],
    *,
    name: str,
    leader: Sequence[float] | None = None,
) -> Figure:
    """A channel's window, what came and what was forecast; above it the leader."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6.4, 2.6))
    hours = np.arange(-len(past), 0)
    ahead = np.arange(len(future))
    ax.axvspan(0, len(future) - 1, color="#F1F4F8", lw=0)
    if leader is not None:
        ax.plot(hours, leader, color=COLORS["pink"], lw=1, label="leader")
    ax.plot(hours, past, color=COLORS["baseline"], lw=1, label="follower, past")
    ax.plot(ahead, future, color=COLORS["ink"], lw=1.6, label="follower, what came")
    ax.plot(
        ahead,
        forecast,
        color=MODEL_COLORS.get(name, COLORS["method"]),
        lw=2.2,
        label="forecast",
    )
    ax.set(xlabel="hours from now", ylabel="z-score", title=LABELS.get(name, name))
    ax.legend(ncol=4, loc="upper left", bbox_to_anchor=(0, -0.22), handlelength=1.2)
    return figure
