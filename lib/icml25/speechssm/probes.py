"""Experiment C: joins between windows, the end of speech, voices, digits end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator

from .audio import MelConfig, griffin_lim, log_mel
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
from .recordings import ReadingConfig, Recording, librispeech_mini, read_aloud
from .tokens import KMeansTokenizer, TokenizerConfig
from .voices import SpeakerSpace, similarity_over_time
from .windows import decode_long, join_distance, tokenize_long, window_bounds

__all__ = [
    "ReadingTask",
    "VoiceConfig",
    "WindowConfig",
    "prepare_reading",
    "run_digits",
    "run_voices",
    "run_windows",
]


@dataclass(frozen=True)
class WindowConfig:
    """Joins and the end-of-speech probe."""

    source: str = "espeak"  # or "librispeech": recorded readers
    reading: ReadingConfig = ReadingConfig(num_train=150, num_long=8)
    tokenizer: TokenizerConfig = TokenizerConfig(
        vocab_size=200, context=1, num_cepstra=18
    )
    # (window, overlap) in tokens; an overlap of 0 puts windows side by side.
    splits: tuple[tuple[int, int], ...] = (
        (128, 0),
        (128, 8),
        (128, 32),
        (256, 0),
        (256, 8),
        (256, 32),
        (512, 0),
        (512, 68),
    )
    near: int = 1  # a token is at a join if at most this far from it
    probe_window: int = 200  # tokens, 8 s
    probe_real: tuple[int, int] = (60, 160)  # real tokens in the last window


@dataclass(frozen=True)
class VoiceConfig:
    """The prompted decoder and the voice over time."""

    source: str = "espeak"
    reading: ReadingConfig = ReadingConfig(num_train=100, num_long=6, long_s=45.0)
    tokenizer: TokenizerConfig = TokenizerConfig(
        vocab_size=200, context=0, num_cepstra=18
    )
    decoder: DecoderConfig = DecoderConfig()
    window: int = 256  # tokens of a decoding window
    overlap: int = 32
    span_s: float = 10.0  # a similarity is measured on so much speech
    through_sound: bool = False  # measure on decoded sound instead of decoded frames
    num_steps_gl: int = 24  # Griffin-Lim iterations


@dataclass(frozen=True)
class DigitsConfig:
    """Digits from tokens to sound and back."""

    corpus: CountingConfig = CountingConfig()
    recogniser: RecogniserConfig = RecogniserConfig()
    decoder: DecoderConfig = DecoderConfig()
    num_tokens: int = 250  # of each held-out recording: 10 s
    num_train: int = 32  # recordings of 512 tokens the decoder is trained on


LAPTOP_WINDOWS = WindowConfig()
RECORDED_WINDOWS = WindowConfig(source="librispeech")
LAPTOP_VOICES = VoiceConfig()
RECORDED_VOICES = VoiceConfig(
    source="librispeech", decoder=DecoderConfig(num_steps=400), through_sound=True
)
LAPTOP_DIGITS = DigitsConfig()
RECORDED_DIGITS = DigitsConfig(
    corpus=CountingConfig(source="fsdd"), num_tokens=1_000, num_train=64
)


@dataclass(frozen=True)
class ReadingTask:
    """Readings with their frames, and a tokeniser that normalises over its window."""

    grid: MelConfig
    tokenizer: KMeansTokenizer
    train: list[Recording]
    long: list[Recording]
    train_mels: list[Tensor] = field(repr=False)
    long_mels: list[Tensor] = field(repr=False)


def prepare_reading(
    source: str,
    reading: ReadingConfig,
    tokenizer: TokenizerConfig,
    *,
    generator: torch.Generator,
) -> ReadingTask:
    """Readings, frames and a tokeniser.

    Args:
        source: ``"espeak"`` or ``"librispeech"``.
        reading: how much is synthesised.
        tokenizer: sizes.
        generator: of everything drawn.

    Raises:
        ValueError: another source.
        DataError: the recordings are not at hand (``"librispeech"``).
    """
    if source == "espeak":
        train, long = read_aloud(reading, generator=generator)
    elif source == "librispeech":
        train, long = librispeech_mini()
    else:
        raise ValueError(f"source={source!r}: allowed are 'espeak' and 'librispeech'")
    grid = MelConfig()
    train_mels, long_mels = (
        [log_mel(r.audio, grid, sample_rate=r.sample_rate) for r in part]
        for part in (train, long)
    )
    model = KMeansTokenizer(tokenizer).fit(train_mels, generator=generator)
    return ReadingTask(grid, model, train, long, train_mels, long_mels)


def run_windows(
    config: WindowConfig = LAPTOP_WINDOWS,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """What windows do to tokens: at their joins, and in the last one.

    *Joins*: agreement of windowed tokens with those of the whole recording at once.
    *End of speech*: can a linear probe tell, from the histogram of its real tokens
    alone, a last window that was filled up from the first part of an ordinary window?

    Args:
        config: sizes.
        device: where tokens are computed.
        seed: of voices, texts, centres and splits.

    Returns:
        ``joins``: a dict for each split: ``window``, ``overlap``, ``overall`` and
        ``at_join`` agreement, ``num_at_join`` tokens counted. ``probe``: area under
        the curve on held-out clips for ``silence`` and ``repeat``, and ``num_clips``.
    """
    generator = make_generator(seed)
    task = prepare_reading(
        config.source, config.reading, config.tokenizer, generator=generator
    )
    return {
        "joins": measure_joins(task, config.splits, near=config.near, device=device),
        "probe": probe_end(
            task,
            window=config.probe_window,
            real=config.probe_real,
            generator=generator,
            device=device,
        ),
    }


def measure_joins(
    task: ReadingTask,
    splits: Sequence[tuple[int, int]],
    *,
    near: int = 1,
    device: torch.device | str = "cpu",
) -> list[dict[str, float]]:
    """Agreement with whole-recording tokens, overall and at the joins."""
    mels = [m.to(device) for m in task.long_mels]
    whole = [task.tokenizer.encode(m) for m in mels]
    rows = []
    for window, overlap in splits:
        same, at_join = [], []
        for mel, ids in zip(mels, whole, strict=True):
            bounds = window_bounds(len(ids), window=window, overlap=overlap)
            windowed = tokenize_long(
                mel, task.tokenizer, window=window, overlap=overlap
            )
            same.append((windowed == ids).cpu())
            at_join.append(join_distance(bounds) <= near)
        hit, edge = torch.cat(same), torch.cat(at_join)
        rows.append(
            {
                "window": window,
                "overlap": overlap,
                "overall": float(hit.float().mean()),
                "at_join": float(hit[edge].float().mean()),
                "num_at_join": int(edge.sum()),
            }
        )
    return rows


def probe_end(
    task: ReadingTask,
    *,
    window: int,
    real: tuple[int, int],
    num_folds: int = 5,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Area under the curve of a probe for filled-up windows, for each tail.

    For each clip of at least ``window + real[0]`` tokens: its last window, with
    between ``real[0]`` and ``real[1]`` real tokens, and its first window, which is
    full. Of both the probe sees the histogram of the same number of first tokens.
    Each clip is scored by a probe trained on the other folds of clips.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    unit, vocab = task.tokenizer.min_frames, task.tokenizer.vocab_size
    clips = [m for m in task.train_mels if len(m) // unit >= window + real[0]]
    if len(clips) < 8:
        raise ValueError(
            f"{len(clips)} clips of at least {window + real[0]} tokens: the probe "
            "needs 8; read for longer or take a shorter window"
        )
    counts = torch.randint(
        real[0], real[1] + 1, (len(clips),), generator=generator
    ).tolist()
    fold = torch.rand(len(clips), generator=generator).argsort() % num_folds
    result: dict[str, float] = {"num_clips": len(clips)}
    for tail in ("silence", "repeat"):
        features = []
        for mel, count in zip(clips, counts, strict=True):
            last = mel[len(mel) - len(mel) % unit - count * unit :]
            last = last[: count * unit]
            if tail == "silence":
                fill = torch.full_like(mel[: (window - count) * unit], _SILENT)
            else:  # from the beginning of the same recording
                fill = mel[: (window - count) * unit]
            pair = torch.stack([torch.cat([last, fill]), mel[: window * unit]])
            ids = task.tokenizer.encode(pair.to(device))[:, :count].cpu()  # (2, count)
            histogram = torch.nn.functional.one_hot(ids, vocab).float().mean(1)
            features.append(histogram)
        x = torch.stack(features)  # (clips, 2, K): filled up, ordinary
        y = torch.tensor([1, 0]).expand(len(clips), 2)
        score = torch.zeros(len(clips), 2)
        for k in range(num_folds):
            seen = fold != k
            probe = LogisticRegression(C=100.0, max_iter=500)
            probe.fit(x[seen].flatten(0, 1).numpy(), y[seen].flatten().numpy())
            scores = probe.decision_function(x[~seen].flatten(0, 1).numpy())
            score[~seen] = torch.from_numpy(scores).float().view(-1, 2)
        result[tail] = float(roc_auc_score(y.flatten().numpy(), score.flatten()))
    return result


_SILENT = -13.815510557964274  # log 1e-6: a frame of digital zeros


def run_voices(
    config: VoiceConfig = LAPTOP_VOICES,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Whether the voice of a 3-second prompt is kept over a long reading.

    Tokens of readings by voices that no training clip has are decoded with the prompt
    of their own voice, and without a prompt by an equal network that never had one.

    Args:
        config: sizes.
        device: where the decoder is trained and run.
        seed: of voices, texts, weights and batches.

    Returns:
        ``error``: mean absolute error of normalised frames ``with_prompt``,
        ``without_prompt`` and of the ``mean_frame``. ``similarity``: cosines to the
        prompt over time (mean over readings): ``real`` speech, ``own`` prompt, ``none``
        (no prompt); ``others``: mean cosine to the other voices' prompts of real
        speech and of the prompted decoding. ``swap``: [i][j] cosine of reading 0's
        tokens spoken with prompt i to the real voice j.
    """
    generator = make_generator(seed)
    task = prepare_reading(
        config.source, config.reading, config.tokenizer, generator=generator
    )
    return measure_voices(
        task,
        *train_decoders(task, config, generator=generator, device=device),
        config,
        generator=generator,
    )


