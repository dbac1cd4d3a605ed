"""Statistical collusion by collectives: certificates that need only one's own rows.

``tables`` turns rows into counts at the elements of a signal set, ``certificates``
bounds what a collective will reach, ``limits`` says what it reaches with infinitely
many rows, ``cars`` is the paper's data law, ``platforms`` trains real classifiers, and
``experiments`` puts them together.
"""

from icml25.collusion.cars import (
    CAR_COLUMNS,
    CAR_LABELS,
    car_law,
    car_signal,
    sample_cars,
)
from icml25.collusion.certificates import (
    Certificate,
    certified_share,
    erasing_certificate,
    naive_unplanting_certificate,
    planting_certificate,
    released_unplanting_bound,
    second_label,
    suboptimality_threshold,
    unplanting_certificate,
)
from icml25.collusion.limits import (
    cracking_share,
    explaining_eps,
    hardt_bound,
    limit_success,
)
from icml25.collusion.tables import (
    SignalMap,
    Tables,
    count_tables,
    draw_tables,
    feature_only,
    predict,
    relabelled,
    success,
)
