"""Do we need to verify step by step? Process against outcome supervision.

A researcher's names are here; the rest is in the modules. ``mdp``: tabular processes.
``instances``: random ones, and those made by hand. ``transfer``: what changing the
policy costs. ``estimation``: rewards from steps and from outcomes. ``reasoning`` and
``training``: the tiny model. ``bounds`` and ``labels``: the experiments on tables.
"""

from icml25.supervision.estimation import fit_outcome_reward
from icml25.supervision.experiments import EXPERIMENTS
from icml25.supervision.mdp import TabularMDP, evaluate, plan
from icml25.supervision.reasoning import prm_reward
from icml25.supervision.transfer import (
    coverage,
    mean_transfer,
    worst_case_transfer,
)

__all__ = [
    "EXPERIMENTS",
    "TabularMDP",
    "coverage",
    "evaluate",
    "fit_outcome_reward",
    "mean_transfer",
    "plan",
    "prm_reward",
    "worst_case_transfer",
]
