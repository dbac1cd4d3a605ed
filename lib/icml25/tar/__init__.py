"""Topology-aware dynamic reweighting for distribution shifts on graphs."""

from icml25.tar.benchmarks import citation, imbalanced, webkb
from icml25.tar.comparison import ShiftConfig, choose, run_shifts
from icml25.tar.experiments import EXPERIMENTS
from icml25.tar.flow import FlowResult, free_energy, weight_flow, worst_case_limit
from icml25.tar.graph import FlowGraph
from icml25.tar.objectives import (
    ERM,
    IRM,
    KLDRO,
    TAR,
    Chi2DRO,
    ClassBalanced,
    GroupDRO,
    VREx,
)
from icml25.tar.shifts import cbas, good_split, hard_region
from icml25.tar.theory import GapCurves, error_bounds, transport_cost
from icml25.tar.training import GCNEnsemble, History, local_worst_case, train
from icml25.tar.views import EERM, EditedViews

__all__ = [
    "Chi2DRO",
    "ClassBalanced",
    "EERM",
    "ERM",
    "EXPERIMENTS",
    "EditedViews",
    "FlowGraph",
    "FlowResult",
    "GCNEnsemble",
    "GapCurves",
    "GroupDRO",
    "History",
    "IRM",
    "KLDRO",
    "ShiftConfig",
    "TAR",
    "VREx",
    "cbas",
    "choose",
    "citation",
    "error_bounds",
    "free_energy",
    "good_split",
    "hard_region",
    "imbalanced",
    "local_worst_case",
    "run_shifts",
    "train",
    "transport_cost",
    "webkb",
    "weight_flow",
    "worst_case_limit",
]
