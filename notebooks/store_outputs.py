"""Run notebooks in fresh kernels and store their outputs: `make notebooks`.

A notebook is replaced only after a whole clean run. Nothing that changes from run
to run (widget ids, time stamps) is kept, so that a second run gives the same file but
for its measured run time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import uuid
from pathlib import Path

import conftest  # noqa: F401  # sets the environment that the checks use too
import nbformat
from icml25.core import records
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).resolve().parent
BUDGET_S = 90
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def store(path: Path) -> float:
    """Run one notebook and replace it; returns the run time in seconds."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        for noise in ("execution", "ExecuteTime", "collapsed"):
            cell.metadata.pop(noise, None)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        resources={"metadata": {"path": str(HERE)}},
    )
    begin = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - begin
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["icml25"] = {
        "run_seconds": round(seconds),
        "machine": records.machine().partition(" (")[0],
    }
    text = _stable_widget_ids(nbformat.writes(notebook), path.stem)
    partial = path.with_suffix(".partial")
    partial.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    os.replace(partial, path)
    return seconds


def _stable_widget_ids(text: str, name: str) -> str:
    """Give widgets ids that depend only on the notebook and their place in it."""
    notebook = json.loads(text)
    stored = notebook["metadata"].get("widgets", {}).get(WIDGET_STATE)
    if stored is None:
        return text
    models = {old: json.dumps(model) for old, model in stored["state"].items()}
    names: dict[str, str] = {}

    def visit(old: str) -> None:
        if old not in names and old in models:
            key = f"icml25/{name}/{len(names)}"
            names[old] = uuid.uuid5(uuid.NAMESPACE_URL, key).hex
            for part in re.findall(r"IPY_MODEL_([0-9a-f]{32})", models[old]):
                visit(part)

    def renamed(string: str) -> str:
        return re.sub(r"[0-9a-f]{32}", lambda m: names.get(m[0], m[0]), string)

    for old in re.findall(r'"model_id": "([0-9a-f]{32})"', text):
        visit(old)
    # Links hang on no widget; their order follows from what they link.
    for old in sorted(models.keys() - names.keys(), key=lambda o: renamed(models[o])):
        visit(old)
    stored["state"] = {old: stored["state"][old] for old in names}
    return renamed(json.dumps(notebook, indent=1, ensure_ascii=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    chosen = parser.parse_args().notebooks or sorted(HERE.glob("[0-9]*.ipynb"))
    if missing := [str(path) for path in chosen if not path.is_file()]:
        print(f"no such notebook: {', '.join(missing)}", file=sys.stderr)
        return 2
    failed = False
    for path in chosen:
        print(f"running {path.name} ...", flush=True)
        try:
            seconds = store(path.resolve())
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(
                f"{path.name} FAILED, its file is unchanged\n{error}", file=sys.stderr
            )
            failed = True
            continue
        over = seconds > BUDGET_S
        note = f", more than the {BUDGET_S} s that `make test` allows" if over else ""
        print(f"stored {path.name}: {seconds:.0f} s{note}", flush=True)
        failed |= over
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
