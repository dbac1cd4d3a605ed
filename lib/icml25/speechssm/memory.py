"""Experiment B: bytes of state and tokens a second against the length of the speech."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from icml25.core import make_generator, progress

from .griffin import GriffinConfig, GriffinLM
from .layers import LanguageModel, LMState
from .transformer import FullAttention, TransformerConfig, TransformerLM

__all__ = ["MemoryRun", "filled_state", "run_memory", "seconds_per_token"]


@dataclass(frozen=True)
class MemoryRun:
    """Which models, and at which lengths; the defaults are the laptop's."""

    hybrid: GriffinConfig = field(
        default_factory=lambda: GriffinConfig(vocab_size=200, window=96)
    )
    full: TransformerConfig = field(
        default_factory=lambda: TransformerConfig(vocab_size=200)
    )
    lengths: tuple[int, ...] = (250, 2000, 16_000)  # tokens: 10 s to 11 minutes
    batch_sizes: tuple[int, ...] = (1, 16)
    num_tokens: int = 24  # timed, after a quarter as many to warm up


LAPTOP = MemoryRun()
LONG = MemoryRun(lengths=(250, 1000, 4000, 16_000), num_tokens=64)


@torch.no_grad()
def filled_state(
    model: LanguageModel,
    batch_size: int,
    length: int,
    *,
    generator: torch.Generator | None = None,
) -> LMState:
    """The state of a model that has read ``length`` tokens, with random contents.

    What a step costs depends on the sizes of the state, not on the numbers in it, and
    to read 16,000 tokens first takes long.

    Raises:
        ValueError: ``length`` below 1.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    state = model.init_state(batch_size)
    like = model.embed.weight
    for block, layer in zip(model.blocks, state.layers, strict=True):
        for name, tensor in layer.items():
            shape = list(tensor.shape)
            if isinstance(block.mixer, FullAttention):
                shape[2] = length
            layer[name] = torch.rand(
                shape, generator=generator, device=like.device, dtype=tensor.dtype
            )
    state.age += length
    state.stored = length
    return state


@torch.no_grad()
def seconds_per_token(model: LanguageModel, state: LMState, num_tokens: int) -> float:
    """Mean time of one decoding step of the whole batch.

    On a CPU this is the process's own time, which other processes do not change.

    Args:
        model: what decodes, greedily.
        state: where it starts.
        num_tokens: steps that are timed; a quarter as many are run before.
    """
    where = model.embed.weight.device
    token = torch.zeros(len(state.age), 1, dtype=torch.int64, device=where)

    def now() -> float:
        if where.type == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if where.type == "cpu" else time.perf_counter()

    for step in range(num_tokens + num_tokens // 4):
        if step == num_tokens // 4:
            begin = now()
        logits, state = model(token, state)
        token = logits[:, -1:].argmax(-1)
    return (now() - begin) / num_tokens


def run_memory(
    config: MemoryRun = LAPTOP,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Bytes and speed of decoding after contexts of growing length.

    Args:
        config: models and lengths.
        device: where.
        seed: of weights and contents.

    Returns:
        ``lengths``; for ``"hybrid"`` and ``"full"``, ``batch<B>`` with
        ``state_bytes`` and ``tokens_per_s`` (of the whole batch), one a length;
        ``ratio`` of throughputs at each length, for each batch.
    """
    generator = make_generator(seed)
    models = {
        "hybrid": GriffinLM(config.hybrid, generator=generator).to(device).eval(),
        "full": TransformerLM(config.full, generator=generator).to(device).eval(),
    }
    result: dict[str, Any] = {"lengths": list(config.lengths)}
    on_device = make_generator(seed, device)
    for batch_size in config.batch_sizes:
        for name, model in models.items():
            sizes, speeds = [], []
            for length in progress(config.lengths, f"{name}, batch {batch_size}"):
                state = filled_state(model, batch_size, length, generator=on_device)
                sizes.append(state.nbytes())
                spent = seconds_per_token(model, state, config.num_tokens)
                speeds.append(batch_size / spent)
            result.setdefault(name, {})[f"batch{batch_size}"] = {
                "state_bytes": sizes,
                "tokens_per_s": speeds,
            }
        fast, slow = (
            result[n][f"batch{batch_size}"]["tokens_per_s"] for n in ("hybrid", "full")
        )
        ratios = [a / b for a, b in zip(fast, slow, strict=True)]
        result.setdefault("ratio", {})[f"batch{batch_size}"] = ratios
        result[f"times faster after {config.lengths[-1]}, batch {batch_size}"] = ratios[
            -1
        ]
    return result
