"""Closed forms: memory in time and in bytes, and the limits of attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .griffin import GriffinConfig
from .transformer import TransformerConfig

__all__ = [
    "attention_ceiling",
    "griffin_bytes",
    "half_life",
    "transformer_bytes",
    "unseen_turns",
]


def half_life(a: Tensor | float, r: float, *, c: float = 8.0) -> Tensor:
    r"""Tokens after which half of an input is left.

    .. math:: t_{1/2} = \frac{\ln 2}{c\,r\,|\ln a|}

    Args:
        a: learnt decays in ``(0, 1)``, any shape.
        r: value of the recurrence gate, in ``(0, 1]``.
        c: the unit's constant.

    Returns:
        Tokens, the shape of ``a``.

    Raises:
        ValueError: ``a`` or ``r`` outside its range.
    """
    a = torch.as_tensor(a, dtype=torch.float64)
    if not ((a > 0) & (a < 1)).all():
        raise ValueError(f"a must lie in (0, 1), got {a.tolist()}")
    if not 0 < r <= 1:
        raise ValueError(f"r must lie in (0, 1], got {r}")
    return math.log(2) / (-c * r * a.log())


def griffin_bytes(config: GriffinConfig, *, itemsize: int = 4) -> int:
    """Bytes of one row's state, whatever the length.

    Args:
        config: the model's size.
        itemsize: bytes of an activation; the recurrence is in float32 regardless.

    Returns:
        Bytes, the counter of 8 included.
    """
    kinds = config.kinds()
    wide = max(itemsize, 4)
    recurrent = config.lru_width * (wide + (config.conv_width - 1) * itemsize)
    head_dim = config.width // config.num_heads
    local = 2 * (config.window - 1) * config.num_kv_heads * head_dim * itemsize
    return kinds.count("R") * recurrent + kinds.count("A") * local + 8


def transformer_bytes(
    config: TransformerConfig, num_tokens: int, *, itemsize: int = 4
) -> int:
    """Bytes of one row's state after ``num_tokens``, the counter of 8 included.

    Args:
        config: the model's size; with a window the length does not matter.
        num_tokens: tokens read.
        itemsize: bytes of an activation.
    """
    held = num_tokens if config.window is None else config.window - 1
    head_dim = config.width // config.num_heads
    return config.num_layers * 2 * config.num_kv_heads * head_dim * itemsize * held + 8


def attention_ceiling(bound: float, num_keys: int) -> float:
    r"""The largest weight softmax attention can give one of ``num_keys`` keys.

    If all scores lie in :math:`[-\beta, \beta]`, no weight exceeds
    :math:`1/(1+(S-1)e^{-2\beta})` (``eq-ssm-dilution``).

    Args:
        bound: :math:`\beta`, at least 0.
        num_keys: ``S``, at least 1.

    Raises:
        ValueError: outside these ranges.
    """
    if bound < 0 or num_keys < 1:
        raise ValueError(
            f"bound must be >= 0 and num_keys >= 1, got {bound} and {num_keys}"
        )
    return 1 / (1 + (num_keys - 1) * math.exp(-2 * bound))


def unseen_turns(
    num_pairs: int, trained: int, length: int, *, base: float = 10_000.0
) -> Tensor:
    r"""Which rotary pairs meet an angle at ``length`` that training never showed.

    Pair :math:`k` turns by :math:`\theta_k` a token. In training on rows of :math:`L`
    tokens its angles fill :math:`[0, (L-1)\theta_k]`, which is the whole circle only if
    the wavelength :math:`2\pi/\theta_k` is at most :math:`L-1`.

    Args:
        num_pairs: pairs that turn, in each head.
        trained: ``L``, tokens of a training row.
        length: tokens of the row at hand.
        base: of the frequencies.

    Returns:
        ``(num_pairs,)`` booleans.
    """
    theta = base ** (-torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    covered = (trained - 1) * theta
    return (covered < 2 * math.pi) & ((length - 1) * theta > covered)
