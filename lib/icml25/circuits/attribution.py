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
            equal cost the midpoint rule is closer to exact patching. ``"eap"`` needs
            another metric than ``"kl"``: a divergence from the clean run has no slope
            at the clean run, so its scores are zero but for rounding, and their order
            means nothing.
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
        ``steps`` times with frozen parameters, and gradients are taken at the
        projections' outputs, where heads are narrow. There the steps are summed; the
        sums are opened to the full width, and contracted, once: one product of
        ``[U', B T d]`` with ``[B T d, S]`` a layer, whatever the number of steps.
        Memory beside the model's: ``U B T d`` for the differences, ``4 L B T d`` for
        the sums (with as many key-value heads as heads) and one layer's ``S B T d``
        gradients, float32 whatever the model's dtype.

    Source:
        Syed et al. (2023) for EAP, Hanna et al. (2024) for integrated gradients.
    """
    metric = resolve_metric(metric)
    adapter = Adapter(model)
    points, weights = quadrature(rule, steps)
    reads = [_folded_reads(adapter, layer) for layer in range(len(adapter.blocks))]
    graph, total = adapter.graph, None
    every = range(len(points))
    groups = [list(every)] if fold else [[k] for k in every]
    with adapter.frozen():
        for number, batch in enumerate(pairs.batches(batch_size)):
            clean = _Run.of(adapter, batch.clean, batch)
            corrupted = _Run.of(adapter, batch.corrupted, batch)
            differences = _differences(adapter, clean, corrupted, batch)
            scores = differences.new_zeros(graph.mask.shape)
            sums: dict[nn.Module, Tensor] = {}
            for group in groups:
                captured = _gradients(
                    adapter,
                    batch.repeat(len(group)) if len(group) > 1 else batch,
                    clean,
                    corrupted,
                    [points[k] for k in group],
                    [weights[k] for k in group],
                    metric,
                    number,
                )
                _add_step(adapter, scores, sums, differences, captured, reads)
                del captured  # before the next run takes its memory
            _contract(adapter, scores, sums, differences, reads)
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
    out = torch.empty(shape, dtype=torch.float32, device=clean.embedding.device)
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


def _folded_reads(adapter: Adapter, layer: int) -> tuple[Tensor, Tensor]:
    """Maps from the normalised residual to each slot, the norm folded into them.

    Weights ``[S, d_h, d]`` with gain and centring inside, and offsets ``[S, 1, d_h]``:
    what a projection puts out is ``weights @ x_hat + offset``.
    """
    weights, offsets = adapter.read_weights(layer)
    norm = adapter.blocks[layer].attn_norm
    if (bias := adapter.norm_bias(norm)) is not None:
        offsets = offsets + bias.float().unsqueeze(0) @ weights
    return adapter.gain(norm, weights).transpose(1, 2).contiguous(), offsets


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
) -> tuple[dict, dict, dict]:
    """Norms' inputs, norms' and projections' outputs, and gradients at the latter."""
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
        {module: value.detach() for module, value in outputs.items()},
        dict(zip(wanted, found, strict=True)),
    )


