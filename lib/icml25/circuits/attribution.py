"""Edge attribution by integrated gradients, on the stock model, by hooks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from .adapter import Adapter, hooks
from .pairs import Metric, PromptPairs, resolve_metric

RULES = ("midpoint", "right", "left", "gauss", "eap")


def quadrature(rule: str, steps: int) -> tuple[list[float], list[float]]:
    """Points on the line from corrupted (0) to clean (1) embeddings, and weights.

    Args:
        rule: ``"midpoint"``, ``"right"`` (ends at the clean prompt: the paper's code),
            ``"left"`` (starts at the corrupted one), ``"gauss"`` (Gauss-Legendre), or
            ``"eap"``: the clean point alone.
        steps: number of points, at least 1; ``"eap"`` ignores it.

    Raises:
        ValueError: an unknown rule or too few steps.
    """
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: allowed are {', '.join(RULES)}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: give a whole number of at least 1")
    if rule == "eap":
        return [1.0], [1.0]
    if rule == "gauss":
        points, weights = np.polynomial.legendre.leggauss(steps)
        return ((points + 1) / 2).tolist(), (weights / 2).tolist()
    offset = {"left": 0.0, "midpoint": 0.5, "right": 1.0}[rule]
    return [(k + offset) / steps for k in range(steps)], [1 / steps] * steps


@torch.no_grad()
def attribute_edges(
    model: nn.Module,
    pairs: PromptPairs,
    *,
    metric: str | Metric = "kl",
    steps: int = 5,
    rule: str = "midpoint",
    batch_size: int | None = None,
    fold: bool = False,
) -> Tensor:
    r"""Score every edge of the model's graph: EAP, or EAP with integrated gradients.

    .. math:: S[u,v] = \frac1N \sum_{\text{prompts, positions}}
        (a_u^{\text{corr}} - a_u^{\text{clean}}) \cdot \sum_k w_k\, g_v(\alpha_k)

    with $g_v(\alpha)$ the gradient of the metric at slot $v$'s input when the embedding
    output is $e^{\text{corr}} + \alpha(e^{\text{clean}} - e^{\text{corr}})$. To first
    order $S[u,v]$ is the change of the metric when this edge alone carries its
    corrupted activation.

    Args:
        model: GPT-NeoX or Llama of transformers, bare or peft-wrapped, in eval mode.
        pairs: the prompts.
        metric: ``"kl"``, ``"logit"``, ``"logit_diff"`` or a function of (logits
            ``[N, vocabulary]``, the clean run's logits, the batch) that returns one
            number a prompt.
        steps: points of the integral.
        rule: see :func:`quadrature`. Departure: the paper's code uses ``"right"``; at
            equal cost the midpoint rule is closer to exact patching.
        batch_size: prompts at a time (``None``: all). Scores do not depend on it.
        fold: run all points in one batch, ``steps`` times as large: fewer, larger
            kernels on an accelerator, more memory; slower on a CPU.

    Returns:
        ``[U, V]`` float32 on the model's device, mean over prompts; zero where there is
        no edge.

    Raises:
        NotImplementedError: an unsupported architecture.
        ValueError: a metric that is not finite or not one number a prompt, an unknown
            rule or metric, a model in training mode.

    Notes:
        No head's input or output is materialised under autograd. The stock forward runs
        ``steps`` times with frozen parameters; gradients are taken at the projections'
        outputs and pulled back through the norm in closed form, one layer at a time,
        and each layer is one matrix product of ``[U', B T d]`` with ``[B T d, S]``.
        Memory beside the model's: ``U B T d`` for the differences and one layer's
        ``S B T d`` gradients, float32 whatever the model's dtype.

    Source:
        Section 3 of the paper; Syed et al. (2023) for EAP, Hanna et al. (2024) for IG.
    """
    metric = resolve_metric(metric)
    adapter = Adapter(model)
    points, weights = quadrature(rule, steps)
    maps = [_folded_reads(adapter, layer) for layer in range(len(adapter.blocks))]
    graph, total = adapter.graph, None
    every = range(len(points))
    groups = [list(every)] if fold else [[k] for k in every]
    with adapter.frozen():
        for number, batch in enumerate(pairs.batches(batch_size)):
            clean = _Run.of(adapter, batch.clean, batch)
            corrupted = _Run.of(adapter, batch.corrupted, batch)
            differences = _differences(adapter, clean, corrupted, batch)
            scores = differences.new_zeros(graph.mask.shape)
            for group in groups:
                captured, gradients = _gradients(
                    adapter,
                    batch.repeat(len(group)) if len(group) > 1 else batch,
                    clean,
                    corrupted,
                    [points[k] for k in group],
                    [weights[k] for k in group],
                    metric,
                    number,
                )
                _contract(adapter, scores, differences, captured, gradients, maps)
            total = scores if total is None else total + scores
    return total * graph.mask.to(total.device) / len(pairs)


class _Run:
    """What one forward run leaves behind: embeddings, heads, MLPs, logits."""

    def __init__(self, embedding, heads, mlps, logits) -> None:
        self.embedding, self.heads, self.mlps = embedding, heads, mlps
        self.logits = logits

    @classmethod
    @torch.no_grad()
    def of(cls, adapter: Adapter, ids: Tensor, batch: PromptPairs) -> _Run:
        kept: dict[nn.Module, Tensor] = {}

        def keep(module):
            def hook(value):
                kept[module] = value

            return hook

        blocks = adapter.blocks
        with hooks(
            before={b.attn_out: keep(b.attn_out) for b in blocks},
            after={m: keep(m) for m in [adapter.embed, *(b.mlp for b in blocks)]},
        ):
            logits = adapter.logits(ids, batch)
        return cls(
            kept[adapter.embed],
            [kept[b.attn_out] for b in blocks],
            [kept[b.mlp] for b in blocks],
            logits,
        )


@torch.no_grad()
def _differences(
    adapter: Adapter, clean: _Run, corrupted: _Run, batch: PromptPairs
) -> Tensor:
    """Corrupted minus clean output of every source, ``[U, B, T, d]`` float32."""
    graph = adapter.graph
    shape = (len(graph.sources), *clean.embedding.shape)
    out = torch.empty(shape, device=clean.embedding.device)
    out[0] = corrupted.embedding.float() - clean.embedding.float()
    for layer in range(graph.num_layers):
        row = graph.first_source(layer)
        heads = corrupted.heads[layer].float() - clean.heads[layer].float()
        # (B, T, H d_h) -> (H, B T, d_h)
        heads = heads.flatten(0, 1).unflatten(-1, (adapter.num_heads, -1))
        torch.bmm(
            heads.transpose(0, 1),
            adapter.write_weights(layer),
            out=out[row : row + adapter.num_heads].flatten(1, 2),
        )
        mlp = corrupted.mlps[layer].float() - clean.mlps[layer].float()
        out[row + adapter.num_heads] = mlp
    if batch.attention_mask is not None:
        out.mul_(batch.attention_mask.unsqueeze(-1))
    return out


def _folded_reads(adapter: Adapter, layer: int) -> Tensor:
    """Maps from the normalised residual to each slot, ``[S, d_h, d]``, gain inside."""
    weights, _ = adapter.read_weights(layer)
    norm = adapter.blocks[layer].attn_norm
    return adapter.gain(norm, weights).transpose(1, 2).contiguous()


def _mlp_and_final(adapter: Adapter) -> list[nn.Module]:
    return [*(block.mlp_norm for block in adapter.blocks), adapter.final_norm]


def _gradients(
    adapter: Adapter,
    batch: PromptPairs,
    clean: _Run,
    corrupted: _Run,
    alphas: list[float],
    shares: list[float],
    metric: Metric,
    number: int,
) -> tuple[dict, dict]:
    """Norm inputs, and gradients at the norms' and projections' outputs."""
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}
    times, size = len(alphas), len(clean.logits)
    far, near = clean.embedding, corrupted.embedding
    path = torch.cat([torch.lerp(near, far, alpha) for alpha in alphas])

    def keep(store, module):
        def hook(value):
            store[module] = value

        return hook

    def embed(_):
        return path.requires_grad_(True)

    norms = [b.attn_norm for b in adapter.blocks] + _mlp_and_final(adapter)
    reads = [module for b in adapter.blocks for module in b.qkv]
    wanted = reads + _mlp_and_final(adapter)
    with (
        torch.enable_grad(),
        hooks(
            before={norm: keep(inputs, norm) for norm in norms},
            after={adapter.embed: embed}
            | {module: keep(outputs, module) for module in wanted},
        ),
    ):
        logits = adapter.logits(batch.clean, batch)
        values = metric(logits, clean.logits.repeat(times, 1), batch)
        if values.shape != (len(batch),):
            raise ValueError(
                f"the metric must return one number a prompt, [{len(batch)}], "
                f"got {tuple(values.shape)}"
            )
        if not torch.isfinite(values).all():
            raise ValueError(f"the metric is not finite in batch {number}")
        # (m B) -> (m, B): the steps' weights, then a sum over prompts.
        loss = values.view(times, size).sum(1) @ values.new_tensor(shares)
        found = torch.autograd.grad(loss, [outputs[module] for module in wanted])
    return (
        {module: value.detach() for module, value in inputs.items()},
        dict(zip(wanted, found, strict=True)),
    )


def _contract(
    adapter: Adapter,
    scores: Tensor,
    differences: Tensor,
    inputs: dict,
    gradients: dict,
    maps: list[Tensor],
) -> None:
    """Pull gradients back to the slots, layer by layer, and add to the scores."""
    graph = adapter.graph
    rows = differences.shape[1]  # prompts; a folded batch is a multiple of it
    for layer, block in enumerate(adapter.blocks):
        reads = adapter.split_reads(tuple(gradients[m] for m in block.qkv)).float()
        slots = pull_back_reads(
            reads.flatten(1, 2),  # (S, B, T, d_h) -> (S, B T, d_h)
            maps[layer],
            *adapter.normalise(block.attn_norm, inputs[block.attn_norm].flatten(0, 1)),
            room=1,
        )
        slots[-1] = _at_norm(adapter, block.mlp_norm, inputs, gradients)
        count = graph.first_source(layer)
        count += 0 if graph.is_parallel else graph.num_heads
        start = layer * graph.slots_per_layer
        end = start + graph.slots_per_layer
        _add_products(scores[:count, start:end], differences[:count], slots, rows)
    final = _at_norm(adapter, adapter.final_norm, inputs, gradients)
    _add_products(scores[:, -1:], differences, final.unsqueeze(0), rows)


def _at_norm(
    adapter: Adapter, norm: nn.Module, inputs: dict, gradients: dict
) -> Tensor:
    return pull_back_norm(
        gradients[norm].flatten(0, 1).float() * norm.weight.float(),
        *adapter.normalise(norm, inputs[norm].flatten(0, 1)),
        centre=adapter.kind == "gpt_neox",
    )


def _add_products(out: Tensor, differences: Tensor, slots: Tensor, rows: int) -> None:
    """``out += differences @ slots.T``; folded steps of one prompt add up first."""
    width = rows * differences.shape[2]
    slots = slots.unflatten(1, (-1, width))  # (S, m B T, d) -> (S, m, B T, d)
    slots = slots.sum(1) if slots.shape[1] > 1 else slots[:, 0]
    out.addmm_(differences.flatten(1), slots.flatten(1).t())


def pull_back_reads(
    gradients: Tensor, maps: Tensor, x_hat: Tensor, scale: Tensor, *, room: int = 0
) -> Tensor:
    r"""Gradients at the projections' outputs, pulled back to each slot's own input.

    With the norm's gain (and centring) folded into the map $W_s$, a slot's input
    receives $r\,(W_s^\top g_s - \hat x\,\langle W_s\hat x, g_s\rangle/d)$.

    Args:
        gradients: ``[S, n, head_dim]``.
        maps: ``[S, head_dim, d]``, from the normalised input to the slot.
        x_hat: ``[n, d]`` normalised input.
        scale: ``[n, 1]`` the norm's $r = 1/\sigma$.
        room: slots to leave uninitialised at the end, for the caller to fill.

    Returns:
        ``[S + room, n, d]``.
    """
    num_slots, n, _ = gradients.shape
    scaled = gradients * scale
    out = gradients.new_empty(num_slots + room, n, x_hat.shape[-1])
    torch.bmm(scaled, maps, out=out[:num_slots])
    # <W x_hat, g> on the narrow side: (S, n, d_h), never (S, n, d).
    forward = torch.matmul(x_hat, maps.transpose(1, 2))
    along = (forward * scaled).sum(-1, keepdim=True) / x_hat.shape[-1]
    out[:num_slots].addcmul_(x_hat.unsqueeze(0), along, value=-1)
    return out


def pull_back_norm(
    gradient: Tensor, x_hat: Tensor, scale: Tensor, *, centre: bool
) -> Tensor:
    r"""A gradient at a norm's output (times its gain), pulled back to the input.

    $J^\top g = r\,(p - \overline{p} - \hat x\,\overline{\hat x p})$ with
    $p = \gamma g$ and means over the width; an RMS norm has no $\overline p$.

    Args:
        gradient: $p$, ``[..., d]``.
        x_hat: normalised input, ``[..., d]``.
        scale: $r$, ``[..., 1]``.
        centre: a layer norm (true) or an RMS norm.
    """
    if centre:
        gradient = gradient - gradient.mean(-1, keepdim=True)
    along = (gradient * x_hat).mean(-1, keepdim=True)
    return scale * (gradient - x_hat * along)
