"""Success of chain, tree and hypertree when errors grow with the facts in view."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from icml25.hypertree.solve import PLANNERS


@dataclass(frozen=True)
class ErrorModel:
    r"""n sub-tasks of k checks and F facts each, and an error that grows with the view.

    A finished step adds :math:`\delta` facts to what a chain sees. A check with
    :math:`\ell` facts in view fails with probability
    :math:`\varepsilon(\ell) = \min\{1/2, \varepsilon_0 + s\ell\}`.
    """

    num_tasks: int = 4
    num_checks: int = 5
    facts: int = 20
    step_facts: int = 5
    eps0: float = 0.02
    slope: float = 0.001

    def __post_init__(self) -> None:
        if min(self.num_tasks, self.num_checks) < 1:
            raise ValueError(
                f"num_tasks={self.num_tasks}, num_checks={self.num_checks}: at least 1"
            )
        if min(self.facts, self.step_facts) < 0 or self.slope < 0:
            raise ValueError(
                f"facts={self.facts}, step_facts={self.step_facts}, "
                f"slope={self.slope}: not negative"
            )
        if not 0 <= self.eps0 <= 0.5:
            raise ValueError(f"eps0={self.eps0}: between 0 and 1/2")


def errors(model: ErrorModel, planner: str) -> torch.Tensor:
    r"""Error of each of the n k checks, in order: (n k,), float64.

    Facts in view: chain :math:`nF + \delta t` at check t; tree :math:`kF`, since one
    thought settles the k checks of a sub-task together; hypertree :math:`F`.

    Raises:
        ValueError: an unknown planner.
    """
    if planner not in PLANNERS:
        raise ValueError(f"planner={planner!r}: one of {', '.join(PLANNERS)}")
    steps = torch.arange(model.num_tasks * model.num_checks, dtype=torch.float64)
    if planner == "chain":
        view = model.num_tasks * model.facts + model.step_facts * (steps + 1)
    elif planner == "tree":
        view = torch.full_like(steps, model.facts * model.num_checks)
    else:
        view = torch.full_like(steps, model.facts)
    return (model.eps0 + model.slope * view).clamp(max=0.5)


def success(model: ErrorModel, planner: str, *, retries: int = 0) -> float:
    r"""Closed form :math:`\prod_t (1-\varepsilon_t^{\,r+1})` (`hypertree-eq-success`).

    Args:
        model, planner: which errors.
        retries: r further tries of a check by a perfect verifier; possible where a
            leaf can be checked alone.

    Raises:
        ValueError: negative ``retries``.
    """
    if retries < 0:
        raise ValueError(f"retries={retries}: not negative")
    # log1p keeps products of many small errors exact.
    return float((-(errors(model, planner) ** (retries + 1))).log1p().sum().exp())


def simulate(
    model: ErrorModel,
    planner: str,
    *,
    num_samples: int = 10_000,
    retries: int = 0,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """Share of simulated plans without a wrong check, and its standard error.

    Raises:
        ValueError: ``num_samples`` below 2.
    """
    if num_samples < 2:
        raise ValueError(f"num_samples={num_samples}: at least 2")
    eps = errors(model, planner)
    wrong = torch.ones(num_samples, len(eps), dtype=torch.bool)
    for _ in range(retries + 1):
        draw = torch.rand(wrong.shape, generator=generator, dtype=eps.dtype)
        wrong &= draw < eps
    share = float((~wrong.any(1)).double().mean())
    return share, (max(share * (1 - share), 1e-12) / num_samples) ** 0.5
