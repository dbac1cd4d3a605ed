"""Digits from tokens to sound and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from icml25.core import make_generator

from .audio import griffin_lim, log_mel
from .corpus import CountingConfig, CountingCorpus, counting_corpus
from .decoder import (
    DecoderConfig,
    PromptedMelDecoder,
    prompt_vector,
    train_decoder,
)
from .recogniser import (
    DigitRecogniser,
    RecogniserConfig,
    digit_error_rate,
    train_recogniser,
)

__all__ = [
    "LAPTOP_DIGITS",
    "DigitsConfig",
    "digit_decoder",
    "measure_digits",
    "run_digits",
]


@dataclass(frozen=True)
class DigitsConfig:
    """Digits from tokens to sound and back."""

    corpus: CountingConfig = CountingConfig()
    recogniser: RecogniserConfig = RecogniserConfig()
    decoder: DecoderConfig = DecoderConfig()
    num_tokens: int = 250  # of each held-out recording: 10 s
    num_train: int = 32  # recordings of 512 tokens the decoder is trained on


LAPTOP_DIGITS = DigitsConfig()


def digit_decoder(
    corpus: CountingCorpus,
    config: DecoderConfig,
    *,
    num_train: int = 64,
    generator: torch.Generator,
) -> PromptedMelDecoder:
    """A prompted decoder for the counting language, from its training takes."""
    lesson = corpus.sample(num_train, 512, generator=generator, counting=False)
    mels = [
        log_mel(corpus.waveform(lesson, n), corpus.grid, sample_rate=corpus.sample_rate)
        for n in range(num_train)
    ]
    return train_decoder(
        list(lesson.tokens),
        mels,
        config,
        vocab_size=corpus.vocab_size,
        generator=generator,
    )


def run_digits(
    config: DigitsConfig = LAPTOP_DIGITS,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Digit error rates along the way from tokens to sound and back to tokens.

    Args:
        config: sizes.
        device: of the judge and the decoder.
        seed: of takes, weights and batches.

    Returns:
        Error rates on held-out recordings: ``tokens`` (of the true sound), ``mel``
        (decoded and tokenised again) and ``sound`` (with Griffin-Lim in between), and
        ``agreement`` of the last tokens with the first.
    """
    generator = make_generator(seed)
    corpus = counting_corpus(config.corpus, generator=generator)
    judge = train_recogniser(corpus, config.recogniser, generator=generator).to(device)
    decoder = digit_decoder(
        corpus, config.decoder, num_train=config.num_train, generator=generator
    )
    return measure_digits(
        corpus,
        judge,
        decoder.to(device),
        num_tokens=config.num_tokens,
        generator=generator,
    )


def measure_digits(
    corpus: CountingCorpus,
    judge: DigitRecogniser,
    decoder: PromptedMelDecoder,
    *,
    num_tokens: int,
    generator: torch.Generator,
) -> dict[str, float]:
    """The measurements of ``run_digits`` with a judge and a decoder at hand."""
    device = decoder.mel_mean.device
    held_out, size = corpus.held_out, num_tokens
    said, ids = [], {"tokens": [], "mel": [], "sound": []}
    for n, speaker in enumerate(held_out.speaker.tolist()):
        stops = held_out.digits.stop[n]
        inside = (held_out.digits.value[n] >= 0) & (stops <= size)
        said.append(held_out.digits.value[n][inside].tolist())
        tokens = held_out.tokens[n, :size]
        audio = corpus.waveform(held_out, n)
        mel = log_mel(audio, corpus.grid, sample_rate=corpus.sample_rate)
        prompt = prompt_vector(mel[-decoder.config.prompt_frames :])
        with torch.inference_mode():
            made = decoder(tokens[None].to(device), prompt.to(device))[0]
        sound = griffin_lim(made, corpus.grid, generator=generator)
        ids["tokens"].append(tokens)
        ids["mel"].append(corpus.tokenizer.encode(made.cpu(), corpus.stats[speaker]))
        ids["sound"].append(corpus.encode(sound.cpu(), speaker))
    rates = {
        name: digit_error_rate(judge.transcribe(torch.stack(rows)), said)
        for name, rows in ids.items()
    }
    same = torch.stack(ids["sound"]) == torch.stack(ids["tokens"])
    return {**rates, "agreement": float(same.float().mean())}
