"""The chapter's two decision problems, and how a policy for them is scored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from icml25.pcrl import gym_tables
from icml25.pcrl.envs import TabularEnv
from icml25.pcrl.metrics import hypervolume, score, simplex_grid
from icml25.pcrl.oracle import ray_oracle
from icml25.pcrl.policy import MetaPolicy, policy_table

__all__ = [
    "fruit_tree",
    "leaf_values",
    "score_policy",
    "scored",
    "treasure",
    "treasure_front",
]


def fruit_tree(depth: int = 6, num_objectives: int = 6) -> TabularEnv:
    """Fruit-tree: a walk to one of ``2**depth`` leaves, each with six nutrients."""
    env = TabularEnv.from_gymnasium("fruit-tree-v0", depth=depth)
    return env.with_objectives(num_objectives)


def treasure(name: str = "deep-sea-treasure-concave-v0") -> TabularEnv:
    """Deep-sea-treasure as two positive utilities of about equal range.

    ``10 treasure / 124`` and ``10 (25 - time) / 25``: a ratio of value and preference
    needs positive values, and the time penalty is negative.
    """
    env = TabularEnv.from_gymnasium(name)
    most = env.reward[..., 0].max().item()
    return env.with_utility(torch.tensor([10 / most, 0.4]), torch.tensor([0.0, 10.0]))


def leaf_values(env: TabularEnv) -> Tensor:
    """``(leaves, m)`` discounted value of every deterministic walk down a tree."""
    depth = len(env.levels)
    return env.reward[env.done].double() * env.gamma ** (depth - 1)


def treasure_front(env: TabularEnv) -> list[list[float]]:
    """The deterministic front in utilities, from mo-gymnasium's own table."""
    raw = gym_tables.make(env.name).pareto_front(env.gamma)
    most = max(float(point[0]) / env.gamma**18 for point in raw)
    return [[10 / most * float(p[0]), 10 + 0.4 * float(p[1])] for p in raw]


def scored(
    value: Tensor, preference: Tensor, ceiling: Tensor, whole: float
) -> dict[str, Any]:
    """Scores with the hypervolume as a share of ``whole`` and ``eta_each``."""
    row: dict[str, Any] = score(value, preference, ceiling)
    row["hypervolume"] /= whole
    row["eta_each"] = ((value / preference).amin(-1) / ceiling).tolist()
    return row


def score_policy(
    env: TabularEnv, policy: MetaPolicy, resolution: int
) -> dict[str, Any]:
    """Score a meta-policy on the interior grid of preferences, with exact values."""
    grid = simplex_grid(env.num_objectives, resolution).to(env.features.device)
    with torch.no_grad():
        value = env.solve(policy_table(env, policy, grid.to(env.features))).value
    ceiling = ray_oracle(env, grid)
    return scored(value.double(), grid, ceiling, hypervolume(leaf_values(env)))
