"""Experiments: the lemma and its preference corollary against exact worst cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator, progress
from icml25.supervision.estimation import soft_optimal_policy
from icml25.supervision.instances import random_mdp, random_policy
from icml25.supervision.mdp import TabularMDP, expected_return, occupancy, plan
from icml25.supervision.transfer import (
    coverage,
    mean_transfer,
    null_leak,
    second_moment,
    trajectory_coverage,
    worst_case_transfer,
)

__all__ = [
    "LemmaConfig",
    "PreferencesConfig",
    "SearchConfig",
    "lemma",
    "preferences",
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
    """The lemma's bounds on square and mean against their exact worst cases.

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
    gap = value - expected_return(mdp, learned, regularised)
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
        "identity_error": (gap - expected_return(mdp, learned, difference))
        .abs()
        .max()
        .item(),
    }
