"""HS-DTE: batches of expansions against multiple precision and plainer forms."""

from __future__ import annotations

import itertools
import time

import mpmath
import torch
from icml25.hsdte import RootedTree, embed_tree, max_scale, pairwise_distance
from icml25.hsdte.arithmetic import BITS
from icml25.hsdte.reference import distance_by_mpmath, embed_by_node
from icml25.hsdte.sphere import direction_table


def _best(function, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def _row(name, ours_s, other_s, target=None, note=""):
    ratio = ours_s / other_s
    return locals()


def rows() -> list[dict]:
    return [*_against_mpmath(), *_terms(), *_pairs(), *_large()]


def _against_mpmath():
    tree, dim = RootedTree.balanced(3, 5), 20
    points = direction_table(tree.degree.tolist(), dim)
    for terms in (1, 2, 4):
        tau = max_scale(tree, terms)
        kwargs = {"tau": tau, "terms": terms, "points": points}
        ours = _best(lambda kwargs=kwargs: embed_tree(tree, dim, twist=False, **kwargs))
        other = _best(lambda kwargs=kwargs: embed_by_node(tree, **kwargs), 1)
        yield _row(
            f"construct 3-ary, depth 5 (364 nodes), d=20, t={terms} / mpmath by node",
            ours,
            other,
        )
    x = embed_by_node(tree, tau=max_scale(tree, 2), terms=2, points=points)
    pairs = list(itertools.islice(itertools.combinations(range(len(tree)), 2), 2000))
    with mpmath.workprec(2 * BITS[torch.float64]):
        each = _best(lambda: [distance_by_mpmath(x[i], x[j]) for i, j in pairs], 1)
    all_pairs = each / len(pairs) * len(tree) * (len(tree) - 1) / 2
    kwargs = {"tau": max_scale(tree, 2), "terms": 2, "points": points}
    ours = _best(lambda: embed_tree(tree, dim, twist=False, **kwargs).distances())
    other = _best(lambda: embed_by_node(tree, **kwargs), 1) + all_pairs
    yield _row(
        "construct and all distances, t=2 / mpmath by node and pair",
        ours,
        other,
        1 / 50,
        "mpmath's pairs are extrapolated from 2000",
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
    begin = time.perf_counter()
    embedded = embed_tree(tree, 20, terms=2, twist=False)
    embedded.report()
    yield _row(
        "9841 nodes, t=2, embedding and all metrics / budget of 10 s",
        time.perf_counter() - begin,
        10.0,
        1.0,
    )
