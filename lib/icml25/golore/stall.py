"""Experiments on the counterexample: the paper's first figure, sweeps, the bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator, progress

from .bases import SKETCHES
from .optim import GoLore, GoLoreSGD
from .theory import StallProblem, golore_bound, golore_lr


@dataclass(frozen=True)
class StallConfig:
    """The counterexample and how it is optimised."""

    n: int = 10  # matrices are n x n
    rank: int = 4  # r: noise directions, and rank of the subspace
    sigma: float = 1.0  # noise level
    instance_seed: int = 42  # the instance of the paper's figure
    lr: float = 3e-3  # eta
    update_interval: int = 10  # tau
    num_steps: int = 4_000  # T
    num_replicas: int = 3  # independent noise and bases, run at once
    refresh_batch: int = 1_000  # samples a large-batch basis is taken from
    log_every: int = 20


LAPTOP = StallConfig()
PAPER = StallConfig(
    lr=3e-5, update_interval=100, num_steps=200_000, num_replicas=1, log_every=100
)


@dataclass(frozen=True)
class _Setting:
    """One run: the optimiser's options, the law of the noise, the refresh batch."""

    options: dict[str, Any]
    law: str = "blocked"
    refresh_batch: int = 1


_FULL = _Setting({"rank": None, "switch_step": None})
_GALORE = _Setting({"switch_step": None})
_GOLORE = _Setting({"switch_step": 0})


class _Ensemble:
    """All settings and their replicas in one stacked tensor, advanced together.

    Parameters and gradients are views of (settings, replicas, n, n) tensors: one
    batched formula fills every gradient, and the optimiser sees ordinary parameters.
    """

    def __init__(
        self,
        problem: StallProblem,
        settings: dict[str, _Setting],
        config: StallConfig,
        *,
        optimizer: type[GoLore] | type[GoLoreSGD] = GoLoreSGD,
        generator: torch.Generator,
        seed: int,
    ) -> None:
        self.problem, self.settings, self.config = problem, settings, config
        self._generator = generator
        shape = (len(settings), config.num_replicas, config.n, config.n)
        self.x = problem.start.expand(shape).clone()
        self._grads = torch.zeros_like(self.x)
        shared, own = [], []
        for setting, x, grads in zip(
            settings.values(), self.x, self._grads, strict=True
        ):
            params = [torch.nn.Parameter(one) for one in x]
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            group = {"params": params, **setting.options}
            if setting.refresh_batch == 1:
                shared.append(group)
            else:  # refresh_grads belongs to an optimiser, not to a group
                own.append(([group], self._large_batch(setting, x)))
        self._optimizers = [
            optimizer(
                groups,
                config.lr,
                switch_step=None,
                rank=config.rank,
                update_interval=config.update_interval,
                side="left",
                projection="svd",
                seed=seed,
                refresh_grads=refresh_grads,
            )
            for groups, refresh_grads in ([(shared, None)] if shared else []) + own
        ]

    def _large_batch(self, setting: _Setting, x: Tensor) -> Callable:
        def refresh_grads(params: list[Tensor]) -> list[Tensor]:
            del params  # always all replicas: they share their history
            grads = self.problem.noisy_grad(
                x,
                generator=self._generator,
                num_samples=setting.refresh_batch,
                law=setting.law,
            )
            return list(grads)

        return refresh_grads

    def step(self) -> None:
        self._grads.copy_(self.problem.noisy_grad(self.x, generator=self._generator))
        for i, setting in enumerate(self.settings.values()):
            if setting.law != "blocked":
                self._grads[i] = self.problem.noisy_grad(
                    self.x[i], generator=self._generator, law=setting.law
                )
        for optimizer in self._optimizers:
            optimizer.step()

    def run(self, desc: str) -> dict[str, Tensor]:
        """Loss of every setting before each logged step and at the end: (logs, R)."""
        losses = []
        for step in progress(range(self.config.num_steps), desc):
            if step % self.config.log_every == 0:
                losses.append(self.problem.loss(self.x))
            self.step()
        losses.append(self.problem.loss(self.x))
        stacked = torch.stack(losses, 1)  # (settings, logs, R)
        return dict(zip(self.settings, stacked, strict=True))


def _problem(config: StallConfig, device: torch.device) -> StallProblem:
    # Drawn on the CPU everywhere: the instance must not depend on the device.
    problem = StallProblem(
        config.n,
        config.rank,
        config.sigma,
        generator=make_generator(config.instance_seed),
    )
    return problem.to(device)


