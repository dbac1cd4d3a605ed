"""What the chapter ships: our checkpoints in float16, our features in 8 bits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .autoencoders import BlockPCA, load_tensors
from .generators import FAMILY, Generator, make_kl_vae

if TYPE_CHECKING:
    from .build import Build

MANIFEST = "MANIFEST.json"
MAX_BYTES = 5_000_000  # a file


@dataclass(frozen=True)
class Features:
    """TAEF2 embeddings of photos and translations, float32, rows of d = 512.

    Attributes:
        train: (3500, d) photos that models and W may see.
        pair_gen, pair_owner: translations by the seen model A, and the row of
            ``train`` each comes from.
        gallery: (2351, d) test photos.
        queries: by model, translations of test photos and the gallery row of each.
        strengths: by strength, the same for model A.
        attacked: by attack, model A's queries after it (same gallery rows).
        other_pairs: by unseen model, translations of train photos and their rows; only
            for the matrix of what is trained and tested on.
        cnn: descriptors of the gallery and of every model's queries by the CNN.
    """

    train: Tensor
    pair_gen: Tensor
    pair_owner: Tensor
    gallery: Tensor
    queries: dict[str, tuple[Tensor, Tensor]]
    strengths: dict[float, tuple[Tensor, Tensor]]
    attacked: dict[str, Tensor]
    other_pairs: dict[str, tuple[Tensor, Tensor]]
    cnn: dict[str, Tensor]


def encode_bytes(rows: Tensor, mean: Tensor, step: Tensor) -> Tensor:
    """Rows to 8-bit codes: how many ``step`` each number lies from ``mean``."""
    return ((rows - mean) / step).round().clamp(-127, 127).to(torch.int8)


def decode_bytes(codes: Tensor, mean: Tensor, step: Tensor) -> Tensor:
    """The way back from :func:`encode_bytes`, off by half a step at most."""
    return codes * step + mean


def pack(build: Build) -> dict[str, int]:
    """Write the assets of a finished build; returns the size of each file."""
    folder = build.folder / "assets"
    folder.mkdir(exist_ok=True)
    photos = build.photo_features()["taef2"]
    mean = photos[build.train].mean(0)
    queries = {code: build.queries(code) for code in FAMILY}
    pairs = {code: build.pairs(code) for code in FAMILY}
    # The widest excursion decides the step, so that nothing is cut off.
    every = [photos, *(m["taef2"] for m in (*queries.values(), *pairs.values()))]
    step = torch.stack([(x - mean).abs().amax(0) for x in every]).amax(0) / 127

    def coded(rows: Tensor) -> Tensor:
        return encode_bytes(rows, mean, step)

    def query(made: dict, split: Tensor) -> dict:
        return {
            "z": coded(made["taef2"]),
            "row": torch.searchsorted(split, made["rows"]).short(),
        }

    cnn = {
        key: (value * 127).round().to(torch.int8)
        for key, value in build.stage("cnn", dict).items()
        if key in ("gallery", *FAMILY)
    }
    contents = {
        "photos.pt": {
            "mean": mean,
            "step": step,
            "train": coded(photos[build.train]),
            "gallery": coded(photos[build.test]),
        },
        "pairs_seen.pt": query(pairs["A"], build.train),
        "pairs_unseen.pt": {
            code: query(made, build.train)
            for code, made in pairs.items()
            if code != "A"
        },
        "queries.pt": {
            "models": {code: query(made, build.test) for code, made in queries.items()},
            "strengths": {
                name: query(made, build.test)
                for name, made in build.strengths().items()
            },
            "attacks": {
                name: coded(made["taef2"]) for name, made in build.attacked().items()
            },
        },
        "cnn.pt": cnn,
        "kl_vae.pt": _half(build.stage("kl_vae", dict)),
    } | {
        f"generator_{code}.pt": _half(build.stage(f"generator_{code}", dict))
        for code in FAMILY
    }
    sizes, hashes = {}, {}
    for name, content in contents.items():
        torch.save(content, folder / name)
        sizes[name] = (folder / name).stat().st_size
        hashes[name] = _sha256(folder / name)
        if sizes[name] >= MAX_BYTES:
            raise ValueError(
                f"{name}: {sizes[name]:,} bytes, below {MAX_BYTES:,} wanted"
            )
    manifest = {
        "what": "made by `python -m icml25 run id2 build`; see README.md",
        "seed": build.seed,
        "config": vars(build.config) | {"folder": ""},
        "torch": torch.__version__,
        "words": build.words,
        "vae_psnr_db": build.stage("kl_vae", dict)["psnr_db"],
        "cpu_s": _seconds(build),
        "prompt_effect": build.stage("prompts", dict)["grey_levels"],
        "photo_baselines": build.stage("others", dict)["map_acc"],
        "files": {
            name: {"bytes": sizes[name], "sha256": hashes[name]} for name in contents
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return sizes


def _seconds(build: Build) -> dict[str, float]:
    """CPU seconds of each training, and of all translations together."""
    spent = {
        path.stem: float(load_tensors(path)["cpu_s"])
        for path in sorted(build.folder.glob("*.pt"))
    }
    made = ("queries_", "pairs_", "strength_", "attack_", "photos")
    total = sum(value for name, value in spent.items() if name.startswith(made))
    kept = {name: value for name, value in spent.items() if not name.startswith(made)}
    return {**kept, "translations": total}


def _half(made: dict) -> dict:
    """A checkpoint's tensors in float16."""
    skip = {"curve", "num_steps", "cpu_s", "psnr_db"}
    return {
        key: value.half() if value.is_floating_point() else value
        for key, value in made.items()
        if key not in skip
    }


