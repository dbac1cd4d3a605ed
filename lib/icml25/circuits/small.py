"""A small GPT-NeoX that knows some arithmetic, and fine-tuning with peft."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from icml25.core import make_generator, progress
from icml25.core.runtime import make_accelerator

from .data import LIMIT
from .encoding import NumberTokenizer
from .lora import add_lora, wrap
from .pairs import PromptPairs
from .tasks import OPERATORS, is_held_out

OPERAND = 50  # the largest operand
PRETRAINED = ("+", "max", "min")  # what the base model has learned
CHECKPOINT = Path(__file__).resolve().parents[1] / "assets/circuits_base.safetensors"


@dataclass(frozen=True)
class BaseConfig:
    """The base model and its pre-training."""

    num_layers: int = 4
    num_heads: int = 4
    dim: int = 48
    num_steps: int = 2000
    batch_size: int = 256
    lr: float = 5e-3  # one cycle, rises for a tenth
    weight_decay: float = 0.3


def random_neox(config: BaseConfig, vocab_size: int, seed: int) -> nn.Module:
    """An untrained GPT-NeoX with parallel blocks, in eval mode."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    with torch.random.fork_rng(devices=[]):  # transformers draws from the global state
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=vocab_size,
                hidden_size=config.dim,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                intermediate_size=4 * config.dim,
                max_position_embeddings=32,
                use_parallel_residual=True,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    return model.eval()


def number_features(limit: int, dim: int, generator: torch.Generator) -> Tensor:
    """Embeddings that know numbers' order and remainders, ``[limit+1, dim]``.

    A ramp and waves of periods 2, 5, 10, 20, 50 and the range, mixed at random: the
    kind of geometry that large language models have for numbers before fine-tuning.
    """
    numbers = torch.arange(limit + 1.0)
    periods = torch.tensor([2.0, 5.0, 10.0, 20.0, 50.0, limit + 1.0])
    angles = 2 * math.pi * numbers.unsqueeze(1) / periods
    features = torch.cat(
        [numbers.unsqueeze(1) / limit * 2 - 1, angles.cos(), angles.sin()], dim=1
    )
    mix = torch.randn(features.shape[1], dim, generator=generator)
    return 0.3 * features @ mix / features.shape[1] ** 0.5


def pretrain(config: BaseConfig, *, seed: int = 0) -> nn.Module:
    """Train the base model on ``+``, ``max``, ``min`` of pairs not held out."""
    tokenizer = NumberTokenizer(LIMIT)
    model = random_neox(config, tokenizer.vocab_size, seed)
    generator = make_generator(seed)
    with torch.no_grad():
        table = number_features(LIMIT, config.dim, generator)
        model.gpt_neox.embed_in.weight[: LIMIT + 1] = table
    prompts, labels = [], []
    for a in range(1, OPERAND + 1):
        for b in range(1, OPERAND + 1):
            if not is_held_out((a, b)):
                for name in PRETRAINED:
                    prompts.append(tokenizer(f"{a} {name} {b} =").input_ids)
                    labels.append(OPERATORS[name](a, b))
    ids = torch.tensor(prompts)
    pairs = PromptPairs(ids, ids, torch.tensor(labels))
    train(
        model,
        pairs,
        num_steps=config.num_steps,
        batch_size=config.batch_size,
        lr=config.lr,
        weight_decay=config.weight_decay,
        generator=generator,
        desc="pre-training",
    )
    return model


def load_base(config: BaseConfig | None = None) -> tuple[nn.Module, NumberTokenizer]:
    """The base model as it ships with the package, float32 in eval mode.

    It was made by ``python -m icml25 run circuits base`` and is stored in half
    precision.

    Raises:
        FileNotFoundError: the checkpoint is not there.
    """
    from safetensors.torch import load_file

    if not CHECKPOINT.is_file():
        raise FileNotFoundError(
            f"{CHECKPOINT} is missing: `python -m icml25 run circuits base` makes it"
        )
    tokenizer = NumberTokenizer(LIMIT)
    model = random_neox(config or BaseConfig(), tokenizer.vocab_size, 0)
    weights = {name: w.float() for name, w in load_file(CHECKPOINT).items()}
    model.load_state_dict(weights)
    return model.eval(), tokenizer


