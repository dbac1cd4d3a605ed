"""HS-DTE on a GPU: the products' self-test there, then trees embedded on both devices.

Run `python tests/benchmarks/gpu_hsdte.py`; without a GPU it says so and stops.
`compiled=True` takes minutes to compile and is left to the last row.
"""

from __future__ import annotations

import time

import torch
from icml25.hsdte import RootedTree, embed_tree
from icml25.hsdte.arithmetic import product_is_exact

DIM = 20


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: skipped")
        return
    device = torch.device("cuda")
    fused = self_test(device)
    for height in (5, 7, 9):  # 364, 3,280 and 29,524 nodes
        for terms in (1, 2, 4):
            compare(RootedTree.balanced(3, height), terms, device)
    if fused:
        compare(RootedTree.balanced(3, 9), 2, device, product="fma")
    compare(RootedTree.balanced(3, 9), 2, device, compiled=True)


def self_test(device: torch.device) -> bool:
    """Print which products are exact; true if the fused one is, for doubles."""
    found = {}
    for method in ("dekker", "fma"):
        for dtype in (torch.float64, torch.float32):
            for compiled in (False, True):
                exact = product_is_exact(
                    method, device=device, dtype=dtype, compiled=compiled
                )
                found[method, dtype, compiled] = exact
                mode = "compiled" if compiled else "eager"
                print(f"{method}, {dtype}, {mode}: {'exact' if exact else 'NOT exact'}")
    assert (
        found["dekker", torch.float64, False] and found["dekker", torch.float32, False]
    )
    return found["fma", torch.float64, False]


def compare(tree: RootedTree, terms: int, device: torch.device, **options) -> None:
    """Time one tree on the CPU and on ``device``, with metrics; they must agree."""
    seconds, reports = {}, {}
    for where in (torch.device("cpu"), device):
        mode = options if where == device else {}

        def run(where=where, mode=mode):
            embedded = embed_tree(
                tree, DIM, terms=terms, twist=False, device=where, **mode
            )
            return embedded.report()

        run()  # warms up, compiles
        begin = time.perf_counter()
        reports[where.type] = run()  # its numbers are read back: the work is done
        seconds[where.type] = time.perf_counter() - begin
    cpu, other = reports["cpu"], reports[device.type]
    assert abs(other.d_ave / cpu.d_ave - 1) < 1e-6 and other.map == cpu.map
    extra = "".join(f", {name}={value}" for name, value in options.items())
    print(
        f"{len(tree):,} nodes, t={terms}{extra}: {seconds[device.type]:.3f} s with all "
        f"metrics, {seconds['cpu'] / seconds[device.type]:.1f} times the CPU"
    )


if __name__ == "__main__":
    main()
