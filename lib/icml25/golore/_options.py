"""What a group of :class:`GoLore` or :class:`GoLoreSGD` may say."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from .bases import SKETCHES

_CHOICES = {
    "projection": ("svd", "rsvd"),
    "sketch": tuple(SKETCHES),
    "side": ("auto", "left", "right"),
}


def check_options(group: dict[str, Any]) -> None:
    """Raises ValueError for an option, or a parameter, that a group cannot have."""
    for key in ("lr", "weight_decay"):
        value = group[key]
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise ValueError(f"{key} must be a finite number >= 0, got {value!r}")
    rank = group["rank"]
    if rank is not None:
        _check_whole("rank", rank, 1, "or None")
    for number, p in enumerate(group["params"]):
        names = group.get("param_names")
        name = f"parameter {names[number] if names else number!r} {tuple(p.shape)}"
        if not p.is_floating_point():  # a complex one would lose its imaginary part
            raise ValueError(f"{name} must be real floating point, got {p.dtype}")
        if rank is None:
            continue
        if p.dim() != 2:
            raise ValueError(
                f"a group with a rank holds matrices only, got {name}; put it in a "
                "group with rank=None (split_param_groups(model, include=...) makes "
                "both groups), or pass a 2-D view of it"
            )
        if rank > min(p.shape):
            raise ValueError(f"rank must be at most min(m, n), got {rank} for {name}")
    if rank is None:
        return
    _check_whole("update_interval", group["update_interval"], 1)
    if group["switch_step"] is not None:
        _check_whole("switch_step", group["switch_step"], 0, "or None")
    _check_whole("seed", group["seed"], 0)
    if not isinstance(group["scale"], Real) or not 0 < group["scale"] < math.inf:
        raise ValueError(f"scale must be a finite number > 0, got {group['scale']!r}")
    for key, known in _CHOICES.items():
        if group[key] not in known:
            raise ValueError(f"{key} must be one of {known}, got {group[key]!r}")


def _check_whole(key: str, value: Any, smallest: int, also: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        allowed = f"a whole number >= {smallest} {also}".rstrip()
        raise ValueError(f"{key} must be {allowed}, got {value!r}")
