"""The chapter's experiments and their configurations."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch_geometric.nn import GCN

from icml25.core import Experiment, make_generator
from icml25.tar.comparison import (
    ShiftConfig,
    make_task,
    run_eerm,
    run_imbalance,
    run_levers,
    run_shifts,
)
from icml25.tar.graph import FlowGraph
from icml25.tar.objectives import ERM, TAR

__all__ = ["EXPERIMENTS", "CostConfig", "LabelConfig", "epoch_cost", "label_orders"]


@dataclass(frozen=True)
class CostConfig:
    """A random graph of Cora's size, a GCN, and how often its epoch is timed."""

    num_nodes: int = 2708
    num_edges: int = 5278
    num_words: int = 1433
    num_train: int = 1171
    hidden: int = 64
    steps: int = 20
    repeats: int = 40


def epoch_cost(
    config: CostConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Least seconds of a training epoch with TAR and with plain training.

    Both take turns in one process. On a CPU the seconds are the process's own, so a
    busy machine does not disturb them.
    """
    generator, n = make_generator(seed), config.num_nodes
    pairs = torch.randint(n, (2, config.num_edges), generator=generator)
    edge_index = torch.cat([pairs, pairs.flip(0)], 1).to(device)
    # Cora's papers have 18 words on average.
    share = 18 / config.num_words
    x = (torch.rand(n, config.num_words, generator=generator) < share).float()
    x, y = x.to(device), torch.randint(7, (n,), generator=generator).to(device)
    mask = (torch.arange(n) < config.num_train).to(device)
    graph = FlowGraph.from_edge_index(edge_index, n, mask=mask)
    chosen = {"ERM": ERM(), "TAR": TAR(graph, steps=config.steps)}
    models = {
        name: GCN(config.num_words, config.hidden, 2, 7, dropout=0.5).to(device)
        for name in chosen
    }
    optimisers = {name: torch.optim.Adam(m.parameters()) for name, m in models.items()}

    def epoch(name: str) -> float:
        begin = _clock(device)
        optimisers[name].zero_grad()
        logits = models[name](x, edge_index)
        chosen[name](logits[mask], y[mask]).backward()
        optimisers[name].step()
        return _clock(device) - begin

    times: dict[str, list[float]] = {name: [] for name in chosen}
    for turn in range(config.repeats + 2):
        for name, kept in times.items():
            seconds = epoch(name)
            if turn > 1:  # the first two warm up
                kept.append(seconds)
    erm, tar = (min(times[name]) for name in ("ERM", "TAR"))
    return {"erm_s": erm, "tar_s": tar, "ratio": tar / erm, "edges": graph.num_edges}


@dataclass(frozen=True)
class LabelConfig:
    """Ridge regression on words: strength of the ridge."""

    ridge: float = 50.0


def label_orders(
    config: LabelConfig, *, device: torch.device, seed: int
) -> dict[str, float]:
    """Read Wisconsin's pages with a linear classifier of Cornell's and Texas' words.

    Returns:
        Share of right answers with the classes numbered as the files number them, and
        with matched numbers. The classifier sees words alone, no edge.
    """
    found = {}
    for name in ("webkb", "webkb-matched"):
        data = make_task(f"{name}/covariate", make_generator(seed)).to(device)
        away = data.ood_val_mask | data.ood_test_mask
        x, target = data.x.double(), torch.nn.functional.one_hot(data.y).double()
        ridge = config.ridge * torch.eye(x.shape[1], dtype=x.dtype, device=device)
        known = x[~away]
        fit = torch.linalg.solve(known.T @ known + ridge, known.T @ target[~away])
        right = (x[away] @ fit).argmax(1) == data.y[away]
        found[name] = round(right.double().mean().item(), 3)
    return found


def _clock(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def _shifts(*names: str) -> tuple[str, ...]:
    return tuple(
        f"{name}/{kind}" for name in names for kind in ("covariate", "concept")
    )


# GOOD's own sizes: three layers of 300, ten runs, no weight decay.
_GOOD = {
    "num_seeds": 10,
    "num_layers": 3,
    "hidden": 300,
    "epochs": 1000,
    "lr": 1e-3,
    "weight_decay": 0.0,
}
_CBAS = {"num_layers": 3, "lr": 5e-3, "weight_decay": 0.0}
# One layer is a convex problem: it is run to its end, nothing is stopped early.
_REGIONS = {"num_layers": 1, "lr": 0.1, "weight_decay": 0.0, "early_stop": False}
CORA = ShiftConfig(_shifts("Cora/word", "Cora/degree"), hidden=32)
CITESEER = ShiftConfig(_shifts("CiteSeer/word"), hidden=32)
WEBKB = ShiftConfig(_shifts("webkb", "webkb-matched"), hidden=32)
LEVERS = ShiftConfig(CORA.tasks + CITESEER.tasks + WEBKB.tasks, hidden=32)
IMBALANCE = ShiftConfig(("imbalance/Cora", "imbalance/CiteSeer"), hidden=32)
CBAS = ShiftConfig(_shifts("cbas"), num_seeds=5, epochs=250, **_CBAS)
CBAS_SMALL = ShiftConfig(
    _shifts("cbas"), num_seeds=3, hidden=32, epochs=100, full_grid=False, **_CBAS
)
REGIONS = ShiftConfig(
    ("regions/0", "regions/0.2"), num_seeds=4, epochs=100, full_grid=False, **_REGIONS
)
EXPERIMENTS = {
    "cbas-small": Experiment(
        run_shifts,
        laptop=CBAS_SMALL,
        summary="CBAS, one setting a method (the notebook's run)",
    ),
    "regions": Experiment(
        run_shifts, laptop=REGIONS, summary="a shift that follows the graph's edges"
    ),
    "cost": Experiment(
        epoch_cost,
        laptop=CostConfig(),
        summary="seconds of an epoch with TAR and without, at Cora's size",
    ),
    "webkb-labels": Experiment(
        label_orders,
        laptop=LabelConfig(),
        summary="the universities number their classes differently (needs webkb)",
    ),
    "cbas": Experiment(
        run_shifts,
        laptop=CBAS,
        paper=ShiftConfig(CBAS.tasks, **{**_GOOD, "lr": 3e-3, "epochs": 2000}),
        summary="CBAS, every setting of every method",
    ),
    "cora": Experiment(
        run_shifts,
        laptop=CORA,
        paper=ShiftConfig(CORA.tasks, **_GOOD),
        summary="Cora by words and by degree (needs planetoid)",
    ),
    "citeseer": Experiment(
        run_shifts,
        laptop=CITESEER,
        paper=ShiftConfig(CITESEER.tasks, **_GOOD),
        summary="CiteSeer by words (needs planetoid)",
    ),
    "webkb": Experiment(
        run_shifts,
        laptop=WEBKB,
        paper=ShiftConfig(WEBKB.tasks, **_GOOD),
        summary="WebKB by university (needs webkb)",
    ),
    "imbalance": Experiment(
        run_imbalance,
        laptop=IMBALANCE,
        paper=ShiftConfig(IMBALANCE.tasks, **_GOOD),
        summary="three classes cut to a tenth in training (needs planetoid)",
    ),
}
EXPERIMENTS["levers"] = Experiment(
    run_levers,
    laptop=LEVERS,
    summary="TAR with warm starts and logarithmic means (needs planetoid, webkb)",
)
EXPERIMENTS |= {
    f"{name}-eerm": Experiment(
        run_eerm,
        EXPERIMENTS[name].laptop,
        EXPERIMENTS[name].paper,
        f"EERM on the tasks of {name}",
    )
    for name in ("cbas-small", "cbas", "cora", "citeseer", "webkb")
}
