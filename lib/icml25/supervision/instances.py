"""Decision processes that the chapter is about: random ones and three by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from icml25.supervision.mdp import TabularMDP

__all__ = [
    "bandit_chain",
    "filler_mdp",
    "hedge_mdp",
    "random_mdp",
    "random_policy",
]

_F = torch.float64


def random_mdp(
    batch: int,
    horizon: int,
    states: int,
    actions: int,
    *,
    transitions: str = "stochastic",
    rewards: str = "dense",
    generator: torch.Generator | None = None,
) -> TabularMDP:
    """Random processes: laws uniform on the simplex, rewards uniform on [0, 1].

    Args:
        batch: number of processes B.
        horizon: steps H.
        states: states a layer S.
        actions: actions A.
        transitions: ``"stochastic"``, or ``"deterministic"``: one next state a cell,
            drawn uniformly.
        rewards: ``"dense"``, or ``"terminal"``: only the last step pays.
        generator: source of randomness; its device is the processes' device.

    Raises:
        ValueError: a size below one, an unknown ``transitions`` or ``rewards``.
    """
    if min(batch, horizon, states, actions) < 1:
        raise ValueError(
            f"sizes must be at least 1, got batch={batch}, horizon={horizon}, "
            f"states={states}, actions={actions}"
        )
    if transitions not in ("stochastic", "deterministic"):
        raise ValueError(
            f"transitions={transitions!r}: allowed are 'stochastic', 'deterministic'"
        )
    if rewards not in ("dense", "terminal"):
        raise ValueError(f"rewards={rewards!r}: allowed are 'dense', 'terminal'")
    device = generator.device if generator is not None else None
    shape = (batch, horizon - 1, states, actions)
    if transitions == "stochastic":
        transition = _uniform_law((*shape, states), generator, device)
    else:
        target = torch.randint(states, shape, generator=generator, device=device)
        transition = torch.nn.functional.one_hot(target, states).to(_F)
    reward = torch.rand(
        (batch, horizon, states, actions), generator=generator, device=device, dtype=_F
    )
    if rewards == "terminal":
        reward[:, :-1] = 0
    return TabularMDP(
        _uniform_law((batch, states), generator, device), transition, reward
    )


def random_policy(
    mdp: TabularMDP,
    *,
    spread: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Softmax of Gaussian logits; ``spread`` is their standard deviation.

    Returns:
        (B, H, S, A); every action has positive probability.
    """
    logits = torch.randn(
        mdp.shape, generator=generator, device=mdp.reward.device, dtype=_F
    )
    return (spread * logits).softmax(-1)


def bandit_chain(horizon: int, p: float) -> tuple[TabularMDP, Tensor, Tensor]:
    r"""One state a layer, two actions: where the lemma is tight.

    The data policy plays action 0 with probability ``p``, the target always. Both
    suprema equal :math:`1 + H(1/p - 1)`, the trajectory ratio is :math:`p^{-H}`.

    Returns:
        The process (B = 1), the target policy and the data policy.
    """
    if horizon < 1 or not 0 < p <= 1:
        raise ValueError(f"horizon={horizon}, p={p}: need horizon >= 1 and 0 < p <= 1")
    mdp = TabularMDP(
        torch.ones(1, 1, dtype=_F),
        torch.ones(1, horizon - 1, 1, 2, 1, dtype=_F),
        torch.zeros(1, horizon, 1, 2, dtype=_F),
    )
    target = torch.tensor([1.0, 0.0], dtype=_F).expand(mdp.shape)
    data = torch.tensor([p, 1 - p], dtype=_F).expand(mdp.shape)
    return mdp, target, data


