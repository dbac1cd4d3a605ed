"""Pictures of hypertrees: a branch is a fan over the set of children it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from icml25.core import COLORS
from icml25.hypertree.backends import Check
from icml25.hypertree.planner import Outline
from icml25.hypertree.tree import Hyperchain, HyperTree, Node
from icml25.hypertree.verify import Report

_PARTS = [COLORS[name] for name in ("method", "orange", "green", "pink", "yellow")]
_OFF = "#B8C2CC"


def short(node: Node) -> str:
    """A node's label without brackets and without what its parent says already."""
    text = node.label.strip("[]")
    if node.head == "Mode":
        return text.split(" from ")[0]
    return re.sub(r" to ", " → ", text) if node.head == "Leg" else text


def _text_width(text: str, size: float) -> float:
    """Inches."""
    if not text:
        return 0.0
    font = FontProperties(size=size)
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().x1) / 72


def _shown(tree: HyperTree, outline: Outline | None, steps: int | None) -> set[int]:
    if outline is None or steps is None:
        return set(range(len(tree)))
    grown = {0}
    for step in outline.steps[:steps]:
        grown.update(u for branch in step.branches for u in branch)
    return grown


def _part(tree: HyperTree, node: Node, by_part: bool) -> str:
    if not by_part:
        return COLORS["method"]
    path = tree.path(node.index)
    if len(path) < 2:
        return COLORS["ink"]
    siblings = [u for branch in tree.nodes[0].branches for u in branch]
    return _PARTS[siblings.index(path[1].index) % len(_PARTS)]


def _rows(tree: HyperTree, shown: set[int], gap: float) -> dict[int, float]:
    """Vertical places: leaves one row apart, alternatives a little more."""
    place: dict[int, float] = {}
    at = 0.0

    def visit(index: int) -> float:
        nonlocal at
        branches = [b for b in tree.nodes[index].branches if b[0] in shown]
        if not branches:
            place[index] = at
            at += 1
            return place[index]
        tops = []
        for i, branch in enumerate(branches):
            at += gap if i else 0.0
            tops += [visit(u) for u in branch]
        place[index] = (tops[0] + tops[-1]) / 2
        return place[index]

    visit(0)
    return place


def tree_figure(
    tree: HyperTree,
    *,
    chain: Hyperchain | None = None,
    outline: Outline | None = None,
    steps: int | None = None,
    label: Callable[[Node], str] = short,
    by_part: bool = True,
    row: float = 0.2,
    gap: float = 0.5,
    column: float = 0.5,
    size: float = 8.0,
    title: str = "",
    width: float | None = None,
    height: float | None = None,
) -> Any:
    """Draw a tree from left to right; a figure in inches.

    A fan is one branch: all its children are needed. Several fans at a node are
    alternatives; those outside ``chain`` are grey and dashed.

    Args:
        tree: what to draw.
        chain: the hyperchain in colour; default: everything.
        outline, steps: draw only what the first ``steps`` expansions made, the newest
            with a strong fan.
        label: the text at a node.
        by_part: one colour for each child of the root.
        row, gap, column: inches a leaf, rows between alternatives, inches between
            columns.
        size: points of the text.
        title: above the tree.
        width, height: at least so many inches, for frames of one size.
    """
    shown = _shown(tree, outline, steps)
    y = _rows(tree, shown, gap)
    on = set(chain.nodes) if chain else shown
    newest = -1
    if outline is not None and steps:
        newest = outline.steps[min(steps, len(outline.steps)) - 1].node
    nodes = [tree.nodes[i] for i in sorted(shown)]
    text = {node.index: label(node) for node in nodes}
    wide = {i: _text_width(t, size) + 0.12 for i, t in text.items()}
    left, x = [], 0.08
    for depth in range(max(node.depth for node in nodes) + 1):
        left.append(x)
        x += max(wide[n.index] for n in nodes if n.depth == depth) + column
    head = 0.34 if title else 0.1
    need = (max(y.values()) + 1) * row
    full = (max(width or 0.0, x - column + 0.08), max(height or 0.0, need + head))
    fig = plt.figure(figsize=full)
    fig.set_layout_engine("none")
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, full[0]), ylim=(full[1], 0))
    ax.axis("off")
    if title:
        ax.text(0.08, 0.17, title, weight="bold", size=9.5, va="center")
    top = head + (full[1] - head - need) / 2 + row / 2
    spot = {i: (left[tree.nodes[i].depth], top + v * row) for i, v in y.items()}
    for node in nodes:
        _fans(ax, tree, node, shown, on, newest, spot, wide, row, by_part)
    for node in nodes:
        px, py = spot[node.index]
        mine = node.index in on
        color = _part(tree, node, by_part) if mine else _OFF
        inner = bool(node.branches) and node.branches[0][0] in shown
        box = FancyBboxPatch(
            (px + 0.02, py - 0.075),
            wide[node.index] - 0.04,
            0.15,
            boxstyle="round,pad=0.02,rounding_size=0.07",
            facecolor=color if inner and mine else "white",
            edgecolor=color,
            linewidth=0.9,
            zorder=3,
        )
        ax.add_patch(box)
        ink = "white" if inner and mine else COLORS["ink"] if mine else "#7B8794"
        ax.text(
            px + wide[node.index] / 2,
            py,
            text[node.index],
            size=size,
            ha="center",
            va="center_baseline",
            color=ink,
            zorder=4,
        )
    return fig


