r"""Learning step rewards from step labels and from outcomes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from icml25.supervision.mdp import (
    TabularMDP,
    Trajectories,
    _as_policy,
    _as_table,
    _need_probabilities,
    _next_state,
    occupancy,
)
from icml25.supervision.transfer import _need_coverage, _ratio

__all__ = [
    "asymptotic_variance",
    "fit_outcome_reward",
    "fit_process_reward",
    "importance_estimate",
    "soft_optimal_policy",
]


def fit_process_reward(
    trajectories: Trajectories, num_cells: int, *, prior: float = 0.5
) -> Tensor:
    """Process supervision: the mean observed reward of every cell.

    Args:
        trajectories: cells and step rewards, (B, n, H) each.
        num_cells: cells a layer, S * A.
        prior: estimate for a cell that no trajectory visits.

    Returns:
        (B, H, num_cells)

    Raises:
        TypeError: cells that are no int64.
        ValueError: a cell outside ``range(num_cells)``, shapes that disagree, a reward
            that is not finite.
    """
    index, reward = trajectories.index, trajectories.reward
    if reward.shape != index.shape:
        raise ValueError(
            f"reward has shape {tuple(reward.shape)}, index {tuple(index.shape)}; "
            "they must agree"
        )
    _need_cells(index, num_cells)
    _need_finite("reward", reward)
    count = _layer_sums(index, torch.ones_like(reward), num_cells)
    total = _layer_sums(index, reward, num_cells)
    return torch.where(count > 0, total / count.clamp(min=1), prior)


def fit_outcome_reward(
    index: Tensor,
    returns: Tensor,
    num_cells: int,
    *,
    prior: float = 0.5,
    ridge: float = 1e-3,
) -> Tensor:
    r"""Outcome supervision: the step rewards whose sums explain the outcomes best.

    Minimises :math:`\sum_i (\sum_h r'_h - R_i)^2 + \lambda \|r' - \text{prior}\|^2`
    (``eq-supervision-outcome-regression``). Step rewards are not identifiable from
    outcomes; the small ridge picks one member of the equivalence class. With enough
    trajectories all of them give every covered policy the same value.

    Args:
        index: visited cells, (B, n, H), int64.
        returns: outcomes :math:`R_i`, (B, n).
        num_cells: cells a layer, S * A.
        prior: what every step reward is shrunk to.
        ridge: constant part of :math:`\lambda`; another ``1e-6 n`` keeps the
            factorisation safe for large n.

    Returns:
        (B, H, num_cells); finite for every n, ``prior`` for n = 0.

    Raises:
        TypeError: cells that are no int64.
        ValueError: a cell outside ``range(num_cells)``, shapes that disagree, an
            outcome that is not finite, a ridge that is not positive.

    Notes:
        The normal equations hold pair counts, H^2/2 histograms. The (n, H num_cells)
        feature matrix is never formed: memory ``O(B n + B (H num_cells)^2)``.
    """
    if index.dim() != 3 or returns.shape != index.shape[:2]:
        raise ValueError(
            f"index must be (B, n, H) and returns (B, n); got {tuple(index.shape)} "
            f"and {tuple(returns.shape)}"
        )
    if not ridge > 0:
        raise ValueError(f"ridge={ridge}: must be positive, the problem is singular")
    _need_cells(index, num_cells)
    _need_finite("returns", returns)
    batch, num, horizon = index.shape
    gram = _pair_counts(index, num_cells)
    size = horizon * num_cells
    gram.diagonal(dim1=1, dim2=2).add_(ridge + 1e-6 * num)
    centred = (returns.to(gram) - prior * horizon)[..., None].expand(-1, -1, horizon)
    right = _layer_sums(index, centred, num_cells).reshape(batch, size, 1)
    factor = torch.linalg.cholesky(gram)
    return prior + torch.cholesky_solve(right, factor).view(batch, horizon, num_cells)


def importance_estimate(
    mdp: TabularMDP,
    trajectories: Trajectories,
    policy: Tensor,
    policy_off: Tensor,
    *,
    normalise: bool = False,
) -> Tensor:
    r"""Trajectory importance sampling: the mean of
    :math:`R_i \prod_h \pi(a_h|s_h) / off(a_h|s_h)`.

    The method that needs coverage of whole trajectories.

    Args:
        mdp: B processes.
        trajectories: data of ``policy_off``, (B, n, H).
        policy: target policy, (B, H, S, A).
        policy_off: data policy, (B, H, S, A).
        normalise: divide the weights by their sum instead of n: less variance for some
            bias. Where no trajectory has any weight the plain mean of the returns is
            all that is left.

    Returns:
        (B,)

    Raises:
        ValueError: no trajectories, a policy that is none, or a target that visits a
            cell that the data never do.
    """
    policy = _as_policy("policy", policy, mdp)
    policy_off = _as_policy("policy_off", policy_off, mdp)
    _need_coverage(occupancy(mdp, policy), occupancy(mdp, policy_off))
    if trajectories.index.shape[1] == 0:
        raise ValueError("importance sampling needs at least one trajectory, got 0")
    ratio = torch.where(policy == 0, torch.zeros_like(policy), policy / policy_off)
    ratio = ratio.flatten(2).transpose(1, 2)  # (B, H, S, A) -> (B, SA, H)
    weight = ratio.gather(1, trajectories.index).prod(-1)
    if normalise:
        total = weight.sum(1, keepdim=True)
        weight = torch.where(total > 0, weight / total * weight.shape[1], 1.0)
    return (weight * trajectories.returns).mean(1)


def asymptotic_variance(
    mdp: TabularMDP, policy: Tensor, policy_off: Tensor
) -> tuple[Tensor, Tensor]:
    r"""n times the variance of the estimated return, for Bernoulli step rewards.

    Known dynamics, unrestricted step rewards, n large (``eq-supervision-price``). Step
    labels cost :math:`\sum_h E_{off}[w_h^2 v_h]` with
    :math:`w_h = d_h^\pi / d_h^{off}` and noise :math:`v_h = r_h (1 - r_h)`;
    outcomes cost :math:`E_{off}[X_*^2 \sum_h v_h]` with
    :math:`X_* = 1 + \sum_h (w_h - \bar w_h)`, the function that attains
    :func:`~icml25.supervision.mean_transfer`; :math:`\bar w_h` is the mean of
    :math:`w_h` given the state.

    Returns:
        For step labels and for outcomes, (B,) each.

    Raises:
        ValueError: the target visits a cell that the data never do, or rewards are no
            probabilities.
    """
    _need_probabilities(mdp.reward)
    policy_off = _as_policy("policy_off", policy_off, mdp)
    d, d_off = occupancy(mdp, policy), occupancy(mdp, policy_off)
    _need_coverage(d, d_off)
    noise = mdp.reward * (1 - mdp.reward)
    weight = _ratio(d, d_off)
    process = (d * weight * noise).flatten(1).sum(1)
    x = weight - _ratio(d.sum(-1), d_off.sum(-1))[..., None]
    # By state: E[1], E[X], E[X^2] and the same times W, the noise summed so far.
    zero = torch.zeros_like(mdp.start)
    moments = [[mdp.start, mdp.start, mdp.start], [zero, zero, zero]]
    for h in range(mdp.shape[1]):
        cells = [[m[..., None] * policy_off[:, h] for m in row] for row in moments]
        dx, dw = x[:, h], noise[:, h]
        shifted = [
            [m0, m1 + dx * m0, m2 + 2 * dx * m1 + dx**2 * m0] for m0, m1, m2 in cells
        ]
        cells = [
            shifted[0],
            [mw + dw * m for m, mw in zip(*shifted, strict=True)],
        ]
        if h < mdp.shape[1] - 1:
            step = mdp.transition[:, h]
            moments = [[_next_state(m, step) for m in row] for row in cells]
    return process, cells[1][2].flatten(1).sum(1)


def soft_optimal_policy(
    mdp: TabularMDP, reference: Tensor, temperature: float, reward: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""The policy that maximises :math:`E_\pi[R] - b\,KL(\pi \| \pi_{ref})`.

    Args:
        mdp: B processes.
        reference: :math:`\pi_{ref}`, (B, H, S, A).
        temperature: b > 0.
        reward: step reward to use instead of ``mdp.reward``.

    Returns:
        The policy (B, H, S, A) and its regularised return, (B,).

    Raises:
        ValueError: ``temperature`` is not positive; the reference is no policy.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be positive")
    reference = _as_policy("reference", reference, mdp)
    reward = _as_table("reward", reward, mdp)
    policies = []
    value = torch.zeros_like(mdp.start)
    for h in reversed(range(mdp.shape[1])):
        q = reward[:, h]
        if h < mdp.shape[1] - 1:
            q = q + (mdp.transition[:, h] * value[:, None, None]).sum(-1)
        logits = reference[:, h].log() + q / temperature
        value = temperature * logits.logsumexp(-1)
        policies.append(logits.softmax(-1))
    return torch.stack(policies[::-1], 1), (mdp.start * value).sum(-1)


def _need_finite(name: str, x: Tensor) -> None:
    if not x.isfinite().all():
        raise ValueError(f"{name} holds values that are not finite")


def _need_cells(index: Tensor, num_cells: int) -> None:
    if index.dtype != torch.long:
        raise TypeError(f"index must be an int64 tensor of cells, got {index.dtype}")
    if index.numel() and not (0 <= int(index.min()) <= int(index.max()) < num_cells):
        raise ValueError(
            f"index holds cells from {int(index.min())} to {int(index.max())}; "
            f"allowed are 0 to {num_cells - 1}"
        )


def _layer_sums(index: Tensor, value: Tensor, num_cells: int) -> Tensor:
    """Sum ``value`` (B, n, H) by cell -> (B, H, num_cells)."""
    batch, num, horizon = index.shape
    place = torch.arange(batch * horizon, device=index.device).view(batch, 1, horizon)
    flat = (place * num_cells + index).reshape(-1)
    sums = value.new_zeros(batch * horizon * num_cells)
    return sums.index_add_(0, flat, value.reshape(-1)).view(batch, horizon, num_cells)


def _pair_counts(index: Tensor, num_cells: int) -> Tensor:
    """How often two cells are visited by one trajectory, (B, H cells, H cells)."""
    batch, num, horizon = index.shape
    pairs = num_cells**2
    base = torch.arange(batch, device=index.device)[:, None] * pairs
    gram = index.new_zeros(
        batch, horizon, num_cells, horizon, num_cells, dtype=torch.float64
    )
    layers = index.unbind(-1)
    for h in range(horizon):
        left = base + layers[h] * num_cells
        for k in range(h, horizon):
            flat = (left + layers[k]).reshape(-1)
            count = torch.bincount(flat, minlength=batch * pairs)
            count = count.view(batch, num_cells, num_cells).to(gram)
            gram[:, h, :, k] = count
            gram[:, k, :, h] = count.mT
    return gram.view(batch, horizon * num_cells, horizon * num_cells)
