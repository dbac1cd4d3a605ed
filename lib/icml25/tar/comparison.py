"""Every method on one shift, from the same start, chosen as GOOD prescribes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from icml25.core import make_generator
from icml25.tar.benchmarks import citation, imbalanced, webkb
from icml25.tar.graph import FlowGraph
from icml25.tar.objectives import (
    ERM,
    IRM,
    KLDRO,
    TAR,
    Chi2DRO,
    ClassBalanced,
    GroupDRO,
    VREx,
)
from icml25.tar.shifts import cbas, hard_region
from icml25.tar.training import GCNEnsemble, History, Objective, train
from icml25.tar.views import EERM, EditedViews

__all__ = [
    "ShiftConfig",
    "choose",
    "make_task",
    "run_eerm",
    "run_imbalance",
    "run_levers",
    "run_shifts",
    "train_eerm",
    "train_task",
]

# Accuracies are of the chosen epoch; losses and risks, which training lowers until
# its end, those of the last.
CHOSEN_METRICS = ("ood_val_accuracy", "ood_test_accuracy", "id_test_accuracy")
LAST_METRICS = ("train_loss", "train_risk", "ood_test_loss", "ood_test_risk")


@dataclass(frozen=True)
class ShiftConfig:
    """One set of data, its shifts, the model and the methods' candidates.

    ``tasks`` are names of :func:`make_task`; everything else is of the model (layers,
    sizes, Adam) but ``full_grid``: every candidate of every method, not one or two;
    and ``early_stop``: judge a model at its best epoch on shifted validation (GOOD's
    rule), not at its last.
    """

    tasks: tuple[str, ...]
    num_seeds: int = 4
    num_layers: int = 2
    hidden: int = 64
    dropout: float = 0.5
    epochs: int = 200
    lr: float = 5e-3
    weight_decay: float = 5e-4
    full_grid: bool = True
    early_stop: bool = True


def make_task(task: str, generator: torch.Generator) -> Data:
    """The data of a task: ``"cbas/concept"``, ``"Cora/word/covariate"``,
    ``"webkb-matched/concept"`` (see :func:`~icml25.tar.webkb`),
    ``"regions/0.2"`` (share of noisy labels).

    Raises:
        ValueError: no such task.
    """
    match task.split("/"):
        case ["cbas", kind]:
            return cbas(kind, generator=generator)
        case ["Cora" | "CiteSeer" as name, domain, kind]:
            return citation(name, domain, kind, generator=generator)
        case ["webkb" | "webkb-matched" as name, kind]:
            matched = name == "webkb-matched"
            return webkb(kind, match_labels=matched, generator=generator)
        case ["regions", noise]:
            return hard_region(noise=float(noise), generator=generator)
        case ["imbalance", name]:
            return imbalanced(name, generator=generator)
    raise ValueError(
        f"task={task!r}: allowed are cbas/KIND, Cora/DOMAIN/KIND, "
        "CiteSeer/DOMAIN/KIND, webkb[-matched]/KIND, regions/NOISE and "
        "imbalance/Cora or imbalance/CiteSeer"
    )


def candidates(data: Data, full_grid: bool) -> dict[str, Objective]:
    """Every method with its settings, by name; the method is the name's first word."""
    train_nodes = data.train_mask
    pairs = data.edge_index

    def graph(**options: Any) -> FlowGraph:
        n = data.num_nodes
        return FlowGraph.from_edge_index(pairs, n, mask=train_nodes, **options)

    env_id = data.env_id[train_nodes]
    induced = graph()
    chosen: dict[str, Objective] = {
        "ERM": ERM(),
        "KL-DRO tau=1": KLDRO(1.0),
        "TAR beta=0.1 steps=20": TAR(induced),
    }
    if len(env_id.unique()) > 1:
        chosen["VREx 1"] = VREx(env_id, 1.0)
        chosen["GroupDRO 1"] = GroupDRO(env_id, 1.0)
    if not full_grid:
        return chosen
    chosen |= {
        "balanced": ClassBalanced(),
        "TAR beta=0.1 steps=5": TAR(induced, steps=5),
        "TAR beta=0.1 steps=60": TAR(induced, steps=60),
        "TAR beta=1 steps=20": TAR(induced, beta=1.0),
        "TAR two hops": TAR(graph(hops=2)),
        "TAR two hops, normalised": TAR(graph(hops=2, normalise=True)),
    }
    # Six settings a method, as many as TAR has; GOOD's own are among them.
    for each in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        chosen[f"KL-DRO tau={each:g}"] = KLDRO(each)
        chosen[f"chi2-DRO tau={each:g}"] = Chi2DRO(each)
    if len(env_id.unique()) > 1:
        for each in (0.001, 0.01, 0.1, 1.0, 10.0, 100.0):
            chosen[f"GroupDRO {each:g}"] = GroupDRO(env_id, each)
        for each in (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0):
            chosen[f"VREx {each:g}"] = VREx(env_id, each)
            chosen[f"IRM {each:g}"] = IRM(env_id, each)
    return chosen


