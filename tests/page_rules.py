"""The rules a built page keeps, each a function from its HTML to its violations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"

# What a browser loads by itself. A link that the reader may follow is not among it.
_LOADED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "audio": ("src",),
    "video": ("src", "poster"),
    "source": ("src", "srcset"),
    "track": ("src",),
    "embed": ("src",),
    "object": ("data",),
}
_LOADING_RELS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "font"}
_OUTSIDE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
_OUTSIDE_IN_CSS = re.compile(
    r"(?:url\(|@import)\s*['\"]?\s*((?:https?:)?//[^'\")\s;]+)", re.IGNORECASE
)
_RAW_TEX = re.compile(r"\$\$|\\(?:frac|mathbb|mathcal|begin|end|sum|label|text)\b")


def parse(text: str) -> BeautifulSoup:
    return BeautifulSoup(text, "html.parser")


def outside_resources(page: BeautifulSoup) -> list[str]:
    """Addresses outside the book that the page would load."""
    found = [address for address in _resources(page) if _OUTSIDE.match(address)]
    for css in page.find_all("style"):
        found += outside_in_css(css.get_text())
    for node in page.find_all(style=True):
        found += outside_in_css(node["style"])
    return found


def outside_in_css(text: str) -> list[str]:
    """Addresses outside the book that a style sheet would load."""
    return _OUTSIDE_IN_CSS.findall(text)


def _resources(page: BeautifulSoup) -> list[str]:
    found = [
        node[attribute]
        for name, attributes in _LOADED.items()
        for node in page.find_all(name)
        for attribute in attributes
        if node.get(attribute)
    ]
    found += [
        node["href"]
        for node in page.find_all("link", href=True)
        if _LOADING_RELS & set(node.get("rel", []))
    ]
    return found


def missing_resources(page: BeautifulSoup, path: Path) -> list[str]:
    """Files that the page would load and that the book does not have."""
    return [
        address
        for address in _resources(page)
        if not _OUTSIDE.match(address)
        and not address.startswith("data:")
        and not (path.parent / unquote(urlsplit(address).path)).is_file()
    ]


def dead_links(page: BeautifulSoup, path: Path, ids: dict[Path, set[str]]) -> list[str]:
    """Links into the book whose page or anchor is not there.

    Args:
        page: the parsed page.
        path: where it lies.
        ids: the anchors of every page, by resolved path.
    """
    found = []
    for node in page.find_all("a", href=True):
        parts = urlsplit(node["href"])
        if parts.scheme or parts.netloc or "headerlink" in node.get("class", []):
            continue
        target = path
        if parts.path:
            target = (path.parent / unquote(parts.path)).resolve()
        known = target.is_file() if target not in ids else True
        anchor = unquote(parts.fragment)
        if not known or (anchor and target in ids and anchor not in ids[target]):
            found.append(node["href"])
    return found


def anchors(page: BeautifulSoup) -> set[str]:
    return {node["id"] for node in page.find_all(id=True)}


def stateless_widgets(page: BeautifulSoup) -> list[str]:
    """Widget views whose model, or a model it refers to, the page does not hold."""
    state: dict = {}
    for node in page.find_all("script", type=WIDGET_STATE):
        state |= json.loads(node.string)["state"]
    wanted = [
        json.loads(node.string)["model_id"]
        for node in page.find_all("script", type=WIDGET_VIEW)
    ]
    missing, seen = [], set()
    while wanted:
        model = wanted.pop()
        if model in seen:
            continue
        seen.add(model)
        if model in state:
            wanted += re.findall(r"IPY_MODEL_([0-9a-f]+)", json.dumps(state[model]))
        else:
            missing.append(model)
    return missing


def raw_markup(page: BeautifulSoup) -> list[str]:
    """TeX, Markdown and error traces that reached the reader as text."""
    body = parse(str(page.find("article") or page))
    for node in body.find_all(["script", "style", "pre", "code"]):
        node.decompose()
    for node in body.find_all(class_=["math", "sig"]):
        node.decompose()
    text = body.get_text(" ")
    found = _RAW_TEX.findall(text)
    found += re.findall(r"(?:```|:::)\{?[\w-]*\}?", text)
    found += re.findall(r"\{[a-z:]+\}`", text)
    found += re.findall(r"\|\s*:?[-\u2013]+:?\s*\|", text)
    if "Traceback (most recent call last)" in page.get_text():
        found.append("Traceback")
    return found


def heading_faults(page: BeautifulSoup) -> list[str]:
    """More or less than one first-level heading, or a level that is jumped over."""
    article = page.find("article") or page
    levels = [int(node.name[1]) for node in article.find_all(re.compile(r"^h[1-6]$"))]
    faults = [] if levels.count(1) == 1 else [f"{levels.count(1)} first-level headings"]
    faults += [
        f"h{before} is followed by h{after}"
        for before, after in zip(levels, levels[1:], strict=False)
        if after > before + 1
    ]
    return faults


def unlabelled(page: BeautifulSoup) -> list[str]:
    """Images without alternative text, and form controls without a name."""
    article = page.find("article") or page
    found = [
        f"img {node.get('src', '')[:60]}"
        for node in article.find_all("img")
        if not node.get("alt", "").strip()
    ]
    found += [
        str(node)[:60]
        for node in article.find_all(["select", "input", "textarea"])
        if node.get("type") != "hidden"
        and not node.get("aria-label")
        and not node.find_parent("label")
    ]
    return found
