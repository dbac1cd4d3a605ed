"""Continuous control: the same rules on mo-hopper through a Gaussian meta-policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from icml25.core import make_generator, progress
from icml25.pcrl.metrics import score, simplex_grid
from icml25.pcrl.policy import MetaPolicy, sample_preferences
from icml25.pcrl.rules import RULES, _rule_weights

__all__ = ["HOPPER_LAPTOP", "HOPPER_PAPER", "HopperConfig", "run_hopper"]

_SMALLEST = 1e-3


@dataclass(frozen=True)
class HopperConfig:
    """PPO with a Gaussian meta-policy on a MuJoCo task of mo-gymnasium.

    Attributes:
        name: mo-gymnasium id; rewards that are mostly positive.
        rules: (rule, lambda) pairs.
        iterations: rollouts.
        num_preferences: preferences per rollout, one environment each.
        horizon: most steps of an episode; one that ends earlier is masked after it.
        epochs: passes over a rollout.
        clip: PPO's ratio window.
        lr: Adam's step.
        hidden: width of the two hidden layers.
        gamma: discount.
        resolution: the grid of preferences the policy is scored on.
        num_episodes: scored episodes per preference of the grid.
    """

    name: str = "mo-hopper-2obj-v5"
    rules: tuple[tuple[str, float], ...] = (("ls", 0.0), ("preco", 5.0))
    iterations: int = 20
    num_preferences: int = 16
    horizon: int = 200
    epochs: int = 10
    clip: float = 0.2
    lr: float = 1e-3
    hidden: int = 64
    gamma: float = 0.99
    resolution: int = 6
    num_episodes: int = 4


HOPPER_LAPTOP = HopperConfig()
HOPPER_PAPER = HopperConfig(
    iterations=1000,
    num_preferences=64,
    horizon=500,
    hidden=256,
    lr=3e-4,
    resolution=10,
    num_episodes=10,
)


def run_hopper(
    config: HopperConfig, *, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """Train each rule's Gaussian meta-policy and score it on a grid of preferences.

    The simulators run on the CPU, in a loop inside ``MOSyncVectorEnv``; the rule and
    the networks run on ``device``.

    Returns:
        Per rule the scores of :func:`~icml25.pcrl.score` and, per preference of the
        grid, its mean discounted returns over episodes with the mean action; the mean
        length of those episodes and the steps that training took. The same for the
        ``untrained`` network, which all rules start from. ``cosine_<rule>``,
        ``hypervolume_<rule>`` and ``episode_steps_<rule>`` once more by themselves.

    Raises:
        ValueError: unknown rule, or an observation or action that is not a vector.
        ModuleNotFoundError: MuJoCo is not installed.
    """
    for rule, _ in config.rules:
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: allowed are {', '.join(RULES)}")
    result: dict[str, Any] = {}
    rules = (("untrained", 0.0), *config.rules)
    for rule, lam in rules:
        generator = make_generator(seed, device)
        policy, steps = _train(config, rule, lam, device, seed, generator)
        result[rule] = _evaluate(config, policy, device, seed, generator)
        result[rule]["steps"] = steps
        for name in ("cosine", "hypervolume", "episode_steps"):
            result[f"{name}_{rule}"] = result[rule][name]
    return result


def _evaluate(
    config: HopperConfig,
    policy: MetaPolicy,
    device: torch.device,
    seed: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    grid = simplex_grid(policy.num_objectives, config.resolution).float().to(device)
    asked = grid.repeat_interleave(config.num_episodes, 0)
    env = _environments(config, len(asked))
    with torch.no_grad():
        # Seeds of its own: no training episode starts from them.
        batch = _rollout(env, policy, None, asked, config, seed + 10**6, generator)
    env.close()
    value = batch["returns"][0].double().clamp_min(0.0)
    value = value.unflatten(0, (len(grid), -1)).mean(1)  # (K*N, m) -> (K, m)
    row: dict[str, Any] = score(value, grid.double())
    row["preference"], row["value"] = grid.tolist(), value.tolist()
    row["episode_steps"] = float(batch["alive"].sum(0).mean())
    return row


def _environments(config: HopperConfig, num: int) -> Any:
    import mo_gymnasium
    from mo_gymnasium.wrappers.vector import MOSyncVectorEnv

    return MOSyncVectorEnv([lambda: mo_gymnasium.make(config.name)] * num)


def _train(
    config: HopperConfig,
    rule: str,
    lam: float,
    device: torch.device,
    seed: int,
    generator: torch.Generator,
) -> tuple[MetaPolicy, int]:
    env = _environments(config, config.num_preferences)
    m = env.reward_space.shape[-1]
    size = env.single_observation_space.shape[0]
    actions = env.single_action_space.shape[0]

    def network(outputs: int) -> MetaPolicy:
        made = MetaPolicy(size, m, outputs, hidden=config.hidden, generator=generator)
        return made.to(device)

    policy, critic = network(actions), network(m)
    log_std = torch.full((actions,), -0.5, device=device, requires_grad=True)
    parameters = [*policy.parameters(), *critic.parameters(), log_std]
    optimizer = torch.optim.Adam(parameters, lr=config.lr)
    iterations = 0 if rule == "untrained" else config.iterations
    steps = 0
    for step in progress(range(iterations), desc=f"{rule} {config.name}"):
        preference = sample_preferences(
            config.num_preferences, m, generator=generator
        ).to(device)
        with torch.no_grad():
            first = seed if step == 0 else None  # then the simulators go on drawing
            batch = _rollout(env, policy, log_std, preference, config, first, generator)
            alive, returns = batch["alive"], batch["returns"]  # (T, K), (T, K, m)
            steps += int(alive.sum())
            advantage = returns - critic(batch["obs"], preference)
            advantage = advantage * alive[..., None]
            count = alive.sum(0).clamp_min(1.0)
            gram = torch.einsum("tki,tkj->kij", advantage, advantage)
            weights = _rule_weights(
                gram / count[:, None, None],
                preference,
                returns[0].clamp_min(_SMALLEST),
                rule=rule,
                lam=lam,
            )
            weights = nn.functional.normalize(weights, p=1.0, dim=-1)
            gain = torch.einsum("tkm,km->tk", advantage, weights)
            mean = gain.sum(0) / count
            spread = ((gain - mean).square() * alive).sum(0) / count
            gain = (gain - mean) / spread.sqrt().clamp_min(1e-6)
        for _ in range(config.epochs):
            mean_action = policy(batch["obs"], preference)
            log_prob = _log_prob(batch["action"], mean_action, log_std)
            ratio = (log_prob - batch["log_prob"]).exp()
            clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
            surrogate = torch.minimum(ratio * gain, clipped * gain)
            fit = (critic(batch["obs"], preference) - returns).square().mean(-1)
            # The critic's error is in squared returns; its own scale keeps it tame.
            fit = fit / returns.square().mean().clamp_min(1.0)
            loss = ((fit - surrogate) * alive).sum() / alive.sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    env.close()
    return policy, steps


def _log_prob(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return torch.distributions.Normal(mean, log_std.exp()).log_prob(action).sum(-1)


def _rollout(
    env: Any,
    policy: MetaPolicy,
    log_std: Tensor | None,
    preference: Tensor,
    config: HopperConfig,
    seed: int | None,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """One episode per environment, masked after its end; mean actions without a std."""
    device = preference.device
    low = torch.as_tensor(env.single_action_space.low, device=device)
    high = torch.as_tensor(env.single_action_space.high, device=device)
    seen, _ = env.reset(seed=seed)
    alive = torch.ones(env.num_envs, device=device)
    kept: dict[str, list[Tensor]] = {"obs": [], "action": [], "alive": []}
    rewards, log_probs = [], []
    for _ in range(config.horizon):
        obs = torch.as_tensor(seen, dtype=torch.float32, device=device)
        mean = policy(obs, preference)
        action = mean
        if log_std is not None:
            noise = torch.randn(mean.shape, generator=generator, device=device)
            action = mean + log_std.exp() * noise
            log_probs.append(_log_prob(action, mean, log_std))
        for name, tensor in (("obs", obs), ("action", action), ("alive", alive)):
            kept[name].append(tensor)
        played = action.maximum(low).minimum(high).cpu().numpy()
        seen, reward, terminated, truncated, _ = env.step(played)
        reward = torch.as_tensor(reward, dtype=torch.float32, device=device)
        rewards.append(reward * alive[:, None])
        ended = torch.as_tensor(terminated | truncated, device=device)
        alive = alive * (~ended).float()
        if not alive.any():
            break
    for step in range(len(rewards) - 2, -1, -1):
        rewards[step] = rewards[step] + config.gamma * rewards[step + 1]
    batch = {name: torch.stack(parts) for name, parts in kept.items()}
    batch["returns"] = torch.stack(rewards)
    if log_probs:
        batch["log_prob"] = torch.stack(log_probs)
    return batch
