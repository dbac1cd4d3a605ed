"""Exact ranks of 5,000 queries against 1,000,000 rows on a CUDA device.

    python tests/benchmarks/gpu_id2.py

Under two minutes; says so and stops where there is no CUDA device. The gallery is
kept in bfloat16 and float16; a slice is compared with the CPU's ranks, which must be
equal.
"""

from __future__ import annotations

import json
import sys

import torch
from icml25.id2 import PairScatter, rank_of_positive, whitening_transform
from icml25.id2.ranking import unit

NUM_QUERIES, NUM_GALLERY, DIM = 5_000, 1_000_000, 512


def _time(work) -> tuple[float, float]:
    """Milliseconds and extra peak memory in MB of the second of two runs."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), (torch.cuda.max_memory_allocated() - before) / 1e6


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return 0
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    gallery = unit(torch.randn(NUM_GALLERY, DIM, **options))
    positive = torch.randint(NUM_GALLERY, (NUM_QUERIES,), **options)
    queries = unit(gallery[positive] + 0.2 * torch.randn(NUM_QUERIES, DIM, **options))
    table = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = gallery.to(dtype)
        for block in (8_192, 65_536):
            ms, extra = _time(
                lambda g=stored, b=block: rank_of_positive(
                    queries, g, positive, block=b
                )
            )
            table.append(
                {"gallery": str(dtype), "block": block, "ms": ms, "extra_mb": extra}
            )
    few = slice(0, 20_000)
    inside = positive < 20_000
    on_gpu = rank_of_positive(queries[inside], gallery[few], positive[inside])
    on_cpu = rank_of_positive(
        queries[inside].cpu(), gallery[few].cpu(), positive[inside].cpu()
    )
    if not torch.equal(on_gpu.cpu(), on_cpu):
        raise AssertionError("ranks on the two devices differ")
    scatter = PairScatter(4096, device="cuda")
    rows = torch.randn(65_536, 4096, **options)
    ms, _ = _time(lambda: scatter.update(torch.zeros_like(rows), rows))
    table.append({"scatter": "65,536 pairs of 4,096 numbers, float64 sum", "ms": ms})
    ms, _ = _time(lambda: whitening_transform(scatter.second_moment, 1.0))
    table.append({"whitening": "4,096 x 4,096", "ms": ms})
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": table,
        "equal_to_cpu": int(inside.sum()),
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
