"""The preference-conditioned network, how it is trained, and what it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from icml25.pcrl.envs import TabularEnv
from icml25.pcrl.rules import RULES

__all__ = ["MetaConfig", "MetaPolicy", "policy_table", "sample_preferences"]

_NO_RATIOS = ("ls", "mgda", "sdmgrad", "cagrad")  # rules that never look at values
_LEAST_SHARE = 0.02  # least entry of a training preference (sum one): it is divided by


class MetaPolicy(nn.Module):
    r"""One network for all preferences: :math:`(s, p) \mapsto` logits or values.

    The first layer is split into a part for the state and a part for the preference,
    so that ``K`` preferences and ``S`` states cost ``K + S`` rows there, not ``K * S``.

    Args:
        num_features: size ``F`` of the state's code.
        num_objectives: :math:`m`.
        num_outputs: actions for a policy, ``m`` for a vector critic.
        hidden: width of the hidden layers.
        depth: number of hidden layers.
        generator: draws the initial weights; they live on its device (the CPU without
            one).

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(
        self,
        num_features: int,
        num_objectives: int,
        num_outputs: int,
        *,
        hidden: int = 128,
        depth: int = 2,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        sizes = (num_features, num_objectives, num_outputs, hidden, depth)
        if min(sizes) < 1:
            raise ValueError(f"sizes {sizes} must be positive")
        self.num_objectives = num_objectives
        # Weights come from the generator below; skip_init leaves the global one alone.
        device = "cpu" if generator is None else generator.device
        make = partial(nn.utils.skip_init, nn.Linear, device=device)
        self.on_state = make(num_features, hidden)
        self.on_preference = make(num_objectives, hidden, bias=False)
        layers: list[nn.Module] = [nn.ReLU()]
        for _ in range(depth - 1):
            layers += [make(hidden, hidden), nn.ReLU()]
        self.head = nn.Sequential(*layers, make(hidden, num_outputs))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    bound = parameter.shape[1] ** -0.5
                    parameter.uniform_(-bound, bound, generator=generator)
                else:
                    parameter.zero_()

    def forward(self, features: Tensor, preference: Tensor) -> Tensor:
        """``(..., F)`` and ``(..., m)``, broadcast against each other, to outputs.

        Raises:
            ValueError: features or preference have another size than the network.
        """
        if features.shape[-1] != self.on_state.in_features:
            raise ValueError(
                f"features have size {features.shape[-1]}, the network takes "
                f"{self.on_state.in_features}"
            )
        if preference.shape[-1] != self.num_objectives:
            raise ValueError(
                f"preference has {preference.shape[-1]} objectives, the network "
                f"{self.num_objectives}"
            )
        unit = nn.functional.normalize(preference, dim=-1)
        return self.head(self.on_state(features) + self.on_preference(unit))


@dataclass(frozen=True)
class MetaConfig:
    """How a meta-policy is trained (defaults: laptop, exact gradients).

    Attributes:
        rule: key of ``RULES``.
        lam: the pull's strength, lambda.
        iterations: updates (exact) or rollouts (PPO).
        num_preferences: preferences drawn per update, K.
        num_episodes: episodes per preference and rollout (PPO only), N.
        epochs: passes over a rollout (PPO only).
        clip: PPO's ratio window, epsilon.
        lr: Adam's step, decayed linearly to a tenth.
        hidden: width of the two hidden layers.
        entropy: coefficient of the entropy bonus at the start and at the end; it
            falls geometrically.
    """

    rule: str = "preco"
    lam: float = 5.0
    iterations: int = 600
    num_preferences: int = 32
    num_episodes: int = 32
    epochs: int = 3
    clip: float = 0.2
    lr: float = 2e-3
    hidden: int = 128
    entropy: tuple[float, float] = (3.0, 0.05)

    def __post_init__(self) -> None:
        for name in ("iterations", "num_preferences", "num_episodes", "epochs", "lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: give a number > 0")
        if not min(self.entropy) >= 0:
            raise ValueError(f"entropy={self.entropy!r}: give two numbers >= 0")


def policy_table(env: TabularEnv, policy: MetaPolicy, preference: Tensor) -> Tensor:
    """``(K, S, A)`` action probabilities of a meta-policy in every state.

    Args:
        env: the environment.
        policy: the network.
        preference: ``(K, m)``, positive.
    """
    _check(env, "ls", preference)
    return policy(env.features, preference[:, None].to(env.features)).softmax(-1)


def sample_preferences(
    num: int, num_objectives: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """``(num, m)`` training preferences ``|N(0, I)|``, sum one, none below 0.02."""
    device = "cpu" if generator is None else generator.device
    draw = torch.randn(num, num_objectives, generator=generator, device=device).abs()
    share = (draw / draw.sum(-1, keepdim=True)).clamp_min(_LEAST_SHARE)
    return share / share.sum(-1, keepdim=True)


def _check(
    env: TabularEnv, rule: str, preference: Tensor | None, lam: float = 0.0
) -> None:
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: allowed are {', '.join(RULES)}")
    if not lam >= 0:
        raise ValueError(f"lam={lam!r}: give a number >= 0")
    # Training clamps the odd negative value; here every value would be clamped.
    hopeless = (env.reward.flatten(0, -2).amax(0) <= 0) & (env.offset <= 0)
    if rule not in _NO_RATIOS and hopeless.any():
        where = hopeless.nonzero().flatten().tolist()
        raise ValueError(
            f"{env.name}: objectives {where} are never positive, but rule={rule!r} "
            "divides by a preference and compares ratios; shift them with with_utility"
        )
    if preference is None:
        return
    if not preference.is_floating_point():
        raise ValueError(
            f"preference has dtype {preference.dtype}; give floating-point numbers"
        )
    if preference.ndim != 2 or preference.shape[1] != env.num_objectives:
        raise ValueError(
            f"preference has shape {tuple(preference.shape)}; "
            f"{env.name} needs (K, {env.num_objectives})"
        )
    if not ((preference > 0) & preference.isfinite()).all():
        raise ValueError(
            f"preference holds {preference.min():g}; every entry must be positive and "
            "finite"
        )