def _fans(ax, tree, node, shown, on, newest, spot, wide, row, by_part):
    x0, y0 = spot[node.index][0] + wide[node.index], spot[node.index][1]
    for branch in node.branches:
        if branch[0] not in shown:
            continue
        mine = all(u in on for u in branch)
        fresh = node.index == newest
        x1 = spot[branch[0]][0]
        mid = (x0 + x1) / 2
        ends = [spot[u][1] for u in branch]
        pad = 0.32 * row
        shape = Path(
            [
                (x0, y0),
                (mid, y0),
                (mid, ends[0] - pad),
                (x1, ends[0] - pad),
                (x1, ends[-1] + pad),
                (mid, ends[-1] + pad),
                (mid, y0),
                (x0, y0),
            ],
            [1, 4, 4, 4, 2, 4, 4, 4],
        )
        tint = _part(tree, tree.nodes[branch[0]], by_part) if mine else _OFF
        if node.index == 0:
            tint = COLORS["ink"] if mine and by_part else tint
        alpha = 0.5 if fresh else 0.16 if mine else 0.2
        ax.add_patch(PathPatch(shape, facecolor=tint, alpha=alpha, linewidth=0))
        for u in branch:
            color = _part(tree, tree.nodes[u], by_part) if mine else _OFF
            line = Path(
                [(x0, y0), (mid, y0), (mid, spot[u][1]), (x1 + 0.01, spot[u][1])],
                [1, 4, 4, 4],
            )
            ax.add_patch(
                PathPatch(
                    line,
                    facecolor="none",
                    edgecolor=color,
                    linewidth=1.2,
                    linestyle="-" if mine else (0, (3, 2)),
                    zorder=2,
                )
            )


def radial(ax: Any, tree: HyperTree, *, names: bool = True) -> None:
    """Draw a tree from its centre outwards, one colour for each child of the root.

    Leaves stand on the rim; shallow ones take more of it, so that no part is squeezed.
    """
    rim = float(max(node.depth for node in tree.nodes))
    turn: dict[int, float] = {}
    leaves: list[int] = list(tree.chain({}).leaves)
    wide = {i: 1 + 0.5 * (rim - tree.nodes[i].depth) for i in leaves}
    part = {i: tree.path(i)[1].index for i in leaves}
    parts = list(dict.fromkeys(part[i] for i in leaves))
    between = 1.2
    unit = 2 * math.pi / (sum(wide.values()) + between * len(parts))
    at = math.pi / 2
    for i, after in zip(leaves, [*leaves[1:], leaves[0]], strict=True):
        turn[i] = at - unit * wide[i] / 2
        at -= unit * (wide[i] + between * (part[i] != part[after]))
    for node in reversed(tree.nodes):
        if node.branches:
            ends = [turn[u] for u in node.branches[0]]
            turn[node.index] = (ends[0] + ends[-1]) / 2

    def place(radius: float, angle: float) -> tuple[float, float]:
        return radius * math.cos(angle), radius * math.sin(angle)

    def radius(node: Node) -> float:
        return rim if not node.branches else float(node.depth)

    ax.add_patch(plt.Circle((0, 0), 1, color=COLORS["ink"], alpha=0.08, linewidth=0))
    for node in tree.nodes:
        if not node.branches:
            continue
        kids = [tree.nodes[u] for u in node.branches[0]]
        r0, r1, a0 = radius(node), radius(kids[0]), turn[node.index]
        mid = (r0 + r1) / 2
        if node.index:
            pad = 0.3 * unit
            first, last = turn[kids[0].index] + pad, turn[kids[-1].index] - pad
            arc = [first + (last - first) * i / 40 for i in range(41)]
            corners = [
                place(r0, a0),
                place(mid, a0),
                place(mid, first),
                *(place(r1, a) for a in arc),
                place(mid, last),
                place(mid, a0),
                place(r0, a0),
            ]
            shape = Path(corners, [1, 4, 4, 4, *([2] * 40), 4, 4, 4])
            tint = _part(tree, kids[0], True)
            ax.add_patch(PathPatch(shape, facecolor=tint, alpha=0.18, linewidth=0))
        for kid in kids:
            bend = a0 if node.index else turn[kid.index]
            line = [
                place(r0, a0),
                place(mid, bend),
                place(mid, turn[kid.index]),
                place(r1, turn[kid.index]),
            ]
            ax.add_patch(
                PathPatch(
                    Path(line, [1, 4, 4, 4]),
                    facecolor="none",
                    edgecolor=_part(tree, kid, True),
                    linewidth=1.2,
                )
            )
    for node in tree.nodes:
        px, py = place(radius(node), turn[node.index])
        color = _part(tree, node, True)
        ax.plot(
            px,
            py,
            "o",
            markersize=10 - 1.5 * node.depth if node.branches else 4.4,
            color=color if node.branches else "white",
            markeredgecolor=color,
            markeredgewidth=1.1,
            zorder=3,
        )
    for i in parts if names else ():
        px, py = place(rim + 0.35, turn[i])
        side = "left" if px > 1 else "right" if px < -1 else "center"
        color = _part(tree, tree.nodes[i], True)
        text = short(tree.nodes[i])
        ax.text(px, py, text, color=color, weight="bold", size=11, ha=side, va="center")
    ax.set_aspect("equal")
    ax.axis("off")


