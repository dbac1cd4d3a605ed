"""The built pages: all there, whole without a network, and true to the runs."""

import json
import re
import shutil

import built_book
import page_rules as rules
import pytest
import vendor
import yaml
from built_book import ROOT
from icml25.core import claims
from icml25_book.glossary import split_terms, symbol_tables

PAGES = built_book.pages()
NOTEBOOKS = built_book.notebooks()
# Pages that Sphinx adds by itself.
OWN = {"index", "genindex", "prf-prf", "py-modindex", "search"}


@pytest.fixture(scope="module")
def parsed(book):
    """Every page of the book by its document name."""
    return {
        name: rules.parse((book / f"{name}.html").read_text(encoding="utf-8"))
        for name in [*PAGES, "search"]
    }


@pytest.fixture(scope="module")
def anchors(book, parsed):
    return {
        (book / f"{name}.html").resolve(): rules.anchors(page)
        for name, page in parsed.items()
    }


def test_the_book_holds_the_pages_of_its_contents_and_no_others(book):
    built = {
        path.relative_to(book).with_suffix("").as_posix()
        for path in book.rglob("*.html")
    }
    built = {name for name in built if not name.startswith(("_static", "_modules"))}
    assert built - OWN == set(PAGES)


def test_every_stored_notebook_is_in_the_contents():
    stored = {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert stored == set(NOTEBOOKS)


def test_chapters_stand_in_the_order_of_the_ledger():
    order = [f"notebooks/{each['notebook']}" for each in claims.load()["chapters"]]
    assert [name for name in order if name in NOTEBOOKS] == NOTEBOOKS


@pytest.mark.parametrize("name", [*PAGES, "search"])
def test_a_page_loads_only_what_the_book_carries(book, parsed, name):
    assert rules.outside_resources(parsed[name]) == []
    assert rules.missing_resources(parsed[name], book / f"{name}.html") == []


def test_style_sheets_load_only_what_the_book_carries(book):
    found = {
        str(path.relative_to(book)): outside
        for path in (book / "_static").rglob("*.css")
        if (outside := rules.outside_in_css(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize("name", PAGES)
def test_links_into_the_book_arrive(book, parsed, anchors, name):
    assert rules.dead_links(parsed[name], book / f"{name}.html", anchors) == []


@pytest.mark.parametrize("name", PAGES)
def test_nothing_reaches_the_reader_raw(parsed, name):
    assert rules.raw_markup(parsed[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_headings_are_in_order_and_everything_has_a_name(parsed, name):
    assert rules.heading_faults(parsed[name]) == []
    assert rules.unlabelled(parsed[name]) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_widget_of_a_chapter_has_its_state(parsed, name):
    assert rules.stateless_widgets(parsed[name]) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_widget_view_of_a_notebook_is_in_its_page(parsed, name):
    notebook = json.loads((ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))
    stored = [
        output["data"][rules.WIDGET_VIEW]["model_id"]
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if rules.WIDGET_VIEW in output.get("data", {})
    ]
    views = parsed[name].find_all("script", type=rules.WIDGET_VIEW)
    assert [json.loads(view.string)["model_id"] for view in views] == stored


def test_the_scorecard_lists_every_row_with_its_stored_verdict(parsed):
    drawn = {
        row["data-claim"]: row.find(class_="icml25-badge").get_text()[2:]
        for row in parsed["book/scorecard"].find_all("tr", attrs={"data-claim": True})
    }
    assert drawn == {row["id"]: row["verdict"] for row in claims.ledger()}


def test_the_scorecard_leads_to_the_cell_behind_every_verdict(parsed):
    for row in claims.ledger():
        if row["verdict"] == claims.NOT_YET:
            continue
        page = f"notebooks/{row['chapter']['notebook']}"
        anchor = parsed[page].find(id=f"claim-{row['id']}")
        is_cell = "cell" in anchor.get("class", [])
        cell = anchor if is_cell else anchor.find_parent(class_="cell")
        assert f"claims.{'not_shown' if row['why'] else 'check'}" in cell.get_text()
        drawn = parsed["book/scorecard"].find(attrs={"data-claim": row["id"]})
        assert drawn.find("a", href=f"../{page}.html#claim-{row['id']}")
        assert row["measured"] in drawn.get_text()


def test_the_trust_page_gives_a_reason_for_every_row_not_shown(parsed):
    drawn = parsed["book/trust"].select("dl.icml25-missed dt a")
    missed = [row for row in claims.ledger() if row["verdict"] == claims.NOT_SHOWN]
    assert [link.get_text() for link in drawn] == [row["id"] for row in missed]
    for link, row in zip(drawn, missed, strict=True):
        assert link["href"].endswith(f"#claim-{row['id']}")
        reason = link.find_parent("dt").find_next_sibling("dd").get_text()
        assert row["why"][1:].rstrip(".") in reason


def test_totals_count_the_whole_ledger(parsed):
    rows = claims.ledger()
    for name in ("book/intro", "book/scorecard", "book/trust"):
        numbers = [
            int(node.get_text()) for node in parsed[name].select("dl.icml25-totals dd")
        ]
        assert numbers[0] == len(rows) == sum(numbers[1:])
        assert numbers[1] == sum(row["verdict"] == claims.SHOWN for row in rows)


def test_the_front_page_has_a_card_for_every_chapter(parsed):
    cards = parsed["book/intro"].find_all(class_="icml25-card")
    names = [card.find(class_="icml25-card-name").get_text() for card in cards]
    assert names == [chapter["name"] for chapter in claims.load()["chapters"]]
    linked = [card.a["href"] for card in cards if card.a]
    assert linked == [f"../{name}.html" for name in NOTEBOOKS]
    assert all(card.img for card in cards if card.a)


def test_run_times_are_those_that_the_notebooks_store(parsed):
    text = parsed["book/runtimes"].get_text()
    for name in NOTEBOOKS:
        notebook = json.loads((ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))
        assert f"{notebook['metadata']['icml25']['run_seconds']:.0f} s" in text


def test_every_paper_is_in_the_bibliography(parsed):
    text = parsed["book/bibliography"].get_text()
    for chapter in claims.load()["chapters"]:
        assert chapter["title"].split(":")[0].lower() in text.lower()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_launch_buttons_wait_for_the_public_address(parsed, name):
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    launch = parsed[name].find_all("a", href=re.compile("mybinder|colab"))
    assert bool(launch) == bool(config["repository"]["url"])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_chapter_gives_each_symbol_one_meaning(name):
    (table,) = symbol_tables(ROOT / f"{name}.ipynb")
    head, _, *rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    columns = [i for i, title in enumerate(head) if title.strip() == "symbol"]
    symbols = [
        symbol.strip()
        for row in rows
        for i in columns
        for symbol in re.split(r",(?![^{(]*[})])", row[i])
    ]
    assert symbols
    assert len(set(symbols)) == len(symbols)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_terms_lead_to_the_glossary(parsed, name):
    links = parsed[name].select("a.icml25-term")
    targets = [link["href"] for link in links]
    assert targets and len(set(targets)) == len(targets)


def test_an_abbreviation_is_not_found_in_a_word():
    terms = {"MAP": "term-MAP", "policy": "term-policy"}
    assert len(split_terms("The map of a Policy", terms, "x")) == 3
    assert terms == {"MAP": "term-MAP"}


# --- the vendored files ---


def test_vendored_files_are_as_recorded():
    assert vendor.problems() == []


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda file: file.write_text("altered"), "its content differs"),
        (lambda file: file.unlink(), "listed, but not there"),
        (lambda file: (file.parent / "new.js").write_text(""), "there, but not listed"),
    ],
)
def test_a_changed_vendored_file_is_named(tmp_path, monkeypatch, spoil, complaint):
    copy = tmp_path / "vendor"
    shutil.copytree(vendor.VENDOR, copy)
    monkeypatch.setattr(vendor, "VENDOR", copy)
    monkeypatch.setattr(vendor, "TABLE", copy / "VERSIONS.md")
    spoil(copy / "mathjax" / "tex-svg.js")
    (problem,) = vendor.problems()
    assert complaint in problem


# --- the rules can be broken ---


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.org/a.js"></script>',
        '<script src="//example.org/a.js"></script>',
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<img src="http://example.org/a.png">',
        "<style>@import 'https://example.org/a.css';</style>",
        '<p style="background: url(https://example.org/a.png)">x</p>',
    ],
)
def test_an_outside_resource_is_seen(html):
    assert rules.outside_resources(rules.parse(html))


def test_a_link_to_another_site_is_no_resource():
    page = rules.parse('<a href="https://example.org/">there</a>')
    assert rules.outside_resources(page) == []


def test_a_widget_without_its_state_is_seen():
    view = json.dumps({"model_id": "ab", "version_major": 2, "version_minor": 0})
    state = json.dumps({"state": {"ab": {"state": {"children": ["IPY_MODEL_cd"]}}}})
    bare = f'<script type="{rules.WIDGET_VIEW}">{view}</script>'
    part = f'{bare}<script type="{rules.WIDGET_STATE}">{state}</script>'
    assert rules.stateless_widgets(rules.parse(bare)) == ["ab"]
    assert rules.stateless_widgets(rules.parse(part)) == ["cd"]


@pytest.mark.parametrize(
    "text",
    [
        r"<p>\frac{1}{2}</p>",
        "<p>$$ x $$</p>",
        "<p>{cite}`he2025subspace`</p>",
        "<p>:::{prf:theorem}</p>",
        "<p>| run | loss | | :-- | --: | | GoLore | 0.1 |</p>",
        "<pre>Traceback (most recent call last):</pre>",
    ],
)
def test_raw_markup_is_seen(text):
    assert rules.raw_markup(rules.parse(text))


def test_a_dead_link_is_seen(tmp_path):
    path = (tmp_path / "page.html").resolve()
    ids = {path: {"here"}}
    page = rules.parse('<a href="#here">1</a><a href="#gone">2</a><a href="no.html">')
    assert rules.dead_links(page, path, ids) == ["#gone", "no.html"]


def test_a_jumped_heading_and_an_image_without_text_are_seen():
    page = rules.parse("<h1>a</h1><h3>b</h3><img src='x.png'><select></select>")
    assert rules.heading_faults(page) == ["h1 is followed by h3"]
    assert len(rules.unlabelled(page)) == 2


def test_a_broken_reference_stops_the_build(tmp_path):
    for name in ("_config.yml", "book", "lib"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/bibliography\n")
    page = tmp_path / "book" / "bibliography.md"
    assert built_book.run(tmp_path) == ""
    page.write_text(page.read_text() + "\nSee {ref}`no-such-place`.\n")
    assert "no-such-place" in built_book.run(tmp_path)
