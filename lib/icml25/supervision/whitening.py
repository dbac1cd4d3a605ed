"""Whitening without large matrices: the fast path to the exact worst case."""

from __future__ import annotations

import torch
from torch import Tensor

from icml25.supervision.mdp import TabularMDP

# An eigenvalue of a unit-diagonal Gram matrix below this is rounding, not signal.
_NULL = 1e-12


class _WhitenedMoment:
    r"""z -> W^T M_pi W z with W^T M_off W = 1, no matrix of size HSA formed.

    In the coordinates of the proof, V_1(s_1), A_h(s_h, a_h) and the innovation of
    V_{h+1}(s_{h+1}), M_off is block diagonal: A_h has the diagonal d_off (on functions
    with mean zero in each state), V_{h+1} the S x S covariance of the next state.
    f_h = V_h + A_h - P_h V_{h+1} leads back. M_pi f is one forward and one backward
    recursion over the states.
    """

    def __init__(
        self, mdp: TabularMDP, policy: Tensor, d: Tensor, d_off: Tensor
    ) -> None:
        self.shape = mdp.shape
        self.policy, self.d = policy.to(d), d
        self.transition = mdp.transition.flatten(2, 3)  # (B, H-1, SA, S)
        # Laws of s' given s under the target: (B, H-1, S, S)
        self.step = (self.policy[:, :-1, ..., None] * mdp.transition).sum(3)
        state_off = d_off.sum(-1)
        self.cell_scale = d_off.rsqrt().masked_fill(d_off == 0, 0)
        # Unit vectors sqrt(off(a|s)): what mean zero in each state projects out.
        self.unit = (d_off / state_off[..., None]).sqrt().masked_fill(d_off == 0, 0)
        self.state_scale = self._whiten_states(mdp, state_off)

    def _whiten_states(self, mdp: TabularMDP, state_off: Tensor) -> Tensor:
        """(B, H, S, S): unit covariance of V_1(s_1), then of the innovations of V_h."""
        root = state_off.rsqrt().masked_fill(state_off == 0, 0)
        first = torch.diag_embed(root[:, 0])[:, None]
        if self.shape[1] == 1:
            return first
        # Scaling the cells of d_off and of d gives both covariances in one go.
        d_off = self.cell_scale.pow(-2).masked_fill(self.cell_scale == 0, 0)
        outer = root[:, 1:, :, None] * root[:, 1:, None]
        covariance = _innovation(self.transition, d_off[:, :-1]) * outer
        values, vectors = torch.linalg.eigh(covariance)
        null = values < _NULL
        target = _innovation(self.transition, self.d[:, :-1]) * outer
        # diag(mass) - P^T d P cancels; its terms are as large as the mass of a state.
        mass = torch.diag_embed(self.d.sum(-1)[:, 1:] * root[:, 1:] ** 2)
        _need_no_leak(vectors, target, null, target.abs() + mass)
        inverse = values.rsqrt().masked_fill(null, 0)
        rest = (vectors * inverse[..., None, :]) @ vectors.mT
        return torch.cat([first, root[:, 1:, :, None] * rest], 1)

    def start(self) -> Tensor:
        """A fixed start: the mean direction plus a part that meets every direction."""
        mean = self._pull_back(self.d)
        count = torch.arange(mean.shape[1], device=mean.device, dtype=mean.dtype)
        spread = (count * 0.6180339887498949 + 0.5) % 1 - 0.5
        return mean + 0.1 * mean.norm(dim=1, keepdim=True) * spread

    def _push(self, z: Tensor) -> Tensor:
        """Whitened coordinates (B, HS + HSA) to a step function f (B, H, S, A)."""
        b, h, s, a = self.shape
        value = (self.state_scale @ z[:, : h * s].view(b, h, s, 1))[..., 0]
        action = z[:, h * s :].view(b, h, s, a)
        action = action - self.unit * (self.unit * action).sum(-1, keepdim=True)
        f = value[..., None] + self.cell_scale * action
        f[:, :-1] -= (self.transition @ value[:, 1:, :, None]).view(b, h - 1, s, a)
        return f

    def _pull_back(self, y: Tensor) -> Tensor:
        """The transpose of :meth:`_push`."""
        b, h, s, a = self.shape
        value = y.sum(-1)
        # (B, H-1, 1, SA) @ (B, H-1, SA, S) -> (B, H-1, S)
        value[:, 1:] -= (y[:, :-1].flatten(2)[:, :, None] @ self.transition)[:, :, 0]
        value = (self.state_scale.mT @ value[..., None])[..., 0]
        action = self.cell_scale * y
        action = action - self.unit * (self.unit * action).sum(-1, keepdim=True)
        return torch.cat([value.flatten(1), action.flatten(1)], 1)

    def __call__(self, z: Tensor) -> Tensor:
        b, h, s, a = self.shape
        f = self._push(z)
        weighted = self.d * f
        # What the past and the future add to a cell, given its state and its action.
        inflow = (weighted[:, :-1].flatten(2)[:, :, None] @ self.transition)[:, :, 0]
        mean = (self.policy * f).sum(-1)
        past, future = [torch.zeros_like(mean[:, 0])], [mean[:, -1]]
        for k in range(h - 1):
            past.append((past[-1][:, None] @ self.step[:, k])[:, 0] + inflow[:, k])
        for k in reversed(range(1, h - 1)):
            ahead = (self.step[:, k] @ future[-1][..., None])[..., 0]
            future.append(mean[:, k] + ahead)
        y = weighted + torch.stack(past, 1)[..., None] * self.policy
        if h > 1:
            ahead = torch.stack(future[::-1], 1)[..., None]  # values of layers 2..H
            y[:, :-1] += self.d[:, :-1] * (self.transition @ ahead).view(b, h - 1, s, a)
        return self._pull_back(y)


