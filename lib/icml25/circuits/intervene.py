"""What a circuit does on its own, and what one edge does: exact interventions."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from .adapter import Adapter, hooks
from .attribution import _differences, _Run
from .pairs import Metric, PromptPairs, kl_divergence, resolve_metric


def run_circuit(
    model: nn.Module,
    pairs: PromptPairs,
    circuit: Tensor,
    *,
    batch_size: int | None = None,
) -> Tensor:
    r"""Run the clean prompts with every edge outside the circuit corrupted.

    Each slot reads $\sum_{u \in C} a_u + \sum_{u \notin C} a_u^{\text{corr}}$ (plus the
    biases): what edges of the circuit carry is computed in this run, everything else is
    taken from the corrupted prompt.

    Args:
        model: as for :func:`~icml25.circuits.attribute_edges`.
        pairs: clean and corrupted prompts.
        circuit: ``[U, V]`` bool; entries where the graph has no edge are ignored.
        batch_size: prompts at a time (``None``: all).

    Returns:
        ``[N, vocabulary]`` logits at the answer's position. The full graph gives the
        clean model's, the empty one the corrupted prompts'.

    Raises:
        NotImplementedError: an unsupported architecture.
        TypeError: the circuit is not boolean.
        ValueError: its shape is not the graph's.

    Warns:
        UserWarning: the circuit is empty.
    """
    adapter = Adapter(model)
    circuit = _validated(adapter, circuit)
    if not circuit.any():
        warnings.warn(
            "the circuit has no edges: this run gives the corrupted prompts' logits",
            stacklevel=2,
        )
    return torch.cat(
        [_run(adapter, batch, circuit) for batch in pairs.batches(batch_size)]
    )


def _validated(adapter: Adapter, circuit: Tensor) -> Tensor:
    circuit = adapter.graph._matrix(circuit, "circuit")
    if circuit.dtype != torch.bool:
        raise TypeError(f"circuit must be a boolean mask, got {circuit.dtype}")
    return circuit.cpu() & adapter.graph.mask


@torch.no_grad()
def _run(adapter: Adapter, batch: PromptPairs, circuit: Tensor) -> Tensor:
    graph = adapter.graph
    corrupted = _Run.of(adapter, batch.corrupted, batch)
    # Rows start as corrupted outputs; once a source has been computed in this run, its
    # row becomes corrupted minus current.
    nothing = _Run(
        torch.zeros_like(corrupted.embedding),
        [torch.zeros_like(each) for each in corrupted.heads],
        [torch.zeros_like(each) for each in corrupted.mlps],
        None,
    )
    rows = _differences(adapter, nothing, corrupted, batch)
    # [U, V]: which corrections a slot gets.
    outside = (graph.mask & ~circuit).to(rows.device, rows.dtype)
    before, after = {}, {}
    # Read off before there are hooks: a wrapped module is read by running it.
    every = range(graph.num_layers)
    reads = [adapter.read_weights(layer) for layer in every]
    writes = [adapter.write_weights(layer) for layer in every]

    def correction(slots: slice, count: int) -> Tensor:
        """Sum of the corrections of some slots, ``[S, B, T, d]``."""
        flat = rows[:count].flatten(1)
        total = outside[:count, slots].t() @ flat
        return total.view(-1, *rows.shape[1:])

    def embedded(value):
        rows[0] -= value

    after[adapter.embed] = embedded
    for layer, block in enumerate(adapter.blocks):
        row, start = graph.first_source(layer), layer * graph.slots_per_layer
        stop = start + graph.slots_per_layer - 1
        wide = row + (0 if graph.is_parallel else graph.num_heads)
        replaced: dict[nn.Module, Tensor] = {}

        def read(
            x, block=block, layer=layer, at=slice(start, stop), row=row, store=replaced
        ):
            weights, biases = reads[layer]
            inputs = x.float() + correction(at, row)  # (S, B, T, d)
            normed, _ = adapter.normalise(block.attn_norm, inputs)
            normed = normed * block.attn_norm.weight.float()
            if (bias := adapter.norm_bias(block.attn_norm)) is not None:
                normed = normed + bias.float()
            out = torch.bmm(normed.flatten(1, 2), weights) + biases
            out = out.unflatten(1, x.shape[:2]).to(x.dtype)
            store.update(zip(block.qkv, adapter.join_reads(out), strict=True))

        before[block.attn_norm] = read
        for module in block.qkv:
            after[module] = lambda _, module=module, store=replaced: store[module]

        def heads(z, layer=layer, row=row):
            z = z.float().flatten(0, 1).unflatten(-1, (adapter.num_heads, -1))
            out = torch.bmm(z.transpose(0, 1), writes[layer])
            rows[row : row + adapter.num_heads].flatten(1, 2).sub_(out)

        before[block.attn_out] = heads

        def mlp_input(x, at=slice(stop, stop + 1), wide=wide):
            return (x.float() + correction(at, wide)[0]).to(x.dtype)

        before[block.mlp_norm] = mlp_input

        def mlp_output(value, last=row + adapter.num_heads):
            rows[last] -= value

        after[block.mlp] = mlp_output

    def final(x):
        at = slice(len(graph.slots) - 1, len(graph.slots))
        return (x.float() + correction(at, len(rows))[0]).to(x.dtype)

    before[adapter.final_norm] = final
    with hooks(before=before, after=after):
        return adapter.logits(batch.clean, batch)


@torch.no_grad()
def patch_effects(
    model: nn.Module,
    pairs: PromptPairs,
    *,
    metric: str | Metric = "kl",
    edges: Tensor | None = None,
    max_rows: int = 2048,
) -> Tensor:
    r"""Exact effect of corrupting single edges, one after the other.

    For an edge $u \to v$ the clean prompts run with
    $a_u^{\text{corr}} - a_u^{\text{clean}}$ added to the input of slot $v$ only.

    Args:
        model: as for :func:`~icml25.circuits.attribute_edges`.
        pairs: clean and corrupted prompts.
        metric: as there.
        edges: ``[U, V]`` bool, which edges to patch (``None``: all).
        max_rows: prompts times edges in one forward run.

    Returns:
        ``[U, V]`` float32: mean change of the metric; zero where not patched.

    Raises:
        NotImplementedError: an unsupported architecture.
        ValueError: wrong shape, or a metric that is not finite.

    Notes:
        One forward run per edge and prompt, batched over the sources of a slot; nothing
        is pruned, so it is right for parallel blocks too. It costs as much as there are
        edges: this is the yardstick, :func:`~icml25.circuits.attribute_edges` the tool.
    """
    metric = resolve_metric(metric)
    adapter = Adapter(model)
    graph = adapter.graph
    edges = graph.mask if edges is None else _validated(adapter, edges)
    chunk = max(1, max_rows // len(pairs))
    clean = _Run.of(adapter, pairs.clean, pairs)
    corrupted = _Run.of(adapter, pairs.corrupted, pairs)
    differences = _differences(adapter, clean, corrupted, pairs)
    baseline = metric(clean.logits, clean.logits, pairs)
    effects = differences.new_zeros(graph.mask.shape)
    for slot in edges.any(0).nonzero().flatten().tolist():
        for sources in edges[:, slot].nonzero().flatten().split(chunk):
            times = len(sources)
            wide = pairs.repeat(times)
            shift = differences[sources.to(differences.device)].flatten(0, 1)
            with hooks(**_patch(adapter, slot, shift)):
                logits = adapter.logits(wide.clean, wide)
            values = metric(logits, clean.logits.repeat(times, 1), wide)
            if not torch.isfinite(values).all():
                raise ValueError(
                    f"the metric is not finite at slot {graph.slots[slot]}"
                )
            change = values.view(times, -1) - baseline
            effects[sources.to(effects.device), slot] = change.mean(1)
    return effects


def _patch(adapter: Adapter, slot: int, shift: Tensor) -> dict[str, dict]:
    """Hooks that add ``shift`` ``[N, T, d]`` to one slot's input."""
    graph = adapter.graph
    layer, place = divmod(slot, graph.slots_per_layer)
    if slot == len(graph.slots) - 1:
        return {"before": {adapter.final_norm: lambda x: (x + shift).to(x.dtype)}}
    block = adapter.blocks[layer]
    if place == graph.slots_per_layer - 1:
        return {"before": {block.mlp_norm: lambda x: (x + shift).to(x.dtype)}}
    weights, biases = adapter.read_weights(layer)
    kept: dict[nn.Module, Tensor] = {}

    def read(x):
        normed, _ = adapter.normalise(block.attn_norm, x.float() + shift)
        normed = normed * block.attn_norm.weight.float()
        if (bias := adapter.norm_bias(block.attn_norm)) is not None:
            normed = normed + bias.float()
        kept["new"] = normed @ weights[place] + biases[place]

    def replace(position: int):
        def hook(value):
            return _with_slot(adapter, place, position, value, kept["new"])

        return hook

    return {
        "before": {block.attn_norm: read},
        "after": {module: replace(i) for i, module in enumerate(block.qkv)},
    }


