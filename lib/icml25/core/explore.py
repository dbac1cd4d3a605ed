"""A figure with controls that needs no kernel.

Every frame is computed beforehand; the controls choose among the frames in the browser.
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from icml25.core.runtime import progress

if TYPE_CHECKING:
    import ipywidgets

MAX_FRAMES = 40
MAX_TEXTS = 64  # frames of HTML are light: six controls with two values each
MAX_BYTES = 1_000_000


def explore(
    fn: Callable[..., Any],
    *,
    labels: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    start: Mapping[str, Any] | None = None,
    alt: str | Callable[..., str] = "",
    image: str = "svg",
    colors: int | None = None,
    **axes: Sequence[Any],
) -> ipywidgets.VBox:
    """Draw ``fn`` for every combination of values; link controls to the frames.

    Numbers get a slider, texts get buttons. The result moves in a live notebook, in the
    built page without a kernel, and from a file without a network.

    Args:
        fn: called as ``fn(**{axis: value})``; returns a matplotlib figure or HTML.
        labels: what a control is called, by axis (default: the axis's name).
        units: unit shown after a number, by axis.
        start: the value each control starts at (default: the first).
        alt: alternative text of the frames; a text, or a function called like ``fn``.
        image: ``"svg"`` for lines, ``"png"`` for scatter plots and images.
        colors: a PNG's palette, 2 to 256. Drawings of few colours are then sharper in
            half the bytes.
        **axes: one or two axes, each a sequence of at least two values; up to six where
            ``fn`` returns HTML.

    Returns:
        A widget; as a cell's last expression it is drawn. Its still picture is stored
        beside it for viewers without widgets.

    Raises:
        TypeError: ``fn`` returned neither a figure nor text.
        ValueError: no axis or more than two (HTML: six), an axis with fewer than two
            values, a start that is no value of its axis, an unknown name in ``labels``/
            ``units``/``start``, more than 40 frames (HTML: 64), or frames of more than
            1 MB together.

    Example:
        >>> def double(n):
        ...     return f"<p>2 x {n} = {2 * n}</p>"
        >>> figure = explore(double, n=[1, 2, 3], labels={"n": "a number"})
    """
    labels, units, start = dict(labels or {}), dict(units or {}), dict(start or {})
    values = _validate(axes, labels=labels, units=units, start=start, image=image)
    if colors is not None and (image != "png" or not 2 <= colors <= 256):
        raise ValueError(f'colors={colors}: give 2 to 256, and image="png"')
    begin = {name: start.get(name, choices[0]) for name, choices in values.items()}
    combinations = list(product(*values.values()))
    frames = {}
    still = None
    for combination in progress(combinations, desc="drawing frames"):
        arguments = dict(zip(values, combination, strict=True))
        text = alt(**arguments) if callable(alt) else alt
        text = text or ", ".join(
            f"{labels.get(name, name)} {_format(value, units.get(name, ''))}"
            for name, value in arguments.items()
        )
        drawn = fn(**arguments)
        if not isinstance(drawn, str):
            _limit(axes, len(combinations), controls=2, frames=MAX_FRAMES)
        if arguments == begin:
            still = _still(drawn)
        frames[combination] = _render(drawn, alt=text, image=image, colors=colors)
    size = sum(len(frame) for frame in frames.values())
    if size > MAX_BYTES:
        raise ValueError(
            f"the {len(frames)} frames take {size:,} bytes; at most {MAX_BYTES:,} are "
            'stored: use fewer values, simpler figures, or image="png"'
        )
    return _assemble(values, frames, still, labels=labels, units=units, begin=begin)


def _validate(
    axes: Mapping[str, Sequence[Any]],
    *,
    labels: Mapping[str, str],
    units: Mapping[str, str],
    start: Mapping[str, Any],
    image: str,
) -> dict[str, list[Any]]:
    if not axes:
        raise ValueError("axes=[]: give at least one, as name=[values]")
    values = {name: list(choices) for name, choices in axes.items()}
    for name, choices in values.items():
        if len(choices) < 2:
            raise ValueError(f"axis {name}={choices!r} needs at least two values")
    for argument, given in (("labels", labels), ("units", units), ("start", start)):
        if unknown := given.keys() - values.keys():
            raise ValueError(
                f"{argument} names {sorted(unknown)}; axes: {list(values)}"
            )
    for name, value in start.items():
        if value not in values[name]:
            raise ValueError(f"start {name}={value!r} is not one of {values[name]}")
    count = math.prod(map(len, values.values()))
    _limit(values, count, controls=6, frames=MAX_TEXTS)
    if image not in ("svg", "png"):
        raise ValueError(f"image={image!r}: allowed are 'svg' and 'png'")
    return values


def _limit(axes: Mapping[str, Any], count: int, *, controls: int, frames: int) -> None:
    kind = "figures" if frames == MAX_FRAMES else "HTML"
    if len(axes) > controls:
        raise ValueError(f"axes={list(axes)}: at most {controls} for {kind}")
    if count > frames:
        raise ValueError(
            f"{count} frames; at most {frames} of {kind}: use fewer values"
        )


def _still(drawn: Any) -> bytes | None:
    """The figure as PNG bytes, for viewers without widgets."""
    if not hasattr(drawn, "savefig"):
        return None
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _few_colors(drawn: Any, colors: int) -> bytes:
    """The figure as a PNG with a palette."""
    from PIL import Image

    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=160)
    picture = Image.open(buffer).convert("RGB")
    picture = picture.quantize(colors, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    picture.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def _render(drawn: Any, *, alt: str, image: str, colors: int | None = None) -> str:
    """One frame as HTML."""
    if isinstance(drawn, str):
        return drawn
    if not hasattr(drawn, "savefig"):
        raise TypeError(
            f"fn returned {type(drawn).__name__}; return a matplotlib figure or HTML"
        )
    import matplotlib.pyplot as plt

    if image == "svg":
        buffer = io.BytesIO()
        # Without a date and with a fixed salt the same figure is the same text.
        with plt.rc_context({"svg.hashsalt": "icml25"}):
            drawn.savefig(buffer, format="svg", metadata={"Date": None})
        data = _minify(buffer.getvalue().decode()).encode()
    else:
        data = _still(drawn) if colors is None else _few_colors(drawn, colors)
    width = drawn.get_figwidth() * 100
    plt.close(drawn)
    kind = "svg+xml" if image == "svg" else "png"
    encoded = base64.b64encode(data).decode()
    # An <img> keeps the ids inside one frame's SVG from meeting another's.
    return (
        f'<img alt="{html.escape(alt, quote=True)}" style="width:{width:.0f}px;'
        f'max-width:100%;height:auto" src="data:image/{kind};base64,{encoded}">'
    )


def _minify(svg: str) -> str:
    """Drop what no one sees: metadata, comments, digits past a hundredth of a point."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg
    )
    return re.sub(r"\s+", " ", svg)


