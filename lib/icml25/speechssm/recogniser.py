"""The judge: recognises spoken digits in tokens, and knows nothing of counting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import CountingCorpus, DigitSpans
from .tokens import check_ids

__all__ = [
    "DigitRecogniser",
    "RecogniserConfig",
    "Transcript",
    "coherence",
    "coherence_over_time",
    "digit_error_rate",
    "train_recogniser",
]

_BLANK = 10


@dataclass(frozen=True)
class RecogniserConfig:
    """Sizes and training of the recogniser."""

    width: int = 64  # channels
    kernel: int = 7  # tokens each of three layers sees
    num_steps: int = 80
    batch_size: int = 32  # recordings
    crop: int = 96  # tokens of a training recording
    lr: float = 4e-3  # cosine to 0
    corruption: float = 0.1  # share of training tokens replaced by random ones


@dataclass(frozen=True)
class Transcript:
    """What was heard: ``digits`` and the token at which each is centred."""

    digits: list[int]
    times: list[int]


class DigitRecogniser(nn.Module):
    """Three convolutions over token embeddings; at each token: a digit, or nothing.

    A digit is marked at the middle of its span, so that the same digit said twice
    leaves a gap between the marks. The network sees ``3 (kernel - 1) + 1`` tokens,
    less than two digits: it cannot learn a grammar from its context even if it
    were trained on one.

    Args:
        vocab_size: of the tokens.
        config: sizes.
        generator: of the weights.
    """

    def __init__(
        self,
        vocab_size: int,
        config: RecogniserConfig = RecogniserConfig(),
        *,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        if config.kernel % 2 == 0:
            raise ValueError(f"kernel={config.kernel}: must be odd")
        self.vocab_size, self.config = vocab_size, config
        width = config.width
        self.embed = nn.Embedding(vocab_size, width)
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, config.kernel, padding=config.kernel // 2)
            for _ in range(3)
        )
        self.head = nn.Conv1d(width, 11, 1)
        for parameter in self.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            std = 0.0 if parameter.ndim == 1 else (2 / fan_in) ** 0.5
            with torch.no_grad():
                fresh = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(std * fresh)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, 11) logits: ten digits, and nothing."""
        x = self.embed(ids).transpose(1, 2)  # (B, T, C) -> (B, C, T)
        for conv in self.convs:
            x = x + F.relu(conv(x))
        return self.head(x).transpose(1, 2)

    def fit(
        self, tokens: Tensor, labels: DigitSpans, *, generator: torch.Generator
    ) -> DigitRecogniser:
        """Train on recordings whose digits are known.

        Give recordings of *random* digits (``CountingCorpus.sample(counting=False)``):
        then the judge has no reason to prefer the rule it is to check.

        Args:
            tokens: (N, T) int64.
            labels: what is said where, in tokens.
            generator: of batches, crops and corruption.

        Returns:
            Itself, in evaluation mode.

        Raises:
            ValueError: shapes that do not match, recordings shorter than a crop.
            IndexError: an id outside the vocabulary.
        """
        c = self.config
        check_ids(tokens, self.vocab_size)
        if tokens.ndim != 2 or len(labels.value) != len(tokens):
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} for {len(labels.value)} rows "
                "of labels"
            )
        if tokens.shape[1] < c.crop:
            raise ValueError(
                f"recordings of {tokens.shape[1]} tokens are shorter than a crop of "
                f"{c.crop}"
            )
        target = _targets(labels, tokens.shape[1])
        optimizer = torch.optim.AdamW(self.parameters(), c.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, c.lr, total_steps=c.num_steps, pct_start=0.1
        )
        device = self.embed.weight.device
        shape = (c.batch_size, c.crop)
        self.train()
        for _ in range(c.num_steps):
            row = torch.randint(len(tokens), (c.batch_size, 1), generator=generator)
            start = torch.randint(
                tokens.shape[1] - c.crop + 1, (c.batch_size, 1), generator=generator
            )
            at = (row, start + torch.arange(c.crop))
            x, y = tokens[at], target[at]
            wrong = torch.rand(shape, generator=generator) < c.corruption
            noise = torch.randint(self.vocab_size, shape, generator=generator)
            x = torch.where(wrong, noise, x)
            logits = self(x.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten().to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return self.eval()

    @torch.inference_mode()
    def listen(self, ids: Tensor) -> list[Transcript]:
        """Digits and their times in each recording.

        Args:
            ids: (B, T) or (T,) tokens.

        Raises:
            IndexError: an id outside the vocabulary.
            ValueError: no ids, more than two dimensions.
        """
        check_ids(ids, self.vocab_size)
        if ids.ndim not in (1, 2):
            raise ValueError(
                f"ids of shape {tuple(ids.shape)}: expected (B, T) or (T,)"
            )
        ids = ids.reshape(-1, ids.shape[-1])
        best = self(ids.to(self.embed.weight.device)).argmax(-1).cpu()
        previous = F.pad(best[:, :-1], (1, 0), value=_BLANK)
        begins = (best != _BLANK) & (best != previous)
        heard = []
        for row, starts in zip(best, begins, strict=True):
            times = starts.nonzero().flatten()
            heard.append(Transcript(row[times].tolist(), times.tolist()))
        return heard

    def transcribe(self, ids: Tensor) -> list[int] | list[list[int]]:
        """The digits alone: one list for (T,) tokens, a list of lists for (B, T)."""
        heard = [t.digits for t in self.listen(ids)]
        return heard[0] if ids.ndim == 1 else heard


def _targets(labels: DigitSpans, num_tokens: int) -> Tensor:
    """(N, T): the digit in the middle third of its span, else nothing."""
    time = torch.arange(num_tokens)[None, None]  # (1, 1, T)
    length = labels.stop - labels.start
    low = (labels.start + length // 3)[..., None]
    high = torch.maximum(labels.stop - length // 3, labels.start + 1)[..., None]
    inside = (time >= low) & (time < high) & (labels.value >= 0)[..., None]
    digit = torch.where(inside, labels.value[..., None], -1).amax(1)  # (N, T)
    return torch.where(digit >= 0, digit, _BLANK)


def train_recogniser(
    corpus: CountingCorpus,
    config: RecogniserConfig = RecogniserConfig(),
    *,
    generator: torch.Generator,
) -> DigitRecogniser:
    """A judge trained on random digits said by the corpus's training takes."""
    lesson = corpus.sample(1_024, 128, generator=generator, counting=False)
    judge = DigitRecogniser(corpus.vocab_size, config, generator=generator)
    return judge.fit(lesson.tokens, lesson.digits, generator=generator)


def digit_error_rate(
    heard: Sequence[Sequence[int]], said: Sequence[Sequence[int]]
) -> float:
    """Edits (substitutions, insertions, deletions) per digit that was said.

    Raises:
        ValueError: lists of different number, or nothing was said.
    """
    if len(heard) != len(said) or not any(len(s) for s in said):
        raise ValueError(
            f"{len(heard)} transcripts for {len(said)} references; at least one "
            "reference must hold a digit"
        )
    edits = sum(_distance(h, s) for h, s in zip(heard, said, strict=True))
    return edits / sum(map(len, said))


def _distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def coherence(digits: Sequence[int]) -> float:
    """Share of neighbouring digits that follow the rule d' = d + 1 (mod 10).

    1 for perfect counting, 0.1 for random digits, NaN below two digits.
    """
    pairs = list(zip(digits, digits[1:], strict=False))
    if not pairs:
        return float("nan")
    return sum(b == (a + 1) % 10 for a, b in pairs) / len(pairs)


def coherence_over_time(
    heard: Sequence[Transcript], *, num_tokens: int, window: int = 250
) -> list[dict[str, float]]:
    """Coherence and speaking rate of each window of time, over all recordings.

    A pair of digits counts in the window where its second digit is heard, so that no
    pair is lost between windows.

    Args:
        heard: transcripts.
        num_tokens: length of the recordings.
        window: tokens a window; 250 are 10 s. A last window shorter than half is
            dropped.

    Returns:
        A dict a window: ``start`` (token), ``coherence`` (NaN if no pair was heard),
        ``pairs`` (how many), ``digits`` per token and recording.

    Raises:
        ValueError: no transcripts, a window or a length below 1.
    """
    if not heard or window < 1 or num_tokens < 1:
        raise ValueError(
            f"{len(heard)} transcripts, window={window}, num_tokens={num_tokens}: all "
            "must be at least 1"
        )
    rows = []
    for start in range(0, num_tokens, window):
        stop = min(start + window, num_tokens)
        if start and stop - start < window / 2:
            break
        follows, digits = [], 0
        for t in heard:
            for i, time in enumerate(t.times):
                if start <= time < stop:
                    digits += 1
                    if i:
                        follows.append(t.digits[i] == (t.digits[i - 1] + 1) % 10)
        share = sum(follows) / len(follows) if follows else float("nan")
        rate = digits / (stop - start) / len(heard)
        rows.append(
            {"start": start, "coherence": share, "pairs": len(follows), "digits": rate}
        )
    return rows
