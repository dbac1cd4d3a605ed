"""Baselines that need the photographs: pixels, a trained CNN, another VAE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .autoencoders import embed
from .generators import FAMILY
from .linear import LinearIdentifier
from .margin import CosFaceConfig, train_cosface
from .ranking import map_acc, rank_of_positive, standard_error, unit
from .selection import LAMBDAS, choose_lambda

if TYPE_CHECKING:
    from .build import Build

CNN_WIDTH = 128


def make_cnn(size: int = 32) -> nn.Sequential:
    """A small residual network on rows of 3 x size x size pixels in [-1, 1]."""
    return nn.Sequential(
        nn.Unflatten(1, (3, size, size)),
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        _Residual(32, 64),
        _Residual(64, CNN_WIDTH),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * CNN_WIDTH, CNN_WIDTH),
    )


class _Residual(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, num_in),
            nn.ReLU(),
            nn.Conv2d(num_in, num_out, 3, stride=2, padding=1),
            nn.GroupNorm(8, num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1),
        )
        self.skip = nn.Conv2d(num_in, num_out, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.skip(x)


def _rows(images: Tensor) -> Tensor:
    """8-bit or [0, 1] images to rows of pixels in [-1, 1]."""
    if images.dtype == torch.uint8:
        images = images.float() / 255
    return (2 * images - 1).flatten(1)


def train_cnn(build: Build, generator: torch.Generator) -> dict[str, Any]:
    """A CNN trained by CosFace on the seen model's pairs, and what it says of all."""
    pairs = build.pairs("A")
    photos = _rows(build.photos.images).to(build.device)
    config = CosFaceConfig(
        num_steps=build.config.cnn_steps,
        lr=2e-3,
        centre_lr=1e-2,
        width=CNN_WIDTH,
        init="default",
        ema=0.98,
    )
    network, curve = train_cosface(
        photos[build.train],
        _rows(pairs["images"]).to(build.device),
        torch.searchsorted(build.train, pairs["rows"]),
        config=config,
        network=make_cnn().to(build.device),
        generator=generator,
        desc="CNN",
    )
    network.eval()

    def describe(rows: Tensor) -> Tensor:
        parts = rows.to(build.device).split(512)
        return torch.cat([unit(network(part)).cpu() for part in parts])

    described = {"gallery": describe(photos[build.test])}
    for code in FAMILY:
        described[code] = describe(_rows(build.queries(code)["images"]))
    return described | {"curve": torch.tensor(curve)}


def photo_baselines(build: Build) -> dict[str, Any]:
    """mAP, accuracy and standard error of methods whose features we do not ship."""
    pairs = build.pairs("A")
    owner = torch.searchsorted(build.train, pairs["rows"])
    positives = {
        code: torch.searchsorted(build.test, build.queries(code)["rows"])
        for code in FAMILY
    }
    pixels = _rows(build.photos.images)
    small = nn.AvgPool2d(2)
    tables: dict[str, dict[str, list[float]]] = {}

    def measure(name: str, describe, photos: Tensor, of_queries) -> None:
        gallery = describe(photos[build.test])
        tables[name] = {}
        for code in FAMILY:
            q = describe(of_queries(build.queries(code)))
            ranks = rank_of_positive(q, gallery, positives[code])
            tables[name][code] = [*map_acc(ranks), standard_error(ranks)]

    mean = pixels[build.train].mean(0)
    measure(
        "pixels",
        lambda z: unit(z - mean),
        pixels,
        lambda made: _rows(made["images"]),
    )
    vae = build.kl_vae()

    def own_vae(images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            images = images.float() / 255
        return embed(vae, images.to(build.device)).cpu()

    thumbs = _rows(small(build.photos.images))
    kinds = {
        "thumbnails": (thumbs, lambda m: _rows(small(m["images"].float() / 255))),
        "own VAE": (own_vae(build.photos.images), lambda m: own_vae(m["images"])),
    }
    lams = {}
    for name, (photos, of_queries) in kinds.items():
        train, gen = photos[build.train], of_queries(pairs)
        mean = train.mean(0)
        measure(f"{name}, cosine", lambda z, m=mean: unit(z - m), photos, of_queries)
        lams[name], _ = choose_lambda(train, gen, owner, grid=LAMBDAS)
        w = LinearIdentifier.fit(train[owner], gen, lam=lams[name], photos=train)
        measure(f"{name}, closed form", w, photos, of_queries)
    return {"map_acc": tables, "lam": lams}
