"""Pre-training a Llama with AdamW, GaLore and GoLore: tiny on text, 60M on C4."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from icml25.core import data, make_generator, progress
from icml25.core.runtime import make_accelerator

from .memory import state_bytes
from .optim import GoLore, split_param_groups

_SHARES = {"galore": None, "golore@20": 0.8}  # where the random phase starts
METHODS = ("adamw", *_SHARES)
CORPORA = ("pydoc", "c4", "generated")


@dataclass(frozen=True)
class PretrainConfig:
    """Model, data and recipe; the defaults are the laptop's."""

    corpus: str = "pydoc"  # characters of the language reference that ships with Python
    hidden: int = 96
    intermediate: int = 256
    layers: int = 3
    heads: int = 4
    vocab_size: int | None = None  # None: as many as the corpus has characters
    seq_len: int = 64
    batch_size: int = 8  # sequences per process and backward pass
    accumulate: int = 1  # backward passes per step, shared by all processes
    num_steps: int = 100
    warmup: int = 10  # then cosine to a tenth
    # The laptop's step sizes are the best of {2, 5, 10, 20}e-3, over seeds that no
    # result uses; AdamW was also tried at 0.5, 1 and 3e-3 (2 to 5e-3 tie).
    lr: float = 1e-2  # of GaLore and GoLore
    lr_adamw: float = 2e-3
    rank: int = 16
    update_interval: int = 20  # tau
    clip: float = 1.0  # gradient norm
    dtype: str = "float32"
    eval_batches: int = 32
    num_seeds: int = 2
    methods: tuple[str, ...] = METHODS


LAPTOP = PretrainConfig()
PAPER = PretrainConfig(
    corpus="c4",
    hidden=512,
    intermediate=1376,
    layers=8,
    heads=8,
    vocab_size=32_000,
    seq_len=256,
    batch_size=128,
    accumulate=4,  # 512 sequences per step
    num_steps=10_000,
    warmup=1_000,
    lr=1e-3,
    lr_adamw=1e-3,
    rank=128,
    update_interval=200,
    dtype="bfloat16",
    eval_batches=300,
    num_seeds=1,
)


