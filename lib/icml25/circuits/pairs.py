"""Clean and corrupted prompts, and what is measured on their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptPairs:
    """Clean prompts, each with a corrupted twin of equal length.

    Attributes:
        clean: token ids, ``[N, T]`` int64.
        corrupted: token ids of the twins, ``[N, T]``.
        label: token id of the clean prompt's answer, ``[N]``; needed for accuracies and
            for the logit metrics.
        foil: token id of the corrupted prompt's answer, ``[N]``.
        attention_mask: ``[N, T]``, 1 for real tokens; ``None``: no padding. Padding is
            on the right, and the answer is read at the last real token.

    Raises:
        TypeError: not integer tensors.
        ValueError: clean and corrupted differ in shape, no prompt at all, padding on
            the left or inside, or a label for every prompt is missing.
    """

    clean: Tensor
    corrupted: Tensor
    label: Tensor | None = None
    foil: Tensor | None = None
    attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("clean", "corrupted"):
            ids = getattr(self, name)
            if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
                raise TypeError(f"{name} must be an integer tensor [N, T] of token ids")
        if self.clean.shape != self.corrupted.shape:
            raise ValueError(
                f"clean prompts are {tuple(self.clean.shape)}, corrupted ones "
                f"{tuple(self.corrupted.shape)}: a pair must have equal lengths"
            )
        if not self.clean.numel():
            raise ValueError(f"no prompts: clean has shape {tuple(self.clean.shape)}")
        for name in ("label", "foil"):
            ids = getattr(self, name)
            if ids is not None and ids.shape != self.clean.shape[:1]:
                raise ValueError(
                    f"{name} must be [{len(self)}], one token a prompt, "
                    f"got {tuple(ids.shape)}"
                )
        mask = self.attention_mask
        if mask is None:
            return
        if mask.shape != self.clean.shape:
            raise ValueError(
                f"attention_mask is {tuple(mask.shape)}, prompts {self.clean.shape}"
            )
        real = mask.bool()
        if not real[:, 0].all() or (real[:, 1:] & ~real[:, :-1]).any():
            raise ValueError(
                "attention_mask: real tokens come first and padding on the right"
            )

    def __len__(self) -> int:
        return self.clean.shape[0]

    @property
    def last(self) -> Tensor:
        """Position of the last real token, ``[N]``."""
        if self.attention_mask is None:
            return self.clean.new_full((len(self),), self.clean.shape[1] - 1)
        return self.attention_mask.long().sum(1) - 1

    def __getitem__(self, rows: slice | Tensor) -> PromptPairs:
        fields = (
            self.clean,
            self.corrupted,
            self.label,
            self.foil,
            self.attention_mask,
        )
        return PromptPairs(*(None if each is None else each[rows] for each in fields))

    def to(self, device: torch.device | str) -> PromptPairs:
        """The same pairs on another device."""
        fields = (
            self.clean,
            self.corrupted,
            self.label,
            self.foil,
            self.attention_mask,
        )
        return PromptPairs(
            *(None if each is None else each.to(device) for each in fields)
        )

    def repeat(self, times: int) -> PromptPairs:
        """All pairs, ``times`` times over."""
        return self[torch.arange(len(self), device=self.clean.device).repeat(times)]

    def batches(self, batch_size: int | None) -> Iterator[PromptPairs]:
        """Consecutive batches; the last may be smaller. ``None``: all at once."""
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give at least 1")
        step = batch_size or len(self)
        for start in range(0, len(self), step):
            yield self[start : start + step]


Metric = Callable[[Tensor, Tensor, PromptPairs], Tensor]


def kl_divergence(logits: Tensor, clean_logits: Tensor, pairs: PromptPairs) -> Tensor:
    """KL(clean || current) of the answer's distribution, summed over the vocabulary.

    Args:
        logits: ``[N, vocabulary]`` at the answer's position.
        clean_logits: the same of the unchanged model on the clean prompts.
        pairs: unused.

    Returns:
        ``[N]`` float32, nats.
    """
    del pairs
    log_prob = logits.float().log_softmax(-1)
    target = clean_logits.float().log_softmax(-1)
    return (target.exp() * (target - log_prob)).sum(-1)


def label_logit(logits: Tensor, clean_logits: Tensor, pairs: PromptPairs) -> Tensor:
    """Logit of the right answer, ``[N]``."""
    del clean_logits
    return logits.float().gather(1, _need(pairs, "label")).squeeze(1)


def logit_difference(
    logits: Tensor, clean_logits: Tensor, pairs: PromptPairs
) -> Tensor:
    """Logit of the right answer minus that of the corrupted prompt's, ``[N]``."""
    foil = logits.float().gather(1, _need(pairs, "foil")).squeeze(1)
    return label_logit(logits, clean_logits, pairs) - foil


def _need(pairs: PromptPairs, name: str) -> Tensor:
    if getattr(pairs, name) is None:
        raise ValueError(f"this metric needs the pairs' {name}")
    return getattr(pairs, name).unsqueeze(1)


METRICS: dict[str, Metric] = {
    "kl": kl_divergence,
    "logit": label_logit,
    "logit_diff": logit_difference,
}


def resolve_metric(metric: str | Metric) -> Metric:
    """A metric by name, or the function itself."""
    if callable(metric):
        return metric
    if metric not in METRICS:
        raise ValueError(
            f"metric={metric!r}: allowed are {sorted(METRICS)}, a function"
        )
    return METRICS[metric]
