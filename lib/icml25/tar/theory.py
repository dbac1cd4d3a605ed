"""What is proved about the flow, as numbers: error bounds and the transport cost."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from icml25.tar.flow import FlowResult, _tiny, free_energy, worst_case_limit
from icml25.tar.graph import FlowGraph

__all__ = ["GapCurves", "error_bounds", "transport_cost"]


class GapCurves(NamedTuple):
    """Distance to the worst case after each step, relative to the start.

    Attributes:
        times: ``(K + 1,)`` flow times.
        gap: ``(K + 1,)`` measured (R* - R(q_k)) / (R* - R(q_0)).
        sharp: ``(K + 1,)`` proved bound that reads the path (``eq-tar-sharp``).
        coarse: ``(K + 1,)`` proved bound from the extreme weights and the spectral gap
            alone (``eq-tar-coarse``).
    """

    times: Tensor
    gap: Tensor
    sharp: Tensor
    coarse: Tensor


def error_bounds(
    flow: FlowResult, losses: Tensor, graph: FlowGraph, *, beta: float
) -> GapCurves:
    r"""The gap to the worst case beside its two proved bounds, step by step.

    Each step h multiplies the gap by at most :math:`1 - 2\kappa h\beta\mu`, with
    :math:`\mu` the smallest non-zero eigenvalue of
    :math:`L(q) v = \mu\,\mathrm{diag}(M) v`, :math:`M_i = \max(q_i, q^*_i)`, and
    :math:`\kappa` the share of its first-order gain that the step is sure to keep. It
    is at least 1/2 while the weights stay above 1e-3/n; below, it may be less, and
    counts as 0 where the proof gives nothing. The coarse bound puts
    :math:`m\lambda_2/\max M \le \mu` and at most 1/2 in their place, with m and max M
    the extremes of the whole path. Both hold for the adaptive steps of an upwind flow,
    also on a disconnected graph.

    Args:
        flow: a traced, adaptive upwind flow of one loss vector, in float64.
        losses: ``(n,)`` its losses.
        graph: its graph.
        beta: > 0.

    Raises:
        TypeError: the flow is not in float64: rounding would pass for a gap.
        ValueError: the flow was not traced, or the graph has no edge.

    Notes:
        An eigenvalue that rounding could have made counts as 0, which is still a bound.
        One dense eigenvalue problem a step, O(n^3): for graphs of some hundred nodes.
    """
    if flow.path is None or flow.path.ndim != 2:
        raise ValueError("flow: one loss vector, run with trace=True, is needed")
    if flow.path.dtype != torch.float64 or losses.dtype != torch.float64:
        raise TypeError(
            f"the flow has dtype {flow.path.dtype}, losses {losses.dtype}; float64 is "
            "needed"
        )
    if graph.num_edges == 0:
        raise ValueError("graph has no edge: no weight can move")
    best = worst_case_limit(losses, graph, beta=beta, q0=flow.path[0])
    top = free_energy(best, losses, beta=beta)
    gap = top - free_energy(flow.path, losses, beta=beta)
    # Zero is an eigenvalue once per component; isolated nodes carry no gap.
    linked = torch.cat([graph.src, graph.dst]).unique()
    zeros = int(graph.components()[linked].unique().numel())
    spectral_gap = _eigenvalue(graph.laplacian()[linked][:, linked], zeros)
    smallest = flow.path[:, linked].min()
    largest = torch.maximum(flow.path.amax(0), best)[linked].max()
    coarse_rate = spectral_gap * smallest / largest
    h = flow.times.diff()
    rates, coarse_rates = [], []
    for q, moved, length in zip(flow.path, flow.path.diff(dim=0), h, strict=False):
        force = losses - beta * q.clamp_min(_tiny(q)).log()
        rise = force[graph.dst] - force[graph.src]
        carried = torch.where(rise > 0, q[graph.src], q[graph.dst])
        matrix = graph.laplacian(carried)[linked][:, linked]
        most = torch.maximum(q, best)[linked].double()
        scale = most.rsqrt()
        gain = (graph.edge_weights(q.dtype) * carried * rise.square()).sum() * length
        bend = beta * (moved.square() / q.clamp_min(_tiny(q))).sum()
        kept = (1 - bend / gain.clamp_min(_tiny(q))).clamp_min(0)
        rates.append(2 * kept * _eigenvalue(scale[:, None] * matrix * scale, zeros))
        coarse_rates.append(2 * kept.clamp_max(0.5) * coarse_rate)
    start = h.new_ones(1)

    def bound(rate: list[Tensor]) -> Tensor:
        shrink = 1 - h * beta * torch.stack(rate).to(h)
        return torch.cat([start, shrink.clamp_min(0).cumprod(0)])

    return GapCurves(flow.times, gap / gap[0], bound(rates), bound(coarse_rates))


def _eigenvalue(matrix: Tensor, number: int) -> Tensor:
    values = torch.linalg.eigvalsh(matrix)
    rounding = len(values) * torch.finfo(values.dtype).eps * values[-1]
    return torch.where(values[number] > rounding, values[number], 0.0)


def transport_cost(
    start: Tensor, end: Tensor, graph: FlowGraph, *, num_times: int = 64
) -> Tensor:
    r"""The geometric Wasserstein penalty :math:`\mathrm{GW}^2(q_0, q_1)` of a move.

    The least action :math:`\int_0^1\sum_{ij} f_{ij}^2/(2 w_{ij}q_{\text{tail}})\,dt`
    of fluxes f that carry ``start`` to ``end`` along edges, each edge drawing on the
    weight of its tail. Computed through its concave dual (``eq-tar-dual``)

    .. math:: \max_\varphi \sum_i q_{1,i}\varphi_i - \sum_i q_{0,i}(S\varphi)_i

    with S the Hamilton-Jacobi flow
    :math:`\dot u_i = \tfrac12\sum_j w_{ij}(u_j - u_i)_+^2` over unit time.

    Args:
        start: ``(n,)`` weights q_0.
        end: ``(n,)`` weights q_1 with the same mass in every component.
        graph: the graph; the cost is infinite where no path joins the two.
        num_times: steps of the time grid.

    Returns:
        The cost, a lower bound up to the error of the time grid, or infinity.

    Raises:
        ValueError: sizes that differ, negative weights.

    Notes:
        Not symmetric: leaving a light node costs more than leaving a heavy one. For
        graphs of up to some hundred nodes; runs L-BFGS in float64.
    """
    for name, q in (("start", start), ("end", end)):
        if q.shape != (graph.num_nodes,):
            raise ValueError(
                f"{name} has shape {tuple(q.shape)}; ({graph.num_nodes},) is needed"
            )
        if bool((q < 0).any()):
            raise ValueError(f"{name} holds {q.min().item():g}; weights are >= 0")
    start, end = start.double(), end.double()
    label = graph.components()
    moved = start.new_zeros(int(label.max()) + 1).index_add(0, label, end - start)
    if bool((moved.abs() > 1e-6).any()):  # float32 weights sum to 1 this well
        return start.new_tensor(torch.inf)
    weight = graph.edge_weights(torch.float64).double()

    def slope(u: Tensor) -> Tensor:
        rise = u[graph.dst] - u[graph.src]
        push = weight / 2 * rise.square()
        rate = torch.zeros_like(u).index_add(0, graph.src, push * (rise > 0))
        return rate.index_add(0, graph.dst, push * (rise < 0))

    def value(phi: Tensor) -> Tensor:
        u, h = phi, 1 / num_times
        for _ in range(num_times):  # midpoint rule, error O(h^2)
            u = u + h * slope(u + h / 2 * slope(u))
        return (end * phi).sum() - (start * u).sum()

    phi = torch.zeros_like(start).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [phi],
        max_iter=500,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -value(phi)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    return value(phi.detach()).clamp_min(0)