def _summary(loss: Tensor) -> dict[str, Any]:
    """Plain numbers: the mean curve, and mean and extremes of the last value."""
    return {
        "curve": loss.mean(1).tolist(),
        "final": loss[-1].mean().item(),
        "lowest": loss[-1].min().item(),
        "highest": loss[-1].max().item(),
    }


def _level(problem: StallProblem) -> dict[str, float]:
    return {
        "f_0": problem.loss(problem.start).item(),
        "f_star": problem.f_star,
        "f_stall": problem.f_stall(problem.start).item(),
    }


def _steps(config: StallConfig) -> list[int]:
    return [*range(0, config.num_steps, config.log_every), config.num_steps]


def run_stall(
    config: StallConfig = LAPTOP, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """The paper's first figure: who reaches the optimum, with SGD and with AdamW.

    Args:
        config: sizes; the laptop's step is larger and its run shorter than the
            paper's, so that the distance travelled is of the same order.
        device: where to run.
        seed: of the noise and of the bases.

    Returns:
        ``f_0``, ``f_star``, ``f_stall``; ``steps``; and for ``sgd`` and ``adamw`` a
        dict from run (``full``, ``galore``, ``large batch``, ``isotropic``,
        ``golore@50``, ``golore@75``, ``golore@100``) to ``curve``, ``final``,
        ``lowest`` and ``highest`` over the replicas.
    """
    problem = _problem(config, torch.device(device))
    last = config.num_steps
    settings = {
        "full": _FULL,
        "galore": _GALORE,
        "large batch": replace(_GALORE, refresh_batch=config.refresh_batch),
        "isotropic": replace(_GALORE, law="isotropic"),
        "golore@50": _Setting({"switch_step": last // 2}),
        "golore@75": _Setting({"switch_step": last // 4}),
        "golore@100": _GOLORE,
    }
    result: dict[str, Any] = {**_level(problem), "steps": _steps(config)}
    for name, optimizer in (("sgd", GoLoreSGD), ("adamw", GoLore)):
        ensemble = _Ensemble(
            problem,
            settings,
            config,
            optimizer=optimizer,
            generator=make_generator(seed, device),
            seed=seed,
        )
        losses = ensemble.run(f"counterexample, {name}")
        result[name] = {run: _summary(loss) for run, loss in losses.items()}
    return result


def run_sweeps(
    config: StallConfig = LAPTOP, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """What the stall depends on: refresh batch, rank, and momentum re-projection.

    Returns:
        ``batch`` (size -> summary of GaLore), ``rank`` (rank -> ``galore`` and
        ``golore``), ``reproject`` (interval -> ``with`` and ``without``, for GoLore),
        all with momentum SGD; and the levels of :func:`run_stall`. Keys are strings.
    """
    problem = _problem(config, torch.device(device))
    settings: dict[str, _Setting] = {}
    for batch in (1, 4, 16, 64, 256, 1024):
        settings[f"batch/{batch}"] = replace(_GALORE, refresh_batch=batch)
    for rank in (2, 4, 6, 8):
        for name, setting in (("galore", _GALORE), ("golore", _GOLORE)):
            options = {**setting.options, "rank": rank}
            settings[f"rank/{rank}/{name}"] = _Setting(options)
    for interval in (5, 10, 50):
        for name, reproject in (("with", True), ("without", False)):
            options = {"update_interval": interval, "reproject": reproject}
            options = {**_GOLORE.options, **options}
            settings[f"reproject/{interval}/{name}"] = _Setting(options)
    generator = make_generator(seed, device)
    ensemble = _Ensemble(problem, settings, config, generator=generator, seed=seed)
    result: dict[str, Any] = _level(problem)
    for path, loss in ensemble.run("sweeps").items():
        *parents, leaf = path.split("/")
        place = result
        for part in parents:
            place = place.setdefault(part, {})
        place[leaf] = _summary(loss)
    return result


@dataclass(frozen=True)
class BoundConfig(StallConfig):
    """The bound is checked at its own step size, for several intervals."""

    num_replicas: int = 4
    intervals: tuple[int, ...] = (1, 5, 10, 50)


def check_bound(
    config: BoundConfig = BoundConfig(),
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    r"""The theorem on the counterexample: GoLore keeps the bound, GaLore breaks it.

    Returns:
        ``rows``: for each interval ``update_interval``, ``lr``, ``bound``, and the
        measured left-hand side (the average squared gradient at the refreshes, mean
        over replicas) of ``golore`` and ``galore``; ``golore_highest`` and
        ``galore_lowest`` are the extreme replicas, and ``floor`` is what GaLore's
        cannot fall below: $\sum_i \min(s_i, \sigma(1-\eta)^\tau)^2$.
    """
    problem = _problem(config, torch.device(device))
    delta = config.rank / config.n
    values = torch.linalg.svdvals(problem.signal(problem.start))
    rows, settings = [], {}
    for interval in config.intervals:
        theorem = {
            "smoothness": problem.smoothness,
            "gap": (problem.loss(problem.start) - problem.f_star).item(),
            "update_interval": interval,
            "num_steps": config.num_steps,
            # noise independent of the basis: E||P^T xi||^2 = delta E||xi||^2
            "noise": delta * problem.noise_power,
        }
        lr = golore_lr(**theorem)
        bound = golore_bound(delta=delta, lr=lr, **theorem)
        # A component is selected only while above sigma, and then for one interval.
        left = values.clamp(max=problem.sigma * (1 - lr) ** interval)
        floor = left.square().sum().item()
        rows.append(
            {"update_interval": interval, "lr": lr, "bound": bound, "floor": floor}
        )
        plain = {"lr": lr, "update_interval": interval, "momentum": 0.0}
        for name, setting in (("golore", _GOLORE), ("galore", _GALORE)):
            options = {**setting.options, **plain, "dampening": 0.0}
            settings[f"{name}/{interval}"] = _Setting(options)
    ensemble = _Ensemble(
        problem,
        settings,
        replace(config, log_every=1),
        generator=make_generator(seed, device),
        seed=seed,
    )
    losses = ensemble.run("bound")
    for row in rows:
        interval = row["update_interval"]
        for name in ("golore", "galore"):
            # ||grad f||^2 = 2 (f - f*), averaged over the refresh points
            at_refresh = losses[f"{name}/{interval}"][:-1:interval]
            average = 2 * (at_refresh - problem.f_star).mean(0)
            row[name] = average.mean().item()
            row[f"{name}_lowest"] = average.min().item()
            row[f"{name}_highest"] = average.max().item()
    return {"rows": rows}


@dataclass(frozen=True)
class SketchConfig(StallConfig):
    """Other random subspaces: their two facts, and the counterexample."""

    num_draws: int = 20_000


def compare_sketches(
    config: SketchConfig = SketchConfig(),
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    r"""Haar, coordinate and Hadamard bases: orthonormal, unbiased, and convergent.

    Returns:
        For each sketch ``orthonormality`` (largest $|P^\top P - I|$), ``bias`` (largest
        $|\overline{PP^\top} - \frac rn I|$ in standard errors of that mean) and the
        summary of GoLore with it on the counterexample, plus the levels.
    """
    problem = _problem(config, torch.device(device))
    generator = make_generator(seed, device)
    settings = {
        name: _Setting({**_GOLORE.options, "sketch": name}) for name in SKETCHES
    }
    ensemble = _Ensemble(problem, settings, config, generator=generator, seed=seed)
    losses = ensemble.run("sketches")
    result: dict[str, Any] = _level(problem)
    for name, sample in SKETCHES.items():
        result[name] = {
            **sketch_facts(sample, config.n, config.rank, config.num_draws, generator),
            **_summary(losses[name]),
        }
    return result


def sketch_facts(
    sample: Callable[..., Tensor],
    rows: int,
    rank: int,
    num_draws: int,
    generator: torch.Generator,
) -> dict[str, float]:
    """Measures the two facts the proof needs of a random basis.

    Returns:
        ``orthonormality`` and ``bias`` as in :func:`compare_sketches`.
    """
    bases = sample(
        rows,
        rank,
        batch=(num_draws,),
        generator=generator,
        dtype=torch.float64,
        device=generator.device,
    )
    eye = torch.eye(rank, device=bases.device, dtype=bases.dtype)
    projectors = bases @ bases.mT
    error = projectors.mean(0) - rank / rows * torch.eye(rows).to(projectors)
    # A coordinate projector's off-diagonal is exactly 0: no noise to divide by.
    spread = projectors.std(0).clamp(min=1e-12) / num_draws**0.5
    return {
        "orthonormality": (bases.mT @ bases - eye).abs().max().item(),
        "bias": (error / spread).abs().max().item(),
    }
