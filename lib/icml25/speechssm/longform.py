"""LibriSpeech-Long's construction, and measures of long speech against time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icml25.core import make_generator

from .audio import MelConfig, check_audio, griffin_lim, log_mel
from .decoder import PromptedMelDecoder, prompt_vector
from .evaluators import load_evaluators
from .joins import ReadingTask, prepare_reading
from .persistence import RECORDED_VOICES, VoiceConfig, speaker_space, train_decoders
from .recordings import ReadingConfig, Recording
from .voices import SpeakerSpace
from .windows import decode_long, tokenize_long

__all__ = [
    "LongFormConfig",
    "LongItem",
    "group_segments",
    "librispeech_long",
    "measure_longform",
    "measure_over_time",
    "run_longform",
]


def group_segments(
    durations: Sequence[float], *, target: float = 240.0
) -> list[tuple[int, int]]:
    """Join consecutive segments into stretches of at most the target length.

    Segments are appended in order; if the next would exceed the target and something
    is already collected, a new stretch begins. A segment that is too long by itself
    becomes a stretch of its own; what is left at the end is a stretch too.

    Args:
        durations: of the segments of one chapter, in order, in any unit.
        target: the longest stretch wanted, same unit; 240 s in the paper.

    Returns:
        (first, last + 1) segment of each stretch. They cover all segments in order;
        no stretch of two or more segments exceeds the target; and no stretch could
        take the first segment of the next.

    Raises:
        ValueError: a duration or target that is not positive.

    Source:
        LibriSpeech-Long is described as made in the manner of LibriLight's cutting
        script; this is that rule.
    """
    if not target > 0 or not all(d > 0 for d in durations):
        raise ValueError(f"target={target}: target and durations must be positive")
    stretches, first, length = [], 0, 0.0
    for n, duration in enumerate(durations):
        if n > first and length + duration > target:
            stretches.append((first, n))
            first, length = n, 0.0
        length += duration
    if first < len(durations):
        stretches.append((first, len(durations)))
    return stretches


@dataclass(frozen=True)
class LongItem:
    """One item of the benchmark: consecutive utterances of a chapter."""

    name: str  # <speaker>_<chapter>_<chapter>_<index of four digits>
    speaker: str
    chapter: str
    files: tuple[Path, ...]
    duration_s: float
    text: str

    def audio(self) -> tuple[Tensor, int]:
        """The samples (N,) of all files one after the other, and their rate in Hz."""
        import soundfile

        parts = [soundfile.read(str(f), dtype="float32") for f in self.files]
        if len({rate for _, rate in parts}) > 1:
            raise ValueError(f"{self.name}: its files have different sample rates")
        rate = parts[0][1]
        return torch.cat([torch.from_numpy(samples) for samples, _ in parts]), rate


def librispeech_long(
    root: str | Path, split: str, *, target_s: float = 240.0
) -> list[LongItem]:
    """LibriSpeech-Long from LibriSpeech's own files.

    Args:
        root: the folder ``LibriSpeech``; below it ``<split>/<speaker>/<chapter>/`` with
            ``<speaker>-<chapter>-<number>.flac`` and a transcript file.
        split: ``"dev-clean"``, ``"test-other"``, ...
        target_s: longest item in seconds.

    Returns:
        The items, sorted by name. Nothing but headers and transcripts is read.

    Raises:
        FileNotFoundError: no such split, or no recordings in it.
    """
    import soundfile

    folder = Path(root) / split
    chapters = sorted({f.parent for f in folder.glob("*/*/*.flac")})
    if not chapters:
        raise FileNotFoundError(
            f"no LibriSpeech recordings under {folder}: expected "
            "<speaker>/<chapter>/<speaker>-<chapter>-0000.flac"
        )
    items = []
    for place in chapters:
        files = sorted(place.glob("*.flac"))
        speaker, chapter = place.parent.name, place.name
        durations = [soundfile.info(str(f)).duration for f in files]
        text = {}
        for transcript in place.glob("*.trans.txt"):
            for line in transcript.read_text(encoding="utf-8").splitlines():
                name, _, words = line.partition(" ")
                text[name] = words
        for index, (first, stop) in enumerate(
            group_segments(durations, target=target_s)
        ):
            members = files[first:stop]
            items.append(
                LongItem(
                    f"{speaker}_{chapter}_{chapter}_{index:04}",
                    speaker,
                    chapter,
                    tuple(members),
                    sum(durations[first:stop]),
                    " ".join(text.get(f.stem, "") for f in members).strip(),
                )
            )
    return sorted(items, key=lambda item: item.name)


def measure_over_time(
    continuation: Tensor,
    prompt: Tensor,
    *,
    sample_rate: int,
    judges: Mapping[str, Callable[..., Any]],
    window_s: float = 15.0,
) -> list[dict[str, float]]:
    """Each window of a continuation, judged by what is at hand.

    Args:
        continuation: (N,) samples that follow the prompt.
        prompt: (P,) samples.
        sample_rate: of both, 16 kHz.
        judges: any of ``voice`` (samples -> embedding), ``naturalness`` (samples ->
            score), ``transcribe`` (samples -> text), ``meaning`` (texts -> embeddings)
            and ``perplexity`` (text -> number). The last two need ``transcribe``.
        window_s: length of a window; a last one shorter than half is dropped.

    Returns:
        A dict a window: ``start_s`` and, as judges allow, ``speaker_similarity``
        (cosine of voices of prompt and window), ``naturalness``, ``coherence`` (cosine
        of the meanings of the prompt's and the window's transcripts), ``perplexity``
        and ``words_per_s``. NaN where a window was silent to the transcriber.

    Raises:
        ValueError: another sample rate, NaN, a continuation shorter than half a window.

    Source:
        The measures are named for the paper; coherence over length is our reading of
        its name, and the judges are small substitutes.
    """
    size = int(window_s * sample_rate)
    for audio in (continuation, prompt):
        check_audio(audio, sample_rate, expected_rate=16_000, min_samples=size // 2)
    starts = list(range(0, len(continuation), size))
    if len(starts) > 1 and len(continuation) - starts[-1] < size / 2:
        starts.pop()
    windows = [continuation[s : s + size] for s in starts]
    rows = [{"start_s": s / sample_rate} for s in starts]
    if voice := judges.get("voice"):
        own = voice(prompt)
        for row, window in zip(rows, windows, strict=True):
            value = F.cosine_similarity(voice(window), own, dim=0)
            row["speaker_similarity"] = float(value)
    if score := judges.get("naturalness"):
        for row, window in zip(rows, windows, strict=True):
            row["naturalness"] = score(window)
    if transcribe := judges.get("transcribe"):
        texts = [transcribe(window) for window in windows]
        for row, text, window in zip(rows, texts, windows, strict=True):
            row["words_per_s"] = len(text.split()) * sample_rate / len(window)
        if meaning := judges.get("meaning"):
            vectors = meaning([transcribe(prompt) or " ", *(t or " " for t in texts)])
            for row, text, vector in zip(rows, texts, vectors[1:], strict=True):
                row["coherence"] = float(vector @ vectors[0]) if text else float("nan")
        if perplexity := judges.get("perplexity"):
            for row, text in zip(rows, texts, strict=True):
                row["perplexity"] = perplexity(text) if text else float("nan")
    return rows


@dataclass(frozen=True)
class LongFormConfig:
    """The metric suite on readings at hand."""

    source: str = "espeak"  # or "librispeech": the recorded readings
    reading: ReadingConfig = ReadingConfig(num_train=100, num_long=4)
    voice: VoiceConfig = VoiceConfig()
    target_s: float = 60.0  # longest item; the benchmark's is 240
    prompt_s: float = 10.0  # as in the paper
    window_s: float = 15.0
    num_items: int = 4
    judges: tuple[str, ...] = ()  # optional evaluators; the built-in voice always is

    def __post_init__(self) -> None:
        if self.num_items < 2:
            raise ValueError(
                f"num_items={self.num_items}: at least two, each is the other's control"
            )


LAPTOP_LONGFORM = LongFormConfig()
RECORDED_LONGFORM = LongFormConfig(
    source="librispeech", voice=RECORDED_VOICES, judges=("voice", "naturalness")
)
TRANSCRIBED_LONGFORM = LongFormConfig(  # a transcriber is slow: two items
    source="librispeech",
    voice=RECORDED_VOICES,
    target_s=45.0,
    num_items=2,
    judges=("transcribe", "meaning", "perplexity"),
)


def _items(readings: Sequence[Recording], target_s: float) -> list[Tensor]:
    """The longest stretch of each reading, by the benchmark's rule."""
    chosen = []
    for reading in readings:
        ends = torch.tensor(reading.segments).cumsum(0).tolist()
        seconds = [n / reading.sample_rate for n in reading.segments]
        stretches = group_segments(seconds, target=target_s)
        pieces = [
            reading.audio[(ends[a - 1] if a else 0) : ends[b - 1]] for a, b in stretches
        ]
        chosen.append(max(pieces, key=len))
    return sorted(chosen, key=len, reverse=True)


