"""HS-DTE: batches of expansions against multiple precision and plainer forms.

Seconds of CPU. ICML25_SLOW=1 adds the compiled mode, which takes minutes to compile.
"""

from __future__ import annotations

import os
import time

import mpmath
import torch
from icml25.hsdte import RootedTree, embed_tree, max_scale
from icml25.hsdte.arithmetic import BITS
from icml25.hsdte.distances import pairwise_distance
from icml25.hsdte.reference import distances_by_pair, embed_by_node
from icml25.hsdte.sphere import direction_table


def _best(function, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return min(times)


def _row(name, ours_s, other_s, target=None, note=""):
    ratio = ours_s / other_s
    return locals()


def rows() -> list[dict]:
    return [*_against_mpmath(), *_terms(), *_pairs(), *_large()]


def _against_mpmath():
    """Per-node multiple precision at equal bits; both sides do all that they return.

    The target is 500 times. The plain side is as good as straightforward Python
    gets: one inversion a parent, one deficit a point, mpmath's own dot products.
    """
    tree, dim = RootedTree.balanced(3, 5), 20
    points = direction_table(tree.degree.tolist(), dim)
    modes = [False, True] if os.environ.get("ICML25_SLOW") else [False]
    for terms in (1, 2, 4):
        kwargs = {"tau": max_scale(tree, terms), "terms": terms, "points": points}
        begin = time.process_time()
        x = embed_by_node(tree, **kwargs)
        construct_s = time.process_time() - begin
        with mpmath.workprec(BITS[torch.float64] * terms):
            distances_by_pair(x)
        both_s = time.process_time() - begin
        for compiled in modes[: None if terms > 1 else 1]:

            def construct(kwargs=kwargs, compiled=compiled):
                return embed_tree(tree, dim, twist=False, compiled=compiled, **kwargs)

            construct()  # compiles
            mode = "compiled" if compiled else "eager"
            named = terms == 2
            yield _row(
                f"construct 3-ary, depth 5, d=20, t={terms}, {mode} / mpmath by node",
                _best(construct),
                construct_s,
                1 / 500 if named else None,
                "364 nodes are too few: the fixed cost of a level's operations decides"
                if named
                else "",
            )
            yield _row(
                f"... and all metrics, t={terms}, {mode} / mpmath with all distances",
                _best(lambda construct=construct: construct().report()),
                both_s,
                1 / 500 if named else None,
            )


def _terms():
    tree, dim = RootedTree.balanced(3, 7), 20
    seconds = {}
    for terms in (1, 2, 4):
        seconds[terms] = _best(
            lambda terms=terms: embed_tree(tree, dim, terms=terms, twist=False), 3
        )
    for terms, limit in ((2, 0.5), (4, 3.0)):
        yield _row(
            f"construct 3-ary, depth 7 (3280 nodes), t={terms} / budget of {limit} s",
            seconds[terms],
            limit,
            1.0,
            f"{seconds[terms] / seconds[1]:.1f} times t=1",
        )


def _pairs():
    tree, dim = RootedTree.balanced(3, 6), 20
    for terms in (1, 2, 4):
        embedded = embed_tree(tree, dim, terms=terms, twist=False)
        yield _row(
            f"all pairs of 1093 nodes, t={terms}: by ancestors / direct",
            _best(embedded.distances, 3),
            _best(lambda points=embedded.points: pairwise_distance(points), 1),
            0.5 if terms > 1 else None,
        )


def _large():
    tree = RootedTree.balanced(3, 8)
    begin = time.process_time()
    embedded = embed_tree(tree, 20, terms=2, twist=False)
    embedded.report()
    yield _row(
        "9841 nodes, t=2, embedding and all metrics / budget of 10 s",
        time.process_time() - begin,
        10.0,
        1.0,
    )
