"""GoLore's step against a plain per-parameter GaLore and against pytorch_optimizer's.

LLaMA-60M parameters, rank 128, float32, one thread, CPU seconds (they do not notice a
busy machine). Both others get the same gradients and also own the dense parameters.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from icml25.golore import GoLore, state_numel
from icml25.golore.theory import llama_shapes
from torch import Tensor, nn

RANK = 128
GAP = 4  # steps between refreshes
NUM_STEPS = 9


class PlainGaLore(torch.optim.Optimizer):
    """GaLore's AdamW the way public implementations do it, written for this table.

    One parameter after the other: a full SVD at a refresh, the moments of the projected
    gradient, and an update of the weight's own size, projected back and then added.
    """

    def __init__(self, groups, lr: float = 1e-3) -> None:
        super().__init__(groups, {"lr": lr, "rank": None})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, group["rank"], group["lr"])

    def _update(self, p: Tensor, rank: int | None, lr: float) -> None:
        state, grad = self.state[p], p.grad
        state.setdefault("step", 0)
        is_left = grad.dim() == 2 and grad.shape[0] < grad.shape[1]
        if rank is not None:
            if state["step"] % GAP == 0:
                u, _, vh = torch.linalg.svd(grad.float(), full_matrices=False)
                state["basis"] = u[:, :rank].clone() if is_left else vh[:rank].clone()
            basis = state["basis"]
            grad = basis.t() @ grad if is_left else grad @ basis.t()
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(grad)
            state["exp_avg_sq"] = torch.zeros_like(grad)
        state["step"] += 1
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.mul_(0.9).add_(grad, alpha=0.1)
        exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
        denominator = exp_avg_sq.sqrt().add_(1e-6)
        correction = math.sqrt(1 - 0.999 ** state["step"]) / (1 - 0.9 ** state["step"])
        update = exp_avg / denominator
        if rank is not None:
            update = basis @ update if is_left else update @ basis
        p.add_(update, alpha=-lr * correction)


def _groups(rank_key: str = "rank", **extra) -> list[dict]:
    projected, dense = (
        [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
        for shapes in llama_shapes("60M")
    )
    for p in (*projected, *dense):
        p.grad = torch.randn_like(p)
    return [{"params": projected, rank_key: RANK, **extra}, {"params": dense}]


def _time(
    optimizer: torch.optim.Optimizer, *, first_step: int = 0
) -> tuple[float, float]:
    """CPU seconds of an ordinary step and of a refresh: medians, the first step apart.

    ``first_step`` is what the optimiser calls its first: refreshes are at multiples of
    the gap in its own count.
    """
    ordinary, refresh = [], []
    for step in range(first_step, first_step + NUM_STEPS):
        start = time.process_time()
        optimizer.step()
        elapsed = time.process_time() - start
        if step > first_step:  # which allocates
            (ordinary if step % GAP else refresh).append(elapsed)
    return statistics.median(ordinary), statistics.median(refresh)


def _ours(switch_step: int | None) -> tuple[float, float, int]:
    groups = _groups()
    groups[1]["rank"] = None
    optimizer = GoLore(groups, switch_step=switch_step, rank=RANK, update_interval=GAP)
    ordinary, refresh = _time(optimizer)
    numel = sum(
        value.numel()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
    return ordinary, refresh, 4 * numel


def _peer() -> tuple[float, float] | None:
    try:
        from pytorch_optimizer import GaLore
    except ImportError:
        return None
    peer = {"update_proj_gap": GAP, "scale": 1.0, "projection_type": "std"}
    return _time(GaLore(_groups(**peer), lr=1e-3), first_step=1)


def rows() -> list[dict]:
    """The table's rows, for `make bench`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        ordinary, haar, state_bytes = _ours(switch_step=0)
        _, singular, _ = _ours(switch_step=None)
        others = {"plain GaLore": _time(PlainGaLore(_groups()))}
        if peer := _peer():
            others["pytorch_optimizer's GaLore"] = peer
    finally:
        torch.set_num_threads(threads)
    projected, dense = llama_shapes("60M")
    formula = 4 * (state_numel(projected, rank=RANK) + state_numel(dense, rank=None))
    if state_bytes != formula:
        raise AssertionError(f"state has {state_bytes} bytes, the formula {formula}")
    table = []
    for other, (other_step, other_refresh) in others.items():
        for what, ours, theirs, target in (
            ("ordinary step", ordinary, other_step, 0.6),
            ("Haar refresh", haar, other_refresh, 0.2),
            ("singular refresh", singular, other_refresh, 0.25),
        ):
            table.append(
                {
                    "name": f"{what} / {other}",
                    "ours_s": ours,
                    "other_s": theirs,
                    "ratio": ours / theirs,
                    "target": target,
                    "note": "",
                }
            )
    table[0]["note"] = (
        "LLaMA-60M, r = 128, float32, one thread, CPU seconds; "
        f"state {state_bytes / 1e6:.1f} MB, equal to the formula"
    )
    if len(others) == 1:
        table[-1]["note"] = "pytorch_optimizer is not installed: pip install '.[bench]'"
    return table
