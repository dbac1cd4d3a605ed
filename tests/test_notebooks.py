"""Every stored notebook keeps the rules, and each rule can be broken."""

import base64
import copy
import json
from pathlib import Path

import pytest
from icml25.core import claims
from notebook_rules import HEADINGS, WIDGET_STATE, WIDGET_VIEW, violations

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
CHAPTERS = {
    chapter["notebook"]: chapter["slug"] for chapter in claims.load()["chapters"]
}
STORED = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_notebook_keeps_the_rules(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert violations(notebook, CHAPTERS[path.stem]) == []


def test_every_notebook_is_a_chapter():
    assert {path.stem for path in STORED} <= CHAPTERS.keys()


# --- the rules themselves ---


def markdown(source):
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code(source, *outputs, **metadata):
    return {
        "cell_type": "code",
        "execution_count": 0,
        "metadata": metadata,
        "outputs": list(outputs),
        "source": source,
    }


def output(**data):
    named = {key.replace("_", "/"): value for key, value in data.items()}
    return {"output_type": "display_data", "data": named, "metadata": {}}


PICTURE = base64.b64encode(b"\x89PNG" + bytes(3000)).decode()


def good_notebook():
    rows = [
        row["id"]
        for row in claims.load()["claims"]
        if claims.slug_of(row["id"]) == "golore"
    ]
    verdicts = [
        {"output_type": "display_data", "data": {claims.MIME: {"id": row}}}
        for row in rows
    ]
    checks = "\n".join(f'claims.check("{row}")' for row in rows)
    widget = {"output_type": "display_data", "data": {WIDGET_VIEW: {"model_id": "a"}}}
    cells = [markdown("# GoLore: a title")]
    cells += [markdown(f"## {name}") for name in HEADINGS]
    cells += [
        code("x = 1", {"output_type": "stream", "name": "stdout", "text": "1\n"}),
        markdown("words"),
        code(
            "plt.show()",
            output(image_png=PICTURE, text_plain="<Figure>"),
            tags=["card"],
            mystnb={"image": {"alt": "a line"}},
        ),
        markdown("words"),
        code("explore(f, a=[1, 2])", widget),
        markdown("words"),
        code(checks, *verdicts),
        markdown("words"),
        code('claims.table("golore")'),
    ]
    executed = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(executed, 1):
        cell["execution_count"] = number
    metadata = {
        "widgets": {WIDGET_STATE: {"state": {"a": {}}}},
        "icml25": {"run_seconds": 5},
    }
    return {"cells": cells, "metadata": metadata}


def test_a_good_notebook_has_no_violations():
    assert violations(good_notebook(), "golore") == []


def cells_of(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def unexecuted(notebook):
    cells_of(notebook)[0]["execution_count"] = None


def rerun_out_of_order(notebook):
    cells_of(notebook)[0]["execution_count"] = 7


def stored_error(notebook):
    cells_of(notebook)[0]["outputs"] = [{"output_type": "error", "ename": "ValueError"}]


def stderr(notebook):
    cells_of(notebook)[0]["outputs"][0]["name"] = "stderr"


def neighbours(notebook):
    notebook["cells"].insert(-1, notebook["cells"].pop(-2))
    del notebook["cells"][-2]


def missing_heading(notebook):
    notebook["cells"] = [
        cell for cell in notebook["cells"] if cell["source"] != "## Exercises"
    ]


def jumping_heading(notebook):
    notebook["cells"].insert(3, markdown("#### deep"))


def source(text):
    def change(notebook):
        cells_of(notebook)[0]["source"] = text

    return change


def printed(text):
    def change(notebook):
        cells_of(notebook)[0]["outputs"][0]["text"] = text

    return change


def unchecked_row(notebook):
    cells_of(notebook)[3]["outputs"].pop()


def foreign_row(notebook):
    cells_of(notebook)[3]["outputs"][0]["data"][claims.MIME]["id"] = "tar-1"


def no_table(notebook):
    cells_of(notebook)[4]["source"] = "pass"


def few_checks(notebook):
    cells_of(notebook)[3]["source"] = "pass"


def no_alternative(notebook):
    del cells_of(notebook)[1]["metadata"]["mystnb"]


def no_picture(notebook):
    cells_of(notebook)[1]["outputs"] = []


def empty_picture(notebook):
    cells_of(notebook)[1]["outputs"][0]["data"]["image/png"] = PICTURE[:100]


def bare_object(notebook):
    cells_of(notebook)[0]["outputs"] = [output(text_plain="<generator object f>")]


def lost_state(notebook):
    notebook["metadata"]["widgets"] = {}


def heavy_state(notebook):
    state = notebook["metadata"]["widgets"][WIDGET_STATE]["state"]
    state["a"] = {"value": "x" * 2_000_000}


def frozen_figure(notebook):
    def frame(step):
        graphic = f"<svg><rect/><text>step {step}</text></svg>".encode()
        source = f"data:image/svg+xml;base64,{base64.b64encode(graphic).decode()}"
        return {"model_name": "HTMLModel", "state": {"value": f'<img src="{source}">'}}

    state = notebook["metadata"]["widgets"][WIDGET_STATE]["state"]
    state |= {f"frame{step}": frame(step) for step in range(8)}
    children = [f"IPY_MODEL_frame{step}" for step in range(8)]
    state["stack"] = {"model_name": "StackModel", "state": {"children": children}}
    box = {"children": ["IPY_MODEL_stack"]}
    state["a"] = {"model_name": "VBoxModel", "state": box}


def slow(notebook):
    notebook["metadata"]["icml25"]["run_seconds"] = 91


def stored_by_hand(notebook):
    del notebook["metadata"]["icml25"]


def tagged(*tags):
    def change(notebook):
        cells_of(notebook)[0]["metadata"]["tags"] = list(tags)

    return change


def lost_explore(notebook):
    cells_of(notebook)[2]["outputs"] = []


def unnamed_image(notebook):
    notebook["cells"][1]["source"] += "\n![](picture.png)"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (unexecuted, "not executed"),
        (rerun_out_of_order, "not executed"),
        (stored_error, "a stored error"),
        (stderr, "output on stderr"),
        (neighbours, "no words between"),
        (missing_heading, "second-level headings"),
        (jumping_heading, "jumps from level"),
        (source("x = " + "1" * 80), "a line of 84 columns"),
        (source("plot(x);"), "ends in ';'"),
        (source("!ls"), "a shell command"),
        (source("%pip install x"), "a magic"),
        (source("import sys\nsys.path.append('x')"), "sys.path"),
        (source("open('/home/me/x')"), "an absolute path"),
        (source("clear_output()"), "clear_output"),
        (source("interact(f)"), "interact"),
        (source("widgets.Output()"), "an Output or Play widget"),
        (source("x = = 1"), "not plain Python"),
        (source("show_table(rows)\nassert rows"), "not drawn: show_table(rows)"),
        (source("\n".join(["x = 1"] * 16)), "Setup cell is longer"),
        (source("plt.show()"), "stored no picture"),
        (printed("at 0x7f3a2b4c5d6e"), "a memory address"),
        (printed("done at 12:30:05"), "a clock time"),
        (printed("/home/me/data"), "an absolute path"),
        (printed("UserWarning: old"), "a warning"),
        (unchecked_row, "no stored output checks"),
        (foreign_row, "not the chapter's"),
        (no_table, 'claims.table("golore") is missing'),
        (few_checks, "at least 5 wanted"),
        (no_alternative, "without alternative text"),
        (unnamed_image, "without alternative text"),
        (no_picture, "stored no picture"),
        (empty_picture, "no drawn PNG"),
        (bare_object, "a bare object"),
        (lost_state, "a widget without its state"),
        (lost_explore, "explore() stored no figure"),
        (heavy_state, "bytes of widget state"),
        (frozen_figure, "a figure of 8 frames has 1 drawings"),
        (slow, "91 s to run"),
        (stored_by_hand, "not stored by"),
        (tagged("nbval-skip"), "unknown cell tags"),
        (tagged("card"), "2 cells are tagged 'card'"),
        (tagged("nbval-ignore-output"), "an ignored output without an assert"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_rule_can_be_broken(break_it, message):
    notebook = copy.deepcopy(good_notebook())
    break_it(notebook)
    assert any(message in found for found in violations(notebook, "golore"))
