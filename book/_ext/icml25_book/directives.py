"""The directives that write the generated parts of the book as HTML."""

from html import escape
from importlib import import_module
from importlib.util import find_spec

from docutils import nodes
from docutils.statemachine import StringList
from icml25.core import claims, records
from sphinx.util.docutils import SphinxDirective

from icml25_book.sources import VERDICTS, Chapter, chapters, count, files

_MARKS = {"shown": "✓", "reduced": "✓", "missed": "✗", "open": "·"}
_LABELS = {
    "shown": "shown",
    "reduced": "reduced",
    "missed": "not shown",
    "open": "not yet",
}


class _Generated(SphinxDirective):
    """A part of a page drawn from the ledger, the notebooks and the recorded runs."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        for path in files(self.env):
            self.env.note_dependency(path)
        return [nodes.raw("", self.draw(chapters(self.env)), format="html")]

    def draw(self, book: list[Chapter]) -> str:
        raise NotImplementedError

    def href(self, docname: str, anchor: str = "") -> str:
        uri = self.env.app.builder.get_relative_uri(self.env.docname, docname)
        return escape(f"{uri}#{anchor}" if anchor else uri)

    def asset(self, path: str) -> str:
        return "../" * self.env.docname.count("/") + path


class ChapterCards(_Generated):
    """One card a chapter: its question, a figure from its outputs, time, verdicts."""

    def draw(self, book: list[Chapter]) -> str:
        return f'<div class="icml25-cards">{"".join(map(self._card, book))}</div>'

    def _card(self, chapter: Chapter) -> str:
        name = escape(chapter.name)
        if chapter.is_there:
            name = f'<a href="{self.href(chapter.docname)}">{name}</a>'
        return (
            f'<article class="icml25-card{"" if chapter.is_there else " is-open"}">'
            f"{self._figure(chapter)}"
            '<div class="icml25-card-text">'
            f'<p class="icml25-card-head"><span>{chapter.number:02d}</span>'
            f"<span>{_duration(chapter.run_seconds)}</span></p>"
            f'<p class="icml25-card-name" role="heading" aria-level="3">{name}</p>'
            f"<p>{escape(chapter.question)}</p>"
            f"{_counts(chapter)}"
            "</div></article>"
        )

    def _figure(self, chapter: Chapter) -> str:
        if not chapter.card_png:
            return '<div class="icml25-card-figure" aria-hidden="true">not yet</div>'
        source = self.asset(f"_images/cards/{chapter.slug}.png")
        return (
            f'<div class="icml25-card-figure"><img src="{source}" loading="lazy" '
            f'alt="A figure from the chapter on {escape(chapter.name)}"></div>'
        )


class LedgerTotals(_Generated):
    """How many rows of the ledger carry each verdict."""

    def draw(self, book: list[Chapter]) -> str:
        rows = [row for chapter in book for row in chapter.rows]
        cells = "".join(
            f'<div class="is-{VERDICTS[name]}"><dd>{number}</dd><dt>{name}</dt></div>'
            for name, number in count(rows).items()
        )
        return (
            f'<dl class="icml25-totals"><div><dd>{len(rows)}</dd><dt>claims</dt></div>'
            f"{cells}</dl>"
        )


class Scorecard(_Generated):
    """Every row of the ledger with its verdict and a link to the cell behind it."""

    def draw(self, book: list[Chapter]) -> str:
        chapter_options = "".join(
            f'<option value="{chapter.slug}">{escape(chapter.name)}</option>'
            for chapter in book
        )
        verdict_options = "".join(
            f'<option value="{css}">{name}</option>' for name, css in VERDICTS.items()
        )
        return (
            '<form class="icml25-filter" hidden>'
            '<label>Chapter <select name="chapter"><option value="">all</option>'
            f"{chapter_options}</select></label>"
            '<label>Verdict <select name="verdict"><option value="">all</option>'
            f"{verdict_options}</select></label>"
            '<output aria-live="polite"></output></form>'
            '<table class="icml25-ledger" role="table"><thead role="rowgroup">'
            '<tr role="row"><th scope="col" role="columnheader">claim</th>'
            '<th scope="col" role="columnheader">verdict</th>'
            '<th scope="col" role="columnheader">measured here</th></tr></thead>'
            f"{''.join(map(self._group, book))}</table>"
        )

    def _group(self, chapter: Chapter) -> str:
        name = f"{chapter.number}. {escape(chapter.name)}"
        if chapter.is_there:
            name = f'<a href="{self.href(chapter.docname)}">{name}</a>'
        return (
            f'<tbody role="rowgroup" id="{chapter.slug}" data-chapter="{chapter.slug}">'
            '<tr role="row" class="icml25-ledger-chapter">'
            f'<th scope="rowgroup" role="rowheader" colspan="3">{name}'
            f"{_counts(chapter)}</th></tr>"
            f"{''.join(self._row(chapter, row) for row in chapter.rows)}</tbody>"
        )

    def _row(self, chapter: Chapter, row: dict) -> str:
        css = VERDICTS[row["verdict"]]
        where = ""
        if "cell" in row and chapter.is_there:
            section = escape(row["section"] or chapter.name)
            link = self.href(chapter.docname, f"claim-{row['id']}")
            where = f'<p class="icml25-where">See <a href="{link}">{section}</a></p>'
        return (
            f'<tr role="row" data-claim="{row["id"]}" data-verdict="{css}">'
            f'<th scope="row" role="rowheader"><code>{row["id"]}</code> '
            f"{escape(row['claim'])}"
            "<details><summary>What counts as showing it</summary>"
            f"<p>{escape(row['shows'])}</p><p>{escape(row['kind'].capitalize())}; "
            f"stated in the paper: {escape(row['source'])}.</p></details></th>"
            f'<td role="cell"><span class="icml25-badge is-{css}">{_MARKS[css]} '
            f"{row['verdict']}</span></td>"
            f'<td role="cell">{_evidence(row)}{where}</td></tr>'
        )


class NotShown(_Generated):
    """The rows that were not shown, each with its reason and the cell behind it."""

    def draw(self, book: list[Chapter]) -> str:
        rows = "".join(
            f"<dt>{escape(row['claim'])} "
            f'<a href="{self.href(chapter.docname, "claim-" + row["id"])}">'
            f"{escape(row['id'])}</a></dt><dd><p>{_sentence(row['why'])}</p></dd>"
            for chapter in book
            for row in chapter.rows
            if row["verdict"] == claims.NOT_SHOWN
        )
        return f'<dl class="simple icml25-missed">{rows}</dl>'


class RunTimes(_Generated):
    """What each stored run took, and on what kind of machine."""

    def draw(self, book: list[Chapter]) -> str:
        return _table(
            ["chapter", "stored run", "machine", "code cells"],
            [
                [
                    f'<a href="{self.href(chapter.docname)}">{escape(chapter.name)}</a>'
                    if chapter.is_there
                    else escape(chapter.name),
                    _duration(chapter.run_seconds) or "not yet",
                    escape(chapter.machine),
                    str(chapter.num_cells or ""),
                ]
                for chapter in book
            ],
        )


class ApiModule(SphinxDirective):
    """The documented names of one module: its docstring, then its public names."""

    has_content = False
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        if not find_spec(module):
            raise self.error(f"there is no module {module!r}")
        # A package re-exports what its files define; `__all__` says what is public.
        has_exports = hasattr(import_module(module), "__all__")
        exported = "   :imported-members:\n" if has_exports else ""
        text = f"""
