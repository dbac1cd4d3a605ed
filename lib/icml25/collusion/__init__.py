"""Statistical collusion by collectives: certificates that need only one's own rows.

``tables`` turns rows into counts at the elements of a signal set, ``certificates``
bounds what a collective will reach, ``limits`` says where each element falls, ``cars``
is the paper's data law, ``flights`` loads real rows, ``platforms`` trains classifiers,
``figures`` and ``beyond`` put them together as experiments.
"""

from icml25.collusion.certificates import (
    Certificate,
    erasing_certificate,
    planting_certificate,
    unplanting_certificate,
)
from icml25.collusion.experiments import EXPERIMENTS
from icml25.collusion.limits import certified_share
from icml25.collusion.tables import SignalMap, Tables, count_tables

__all__ = [
    "EXPERIMENTS",
    "Certificate",
    "SignalMap",
    "Tables",
    "certified_share",
    "count_tables",
    "erasing_certificate",
    "planting_certificate",
    "unplanting_certificate",
]
