"""The weight flow: sample weights that run along edges toward higher loss."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from icml25.tar.graph import FlowGraph

__all__ = ["FlowResult", "free_energy", "weight_flow", "worst_case_limit"]

MOBILITIES = ("upwind", "logmean", "split")


class FlowResult(NamedTuple):
    """Where the weights ended, and how they got there.

    Attributes:
        q: ``(..., n)`` final weights, of the losses' dtype, in float32 at least.
        time: ``(...)`` flow time T, the sum of the steps taken.
        length: ``(...)`` length of the path in the metric of the flow; the transport
            cost between its ends is at most ``length ** 2 / 2``.
        path: ``(steps + 1, ..., n)`` weights after each step, None unless traced.
        times: ``(steps + 1, ...)`` times of ``path``, None unless traced.
    """

    q: Tensor
    time: Tensor
    length: Tensor
    path: Tensor | None = None
    times: Tensor | None = None


@torch.no_grad()
def weight_flow(
    losses: Tensor,
    graph: FlowGraph,
    *,
    beta: float,
    step: float = 0.1,
    steps: int = 20,
    q0: Tensor | None = None,
    mobility: str = "upwind",
    adaptive: bool = True,
    trace: bool = False,
) -> FlowResult:
    r"""Let weights flow along edges uphill in :math:`F_i = \ell_i - \beta\log q_i`.

    .. math:: \dot q_i = \sum_{j\sim i} w_{ij}\,\xi_{ij}(q)\,(F_i - F_j)

    (``eq-tar-flow``), integrated by explicit Euler steps.

    Args:
        losses: ``(..., n)`` loss of each node; leading dimensions are a batch.
        graph: the graph of these n nodes.
        beta: strength of the entropy term, >= 0.
        step: largest step h, > 0.
        steps: number of steps, >= 0.
        q0: ``(..., n)`` initial weights >= 0 that sum to 1; uniform by default.
        mobility: what an edge carries. ``"upwind"``: the weight of the node that mass
            leaves, judged by the total force. ``"logmean"``: the logarithmic mean of
            both ends. ``"split"``: loss and entropy upwinded each by its own sign;
            *not* a gradient flow, kept to show that it stalls.
        adaptive: shorten each step so that no weight loses more than half of itself
            and, for the two gradient flows, the free energy never falls; while all
            weights exceed 1e-3/n it rises by at least half of its first-order gain.
            Without it, too long a step is an error.
        trace: keep the path.

    Raises:
        TypeError: ``losses`` are not floats, ``steps`` is not an integer.
        ValueError: sizes that do not match the graph, a loss that is not finite,
            ``beta`` or ``step`` negative or infinite, ``step = 0``, ``steps < 0``, an
            unknown mobility, ``q0`` with negative weights or another sum than 1; with
            ``adaptive=False`` a step above the cap (the message names it).

    Notes:
        Losses of half precision flow in float32: steps of 1/n of a weight would be
        lost. O(steps * (n + E)) time, a few vectors of length E of memory, no autograd.
        Mass is conserved in each connected component, weights stay positive, and the
        free energy never falls (adaptive, upwind and logmean). One host
        synchronisation per call, for the check of its input. ``index_add_`` on CUDA
        adds in no fixed order; ``torch.use_deterministic_algorithms(True)`` fixes it.

    Example:
        >>> graph = FlowGraph.from_edge_index(torch.tensor([[0, 1], [1, 2]]))
        >>> flow = weight_flow(torch.tensor([0.0, 0.0, 1.0]), graph, beta=0.1)
        >>> bool(flow.q[2] > flow.q[1])
        True

    Source: reconstructed from the paper's abstract and from geometric Wasserstein DRO.
    """
    _check(losses, graph, beta, step, steps, mobility)
    losses = at_least_single(losses)
    if q0 is None:
        q = torch.full_like(losses, 1 / graph.num_nodes)
    else:
        q = _check_weights(q0, losses)
    h = losses.new_full(losses.shape[:-1], step)
    time, length = torch.zeros_like(h), torch.zeros_like(h)
    path, times, caps = [q], [time], []
    for _ in range(steps):
        if graph.num_edges == 0:
            time = time + step
        else:
            velocity, gain = _velocity(q, losses, graph, beta, mobility)
            # No weight loses more than half of itself: h * max(-dq/q) <= 1/2.
            cap = 1 / (-velocity / q.clamp_min(_tiny(q))).amax(-1).clamp_min(_tiny(q))
            if not adaptive:
                caps.append(cap)
            else:
                h = (cap / 2).clamp_max(step)
                if mobility != "split" and beta > 0:
                    h = _rising_step(q, velocity, gain, h, beta)
            q = q + h.unsqueeze(-1) * velocity
            time = time + h
            length = length + h * gain.clamp_min(0).sqrt()
        if trace:
            path.append(q)
            times.append(time)
    if caps:
        _check_caps(torch.stack(caps), step)
    traced = (torch.stack(path), torch.stack(times)) if trace else ()
    return FlowResult(q, time, length, *traced)


def _velocity(
    q: Tensor, losses: Tensor, graph: FlowGraph, beta: float, mobility: str
) -> tuple[Tensor, Tensor]:
    """dq/dt, and the rate at which the free energy rises."""
    src, dst = graph.src, graph.dst
    log_q = q.clamp_min(_tiny(q)).log()
    force = losses - beta * log_q
    rise = _difference(force, graph)  # F_dst - F_src; mass runs src -> dst if > 0
    q_src, q_dst = q.index_select(-1, src), q.index_select(-1, dst)
    if mobility == "upwind":
        flux = rise * torch.where(rise > 0, q_src, q_dst)
    elif mobility == "logmean":
        flux = rise * _log_mean(q_src, q_dst, _difference(log_q, graph))
    else:
        pull = _difference(losses, graph)
        flux = pull * torch.where(pull > 0, q_src, q_dst)
        flux -= beta * _difference(log_q, graph) * torch.maximum(q_src, q_dst)
    if graph.weight is not None:
        flux = flux * graph.weight.to(flux.dtype)
    velocity = torch.zeros_like(q)
    velocity.index_add_(-1, dst, flux).index_add_(-1, src, flux, alpha=-1)
    return velocity, (flux * rise).sum(-1)


def _rising_step(
    q: Tensor, velocity: Tensor, gain: Tensor, h: Tensor, beta: float
) -> Tensor:
    """The longer of two steps up to ``h`` on which the free energy rises."""
    tiny = _tiny(q)
    kept, square = q.clamp_min(tiny), velocity.square()

    def bounded(bend: Tensor) -> Tensor:
        # On the step R bends by at most 2 beta/q: half the gain is kept.
        bound = gain / (2 * beta * bend).clamp_min(tiny)
        return torch.where(bend > 0, torch.minimum(h, bound), h)

    # Tiny weights that grow would make that step tiny too. Try one that takes them
    # for larger, and fall back if R would fall: R gains h * gain - beta * lost.
    bold = bounded((square / q.clamp_min(1e-3 / q.shape[-1])).sum(-1))
    move = bold.unsqueeze(-1) * velocity
    lost = ((q + move) * torch.log1p(move / kept) - move).sum(-1)
    return torch.where(
        beta * lost <= bold * gain, bold, bounded((square / kept).sum(-1))
    )


def _difference(values: Tensor, graph: FlowGraph) -> Tensor:
    return values.index_select(-1, graph.dst) - values.index_select(-1, graph.src)


def _log_mean(low: Tensor, high: Tensor, log_ratio: Tensor) -> Tensor:
    # (high - low) / log(high / low); its series where the quotient would cancel.
    close = log_ratio.abs() < 1e-3
    quotient = (high - low) / torch.where(close, 1.0, log_ratio)
    series = (low * high).sqrt() * (1 + log_ratio.square() / 24)
    return torch.where(close, series, quotient)


def free_energy(q: Tensor, losses: Tensor, *, beta: float) -> Tensor:
    r"""What the flow climbs: :math:`R(q) = \sum_i q_i\ell_i - \beta\sum_i q_i\log q_i`.

    Args:
        q: ``(..., n)`` weights; zero counts as ``0 log 0 = 0``.
        losses: ``(..., n)`` losses.
        beta: strength of the entropy term.

    Returns:
        ``(...)`` values of R (``eq-tar-energy``).

    Raises:
        ValueError: numbers of nodes that differ.
    """
    if q.shape[-1:] != losses.shape[-1:]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, losses {tuple(losses.shape)}: the last "
            "sizes must agree"
        )
    return (q * losses).sum(-1) - beta * torch.special.xlogy(q, q).sum(-1)


def worst_case_limit(
    losses: Tensor, graph: FlowGraph, *, beta: float, q0: Tensor | None = None
) -> Tensor:
    r"""Where the flow ends: :math:`q_i \propto e^{\ell_i/\beta}` in each component.

    Args:
        losses: ``(n,)`` losses.
        graph: the graph; each component keeps the mass it starts with.
        beta: > 0.
        q0: ``(n,)`` initial weights, uniform by default.

    Returns:
        ``(n,)`` weights that maximise the free energy.

    Raises:
        ValueError: ``beta`` is not positive; losses or weights that
            :func:`weight_flow` would refuse.
    """
    if not beta > 0:
        raise ValueError(f"beta={beta}: the limit needs beta > 0")
    if losses.shape != (graph.num_nodes,):
        raise ValueError(
            f"losses have shape {tuple(losses.shape)}; ({graph.num_nodes},) is needed"
        )
    _check_finite(losses)
    losses = at_least_single(losses)
    uniform = torch.full_like(losses, 1 / graph.num_nodes)
    q0 = uniform if q0 is None else _check_weights(q0, losses)
    label = graph.components()
    count = int(label.max()) + 1
    blank = losses.new_zeros(count)
    top = blank.scatter_reduce(0, label, losses, "amax", include_self=False)
    share = ((losses - top[label]) / beta).exp()
    total = blank.index_add(0, label, share)
    mass = blank.index_add(0, label, q0)
    return share * (mass / total)[label]


def at_least_single(x: Tensor) -> Tensor:
    """``x``, or where it is of half precision ``x`` in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


