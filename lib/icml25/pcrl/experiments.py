"""The chapter's experiments: one function each, plain numbers out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from icml25.core import Experiment, make_generator
from icml25.pcrl.continuous import HOPPER_LAPTOP, HOPPER_PAPER, run_hopper
from icml25.pcrl.envs import TabularEnv, _make, ray_oracle
from icml25.pcrl.metrics import hull_hypervolume, hypervolume, score, simplex_grid
from icml25.pcrl.toy import toy_preferences
from icml25.pcrl.train import (
    MetaConfig,
    policy_table,
    train_meta,
    train_ppo,
    train_tables,
)

__all__ = [
    "EXPERIMENTS",
    "NetworkConfig",
    "TablesConfig",
    "TreasureConfig",
    "fruit_tree",
    "run_network",
    "run_tables",
    "run_treasure",
    "treasure",
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


@dataclass(frozen=True)
class TablesConfig:
    """Fruit-tree with one table of logits per preference and exact values.

    Attributes:
        rules: (rule, lambda) pairs.
        resolution: the grid of preferences has steps of one over this.
        depth: of the tree.
        num_objectives: the first so many of six.
        iterations: updates.
        lr: step on the logits.
    """

    rules: tuple[tuple[str, float], ...] = (
        ("ls", 0.0),
        ("mgda", 0.0),
        ("sdmgrad", 1.0),
        ("cagrad", 0.0),
        ("epo", 0.0),
        ("chebyshev", 10.0),
        ("preco", 5.0),
        ("residual", 1.0),
        ("blend", 10.0),
    )
    resolution: int = 9
    depth: int = 6
    num_objectives: int = 6
    iterations: int = 300
    lr: float = 0.3


def run_tables(
    config: TablesConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """E1: every rule on fruit-tree, no network, no sampling (``seed`` is not used).

    Returns:
        Per rule the scores of :func:`~icml25.pcrl.score` with the hypervolume as a
        share of that of all leaves, and ``eta_each``; ``ray_share`` for the oracle.
    """
    env = fruit_tree(config.depth, config.num_objectives).to(device)
    preference = simplex_grid(config.num_objectives, config.resolution).to(device)
    ceiling = ray_oracle(env, preference)
    leaves = hypervolume(leaf_values(env))
    result: dict[str, Any] = {
        "ray_share": hypervolume(ceiling[:, None] * preference) / leaves
    }
    for rule, lam in config.rules:
        _, solution = train_tables(
            env,
            preference,
            rule=rule,
            lam=lam,
            iterations=config.iterations,
            lr=config.lr,
        )
        result[rule] = _scored(solution.value, preference, ceiling, leaves)
    return result


def _scored(
    value: Tensor, preference: Tensor, ceiling: Tensor, whole: float
) -> dict[str, Any]:
    row: dict[str, Any] = score(value, preference, ceiling)
    row["hypervolume"] /= whole
    row["eta_each"] = ((value / preference).amin(-1) / ceiling).tolist()
    return row


@dataclass(frozen=True)
class TreasureConfig:
    """Deep-sea-treasure (concave) with one table of logits per preference.

    Attributes:
        rules: (rule, lambda) pairs.
        num_preferences: at equal angles between the axes.
        iterations: updates.
        lr: step on the logits.
    """

    rules: tuple[tuple[str, float], ...] = (
        ("ls", 0.0),
        ("mgda", 0.0),
        ("preco", 5.0),
    )
    num_preferences: int = 21
    iterations: int = 150
    lr: float = 0.3


def run_treasure(
    config: TreasureConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """E4: the treasure map, exact (``seed`` is not used).

    Returns:
        Per rule the scores, the values ``(K, 2)``, the visits ``(K, S)``, and the
        number of distinct *greedy* value vectors; the hypervolume is a share of that of
        all stochastic policies (``hull``).
    """
    env = treasure().to(device)
    preference = toy_preferences(config.num_preferences).to(device)
    ceiling = ray_oracle(env, preference)
    front = torch.tensor(_treasure_front(env), dtype=torch.float64)
    hull = hull_hypervolume(front)
    result: dict[str, Any] = {"front": front.tolist(), "hull": hull}
    for rule, lam in config.rules:
        policy, solution = train_tables(
            env,
            preference,
            rule=rule,
            lam=lam,
            iterations=config.iterations,
            lr=config.lr,
        )
        row = _scored(solution.value, preference, ceiling, hull)
        best = policy.argmax(-1)
        greedy = env.solve(torch.nn.functional.one_hot(best, 4).to(policy)).value
        row["greedy_distinct"] = score(greedy.clamp_min(0.0), preference)["distinct"]
        row["value"] = solution.value.tolist()
        row["visits"] = solution.occupancy.tolist()
        result[rule] = row
    return result


def _treasure_front(env: TabularEnv) -> list[list[float]]:
    """The deterministic front in utilities, from mo-gymnasium's own table."""
    raw = _make(env.name).pareto_front(env.gamma)
    most = max(float(point[0]) / env.gamma**18 for point in raw)
    return [[10 / most * float(p[0]), 10 + 0.4 * float(p[1])] for p in raw]


