"""Hyperparameters by held-out pairs of the seen model; unseen ones are never asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from icml25.core import make_generator

from .linear import LinearIdentifier
from .ranking import map_acc, rank_of_positive

LAMBDAS = (0.03, 0.1, 0.3, 1.0, 3.0)
NUM_HELD_OUT = 300


def held_out_score(
    train: Tensor,
    gen: Tensor,
    owner: Tensor,
    fit: Callable[[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]],
    *,
    num_held_out: int = NUM_HELD_OUT,
    seed: int = 0,
) -> float:
    """mAP of a way to fit, on pairs of the seen model that it did not see.

    ``num_held_out`` translated train photos are set apart. ``fit`` gets the others and
    their translations; the translations of those set apart are then searched for among
    all train photos.

    Args:
        train: (m, d) embeddings of the train photos.
        gen: (n, d) embeddings of translations by the seen model.
        owner: (n,) int64, train photo of each translation.
        fit: (photos, translations, owner) -> the function that makes descriptors.
        num_held_out: photos set apart.
        seed: which ones.

    Raises:
        ValueError: fewer translated photos than are to be set apart.
    """
    translated = owner.unique()
    if not 0 < num_held_out < len(translated):
        raise ValueError(
            f"num_held_out={num_held_out}: give 1 to {len(translated) - 1}, fewer than "
            "the translated photos"
        )
    order = torch.randperm(len(translated), generator=make_generator(seed))
    is_out = torch.zeros(len(train), dtype=torch.bool, device=owner.device)
    is_out[translated[order[:num_held_out].to(owner.device)]] = True
    kept = (~is_out).nonzero().flatten()
    is_query = is_out[owner]
    again = torch.searchsorted(kept, owner[~is_query])
    describe = fit(train[kept], gen[~is_query], again)
    ranks = rank_of_positive(describe(gen[is_query]), describe(train), owner[is_query])
    return map_acc(ranks)[0]


def choose_lambda(
    train: Tensor,
    gen: Tensor,
    owner: Tensor,
    *,
    grid: tuple[float, ...] = LAMBDAS,
    num_held_out: int = NUM_HELD_OUT,
) -> tuple[float, dict[float, float]]:
    """The ridge with the best held-out mAP, and the mAP of each."""
    scores = {}
    for lam in grid:

        def fit(photos: Tensor, made: Tensor, of: Tensor, lam: float = lam):
            return LinearIdentifier.fit(photos[of], made, lam=lam, photos=photos)

        scores[lam] = held_out_score(train, gen, owner, fit, num_held_out=num_held_out)
    return max(scores, key=scores.get), scores
