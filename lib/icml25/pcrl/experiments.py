"""The chapter's experiments: one function each, plain numbers out."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    "ObjectivesConfig",
    "SchedulesConfig",
    "TablesConfig",
    "TreasureConfig",
    "fruit_tree",
    "run_network",
    "run_objectives",
    "run_schedules",
    "run_tables",
    "run_treasure",
    "score_policy",
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
    iterations: int = 200
    lr: float = 0.3


def run_tables(
    config: TablesConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """E1: every rule on fruit-tree, no network, no sampling (``seed`` is not used).

    Returns:
        Per rule the scores of :func:`~icml25.pcrl.score` with the hypervolume as a
        share of that of all leaves, and ``eta_each``. ``ray_share`` and ``hull_share``:
        the hypervolume of the oracle's points and of all stochastic policies;
        ``ls_limit_eta`` and ``best_leaf_eta``: where the weighted sum ends with the
        preference as weight, and with the best weight for each preference.
    """
    env = fruit_tree(config.depth, config.num_objectives).to(device)
    preference = simplex_grid(config.num_objectives, config.resolution).to(device)
    ceiling = ray_oracle(env, preference)
    corners = leaf_values(env)
    leaves = hypervolume(corners)
    reached = (corners / preference[:, None]).amin(-1) / ceiling[:, None]  # (K, leaves)
    chosen = (preference @ corners.T).argmax(-1, keepdim=True)
    result: dict[str, Any] = {
        "ray_share": hypervolume(ceiling[:, None] * preference) / leaves,
        "hull_share": hull_hypervolume(corners) / leaves,
        "ls_limit_eta": float(reached.gather(1, chosen).mean()),
        "best_leaf_eta": float(reached.amax(1).mean()),
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
        Per rule the scores, the values ``(K, 2)`` and visits ``(K, S)``, the same with
        greedy actions, and the number of distinct greedy values; the hypervolume is a
        share of that of all stochastic policies (``hull``).
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
        greedy = env.solve(torch.nn.functional.one_hot(best, 4).to(policy))
        row["greedy_distinct"] = score(greedy.value, preference)["distinct"]
        row["greedy_value"] = greedy.value.tolist()
        row["greedy_visits"] = greedy.occupancy.tolist()
        row["value"] = solution.value.tolist()
        row["visits"] = solution.occupancy.tolist()
        result[rule] = row
    return result


def _treasure_front(env: TabularEnv) -> list[list[float]]:
    """The deterministic front in utilities, from mo-gymnasium's own table."""
    raw = _make(env.name).pareto_front(env.gamma)
    most = max(float(point[0]) / env.gamma**18 for point in raw)
    return [[10 / most * float(p[0]), 10 + 0.4 * float(p[1])] for p in raw]


_NETWORK = MetaConfig(iterations=500, hidden=64, lr=4e-3, entropy=(3.0, 0.1))
_SAMPLED = MetaConfig(
    iterations=40, num_preferences=64, hidden=64, lr=4e-3, entropy=(1.0, 0.03)
)


def _both(config: MetaConfig) -> tuple[MetaConfig, ...]:
    """The weighted sum and PreCo, trained alike."""
    return (replace(config, rule="ls"), replace(config, rule="preco"))


@dataclass(frozen=True)
class NetworkConfig:
    """One meta-policy for all preferences on fruit-tree.

    Attributes:
        runs: how each rule is trained.
        resolution: the grid of preferences it is scored on.
        depth: of the tree.
        sampled: PPO from sampled episodes instead of exact gradients.
    """

    runs: tuple[MetaConfig, ...] = _both(_NETWORK)
    resolution: int = 9
    depth: int = 6
    sampled: bool = False


