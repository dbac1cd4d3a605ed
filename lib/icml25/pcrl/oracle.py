"""What the best stochastic policy could attain along a preference's ray."""

from __future__ import annotations

import torch
from torch import Tensor

from icml25.pcrl.envs import TabularEnv

__all__ = ["ray_oracle"]


def ray_oracle(env: TabularEnv, preference: Tensor) -> Tensor:
    r"""How far along each preference's ray any stochastic policy can get.

    .. math:: \tau^*(p) = \max_{\tau,\,y \ge 0} \{ \tau : v(y) \ge \tau\,p \}

    over the occupancy measures :math:`y` of the environment, a linear program. Mixing
    is allowed, so this is the ceiling for every policy, deterministic or not.

    Args:
        env: the environment, with its utility.
        preference: ``(K, m)``, positive.

    Returns:
        ``(K,)`` in units of value per unit of preference. Where the ray meets the front
        it does so at :math:`\tau^* p`; where it misses the front, some policy has
        :math:`v \ge \tau^* p` with more than asked in some objectives.

    Raises:
        ValueError: the preference's size does not match, an entry is not positive, or
            it holds integers.

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
    if not preference.is_floating_point():  # the answer has its dtype
        raise ValueError(f"preference has dtype {preference.dtype}; give floats")
    states, actions = env.num_states, env.num_actions
    prob = env.prob.double().cpu().numpy()
    keep = env.gamma * prob * ~env.done.cpu().numpy()
    pairs = np.arange(states * actions)
    # Flow: mass leaving a state minus discounted mass entering it is the start mass.
    outcome = np.broadcast_to(pairs[:, None], (len(pairs), keep.shape[-1])).ravel()
    rows = np.concatenate([pairs // actions, env.next_state.cpu().numpy().ravel()])
    columns = np.concatenate([pairs, outcome])
    entries = np.concatenate([np.ones(len(pairs)), -keep.ravel()])
    shape = (states, len(pairs) + 1)  # the last variable is tau
    flow = coo_array((entries, (rows, columns)), shape=shape).tocsr()
    source = np.eye(states)[env.start]
    mean = (env.prob[..., None] * env.reward).sum(2).double()
    mean = mean.flatten(0, 1).cpu().numpy()  # (S*A, m)
    offset = env.offset.double().cpu().numpy()
    best = []
    for p in preference.double().cpu().numpy():
        reach = np.concatenate([-mean.T, p[:, None]], 1)  # tau p - v(y) <= offset
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
