"""Topology-aware dynamic reweighting for distribution shifts on graphs."""

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
from icml25.tar.shifts import cbas, citation, good_split, hard_region, webkb
from icml25.tar.theory import GapCurves, error_bounds, transport_cost
from icml25.tar.training import GCNEnsemble, History, local_worst_case, train