def train_task(
    task: str, config: ShiftConfig, *, device: torch.device, seed: int
) -> tuple[Data, History]:
    """Train every candidate on one task and one seed, side by side.

    The seed draws the data or its split, the first weights and the dropout, the same
    for all candidates.
    """
    data = make_task(task, make_generator(seed)).to(device)
    chosen = candidates(data, config.full_grid)
    model = _model(len(chosen), data, config, device, seed)
    return data, _train(model, data, chosen, config, f"{task}, seed {seed}")


def train_eerm(
    task: str, config: ShiftConfig, *, device: torch.device, seed: int
) -> list[History]:
    """The same for EERM, which needs graphs of its own: one run a setting.

    Data, first weights and epochs are those of :func:`train_task`.
    """
    data = make_task(task, make_generator(seed)).to(device)
    histories = []
    settings = ((1.0, 1), (1.0, 5), (0.1, 5)) if config.full_grid else ((1.0, 1),)
    for beta, edits in settings:
        views = EditedViews(
            _model(1, data, config, device, seed),
            data.edge_index,
            data.num_nodes,
            num_edits=edits,
            generator=make_generator(seed + 20_000, device),
        )
        name = f"EERM beta={beta:g} edits={edits}"
        desc = f"{task}, seed {seed}, {name}"
        chosen = {name: EERM(views, beta)}
        histories.append(_train(views, data, chosen, config, desc))
    return histories


def _model(
    count: int, data: Data, config: ShiftConfig, device: torch.device, seed: int
) -> GCNEnsemble:
    return GCNEnsemble(
        count,
        data.num_features,
        config.hidden,
        int(data.y.max()) + 1,
        num_layers=config.num_layers,
        dropout=config.dropout,
        generator=make_generator(seed + 10_000, device),
    )


def _train(
    model: nn.Module,
    data: Data,
    chosen: dict[str, Objective],
    config: ShiftConfig,
    desc: str,
) -> History:
    return train(
        model,
        data,
        chosen,
        epochs=config.epochs,
        lr=config.lr,
        weight_decay=config.weight_decay,
        desc=desc,
    )


