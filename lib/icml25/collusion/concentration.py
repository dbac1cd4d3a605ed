"""From a count to a probability and back to another count, each at one level.

``log_level`` is log(1 / delta~) throughout: every statement fails with probability at
most delta~.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

__all__ = ["carry_lower", "carry_upper", "clopper_pearson", "hoeffding"]


def hoeffding(size: Tensor, log_level: float) -> Tensor:
    r"""The one-sided radius :math:`R(k) = \sqrt{\log(1/\tilde\delta) / 2k}`."""
    return (log_level / (2 * size)).sqrt()


def clopper_pearson(
    counts: Tensor, size: Tensor, log_level: float
) -> tuple[Tensor, Tensor]:
    r"""One-sided lower and upper limits of a probability from a count, each exact.

    :math:`\mathrm{BetaInv}(\tilde\delta; k, m-k+1)` and
    :math:`\mathrm{BetaInv}(1-\tilde\delta; k+1, m-k)`; 0 and 1 at the ends.

    Args:
        counts: k, any shape, float64.
        size: m >= k, broadcast against ``counts``.
        log_level: log(1 / delta~).
    """
    k, m = (each.cpu().numpy() for each in torch.broadcast_tensors(counts, size))
    level = math.exp(-log_level)
    low = _inverse_beta(k, m - k + 1, level)
    # The upper limit of k is one minus the lower limit of the m - k misses.
    miss = _inverse_beta(m - k, k + 1, level)
    low, miss = low.to(counts.device), miss.to(counts.device)
    zero = torch.zeros_like(low)
    return (
        torch.where(counts <= 0, zero, low),
        1 - torch.where(counts >= size, zero, miss),
    )


def carry_lower(
    counts: Tensor, size: Tensor, other_size: Tensor | int, log_level: float
) -> Tensor:
    r"""A frequency among ``other_size`` fresh rows is at least this, whatever p is.

    Two events: :math:`p \ge` its Clopper-Pearson limit, and Bernstein's
    :math:`\hat p' \ge b(p) = p - \sqrt{2p(1-p)L/m'} - L/3m'`. b is convex, so its
    least value above the limit is at the limit or at its own minimum.
    """
    p, _ = clopper_pearson(counts, torch.as_tensor(size), log_level)
    c = 2 * log_level / torch.as_tensor(other_size, dtype=p.dtype, device=p.device)
    turn = (1 - (1 + c).rsqrt()) / 2  # where b' = 0
    p = torch.maximum(p, turn)
    return p - (c * p * (1 - p)).sqrt() - c / 6


def carry_upper(
    counts: Tensor, size: Tensor, other_size: Tensor | int, log_level: float
) -> Tensor:
    """A frequency among ``other_size`` fresh rows is at most this, whatever p is.

    The mirror of :func:`carry_lower`.
    """
    size = torch.as_tensor(size)
    return 1 - carry_lower(size - counts, size, other_size, log_level)


def _inverse_beta(a: np.ndarray, b: np.ndarray, level: float) -> Tensor:
    # a = 0 has no inverse; the caller knows the limit there.
    return torch.from_numpy(np.asarray(betaincinv(np.maximum(a, 1e-300), b, level)))
