"""Rooted trees as flat arrays in breadth-first order, checked at the door."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from icml25.core import data, make_generator

if TYPE_CHECKING:
    import networkx

__all__ = ["RootedTree", "load_tree"]


class RootedTree:
    """A rooted tree with positive edge lengths; nodes are numbered breadth first.

    Shapes: ``n`` nodes; node 0 is the root; the children of a node have consecutive
    numbers, and so have the nodes of a level.

    Args:
        parent: ``(n,)`` whole numbers, the parent of each node; -1 for the root. Any
            numbering; it is brought into breadth-first order, children in their order.
        weight: ``(n,)`` length of the edge to the parent, > 0 (the root's is ignored).
            Default: 1.
        labels: ``n`` names.

    Attributes:
        parent, weight: as given, in breadth-first order (int64, float64; root: -1, 0).
        order: ``(n,)`` the number each node had when it was given.
        labels: names in breadth-first order, or ``None``.

    Raises:
        ValueError: no node, no root or several, a parent out of range, a cycle, a wrong
            number of weights or labels, a weight that is not finite and positive.

    Example:
        >>> path = RootedTree([-1, 0, 1])
        >>> path.distances().tolist()[0]
        [0.0, 1.0, 2.0]
    """

    def __init__(
        self,
        parent: Sequence[int] | Tensor,
        weight: Sequence[float] | Tensor | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        parents = np.asarray(parent)
        if parents.ndim != 1 or parents.size == 0:
            raise ValueError(f"parent has shape {parents.shape}; give (n,) with n >= 1")
        if not np.issubdtype(parents.dtype, np.integer):
            raise ValueError(f"parent has dtype {parents.dtype}; give whole numbers")
        size = len(parents)
        weights = np.ones(size) if weight is None else _as_floats(weight)
        for name, given in (("weight", weights), ("labels", labels)):
            shape = np.shape(given)
            if given is not None and shape != (size,):
                raise ValueError(f"{name} has shape {shape}; the tree has {size} nodes")
        order = _breadth_first(parents)
        _check_weights(weights, parents)
        number = np.empty(size, dtype=np.int64)
        number[order] = np.arange(size)
        ordered = np.where(parents[order] < 0, -1, number[parents[order]])
        self.parent = torch.from_numpy(ordered)
        self.weight = torch.from_numpy(np.where(ordered < 0, 0.0, weights[order]))
        self.order = torch.from_numpy(order)
        self.labels = None if labels is None else tuple(str(labels[i]) for i in order)

    @classmethod
    def balanced(cls, branching: int, height: int) -> RootedTree:
        """The complete tree in which every inner node has ``branching`` children."""
        whole = isinstance(branching, int) and isinstance(height, int)
        if not whole or branching < 1 or height < 0:
            raise ValueError(
                f"branching={branching}, height={height}: give whole numbers, at least "
                "1 and 0"
            )
        size = sum(branching**level for level in range(height + 1))
        return cls((torch.arange(size) + branching - 1) // branching - 1)

    @classmethod
    def from_networkx(cls, graph: networkx.Graph, root: Any = None) -> RootedTree:
        """An undirected networkx tree, hung up at ``root`` (default: its first node).

        Edge attribute ``weight`` is the length (default 1).

        Raises:
            TypeError: no simple undirected networkx graph.
            ValueError: the graph is empty, has a cycle or is not connected.
        """
        kind = type(graph).__name__
        if not hasattr(graph, "adj") or graph.is_directed() or graph.is_multigraph():
            raise TypeError(f"graph is a {kind}; give an undirected networkx.Graph")
        nodes = list(graph.nodes)
        if not nodes:
            raise ValueError("the graph has no node")
        number = {node: i for i, node in enumerate(nodes)}
        parent, weight = [-1] * len(nodes), [1.0] * len(nodes)
        root = nodes[0] if root is None else root
        if root not in number:
            raise ValueError(f"root={root!r} is no node of the graph")
        if graph.number_of_edges() >= len(nodes):
            raise ValueError(
                f"the graph has a cycle: {graph.number_of_edges()} edges between "
                f"{len(nodes)} nodes"
            )
        seen, stack = {root}, [root]
        while stack:
            node = stack.pop()
            for other, attributes in graph.adj[node].items():
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
                    parent[number[other]] = number[node]
                    weight[number[other]] = attributes.get("weight", 1.0)
        if len(seen) < len(nodes):
            raise ValueError(
                f"the graph is not connected: {len(nodes) - len(seen)} of {len(nodes)} "
                f"nodes cannot be reached from {root!r}"
            )
        return cls(parent, weight, [str(node) for node in nodes])

    @classmethod
    def from_tsv(cls, path: str | Path) -> RootedTree:
        """A file with the columns node, parent, weight, label, and one header line.

        Raises:
            ValueError: a line without numbers in the first three columns, or nodes that
                are not numbered 0 to n - 1, each once.
        """
        rows: dict[int, tuple[int, float, str]] = {}
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        for place, line in enumerate(lines[1:], 2):
            if not line:
                continue
            node, parent, weight, label = (*line.split("\t", 3), "", "", "")[:4]
            try:
                rows[int(node)] = int(parent), float(weight), label
            except ValueError:
                raise ValueError(
                    f"{path}, line {place}: {line!r} does not begin with the columns "
                    "node, parent, weight"
                ) from None
        if sorted(rows) != list(range(sum(map(bool, lines[1:])))):
            raise ValueError(
                f"{path}: the nodes must be numbered 0 to n - 1, each once"
            )
        parents, weights, labels = zip(
            *(rows[i] for i in range(len(rows))), strict=True
        )
        return cls(parents, weights, labels)

    @classmethod
    def yule(cls, leaves: int, generator: torch.Generator | None = None) -> RootedTree:
        """A random phylogeny: lineages split at rate 1 until there are ``leaves``.

        All leaves end at the same time; edge lengths are times, exponentially spread.

        Raises:
            ValueError: fewer than 2 leaves.
        """
        if leaves < 2:
            raise ValueError(f"leaves={leaves}: at least 2 are needed")
        draws = torch.rand(leaves, 2, generator=generator, dtype=torch.float64).tolist()
        parent, birth, alive, now = [-1], [0.0], [0], 0.0
        weight = [0.0]
        for wait, pick in draws:
            now += -float(np.log1p(-wait)) / len(alive)
            if len(alive) == leaves:
                break
            split = alive.pop(int(pick * len(alive)))
            weight[split] = now - birth[split]
            for _ in range(2):
                alive.append(len(parent))
                parent.append(split)
                birth.append(now)
                weight.append(0.0)
        for leaf in alive:
            weight[leaf] = now - birth[leaf]
        return cls(parent, weight)

    def __len__(self) -> int:
        return len(self.parent)

    def __repr__(self) -> str:
        return (
            f"RootedTree({len(self)} nodes, height {len(self.levels) - 1}, "
            f"largest degree {int(self.degree.max())})"
        )

    @cached_property
    def num_children(self) -> Tensor:
        """``(n,)`` number of children."""
        return torch.bincount(self.parent[1:], minlength=len(self))

    @cached_property
    def degree(self) -> Tensor:
        """``(n,)`` number of neighbours."""
        return self.num_children + (torch.arange(len(self)) > 0)

    @cached_property
    def rank(self) -> Tensor:
        """``(n,)`` place among the siblings, from 0."""
        first = torch.zeros(len(self), dtype=torch.int64)
        first[1:] = torch.searchsorted(self.parent, self.parent[1:])
        return torch.arange(len(self)) - first

    @cached_property
    def levels(self) -> list[slice]:
        """The nodes of each level, from the root's, as slices."""
        bounds = [0, 1]
        while bounds[-1] < len(self):
            # Parents increase with the node, so a level ends where its parents do.
            bounds.append(int(torch.searchsorted(self.parent, bounds[-1])))
        return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]

    @cached_property
    def height(self) -> Tensor:
        """``(n,)`` distance from the root."""
        height = torch.zeros(len(self), dtype=torch.float64)
        for level in self.levels[1:]:
            height[level] = height[self.parent[level]] + self.weight[level]
        return height

    @property
    def eccentricity(self) -> float:
        """Length of the longest path from the root."""
        return float(self.height.max())

    @cached_property
    def subtree_size(self) -> Tensor:
        """``(n,)`` number of nodes below and at each node."""
        size = torch.ones(len(self), dtype=torch.int64)
        for level in reversed(self.levels[1:]):
            size.index_add_(0, self.parent[level], size[level].clone())
        return size

    @cached_property
    def depth_first(self) -> Tensor:
        """``(n,)`` place in depth-first order: a subtree is one run of places."""
        place = torch.zeros(len(self), dtype=torch.int64)
        size = self.subtree_size
        before = torch.cumsum(size, 0) - size
        for level in self.levels[1:]:
            first = torch.arange(level.start, level.stop) - self.rank[level]
            siblings = before[level] - before[first]
            place[level] = place[self.parent[level]] + 1 + siblings
        return place

    def distances(self) -> Tensor:
        """``(n, n)`` path lengths between all nodes; ``n`` row operations."""
        d = torch.zeros(len(self), len(self), dtype=torch.float64)
        for node, parent in enumerate(self.parent.tolist()[1:], 1):
            row = d[parent, :node] + self.weight[node]
            d[node, :node] = row
            d[:node, node] = row
        return d

    def rerooted(self, root: int) -> RootedTree:
        """The same tree hung up at another node; ``order`` still names the input's."""
        if not 0 <= root < len(self):
            raise ValueError(f"root={root}: the tree has nodes 0 to {len(self) - 1}")
        parent, weight = self.parent.clone(), self.weight.clone()
        path = [root]
        while path[-1] != 0:
            path.append(int(self.parent[path[-1]]))
        for child, above in zip(path, path[1:], strict=False):
            parent[above], weight[above] = child, self.weight[child]
        parent[root] = -1
        turned = RootedTree(parent, weight, self.labels)
        turned.order = self.order[turned.order]
        return turned

    def subtree(self, node: int) -> RootedTree:
        """The part at and below a node."""
        start = int(self.depth_first[node])
        inside = torch.argsort(self.depth_first)[
            start : start + int(self.subtree_size[node])
        ]
        number = torch.full((len(self),), -1)
        number[inside] = torch.arange(len(inside))
        parent = number[self.parent[inside]]
        parent[0] = -1
        labels = self.labels and [self.labels[i] for i in inside.tolist()]
        part = RootedTree(parent, self.weight[inside], labels)
        part.order = self.order[inside[part.order]]
        return part

    def recentered(self) -> RootedTree:
        """Hung up at its centre: the root with the smallest eccentricity.

        The centre lies on a longest path; two sweeps find one.
        """
        end = self.rerooted(int(self.height.argmax()))
        node = int(end.height.argmax())
        length = float(end.height[node])
        best, best_ecc = node, length
        while node >= 0:
            ecc = max(float(end.height[node]), length - float(end.height[node]))
            if ecc < best_ecc - 1e-12 * length:
                best, best_ecc = node, ecc
            node = int(end.parent[node])
        return end.rerooted(best)


