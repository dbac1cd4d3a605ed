"""A search as one piece of HTML: light enough to store many of them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_EDGE = 1  # transparent pixels around a picture
_QUALITY = 80  # of WebP; 32-pixel pictures are then about 0.5 kB each
_MARK = "#D55E00"  # the book's orange


class Found(NamedTuple):
    """What one method returned for a query."""

    rank: float  # place of the true origin; between two places if it ties
    pictures: Sequence[Tensor]  # the best matches, best first, (3, H, W) in [0, 1]
    is_origin: Sequence[bool]  # which of them is the true origin


def search_frame(
    photo: Tensor,
    translation: Tensor,
    found: Mapping[str, Found],
    *,
    caption: str,
    gallery_size: int,
) -> str:
    """A photo, what a model made of it, and what each method finds for that.

    The true origin is framed, and its place among all images stands above each row.

    Args:
        photo: (3, H, W) in [0, 1], the true origin.
        translation: (3, H, W) in [0, 1], the query.
        found: by the name of a method, its answer; as many pictures in each.
        caption: how the translation was made.
        gallery_size: number of images searched.

    Returns:
        HTML with embedded WebP pictures; each has alternative text.

    Raises:
        ValueError: no method, a method without pictures, or not one mark a picture.
    """
    if not found:
        raise ValueError("found={}: give at least one method")
    columns = {len(answer.pictures) for answer in found.values()}
    if len(columns) > 1 or 0 in columns:
        raise ValueError(f"{sorted(columns)} pictures: as many in each, at least one")
    share = 100 / columns.pop()  # percent of the width for one picture
    text = html.escape(caption)
    parts = [
        '<div style="display:flex;align-items:center;gap:1em">',
        f'<div style="flex:0 0 {2 * share:g}%">',
        _strip([photo, translation], alt=f"A photo, and its translation: {caption}"),
        f"</div><div>A photo and its translation:<br>{text}</div></div>",
    ]
    for name, answer in found.items():
        if len(answer.is_origin) != len(answer.pictures):
            raise ValueError(
                f"{name!r}: {len(answer.is_origin)} marks for {len(answer.pictures)} "
                "pictures"
            )
        place = f"{name}: true origin at place {answer.rank:g} of {gallery_size:,}"
        among = "framed" if any(answer.is_origin) else "not among them"
        parts += [
            f'<div style="margin-top:.5em">{html.escape(place)}</div>',
            '<div style="position:relative">',
            _strip(answer.pictures, alt=f"The best matches; true origin {among}"),
            *[
                _frame(k * share, share)
                for k, is_it in enumerate(answer.is_origin)
                if is_it
            ],
            "</div>",
        ]
    inner = "".join(parts)
    return f'<div style="line-height:1.4;margin-top:.5em;max-width:560px">{inner}</div>'


def _strip(pictures: Sequence[Tensor], *, alt: str) -> str:
    """Pictures side by side as one image; what lies between them is transparent."""
    from PIL import Image

    row = torch.stack(list(pictures)).clamp(0, 1).cpu()
    # (N, 3, H, W) -> (N, 4, H, W), opaque -> padded -> (4, H, N W)
    row = torch.cat([row, torch.ones_like(row[:, :1])], 1)
    row = torch.nn.functional.pad(row, [_EDGE] * 4).permute(1, 2, 0, 3).flatten(2)
    pixels = (row * 255).round().byte().permute(1, 2, 0).numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="WEBP", quality=_QUALITY)
    data = base64.b64encode(stream.getvalue()).decode()
    return (
        f'<img alt="{html.escape(alt)}" src="data:image/webp;base64,{data}" '
        'style="display:block;width:100%;image-rendering:pixelated;'
        'padding:0;background:none;filter:none">'
    )


def _frame(left: float, width: float) -> str:
    return (
        f'<span style="position:absolute;inset:0 auto 0 {left:g}%;width:{width:g}%;'
        f'box-sizing:border-box;border:4px solid {_MARK}"></span>'
    )
