"""Batched, layered, tabular decision processes: values, plans, samples."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "TabularMDP",
    "Trajectories",
    "advantage",
    "evaluate",
    "expected_return",
    "occupancy",
    "plan",
    "sample_trajectories",
]


@dataclass(frozen=True)
class TabularMDP:
    r"""A batch of finite-horizon decision processes with one table per layer.

    Shapes: ``B`` processes, ``H`` steps (the horizon), ``S`` states a layer, ``A``
    actions. Everything is float64: the second moments of outcomes are singular
    matrices, and single precision would make the lemma appear to fail.

    Attributes:
        start: law :math:`\rho` of the first state, (B, S).
        transition: :math:`P_h(s' \mid s, a)`, (B, H-1, S, A, S).
        reward: mean step reward :math:`r_h(s, a)`, (B, H, S, A).

    Raises:
        TypeError: an entry is no floating-point tensor.
        ValueError: shapes disagree, a law does not sum to one, a value is not finite.

    Notes:
        float32 input is converted to float64 with a warning.
    """

    start: Tensor
    transition: Tensor
    reward: Tensor

    def __post_init__(self) -> None:
        for name in ("start", "transition", "reward"):
            object.__setattr__(self, name, _as_float64(name, getattr(self, name)))
        if self.reward.dim() != 4 or 0 in self.reward.shape:
            raise ValueError(
                f"reward has shape {tuple(self.reward.shape)}; "
                "it must be (B, H, S, A) with no empty axis"
            )
        b, h, s, a = self.reward.shape
        for name, shape in (("start", (b, s)), ("transition", (b, h - 1, s, a, s))):
            _need_shape(name, getattr(self, name), shape)
            _need_law(name, getattr(self, name))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, H, S, A)``."""
        return tuple(self.reward.shape)

    def to(self, device: torch.device | str) -> TabularMDP:
        """The same processes on another device."""
        return TabularMDP(*(x.to(device) for x in self._tensors()))

    def __getitem__(self, rows: slice | Tensor) -> TabularMDP:
        """Some of the processes, chosen along the batch axis."""
        return TabularMDP(*(x[rows] for x in self._tensors()))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.start, self.transition, self.reward


@dataclass(frozen=True)
class Trajectories:
    r"""Sampled trajectories.

    Attributes:
        index: visited cells :math:`s_h A + a_h`, (B, n, H), int64.
        reward: observed step rewards, (B, n, H).
    """

    index: Tensor
    reward: Tensor

    @property
    def returns(self) -> Tensor:
        """What outcome supervision sees: the sum of the step rewards, (B, n)."""
        return self.reward.sum(-1)


def occupancy(mdp: TabularMDP, policy: Tensor) -> Tensor:
    r"""How often a policy visits each cell: :math:`d_h^\pi(s, a)`.

    Args:
        mdp: B processes.
        policy: :math:`\pi_h(a \mid s)`, (B, H, S, A), rows sum to one.

    Returns:
        (B, H, S, A); every layer sums to one.

    Raises:
        TypeError: the policy is no floating-point tensor.
        ValueError: wrong shape, or a row is no probability law.
    """
    policy = _as_policy("policy", policy, mdp)
    state = mdp.start
    layers = []
    for h in range(mdp.shape[1]):
        cell = state[..., None] * policy[:, h]
        layers.append(cell)
        if h < mdp.shape[1] - 1:
            state = _next_state(cell, mdp.transition[:, h])
    return torch.stack(layers, 1)


