"""From images to embeddings and back: three kinds of autoencoder behind one call."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

TAEF2_FACTOR = 8  # pixels a latent cell, along each side
TAEF2_CHANNELS = 32


class _Block(nn.Module):
    """Three convolutions around a skip; ``pool`` adds a grouped 1x1 branch first."""

    def __init__(self, dim: int, *, pool: bool = False) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            _conv(dim, dim), nn.ReLU(), _conv(dim, dim), nn.ReLU(), _conv(dim, dim)
        )
        self.pool = (
            nn.Sequential(
                nn.Conv2d(dim, 4 * dim, 1, bias=False),
                nn.GroupNorm(4, 4 * dim),
                nn.ReLU(),
                nn.Conv2d(4 * dim, dim, 1, bias=False),
            )
            if pool
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return (self.conv(x) + x).relu()


class _SoftClamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * (x / 3).tanh()


def _conv(
    num_in: int, num_out: int, *, stride: int = 1, bias: bool = True
) -> nn.Module:
    return nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=bias)


class TAEF2(nn.Module):
    """The tiny distilled FLUX.2 autoencoder, written from its description.

    ``encode`` takes images in [0, 1], (N, 3, H, W) with H and W multiples of 8, to
    latents (N, 32, H/8, W/8); ``decode`` goes back and is not clamped. diffusers'
    ``AutoencoderTiny`` has no pooled middle block and cannot load these weights.

    Source: the weights' own description (madebyollin/taesd, MIT licence).
    """

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        down = [
            layer
            for _ in range(2)
            for layer in (_conv(dim, dim, stride=2, bias=False), *_blocks(dim, 3))
        ]
        self.encoder = nn.Sequential(
            *(_conv(3, dim), _Block(dim), *down),
            *(_conv(dim, dim, stride=2, bias=False), *_blocks(dim, 3, pool=True)),
            _conv(dim, TAEF2_CHANNELS),
        )
        up = [nn.Upsample(scale_factor=2), _conv(dim, dim, bias=False)]
        self.decoder = nn.Sequential(
            *(_SoftClamp(), _conv(TAEF2_CHANNELS, dim), nn.ReLU()),
            *(*_blocks(dim, 3, pool=True), *up, *_blocks(dim, 3)),
            nn.Upsample(scale_factor=2),
            *(_conv(dim, dim, bias=False), *_blocks(dim, 3)),
            nn.Upsample(scale_factor=2),
            *(_conv(dim, dim, bias=False), _Block(dim), _conv(dim, 3)),
        )

    def encode(self, images: Tensor) -> Tensor:
        return self.encoder(images)

    def decode(self, latents: Tensor) -> Tensor:
        return self.decoder(latents)


def _blocks(dim: int, count: int, *, pool: bool = False) -> list[nn.Module]:
    return [_Block(dim, pool=pool) for _ in range(count)]


def load_taef2(encoder: Path | str, decoder: Path | str) -> TAEF2:
    """The pretrained TAEF2 in float32, from the two files of the data set ``taef2``.

    Raises:
        ValueError: a file that is no state dict of tensors, or of another network.
    """
    model = TAEF2()
    model.encoder.load_state_dict(load_tensors(encoder))
    model.decoder.load_state_dict(load_tensors(decoder))
    return model.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def load_tensors(path: Path | str) -> dict:
    """Read a checkpoint of plain tensors; nothing in the file is ever executed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, altered, or holds more than plain data.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises one of many for a damaged file
        raise ValueError(
            f"{path.name} is no readable checkpoint of plain tensors "
            f"({type(error).__name__}): restore it, or build it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not a dict")
    return {
        key: value.float() if _is_half(value) else value
        for key, value in content.items()
    }