# --- reading -----------------------------------------------------------------------


def assets() -> Path:
    """The folder that ships in the package."""
    return Path(str(resources.files("icml25"))) / "assets" / "id2"


@cache
def manifest(folder: Path | None = None) -> dict[str, Any]:
    """What the assets are: configuration, words, checksums, photo baselines."""
    return json.loads(((folder or assets()) / MANIFEST).read_text(encoding="utf-8"))


def _read(name: str, folder: Path | None) -> dict:
    """One asset, checked against the manifest.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is truncated or altered.
    """
    path = (folder or assets()) / name
    content = load_tensors(path)
    if _sha256(path) != manifest(folder)["files"][name]["sha256"]:
        raise ValueError(
            f"{name} is not the file of its {MANIFEST}: restore it, or build it again "
            "with `python -m icml25 run id2 build`"
        )
    return content


def load_features(folder: Path | None = None) -> Features:
    """All features the chapter ships, as float32.

    Args:
        folder: the assets of a build of one's own; default: those of the package.

    Raises:
        FileNotFoundError, ValueError: a file that is missing or altered.
    """
    photos = _read("photos.pt", folder)
    mean, step = photos["mean"], photos["step"]

    def z(codes: Tensor) -> Tensor:
        return decode_bytes(codes, mean, step)

    def pair(made: dict) -> tuple[Tensor, Tensor]:
        return z(made["z"]), made["row"].long()

    queries = _read("queries.pt", folder)
    pair_gen, pair_owner = pair(_read("pairs_seen.pt", folder))
    return Features(
        train=z(photos["train"]),
        pair_gen=pair_gen,
        pair_owner=pair_owner,
        gallery=z(photos["gallery"]),
        queries={code: pair(made) for code, made in queries["models"].items()},
        strengths={float(s): pair(made) for s, made in queries["strengths"].items()},
        attacked={name: z(codes) for name, codes in queries["attacks"].items()},
        other_pairs={
            code: pair(made) for code, made in _read("pairs_unseen.pt", folder).items()
        },
        cnn={
            key: value.float() / 127 for key, value in _read("cnn.pt", folder).items()
        },
    )


def load_kl_vae(folder: Path | None = None) -> nn.Module:
    """Our own small ``AutoencoderKL``, trained, frozen, float32."""
    vae = make_kl_vae()
    vae.load_state_dict(_read("kl_vae.pt", folder))
    return vae.eval().requires_grad_(False)


def load_generator(
    code: str, *, vae: nn.Module | None = None, folder: Path | None = None
) -> Generator:
    """A trained model, frozen, float32.

    Args:
        code: A to F.
        vae: its autoencoder; C, E and F bring their own, A, B and D need TAEF2
            (``load_taef2``), whose weights come through ``icml25.core.data``.
        folder: the assets of a build of one's own.

    Raises:
        ValueError: an unknown code; A, B or D without an autoencoder; a damaged file.
    """
    if code not in FAMILY:
        raise ValueError(f"code={code!r}: one of {', '.join(FAMILY)}")
    config = FAMILY[code]
    content = _read(f"generator_{code}.pt", folder)
    if config.latent == "pca":
        vae = BlockPCA(content["vae.mean"], content["vae.basis"])
    elif config.latent == "kl" and vae is None:
        vae = load_kl_vae(folder)
    if vae is None:
        raise ValueError(
            f"model {code} works in TAEF2's latents: pass vae=load_taef2(...), whose "
            "weights icml25.core.data.fetch('taef2') brings"
        )
    model = Generator(config, vae, manifest(folder)["words"])
    missing, unexpected = model.load_state_dict(content, strict=False)
    missing = [key for key in missing if not key.startswith("vae.")]
    if missing or unexpected:
        raise ValueError(f"generator_{code}.pt does not fit: {missing or unexpected}")
    return model.eval().requires_grad_(False)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
