"""The construction: a tree in the Poincare ball, level by level from the root."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from icml25.hsdte.arithmetic import BITS, MAX_TERMS
from icml25.hsdte.distances import AncestorViews, tree_pairwise_distance
from icml25.hsdte.expansion import Expansion, max_radius
from icml25.hsdte.level import (
    aligned,
    carry_back,
    compiled_steps,
    direction,
    mirror,
    on_sphere,
    twisted,
)
from icml25.hsdte.metrics import Distortion, tree_distortion
from icml25.hsdte.sphere import direction_table
from icml25.hsdte.trees import RootedTree

__all__ = ["TreeEmbedding", "embed_tree", "max_scale", "terms_for"]

#: Reflections whose product turns a node's directions at random.
_TWIST_REFLECTIONS = 8


@dataclass(frozen=True)
class TreeEmbedding:
    """An embedded tree.

    Attributes:
        tree: the tree, ``n`` nodes.
        points: ``(n, d)`` expansions in the unit ball, in the tree's numbering.
        tau: scale: an edge of length ``w`` is ``tau * w`` long in the ball.
    """

    tree: RootedTree
    points: Expansion
    tau: float

    @property
    def radius(self) -> float:
        """Distance of the farthest node from the origin, in nats."""
        return self.tau * self.tree.eccentricity

    def distances(self) -> Tensor:
        """``(n, n)`` hyperbolic distances, by lowest common ancestors."""
        return tree_pairwise_distance(self.tree, self.points)

    def report(self) -> Distortion:
        """Distortion against the tree's own distances, streamed."""
        return tree_distortion(self.tree, self.points, self.tau)

    def edge_errors(self) -> Tensor:
        r"""``(n - 1,)`` nats by which each edge misses $\tau w$."""
        length = AncestorViews(self.tree, self.points).edge_lengths()
        return length[1:] - self.tau * self.tree.weight[1:].to(length.device)


def max_scale(
    tree: RootedTree,
    terms: int,
    dtype: torch.dtype = torch.float64,
    *,
    margin: float = 3.0,
) -> float:
    r"""The largest safe scale, $(R_{\max} - \mu)$ over the tree's eccentricity.

    Args:
        tree: hang it up at its centre first (:meth:`RootedTree.recentered`).
        terms: components $t$.
        dtype: of the components.
        margin: $\mu$; edges then come out right to about $e^{-\mu}$ nats.

    Returns:
        The scale; 1 for a single node.

    Notes:
        The margin bounds the absolute error of an edge. Where the scale leaves edges of
        few nats, as in a long path or beside one very short edge, the relative one may
        be large: a path of 2000 nodes with $t = 1$ in three dimensions has
        $D_{wc} = 19.7$; a tree of eight nodes with one edge of 0.001 has 2.25. One term
        more at the *same* scale cures it (the path: 1 to twelve digits), and so does a
        smaller scale: each nat of margin divides the error by $e$ (the path at 0.8 of
        its scale: 1.004).

    Raises:
        ValueError: a margin that is negative or leaves no room.
    """
    limit = max_radius(terms, dtype)
    if not 0 <= margin < limit:
        raise ValueError(
            f"margin={margin}: terms={terms} reach R_max = {limit:.1f}; give 0 or more "
            "and less than that"
        )
    return (limit - margin) / tree.eccentricity if len(tree) > 1 else 1.0


def terms_for(radius: float, dtype: torch.dtype, margin: float = 1.0) -> int:
    """Components that reach a hyperbolic radius with ``margin`` nats to spare."""
    return max(1, math.ceil(((radius + margin) / math.log(2) - 1) / BITS[dtype]))


