"""Edge attribution written out plainly: every input and output of every head."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from .adapter import Adapter
from .attribution import quadrature
from .pairs import Metric, PromptPairs, resolve_metric


def attribute_edges_plainly(
    model: nn.Module,
    pairs: PromptPairs,
    *,
    metric: str | Metric = "kl",
    steps: int = 5,
    rule: str = "midpoint",
) -> Tensor:
    """What :func:`~icml25.circuits.attribute_edges` computes, by definition.

    The forward pass is rebuilt from the model's weights with one residual input for
    every slot and one residual output for every head, all kept under autograd, as
    libraries that hook such tensors do. It is the readable version and the benchmark's
    other side; unpadded prompts only.

    Args:
        model: as for :func:`~icml25.circuits.attribute_edges`.
        pairs: prompts without padding.
        metric: as there.
        steps: as there.
        rule: as there.

    Returns:
        ``[U, V]`` float32.
    """
    metric = resolve_metric(metric)
    adapter = Adapter(model)
    embed = adapter.embed
    with torch.no_grad():
        start, end = embed(pairs.corrupted).float(), embed(pairs.clean).float()
        outputs, _, clean_logits = _forward(adapter, end)
        corrupted, _, _ = _forward(adapter, start)
        differences = torch.stack(
            [far - near for far, near in zip(corrupted, outputs, strict=True)]
        )
    scores = differences.new_zeros(adapter.graph.mask.shape)
    for alpha, weight in zip(*quadrature(rule, steps), strict=True):
        path = (start + alpha * (end - start)).requires_grad_(True)
        with torch.enable_grad():
            _, slots, logits = _forward(adapter, path)
            metric(logits, clean_logits, pairs).sum().backward(inputs=slots)
        gradients = torch.stack([slot.grad for slot in slots])
        scores += weight * differences.flatten(1) @ gradients.flatten(1).t()
    return scores * adapter.graph.mask.to(scores.device) / len(pairs)


def _forward(adapter: Adapter, x: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs of all sources, inputs of all slots, logits at the last position."""
    sources, slots = [x], []
    rotate = importlib.import_module(type(adapter.backbone).__module__)
    where = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    cos, sin = adapter.backbone.rotary_emb(x, where)
    group = adapter.num_heads // adapter.num_kv_heads
    for layer, block in enumerate(adapter.blocks):
        weights, biases = adapter.read_weights(layer)
        reads = []
        for place in range(adapter.num_reads):
            slots.append(x + 0)  # one node of the graph for every slot
            normed = block.attn_norm(slots[-1])
            reads.append(normed @ weights[place] + biases[place])
        reads = torch.stack(reads, dim=1)  # (B, S, T, d_h)
        sizes = (adapter.num_heads, adapter.num_kv_heads, adapter.num_kv_heads)
        query, key, value = reads.split(sizes, dim=1)
        query, key = rotate.apply_rotary_pos_emb(query, key, cos, sin)
        z = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            is_causal=True,
        )
        heads = torch.einsum("bhte,hed->hbtd", z, adapter.write_weights(layer))
        sources += list(heads.unbind(0))
        _, bias = adapter.write_affine(layer)
        mixed = x + heads.sum(0) + bias
        slots.append((x if adapter.graph.is_parallel else mixed) + 0)
        sources.append(block.mlp(block.mlp_norm(slots[-1])))
        x = mixed + sources[-1]
    slots.append(x + 0)
    if x.requires_grad:
        for slot in slots:
            slot.retain_grad()
    logits = adapter.base.lm_head(adapter.final_norm(slots[-1])[:, -1])
    return sources, slots, logits
