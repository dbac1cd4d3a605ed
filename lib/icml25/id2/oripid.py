"""OriPID's protocol on folders of precomputed embeddings, at any size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icml25.core import progress

from .linear import LinearIdentifier, PairScatter, whitening_transform
from .ranking import locate_origins, map_acc, rank_of_positive, standard_error, unit

_NAME = re.compile(r"T?(\d+)(?:_(\d+))?\.npy")


@dataclass(frozen=True)
class OriPIDConfig:
    """Where the embeddings lie and how they are searched.

    ``folder`` holds ``train/T<id>_<j>.npy`` (the released trainer's names; j = 0 is the
    origin, j = 1, 2, ... its translations by the seen model), ``gallery/<id>.npy`` and
    one folder a model, ``queries/<model>/<id>.npy``: one flattened latent a file.
    """

    folder: str = "oripid"
    dim: int = 4096  # d: 4 x 32 x 32
    lam: float = 1.0
    chunk: int = 4096  # files read at once
    block: int = 8192  # gallery rows a tile
    gallery_dtype: str = "bfloat16"  # of the gallery in memory


LAPTOP = OriPIDConfig()
PAPER = OriPIDConfig()


def read_embeddings(folder: Path | str, *, dim: int) -> tuple[list[tuple], Tensor]:
    """All ``.npy`` embeddings of a folder, in the order of their identifiers.

    Returns:
        Keys (id, j) with j = 0 where the name has none, and rows (N, dim) float32.

    Raises:
        FileNotFoundError: no such folder, or no embedding in it.
        ValueError: another size than ``dim``; two files with one key; NaN.
    """
    keys, paths = _listing(Path(folder))
    return keys, _load(paths, dim)


def pair_chunks(
    folder: Path | str, *, dim: int, chunk: int = 4096
) -> Iterator[tuple[Tensor, Tensor]]:
    """Origins and translations of a training folder, row by row, in chunks.

    Yields:
        Two (n, dim): each translation (j > 0) beside its origin (j = 0).

    Raises:
        ValueError: translations without their origin.
    """
    keys, paths = _listing(Path(folder))
    path_of = dict(zip(keys, paths, strict=True))
    made = [key for key in keys if key[1] > 0]
    if missing := sorted({key[0] for key in made if (key[0], 0) not in path_of}):
        raise ValueError(
            f"{folder}: {len(missing)} identifiers have translations and no origin "
            f"T<id>_0.npy, {missing[0]} for one"
        )
    for start in range(0, len(made), chunk):
        part = made[start : start + chunk]
        owners = sorted({key[0] for key in part})
        origins = _load([path_of[(owner, 0)] for owner in owners], dim)
        place = {owner: row for row, owner in enumerate(owners)}
        rows = torch.tensor([place[key[0]] for key in part])
        yield origins[rows], _load([path_of[key] for key in part], dim)


def run_oripid(
    config: OriPIDConfig = LAPTOP, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """W in one pass over the training pairs, then every query set against the gallery.

    Args:
        config: the folder and sizes.
        device: where scatter, W and the search run.
        seed: not used; nothing is drawn.

    Returns:
        By model and method: mAP, accuracy, standard error; the number of pairs.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: queries without origin in the gallery; duplicate identifiers.
    """
    root = Path(config.folder)
    scatter = PairScatter(config.dim, device=device)
    total, count = torch.zeros(config.dim, dtype=torch.float64, device=device), 0
    chunks = pair_chunks(root / "train", dim=config.dim, chunk=config.chunk)
    for origin, gen in progress(chunks, "pairs", unit="chunk"):
        scatter.update(origin.to(device), gen.to(device))
        total += origin.to(device).double().sum(0)
        count += len(origin)
    mean = (total / count).float()
    weight = whitening_transform(scatter.second_moment, config.lam).float()
    methods = {"raw": unit, "closed form W": LinearIdentifier(mean, weight)}
    keys, gallery = read_embeddings(root / "gallery", dim=config.dim)
    found: dict[str, Any] = {"num_pairs": count, "num_gallery": len(gallery)}
    dtype = getattr(torch, config.gallery_dtype)
    models = sorted(path for path in (root / "queries").iterdir() if path.is_dir())
    sets = {path.name: read_embeddings(path, dim=config.dim) for path in models}
    for name, describe in methods.items():
        parts = gallery.split(config.chunk)
        stored = torch.cat([describe(part.to(device)).to(dtype) for part in parts])
        found[name] = {}
        for model, (query_keys, z) in sets.items():
            positive = locate_origins([k[0] for k in query_keys], [k[0] for k in keys])
            ranks = rank_of_positive(
                describe(z.to(device)), stored, positive.to(device), block=config.block
            )
            found[name][model] = [*map_acc(ranks), standard_error(ranks)]
    return found


def _listing(folder: Path) -> tuple[list[tuple[int, int]], list[Path]]:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no folder {folder}: OriPID's embeddings are expected there "
            "(see OriPIDConfig)"
        )
    found: dict[tuple[int, int], Path] = {}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        key = (int(match[1]), int(match[2] or 0))
        if key in found:
            raise ValueError(
                f"{folder}: {found[key].name} and {path.name} are both {key}"
            )
        found[key] = path
    if not found:
        raise FileNotFoundError(f"{folder} holds no embedding T<id>_<j>.npy")
    keys = sorted(found)
    return keys, [found[key] for key in keys]


def _load(paths: list[Path], dim: int) -> Tensor:
    import numpy as np

    rows = torch.empty(len(paths), dim)
    for row, path in enumerate(paths):
        values = torch.from_numpy(np.load(path, allow_pickle=False)).flatten().float()
        if len(values) != dim:
            raise ValueError(f"{path}: {len(values)} numbers, dim={dim} wanted")
        rows[row] = values
    if not torch.isfinite(rows).all():
        bad = paths[int((~torch.isfinite(rows)).any(1).nonzero()[0])]
        raise ValueError(f"{bad} holds NaN or infinite numbers")
    return rows
