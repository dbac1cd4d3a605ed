"""The tables of mo-gymnasium's finite environments, read by stepping its own code."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["make", "read"]

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


def make(name: str, **options: Any) -> Any:
    """mo-gymnasium's environment ``name``, without its wrappers.

    Raises:
        ValueError: there is none of that name and those options, or it is not one
            whose tables can be read.
    """
    import mo_gymnasium

    # Some constructors warn about the precision of their own spaces.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            env = mo_gymnasium.make(name, **options).unwrapped
        except Exception as error:
            raise ValueError(f"name={name!r} cannot be made: {error}") from error
    if type(env).__name__ not in _OUTCOMES:
        raise ValueError(
            f"name={name!r} is not tabular here (observations: "
            f"{env.observation_space}); tabular: fruit-tree-v0, "
            "deep-sea-treasure-v0, deep-sea-treasure-concave-v0, "
            "deep-sea-treasure-mirrored-v0, resource-gathering-v0"
        )
    return env


def read(env: Any) -> dict[str, Tensor]:
    """Tables of an environment of :func:`make`, for ``TabularEnv.from_tables``.

    Walks from the start, trying every action in every state by the environment's own
    ``step``; where it draws a random number, once for each outcome.
    """
    kind = type(env).__name__
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
    return {
        "next_state": next_state,
        "reward": reward,
        "done": done,
        "prob": prob.expand(next_state.shape).contiguous(),
        "obs": obs,
        "features": _path_code(obs) if kind == "FruitTreeEnv" else _coordinates(obs),
    }


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
