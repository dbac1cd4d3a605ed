"""What can be said about W before any image is searched for."""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import whitening_transform
from .ranking import need_rows


def transfer_constant(seen: Tensor, unseen: Tensor, *, lam: float = 1.0) -> float:
    r"""How much worse W may do on another model: the largest generalised eigenvalue.

    $$\kappa = \lambda_{\max}\bigl(\bar S_1^{-1/2} S_2 \bar S_1^{-1/2}\bigr),\qquad
      \bar S_1 = S_1 + \lambda\,\tfrac{\mathrm{tr}S_1}{d}I,$$

    so that $\mathrm{tr}(W^\top S_2 W) \le \kappa\,\mathrm{tr}(W^\top \bar S_1 W)$ for
    every W, with equality for one direction.

    Args:
        seen, unseen: (d, d) second moments S of the differences of two models.
        lam: ridge of the seen one.

    Raises:
        ValueError: shapes that differ, NaN, or S singular (``whitening_transform``).
    """
    if seen.shape != unseen.shape:
        raise ValueError(
            f"seen={tuple(seen.shape)}, unseen={tuple(unseen.shape)}: give two of one "
            "shape"
        )
    need_rows("unseen", unseen)
    white = whitening_transform(seen, lam)
    return torch.linalg.eigvalsh(white @ unseen.to(white) @ white)[-1].item()


def singular_value_cosine(first: Tensor, second: Tensor) -> float:
    """Cosine between the singular values of two matrices of rows, (n, d) each.

    The statistic behind the paper's Table 1 as far as its caption tells; it compares
    two sorted positive lists and so is close to 1 for almost anything.

    Raises:
        ValueError: matrices of different shape, empty, or not finite.
    """
    if first.shape != second.shape or first.dim() != 2:
        raise ValueError(
            f"first={tuple(first.shape)}, second={tuple(second.shape)}: give two (n, d)"
        )
    need_rows("first", first)
    need_rows("second", second)
    values = [torch.linalg.svdvals(x.double()) for x in (first, second)]
    return torch.nn.functional.cosine_similarity(*values, dim=0).item()


def exact_annihilator(differences: Tensor) -> Tensor:
    """Orthonormal W, (d, d - r), with ``differences @ W`` = 0; r is their rank.

    It exists, with at least one column, if and only if r < d. Nothing keeps it from
    collapsing identities: that is why existence says little.

    Raises:
        ValueError: full rank: then only W = 0 is left; no rows, or not finite ones.
    """
    need_rows("differences", differences)
    _, values, vh = torch.linalg.svd(differences, full_matrices=True)
    tolerance = max(differences.shape) * torch.finfo(values.dtype).eps * values[0]
    rank = int((values > tolerance).sum())
    if rank == differences.shape[1]:
        raise ValueError(
            f"the differences have full rank {rank}: only W = 0 sends all to zero"
        )
    return vh[rank:].mT


def separation(positive: Tensor, negative: Tensor) -> float:
    """How far positive cosines stand above the negatives, in the negatives' sigmas."""
    return ((positive.mean() - negative.mean()) / negative.std()).item()
