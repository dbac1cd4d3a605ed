"""The chapter's experiments: one function each, plain numbers out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from icml25.core import Experiment, make_generator
from icml25.pcrl.continuous import HOPPER_LAPTOP, HOPPER_PAPER, run_hopper
from icml25.pcrl.metrics import hull_hypervolume, hypervolume, score, simplex_grid
from icml25.pcrl.oracle import ray_oracle
from icml25.pcrl.policy import MetaConfig, policy_table
from icml25.pcrl.tasks import (
    fruit_tree,
    leaf_values,
    score_policy,
    scored,
    treasure,
    treasure_front,
)
from icml25.pcrl.toy import toy_preferences
from icml25.pcrl.train import train_meta, train_ppo, train_tables

__all__ = [
    "EXPERIMENTS",
    "NetworkConfig",
    "ObjectivesConfig",
    "RivalsConfig",
    "SchedulesConfig",
    "TablesConfig",
    "TreasureConfig",
    "run_network",
    "run_objectives",
    "run_schedules",
    "run_tables",
    "run_treasure",
]


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
    """Every rule on fruit-tree, no network, no sampling (``seed`` is not used).

    Returns:
        Per rule the scores of :func:`~icml25.pcrl.score` with the hypervolume as a
        share of that of all leaves, and ``eta_each``. ``ray_share`` and ``hull_share``:
        the hypervolume of the oracle's points and of all stochastic policies;
        ``ls_limit_eta``: where the weighted sum ends with the preference as weight;
        ``best_leaf_eta`` and ``best_leaf_cosine``: with the best weight for each
        preference, or better, since some leaves have no weight.
    """
    env = fruit_tree(config.depth, config.num_objectives).to(device)
    preference = simplex_grid(config.num_objectives, config.resolution).to(device)
    ceiling = ray_oracle(env, preference)
    corners = leaf_values(env)
    leaves = hypervolume(corners)
    reached = (corners / preference[:, None]).amin(-1) / ceiling[:, None]  # (K, leaves)
    aligned = torch.cosine_similarity(corners, preference[:, None], dim=-1)
    chosen = (preference @ corners.T).argmax(-1, keepdim=True)
    result: dict[str, Any] = {
        "ray_share": hypervolume(ceiling[:, None] * preference) / leaves,
        "hull_share": hull_hypervolume(corners) / leaves,
        "ls_limit_eta": float(reached.gather(1, chosen).mean()),
        "best_leaf_eta": float(reached.amax(1).mean()),
        "best_leaf_cosine": float(aligned.amax(1).mean()),
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
        result[rule] = scored(solution.value, preference, ceiling, leaves)
    return result


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
    iterations: int = 400
    lr: float = 0.1  # at 0.3 some of PreCo's policies jump and stay misaligned


def run_treasure(
    config: TreasureConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """The treasure map, exact (``seed`` is not used).

    Returns:
        Per rule the scores, the values ``(K, 2)`` and visits ``(K, S)``, the same with
        greedy actions, and the number of distinct greedy values; the hypervolume is a
        share of that of all stochastic policies (``hull``).
    """
    env = treasure().to(device)
    preference = toy_preferences(config.num_preferences).to(device)
    ceiling = ray_oracle(env, preference)
    front = torch.tensor(treasure_front(env), dtype=torch.float64)
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
        row = scored(solution.value, preference, ceiling, hull)
        best = policy.argmax(-1)
        greedy = env.solve(torch.nn.functional.one_hot(best, 4).to(policy))
        row["greedy_distinct"] = score(greedy.value, preference)["distinct"]
        row["greedy_value"] = greedy.value.tolist()
        row["greedy_visits"] = greedy.occupancy.tolist()
        row["value"] = solution.value.tolist()
        row["visits"] = solution.occupancy.tolist()
        result[rule] = row
    return result


_NETWORK = MetaConfig(iterations=500, hidden=64, lr=4e-3, entropy=(3.0, 0.1))
_SAMPLED = MetaConfig(
    iterations=40, num_preferences=64, hidden=64, lr=4e-3, entropy=(1.0, 0.03)
)


_BOTH = (("ls", 5.0), ("preco", 5.0))


def _alike(
    config: MetaConfig, rules: tuple[tuple[str, float], ...] = _BOTH
) -> tuple[MetaConfig, ...]:
    """Rules (the weighted sum and PreCo) with everything else the same."""
    return tuple(replace(config, rule=rule, lam=lam) for rule, lam in rules)


@dataclass(frozen=True)
class NetworkConfig:
    """One meta-policy for all preferences on fruit-tree.

    Attributes:
        runs: how each rule is trained.
        resolution: the grid of preferences it is scored on.
        depth: of the tree.
        sampled: PPO from sampled episodes instead of exact gradients.
    """

    runs: tuple[MetaConfig, ...] = _alike(_NETWORK)
    resolution: int = 9
    depth: int = 6
    sampled: bool = False


def run_network(
    config: NetworkConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """Train each rule's meta-policy and score it on unseen preferences.

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


@dataclass(frozen=True)
class SchedulesConfig:
    """How much of the result is the entropy schedule, for all rules alike.

    Attributes:
        train: everything but rule and schedule.
        schedules: entropy coefficients (start, end).
        seeds: number of seeds for each.
    """

    rules: ClassVar[tuple[tuple[str, float], ...]] = _BOTH
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


@dataclass(frozen=True)
class RivalsConfig(SchedulesConfig):
    """The same network under the other rules that steer by the lack.

    Attributes:
        rules: (rule, lambda) pairs, the weighted sum and PreCo among them.
        schedules: the one that suits both best.
    """

    rules: tuple[tuple[str, float], ...] = (*_BOTH, ("epo", 0.0), ("chebyshev", 10.0))
    schedules: tuple[tuple[float, float], ...] = (_NETWORK.entropy,)


def run_schedules(
    config: SchedulesConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """Train each rule with the same schedules and seeds.

    Returns:
        ``eta``, ``cosine`` and ``hypervolume`` per rule: one list of seeds per
        schedule; the best mean ``eta`` of each rule and PreCo's margin over the
        weighted sum.
    """
    env = fruit_tree().to(device)
    result: dict[str, Any] = {}
    for run in _alike(config.train, config.rules):
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
        for run in _alike(config.train):
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
        laptop=NetworkConfig(runs=_alike(_SAMPLED), sampled=True),
        summary="the same network from sampled episodes (PPO)",
    ),
    "schedules": Experiment(
        run_schedules,
        laptop=SchedulesConfig(),
        summary="both rules under six entropy schedules, three seeds each",
    ),
    "rivals": Experiment(
        run_schedules,
        laptop=RivalsConfig(),
        summary="the network under the other rules that steer, three seeds each",
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
