"""What the authors' released code computes where it departs from the theorem."""

from __future__ import annotations

import torch
from torch import Tensor

from icml25.collusion import concentration as bounds
from icml25.collusion.certificates import (
    check_sizes,
    log_level_of,
    second_label,
    suboptimality_threshold,
)
from icml25.collusion.tables import Tables

__all__ = ["released_unplanting_bound"]


def released_unplanting_bound(
    estimation: Tables,
    rest_of_collective: Tables,
    *,
    population_size: int,
    test_size: int,
    avoid: int,
    delta: float = 0.05,
    eps: float = 0.0,
) -> Tensor:
    """The number that the authors' released code returns for unplanting.

    Kept to reproduce their figure. Unlike Theorem 3.7 it takes the second label's
    frequency from the n_e estimation rows with the radius of n rows, and divides the
    n - n_e certified rows by n.
    """
    events = 2 + 6 * rest_of_collective.mapped.shape[-2]
    log_level = log_level_of(events, delta)
    rows, chosen = rest_of_collective.size.double(), estimation.size.double()
    n = rows + chosen
    check_sizes(rows, n, population_size, test_size)
    wanted = second_label(estimation, avoid)
    rate_wanted = estimation.inside.gather(-1, wanted[..., None]).squeeze(-1)
    delta_x = rest_of_collective.inside[..., avoid] / rows[..., None]
    delta_x = delta_x - rate_wanted / chosen[..., None]
    radius = bounds.hoeffding(n, log_level)[..., None]
    others = population_size - n[..., None]
    share = n[..., None] / population_size
    slack = radius + bounds.hoeffding(rows, log_level)[..., None]
    slack = slack + 2 * bounds.hoeffding(others, log_level)
    margin = share * (rest_of_collective.mass - 2 * radius)
    margin = margin - (1 - share) * (delta_x + slack) - suboptimality_threshold(eps)
    certified = (rest_of_collective.mapped.sum(-1) * (margin > 0)).sum(-1)
    test = torch.full_like(n, test_size)
    return certified / n - radius.squeeze(-1) - bounds.hoeffding(test, log_level)