def run_longform(
    config: LongFormConfig = LAPTOP_LONGFORM,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Build items from readings, and judge four continuations of each over time.

    ``true``: what the reader went on to say; ``resynthesis``: the same through tokens
    and the prompted decoder; ``other``: another reader's speech, a model that loses
    voice and topic; ``loop``: two seconds of the prompt again and again, a model that
    repeats itself.

    Args:
        config: sizes and judges.
        device: of the decoder.
        seed: of voices, texts and weights.

    Returns:
        ``items``: their durations; ``scores``: for each continuation the measures,
        averaged over items, a list over windows each; ``skipped``: messages of judges
        that are not installed.
    """
    generator = make_generator(seed)
    voice = config.voice
    task = prepare_reading(
        config.source, config.reading, voice.tokenizer, generator=generator
    )
    prompted, _ = train_decoders(task, voice, generator=generator, device=device)
    return measure_longform(
        task, prompted, config, space=speaker_space(task), generator=generator
    )


def measure_longform(
    task: ReadingTask,
    prompted: PromptedMelDecoder,
    config: LongFormConfig,
    *,
    space: SpeakerSpace,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The measurements of ``run_longform`` with readings and a decoder at hand."""
    judges, skipped = load_evaluators(config.judges)
    voice, grid = config.voice, task.grid
    if "voice" not in judges:
        judges["voice"] = lambda x: space(
            log_mel(x, grid, sample_rate=grid.sample_rate)
        )
    items = _items(task.long, config.target_s)[: config.num_items]
    rate = grid.sample_rate
    size = int(config.prompt_s * rate)
    collected: dict[str, list[list[dict[str, float]]]] = {}
    for n, audio in enumerate(items):
        prompt, true = audio[:size], audio[size:]
        continuations = {
            "true": true,
            "resynthesis": _resynthesise(
                audio, grid, task.tokenizer, prompted, voice, generator
            )[size:],
            "other": items[(n + 1) % len(items)][size:],
            "loop": prompt[-2 * rate :].repeat(len(true) // (2 * rate) + 1)[
                : len(true)
            ],
        }
        for name, sound in continuations.items():
            collected.setdefault(name, []).append(
                measure_over_time(
                    sound,
                    prompt,
                    sample_rate=rate,
                    judges=judges,
                    window_s=config.window_s,
                )
            )
    return {
        "items": [len(a) / rate for a in items],
        "scores": {name: _average(runs) for name, runs in collected.items()},
        "skipped": skipped,
    }


def _resynthesise(
    audio: Tensor,
    grid: MelConfig,
    tokenizer,
    decoder,
    config: VoiceConfig,
    generator: torch.Generator,
) -> Tensor:
    mel = log_mel(audio, grid, sample_rate=grid.sample_rate)
    ids = tokenize_long(mel, tokenizer, window=config.window, overlap=config.overlap)
    device = decoder.mel_mean.device
    prompt = prompt_vector(mel[: config.decoder.prompt_frames]).to(device)
    with torch.inference_mode():
        frames = decode_long(
            ids.to(device),
            lambda x: decoder(x, prompt),
            vocab_size=tokenizer.vocab_size,
            window=config.window,
            overlap=config.overlap,
            frames_per_token=tokenizer.min_frames,
        )
    sound = griffin_lim(
        frames.cpu(), grid, num_steps=config.num_steps_gl, generator=generator
    )
    return sound / sound.abs().max().clamp(min=1)


def _average(runs: list[list[dict[str, float]]]) -> dict[str, list[float]]:
    """Mean over items of each measure, for the windows that all items have."""
    count = min(len(run) for run in runs)
    names = runs[0][0].keys()
    table = torch.tensor(
        [[[row[name] for name in names] for row in run[:count]] for run in runs],
        dtype=torch.float64,
    ).nanmean(0)
    return {name: table[:, i].tolist() for i, name in enumerate(names)}
