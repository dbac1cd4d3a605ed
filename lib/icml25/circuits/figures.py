"""Circuits drawn on the grid of a model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from icml25.core import COLORS

from .graph import CircuitGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _places(graph: CircuitGraph) -> list[tuple[float, float]]:
    """Where each node stands: layers rise, heads to the left, the MLP to the right."""
    width = graph.num_heads + 1
    middle = (width - 1) / 2
    places = [(middle, -1.0)]
    for layer in range(graph.num_layers):
        places += [(float(head), float(layer)) for head in range(graph.num_heads)]
        places.append((graph.num_heads + 0.2, float(layer)))
    return [*places, (middle, float(graph.num_layers))]


def draw_circuit(
    ax: Axes,
    graph: CircuitGraph,
    circuits: list[tuple[Tensor, str]],
    *,
    weights: Tensor | None = None,
) -> None:
    """Draw circuits as curves between the nodes of a layer grid (q, k, v merged).

    Args:
        ax: where to draw.
        graph: the model's graph.
        circuits: (mask ``[U, V]`` or merged ``[U, U + 1]``, colour), drawn in order.
        weights: ``[U, V]`` scores; an edge's width grows with the root of its size.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path

    places = _places(graph)
    merged = [
        (graph.merge_qkv(mask) if mask.shape == graph.mask.shape else mask, colour)
        for mask, colour in circuits
    ]
    size = None if weights is None else graph.merge_qkv(weights.cpu()).abs().sqrt()
    touched = torch.zeros(len(graph.nodes), dtype=torch.bool)
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    for mask, colour in merged:
        paths, widths = [], []
        top = 1.0 if size is None or not mask.any() else size[mask].max().item()
        for u, v in mask.nonzero().tolist():
            (x0, y0), (x1, y1) = places[u], places[v]
            bend = 0.45 * (y1 - y0)
            paths.append(
                Path([(x0, y0), (x0, y0 + bend), (x1, y1 - bend), (x1, y1)], codes)
            )
            widths.append(1.0 if size is None else 0.4 + 2.4 * size[u, v].item() / top)
            touched[u] = touched[v] = True
        ax.add_collection(
            PathCollection(
                paths, facecolor="none", edgecolor=colour, linewidth=widths, alpha=0.6
            )
        )
    for index, (x, y) in enumerate(places):
        name = graph.nodes[index]
        is_on = bool(touched[index])
        ax.text(
            x,
            y,
            {"i": "input", "l": "logits", "m": "MLP"}.get(
                name[0], name.partition(".")[2]
            ),
            ha="center",
            va="center",
            fontsize=8,
            color=COLORS["ink"] if is_on else "#9AA5B1",
            bbox={
                "boxstyle": "round,pad=0.25",
                "facecolor": "white",
                "edgecolor": COLORS["ink"] if is_on else "#D5DBE1",
            },
        )
    ax.set(
        xlim=(-0.6, graph.num_heads + 0.8),
        ylim=(-1.4, graph.num_layers + 0.4),
        xticks=[],
        yticks=range(graph.num_layers),
        yticklabels=[f"layer {layer}" for layer in range(graph.num_layers)],
    )
    ax.grid(visible=False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0)
