"""GoLore on a CUDA device: step and refresh times, kernel launches, bytes.

    python tests/benchmarks/gpu_golore.py

Under four minutes; says so and stops where there is no CUDA device. LLaMA-60M and -130M
parameter sets in float32 and bfloat16, against torch's fused AdamW and, for the first,
the plain GaLore of bench_golore.py; then a check that both machines' answers agree.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import torch
from icml25.golore import GoLore, singular_basis, state_numel, stiefel_uniform
from icml25.golore.theory import llama_shapes
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_golore import GAP, PlainGaLore

CASES = (
    ("60M", 128, torch.float32),
    ("60M", 128, torch.bfloat16),
    ("130M", 256, torch.bfloat16),
)


def _groups(model: str, rank: int | None, dtype: torch.dtype) -> list[dict]:
    torch.manual_seed(0)
    projected, dense = (
        [
            nn.Parameter(0.02 * torch.randn(s, device="cuda", dtype=dtype))
            for s in shapes
        ]
        for shapes in llama_shapes(model)
    )
    for p in (*projected, *dense):
        p.grad = torch.randn_like(p)
    return [{"params": projected, "rank": rank}, {"params": dense, "rank": None}]


def _time(optimizer: torch.optim.Optimizer, num_steps: int = 41) -> dict[str, float]:
    """Milliseconds of an ordinary step and of a refresh, and the extra peak memory."""
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ordinary, refresh = [], []
    for step in range(1, num_steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        (ordinary if step % GAP else refresh).append(start.elapsed_time(end))
    return {
        "step_ms": statistics.median(ordinary),
        "refresh_ms": statistics.median(refresh),
        "extra_peak_mb": (torch.cuda.max_memory_allocated() - before) / 1e6,
    }


def _launches(optimizer: torch.optim.Optimizer) -> int:
    """CUDA kernels of one ordinary step."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as trace:
        optimizer.step()
        torch.cuda.synchronize()
    return sum(
        event.count for event in trace.key_averages() if "LaunchKernel" in event.key
    )


def _agreement() -> dict[str, float]:
    """Largest errors on the device: orthonormality, and the split of the energy."""
    generator = torch.Generator("cuda").manual_seed(0)
    haar = stiefel_uniform(1376, 128, generator=generator, device="cuda")
    matrix = torch.randn(512, 1376, generator=generator, device="cuda")
    matrix *= torch.arange(1, 513, device="cuda").rsqrt().unsqueeze(1)
    exact = singular_basis(matrix, 128)
    fast = singular_basis(matrix, 128, method="rsvd", generator=generator)
    eye = torch.eye(128, device="cuda")
    best = (exact.mT @ matrix).square().sum()
    return {
        "haar": (haar.mT @ haar - eye).abs().max().item(),
        "rsvd": (fast.mT @ fast - eye).abs().max().item(),
        "rsvd_energy": ((fast.mT @ matrix).square().sum() / best).item(),
    }


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return 0
    table = []
    for model, rank, dtype in CASES:
        name = f"{model} r={rank} {str(dtype).removeprefix('torch.')}"
        for phase, switch in (("haar", 0), ("rsvd", None)):
            optimizer = GoLore(
                _groups(model, rank, dtype),
                switch_step=switch,
                rank=rank,
                update_interval=GAP,
            )
            row = {"case": name, "optimizer": f"GoLore ({phase})", **_time(optimizer)}
            optimizer.step()  # the step that _time ended before is a refresh
            row["kernels"] = _launches(optimizer)
            counted = sum(
                value.numel()
                for state in optimizer.state.values()
                for value in state.values()
                if value.dim()
            )
            projected, dense = llama_shapes(model)
            formula = state_numel(projected, rank=rank) + state_numel(dense, rank=None)
            row["state_mb"] = 4 * counted / 1e6
            if counted != formula:
                raise AssertionError(f"{counted} numbers of state, formula {formula}")
            table.append(row)
            del optimizer
        params = [p for g in _groups(model, rank, dtype) for p in g["params"]]
        adamw = torch.optim.AdamW(params, fused=True)
        table.append({"case": name, "optimizer": "torch AdamW", **_time(adamw)})
        del adamw, params
        if (model, dtype) == ("60M", torch.float32):
            plain = PlainGaLore(_groups(model, rank, dtype))
            timed = _time(plain, num_steps=2 * GAP + 1)
            table.append({"case": name, "optimizer": "plain GaLore", **timed})
            del plain
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": table,
        "agreement": _agreement(),
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
