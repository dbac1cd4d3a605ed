"""Orthonormal bases of the subspace: singular, Haar, and two cheap sketches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def singular_basis(
    matrix: Tensor,
    rank: int,
    *,
    method: str = "svd",
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Leading left singular vectors: GaLore's choice of subspace.

    For every matrix, $\|P^\top G\|_F^2 \ge \frac{r}{\min(m,n)} \|G\|_F^2$: the top
    $r$ of $\min(m, n)$ squared singular values hold at least their share.

    Args:
        matrix: $G$, shape (..., m, n), float32 or float64.
        rank: $r$, with 1 <= r <= min(m, n).
        method: ``"svd"`` (exact) or ``"rsvd"`` (a randomised range finder with one
            power iteration: three thin products instead of a full decomposition).
        generator: draws the test matrix of ``"rsvd"``; not used by ``"svd"``.

    Returns:
        $P$, shape (..., m, r), with $P^\top P = I_r$. A zero matrix gives some
        orthonormal basis.

    Raises:
        ValueError: if ``matrix`` has no two dimensions, or ``rank`` or ``method`` is
            out of range.

    Notes:
        ``"svd"`` costs O(m n min(m, n)), ``"rsvd"`` O(m n r). The range finder uses
        max(8, r/4) extra directions; where these reach min(m, n) it is exact too. It
        keeps about 98% of the best possible energy on spectra that decay like
        1/sqrt(i), and 90% on pure noise, where no direction is better than another.

    Source: GaLore (Zhao et al., 2024); range finder of Halko et al. (2011).
    """
    if matrix.dim() < 2:
        raise ValueError(f"matrix must be (..., m, n), got {tuple(matrix.shape)}")
    m, n = matrix.shape[-2:]
    _check_rank(rank, min(m, n))
    if method not in ("svd", "rsvd"):
        raise ValueError(f"method must be 'svd' or 'rsvd', got {method!r}")
    width = rank + max(8, rank // 4)  # oversampling of the range finder
    if method == "svd" or width >= min(m, n):
        return torch.linalg.svd(matrix, full_matrices=False).U[..., :rank]
    test = torch.randn(
        n, width, generator=generator, device=matrix.device, dtype=matrix.dtype
    )
    # One power iteration, G G^T (G Omega): a row space first, then its image.
    row_space = torch.linalg.qr(matrix.mT @ (matrix @ test)).Q  # (..., n, width)
    q, triangle = torch.linalg.qr(matrix @ row_space)  # (..., m, width)
    # The left singular vectors of G restricted to it; eigenvalues come ascending.
    vectors = torch.linalg.eigh(triangle @ triangle.mT).eigenvectors
    return q @ vectors[..., -rank:].flip(-1)


def stiefel_uniform(
    rows: int,
    rank: int,
    *,
    batch: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Haar sample of the Stiefel manifold: GoLore's choice of subspace.

    The Q factor of a Gaussian matrix, with R's diagonal made positive, is uniform on
    $\mathrm{St}(m, r) = \{P : P^\top P = I_r\}$. Hence $E[P P^\top] = \frac{r}{m} I$,
    and $E\|P^\top G\|_F^2 = \frac{r}{m}\|G\|_F^2$ for every $G$ independent of $P$.

    Args:
        rows: $m$, the ambient dimension.
        rank: $r$, with 1 <= r <= m.
        batch: leading shape of independent samples.
        generator: source of randomness, on ``device``.
        dtype: float32 or float64.
        device: where the sample is made.

    Returns:
        $P$, shape (\*batch, m, r).

    Raises:
        ValueError: if ``rank`` is out of range.

    Notes:
        O(m r^2) per sample; no decomposition of a gradient.
    """
    _check_rank(rank, rows)
    gaussian = torch.randn(
        *batch, rows, rank, generator=generator, dtype=dtype, device=device
    )
    q, r = torch.linalg.qr(gaussian)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)
    return q.mul_(signs.unsqueeze(-2))


def coordinate_basis(
    rows: int,
    rank: int,
    *,
    batch: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """``rank`` different coordinates, uniformly: the sparse relative of Haar.

    Same arguments as :func:`stiefel_uniform`. Orthonormal, and E[P P^T] = (r/m) I:
    the two facts the convergence proof uses.
    """
    _check_rank(rank, rows)
    index = _subset(rows, rank, batch, generator, device)
    basis = torch.zeros(*batch, rows, rank, dtype=dtype, device=device)
    return basis.scatter_(-2, index.unsqueeze(-2), 1.0)


def hadamard_basis(
    rows: int,
    rank: int,
    *,
    batch: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Random columns of a sign-flipped Walsh-Hadamard matrix.

    $P = D H S$: random signs $D$, orthonormal $H$, a uniform choice $S$ of columns.
    Same arguments and the same two facts as :func:`stiefel_uniform`. Where ``rows``
    is no power of two, $H$ is block diagonal over its binary digits (10 = 8 + 2) and
    $D$ is preceded by a random permutation.
    """
    _check_rank(rank, rows)
    blocks = [1 << bit for bit in reversed(range(rows.bit_length())) if rows >> bit & 1]
    sizes = torch.tensor(blocks, device=device)
    block_of = torch.repeat_interleave(torch.arange(len(blocks), device=device), sizes)
    offset = torch.arange(rows, device=device) - (sizes.cumsum(0) - sizes)[block_of]

    columns = _subset(rows, rank, batch, generator, device)
    rows_of = _subset(rows, rows, batch, generator, device)
    signs = torch.randint(
        0, 2, (*batch, rows, 1), generator=generator, device=device
    ).mul_(2)
    # H[i, j] = (-1)^popcount(i & j) / sqrt(size) inside a block, 0 outside it.
    bits = offset[rows_of].unsqueeze(-1) & offset[columns].unsqueeze(-2)
    shift = 32
    while shift := shift // 2:  # fold the parity of all bits into the lowest
        bits = bits ^ (bits >> shift)
    same_block = block_of[rows_of].unsqueeze(-1) == block_of[columns].unsqueeze(-2)
    scale = sizes.to(dtype or torch.get_default_dtype()).rsqrt()[block_of[columns]]
    return (1 - 2 * (bits & 1)) * (signs - 1) * same_block * scale.unsqueeze(-2)


SKETCHES: dict[str, Callable[..., Tensor]] = {
    "haar": stiefel_uniform,
    "coordinate": coordinate_basis,
    "hadamard": hadamard_basis,
}


def _subset(rows, count, batch, generator, device) -> Tensor:
    """A uniform ordered choice of ``count`` of ``rows`` indices, (*batch, count)."""
    keys = torch.rand(
        *batch, rows, generator=generator, dtype=torch.float64, device=device
    )
    return keys.argsort(-1)[..., :count]


def _check_rank(rank: int, largest: int) -> None:
    if not isinstance(rank, int) or not 1 <= rank <= largest:
        raise ValueError(
            f"rank must be a whole number between 1 and {largest}, got {rank!r}"
        )
