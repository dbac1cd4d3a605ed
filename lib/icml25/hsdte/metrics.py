"""How faithful an embedding is: distortion and mean average precision, streamed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from icml25.hsdte.distances import AncestorViews, tree_blocks
from icml25.hsdte.expansion import Expansion
from icml25.hsdte.trees import RootedTree

__all__ = ["Distortion", "distortion", "tree_distortion"]


@dataclass(frozen=True)
class Distortion:
    """How well distances ``D`` in the ball repeat distances ``T`` of the tree.

    Attributes:
        d_ave: mean over pairs of ``|D / (tau T) - 1|``.
        d_max: the largest of these.
        d_wc: largest ``D/T`` over smallest ``D/T``; 1 is perfect.
        map: mean average precision: are a node's neighbours its nearest points?
        map_ceiling: MAP of the tree metric; below 1 where edges differ in length.
        pairs: unordered pairs of nodes.
    """

    d_ave: float
    d_max: float
    d_wc: float
    map: float
    map_ceiling: float
    pairs: int


class _Precision:
    """Mean average precision, counted block by block.

    For each directed edge ``a -> b``: how many points are at most as far from ``a`` as
    ``b`` is, and how many of these are neighbours. ``slack`` is the absolute error of
    the distances to come; ``max_elements`` of them are compared at one time.
    """

    def __init__(
        self,
        tree: RootedTree,
        place: Tensor,
        length: Tensor,
        slack: float = 0.0,
        max_elements: int = 1 << 17,
    ) -> None:
        self.max_elements = max_elements
        child = torch.arange(1, len(tree), device=length.device)
        parent = tree.parent[1:].to(length.device)
        source = torch.cat([place[child], place[parent]])
        length = length[1:].repeat(2)
        by_length = torch.argsort(length, stable=True)
        order = by_length[torch.argsort(source[by_length], stable=True)]
        self.source, length = source[order], length[order]
        # Equal lengths, up to rounding, rank together: a run ends where they grow.
        limit = length * (1 + 1e-12) + slack
        ends = torch.ones(len(length), dtype=torch.bool, device=length.device)
        ends[:-1] = (self.source[1:] != self.source[:-1]) | (length[1:] > limit[:-1])
        last = torch.nonzero(ends).flatten()
        run = torch.cumsum(ends, 0) - ends.long()
        self.limit = limit[last[run]]
        self.first = torch.searchsorted(
            self.source, torch.arange(len(tree) + 1, device=length.device)
        )
        self.reach = self.limit[self.first[1:] - 1]  # by place: its longest edge
        self.neighbours = last[run] - self.first[self.source] + 1
        self.within = torch.zeros_like(self.source)
        self.bounds = self.first.tolist()

    def add(self, begin: int, end: int, distance: Tensor, nearest: Tensor) -> None:
        """Distances ``(end - begin, k)`` from the places ``begin..end`` to others.

        ``nearest``: the smallest of them; most blocks are out of reach of any edge.
        """
        first, last = self.bounds[begin], self.bounds[end]
        if nearest > self.limit[first:last].max():
            return
        # A hub has as many edges in its row as there are columns.
        step = max(1, self.max_elements // distance.shape[1])
        for edge in range(first, last, step):
            edges = slice(edge, min(edge + step, last))
            rows = self.source[edges] - begin
            self.within[edges] += (distance[rows] <= self.limit[edges, None]).sum(1)

    def add_pairs(self, one: Tensor, other: Tensor, distance: Tensor) -> None:
        """Distances ``(k,)`` of single pairs of places, each counted from both ends."""
        for source in (one, other):
            near = torch.nonzero(distance <= self.reach[source]).flatten()
            first, end = self.first[source[near]], self.first[source[near] + 1]
            count = end - first
            edge = torch.arange(int(count.sum()), device=count.device)
            edge += torch.repeat_interleave(
                first - torch.cumsum(count, 0) + count, count
            )
            hit = distance[torch.repeat_interleave(near, count)] <= self.limit[edge]
            self.within.index_add_(0, edge, hit.long())

    def value(self) -> float:
        precision = self.neighbours.double() / self.within
        degree = self.first[1:] - self.first[:-1]
        total = precision.new_zeros(len(degree)).index_add_(0, self.source, precision)
        return float((total / degree).mean())


def tree_distortion(
    tree: RootedTree, points: Expansion, tau: float, *, max_elements: int = 1 << 17
) -> Distortion:
    """:class:`Distortion` of an embedded tree, streamed: no ``n x n`` matrix."""
    if len(tree) == 1:
        return Distortion(0.0, 0.0, 1.0, 1.0, 1.0, 0)
    device = points.device
    views = AncestorViews(tree, points)
    place = tree.depth_first.to(device)
    found = _Precision(tree, place, views.edge_lengths(), 0.0, max_elements)
    # Paths are differences of heights, whose rounding a short edge would not forgive.
    slack = 1e-15 * tree.eccentricity
    ideal = _Precision(tree, place, tree.weight.to(device), slack, max_elements)
    even = bool((tree.weight[1:] == tree.weight[1]).all())
    total = torch.zeros((), dtype=torch.float64, device=device)
    low, high = total + torch.inf, total - torch.inf
    for rows, cols, distance, path in tree_blocks(views, max_elements=max_elements):
        ratio = distance / path
        least, most = ratio.aminmax()
        low, high = torch.minimum(low, least), torch.maximum(high, most)
        total += ratio.div_(tau).sub_(1).abs_().sum()
        for metric, values in ((found, distance), (ideal, path)):
            if metric is ideal and even:
                continue  # equal edges: neighbours are nearest by definition
            if not isinstance(rows, slice):
                metric.add_pairs(rows, cols, values)
                continue
            nearest = values.min()
            metric.add(rows.start, rows.stop, values, nearest)
            metric.add(cols.start, cols.stop, values.T, nearest)
    pairs = len(tree) * (len(tree) - 1) // 2
    worst = torch.maximum((low / tau - 1).abs(), (high / tau - 1).abs())
    return Distortion(
        d_ave=float(total) / pairs,
        d_max=float(worst),
        d_wc=float(high / low),
        map=found.value(),
        map_ceiling=1.0 if even else ideal.value(),
        pairs=pairs,
    )


def distortion(tree: RootedTree, distances: Tensor, tau: float = 1.0) -> Distortion:
    """:class:`Distortion` of any ``(n, n)`` matrix of distances, for other methods.

    Raises:
        ValueError: the matrix has another shape than the tree.
    """
    size = len(tree)
    if distances.shape != (size, size):
        raise ValueError(
            f"distances have shape {tuple(distances.shape)}; the tree has {size} nodes"
        )
    if size == 1:
        return Distortion(0.0, 0.0, 1.0, 1.0, 1.0, 0)
    distances = (distances + distances.T) / 2  # equal both ways, to the last bit
    target = tree.distances().to(distances.device)
    pair = ~torch.eye(size, dtype=torch.bool, device=distances.device)
    ratio = distances[pair] / target[pair]
    error = (ratio / tau - 1).abs()
    nodes = torch.arange(size, device=distances.device)
    value = []
    for matrix in (distances, target):
        length = torch.zeros(size, dtype=matrix.dtype, device=matrix.device)
        length[1:] = matrix[nodes[1:], tree.parent[1:].to(matrix.device)]
        metric = _Precision(tree, nodes, length)
        metric.add(0, size, matrix.masked_fill(~pair, torch.inf), matrix.min())
        value.append(metric.value())
    return Distortion(
        d_ave=float(error.mean()),
        d_max=float(error.max()),
        d_wc=float(ratio.max() / ratio.min()),
        map=value[0],
        map_ceiling=value[1],
        pairs=size * (size - 1) // 2,
    )
