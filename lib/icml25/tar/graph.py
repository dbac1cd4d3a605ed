"""The graph that weights flow on: each undirected edge once, checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

__all__ = ["FlowGraph"]


@dataclass(frozen=True)
class FlowGraph:
    """An undirected graph without self-loops, each edge stored once with ``src < dst``.

    Build it with :meth:`from_edge_index`; the flow relies on what is checked there.

    Attributes:
        src: ``(E,)`` int64, smaller end of each edge, ascending.
        dst: ``(E,)`` int64, larger end.
        num_nodes: number of nodes n, isolated ones included.
        weight: ``(E,)`` positive edge weights w, or None where all are 1.
    """

    src: Tensor
    dst: Tensor
    num_nodes: int
    weight: Tensor | None = None

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: int | None = None,
        *,
        edge_weight: Tensor | None = None,
        mask: Tensor | None = None,
        hops: int = 1,
        normalise: bool = False,
    ) -> FlowGraph:
        r"""Read PyG's ``edge_index``: loops go, directions and duplicates merge.

        Args:
            edge_index: ``(2, E)`` int64; one direction of an edge suffices.
            num_nodes: n; needed where the last nodes may be isolated.
            edge_weight: ``(E,)`` positive; all copies of an edge must agree.
            mask: ``(n,)`` bool; keep the subgraph that these nodes induce, renumbered
                in order. Without it the whole graph is kept.
            hops: join kept nodes that are at most this many edges apart in the *whole*
                graph (1: the induced subgraph). More than 1 needs unit weights.
            normalise: divide each weight by :math:`\sqrt{d_i d_j}`, with d the degrees
                inside the kept graph.

        Raises:
            TypeError: ``edge_index`` is not int64, ``mask`` not bool.
            ValueError: a wrong shape, a node out of range, a weight that is not a
                positive number or differs between copies of an edge, an empty mask.

        Example:
            >>> pairs = torch.tensor([[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]])
            >>> FlowGraph.from_edge_index(pairs).num_edges
            2
        """
        n = _check_edges(edge_index, num_nodes)
        _check_mask(mask, n)
        if hops < 1:
            raise ValueError(f"hops={hops}: at least 1")
        keep = edge_index[0] != edge_index[1]
        low = edge_index.amin(0)[keep]
        high = edge_index.amax(0)[keep]
        key, copy_of = torch.unique(low * n + high, return_inverse=True)
        weight = None
        if edge_weight is not None:
            if hops > 1:
                raise ValueError(f"hops={hops} needs unit weights; drop edge_weight")
            weight = _merge_weights(edge_weight, keep, copy_of, key.numel())
        src, dst = key // n, key % n
        if hops > 1:
            src, dst = _reach(src, dst, n, hops)
        if mask is not None:
            inside = mask[src] & mask[dst]
            number = torch.cumsum(mask, 0) - 1
            src, dst = number[src[inside]], number[dst[inside]]
            weight = None if weight is None else weight[inside]
            n = int(mask.sum())
        graph = cls(src, dst, n, weight)
        if normalise:
            degree = graph.degree()
            scaled = (degree[src] * degree[dst]).rsqrt()
            graph = replace(graph, weight=scaled if weight is None else weight * scaled)
        return graph

    @property
    def num_edges(self) -> int:
        return self.src.numel()

    @property
    def num_isolated(self) -> int:
        """Nodes without an edge: their weight can never change."""
        return self.num_nodes - torch.cat([self.src, self.dst]).unique().numel()

    def degree(self) -> Tensor:
        """``(n,)`` weighted degrees d."""
        weight = self.edge_weights()
        zero = weight.new_zeros(self.num_nodes)
        return zero.index_add(0, self.src, weight).index_add(0, self.dst, weight)

    def edge_weights(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``(E,)`` weights, ones where the graph has none."""
        if self.weight is None:
            return torch.ones(self.num_edges, dtype=dtype, device=self.src.device)
        return self.weight

    def to(self, device: torch.device | str) -> FlowGraph:
        weight = None if self.weight is None else self.weight.to(device)
        return FlowGraph(
            self.src.to(device), self.dst.to(device), self.num_nodes, weight
        )

    def components(self) -> Tensor:
        """``(n,)`` int64: the number of each node's connected component."""
        from scipy.sparse.csgraph import connected_components

        labels = connected_components(self._adjacency(), directed=False)[1]
        return torch.as_tensor(labels, dtype=torch.int64, device=self.src.device)

    def laplacian(self, edge_mobility: Tensor | None = None) -> Tensor:
        """Dense ``(n, n)`` float64 Laplacian with edge weights ``w * edge_mobility``.

        For theory on small graphs only: memory O(n^2). The flow never forms it.
        """
        weight = self.edge_weights(torch.float64).double()
        if edge_mobility is not None:
            weight = weight * edge_mobility.double()
        matrix = weight.new_zeros(self.num_nodes, self.num_nodes)
        matrix[self.src, self.dst] = -weight
        matrix[self.dst, self.src] = -weight
        return matrix - torch.diag(matrix.sum(1))

    def _adjacency(self):
        return _adjacency(self.src, self.dst, self.num_nodes)