def run_pretrain(
    config: PretrainConfig = LAPTOP,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Validation loss and optimiser memory of the three methods, same data and start.

    Runs through ``accelerate``:
    ``accelerate launch -m icml25 run golore --scale paper`` uses every device it
    is given, and divides ``accumulate`` by their number to keep the batch (where
    their number divides it).

    Args:
        config: what to train. ``corpus="generated"`` needs no text: tokens of a random
            Markov chain, for a dry run at any size.
        device: CPU or accelerator; ``accelerate`` picks the index.
        seed: the first seed, of weights, data order and bases.

    Returns:
        For each method ``val_loss`` (nats per token, one a seed), ``perplexity`` (of
        their mean), ``train_loss`` (curve of the first seed), ``state_bytes``,
        ``seconds_per_step``; and ``params``, the size of the model.

    Raises:
        ValueError: for an unknown corpus or method.
        icml25.core.data.DataError: if C4 cannot be streamed.
    """
    if config.corpus not in CORPORA:
        raise ValueError(f"corpus must be one of {CORPORA}, got {config.corpus!r}")
    if unknown := set(config.methods) - set(METHODS):
        raise ValueError(f"methods must be among {METHODS}, got {sorted(unknown)}")
    result: dict[str, Any] = {}
    for method in config.methods:
        runs = [
            _train(config, method, torch.device(device), seed + i)
            for i in range(config.num_seeds)
        ]
        losses = [run["val_loss"] for run in runs]
        result[method] = {
            **runs[0],
            "val_loss": losses,
            "perplexity": math.exp(sum(losses) / len(losses)),
        }
        result["params"] = result[method].pop("params")
    return result


def _train(
    config: PretrainConfig, method: str, device: torch.device, seed: int
) -> dict[str, Any]:
    # More devices, fewer passes: the batch stays what the configuration says.
    accelerator = make_accelerator(device, accumulate=config.accumulate)
    accumulate = accelerator.gradient_accumulation_steps
    train, valid, vocab_size = _corpus(config, seed)
    model = _model(config, vocab_size, seed)
    optimizer = _optimizer(config, method, model, seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _warmup_cosine(step, config)
    )
    model, stepper, loader = accelerator.prepare(
        model, optimizer, DataLoader(train, config.batch_size)
    )
    model.train()
    losses: list[Tensor] = []
    batches = iter(loader)
    start = time.perf_counter()
    for _ in progress(range(config.num_steps), f"{method}, seed {seed}"):
        total = 0.0
        for _ in range(accumulate):
            batch = next(batches)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), config.clip)
                stepper.step()
                stepper.zero_grad()
            total = total + loss.detach()
        schedule.step()
        losses.append(total / accumulate)
    curve = torch.stack(losses).tolist()  # waits for the device, once
    elapsed = time.perf_counter() - start
    loader = accelerator.prepare(DataLoader(valid, config.batch_size))
    return {
        "val_loss": _evaluate(model, loader, config.eval_batches, accelerator),
        "train_loss": curve,
        "state_bytes": state_bytes(optimizer),
        "seconds_per_step": elapsed / config.num_steps,
        "params": sum(p.numel() for p in model.parameters()),
    }


def _model(config: PretrainConfig, vocab_size: int, seed: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):  # transformers draws from the global state
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                max_position_embeddings=config.seq_len,
                use_cache=False,
            )
        )
    return model.to(getattr(torch, config.dtype))


def _optimizer(
    config: PretrainConfig, method: str, model: torch.nn.Module, seed: int
) -> torch.optim.Optimizer:
    if method == "adamw":
        return torch.optim.AdamW(
            model.parameters(), config.lr_adamw, eps=1e-6, weight_decay=0.0, fused=True
        )
    share = _SHARES[method]
    return GoLore(
        split_param_groups(model),
        config.lr,
        switch_step=None if share is None else int(share * config.num_steps),
        rank=config.rank,
        update_interval=config.update_interval,
        seed=seed,
    )


def _warmup_cosine(step: int, config: PretrainConfig) -> float:
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.num_steps - config.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


@torch.no_grad()
def _evaluate(model, loader, num_batches: int, accelerator) -> float:
    model.eval()
    losses = [
        accelerator.gather(model(**batch).loss.reshape(1)).mean()
        for _, batch in zip(range(num_batches), loader, strict=False)
    ]
    return torch.stack(losses).mean().item()


class _Sequences(IterableDataset):
    """An endless or streamed source of token sequences, made anew for every loop."""

    def __init__(self, make) -> None:
        self._make = make

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._make()


def _corpus(config: PretrainConfig, seed: int) -> tuple[_Sequences, _Sequences, int]:
    """Training and validation sequences, and the size of the vocabulary."""
    if config.corpus == "c4":
        return (*_c4(config, seed), config.vocab_size or 32_000)
    if config.corpus == "pydoc":
        tokens, vocab_size = _pydoc_tokens()
    else:
        vocab_size = config.vocab_size or 256
        tokens = _markov_tokens(vocab_size, make_generator(seed))
    split = len(tokens) * 9 // 10
    train, valid = tokens[:split], tokens[split:]
    return (
        _Sequences(lambda: _windows(train, config.seq_len, seed)),
        _Sequences(lambda: _windows(valid, config.seq_len, 0)),
        vocab_size if config.vocab_size is None else config.vocab_size,
    )


def _windows(tokens: Tensor, seq_len: int, seed: int) -> Iterator[dict[str, Tensor]]:
    generator = make_generator(seed)
    while True:
        starts = torch.randint(len(tokens) - seq_len, (1024,), generator=generator)
        for start in starts.tolist():
            window = tokens[start : start + seq_len]
            yield {"input_ids": window, "labels": window}


def _pydoc_tokens() -> tuple[Tensor, int]:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[c] for c in text]), len(alphabet)


def _markov_tokens(vocab_size: int, generator: torch.Generator) -> Tensor:
    """Each token is followed by one of four successors: something to learn."""
    successors = torch.randint(vocab_size, (vocab_size, 4), generator=generator)
    choices = torch.randint(4, (1 << 16,), generator=generator).tolist()
    table, token, tokens = successors.tolist(), 0, []
    for choice in choices:
        token = table[token][choice]
        tokens.append(token)
    return torch.tensor(tokens)


def _c4(config: PretrainConfig, seed: int) -> tuple[_Sequences, _Sequences]:
    from datasets import load_dataset
    from huggingface_hub import HfApi
    from transformers import AutoTokenizer

    def stream(split: str):
        return load_dataset("allenai/c4", "en", split=split, streaming=True)

    try:
        HfApi().dataset_info("allenai/c4", timeout=10)  # or it retries for a minute
        tokenizer = AutoTokenizer.from_pretrained("google-t5/t5-base")
        train = stream("train").shuffle(seed=seed, buffer_size=10_000)
        valid = stream("validation")
    except Exception as error:  # each library on the way wraps it in its own class
        raise data.DataError(
            "C4 and its tokenizer are streamed from the Hugging Face hub "
            "(allenai/c4, google-t5/t5-base), which could not be reached: go online, "
            "unset HF_HUB_OFFLINE, or try the run dry with corpus='generated' "
            f"[{type(error).__name__}: {error}]"
        ) from error

    def sequences(source) -> Iterator[dict[str, Tensor]]:
        for record in source:
            ids = tokenizer(
                record["text"],
                max_length=config.seq_len,
                truncation=True,
                padding="max_length",
                return_tensors="pt",
            ).input_ids[0]
            labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
            yield {"input_ids": ids, "labels": labels}

    return _Sequences(lambda: sequences(train)), _Sequences(lambda: sequences(valid))
