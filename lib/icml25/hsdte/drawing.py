"""Pictures of embedded trees and of the bits that hold them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icml25.core import COLORS
from icml25.hsdte.arithmetic import BITS
from icml25.hsdte.distances import AncestorViews
from icml25.hsdte.embedding import TreeEmbedding, embed_tree
from icml25.hsdte.expansion import max_radius
from icml25.hsdte.sphere import rankin_angle, smallest_angle
from icml25.hsdte.trees import RootedTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["angle_figure", "bits_figure", "draw_disc", "error_figure", "planar_figure"]

_HUES = [
    COLORS[name] for name in ("method", "orange", "green", "pink", "yellow", "sky")
]


def geodesics(x: Tensor, y: Tensor, steps: int) -> Tensor:
    """Points on the geodesic arcs of the disc: ``(k, 2), (k, 2) -> (k, steps, 2)``."""
    # A picture has no use for the last digits; they would only divide by zero.
    rim = [p * (0.999999 / p.norm(dim=-1, keepdim=True)).clamp_max(1) for p in (x, y)]
    a, b = (torch.view_as_complex(p.contiguous()) for p in rim)
    w = (b - a) / (1 - a.conj() * b)
    size = w.abs().clamp_min(1e-300)
    along = torch.linspace(0, 1, steps, dtype=torch.float64)
    step = (w / size)[:, None] * (along * size.atanh()[:, None]).tanh()
    a = a[:, None]
    return torch.view_as_real((step + a) / (1 + a.conj() * step))


def _branch(tree: RootedTree) -> Tensor:
    """Which child of the root each node hangs on, -1 for the root; largest first."""
    top = torch.full((len(tree),), -1)
    first = tree.levels[1]
    order = torch.argsort(tree.subtree_size[first], descending=True, stable=True)
    top[first] = torch.argsort(order)
    for level in tree.levels[2:]:
        top[level] = top[tree.parent[level]]
    return top


def draw_disc(
    ax: Axes,
    embedded: TreeEmbedding,
    *,
    labels: dict[int, str] | None = None,
    steps: int = 12,
) -> None:
    """Draw a tree of the plane in the Poincare disc, its edges as geodesic arcs.

    Args:
        ax: where.
        embedded: an embedding with ``d = 2``; nodes that are not finite are left out.
        labels: names by node, written beside the node.
        steps: points per arc.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle

    tree = embedded.tree
    x = embedded.points.to_float(torch.float64)
    fine = x.isfinite().all(1) & (x.norm(dim=1) <= 1)
    child = torch.arange(1, len(tree))
    child = child[fine[1:] & fine[tree.parent[1:]]]
    branch = _branch(tree)
    hue = [_HUES[i % len(_HUES)] for i in branch[child].tolist()]
    depth = torch.zeros(len(tree))
    for number, level in enumerate(tree.levels):
        depth[level] = number
    width = 1.8 * 0.72 ** depth[child]
    arcs = geodesics(x[tree.parent[child]], x[child], steps)
    ax.add_patch(Circle((0, 0), 1, facecolor="#F7F9FB", edgecolor="#9AA5B1"))
    ax.add_collection(LineCollection(arcs.numpy(), colors=hue, linewidths=width))
    ax.scatter(
        *x[child].T, s=14 * 0.6 ** depth[child].numpy(), c=hue, linewidths=0, zorder=3
    )
    ax.scatter(*x[0], s=26, color=COLORS["ink"], zorder=4)
    for node, name in (labels or {}).items():
        place = x[node] / x[node].norm()
        side = "left" if place[0] > 0 else "right"
        ax.text(*(1.04 * place), name, ha=side, va="center", fontsize=8.5)
    ax.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal")
    ax.axis("off")


def planar_figure(tree: RootedTree, tau: float, terms: int) -> Figure:
    """A tree in the disc, what became of its edges, and a gauge of the radius."""
    import matplotlib.pyplot as plt

    embedded = embed_tree(tree, 2, tau=tau, terms=terms, twist=False, strict=False)
    limit, radius = max_radius(terms), embedded.radius
    length = AncestorViews(tree, embedded.points).edge_lengths()[1:] / tau
    lost = ~length.isfinite()
    fig, (disc, right) = plt.subplots(
        1, 2, figsize=(5.9, 2.8), width_ratios=(1, 1.05), layout="constrained"
    )
    draw_disc(disc, embedded, steps=9)
    place = [
        number + 0.3 * torch.linspace(-1, 1, level.stop - level.start)
        for number, level in enumerate(tree.levels[1:], 1)
    ]
    right.axhline(1, color=COLORS["baseline"], linewidth=1)
    right.plot(
        torch.cat(place)[~lost],
        length[~lost].clamp(0, 2.2),
        ".",
        color=COLORS["method"],
    )
    right.set(
        xlabel="level of the edge",
        ylabel="its length in the ball / τ",
        ylim=(-0.1, 2.3),
        xticks=range(1, len(tree.levels)),
    )
    colour = COLORS["green"] if radius <= limit - 3 else COLORS["orange"]
    state = rf"$R$ = {radius:.0f} of $R_{{\max}}$ = {limit:.0f} nats"
    right.set_title(state, color=colour)
    if radius <= limit - 1:
        report = embedded.report()
        words = (
            rf"$D_{{ave}}$ = {report.d_ave:.3f}"
            + "\n"
            + rf"$D_{{wc}}$ = {report.d_wc:.3f}"
        )
    else:
        words = (
            f"past the limit: the drawing\nis noise, {int(lost.sum())} edges are lost"
        )
    right.text(0.97, 0.95, words, transform=right.transAxes, ha="right", va="top")
    return fig


