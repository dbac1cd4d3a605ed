"""25 tokens a second: k-means over short stretches of log-mel frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KMeansTokenizer", "SpeakerStats", "TokenizerConfig", "speaker_stats"]


@dataclass(frozen=True)
class SpeakerStats:
    """Level and spread of each mel band of one voice.

    ``mean`` and ``std``: (..., num_mels), in log power.
    """

    mean: Tensor
    std: Tensor

    def normalise(self, mel: Tensor) -> Tensor:
        """(m - mean) / (std + 0.2): the 0.2 keeps a band that never moves quiet."""
        return (mel - self.mean) / (self.std + 0.2)

    def restore(self, normal: Tensor) -> Tensor:
        """Undo ``normalise``."""
        return normal * (self.std + 0.2) + self.mean


def speaker_stats(mel: Tensor, *, speech_quantile: float = 0.3) -> SpeakerStats:
    """Statistics of a voice over its louder frames.

    Args:
        mel: (T, num_mels) log-mel frames.
        speech_quantile: frames below this quantile of mean log power are left out
            (pauses); 0 keeps all.

    Raises:
        ValueError: no frames, NaN, a quantile outside [0, 1).
    """
    if mel.ndim != 2 or len(mel) < 1:
        raise ValueError(f"mel of shape {tuple(mel.shape)}: expected (T >= 1, mels)")
    if not torch.isfinite(mel).all():
        raise ValueError("mel holds NaN or infinite values")
    if not 0 <= speech_quantile < 1:
        raise ValueError(f"speech_quantile={speech_quantile}: allowed is [0, 1)")
    level = mel.mean(1)
    # A rank, not torch.quantile, which refuses more than 16 million values.
    rank = math.ceil(speech_quantile * len(level)) - 1
    loud = mel[level > level.kthvalue(rank).values] if rank > 0 else mel
    if len(loud) == 0:  # no frame is louder than another
        loud = mel
    return SpeakerStats(loud.mean(0), loud.std(0, correction=0))


@dataclass(frozen=True)
class TokenizerConfig:
    """Sizes of the tokeniser."""

    vocab_size: int = 64  # K
    frames_per_token: int = 4  # at 100 frames a second: 25 Hz, the paper's rate
    context: int = 0  # tokens of frames to see on either side
    num_cepstra: int = 12  # cosine coefficients kept of each frame
    num_components: int = 16  # principal components kept of each stretch
    max_fit: int = 20_000  # stretches the k-means sees

    def __post_init__(self) -> None:
        if self.vocab_size < 2 or self.frames_per_token < 1 or self.context < 0:
            raise ValueError(
                f"vocab_size={self.vocab_size}, frames_per_token="
                f"{self.frames_per_token}, context={self.context}: need at least two "
                "tokens, one frame each, and no negative context"
            )
        width = self.num_cepstra * self.frames_per_token * (2 * self.context + 1)
        if not 1 <= self.num_components <= width:
            raise ValueError(
                f"num_components={self.num_components}: allowed is 1 to {width}, the "
                "coefficients of one stretch"
            )


def _cosines(num: int, size: int) -> Tensor:
    """First ``num`` rows of the orthonormal DCT-II of length ``size``."""
    angle = torch.arange(num)[:, None] * (torch.arange(size) + 0.5) * math.pi / size
    matrix = angle.double().cos() * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


_STATE = ("mean", "basis", "centres", "prototype")
_NOT_FITTED = "this tokenizer has not been fitted: call fit first"


class KMeansTokenizer:
    """Turns log-mel frames into one of ``vocab_size`` numbers every 40 ms.

    Frames are normalised (by the voice's statistics if given, else by the mean and
    deviation of the window at hand, which makes the tokeniser look at the whole
    window), turned into cepstra, stacked by ``frames_per_token``, reduced by
    principal components and assigned to the nearest of ``vocab_size`` centres.

    Shapes: ``T`` frames, ``L = T // frames_per_token`` tokens, ``M`` mel bands.

    Example:
        >>> tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=64))
        >>> ids = tokenizer.fit([mel], generator=generator).encode(mel)

    Source:
        Stands in for the paper's USM-v2 tokeniser, which is not public.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        self.config = config
        self.centres: Tensor | None = None  # (K, num_components)
        self.mean: Tensor | None = None  # (width,)
        self.basis: Tensor | None = None  # (width, num_components)
        self.prototype: Tensor | None = None  # (K, frames_per_token, M), normalised

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def min_frames(self) -> int:
        """The shortest stretch that has a token."""
        return self.config.frames_per_token

    def normalise(self, mel: Tensor, stats: SpeakerStats | None = None) -> Tensor:
        """(..., T, M) frames by the voice's statistics, or by their own."""
        if stats is not None:
            return stats.normalise(mel)
        mean = mel.mean(-2, keepdim=True)
        return SpeakerStats(mean, mel.std(-2, correction=0, keepdim=True)).normalise(
            mel
        )

    def _check(self, mel: Tensor) -> None:
        if mel.ndim < 2 or mel.shape[-2] < self.min_frames:
            raise ValueError(
                f"mel of shape {tuple(mel.shape)} is shorter than a token: at least "
                f"{self.min_frames} frames are needed"
            )
        if not torch.isfinite(mel).all():
            raise ValueError("mel holds NaN or infinite values")

    def _stretches(self, normal: Tensor) -> Tensor:
        """(..., T, M) -> (..., L, width), each token's cepstra with its context."""
        c = self.config
        num_tokens = normal.shape[-2] // c.frames_per_token
        used = normal[..., : num_tokens * c.frames_per_token, :]
        cosines = _cosines(c.num_cepstra, normal.shape[-1]).to(normal)
        cepstra = used @ cosines.mT
        # (..., L f, C) -> (..., L, f C)
        stacked = cepstra.reshape(*cepstra.shape[:-2], num_tokens, -1)
        if c.context:
            lead = stacked.shape[:-2]
            flat = stacked.reshape(-1, num_tokens, stacked.shape[-1]).mT  # (B, fC, L)
            flat = F.pad(flat, (c.context, c.context), mode="replicate").mT
            stacked = flat.unfold(1, 2 * c.context + 1, 1)  # (B, L, fC, 2c+1)
            stacked = stacked.reshape(*lead, num_tokens, -1)
        return stacked

    def fit(
        self,
        mels: Sequence[Tensor],
        stats: Sequence[SpeakerStats] | None = None,
        *,
        generator: torch.Generator,
    ) -> KMeansTokenizer:
        """Find components and centres.

        Args:
            mels: recordings, (T, M) each.
            stats: the voice of each recording; None normalises each by itself.
            generator: of the stretches seen and the first centres, on any device.

        Returns:
            Itself.

        Raises:
            ValueError: no recordings, one shorter than a token, NaN, fewer stretches
                than tokens.
        """
        from sklearn.cluster import KMeans

        if len(mels) == 0:
            raise ValueError("mels is empty: give at least one recording")
        for mel in mels:
            self._check(mel)
        voices = [None] * len(mels) if stats is None else stats
        normal = [self.normalise(m, s) for m, s in zip(mels, voices, strict=True)]
        points = torch.cat([self._stretches(x) for x in normal])
        c = self.config
        if len(points) < c.vocab_size:
            raise ValueError(
                f"{len(points)} stretches for vocab_size={c.vocab_size}: give more "
                "speech or fewer tokens"
            )
        f = c.frames_per_token
        frames = torch.cat(
            [x[: len(x) // f * f].reshape(-1, f, x.shape[-1]) for x in normal]
        )  # (points, f, M)
        draw = {"generator": generator, "device": generator.device}
        keep = torch.randperm(len(points), **draw)[: c.max_fit]
        seen = points[keep.to(points.device)]
        self.mean = seen.mean(0)
        centred = (seen - self.mean).double()
        # Half whitening: with full whitening noise would weigh as much as speech.
        variance, vectors = torch.linalg.eigh(centred.mT @ centred / len(seen))
        variance = variance.flip(0)[: c.num_components].clamp(min=1e-8)
        vectors = vectors.flip(1)[:, : c.num_components]
        self.basis = (vectors / variance**0.25).float()
        seed = int(torch.randint(2**31 - 1, (), **draw))
        kmeans = KMeans(c.vocab_size, n_init=1, max_iter=50, random_state=seed)
        kmeans.fit(((seen - self.mean) @ self.basis).cpu().numpy())
        centres = torch.from_numpy(kmeans.cluster_centers_).float()
        self.centres = centres.to(points.device)
        ids = self._nearest(points)
        total = frames.new_zeros(c.vocab_size, *frames.shape[1:])
        total.index_add_(0, ids, frames)
        count = torch.bincount(ids, minlength=c.vocab_size).clamp(min=1)
        self.prototype = total / count[:, None, None]
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """What ``fit`` found, as float32 tensors, to be kept with a model's weights.

        Raises:
            RuntimeError: before ``fit``.
        """
        if self.centres is None:
            raise RuntimeError(_NOT_FITTED)
        return {name: getattr(self, name).float() for name in _STATE}

    @classmethod
    def from_state(
        cls, config: TokenizerConfig, tensors: Mapping[str, Tensor]
    ) -> KMeansTokenizer:
        """The tokenizer that ``state_dict`` was taken from.

        Raises:
            ValueError: a tensor that is missing, or does not fit the configuration.
        """
        if missing := set(_STATE) - set(tensors):
            raise ValueError(f"tensors lack {sorted(missing)}")
        width = config.num_cepstra * config.frames_per_token * (2 * config.context + 1)
        shapes = {
            "mean": (width,),
            "basis": (width, config.num_components),
            "centres": (config.vocab_size, config.num_components),
        }
        for name, shape in shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensors[name].shape)}, not {shape}: it "
                    "belongs to another configuration"
                )
        tokenizer = cls(config)
        for name in _STATE:
            setattr(tokenizer, name, tensors[name].float().clone())
        return tokenizer

    def _nearest(self, stretches: Tensor) -> Tensor:
        if self.centres is None or self.basis is None or self.mean is None:
            raise RuntimeError(_NOT_FITTED)
        mean, basis = self.mean.to(stretches), self.basis.to(stretches)
        centres = self.centres.to(stretches)
        points = (stretches - mean) @ basis
        # |p - c|^2 without |p|^2, which is the same for every centre.
        return (centres.square().sum(1) - 2 * points @ centres.mT).argmin(-1)

    def encode(self, mel: Tensor, stats: SpeakerStats | None = None) -> Tensor:
        """Frames to tokens.

        Args:
            mel: (..., T, M) log-mel frames; a remainder of T is dropped.
            stats: of the voice; None normalises over these T frames.

        Returns:
            (..., T // frames_per_token) int64.

        Raises:
            ValueError: fewer frames than a token has, NaN.
            RuntimeError: before ``fit``.
        """
        self._check(mel)
        return self._nearest(self._stretches(self.normalise(mel, stats)))

    def decode(self, ids: Tensor, stats: SpeakerStats) -> Tensor:
        """Each token's average frames in a voice: the plainest decoder.

        Args:
            ids: (..., L) tokens.
            stats: the voice to speak in.

        Returns:
            (..., L * frames_per_token, M) log-mel frames.

        Raises:
            IndexError: an id outside the vocabulary.
            RuntimeError: before ``fit``.
        """
        check_ids(ids, self.vocab_size)
        if self.prototype is None:
            raise RuntimeError(_NOT_FITTED)
        frames = self.prototype.to(ids.device)[ids]  # (..., L, f, M)
        frames = frames.reshape(*ids.shape[:-1], -1, frames.shape[-1])
        return stats.restore(frames)


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse ids that are no tokens.

    Raises:
        TypeError: not integers.
        ValueError: none at all.
        IndexError: outside 0 .. vocab_size - 1.
    """
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids have dtype {ids.dtype}: give integers")
    if ids.numel() == 0:
        raise ValueError(f"ids of shape {tuple(ids.shape)} are empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise IndexError(
            f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}"
        )