def _adjacency(src: Tensor, dst: Tensor, n: int):
    from scipy.sparse import coo_matrix

    rows = torch.cat([src, dst]).cpu().numpy()
    columns = torch.cat([dst, src]).cpu().numpy()
    ones = np.ones(len(rows), dtype=np.int8)
    return coo_matrix((ones, (rows, columns)), shape=(n, n)).tocsr()


def _reach(src: Tensor, dst: Tensor, n: int, hops: int) -> tuple[Tensor, Tensor]:
    """Pairs at most ``hops`` edges apart, each once."""
    adjacency = _adjacency(src, dst, n).astype(bool)
    reach = adjacency
    for _ in range(hops - 1):
        reach = reach + reach @ adjacency
    pairs = np.nonzero(reach)
    low, high = (torch.as_tensor(p, dtype=torch.int64).to(src.device) for p in pairs)
    once = low < high
    return low[once], high[once]


def _check_edges(edge_index: Tensor, num_nodes: int | None) -> int:
    if edge_index.dtype != torch.int64:
        raise TypeError(f"edge_index has dtype {edge_index.dtype}; int64 is needed")
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"edge_index has shape {tuple(edge_index.shape)}; (2, E) is needed"
        )
    top = int(edge_index.max()) + 1 if edge_index.numel() else 0
    n = top if num_nodes is None else num_nodes
    if n < 1:
        raise ValueError(f"num_nodes={num_nodes}: the graph has no node")
    if top > n or (edge_index.numel() and int(edge_index.min()) < 0):
        raise ValueError(
            f"edge_index names nodes {int(edge_index.min())} to {top - 1}; "
            f"with num_nodes={n} allowed are 0 to {n - 1}"
        )
    return n


def _check_mask(mask: Tensor | None, n: int) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}; bool is needed")
    if mask.shape != (n,):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; ({n},) is needed")
    if not bool(mask.any()):
        raise ValueError("mask selects no node: there is nothing to weigh")


def _merge_weights(
    edge_weight: Tensor, keep: Tensor, copy_of: Tensor, num_edges: int
) -> Tensor:
    if edge_weight.shape != keep.shape:
        raise ValueError(
            f"edge_weight has shape {tuple(edge_weight.shape)}; "
            f"one weight an edge, ({keep.numel()},), is needed"
        )
    weight = edge_weight[keep]
    if weight.numel() and not bool((weight.isfinite() & (weight > 0)).all()):
        bad = weight[~(weight.isfinite() & (weight > 0))][0].item()
        raise ValueError(
            f"edge_weight holds {bad:g}; weights are positive and finite (leave out an "
            "edge that should carry nothing)"
        )
    blank = weight.new_zeros(num_edges)
    low = blank.scatter_reduce(0, copy_of, weight, "amin", include_self=False)
    high = blank.scatter_reduce(0, copy_of, weight, "amax", include_self=False)
    if not torch.equal(low, high):
        at = int((high - low).argmax())
        raise ValueError(
            f"edge_weight gives one undirected edge both {low[at].item():g} and "
            f"{high[at].item():g}; its directions and copies must agree"
        )
    return high
