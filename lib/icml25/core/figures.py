"""One look for all figures and tables, and the library's own source in the page."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

#: Colour-blind-safe colours (Okabe and Ito). Baselines are grey, the paper's method is
#: the first colour, and further methods follow in this order.
COLORS = {
    "method": "#0072B2",
    "baseline": "#8A8A8A",
    "orange": "#D55E00",
    "green": "#009E73",
    "pink": "#CC79A7",
    "yellow": "#E69F00",
    "sky": "#56B4E9",
    "ink": "#1F2933",
}
#: A cell that begins with a number, marks and signs aside, or an empty one.
_NUMBER = re.compile(
    r"[\s*~<>≤≥±+−–—$-]*((about|under|over|at (least|most)) )?[\d.]|[–—-]*$"
)
_CYCLE = [COLORS[name] for name in ("method", "orange", "green", "pink", "yellow")]


def use_book_style() -> None:
    """Set matplotlib to the book's style: white ground, 9 pt text, quiet axes.

    The ground is white on purpose: it stays readable on a dark page.
    """
    import matplotlib as mpl

    mpl.rcParams.update(
        {
            "figure.figsize": (6.4, 3.2),
            "figure.dpi": 100,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "savefig.dpi": 200,
            "savefig.facecolor": "white",
            "font.size": 9.5,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 9.5,
            "axes.edgecolor": "#9AA5B1",
            "axes.labelcolor": COLORS["ink"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": mpl.cycler(color=[*_CYCLE, COLORS["sky"]]),
            "grid.color": "#E4E7EB",
            "grid.linewidth": 0.8,
            "text.color": COLORS["ink"],
            "xtick.color": "#52606D",
            "ytick.color": "#52606D",
            "lines.linewidth": 1.6,
            "legend.frameon": False,
            "legend.fontsize": 9,
            # Text stays text: that halves a frame.
            "svg.fonttype": "none",
            "svg.hashsalt": "icml25",
        }
    )
    try:
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:
        return
    set_matplotlib_formats("retina")


class _Shown:
    """A text with a Markdown form, which a notebook and the page draw."""

    def __init__(self, text: str, markdown: str) -> None:
        self.text, self.markdown = text, markdown

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.markdown


def show_table(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> _Shown:
    """A table of texts: columns of numbers to the right, the first and all others left.

    Cells may hold Markdown and ``$``-mathematics; round numbers before they come here.

    Raises:
        ValueError: a row has not as many cells as the header.
    """
    header = list(map(str, header))
    lines = [list(map(str, row)) for row in rows]
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"row {line} needs {len(header)} cells, as {header}")
    rule = [":--"]
    for place in range(1, len(header)):
        is_number = all(_NUMBER.match(line[place]) for line in lines)
        rule.append("--:" if is_number else ":--")
    text = "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])
    return _Shown(text, text)


def show_source(*objects: Any, docstring: bool = False) -> _Shown:
    """The library's own source of functions, methods or classes, as a code block.

    Args:
        objects: what to show, in order.
        docstring: keep docstrings (the API page has them).

    Returns:
        An object a notebook draws as highlighted Python.

    Raises:
        TypeError: an object has no Python source.
    """
    text = "\n\n".join(_source(each, docstring) for each in objects)
    return _Shown(text, f"```python\n{text}\n```")


def _source(target: Any, docstring: bool) -> str:
    lines = textwrap.dedent(inspect.getsource(target)).rstrip().splitlines()
    if docstring:
        return "\n".join(lines)
    drop: set[int] = set()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            text = node.body[0]
            end = text.end_lineno or text.lineno
            drop.update(range(text.lineno, end + 1))
            while end < len(lines) and not lines[end].strip():
                end += 1
                drop.add(end)
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in drop)
