"""Whose voice is it: a small speaker encoder in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoder import prompt_vector

__all__ = ["SpeakerSpace", "similarity_over_time"]


class SpeakerSpace:
    """Directions of the log-mel statistics in which voices differ most.

    Linear discriminant analysis of ``prompt_vector`` over short stretches: the
    deviation between voices is maximised against the deviation within a voice, and
    stretches are compared by the cosine of their projections. It needs no weights from
    elsewhere, and is blind to everything but timbre and channel.

    Args:
        mels: (T_n, M) frames, one recording a voice.
        num_frames: length of a stretch; 200 are 2 s.
        num_dims: directions kept.
        shrinkage: share of the identity in the within-voice covariance, 0 to 1.

    Raises:
        ValueError: fewer than two voices, a recording of less than two stretches.
    """

    def __init__(
        self,
        mels: Sequence[Tensor],
        *,
        num_frames: int = 200,
        num_dims: int = 16,
        shrinkage: float = 0.1,
    ) -> None:
        if len(mels) < 2 or min(map(len, mels)) < 2 * num_frames:
            raise ValueError(
                f"{len(mels)} voices, the shortest of {min(map(len, mels), default=0)} "
                f"frames: need two voices of {2 * num_frames} frames each"
            )
        if not 0 < shrinkage <= 1:
            raise ValueError(f"shrinkage={shrinkage}: allowed is (0, 1]")
        self.num_frames = num_frames
        groups = [prompt_vector(_stretches(m, num_frames)).double() for m in mels]
        means = torch.stack([g.mean(0) for g in groups])
        self._mean = means.mean(0)
        centred = torch.cat([g - m for g, m in zip(groups, means, strict=True)])
        within = centred.mT @ centred / (len(centred) - len(groups))
        scale = within.diagonal().mean()
        within = (1 - shrinkage) * within + shrinkage * scale * torch.eye(
            len(within), dtype=within.dtype
        )
        # Whiten within voices, then the principal directions between them.
        values, vectors = torch.linalg.eigh(within)
        whiten = vectors / values.sqrt()
        spread = (means - self._mean) @ whiten
        _, _, axes = torch.linalg.svd(spread, full_matrices=False)
        self._axes = whiten @ axes[:num_dims].mT  # (2M, num_dims)

    def state_dict(self) -> dict[str, Tensor]:
        """What was found, to be kept beside a decoder's weights."""
        return {
            "mean": self._mean.float(),
            "axes": self._axes.float(),
            "num_frames": torch.tensor([self.num_frames]),
        }

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> SpeakerSpace:
        """The space that ``state_dict`` was taken from."""
        space = cls.__new__(cls)
        space._mean = tensors["mean"].double()
        space._axes = tensors["axes"].double()
        space.num_frames = int(tensors["num_frames"])
        return space

    def embed(self, mel: Tensor) -> Tensor:
        """(T, M) frames -> (num_dims,) unit vector: the mean over their stretches."""
        size = min(self.num_frames, len(mel))
        vectors = prompt_vector(_stretches(mel, size)).double()
        return F.normalize(((vectors - self._mean) @ self._axes).mean(0), dim=0)

    def __call__(self, mel: Tensor) -> Tensor:
        return self.embed(mel)


def _stretches(mel: Tensor, num_frames: int) -> Tensor:
    """(T, M) -> (n, num_frames, M): neighbours side by side, the rest dropped."""
    if mel.ndim != 2 or len(mel) < num_frames or num_frames < 1:
        raise ValueError(
            f"mel of shape {tuple(mel.shape)}: expected (T >= {max(num_frames, 1)}, M)"
        )
    count = len(mel) // num_frames
    return mel[: count * num_frames].reshape(count, num_frames, -1)


def similarity_over_time(
    signal: Tensor, reference: Tensor, embed, *, window: int, hop: int | None = None
) -> list[float]:
    """Cosine between a reference embedding and each window of a signal.

    Args:
        signal: (T, ...) frames or samples, whatever ``embed`` reads.
        reference: (dims,) embedding, of the prompt for instance.
        embed: stretch of the signal -> (dims,) embedding.
        window: length of a window, in steps of the signal.
        hop: between windows; None for side by side.

    Returns:
        One cosine a whole window.

    Raises:
        ValueError: a signal shorter than a window.
    """
    if len(signal) < window or window < 1:
        raise ValueError(
            f"a signal of {len(signal)} steps is shorter than the window of {window}"
        )
    starts = range(0, len(signal) - window + 1, hop or window)
    vectors = torch.stack([embed(signal[s : s + window]) for s in starts])
    return F.cosine_similarity(vectors, reference.to(vectors)[None], dim=1).tolist()
