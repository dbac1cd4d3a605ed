"""Training: one loop for any PyG node classifier, or for many models side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from icml25.core import progress
from icml25.tar.flow import weight_flow
from icml25.tar.graph import FlowGraph
from icml25.tar.objectives import TAR

__all__ = ["GCNEnsemble", "History", "local_worst_case", "train"]

Objective = Callable[[Tensor, Tensor], Tensor]
_EVALUATED = ("train", "ood_val", "ood_test", "id_val", "id_test")


@dataclass
class History:
    """What each objective's model did, by evaluation; chosen by shifted validation.

    Attributes:
        epochs: evaluated epochs.
        accuracy: set -> objective -> accuracies at those epochs.
        loss: set -> objective -> mean cross-entropies.
        risk: set -> objective -> local worst-case risks (``"train"``, ``"ood_test"``).
        weights: TAR objectives -> flowed weights of the training nodes.
    """

    names: list[str]
    epochs: list[int] = field(default_factory=list)
    accuracy: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    loss: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    risk: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def best(self, name: str) -> dict[str, float]:
        """The numbers of objective ``name`` at the epoch with the best accuracy on the
        shifted validation set; ties go to the smaller loss there."""
        return self.at(
            name,
            max(
                range(len(self.epochs)),
                key=lambda k: (
                    self.accuracy["ood_val"][name][k],
                    -self.loss["ood_val"][name][k],
                ),
            ),
        )

    def at(self, name: str, chosen: int) -> dict[str, float]:
        """The numbers of objective ``name`` at evaluation ``chosen`` (-1: the last)."""
        picked = {f"{s}_accuracy": v[name][chosen] for s, v in self.accuracy.items()}
        picked |= {f"{s}_loss": v[name][chosen] for s, v in self.loss.items()}
        picked |= {f"{s}_risk": v[name][chosen] for s, v in self.risk.items()}
        return {"epoch": self.epochs[chosen], **picked}


class GCNEnsemble(nn.Module):
    """Several graph convolutional networks of one shape, evaluated together.

    The members share the first weights and the dropout masks but never meet: member k
    trains exactly as it would alone. Comparing objectives on common random numbers
    takes the luck of the start out of the difference.

    Args:
        num_models: members B.
        in_channels, hidden_channels, out_channels: sizes.
        num_layers: graph convolutions.
        dropout: share dropped in front of every layer but the first.
        generator: draws the first weights and, on its device, the dropout.

    Shapes:
        input ``(n, in_channels)``, output ``(B, n, out_channels)``.
    """

    def __init__(
        self,
        num_models: int,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_layers: int = 2,
        dropout: float = 0.5,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        hidden = [hidden_channels] * (num_layers - 1)
        sizes = [in_channels, *hidden, out_channels]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
            bound = (6 / (fan_in + fan_out)) ** 0.5
            first = torch.empty(fan_in, fan_out, device=generator.device)
            first.uniform_(-bound, bound, generator=generator)
            self.weights.append(first.expand(num_models, -1, -1).clone())
            self.biases.append(torch.zeros(num_models, 1, fan_out, device=first.device))
        self.dropout, self.generator = dropout, generator
        self._cache: tuple | None = None  # x, edges, their versions, what follows

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        adjacency, x = self._propagated(x, edge_index)
        for depth, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True)
        ):
            if depth == 0:
                x = x @ weight + bias  # (n, F) @ (B, F, H) -> (B, n, H)
                continue
            x = self._drop(F.relu(x)) @ weight
            num_models, n, size = x.shape
            # Neighbours are summed for all members in one sparse product.
            wide = x.transpose(0, 1).reshape(n, -1)  # (B, n, C) -> (n, B * C)
            mixed = (adjacency @ wide).view(n, num_models, size)
            x = mixed.transpose(0, 1) + bias
        return x

    def _propagated(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised adjacency A and A x, kept while the same tensors come in."""
        if not _may_keep(x, edge_index):
            return _propagate(x, edge_index)
        versions = (x._version, edge_index._version)  # counts changes in place
        if (
            self._cache is None
            or self._cache[0] is not x
            or self._cache[1] is not edge_index
            or self._cache[2] != versions
        ):
            self._cache = (x, edge_index, versions, _propagate(x, edge_index))
        return self._cache[3]

    def _drop(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0:
            return x
        keep = torch.empty(x.shape[1:], device=x.device, dtype=x.dtype)
        keep.bernoulli_(1 - self.dropout, generator=self.generator)
        return x * keep / (1 - self.dropout)


def _propagate(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    n = x.shape[0]
    index, weight = gcn_norm(edge_index, num_nodes=n, dtype=x.dtype)
    adjacency = torch.sparse_coo_tensor(
        index, weight, (n, n), check_invariants=False
    ).coalesce()
    return adjacency, adjacency @ x


def _may_keep(x: Tensor, edge_index: Tensor) -> bool:
    # Gradients pass a graph once; what inference mode makes cannot be trained on, and
    # its tensors do not count their changes.
    made = (
        torch.is_inference_mode_enabled(),
        x.is_inference(),
        edge_index.is_inference(),
    )
    return not (x.requires_grad or any(made))


def train(
    model: nn.Module,
    data: Data,
    objectives: Mapping[str, Objective],
    *,
    epochs: int = 200,
    lr: float = 5e-3,
    weight_decay: float = 5e-4,
    evaluate_every: int = 10,
    desc: str = "",
) -> History:
    """Train a node classifier, full batch, and evaluate it on GOOD's five sets.

    Args:
        model: ``model(x, edge_index)`` gives logits ``(n, C)``; or ``(B, n, C)`` for an
            ensemble of as many members as there are objectives.
        data: ``x``, ``edge_index``, ``y`` and the five masks.
        objectives: name -> ``objective(logits[train], y[train])``, such as
            :class:`~icml25.tar.TAR` or ``F.cross_entropy``.
        epochs: steps of Adam.
        lr, weight_decay: of Adam.
        evaluate_every: epochs between two evaluations.
        desc: shown before the progress bar.

    Raises:
        ValueError: ``epochs`` or ``evaluate_every`` below 1; no objective; a model
            whose output does not fit the number of objectives; an empty training or
            shifted test set.
    """
    for name, value in (("epochs", epochs), ("evaluate_every", evaluate_every)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1")
    if not objectives:
        raise ValueError("objectives is empty: at least one is needed")
    history = History(list(objectives))
    optimiser = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    masks = {name: data[f"{name}_mask"] for name in _EVALUATED}
    # Indices once: a mask would be searched again at every epoch.
    nodes = {name: mask.nonzero().squeeze(1) for name, mask in masks.items()}
    graphs = {
        name: FlowGraph.from_edge_index(data.edge_index, data.num_nodes, mask=mask)
        for name, mask in masks.items()
        if name in ("train", "ood_test")
    }
    inside, targets = nodes["train"], data.y[masks["train"]]
    for epoch in progress(range(1, epochs + 1), desc=desc, unit="epoch"):
        model.train()
        optimiser.zero_grad()
        logits = _stacked(model(data.x, data.edge_index), len(objectives))
        logits = logits.index_select(1, inside)
        total = sum(
            objective(each, targets)
            for objective, each in zip(objectives.values(), logits, strict=True)
        )
        total.backward()
        optimiser.step()
        if epoch % evaluate_every == 0 or epoch == epochs:
            model.eval()
            with torch.no_grad():
                logits = _stacked(model(data.x, data.edge_index), len(objectives))
                _evaluate(history, epoch, logits, data.y, nodes, graphs)
            for name, objective in objectives.items():
                if isinstance(objective, TAR):
                    history.weights.setdefault(name, []).append(objective.last_q)
    return history


def _stacked(logits: Tensor, count: int) -> Tensor:
    logits = logits.unsqueeze(0) if logits.ndim == 2 else logits
    if len(logits) != count:
        raise ValueError(
            f"{count} objectives need as many models; the model has {len(logits)}"
        )
    return logits


def _evaluate(
    history: History,
    epoch: int,
    logits: Tensor,
    y: Tensor,
    nodes: Mapping[str, Tensor],
    graphs: Mapping[str, FlowGraph],
) -> None:
    history.epochs.append(epoch)
    losses = F.cross_entropy(
        logits.flatten(0, 1), y.repeat(len(logits)), reduction="none"
    ).view(len(logits), -1)  # (B * n,) -> (B, n)
    right = (logits.argmax(-1) == y).float()
    for name, chosen in nodes.items():
        _append(history, history.accuracy, name, right[:, chosen].mean(1))
        _append(history, history.loss, name, losses[:, chosen].mean(1))
        if name in graphs:
            risk = local_worst_case(losses[:, chosen], graphs[name])
            _append(history, history.risk, name, risk)


def _append(history: History, table: dict, name: str, values: Tensor) -> None:
    row = table.setdefault(name, {each: [] for each in history.names})
    for each, value in zip(history.names, values.tolist(), strict=True):
        row[each].append(value)


def local_worst_case(
    losses: Tensor,
    graph: FlowGraph,
    *,
    beta: float = 0.1,
    step: float = 0.1,
    steps: int = 20,
) -> Tensor:
    r"""Local worst-case risk :math:`\sum_i q_i\ell_i` under weights that have flowed.

    Args:
        losses: ``(..., n)`` losses of the nodes of ``graph``.
        graph: graph that the set induces.
        beta, step, steps: of the flow, from uniform weights. Its time is at most
            ``step * steps``: where losses are large the steps shorten.

    Returns:
        ``(...)`` risks; the quantity that the theory promises to lower.
    """
    flow = weight_flow(losses, graph, beta=beta, step=step, steps=steps)
    return (flow.q * losses).sum(-1)