def angle_figure(points: Tensor, tau: float) -> Figure:
    """All pairwise angles of some unit vectors, and what they cost a tree.

    The tree is two levels deep and uses the vectors at every node, the first of them
    towards the parent; its longest paths turn at three nodes.
    """
    import matplotlib.pyplot as plt

    count, dim = points.shape
    pair = torch.triu_indices(count, count, 1)
    cosine = (points @ points.T)[pair[0], pair[1]].clamp(-1, 1)
    worst = float(smallest_angle(points))
    loss = -((1 - points @ points.T) / 2).clamp_min(1e-30).log() / 2
    loss.fill_diagonal_(-math.inf)  # of a corner between two directions
    up, side = float(loss[0, 1:].max()), float(loss[1:, 1:].max())
    # Over the root from leaf to leaf or from leaf to child, and then one corner alone.
    predicted = 2 / tau * max((2 * up + side) / 4, (up + side) / 3, up / 2, side / 2)
    tree = RootedTree.balanced(count - 1, 2)
    table = {1: points[:1], count - 1: points[1:], count: points}
    embedded = embed_tree(tree, dim, tau=tau, points=table, twist=False)
    measured = embedded.report().d_max
    fig, ax = plt.subplots(figsize=(5.9, 2.5), layout="constrained")
    ax.hist(
        torch.rad2deg(cosine.acos()).numpy(),
        bins=range(0, 184, 4),
        color=COLORS["method"],
    )
    best = rankin_angle(count, dim)
    ax.axvline(best, color=COLORS["ink"], linestyle="--", linewidth=1)
    ax.axvline(worst, color=COLORS["orange"])
    ax.set(
        xlabel="angle between two directions (degrees)", ylabel="pairs", xlim=(0, 180)
    )
    ax.text(
        0.01,
        0.97,
        f"smallest {worst:.0f}° (orange)\nRankin's bound {best:.0f}° (dashed)\n"
        f"largest error, law: {predicted:.3f}\n"
        f"measured: {measured:.3f}",
        transform=ax.transAxes,
        va="top",
        fontsize=8.5,
    )
    return fig


def bits_figure(radius: float, terms: int = 4) -> Figure:
    """The binary digits of a point's norm, cut into the bits of each component.

    The errors are those of the norm rounded to the digits shown so far: what a generic
    coordinate gets. A lucky number, with a gap between its components, gets more.
    """
    import matplotlib.pyplot as plt
    import mpmath

    bits = BITS[torch.float64]
    total = bits * terms
    with mpmath.workprec(total + 200):
        norm = mpmath.tanh(mpmath.mpf(radius) / 2)
        digits = int(mpmath.floor(norm * mpmath.mpf(2) ** total))
        string = [(digits >> (total - 1 - i)) & 1 for i in range(total)]
        exact = 1 - norm
        error = []
        for t in range(1, terms + 1):
            unit = mpmath.mpf(2) ** (-bits * t)
            error.append(float(abs(mpmath.nint(norm / unit) * unit - norm) / exact))
    fig, ax = plt.subplots(figsize=(6.6, 1.5 + 0.1 * terms), layout="constrained")
    names = ("method", "orange", "green", "pink")
    for i, bit in enumerate(string):
        row, column = divmod(i, bits)
        hue = COLORS[names[row % 4]]
        ax.add_patch(
            plt.Rectangle(
                (column, -row),
                0.9,
                0.8,
                facecolor=hue if bit else "#FFFFFF",
                edgecolor=hue,
                linewidth=0.4,
            )
        )
    for row in range(terms):
        shown = f"{error[row]:.0e}" if error[row] < 0.5 else "all of it"
        ax.text(-1, 0.4 - row, f"bits to {bits * (row + 1)}", ha="right", va="center")
        ax.text(
            bits + 1, 0.4 - row, f"1 − |x| off by {shown}", va="center", fontsize=8.5
        )
    ax.set(xlim=(-11, bits + 22), ylim=(-terms + 0.8, 1))
    ax.axis("off")
    ones = next((i for i, bit in enumerate(string) if not bit), total)
    ax.set_title(f"R = {radius:g} nats: the norm begins with {ones} ones")
    return fig


def error_figure(reports: dict[str, TreeEmbedding], vmax: float = 0.5) -> Any:
    """Relative errors of all pairs in depth-first order, one panel per embedding."""
    import matplotlib.pyplot as plt

    size = 1.1 + 2.75 * len(reports), 3.3
    fig, axes = plt.subplots(
        1, len(reports), figsize=size, layout="constrained", squeeze=False
    )
    for ax, (title, embedded) in zip(axes[0], reports.items(), strict=True):
        tree = embedded.tree
        order = torch.argsort(tree.depth_first)
        target = (embedded.tau * tree.distances()).fill_diagonal_(1)
        error = (1 - embedded.distances() / target).fill_diagonal_(0)
        image = ax.imshow(
            error[order][:, order].clamp_min(0),
            cmap=plt.get_cmap("Blues", 10),  # few colours make small files
            interpolation="nearest",
            vmin=0,
            vmax=vmax,
        )
        ax.set(title=title, xticks=[], yticks=[], xlabel="nodes, depth first")
        ax.grid(False)
    fig.colorbar(image, ax=axes[0].tolist(), label="relative error", shrink=0.8)
    return fig
