"""Experiments: step labels against outcomes, advantage against Q."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator, progress
from icml25.supervision.estimation import (
    asymptotic_variance,
    fit_outcome_reward,
    fit_process_reward,
    importance_estimate,
)
from icml25.supervision.instances import random_mdp, random_policy
from icml25.supervision.mdp import (
    TabularMDP,
    advantage,
    evaluate,
    expected_return,
    plan,
    sample_trajectories,
)

__all__ = ["LabelsConfig", "RewardsConfig", "labels", "rewards"]


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
        value = expected_return(mdp, best)
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
                "gap_off": (value - expected_return(mdp, off)).mean().item(),
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
    value = expected_return(mdp, best)
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
        errors[name] = expected_return(mdp, best, reward) - value
        planned, _ = plan(mdp, reward.clamp(0, 1))
        errors[f"{name}_loss"] = value - expected_return(mdp, planned)
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
            best = expected_return(mdp, plan(mdp)[0])
            gain = best - expected_return(mdp, mu)
            by_advantage, _ = plan(mdp, advantage(mdp, mu))
            by_q, _ = plan(mdp, evaluate(mdp, mu)[0])
            identity = expected_return(mdp, by_q, advantage(mdp, mu))
            identity = identity - (
                expected_return(mdp, by_q) - expected_return(mdp, mu)
            )
            loss = (best - expected_return(mdp, by_q)) / gain
            rows.append(
                {
                    "rewards": kind,
                    "horizon": horizon,
                    "advantage_gap": (best - expected_return(mdp, by_advantage))
                    .max()
                    .item(),
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


def _rmse(error: Tensor) -> float:
    return (error**2).mean().sqrt().item()
