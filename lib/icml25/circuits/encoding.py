"""Problems as token ids: a tokenizer of one token a number, and padded prompt pairs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from .pairs import PromptPairs
from .tasks import OPERATORS, Item


class NumberTokenizer:
    """One token a number from 0 to ``limit`` and one a symbol; blanks separate.

    Args:
        limit: largest number.
        symbols: the other words.
    """

    def __init__(
        self,
        limit: int = 100,
        symbols: Sequence[str] = (*OPERATORS, "=", ">", "lcm", "f"),
    ) -> None:
        self.limit = limit
        self.ids = {symbol: limit + 1 + i for i, symbol in enumerate(symbols)}
        self.vocab_size = limit + 1 + len(symbols)

    def __call__(self, text: str, add_special_tokens: bool = False) -> Any:
        """Token ids of one text, as ``.input_ids``.

        Raises:
            ValueError: a word that is neither a known symbol nor a number in range.
        """
        del add_special_tokens
        ids = []
        for word in text.split():
            number = int(word) if word.isdecimal() else -1
            if word not in self.ids and not 0 <= number <= self.limit:
                raise ValueError(
                    f"{word!r} is no token: numbers 0 to {self.limit}, {list(self.ids)}"
                )
            ids.append(self.ids.get(word, number))
        return SimpleNamespace(input_ids=ids)


def encode_items(
    items: Sequence[Item], tokenizer: Any, *, end: str = ""
) -> tuple[PromptPairs, list[Item]]:
    """Tokenise items; keep those whose answers are single tokens and lengths agree.

    Args:
        items: the problems.
        tokenizer: a :class:`NumberTokenizer` or a tokenizer of transformers.
        end: appended to every prompt (a newline, where the answer follows one).

    Returns:
        The pairs, padded on the right where lengths differ, and the items kept.

    Raises:
        ValueError: nothing was kept.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    rows, kept = [], []
    for item in items:
        clean, corrupted = ids(item.prompt + end), ids(item.corrupted + end)
        label = ids(str(item.answer))
        other = item.corrupted_answer
        foil = label if other is None else ids(str(other))
        if len(clean) == len(corrupted) and len(label) == len(foil) == 1:
            rows.append((clean, corrupted, label[0], foil[0]))
            kept.append(item)
    if not rows:
        raise ValueError(
            f"none of {len(items)} items has single-token answers and equal lengths"
        )
    longest = max(len(clean) for clean, *_ in rows)
    mask = torch.tensor(
        [[1] * len(clean) + [0] * (longest - len(clean)) for clean, *_ in rows]
    )
    padded = [
        torch.tensor([row[i] + row[i][-1:] * (longest - len(row[i])) for row in rows])
        for i in (0, 1)
    ]
    has_foil = all(item.corrupted_answer is not None for item in kept)
    return (
        PromptPairs(
            *padded,
            label=torch.tensor([row[2] for row in rows]),
            foil=torch.tensor([row[3] for row in rows]) if has_foil else None,
            attention_mask=None if mask.all() else mask,
        ),
        kept,
    )