def draw_blocks(ax: Any, facts: Iterable[str], *, title: str = "") -> None:
    """The towers of a Blocksworld state or goal."""
    pairs = [f.split()[1:] for f in facts if f.startswith("on ")]
    above = {below: block for block, below in pairs}
    named = {b for pair in pairs for b in pair}
    named |= {f.split()[1] for f in facts if f.startswith("ontable")}
    tall = 1
    for column, base in enumerate(sorted(named - {block for block, _ in pairs})):
        block, level = base, 0
        while block is not None:
            ax.add_patch(
                FancyBboxPatch(
                    (1.3 * column + 0.05, level + 0.05),
                    0.9,
                    0.9,
                    boxstyle="round,pad=0,rounding_size=0.12",
                    facecolor=_PARTS[(ord(block[0]) - 97) % len(_PARTS)],
                    edgecolor="white",
                )
            )
            ax.text(
                1.3 * column + 0.5,
                level + 0.48,
                block,
                color="white",
                weight="bold",
                ha="center",
                va="center",
            )
            block, level = above.get(block), level + 1
            tall = max(tall, level)
    columns = max(1, len(named - {block for block, _ in pairs}))
    ax.plot([-0.3, 1.3 * columns], [0, 0], color="#9AA5B1", linewidth=1.5)
    ax.set(xlim=(-0.4, 1.3 * columns + 0.1), ylim=(-0.3, tall + 0.2), title=title)
    ax.set_aspect("equal")
    ax.axis("off")


def views_axis(ax: Any, views: dict[str, Sequence[int]]) -> None:
    """Facts in view at each decision, one step line a planner."""
    look = {"chain": "baseline", "tree": "yellow", "hypertree": "method"}
    for name, facts in views.items():
        ax.step(
            range(1, len(facts) + 1),
            facts,
            where="mid",
            color=COLORS[look[name]],
            linewidth=2.2 if name == "hypertree" else 1.5,
            label=name,
        )
    ax.set(yscale="log", xlabel="decision", ylabel="facts in view")
    ax.grid(axis="x", visible=False)


def report_figure(checks: Sequence[Check], report: Report, title: str) -> Any:
    """How many candidates each leaf's check keeps, and what the verifier says."""
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(6.6, 3.4), width_ratios=(1.5, 1), layout="constrained"
    )
    for i, check in enumerate(checks):
        kept = sum(check.keep)
        left.barh(i, len(check.keep), color="#E4E7EB", height=0.7)
        left.barh(i, kept, color=COLORS["method" if kept else "orange"], height=0.7)
        left.text(len(check.keep) + 0.3, i, f"{kept}", va="center", size=8.5)
    asked = [check.requirement.rstrip("?") for check in checks]
    names = [
        f"{name} (city {asked[: i + 1].count(name)})" if asked.count(name) > 1 else name
        for i, name in enumerate(asked)
    ]
    left.set_yticks(range(len(checks)), names, size=8.5)
    most = max((len(check.keep) for check in checks), default=0)
    left.set(
        xlabel="candidates kept",
        xlim=(0, max(19, most + 4)),
        ylim=(max(6, len(checks)), -0.7),
    )
    left.grid(axis="y", visible=False)
    left.set_title(title)
    rows = [*report.commonsense.items(), *report.hard.items()]
    for i, (name, passed) in enumerate(rows):
        mark, color = {
            True: ("pass", COLORS["green"]),
            False: ("FAIL", COLORS["orange"]),
            None: ("not asked", "#7B8794"),
        }[passed]
        weight = "bold" if passed is False else "normal"
        right.text(0, i, name.replace("_", " "), size=8.5, va="center", weight=weight)
        right.text(
            1, i, mark, size=8.5, va="center", ha="right", color=color, weight=weight
        )
    right.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6))
    right.axis("off")
    right.set_title("plan passes" if report.passed else "plan fails")
    return fig
