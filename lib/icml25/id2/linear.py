"""The linear map in closed form: whitening the edit noise that pairs show."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from .autoencoders import load_tensors
from .ranking import need_rows, unit


class PairScatter:
    r"""Second moment of the differences between translations and their origins.

    $$S = \frac1n\sum_{i=1}^n (z_{g_i} - z_{o_i})^\top (z_{g_i} - z_{o_i}),$$

    accumulated chunk by chunk, so that two million pairs need one pass and d^2 numbers.

    Args:
        dim: d, numbers an embedding.
        dtype: of the sum; float64 unless the device has none.
        device: where the sum lives.
    """

    def __init__(
        self,
        dim: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        if dim < 1:
            raise ValueError(f"dim={dim}: give at least 1")
        self.count = 0
        self._sum = torch.zeros(dim, dim, dtype=dtype, device=device)

    def update(self, z_origin: Tensor, z_gen: Tensor) -> PairScatter:
        """Add pairs: two (n, d) of equal shape, row by row. Returns itself.

        Raises:
            ValueError: shapes that differ, another d, NaN.
        """
        if z_origin.shape != z_gen.shape or z_gen.dim() != 2:
            raise ValueError(
                f"z_origin={tuple(z_origin.shape)}, z_gen={tuple(z_gen.shape)}: both "
                "must be (n, d) of one shape"
            )
        if z_gen.shape[1] != len(self._sum):
            raise ValueError(
                f"embeddings of {z_gen.shape[1]} numbers, the scatter is for "
                f"{len(self._sum)}"
            )
        difference = (z_gen - z_origin).to(self._sum)
        if not torch.isfinite(difference).all():
            raise ValueError("z_origin or z_gen hold NaN or infinite numbers")
        self._sum.addmm_(difference.mT, difference)
        self.count += len(difference)
        return self

    @property
    def second_moment(self) -> Tensor:
        """S, (d, d). Raises ValueError before the first pair."""
        if self.count == 0:
            raise ValueError("no pair was added, so there is no second moment")
        return self._sum / self.count


def whitening_transform(scatter: Tensor, lam: float = 1.0) -> Tensor:
    r"""The closed form: $W = (S + \lambda\,\tfrac{\mathrm{tr}S}{d} I)^{-1/2}$.

    Up to a rotation, which no cosine sees, it is what :func:`lda_transform` gives when
    all directions are kept, and $W^\top (S + \lambda\,\mathrm{tr}S/d\,I) W = I$.

    Args:
        scatter: S, (d, d), symmetric positive semi-definite.
        lam: ridge in units of the mean eigenvalue.

    Returns:
        W, (d, d), symmetric, in the dtype of S.

    Raises:
        ValueError: S empty, not square, not symmetric or not finite; ``lam`` negative;
            ``lam`` 0 with a singular S (fewer pairs than dimensions).
        TypeError: S is no float32 or float64.

    Source: ours (known as relevant component analysis); the paper trains W instead.
    """
    values, vectors = _ridged_eigh(scatter, lam)
    return (vectors * values.rsqrt()) @ vectors.mT


def lda_transform(
    scatter: Tensor, covariance: Tensor, *, rank: int, lam: float = 1.0
) -> Tensor:
    r"""The best ``rank`` directions: apart for photos, together for pairs.

    Maximises $\mathrm{tr}(W^\top T W)$ subject to $W^\top \bar S W = I$ with
    $\bar S = S + \lambda\,\tfrac{\mathrm{tr}S}{d} I$: the leading generalised
    eigenvectors of $T w = \mu \bar S w$.

    Args:
        scatter: S, (d, d), of the differences.
        covariance: T, (d, d), of the origins.
        rank: columns of W, 1 to d.
        lam: ridge of S as in :func:`whitening_transform`.

    Returns:
        W, (d, rank), columns by falling mu.

    Raises:
        ValueError: as :func:`whitening_transform`; T of another shape; a rank outside
            1..d.
    """
    if covariance.shape != scatter.shape:
        raise ValueError(
            f"covariance={tuple(covariance.shape)}, scatter={tuple(scatter.shape)}: "
            "give two of one shape"
        )
    if not torch.isfinite(covariance).all():
        raise ValueError("covariance holds NaN or infinite numbers: it takes two rows")
    if not 1 <= rank <= len(scatter):
        raise ValueError(f"rank={rank}: give 1 to {len(scatter)}")
    white = whitening_transform(scatter, lam)
    _, vectors = torch.linalg.eigh(white @ covariance.to(white) @ white)
    return white @ vectors[:, -rank:].flip(1)


def _ridged_eigh(scatter: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    if scatter.dim() != 2 or scatter.shape[0] != scatter.shape[1]:
        raise ValueError(f"scatter={tuple(scatter.shape)}: give a square matrix")
    if scatter.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"scatter is {scatter.dtype}: give float32 or float64")
    need_rows("scatter", scatter)
    if not torch.allclose(scatter, scatter.mT, atol=1e-4 * scatter.abs().max().item()):
        raise ValueError("scatter is not symmetric")
    if not 0 <= lam < float("inf"):
        raise ValueError(f"lam={lam}: give a finite number, 0 or more")
    dim = len(scatter)
    values, vectors = torch.linalg.eigh(scatter)
    values = values + lam * scatter.trace() / dim  # the ridge moves no eigenvector
    if values[0] <= dim * torch.finfo(scatter.dtype).eps * values[-1]:
        raise ValueError(
            f"scatter is singular with lam={lam}: some direction never changes, as "
            f"with fewer pairs than its {dim} dimensions; give a positive lam"
        )
    return values, vectors


class LinearIdentifier(nn.Module):
    """Embeddings in, unit vectors out whose inner products find the origin.

    Args:
        mean: (d,), taken off every embedding.
        weight: W, (d, k).

    Shapes: d numbers an embedding, k numbers a descriptor.

    Example:
        >>> origins = torch.randn(300, 8); generated = origins + 0.1
        >>> w = LinearIdentifier.fit(origins, generated, lam=1.0)
        >>> w(origins).shape
        torch.Size([300, 8])
    """

    def __init__(self, mean: Tensor, weight: Tensor) -> None:
        super().__init__()
        if mean.dim() != 1 or weight.dim() != 2 or len(mean) != len(weight):
            raise ValueError(
                f"mean={tuple(mean.shape)}, weight={tuple(weight.shape)}: give (d,) "
                "and (d, k)"
            )
        self.register_buffer("mean", mean)
        self.register_buffer("weight", weight)

    @classmethod
    def fit(
        cls,
        z_origin: Tensor,
        z_gen: Tensor,
        *,
        lam: float = 1.0,
        rank: int | None = None,
        photos: Tensor | None = None,
    ) -> LinearIdentifier:
        """W in closed form from pairs of one model.

        Args:
            z_origin: (n, d) embeddings of origins, repeated as often as translated.
            z_gen: (n, d) embeddings of their translations.
            lam: ridge; choose it on held-out pairs of the *same* model.
            rank: columns of W; None keeps all d.
            photos: (m, d) embeddings whose mean is taken off and whose covariance
                decides which ``rank`` directions stay; default: the origins.

        Raises:
            ValueError: as the functions above; photos that are empty or not finite.
            TypeError: embeddings that are no floating-point numbers.
        """
        if not z_gen.is_floating_point():
            raise TypeError(f"z_gen is {z_gen.dtype}: give floating-point embeddings")
        scatter = PairScatter(z_gen.shape[-1], device=z_gen.device)
        moment = scatter.update(z_origin, z_gen).second_moment
        photos = (z_origin if photos is None else photos).double()
        need_rows("photos", photos)
        mean = photos.mean(0)
        if rank is None:
            weight = whitening_transform(moment, lam)
        else:
            weight = lda_transform(moment, (photos - mean).mT.cov(), rank=rank, lam=lam)
        return cls(mean.to(z_gen.dtype), weight.to(z_gen.dtype))

    def forward(self, z: Tensor) -> Tensor:
        """(N, d) embeddings to (N, k) descriptors of length 1.

        Raises:
            ValueError: another d; NaN; a row that W sends to zero.
        """
        if z.dim() != 2 or z.shape[1] != len(self.mean):
            raise ValueError(
                f"z={tuple(z.shape)}: this identifier was fitted on embeddings of "
                f"{len(self.mean)} numbers"
            )
        dtype = torch.promote_types(z.dtype, self.weight.dtype)
        return unit((z.to(dtype) - self.mean) @ self.weight.to(dtype))

    def save(self, path: Path | str) -> None:
        """Write mean and W as plain tensors."""
        torch.save({"mean": self.mean, "weight": self.weight}, path)

    @classmethod
    def load(cls, path: Path | str) -> LinearIdentifier:
        """Read what :meth:`save` wrote, executing nothing.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a damaged file, or one that holds something else.
        """
        content = load_tensors(path)
        if set(content) != {"mean", "weight"}:
            raise ValueError(f"{path}: no identifier, it holds {sorted(content)[:4]}")
        return cls(content["mean"], content["weight"])
