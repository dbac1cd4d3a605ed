"""The counting language, spoken: one voice counts upwards, modulo ten, for ever."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .audio import TELEPHONE, MelConfig, griffin_lim, log_mel
from .espeak import Utterance, synthesise
from .tokens import KMeansTokenizer, TokenizerConfig, speaker_stats

__all__ = [
    "Counters",
    "CountingConfig",
    "CountingCorpus",
    "DigitSpans",
    "counting_corpus",
]

VOICES = ("en-us+m3", "en+f4", "en-gb-scotland+m7", "en-us+f1")
WORDS = ("zero", "one", "two", "three", "four")
WORDS += ("five", "six", "seven", "eight", "nine")  # WORDS[d] says d


@dataclass(frozen=True)
class CountingConfig:
    """The counting language and how it is tokenised."""

    source: str = "espeak"  # or "fsdd": recorded digits of four speakers, 8 kHz
    voices: tuple[str, ...] = VOICES  # of eSpeak NG; one voice speaks a recording
    num_takes: int = 24  # of each digit by each voice (espeak)
    num_test_takes: int = 4  # of them, kept for held-out recordings
    max_pause: int = 2  # extra silent tokens after a digit: 0 .. max_pause
    num_clips: int = 512  # training recordings in `.tokens`
    clip_tokens: int = 128  # their length: 5.1 s
    num_long: int = 4  # held-out recordings in `.held_out`, voice by voice
    long_tokens: int = 2_048  # their length: 82 s
    tokenizer: TokenizerConfig = TokenizerConfig()

    def __post_init__(self) -> None:
        if self.source not in ("espeak", "fsdd"):
            raise ValueError(f"source={self.source!r}: allowed are 'espeak' and 'fsdd'")
        if not self.voices:
            raise ValueError("voices is empty: give at least one")
        if not 0 < self.num_test_takes < self.num_takes:
            raise ValueError(
                f"num_test_takes={self.num_test_takes}: allowed is 1 to "
                f"{self.num_takes - 1}, one fewer than num_takes"
            )
        if min(self.num_clips, self.clip_tokens, self.num_long, self.long_tokens) < 1:
            raise ValueError("numbers and lengths of recordings must be at least 1")
        if self.max_pause < 0:
            raise ValueError(f"max_pause={self.max_pause}: must not be negative")


@dataclass(frozen=True)
class DigitSpans:
    """Which digit is spoken where; rows are padded with digit -1.

    ``value``, ``start``, ``stop``: (N, D) int64; spans are [start, stop) in tokens,
    and the last of a row may run past the end of the recording.
    """

    value: Tensor
    start: Tensor
    stop: Tensor

    def row(self, n: int) -> list[int]:
        """The digits of recording ``n`` that end inside it."""
        return [d for d in self.value[n].tolist() if d >= 0]


@dataclass(frozen=True)
class Counters:
    """Recordings in the counting language.

    ``tokens``: (N, T) int64; ``digits``: what is said where; ``speaker``: (N,);
    ``take``, ``pause``: (N, D) which take is used and how many silent tokens follow.
    """

    tokens: Tensor
    digits: DigitSpans
    speaker: Tensor
    take: Tensor
    pause: Tensor


def _normalise_take(audio: Tensor, grid: MelConfig, frames_per_token: int) -> Tensor:
    """Trim silence, set the level, pad to whole tokens with silent borders."""
    peak = audio.abs().max()
    loud = (audio.abs() > 0.02 * peak).nonzero().flatten()
    if len(loud) == 0:
        raise ValueError("a take is silent: there is no digit in it")
    audio = audio[loud[0] : loud[-1] + 1]
    audio = 0.08 * audio / audio.square().mean().sqrt()
    # The border is wider than half an analysis window: no frame sees two digits.
    border = math.ceil(0.8 * grid.win_length)
    unit = grid.hop_length * frames_per_token
    total = math.ceil((len(audio) + 2 * border) / unit) * unit
    padded = audio.new_zeros(total)
    padded[border : border + len(audio)] = audio
    return padded


def _espeak_takes(config: CountingConfig, generator: torch.Generator):
    """(take audio, digit, speaker, is held out), with tempo and pitch drawn anew."""
    shape = (len(config.voices), 10, config.num_takes)
    rate = torch.randint(150, 196, shape, generator=generator)
    pitch = torch.randint(38, 63, shape, generator=generator)
    jobs, labels = [], []
    for s, voice in enumerate(config.voices):
        for d, word in enumerate(WORDS):
            for t in range(config.num_takes):
                at = (s, d, t)
                jobs.append(Utterance(word, voice, int(rate[at]), int(pitch[at])))
                labels.append((d, s, t < config.num_test_takes))
    return [
        (audio, *label) for audio, label in zip(synthesise(jobs), labels, strict=True)
    ]


def _fsdd_takes():
    import csv

    import soundfile

    from icml25.core import data

    with data.fetch("fsdd_mini", "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    files = sorted({row["file"] for row in rows})
    sound = {}
    for name in files:
        samples, rate = soundfile.read(data.fetch("fsdd_mini", name), dtype="float32")
        if rate != TELEPHONE.sample_rate:
            raise ValueError(f"{name} has {rate} Hz, not {TELEPHONE.sample_rate}")
        sound[name] = torch.from_numpy(samples)
    takes = []
    for row in rows:
        start, count = int(row["start_sample"]), int(row["num_samples"])
        audio = sound[row["file"]][start : start + count]
        speaker, held_out = files.index(row["file"]), row["split"] == "test"
        takes.append((audio, int(row["digit"]), speaker, held_out))
    return takes, tuple(f.removesuffix(".flac") for f in files)


class CountingCorpus:
    """Takes of spoken digits, their tokens, and recordings put together from them.

    A recording is one voice counting upwards from a random digit; each digit is a
    random take, followed by 0 to ``max_pause`` silent tokens. Every take fills whole
    tokens and has silent borders, so tokens of a recording are the tokens of its
    takes, side by side (but for the rare token at a border).

    Attributes:
        train: ``num_clips`` recordings of ``clip_tokens`` from the training takes.
        held_out: ``num_long`` recordings of ``long_tokens`` from the held-out takes,
            speakers in turn.
        tokens, digits: those of ``train``.
        tokenizer: fitted on the training takes.
        grid: the mel grid; ``sample_rate`` in Hz.
        stats: one ``SpeakerStats`` a speaker; ``speakers``: their names.
        take_audio: the takes' samples, ``take_digit``, ``take_speaker``, ``take_test``.
    """

    def __init__(
        self,
        config: CountingConfig,
        *,
        generator: torch.Generator,
        tokenizer: KMeansTokenizer | None = None,
    ) -> None:
        if tokenizer is not None and tokenizer.config != config.tokenizer:
            raise ValueError(
                f"tokenizer has {tokenizer.config}, the corpus asks for "
                f"{config.tokenizer}"
            )
        self.config = config
        if config.source == "espeak":
            self.grid, self.speakers = MelConfig(), config.voices
            takes = _espeak_takes(config, generator)
        else:
            self.grid = TELEPHONE
            takes, self.speakers = _fsdd_takes()
        frames = config.tokenizer.frames_per_token
        audio = [_normalise_take(take[0], self.grid, frames) for take in takes]
        self.take_digit = torch.tensor([take[1] for take in takes])
        self.take_speaker = torch.tensor([take[2] for take in takes])
        self.take_test = torch.tensor([take[3] for take in takes])
        unit = self.grid.hop_length * frames
        lengths = torch.tensor([len(a) for a in audio])
        everything = torch.cat([*audio, audio[0].new_zeros(4 * unit)])
        # A little noise, so that silence is a sound and not the floor of a logarithm.
        noise = torch.randn(everything.shape, generator=generator)
        everything = everything + 1e-4 * noise
        self.take_audio = list(everything[: -4 * unit].split(lengths.tolist()))
        self._silence_audio = everything[-4 * unit :]
        mel = log_mel(everything, self.grid, sample_rate=self.sample_rate)
        *mels, silence = mel.split([*(lengths // self.grid.hop_length), 4 * frames])
        self.stats = [
            speaker_stats(
                torch.cat([mels[i] for i in self._takes(s, test=False).tolist()])
            )
            for s in range(len(self.speakers))
        ]
        train = (~self.take_test).nonzero().flatten().tolist()
        if tokenizer is None:
            tokenizer = KMeansTokenizer(config.tokenizer).fit(
                [mels[i] for i in train],
                [self.stats[self.take_speaker[i]] for i in train],
                generator=generator,
            )
        self.tokenizer = tokenizer
        ids = [
            self.tokenizer.encode(m, self.stats[s])
            for m, s in zip(mels, self.take_speaker.tolist(), strict=True)
        ]
        self.take_tokens = ids
        quiet = [self.tokenizer.encode(silence, s).mode().values for s in self.stats]
        self.silence = torch.stack(quiet)  # (speakers,)
        self._length = torch.tensor([len(i) for i in ids])
        self._start = self._length.cumsum(0) - self._length
        self._flat = torch.cat(ids)
        self.train = self.sample(
            config.num_clips, config.clip_tokens, generator=generator
        )
        self.held_out = self.sample(
            config.num_long,
            config.long_tokens,
            generator=generator,
            test=True,
            speaker=torch.arange(config.num_long) % len(self.speakers),
        )

    @property
    def sample_rate(self) -> int:
        return self.grid.sample_rate

    @property
    def vocab_size(self) -> int:
        return self.config.tokenizer.vocab_size

    @property
    def tokens(self) -> Tensor:
        return self.train.tokens

    @property
    def digits(self) -> DigitSpans:
        return self.train.digits

    def _takes(self, speaker: int, *, test: bool) -> Tensor:
        here = (self.take_speaker == speaker) & (self.take_test == test)
        return here.nonzero().flatten()

    def sample(
        self,
        num: int,
        num_tokens: int,
        *,
        generator: torch.Generator,
        test: bool = False,
        counting: bool = True,
        speaker: Tensor | None = None,
    ) -> Counters:
        """Draw recordings.

        Args:
            num: how many.
            num_tokens: length of each, in tokens.
            generator: of speakers, first digits, takes and pauses.
            test: from the held-out takes instead of the training takes.
            counting: False draws every digit at random (what the recogniser is
                trained on, so that it cannot know the counting rule).
            speaker: (num,) who speaks each; None draws.

        Raises:
            ValueError: a number below 1, a speaker that does not exist.
        """
        if num < 1 or num_tokens < 1:
            raise ValueError(f"num={num}, num_tokens={num_tokens}: need at least 1")
        draw = {"generator": generator}
        if speaker is None:
            speaker = torch.randint(len(self.speakers), (num,), **draw)
        if speaker.shape != (num,) or not (
            int(speaker.min()) >= 0 and int(speaker.max()) < len(self.speakers)
        ):
            raise ValueError(
                f"speaker={speaker.tolist()}: give {num} numbers of 0.."
                f"{len(self.speakers) - 1}"
            )
        # Enough digits to fill the time if all are the shortest.
        count = num_tokens // int(self._length.min()) + 1
        if counting:
            first = torch.randint(10, (num, 1), **draw)
            value = (first + torch.arange(count)) % 10
        else:
            value = torch.randint(10, (num, count), **draw)
        pools = self._pools(test)  # (speakers, 10, takes of each)
        pick = torch.randint(pools.shape[-1], (num, count), **draw)
        take = pools[speaker[:, None], value, pick]
        pause = torch.randint(self.config.max_pause + 1, (num, count), **draw)
        length = self._length[take]
        end = (length + pause).cumsum(1)
        begin = end - length - pause
        time = torch.arange(num_tokens).expand(num, -1).contiguous()
        which = torch.searchsorted(end, time, right=True)  # (N, T) digit at each time
        offset = time - begin.gather(1, which)
        spoken = offset < length.gather(1, which)
        source = self._start[take].gather(1, which) + offset
        tokens = torch.where(
            spoken,
            self._flat[source.clamp(max=len(self._flat) - 1)],
            self.silence[speaker][:, None],
        )
        whole = begin + length <= num_tokens
        digits = DigitSpans(
            torch.where(whole, value, -1),
            torch.where(whole, begin, 0),
            torch.where(whole, begin + length, 0),
        )
        return Counters(tokens, digits, speaker, take, pause)

    def _pools(self, test: bool) -> Tensor:
        rows = []
        for s in range(len(self.speakers)):
            takes = self._takes(s, test=test)
            rows.append([takes[self.take_digit[takes] == d] for d in range(10)])
        few = min(len(pool) for row in rows for pool in row)
        return torch.stack([torch.stack([p[:few] for p in row]) for row in rows])

    def waveform(self, counters: Counters, row: int) -> Tensor:
        """The sound of one recording, (T * samples of a token,)."""
        unit = self.grid.hop_length * self.config.tokenizer.frames_per_token
        total = counters.tokens.shape[1] * unit
        repeats = math.ceil(self.config.max_pause / 4) + 1
        quiet = self._silence_audio.repeat(repeats)
        pieces, length = [], 0
        for take, pause in zip(
            counters.take[row].tolist(), counters.pause[row].tolist(), strict=True
        ):
            pieces += [self.take_audio[take], quiet[: pause * unit]]
            length += len(pieces[-1]) + len(pieces[-2])
            if length >= total:
                break
        return torch.cat(pieces)[:total]

    def encode(self, audio: Tensor, speaker: int) -> Tensor:
        """Tokens of samples (..., N) in the voice of ``speaker``."""
        mel = log_mel(audio, self.grid, sample_rate=self.sample_rate)
        return self.tokenizer.encode(mel, self.stats[speaker])

    def speak(self, ids: Tensor, speaker: int, *, generator: torch.Generator) -> Tensor:
        """Sound of tokens in the voice of ``speaker``, without a trained decoder.

        Args:
            ids: (..., T) tokens.
            speaker: number of the voice.
            generator: of Griffin-Lim's first phases.

        Returns:
            (..., T * samples of a token) at ``sample_rate``, at most 1 in size.

        Raises:
            IndexError: an id outside the vocabulary, a speaker that does not exist.
        """
        mel = self.tokenizer.decode(ids, self.stats[speaker])
        return griffin_lim(mel, self.grid, generator=generator).clamp(-1, 1)


def counting_corpus(
    config: CountingConfig,
    *,
    generator: torch.Generator,
    tokenizer: KMeansTokenizer | None = None,
) -> CountingCorpus:
    """Build the corpus: the same configuration and generator state give the same one.

    Args:
        config: source, voices, sizes.
        generator: of everything that is drawn.
        tokenizer: a fitted one to use as it is, such as the one a trained model came
            with; None fits one on the training takes.

    Raises:
        ValueError: a tokenizer of another configuration.
        RuntimeError: ``espeakng-loader`` is not installed (source ``espeak``).
        DataError: the recordings are not at hand (source ``fsdd``).

    Source:
        The language is ours: its coherence can be counted exactly, because the share
        of neighbouring digits that follow the rule is 1 for perfect speech and 0.1 for
        random digits.
    """
    return CountingCorpus(config, generator=generator, tokenizer=tokenizer)
