"""How a circuit changes while a model is fine-tuned, and what of that is noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from icml25.core import make_generator

from .adapter import Adapter
from .attribution import attribute_edges
from .data import small_pairs
from .graph import CircuitGraph
from .lora import circuit_lora_config
from .pairs import PromptPairs
from .small import CHECKPOINT, accuracy, adapt, load_base, train

ADAPTERS = CHECKPOINT.with_name("circuits_adapters.safetensors")


@dataclass(frozen=True)
class DriftConfig:
    """Fine-tuning on addition and subtraction, watched through circuits."""

    rank: int = 8
    lr: float = 1e-2
    num_steps: int = 250
    every: int = 50  # steps between checkpoints
    batch_size: int = 128
    circuit_prompts: int = 256  # two disjoint halves
    steps: int = 5  # m
    rule: str = "midpoint"
    shares: tuple[float, ...] = (0.1, 0.2)  # of the edges, before pruning
    num_seeds: int = 3


@dataclass
class Drift:
    """One fine-tuning and the scores of every edge at its checkpoints.

    Attributes:
        base: the model before.
        model: the model after, LoRA inside.
        graph: their graph.
        steps: optimiser steps at the checkpoints; 0 is the base.
        scores: ``[checkpoint, half, U, V]``, two disjoint halves of the prompts.
        accuracies: held-out accuracy at the checkpoints.
        losses: training loss of every step (empty for a stored run).
        prompts: what the scores were estimated on.
        test: held-out pairs.
        adapters: LoRA's weights at the checkpoints, half precision.
    """

    base: nn.Module
    model: nn.Module
    graph: CircuitGraph
    steps: list[int]
    scores: Tensor
    accuracies: list[float]
    losses: list[float]
    prompts: PromptPairs
    test: PromptPairs
    adapters: list[dict[str, Tensor]]

    def circuit(self, checkpoint: int, share: float, half: int | None = None) -> Tensor:
        """Mask of the circuit at a checkpoint, from all prompts or from one half."""
        scores = self.scores[checkpoint]
        scores = scores.mean(0) if half is None else scores[half]
        return self.graph.top_edges(scores, round(share * self.graph.num_edges))

    def compare(self, first: int, second: int, share: float) -> dict[str, float]:
        """How far the circuits of two checkpoints differ (heads merged)."""
        return self.graph.compare(
            self.circuit(first, share), self.circuit(second, share)
        )

    def noise(self, checkpoint: int, share: float) -> dict[str, float]:
        """How far the circuits of the two halves differ at one checkpoint."""
        return self.graph.compare(
            *(self.circuit(checkpoint, share, half) for half in (0, 1))
        )

    def across(self, first: int, second: int, share: float) -> dict[str, float]:
        """Two checkpoints, each seen by another half: change and noise together.

        The fair partner of :meth:`noise`: both compare circuits that were estimated on
        equally many prompts, and on different ones.
        """
        rows = [
            self.graph.compare(
                self.circuit(first, share, half), self.circuit(second, share, 1 - half)
            )
            for half in (0, 1)
        ]
        return {key: sum(row[key] for row in rows) / 2 for key in rows[0]}


def follow(
    config: DriftConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    stored: bool = False,
) -> Drift:
    """Fine-tune once and score every edge at every checkpoint.

    Args:
        config: the run.
        device: where to run.
        seed: of the adapter's start, the batches and the prompts.
        stored: take the adapters of the checkpoints that ship with the package (made by
            ``python -m icml25 run circuits checkpoints``) instead of training, so that
            the numbers do not depend on the processor.
    """
    config = config or DriftConfig()
    base = load_base()[0].to(device)
    fit, test = small_pairs("add_sub", device=device)
    generator = make_generator(seed)
    order = torch.randperm(len(fit), generator=generator)[: config.circuit_prompts]
    prompts = fit[order.to(fit.clean.device)]
    half = len(prompts) // 2
    graph = Adapter(base).graph
    steps, scores, accuracies, adapters = [], [], [], []
    model = adapt(base, circuit_lora_config(base, [], r=config.rank), seed=seed)

    def look(step: int) -> None:
        steps.append(step)
        scores.append(
            torch.stack(
                [
                    attribute_edges(model, part, steps=config.steps, rule=config.rule)
                    for part in (prompts[:half], prompts[half:])
                ]
            ).cpu()
        )
        accuracies.append(accuracy(model, test))
        adapters.append(
            {
                name: p.detach().half().cpu().clone()
                for name, p in model.named_parameters()
                if "lora_" in name
            }
        )

    model.eval()
    losses: list[float] = []
    if stored:
        for step, weights in _stored().items():
            model.load_state_dict(weights, strict=False)
            look(step)
    else:
        look(0)
        losses = train(
            model,
            fit,
            num_steps=config.num_steps,
            batch_size=config.batch_size,
            lr=config.lr,
            generator=generator,
            desc="fine-tuning",
            every=config.every,
            callback=look,
        )
    return Drift(
        base,
        model,
        graph,
        steps,
        torch.stack(scores),
        accuracies,
        losses,
        prompts,
        test,
        adapters,
    )


def _stored() -> dict[int, dict[str, Tensor]]:
    """Adapters that ship with the package, by step."""
    from safetensors.torch import load_file

    found: dict[int, dict[str, Tensor]] = {}
    for key, value in load_file(ADAPTERS).items():
        step, _, name = key.partition(":")
        found.setdefault(int(step), {})[name] = value.float()
    return dict(sorted(found.items()))


def store_checkpoints(
    config: DriftConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Fine-tune once and write the adapters that :func:`follow` can start from.

    Returns:
        ``accuracies`` at the checkpoints, and ``bytes`` of the file.
    """
    from safetensors.torch import save_file

    drift = follow(config, device=device, seed=seed)
    weights = {
        f"{step}:{name}": value
        for step, each in zip(drift.steps, drift.adapters, strict=True)
        for name, value in each.items()
    }
    save_file(weights, ADAPTERS)
    return {"accuracies": drift.accuracies, "bytes": ADAPTERS.stat().st_size}


def run_drift(
    config: DriftConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Node and edge overlap of the circuits before and after, over several seeds.

    Returns:
        Lists over seeds: ``accuracy_before``, ``accuracy_after``, and for each share of
        edges the overlaps ``node`` and ``edge`` of base and final circuit, the same
        across halves, and of the two halves at the end and at the start; and the mean
        of the list ``x`` as ``mean_x``.
    """
    config = config or DriftConfig()
    found: dict[str, list] = {}
    for index in range(config.num_seeds):
        drift = follow(config, device=device, seed=seed + index)
        row: dict[str, float] = {
            "accuracy_before": drift.accuracies[0],
            "accuracy_after": drift.accuracies[-1],
        }
        for share in config.shares:
            for name, pair in {
                "change": drift.compare(0, -1, share),
                "across": drift.across(0, -1, share),
                "noise_end": drift.noise(-1, share),
                "noise_start": drift.noise(0, share),
            }.items():
                for what in ("node", "edge"):
                    row[f"{what}_{name}_{share:g}"] = pair[f"{what}_jaccard"]
        for key, value in row.items():
            found.setdefault(key, []).append(value)
    means = {f"mean_{key}": sum(each) / len(each) for key, each in found.items()}
    return {**found, **means}
