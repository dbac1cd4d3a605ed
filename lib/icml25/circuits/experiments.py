"""What `python -m icml25 run circuits [name]` runs, the paper's comparison first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from icml25.core import Experiment

from .compare import FAST, LAPTOP, PAPER, compare_allocations
from .composition import CompositionConfig, run_composition
from .data import small_pairs
from .drift import DriftConfig, run_drift, store_checkpoints
from .small import CHECKPOINT, BaseConfig, accuracy, pretrain


def make_base(
    config: BaseConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Train the base model and store it where the package loads it from.

    Returns:
        ``accuracy`` on held-out sums, ``parameters``, ``bytes`` of the file.
    """
    from safetensors.torch import save_file

    model = pretrain(config or BaseConfig(), seed=seed)
    weights = {k: v.half().contiguous() for k, v in model.state_dict().items()}
    CHECKPOINT.parent.mkdir(exist_ok=True)
    save_file(weights, CHECKPOINT)
    _, test = small_pairs("add_sub")
    return {
        "accuracy": accuracy(model, test),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": CHECKPOINT.stat().st_size,
    }


EXPERIMENTS = {
    "compare": Experiment(
        compare_allocations,
        laptop=LAPTOP,
        paper=PAPER,
        summary="CircuitLoRA, LoRA, AdaLoRA, IA3 and controls at equal parameters",
    ),
    "confirm": Experiment(
        compare_allocations,
        laptop=replace(
            LAPTOP,
            tasks=("add_sub", "lcm"),
            methods=("lora", "circuit_lora", "circuit_lora_mean", "early_layers"),
            num_seeds=5,
        ),
        summary="the allocations again, on fresh seeds (--seed 10) and another task",
    ),
    "doubled": Experiment(
        compare_allocations,
        laptop=replace(
            LAPTOP,
            tasks=("add_sub",),
            methods=("lora", "circuit_lora", FAST),
            lr=LAPTOP.lr / 2,  # so that twice as fast is the usual step size
        ),
        summary="critical layers at twice the step size, as in the released code",
    ),
    "tasks": Experiment(
        compare_allocations,
        laptop=replace(
            LAPTOP,
            tasks=("mul_div", "sequence", "lcm", "function"),
            methods=("lora",),
        ),
        paper=replace(PAPER, methods=("lora",)),
        summary="base and fine-tuned accuracy on the other task generators",
    ),
    "drift": Experiment(
        run_drift,
        laptop=DriftConfig(),
        summary="how nodes and edges of the circuit change during fine-tuning",
    ),
    "composition": Experiment(
        run_composition,
        laptop=CompositionConfig(),
        summary="the union of two steps' circuits against the composed task's",
    ),
    "checkpoints": Experiment(
        store_checkpoints,
        laptop=DriftConfig(),
        summary="fine-tune and store the adapters whose circuits the chapter shows",
    ),
    "base": Experiment(
        make_base,
        laptop=BaseConfig(),
        summary="train and store the small base model that the chapter starts from",
    ),
}
