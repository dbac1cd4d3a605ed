"""The thin floor every chapter stands on.

Nothing here imports torch, matplotlib or ipywidgets until it is called, so that
``import icml25.core`` is instant.
"""

from icml25.core import claims, data, records
from icml25.core.explore import explore
from icml25.core.figures import COLORS, show_source, show_table, use_book_style
from icml25.core.runtime import Experiment, device, make_generator, progress, scale

__all__ = [
    "COLORS",
    "Experiment",
    "claims",
    "data",
    "device",
    "explore",
    "make_generator",
    "progress",
    "records",
    "scale",
    "show_source",
    "show_table",
    "use_book_style",
]
