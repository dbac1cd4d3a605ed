"""Command line: run an experiment, see the outside data, read the ledger."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence

from icml25.core import claims, data, records
from icml25.core.runtime import (
    CHAPTERS,
    SCALES,
    device,
    end_process,
    leave_processes,
    scale_name,
)

_EPILOG = """examples:
  python -m icml25 run golore                       the chapter's main experiment
  python -m icml25 run golore digits --seed 1       another of its experiments
  python -m icml25 run golore --list                what its experiments are
  python -m icml25 run golore --scale paper         the paper's own configuration
  python -m icml25 data                             data sets, and which are here
  python -m icml25 claims                           every claim and its verdict

chapters: """ + ", ".join(CHAPTERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m icml25",
        description="Eleven ICML 2025 papers that run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a chapter's experiment",
        epilog="chapters: " + ", ".join(CHAPTERS),
    )
    run.add_argument("slug", help="the chapter, such as golore")
    run.add_argument("experiment", nargs="?", help="default: the chapter's first")
    run.add_argument("--list", action="store_true", help="list its experiments")
    run.add_argument("--scale", choices=SCALES, help="default: $ICML25_SCALE or laptop")
    run.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: the best here)")
    run.add_argument("--seed", type=int, default=0, help="default: 0")
    run.add_argument(
        "--record",
        action="store_true",
        help="write book/results/<slug>/<name>-<scale>-seed<seed>.json",
    )
    show = commands.add_parser("data", help="outside data: list, show one, fetch")
    show.add_argument("name", nargs="?", help="one data set")
    show.add_argument("--fetch", action="store_true", help="bring it into the cache")
    ledger = commands.add_parser("claims", help="the ledger of claims with verdicts")
    ledger.add_argument("slug", nargs="?", help="one chapter")
    options = parser.parse_args(arguments)
    try:
        return {"run": _run, "data": _data, "claims": _claims}[options.command](options)
    except KeyboardInterrupt:
        print("interrupted; nothing was recorded", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        # The package's own say all in a line; PyTorch's are lost without a traceback.
        if isinstance(error, RuntimeError) and not _is_ours(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("icml25.")


def _chapter(slug: str) -> str:
    if slug not in CHAPTERS:
        raise ValueError(f"no chapter {slug!r}; chapters: {', '.join(CHAPTERS)}")
    return slug


def _run(options: argparse.Namespace) -> int:
    slug = _chapter(options.slug)
    try:
        return _run_experiment(options, slug)
    except ModuleNotFoundError as error:  # experiments import heavy packages late
        if (error.name or "icml25").startswith("icml25"):
            raise
        raise ValueError(
            f"chapter {slug!r} needs the package {error.name!r}: "
            "pip install -e '.[all]'"
        ) from error


def _run_experiment(options: argparse.Namespace, slug: str) -> int:
    experiments = importlib.import_module(f"icml25.{slug}").EXPERIMENTS
    known = "\n".join(f"  {key}: {e.summary}" for key, e in experiments.items())
    if options.list:
        print(f"experiments of {slug}, the default first:\n{known}")
        return 0
    chosen = options.experiment or next(iter(experiments))
    if chosen not in experiments:
        raise ValueError(f"{slug} has no experiment {chosen!r}; it has\n{known}")
    experiment = experiments[chosen]
    if options.record:
        records.directory()  # a run of hours must not end in finding none
    scale = options.scale or scale_name()
    where = device(options.device)
    config = experiment.config(scale)
    print(f"{slug}/{chosen}: {scale} scale, {where}, seed {options.seed}\n{config}")
    begin = time.perf_counter()
    try:
        metrics = experiment.function(config, device=where, seed=options.seed)
    finally:
        leave_processes()
    wall_s = time.perf_counter() - begin
    if int(os.environ.get("RANK", 0)) > 0:  # one of several processes speaks for all
        return 0
    print(json.dumps(metrics, indent=1, default=str))
    print(f"{wall_s:.1f} s on {records.machine(where)}")
    if options.record:
        path = records.write(
            slug,
            chosen,
            scale=scale,
            config=config,
            seed=options.seed,
            metrics=metrics,
            wall_s=wall_s,
            device=where,
        )
        print(f"recorded in {path}")
    return 0


def _data(options: argparse.Namespace) -> int:
    if options.fetch:
        names = [options.name] if options.name else list(data.DATASETS)
        for name in names:
            for filename, path in data.fetch_all(name).items():
                print(f"{name}/{filename}: {path}")
        return 0
    print(data.describe(options.name))
    return 0


def _claims(options: argparse.Namespace) -> int:
    if options.slug:
        _chapter(options.slug)
    for row in claims.ledger():
        if options.slug in (None, row["chapter"]["slug"]):
            print(f"{row['id']:<15} {row['verdict']:<23} {row['claim']}")
            if row["measured"]:
                print(f"{'':<15} {'':<23} -> {row['measured']}")
    return 0


if __name__ == "__main__":
    end_process(main())
