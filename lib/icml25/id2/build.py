"""Build everything the chapter ships: autoencoder, six generators, features.

    python -m icml25 run id2 build

Reads the registered photos and the pretrained TAEF2, writes into ``build/id2`` of the
current folder, one file a stage, and ends with ``build/id2/assets``, whose files are
what ``icml25/assets/id2`` holds. A stage whose file is there is not run again, and a
training that was interrupted goes on from its last hundred steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from icml25.core import data, make_generator, progress

from . import attacks
from .autoencoders import BlockPCA, decode, embed, encode, load_taef2, load_tensors
from .diffusion import diffusion_loss
from .generators import FAMILY, Generator, make_kl_vae, make_scheduler
from .photos import Photos, describe, load_caltech, random_prompts, vocabulary

STRENGTHS = (0.5, 0.65, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class BuildConfig:
    """Sizes of the build."""

    folder: str = "build/id2"  # where the stages write, relative to the current folder
    vae_steps: int = 2_700  # of the KL autoencoder
    vae_batch: int = 32
    kl_weight: float = 1e-4  # of the posterior's divergence, per latent number
    step_share: float = 1.0  # of each generator's training steps
    num_queries: int = 200  # a model, from the test split
    num_seen: int = 1_500  # train photos that the seen model translates
    num_second: int = 500  # of them, those it translates twice
    num_pairs: int = 200  # an unseen model, only to fit W on it for comparison
    num_strength: int = 120  # queries at each strength
    num_photos: int = 0  # of each split; 0 takes all, a few make a trial
    cnn_steps: int = 750  # of the convolutional baseline


LAPTOP = BuildConfig()
PAPER = BuildConfig(vae_steps=20_000, step_share=8.0, num_queries=2_000)


class Build:
    """The stages; each is a method that returns a dict of tensors and numbers."""

    def __init__(self, config: BuildConfig, device: torch.device | str, seed: int):
        self.config, self.device, self.seed = config, device, seed
        self.folder = Path(config.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim_folder()
        self.photos = _first(load_caltech(), config.num_photos)
        self.words = vocabulary(self.photos.classes)
        self.train = self.photos.is_train.nonzero().flatten()
        self.test = (~self.photos.is_train).nonzero().flatten()
        self.taef2 = load_taef2(
            data.fetch("taef2", "taef2_encoder.pth"),
            data.fetch("taef2", "taef2_decoder.pth"),
        ).to(device)

    def _claim_folder(self) -> None:
        """Stages of two configurations or seeds must not mix in one folder."""
        made = {"seed": self.seed, **vars(self.config), "folder": ""}
        made["family"] = {code: vars(config) for code, config in FAMILY.items()}
        text = json.dumps(made, indent=1)
        path = self.folder / "config.json"
        if path.exists() and path.read_text() != text:
            raise ValueError(
                f"folder={self.config.folder!r} holds stages of another configuration "
                "or seed: delete it, or give another folder"
            )
        path.write_text(text)

    def stage(self, name: str, make: Callable[[torch.Generator], dict]) -> dict:
        """The stage's file; made if it is not there."""
        path = self.folder / f"{name}.pt"
        if path.exists():
            return load_tensors(path)
        begin = time.process_time()
        offset = sum((k + 1) * ord(c) for k, c in enumerate(name))  # stable, by name
        with torch.random.fork_rng():  # diffusers initialises from the global stream
            torch.manual_seed(100_003 * self.seed + offset)
            made = make(make_generator(100_003 * self.seed + offset))
        made.setdefault("cpu_s", time.process_time() - begin)
        _write(made, path)
        return made

    # --- training ----------------------------------------------------------------

    def kl_vae(self) -> nn.Module:
        vae = make_kl_vae()
        made = self.stage("kl_vae", lambda g: self._train_vae(g, make_kl_vae()))
        vae.load_state_dict(_state(made))
        return vae.eval().requires_grad_(False).to(self.device)

    def _train_vae(self, generator: torch.Generator, vae: nn.Module) -> dict:
        images = self.photos.images[self.train].to(self.device)
        vae = vae.to(self.device, memory_format=torch.channels_last)

        def loss(step: int) -> Tensor:
            rows = torch.randint(
                len(images), (self.config.vae_batch,), generator=generator
            )
            batch = 2 * images[rows] - 1
            if step % 2:
                batch = batch.flip(3)
            posterior = vae.encode(batch).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator)
            latents = posterior.mean + posterior.std * noise.to(batch)
            error = vae.decode(latents).sample - batch
            size = posterior.mean[0].numel()
            divergence = posterior.kl().mean() / size
            # Squared error for the picture, absolute error against blur.
            fit = error.square().mean() + 0.2 * error.abs().mean()
            return fit + self.config.kl_weight * divergence

        made = self._fit(
            "kl_vae", vae, loss, generator, self.config.vae_steps, lr=2e-3, ema=0.99
        )
        vae.load_state_dict(_state(made))
        vae.eval()
        test = self.photos.images[self.test[:256]].to(self.device)
        with torch.no_grad():
            error = (decode(vae, encode(vae, test)) - test).square().mean((1, 2, 3))
        made["psnr_db"] = (-10 * error.log10()).mean().item()
        return made

    def generator(self, code: str) -> Generator:
        config = FAMILY[code]
        vae: nn.Module = self.taef2
        if config.latent == "kl":
            vae = self.kl_vae()
        elif config.latent == "pca":
            vae = BlockPCA.fit(self.photos.images[self.train]).to(self.device)
        made = self.stage(f"generator_{code}", lambda g: self._train(code, vae, g))
        model = Generator(config, vae, self.words).to(self.device)
        model.load_state_dict(_state(made), strict=False)
        return model.eval().requires_grad_(False)

    def _train(self, code: str, vae: nn.Module, generator: torch.Generator) -> dict:
        config = FAMILY[code]
        model = Generator(config, vae, self.words).to(self.device)
        images = self.photos.images[self.train].to(self.device)
        with torch.no_grad():
            latents = torch.cat([encode(vae, part) for part in images.split(256)])
        model.shift.copy_(latents.mean((0, 2, 3))[:, None, None])
        model.scale.copy_(latents.std((0, 2, 3))[:, None, None])
        latents = (latents - model.shift) / model.scale
        labels = self.photos.labels[self.train].tolist()
        subjects = [self.photos.classes[k] for k in labels]
        tokens = model.tokens(describe(images.cpu(), subjects))
        empty = model.tokens([""])
        scheduler = make_scheduler(config)

        def loss(step: int) -> Tensor:
            rows = torch.randint(
                len(latents), (config.batch_size,), generator=generator
            )
            drop = torch.rand(len(rows), 1, generator=generator) < 0.1
            words = torch.where(drop.to(tokens.device), empty, tokens[rows])
            cond = model.read(words)
            return diffusion_loss(
                model.predict, scheduler, latents[rows], cond, generator=generator
            )

        steps = max(1, round(self.config.step_share * config.train_steps))
        made = self._fit(
            f"generator_{code}",
            model.trained(),
            loss,
            generator,
            steps,
            lr=config.lr,
            ema=config.ema,
        )
        made |= {"shift": model.shift, "scale": model.scale}
        if config.latent == "pca":
            made |= {"vae.mean": vae.mean, "vae.basis": vae.basis}
        return made

    def _fit(
        self,
        name: str,
        module: nn.Module,
        loss: Callable[[int], Tensor],
        generator: torch.Generator,
        num_steps: int,
        *,
        lr: float,
        ema: float,
    ) -> dict:
        """AdamW with a warm-up and a cosine; averaged weights; saved every 100 steps.

        All random numbers come from ``generator``, whose state is saved too.
        """
        partial = self.folder / f"{name}.partial"
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr, fused=True)
        averaged = [p.detach().clone() for p in module.parameters()]
        first, curve, spent = 0, [], 0.0
        if partial.exists():
            saved = torch.load(partial, weights_only=True)
            module.load_state_dict(saved["module"])
            optimizer.load_state_dict(saved["optimizer"])
            generator.set_state(saved["generator"])
            averaged, first = saved["averaged"], saved["step"]
            curve, spent = saved["curve"], saved["cpu_s"]
        begin = time.process_time() - spent
        for step in progress(range(first, num_steps), f"{name} from step {first}"):
            warm = min(1.0, (step + 1) / 30)
            for group in optimizer.param_groups:
                cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
                group["lr"] = lr * warm * max(0.02, cosine)
            value = loss(step)
            value.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            weight = 1 - min(ema, (step + 1) / (step + 10))
            torch._foreach_lerp_(
                averaged, [p.data for p in module.parameters()], weight
            )
            curve.append(value.item())
            if (step + 1) % 100 == 0:
                content = {
                    "module": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "generator": generator.get_state(),
                    "averaged": averaged,
                    "step": step + 1,
                    "curve": curve,
                    "cpu_s": time.process_time() - begin,
                }
                _write(content, partial)
        with torch.no_grad():
            for p, mean in zip(module.parameters(), averaged, strict=True):
                p.copy_(mean)
        partial.unlink(missing_ok=True)
        state = {key: value.cpu() for key, value in module.state_dict().items()}
        return state | {
            "curve": torch.tensor(curve),
            "num_steps": num_steps,
            "cpu_s": time.process_time() - begin,
        }

    # --- translations ------------------------------------------------------------

    def translations(self, name: str, code: str, rows: Tensor, **options: Any) -> dict:
        """``rows`` of the photos under random prompts: 8-bit images and embeddings."""

        def make(generator: torch.Generator) -> dict:
            model = self.generator(code)
            texts = random_prompts(len(rows), self.photos.classes, generator)
            parts = []
            chunks = list(range(0, len(rows), 250))
            for start in progress(chunks, f"{name}: {len(rows)} translations"):
                part = rows[start : start + 250]
                images = self.photos.images[part].to(self.device)
                parts.append(
                    model.translate(
                        images,
                        texts[start : start + 250],
                        generator=generator,
                        **options,
                    ).cpu()
                )
            return self._embedded(torch.cat(parts)) | {"rows": rows}

        return self.stage(name, make)

    def _embedded(self, images: Tensor) -> dict:
        return {
            "images": (images * 255).round().byte(),
            "taef2": embed(self.taef2, images.to(self.device)).cpu(),
        }

    def photo_features(self) -> dict:
        return self.stage(
            "photos",
            lambda g: {
                "taef2": embed(self.taef2, self.photos.images.to(self.device)).cpu()
            },
        )

    def _pick(self, rows: Tensor, count: int, tag: int) -> Tensor:
        order = torch.randperm(len(rows), generator=make_generator(self.seed + tag))
        return rows[order[:count]]

    def queries(self, code: str) -> dict:
        rows = self._pick(self.test, self.config.num_queries, 10 + ord(code))
        return self.translations(f"queries_{code}", code, rows)

    def pairs(self, code: str) -> dict:
        if code == "A":
            first = self._pick(self.train, self.config.num_seen, 1)
            rows = torch.cat([first, first[: self.config.num_second]])
        else:
            rows = self._pick(self.train, self.config.num_pairs, 200 + ord(code))
        return self.translations(f"pairs_{code}", code, rows)

    def strengths(self) -> dict[str, dict]:
        rows = self._pick(self.test, self.config.num_strength, 3)
        return {
            f"{strength:g}": self.translations(
                f"strength_{strength:g}", "A", rows, strength=strength
            )
            for strength in STRENGTHS
        }

    def attacked(self) -> dict[str, dict]:
        images = self.queries("A")["images"].float() / 255
        return {
            name: self.stage(
                f"attack_{name}", lambda g, f=attack: self._embedded(f(images))
            )
            for name, attack in attacks.ATTACKS.items()
        }


