r"""What it costs to change the policy under which trajectories are measured.

For :math:`X = \sum_h f_h(s_h, a_h)` the functions here compute, exactly and for a batch
of processes, how large :math:`E_\pi[X^2] / E_{off}[X^2]` and
:math:`(E_\pi X)^2 / E_{off}[X^2]` become over **all** f, and the coverage coefficients
that bound them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from icml25.supervision.mdp import (
    TabularMDP,
    _as_policy,
    _as_table,
    evaluate,
    occupancy,
)
from icml25.supervision.whitening import (
    _NULL,
    _largest_eigenvalue,
    _need_no_leak,
    _WhitenedMoment,
)

__all__ = [
    "Coverage",
    "coverage",
    "mean_transfer",
    "null_leak",
    "orthogonal_terms",
    "second_moment",
    "trajectory_coverage",
    "worst_case_transfer",
]


@dataclass(frozen=True)
class Coverage:
    r"""State-action coverage of a target policy by the data policy.

    Attributes:
        ratio: :math:`C_h = \max_{s,a} d_h^\pi / d_h^{off}`, (B, H); ``inf`` where the
            target visits a cell that the data never do.
        chi2: :math:`\chi^2_h = \sum_{s,a} (d_h^\pi)^2 / d_h^{off} - 1`, (B, H).
        state_chi2: the same for the state marginals, (B, H).
    """

    ratio: Tensor
    chi2: Tensor
    state_chi2: Tensor

    @property
    def worst(self) -> Tensor:
        r"""State-action coverage :math:`C_{sa} = \max_h C_h`, (B,)."""
        return self.ratio.amax(-1)

    @property
    def total(self) -> Tensor:
        r"""The lemma's constant :math:`\sum_h C_h`, (B,); at most ``H * worst``."""
        return self.ratio.sum(-1)


def coverage(mdp: TabularMDP, policy: Tensor, policy_off: Tensor) -> Coverage:
    r"""Coverage coefficients of ``policy`` under data from ``policy_off``.

    Cells that neither policy visits do not count. Always
    :math:`1 + \chi^2_h \le C_h \le C_{traj}`.

    Args:
        mdp: B processes.
        policy: target policy, (B, H, S, A).
        policy_off: data policy, (B, H, S, A).

    Raises:
        TypeError: a policy is no floating-point tensor.
        ValueError: wrong shape, or a row is no probability law.
    """
    policy_off = _as_policy("policy_off", policy_off, mdp)
    d, d_off = occupancy(mdp, policy), occupancy(mdp, policy_off)
    ratio = _ratio(d, d_off)
    state, state_off = d.sum(-1), d_off.sum(-1)
    return Coverage(
        ratio=ratio.flatten(2).amax(-1),
        chi2=_dot(d, ratio).flatten(2).sum(-1) - 1,
        state_chi2=_dot(state, _ratio(state, state_off)).sum(-1) - 1,
    )


def trajectory_coverage(mdp: TabularMDP, policy: Tensor, policy_off: Tensor) -> Tensor:
    r"""Largest ratio of trajectory probabilities, :math:`\log C_{traj}`.

    Transitions cancel; what is left is a product of action ratios, maximised over
    feasible trajectories by a max-product recursion in logarithms.

    Returns:
        (B,); ``inf`` where the target can do what the data policy never does.
    """
    policy = _as_policy("policy", policy, mdp)
    policy_off = _as_policy("policy_off", policy_off, mdp)
    # Actions the target never takes carry no trajectory of positive probability.
    ratio = (policy.log() - policy_off.log()).masked_fill(policy == 0, -torch.inf)
    best = ratio[:, -1].amax(-1)
    for h in reversed(range(mdp.shape[1] - 1)):
        reachable = best[:, None, None, :].masked_fill(
            mdp.transition[:, h] == 0, -torch.inf
        )
        best = (ratio[:, h] + reachable.amax(-1)).amax(-1)
    return best.masked_fill(mdp.start == 0, -torch.inf).amax(-1)