def _is_half(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float16


class BlockPCA(nn.Module):
    """A linear autoencoder: each 8 x 8 block of pixels to its main components.

    Same calls as :class:`TAEF2`; the latent of (N, 3, H, W) is (N, k, H/8, W/8).
    """

    def __init__(self, mean: Tensor, basis: Tensor, *, block: int = 8) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("mean", mean)  # (3 * block**2,)
        self.register_buffer("basis", basis)  # (3 * block**2, k), orthonormal columns

    @classmethod
    def fit(cls, images: Tensor, num_components: int = 32, *, block: int = 8):
        """Principal components of all blocks of ``images`` (N, 3, H, W)."""
        rows = nn.functional.pixel_unshuffle(images, block)
        rows = rows.permute(0, 2, 3, 1).reshape(-1, rows.shape[1])  # (N h w, 3 b b)
        mean = rows.mean(0)
        centred = (rows - mean).double()
        _, vectors = torch.linalg.eigh(centred.mT @ centred)
        return cls(mean, vectors[:, -num_components:].flip(1).float(), block=block)

    def encode(self, images: Tensor) -> Tensor:
        rows = nn.functional.pixel_unshuffle(images, self.block)
        rows = rows - self.mean[:, None, None]
        return torch.einsum("nchw,ck->nkhw", rows, self.basis)

    def decode(self, latents: Tensor) -> Tensor:
        rows = torch.einsum("nkhw,ck->nchw", latents, self.basis)
        return nn.functional.pixel_shuffle(rows + self.mean[:, None, None], self.block)


def encode(vae: nn.Module, images: Tensor) -> Tensor:
    """Latents of images in [0, 1]: the mode of the posterior, without a scaling factor.

    Accepts diffusers' ``AutoencoderKL`` and ``AutoencoderTiny`` (which want [-1, 1] and
    get it), :class:`TAEF2` and :class:`BlockPCA`.

    Raises:
        ValueError: images that are not (N, 3, H, W), not finite, not in [0, 1], or
            whose sides do not divide by the autoencoder's factor.
        TypeError: images of another dtype than the autoencoder's weights.
    """
    if images.dim() != 4 or images.shape[1] != 3:
        raise ValueError(f"images={tuple(images.shape)}: give (N, 3, H, W)")
    factor = _factor(vae)
    if any(side == 0 or side % factor for side in images.shape[2:]):
        raise ValueError(
            f"images of {images.shape[2]} x {images.shape[3]} pixels: this autoencoder "
            f"needs sides that are multiples of {factor}"
        )
    dtype = next(chain(vae.parameters(), vae.buffers())).dtype
    if images.dtype != dtype:
        raise TypeError(f"images are {images.dtype}, the autoencoder is {dtype}")
    if images.numel():
        low, high = images.min().item(), images.max().item()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("images hold NaN or infinite values")
        if low < -0.01 or high > 1.01:
            raise ValueError(f"images go from {low:.3g} to {high:.3g}: give [0, 1]")
    if not hasattr(vae, "config"):
        return vae.encode(images)
    output = vae.encode(2 * images - 1)
    if hasattr(output, "latent_dist"):
        return output.latent_dist.mode()
    return output.latents


def decode(vae: nn.Module, latents: Tensor) -> Tensor:
    """Images in [0, 1] (clamped) of latents: the way back from :func:`encode`."""
    if not hasattr(vae, "config"):
        return vae.decode(latents).clamp(0, 1)
    return (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def embed(vae: nn.Module, images: Tensor, *, batch_size: int = 128) -> Tensor:
    """The embedding of the method: each image's latent, laid out as one row.

    Args:
        vae: an autoencoder as in :func:`encode`; it stays frozen.
        images: (N, 3, H, W) in [0, 1], on the autoencoder's device.
        batch_size: images encoded at once.

    Returns:
        (N, d) float32; d = channels x latent height x latent width.

    Raises:
        ValueError, TypeError: as :func:`encode`; no image at all; a batch below 1.

    Source: the released model card (256 x 256 images, d = 4 x 32 x 32 = 4096). The
    authors draw from the posterior; we take its mode, so that an image has one
    embedding.
    """
    if len(images) == 0:
        raise ValueError("images is empty: there is nothing to embed")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give at least 1")
    parts = [encode(vae, part).flatten(1).float() for part in images.split(batch_size)]
    return torch.cat(parts)


def _factor(vae: nn.Module) -> int:
    if isinstance(vae, BlockPCA):
        return vae.block
    if isinstance(vae, TAEF2):
        return TAEF2_FACTOR
    channels = getattr(vae.config, "block_out_channels", None)
    if channels is None:  # AutoencoderTiny
        channels = vae.config.encoder_block_out_channels
    return 2 ** (len(channels) - 1)