def run_build(
    config: BuildConfig = LAPTOP, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Train the autoencoder and the generators, translate, embed, pack.

    Returns:
        CPU seconds a stage, final losses, the autoencoder's quality, sizes of the
        files, and the baselines that need the photos themselves (pixels, another
        autoencoder).

    Raises:
        icml25.core.data.DataError: the photos or TAEF2's weights are not at hand.
        ValueError: the folder holds stages of another configuration or seed.
    """
    from . import baselines, packing

    build = Build(config, device, seed)
    build.photo_features()
    for code in FAMILY:
        build.generator(code)
        build.queries(code)
        build.pairs(code)
    build.strengths()
    build.attacked()
    build.stage("cnn", lambda g: baselines.describe_by_cnn(build))
    others = build.stage("others", lambda g: baselines.photo_baselines(build))
    prompts = build.stage("prompts", lambda g: baselines.prompt_effect(build))
    sizes = packing.pack(build)
    return {
        "cpu_s": {
            path.stem: round(load_tensors(path)["cpu_s"], 1)
            for path in sorted(build.folder.glob("*.pt"))
        },
        "final_loss": {
            code: build.stage(f"generator_{code}", dict)["curve"][-50:].mean().item()
            for code in FAMILY
        },
        "vae_psnr_db": build.stage("kl_vae", dict)["psnr_db"],
        "cnn_loss": build.stage("cnn_weights", dict)["curve"][-20:].mean().item(),
        "map_acc": others["map_acc"],
        "prompt_effect": prompts["grey_levels"],
        "bytes": sizes,
    }


def _first(photos: Photos, count: int) -> Photos:
    """The first ``count`` photos of each split; all for 0."""
    if count == 0:
        return photos
    splits = (photos.is_train, ~photos.is_train)
    rows = torch.cat([split.nonzero().flatten()[:count] for split in splits])
    return replace(
        photos,
        images=photos.images[rows],
        labels=photos.labels[rows],
        is_train=photos.is_train[rows],
    )


def _state(made: dict) -> dict[str, Tensor]:
    """The weights in a stage's file, without its bookkeeping."""
    skip = {"curve", "num_steps", "cpu_s", "psnr_db"}
    return {key: value for key, value in made.items() if key not in skip}


def _write(content: dict, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".writing")
    torch.save(content, part)
    part.replace(path)
