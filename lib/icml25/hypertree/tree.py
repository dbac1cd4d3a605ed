"""The hypertree: a branch leads to a *set* of children that must all be solved."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class RuleError(ValueError):
    """A rule library that does not fit the tree it is asked to grow."""


class RuleCycle(RuleError):
    """A task that would be divided into itself; the message names the path."""


@dataclass(frozen=True)
class Child:
    """What a rule asks for: the head its rules are looked up by, its text, its data."""

    head: str
    label: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Node:
    """A task of the tree.

    Attributes:
        index, depth, parent: place in the tree; the root is 0 and has no parent.
        head: the kind of task; rules are looked up by it.
        label: what a reader and a model see.
        data: what leaf operators need (city, leg, ...).
        branches: alternative ways to divide it, each a tuple of node indices.
        weights: one weight a branch, used by probability pruning.
    """

    index: int
    depth: int
    parent: int | None
    head: str
    label: str
    data: Mapping[str, Any]
    branches: list[tuple[int, ...]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Hyperchain:
    """One branch kept at every expanded node reached from the root.

    Attributes:
        choice: node index -> which of its branches.
        nodes: indices in depth-first order; a root-to-leaf path when every branch
            has one child.
        leaves: the nodes that are not divided.
        weight: product of the weights of the kept branches.
    """

    choice: Mapping[int, int]
    nodes: tuple[int, ...]
    leaves: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class _Partial:
    """A hyperchain of one subtree."""

    choice: tuple[tuple[int, int], ...]
    weight: float


class HyperTree:
    r"""An acyclic hypergraph: branches are alternatives, children are all needed.

    The number of hyperchains below a node obeys (`hypertree-eq-count`)

    .. math:: N(v) = \sum_{b \in B(v)} \prod_{u \in b} N(u), \qquad
              N(\text{leaf}) = 1 .

    With one child a branch this is the tree of alternatives of Tree of Thoughts; with
    one branch and one child, a chain.

    Example:
        >>> tree = HyperTree("plan", "[Plan]")
        >>> _ = tree.add_branch(0, [Child("fly", "fly"), Child("sleep", "sleep")])
        >>> _ = tree.add_branch(0, [Child("stay", "stay home")])
        >>> tree.n_chains(), len(tree.leaves())
        (2, 3)

    Source: the paper's hypertree and hyperchain.
    """

    def __init__(
        self, head: str, label: str, data: Mapping[str, Any] | None = None
    ) -> None:
        self.nodes = [Node(0, 0, None, head, label, data or {})]

    def __len__(self) -> int:
        return len(self.nodes)

    def path(self, index: int) -> list[Node]:
        """Nodes from the root to ``index``."""
        nodes = []
        at: int | None = index
        while at is not None:
            nodes.append(self.nodes[at])
            at = self.nodes[at].parent
        return nodes[::-1]

    def add_branch(
        self, parent: int, children: Sequence[Child], *, weight: float = 1.0
    ) -> tuple[int, ...]:
        """Attach one hyperedge and return the indices of its new children.

        Raises:
            ValueError: no such parent, no children, a weight that is not positive.
            RuleCycle: a child repeats a task above it.
        """
        if not 0 <= parent < len(self.nodes):
            raise ValueError(f"parent={parent}: the tree has nodes 0..{len(self) - 1}")
        if not children:
            raise ValueError(f"children of {self.nodes[parent].label!r} are empty")
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"weight={weight!r}: a finite number > 0")
        above = self.path(parent)
        for child in children:
            for node in above:
                if (node.head, node.label) == (child.head, child.label):
                    names = [n.label for n in above[node.depth :]] + [child.label]
                    raise RuleCycle("rules run in a cycle: " + " -> ".join(names))
        first = len(self.nodes)
        depth = self.nodes[parent].depth + 1
        for i, child in enumerate(children):
            self.nodes.append(
                Node(first + i, depth, parent, child.head, child.label, child.data)
            )
        branch = tuple(range(first, first + len(children)))
        self.nodes[parent].branches.append(branch)
        self.nodes[parent].weights.append(weight)
        return branch

    def leaves(self) -> list[int]:
        """Nodes without branches, over all alternatives."""
        return [node.index for node in self.nodes if not node.branches]

    def n_chains(self) -> int:
        """The number of hyperchains, exactly, without listing them."""
        counts = [1] * len(self.nodes)
        for node in reversed(self.nodes):  # children have larger indices
            if node.branches:
                counts[node.index] = sum(
                    math.prod(counts[u] for u in branch) for branch in node.branches
                )
        return counts[0]

    def chain(self, choice: Mapping[int, int]) -> Hyperchain:
        """The hyperchain that keeps ``choice[v]`` (default 0) at every node ``v``."""
        kept, order, leaves, weight = {}, [], [], 1.0
        stack = [0]
        while stack:
            node = self.nodes[stack.pop()]
            order.append(node.index)
            if not node.branches:
                leaves.append(node.index)
                continue
            b = choice.get(node.index, 0)
            if not 0 <= b < len(node.branches):
                raise ValueError(
                    f"choice[{node.index}]={b}: the node has "
                    f"{len(node.branches)} branches"
                )
            kept[node.index] = b
            weight *= node.weights[b]
            stack.extend(reversed(node.branches[b]))
        return Hyperchain(kept, tuple(order), tuple(leaves), weight)

    def hyperchains(self, limit: int | None = None) -> Iterator[Hyperchain]:
        """Hyperchains in order of their branches, lazily, at most ``limit``."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: at least 1")
        for part in itertools.islice(self._list(0), limit):
            yield self.chain(dict(part))

    def _list(self, index: int) -> Iterator[tuple[tuple[int, int], ...]]:
        node = self.nodes[index]
        if not node.branches:
            yield ()
        for b, branch in enumerate(node.branches):
            for parts in self._product(branch):
                yield ((index, b), *parts)

    def _product(self, branch: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
        if not branch:
            yield ()
            return
        for head in self._list(branch[0]):
            for tail in self._product(branch[1:]):
                yield head + tail

    def best_chains(self, k: int) -> list[Hyperchain]:
        """The ``k`` hyperchains of largest weight, best first, ties in branch order.

        Notes:
            The weight is a product over independent subtrees, so the k best of a node
            are made of the k best of its children: at most :math:`k^2` combinations a
            child are weighed, instead of all chains.
        """
        if k < 1:
            raise ValueError(f"k={k}: at least 1")
        best: dict[int, list[_Partial]] = {}
        for node in reversed(self.nodes):
            if not node.branches:
                best[node.index] = [_Partial((), 1.0)]
                continue
            found: list[_Partial] = []
            for b, branch in enumerate(node.branches):
                kept = [_Partial(((node.index, b),), node.weights[b])]
                for u in branch:
                    kept = _largest(
                        k,
                        (
                            _Partial(x.choice + y.choice, x.weight * y.weight)
                            for x in kept
                            for y in best[u]
                        ),
                    )
                found += kept
            best[node.index] = _largest(k, found)
        return [self.chain(dict(part.choice)) for part in best[0]]

    def to_text(self, chain: Hyperchain | None = None) -> str:
        """Indented outline: of one hyperchain, or of the whole tree."""
        if chain is not None:
            shown = [self.nodes[i] for i in chain.nodes]
            return "\n".join("  " * n.depth + n.label for n in shown)
        lines: list[str] = []
        stack: list[tuple[int, str]] = [(0, "")]
        while stack:
            index, mark = stack.pop()
            node = self.nodes[index]
            lines.append("  " * node.depth + mark + node.label)
            many = len(node.branches) > 1
            for b in reversed(range(len(node.branches))):
                tag = f"({b + 1}) " if many else ""
                stack.extend((u, tag) for u in reversed(node.branches[b]))
        return "\n".join(lines)

    def to_networkx(self) -> Any:
        """A ``networkx.DiGraph``; edges carry ``branch``, nodes their ``label``."""
        import networkx as nx

        graph = nx.DiGraph()
        for node in self.nodes:
            graph.add_node(
                node.index, label=node.label, head=node.head, depth=node.depth
            )
        for node in self.nodes:
            for b, branch in enumerate(node.branches):
                graph.add_edges_from((node.index, u, {"branch": b}) for u in branch)
        return graph


def _largest(k: int, parts: Iterable[_Partial]) -> list[_Partial]:
    # Choices compare like branches, since two of them first differ at one node.
    return heapq.nsmallest(k, parts, key=lambda part: (-part.weight, part.choice))


@dataclass(frozen=True)
class Rule:
    """How a task is divided.

    Attributes:
        head: the kind of task it applies to.
        children: ``children(node) -> child sets``, one an alternative; ``None`` to let
            the backend write them.
        hint: the rule in words, shown to a backend that writes.
    """

    head: str
    children: Callable[[Node], Sequence[Sequence[Child]]] | None = None
    hint: str = ""


class RuleLibrary:
    """The rules of one domain; their heads are the divisible tasks.

    Args:
        rules: several may share a head; each adds its own branches.
        atoms: heads of tasks that are not divided further.

    Raises:
        RuleError: no rules, or a head that is both divisible and an atom.
    """

    def __init__(self, rules: Sequence[Rule], *, atoms: Iterable[str]) -> None:
        if not rules:
            raise RuleError("rules is empty: a library divides at least one task")
        self.rules: dict[str, list[Rule]] = {}
        for rule in rules:
            self.rules.setdefault(rule.head, []).append(rule)
        self.atoms = frozenset(atoms)
        if both := self.atoms & self.rules.keys():
            raise RuleError(f"both divisible and atoms: {', '.join(sorted(both))}")

    def divisible(self, node: Node) -> bool:
        return node.head in self.rules

    def match(self, node: Node) -> list[Rule]:
        """The rules for a node; none for an atom.

        Raises:
            RuleError: the node's head is neither divisible nor an atom.
        """
        self.check(node.head)
        return self.rules.get(node.head, [])

    def check(self, head: str) -> None:
        if head not in self.rules and head not in self.atoms:
            known = ", ".join(sorted(self.rules.keys() | self.atoms))
            raise RuleError(f"unknown rule head {head!r}; the library knows: {known}")