def embed_tree(
    tree: RootedTree,
    dim: int,
    *,
    tau: float | None = None,
    terms: int = 1,
    dtype: torch.dtype = torch.float64,
    points: str | Mapping[int, Tensor] = "auto",
    twist: bool = True,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    product: str = "dekker",
    strict: bool = True,
    compiled: bool = False,
) -> TreeEmbedding:
    r"""Embed a tree in the ``dim``-dimensional Poincare ball.

    The root is at the origin. For every other inner node ``v`` the inversion that swaps
    ``v`` and the origin shows where the parent is; the unit vectors of ``v`` are turned
    so that the first points there; the others, times $\tanh(\tau w/2)$, are the
    children, and the same inversion carries them back. All nodes of a level are done
    at once.

    Args:
        tree: the tree.
        dim: dimension $d \ge 2$.
        tau: scale $\tau > 0$; default: :func:`max_scale`, whose margin holds short
            edges to an absolute error only: give them one term more than the default
            scale needs, ``tau=max_scale(tree, terms - 1, dtype)``.
        terms: components of each coordinate, $t$, 1 to 8.
        dtype: of the components, float64 or float32.
        points: method of :func:`~icml25.hsdte.sphere_points` (the paper's is
            ``"mam"``; the default is the best known), or a table of unit vectors by
            degree, row 0 towards the parent.
        twist: turn the directions of each node by its own random rotation before they
            are aligned. It changes no edge and no angle at a node, and keeps paths from
            curling up. Our addition; the paper's construction has none.
        generator: for directions that are searched, and for the twist.
        device: where the points are built.
        product: ``"dekker"``, or ``"fma"`` where the self-test
            ``arithmetic.product_is_exact`` allows it.
        strict: refuse scales that the components cannot hold. False shows what happens.
        compiled: fuse the arithmetic of a level by ``torch.compile``; the bits stay the
            same. The first call with each dimension, number of components, dtype and
            device takes a minute or several. One component has little to fuse and runs
            as it is.

    Returns:
        The embedding.

    Raises:
        TypeError: ``tree`` is no :class:`RootedTree`.
        ValueError: ``dim`` < 2, ``tau`` not positive, or so large that the components
            run out of bits (the text names the limit and the components that would do);
            a degree that the method has no directions for, or a table whose rows are
            not unit vectors.
        RuntimeError: ``compiled``, and there is no compiler or it changes the bits.

    Notes:
        Edges come out as $\tau w$ up to about $e^{R - R_{\max}}$ nats.

    Example:
        >>> tree = RootedTree.balanced(3, 4)
        >>> embedded = embed_tree(tree, 5, tau=12.0, terms=2, twist=False)
        >>> round(embedded.report().d_max, 5)
        0.02834
    """
    tau = _check(tree, dim, tau, terms, dtype, strict)
    x = torch.zeros(terms, len(tree), dim, dtype=dtype, device=device)
    if isinstance(points, str):
        points = direction_table(tree.degree.tolist(), dim, points, generator=generator)
    offset, table = _flatten(tree, points, dim, device)
    radius, square = _radii(tree.weight, tau, terms, dtype, device, product)
    steps = mirror, carry_back
    if compiled and terms > 1:
        steps = compiled_steps(dim, terms, dtype, x.device, product)
    to_center, from_center = steps
    for depth, level in enumerate(tree.levels[1:], 1):
        parent = tree.parent[level]
        inner, owner = torch.unique_consecutive(parent, return_inverse=True)
        row = offset[tree.degree[parent]] + tree.rank[level] + (depth > 1)
        unit = table[row.to(device)]
        if depth == 1:
            u = Expansion(unit.to(dtype)[None], product=product)
            x[:, level] = on_sphere(u, radius[level]).components
            continue
        above = tree.parent[inner].to(device)
        first = table[offset[tree.degree[inner]].to(device)]
        inner, owner = inner.to(device), owner.to(device)
        if twist:
            shape = (len(inner), _TWIST_REFLECTIONS, dim)
            normal = torch.randn(shape, generator=generator, dtype=torch.float64)
            first, unit = twisted(first, unit, normal.to(device), owner)
        inversion = to_center(Expansion(x[:, inner], product=product))
        up = direction(Expansion(x[:, above]), *inversion)
        unit = aligned(unit, first, up, owner).to(dtype)
        u = Expansion(unit[None], product=product)
        seen = (each[owner] for each in inversion)
        x[:, level] = from_center(u, radius[level], square[level], *seen).components
    return TreeEmbedding(tree, Expansion(x, product=product), tau)


def _check(
    tree: RootedTree,
    dim: int,
    tau: float | None,
    terms: int,
    dtype: torch.dtype,
    strict: bool,
) -> float:
    if not isinstance(tree, RootedTree):
        raise TypeError(f"tree is a {type(tree).__name__}; give a RootedTree")
    if not isinstance(dim, int) or dim < 2:
        raise ValueError(
            f"dim={dim}: give a whole number, at least 2 (a line holds only paths)"
        )
    limit = max_radius(terms, dtype)
    if tau is None:
        return max_scale(tree, terms, dtype)
    if not (isinstance(tau, int | float) and math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau={tau!r}: give a positive, finite scale")
    radius = tau * tree.eccentricity
    if strict and radius > limit - 1:
        needed = terms_for(radius, dtype)
        name = str(dtype).removeprefix("torch.")
        cure = (
            f"terms={needed} would do"
            if needed <= MAX_TERMS[dtype]
            else "no terms will do"
        )
        raise ValueError(
            f"tau={tau:g} puts nodes at radius R = {radius:.1f}, but terms={terms} of "
            f"{name} reach R_max = {limit:.1f} (and need a margin of 1); {cure}, or "
            f"tau <= {(limit - 1) / tree.eccentricity:.4g}"
        )
    return float(tau)


def _flatten(
    tree: RootedTree,
    points: Mapping[int, Tensor],
    dim: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """One table of all unit vectors, and where each degree's begin in it."""
    degrees = sorted(set(tree.degree.tolist()) - {0})
    offset = torch.zeros(max(degrees, default=0) + 1, dtype=torch.int64)
    rows, total = [torch.zeros(0, dim, dtype=torch.float64, device=device)], 0
    for degree in degrees:
        given = points.get(degree)
        if given is None or given.shape != (degree, dim):
            shape = None if given is None else tuple(given.shape)
            raise ValueError(
                f"points[{degree}] has shape {shape}; the tree needs ({degree}, {dim})"
            )
        if not bool((given.norm(dim=1) - 1).abs().max() < 1e-5):
            raise ValueError(f"points[{degree}]: its rows must be unit vectors")
        offset[degree] = total
        total += degree
        unit = given.double() / given.double().norm(dim=1, keepdim=True)
        rows.append(unit.to(device))
    return offset, torch.cat(rows)


def _radii(
    weight: Tensor,
    tau: float,
    terms: int,
    dtype: torch.dtype,
    device: torch.device | str,
    product: str,
) -> tuple[Expansion, Expansion]:
    """``tanh(tau w / 2)`` and its square by node; computed once a distinct length."""
    import mpmath

    distinct, place = torch.unique(weight, return_inverse=True)
    with mpmath.workprec(terms * BITS[dtype] + 200):
        half = mpmath.mpf(tau) / 2
        values = [mpmath.tanh(half * w) for w in distinct.tolist()]
        table = Expansion.from_mpmath(values, terms, dtype=dtype, device=device)
    table = Expansion(table.components, product=product)
    place = place.to(device)
    return table[place], (table * table)[place]
