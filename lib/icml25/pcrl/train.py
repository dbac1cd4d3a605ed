"""Preference-controllable training: tables, a meta-policy with exact gradients, PPO."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from icml25.core import progress
from icml25.pcrl.envs import Solution, TabularEnv
from icml25.pcrl.policy import MetaConfig, MetaPolicy, _check, sample_preferences
from icml25.pcrl.rules import _rule_weights

__all__ = ["rollout", "train_meta", "train_ppo", "train_tables"]

_SMALLEST = 1e-3  # values are clamped here before ratios are formed


def train_tables(
    env: TabularEnv,
    preference: Tensor,
    *,
    rule: str = "preco",
    lam: float = 5.0,
    iterations: int = 300,
    lr: float = 0.3,
) -> tuple[Tensor, Solution]:
    r"""One table of logits per preference, natural policy gradient, exact values.

    .. math:: \ell \leftarrow \ell + \alpha\, A\,\omega / \|\omega\|_1, \qquad
              M = \mathbb{E}_{d_\pi, \pi}[A A^\top]

    with exact advantages :math:`A \in \mathbb{R}^{S \times A \times m}`; in the
    policy's own (Fisher) metric :math:`A_i` *is* the gradient of :math:`v_i`.

    Args:
        env: the environment, with positive values.
        preference: ``(K, m)``, positive.
        rule: key of ``RULES``.
        lam: strength of the pull.
        iterations: updates.
        lr: step :math:`\alpha`.

    Returns:
        The policies ``(K, S, A)`` and their exact ``Solution``.

    Raises:
        ValueError: unknown rule, negative ``lam``, wrong size, a preference that is not
            positive, or an objective that is never positive.
    """
    _check(env, rule, preference, lam)
    shape = (len(preference), env.num_states, env.num_actions)
    logits = preference.new_zeros(shape)
    for _ in progress(range(iterations), desc=f"{rule} tables"):
        solution = env.solve(logits.softmax(-1))
        weights = _exact_weights(solution, logits.softmax(-1), preference, rule, lam)
        logits = logits + lr * torch.einsum("ksam,km->ksa", solution.advantage, weights)
    policy = logits.softmax(-1)
    return policy, env.solve(policy)


def _exact_weights(
    solution: Solution, policy: Tensor, preference: Tensor, rule: str, lam: float
) -> Tensor:
    """``(K, m)`` weights with unit L1 norm from exact advantages."""
    visits = solution.occupancy[..., None] * policy  # (K, S, A)
    advantage = solution.advantage
    gram = torch.einsum("ksa,ksai,ksaj->kij", visits, advantage, advantage)
    value = solution.value.clamp_min(_SMALLEST)
    weights = _rule_weights(gram, preference, value, rule=rule, lam=lam)
    return nn.functional.normalize(weights, p=1.0, dim=-1)


def train_meta(
    env: TabularEnv,
    config: MetaConfig,
    *,
    generator: torch.Generator | None = None,
) -> tuple[MetaPolicy, dict[str, list[float]]]:
    r"""Train one network for all preferences with exact policy gradients.

    Each update draws ``K`` preferences, solves the environment for all of them, picks
    the weights :math:`\omega_k` by the rule and ascends
    :math:`\sum_s d_k(s) \sum_a \pi_k(a|s)\, Q_k(s, a)\,\omega_k` plus an entropy bonus,
    with :math:`d` and :math:`Q` held fixed (the policy-gradient theorem).

    Args:
        env: the environment, with positive values; its device is used.
        config: see :class:`MetaConfig`.
        generator: draws initial weights and preferences.

    Returns:
        The policy and a log with the mean cosine every 50 updates.

    Raises:
        ValueError: unknown rule, negative ``lam``, or an objective that is never
            positive.
    """
    policy, optimizer = _start(env, config, generator, env.num_actions)
    log: dict[str, list[float]] = {"iteration": [], "cosine": []}
    for step in progress(range(config.iterations), desc=f"{config.rule} network"):
        preference = sample_preferences(
            config.num_preferences, env.num_objectives, generator=generator
        ).to(env.features)
        logits = policy(env.features, preference[:, None])
        log_prob = logits.log_softmax(-1)
        prob = log_prob.exp()
        with torch.no_grad():
            solution = env.solve(prob)
            weights = _exact_weights(
                solution, prob, preference, config.rule, config.lam
            )
            gain = torch.einsum("ksam,km->ksa", solution.advantage, weights)
            visits = solution.occupancy[..., None]
        entropy = -(prob * log_prob)
        bonus = _entropy_weight(config, step)
        loss = -(visits * (prob * gain + bonus * entropy)).sum() / len(preference)
        _descend(optimizer, loss, config, step)
        if step % 50 == 0 or step == config.iterations - 1:
            aligned = torch.cosine_similarity(solution.value, preference, dim=-1)
            log["iteration"].append(step)
            log["cosine"].append(float(aligned.mean()))
    return policy, log


def train_ppo(
    env: TabularEnv,
    config: MetaConfig,
    *,
    generator: torch.Generator | None = None,
) -> tuple[MetaPolicy, dict[str, list[float]]]:
    r"""Train one network for all preferences from sampled episodes (clipped PPO).

    Per iteration: ``K`` preferences, ``N`` episodes each as tensor gathers, a vector
    critic fitted to the returns, :math:`A = R - V`, the value estimate
    :math:`\hat v_k` from the mean return, :math:`M_k = A_k^\top A_k / B`, the rule's
    weights, and PPO with the advantage :math:`A\,\omega_k`, standardised per
    preference. Nothing loops over preferences or episodes.

    Args:
        env: an environment in which no state repeats (a tree), with positive values.
        config: see :class:`MetaConfig`.
        generator: draws initial weights, preferences and actions, so it lives on the
            environment's device.

    Returns:
        The policy and a log with the mean cosine and the number of steps taken.

    Raises:
        ValueError: unknown rule, negative ``lam``, an objective that is never positive,
            or an environment with unbounded episodes.
    """
    if not env.levels:
        raise ValueError(f"{env.name}: PPO here needs episodes of bounded length")
    policy, optimizer = _start(env, config, generator, env.num_actions)
    critic, critic_optimizer = _start(env, config, generator, env.num_objectives)
    log: dict[str, list[float]] = {"iteration": [], "cosine": [], "steps": []}
    taken = 0
    for step in progress(range(config.iterations), desc=f"{config.rule} PPO"):
        preference = sample_preferences(
            config.num_preferences, env.num_objectives, generator=generator
        ).to(env.features)
        with torch.no_grad():
            old = policy(env.features, preference[:, None]).log_softmax(-1)
            states, actions, returns = rollout(
                env, old.exp(), config.num_episodes, generator=generator
            )
            k = torch.arange(len(preference), device=states.device)[None, :, None]
            guess = critic(env.features, preference[:, None])[k, states]
            value = (returns[0].mean(1) + env.offset).clamp_min(_SMALLEST)
            advantage = returns - guess  # (T, K, N, m)
            rows = advantage.transpose(0, 1).flatten(1, 2)  # (K, T*N, m)
            gram = rows.mT @ rows / rows.shape[1]
            weights = _rule_weights(
                gram, preference, value, rule=config.rule, lam=config.lam
            )
            weights = nn.functional.normalize(weights, p=1.0, dim=-1)
            gain = torch.einsum("tknm,km->tkn", advantage, weights)
            spread = gain.std((0, 2), keepdim=True).clamp_min(1e-6)
            gain = (gain - gain.mean((0, 2), keepdim=True)) / spread
            before = old[k, states, actions]
        bonus = _entropy_weight(config, step)
        for _ in range(config.epochs):
            table = policy(env.features, preference[:, None]).log_softmax(-1)
            log_prob = table[k, states, actions]
            ratio = (log_prob - before).exp()
            clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
            entropy = -(table.exp() * table).sum(-1)[k, states]
            surrogate = torch.minimum(ratio * gain, clipped * gain)
            _descend(optimizer, -(surrogate + bonus * entropy).mean(), config, step)
            fit = critic(env.features, preference[:, None])[k, states] - returns
            _descend(critic_optimizer, fit.square().mean(), config, step)
        taken += states.numel()
        log["iteration"].append(step)
        log["steps"].append(taken)
        aligned = torch.cosine_similarity(value, preference, dim=-1)
        log["cosine"].append(float(aligned.mean()))
    return policy, log


def rollout(
    env: TabularEnv,
    policy: Tensor,
    num_episodes: int,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Play ``N`` episodes with each of ``K`` policies at once.

    Args:
        env: an environment whose episodes all last ``T = len(env.levels)`` steps.
        policy: ``(K, S, A)`` action probabilities.
        num_episodes: ``N``.
        generator: draws the actions, on the environment's device.

    Returns:
        States and actions ``(T, K, N)``, discounted returns-to-go ``(T, K, N, m)``.
    """
    k = torch.arange(len(policy), device=policy.device)[:, None]
    state = env.reset(len(policy) * num_episodes).reshape(len(policy), num_episodes)
    states, actions, rewards = [], [], []
    cumulative = policy.cumsum(-1)
    for _ in env.levels:
        draw = torch.rand(
            state.shape, generator=generator, device=state.device, dtype=policy.dtype
        )
        threshold = cumulative[k, state][..., :-1]  # rounding must not pass the last
        action = (draw[..., None] > threshold).sum(-1)
        states.append(state)
        actions.append(action)
        state, reward, _ = env.step(state, action, generator=generator)
        rewards.append(reward)
    for step in range(len(rewards) - 2, -1, -1):
        rewards[step] = rewards[step] + env.gamma * rewards[step + 1]
    return torch.stack(states), torch.stack(actions), torch.stack(rewards)


def _start(
    env: TabularEnv,
    config: MetaConfig,
    generator: torch.Generator | None,
    num_outputs: int,
) -> tuple[MetaPolicy, torch.optim.Optimizer]:
    _check(env, config.rule, None, config.lam)
    network = MetaPolicy(
        env.features.shape[1],
        env.num_objectives,
        num_outputs,
        hidden=config.hidden,
        generator=generator,
    ).to(env.features)
    return network, torch.optim.Adam(network.parameters(), lr=config.lr)


def _descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, config: MetaConfig, step: int
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = config.lr * (1.0 - 0.9 * step / config.iterations)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def _entropy_weight(config: MetaConfig, step: int) -> float:
    first, last = config.entropy
    if min(first, last) <= 0:
        return first + (last - first) * step / config.iterations
    return first * (last / first) ** (step / max(config.iterations - 1, 1))
