"""Multi-objective directions: one small quadratic program, and the rules built on it.

Every rule answers the same question. Given the Gram matrix of the objectives'
gradients, a preference and the current value: with which weights are they added up?
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "RULES",
    "min_norm_weights",
    "project_simplex",
    "pull_blend",
    "pull_residual",
    "rule_weights",
    "similarity",
    "similarity_full_gradient",
    "similarity_semigrad",
]

MAX_EXACT = 8  # objectives up to which all supports are enumerated

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


def min_norm_weights(
    gram: Tensor, pull: Tensor | None = None, *, iterations: int = 500
) -> Tensor:
    r"""The simplex weights whose combined gradient is shortest.

    .. math:: w^* = \arg\min_{w \in \Delta^m} \tfrac12 \|G (w + u)\|^2
              = \arg\min_{w \in \Delta^m} \tfrac12 w^\top M w + (M u)^\top w

    with Gram matrix :math:`M = G^\top G` and a fixed pull :math:`u` (PreCo:
    :math:`u = \lambda s`); label ``pcrl-qp`` in the book.

    Args:
        gram: :math:`M`, shape ``(..., m, m)``, symmetric positive semidefinite.
        pull: :math:`u`, shape ``(..., m)``; ``None`` is zero (MGDA).
        iterations: accelerated projected-gradient steps, used for ``m > 8`` only.

    Returns:
        :math:`w^*`, shape ``(..., m)``, non-negative, summing to one, in the dtype of
        ``gram``. Where the minimiser is not unique, one of them.

    Raises:
        ValueError: ``gram`` is not a stack of square matrices, ``pull`` does not match
            it, or either holds a NaN or infinity.

    Notes:
        For ``m <= 8`` exact up to rounding in float64: all ``2**m - 1`` supports are
        solved at once by sweeping one pivot after the other, so the batch is the only
        long dimension and nothing is decided in Python. Adding a constant to all of
        ``M`` changes the objective by a constant on the simplex and keeps the pivots
        away from zero when the gradients can cancel, which is the case of interest.
        Time and memory :math:`O(2^m m)` per problem.
    """
    return _min_norm(*_checked(gram, pull), iterations=iterations)


def _min_norm(gram: Tensor, pull: Tensor, *, iterations: int = 500) -> Tensor:
    m = gram.shape[-1]
    dtype = gram.dtype
    gram = gram.double()
    # Scale-free: the minimiser does not change when M is divided by a number.
    scale = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)
    gram = gram / scale[..., None, None]
    linear = (gram @ pull.double()[..., None])[..., 0]
    if m <= MAX_EXACT:
        return _all_supports(gram, linear).to(dtype)
    return _projected_gradient(gram, linear, iterations=iterations).to(dtype)


def _all_supports(gram: Tensor, linear: Tensor) -> Tensor:
    """Solve every support's KKT system by sweeping; keep the best feasible one."""
    m = gram.shape[-1]
    # Pieces of this size stay in a CPU's cache; a GPU takes all at once.
    size = 512 if gram.device.type == "cpu" else 1 << 20
    pieces = zip(
        gram.reshape(-1, m, m).split(size),
        linear.reshape(-1, m).split(size),
        strict=True,
    )
    # The batch goes last: every step then runs along it, contiguously.
    found = [
        _enumerate(g.permute(1, 2, 0).contiguous(), q.mT.contiguous()).mT
        for g, q in pieces
    ]
    return torch.cat(found).reshape(linear.shape)


def _enumerate(gram: Tensor, linear: Tensor) -> Tensor:
    """``(m, m, B)`` and ``(m, B)`` to the best of all supports' solutions, ``(m, B)``.

    The tableau holds ``M + 1 1^T`` and two right-hand sides. One pivot after the other
    is swept or left out, which doubles the number of supports each time.
    """
    m, size = linear.shape
    ridge = 1e-13 * torch.eye(m, dtype=gram.dtype, device=gram.device)[..., None]
    sides = torch.stack([torch.ones_like(linear), linear], 1)  # (m, 2, B)
    table = torch.cat([gram + 1.0 + ridge, sides], 1)[None]  # (1, m, m + 2, B)
    for pivot in range(m):
        half = len(table)
        column, rest = table[:, :, :1], table[:, :, 1:]
        row = rest[:, pivot] / table[:, pivot, :1].clamp_min(1e-15)
        table = table.new_empty(2 * half, *rest.shape[1:])
        without, swept = table[:half], table[half:]
        without.copy_(rest)
        without[:, pivot] = 0.0  # outside the support the weight is zero
        torch.sub(rest, torch.mul(column, row[:, None], out=swept), out=swept)
        swept[:, pivot] = row
    # The empty support is first; leave it out.
    inverse_ones, inverse_linear = table[1:].unbind(2)
    # Stationarity on the support, M w + q = mu 1, with mu from sum(w) = 1.
    mu = (1.0 + inverse_linear.sum(1)) / inverse_ones.sum(1)
    # (supports, m, B)
    w = torch.addcmul(-inverse_linear, mu[:, None], inverse_ones)
    is_out = w.amin(1) < -1e-10
    w = w.clamp_min_(0.0)
    w /= w.sum(1, keepdim=True).clamp_min(1e-300)
    # The true objective: what KKT implies may err on ill-conditioned supports.
    objective = torch.zeros_like(mu)
    for i in range(m):
        slope = torch.addcmul(linear[i], w[:, i], 0.5 * gram[i, i])
        for j in range(i + 1, m):
            slope.addcmul_(w[:, j], gram[i, j])
        objective.addcmul_(w[:, i], slope)
    # A single objective is always feasible, so a minimum exists.
    objective = objective.masked_fill_(is_out | objective.isnan(), torch.inf)
    best = objective.argmin(0)  # (B,)
    return w.gather(0, best.expand(1, m, size))[0]


