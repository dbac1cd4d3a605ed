"""Algorithm 1: grow a hypertree by selection and expansion, then decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from icml25.hypertree.backends import (
    Backend,
    Question,
    ReplyError,
    read_children,
)
from icml25.hypertree.tree import (
    Child,
    Hyperchain,
    HyperTree,
    Node,
    Rule,
    RuleCycle,
    RuleLibrary,
)

PRUNING = ("width", "probability", "llm")


@dataclass(frozen=True)
class Step:
    """One expansion, for whoever wants to watch: the node and its new branches."""

    node: int
    branches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Outline:
    """The result of the construction.

    Attributes:
        tree: the whole hypertree.
        chain: the chosen hyperchain; its leaves are what is left to solve.
        steps: the expansions in order.
        complete: whether no divisible leaf is left in ``chain``.
    """

    tree: HyperTree
    chain: Hyperchain
    steps: tuple[Step, ...]
    complete: bool

    @property
    def leaves(self) -> list[Node]:
        return [self.tree.nodes[i] for i in self.chain.leaves]

    def __str__(self) -> str:
        return self.tree.to_text(self.chain)


@dataclass
class HTPlanner:
    """Top-down construction of an outline (Algorithm 1).

    Args:
        rules: the library R; its heads are the divisible set D.
        backend: selects, expands what the rules leave open, prunes and decides.
        depth: K, the largest number of rounds.
        width: W >= 1, hyperchains expanded in a round.
        prune: which W: ``"width"`` the first, ``"probability"`` the W of largest
            weight, ``"llm"`` those the backend prefers among the first ``4 W``.
        max_depth: deepest node; a rule that never ends stops here with the path.

    Raises:
        ValueError: ``depth``, ``width`` or ``prune`` out of range.

    Notes:
        Chains that are not kept stay in the tree and may return in a later round;
        nothing that other chains share is deleted. Selection is no bandit: the
        children of a branch are different tasks, not arms of one.
    """

    rules: RuleLibrary
    backend: Backend
    depth: int = 30
    width: int = 1
    prune: str = "probability"
    max_depth: int = 32

    def __post_init__(self) -> None:
        for name in ("depth", "width", "max_depth"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number >= 1")
        if self.prune not in PRUNING:
            raise ValueError(f"prune={self.prune!r}: one of {', '.join(PRUNING)}")

    def outline(self, query: str, root: Child) -> Outline:
        """Grow the tree under ``root`` for ``query`` and choose a hyperchain.

        Raises:
            RuleError: a task whose head the library does not know.
            RuleCycle: a task divided into itself, or deeper than ``max_depth``.
            ReplyError: a written expansion that stays malformed after one repair.
        """
        self.rules.check(root.head)
        tree = HyperTree(root.head, root.label, root.data)
        steps: list[Step] = []
        for _ in range(self.depth):
            grew = False
            for chain in self._kept(query, tree):
                open_ = [
                    i
                    for i in chain.leaves
                    if self.rules.divisible(tree.nodes[i])
                    # A chain before may have grown it.
                    and not tree.nodes[i].branches
                ]
                if open_:
                    node = tree.nodes[self._select(query, tree, chain, open_)]
                    steps.append(Step(node.index, self._expand(query, tree, node)))
                    grew = True
            if not grew:
                break
        chain = self._decide(query, tree)
        return Outline(tree, chain, tuple(steps), self._complete(tree, chain))

    def _complete(self, tree: HyperTree, chain: Hyperchain) -> bool:
        return not any(self.rules.divisible(tree.nodes[i]) for i in chain.leaves)

    def _kept(self, query: str, tree: HyperTree) -> list[Hyperchain]:
        if self.prune == "width":
            return list(tree.hyperchains(self.width))
        if self.prune == "probability":
            return tree.best_chains(self.width)
        chains = list(tree.hyperchains(4 * self.width))
        if len(chains) <= self.width:
            return chains
        prob = self._rank(query, tree, chains, "Which outline is the most promising?")
        order = sorted(range(len(chains)), key=lambda i: (-prob[i], i))
        return [chains[i] for i in sorted(order[: self.width])]

    def _rank(
        self, query: str, tree: HyperTree, chains: Sequence[Hyperchain], ask: str
    ) -> list[float]:
        texts = [tree.to_text(chain) for chain in chains]
        shown = "\n".join(f"({i + 1})\n{text}" for i, text in enumerate(texts))
        best = max(range(len(chains)), key=lambda i: chains[i].weight)
        question = Question(
            f"Task: {query}\nOutlines:\n{shown}\n{ask}",
            tuple(f" {i + 1}" for i in range(len(chains))),
            best,
        )
        return self.backend.choose([question])[0]

    def _select(
        self, query: str, tree: HyperTree, chain: Hyperchain, open_: list[int]
    ) -> int:
        if len(open_) == 1:
            return open_[0]
        names = "\n".join(
            f"({i + 1}) {tree.nodes[u].label}" for i, u in enumerate(open_)
        )
        question = Question(
            f"Task: {query}\nOutline so far:\n{tree.to_text(chain)}\n"
            f"Tasks that can be divided:\n{names}\nWhich one is divided next?",
            tuple(f" {i + 1}" for i in range(len(open_))),
        )
        return open_[self.backend.pick([question])[0]]

    def _expand(
        self, query: str, tree: HyperTree, node: Node
    ) -> tuple[tuple[int, ...], ...]:
        if node.depth >= self.max_depth:
            path = " -> ".join(n.label for n in tree.path(node.index))
            raise RuleCycle(f"deeper than max_depth={self.max_depth}: {path}")
        sets: list[Sequence[Child]] = []
        for rule in self.rules.match(node):
            if rule.children is not None:
                sets += rule.children(node)
            else:
                sets += self._written(query, tree, node, rule)
        for each in sets:
            for child in each:
                self.rules.check(child.head)
        weights = self._weights(query, node, sets)
        return tuple(
            tree.add_branch(node.index, each, weight=weight)
            for each, weight in zip(sets, weights, strict=True)
        )

    def _weights(
        self, query: str, node: Node, sets: Sequence[Sequence[Child]]
    ) -> list[float]:
        """How probable the backend finds each alternative; needed to prune by it."""
        if len(sets) < 2 or self.prune != "probability":
            return [1.0] * len(sets)
        labels = tuple(" " + " + ".join(c.label for c in each) for each in sets)
        given = [each[0].data.get("weight") for each in sets]
        best = max(range(len(sets)), key=lambda i: given[i] or 0.0)
        question = Question(
            f"Task: {query}\nTo solve: {node.label}\nOptions:\n"
            + "\n".join(f"-{label}" for label in labels)
            + "\nThe best option is:",
            labels,
            best,
        )
        prob = self.backend.choose([question])[0]
        floor = 1e-6  # An option that was ruled out stays reachable.
        return [max(floor, p) for p in prob]

    def _written(
        self, query: str, tree: HyperTree, node: Node, rule: Rule
    ) -> list[list[Child]]:
        path = " / ".join(n.label for n in tree.path(node.index))
        prompt = (
            f"Task: {query}\nDivide: {path}\nRule: {rule.hint or rule.head}\n"
            "Write the sub-tasks in brackets, like [first] [second]; separate "
            "alternatives by a semicolon."
        )
        reply = self.backend.generate(prompt)
        try:
            names = read_children(reply)
        except ReplyError:
            repaired = self.backend.generate(
                f"Rewrite as bracketed sub-tasks, [first] [second]:\n{reply}"
            )
            names = read_children(repaired)
        return [[Child(_head(name), f"[{name}]") for name in each] for each in names]

    def _decide(self, query: str, tree: HyperTree) -> Hyperchain:
        chains = self._kept(query, tree)
        # Alternatives that were left half-built are no outline.
        ready = [c for c in chains if self._complete(tree, c)]
        if not ready:
            more = tree.hyperchains(64 * self.width)
            ready = [c for c in more if self._complete(tree, c)][: self.width]
        chains = ready or chains
        if len(chains) == 1:
            return chains[0]
        prob = self._rank(query, tree, chains, "Which outline should be followed?")
        return chains[max(range(len(chains)), key=prob.__getitem__)]


def _head(name: str) -> str:
    """``"Flight from A to B"`` -> ``"Flight"``: the head is what precedes a detail."""
    for word in (" from ", " in ", " to ", ":"):
        name = name.split(word, 1)[0]
    return name.strip()
