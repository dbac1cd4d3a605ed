"""Tabular vector-reward environments as tensors, read from mo-gymnasium."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Solution", "TabularEnv", "ray_oracle"]


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
        try:
            env = _make(name, **options)
        except Exception as error:
            raise ValueError(f"name={name!r} cannot be made: {error}") from error
        kind = type(env).__name__
        if kind not in _OUTCOMES:
            raise ValueError(
                f"name={name!r} is not tabular here (observations: "
                f"{env.observation_space}); tabular: fruit-tree-v0, "
                "deep-sea-treasure-v0, deep-sea-treasure-concave-v0, "
                "deep-sea-treasure-mirrored-v0, resource-gathering-v0"
            )
        return _read(env, kind=kind, name=name, gamma=gamma)

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
            ValueError: shapes do not match, a successor does not exist, probabilities
                do not sum to one, or a reward is not finite.
        """
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
        if prob is None:
            prob = torch.full(next_state.shape, 1.0 / outcomes, dtype=reward.dtype)
        if not torch.allclose(prob.sum(-1), torch.ones_like(prob[..., 0])):
            raise ValueError("prob must sum to one over the outcomes")
        eye = torch.eye(states, dtype=reward.dtype, device=reward.device)
        return cls(
            next_state=next_state,
            prob=prob,
            reward=reward,
            done=done,
            obs=torch.arange(states)[:, None] if obs is None else obs,
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
            generator: for environments with random outcomes.

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
            value=v[:, self.start] + self.offset, v=v, q=q, occupancy=occupancy
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


# Per tabular class: the numbers its coin shows for each random outcome, with their
# probabilities. Resource gathering's enemies strike when the coin is below 0.1.
_OUTCOMES = {
    "FruitTreeEnv": ((0.5, 1.0),),
    "DeepSeaTreasure": ((0.5, 1.0),),
    "ResourceGathering": ((0.0, 0.1), (0.5, 0.9)),
}


class _Coin:
    """Stands in for an environment's random generator: always the same number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


def _make(name: str, **options: Any) -> Any:
    import mo_gymnasium

    # Some constructors warn about the precision of their own spaces.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return mo_gymnasium.make(name, **options).unwrapped


def _read(env: Any, *, kind: str, name: str, gamma: float) -> TabularEnv:
    first, _ = env.reset(seed=0)
    index = {tuple(map(int, first)): 0}
    waiting = [env]
    rows = []  # one per state: [action][outcome] -> (successor, reward, done)
    for here in waiting:  # grows while it is walked
        actions = []
        for action in range(int(here.action_space.n)):
            outcomes = []
            for number, _ in _OUTCOMES[kind]:
                there = _clone(here)
                there._np_random = _Coin(number)
                obs, reward, terminated, _, _ = there.step(action)
                key = tuple(map(int, obs))
                if not terminated and key not in index:
                    index[key] = len(index)
                    waiting.append(there)
                # After the end nothing is stepped: the successor is never used.
                outcomes.append((index.get(key, 0), reward, terminated))
            actions.append(outcomes)
        rows.append(actions)

    def column(pick: int) -> list:
        return [[[o[pick] for o in a] for a in row] for row in rows]

    next_state = torch.tensor(column(0))
    reward = torch.tensor([[[o[1].tolist() for o in a] for a in row] for row in rows])
    done = torch.tensor(column(2))
    obs = torch.tensor(list(index))
    prob = torch.tensor([chance for _, chance in _OUTCOMES[kind]])
    return TabularEnv.from_tables(
        next_state,
        reward,
        done,
        prob=prob.expand(next_state.shape).contiguous(),
        gamma=gamma,
        obs=obs,
        features=_path_code(obs) if kind == "FruitTreeEnv" else _coordinates(obs),
        name=name,
    )


def _clone(env: Any) -> Any:
    """A copy with its position (``copy.deepcopy`` would start these anew)."""
    twin = object.__new__(type(env))
    twin.__dict__ = {
        key: value.copy() if hasattr(value, "__array__") else value
        for key, value in vars(env).items()
    }
    return twin


def _path_code(obs: Tensor) -> Tensor:
    """``(S, depth)``: the turns taken from the root as -1 and +1, then zeros."""
    row, place = obs[:, :1], obs[:, 1:]
    turn = torch.arange(int(row.max()))
    bit = (place >> (row - 1 - turn).clamp_min(0)) & 1
    return torch.where(turn < row, 2.0 * bit - 1.0, 0.0)


def _coordinates(obs: Tensor) -> Tensor:
    """``(S, F)``: one-hot code of every coordinate, side by side."""
    parts = [torch.nn.functional.one_hot(column) for column in obs.T]
    return torch.cat(parts, -1).to(torch.get_default_dtype())


def _levels(next_state: Tensor, done: Tensor, start: int) -> tuple[Tensor, ...]:
    """States by time from the start; empty if a state can be met at two times."""
    level, seen, levels = torch.tensor([start]), set(), []
    while len(level):
        if seen & set(level.tolist()):
            return ()
        seen |= set(level.tolist())
        levels.append(level)
        level = next_state[level][~done[level]].unique()
    return tuple(levels) if len(seen) == next_state.shape[0] else ()


def ray_oracle(env: TabularEnv, preference: Tensor) -> Tensor:
    r"""How far along each preference's ray any stochastic policy can get.

    .. math:: t^*(p) = \max_{x \ge 0} \{ t : v(x) \ge t\,p \}

    over the occupancy measures :math:`x` of the environment, a linear program. Mixing
    is allowed, so this is the ceiling for every policy, deterministic or not.

    Args:
        env: the environment, with its utility.
        preference: ``(K, m)``, positive.

    Returns:
        ``(K,)`` in units of value per unit of preference; the aligned Pareto point is
        :math:`t^* p`.

    Raises:
        ValueError: the preference's size does not match, or an entry is not positive.

    Notes:
        One solve by HiGHS per preference (milliseconds): an oracle, not a training
        step.
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    if preference.ndim != 2 or preference.shape[1] != env.num_objectives:
        raise ValueError(
            f"preference has shape {tuple(preference.shape)}; "
            f"need (K, {env.num_objectives})"
        )
    if not (preference > 0).all():
        raise ValueError(f"preference holds {preference.min():g}; entries must be > 0")
    states, actions = env.num_states, env.num_actions
    prob = env.prob.double().cpu().numpy()
    keep = env.gamma * prob * ~env.done.cpu().numpy()
    pairs = np.arange(states * actions)
    # Flow: mass leaving a state minus discounted mass entering it is the start mass.
    outcome = np.broadcast_to(pairs[:, None], (len(pairs), keep.shape[-1])).ravel()
    rows = np.concatenate([pairs // actions, env.next_state.cpu().numpy().ravel()])
    columns = np.concatenate([pairs, outcome])
    entries = np.concatenate([np.ones(len(pairs)), -keep.ravel()])
    shape = (states, len(pairs) + 1)  # the last variable is t
    flow = coo_array((entries, (rows, columns)), shape=shape).tocsr()
    source = np.eye(states)[env.start]
    mean = (env.prob[..., None] * env.reward).sum(2).double()
    mean = mean.flatten(0, 1).cpu().numpy()  # (S*A, m)
    offset = env.offset.double().cpu().numpy()
    best = []
    for p in preference.double().cpu().numpy():
        reach = np.concatenate([-mean.T, p[:, None]], 1)  # t p - v(x) <= offset
        solved = linprog(
            -np.eye(1, len(pairs) + 1, len(pairs))[0],
            A_ub=reach,
            b_ub=offset,
            A_eq=flow,
            b_eq=source,
            bounds=[(0, None)] * len(pairs) + [(None, None)],
        )
        if solved.status != 0:
            raise RuntimeError(f"the linear program failed: {solved.message}")
        best.append(-solved.fun)
    return torch.tensor(best, dtype=preference.dtype, device=preference.device)
