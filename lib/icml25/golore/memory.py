"""How many bytes an optimiser keeps: the formula, and a count of real state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .optim import GoLore
from .theory import llama_shapes, state_numel


@dataclass(frozen=True)
class MemoryConfig:
    """Model sizes and ranks of the table; the first is also counted."""

    models: tuple[tuple[str, int], ...] = (
        ("60M", 128),
        ("130M", 256),
        ("130M", 128),
        ("7B", 1024),
    )
    measured: tuple[str, int] = ("60M", 128)


def run_memory(
    config: MemoryConfig = MemoryConfig(),
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Optimiser state of Llama models in float32, embeddings and head kept dense.

    Returns:
        ``rows``: for each model and rank ``params``, ``adamw_bytes``,
        ``golore_bytes``, ``projected_bytes`` (of which) and ``basis_bytes`` (of
        which); and ``measured_bytes``, counted in a real optimiser after one step on
        ``measured``.
    """
    rows = []
    for name, rank in config.models:
        projected, dense = llama_shapes(name)
        low = state_numel(projected, rank=rank)
        rows.append(
            {
                "model": name,
                "rank": rank,
                "params": state_numel(projected + dense, rank=None, num_moments=1),
                "adamw_bytes": 4 * state_numel(projected + dense, rank=None),
                "golore_bytes": 4 * (low + state_numel(dense, rank=None)),
                "projected_bytes": 4 * low,
                "basis_bytes": 4 * state_numel(projected, rank=rank, num_moments=0),
            }
        )
    name, rank = config.measured
    return {"rows": rows, "measured_bytes": _measure(name, rank, device, seed)}


def _measure(name: str, rank: int, device: torch.device | str, seed: int) -> int:
    groups = []
    for shapes, group_rank in zip(llama_shapes(name), (rank, None), strict=True):
        params = [torch.nn.Parameter(torch.zeros(s, device=device)) for s in shapes]
        for p in params:
            p.grad = torch.zeros_like(p)
        groups.append({"params": params, "rank": group_rank})
    optimizer = GoLore(groups, switch_step=0, seed=seed)
    optimizer.step()
    return state_bytes(optimizer)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimiser's moments and bases; its scalar counters are left out."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
