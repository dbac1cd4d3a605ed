"""Rows of small pictures as one piece of HTML: light enough to store many of them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_FRAME = 3  # pixels around a picture
_MARK = (0.84, 0.37, 0.0)  # the book's orange


def strips(
    rows: Mapping[str, Sequence[Tensor]],
    marked: Mapping[str, Sequence[bool]],
    *,
    alt: str,
) -> str:
    """Rows of pictures, some of them framed, as one image.

    Args:
        rows: by label, pictures (3, H, W) in [0, 1], all of one size, as many in each.
        marked: by label, which pictures get an orange frame.
        alt: alternative text; the labels, top to bottom, are added.

    Returns:
        HTML with one embedded PNG.
    """
    lines = []
    for label, pictures in rows.items():
        framed = [
            _framed(picture, is_marked=is_marked)
            for picture, is_marked in zip(pictures, marked[label], strict=True)
        ]
        lines.append(torch.cat(framed, 2))
    return (
        f'<img alt="{html.escape(alt)}: {html.escape(", ".join(rows))}" '
        'style="width:560px;max-width:100%;image-rendering:pixelated" '
        f'src="data:image/png;base64,{_png(torch.cat(lines, 1))}">'
    )


def _framed(picture: Tensor, *, is_marked: bool) -> Tensor:
    _, height, width = picture.shape
    colour = torch.tensor(_MARK if is_marked else (1.0, 1.0, 1.0))
    canvas = colour[:, None, None].expand(3, height + 2 * _FRAME, width + 2 * _FRAME)
    canvas = canvas.clone()
    canvas[:, _FRAME:-_FRAME, _FRAME:-_FRAME] = picture.clamp(0, 1).cpu()
    return canvas


def _png(picture: Tensor) -> str:
    from PIL import Image

    pixels = (picture * 255).round().byte().permute(1, 2, 0).numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()