def train_decoders(
    task: ReadingTask,
    config: VoiceConfig,
    *,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[PromptedMelDecoder, PromptedMelDecoder]:
    """Two equal networks on the training clips: with prompts, and without."""
    from dataclasses import replace

    ids = [task.tokenizer.encode(m) for m in task.train_mels]
    made = []
    for use_prompt in (True, False):
        decoder = PromptedMelDecoder(
            task.tokenizer.vocab_size,
            task.grid.num_mels,
            replace(config.decoder, use_prompt=use_prompt),
            frames_per_token=task.tokenizer.min_frames,
            generator=generator,
        ).to(device)
        made.append(
            decoder.fit(ids, task.train_mels, task.train_mels, generator=generator)
        )
    return made[0], made[1]


def measure_voices(
    task: ReadingTask,
    prompted: PromptedMelDecoder,
    plain: PromptedMelDecoder,
    config: VoiceConfig,
    *,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The measurements of ``run_voices`` on trained decoders."""
    space = SpeakerSpace([m for m in task.train_mels if len(m) >= 400])
    device = prompted.mel_mean.device
    size = config.decoder.prompt_frames
    long_ids = [
        tokenize_long(
            m, task.tokenizer, window=config.window, overlap=config.overlap
        ).to(device)
        for m in task.long_mels
    ]
    prompts = [prompt_vector(m[:size]).to(device) for m in task.long_mels]
    voices = torch.stack([space(m[:size]) for m in task.long_mels])

    def say(ids: Tensor, decoder: PromptedMelDecoder, prompt: Tensor) -> Tensor:
        with torch.inference_mode():
            mel = decode_long(
                ids,
                lambda x: decoder(x, prompt),
                vocab_size=decoder.vocab_size,
                window=config.window,
                overlap=config.overlap,
                frames_per_token=decoder.frames_per_token,
            )
        if not config.through_sound:
            return mel.cpu()
        audio = griffin_lim(
            mel, task.grid, num_steps=config.num_steps_gl, generator=generator
        )
        return log_mel(audio, task.grid, sample_rate=task.grid.sample_rate).cpu()

    span = int(config.span_s * task.grid.frame_rate)
    errors: dict[str, list[float]] = {"with_prompt": [], "without_prompt": []}
    mean_frame, curves, others = [], {"real": [], "own": [], "none": []}, {}
    for n, (mel, ids) in enumerate(zip(task.long_mels, long_ids, strict=True)):
        errors["with_prompt"].append(prompted.error(ids, mel.to(device), prompts[n]))
        errors["without_prompt"].append(plain.error(ids, mel.to(device), None))
        normal = (mel.to(device) - prompted.mel_mean) / prompted.mel_std
        mean_frame.append(float(normal.abs().mean()))
        spoken = {
            "real": mel[size:],
            "own": say(ids, prompted, prompts[n])[size:],
            "none": say(ids, plain, prompts[n])[size:],
        }
        for name, frames in spoken.items():
            curves[name].append(
                similarity_over_time(frames, voices[n], space, window=span)
            )
            rest = torch.cat([voices[:n], voices[n + 1 :]])
            others.setdefault(name, []).append(float((rest @ space(frames)).mean()))
    shortest = min(len(c) for c in curves["real"])
    excerpt = long_ids[0][: int(config.span_s * 25)]
    swap = [
        (voices @ space(say(excerpt, prompted, prompt))).tolist() for prompt in prompts
    ]
    return {
        "error": {
            **{name: _mean(values) for name, values in errors.items()},
            "mean_frame": _mean(mean_frame),
        },
        "similarity": {
            name: [_mean([row[t] for row in rows]) for t in range(shortest)]
            for name, rows in curves.items()
        },
        "others": {name: _mean(values) for name, values in others.items()},
        "span_s": config.span_s,
        "speakers": [r.speaker for r in task.long],
        "swap": swap,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
