"""Experiment C, first part: joins between windows, and the end of speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator

from .audio import MelConfig, log_mel
from .recordings import ReadingConfig, Recording, librispeech_mini, read_aloud
from .tokens import KMeansTokenizer, TokenizerConfig
from .windows import (
    Window,
    join_distance,
    split_windows,
    tokenize_long,
    window_bounds,
)

__all__ = [
    "ReadingTask",
    "WindowConfig",
    "measure_joins",
    "prepare_reading",
    "probe_end",
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


LAPTOP_WINDOWS = WindowConfig()
RECORDED_WINDOWS = WindowConfig(source="librispeech")


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
    tokenizer: TokenizerConfig | KMeansTokenizer,
    *,
    generator: torch.Generator,
) -> ReadingTask:
    """Readings, frames and a tokeniser.

    Args:
        source: ``"espeak"`` or ``"librispeech"``.
        reading: how much is synthesised.
        tokenizer: sizes, or a fitted tokeniser to use as it is.
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
    if isinstance(tokenizer, TokenizerConfig):
        tokenizer = KMeansTokenizer(tokenizer).fit(train_mels, generator=generator)
    return ReadingTask(grid, tokenizer, train, long, train_mels, long_mels)


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
        the curve on held-out clips for ``silence``, ``repeat`` and the ``control``
        without a tail, and ``num_clips``.
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
    Each clip is scored by a probe trained on the other folds of clips. ``control``
    fills the last window with the speech before it: what the probe tells there, it
    tells by how readings end, not by a tail.
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
    for tail in ("silence", "repeat", "control"):
        features = []
        for mel, count in zip(clips, counts, strict=True):
            end = len(mel) // unit * unit
            if tail == "control":  # with what was said before: full, nothing filled
                early = mel[end - window * unit : end - count * unit]
                last = torch.cat([mel[end - count * unit : end], early])
            else:
                start = end // unit - count
                bounds = [Window(start, start + window, start, start + count)]
                last = split_windows(mel[:end], bounds, tail=tail, unit=unit)[0]
            pair = torch.stack([last, mel[: window * unit]])
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
