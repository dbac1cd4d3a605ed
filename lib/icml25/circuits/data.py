"""The tasks in the small model's numbers, as training and held-out pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from icml25.core import make_generator

from .encoding import NumberTokenizer, encode_items
from .pairs import PromptPairs
from .tasks import (
    OPERATORS,
    TASKS,
    Item,
    make_items,
    split_items,
)

LIMIT = 100  # the largest number the small model can write
#: Problems of each task at laptop size: count, and the largest operand drawn.
SMALL_TASKS = {
    "add_sub": (2000, 50),
    "mul_div": (400, 50),
    "sequence": (600, 60),
    "lcm": (300, 50),
    "function": (700, 50),
    "composition": (3000, 20),
}


def small_pairs(
    task: str, *, count: int | None = None, device: torch.device | str = "cpu"
) -> tuple[PromptPairs, PromptPairs]:
    """Training and held-out pairs of a task in the small model's numbers.

    The problems are the same at every call; only those whose numbers the small model
    can write are kept.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r}: allowed are {', '.join(TASKS)}")
    size, limit = SMALL_TASKS[task]
    items = make_items(
        task,
        count=count or size,
        limit=limit,
        short=True,
        accept=lambda item: min(item.numbers) >= 0 and max(item.numbers) <= LIMIT,
        generator=make_generator(0),
    )
    tokenizer = NumberTokenizer(LIMIT)
    fit, test = (encode_items(side, tokenizer)[0] for side in split_items(items))
    return fit.to(device), test.to(device)


def composition_pairs(
    device: torch.device | str = "cpu",
) -> dict[str, tuple[PromptPairs, PromptPairs]]:
    """Training and held-out pairs of the composed task and of its two steps."""
    count, limit = SMALL_TASKS["composition"]
    items = make_items(
        "composition",
        count=count,
        limit=limit,
        short=True,
        generator=make_generator(0),
    )
    tokenizer = NumberTokenizer(LIMIT)
    parts: dict[str, list[Item]] = {"composition": items, "inner": [], "outer": []}
    for item in items:
        x, y, z = item.operands
        words, twin = item.prompt.split(), item.corrupted.split()
        value = OPERATORS[words[1]](x, y)
        parts["inner"].append(
            Item(
                f"{x} {words[1]} {y} =",
                value,
                f"{x} {twin[1]} {y} =",
                OPERATORS[twin[1]](x, y),
                item.operands,
                (),
            )
        )
        parts["outer"].append(
            Item(
                f"{value} {words[3]} {z} =",
                OPERATORS[words[3]](value, z),
                f"{value} {twin[3]} {z} =",
                OPERATORS[twin[3]](value, z),
                item.operands,
                (),
            )
        )
    return {
        name: tuple(
            encode_items(side, tokenizer)[0].to(device) for side in split_items(each)
        )
        for name, each in parts.items()
    }


def mix(parts: list[PromptPairs]) -> PromptPairs:
    """Several sets of pairs as one, padded on the right."""
    longest = max(part.clean.shape[1] for part in parts)
    fields: dict[str, list[Tensor]] = {}
    for part in parts:
        gap = longest - part.clean.shape[1]
        mask = torch.ones_like(part.clean)
        for name, ids in (
            ("clean", part.clean),
            ("corrupted", part.corrupted),
            ("attention_mask", mask),
        ):
            tail = ids[:, -1:].expand(-1, gap) * (name != "attention_mask")
            fields.setdefault(name, []).append(torch.cat([ids, tail], 1))
        fields.setdefault("label", []).append(part.label)
    return PromptPairs(**{name: torch.cat(each) for name, each in fields.items()})
