"""Distances between points kept as expansions: two by two, and by common ancestors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from icml25.hsdte.expansion import MAX_TERMS, Expansion
from icml25.hsdte.trees import RootedTree

__all__ = [
    "AncestorViews",
    "deficit",
    "distance_to_prototypes",
    "pairwise_distance",
    "poincare_distance",
    "tree_blocks",
    "tree_pairwise_distance",
]


def deficit(x: Expansion) -> Tensor:
    r"""$g(x) = 1 - |x|^2$, subtracted in expansions and then rounded.

    Args:
        x: ``(..., d)`` points of the unit ball.

    Returns:
        ``(...)`` float64, positive as long as the points have bits to spare.
    """
    one = Expansion(torch.ones_like(x.components[:1, ..., 0]))
    return one.minus_as_float(x.dot(x))


def _distance(square: Tensor, g_x: Tensor, g_y: Tensor) -> Tensor:
    """``2 arsinh sqrt(|x-y|^2 / (g(x) g(y)))``: accurate for small and large values.

    The two divisions come one after the other: their product may underflow.
    """
    t = square / g_x / g_y
    # The root's slope is infinite at 0, where the distance has no derivative: use 0.
    return torch.where(t > 0, 2 * t.clamp_min(1e-300).sqrt().asinh(), t)


def _twice_arsinh_root(q: Tensor) -> Tensor:
    """``2 arsinh sqrt(q)`` from fast operations; full accuracy down to ``q = 0``."""
    tail = q / ((1 + q).sqrt_() + 1)
    return tail.add_(q.sqrt()).log1p_().mul_(2)


def _guarded(x: Expansion, guard: int) -> Expansion:
    return x.with_terms(min(x.terms + guard, MAX_TERMS[x.dtype] + 1))


def poincare_distance(x: Expansion, y: Expansion, *, guard: int = 1) -> Tensor:
    r"""Hyperbolic distance of points of the unit ball, ``hsdte-eq-distance``.

    $d(x, y) = 2\,\mathrm{arsinh}\sqrt{|x-y|^2 / (g(x)\,g(y))}$

    Args:
        x, y: ``(..., d)``, broadcastable.
        guard: components more than stored that the subtractions use. One makes the
            distance *of the stored points* right to $10^{-14}$; with none the
            error is of the order $e^{R - R_{\max}}$, that of the points
            themselves.

    Returns:
        ``(...)`` float64. Differentiable where the points differ.
    """
    x, y = _guarded(x, guard), _guarded(y, guard)
    difference = x.minus_as_float(y)
    return _distance(difference.square().sum(-1), deficit(x), deficit(y))


def pairwise_distance(
    points: Expansion, *, guard: int = 0, max_elements: int = 1 << 21
) -> Tensor:
    """All distances the direct way: ``n^2 d`` subtractions of expansions.

    Args:
        points: ``(n, d)``.
        guard: as in :func:`poincare_distance`.
        max_elements: coordinates of differences held at one time.

    Returns:
        ``(n, n)`` float64, zero on the diagonal.
    """
    points = _guarded(points, guard)
    size, dim = points.shape
    gap = deficit(points)
    rows = max(1, max_elements // max(1, size * dim))
    out = []
    for i in range(0, size, rows):
        difference = points[i : i + rows, None].minus_as_float(points)
        square = difference.square().sum(-1)  # (rows, n, d) -> (rows, n)
        out.append(_distance(square, gap[i : i + rows, None], gap))
    return torch.cat(out)


def distance_to_prototypes(
    z: Tensor, points: Expansion, *, validate: bool = True
) -> Tensor:
    """Distances from ordinary points, such as a network's outputs, to embedded nodes.

    Args:
        z: ``(B, d)`` points of the open unit ball, any floating dtype; differentiable.
        points: ``(C, d)`` prototypes, such as the leaves of an embedded tree; fixed.
        validate: look for points outside the ball, which waits for the device. A
            training step whose network maps into the ball can do without; a point
            outside then gives NaN.

    Returns:
        ``(B, C)`` float64.

    Raises:
        TypeError: ``points`` is no :class:`Expansion`.
        ValueError: the dimensions differ, or a point of ``z`` is not inside the ball.

    Example:
        >>> origin = Expansion(torch.zeros(1, 1, 2, dtype=torch.float64))
        >>> z = torch.tensor([[0.5, 0.0]]).double()
        >>> round(float(distance_to_prototypes(z, origin)), 4)  # 2 artanh(1/2) = ln 3
        1.0986
    """
    if not isinstance(points, Expansion):
        raise TypeError(
            f"points are {type(points).__name__}; give an Expansion, such as the "
            "points of an embedded tree"
        )
    if z.ndim != 2 or len(points.shape) != 2 or z.shape[1] != points.shape[1]:
        raise ValueError(
            f"z has shape {tuple(z.shape)}, points {tuple(points.shape)}: give (B, d) "
            "and (C, d)"
        )
    z = z.to(torch.promote_types(z.dtype, points.dtype))
    x = Expansion.from_float(z, max(points.terms, 2))
    gap = deficit(x)
    if not validate:
        gap = torch.where(gap > 0, gap, torch.nan)
    elif not bool((gap > 0).all()):
        raise ValueError("z has points on or outside the unit sphere (or NaN)")
    # Wider components hold the same sum, and z needs no rounding.
    wide = Expansion(points.components.to(z.dtype))
    difference = x[:, None].minus_as_float(wide, leading=points.terms == 1)
    square = difference.square().sum(-1)  # (B, C, d) -> (B, C)
    return _distance(square, gap[:, None], deficit(points))


#: Subtrees of up to so many nodes are done many at a time.
_SMALL_SUBTREE = 128


class AncestorViews:
    """The tree as each ancestor sees it: descendants' directions and distances.

    The inversion that swaps ``v`` and the origin,
    ``sigma(x) = a + rho^2 (x - a) / |x - a|^2`` with ``a = v/|v|^2`` and
    ``rho^2 = 1/|v|^2 - 1``, is an isometry. Only ``x - a`` needs expansions: the
    deficit of the image is the product ``rho^2 g(x) / |x - a|^2``.
    """

    def __init__(self, tree: RootedTree, points: Expansion) -> None:
        self.tree = tree
        self.points = points
        self.gap = deficit(points)
        inner = torch.nonzero(tree.num_children > 0).flatten()[1:].to(points.device)
        self.row = torch.full((len(tree),), -1, device=points.device)
        self.row[inner] = torch.arange(len(inner), device=points.device)
        v = points[inner]
        inverse = v.dot(v).reciprocal()
        self.center = v * inverse[:, None]
        self.center_float = self.center.to_float(torch.float64)
        self.rho2 = (inverse - 1).to_float(torch.float64)

    def __call__(self, ancestor: Tensor | None, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Distances ``(k,)`` and directions ``(k, d)`` of nodes; None is the root."""
        x, gap = self.points[nodes], self.gap[nodes]
        if ancestor is None:
            y = x.to_float(torch.float64)
        else:
            row = self.row[ancestor]
            away = x.minus_as_float(self.center[row])
            factor = self.rho2[row] / away.square().sum(-1)
            y = self.center_float[row] + factor[:, None] * away
            gap = factor * gap
        norm2 = y.square().sum(-1)
        return 2 * (norm2 / gap).sqrt().asinh(), y / norm2.sqrt()[:, None]

    def edge_lengths(self) -> Tensor:
        """``(n,)`` embedded length of the edge to the parent; 0 for the root."""
        device = self.points.device
        length = torch.zeros(len(self.tree), dtype=torch.float64, device=device)
        nodes = torch.arange(len(self.tree), device=device)
        for depth, level in enumerate(self.tree.levels[1:3], 1):
            # Level 1 hangs on the root, which has no inversion; all others are alike.
            rest = slice(level.start, level.stop if depth == 1 else len(self.tree))
            parent = self.tree.parent[rest].to(device) if depth > 1 else None
            length[rest] = self(parent, nodes[rest])[0]
        return length