def _with_slot(
    adapter: Adapter, place: int, position: int, value: Tensor, new: Tensor
) -> Tensor | None:
    """A q/k/v projection's output with one slot's columns replaced."""
    size, heads = adapter.head_dim, adapter.num_heads
    if len(adapter.blocks[0].qkv) == 1:
        letter, head = divmod(place, heads)
        start = (head * 3 + letter) * size  # interleaved by head
    else:
        bounds = (0, heads, heads + adapter.num_kv_heads)
        inside = place - bounds[position]
        count = heads if position == 0 else adapter.num_kv_heads
        if not 0 <= inside < count:
            return None
        start = inside * size
    value = value.clone()
    value[..., start : start + size] = new.to(value.dtype)
    return value


@torch.no_grad()
def faithfulness(
    model: nn.Module,
    pairs: PromptPairs,
    circuit: Tensor,
    *,
    batch_size: int | None = None,
) -> dict[str, float]:
    r"""How well a circuit stands in for the whole model.

    With $F(X)$ the mean $\mathrm{KL}(p_{\text{corrupted}} \Vert p_X)$ at the answer,
    the authors' measure is $100\,(1 - |F(\text{model}) - F(\text{circuit})| /
    F(\text{model}))$: it compares distances from the corrupted output. It is 100 for
    the full graph, 0 for the empty one, and can be negative.

    Args:
        model: as for :func:`~icml25.circuits.attribute_edges`.
        pairs: clean and corrupted prompts.
        circuit: ``[U, V]`` bool.
        batch_size: prompts at a time.

    Returns:
        ``faithfulness`` (percent), ``kl`` (mean KL(clean || circuit), nats), and, where
        the pairs have labels, ``accuracy`` of the circuit and ``model_accuracy``.

    Raises:
        ValueError: the clean and corrupted outputs are the same (nothing to measure).
    """
    adapter = Adapter(model)
    logits = run_circuit(model, pairs, circuit, batch_size=batch_size)
    whole, far = [], []
    for batch in pairs.batches(batch_size):
        whole.append(adapter.logits(batch.clean, batch))
        far.append(adapter.logits(batch.corrupted, batch))
    whole, far = torch.cat(whole), torch.cat(far)
    reach = kl_divergence(whole, far, pairs).mean()
    if reach <= 1e-9:
        raise ValueError(
            "corrupted prompts give the clean prompts' outputs: faithfulness is "
            "undefined; corrupt what the answer depends on"
        )
    gap = (reach - kl_divergence(logits, far, pairs).mean()).abs()
    result = {
        "faithfulness": (100 * (1 - gap / reach)).item(),
        "kl": kl_divergence(logits, whole, pairs).mean().item(),
    }
    if pairs.label is not None:
        for name, scores in (("accuracy", logits), ("model_accuracy", whole)):
            right = scores.argmax(-1) == pairs.label
            result[name] = right.float().mean().item()
    return result