def second_moment(mdp: TabularMDP, policy: Tensor) -> Tensor:
    r"""Joint visit probabilities: the matrix with :math:`E_\pi[X^2] = f^\top M_\pi f`.

    Entry ((h,s,a), (k,s',a')) is :math:`P_\pi(s_h=s, a_h=a, s_k=s', a_k=a')`.

    Returns:
        (B, HSA, HSA), symmetric positive semidefinite; layer (h, h) is the diagonal of
        the occupancy.

    Notes:
        ``8 B (HSA)^2`` bytes; :func:`~icml25.supervision.worst_case_transfer` does
        without it.
    """
    policy = _as_policy("policy", policy, mdp)
    d = occupancy(mdp, policy)
    batch, horizon, states, actions = mdp.shape
    cells = states * actions
    above = torch.diag_embed(d[:, 0].flatten(1))
    columns = [torch.zeros_like(above)]
    for k in range(1, horizon):
        # All earlier layers at once: (B, kSA, SA) @ (B, SA, S) -> (B, kSA, S)
        state = above @ mdp.transition[:, k - 1].flatten(1, 2)
        block = (state[..., None] * policy[:, None, k]).flatten(2)
        columns.append(block)
        above = torch.cat([block, torch.diag_embed(d[:, k].flatten(1))], 1)
    size = horizon * cells
    padded = [F.pad(c, (0, 0, 0, size - c.shape[1])) for c in columns]
    upper = torch.cat(padded, 2)
    return upper + upper.mT + torch.diag_embed(d.flatten(1))