def train(
    model: nn.Module,
    pairs: PromptPairs,
    *,
    num_steps: int,
    batch_size: int,
    lr: float,
    weight_decay: float = 0.01,
    generator: torch.Generator,
    desc: str = "training",
    critical: Callable[[str], bool] | None = None,
    critical_lr: float = 1.0,
    every: int = 0,
    callback: Callable[[int], Any] | None = None,
) -> list[float]:
    """Fine-tune what asks for gradients on the answers of the clean prompts.

    AdamW, one learning-rate cycle, loss on the answer's token alone. (The released code
    also counts the padding behind it, which dilutes the answer.) Runs through
    ``accelerate``: on several processes each takes its share of every batch.

    Args:
        model: trained in place, left in eval mode.
        pairs: prompts with labels.
        num_steps: optimiser steps.
        batch_size: prompts a step, all processes together.
        lr: peak learning rate.
        weight_decay: of AdamW.
        generator: draws the batches (with replacement); the same on every process.
        desc: what the progress bar says.
        critical: names of parameters that train at another rate.
        critical_lr: their factor on ``lr``.
        every: call ``callback`` after every so many steps.
        callback: gets the number of steps done; the model is in eval mode.

    Returns:
        Mean loss of each step over all processes, nats.

    Raises:
        ValueError: the pairs have no labels.
    """
    if pairs.label is None:
        raise ValueError("training needs the pairs' label")
    accelerator = make_accelerator(next(model.parameters()).device)
    slow, fast = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (fast if critical is not None and critical(name) else slow).append(p)
    groups = [{"params": slow}, {"params": fast, "lr": lr * critical_lr}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        weight_decay=weight_decay,
        fused=True,
    )
    warmup = max(1, num_steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / warmup)
            * 0.5
            * (1 + math.cos(math.pi * max(0, step - warmup) / (num_steps - warmup + 1)))
        ),
    )
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    wrapped.train()
    parts, rank = accelerator.num_processes, accelerator.process_index
    allocate = getattr(getattr(model, "base_model", None), "update_and_allocate", None)
    losses = []
    for step in progress(range(1, num_steps + 1), desc):
        drawn = torch.randint(len(pairs), (batch_size,), generator=generator)
        batch = pairs[drawn[rank::parts].to(pairs.clean.device)].to(accelerator.device)
        # Only the answer's position: the model keeps these logits and no others.
        where = batch.last.unique()
        logits = wrapped(
            input_ids=batch.clean,
            attention_mask=batch.attention_mask,
            logits_to_keep=where,
            use_cache=False,
        ).logits
        rows = torch.arange(len(batch), device=logits.device)
        at = torch.searchsorted(where, batch.last)
        loss = functional.cross_entropy(logits[rows, at].float(), batch.label)
        accelerator.backward(loss + _orthogonality(model) if allocate else loss)
        optimizer.step()
        if allocate:  # AdaLoRA moves rank between layers while gradients are there
            allocate(step)
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if callback is not None and every and step % every == 0:
            model.eval()
            callback(step)
            model.train()
    model.eval()
    # Of equal shares the mean of means is the whole batch's mean.
    return accelerator.reduce(torch.stack(losses), "mean").tolist()


def _orthogonality(model: nn.Module, weight: float = 0.5) -> Tensor:
    """AdaLoRA's regulariser, which peft adds only to losses that it computes itself."""
    terms = []
    for name, p in model.named_parameters():
        if p.requires_grad and ("lora_A" in name or "lora_B" in name):
            gram = p @ p.T if "lora_A" in name else p.T @ p
            eye = torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
            terms.append((gram - eye).norm())
    return weight * torch.stack(terms).mean()


@torch.no_grad()
def accuracy(model: nn.Module, pairs: PromptPairs, batch_size: int = 512) -> float:
    """Share of prompts whose most likely next token is the answer."""
    right = 0
    device = next(model.parameters()).device
    for batch in pairs.batches(batch_size):
        batch = batch.to(device)
        where = batch.last.unique()
        logits = model(
            input_ids=batch.clean,
            attention_mask=batch.attention_mask,
            logits_to_keep=where,
            use_cache=False,
        ).logits
        rows = torch.arange(len(batch), device=device)
        best = logits[rows, torch.searchsorted(where, batch.last)].argmax(-1)
        right += int((best == batch.label).sum())
    return right / len(pairs)


def adapt(model: nn.Module, config: Any, *, seed: int) -> nn.Module:
    """A copy of the model wrapped by a peft configuration, started from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # peft draws from the global state
        is_plain = type(config).__name__ == "LoraConfig"
        return add_lora(model, config) if is_plain else wrap(model, config)
