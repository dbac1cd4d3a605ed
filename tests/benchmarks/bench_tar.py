"""TAR: what the flow costs beside a training epoch, and beside plainer ways of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from icml25 import tar
from icml25.core import make_generator
from icml25.tar.experiments import CostConfig, epoch_cost


def rows() -> list[dict]:
    return [_epoch(), _against_dense(), _against_messages()]


def _alternate(*calls: Callable[[], object], repeats: int = 15) -> list[float]:
    """Median CPU seconds of each call, in turns: a busy machine hits all alike."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, kept in zip(calls, times, strict=True):
            begin = time.process_time()
            call()
            kept.append(time.process_time() - begin)
    return [statistics.median(kept) for kept in times]


def _row(name: str, ours_s: float, other_s: float, target: float, note: str) -> dict:
    return {
        "name": name,
        "ours_s": ours_s,
        "other_s": other_s,
        "ratio": ours_s / other_s,
        "target": target,
        "note": note,
    }


def _random_edges(n: int, num_edges: int) -> torch.Tensor:
    return torch.randint(n, (2, num_edges), generator=make_generator(0))


def _epoch() -> dict:
    cost = epoch_cost(CostConfig(repeats=40), device=torch.device("cpu"), seed=0)
    added = (cost["tar_s"] - cost["erm_s"]) / 20
    return _row(
        "epoch of TAR (20 flow steps) / of ERM, at Cora's size",
        cost["tar_s"],
        cost["erm_s"],
        1.3,
        f"GCN, 64 hidden; {cost['edges']} flow edges; a step adds {added * 1e6:.0f} us",
    )


def _against_dense() -> dict:
    n, steps = 3000, 5
    graph = tar.FlowGraph.from_edge_index(_random_edges(n, 7 * n), n)
    losses = torch.rand(n, generator=make_generator(2))
    adjacency = torch.zeros(n, n)
    adjacency[graph.src, graph.dst] = adjacency[graph.dst, graph.src] = 1

    def dense() -> torch.Tensor:
        q = torch.full((n,), 1 / n)
        for _ in range(steps):
            force = losses - 0.1 * q.log()
            rise = adjacency * (force[None] - force[:, None]).clamp_min(0)
            flux = q[:, None] * rise  # [i, j]: mass from i to j
            q = q + 1e-3 * (flux.sum(0) - flux.sum(1))
        return q

    def ours() -> torch.Tensor:
        return tar.weight_flow(losses, graph, beta=0.1, step=1e-3, steps=steps).q

    torch.testing.assert_close(ours(), dense())
    seconds = [each / steps for each in _alternate(ours, dense, repeats=5)]
    return _row(
        "flow step / the same with dense matrices, 3,000 nodes",
        *seconds,
        0.02,
        f"{graph.num_edges:,} edges; dense is O(n^2) and cannot hold 170,000 nodes",
    )


def _against_messages() -> dict:
    """ogbn-arxiv's size; the plain way sends a message along both directions."""
    n, steps = 169_343, 3
    graph = tar.FlowGraph.from_edge_index(_random_edges(n, 1_157_799), n)
    losses = torch.rand(n, generator=make_generator(3))
    source = torch.cat([graph.src, graph.dst])
    target = torch.cat([graph.dst, graph.src])

    def messages() -> torch.Tensor:
        q = torch.full((n,), 1 / n)
        for _ in range(steps):
            force = losses - 0.1 * q.log()
            rise = force[target] - force[source]
            flux = torch.where(rise > 0, q[source], q[target]) * rise
            q = q + 1e-3 * torch.zeros(n).scatter_add(0, target, flux)
        return q

    def ours() -> torch.Tensor:
        return tar.weight_flow(losses, graph, beta=0.1, step=1e-3, steps=steps).q

    torch.testing.assert_close(ours(), messages())
    seconds = [each / steps for each in _alternate(ours, messages, repeats=5)]
    return _row(
        "flow step / messages both ways, 169,343 nodes, 1.16 M edges",
        *seconds,
        0.8,
        "ours includes the step control, which the plain way lacks",
    )
