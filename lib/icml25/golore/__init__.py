"""GoLore: low-rank training whose subspaces come with a convergence guarantee."""

from .bases import singular_basis, stiefel_uniform
from .experiments import EXPERIMENTS
from .optim import GoLore, GoLoreSGD, split_param_groups
from .theory import StallProblem, golore_bound, state_numel

__all__ = [
    "EXPERIMENTS",
    "GoLore",
    "GoLoreSGD",
    "StallProblem",
    "golore_bound",
    "singular_basis",
    "split_param_groups",
    "state_numel",
    "stiefel_uniform",
]