def orthogonal_terms(
    mdp: TabularMDP, policy_off: Tensor, f: Tensor, *, under: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""The terms into which the proof splits :math:`X = \sum_h f_h`.

    :math:`X = V_1(s_1) + \sum_h \delta_h` with
    :math:`\delta_h = f_h + V_{h+1}(s_{h+1}) - V_h(s_h)` and V the value of f under the
    data policy. Under the data policy the terms are orthogonal
    (``eq-supervision-orthogonal``):
    :math:`E_{off} X^2 = E V_1^2 + \sum_h E_{off} \delta_h^2`.

    Args:
        mdp: B processes.
        policy_off: data policy, (B, H, S, A); it defines V.
        f: any step function, (B, H, S, A).
        under: policy under which the squares are averaged; default ``policy_off``.

    Returns:
        :math:`E V_1(s_1)^2` (B,) and :math:`E \delta_h^2` (B, H).
    """
    policy_off = _as_policy("policy_off", policy_off, mdp)
    under = policy_off if under is None else _as_policy("under", under, mdp)
    f = _as_table("f", f, mdp)
    q, v = evaluate(mdp, policy_off, f)
    d = occupancy(mdp, under)
    # delta = (Q - V) + (V' - E[V' | s, a]): the second part has mean zero given (s, a).
    square = (q - v[..., None]) ** 2
    if mdp.shape[1] > 1:
        square[:, :-1] += _conditional_variance(mdp.transition, v[:, 1:])
    return (mdp.start * v[:, 0] ** 2).sum(-1), (d * square).flatten(2).sum(-1)


def mean_transfer(mdp: TabularMDP, policy: Tensor, policy_off: Tensor) -> Tensor:
    r"""Exact worst case of the mean: the largest :math:`(E_\pi X)^2 / E_{off}[X^2]`.

    Closed form (``eq-supervision-mean-exact``): one plus the action part of the
    chi-square divergence, :math:`1 + \sum_h (\chi^2_h - \chi^2_h|_{states})`. It equals
    :math:`m_\pi^\top M_{off}^{+} m_\pi` without the matrix.

    Returns:
        (B,); at most :math:`1 + \sum_h \chi^2_h`.

    Raises:
        ValueError: the target visits a cell that the data never do.
    """
    policy_off = _as_policy("policy_off", policy_off, mdp)
    _need_coverage(occupancy(mdp, policy), occupancy(mdp, policy_off))
    c = coverage(mdp, policy, policy_off)
    return 1 + (c.chi2 - c.state_chi2).sum(-1)


def worst_case_transfer(
    mdp: TabularMDP,
    policy: Tensor,
    policy_off: Tensor,
    *,
    method: str = "krylov",
    tol: float = 1e-6,
) -> Tensor:
    r"""Exact worst case of the lemma: the largest :math:`E_\pi[X^2] / E_{off}[X^2]`.

    It is the largest generalised eigenvalue of :math:`(M_\pi, M_{off})` on the range of
    :math:`M_{off}`, and at most :math:`\sum_h C_h` (``eq-supervision-lemma-square``).

    Args:
        mdp: B processes.
        policy: target policy, (B, H, S, A).
        policy_off: data policy, (B, H, S, A).
        method: ``"krylov"`` whitens with the orthogonal terms of the proof (blocks of
            S x S) and finds the eigenvalue by Lanczos steps on a matrix that is never
            formed; ``"eigh"`` decomposes the dense (HSA x HSA) matrix. Both agree to
            1e-6.
        tol: relative residual at which the Lanczos steps stop.

    Returns:
        (B,)

    Raises:
        ValueError: the target visits a cell that the data never do (the worst case is
            then infinite, and a pseudo-inverse would return a finite wrong number), or
            a direction is so rare in the data that float64 cannot tell; an unknown
            ``method``, a ``tol`` that is not positive.

    Notes:
        ``krylov``: time ``O(B H S^2 A)`` a step, memory ``O(B H S A)`` times the number
        of steps. ``eigh``: time ``O(B (HSA)^3)``, memory ``O(B (HSA)^2)``.
    """
    if method not in ("krylov", "eigh"):
        raise ValueError(f"method={method!r}: allowed are 'krylov' and 'eigh'")
    if not tol > 0:
        raise ValueError(f"tol={tol}: must be positive")
    policy_off = _as_policy("policy_off", policy_off, mdp)
    d, d_off = occupancy(mdp, policy), occupancy(mdp, policy_off)
    _need_coverage(d, d_off)
    if method == "eigh":
        values, vectors, target = _scaled_eigen(mdp, policy, policy_off)
        null = values < _NULL * mdp.shape[1]
        _need_no_leak(vectors, target, null, target.abs())
        whiten = vectors * values.rsqrt().masked_fill(null, 0)[:, None]
        return torch.linalg.eigvalsh(whiten.mT @ target @ whiten)[:, -1]
    operator = _WhitenedMoment(mdp, policy, d, d_off)
    return _largest_eigenvalue(operator, operator.start(), tol)


def null_leak(mdp: TabularMDP, policy: Tensor, policy_off: Tensor) -> Tensor:
    r"""How much the target sees of what outcome data cannot: zero, says the lemma.

    Directions f with :math:`E_{off}[X^2] = 0` change step rewards and leave every
    outcome as it is. This is the largest :math:`E_\pi[X^2]` over them (f normalised to
    unit length after cells are scaled to unit variance under the data).

    Returns:
        (B,), up to rounding zero whenever the data cover the target.
    """
    policy_off = _as_policy("policy_off", policy_off, mdp)
    values, vectors, target = _scaled_eigen(mdp, policy, policy_off)
    return _leak(vectors, target, values < _NULL * mdp.shape[1])


def _ratio(d: Tensor, d_off: Tensor) -> Tensor:
    """d / d_off, 0 where nobody goes, inf where only the target goes."""
    return torch.where(d == 0, torch.zeros_like(d), d / d_off)


def _dot(d: Tensor, ratio: Tensor) -> Tensor:
    return torch.where(d == 0, torch.zeros_like(d), d * ratio)


def _conditional_variance(transition: Tensor, value: Tensor) -> Tensor:
    """Variance of value(s') given (s, a); (B, H-1, S, A, S), (B, H-1, S)."""
    value = value[:, :, None, None]
    mean = (transition * value).sum(-1, keepdim=True)
    return (transition * (value - mean) ** 2).sum(-1)


def _need_coverage(d: Tensor, d_off: Tensor) -> None:
    missed = (d > 0) & (d_off == 0)
    if missed.any():
        b, h, s, a = missed.nonzero()[0].tolist()
        raise ValueError(
            f"the data policy never visits {int(missed.sum())} cells that the target "
            f"does (first: process {b}, step {h}, state {s}, action {a}); coverage and "
            "the worst case are infinite"
        )


def _scaled_eigen(
    mdp: TabularMDP, policy: Tensor, policy_off: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenpairs of M_off after scaling its diagonal to one, and M_pi scaled alike."""
    data = second_moment(mdp, policy_off)
    diagonal = data.diagonal(dim1=1, dim2=2)
    scale = diagonal.rsqrt().masked_fill(diagonal == 0, 0)
    scale = scale[:, :, None] * scale[:, None]
    # A cell that is never visited gets an eigenvalue of its own and carries nothing.
    data = data * scale + torch.diag_embed((diagonal == 0).to(data))
    values, vectors = torch.linalg.eigh(data)
    return values, vectors, second_moment(mdp, policy) * scale


def _leak(vectors: Tensor, target: Tensor, null: Tensor) -> Tensor:
    hidden = vectors * null[:, None]
    return torch.linalg.eigvalsh(hidden.mT @ target @ hidden)[:, -1].clamp(min=0)
