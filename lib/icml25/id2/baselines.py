"""Baselines that need the photographs: pixels, a trained CNN, another VAE."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from icml25.core import make_generator, progress

from .autoencoders import embed
from .generators import FAMILY
from .linear import LinearIdentifier
from .photos import prompt
from .ranking import map_acc, rank_of_positive, standard_error, unit
from .selection import LAMBDAS, NUM_HELD_OUT, choose_lambda

if TYPE_CHECKING:
    from .build import Build

CNN_WIDTH = 128
_CNN_LR = 2e-3
_CNN_BATCH = 128
_TEMPERATURE = 0.07


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
    """A CNN trained for similarity on the seen model's pairs: its weights and losses.

    In each step a batch of translations has to pick its own origins out of the batch's,
    and the other way round (cross-entropy of cosines over a temperature). A margin loss
    with one class an origin does not get off the ground in as few steps.
    """
    pairs, config = build.pairs("A"), build.config
    photos = _rows(build.photos.images).to(build.device)
    made = _rows(pairs["images"]).to(build.device)
    network = make_cnn().to(build.device)
    averaged = [p.detach().clone() for p in network.parameters()]
    optimizer = torch.optim.AdamW(network.parameters(), lr=_CNN_LR, fused=True)
    curve = []
    for step in progress(range(config.cnn_steps), "CNN"):
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / config.cnn_steps))
            group["lr"] = _CNN_LR * min(1.0, (step + 1) / 20) * max(0.02, cosine)
        rows = torch.randint(len(made), (_CNN_BATCH,), generator=generator)
        both = torch.stack([photos[pairs["rows"][rows]], made[rows]])
        if step % 2:  # mirrored
            both = both.unflatten(2, (3, 32, 32)).flip(4).flatten(2)
        origin, gen = nn.functional.normalize(network(both.flatten(0, 1))).chunk(2)
        # The same origin twice in a batch is no mistake to be punished.
        same = pairs["rows"][rows][:, None] == pairs["rows"][rows]
        same = (same & ~torch.eye(len(rows), dtype=torch.bool)).to(build.device)
        logits = (gen @ origin.mT / _TEMPERATURE).masked_fill(same, -1e4)
        target = torch.arange(len(rows), device=build.device)
        cross_entropy = nn.functional.cross_entropy
        loss = (cross_entropy(logits, target) + cross_entropy(logits.mT, target)) / 2
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        weight = 1 - min(0.97, (step + 1) / (step + 10))
        live = [p.data for p in network.parameters()]
        torch._foreach_lerp_(averaged, live, weight)
        curve.append(loss.item())
    with torch.no_grad():
        for p, mean in zip(network.parameters(), averaged, strict=True):
            p.copy_(mean)
    return {**network.state_dict(), "curve": torch.tensor(curve)}


def describe_by_cnn(build: Build) -> dict[str, Tensor]:
    """The trained CNN's descriptors of the gallery and of every model's queries."""
    network = make_cnn()
    weights = build.stage("cnn_weights", lambda g: train_cnn(build, g))
    names = network.state_dict()
    network.load_state_dict({key: weights[key] for key in names})
    network.eval().to(build.device)

    @torch.no_grad()
    def describe(images: Tensor) -> Tensor:
        parts = _rows(images).to(build.device).split(512)
        return torch.cat([unit(network(part)).cpu() for part in parts])

    described = {"gallery": describe(build.photos.images[build.test])}
    for code in FAMILY:
        described[code] = describe(build.queries(code)["images"])
    return described


def prompt_effect(build: Build, *, count: int = 24) -> dict[str, Any]:
    """How much the words matter: mean change, in grey levels of 255, of a translation.

    By model: with another prompt and the same noise; with other noise and the same
    prompt. A model that hardly answers its prompt has a small first number.
    """
    images = build.photos.images[build.test[:count]].to(build.device)
    words = (prompt("dark", "blue", "ant"), prompt("bright", "orange", "sunflower"))
    found = {}
    for code in FAMILY:
        model = build.generator(code)

        def run(text: str, seed: int, model=model) -> Tensor:
            draw = make_generator(seed)
            return model.translate(images, [text] * len(images), generator=draw)

        base = run(words[0], 0)
        changed = (run(words[1], 0), run(words[0], 1))
        found[code] = [255 * (base - x).abs().mean().item() for x in changed]
    return {"grey_levels": found}


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
    held_out = min(NUM_HELD_OUT, len(owner.unique()) // 2)
    for name, (photos, of_queries) in kinds.items():
        train, gen = photos[build.train], of_queries(pairs)
        mean = train.mean(0)
        measure(f"{name}, cosine", lambda z, m=mean: unit(z - m), photos, of_queries)
        lams[name], _ = choose_lambda(
            train, gen, owner, grid=LAMBDAS, num_held_out=held_out
        )
        w = LinearIdentifier.fit(train[owner], gen, lam=lams[name], photos=train)
        measure(f"{name}, closed form", w, photos, of_queries)
    return {"map_acc": tables, "lam": lams}
