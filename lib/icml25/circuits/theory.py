"""Where edge attribution is exact, and what its scores must add up to."""

from __future__ import annotations

import torch
from torch import nn

from .adapter import Adapter
from .attribution import attribute_edges
from .pairs import Metric, PromptPairs, resolve_metric
from .small import BaseConfig, random_neox


@torch.no_grad()
def affine_neox(config: BaseConfig | None = None, *, seed: int = 0) -> nn.Module:
    """A GPT-NeoX whose logits are an affine function of its embeddings.

    MLPs without activation, attention that looks everywhere alike (query and key maps
    are zero), and norms with so large an epsilon that they only centre and scale.
    """
    config = config or BaseConfig(num_layers=3, dim=32)
    model = random_neox(config, 40, seed)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e8
            module.weight.fill_(1e4)
        elif isinstance(module, nn.Linear):
            spread = module.in_features**-0.5
            module.weight.normal_(0, spread, generator=generator)
    for layer in model.gpt_neox.layers:
        layer.mlp.act = nn.Identity()
        qkv = layer.attention.query_key_value
        for values in (qkv.weight, qkv.bias):
            # (H 3 d_h, ...) -> (H, 3, d_h, ...): no query, no key
            values.view(config.num_heads, 3, -1, *values.shape[1:])[:, :2] = 0
    return model


@torch.no_grad()
def completeness(
    model: nn.Module,
    pairs: PromptPairs,
    *,
    metric: str | Metric = "kl",
    steps: int = 5,
    rule: str = "midpoint",
) -> tuple[float, float]:
    """The embedding's row of scores added up, and the metric's change that it equals.

    Returns:
        ``sum_v S[input, v]``, and ``M(corrupted) - M(clean)``: equal for exact
        integration.
    """
    adapter, function = Adapter(model), resolve_metric(metric)
    clean = adapter.logits(pairs.clean, pairs)
    corrupted = adapter.logits(pairs.corrupted, pairs)
    change = function(corrupted, clean, pairs) - function(clean, clean, pairs)
    scores = attribute_edges(model, pairs, metric=metric, steps=steps, rule=rule)
    return scores[0].sum().item(), change.mean().item()
