"""Exact ranks of the true origins, without ever holding the score matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Products of float32 in float32, whatever autocast and the global switches say."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.9 or later
        name = "cuda" if device.type == "cuda" else "mkldnn"
        matmul = getattr(torch.backends, name).matmul
        before, full = matmul.fp32_precision, "ieee"
        switch = partial(setattr, matmul, "fp32_precision")
    else:
        before, full = torch.get_float32_matmul_precision(), "highest"
        switch = torch.set_float32_matmul_precision
    is_loose = before not in (full, "none")  # "none": nobody has asked for less
    if is_loose:
        switch(full)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if is_loose:
            switch(before)


def _in_full_precision(function: Callable) -> Callable:
    @wraps(function)
    def run(queries: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _full_precision(queries.device):
            return function(queries, *args, **kwargs)

    return run


def unit(features: Tensor) -> Tensor:
    """Rows scaled to length 1, so that inner products are cosines.

    Computed in float32, in float64 where the rows are float64.

    Raises:
        ValueError: not a non-empty (N, d); NaN or infinite numbers; a row of zeros,
            which has no direction.
    """
    need_rows("features", features)
    wide = features if features.dtype == torch.float64 else features.float()
    length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    if (length == 0).any():
        row = int((length.flatten() == 0).nonzero()[0])
        raise ValueError(f"features: row {row} is zero, it has no cosine with anything")
    return (wide / length).to(features.dtype)


@_in_full_precision
def rank_of_positive(
    queries: Tensor, gallery: Tensor, positive: Tensor, *, block: int = 8192
) -> Tensor:
    r"""Rank of each query's one true origin among all gallery rows.

    $$\mathrm{rank}_i = 1 + \#\{j : s_{ij} > s_{ip_i}\}
      + \tfrac12\,\#\{j \ne p_i : s_{ij} = s_{ip_i}\},\qquad s_{ij} = q_i\cdot g_j.$$

    Args:
        queries: (Q, d), float32 or float64; unit rows make the scores cosines.
        gallery: (N, d), any floating dtype; each tile is cast to the queries' dtype, so
            a bfloat16 or float16 gallery halves the memory.
        positive: (Q,) int64, gallery row of each query's origin.
        block: gallery rows in one tile.

    Returns:
        (Q,) float64 ranks, 1 to N; halves where there are ties.

    Raises:
        ValueError: wrong shapes, no query, no gallery, NaN, an origin that is not in
            the gallery, a block below 1.
        TypeError: queries that are no float32 or float64.

    Notes:
        Time O(Q N d); memory O(Q block). A tile's matrix product only sorts out which
        scores are clearly above or below the positive's: those within the product's
        rounding error are computed again, and the positive's with them, row by row in
        float64. So ranks depend on no block size, thread count or device, a query never
        beats itself by rounding, and equal rows are equal. The products run in the
        queries' precision under autocast and TF32 too: the global switch is set for the
        time of the call.
    """
    need_rows("queries", queries)
    need_rows("gallery", gallery)
    _need_match(queries, gallery, positive, block)
    owner = gallery[positive].to(queries.dtype)  # (Q, d)
    exact = _exact(queries, owner)  # (Q,) float64
    pivot = exact.to(queries.dtype)[:, None]
    # |rounding error of a product's entry| <= slack |q| |g|, Higham's gamma_d.
    slack = _unit_roundoff(queries) * (queries.shape[1] + 4)
    lengths = torch.linalg.vector_norm(queries, dim=1)
    few = max(1, 2**22 // queries.shape[1])  # rows in double precision at once
    above = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    equal = torch.zeros_like(above)
    for start in range(0, len(gallery), block):
        tile = gallery[start : start + block].to(queries.dtype)
        scores = queries @ tile.mT  # (Q, block)
        reach = slack * lengths * torch.linalg.vector_norm(tile, dim=1).max()
        low, high = pivot - reach[:, None], pivot + reach[:, None]
        above += (scores > high).sum(1)
        row, column = ((scores >= low) & (scores <= high)).nonzero(as_tuple=True)
        for part in torch.arange(len(row), device=row.device).split(few):
            i, j = row[part], column[part]
            again = _exact(queries[i], tile[j])
            other = positive[i] != j + start
            above.index_add_(0, i, ((again > exact[i]) & other).long())
            equal.index_add_(0, i, ((again == exact[i]) & other).long())
    return 1 + above.double() + equal.double() / 2


def ranks_from_scores(scores: Tensor, positive: Tensor) -> Tensor:
    """The same ranks from a whole score matrix (Q, N): short, and the tests' reference.

    Raises:
        ValueError: shapes that do not fit, NaN, an origin outside the gallery.
    """
    need_rows("scores", scores)
    _need_positive(positive, len(scores), scores.shape[1])
    own = scores.gather(1, positive[:, None])
    above = (scores > own).sum(1)
    equal = (scores == own).sum(1) - 1
    return 1 + above.double() + equal.double() / 2


@_in_full_precision
def topk(
    queries: Tensor, gallery: Tensor, k: int, *, block: int = 8192
) -> tuple[Tensor, Tensor]:
    """The ``k`` best gallery rows of each query, tile by tile, in full precision.

    Returns:
        Scores (Q, k), falling, and gallery rows (Q, k).

    Raises:
        ValueError: as :func:`rank_of_positive`; ``k`` outside 1..N.
    """
    need_rows("queries", queries)
    need_rows("gallery", gallery)
    _need_match(queries, gallery, None, block)
    if not 1 <= k <= len(gallery):
        raise ValueError(f"k={k}: give 1 to {len(gallery)}, the gallery's size")
    best, place = None, None
    for start in range(0, len(gallery), block):
        scores = queries @ gallery[start : start + block].to(queries.dtype).mT
        value, index = scores.topk(min(k, scores.shape[1]), dim=1)
        index = index + start
        if best is not None:
            value, index = torch.cat([best, value], 1), torch.cat([place, index], 1)
            value, order = value.topk(min(k, value.shape[1]), dim=1)
            index = index.gather(1, order)
        best, place = value, index
    return best, place


def map_acc(ranks: Tensor) -> tuple[float, float]:
    """Mean average precision and top-1 accuracy, both in [0, 1].

    With one origin a query the average precision is 1/rank. A tie for the first place
    (rank 1.5) is no hit.

    Raises:
        ValueError: no rank, or ranks below 1.
    """
    if ranks.numel() == 0:
        raise ValueError("ranks is empty: there was no query")
    if not (ranks >= 1).all():
        raise ValueError("ranks below 1 or NaN")
    ranks = ranks.double()
    return (1 / ranks).mean().item(), (ranks == 1).double().mean().item()


def standard_error(ranks: Tensor) -> float:
    """Standard error of the mean average precision over queries."""
    if ranks.numel() < 2:
        raise ValueError(f"{ranks.numel()} ranks: a standard error needs two or more")
    return ((1 / ranks.double()).std() / ranks.numel() ** 0.5).item()


def locate_origins(query_ids: Sequence, gallery_ids: Sequence) -> Tensor:
    """Gallery row of each query's origin, by identifier.

    Raises:
        ValueError: no query; an identifier that stands twice in the gallery; a query
            whose origin is not in the gallery.
    """
    if len(query_ids) == 0:
        raise ValueError("query_ids is empty: there is no query")
    places = {}
    for row, key in enumerate(gallery_ids):
        if key in places:
            raise ValueError(
                f"gallery_ids: {key!r} stands twice, at {places[key]} and {row}"
            )
        places[key] = row
    missing = [key for key in query_ids if key not in places]
    if missing:
        raise ValueError(
            f"{len(missing)} origins are not in the gallery, {missing[0]!r} for one: "
            "add them, or leave these queries out"
        )
    return torch.tensor([places[key] for key in query_ids])


def _exact(first: Tensor, second: Tensor) -> Tensor:
    return (first.double() * second.double()).sum(1)


def _unit_roundoff(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


def need_rows(name: str, x: Tensor) -> None:
    """Raise ValueError unless ``x`` is a non-empty matrix of finite numbers."""
    if x.dim() != 2 or x.numel() == 0:
        raise ValueError(f"{name}={tuple(x.shape)}: give a non-empty (rows, numbers)")
    # No mask: a sum is finite only if all its terms are (or huge). In parts, since a
    # sum in double precision first makes a copy in double precision.
    parts = x.split(max(1, 2**22 // x.shape[1]))
    sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
    if not torch.isfinite(sums).all() and not torch.isfinite(x).all():
        row = int((~torch.isfinite(x)).any(1).nonzero()[0])
        raise ValueError(f"{name}: row {row} holds NaN or infinite numbers")


def _need_positive(positive: Tensor, num_queries: int, num_gallery: int) -> None:
    is_whole = positive.dtype in (torch.int32, torch.int64)
    if positive.shape != (num_queries,) or not is_whole:
        raise ValueError(
            f"positive={tuple(positive.shape)} {positive.dtype}: give one gallery row "
            f"(int64) for each of {num_queries} queries"
        )
    low, high = int(positive.min()), int(positive.max())
    if low < 0 or high >= num_gallery:
        raise ValueError(
            f"positive holds {low if low < 0 else high}: an origin outside the gallery "
            f"of {num_gallery} rows"
        )


def _need_match(
    queries: Tensor, gallery: Tensor, positive: Tensor | None, block: int
) -> None:
    if queries.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"queries are {queries.dtype}: give float32 or float64")
    if not gallery.is_floating_point():
        raise TypeError(f"gallery is {gallery.dtype}: give a floating dtype")
    if queries.shape[1] != gallery.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} numbers a row, the gallery "
            f"{gallery.shape[1]}"
        )
    if positive is not None:
        _need_positive(positive, len(queries), len(gallery))
    if block < 1:
        raise ValueError(f"block={block}: give at least 1")
