"""Read speech for the long-form experiments: synthesised by default, or recorded."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .espeak import SAMPLE_RATE, Utterance, synthesise

__all__ = ["ReadingConfig", "Recording", "librispeech_mini", "read_aloud"]

# Variants of eSpeak NG that sound like people; the unseen ones are never trained on.
# fmt: off
_SEEN = ("m1", "m2", "m3", "m5", "m6", "m7", "m8", "f1", "f2", "f3", "Alex", "Andy",
         "Annie", "Diogo", "Gene", "Jacky", "Lee", "Michael", "Mike", "adam",
         "belinda", "benjamin", "ed", "ian", "linda", "max", "quincy", "rob",
         "shelby", "steph")
_UNSEEN = ("m4", "f4", "f5", "Alicia", "Andrea", "Mario", "antonio", "john", "robert",
           "victor")
_ACCENTS = ("en-us", "en", "en-gb-scotland", "en-gb-x-rp", "en-029")
_PEOPLE = ("the captain", "an old sailor", "my neighbour", "the young doctor",
           "her brother", "a quiet stranger", "the teacher", "our guide",
           "the baker's daughter", "a tall soldier", "the gardener", "his aunt")
_DEEDS = ("carried", "painted", "forgot", "described", "found", "repaired", "sold",
          "watched", "borrowed", "measured", "opened", "lost", "followed", "drew")
_THINGS = ("a wooden box", "the broken clock", "seven letters", "the narrow bridge",
           "a green lantern", "the last page", "two silver cups", "an empty house",
           "the heavy door", "a map of the coast", "some warm bread", "the black horse")
_PLACES = ("near the river", "behind the church", "on the road to the sea",
           "in the garden", "under a grey sky", "at the edge of the forest",
           "beside the fire", "in a small village", "across the field")
_TIMES = ("before breakfast", "late in the evening", "every morning", "after the storm",
          "in the spring", "for many years", "when the bells rang", "without a word")
# fmt: on


@dataclass(frozen=True)
class Recording:
    """Samples of one utterance or of a longer stretch, and where they come from."""

    audio: Tensor  # (N,) in [-1, 1]
    sample_rate: int  # Hz
    speaker: str
    name: str
    text: str = ""
    segments: tuple[int, ...] = ()  # samples of each utterance, in order

    @property
    def duration_s(self) -> float:
        return len(self.audio) / self.sample_rate


@dataclass(frozen=True)
class ReadingConfig:
    """Synthetic readers and how much each reads."""

    num_train: int = 60  # clips of seen voices, each with an accent, pitch and tempo
    clip_s: float = 12.0  # at least so long
    num_long: int = 8  # continuous readings by unseen voices
    long_s: float = 60.0


def _sentence(generator: torch.Generator) -> str:
    def draw(words: tuple[str, ...]) -> str:
        return words[int(torch.randint(len(words), (), generator=generator))]

    form = int(torch.randint(3, (), generator=generator))
    head = f"{draw(_PEOPLE)} {draw(_DEEDS)} {draw(_THINGS)}"
    if form == 0:
        return f"{head} {draw(_PLACES)}."
    if form == 1:
        return f"{draw(_TIMES)}, {head} {draw(_PLACES)}."
    return f"{head}, and {draw(_PEOPLE)} {draw(_DEEDS)} {draw(_THINGS)}."


def read_aloud(
    config: ReadingConfig, *, generator: torch.Generator
) -> tuple[list[Recording], list[Recording]]:
    """Synthesised readers: short clips to train on, long readings to test on.

    Sentences are drawn from a small grammar. The voices of the long readings are
    variants that no training clip uses.

    Args:
        config: how much.
        generator: of voices and sentences.

    Returns:
        Training clips and long readings, both in whole utterances.

    Raises:
        RuntimeError: ``espeakng-loader`` is not installed.
    """
    plan = []  # (reading, voice, sentence, rate, pitch)
    total = config.num_train + config.num_long
    per_sentence_s = 2.5  # shorter than almost all of them: readings come out longer
    for n in range(total):
        is_long = n >= config.num_train
        pool = _UNSEEN if is_long else _SEEN
        variant = pool[(n - config.num_train if is_long else n) % len(pool)]
        accent = _ACCENTS[int(torch.randint(len(_ACCENTS), (), generator=generator))]
        pitch = int(torch.randint(35, 66, (), generator=generator))
        rate = int(torch.randint(150, 196, (), generator=generator))
        seconds = config.long_s if is_long else config.clip_s
        for _ in range(int(seconds / per_sentence_s) + 1):
            text = _sentence(generator)
            plan.append((n, Utterance(text, f"{accent}+{variant}", rate, pitch)))
    sounds = synthesise([utterance for _, utterance in plan])
    noise = 3e-4  # a room, so that pauses are not the floor of a logarithm
    readings = []
    for n in range(total):
        parts = [(u, s) for (m, u), s in zip(plan, sounds, strict=True) if m == n]
        limit = config.long_s if n >= config.num_train else config.clip_s
        kept, length = [], 0
        for utterance, sound in parts:
            if length >= limit * SAMPLE_RATE:
                break
            kept.append((utterance, sound))
            length += len(sound)
        audio = torch.cat([sound for _, sound in kept])
        audio = 0.08 * audio / audio.square().mean().sqrt()
        audio = audio + noise * torch.randn(audio.shape, generator=generator)
        voice = kept[0][0].voice
        readings.append(
            Recording(
                audio,
                SAMPLE_RATE,
                f"{voice}/{kept[0][0].pitch}",
                f"reading_{n:03}",
                " ".join(u.text for u, _ in kept),
                tuple(len(s) for _, s in kept),
            )
        )
    return readings[: config.num_train], readings[config.num_train :]


def librispeech_mini(
    *, num_train_files: int = 3
) -> tuple[list[Recording], list[Recording]]:
    """Recorded readers: LibriSpeech clips of 189 voices, eleven contiguous readings.

    Args:
        num_train_files: 1 to 3 of the files that hold the clips.

    Returns:
        One clip a voice, and the long readings with their utterances' lengths. They
        carry no text.

    Raises:
        DataError: the recordings are not at hand.
    """
    import soundfile

    from icml25.core import data

    with data.fetch("librispeech_mini", "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    by_file: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_file.setdefault(row["file"], []).append(row)
    train, long = [], []
    for name, group in by_file.items():
        is_train = name.startswith("train")
        if is_train and int(name[6]) >= num_train_files:
            continue
        path = data.fetch("librispeech_mini", name)
        samples, rate = soundfile.read(path, dtype="float32")
        sound = torch.from_numpy(samples)
        group.sort(key=lambda row: int(row["start_sample"]))
        pieces = list(_cut(sound, group))
        if is_train:
            train += [
                Recording(p, rate, row["speaker"], row["utterance"], "", (len(p),))
                for p, row in zip(pieces, group, strict=True)
            ]
        else:
            sizes = tuple(len(p) for p in pieces)
            stem = name.removesuffix(".ogg")
            long.append(
                Recording(torch.cat(pieces), rate, group[0]["speaker"], stem, "", sizes)
            )
    return train, long


def _cut(sound: Tensor, rows: list[dict[str, str]]) -> Iterable[Tensor]:
    for row in rows:
        start, count = int(row["start_sample"]), int(row["num_samples"])
        yield sound[start : start + count]
