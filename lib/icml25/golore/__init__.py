"""GoLore: low-rank training that provably converges."""

from .bases import singular_basis, stiefel_uniform
from .optim import GoLore, GoLoreSGD, split_param_groups

__all__ = [
    "GoLore",
    "GoLoreSGD",
    "singular_basis",
    "split_param_groups",
    "stiefel_uniform",
]
