"""The chapter's experiments on tabular processes (the paper itself has none)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icml25.core import Experiment, make_generator, progress
from icml25.supervision.estimation import (
    asymptotic_variance,
    fit_outcome_reward,
    fit_process_reward,
    importance_estimate,
    soft_optimal_policy,
)
from icml25.supervision.instances import random_mdp, random_policy
from icml25.supervision.mdp import (
    TabularMDP,
    advantage,
    evaluate,
    occupancy,
    plan,
    sample_trajectories,
)
from icml25.supervision.training import ReasoningConfig, reasoning
from icml25.supervision.transfer import (
    coverage,
    mean_transfer,
    null_leak,
    second_moment,
    trajectory_coverage,
    worst_case_transfer,
)

__all__ = [
    "EXPERIMENTS",
    "labels",
    "lemma",
    "preferences",
    "rewards",
    "search_worst_case",
]

_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class LemmaConfig:
    """Random processes for the lemma against its exact worst case."""

    num_mdps: int = 200  # per row
    chunk: int = 200  # processes at a time
    num_leak: int = 200  # of a row, checked for null directions by dense matrices
    states: int = 4  # S
    actions: int = 3  # A
    settings: tuple[tuple[int, str], ...] = (
        (2, "stochastic"),
        (4, "stochastic"),
        (8, "stochastic"),
        (16, "stochastic"),
        (2, "deterministic"),
        (4, "deterministic"),
        (8, "deterministic"),
    )  # horizon H, transitions


@dataclass(frozen=True)
class SearchConfig:
    """Gradient ascent over process, policies and f towards the worst case."""

    horizons: tuple[int, ...] = (2, 3, 4)
    restarts: int = 128
    steps: int = 250
    lr: float = 0.05  # Adam
    states: int = 2
    actions: int = 2


@dataclass(frozen=True)
class LabelsConfig:
    """Step labels against outcomes, by number of trajectories."""

    horizons: tuple[int, ...] = (4, 8, 16)
    sizes: tuple[int, ...] = (200, 800, 3200, 12800)  # trajectories n
    num_mdps: int = 32
    chunk: int = 32  # processes sampled at a time; n H cells of each are held
    states: int = 4
    actions: int = 3
    spread: float = 0.5  # standard deviation of the data policy's logits


@dataclass(frozen=True)
class RewardsConfig:
    """Advantage against Q as a step reward in random processes."""

    horizons: tuple[int, ...] = (2, 4, 8, 16)
    num_mdps: int = 1000
    states: int = 4
    actions: int = 3


@dataclass(frozen=True)
class PreferencesConfig:
    """The preference corollary on random deterministic processes."""

    num_mdps: int = 1500
    horizon: int = 6
    states: int = 4
    actions: int = 3
    temperature: float = 0.3  # b
    error: float = 0.5  # standard deviation of the error in the learned reward


def lemma(
    config: LemmaConfig, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """The lemma's three bounds against their exact worst cases over all f.

    Returns:
        ``num_mdps``, ``largest_ratio`` (of the worst case to sum C_h),
        ``largest_mean_ratio``, ``largest_leak`` and ``rows``: per setting the quantiles
        0, 0.1, 0.5, 0.9, 1 of the worst case, the coverages and the ratios.
    """
    generator = make_generator(seed, device)
    rows, leaks = [], []
    for horizon, transitions in progress(config.settings, "settings"):
        parts = []
        for begin in range(0, config.num_mdps, config.chunk):
            mdp = random_mdp(
                min(config.chunk, config.num_mdps - begin),
                horizon,
                config.states,
                config.actions,
                transitions=transitions,
                generator=generator,
            )
            off = random_policy(mdp, generator=generator)
            target = plan(mdp)[0]
            parts.append(_lemma_rows(mdp, target, off))
            few = slice(max(config.num_leak - begin, 0))
            if len(off[few]):
                leaks.append(null_leak(mdp[few], target[few], off[few]).max().item())
        joined = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
        quantiles = torch.tensor(_QUANTILES, dtype=torch.float64, device=device)
        rows.append(
            {"horizon": horizon, "transitions": transitions}
            | {k: v.quantile(quantiles).tolist() for k, v in joined.items()}
        )
    return {
        "num_mdps": config.num_mdps * len(rows),
        "largest_ratio": max(row["ratio"][-1] for row in rows),
        "largest_mean_ratio": max(row["mean_ratio"][-1] for row in rows),
        "largest_leak": max(leaks),
        "rows": rows,
    }


def _lemma_rows(mdp: TabularMDP, target: Tensor, off: Tensor) -> dict[str, Tensor]:
    cover = coverage(mdp, target, off)
    worst = worst_case_transfer(mdp, target, off)
    mean = mean_transfer(mdp, target, off)
    horizon = mdp.shape[1]
    return {
        "worst": worst,
        "mean": mean,
        "coverage": cover.worst,
        "total": cover.total,
        "log10_trajectory": trajectory_coverage(mdp, target, off)
        / torch.log(worst.new_tensor(10.0)),
        "per_coverage": worst / cover.worst,
        "ratio": worst / cover.total,
        "mean_ratio": mean / (1 + cover.chi2.sum(-1)),
        "loose_ratio": worst / (horizon**3 * cover.worst),
    }


def search_worst_case(
    config: SearchConfig, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    r"""Look for a violation: ascend :math:`E_\pi X^2 / (\sum_h C_h E_{off} X^2)`.

    Start law, transitions, both policies and f are all free. What the search finds is
    evaluated again by the exact worst case.

    Returns:
        ``horizons``; ``found``: the largest ratio a horizon; ``exact``: that of the
        found processes by their exact worst case; ``curves``: best ratio along the way.
    """
    generator = make_generator(seed, device)
    found, exact, curves = [], [], []
    batch, states, actions = config.restarts, config.states, config.actions
    for horizon in config.horizons:
        shapes = (
            (batch, states),
            (batch, horizon - 1, states, actions, states),
            *[(batch, horizon, states, actions)] * 3,
        )
        free = [
            torch.randn(
                shape, generator=generator, device=device, dtype=torch.float64
            ).requires_grad_()
            for shape in shapes
        ]
        optimizer = torch.optim.Adam(free, config.lr)
        curve = []
        for _ in progress(range(config.steps), f"search, H = {horizon}"):
            start, transition, target, off = (x.softmax(-1) for x in free[:4])
            f = free[4].flatten(1)
            mdp = TabularMDP(start, transition, torch.zeros_like(off))
            square = [
                (f * (second_moment(mdp, policy) @ f[..., None])[..., 0]).sum(-1)
                for policy in (target, off)
            ]
            total = coverage(mdp, target, off).total
            score = square[0].log() - square[1].log() - total.log()
            optimizer.zero_grad()
            (-score.sum()).backward()
            optimizer.step()
            curve.append(score.max().exp().item())
        with torch.no_grad():
            start, transition, target, off = (x.softmax(-1) for x in free[:4])
            mdp = TabularMDP(start, transition, torch.zeros_like(off))
            worst = worst_case_transfer(mdp, target, off)
            ratio = worst / coverage(mdp, target, off).total
        found.append(max(curve))
        exact.append(ratio.max().item())
        curves.append(curve)
    return {
        "horizons": list(config.horizons),
        "found": found,
        "exact": exact,
        "curves": curves,
    }


def labels(
    config: LabelsConfig, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Learn rewards from steps and from outcomes; estimate the best policy's return.

    Returns:
        ``rows``: per horizon and size the root mean square errors over the processes
        (``process``, ``outcome``, ``importance`` and its ``normalised`` form), the
        predictions, and what planning with the learned rewards loses;
        ``largest_slope`` and ``smallest_slope`` of the errors in n from 800 on,
        log-log; ``ratios`` at the largest size.

    Raises:
        ValueError: fewer than two sizes of 800 or more.
    """
    if sum(num >= 800 for num in config.sizes) < 2:
        raise ValueError(
            f"sizes={config.sizes}: a slope needs at least two sizes of 800 or more"
        )
    generator = make_generator(seed, device)
    rows = []
    for horizon in progress(config.horizons, "horizons"):
        mdp = random_mdp(
            config.num_mdps, horizon, config.states, config.actions, generator=generator
        )
        off = random_policy(mdp, spread=config.spread, generator=generator)
        best, _ = plan(mdp)
        value = _value(mdp, best)
        step_variance, sum_variance = asymptotic_variance(mdp, best, off)
        for num in config.sizes:
            parts = []
            for begin in range(0, config.num_mdps, config.chunk):
                few = slice(begin, begin + config.chunk)
                parts.append(
                    _label_errors(mdp[few], best[few], off[few], num, generator)
                )
            error = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
            row = {
                "horizon": horizon,
                "num": num,
                "unknowns": horizon * config.states * config.actions,
                "gap_off": (value - _value(mdp, off)).mean().item(),
                "process_predicted": (step_variance.mean() / num).sqrt().item(),
                "outcome_predicted": (sum_variance.mean() / num).sqrt().item(),
            }
            for name, each in error.items():
                is_loss = name.endswith("_loss")
                row[name] = each.mean().item() if is_loss else _rmse(each)
            rows.append(row)
    slopes, ratios = [], []
    for horizon in config.horizons:
        mine = [r for r in rows if r["horizon"] == horizon and r["num"] >= 800]
        log_n = torch.tensor([r["num"] for r in mine], dtype=torch.float64).log()
        for name in ("process", "outcome"):
            log_e = torch.tensor([r[name] for r in mine], dtype=torch.float64).log()
            centred = log_n - log_n.mean()
            slopes.append(((centred * log_e).sum() / (centred**2).sum()).item())
        ratios.append(mine[-1]["outcome"] / mine[-1]["process"])
    return {
        "smallest_slope": min(slopes),
        "largest_slope": max(slopes),
        "ratios": ratios,
        "rows": rows,
    }


