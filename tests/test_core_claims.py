"""The ledger: rows, checks that can fail, verdicts read back from outputs."""

import json

import pytest
import torch
from icml25.core import claims


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch):
    monkeypatch.setattr(claims, "_checked", {})


def check(**changes):
    arguments = {"measured": "gap 2.4", "expected": "gap > 2", "holds": True}
    claims.check("golore-1", **(arguments | changes))


def test_every_chapter_has_rows_and_every_row_a_chapter():
    book = claims.load()
    slugs = [chapter["slug"] for chapter in book["chapters"]]
    assert len(slugs) == 11
    assert {claims.slug_of(row["id"]) for row in book["claims"]} == set(slugs)


def test_every_row_says_where_it_stands_and_what_shows_it():
    kinds = {"theorem", "counterexample", "comparison", "number"}
    for row in claims.load()["claims"]:
        assert row["kind"] in kinds, row["id"]
        for key in ("claim", "source", "shows"):
            assert row[key].strip(), (row["id"], key)


def test_a_claim_that_does_not_hold_raises():
    with pytest.raises(claims.ClaimFailed, match="golore-1 does not hold: gap 2.4"):
        check(holds=False)


def test_a_claim_that_holds_says_so(capsys):
    check()
    assert "✓ golore-1 shown: gap 2.4 | needed: gap > 2" in capsys.readouterr().out


def test_reduced_scale_is_said(capsys):
    check(reduced="a smaller model")
    assert "shown at reduced scale" in capsys.readouterr().out


@pytest.mark.parametrize("holds", ["yes", None, 1, torch.tensor(True)])
def test_holds_must_be_one_truth_value(holds):
    with pytest.raises(TypeError, match="give one bool"):
        check(holds=holds)


def test_unknown_row_lists_the_known():
    with pytest.raises(ValueError, match="'golore-99' is not in the ledger.*golore-1"):
        claims.check("golore-99", measured="x", expected="y", holds=True)


def test_empty_texts_are_refused():
    with pytest.raises(ValueError, match="measured=''"):
        check(measured="")
    with pytest.raises(ValueError, match="why=' '"):
        claims.not_shown("golore-1", why=" ", measured="not run")


def test_evidence_must_be_a_record_that_exists():
    with pytest.raises(ValueError, match="no record golore/none-such"):
        check(record="golore/none-such")
    with pytest.raises(ValueError, match="record='none-such': give it as '<slug>/"):
        check(record="none-such")


def test_table_refuses_a_chapter_with_an_unchecked_row():
    check()
    with pytest.raises(claims.ClaimFailed, match="no cell checked: golore-2"):
        claims.table("golore")


def test_table_shows_rows_that_were_not_shown():
    for row in claims.load()["claims"]:
        if claims.slug_of(row["id"]) == "golore":
            claims.not_shown(row["id"], why="a test", measured="not run")
    assert claims.table("golore")._repr_html_().count("not shown") == 8


def test_verdicts_are_read_back_from_a_notebook(tmp_path):
    verdict = claims.Verdict("golore-1", claims.SHOWN, "gap 2.4", "gap > 2")
    cells = [
        {"cell_type": "markdown", "source": ["## Theory\n", "words"]},
        {
            "cell_type": "code",
            "source": "",
            "outputs": [{"data": verdict._repr_mimebundle_()}],
        },
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    (row,) = claims.stored_verdicts(path)
    assert (row["id"], row["cell"], row["section"]) == ("golore-1", 1, "Theory")
    assert row["verdict"] == "shown"


def test_ledger_has_every_row_once():
    ids = [row["id"] for row in claims.ledger()]
    assert sorted(ids) == sorted(row["id"] for row in claims.load()["claims"])


def test_repeated_and_orphan_ids_are_refused(tmp_path):
    path = tmp_path / "claims.yml"
    path.write_text("chapters: [{slug: a}]\nclaims: [{id: a-1}, {id: a-1}]\n")
    with pytest.raises(ValueError, match="'a-1' stands twice"):
        claims.load(path)
    path = tmp_path / "orphan.yml"
    path.write_text("chapters: [{slug: a}]\nclaims: [{id: b-1}]\n")
    with pytest.raises(ValueError, match="'b-1' belongs to no chapter"):
        claims.load(path)


def test_html_escapes_what_was_measured():
    verdict = claims.Verdict("golore-1", claims.SHOWN, "1 < 2 & so on")
    assert "1 &lt; 2 &amp; so on" in verdict.to_html()
