"""The reference: a page for every module, and the example that opens it runs."""

import doctest
import re
from importlib.util import find_spec

import built_book
import pytest
import torch
from built_book import ROOT
from icml25.core.runtime import CHAPTERS

PAGES = sorted((ROOT / "book" / "api").glob("*.md"))
_EXAMPLE = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_module_has_its_page():
    there = {name for name in CHAPTERS if find_spec(f"icml25.{name}")}
    assert {page.stem for page in PAGES} == there | {"core"}
    listed = {f"book/api/{page.stem}" for page in PAGES}
    assert listed == {name for name in built_book.pages() if "/api/" in name}
    index = (ROOT / "book" / "api.md").read_text(encoding="utf-8")
    assert all(f"(api/{page.name})" in index for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_runs(page, capsys):
    (code,) = _EXAMPLE.findall(page.read_text(encoding="utf-8"))
    example = doctest.DocTestParser().get_doctest(code, {}, page.stem, str(page), 0)
    assert len(example.examples) > 2
    assert example.examples[-1].want or "step()" in code  # it ends in something seen
    assert max(map(len, code.splitlines())) <= 79
    failed, _ = doctest.DocTestRunner().run(example)
    assert not failed, capsys.readouterr().out


def test_the_example_of_the_readme_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    names["model"](torch.ones(4, 64)).square().mean().backward()
    before = [parameter.clone() for parameter in names["model"].parameters()]
    names["optimizer"].step()
    after = names["model"].parameters()
    moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    assert all(moved)
