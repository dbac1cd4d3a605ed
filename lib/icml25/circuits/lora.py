"""CircuitLoRA: more rank for the layers whose edges fine-tuning changes most."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .graph import CircuitGraph

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

#: The four linear maps of a block that the paper adapts, by model type.
TARGETS = {
    "gpt_neox": (
        "attention.query_key_value",
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    "llama": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
}


def layer_importance(
    before: Tensor,
    after: Tensor,
    graph: CircuitGraph,
    *,
    by: str = "source",
    normalise: bool = False,
) -> Tensor:
    r"""How much the edge scores of each layer change in fine-tuning.

    $D_l = \sum |S_{\text{after}}[u,v] - S_{\text{before}}[u,v]|$ over the
    edges of layer $l$. The paper's rule takes the layer of an edge's **source**; early
    layers then own more edges (their sources reach more slots), and lead even for
    random scores.

    Args:
        before: scores ``[U, V]`` of the model before fine-tuning; or ``[U, U + 1]``,
            already merged by :meth:`~icml25.circuits.CircuitGraph.merge_qkv`.
        after: scores of the fine-tuned model, of the same shape.
        graph: their graph.
        by: ``"source"`` or ``"target"``: whose layer an edge counts for.
        normalise: mean instead of sum over the layer's edges: removes the bias.

    Returns:
        ``[L]``, $D_l \ge 0$.

    Raises:
        ValueError: shapes that differ or do not fit the graph, an unknown ``by``.

    Source:
        The authors' code.
    """
    if by not in ("source", "target"):
        raise ValueError(f"by={by!r}: allowed are 'source' and 'target'")
    mask, columns = graph.mask, graph.slot_layers
    if before.shape != mask.shape:
        mask = graph.merge_qkv(graph.mask)
        last = graph.source_layers.new_full((1,), graph.num_layers - 1)
        columns = torch.cat([graph.source_layers, last])
    if before.shape != mask.shape or after.shape != mask.shape:
        raise ValueError(
            f"before is {tuple(before.shape)} and after {tuple(after.shape)}; both "
            f"must be {tuple(graph.mask.shape)} or {tuple(mask.shape)}"
        )
    delta = (after - before).abs().cpu() * mask
    if by == "source":
        totals, counts, layers = delta.sum(1), mask.sum(1), graph.source_layers
    else:
        totals, counts, layers = delta.sum(0), mask.sum(0), columns
    importance = totals.new_zeros(graph.num_layers).index_add_(0, layers, totals)
    if normalise:
        edges = counts.new_zeros(graph.num_layers).index_add_(0, layers, counts)
        importance = importance / edges
    return importance


def critical_layers(importance: Tensor, top: int | None = None) -> list[int]:
    """The layers that get the larger rank, in rising order.

    Args:
        importance: ``[L]``.
        top: how many; ``None``: all at least one standard deviation above the mean (the
            released code's other rule, population standard deviation). Where all layers
            are equal, all are critical.

    Raises:
        ValueError: importances that are not finite, more layers than there are, or
            none.
    """
    if importance.ndim != 1 or not len(importance) or not importance.isfinite().all():
        raise ValueError(
            f"importance={importance.tolist()}: give one finite number a layer"
        )
    num_layers = len(importance)
    if top is None:
        # From the smallest up: equal layers then are on the bar without rounding.
        above = importance - importance.min()
        bar = above.mean() + above.std(correction=0)
        return (above >= bar).nonzero().flatten().tolist()
    if not 1 <= top <= num_layers:
        raise ValueError(f"top={top}: give 1 to {num_layers}, the number of layers")
    order = importance.argsort(descending=True, stable=True)
    return sorted(order[:top].tolist())


def equal_rank(r: int, r_critical: int, *, num_layers: int, num_critical: int) -> int:
    """The uniform rank with exactly as many parameters: the mean over the layers.

    Raises:
        ValueError: the mean is not a whole number, or the counts do not fit.
    """
    if not 1 <= num_critical <= num_layers:
        raise ValueError(f"num_critical={num_critical}: give 1 to {num_layers}")
    total = (num_layers - num_critical) * r + num_critical * r_critical
    rank, rest = divmod(total, num_layers)
    if rest:
        raise ValueError(
            f"ranks {r} and {r_critical} ({num_critical} of {num_layers} layers) "
            f"average {total}/{num_layers}: no uniform rank has as many parameters"
        )
    return rank


def circuit_lora_config(
    model: nn.Module,
    layers: Sequence[int],
    *,
    r: int = 16,
    r_critical: int = 64,
    alpha_ratio: float = 2,
    targets: Sequence[str] | None = None,
) -> LoraConfig:
    """A peft configuration: rank ``r_critical`` on critical layers, else ``r``.

    Args:
        model: GPT-NeoX or Llama; only its configuration is read.
        layers: critical layers, from 0; empty for plain LoRA.
        r: rank of the other layers.
        r_critical: rank of the critical ones.
        alpha_ratio: LoRA's ``alpha`` over its rank, the same everywhere, so that all
            updates keep one scale.
        targets: module paths inside a block (default: the paper's, all linear maps).

    Returns:
        A ``peft.LoraConfig``. Its ``rank_pattern`` and ``alpha_pattern`` keys are
        anchored and name the layer in full, so that layer 1 does not match layer 11.

    Raises:
        NotImplementedError: no default targets for this architecture.
        TypeError: a rank or layer that is not a whole number.
        ValueError: a rank below 1, or a layer that the model does not have.

    Source:
        The paper's CircuitLoRA with (r, r_critical) = (8, 32) or (16, 64) and the five
        most changed layers.
    """
    from peft import LoraConfig

    config = model.config
    if targets is None and config.model_type not in TARGETS:
        raise NotImplementedError(
            f"no default targets for {config.model_type!r}: give targets=[...]"
        )
    targets = tuple(targets or TARGETS[config.model_type])
    for name, value in (("r", r), ("r_critical", r_critical)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: a rank is a whole number")
        if value < 1:
            raise ValueError(f"{name}={value}: a rank is at least 1")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"layers={list(layers)!r}: give whole numbers")
        if not 0 <= layer < config.num_hidden_layers:
            raise ValueError(
                f"layer {layer} does not exist: the model has layers 0 to "
                f"{config.num_hidden_layers - 1}"
            )
    paths = [
        rf"layers\.{layer}\.{re.escape(target)}"
        for layer in sorted(set(layers))
        for target in targets
    ]
    ends = "|".join(re.escape(target) for target in targets)
    return LoraConfig(
        r=r,
        lora_alpha=alpha_ratio * r,
        lora_dropout=0.0,
        bias="none",
        target_modules=rf".*layers\.\d+\.({ends})",
        rank_pattern=dict.fromkeys(paths, r_critical),
        alpha_pattern=dict.fromkeys(paths, alpha_ratio * r_critical),
        task_type="CAUSAL_LM",
    )


def lora_numel(model: nn.Module, config: LoraConfig) -> int:
    """Trainable numbers that a configuration adds: the sum of ``rank * (in + out)``."""
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and re.fullmatch(config.target_modules, name):
            matching = [
                rank
                for key, rank in config.rank_pattern.items()
                if re.fullmatch(rf"(.*\.)?({key})", name)
            ]
            rank = matching[0] if matching else config.r
            total += rank * (module.in_features + module.out_features)
    return total


def add_lora(model: nn.Module, config: LoraConfig, *, copied: bool = True) -> PeftModel:
    """Wrap a model by peft; it must train as many numbers as the formula says.

    Args:
        model: the bare model.
        config: from :func:`circuit_lora_config`.
        copied: leave ``model`` as it is and wrap a copy.

    Raises:
        RuntimeError: the trainable count differs from the formula's (a pattern that
            did not match, a frozen adapter).
    """
    expected = lora_numel(model, config)
    wrapped = wrap(model, config, copied=copied)
    trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    if trainable != expected:
        raise RuntimeError(
            f"{trainable} trainable parameters, the formula says {expected}: the rank "
            "pattern does not fit the model"
        )
    return wrapped


def wrap(model: nn.Module, config: Any, *, copied: bool = True) -> PeftModel:
    """``peft.get_peft_model`` on a copy of the model and of the configuration."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft still asks transformers by a name that is about to go.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(
            copy.deepcopy(model) if copied else model, copy.deepcopy(config)
        )
