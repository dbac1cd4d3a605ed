"""One notation: every chapter's symbols on one page, and links to the glossary."""

import json
import re
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from icml25_book.sources import chapters, files

PAGE = "book/notation"
_TABLE = re.compile(r"^\| symbol \|.*\n(?:\|.*\n?)+", re.MULTILINE)
# Where a link would be in the way, or is one already.
_NOT_INSIDE = (
    nodes.reference,
    nodes.emphasis,  # titles of papers
    nodes.literal,
    nodes.math,
    nodes.title,
    nodes.term,
    nodes.table,
    nodes.raw,
    nodes.FixedTextElement,
)


def symbol_tables(notebook: Path) -> list[str]:
    """The Markdown tables of a notebook whose first column is headed `symbol`."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )
    return _TABLE.findall(text)


class NotationTables(SphinxDirective):
    """Every chapter's table of symbols, as its notebook holds it."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        for path in files(self.env):
            self.env.note_dependency(path)
        return [
            self._section(chapter) for chapter in chapters(self.env) if chapter.is_there
        ]

    def _section(self, chapter) -> nodes.section:
        name = f"{chapter.number}. {chapter.name}"
        section = nodes.section("", nodes.title("", name), ids=[chapter.slug])
        path = Path(self.env.doc2path(chapter.docname))
        lines = [f"From [the chapter](../{chapter.docname}.ipynb).", ""]
        for table in symbol_tables(path):
            lines += [*table.splitlines(), ""]
        self.state.nested_parse(
            StringList(lines, source=str(path)), self.content_offset, section
        )
        return section


def link_terms(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Lead the first use of each glossary term in a chapter to its explanation."""
    if not docname.startswith("notebooks/"):
        return
    objects = app.env.get_domain("std").objects
    terms = {
        name: anchor
        for (kind, name), (page, anchor) in objects.items()
        if kind == "term" and page == PAGE
    }
    here = app.builder.get_relative_uri(docname, PAGE)
    for text in list(doctree.findall(nodes.Text)):
        if terms and _is_prose(text):
            parts = split_terms(str(text), terms, here)
            if len(parts) > 1:
                text.parent.replace(text, parts)


def _is_prose(text: nodes.Text) -> bool:
    node, in_paragraph = text.parent, False
    while node is not None:
        if (
            isinstance(node, _NOT_INSIDE)
            or node.get("nb_element") == "cell_code_output"
        ):
            return False
        in_paragraph |= isinstance(node, nodes.paragraph)
        node = node.parent
    return in_paragraph


def split_terms(text: str, terms: dict[str, str], here: str) -> list[nodes.Node]:
    """The text with each term's first use as a link; found terms leave ``terms``."""
    found: list[nodes.Node] = []
    while terms:
        # Longest first: "process reward model" before "reward model".
        names = map(_pattern, sorted(terms, key=len, reverse=True))
        match = re.search(rf"(?<![\w-])(?:{'|'.join(names)})s?(?![\w-])", text)
        if not match:
            break
        anchor = next(
            anchor
            for name, anchor in terms.items()
            if re.fullmatch(f"{_pattern(name)}s?", match[0])
        )
        # The names of one entry share its anchor: once is enough.
        for name in [name for name, other in terms.items() if other == anchor]:
            del terms[name]
        link = nodes.reference("", match[0], refuri=f"{here}#{anchor}", internal=True)
        link["classes"] = ["icml25-term"]
        found += [nodes.Text(text[: match.start()]), link]
        text = text[match.end() :]
    return [*found, nodes.Text(text)]


def _pattern(name: str) -> str:
    """A term in any case, but for abbreviations: MAP is not a map."""
    is_plain = name[1:] == name[1:].lower()
    return f"(?i:{re.escape(name)})" if is_plain else re.escape(name)