def run_shifts(
    config: ShiftConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Every task of ``config`` over ``num_seeds`` seeds from ``seed`` on.

    Returns:
        ``{"results": {task: {candidate: {metric: [value per seed]}}}}`` and, for each
        task and method, one text ``"mean +- standard error"`` of the accuracy on the
        shifted test set. Epoch and candidate are chosen on shifted validation; losses
        and risks are those at the end of training.
    """

    def run(task: str, each: int) -> list[History]:
        return [train_task(task, config, device=device, seed=each)[1]]

    return _over_seeds(config, seed, run)


def levers(data: Data) -> dict[str, Objective]:
    """TAR with what its description leaves open: warm starts, another mobility."""
    graph = FlowGraph.from_edge_index(
        data.edge_index, data.num_nodes, mask=data.train_mask
    )
    return {
        "ERM": ERM(),
        "warm beta=0.1 steps=1": TAR(graph, steps=1, warm_start=True),
        "warm beta=0.1 steps=5": TAR(graph, steps=5, warm_start=True),
        "warm beta=1 steps=5": TAR(graph, beta=1.0, steps=5, warm_start=True),
        "log-mean beta=0.1 steps=5": TAR(graph, steps=5, mobility="logmean"),
        "log-mean beta=0.1 steps=20": TAR(graph, mobility="logmean"),
        "log-mean beta=1 steps=20": TAR(graph, beta=1.0, mobility="logmean"),
    }


def run_levers(
    config: ShiftConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """:func:`levers` on the same tasks and seeds; returns what :func:`run_shifts` does.

    Data, first weights, epochs and the rule of choice are those of
    :func:`train_task`.
    """

    def run(task: str, each: int) -> list[History]:
        data = make_task(task, make_generator(each)).to(device)
        chosen = levers(data)
        model = _model(len(chosen), data, config, device, each)
        return [_train(model, data, chosen, config, f"{task}, seed {each}")]

    return _over_seeds(config, seed, run)


def run_eerm(config: ShiftConfig, *, device: torch.device, seed: int) -> dict[str, Any]:
    """EERM on the same tasks and seeds; returns what :func:`run_shifts` does."""

    def run(task: str, each: int) -> list[History]:
        return train_eerm(task, config, device=device, seed=each)

    return _over_seeds(config, seed, run)


def run_imbalance(
    config: ShiftConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """Rare classes: what :func:`run_shifts` returns, and where the weight can go.

    Returns:
        Also, under ``"rare"``, for each task and each seed: the rare classes' share of
        the training nodes (``"share"``), of TAR's weights at the end of training
        (``"tar_mass"``, default setting) and of those of class balance
        (``"balanced_mass"``), the share of rare nodes without any training neighbour
        (``"isolated"``) and of those with one from a common class
        (``"beside_common"``).
    """
    rare: dict[str, dict[str, list[float]]] = {}

    def run(task: str, each: int) -> list[History]:
        data, history = train_task(task, config, device=device, seed=each)
        q = history.weights["TAR beta=0.1 steps=20"][-1]
        found = _rare_weight(data, q)
        row = rare.setdefault(task, {name: [] for name in found})
        for name, value in found.items():
            row[name].append(round(value, 4))
        return [history]

    return {**_over_seeds(config, seed, run), "rare": rare}


def _rare_weight(data: Data, q: Tensor) -> dict[str, float]:
    graph = FlowGraph.from_edge_index(
        data.edge_index, data.num_nodes, mask=data.train_mask
    )
    is_rare = data.is_rare[data.train_mask]
    crossing = is_rare[graph.src] != is_rare[graph.dst]
    ends = torch.stack([graph.src, graph.dst])
    beside, linked = torch.zeros_like(is_rare), torch.zeros_like(is_rare)
    beside[ends[:, crossing].flatten()] = True
    linked[ends.flatten()] = True
    num_classes = int(data.y.max()) + 1
    return {
        "share": is_rare.double().mean().item(),
        "tar_mass": q[is_rare].sum().item(),
        "balanced_mass": data.y[data.is_rare].unique().numel() / num_classes,
        "isolated": (~linked)[is_rare].double().mean().item(),
        "beside_common": beside[is_rare].double().mean().item(),
    }


def _over_seeds(
    config: ShiftConfig, seed: int, run: Callable[[str, int], list[History]]
) -> dict[str, Any]:
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for task in config.tasks:
        table = results.setdefault(task, {})
        for each in range(seed, seed + config.num_seeds):
            for history in run(task, each):
                _keep(table, history, config.early_stop)
    texts = {
        f"{task} {method}": f"{100 * mean:.1f} +- {100 * error:.1f}"
        for task, table in results.items()
        for method, name in choose(table).items()
        for mean, error in [mean_and_error(table[name]["ood_test_accuracy"])]
    }
    return {**texts, "results": results}


def _keep(
    table: dict[str, dict[str, list[float]]], history: History, early_stop: bool
) -> None:
    for name in history.names:
        last = history.at(name, -1)
        best = history.best(name) if early_stop else last
        kept = {metric: best[metric] for metric in CHOSEN_METRICS}
        kept |= {metric: last[metric] for metric in LAST_METRICS}
        row = table.setdefault(name, {metric: [] for metric in kept})
        for metric, value in kept.items():
            row[metric].append(round(value, 4))


def choose(table: dict[str, dict[str, list[float]]]) -> dict[str, str]:
    """Method -> its candidate with the best mean accuracy on shifted validation."""
    picked: dict[str, str] = {}
    for name, row in table.items():
        method = name.split()[0]
        best = picked.setdefault(method, name)
        if _mean(row) > _mean(table[best]):
            picked[method] = name
    return picked


def _mean(row: dict[str, list[float]]) -> float:
    return sum(row["ood_val_accuracy"]) / len(row["ood_val_accuracy"])


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error over seeds (NaN for a single one)."""
    if len(values) < 2:
        return sum(values), float("nan")
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor.mean().item(), (tensor.std() / len(values) ** 0.5).item()
