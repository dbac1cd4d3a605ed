"""Long recordings in fixed windows: overlap, cut in the middle, stitched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .tokens import KMeansTokenizer, SpeakerStats, check_ids

__all__ = [
    "Window",
    "decode_long",
    "join_distance",
    "split_windows",
    "stitch",
    "tokenize_long",
    "window_bounds",
]

TAILS = ("repeat", "silence", "none")


class Window(NamedTuple):
    """One window [start, stop) of which [keep_from, keep_to) is kept.

    All four count from the beginning of the recording. ``stop`` of the last window may
    lie past the end: there the tail is filled.
    """

    start: int
    stop: int
    keep_from: int
    keep_to: int


def window_bounds(length: int, *, window: int, overlap: int) -> list[Window]:
    """Windows of one size that cover a recording, with the overlaps cut in the middle.

    One window if ``length <= window``, else ``ceil((length - overlap) / (window -
    overlap))``. The kept parts cover [0, length) exactly once; every kept position is
    at least ``overlap // 2`` away from a window edge that is not an end of the
    recording.

    Args:
        length: of the recording, in tokens (or frames).
        window: of each window, the same unit; the paper's 30 s are 750 tokens.
        overlap: of neighbours, 0 to ``window - 1``; the paper's 4 s are 100. An odd
            overlap gives its extra position to the window on the left.

    Raises:
        ValueError: an empty recording, ``overlap`` negative or not below ``window``.

    Source:
        Windows and overlap as described for the paper; that the cut lies in the middle
        is our reading of its figure.
    """
    if length < 1:
        raise ValueError(f"length={length}: the recording is empty")
    if not 0 <= overlap < window:
        raise ValueError(
            f"window={window}, overlap={overlap}: need 0 <= overlap < window"
        )
    hop = window - overlap
    count = 1 if length <= window else math.ceil((length - overlap) / hop)
    cuts = [0, *(k * hop + (overlap + 1) // 2 for k in range(1, count)), length]
    return [
        Window(k * hop, k * hop + window, cuts[k], cuts[k + 1]) for k in range(count)
    ]


def split_windows(
    x: Tensor,
    bounds: Sequence[Window],
    *,
    tail: str = "repeat",
    silence: float = math.log(1e-6),
    unit: int = 1,
) -> Tensor | list[Tensor]:
    """Cut a recording into its windows.

    Args:
        x: (T, ...) frames or tokens.
        bounds: from ``window_bounds``.
        tail: what fills the end of the last window. ``"repeat"``: the recording again
            from its beginning (as often as needed); ``"silence"``: the value
            ``silence``; ``"none"``: nothing, the last window is shorter.
        silence: of a silent frame; the default is a log-mel frame of digital zeros.
        unit: frames per position of ``bounds``.

    Returns:
        (windows, window * unit, ...); for ``"none"`` a list of tensors.

    Raises:
        ValueError: an empty recording, an unknown tail.
    """
    if tail not in TAILS:
        raise ValueError(f"tail={tail!r}: allowed are {', '.join(TAILS)}")
    if len(x) == 0 or not bounds:
        raise ValueError("the recording is empty: there is nothing to repeat")
    if tail == "none":
        return [x[w.start * unit : w.stop * unit] for w in bounds]
    index = torch.arange(bounds[-1].stop * unit, device=x.device)
    filled = x[index % len(x)]
    if tail == "silence":
        filled[len(x) :] = silence
    starts = torch.tensor([w.start * unit for w in bounds], device=x.device)
    size = (bounds[0].stop - bounds[0].start) * unit
    return filled[starts[:, None] + torch.arange(size, device=x.device)]


def stitch(
    pieces: Tensor | Sequence[Tensor], bounds: Sequence[Window], *, unit: int = 1
) -> Tensor:
    """Join the kept parts of the windows.

    Args:
        pieces: what was made of each window, (window * unit, ...) each.
        bounds: the windows.
        unit: frames per position of ``bounds``.

    Returns:
        (length * unit, ...).

    Raises:
        ValueError: pieces and bounds of different number, a piece too short.
    """
    if len(pieces) != len(bounds):
        raise ValueError(f"{len(pieces)} pieces for {len(bounds)} windows")
    kept = []
    for piece, w in zip(pieces, bounds, strict=True):
        part = piece[(w.keep_from - w.start) * unit : (w.keep_to - w.start) * unit]
        if len(part) != (w.keep_to - w.keep_from) * unit:
            raise ValueError(f"a piece of length {len(piece)} is too short for {w}")
        kept.append(part)
    return torch.cat(kept)


def tokenize_long(
    mel: Tensor,
    tokenizer: KMeansTokenizer,
    *,
    window: int,
    overlap: int,
    tail: str = "repeat",
    stats: SpeakerStats | None = None,
) -> Tensor:
    """Tokens of a recording of any length, window by window.

    All windows are one batch; memory and time are linear in the length.

    Args:
        mel: (T, M) log-mel frames.
        tokenizer: a fitted one.
        window: tokens of a window.
        overlap: tokens that neighbours share.
        tail: see ``split_windows``; the paper repeats.
        stats: of the voice; None normalises over each window (non-causal, as the
            paper's tokeniser is).

    Returns:
        (T // frames_per_token,) int64.

    Raises:
        ValueError: fewer frames than a token has, window and overlap that do not fit.
    """
    unit = tokenizer.min_frames
    if mel.ndim != 2 or len(mel) < unit:
        raise ValueError(
            f"mel of shape {tuple(mel.shape)}: expected (T >= {unit}, mels), one token"
        )
    length = len(mel) // unit
    bounds = window_bounds(length, window=window, overlap=overlap)
    pieces = split_windows(mel[: length * unit], bounds, tail=tail, unit=unit)
    if isinstance(pieces, Tensor):
        return stitch(tokenizer.encode(pieces, stats), bounds)
    return stitch([tokenizer.encode(piece, stats) for piece in pieces], bounds)


def decode_long(
    ids: Tensor,
    decode: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    window: int,
    overlap: int,
    frames_per_token: int = 4,
) -> Tensor:
    r"""Frames of any number of tokens, window by window.

    If ``decode`` looks at ``R`` tokens on either side and treats what lies beyond the
    ends of its input as it treats the ends of the whole sequence, then ``overlap >=
    2 R`` gives exactly the frames of decoding everything at once: each kept token has
    its ``R`` neighbours in the window.

    Args:
        ids: (L,) tokens.
        decode: (B, l) tokens -> (B, l * frames_per_token, M) frames.
        vocab_size: of the tokens.
        window: tokens of a window.
        overlap: tokens that neighbours share.
        frames_per_token: of ``decode``.

    Returns:
        (L * frames_per_token, M).

    Raises:
        ValueError: no tokens, window and overlap that do not fit.
        IndexError: an id outside the vocabulary.
    """
    check_ids(ids, vocab_size)
    if ids.ndim != 1:
        raise ValueError(f"ids of shape {tuple(ids.shape)}: expected (L,)")
    bounds = window_bounds(len(ids), window=window, overlap=overlap)
    pieces = split_windows(ids, bounds, tail="none")
    full = [piece for piece in pieces if len(piece) == window]
    frames = list(decode(torch.stack(full))) if full else []
    frames += [decode(p[None])[0] for p in pieces[len(full) :]]
    return stitch(frames, bounds, unit=frames_per_token)


def join_distance(bounds: Sequence[Window]) -> Tensor:
    """How far each position is from the nearest join between kept parts.

    Returns:
        (length,) int64: 1 for the two positions next to a join, and so on; all equal to
        the length + 1 if there is a single window.
    """
    length = bounds[-1].keep_to
    cuts = torch.tensor([w.keep_from for w in bounds[1:]])
    if len(cuts) == 0:
        return torch.full((length,), length + 1)
    # Position t occupies [t, t + 1]: its distance to a cut c is |t + 1/2 - c| + 1/2.
    gap = (torch.arange(length)[:, None] + 0.5 - cuts).abs().amin(1)
    return (gap + 0.5).long()
