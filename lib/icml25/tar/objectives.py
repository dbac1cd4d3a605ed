"""Training objectives: TAR and the methods it is compared with.

Each is called like a criterion of PyTorch, ``objective(logits[train], y[train])``, and
returns a scalar; swap it for ``F.cross_entropy`` in any training loop. Losses of half
precision are summed in float32, which is then the scalar's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from icml25.tar.flow import at_least_single, weight_flow
from icml25.tar.graph import FlowGraph

__all__ = ["IRM", "Chi2DRO", "ClassBalanced", "ERM", "GroupDRO", "KLDRO", "TAR", "VREx"]

NodeLoss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


class ERM:
    """Plain average loss (empirical risk minimisation).

    Args:
        node_loss: ``(logits, y) -> (n,)`` losses, cross-entropy by default.
    """

    def __init__(self, node_loss: NodeLoss = _cross_entropy) -> None:
        self.node_loss = node_loss

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return self._losses(logits, y).mean()

    def _losses(self, logits: Tensor, y: Tensor) -> Tensor:
        # A sum of thousands in half precision would stop growing.
        return at_least_single(self.node_loss(logits, y))


class TAR(ERM):
    r"""Topology-aware dynamic reweighting: the loss under flowing weights.

    :math:`\sum_i q_i\ell_i`, with q the end of :func:`~icml25.tar.weight_flow` started
    from uniform weights at *every* call; no gradient passes through q
    (algorithm ``alg-tar`` of the chapter).

    Args:
        graph: graph of the training nodes (``from_edge_index(..., mask=...)``).
        beta: strength of the entropy term.
        step: largest flow step.
        steps: number of inner steps, the paper's T_in.
        warm_start: start from the last weights instead of uniform ones. The time of
            the flow, and with it the radius, then grows with training.
        mobility: what an edge carries, see :func:`~icml25.tar.weight_flow`.
        node_loss: ``(logits, y) -> (n,)`` losses, cross-entropy by default.

    Attributes:
        last_q: ``(n,)`` weights of the last call, None before it.

    Raises:
        ValueError: what :func:`~icml25.tar.weight_flow` rejects, when called.

    Example:
        >>> pairs = torch.tensor([[0, 1], [1, 2]])
        >>> objective = TAR(FlowGraph.from_edge_index(pairs))
        >>> objective(torch.zeros(3, 2), torch.tensor([0, 1, 0])).item()  # log 2
        0.693...

    Notes:
        The paper's hyper-parameters are not public; the defaults are this book's.
    """

    def __init__(
        self,
        graph: FlowGraph,
        *,
        beta: float = 0.1,
        step: float = 0.1,
        steps: int = 20,
        warm_start: bool = False,
        mobility: str = "upwind",
        node_loss: NodeLoss = _cross_entropy,
    ) -> None:
        super().__init__(node_loss)
        self.graph = graph
        self.beta, self.step, self.steps = beta, step, steps
        self.warm_start, self.mobility = warm_start, mobility
        self.last_q: Tensor | None = None

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        losses = self.node_loss(logits, y)
        flow = weight_flow(
            losses.detach(),
            self.graph,
            beta=self.beta,
            step=self.step,
            steps=self.steps,
            mobility=self.mobility,
            q0=self.last_q if self.warm_start else None,
        )
        self.last_q = flow.q
        return (flow.q * losses).sum()


class ClassBalanced(ERM):
    """Average of the class averages."""

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        count = torch.bincount(y, minlength=logits.shape[-1])
        weight = 1 / (count[y] * (count > 0).sum())
        return (weight * self._losses(logits, y)).sum()


class KLDRO(ERM):
    r"""Worst case with a Kullback-Leibler penalty, blind to the graph.

    :math:`\tau\log\frac1n\sum_i e^{\ell_i/\tau}`, the maximum over weights q of
    :math:`\sum_i q_i\ell_i - \tau\,\mathrm{KL}(q\,\|\,1/n)`. It is what TAR tends to
    on a connected graph when the flow runs for ever (with beta = tau).
    """

    def __init__(self, tau: float, node_loss: NodeLoss = _cross_entropy) -> None:
        super().__init__(node_loss)
        self.tau = _positive("tau", tau)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        losses = self._losses(logits, y)
        scaled = torch.logsumexp(losses / self.tau, 0)
        return self.tau * (scaled - torch.log(scaled.new_tensor(losses.numel())))


class Chi2DRO(ERM):
    r"""Worst case with a chi-square penalty, blind to the graph.

    The maximum over weights q of
    :math:`\sum_i q_i\ell_i - \frac{\tau}{2n}\sum_i (nq_i - 1)^2`: q is the projection
    of :math:`(1 + \ell/\tau)/n` on the simplex.
    """

    def __init__(self, tau: float, node_loss: NodeLoss = _cross_entropy) -> None:
        super().__init__(node_loss)
        self.tau = _positive("tau", tau)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        losses = self._losses(logits, y)
        q = _project_simplex((1 + losses.detach() / self.tau) / losses.numel())
        return (q * losses).sum()


def _project_simplex(v: Tensor) -> Tensor:
    ordered = v.sort(descending=True).values
    count = torch.arange(1, v.numel() + 1, device=v.device, dtype=v.dtype)
    shift = (ordered.cumsum(0) - 1) / count
    # The threshold is largest at the last index still above it.
    return (v - shift.max()).clamp_min(0)


class _ByEnvironment(ERM):
    """Base of the methods that know each training node's environment."""

    def __init__(self, env_id: Tensor, node_loss: NodeLoss = _cross_entropy) -> None:
        super().__init__(node_loss)
        if env_id.ndim != 1 or env_id.dtype != torch.int64 or not env_id.numel():
            raise ValueError(
                f"env_id has shape {tuple(env_id.shape)} and dtype {env_id.dtype}; one "
                "int64 label per training node is needed"
            )
        self.env_id = torch.unique(env_id, return_inverse=True)[1]
        self.env_size = torch.bincount(self.env_id)

    def _means(self, values: Tensor) -> Tensor:
        if values.shape != self.env_id.shape:
            raise ValueError(
                f"the loss has shape {tuple(values.shape)}, env_id "
                f"{tuple(self.env_id.shape)}: one environment per training node"
            )
        total = values.new_zeros(self.env_size.numel())
        return total.index_add(0, self.env_id, values) / self.env_size


