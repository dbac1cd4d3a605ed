"""Two objectives whose front is concave: everything about it is known exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from icml25.pcrl.rules import RULES, _check_positive, _rule_weights

__all__ = [
    "ToyRun",
    "run_toy",
    "toy_normal",
    "toy_preferences",
    "toy_target",
    "toy_value",
]


def toy_value(x: Tensor) -> Tensor:
    r"""The two objectives (label ``pcrl-toy`` in the book).

    .. math:: v(x) = \bigl(e^{-\|x - a\|^2},\ e^{-\|x + a\|^2}\bigr), \qquad
              a = (1, \dots, 1) / \sqrt n

    Args:
        x: shape ``(..., n)``.

    Returns:
        ``(..., 2)``. The front is :math:`x = t a`, :math:`t \in [-1, 1]`.
    """
    a = torch.ones_like(x) * x.shape[-1] ** -0.5
    return torch.exp(
        -torch.stack([(x - a).square().sum(-1), (x + a).square().sum(-1)], -1)
    )


def _jacobian(x: Tensor) -> Tensor:
    """``(..., 2, n)``."""
    a = torch.ones_like(x) * x.shape[-1] ** -0.5
    return -2.0 * torch.stack([x - a, x + a], -2) * toy_value(x)[..., None]


def toy_target(preference: Tensor) -> Tensor:
    r"""Place :math:`t` of the front's point with :math:`v \parallel p`.

    :math:`v_1 / v_2 = e^{4t}`, so :math:`t = \tfrac14 \ln(p_1 / p_2)`.
    """
    return 0.25 * (preference[..., 0] / preference[..., 1]).log()


def toy_normal(t: Tensor) -> Tensor:
    r"""The front's normal at :math:`x = t a`, summing to one.

    .. math:: \omega \propto \bigl((1 + t)\,v_2,\ (1 - t)\,v_1\bigr)

    There :math:`\nabla v_1` and :math:`\nabla v_2` are opposite, so these are the only
    weights that certify Pareto stationarity.

    Args:
        t: shape ``(...)``, in [-1, 1].

    Returns:
        ``(..., 2)``.
    """
    # v_2 / v_1 = exp(-4 t), split evenly.
    pair = torch.stack([(1 + t) * (-2 * t).exp(), (1 - t) * (2 * t).exp()], -1)
    return pair / pair.sum(-1, keepdim=True)


def toy_preferences(num: int = 11, *, margin: float = 0.05) -> Tensor:
    """``(num, 2)`` float64 preferences at equal angles, ``margin`` off the axes."""
    angle = torch.linspace(margin, torch.pi / 2 - margin, num, dtype=torch.float64)
    return torch.stack([angle.sin(), angle.cos()], -1)


@dataclass(frozen=True)
class ToyRun:
    """Gradient ascent on the toy, one row per preference.

    Attributes:
        x: ``(K, n)`` last point.
        value: ``(K, 2)`` its value.
        path: ``(steps + 1, K, 2)`` values along the way.
        residual: ``(steps, K)`` length of the raw direction ``d``.
        weights: ``(K, 2)`` last weights, summing to one.
        cosine: ``(K,)`` cosine of value and preference.
        distance: ``(K,)`` distance from the aligned point of the front.
        off_front: ``(K,)`` distance from the front.
    """

    x: Tensor
    value: Tensor
    path: Tensor
    residual: Tensor
    weights: Tensor
    cosine: Tensor
    distance: Tensor
    off_front: Tensor


def run_toy(
    preference: Tensor,
    *,
    rule: str = "preco",
    lam: float | Tensor = 5.0,
    steps: int = 800,
    lr: float | Tensor = 0.2,
    dim: int = 20,
    start: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ToyRun:
    """Follow a rule's direction, divided by ``1 + lam``, from random starts.

    Args:
        preference: ``(K, 2)`` float64, positive.
        rule: key of ``RULES``.
        lam: strength of the pull; a ``(K, 1)`` tensor gives each row its own.
        steps: ascent steps.
        lr: step length; a ``(K, 1)`` tensor gives each row its own.
        dim: number of variables.
        start: ``(n,)`` or ``(K, n)`` where to begin; else random.
        generator: draws the starts ``0.3 N(0, I)``, one per row.

    Raises:
        ValueError: unknown rule, a negative ``lam``, or a preference that is not
            ``(K, 2)``, positive and finite.
    """
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: allowed are {', '.join(RULES)}")
    if not (torch.as_tensor(lam) >= 0).all():
        raise ValueError(f"lam={lam!r}: give numbers >= 0")
    if preference.ndim != 2 or preference.shape[1] != 2:
        raise ValueError(f"preference has shape {tuple(preference.shape)}; need (K, 2)")
    _check_positive(preference=preference)
    if start is None:
        device = "cpu" if generator is None else generator.device
        shape = (len(preference), dim)
        start = 0.3 * torch.randn(shape, generator=generator, device=device)
    x = start.to(preference).expand(len(preference), -1)
    # Rules without a pull do not know lambda.
    shrink = 1.0 + lam if rule in ("preco", "preco-full", "sdmgrad") else 1.0
    path, residual = [], []
    weights = preference
    for _ in range(steps):
        value, jacobian = toy_value(x), _jacobian(x)
        gram = jacobian @ jacobian.mT
        weights = _rule_weights(gram, preference, value, rule=rule, lam=lam)
        direction = (weights[:, None] @ jacobian)[:, 0]  # (K, n)
        path.append(value)
        residual.append(direction.norm(dim=-1))
        x = x + lr / shrink * direction
    value = toy_value(x)
    path.append(value)
    a = torch.ones_like(x) * x.shape[-1] ** -0.5
    along = (x * a).sum(-1, keepdim=True).clamp(-1.0, 1.0) * a
    aligned = toy_target(preference).clamp(-1.0, 1.0)[:, None] * a
    return ToyRun(
        x=x,
        value=value,
        path=torch.stack(path),
        residual=torch.stack(residual),
        weights=weights / weights.sum(-1, keepdim=True),
        cosine=torch.cosine_similarity(value, preference, dim=-1),
        distance=(x - aligned).norm(dim=-1),
        off_front=(x - along).norm(dim=-1),
    )