```{{eval-rst}}
.. automodule:: {module}
   :members:
{exported}```
"""
        lines = StringList(text.splitlines(), source=self.get_source_info()[0])
        part = nodes.Element()
        self.state.nested_parse(lines, self.content_offset, part)
        return part.children


class RecordedRuns(_Generated):
    """The recorded runs of one chapter, or of all, with their provenance."""

    optional_arguments = 1

    def draw(self, book: list[Chapter]) -> str:
        wanted = self.arguments[0] if self.arguments else None
        known = [chapter.slug for chapter in book]
        if wanted and wanted not in known:
            raise self.error(f"{wanted!r} is no chapter; chapters are {known}")
        rows = [
            self._row(chapter, name, records.load(chapter.slug, name))
            for chapter in book
            if wanted in (None, chapter.slug)
            for name in records.names(chapter.slug)
        ]
        if not rows:
            return "<p>No run has been recorded yet.</p>"
        return _table(["run", "scale", "took", "machine", "date", "commit"], rows)

    def _row(self, chapter: Chapter, name: str, record: dict) -> list[str]:
        return [
            f"{escape(chapter.name)}<br><code>{escape(name)}</code>",
            escape(record["scale"]),
            _duration(record["wall_s"]),
            escape(record["machine"]),
            escape(record["date"]),
            f"<code>{escape(record['commit'])}</code>",
        ]


def _counts(chapter: Chapter) -> str:
    badges = "".join(
        f'<li class="icml25-badge is-{VERDICTS[name]}">{_MARKS[VERDICTS[name]]} '
        f"{number} {_LABELS[VERDICTS[name]]}</li>"
        for name, number in chapter.counts().items()
        if number
    )
    return f'<ul class="icml25-counts" aria-label="verdicts">{badges}</ul>'


def _evidence(row: dict) -> str:
    if row["verdict"] == claims.NOT_YET:
        return ""
    parts = [
        ("", row["measured"]),
        ("Needed: ", row.get("expected")),
        ("Smaller than in the paper: ", row.get("reduced")),
        ("Why: ", row.get("why")),
        ("Recorded run: ", row.get("record")),
    ]
    return "".join(
        f"<p><span>{label}</span>{escape(text)}</p>" for label, text in parts if text
    )


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:].rstrip(".") + ".")


def _duration(seconds: float | None) -> str:
    """Seconds with no more digits than a rerun would repeat."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _table(head: list[str], rows: list[list[str]]) -> str:
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td>{cell}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        '<div class="icml25-scroll" tabindex="0" role="region" aria-label="table">'
        f'<table class="table"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


DIRECTIVES = {
    "chapter-cards": ChapterCards,
    "ledger-totals": LedgerTotals,
    "scorecard": Scorecard,
    "not-shown": NotShown,
    "run-times": RunTimes,
    "recorded-runs": RecordedRuns,
    "api-module": ApiModule,
}
