"""PCRL: environment steps, training steps and the min-norm program against others."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

import numpy as np
import torch
from icml25.core import make_generator
from icml25.pcrl import MetaConfig, gym_tables, min_norm_weights
from icml25.pcrl.tasks import fruit_tree
from icml25.pcrl.train import rollout, train_ppo


def _seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Processor time of the best run (one thread): fair on a busy machine."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
    return best


def _row(name: str, ours_s: float, other_s: float, target: float | None, note: str):
    return {
        "name": name,
        "ours_s": ours_s,
        "other_s": other_s,
        "ratio": ours_s / other_s,
        "target": target,
        "note": note,
    }


def _steps() -> dict:
    env, g = fruit_tree(), make_generator(0)
    policy = torch.full((64, env.num_states, 2), 0.5)
    episodes = 64 * 64
    ours = _seconds(lambda: rollout(env, policy, 64, generator=g))
    gym, random = gym_tables.make("fruit-tree-v0"), np.random.default_rng(0)

    def loop() -> None:
        for _ in range(episodes):
            gym.reset()
            done = False
            while not done:
                _, _, done, _, _ = gym.step(int(random.random() < 0.5))

    return _row(
        f"fruit-tree, {6 * episodes} steps: gathers / mo-gymnasium loop",
        ours,
        _seconds(loop, 1),
        1 / 50,
        f"{6 * episodes / ours:,.0f} steps/s with returns-to-go",
    )


def _training(name: str, other_steps: int, run: Callable[[], None], note: str) -> dict:
    config = MetaConfig(iterations=3, num_preferences=64, num_episodes=64)
    env = fruit_tree()
    steps = 3 * 64 * 64 * 6
    ours = _seconds(lambda: train_ppo(env, config, generator=make_generator(0)))
    ours *= other_steps / steps
    return _row(
        f"{other_steps} training steps: ours / {name}",
        ours,
        _seconds(run, 1),
        1 / 50,
        f"{other_steps / ours:,.0f} steps/s, rule and networks included; {note}",
    )


def _loop_training() -> dict:
    """The same learner, one environment and one preference at a time."""
    steps = 600
    env, gym = fruit_tree(), gym_tables.make("fruit-tree-v0")
    index = {tuple(obs): i for i, obs in enumerate(env.obs.tolist())}
    config = MetaConfig(num_preferences=1, num_episodes=1)
    from icml25.pcrl.train import _start

    def run() -> None:
        g = make_generator(0)
        policy, optimizer = _start(env, config, g, 2)
        critic, critic_optimizer = _start(env, config, g, 6)
        for _ in range(steps // 6):
            p = torch.full((6,), 1 / 6)
            obs, _ = gym.reset()
            states, actions, rewards, done = [], [], [], False
            while not done:
                states.append(index[tuple(map(int, obs))])
                prob = policy(env.features[states[-1]], p).softmax(-1)
                actions.append(int(torch.multinomial(prob, 1, generator=g)))
                obs, reward, done, _, _ = gym.step(actions[-1])
                rewards.append(torch.as_tensor(reward))
            returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
            features = env.features[states]
            advantage = returns - critic(features, p).detach()
            weights = min_norm_weights(advantage.T @ advantage / len(states))
            gain = advantage @ weights
            for _ in range(config.epochs):
                chosen = torch.arange(len(states)), torch.tensor(actions)
                log_prob = policy(features, p).log_softmax(-1)[chosen]
                fit = (critic(features, p) - returns).square().mean()
                for loss, each in (
                    (-(log_prob * gain).mean(), optimizer),
                    (fit, critic_optimizer),
                ):
                    each.zero_grad()
                    loss.backward()
                    each.step()

    return _training("one mo-gymnasium environment at a time", steps, run, "same size")


def _morl_baselines() -> dict:
    from morl_baselines.multi_policy.envelope.envelope import Envelope

    steps = 1000
    agent = Envelope(
        gym_tables.make("fruit-tree-v0"),
        net_arch=[128, 128],
        batch_size=64,
        learning_starts=100,
        log=False,
        seed=0,
        device="cpu",
    )
    return _training(
        "morl-baselines Envelope",
        steps,
        lambda: agent.train(total_timesteps=steps),
        "both 2 x 128 units; another algorithm, equal environment steps",
    )


def _programs() -> list[dict]:
    from scipy.optimize import minimize

    num, m = 2048, 6
    gradients = torch.randn(
        num, m, 100, generator=make_generator(0), dtype=torch.float64
    )
    gram = gradients @ gradients.mT
    ours = _seconds(lambda: min_norm_weights(gram), 10)
    few = 64
    matrices = gram[:few].numpy()

    def quadratic(matrix: np.ndarray) -> np.ndarray:
        return minimize(
            lambda w: 0.5 * w @ matrix @ w,
            np.full(m, 1 / m),
            jac=lambda w: matrix @ w,
            bounds=[(0, None)] * m,
            constraints={
                "type": "eq",
                "fun": lambda w: w.sum() - 1,
                "jac": lambda w: np.ones(m),
            },
            method="SLSQP",
        ).x

    def frank_wolfe(matrix: np.ndarray) -> np.ndarray:
        w = np.full(m, 1 / m)
        for step in range(250):
            vertex = np.argmin(matrix @ w)
            rate = 2 / (step + 2)
            w *= 1 - rate
            w[vertex] += rate
        return w

    rows = []
    for name, solve, target in (
        ("SLSQP", quadratic, 1 / 100),
        ("250 Frank-Wolfe steps", frank_wolfe, None),
    ):
        other = _seconds(lambda each=solve: [each(x) for x in matrices], 2)
        rows.append(
            _row(
                f"{num} min-norm programs, m = {m}: ours / {name} in a loop",
                ours,
                other * num / few,
                target,
                f"{ours / num * 1e6:.1f} us each, exact; the loop timed on {few}",
            )
        )
    return rows


def rows() -> list[dict]:
    """Rows for `make bench`; the morl-baselines row only where it is installed."""
    torch.set_num_threads(1)
    result = [_steps(), _loop_training()]
    if importlib.util.find_spec("morl_baselines") is not None:
        result.append(_morl_baselines())
    return result + _programs()