@dataclass(frozen=True)
class NetworkConfig:
    """One meta-policy for all preferences on fruit-tree.

    Attributes:
        runs: how each rule is trained.
        resolution: the grid of preferences it is scored on.
        depth: of the tree.
        num_objectives: the first so many of six.
        has_zeros: score on the grid with zero entries too, as the paper does (then
            only cosine and hypervolume exist).
        sampled: PPO from sampled episodes instead of exact gradients.
    """

    runs: tuple[MetaConfig, ...] = field(
        default_factory=lambda: (MetaConfig(rule="ls"), MetaConfig(rule="preco"))
    )
    resolution: int = 9
    depth: int = 6
    num_objectives: int = 6
    has_zeros: bool = False
    sampled: bool = False


def run_network(
    config: NetworkConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """E2 and E3: train each rule's meta-policy and score it on unseen preferences.

    Returns:
        Per rule the scores with the hypervolume as a share of that of all leaves.
    """
    env = fruit_tree(config.depth, config.num_objectives).to(device)
    train = train_ppo if config.sampled else train_meta
    result: dict[str, Any] = {}
    for run in config.runs:
        policy, _ = train(env, run, generator=make_generator(seed, device))
        result[run.rule] = score_policy(env, policy, config)
    return result


def score_policy(env: TabularEnv, policy: Any, config: NetworkConfig) -> dict[str, Any]:
    """Score a meta-policy on the grid of preferences of ``config``."""
    grid = simplex_grid(
        config.num_objectives, config.resolution, interior=not config.has_zeros
    ).to(env.features.device)
    # A zero entry is no preference that can be divided by; the network sees a tiny one.
    grid = grid.clamp_min(1e-6)
    with torch.no_grad():
        value = env.solve(policy_table(env, policy, grid.to(env.features))).value
    value = value.double()
    leaves = hypervolume(leaf_values(env))
    if config.has_zeros:
        row: dict[str, Any] = score(value, grid)
        row["hypervolume"] /= leaves
        return row
    return _scored(value, grid, ray_oracle(env, grid), leaves)


NETWORK = NetworkConfig()
_PAPER_RUN = MetaConfig(
    iterations=1500,
    num_preferences=256,
    num_episodes=64,
    hidden=256,
    lr=1e-3,
)
NETWORK_PAPER = NetworkConfig(
    runs=(replace(_PAPER_RUN, rule="ls"), _PAPER_RUN),
    resolution=10,
    has_zeros=True,
    sampled=True,
)
SAMPLED = replace(
    NETWORK,
    sampled=True,
    runs=tuple(
        MetaConfig(rule=rule, iterations=60, lr=3e-3, entropy=(0.3, 0.01))
        for rule in ("ls", "preco")
    ),
)

EXPERIMENTS = {
    "tables": Experiment(
        run_tables,
        laptop=TablesConfig(),
        summary="every rule on fruit-tree, exact, one table per preference",
    ),
    "treasure": Experiment(
        run_treasure,
        laptop=TreasureConfig(),
        summary="deep-sea-treasure (concave), exact",
    ),
    "network": Experiment(
        run_network,
        laptop=NETWORK,
        paper=NETWORK_PAPER,
        summary="one preference-conditioned network on fruit-tree",
    ),
    "sampled": Experiment(
        run_network,
        laptop=SAMPLED,
        paper=NETWORK_PAPER,
        summary="the same network from sampled episodes (PPO)",
    ),
    "hopper": Experiment(
        run_hopper,
        laptop=HOPPER_LAPTOP,
        paper=HOPPER_PAPER,
        summary="continuous control: mo-hopper (needs mo-gymnasium[mujoco])",
    ),
}
