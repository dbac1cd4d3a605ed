"""Beyond the laptop: 40 million parameters on LibriSpeech, on several devices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from icml25.core import make_generator, progress
from icml25.core.runtime import make_accelerator

from .audio import MelConfig, log_mel
from .griffin import MINI, GriffinConfig, GriffinLM
from .tokens import KMeansTokenizer, TokenizerConfig
from .training import Recipe, nll_by_token, warmup_cosine

__all__ = ["LAPTOP", "PAPER", "MiniRun", "librispeech_documents", "run_mini"]

SOURCES = ("generated", "librispeech")


@dataclass(frozen=True)
class MiniRun:
    """A training run over real speech; the defaults are a dry run of the machinery."""

    source: str = "generated"  # random token chains, or "librispeech"
    train_splits: tuple[str, ...] = ("train-clean-100", "train-clean-360")
    test_splits: tuple[str, ...] = ("dev-clean",)
    tokenizer: TokenizerConfig = field(
        default_factory=lambda: TokenizerConfig(
            vocab_size=1024, context=1, num_cepstra=18, num_components=64
        )
    )
    fit_documents: int = 200  # chapters that the k-means sees
    model: GriffinConfig = field(default_factory=GriffinConfig)
    recipe: Recipe = field(
        default_factory=lambda: Recipe(num_steps=20, batch_size=4, seq_len=64)
    )
    accumulate: int = 2  # backward passes a step, shared by all processes
    precision: str = "no"  # of accelerate: "no" or "bf16"
    eval_tokens: int = 1024  # length of a test document: 16 times the training length


LAPTOP = MiniRun()
PAPER = MiniRun(
    source="librispeech",
    model=MINI,
    recipe=Recipe(
        num_steps=20_000,
        batch_size=16,
        seq_len=750,
        lr=5e-4,
        warmup=1000,
        weight_decay=0.6,
    ),
    accumulate=11,  # 16 x 11 x 750 = 132,000 tokens a step
    precision="bf16",
    eval_tokens=12_000,
)


def run_mini(
    config: MiniRun = LAPTOP,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Train a hybrid on 30-second rows, and read documents 16 times as long.

    Runs through ``accelerate``:
    ``accelerate launch -m icml25 run speechssm mini --scale paper`` uses every device
    it is given and divides ``accumulate`` by their number to keep the batch. Rows are
    cut from one stream of chapters; where a chapter begins inside a row, the state is
    reset.

    Args:
        config: what to train. ``source="librispeech"`` reads
            ``$ICML25_DATA/LibriSpeech/<split>/``, as the archives of openslr.org/12
            unpack.
        device: CPU or accelerator; ``accelerate`` picks the index.
        seed: of tokeniser, weights and data order.

    Returns:
        ``params``, ``loss`` (curve), ``nll`` (nats a token at positions up to 1, 1 to
        4 and 4 to 16 training lengths), ``tokens_per_s``, ``state_bytes``.

    Raises:
        ValueError: an unknown source.
        FileNotFoundError: LibriSpeech is not there.
    """
    if config.source not in SOURCES:
        raise ValueError(f"source must be one of {SOURCES}, got {config.source!r}")
    accelerator = make_accelerator(
        device, accumulate=config.accumulate, precision=config.precision
    )
    accumulate = accelerator.gradient_accumulation_steps
    recipe = config.recipe
    train, test = _token_documents(config, seed)
    model = GriffinLM(config.model, generator=make_generator(seed))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        recipe.lr,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    rows = _Rows(train, recipe.seq_len + 1, seed)
    model, stepper, loader = accelerator.prepare(
        model, optimizer, DataLoader(rows, recipe.batch_size)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, recipe)
    )
    model.train()
    losses, batches = [], iter(loader)
    begin = time.perf_counter()
    for _ in progress(range(recipe.num_steps), f"mini, seed {seed}"):
        total = torch.zeros((), device=accelerator.device)
        for _ in range(accumulate):
            ids, reset = next(batches)
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    logits, _ = model(ids[:, :-1], None, reset[:, :-1])
                # What follows the end of a document is not predictable from it.
                target = ids[:, 1:].masked_fill(reset[:, 1:], -100)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
                stepper.step()
                stepper.zero_grad()
            total = total + loss.detach() / accumulate
        schedule.step()
        losses.append(total)
    curve = torch.stack(losses).tolist()
    elapsed = time.perf_counter() - begin
    model = accelerator.unwrap_model(model).eval()
    read = recipe.num_steps * accumulate * recipe.batch_size * recipe.seq_len
    return {
        "params": sum(p.numel() for p in model.parameters()),
        "loss": curve,
        "nll": _nll_by_multiple(model, test, recipe.seq_len, accelerator.device),
        "tokens_per_s": read * accelerator.num_processes / elapsed,
        "state_bytes": model.init_state(1).nbytes(),
    }