def run_network(
    config: NetworkConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """E2 and E3: train each rule's meta-policy and score it on unseen preferences.

    Returns:
        Per rule the scores with the hypervolume as a share of that of all leaves.
    """
    env = fruit_tree(config.depth).to(device)
    train = train_ppo if config.sampled else train_meta
    result: dict[str, Any] = {}
    for run in config.runs:
        policy, _ = train(env, run, generator=make_generator(seed, device))
        result[run.rule] = score_policy(env, policy, config.resolution)
    return result


def score_policy(env: TabularEnv, policy: Any, resolution: int) -> dict[str, Any]:
    """Score a meta-policy on the interior grid of preferences, with exact values."""
    grid = simplex_grid(env.num_objectives, resolution).to(env.features.device)
    with torch.no_grad():
        value = env.solve(policy_table(env, policy, grid.to(env.features))).value
    ceiling = ray_oracle(env, grid)
    return _scored(value.double(), grid, ceiling, hypervolume(leaf_values(env)))


@dataclass(frozen=True)
class SchedulesConfig:
    """How much of the result is the entropy schedule, for both rules alike.

    Attributes:
        train: everything but rule and schedule.
        schedules: entropy coefficients (start, end).
        seeds: number of seeds for each.
    """

    train: MetaConfig = _NETWORK
    schedules: tuple[tuple[float, float], ...] = (
        (0.001, 0.001),
        (1.0, 0.02),
        (3.0, 0.02),
        (3.0, 0.05),
        (3.0, 0.1),
        (3.0, 0.2),
    )
    seeds: int = 3


def run_schedules(
    config: SchedulesConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """Train the weighted sum and PreCo with the same schedules and seeds.

    Returns:
        ``eta``, ``cosine`` and ``hypervolume`` per rule: one list of seeds per
        schedule; the best mean ``eta`` of each rule and the margin between them.
    """
    env = fruit_tree().to(device)
    result: dict[str, Any] = {}
    for run in _both(config.train):
        rows: dict[str, list] = {"eta": [], "cosine": [], "hypervolume": []}
        for entropy in config.schedules:
            scores = []
            for each in range(seed, seed + config.seeds):
                policy, _ = train_meta(
                    env,
                    replace(run, entropy=entropy),
                    generator=make_generator(each, device),
                )
                scores.append(score_policy(env, policy, 9))
            for name, column in rows.items():
                column.append([row[name] for row in scores])
        result[run.rule] = rows
        means = [sum(row) / len(row) for row in rows["eta"]]
        result[f"best_eta_{run.rule}"] = max(means)
    result["margin"] = result["best_eta_preco"] - result["best_eta_ls"]
    return result


@dataclass(frozen=True)
class ObjectivesConfig:
    """Fruit-tree with 3 to 6 objectives from samples, scored as the paper scores.

    Attributes:
        train: everything but the rule.
        objectives: the numbers of objectives.
        resolution: the grid, zero entries included.
        num_samples: for the hypervolume, which is estimated on so many points.
    """

    train: MetaConfig = _SAMPLED
    objectives: tuple[int, ...] = (3, 6)
    resolution: int = 6
    num_samples: int = 50_000


def run_objectives(
    config: ObjectivesConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """Train both rules for each number of objectives.

    Returns:
        ``<rule>_<m>_cosine`` and ``<rule>_<m>_hypervolume`` (a share of the leaves'),
        over the grid with zero entries, which the network sees as 1e-6.
    """
    result: dict[str, Any] = {}
    for m in config.objectives:
        env = fruit_tree(6, m).to(device)
        leaves = hypervolume(leaf_values(env))
        grid = simplex_grid(m, config.resolution, interior=False).to(device)
        for run in _both(config.train):
            policy, log = train_ppo(env, run, generator=make_generator(seed, device))
            with torch.no_grad():
                seen = grid.clamp_min(1e-6).to(env.features)
                value = env.solve(policy_table(env, policy, seen)).value.double()
            cosine = torch.cosine_similarity(value, grid, dim=-1).mean()
            volume = hypervolume(value, num_samples=config.num_samples)
            result[f"{run.rule}_{m}_cosine"] = float(cosine)
            result[f"{run.rule}_{m}_hypervolume"] = volume / leaves
            result["steps_each"] = log["steps"][-1]
    return result


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
        laptop=NetworkConfig(),
        summary="one preference-conditioned network on fruit-tree, exact gradients",
    ),
    "sampled": Experiment(
        run_network,
        laptop=NetworkConfig(runs=_both(_SAMPLED), sampled=True),
        summary="the same network from sampled episodes (PPO)",
    ),
    "schedules": Experiment(
        run_schedules,
        laptop=SchedulesConfig(),
        summary="both rules under six entropy schedules, three seeds each",
    ),
    "objectives": Experiment(
        run_objectives,
        laptop=ObjectivesConfig(),
        # The authors' budget: 3000 preferences x 20 episodes x 6 steps = 360 000.
        paper=ObjectivesConfig(
            train=replace(_SAMPLED, iterations=50, num_preferences=60, num_episodes=20),
            objectives=(3, 4, 5, 6),
            resolution=10,
            num_samples=200_000,
        ),
        summary="3 to 6 objectives from samples, scored as the paper scores",
    ),
    "hopper": Experiment(
        run_hopper,
        laptop=HOPPER_LAPTOP,
        paper=HOPPER_PAPER,
        summary="continuous control: mo-hopper (needs mo-gymnasium[mujoco])",
    ),
}