def tree_blocks(
    views: AncestorViews, *, max_elements: int = 1 << 17
) -> Iterator[tuple[slice | Tensor, slice | Tensor, Tensor, Tensor]]:
    r"""All distances of an embedded tree, block by block, by lowest common ancestor.

    Nodes below different children of ``a`` are seen from ``a`` at distances
    $r_1, r_2$ in directions $u_1, u_2$ that are far apart, so nothing
    cancels: $\sinh^2\frac D2 = \sinh^2\frac{r_1-r_2}2 + \sinh r_1\sinh r_2\,c$,
    $c = (1-u_1\cdot u_2)/2$.

    Args:
        views: the embedded tree.
        max_elements: pairs in one block.

    Yields:
        ``(rows, columns, D, T)``: places in depth-first order, hyperbolic distances
        and path lengths. Slices stand for a block, index tensors for a list of pairs.
        Every unordered pair of nodes stands in exactly one of them.

    Notes:
        ``n * depth`` expansions instead of ``n^2``; the memory of a level is ``n d``.
    """
    height = views.tree.height[torch.argsort(views.tree.depth_first)]
    height = height.to(views.points.device)
    for rows, cols, square, ancestor in _squares(views, max_elements):
        left = height[rows, None] if isinstance(rows, slice) else height[rows]
        path = left + height[cols] - 2 * height[ancestor]
        yield rows, cols, _twice_arsinh_root(square), path


