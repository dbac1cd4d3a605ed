"""Time the cores against their plain versions and their peers: `make bench`.

Every row is a ratio (ours / other) measured in one process, so that a slow or busy
machine changes both sides alike. `make bench BENCH="golore tar"` runs some chapters.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(names: list[str]) -> int:
    known = sorted(path.stem[6:] for path in HERE.glob("bench_*.py"))
    if unknown := set(names) - set(known):
        print(f"no benchmark {sorted(unknown)}; there are: {', '.join(known)}")
        return 2
    sys.path.insert(0, str(HERE))
    missed = 0
    for name in names or known:
        print(f"\n== {name}", flush=True)
        print(f"{'what':<58} {'ours':>10} {'other':>10} {'ratio':>8}  target")
        for row in importlib.import_module(f"bench_{name}").rows():
            target = row.get("target")
            met = target is None or row["ratio"] <= target
            missed += not met
            goal = "" if target is None else f"<= {target:g}{'' if met else '  MISSED'}"
            print(
                f"{row['name']:<58} {_time(row['ours_s']):>10} "
                f"{_time(row['other_s']):>10} {row['ratio']:>8.3f}  {goal}"
            )
            if row.get("note"):
                print(f"    {row['note']}")
    return int(missed > 0)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
