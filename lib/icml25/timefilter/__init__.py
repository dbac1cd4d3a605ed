"""TimeFilter: forecasts from a graph over the patches of all channels.

Every patch of every channel is a token; a filter decides which kinds of neighbours a
token listens to: the same time in other channels (S), other times of its own channel
(T), or the rest (ST).
"""

from icml25.timefilter.experiments import EXPERIMENTS
from icml25.timefilter.graph import GraphFilter, RegionRouter, region_map
from icml25.timefilter.linear import DLinear, NLinear, RLinear
from icml25.timefilter.model import Forecast, TimeFilter, released_state

__all__ = [
    "EXPERIMENTS",
    "DLinear",
    "Forecast",
    "GraphFilter",
    "NLinear",
    "RLinear",
    "RegionRouter",
    "TimeFilter",
    "region_map",
    "released_state",
]
