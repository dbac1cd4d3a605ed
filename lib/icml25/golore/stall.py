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
    num_replicas: int = 4  # independent noise and bases, run at once
    refresh_batch: int = 1_000  # samples a large-batch basis is taken from
    log_every: int = 20


LAPTOP = StallConfig()
PAPER = StallConfig(
    lr=3e-5, update_interval=100, num_steps=200_000, num_replicas=1, log_every=100
)

_FULL = {"rank": None, "switch_step": None}
_GALORE = {"switch_step": None}


class _Replicas:
    """Independent runs of one setting, held in one stacked tensor.

    Parameters and their gradients are views of (R, n, n) tensors, so that one batched
    formula fills all gradients and the optimiser sees ordinary parameters.
    """

    def __init__(
        self,
        problem: StallProblem,
        options: dict[str, Any],
        config: StallConfig,
        *,
        optimizer: str,
        generator: torch.Generator,
        seed: int,
        law: str = "blocked",
        refresh_batch: int = 1,
    ) -> None:
        self.problem, self.law, self._generator = problem, law, generator
        shape = (config.num_replicas, config.n, config.n)
        self.x = problem.start.expand(shape).clone()
        self._grads = torch.zeros_like(self.x)
        params = [torch.nn.Parameter(x) for x in self.x]
        for p, grad in zip(params, self._grads, strict=True):
            p.grad = grad
        options = {
            "rank": config.rank,
            "update_interval": config.update_interval,
            "side": "left",
            "projection": "svd",
            "seed": seed,
            "refresh_grads": self._large_batch if refresh_batch > 1 else None,
            **options,
        }
        self._refresh_batch = refresh_batch
        if optimizer == "adamw":
            self._optimizer = GoLore(params, config.lr, eps=1e-8, **options)
        else:
            self._optimizer = GoLoreSGD(params, config.lr, **options)

    def _large_batch(self, params: list[Tensor]) -> list[Tensor]:
        del params  # always all of them: replicas share their history
        grads = self.problem.noisy_grad(
            self.x,
            generator=self._generator,
            num_samples=self._refresh_batch,
            law=self.law,
        )
        return list(grads)

    def step(self) -> None:
        noisy = self.problem.noisy_grad(
            self.x, generator=self._generator, law=self.law
        )
        self._grads.copy_(noisy)
        self._optimizer.step()


def _problem(config: StallConfig, device: torch.device) -> StallProblem:
    # Drawn on the CPU everywhere: the instance must not depend on the device.
    problem = StallProblem(
        config.n,
        config.rank,
        config.sigma,
        generator=make_generator(config.instance_seed),
    )
    return problem.to(device)


def _simulate(
    runs: dict[str, _Replicas], config: StallConfig, desc: str
) -> dict[str, Tensor]:
    """Loss of every run before each logged step and at the end: (logs + 1, R)."""
    losses: dict[str, list[Tensor]] = {name: [] for name in runs}
    for step in progress(range(config.num_steps), desc):
        if step % config.log_every == 0:
            for name, run in runs.items():
                losses[name].append(run.problem.loss(run.x))
        for run in runs.values():
            run.step()
    return {
        name: torch.stack([*losses[name], run.problem.loss(run.x)])
        for name, run in runs.items()
    }


def _summary(loss: Tensor) -> dict[str, Any]:
    """Plain numbers: the mean curve, and mean and extremes of the last value."""
    return {
        "curve": loss.mean(1).tolist(),
        "final": loss[-1].mean().item(),
        "lowest": loss[-1].min().item(),
        "highest": loss[-1].max().item(),
    }