def _squares(
    views: AncestorViews, max_elements: int
) -> Iterator[tuple[slice | Tensor, slice | Tensor, Tensor, int | Tensor]]:
    """The blocks as ``sinh^2(D/2)``, with the place of the common ancestor."""
    tree = views.tree
    inner = tree.num_children > 0
    small = inner & (tree.subtree_size <= _SMALL_SUBTREE)
    small[0] = False  # the root has no inversion
    yield from _small_squares(views, torch.nonzero(small).flatten(), max_elements)
    for depth, level in enumerate(tree.levels):
        large = torch.arange(level.start, level.stop)[(inner & ~small)[level]]
        if len(large):
            yield from _large_squares(views, large, depth, max_elements)


def _small_squares(
    views: AncestorViews, ancestors: Tensor, max_elements: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Whole subtrees, those of similar size as one batch of matrices."""
    tree, device = views.tree, views.points.device
    node_at = torch.argsort(tree.depth_first)
    ancestors = ancestors[torch.argsort(tree.subtree_size[ancestors], stable=True)]
    for group in _groups(ancestors, tree.subtree_size[ancestors], max_elements):
        size = tree.subtree_size[group]
        offset = torch.arange(int(size.max()))
        inside = offset < size[:, None]  # (g, w), like all that follows
        place = tree.depth_first[group, None] + offset * inside
        nodes = node_at[place]
        # Depth-first, another child's subtree begins wherever a child stands.
        child = torch.cumsum((tree.parent[nodes] == group[:, None]) & inside, 1)
        apart = (child[:, :, None] != child[:, None]) & inside[:, None]
        pairs = torch.nonzero(torch.triu(apart, 1), as_tuple=True)
        g, i, j = (each.to(device) for each in pairs)
        above = place[:, 0].to(device)[g]
        ancestor = group[:, None].expand_as(nodes).flatten()
        radius, unit = views(ancestor.to(device), nodes.flatten().to(device))
        radius, unit = radius.reshape(nodes.shape), unit.reshape(*nodes.shape, -1)
        radius[:, 0], unit[:, 0] = 0, 0  # the ancestor itself, but for rounding
        square = _opposite(*_rays(radius, unit))
        square[:, 0] = (radius / 2).sinh().square()
        yield above + i, above + j, square[g, i, j].clamp_min_(0), above


def _groups(ancestors: Tensor, size: Tensor, max_elements: int) -> Iterator[Tensor]:
    """Runs of sizes that differ by less than a half, of so many pairs together."""
    sizes = size.tolist()
    begin = 0
    for end in range(1, len(sizes) + 1):
        if (
            end == len(sizes)
            or sizes[end] > 1.5 * sizes[begin]
            or (end + 1 - begin) * sizes[end] ** 2 > max_elements
        ):
            yield ancestors[begin:end]
            begin = end


def _rays(radius: Tensor, unit: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factors of ``sinh^2(D/2)``; both of its terms are products of a row and a column.

    ``cosh D = cosh r1 cosh r2 - sinh r1 sinh r2 (u1.u2)``, in a form that keeps small
    distances.
    """
    grow = (radius / 2).exp()
    left = torch.stack([grow, -1 / grow], -1)
    right = torch.stack([1 / grow, grow], -1)
    sinh = radius.sinh()[..., None]
    ray, mirrored = (torch.cat([sinh, sinh * u], -1) for u in (unit, -unit))
    return left, right, mirrored, ray


def _opposite(left: Tensor, right: Tensor, mirrored: Tensor, ray: Tensor) -> Tensor:
    """``(g, rows, 2 or d+1), (g, columns, ...)`` factors as ``(g, rows, columns)``."""
    half = left @ right.mT  # 2 sinh((r1 - r2) / 2)
    return torch.baddbmm(half.square_(), mirrored, ray.mT, beta=0.25, alpha=0.5)


def _large_squares(
    views: AncestorViews, inner: Tensor, depth: int, max_elements: int
) -> Iterator[tuple[slice, slice, Tensor, int]]:
    """One level's ancestors, one after the other, in rectangles."""
    tree, device = views.tree, views.points.device
    place, size = tree.depth_first, tree.subtree_size
    children = tree.num_children.tolist()
    first_child = [1, *(1 + torch.cumsum(tree.num_children, 0)).tolist()]
    starts, sizes = place.tolist(), size.tolist()
    node_at = torch.argsort(place)
    count = size[inner] - 1
    ancestor = torch.repeat_interleave(inner, count)
    ends = torch.cumsum(count, 0)
    offset = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - count, count)
    nodes = node_at[torch.repeat_interleave(place[inner] + 1, count) + offset]
    radius, unit = views(ancestor.to(device) if depth else None, nodes.to(device))
    left, right, mirrored, ray = _rays(radius, unit)
    alone = (radius[None] / 2).sinh().square()
    for a, end in zip(inner.tolist(), ends.tolist(), strict=True):
        begin, stop = starts[a], starts[a] + sizes[a]
        shift = end - (stop - begin - 1) - (begin + 1)  # place -> row of radius
        below = slice(begin + 1, stop)
        seen = alone[:, begin + 1 + shift : stop + shift]
        yield slice(begin, begin + 1), below, seen, begin
        last = first_child[a] + children[a]
        for rows, cols in _rectangles(
            starts[first_child[a] : last],
            sizes[first_child[a] : last],
            stop,
            max_elements,
        ):
            i = slice(rows.start + shift, rows.stop + shift)
            j = slice(cols.start + shift, cols.stop + shift)
            square = _opposite(
                left[None, i], right[None, j], mirrored[None, i], ray[None, j]
            )
            yield rows, cols, square[0].clamp_min_(0), begin


