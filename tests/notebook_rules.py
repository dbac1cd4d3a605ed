"""The rules a stored notebook keeps, as one function from its JSON to its violations.

nbval compares what a notebook prints; these rules cover what it does not look at: that
there are outputs at all, that pictures are drawn, that words stand between cells.
"""

from __future__ import annotations

import ast
import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from icml25.core import claims

HEADINGS = [
    "The question",
    "A small example",
    "Theory",
    "The core",
    "Training",
    "Evaluation",
    "Play",
    "Claims",
    "Exercises",
    "Beyond the laptop",
]
TAGS = {"card", "hide-input", "hide-output", "hide-cell", "nbval-ignore-output"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
MAX_LINE = 79
MAX_SECONDS = 90
MAX_STATE_BYTES = 1_500_000
MAX_SETUP_LINES = 15
MIN_CHECKS = 5
MIN_PICTURE_BYTES = 2_000
# They return what Jupyter draws if it is a cell's last expression.
DRAWN_IF_LAST = {
    "explore",
    "show_source",
    "show_table",
    "claims.table",
    "records.table",
}

_FORBIDDEN = {
    r"\bclear_output\b": "clear_output",
    r"\bdisplay_id\b": "an updating display",
    r"\binteract(ive|_manual)?\(": "interact",
    r"\bwidgets\.(Output|Play)\b": "an Output or Play widget",
    r"^\s*!": "a shell command",
    r"^\s*%": "a magic",
    r"\bsys\.path\b": "sys.path",
    r"[\"'](/home|/root|/tmp|/work|/Users|[A-Z]:\\)": "an absolute path",
    r"\bwarnings\.(filterwarnings|simplefilter)\b": "a silenced warning",
}
_IN_OUTPUT = {
    r"\b0x[0-9a-f]{6,}\b": "a memory address",
    r"\b\d{1,2}:\d{2}:\d{2}\b": "a clock time",
    r"(/home|/root|/tmp|/work|/Users)/": "an absolute path",
    r"Warning: ": "a warning",
}


def violations(notebook: dict[str, Any], slug: str) -> list[str]:
    """Everything that is wrong with a stored notebook of chapter ``slug``."""
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    found = [*_execution(code), *_frame(cells), *_claims(cells, slug)]
    for number, cell in enumerate(code, 1):
        where = f"code cell {number}"
        found += [f"{where}: {problem}" for problem in _source(cell)]
        found += [f"{where}: {problem}" for problem in _outputs(cell)]
    found += [*_tags(code), *_state(notebook, code)]
    return found


def text(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def headings(cells: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """(level, text) of every heading, fenced code left out."""
    found = []
    for cell in cells:
        if cell["cell_type"] == "markdown":
            prose = re.sub(r"```.*?```", "", text(cell), flags=re.DOTALL)
            matches = re.findall(r"^(#{1,6})\s+(.+?)\s*$", prose, flags=re.MULTILINE)
            found += [(len(marks), title) for marks, title in matches]
    return found


def _execution(code: list[dict[str, Any]]) -> Iterator[str]:
    counts = [cell.get("execution_count") for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"cells are not executed and numbered 1..{len(code)}: {counts}"


def _frame(cells: list[dict[str, Any]]) -> Iterator[str]:
    if not cells or cells[0]["cell_type"] != "markdown":
        yield "the first cell is not the title"
    all_headings = headings(cells)
    if [level for level, _ in all_headings].count(1) != 1:
        yield "there is not exactly one first-level heading"
    second = [title for level, title in all_headings if level == 2]
    if second != HEADINGS:
        yield f"second-level headings are {second}, not {HEADINGS}"
    for (above, _), (below, title) in zip(all_headings, all_headings[1:], strict=False):
        if below > above + 1:
            yield f"heading {title!r} jumps from level {above} to {below}"
    for first, then in zip(cells, cells[1:], strict=False):
        if first["cell_type"] == then["cell_type"] == "code":
            yield f"no words between two code cells, before {text(then)[:50]!r}"
    for cell in cells:
        if cell["cell_type"] == "markdown" and re.search(r"!\[\s*\]\(", text(cell)):
            yield f"a picture without alternative text in {text(cell)[:50]!r}"


def _claims(cells: list[dict[str, Any]], slug: str) -> Iterator[str]:
    rows = {
        row["id"]
        for row in claims.load()["claims"]
        if claims.slug_of(row["id"]) == slug
    }
    checked = {
        output["data"][claims.MIME]["id"]
        for cell in cells
        for output in cell.get("outputs", [])
        if claims.MIME in output.get("data", {})
    }
    if missing := sorted(rows - checked):
        yield f"rows of the ledger that no stored output checks: {missing}"
    if foreign := sorted(checked - rows):
        yield f"checks rows that are not the chapter's: {foreign}"
    sources = "\n".join(text(c) for c in cells if c["cell_type"] == "code")
    if f'claims.table("{slug}")' not in sources:
        yield f'claims.table("{slug}") is missing'
    checks = len(re.findall(r"^\s*assert\b|\bclaims\.check\(", sources, re.MULTILINE))
    if checks < MIN_CHECKS:
        yield f"{checks} asserted claims or identities, at least {MIN_CHECKS} wanted"


def _source(cell: dict[str, Any]) -> Iterator[str]:
    source = text(cell)
    for line in source.splitlines():
        if len(line) > MAX_LINE:
            yield f"a line of {len(line)} columns: {line[:40]!r}..."
    if source.rstrip().endswith(";"):
        yield "the last expression ends in ';'"
    for pattern, name in _FORBIDDEN.items():
        if re.search(pattern, source, re.MULTILINE):
            yield f"{name} in the source"
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"not plain Python: {error}"
        return
    for statement in tree.body[:-1]:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) in DRAWN_IF_LAST:
            yield f"not the last expression, so not drawn: {ast.unparse(call)[:50]}"


def _outputs(cell: dict[str, Any]) -> Iterator[str]:
    pictures = 0
    for output in cell.get("outputs", []):
        kind = output["output_type"]
        if kind == "error":
            yield f"a stored error: {output.get('ename')}"
        if output.get("name") == "stderr":
            yield "output on stderr"
        data = output.get("data", {})
        shown = _joined(output.get("text", "")) + _joined(data.get("text/plain", ""))
        for pattern, name in _IN_OUTPUT.items():
            if re.search(pattern, shown):
                yield f"{name} in the output: {shown[:60]!r}"
        if set(data) == {"text/plain"} and re.match(r"\s*<\w", shown):
            yield f"a bare object in the output: {shown[:60]!r}"
        if "image/png" in data:
            picture = base64.b64decode(_joined(data["image/png"]))
            if not picture.startswith(b"\x89PNG") or len(picture) < MIN_PICTURE_BYTES:
                yield f"a picture of {len(picture)} bytes is no drawn PNG"
            pictures += WIDGET_VIEW not in data
    if pictures and not _alternative(cell):
        yield "a picture without alternative text (metadata mystnb.image.alt)"
    if "plt.show()" in text(cell) and not pictures:
        yield "plt.show() stored no picture"
    if "explore(" in text(cell) and WIDGET_VIEW not in json.dumps(cell["outputs"]):
        yield "explore() stored no figure"


def _alternative(cell: dict[str, Any]) -> str:
    mystnb = cell["metadata"].get("mystnb", {})
    return mystnb.get("image", {}).get("alt", "").strip()


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def _tags(code: list[dict[str, Any]]) -> Iterator[str]:
    tags = [cell["metadata"].get("tags", []) for cell in code]
    if unknown := sorted({tag for each in tags for tag in each} - TAGS):
        yield f"unknown cell tags: {unknown}"
    cards = [cell for cell, each in zip(code, tags, strict=True) if "card" in each]
    if len(cards) != 1:
        yield f"{len(cards)} cells are tagged 'card', not one"
    elif not any("image/png" in o.get("data", {}) for o in cards[0]["outputs"]):
        yield "the cell tagged 'card' stores no picture"
    ignored = [
        cell
        for cell, each in zip(code, tags, strict=True)
        if "nbval-ignore-output" in each
    ]
    if len(ignored) > 3:
        yield f"{len(ignored)} cells are tagged nbval-ignore-output, at most 3 may be"
    for cell in ignored:
        if not re.search(r"\bassert\b|claims\.check", text(cell)):
            yield f"an ignored output without an assert: {text(cell)[:50]!r}"
    if code and len(text(code[0]).splitlines()) > MAX_SETUP_LINES:
        yield f"the Setup cell is longer than {MAX_SETUP_LINES} lines"


def _state(notebook: dict[str, Any], code: list[dict[str, Any]]) -> Iterator[str]:
    metadata = notebook["metadata"]
    stored = metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for cell in code:
        for output in cell.get("outputs", []):
            view = output.get("data", {}).get(WIDGET_VIEW)
            if view and view["model_id"] not in stored:
                yield f"a widget without its state: {view['model_id']}"
    for key, model in stored.items():
        if model.get("model_name") == "VBoxModel":
            drawn = [_drawing(frame) for frame in _frames(stored, key)]
            if len(set(drawn)) * 4 < len(drawn):  # a control that moves the title only
                yield f"a figure of {len(drawn)} frames has {len(set(drawn))} drawings"
    size = len(json.dumps(stored))
    if size > MAX_STATE_BYTES:
        yield f"{size:,} bytes of widget state, at most {MAX_STATE_BYTES:,} may be"
    seconds = metadata.get("icml25", {}).get("run_seconds")
    if seconds is None:
        yield "outputs were not stored by `make notebooks`"
    elif seconds > MAX_SECONDS:
        yield f"it took {seconds} s to run, at most {MAX_SECONDS} s may be"


def _frames(stored: dict[str, Any], key: str) -> list[str]:
    """The frames of an interactive figure; it nests one stack of them a control."""
    model = stored[key]
    if model["model_name"] == "HTMLModel":
        return [model["state"]["value"]]
    children = [
        child.removeprefix("IPY_MODEL_") for child in model["state"]["children"]
    ]
    stacks = ("StackModel", "HTMLModel")
    return [
        frame
        for child in children
        if stored[child]["model_name"] in stacks
        for frame in _frames(stored, child)
    ]


def _drawing(frame: str) -> str:
    """A frame without its words, where it is a vector graphic; else as it is."""
    coded = re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', frame)
    if not coded:
        return frame
    graphic = base64.b64decode(coded[1]).decode()
    return re.sub(r"<text.*?</text>", "", graphic, flags=re.DOTALL)
