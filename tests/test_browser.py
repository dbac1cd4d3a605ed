"""The built pages in a real browser, opened from disk with the network off."""

import re
import shutil
from pathlib import Path

import built_book
import pytest
from icml25.core import claims

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no chromium on this machine (Debian: apt-get install chromium)",
    ),
]
PAGES = built_book.pages()
NOTEBOOKS = built_book.notebooks()
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# The lowest contrasts on the page, as WCAG 2 defines them, over what is painted behind.
CONTRAST = """
(selector) => {
  const probe = document.createElement("canvas").getContext("2d");
  const rgba = (color) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = probe.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => c / 255).map(
      (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      layers.push(rgba(getComputedStyle(at).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    const mix = (under, over) =>
      under.map((c, i) => over[i] * over[3] + c * (1 - over[3]));
    return layers.reverse().reduce(mix, [255, 255, 255]);
  };
  const seen = [];
  for (const node of document.querySelectorAll(selector)) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim());
    if (!own || !node.getClientRects().length || !node.checkVisibility()) continue;
    const text = luminance(rgba(getComputedStyle(node).color));
    const behind = luminance(ground(node));
    const [low, high] = [text, behind].sort((x, y) => x - y);
    const what = `${node.tagName}.${node.className} ${node.innerText.slice(0, 40)}`;
    seen.push([(high + 0.05) / (low + 0.05), what]);
  }
  return seen.sort((x, y) => x[0] - y[0]).slice(0, 8);
}
"""


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, book):
    """visit(name) opens a page; what it did wrong is told when the test ends."""
    contexts, faults = [], []

    def note(route):
        faults.append(f"asked the network for {route.request.url}")
        route.abort()

    def open_page(name):
        context = chromium.new_context(
            viewport={"width": 1280, "height": 900}, reduced_motion="reduce"
        )
        contexts.append(context)
        context.route(re.compile(r"^(https?|wss?):"), note)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
        page.on("requestfailed", lambda request: faults.append(f"lost {request.url}"))
        page.on(
            "console",
            lambda message: (
                faults.append(f"console: {message.text}")
                if message.type == "error"
                else None
            ),
        )
        page.goto(Path(book, f"{name}.html").as_uri())
        _settle(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def _settle(page):
    """Wait until math is typeset and widgets are drawn."""
    page.evaluate("window.MathJax?.startup?.promise")
    page.wait_for_function(
        """() => [...document.querySelectorAll(
          'script[type="application/vnd.jupyter.widget-view+json"]'
        )].every((view) =>
          view.previousElementSibling?.querySelector(".jupyter-widgets"))"""
    )


def _frames(page, figure):
    """What a figure shows now: one picture, or one frame of HTML with all it holds."""
    shown = figure.locator("img:visible:not(.widget-html-content *)").evaluate_all(
        "images => images.map(image => image.src)"
    )
    html = figure.locator(".widget-html-content:visible").evaluate_all(
        "frames => frames.map(frame => frame.innerHTML)"
    )
    return shown + [each for each in html if each.strip()]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_desktop_a_tablet_and_a_phone(visit, name):
    page = visit(name)
    assert page.locator("article h1").inner_text().strip()
    for width in (1280, 820, 390):
        page.set_viewport_size({"width": width, "height": 844})
        beyond = page.evaluate(
            "document.documentElement.scrollWidth - window.innerWidth"
        )
        assert beyond <= 0, f"{beyond} px wider than a window of {width} px"


@pytest.mark.parametrize("name", PAGES)
def test_text_is_readable_in_light_and_in_dark(visit, name):
    page = visit(name)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.locator(f"html[data-theme='{scheme}']").wait_for()
        # 4.5 is what WCAG 2 asks of body text (AA). Code has the highlighter's colours.
        worst = page.evaluate(CONTRAST, "article :not(pre *, svg *, mjx-container *)")
        assert [entry for entry in worst if entry[0] < 4.5] == [], scheme


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_math_is_typeset(visit, name):
    page = visit(name)
    written = page.locator("article .math").count()
    assert written > 0
    assert page.locator("article .math mjx-container > svg").count() >= written
    assert page.locator("article [data-mml-node='merror']").count() == 0


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_control_moves_its_figure_by_keyboard(visit, name):
    page = visit(name)
    figures = page.locator(".icml25-explore")
    assert figures.count() > 0, "a chapter has at least one figure to play with"
    for figure in figures.all():
        assert len(_frames(page, figure)) == 1
        for handle in figure.locator(".noUi-handle").all():
            before = _frames(page, figure)
            at_end = handle.get_attribute("aria-valuenow") == handle.get_attribute(
                "aria-valuemax"
            )
            handle.focus()
            page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")
            assert _frames(page, figure) != before
        for group in figure.locator(".widget-toggle-buttons").all():
            before = _frames(page, figure)
            group.locator("button:not(.mod-active)").first.focus()
            page.keyboard.press("Enter")
            assert _frames(page, figure) != before


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_picture_is_drawn_and_every_player_has_sound(visit, name):
    page = visit(name)
    broken = page.locator("article img").evaluate_all(
        "images => images.filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    )
    assert broken == []
    for player in page.locator("audio").all():
        length = player.evaluate(
            """audio => new Promise((done) => {
              if (audio.readyState) return done(audio.duration);
              audio.onloadedmetadata = () => done(audio.duration);
              audio.onerror = () => done(0);
              audio.load();
            })"""
        )
        assert length > 0


def test_the_scorecard_filters_by_keyboard(visit):
    page = visit("book/scorecard")
    rows = page.locator("[data-claim]:visible")
    everything = rows.count()
    page.get_by_role("combobox", name="Chapter").focus()
    page.keyboard.type("GoLore")
    golore = page.locator("[data-claim^='golore-']").count()
    assert rows.count() == golore < everything
    assert page.locator(".icml25-filter output").inner_text() == f"{golore} claims"
    page.get_by_role("combobox", name="Chapter").select_option("")
    page.get_by_role("combobox", name="Verdict").select_option("shown")
    assert rows.count() == page.locator("[data-verdict='shown']").count()


def test_the_scorecard_is_whole_without_scripts(chromium, book):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(Path(book, "book", "scorecard.html").as_uri())
    rows = page.locator("[data-claim]")
    assert rows.count() == page.locator("[data-claim]:visible").count() > 0
    assert not page.locator(".icml25-filter").is_visible()
    context.close()


def test_the_index_leads_to_the_front_page(visit, book):
    page = visit("book/scorecard")
    page.goto(Path(book, "index.html").as_uri())
    page.wait_for_url("**/book/intro.html")
    assert page.locator(".icml25-card").count() == len(claims.load()["chapters"])


def test_search_finds_a_page_from_disk(visit):
    page = visit("search")
    page.goto(f"{page.url}?q=ledger")
    # Results come one after the other.
    page.locator("#search-results li a[href*='book/trust']").first.wait_for()


def test_the_theme_switch_is_reached_by_keyboard(visit):
    page = visit("book/intro")
    switch = page.locator("button.theme-switch-button:visible").first
    modes = set()
    for _ in range(3):
        switch.focus()
        page.keyboard.press("Enter")
        modes.add(page.locator("html").get_attribute("data-theme"))
    assert modes == {"light", "dark"}
