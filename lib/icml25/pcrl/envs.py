"""Tabular vector-reward environments as tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from icml25.pcrl import gym_tables

__all__ = ["Solution", "TabularEnv"]


@dataclass(frozen=True)
class Solution:
    """The exact evaluation of a batch of policies.

    Shapes: ``K`` policies, ``S`` states, ``A`` actions, ``m`` objectives.

    Attributes:
        value: ``(K, m)`` expected discounted utility from the start state.
        v: ``(K, S, m)`` value of each state.
        q: ``(K, S, A, m)`` value of each action.
        occupancy: ``(K, S)`` expected discounted visits of each state.
    """

    value: Tensor
    v: Tensor
    q: Tensor
    occupancy: Tensor

    @property
    def advantage(self) -> Tensor:
        """``(K, S, A, m)``: the gradient of each value in the policy's own metric."""
        return self.q - self.v[:, :, None]


@dataclass(frozen=True)
class TabularEnv:
    r"""A finite Markov decision process with a vector reward, as lookup tables.

    Step and reset are index gathers, so thousands of preferences times episodes advance
    at once, on any device.

    Shapes: ``S`` states, ``A`` actions, ``O`` random outcomes, ``m`` objectives, ``F``
    features.

    Attributes:
        next_state: ``(S, A, O)`` index of the successor.
        prob: ``(S, A, O)`` probability of the outcome.
        reward: ``(S, A, O, m)``.
        done: ``(S, A, O)`` whether the episode ends.
        obs: ``(S, d)`` what mo-gymnasium shows in that state.
        features: ``(S, F)`` what a network sees.
        start: index of the start state.
        gamma: discount :math:`\gamma`.
        offset: ``(m,)`` added to the value of the start state (see ``with_utility``).
        levels: states grouped by time where no state is visited twice, else empty.
        name: the mo-gymnasium id.
    """

    next_state: Tensor
    prob: Tensor
    reward: Tensor
    done: Tensor
    obs: Tensor
    features: Tensor
    start: int
    gamma: float
    offset: Tensor
    levels: tuple[Tensor, ...]
    name: str

    @property
    def num_states(self) -> int:
        return self.next_state.shape[0]

    @property
    def num_actions(self) -> int:
        return self.next_state.shape[1]

    @property
    def num_objectives(self) -> int:
        return self.reward.shape[-1]

    @classmethod
    def from_gymnasium(
        cls, name: str, *, gamma: float = 0.99, **options: Any
    ) -> TabularEnv:
        """Read an environment's tables by stepping mo-gymnasium's own code.

        Every state is found by walking from the start; every action is tried in every
        state by the library's ``step`` (for random ones, once for each outcome).

        Args:
            name: ``fruit-tree-v0``, ``deep-sea-treasure-v0`` (also ``-concave-v0``,
                ``-mirrored-v0``) or ``resource-gathering-v0``.
            gamma: discount in (0, 1]; below 1 where an episode may last for ever.
            **options: given to the environment, such as ``depth=6``.

        Raises:
            ValueError: the environment is not one of the tabular ones, an option is
                out of range, a reward is not finite, or ``gamma`` is not in (0, 1].
        """
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma!r}: give a number in (0, 1]")
        depth = options.get("depth", 6)
        if depth not in (5, 6, 7):
            raise ValueError(f"depth={depth!r}: the fruit tree has depth 5, 6 or 7")
        env = gym_tables.make(name, **options)
        return cls.from_tables(**gym_tables.read(env), gamma=gamma, name=name)

    @classmethod
    def from_tables(
        cls,
        next_state: Tensor,
        reward: Tensor,
        done: Tensor,
        *,
        prob: Tensor | None = None,
        gamma: float = 0.99,
        start: int = 0,
        obs: Tensor | None = None,
        features: Tensor | None = None,
        name: str = "tables",
    ) -> TabularEnv:
        """Build an environment from its tables (shapes as in the class).

        Raises:
            TypeError: ``done`` is not boolean, or ``reward`` not floating-point.
            ValueError: shapes do not match, a successor or the start does not exist,
                probabilities are negative or do not sum to one, a reward is not
                finite, or ``gamma`` is not in (0, 1].
        """
        if next_state.ndim != 3 or reward.ndim != 4:
            raise ValueError(
                f"next_state {tuple(next_state.shape)} must be (S, A, O) and "
                f"reward {tuple(reward.shape)} (S, A, O, m)"
            )
        if done.dtype != torch.bool:  # ~ would flip an integer's bits
            raise TypeError(f"done has dtype {done.dtype}; give torch.bool")
        if not reward.is_floating_point():
            raise TypeError(f"reward has dtype {reward.dtype}; give floats")
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma!r}: give a number in (0, 1]")
        states, _, outcomes = next_state.shape
        if reward.shape[:3] != next_state.shape or done.shape != next_state.shape:
            raise ValueError(
                f"next_state {tuple(next_state.shape)}, done {tuple(done.shape)} and "
                f"reward {tuple(reward.shape)} must agree in (S, A, O)"
            )
        if not reward.isfinite().all():
            bad = (~reward.isfinite()).nonzero()[0].tolist()
            raise ValueError(f"reward[{bad}] is not finite; a NaN would spread to all")
        if next_state.min() < 0 or next_state.max() >= states:
            raise ValueError(f"next_state must lie in 0..{states - 1}")
        if not 0 <= start < states:
            raise ValueError(f"start={start}: states are 0..{states - 1}")
        if prob is None:
            like = {"dtype": reward.dtype, "device": reward.device}
            prob = torch.full(next_state.shape, 1.0 / outcomes, **like)
        if prob.shape != next_state.shape:
            raise ValueError(
                f"prob {tuple(prob.shape)} must be {tuple(next_state.shape)}"
            )
        if (prob < 0).any():
            raise ValueError(f"prob holds {prob.min():g}; entries must be >= 0")
        if not torch.allclose(prob.sum(-1), torch.ones_like(prob[..., 0])):
            raise ValueError("prob must sum to one over the outcomes")
        index = torch.arange(states, device=next_state.device)
        eye = torch.eye(states, dtype=reward.dtype, device=reward.device)
        return cls(
            next_state=next_state,
            prob=prob,
            reward=reward,
            done=done,
            obs=index[:, None] if obs is None else obs,
            features=eye if features is None else features,
            start=start,
            gamma=gamma,
            offset=reward.new_zeros(reward.shape[-1]),
            levels=_levels(next_state, done, start),
            name=name,
        )

    def to(self, device: torch.device | str) -> TabularEnv:
        """The same environment with its tables on another device."""
        moved = {
            key: value.to(device)
            for key, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(
            self, **moved, levels=tuple(level.to(device) for level in self.levels)
        )

    def with_utility(self, scale: Tensor, offset: Tensor) -> TabularEnv:
        """Measure each objective as ``offset + scale * value``, with ``scale > 0``.

        Ratios of values to preferences need positive values; a time penalty becomes
        positive by an offset. Steps pay the scaled reward; the offset is added once, to
        the value of the start state.

        Raises:
            ValueError: a scale is not positive, or a size is not ``m``.
        """
        if scale.shape != self.offset.shape or offset.shape != self.offset.shape:
            raise ValueError(
                f"scale {tuple(scale.shape)} and offset {tuple(offset.shape)} must be "
                f"({self.num_objectives},)"
            )
        if not (scale > 0).all():
            raise ValueError(f"scale={scale.tolist()}: every entry must be positive")
        return replace(
            self, reward=self.reward * scale, offset=self.offset * scale + offset
        )

    def with_objectives(self, num: int) -> TabularEnv:
        """The same environment with the first ``num`` objectives only.

        Raises:
            ValueError: there are not that many.
        """
        if not 1 <= num <= self.num_objectives:
            raise ValueError(f"num={num}: {self.name} has {self.num_objectives}")
        return replace(self, reward=self.reward[..., :num], offset=self.offset[:num])

    def reset(self, num: int) -> Tensor:
        """``(num,)`` start states."""
        return torch.full((num,), self.start, device=self.next_state.device)

    def step(
        self,
        state: Tensor,
        action: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Advance any number of episodes by one step.

        Args:
            state: ``(...)`` state indices.
            action: ``(...)`` action indices.
            generator: for environments with random outcomes, on their device.

        Returns:
            ``next_state (...)``, ``reward (..., m)``, ``done (...)``. Steps after the
            end are the caller's to mask.
        """
        if self.prob.shape[-1] == 1:
            outcome = torch.zeros_like(state)
        else:
            chance = self.prob[state, action]
            flat = chance.reshape(-1, chance.shape[-1])
            outcome = torch.multinomial(flat, 1, generator=generator)
            outcome = outcome.reshape(state.shape)
        where = (state, action, outcome)
        return self.next_state[where], self.reward[where], self.done[where]

    def solve(self, policy: Tensor) -> Solution:
        r"""Evaluate ``K`` policies exactly.

        Dynamic programming over time where no state repeats (a tree), else one batched
        solve of :math:`(I - \gamma P_\pi) V = R_\pi`.

        Args:
            policy: ``(K, S, A)`` action probabilities.

        Raises:
            ValueError: the shape is not ``(K, S, A)``.

        Notes:
            :math:`O(K S A m)` on a tree, :math:`O(K S^3)` in general.
        """
        expected = (self.num_states, self.num_actions)
        if policy.ndim != 3 or policy.shape[1:] != expected:
            raise ValueError(
                f"policy has shape {tuple(policy.shape)}; need (K, {expected[0]}, "
                f"{expected[1]})"
            )
        v, occupancy = (self._sweep if self.levels else self._invert)(policy)
        q = self._backup(v, slice(None))
        return Solution(
            value=v[:, self.start] + self.offset.to(v.dtype),
            v=v,
            q=q,
            occupancy=occupancy,
        )

    def _backup(self, v: Tensor, states: Tensor | slice) -> Tensor:
        """``(K, S, A, m)``: expected reward plus discounted next value."""
        keep = self.gamma * (~self.done[states]).to(v.dtype)[..., None]  # (S, A, O, 1)
        prob = self.prob[states].to(v.dtype)[..., None]
        reward = self.reward[states].to(v.dtype)
        return (prob * (reward + keep * v[:, self.next_state[states]])).sum(-2)

    def _sweep(self, policy: Tensor) -> tuple[Tensor, Tensor]:
        k, m = policy.shape[0], self.num_objectives
        v = policy.new_zeros(k, self.num_states, m)
        for states in reversed(self.levels):
            q = self._backup(v, states)
            v[:, states] = (policy[:, states, :, None] * q).sum(2)
        visits = policy.new_zeros(k, self.num_states)
        visits[:, self.start] = 1.0
        for states in self.levels[:-1]:
            flow = self._flow(policy, states) * visits[:, states, None, None]
            target = self.next_state[states].flatten()
            visits.index_add_(1, target, flow.flatten(1))
        return v, visits

    def _flow(self, policy: Tensor, states: Tensor | slice) -> Tensor:
        """``(K, S, A, O)``: discounted mass each state sends along each outcome."""
        keep = self.gamma * (~self.done[states]).to(policy.dtype)
        return policy[:, states, :, None] * self.prob[states].to(policy.dtype) * keep

    def _invert(self, policy: Tensor) -> tuple[Tensor, Tensor]:
        k, s = policy.shape[0], self.num_states
        flow = self._flow(policy, slice(None)).flatten(2)  # (K, S, A*O)
        target = self.next_state.flatten(1).expand(k, -1, -1)
        # (K, S, S): I - gamma P_pi
        system = torch.eye(s, dtype=policy.dtype, device=policy.device).repeat(k, 1, 1)
        system.scatter_add_(2, target, -flow)
        mean = (self.prob[..., None] * self.reward).sum(2).to(policy.dtype)  # (S, A, m)
        factor, pivots, _ = torch.linalg.lu_factor_ex(system)
        v = torch.linalg.lu_solve(factor, pivots, (policy[..., None] * mean).sum(2))
        first = policy.new_zeros(k, 1, s)
        first[..., self.start] = 1.0
        visits = torch.linalg.lu_solve(factor, pivots, first, left=False)[:, 0]
        return v, visits


def _levels(next_state: Tensor, done: Tensor, start: int) -> tuple[Tensor, ...]:
    """States by time from the start; empty if a state can be met at two times."""
    level, seen, levels = next_state.new_tensor([start]), set(), []
    while len(level):
        if seen & set(level.tolist()):
            return ()
        seen |= set(level.tolist())
        levels.append(level)
        level = next_state[level][~done[level]].unique()
    return tuple(levels) if len(seen) == next_state.shape[0] else ()
