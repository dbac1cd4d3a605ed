"""Training a token language model, and its likelihood against time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from icml25.core import progress

from .layers import LanguageModel, LMState

__all__ = ["Recipe", "nll_by_token", "nll_in_ranges", "train_lm"]


@dataclass(frozen=True)
class Recipe:
    """Optimisation; the same for every model of a comparison."""

    num_steps: int = 250
    batch_size: int = 16  # recordings a step
    seq_len: int = 128  # tokens of a recording: 5.1 s
    lr: float = 6e-3
    warmup: int = 20  # steps; then a cosine to a twentieth
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    clip: float = 1.0  # gradient norm


def train_lm(
    model: LanguageModel,
    batch: Callable[[int], Tensor],
    recipe: Recipe = Recipe(),
    *,
    desc: str = "training",
) -> list[float]:
    """Train by next-token prediction, with no end-of-speech token.

    Args:
        model: trained in place.
        batch: step number -> ``(B, T + 1)`` tokens, whole documents from their start.
        recipe: optimisation.
        desc: label of the progress bar.

    Returns:
        The loss of every step, nats a token.

    Raises:
        ValueError: fewer than one step, or tokens too short to predict anything.
    """
    if recipe.num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {recipe.num_steps}")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        recipe.lr,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, recipe)
    )
    where = model.embed.weight.device
    model.train()
    losses = []
    for step in progress(range(recipe.num_steps), desc):
        tokens = batch(step).to(where)
        if tokens.shape[1] < 2:
            raise ValueError(f"tokens must be (B, 2 or more), got {tokens.shape}")
        logits, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    model.eval()
    return torch.stack(losses).tolist()  # waits for the device, once


def warmup_cosine(step: int, recipe: Recipe) -> float:
    """Factor on the step size."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.num_steps - recipe.warmup)
    return 0.525 + 0.475 * math.cos(math.pi * min(done, 1.0))


@torch.no_grad()
def nll_by_token(model: LanguageModel, tokens: Tensor, *, chunk: int = 256) -> Tensor:
    """Negative log likelihood of every token after the first, read as one stream.

    Args:
        model: what judges.
        tokens: ``(B, T)``, far longer than anything the model was trained on.
        chunk: tokens read at once.

    Returns:
        ``(B, T - 1)``, nats.

    Raises:
        ValueError: fewer than two tokens.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens must be (B, T >= 2), got {tuple(tokens.shape)}")
    state: LMState | None = None
    found = []
    for begin in range(0, tokens.shape[1] - 1, chunk):
        piece = tokens[:, begin : begin + chunk + 1]
        logits, state = model(piece[:, :-1], state)
        found.append(
            F.cross_entropy(logits.transpose(1, 2), piece[:, 1:], reduction="none")
        )
    return torch.cat(found, 1)


def nll_in_ranges(nll: Tensor, edges: tuple[int, ...]) -> list[float]:
    """Mean over the rows and over each range of positions between two edges.

    Raises:
        ValueError: edges that do not rise or do not fit.
    """
    rising = all(a < b for a, b in zip(edges, edges[1:], strict=False))
    if len(edges) < 2 or not rising or edges[-1] > nll.shape[1] + 1:
        raise ValueError(f"edges must rise to at most {nll.shape[1] + 1}, got {edges}")
    return [nll[:, a:b].mean().item() for a, b in zip(edges, edges[1:], strict=False)]
