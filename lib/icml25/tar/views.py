"""EERM: training on copies of the graph that generators edit against the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from icml25.tar.flow import _tiny
from icml25.tar.graph import _check_edges
from icml25.tar.objectives import ERM, NodeLoss, _cross_entropy, _positive

__all__ = ["EERM", "EditedViews"]


class EditedViews(nn.Module):
    r"""A node classifier that trains on K edited copies of its graph.

    Generator k has a logit :math:`b^k_{vu}` for each node v and possible partner u. A
    training pass draws, for every v and without replacement, ``num_edits`` partners
    with probabilities :math:`\mathrm{softmax}_u\,b^k_{vu}` and flips those pairs: an
    edge goes, a pair without one is joined. In evaluation the graph is left alone.

    Args:
        model: ``model(x, edge_index)`` gives ``(n, C)``, or ``(1, n, C)`` for a
            :class:`~icml25.tar.GCNEnsemble` of one member.
        edge_index: ``(2, E)`` int64, the undirected graph in both directions.
        num_nodes: n.
        num_views: generators K, at least 2: one view has no variance.
        num_edits: partners s that each node flips in a view.
        num_partners: possible partners P of a node: its neighbours, up to half of P,
            and random nodes for the rest. None: every other node, as published, in
            O(n^2) memory.
        generator: draws partners and edits, on the device of ``edge_index``.

    Attributes:
        log_prob: ``()`` log-probability of the edits of the last training pass, summed
            over views, nodes and draws (as if they were drawn with replacement).

    Raises:
        TypeError: ``edge_index`` is not int64.
        ValueError: a node out of range; ``num_views`` below 2; ``num_partners`` not in
            2 to n - 1; ``num_edits`` below 1 or above the number of partners.

    Shapes:
        training: ``(1, n, K, C)``; evaluation: what ``model`` gives.

    Notes:
        O(K (n P + E)) time for an edit; the K copies pass the model as one graph.
    """

    def __init__(
        self,
        model: nn.Module,
        edge_index: Tensor,
        num_nodes: int,
        *,
        num_views: int = 3,
        num_edits: int = 5,
        num_partners: int | None = 16,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        n = _check_edges(edge_index, num_nodes)
        if num_views < 2:
            raise ValueError(f"num_views={num_views}: at least 2")
        if num_partners is not None and not 2 <= num_partners < n:
            raise ValueError(
                f"num_partners={num_partners}: 2 to {n - 1} for {n} nodes, or None"
            )
        width = n - 1 if num_partners is None else num_partners
        if not 1 <= num_edits <= width:
            raise ValueError(f"num_edits={num_edits}: 1 to {width}, the partners")
        self.model, self.num_edits, self.generator = model, num_edits, generator
        own = torch.arange(n, device=edge_index.device)[:, None]
        if num_partners is None:
            hop = torch.arange(1, n, device=own.device).expand(n, -1)
        else:
            size = (n, num_partners)
            hop = torch.randint(1, n, size, generator=generator, device=own.device)
        partners = (own + hop) % n  # never the node itself
        if num_partners is not None:
            _put_neighbours(partners, edge_index, num_partners // 2)
        low, high = torch.minimum(own, partners), torch.maximum(own, partners)
        self.register_buffer("pairs", low * n + high)  # (n, P): pair {v, u}, a number
        keep = edge_index[0] != edge_index[1]
        edges = edge_index.amin(0)[keep] * n + edge_index.amax(0)[keep]
        self.register_buffer("edges", edges.unique())
        self.edit_logits = nn.Parameter(torch.zeros(num_views, n, width).to(own.device))
        self.log_prob: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if not self.training:
            return self.model(x, edge_index)
        num_views, n, _ = self.edit_logits.shape
        logits = self.model(x.repeat(num_views, 1), self._edited())
        # (1, K * n, C) or (K * n, C) -> (1, K, n, C) -> (1, n, K, C)
        return logits.reshape(1, num_views, n, -1).transpose(1, 2)

    def _edited(self) -> Tensor:
        """``(2, E')``: the edited copies side by side, copy k's nodes from k n on."""
        num_views, n, _ = self.edit_logits.shape
        log_prob = self.edit_logits.log_softmax(-1)
        u = torch.empty_like(log_prob).uniform_(generator=self.generator)
        # Largest log-probabilities plus Gumbel noise: draws without replacement.
        score = log_prob.detach() - u.clamp_min(_tiny(u)).log().neg().log()
        drawn = score.topk(self.num_edits, -1).indices  # (K, n, s)
        self.log_prob = log_prob.gather(-1, drawn).sum()
        shift = torch.arange(num_views, device=drawn.device)[:, None] * n * n
        flips = self.pairs.expand(num_views, -1, -1).gather(-1, drawn)
        # A pair drawn from both of its ends flips once.
        flips = (flips.reshape(num_views, -1) + shift).unique()
        both = torch.cat([(self.edges + shift).reshape(-1), flips])
        key, count = both.unique(return_counts=True)
        key = key[count == 1]  # in one of the two, not in both
        first = key // (n * n) * n
        low, high = first + key % (n * n) // n, first + key % n
        return torch.stack([torch.cat([low, high]), torch.cat([high, low])])


def _put_neighbours(partners: Tensor, edge_index: Tensor, most: int) -> None:
    """Put up to ``most`` neighbours of each node in front of its row of partners."""
    row, column = edge_index[:, edge_index[0] != edge_index[1]].unique(dim=1)
    count = torch.bincount(row, minlength=len(partners))
    begin = count.cumsum(0) - count
    place = torch.arange(len(row), device=row.device) - begin[row]
    fits = place < most
    partners[row[fits], place[fits]] = column[fits]


class EERM(ERM):
    r"""Explore-to-extrapolate risk minimisation: variance and mean over edited graphs.

    The model minimises :math:`\mathrm{Var}_k(r_k) + \beta\,\mathrm{mean}_k(r_k)`, with
    :math:`r_k` the risk on view k; the generators raise the variance by REINFORCE, that
    is, along :math:`\mathrm{Var}\,\nabla\log p`. Both gradients come from one scalar:
    the edits are discrete, so that no risk depends on the generators, and log p does
    not depend on the model.

    Args:
        views: the model that :func:`~icml25.tar.train` trains with this objective.
        beta: weight of the mean risk, > 0.
        node_loss: ``(logits, y) -> (n,)`` losses, cross-entropy by default.

    Raises:
        ValueError: ``beta`` is not positive; logits that are not of ``views`` in
            training, ``(n, K, C)``.

    Source: Wu, Zhang, Yan and Wipf (ICLR 2022).
    """

    def __init__(
        self, views: EditedViews, beta: float, node_loss: NodeLoss = _cross_entropy
    ) -> None:
        super().__init__(node_loss)
        self.views, self.beta = views, _positive("beta", beta)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        if logits.ndim != 3 or self.views.log_prob is None:
            raise ValueError(
                f"logits have shape {tuple(logits.shape)}; EERM needs (n, K, C), of "
                "an EditedViews model in training"
            )
        num_views = logits.shape[1]
        losses = self._losses(logits.flatten(0, 1), y.repeat_interleave(num_views))
        risks = losses.view(-1, num_views).mean(0)
        variance = risks.var()
        explored = variance.detach() * self.views.log_prob
        return variance + self.beta * risks.mean() - explored
