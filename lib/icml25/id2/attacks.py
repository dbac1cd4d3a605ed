"""What may happen to a translation on its way: compression, blur, crop, noise."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def jpeg(images: Tensor, *, quality: int) -> Tensor:
    """Save each of (N, 3, H, W) in [0, 1] as JPEG of quality 1 to 100, and reload."""
    from PIL import Image

    if not 1 <= quality <= 100:
        raise ValueError(f"quality={quality}: give a whole number from 1 to 100")
    out = []
    for image in (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy():
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, format="JPEG", quality=quality)
        pixels = bytearray(Image.open(stream).convert("RGB").tobytes())
        out.append(torch.frombuffer(pixels, dtype=torch.uint8).view(image.shape))
    return torch.stack(out).permute(0, 3, 1, 2).to(images) / 255


def blur(images: Tensor, *, sigma: float) -> Tensor:
    """Gaussian blur of ``sigma`` pixels with reflecting borders."""
    limit = (min(images.shape[-2:]) - 1) / 3
    if not 0 < sigma <= limit:
        raise ValueError(f"sigma={sigma}: give pixels above 0, up to {limit:.1f}")
    reach = max(1, min(round(3 * sigma), min(images.shape[-2:]) - 1))
    place = torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype)
    weight = (-(place**2) / (2 * sigma**2)).exp()
    weight = (weight / weight.sum()).expand(3, 1, 1, -1)
    conv = torch.nn.functional.conv2d
    padded = torch.nn.functional.pad(images, (reach,) * 4, mode="reflect")
    return conv(conv(padded, weight, groups=3), weight.mT, groups=3)


def crop(images: Tensor, *, share: float) -> Tensor:
    """Keep the middle ``share`` of each side and stretch it back to full size."""
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: give a number in (0, 1]")
    middle = images
    for side in (-2, -1):
        size = images.shape[side]
        keep = max(1, round(share * size))
        middle = middle.narrow(side, (size - keep) // 2, keep)
    return torch.nn.functional.interpolate(
        middle, size=images.shape[-2:], mode="bilinear", align_corners=False
    )


ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "jpeg 75": partial(jpeg, quality=75),
    "jpeg 30": partial(jpeg, quality=30),
    "blur 0.5": partial(blur, sigma=0.5),
    "blur 1": partial(blur, sigma=1.0),
    "crop 94%": partial(crop, share=30 / 32),
}