def _projected_gradient(gram: Tensor, linear: Tensor, *, iterations: int) -> Tensor:
    """FISTA on the simplex, restarted where the momentum points uphill."""
    step = 1.0 / torch.linalg.matrix_norm(gram, 2).clamp_min(1e-300)[..., None]
    w = torch.full_like(linear, 1.0 / linear.shape[-1])
    ahead, momentum = w, torch.ones_like(step)
    for _ in range(iterations):
        gradient = (gram @ ahead[..., None])[..., 0] + linear
        new = project_simplex(ahead - step * gradient)
        uphill = ((ahead - new) * (new - w)).sum(-1, keepdim=True) > 0
        momentum = torch.where(uphill, 1.0, momentum)
        faster = 0.5 * (1.0 + (1.0 + 4.0 * momentum.square()).sqrt())
        ahead = new + torch.where(uphill, 0.0, (momentum - 1.0) / faster) * (new - w)
        w, momentum = new, faster
    return w


def project_simplex(x: Tensor) -> Tensor:
    r"""Euclidean projection onto the probability simplex.

    Args:
        x: shape ``(..., m)``.

    Returns:
        The nearest point with non-negative entries that sum to one, same shape.

    Notes:
        One sort, :math:`O(m \log m)`.
    """
    ordered = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    excess = (ordered.cumsum(-1) - 1.0) / count
    last = (ordered > excess).sum(-1, keepdim=True) - 1
    return (x - excess.gather(-1, last)).clamp_min(0.0)


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
    return _full_gradient(preference, value)


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
    :math:`\omega = w^* + \lambda u` for the min-norm :math:`w^*`; they differ in the
    pull :math:`u` and in whether either part is left out.

    Args:
        gram: :math:`G^\top G`, shape ``(..., m, m)``.
        preference: :math:`p`, shape ``(..., m)``, positive; only its direction matters.
        value: :math:`v`, shape ``(..., m)``, positive.
        rule: a key of ``RULES``.
        lam: :math:`\lambda \ge 0`, the strength of the pull, one number or a tensor
            that broadcasts to ``(..., 1)``; for ``chebyshev`` the
            sharpness of the soft minimum; unused by ``ls``, ``mgda``, ``epo`` and by
            ``cagrad``, which finds its own.

    Returns:
        :math:`\omega`, shape ``(..., m)``. Divide by its sum for weights that certify
        Pareto stationarity; non-negative for all rules but ``preco-full`` and
        ``residual``.

    Raises:
        ValueError: unknown rule, negative ``lam``, mismatched sizes, a preference or
            value that is not positive, a Gram matrix with NaN.

    Source:
        Eq. 6 (PreCo); section 4.3 of the authors' code for the last two rules.
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
              \qquad u = \sigma / \|\sigma\|

    Args:
        preference: :math:`p`, shape ``(..., m)``; scaled to length 1 here.
        returns: :math:`R_t`, shape ``(..., T, m)``: discounted returns-to-go.

    Returns:
        :math:`u`, shape ``(..., m)``, of length 1; entries may be negative.

    Source:
        The authors' published code, on-policy agent.
    """
    p = torch.nn.functional.normalize(preference, dim=-1)
    unit = returns / (returns.norm(dim=-1, keepdim=True) + 1e-4)
    gap = (p - unit.mean(-2)).clamp_min(-0.2)
    return torch.nn.functional.normalize(gap, dim=-1)


def pull_blend(preference: Tensor, value: Tensor, *, sharpness: float = 8.0) -> Tensor:
    r"""The pull of the authors' off-policy code: similarity first, weighted sum last.

    .. math:: u = \rho\,p + (1 - \rho)\,\tfrac{s}{\|s\|_1}, \qquad
              \rho = e^{-\kappa \theta / \pi}, \quad \theta = \angle(p, v)

    Args:
        preference: :math:`p`, shape ``(..., m)``, positive; scaled to length 1 here.
        value: :math:`v`, shape ``(..., m)``, positive.
        sharpness: :math:`\kappa`, how fast the weighted sum fades with the angle.

    Returns:
        :math:`u`, shape ``(..., m)``, non-negative.

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

    :math:`\max_d \min_i \langle g_i, d\rangle` within :math:`\|d - g_0\| \le c\|g_0\|`
    has the solution :math:`d = g_0 + G w / \mu` where :math:`w` is the min-norm weight
    with pull :math:`\mu p` and :math:`\|G w\| = \mu c \|g_0\|`; that :math:`\mu` is the
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


def _checked(gram: Tensor, pull: Tensor | None) -> tuple[Tensor, Tensor]:
    if gram.ndim < 2 or gram.shape[-1] != gram.shape[-2] or gram.shape[-1] == 0:
        raise ValueError(
            f"gram has shape {tuple(gram.shape)}; need (..., m, m), m >= 1"
        )
    if pull is None:
        pull = gram.new_zeros(gram.shape[:-1])
    elif pull.shape[-1] != gram.shape[-1]:
        raise ValueError(
            f"pull has {pull.shape[-1]} entries, gram is {tuple(gram.shape[-2:])}"
        )
    if not (gram.isfinite().all() & pull.isfinite().all()):
        raise ValueError("gram or pull holds a NaN or infinity; check the rewards")
    return gram, pull


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
