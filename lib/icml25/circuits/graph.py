"""A transformer as a graph: who writes to the residual stream, who reads from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class CircuitGraph:
    r"""The computational graph of a pre-norm transformer, down to heads and MLPs.

    *Sources* write to the residual stream: the embedding (``input``), every attention
    head (``a{l}.h{h}``) and every MLP (``m{l}``). *Slots* read from it: each head reads
    three times (``<q>``, ``<k>``, ``<v>``), each MLP once, and the ``logits`` once. An
    edge joins a source to every slot that is read after the source was written. With
    $L$ layers and $H$ heads and parallel blocks their number is
    $(3H+1)\sum_{l<L}(1+l(H+1)) + 1 + L(H+1)$; sequential blocks add $LH$, because there
    a layer's MLP reads what its heads wrote.

    With grouped queries (fewer key-value heads $G$ than heads) keys and values have one
    slot a **key-value head**: that is where the model reads. Such a slot belongs to all
    query heads of its group.

    Attributes:
        num_layers: $L \ge 1$.
        num_heads: $H \ge 1$, query heads a layer.
        is_parallel: attention and MLP read the same input (GPT-NeoX, Pythia).
        num_kv_heads: $G$, a divisor of $H$; ``None`` for $G = H$.

    Raises:
        ValueError: a size below one, or key-value heads that do not divide the heads.

    Shapes:
        ``U = 1 + L(H + 1)`` sources, ``V = L(H + 2G + 1) + 1`` slots; a matrix of
        scores or a circuit's mask is ``[U, V]``, rows in layer order (heads, then
        MLP), columns in layer order (q of all heads, k, v, then MLP).

    Source:
        The graph of Hanna et al. (2024), which the paper uses.
    """

    num_layers: int
    num_heads: int
    is_parallel: bool = True
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads"):
            value = getattr(self, name)
            if value is None and name == "num_kv_heads":
                object.__setattr__(self, name, self.num_heads)
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide "
                f"num_heads={self.num_heads}"
            )

    @cached_property
    def sources(self) -> list[str]:
        """Names of the rows, ``U`` of them."""
        names = ["input"]
        for layer in range(self.num_layers):
            names += [f"a{layer}.h{head}" for head in range(self.num_heads)]
            names.append(f"m{layer}")
        return names

    @cached_property
    def slots(self) -> list[str]:
        """Names of the columns, ``V`` of them."""
        names = []
        for layer in range(self.num_layers):
            for letter in "qkv":
                count = self.num_heads if letter == "q" else self.num_kv_heads
                names += [f"a{layer}.h{head}<{letter}>" for head in range(count)]
            names.append(f"m{layer}")
        return [*names, "logits"]

    @cached_property
    def nodes(self) -> list[str]:
        """Names of the nodes: the sources and ``logits``."""
        return [*self.sources, "logits"]

    @property
    def slots_per_layer(self) -> int:
        """``H + 2G + 1``."""
        return self.num_heads + 2 * self.num_kv_heads + 1

    @cached_property
    def source_layers(self) -> Tensor:
        """Layer of each source, ``[U]``; the embedding counts as layer 0."""
        layers = torch.arange(self.num_layers).repeat_interleave(self.num_heads + 1)
        return torch.cat([layers.new_zeros(1), layers])

    @cached_property
    def slot_layers(self) -> Tensor:
        """Layer of each slot, ``[V]``; the logits count as the last layer."""
        layers = torch.arange(self.num_layers).repeat_interleave(self.slots_per_layer)
        return torch.cat([layers, layers.new_full((1,), self.num_layers - 1)])

    def first_source(self, layer: int) -> int:
        """How many sources are written before ``layer`` reads (its first row)."""
        return 1 + layer * (self.num_heads + 1)

    @cached_property
    def mask(self) -> Tensor:
        """Where there is an edge, ``[U, V]`` bool."""
        readable = torch.full((len(self.slots),), len(self.sources))
        for layer in range(self.num_layers):
            start = layer * self.slots_per_layer
            end = start + self.slots_per_layer - 1
            readable[start : end + 1] = self.first_source(layer)
            if not self.is_parallel:
                readable[end] += self.num_heads
        return torch.arange(len(self.sources)).unsqueeze(1) < readable

    @property
    def num_edges(self) -> int:
        """How many edges the full graph has."""
        return int(self.mask.sum())

    @cached_property
    def membership(self) -> Tensor:
        """Which nodes a slot belongs to, ``[V, U + 1]`` bool (last column: logits)."""
        table = torch.zeros(len(self.slots), len(self.nodes), dtype=torch.bool)
        group = torch.arange(self.num_heads) // (self.num_heads // self.num_kv_heads)
        heads = torch.arange(self.num_heads)
        for layer in range(self.num_layers):
            slot, source = layer * self.slots_per_layer, self.first_source(layer)
            table[slot + heads, source + heads] = True
            for start in (self.num_heads, self.num_heads + self.num_kv_heads):
                table[slot + start + group, source + heads] = True
            table[slot + self.slots_per_layer - 1, source + self.num_heads] = True
        table[-1, -1] = True
        return table

    def top_edges(self, scores: Tensor, n: int, *, prune: bool = True) -> Tensor:
        """The circuit of the ``n`` edges with the largest absolute scores.

        Args:
            scores: ``[U, V]``, as :func:`~icml25.circuits.attribute_edges` returns.
            n: how many edges to keep before pruning, from 0 to ``num_edges``.
            prune: then drop what hangs loose (:meth:`prune`).

        Returns:
            ``[U, V]`` bool. Ties go to the earlier edge in row order.

        Raises:
            ValueError: wrong shape, a NaN, or more edges than there are.
        """
        scores = self._matrix(scores, "scores")
        if (
            isinstance(n, bool)
            or not isinstance(n, int)
            or not 0 <= n <= self.num_edges
        ):
            raise ValueError(f"n={n!r}: give 0 to {self.num_edges}, the graph's edges")
        if not torch.isfinite(scores).all():
            raise ValueError("scores hold a NaN or an infinity")
        ranked = scores.detach().abs().cpu().masked_fill(~self.mask, -1.0).flatten()
        keep = ranked.argsort(descending=True, stable=True)[:n]
        circuit = torch.zeros(ranked.numel(), dtype=torch.bool)
        circuit[keep] = True
        circuit = circuit.view_as(self.mask)
        return self.prune(circuit) if prune else circuit

    def prune(self, circuit: Tensor) -> Tensor:
        """Drop, again and again, edges of nodes that nothing enters or nothing leaves.

        The embedding needs nothing that enters it, the logits nothing that leaves.
        """
        circuit = self._matrix(circuit, "circuit").cpu().bool() & self.mask
        membership = self.membership.float()
        while True:
            entered = (circuit.any(0).float() @ membership) > 0  # [U + 1]
            entered[0] = True
            left = torch.cat([circuit.any(1), torch.ones(1, dtype=torch.bool)])
            alive = entered & left
            slots = (membership @ alive.float()) > 0
            smaller = circuit & alive[:-1].unsqueeze(1) & slots
            if torch.equal(smaller, circuit):
                return circuit
            circuit = smaller

    def merge_qkv(self, matrix: Tensor) -> Tensor:
        """Edges between nodes instead of slots: ``[U, V]`` to ``[U, U + 1]``.

        Scores of a head's three slots are added (with their signs); the score of a slot
        that several query heads share is divided evenly among them. Of a mask, any.
        """
        matrix = self._matrix(matrix, "matrix").cpu()
        membership = self.membership.to(torch.get_default_dtype())
        if matrix.dtype == torch.bool:
            return (matrix.to(membership.dtype) @ membership) > 0
        shares = membership / membership.sum(1, keepdim=True)
        return matrix @ shares.to(matrix.dtype)

    def node_mask(self, circuit: Tensor) -> Tensor:
        """The sources that a circuit touches, ``[U]`` bool."""
        circuit = self._matrix(circuit, "circuit").cpu()
        return circuit.any(1) | self.merge_qkv(circuit).any(0)[:-1]

    def compare(
        self, before: Tensor, after: Tensor, *, merge: bool = True
    ) -> dict[str, float]:
        """How far two circuits differ.

        Args:
            before: mask ``[U, V]`` of the earlier circuit.
            after: mask of the later one.
            merge: compare edges between nodes (the paper's counts), not slots.

        Returns:
            ``node_jaccard`` and ``edge_jaccard`` (shared over all), ``node_change`` and
            ``edge_change`` (added plus removed, over the earlier size), and
            ``at_changed_nodes``: the share of changed edges at a node that changed.

        Raises:
            ValueError: wrong shapes, or a circuit without edges.
        """
        nodes = [self.node_mask(each) for each in (before, after)]
        edges = [self._matrix(each, "circuit").cpu() for each in (before, after)]
        if merge:
            edges = [self.merge_qkv(each) for each in edges]
        if not all(each.any() for each in edges):
            raise ValueError("a circuit without edges cannot be compared")
        changed = edges[0] ^ edges[1]
        moved = nodes[0] ^ nodes[1]
        touched = moved.unsqueeze(1).expand_as(changed)
        if merge:
            touched = touched | torch.cat([moved, moved.new_zeros(1)])
        else:
            ends = self.membership[:, :-1].float() @ moved.float()
            touched = touched | (ends > 0)
        return {
            "node_jaccard": jaccard(*nodes),
            "edge_jaccard": jaccard(*edges),
            "node_change": moved.sum().item() / nodes[0].sum().item(),
            "edge_change": changed.sum().item() / edges[0].sum().item(),
            "at_changed_nodes": (changed & touched).sum().item()
            / max(1, changed.sum().item()),
        }

    def union(
        self, first: Tensor, second: Tensor, *, scores: tuple[Tensor, Tensor], n: int
    ) -> Tensor:
        """The union of two circuits, cut to the ``n`` strongest edges and pruned.

        Args:
            first: mask ``[U, V]`` of one sub-task's circuit.
            second: mask of the other's.
            scores: their scores; an edge in both counts with the mean of the two.
            n: the size to cut to, usually that of the circuit it stands in for.

        Raises:
            ValueError: wrong shapes.
        """
        masks = torch.stack([self._matrix(each, "circuit") for each in (first, second)])
        values = torch.stack([self._matrix(each, "scores") for each in scores])
        masks = masks.to(values.device)
        total = (values * masks).sum(0) / masks.sum(0).clamp(min=1)
        both = (masks.any(0)).cpu() & self.mask
        n = min(n, int(both.sum()))
        # An edge of the union with score zero still ranks before any edge outside it.
        ranked = (total.abs() + torch.finfo(total.dtype).tiny) * both.to(total.device)
        return self.top_edges(ranked, n)

    def edges(self, circuit: Tensor) -> list[tuple[str, str]]:
        """Names of a circuit's edges, as (source, slot)."""
        rows, columns = self._matrix(circuit, "circuit").nonzero(as_tuple=True)
        return [
            (self.sources[u], self.slots[v])
            for u, v in zip(rows.tolist(), columns.tolist(), strict=True)
        ]

    def to_networkx(
        self, circuit: Tensor, scores: Tensor | None = None
    ) -> networkx.DiGraph:
        """A circuit as a directed graph of nodes (q, k and v merged), with weights.

        Args:
            circuit: mask ``[U, V]``.
            scores: ``[U, V]``; their sum over an edge's slots becomes its ``weight``.
        """
        import networkx

        merged = self.merge_qkv(self._matrix(circuit, "circuit"))
        graph = networkx.DiGraph()
        if scores is None:
            weights = merged.float()
        else:
            weights = self.merge_qkv(scores.cpu() * circuit.cpu())
        for u, v in merged.nonzero().tolist():
            graph.add_edge(self.nodes[u], self.nodes[v], weight=weights[u, v].item())
        return graph

    def _matrix(self, matrix: Tensor, name: str) -> Tensor:
        if not isinstance(matrix, Tensor) or matrix.shape != self.mask.shape:
            shape = tuple(getattr(matrix, "shape", ())) or type(matrix).__name__
            raise ValueError(
                f"{name} must be a tensor {tuple(self.mask.shape)}, got {shape}"
            )
        return matrix


def jaccard(first: Tensor, second: Tensor) -> float:
    """Shared over all: the overlap of two boolean tensors of one shape."""
    union = (first | second).sum().item()
    return (first & second).sum().item() / union if union else 1.0
