"""Two steps and their composition: does a union of circuits stand in for the whole?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from icml25.core import make_generator

from .adapter import Adapter
from .attribution import attribute_edges
from .data import composition_pairs, mix
from .graph import CircuitGraph
from .intervene import faithfulness
from .lora import circuit_lora_config
from .pairs import PromptPairs
from .small import accuracy, adapt, load_base, train


@dataclass(frozen=True)
class CompositionConfig:
    """A two-step task, its steps, and the circuits of all three."""

    rank: int = 16
    lr: float = 1e-2
    num_steps: int = 300
    batch_size: int = 192
    circuit_prompts: int = 192
    share: float = 0.2  # of the edges
    num_seeds: int = 2


def run_composition(
    config: CompositionConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Does the union of two sub-tasks' circuits stand in for the composed task's?

    One LoRA model is tuned on the composed task and on both of its steps together, so
    that three circuits of *one* model are compared. (The paper tunes one model a task;
    a circuit of another model's weights says less about this one.)

    Returns:
        One number a seed: held-out ``accuracy``; ``coverage`` of the composed circuit's
        edges by the union of equal size, by the whole union, by a random circuit of the
        union's size (``chance``); ``faithfulness`` on the composed task of its own
        circuit, of both unions, of each sub-task's circuit and of a random circuit.

    Source:
        The compositional tasks of the paper.
    """
    config = config or CompositionConfig()
    found: dict[str, list] = {}
    for index in range(config.num_seeds):
        one = _compose_once(config, device, seed + index)
        for key, value in one.items():
            found.setdefault(key, []).append(value)
    return {
        **found,
        **{f"mean_{key}": sum(values) / len(values) for key, values in found.items()},
    }


def _compose_once(
    config: CompositionConfig, device: torch.device | str, seed: int
) -> dict[str, float]:
    base = load_base()[0].to(device)
    sides = composition_pairs(device)
    generator = make_generator(seed)
    model = adapt(base, circuit_lora_config(base, [], r=config.rank), seed=seed)
    mixed = mix([side[0] for side in sides.values()])
    train(
        model,
        mixed,
        num_steps=config.num_steps,
        batch_size=config.batch_size,
        lr=config.lr,
        generator=generator,
        desc=f"composition, seed {seed}",
    )
    graph = Adapter(base).graph
    size = round(config.share * graph.num_edges)
    scores, circuits = {}, {}
    for name, (fit, _) in sides.items():
        scores[name] = attribute_edges(model, fit[: config.circuit_prompts])
        circuits[name] = graph.top_edges(scores[name], size)
    return composition_row(
        model,
        graph,
        scores,
        circuits,
        sides["composition"][1][: config.circuit_prompts],
        generator,
    ) | {"accuracy": accuracy(model, sides["composition"][1])}


def composition_row(
    model: nn.Module,
    graph: CircuitGraph,
    scores: dict[str, Tensor],
    circuits: dict[str, Tensor],
    test: PromptPairs,
    generator: torch.Generator,
) -> dict[str, float]:
    """Overlap and faithfulness of the union of the two steps' circuits."""
    whole = circuits["composition"]
    steps = ("inner", "outer")
    parts = tuple(circuits[name] for name in steps)
    values = tuple(scores[name] for name in steps)
    matched = graph.union(*parts, scores=values, n=int(whole.sum()))
    both = graph.union(*parts, scores=values, n=graph.num_edges)
    chance = graph.top_edges(
        torch.rand(graph.mask.shape, generator=generator), int(whole.sum()), prune=False
    )
    row = {
        "coverage_matched": (whole & matched).sum().item() / whole.sum().item(),
        "coverage_union": (whole & both).sum().item() / whole.sum().item(),
        "chance_matched": matched.sum().item() / graph.num_edges,
        "chance_union": both.sum().item() / graph.num_edges,
    }
    tried = {
        "composition": whole,
        "union_matched": matched,
        "union": both,
        **dict(zip(steps, parts, strict=True)),
        "random": chance,
    }
    for name, circuit in tried.items():
        row[f"faith_{name}"] = faithfulness(model, test, circuit)["faithfulness"]
    return row