def _add_step(
    adapter: Adapter,
    scores: Tensor,
    sums: dict[nn.Module, Tensor],
    differences: Tensor,
    captured: tuple[dict, dict, dict],
    reads: list[tuple[Tensor, Tensor]],
) -> None:
    """Sum one step's gradients, heads still narrow; add what cannot wait to scores."""
    graph, (inputs, outputs, gradients) = adapter.graph, captured
    sources = differences.flatten(1, 2)  # (U, n, d)

    def add(module: nn.Module, value: Tensor) -> None:
        # Folded steps of one prompt add up first: (..., m n, w) -> (..., n, w)
        value = value.unflatten(-2, (-1, sources.shape[1])).sum(-3)
        sums[module] = sums[module].add_(value) if module in sums else value

    for layer, block in enumerate(adapter.blocks):
        norm, mlp_norm = block.attn_norm, block.mlp_norm
        x_hat, scale = adapter.normalise(norm, inputs[norm].flatten(0, 1))
        y, g = (
            adapter.split_reads(tuple(each[m] for m in block.qkv))
            for each in (outputs, gradients)
        )
        # (S, B, T, d_h) -> (S, n, d_h)
        y = y.flatten(1, 2).float() - reads[layer][1]
        g = g.flatten(1, 2).float() * scale
        add(norm, g)
        along = (y * g).sum(-1) / adapter.dim  # (S, n)
        start, count = layer * graph.slots_per_layer, graph.first_source(layer)
        stop = start + adapter.num_reads
        scores[:count, start:stop] -= _projected(sources[:count], x_hat, along)
        add(mlp_norm, _at_norm(adapter, mlp_norm, inputs, gradients))
    last = adapter.final_norm
    add(last, _at_norm(adapter, last, inputs, gradients))


def _projected(sources: Tensor, x_hat: Tensor, along: Tensor) -> Tensor:
    """Sum over n of (source . x_hat) times along, ``[U', S]``."""
    steps = x_hat.unflatten(0, (-1, sources.shape[1]))  # (m, n, d)
    # (n, U', d) x (n, d, m): the differences are read once, in place.
    shares = torch.bmm(sources.transpose(0, 1), steps.permute(1, 2, 0))
    # (n, U', m) -> (U', m n); along is (S, m n)
    return shares.permute(1, 2, 0).flatten(1) @ along.t()


def _at_norm(
    adapter: Adapter, norm: nn.Module, inputs: dict, gradients: dict
) -> Tensor:
    return pull_back_norm(
        gradients[norm].flatten(0, 1).float() * norm.weight.float(),
        *adapter.normalise(norm, inputs[norm].flatten(0, 1)),
        centre=adapter.kind == "gpt_neox",
    )


def _contract(
    adapter: Adapter,
    scores: Tensor,
    sums: dict[nn.Module, Tensor],
    differences: Tensor,
    reads: list[tuple[Tensor, Tensor]],
) -> None:
    """Open the summed gradients to the full width; one product a layer."""
    graph, sources = adapter.graph, differences.flatten(1)  # (U, n d)
    for layer, block in enumerate(adapter.blocks):
        narrow, mlp = sums.pop(block.attn_norm), sums.pop(block.mlp_norm)
        slots = mlp.new_empty(graph.slots_per_layer, *mlp.shape)
        # (S, n, d_h) x (S, d_h, d) -> (S, n, d)
        torch.bmm(narrow, reads[layer][0], out=slots[:-1])
        slots[-1] = mlp
        count = graph.first_source(layer)
        count += 0 if graph.is_parallel else graph.num_heads
        start = layer * graph.slots_per_layer
        scores[:count, start : start + len(slots)].addmm_(
            sources[:count], slots.flatten(1).t()
        )
    final = sums.pop(adapter.final_norm)
    scores[:, -1:].addmm_(sources, final.flatten().unsqueeze(1))


def pull_back_norm(
    gradient: Tensor, x_hat: Tensor, scale: Tensor, *, centre: bool
) -> Tensor:
    r"""A gradient at a norm's output (times its gain), pulled back to the input.

    $J^\top g = \rho\,(p - \overline{p} - \hat x\,\overline{\hat x p})$ with
    $p = \gamma g$ and means over the width; an RMS norm has no $\overline p$.

    Args:
        gradient: $p$, ``[..., d]``.
        x_hat: normalised input, ``[..., d]``.
        scale: $\rho$, the inverse standard deviation, ``[..., 1]``.
        centre: a layer norm (true) or an RMS norm.
    """
    if centre:
        gradient = gradient - gradient.mean(-1, keepdim=True)
    along = (gradient * x_hat).mean(-1, keepdim=True)
    return scale * (gradient - x_hat * along)