def _nll_by_multiple(
    model: GriffinLM, documents: list[Tensor], length: int, device: torch.device
) -> dict[str, float]:
    """Mean over all test tokens at 0-1, 1-4 and 4-16 training lengths."""
    sums, counts = torch.zeros(3), torch.zeros(3)
    edges = [0, length, 4 * length, 16 * length]
    for document in documents:
        nll = nll_by_token(model, document.unsqueeze(0).to(device)).cpu()
        for at in range(3):
            part = nll[:, edges[at] : edges[at + 1]]
            sums[at] += part.sum()
            counts[at] += part.numel()
    names = ("0-1x", "1-4x", "4-16x")
    return {
        name: (s / c).item()
        for name, s, c in zip(names, sums, counts, strict=True)
        if c
    }


class _Rows(IterableDataset):
    """Endless rows of a shuffled stream of documents, with their beginnings marked."""

    def __init__(self, documents: list[Tensor], length: int, seed: int) -> None:
        self.documents, self.length, self.seed = documents, length, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = make_generator(self.seed)
        ids = torch.zeros(0, dtype=torch.int64)
        starts = torch.zeros(0, dtype=torch.bool)
        while True:
            for at in torch.randperm(len(self.documents), generator=generator):
                document = self.documents[at]
                first = torch.zeros(len(document), dtype=torch.bool)
                first[0] = True
                ids, starts = torch.cat((ids, document)), torch.cat((starts, first))
                while len(ids) >= self.length:
                    yield ids[: self.length], starts[: self.length]
                    ids, starts = ids[self.length :], starts[self.length :]


def _token_documents(config: MiniRun, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = make_generator(seed)
    if config.source == "generated":
        chain = torch.randint(
            config.model.vocab_size, (config.model.vocab_size, 4), generator=generator
        )
        documents = [_walk(chain, config.eval_tokens, generator) for _ in range(12)]
        return documents[2:], documents[:2]
    grid = MelConfig()
    splits = {
        split: list(librispeech_documents(split))
        for split in (*config.train_splits, *config.test_splits)
    }
    train = [d for split in config.train_splits for d in splits[split]]
    order = torch.randperm(len(train), generator=generator)[: config.fit_documents]
    seen = [_mels(path, grid) for at in order for path in train[at]]
    tokenizer = KMeansTokenizer(config.tokenizer).fit(seen, generator=generator)

    def encode(paths: list[Path]) -> Tensor:
        return torch.cat([tokenizer.encode(_mels(path, grid)) for path in paths])

    test = [d for split in config.test_splits for d in splits[split]]
    bar = progress(train, "tokenising")
    return [encode(paths) for paths in bar], [
        encode(paths)[: config.eval_tokens] for paths in test
    ]


def _walk(chain: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """A random chain of tokens with four successors each."""
    token, walk = 0, []
    for choice in torch.randint(4, (length,), generator=generator).tolist():
        token = int(chain[token, choice])
        walk.append(token)
    return torch.tensor(walk)


def _mels(path: Path, grid: MelConfig) -> Tensor:
    import soundfile

    audio, rate = soundfile.read(path, dtype="float32")
    return log_mel(torch.from_numpy(audio), grid, sample_rate=rate)


def librispeech_documents(split: str) -> Iterator[list[Path]]:
    """The utterances of every chapter of a LibriSpeech split, in reading order.

    Args:
        split: a folder of ``$ICML25_DATA/LibriSpeech``, such as ``"train-clean-100"``.

    Yields:
        One list of files a chapter.

    Raises:
        FileNotFoundError: the folder is not there.
    """
    root = Path(os.environ.get("ICML25_DATA", ".")) / "LibriSpeech" / split
    if not root.is_dir():
        raise FileNotFoundError(
            f"{split} is not in the folder LibriSpeech of $ICML25_DATA: unpack "
            f"openslr.org/resources/12/{split}.tar.gz there"
        )
    for chapter in sorted(root.glob("*/*")):
        if files := sorted(chapter.glob("*.flac")):
            yield files