def _format(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        text = str(value)
    elif isinstance(value, int):
        text = f"{value:,}" if abs(value) >= 10_000 else str(value)
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {unit}".rstrip()


def _assemble(
    values: Mapping[str, list[Any]],
    frames: Mapping[tuple, str],
    still: bytes | None,
    *,
    labels: Mapping[str, str],
    units: Mapping[str, str],
    begin: Mapping[str, Any],
) -> ipywidgets.VBox:
    import ipywidgets as widgets

    names = list(values)
    at = {name: values[name].index(begin[name]) for name in names}
    wide = widgets.Layout(width="100%")
    moved: list[list[Any]] = [[] for _ in names]  # what each control turns

    def branch(chosen: tuple) -> Any:
        """The frame of a full choice, else a stack over the next control's values."""
        depth = len(chosen)
        if depth == len(names):
            return widgets.HTML(frames[chosen], layout=wide)
        name = names[depth]
        stack = widgets.Stack(
            children=[branch((*chosen, value)) for value in values[name]],
            selected_index=at[name],
            layout=wide,
        )
        moved[depth].append(stack)
        return stack

    controls = [
        _control(values[name], at[name], labels.get(name, name), units.get(name, ""))
        for name in names
    ]
    picture = branch(())
    figure = _figure_class()(children=[*controls, picture])
    figure.links = [
        widgets.jslink((control, "index"), (target, "selected_index"))
        for control, targets in zip(controls, moved, strict=True)
        for target in targets
    ]
    figure.add_class("icml25-explore")
    figure.still = still
    state = ", ".join(
        f"{labels.get(name, name)} = {_format(begin[name], units.get(name, ''))}"
        for name in names
    )
    figure.summary = f"[figure with {len(frames)} frames, at {state}]"
    return figure


def _control(choices: list[Any], index: int, label: str, unit: str) -> Any:
    import ipywidgets as widgets

    options = [(_format(choice, unit), place) for place, choice in enumerate(choices)]
    kind = (
        widgets.ToggleButtons
        if all(isinstance(choice, str) for choice in choices)
        else widgets.SelectionSlider
    )
    extra = {} if kind is widgets.ToggleButtons else {"continuous_update": True}
    return kind(
        options=options,
        index=index,
        description=label,
        style={"description_width": "initial"},
        layout={"width": "100%", "max_width": "640px"},
        **extra,
    )


def _figure_class() -> type:
    import ipywidgets as widgets

    class ExploreFigure(widgets.VBox):
        """A VBox whose text form is one stable line, with a still picture beside it."""

        still: bytes | None = None
        summary: str = ""
        links: Sequence[widgets.Widget] = ()

        def _repr_mimebundle_(self, **kwargs: Any) -> dict:
            bundle = {
                "text/plain": self.summary,
                "application/vnd.jupyter.widget-view+json": {
                    "version_major": 2,
                    "version_minor": 0,
                    "model_id": self.model_id,
                },
            }
            if self.still is not None:
                bundle["image/png"] = base64.b64encode(self.still).decode()
            return bundle

    return ExploreFigure