def evaluate(
    mdp: TabularMDP, policy: Tensor, reward: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Exact values :math:`Q_h^\pi(s,a)` and :math:`V_h^\pi(s)` by backward induction.

    Args:
        mdp: B processes.
        policy: (B, H, S, A).
        reward: step reward to use instead of ``mdp.reward``, (B, H, S, A).

    Returns:
        ``Q`` (B, H, S, A) and ``V`` (B, H, S); the mean of V over the first state is
        :func:`~icml25.supervision.mdp.expected_return`.

    Raises:
        TypeError: an entry is no floating-point tensor.
        ValueError: wrong shape, or a row of the policy is no probability law.
    """
    policy = _as_policy("policy", policy, mdp)
    reward = _as_table("reward", reward, mdp)
    q_layers, v_layers = [], []
    ahead = None
    for h in reversed(range(mdp.shape[1])):
        q = reward[:, h]
        if ahead is not None:
            q = q + _expected_next(mdp.transition[:, h], ahead)
        ahead = (policy[:, h] * q).sum(-1)
        q_layers.append(q)
        v_layers.append(ahead)
    return torch.stack(q_layers[::-1], 1), torch.stack(v_layers[::-1], 1)


def advantage(mdp: TabularMDP, policy: Tensor) -> Tensor:
    r"""How much better an action is than the policy's own choice: :math:`Q^\mu-V^\mu`.

    Used as a step reward it ranks all policies as their true return does
    (the performance difference identity, ``eq-supervision-performance-difference``).

    Returns:
        (B, H, S, A); under ``policy`` it averages to zero in every state.
    """
    q, v = evaluate(mdp, policy)
    return q - v[..., None]


def expected_return(
    mdp: TabularMDP, policy: Tensor, reward: Tensor | None = None
) -> Tensor:
    r"""The return of a policy, :math:`J(\pi) = E_\pi[\sum_h r_h]`.

    Args:
        mdp: B processes.
        policy: (B, H, S, A).
        reward: step reward to use instead of ``mdp.reward``, (B, H, S, A).

    Returns:
        (B,)

    Raises:
        TypeError: an argument is no floating-point tensor.
        ValueError: wrong shapes, or ``policy`` is none.
    """
    _, v = evaluate(mdp, policy, reward)
    return (mdp.start * v[:, 0]).sum(-1)


def plan(mdp: TabularMDP, reward: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""The deterministic policy that maximises the summed reward, exactly.

    Args:
        mdp: B processes.
        reward: step reward to maximise, (B, H, S, A); default the process's own.

    Returns:
        The policy (B, H, S, A, zeros and ones) and its values ``Q`` (B, H, S, A).
        Of actions that tie to ``1e-12`` the first is taken.
    """
    reward = _as_table("reward", reward, mdp)
    policies, q_layers = [], []
    ahead = None
    for h in reversed(range(mdp.shape[1])):
        q = reward[:, h]
        if ahead is not None:
            q = q + _expected_next(mdp.transition[:, h], ahead)
        best = q.amax(-1, keepdim=True)
        ties = q >= best - 1e-12 * best.abs().clamp(min=1)
        first = ties.to(torch.uint8).argmax(-1)  # argmax of equal values is the first
        ahead = best[..., 0]
        policies.append(torch.nn.functional.one_hot(first, mdp.shape[3]).to(q))
        q_layers.append(q)
    return torch.stack(policies[::-1], 1), torch.stack(q_layers[::-1], 1)


def sample_trajectories(
    mdp: TabularMDP,
    policy: Tensor,
    num: int,
    *,
    generator: torch.Generator | None = None,
    noise: str = "bernoulli",
) -> Trajectories:
    """Sample ``num`` trajectories of each process.

    Args:
        mdp: B processes.
        policy: (B, H, S, A).
        num: trajectories a process, 0 or more.
        generator: source of randomness, on the processes' device.
        noise: ``"bernoulli"``: a step pays 1 with probability ``reward`` and else 0;
            ``"none"``: it pays ``reward``.

    Returns:
        Cells and rewards, (B, num, H) each.

    Raises:
        ValueError: a negative ``num``, an unknown ``noise``, rewards outside [0, 1]
            with Bernoulli noise, a policy that is none.

    Notes:
        Inverse-CDF sampling, one gather a draw: more than a million steps a second on
        one core.
    """
    policy = _as_policy("policy", policy, mdp)
    if num < 0:
        raise ValueError(f"num={num}: give the number of trajectories, 0 or more")
    if noise not in ("bernoulli", "none"):
        raise ValueError(f"noise={noise!r}: allowed are 'bernoulli' and 'none'")
    if noise == "bernoulli":
        _need_probabilities(mdp.reward)
    batch, horizon, num_states, num_actions = mdp.shape
    offset = torch.arange(batch, device=policy.device)[:, None]

    def draw(law: Tensor, row: Tensor) -> Tensor:
        """Draw from row ``row`` of the laws; counts the thresholds that u passes."""
        # The last threshold is left out: rounding may leave it below one.
        thresholds = law.cumsum(-1)[:, :-1][row]
        u = torch.rand(row.shape, generator=generator, device=row.device, dtype=_F)
        return (u[..., None] >= thresholds).sum(-1)

    state = draw(mdp.start, offset.expand(batch, num))
    index = torch.empty(batch, num, horizon, dtype=torch.long, device=policy.device)
    for h in range(horizon):
        row = offset * num_states + state
        action = draw(policy[:, h].reshape(-1, num_actions), row)
        index[:, :, h] = state * num_actions + action
        if h < horizon - 1:
            row = row * num_actions + action
            state = draw(mdp.transition[:, h].reshape(-1, num_states), row)
    flat = mdp.reward.flatten(2).transpose(1, 2)  # (B, H, SA) -> (B, SA, H)
    reward = flat.gather(1, index)
    if noise == "bernoulli":
        u = torch.rand(
            reward.shape, generator=generator, device=reward.device, dtype=_F
        )
        reward = (u < reward).to(_F)
    return Trajectories(index, reward)


_F = torch.float64


def _next_state(cell: Tensor, transition: Tensor) -> Tensor:
    """Push a measure on cells (B, S, A) through P (B, S, A, S) -> (B, S)."""
    # (B, 1, SA) @ (B, SA, S) -> (B, S)
    return (cell.flatten(1)[:, None] @ transition.flatten(1, 2))[:, 0]


def _expected_next(transition: Tensor, value: Tensor) -> Tensor:
    """The mean of a function of the next state: P (B, S, A, S), (B, S) -> (B, S, A)."""
    return (transition.flatten(1, 2) @ value[..., None]).view(transition.shape[:-1])


def _as_float64(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a float64 tensor, got {kind}")
    if not x.isfinite().all():
        raise ValueError(f"{name} holds values that are not finite")
    if x.dtype != _F:
        warnings.warn(f"{name} is {x.dtype}; converted to float64", stacklevel=4)
    return x.to(_F)


def _need_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")


def _need_law(name: str, law: Tensor) -> None:
    if law.numel() == 0:
        return
    if (law < 0).any():
        raise ValueError(f"{name} holds a negative probability: {law.min().item():g}")
    error = (law.sum(-1) - 1).abs().max().item()
    # float32 laws sum to one to about 1e-7 only.
    if error > 1e-6:
        raise ValueError(
            f"{name} must sum to one along its last axis; it is off by {error:.2g}"
        )


def _need_probabilities(reward: Tensor) -> None:
    if not ((reward >= 0) & (reward <= 1)).all():
        raise ValueError(
            "Bernoulli noise needs rewards in [0, 1]; they span "
            f"[{reward.min().item():g}, {reward.max().item():g}]"
        )


def _as_table(name: str, x: Tensor | None, mdp: TabularMDP) -> Tensor:
    if x is None:
        return mdp.reward
    x = _as_float64(name, x)
    _need_shape(name, x, mdp.shape)
    return x


def _as_policy(name: str, policy: Tensor, mdp: TabularMDP) -> Tensor:
    policy = _as_table(name, _given(name, policy), mdp)
    _need_law(name, policy)
    return policy


def _given(name: str, x: Tensor | None) -> Tensor:
    if x is None:
        raise TypeError(f"{name} must be a float64 tensor, got NoneType")
    return x
