"""The photographs: the registered ones, the shipped ones, and words that fit them."""

from __future__ import annotations

import csv
from dataclasses import dataclass

import torch
from torch import Tensor

from icml25.core import data

COLOURS = {
    "black": (0.05, 0.05, 0.05),
    "grey": (0.5, 0.5, 0.5),
    "white": (0.95, 0.95, 0.95),
    "red": (0.8, 0.15, 0.15),
    "orange": (0.9, 0.5, 0.15),
    "yellow": (0.9, 0.85, 0.3),
    "green": (0.25, 0.6, 0.25),
    "blue": (0.25, 0.45, 0.8),
    "purple": (0.5, 0.25, 0.65),
    "pink": (0.9, 0.6, 0.7),
    "brown": (0.45, 0.3, 0.2),
}
BRIGHTNESS = ("dark", "bright")
#: Photographs without people that ship inside scikit-image and scikit-learn.
SHIPPED = (
    "chelsea",
    "coffee",
    "motorcycle",
    "rocket",
    "retina",
    "hubble",
    "china",
    "flower",
)


@dataclass(frozen=True)
class Photos:
    """Photographs with their class and split.

    Attributes:
        images: (N, 3, S, S) float32 in [0, 1].
        labels: (N,) class numbers.
        classes: the words for them.
        is_train: (N,) True for the 3,500 that models and statistics may see.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    is_train: Tensor


def load_caltech(size: int = 32) -> Photos:
    """The registered photos (Caltech-101, CC BY 4.0), shrunk by averaging.

    Args:
        size: side in pixels, 64 or a divisor of it.

    Raises:
        ValueError: ``size`` does not divide 64.
        icml25.core.data.DataError: the photos are not at hand (the message says where
            they come from).
    """
    from matplotlib.image import imread

    if size < 8 or 64 % size:
        raise ValueError(f"size={size}: give 64, 32, 16 or 8")
    with data.fetch("caltech64", "index.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    mosaics = [
        torch.from_numpy(imread(data.fetch("caltech64", f"mosaic_{k}.jpg")).copy())
        for k in range(3)
    ]
    # (rows 64, columns 64, 3) -> (rows, columns, 3, 64, 64) -> (tiles, 3, 64, 64)
    tiles = [
        mosaic.unflatten(1, (-1, 64)).unflatten(0, (-1, 64)).permute(0, 2, 4, 1, 3)
        for mosaic in mosaics
    ]
    images = torch.stack(
        [tiles[int(r["mosaic"])][int(r["row"]), int(r["col"])] for r in rows]
    )
    names = {int(r["label"]): r["class"].lower() for r in rows}
    return Photos(
        images=torch.nn.functional.avg_pool2d(images.float() / 255, 64 // size),
        labels=torch.tensor([int(r["label"]) for r in rows]),
        classes=tuple(names[k] for k in sorted(names)),
        is_train=torch.tensor([r["split"] == "train" for r in rows]),
    )


def load_shipped(name: str) -> Tensor:
    """One photograph that ships in a dependency, (3, H, W) float32 in [0, 1].

    Raises:
        ValueError: ``name`` is none of ``SHIPPED``.
    """
    if name not in SHIPPED:
        raise ValueError(f"name={name!r}: one of {', '.join(SHIPPED)}")
    if name in ("china", "flower"):
        from sklearn.datasets import load_sample_image

        pixels = load_sample_image(f"{name}.jpg")
    else:
        from skimage import data as shipped

        if name == "motorcycle":
            pixels = shipped.stereo_motorcycle()[0]
        else:
            name = "hubble_deep_field" if name == "hubble" else name
            pixels = getattr(shipped, name)()
    return torch.from_numpy(pixels[..., :3].copy()).permute(2, 0, 1).float() / 255


def shipped_crops(
    names: tuple[str, ...] = SHIPPED, *, window: int = 128, size: int = 32
) -> tuple[Tensor, list[str]]:
    """Square crops of the shipped photographs, side by side without overlap.

    Args:
        names: which photographs.
        window: side of a crop in the photograph's pixels; a multiple of ``size``.
        size: side it is averaged down to.

    Returns:
        Crops (N, 3, size, size) in [0, 1], and the photograph each comes from.

    Raises:
        ValueError: an unknown name; a window that is no multiple of ``size``, or wider
            than a photograph.
    """
    if window < size or window % size:
        raise ValueError(f"window={window}: give a multiple of size={size}")
    crops, origins = [], []
    for name in names:
        photo = load_shipped(name)
        if window > min(photo.shape[1:]):
            raise ValueError(
                f"window={window}: {name!r} is {photo.shape[1]} x {photo.shape[2]}"
            )
        tiles = photo.unfold(1, window, window).unfold(2, window, window)
        tiles = tiles.permute(1, 2, 0, 3, 4).flatten(0, 1)  # (tiles, 3, window, window)
        crops.append(torch.nn.functional.avg_pool2d(tiles, window // size))
        origins += [name] * len(tiles)
    return torch.cat(crops), origins


def describe(images: Tensor, subjects: list[str]) -> list[str]:
    """Captions ``a {bright|dark} {colour} photo of a {subject}`` computed from pixels.

    Args:
        images: (N, 3, H, W) in [0, 1].
        subjects: N words, the class names.
    """
    mean = images.mean((2, 3))  # (N, 3)
    bright = (mean.mean(1) > 0.5).long().tolist()
    # Averages are duller than what they are averages of: stretch away from grey.
    grey = mean.mean(1, keepdim=True)
    vivid = (grey + 2 * (mean - grey)).clamp(0, 1)
    palette = torch.tensor(list(COLOURS.values()))
    nearest = torch.cdist(vivid, palette).argmin(1).tolist()
    names = list(COLOURS)
    return [
        prompt(BRIGHTNESS[b], names[k], subject)
        for b, k, subject in zip(bright, nearest, subjects, strict=True)
    ]


def prompt(brightness: str, colour: str, subject: str) -> str:
    """The one sentence all models read."""
    return f"a {brightness} {colour} photo of a {subject}"


def random_prompts(
    count: int, classes: tuple[str, ...], generator: torch.Generator
) -> list[str]:
    """Prompts whose three words are drawn independently of any image."""

    def draw(words):
        picked = torch.randint(len(words), (count,), generator=generator)
        return [words[k] for k in picked.tolist()]

    parts = zip(draw(BRIGHTNESS), draw(list(COLOURS)), draw(list(classes)), strict=True)
    return [prompt(*words) for words in parts]


def vocabulary(classes: tuple[str, ...]) -> list[str]:
    """All words of all prompts, special tokens first; a word's place is its id."""
    special = ["<pad>", "<unk>", "<start>", "<end>"]
    return [*special, "a", "photo", "of", *BRIGHTNESS, *COLOURS, *sorted(classes)]
