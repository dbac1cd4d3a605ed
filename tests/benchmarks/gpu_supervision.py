"""The exact worst case of 65,536 processes on a GPU, checked against the CPU.

``python tests/benchmarks/gpu_supervision.py`` prints one JSON line, or says that there
is no CUDA device.
"""

from __future__ import annotations

import json
import time

import torch
from icml25.supervision import coverage, plan, worst_case_transfer
from icml25.supervision.instances import random_mdp, random_policy


def main(batch: int = 65_536, chunk: int = 8192) -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: skipped")
        return
    generator = torch.Generator("cuda").manual_seed(0)
    parts = []
    seconds = 0.0
    for _ in range(0, batch, chunk):
        mdp = random_mdp(chunk, 8, 4, 3, generator=generator)
        off = random_policy(mdp, generator=generator)
        target, _ = plan(mdp)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        worst = worst_case_transfer(mdp, target, off)
        torch.cuda.synchronize()
        seconds += time.perf_counter() - begin
        parts.append((worst / coverage(mdp, target, off).total).max())
    few = slice(64)
    cpu = worst_case_transfer(mdp[few].to("cpu"), target[few].cpu(), off[few].cpu())
    error = (worst[few].cpu() / cpu - 1).abs().max().item()
    if error > 1e-6:
        raise AssertionError(f"GPU and CPU differ by {error:.1e}")
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "processes": batch,
                "seconds": seconds,
                "processes_per_s": batch / seconds,
                "largest_ratio": torch.stack(parts).max().item(),
                "cpu_error": error,
            }
        )
    )


if __name__ == "__main__":
    main()
