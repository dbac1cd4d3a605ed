"""The ledger of claims: what each paper says, and the run that shows it or does not.

``book/claims.yml`` holds the rows. A notebook cell checks a row with :func:`check`; the
verdict is stored with the cell's output, and the scorecard is drawn from there.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from icml25.core.runtime import repository

MIME = "application/vnd.icml25.claim+json"
SHOWN = "shown"
REDUCED = "shown at reduced scale"
NOT_SHOWN = "not shown"
NOT_YET = "not yet"
_MARKS = {SHOWN: "✓", REDUCED: "✓", NOT_SHOWN: "✗", NOT_YET: "·"}
# The book's style sheet colours by class, for light and dark; the tints are for viewers
# that have no style sheet.
_CLASSES = {
    SHOWN: "is-shown",
    REDUCED: "is-reduced",
    NOT_SHOWN: "is-missed",
    NOT_YET: "is-open",
}
_TINTS = {SHOWN: "#1b7f5c", REDUCED: "#2b6cb0", NOT_SHOWN: "#b7791f", NOT_YET: "#888"}

_checked: dict[str, Verdict] = {}


class ClaimFailed(AssertionError):
    """A claim that a cell set out to show did not hold in this run."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one row of the ledger in one run.

    Attributes:
        id: the row, such as ``"golore-1"``.
        verdict: ``"shown"``, ``"shown at reduced scale"`` or ``"not shown"``.
        measured: what came out, in words and few digits.
        expected: what had to come out for the claim to hold; the tolerance.
        reduced: what is smaller here than in the paper.
        why: the reason why a row is not shown.
        record: ``"<slug>/<name>"`` of the recorded run that is the evidence.
    """

    id: str
    verdict: str
    measured: str
    expected: str = ""
    reduced: str = ""
    why: str = ""
    record: str = ""

    def __str__(self) -> str:
        parts = [f"{_MARKS[self.verdict]} {self.id} {self.verdict}: {self.measured}"]
        parts += [f"needed: {self.expected}"] if self.expected else []
        parts += [f"smaller than the paper: {self.reduced}"] if self.reduced else []
        parts += [f"why: {self.why}"] if self.why else []
        parts += [f"recorded run: {self.record}"] if self.record else []
        return " | ".join(parts)

    def to_html(self) -> str:
        """A card that reads in a light and a dark page, with no style sheet at hand."""
        row = _row(self.id)
        tint = _TINTS[self.verdict]
        lines = [f"<strong>Measured:</strong> {html.escape(self.measured)}"]
        for name, text in (
            ("Needed", self.expected),
            ("Smaller than in the paper", self.reduced),
            ("Why", self.why),
            ("Recorded run", self.record),
        ):
            if text:
                lines.append(f"<strong>{name}:</strong> {html.escape(text)}")
        return (
            f'<div class="icml25-claim {_CLASSES[self.verdict]}" style="border-left:'
            f'4px solid {tint};padding:.3em 0 .3em .8em;margin:.4em 0">'
            f'<div><span style="color:{tint};font-weight:700">{_MARKS[self.verdict]} '
            f"{self.verdict}</span> <code>{self.id}</code> "
            f"{html.escape(row['claim'])}</div>" + "<br>".join(lines) + "</div>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict:
        return {
            "text/plain": str(self),
            "text/html": self.to_html(),
            MIME: asdict(self),
        }


@cache
def load(path: Path | None = None) -> dict[str, Any]:
    """The ledger: ``{"chapters": [...], "claims": [...]}`` as in ``book/claims.yml``.

    Raises:
        ValueError: a claim's id is repeated or belongs to no chapter.
    """
    import yaml

    path = path or repository() / "book" / "claims.yml"
    ledger = yaml.safe_load(path.read_text(encoding="utf-8"))
    slugs = {chapter["slug"] for chapter in ledger["chapters"]}
    seen: set[str] = set()
    for row in ledger["claims"]:
        if row["id"] in seen:
            raise ValueError(f"{path}: claim id {row['id']!r} stands twice")
        if slug_of(row["id"]) not in slugs:
            raise ValueError(f"{path}: claim id {row['id']!r} belongs to no chapter")
        seen.add(row["id"])
    return ledger


def slug_of(claim_id: str) -> str:
    """The chapter a row belongs to: ``slug_of("golore-1") == "golore"``."""
    return claim_id.rpartition("-")[0]


def _row(claim_id: str) -> dict[str, Any]:
    for row in load()["claims"]:
        if row["id"] == claim_id:
            return row
    known = ", ".join(row["id"] for row in load()["claims"])
    raise ValueError(f"claim id {claim_id!r} is not in the ledger; it has: {known}")


def check(
    claim_id: str,
    *,
    measured: str,
    expected: str,
    holds: bool,
    reduced: str = "",
    record: str = "",
) -> None:
    """Check one row of the ledger: raise if it does not hold, else show the verdict.

    Args:
        claim_id: row of ``book/claims.yml``.
        measured: what came out, in words with at most two or three digits.
        expected: what had to come out; set from the claim, not from the result.
        holds: the condition, computed in the same cell.
        reduced: what is smaller here than in the paper; turns the verdict into
            "shown at reduced scale".
        record: ``"<slug>/<name>"`` where the evidence is a recorded run.

    Raises:
        ClaimFailed: ``holds`` is false.
        ValueError: unknown row, empty text, unknown record.
        TypeError: ``holds`` is not one truth value.
    """
    _row(claim_id)
    _need_text(claim_id, measured=measured, expected=expected)
    _need_record(record)
    if not isinstance(holds, bool) and type(holds).__name__ not in ("bool", "bool_"):
        raise TypeError(
            f"{claim_id}: holds={holds!r} is a {type(holds).__name__}; give one bool"
        )
    if not holds:
        raise ClaimFailed(f"{claim_id} does not hold: {measured}; needed: {expected}")
    _show(
        Verdict(
            id=claim_id,
            verdict=REDUCED if reduced else SHOWN,
            measured=measured,
            expected=expected,
            reduced=reduced,
            record=record,
        )
    )


def not_shown(
    claim_id: str, *, why: str, measured: str, expected: str = "", record: str = ""
) -> None:
    """State that a row was *not* shown, with what was measured and the reason.

    Args:
        claim_id: row of ``book/claims.yml``.
        why: the reason, for the reader.
        measured: what came out instead, or ``"not run"``.
        expected: what would have shown it.
        record: ``"<slug>/<name>"`` of the recorded run that says so.

    Raises:
        ValueError: unknown row, empty text, unknown record.
    """
    _row(claim_id)
    _need_text(claim_id, why=why, measured=measured)
    _need_record(record)
    _show(
        Verdict(
            id=claim_id,
            verdict=NOT_SHOWN,
            measured=measured,
            expected=expected,
            why=why,
            record=record,
        )
    )


def table(slug: str) -> Any:
    """The chapter's rows with the verdicts of this run, as a table.

    Raises:
        ClaimFailed: a row of the chapter was neither checked nor declared not shown.
        ValueError: the ledger has no such chapter.
    """
    rows = [row for row in load()["claims"] if slug_of(row["id"]) == slug]
    if not rows:
        known = ", ".join(chapter["slug"] for chapter in load()["chapters"])
        raise ValueError(f"slug={slug!r} is no chapter; chapters are: {known}")
    missing = [row["id"] for row in rows if row["id"] not in _checked]
    if missing:
        raise ClaimFailed(f"rows of {slug} that no cell checked: {', '.join(missing)}")
    return _Table([(row, _checked[row["id"]]) for row in rows])


class _Table:
    def __init__(self, rows: list[tuple[dict[str, Any], Verdict]]) -> None:
        self.rows = rows

    def __repr__(self) -> str:
        return "\n".join(str(verdict) for _, verdict in self.rows)

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td><code>{verdict.id}</code></td><td>{html.escape(row['claim'])}</td>"
            f'<td><span class="{_CLASSES[verdict.verdict]}" '
            f'style="color:{_TINTS[verdict.verdict]};font-weight:700">'
            f"{_MARKS[verdict.verdict]} {verdict.verdict}</span></td>"
            f"<td>{html.escape(verdict.measured)}</td></tr>"
            for row, verdict in self.rows
        )
        return (
            '<div class="icml25-scroll"><table class="icml25-claims"><thead><tr>'
            "<th>row</th><th>claim</th><th>verdict</th><th>measured</th></tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )


def stored_verdicts(notebook: Path) -> list[dict[str, Any]]:
    """The verdicts stored in a notebook's outputs, in order.

    Returns:
        One dict per verdict: the fields of :class:`Verdict` plus ``cell`` (index of the
        cell) and ``section`` (text of the last heading above it).
    """
    found = []
    section = ""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            headings = [
                line.lstrip("#").strip()
                for line in "".join(cell["source"]).splitlines()
                if line.startswith("#")
            ]
            section = headings[-1] if headings else section
        for output in cell.get("outputs", []):
            verdict = output.get("data", {}).get(MIME)
            if verdict:
                found.append({**verdict, "cell": index, "section": section})
    return found


def ledger() -> list[dict[str, Any]]:
    """Every row of the ledger with its stored verdict, or ``"not yet"`` without one.

    Returns:
        One dict per row: ``id``, ``claim``, ``kind``, ``source``, ``shows``,
        ``chapter`` (its entry) and the stored verdict's fields; ``verdict`` is
        ``"not yet"`` where no run stands behind the row.
    """
    book = load()
    rows = []
    for chapter in book["chapters"]:
        notebook = repository() / "notebooks" / f"{chapter['notebook']}.ipynb"
        stored = stored_verdicts(notebook) if notebook.is_file() else []
        by_id = {verdict["id"]: verdict for verdict in stored}
        for row in book["claims"]:
            if slug_of(row["id"]) == chapter["slug"]:
                verdict = by_id.get(row["id"], {"verdict": NOT_YET, "measured": ""})
                rows.append({**row, "chapter": chapter, **verdict})
    return rows


def _need_text(claim_id: str, **texts: str) -> None:
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{claim_id}: {name}={text!r} must be a non-empty text")


def _need_record(record: str) -> None:
    if record:
        from icml25.core import records

        slug, slash, name = record.partition("/")
        if not slash:
            raise ValueError(f"record={record!r}: give it as '<slug>/<name>'")
        records.load(slug, name)


def _show(verdict: Verdict) -> None:
    _checked[verdict.id] = verdict
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(verdict)
        return
    if get_ipython() is None:
        print(verdict)
    else:
        display(verdict)