def _check(
    losses: Tensor,
    graph: FlowGraph,
    beta: float,
    step: float,
    steps: int,
    mobility: str,
) -> None:
    if not losses.is_floating_point():
        raise TypeError(f"losses have dtype {losses.dtype}; floats are needed")
    if losses.ndim < 1 or losses.shape[-1] != graph.num_nodes:
        raise ValueError(
            f"losses have shape {tuple(losses.shape)}; the graph has "
            f"{graph.num_nodes} nodes, so (..., {graph.num_nodes}) is needed"
        )
    if not 0 <= beta < float("inf"):
        raise ValueError(f"beta={beta}: at least 0 and finite")
    if not 0 < step < float("inf"):
        raise ValueError(f"step={step}: must be positive and finite")
    if not isinstance(steps, Integral):
        raise TypeError(f"steps={steps!r}: a whole number is needed")
    if steps < 0:
        raise ValueError(f"steps={steps}: at least 0")
    if mobility not in MOBILITIES:
        raise ValueError(f"mobility={mobility!r}: allowed are {MOBILITIES}")
    _check_finite(losses)


def _check_finite(losses: Tensor) -> None:
    if not bool(losses.isfinite().all()):
        bad = int((~losses.isfinite()).sum())
        raise ValueError(
            f"losses: {bad} of {losses.numel()} are NaN or infinite; weights would "
            "follow them (has the training diverged?)"
        )


def _check_weights(q0: Tensor, losses: Tensor) -> Tensor:
    if q0.shape[-1:] != losses.shape[-1:]:
        raise ValueError(
            f"q0 has shape {tuple(q0.shape)}, losses {tuple(losses.shape)}: the last "
            "sizes must agree"
        )
    q0 = q0.to(losses).expand_as(losses)
    if bool((q0 < 0).any()):
        raise ValueError(f"q0 holds {q0.min().item():g}; weights are not negative")
    error = (q0.sum(-1) - 1).abs().max().item()
    if not error <= 1e-4:
        raise ValueError(f"q0 must sum to 1; it is off by {error:.2g}")
    return q0


def _check_caps(caps: Tensor, step: float) -> None:
    over = (step > caps.reshape(len(caps), -1).amin(1)).nonzero()
    if len(over):
        first = int(over[0])
        raise ValueError(
            f"step={step} is above the cap of {caps[first].min().item():.3g} at step "
            f"{first}: a weight would turn negative (use a smaller step, or adaptive)"
        )