def hedge_mdp(
    horizon: int, safe_value: float | Tensor, good_prob: float | Tensor
) -> tuple[TabularMDP, Tensor]:
    r"""A safe way out that the summed Q-function prefers to certain success.

    The first action is *risky* (0) or *safe* (1). Safe pays ``safe_value`` at the end
    whatever follows. Risky pays 1 at the end if action 0 (*good*) is taken in each of
    the other ``H - 1`` steps; action 1 fails for ever. The reference policy plays good
    with probability ``good_prob``. Summed Q picks safe if and only if
    :math:`y > (1 - q^H) / (H (1 - q))` (``eq-supervision-hedge``).

    Args:
        horizon: H, at least 2.
        safe_value: y in [0, 1]; a tensor (B,) gives B processes.
        good_prob: q in (0, 1); a number or a tensor (B,).

    Returns:
        The processes (states: on the risky way, safe, failed) and the reference policy.
    """
    y = torch.as_tensor(safe_value, dtype=_F).reshape(-1)
    q = torch.as_tensor(good_prob, dtype=_F).reshape(-1)
    y, q = torch.broadcast_tensors(y, q)
    if horizon < 2 or not ((y >= 0) & (y <= 1) & (q > 0) & (q < 1)).all():
        raise ValueError(
            f"horizon={horizon}, safe_value from {y.min():g} to {y.max():g}, good_prob "
            f"from {q.min():g} to {q.max():g}: need horizon >= 2, safe_value in "
            "[0, 1], good_prob in (0, 1)"
        )
    batch = len(y)
    transition = torch.zeros(batch, horizon - 1, 3, 2, 3, dtype=_F)
    transition[:, :, 0, 0, 0] = 1
    transition[:, 0, 0, 1, 1] = 1
    transition[:, 1:, 0, 1, 2] = 1
    transition[:, :, 1, :, 1] = 1
    transition[:, :, 2, :, 2] = 1
    reward = torch.zeros(batch, horizon, 3, 2, dtype=_F)
    reward[:, -1, 0, 0] = 1
    reward[:, -1, 1] = y[:, None]
    start = torch.tensor([1.0, 0, 0], dtype=_F).expand(batch, 3)
    policy = torch.full((batch, horizon, 3, 2), 0.5, dtype=_F)
    policy[:, 1:, 0] = torch.stack([q, 1 - q], -1)[:, None]
    return TabularMDP(start, transition, reward), policy


def filler_mdp(
    steps: int = 4, budget: int = 10, *, wait: float = 0.15, slip: float = 0.12
) -> tuple[TabularMDP, Tensor]:
    r"""Write ``steps`` correct steps and stop, within a budget of tokens.

    Actions: 0 next step, 1 a wrong step, 2 END, 3 WAIT (does nothing). States: 0 to
    ``steps`` correct steps so far, then *wrong*, then *ended*. END after all correct
    steps pays 1. The reference policy waits with probability ``wait``, else goes on,
    wrongly with probability ``slip``.

    Returns:
        The process (B = 1) and the reference policy.
    """
    if steps < 1 or budget <= steps or not (0 <= wait < 1 and 0 <= slip < 1):
        raise ValueError(
            f"steps={steps}, budget={budget}, wait={wait}, slip={slip}: need "
            "1 <= steps < budget and probabilities below 1"
        )
    wrong, ended, num = steps + 1, steps + 2, steps + 3
    step = torch.zeros(num, 4, num, dtype=_F)
    policy = torch.zeros(num, 4, dtype=_F)
    for state in range(num):
        step[state, 0, state + 1 if state < steps else wrong] = 1
        step[state, 1, wrong] = 1
        step[state, 2, ended] = 1
        step[state, 3, state] = 1
        go = [1 - slip, slip, 0] if state < steps else [0, 0, 1]
        policy[state] = torch.tensor([(1 - wait) * x for x in go] + [wait], dtype=_F)
    step[ended] = 0
    step[ended, :, ended] = 1
    reward = torch.zeros(1, budget, num, 4, dtype=_F)
    reward[:, :, steps, 2] = 1
    start = torch.zeros(1, num, dtype=_F)
    start[0, 0] = 1
    return (
        TabularMDP(start, step.expand(1, budget - 1, num, 4, num), reward),
        policy.expand(1, budget, num, 4),
    )


def _uniform_law(
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    device: torch.device | None,
) -> Tensor:
    """Laws drawn uniformly from the simplex: normalised exponentials."""
    x = torch.empty(shape, device=device, dtype=_F).exponential_(generator=generator)
    return x / x.sum(-1, keepdim=True)