def _innovation(transition: Tensor, d: Tensor) -> Tensor:
    """sum_{s,a} d(s,a) Cov(one-hot s' | s,a): P (B, K, SA, S), d (B, K, S, A)."""
    d = d.flatten(2)[..., None]
    state = (d * transition).sum(2)
    return torch.diag_embed(state) - transition.mT @ (d * transition)


def _largest_eigenvalue(operator, start: Tensor, tol: float) -> Tensor:
    """Lanczos with full reorthogonalisation, batched; the residual bounds the error."""
    size = start.shape[1]
    q = start / start.norm(dim=1, keepdim=True)
    basis = q[:, None]
    diagonal, off_diagonal = [], []
    while True:
        w = operator(q)
        diagonal.append((w * q).sum(1))
        for _ in range(2):  # twice is enough for orthogonality to rounding
            w = w - ((basis @ w[..., None]).mT @ basis)[:, 0]
        norm = w.norm(dim=1)
        steps = len(diagonal)
        if (steps >= 8 and steps % 4 == 0) or steps == size:
            ritz = torch.diag_embed(torch.stack(diagonal, 1))
            if off_diagonal:
                off = torch.diag_embed(torch.stack(off_diagonal, 1), 1)
                ritz = ritz + off + off.mT
            values, vectors = torch.linalg.eigh(ritz)
            residual = norm * vectors[:, -1, -1].abs()
            if steps == size or (residual <= tol * values[:, -1]).all():
                return values[:, -1]
        off_diagonal.append(norm)
        # A space that is used up yields zeros, which leave the largest value alone.
        floor = 1e-14 * diagonal[0].abs()
        q = w / norm.clamp(min=floor + 1e-300)[:, None] * (norm > floor)[:, None]
        basis = torch.cat([basis, q[:, None]], 1)


def _need_no_leak(vectors: Tensor, target: Tensor, null: Tensor, terms: Tensor) -> None:
    """Refuse if what counts as hidden from the data is visible to the target.

    For a true null direction u the sum u^T M_pi u cancels to rounding, relative to
    ``terms``, the absolute values of what is summed.
    """
    hidden = vectors * null[..., None, :]
    seen = (hidden * (target @ hidden)).sum(-2)
    lost = seen > 1e-9 * (hidden.abs() * (terms @ hidden.abs())).sum(-2)
    if lost.any():
        raise ValueError(
            f"process {int(lost.nonzero()[0, 0])}: the target sees a direction of f "
            "that the data do not show to float64 precision; coverage is too close to "
            "failing to compute the worst case"
        )