def _level(config: StallConfig, problem: StallProblem) -> dict[str, float]:
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
    settings: dict[str, tuple[dict, dict]] = {
        "full": (_FULL, {}),
        "galore": (_GALORE, {}),
        "large batch": (_GALORE, {"refresh_batch": config.refresh_batch}),
        "isotropic": (_GALORE, {"law": "isotropic"}),
        "golore@50": ({"switch_step": last // 2}, {}),
        "golore@75": ({"switch_step": last // 4}, {}),
        "golore@100": ({"switch_step": 0}, {}),
    }
    result: dict[str, Any] = {**_level(config, problem), "steps": _steps(config)}
    for optimizer in ("sgd", "adamw"):
        generator = make_generator(seed, device)
        runs = {
            name: _Replicas(
                problem,
                options,
                config,
                optimizer=optimizer,
                generator=generator,
                seed=seed,
                **source,
            )
            for name, (options, source) in settings.items()
        }
        losses = _simulate(runs, config, f"counterexample, {optimizer}")
        result[optimizer] = {name: _summary(loss) for name, loss in losses.items()}
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
    generator = make_generator(seed, device)

    def run(options: dict[str, Any], **source: Any) -> _Replicas:
        return _Replicas(
            problem,
            options,
            config,
            optimizer="sgd",
            generator=generator,
            seed=seed,
            **source,
        )

    runs: dict[str, _Replicas] = {}
    for batch in (1, 4, 16, 64, 256, 1024):
        runs[f"batch/{batch}"] = run(_GALORE, refresh_batch=batch)
    for rank in (2, 4, 6, 8):
        runs[f"rank/{rank}/galore"] = run({**_GALORE, "rank": rank})
        runs[f"rank/{rank}/golore"] = run({"switch_step": 0, "rank": rank})
    for interval in (1, 10, 50):
        for name, reproject in (("with", True), ("without", False)):
            options = {
                "switch_step": 0,
                "update_interval": interval,
                "reproject": reproject,
            }
            runs[f"reproject/{interval}/{name}"] = run(options)
    result: dict[str, Any] = _level(config, problem)
    for path, loss in _simulate(runs, config, "sweeps").items():
        *parents, leaf = path.split("/")
        place = result
        for part in parents:
            place = place.setdefault(part, {})
        place[leaf] = _summary(loss)
    return result


@dataclass(frozen=True)
class BoundConfig(StallConfig):
    """The bound is checked at its own step size, for several intervals."""

    num_replicas: int = 8
    intervals: tuple[int, ...] = (1, 5, 10, 50)


def check_bound(
    config: BoundConfig = BoundConfig(),
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """The theorem on the counterexample: GoLore keeps the bound, GaLore breaks it.

    Returns:
        ``rows``: for each interval ``update_interval``, ``lr``, ``bound``, and the
        measured left-hand side (mean over replicas of the average squared gradient at
        the refreshes) of ``golore`` and ``galore``, with ``golore_highest``, the
        largest replica.
    """
    problem = _problem(config, torch.device(device))
    delta = config.rank / config.n
    rows = []
    for interval in config.intervals:
        theorem = {
            "smoothness": problem.smoothness,
            "gap": (problem.loss(problem.start) - problem.f_star).item(),
            "update_interval": interval,
            "num_steps": config.num_steps,
            # additive noise, independent of the basis: E||P^T xi||^2 = delta sigma^2
            "noise": delta * problem.noise_power,
        }
        lr = golore_lr(**theorem)
        at = replace(
            config, lr=lr, update_interval=interval, log_every=interval
        )
        generator = make_generator(seed, device)
        runs = {
            name: _Replicas(
                problem,
                {"switch_step": switch, "momentum": 0.0, "dampening": 0.0},
                at,
                optimizer="sgd",
                generator=generator,
                seed=seed,
            )
            for name, switch in (("golore", 0), ("galore", None))
        }
        losses = _simulate(runs, at, f"bound, tau = {interval}")
        # ||grad f||^2 = 2 (f - f*), logged at the refresh points only
        means = {k: 2 * (v[:-1] - problem.f_star).mean(0) for k, v in losses.items()}
        rows.append(
            {
                "update_interval": interval,
                "lr": lr,
                "bound": golore_bound(delta=delta, lr=lr, **theorem),
                "golore": means["golore"].mean().item(),
                "golore_highest": means["golore"].max().item(),
                "galore": means["galore"].mean().item(),
            }
        )
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
    runs = {
        name: _Replicas(
            problem,
            {"switch_step": 0, "sketch": name},
            config,
            optimizer="sgd",
            generator=generator,
            seed=seed,
        )
        for name in SKETCHES
    }
    losses = _simulate(runs, config, "sketches")
    result: dict[str, Any] = _level(config, problem)
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
