"""Collusion on a GPU: 1,000 populations of figure 1 at once, and 3,000,000 rows.

Run `python tests/benchmarks/gpu_collusion.py`; without a GPU it says so and stops.
"""

from __future__ import annotations

import time

import torch
from icml25.collusion import EXPERIMENTS, count_tables, figures
from icml25.collusion.cars import car_signal, sample_cars
from icml25.core import make_generator


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: skipped")
        return
    device = torch.device("cuda")
    config = EXPERIMENTS["bands"].paper
    figures.bands(config, device=device, seed=0)  # warm up
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = figures.bands(config, device=device, seed=1)
    seconds = time.perf_counter() - begin
    points = config.repetitions * len(found["share"])
    print(f"{points:,} staircase points in {seconds:.2f} s")
    assert found["violations"] == 0
    generator = make_generator(0, device)
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        x, y = sample_cars(3_000_000, generator=generator)
        tables = count_tables(car_signal(), x, y, num_labels=4)
        assert int(tables.size) == 3_000_000
        seconds = time.perf_counter() - begin
    print(f"3,000,000 rows drawn and counted: {seconds:.3f} s")


if __name__ == "__main__":
    main()
