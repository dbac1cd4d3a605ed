"""Linear forecasters: one matrix from look-back to horizon, shared by all channels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from icml25.timefilter.graph import check_counts
from icml25.timefilter.model import Forecast


class _Linear(nn.Module):
    def __init__(self, lookback: int, horizon: int) -> None:
        super().__init__()
        check_counts(lookback=lookback, horizon=horizon)
        self.lookback = lookback

    def _check(self, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[1] != self.lookback:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; (batch, lookback={self.lookback}, "
                "channels) is needed"
            )


class NLinear(_Linear):
    """Subtract the last value, map linearly, add it back.

    Args:
        lookback: window length ``T``.
        horizon: steps ahead ``S``.

    Source:
        Zeng et al., AAAI 2023.
    """

    def __init__(self, lookback: int, horizon: int) -> None:
        super().__init__(lookback, horizon)
        self.map = nn.Linear(lookback, horizon)

    def forward(self, x: Tensor) -> Forecast:
        """Windows ``(B, T, C)`` to ``(B, S, C)``."""
        self._check(x)
        last = x[:, -1:]
        return _forecast(self.map((x - last).mT).mT + last)


class DLinear(_Linear):
    """A moving average and the rest, each mapped linearly, and summed.

    Args:
        lookback: window length ``T``.
        horizon: steps ahead ``S``.
        kernel: odd width of the moving average; the ends are repeated.

    Source:
        Zeng et al., AAAI 2023.
    """

    def __init__(self, lookback: int, horizon: int, *, kernel: int = 25) -> None:
        super().__init__(lookback, horizon)
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel={kernel}: an odd width is needed")
        self.kernel = kernel
        self.trend = nn.Linear(lookback, horizon)
        self.rest = nn.Linear(lookback, horizon)

    def forward(self, x: Tensor) -> Forecast:
        """Windows ``(B, T, C)`` to ``(B, S, C)``."""
        self._check(x)
        series = x.mT
        side = self.kernel // 2
        padded = F.pad(series, (side, side), mode="replicate")
        trend = F.avg_pool1d(padded, self.kernel, stride=1)
        return _forecast((self.trend(trend) + self.rest(series - trend)).mT)


class RLinear(_Linear):
    """Normalise each window by its own mean and spread, map linearly, undo.

    Args:
        lookback: window length ``T``.
        horizon: steps ahead ``S``.

    Source:
        Li et al., arXiv 2305.10721; without the learnt affine map.
    """

    def __init__(self, lookback: int, horizon: int) -> None:
        super().__init__(lookback, horizon)
        self.map = nn.Linear(lookback, horizon)

    def forward(self, x: Tensor) -> Forecast:
        """Windows ``(B, T, C)`` to ``(B, S, C)``."""
        self._check(x)
        mean = x.mean(1, keepdim=True)
        spread = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return _forecast(self.map(((x - mean) / spread).mT).mT * spread + mean)


def _forecast(y: Tensor) -> Forecast:
    return Forecast(y, y.new_zeros(()))


LINEAR: dict[str, type[nn.Module]] = {
    "DLinear": DLinear,
    "NLinear": NLinear,
    "RLinear": RLinear,
}
