"""Multi-objective rules: with which weights are the gradients added up?

Every rule answers the same question. Given the Gram matrix of the objectives'
gradients, a preference and the current value, it gives one weight per objective.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from icml25.pcrl.min_norm import _batch, _checked, _min_norm

__all__ = [
    "RULES",
    "pull_blend",
    "pull_residual",
    "rule_weights",
    "similarity",
    "similarity_full_gradient",
    "similarity_semigrad",
]

RULES = {
    "ls": "linear scalarisation: the preference is the weight",
    "mgda": "min-norm point of the gradients; the preference is ignored",
    "sdmgrad": "min-norm, pulled towards the weighted sum by lambda",
    "cagrad": "min-norm within a ball around the weighted sum",
    "epo": "similarity alone while misaligned, then min-norm",
    "chebyshev": "soft worst ratio value / preference",
    "preco": "min-norm, pulled towards alignment by lambda (semi-gradient)",
    "preco-full": "the same with the similarity's full gradient (for contrast)",
    "residual": "the authors' on-policy code: normalised residual as the pull",
    "blend": "the authors' off-policy code: weighted sum once aligned",
}


def similarity(preference: Tensor, value: Tensor) -> Tensor:
    r"""How far a value vector is from the ray of the preference; zero when on it.

    .. math:: \Psi(p, v) = -\tfrac12 \|c\,p - v\|^2, \qquad c = \max_i v_i / p_i

    Args:
        preference: :math:`p`, shape ``(..., m)``, positive.
        value: :math:`v`, shape ``(..., m)``, positive.

    Returns:
        :math:`\Psi \le 0`, shape ``(...)``. :math:`\Psi(p, a v) = a^2 \Psi(p, v)`, and
        only the direction of ``p`` matters.

    Raises:
        ValueError: sizes differ, or an entry is not positive and finite.

    Source:
        Definition 4.1.
    """
    return -0.5 * similarity_semigrad(preference, value).square().sum(-1)


def similarity_semigrad(preference: Tensor, value: Tensor) -> Tensor:
    r"""What each objective lacks to be in proportion with the best-served one.

    .. math:: s(p, v) = c\,p - v \ge 0, \qquad c = \max_i v_i / p_i

    This is :math:`\nabla_v \Psi` with :math:`c` held fixed. It never asks an objective
    to get worse, and it is zero in the best-served one.

    Args:
        preference: :math:`p`, shape ``(..., m)``, positive.
        value: :math:`v`, shape ``(..., m)``, positive.

    Returns:
        :math:`s`, shape ``(..., m)``, in units of the value.

    Raises:
        ValueError: sizes differ, or an entry is not positive and finite.
    """
    _check_positive(preference=preference, value=value)
    return _semigrad(preference, value)


def _semigrad(preference: Tensor, value: Tensor) -> Tensor:
    ratio = value / preference
    best = ratio.argmax(-1, keepdim=True)
    lack = ratio.gather(-1, best) * preference - value
    return lack.clamp_min(0.0).scatter(-1, best, 0.0)


def similarity_full_gradient(preference: Tensor, value: Tensor) -> Tensor:
    r"""The true :math:`\nabla_v \Psi`: it may pull the best-served objective *down*.

    .. math:: \partial_j \Psi = s_j \ (j \ne i^*), \qquad
              \partial_{i^*} \Psi = -\tfrac{1}{p_{i^*}} \sum_{j \ne i^*} s_j p_j \le 0

    Args and errors are those of :func:`similarity_semigrad`. At a tie for the best
    ratio the gradient does not exist; one of the one-sided limits is returned.
    """
    _check_positive(preference=preference, value=value)
    return _full_gradient(*torch.broadcast_tensors(preference, value))


def _full_gradient(preference: Tensor, value: Tensor) -> Tensor:
    s = _semigrad(preference, value)
    best = (value / preference).argmax(-1, keepdim=True)
    down = -(s * preference).sum(-1, keepdim=True) / preference.gather(-1, best)
    return s.scatter(-1, best, down)


def rule_weights(
    gram: Tensor,
    preference: Tensor,
    value: Tensor,
    *,
    rule: str = "preco",
    lam: float | Tensor = 5.0,
) -> Tensor:
    r"""The weights with which a rule adds up the objectives' gradients.

    All rules share one form: the direction is :math:`d = G\,\omega` with
    :math:`\omega = w^* + u` for the min-norm :math:`w^*`; they differ in the pull
    :math:`u` and in whether either part is left out.

    Args:
        gram: :math:`G^\top G`, shape ``(..., m, m)``.
        preference: :math:`p`, shape ``(..., m)``, positive; only its direction matters.
        value: :math:`v`, shape ``(..., m)``, positive.
        rule: a key of ``RULES``.
        lam: :math:`\lambda \ge 0`, the strength of the pull, one number or a tensor
            that broadcasts to ``(..., 1)`` (leading sizes of all four broadcast); for
            ``chebyshev`` the
            sharpness of the soft minimum; unused by ``ls``, ``mgda``, ``epo`` and by
            ``cagrad``, which finds its own.

    Returns:
        :math:`\omega`, shape ``(..., m)``. Divide by its sum for weights that certify
        Pareto stationarity; non-negative for all rules but ``preco-full`` and
        ``residual``.

    Raises:
        ValueError: unknown rule, negative ``lam``, mismatched sizes, a preference or
            value that is not positive, a Gram matrix with NaN.
        TypeError: ``gram`` is not floating-point.

    Source:
        Eq. 6 (PreCo); the authors' published code for the last two rules.
    """
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: allowed are {', '.join(RULES)}")
    if not (lam >= 0 if isinstance(lam, int | float) else (lam >= 0).all()):
        raise ValueError(f"lam={lam!r}: give a number >= 0")
    gram, _ = _checked(gram, None)
    _check_positive(preference=preference, value=value)
    if gram.shape[-1] != preference.shape[-1]:
        raise ValueError(
            f"preference has {preference.shape[-1]} objectives, gram {gram.shape[-1]}"
        )
    batch = _batch(
        gram=gram.shape[:-2], preference=preference.shape[:-1], value=value.shape[:-1]
    )
    if isinstance(lam, Tensor) and lam.ndim:
        batch = torch.broadcast_shapes(batch, lam.shape[:-1])
    gram = gram.expand(*batch, -1, -1)
    preference, value = preference.expand(*batch, -1), value.expand(*batch, -1)
    return _rule_weights(gram, preference, value, rule=rule, lam=lam)


def _rule_weights(
    gram: Tensor, preference: Tensor, value: Tensor, *, rule: str, lam: Any
) -> Tensor:
    """:func:`rule_weights` without its checks, for training steps (no device sync)."""
    p_sum = preference / preference.sum(-1, keepdim=True)
    if rule == "ls":
        return p_sum.expand(value.shape)
    zero = torch.zeros_like(p_sum)
    if rule == "mgda":
        return _min_norm(gram, zero)
    if rule == "cagrad":
        return _cagrad(gram, p_sum)
    if rule == "chebyshev":
        ratio = value / p_sum
        ratio = ratio / ratio.mean(-1, keepdim=True)
        return torch.softmax(-lam * ratio, -1) / p_sum
    if rule == "epo":
        v_sum = value / value.sum(-1, keepdim=True)
        is_off = (p_sum * (p_sum / v_sum).log()).sum(-1, keepdim=True) > 3e-4
        return torch.where(is_off, _semigrad(p_sum, value), _min_norm(gram, zero))
    pull = lam * _PULLS[rule](preference, value)
    return _min_norm(gram, pull) + pull


def pull_residual(preference: Tensor, returns: Tensor) -> Tensor:
    r"""The pull of the authors' on-policy code, which is not that of Definition 4.1.

    .. math:: \sigma = \max\Bigl(\tfrac1T \sum_t \bigl(p -
              \tfrac{R_t}{\|R_t\| + 10^{-4}}\bigr), -0.2\Bigr),
              \qquad \frac{u}{\lambda} = \frac{\sigma}{\|\sigma\|}

    Args:
        preference: :math:`p`, shape ``(..., m)``; scaled to length 1 here.
        returns: :math:`R_t`, shape ``(..., T, m)``: discounted returns-to-go.

    Returns:
        :math:`u / \lambda`, shape ``(..., m)``, of length 1; entries may be negative.

    Source:
        The authors' published code, on-policy agent.
    """
    p = torch.nn.functional.normalize(preference, dim=-1)
    unit = returns / (returns.norm(dim=-1, keepdim=True) + 1e-4)
    gap = (p - unit.mean(-2)).clamp_min(-0.2)
    return torch.nn.functional.normalize(gap, dim=-1)


def pull_blend(preference: Tensor, value: Tensor, *, sharpness: float = 8.0) -> Tensor:
    r"""The pull of the authors' off-policy code: similarity first, weighted sum last.

    .. math:: \frac{u}{\lambda} = \rho\,p + (1 - \rho)\,\frac{s}{\|s\|_1}, \qquad
              \rho = e^{-\kappa \varphi / \pi}, \quad \varphi = \angle(p, v)

    Args:
        preference: :math:`p`, shape ``(..., m)``, positive; scaled to length 1 here.
        value: :math:`v`, shape ``(..., m)``, positive.
        sharpness: :math:`\kappa`, how fast the weighted sum fades with the angle.

    Returns:
        :math:`u / \lambda`, shape ``(..., m)``, non-negative.

    Source:
        The authors' published code, off-policy actor.
    """
    p = torch.nn.functional.normalize(preference, dim=-1)
    s = _semigrad(p, value)
    s = s / s.sum(-1, keepdim=True).clamp_min(1e-12)
    cosine = torch.cosine_similarity(p, value, dim=-1).clamp(-1.0, 1.0)
    rho = torch.exp(-sharpness * torch.arccos(cosine) / torch.pi)[..., None]
    return rho * p + (1.0 - rho) * s


_PULLS = {
    "sdmgrad": lambda p, v: (p / p.sum(-1, keepdim=True)).expand(v.shape),
    "preco": _semigrad,
    "preco-full": _full_gradient,
    "residual": lambda p, v: pull_residual(p, v[..., None, :]),
    "blend": pull_blend,
}


def _cagrad(
    gram: Tensor, reference: Tensor, *, radius: float = 0.5, iterations: int = 8
) -> Tensor:
    r"""CAGrad around the weighted sum ``g0``: SDMGrad whose lambda fits a ball.

    :math:`\max_d \min_i \langle g_i, d\rangle` within :math:`\|d - g_0\| \le r\|g_0\|`
    has the solution :math:`d = g_0 + G w / \mu` where :math:`w` is the min-norm weight
    with pull :math:`\mu p` and :math:`\|G w\| = \mu r \|g_0\|`; that :math:`\mu` is the
    fixed point of a majorise-minimise step.
    """

    def norm(weights: Tensor) -> Tensor:
        square = (weights * (gram @ weights[..., None])[..., 0]).sum(-1, keepdim=True)
        return square.clamp_min(0.0).sqrt()

    allowed = (radius * norm(reference)).clamp_min(1e-12)
    w = _min_norm(gram, torch.zeros_like(reference))
    mu = norm(w) / allowed
    for _ in range(iterations):
        w = _min_norm(gram, mu * reference)
        mu = norm(w) / allowed
    return w + mu * reference


def _check_positive(**tensors: Tensor) -> None:
    sizes = {name: x.shape[-1] for name, x in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"numbers of objectives differ: {sizes}")
    for name, x in tensors.items():
        if not ((x > 0) & x.isfinite()).all():
            worst = x[~((x > 0) & x.isfinite())].flatten()[0].item()
            raise ValueError(
                f"{name} holds {worst:g}; every entry must be positive and finite "
                "(shift or clamp it first: it is divided by or compared in ratio)"
            )