def _label_errors(
    mdp: TabularMDP,
    best: Tensor,
    off: Tensor,
    num: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Errors of four estimates of the best return, and losses of two plans, (B,)."""
    value = _value(mdp, best)
    cells = mdp.shape[2] * mdp.shape[3]
    data = sample_trajectories(mdp, off, num, generator=generator)
    plain = importance_estimate(mdp, data, best, off)
    normalised = importance_estimate(mdp, data, best, off, normalise=True)
    errors = {"importance": plain - value, "normalised": normalised - value}
    fits = {
        "process": fit_process_reward(data, cells),
        "outcome": fit_outcome_reward(data.index, data.returns, cells),
    }
    for name, fit in fits.items():
        reward = fit.view(mdp.shape)
        errors[name] = _value(mdp, best, reward) - value
        planned, _ = plan(mdp, reward.clamp(0, 1))
        errors[f"{name}_loss"] = value - _value(mdp, planned)
    return errors


def rewards(
    config: RewardsConfig, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    r"""Maximise the summed advantage, or the summed Q, of a random reference policy.

    Returns:
        ``rows``: per reward kind and horizon the largest gap of the advantage plan, the
        share of processes where the Q plan is suboptimal, and its mean and largest loss
        as a share of what the optimum gains over the reference.
    """
    generator = make_generator(seed, device)
    rows = []
    for kind in ("dense", "terminal"):
        for horizon in config.horizons:
            mdp = random_mdp(
                config.num_mdps,
                horizon,
                config.states,
                config.actions,
                rewards=kind,
                generator=generator,
            )
            mu = random_policy(mdp, generator=generator)
            best = _value(mdp, plan(mdp)[0])
            gain = best - _value(mdp, mu)
            by_advantage, _ = plan(mdp, advantage(mdp, mu))
            by_q, _ = plan(mdp, evaluate(mdp, mu)[0])
            identity = _value(mdp, by_q, advantage(mdp, mu))
            identity = identity - (_value(mdp, by_q) - _value(mdp, mu))
            loss = (best - _value(mdp, by_q)) / gain
            rows.append(
                {
                    "rewards": kind,
                    "horizon": horizon,
                    "advantage_gap": (best - _value(mdp, by_advantage)).max().item(),
                    "identity_error": identity.abs().max().item(),
                    "q_suboptimal": (loss > 1e-9).double().mean().item(),
                    "q_mean_loss": loss.mean().item(),
                    "q_largest_loss": loss.max().item(),
                }
            )
    return {
        "num_mdps": config.num_mdps * len(rows),
        "largest_advantage_gap": max(row["advantage_gap"] for row in rows),
        "rows": rows,
    }


def preferences(
    config: PreferencesConfig, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    r"""The preference corollary: regularised suboptimality against its bound.

    Deterministic processes, one prompt; the learned policy is optimal for a reward with
    Gaussian errors.

    Returns:
        ``largest_ratio`` of the gap to the bound, ``identity_error`` of
        :math:`J_b(\pi^*) - J_b(\hat\pi) = E_{\hat\pi}[D]`, ``median_ratio``.
    """
    generator = make_generator(seed, device)
    mdp = random_mdp(
        config.num_mdps,
        config.horizon,
        config.states,
        config.actions,
        transitions="deterministic",
        generator=generator,
    )
    start = torch.zeros_like(mdp.start)
    start[:, 0] = 1
    mdp = TabularMDP(start, mdp.transition, mdp.reward)
    off = random_policy(mdp, generator=generator)
    error = torch.randn(
        mdp.shape, generator=generator, device=device, dtype=torch.float64
    )
    b = config.temperature
    best, value = soft_optimal_policy(mdp, off, b)
    learned, _ = soft_optimal_policy(mdp, off, b, mdp.reward + config.error * error)
    regularised = mdp.reward - b * (learned.log() - off.log())
    gap = value - _value(mdp, learned, regularised)
    difference = b * (learned.log() - best.log())  # D as a step function
    f = difference.flatten(1)
    moment = second_moment(mdp, off)
    square = (f * (moment @ f[..., None])[..., 0]).sum(-1)
    mean = (occupancy(mdp, off) * difference).flatten(1).sum(-1)
    spread = [coverage(mdp, p, off).chi2.sum(-1).sqrt() for p in (best, learned)]
    bound = sum(spread) * (square - mean**2).sqrt()
    return {
        "num_mdps": config.num_mdps,
        "largest_ratio": (gap / bound).max().item(),
        "median_ratio": (gap / bound).median().item(),
        "identity_error": (gap - _value(mdp, learned, difference)).abs().max().item(),
    }


def _value(mdp: TabularMDP, policy: Tensor, reward: Tensor | None = None) -> Tensor:
    """Return of a policy, (B,)."""
    return (mdp.start * evaluate(mdp, policy, reward)[1][:, 0]).sum(-1)


def _rmse(error: Tensor) -> float:
    return (error**2).mean().sqrt().item()


EXPERIMENTS = {
    "lemma": Experiment(
        lemma,
        laptop=LemmaConfig(),
        paper=LemmaConfig(
            num_mdps=65_536,
            chunk=4096,
            num_leak=4,
            states=8,
            actions=4,
            settings=tuple((h, "stochastic") for h in (2, 4, 8, 16, 32)),
        ),
        summary="the lemma against its exact worst case",
    ),
    "lemma-large": Experiment(
        lemma,
        laptop=LemmaConfig(
            num_mdps=2048,
            chunk=256,
            num_leak=4,
            states=8,
            actions=4,
            settings=tuple((h, "stochastic") for h in (2, 4, 8, 16, 32)),
        ),
        summary="the same at the paper scale's sizes, with fewer processes",
    ),
    "search": Experiment(
        search_worst_case,
        laptop=SearchConfig(),
        summary="gradient ascent towards a violation of the lemma",
    ),
    "labels": Experiment(
        labels,
        laptop=LabelsConfig(),
        paper=LabelsConfig(
            horizons=(4, 8, 16, 32, 64),
            sizes=(800, 3200, 12_800, 51_200, 204_800),
            num_mdps=512,
            chunk=16,
        ),
        summary="step labels against outcomes",
    ),
    "rewards": Experiment(
        rewards,
        laptop=RewardsConfig(),
        paper=RewardsConfig(num_mdps=100_000),
        summary="advantage against Q as a step reward",
    ),
    "preferences": Experiment(
        preferences,
        laptop=PreferencesConfig(),
        summary="the preference corollary",
    ),
    "reasoning": Experiment(
        reasoning,
        laptop=ReasoningConfig(),
        paper=ReasoningConfig(
            p=11,
            steps=8,
            budget=24,
            dim=128,
            num_layers=4,
            num_heads=4,
            batch_size=256,
            sft_steps=2000,
            value_rollouts=50_000,
            value_steps=1000,
            rl_steps=500,
            eval_every=25,
        ),
        summary="a tiny reasoning model under three step rewards",
    ),
    "reasoning-long": Experiment(
        reasoning,
        laptop=ReasoningConfig(rl_steps=250, eval_every=25),
        summary="the same with five times the policy-gradient steps",
    ),
}
