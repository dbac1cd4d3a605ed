"""Edge attribution on a CUDA device at Pythia-1.4B's shape, random weights.

    python tests/benchmarks/gpu_circuits.py

Two or three minutes; says so and stops where there is no CUDA device. Time and peak
memory for 231,493 edges, 16 prompts of 24 tokens, 5 steps, one by one and folded, in
float32 and bfloat16; and a check that the device agrees with the CPU on a small model.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from icml25.circuits import attribute_edges

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_circuits import STEPS, random_model, random_pairs

PYTHIA = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "vocab_size": 50304,
}


def _agreement() -> float:
    """Largest difference of CPU and device scores, as a share of the largest score."""
    model, pairs = random_model(), random_pairs(4, 12, 1000)
    here = attribute_edges(model, pairs, steps=STEPS)
    there = attribute_edges(model.cuda(), pairs.to("cuda"), steps=STEPS).cpu()
    return ((here - there).abs().max() / here.abs().max()).item()


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return 0
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "agreement": _agreement(),
        "rows": [],
    }
    with torch.device("cuda"):
        model = random_model(**PYTHIA)
    pairs = random_pairs(16, 24, PYTHIA["vocab_size"]).to("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        for fold in (False, True):
            attribute_edges(model, pairs, steps=1)  # warm up
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            scores = attribute_edges(model, pairs, steps=STEPS, fold=fold)
            torch.cuda.synchronize()
            if not torch.isfinite(scores).all():
                raise AssertionError("scores are not finite")
            report["rows"].append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "fold": fold,
                    "seconds": time.perf_counter() - start,
                    "extra_peak_mb": (torch.cuda.max_memory_allocated() - before) / 1e6,
                }
            )
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
