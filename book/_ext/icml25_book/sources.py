"""What the generated parts of the book are drawn from."""

import json
from dataclasses import dataclass
from pathlib import Path

from icml25.core import claims, records
from sphinx.environment import BuildEnvironment

# Verdicts in the order in which totals are shown, with the class that colours them.
VERDICTS = {
    claims.SHOWN: "shown",
    claims.REDUCED: "reduced",
    claims.NOT_SHOWN: "missed",
    claims.NOT_YET: "open",
}


@dataclass(frozen=True)
class Chapter:
    """One chapter: its entry in the ledger and what its notebook stores."""

    number: int
    slug: str
    name: str
    title: str
    question: str
    paper_key: str
    docname: str
    is_there: bool
    rows: list[dict]
    run_seconds: float | None
    machine: str
    num_cells: int
    card_png: str | None

    def counts(self) -> dict[str, int]:
        return count(self.rows)


def count(rows: list[dict]) -> dict[str, int]:
    """How many rows carry each verdict, in the order of VERDICTS."""
    return {name: sum(row["verdict"] == name for row in rows) for name in VERDICTS}


def chapters(env: BuildEnvironment) -> list[Chapter]:
    """Every chapter of the ledger, in order; those in the book carry their notebook."""
    rows = claims.ledger()
    return [
        _chapter(
            env, entry, [row for row in rows if row["chapter"]["slug"] == entry["slug"]]
        )
        for entry in claims.load()["chapters"]
    ]


def files(env: BuildEnvironment) -> list[str]:
    """The files that generated parts depend on: when one changes, they are redrawn."""
    root = Path(env.srcdir)
    return [
        str(path)
        for path in (
            root / "book" / "claims.yml",
            *sorted((root / "notebooks").glob("*.ipynb")),
            *sorted(records.directory().rglob("*.json")),
        )
    ]


def _chapter(env: BuildEnvironment, entry: dict, rows: list[dict]) -> Chapter:
    docname = f"notebooks/{entry['notebook']}"
    is_there = docname in env.found_docs
    notebook = {"cells": [], "metadata": {}}
    if is_there:
        notebook = json.loads(Path(env.doc2path(docname)).read_text(encoding="utf-8"))
    run = notebook["metadata"].get("icml25", {})
    return Chapter(
        number=entry["number"],
        slug=entry["slug"],
        name=entry["name"],
        title=entry["title"],
        question=entry["question"],
        paper_key=entry["paper_key"],
        docname=docname,
        is_there=is_there,
        rows=rows,
        run_seconds=run.get("run_seconds"),
        machine=run.get("machine", ""),
        num_cells=sum(cell["cell_type"] == "code" for cell in notebook["cells"]),
        card_png=_card(notebook),
    )


def _card(notebook: dict) -> str | None:
    """The first image that the cell tagged `card` stored, base64-encoded."""
    for cell in notebook["cells"]:
        if "card" in cell["metadata"].get("tags", []):
            for output in cell.get("outputs", []):
                if image := output.get("data", {}).get("image/png"):
                    return "".join(image)
    return None