def load_tree(name: str, seed: int = 0) -> RootedTree:
    """A tree by name, hung up at its centre.

    Args:
        name: ``"3-ary-5"`` (complete, height 5), ``"yule-200"`` (a random phylogeny of
            200 leaves), ``"mammals"`` (WordNet's, ships with the package),
            ``"carnivores"`` (its part below *carnivore*), or a file of the data set
            ``trees`` without its ending, such as ``"euro_birds"``.
        seed: of the random phylogeny.
    """
    if match := re.fullmatch(r"(\d+)-ary-(\d+)", name):
        return RootedTree.balanced(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"yule-(\d+)", name):
        return RootedTree.yule(int(match[1]), make_generator(seed)).recentered()
    if name in ("mammals", "carnivores"):
        tree = RootedTree.from_tsv(data.wordnet_mammals())
        if name == "carnivores":
            names = [label.split(".")[0] for label in tree.labels]
            tree = tree.subtree(names.index("carnivore"))
        return tree.recentered()
    return RootedTree.from_tsv(data.fetch("trees", f"{name}.tsv")).recentered()


def _breadth_first(parents: np.ndarray) -> np.ndarray:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order

    size = len(parents)
    roots = np.flatnonzero(parents == -1)
    if len(roots) != 1:
        raise ValueError(
            f"there are {len(roots)} roots (nodes with parent -1: {roots[:5].tolist()}"
            f"{' ...' if len(roots) > 5 else ''}); a rooted tree has exactly one"
        )
    if (wrong := np.flatnonzero((parents < -1) | (parents >= size))).size:
        raise ValueError(
            f"parent[{wrong[0]}]={parents[wrong[0]]} is out of range: -1 for the root, "
            f"else 0 to {size - 1}"
        )
    children = np.delete(np.arange(size), roots)
    graph = csr_matrix(
        (np.ones(size - 1, dtype=np.int8), (parents[children], children)),
        shape=(size, size),
    )
    order = breadth_first_order(
        graph, int(roots[0]), directed=True, return_predecessors=False
    ).astype(np.int64)
    if len(order) < size:
        lost = np.setdiff1d(np.arange(size), order)
        raise ValueError(
            f"there is a cycle: {len(lost)} nodes never lead up to the root, such as "
            f"node {lost[0]}"
        )
    return order


def _as_floats(weight: Sequence[float] | Tensor) -> np.ndarray:
    try:
        return torch.as_tensor(weight, dtype=torch.float64).cpu().numpy()
    except (TypeError, ValueError) as error:
        raise ValueError(f"weight must hold numbers: {error}") from None


def _check_weights(weights: np.ndarray, parents: np.ndarray) -> None:
    edges = weights[parents >= 0]
    nodes = np.flatnonzero(parents >= 0)
    if (bad := np.flatnonzero(~np.isfinite(edges) | (edges < 0))).size:
        raise ValueError(
            f"weight[{nodes[bad[0]]}]={edges[bad[0]]}: edge lengths must be finite and "
            "positive"
        )
    if (zero := np.flatnonzero(edges == 0)).size:
        raise ValueError(
            f"weight[{nodes[zero[0]]}]=0: an edge of length zero puts two nodes on one "
            "point; contract it first"
        )
