"""Generation without an end: one token at a time from an explicit state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from .layers import LanguageModel, LMState

__all__ = ["generate", "prefill", "sample_next", "stream"]


@torch.no_grad()
def prefill(
    model: LanguageModel,
    prompt: Tensor,
    state: LMState | None = None,
    *,
    chunk: int = 512,
) -> tuple[Tensor, LMState]:
    """Read a prompt of any length, ``chunk`` tokens at a time.

    Args:
        model: what reads.
        prompt: ``(B, T)`` token ids.
        state: what was read before.
        chunk: tokens read at once; bounds the memory, not the answer.

    Returns:
        Logits ``(B, V)`` of the token after the prompt, and the state.

    Raises:
        ValueError: ``chunk`` below 1, and what the model refuses.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if prompt.dim() != 2 or 0 in prompt.shape:
        raise ValueError(f"prompt must be (B, T >= 1), got {tuple(prompt.shape)}")
    for piece in prompt.split(chunk, 1):
        features, state = model.features(piece, state)
    return model.head(features[:, -1]), state


def sample_next(
    logits: Tensor, *, uniform: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """One token a row by inverting the distribution function.

    Args:
        logits: ``(B, V)``.
        uniform: ``(B,)`` numbers in ``[0, 1)``; a row's token depends on its own number
            alone, whatever else is in the batch.
        temperature: divides the logits; 0 takes the largest, and needs no ``uniform``.

    Returns:
        ``(B,)`` token ids.

    Raises:
        ValueError: a negative temperature, or no ``uniform`` for a positive one.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if temperature == 0:
        return logits.argmax(-1)
    if uniform is None:
        raise ValueError("uniform must be given for a temperature above 0")
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    # The first token whose sum is above the number: never one of probability zero.
    token = torch.searchsorted(
        cumulative,
        uniform.to(cumulative).unsqueeze(-1) * cumulative[:, -1:],
        right=True,
    )
    return token.squeeze(-1).clamp_max(logits.shape[-1] - 1)


@torch.no_grad()
def stream(
    model: LanguageModel,
    prompt: Tensor,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    state: LMState | None = None,
    uniforms: Tensor | None = None,
) -> Iterator[tuple[Tensor, LMState]]:
    """Speak on after a prompt, for ever, a token at a time.

    Args:
        model: what speaks.
        prompt: ``(B, T)`` tokens to read first.
        temperature: see :func:`sample_next`.
        generator: source of the numbers, on the prompt's device.
        state: what the model read before the prompt.
        uniforms: ``(B, n)`` numbers to use in the generator's place; ``n`` tokens then.

    Yields:
        The next tokens ``(B,)`` and the state from which they were drawn. The state is
        the only memory: keep it to go on later, with the last token as the prompt.

    Notes:
        There is no end-of-speech token: the paper trains none, so that a model never
        learns to stop at the length of its training clips.
    """
    logits, state = prefill(model, prompt, state)
    step = 0
    while uniforms is None or step < uniforms.shape[1]:
        if uniforms is not None:
            uniform = uniforms[:, step]
        elif temperature == 0:
            uniform = None
        else:
            uniform = torch.rand(len(logits), generator=generator, device=logits.device)
        token = sample_next(logits, uniform=uniform, temperature=temperature)
        yield token, state
        features, state = model.features(token.unsqueeze(1), state)
        logits = model.head(features[:, -1])
        step += 1


def generate(
    model: LanguageModel,
    prompt: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    state: LMState | None = None,
    uniforms: Tensor | None = None,
) -> tuple[Tensor, LMState]:
    """Continue a batch of prompts by a number of tokens; see :func:`stream`.

    Args:
        model: what speaks.
        prompt: ``(B, T)`` tokens.
        num_tokens: how many to add.
        temperature: see :func:`sample_next`.
        generator: source of the numbers.
        state: what the model read before the prompt.
        uniforms: ``(B, num_tokens)`` numbers in the generator's place.

    Returns:
        ``(B, num_tokens)`` token ids, and the state *before the last of them is read*:
        ``generate(model, tokens[:, -1:], n, state=state)`` goes on.

    Raises:
        ValueError: ``num_tokens`` below 1, or ``uniforms`` of another shape.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    if uniforms is not None and uniforms.shape != (len(prompt), num_tokens):
        raise ValueError(
            f"uniforms must be {(len(prompt), num_tokens)}, got {tuple(uniforms.shape)}"
        )
    spoken = stream(
        model,
        prompt,
        temperature=temperature,
        generator=generator,
        state=state,
        uniforms=uniforms,
    )
    tokens = []
    for token, latest in islice(spoken, num_tokens):
        tokens.append(token)
        state = latest  # only the newest is kept
    return torch.stack(tokens, 1), state
