"""Where each element falls: certified shares, the infinite limit, earlier bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from icml25.collusion.certificates import Certificate
from icml25.collusion.tables import Tables

__all__ = [
    "certified_share",
    "cracking_share",
    "explaining_eps",
    "hardt_bound",
    "limit_success",
]


def certified_share(
    law: Tables,
    certificate: Callable[[Tables], Certificate],
    *,
    population_size: int,
    num_points: int = 400,
) -> Tensor:
    """The share n/N from which each element is certified, if members mirror a law.

    The root of the margin in n/N with the law's probabilities as frequencies.

    Args:
        law: probabilities (K, Y).
        certificate: tables of the members -> certificate.
        population_size: N.
        num_points: shares, even in the logarithm, that bracket the root.

    Returns:
        (K,); infinite where no share below one certifies the element.

    Example:
        >>> from functools import partial
        >>> certify = partial(planting_certificate, population_size=10**6,
        ...                   test_size=10**5, target=3)
        >>> shares = certified_share(car_law(car_signal()), certify,
        ...                          population_size=10**6)
    """

    def margin(shares: Tensor) -> Tensor:
        return certificate(law * (shares * population_size)).margin

    low = math.log(1 / population_size)
    shares = torch.linspace(
        low, 0, num_points + 1, dtype=torch.float64, device=law.mapped.device
    ).exp()[:-1]
    positive = margin(shares) > 0  # (J, K)
    first = positive.int().argmax(0)  # first True, or 0 where there is none
    low, high = shares[(first - 1).clamp(min=0)], shares[first]
    for _ in range(50):
        middle = (low + high) / 2
        is_positive = margin(middle).diagonal() > 0  # element k at its own share
        low = torch.where(is_positive, low, middle)
        high = torch.where(is_positive, middle, high)
    return high.masked_fill(~positive.any(0), math.inf)


def cracking_share(
    law: Tables,
    *,
    target: int | None = None,
    avoid: int | None = None,
    features_only: bool = False,
) -> Tensor:
    r"""The share of members from which each element falls, in an infinite population.

    :math:`\alpha_x = t/(1+t)` with :math:`t = \Delta_x / q_x`: the resistance over the
    push.

    Args:
        law: probabilities (K, Y).
        target: the planted label, or
        avoid: the label to move away from (members write the second label).
        features_only: as in ``planting_certificate``; only with ``target``.

    Returns:
        (K,): 0 where the label wins without any member, 1 where no share helps (nobody
        pushes: q_x = 0).

    Raises:
        ValueError: not exactly one of ``target`` and ``avoid``, or ``features_only``
            without ``target``.
    """
    if (target is None) == (avoid is None) or (features_only and target is None):
        raise ValueError(
            f"target={target}, avoid={avoid}, features_only={features_only}: give one "
            "of target and avoid; features_only goes with target"
        )
    label = avoid if target is None else target
    rest = law.inside.clone()
    rest[..., label] = -math.inf
    resistance = rest.amax(-1) - law.inside[..., label]
    if target is None:
        resistance = -resistance
    push = law.mapped[..., target] if features_only else law.mapped.sum(-1)
    share = resistance / (resistance + push)
    share = torch.where(resistance > 0, share, torch.zeros_like(share))
    # Without a push a label that does not lead already never will.
    return torch.where((push == 0) & (resistance >= 0), 1.0, share)


def limit_success(law: Tables, shares: Tensor, cracking: Tensor) -> Tensor:
    """The staircase: mass of the elements that fall below each share, (J,)."""
    return ((shares[:, None] > cracking) * law.mapped.sum(-1)).sum(-1)


def hardt_bound(
    law: Tables, shares: Tensor, *, target: int, features_only: bool = False
) -> Tensor:
    r"""The bound of Hardt et al. (2023) for an optimal classifier, one per share.

    :math:`1 - \frac{1-\alpha}{\alpha}\Delta\xi` with features and labels, where
    :math:`\xi` is the mass of the signal set and :math:`\Delta` the largest lead of a
    rival given the element (0 where none leads).

    With features only it is :math:`1 - \frac{1-p}{p\alpha}\xi`, our own derivation,
    where :math:`p` is the smallest probability of the target given the element, before
    or after g. Elements that no honest row shows have no conditional law and are left
    out.
    """
    xi = law.inside.sum()
    if features_only:
        p = torch.cat(
            [
                (table[..., target] / table.sum(-1))[table.sum(-1) > 0]
                for table in (law.inside, law.mapped)
            ]
        ).min()
        return 1 - (1 - p) / (p * shares) * xi
    shown = law.inside[law.inside.sum(-1) > 0]
    conditional = shown / shown.sum(-1, keepdim=True)
    rivals = conditional.clone()
    rivals[..., target] = -math.inf
    leads = rivals.amax(-1) - conditional[..., target]
    # A target that leads everywhere has Delta = 0: no bound may exceed one.
    lead = torch.cat([leads, leads.new_zeros(1)]).max()
    return 1 - (1 - shares) / shares * lead * xi


def explaining_eps(table: Tensor, prediction: Tensor, *, size: Tensor | int) -> Tensor:
    r"""The smallest eps that makes a trained platform eps-suboptimal, in hindsight.

    Under contamination :math:`(1-\epsilon)P + \epsilon Q` the mass of Q must make up,
    at every element, for what the predicted label lacks:
    :math:`\epsilon/(1-\epsilon) = \sum_x (\max_y P(x,y) - P(x, f(x)))`.

    Args:
        table: training counts on the signal set, (..., K, Y).
        prediction: the platform's labels, (..., K); -1 (never seen) lacks nothing.
        size: number of all training rows, one for all or (...).

    Returns:
        eps, (...).
    """
    rate = table / (size[..., None, None] if isinstance(size, Tensor) else size)
    label = prediction.clamp(min=0)[..., None]
    lack = rate.amax(-1) - rate.gather(-1, label).squeeze(-1)
    total = lack.sum(-1)
    return total / (1 + total)