def _rectangles(
    starts: list[int], sizes: list[int], stop: int, max_elements: int
) -> Iterator[tuple[slice, slice]]:
    """Pairs below different children, as rectangles; runs of leaves are halved."""
    i = 0
    while i < len(starts):
        j = i + 1
        while j < len(starts) and sizes[i] == 1 and sizes[j] == 1:
            j += 1
        begin, end = starts[i], starts[j - 1] + sizes[j - 1]
        if j > i + 1:
            yield from _triangle(begin, end, max_elements)
        if end < stop:
            step = max(1, max_elements // (stop - end))
            for row in range(begin, end, step):
                yield slice(row, min(row + step, end)), slice(end, stop)
        i = j


def _triangle(begin: int, end: int, max_elements: int) -> Iterator[tuple[slice, slice]]:
    """The pairs of a run of leaves: halves against each other, then within each."""
    if end - begin < 2:
        return
    middle = (begin + end) // 2
    step = max(1, max_elements // (end - middle))
    for row in range(begin, middle, step):
        yield slice(row, min(row + step, middle)), slice(middle, end)
    yield from _triangle(begin, middle, max_elements)
    yield from _triangle(middle, end, max_elements)


def tree_pairwise_distance(tree: RootedTree, points: Expansion) -> Tensor:
    """All distances as in :func:`tree_blocks`, ``(n, n)`` in the tree's numbering."""
    size = len(tree)
    out = torch.zeros(size, size, dtype=torch.float64, device=points.device)
    for rows, cols, square, _ in _squares(AncestorViews(tree, points), 1 << 17):
        out[rows, cols] = square
    out = _twice_arsinh_root(out + out.T)
    place = tree.depth_first.to(points.device)
    return out[place[:, None], place]
