"""The figure style and the source shown in the page."""

import ast

import matplotlib.pyplot as plt
import pytest
from icml25.core import COLORS, show_source, show_table, use_book_style
from icml25.core.runtime import Experiment, scale


def test_importing_the_style_changes_nothing_until_it_is_used():
    before = dict(plt.rcParams)
    import icml25.core.figures  # noqa: F401

    assert dict(plt.rcParams) == before


def test_style_is_white_and_has_the_method_first():
    with plt.rc_context():
        use_book_style()
        assert plt.rcParams["figure.facecolor"] == "white"
        first = plt.rcParams["axes.prop_cycle"].by_key()["color"][0]
        assert first == COLORS["method"]


def test_source_is_the_librarys_own_without_docstrings():
    text = repr(show_source(scale, Experiment))
    ast.parse(text)
    assert "return paper if scale_name()" in text
    assert '"""' not in text
    assert '"""' in repr(show_source(scale, docstring=True))


def test_source_is_drawn_as_a_python_block():
    assert show_source(scale)._repr_markdown_().startswith("```python\ndef scale(")


def test_what_has_no_source_is_refused():
    with pytest.raises(TypeError):
        show_source(len)


def test_table_is_drawn_as_markdown():
    table = show_table(["run", "loss"], [["GaLore", 2.4], ["GoLore", "0.1"]])
    assert table._repr_markdown_().splitlines() == [
        "| run | loss |",
        "| :-- | --: |",
        "| GaLore | 2.4 |",
        "| GoLore | 0.1 |",
    ]


def test_columns_of_numbers_stand_to_the_right_and_words_to_the_left():
    rows = [["a", "-1.5 to +2", "about 3", "none", "1"], ["b", "**7**", "", "2", "yes"]]
    rule = show_table(["", "range", "near", "mixed", "word"], rows).text.splitlines()[1]
    assert rule == "| :-- | --: | --: | :-- | :-- |"
    assert show_table(["a", "b"], []).text.count("|") == 6


def test_table_refuses_a_short_row():
    with pytest.raises(ValueError, match="needs 2 cells"):
        show_table(["run", "loss"], [["GaLore"]])