class GroupDRO(_ByEnvironment):
    """Soft-max weights over the environments' losses, as in the GOOD benchmark.

    Args:
        env_id: ``(n,)`` environment of each training node.
        eta: sharpness of the soft-max, > 0.
    """

    def __init__(self, env_id: Tensor, eta: float) -> None:
        super().__init__(env_id)
        self.eta = _positive("eta", eta)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        means = self._means(self._losses(logits, y))
        return (torch.softmax(self.eta * means.detach(), 0) * means).sum()


class VREx(_ByEnvironment):
    """Mean of the environments' losses plus ``penalty`` times their variance."""

    def __init__(self, env_id: Tensor, penalty: float) -> None:
        super().__init__(env_id)
        self.penalty = _positive("penalty", penalty)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        means = self._means(self._losses(logits, y))
        return means.mean() + self.penalty * means.var(correction=0)


class IRM(_ByEnvironment):
    r"""Invariant risk minimisation, version 1.

    Adds ``penalty`` times the mean over environments of the squared slope of the
    cross-entropy in a scalar factor on the logits, taken at 1. The slope of one node is
    :math:`\sum_c (p_c - [c = y]) z_c`.
    """

    def __init__(self, env_id: Tensor, penalty: float) -> None:
        super().__init__(env_id)
        self.penalty = _positive("penalty", penalty)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        means = self._means(self._losses(logits, y))
        logits = at_least_single(logits)
        true = logits.gather(1, y[:, None]).squeeze(1)
        slope = (torch.softmax(logits, 1) * logits).sum(1) - true
        return means.mean() + self.penalty * self._means(slope).square().mean()


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name}={value}: must be positive")
    return value
