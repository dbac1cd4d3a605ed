"""Edge attribution against the plain ways of doing it, and against TransformerLens.

A random GPT-NeoX of 6 layers, width 256, 8 heads (3,580 edges), 16 prompts of 20
tokens, 5 steps, float32, one thread, CPU seconds (they do not notice a busy machine).
Memory is the peak of what torch allocates during the call, from its profiler.

The target is a fifth of the time and half of the memory of a straightforward version
that keeps every head's inputs and outputs under autograd. Three of those are timed:
the released procedure on stock weights, the same on TransformerLens, and the library's
readable version, which is leaner than the release. All of them run the model seven
times forward and five times backward, and so do we: where these runs alone take more
than a fifth of the other's time, nothing that runs the model can meet the target.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from icml25.circuits import PromptPairs, attribute_edges
from icml25.circuits.adapter import Adapter
from icml25.circuits.reference import attribute_edges_plainly
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}
STEPS = 5


def random_model(**sizes) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(**SIZES | sizes, initializer_range=0.05)
    return GPTNeoXForCausalLM(config).eval()


def random_pairs(count: int, length: int, vocab_size: int) -> PromptPairs:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (2, count, length), generator=generator)
    return PromptPairs(ids[0], ids[1])


def cpu_seconds(function: Callable[[], object], repeats: int = 2) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def peak_bytes(function: Callable[[], object]) -> int:
    """Largest sum of live allocations that the call made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function()
    live = peak = 0
    events = trace.profiler.kineto_results.events()
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def bare_runs(model: nn.Module, pairs: PromptPairs) -> None:
    """As many runs of the stock model as attribution makes, and nothing else."""
    embed = model.gpt_neox.embed_in
    with torch.no_grad():
        for ids in (pairs.clean, pairs.corrupted):
            model(input_ids=ids, logits_to_keep=1)
    with Adapter(model).frozen():
        for _ in range(STEPS):
            path = embed(pairs.clean).requires_grad_(True)
            out = model(inputs_embeds=path, logits_to_keep=1).logits.log_softmax(-1)
            torch.autograd.grad(out[..., 0].sum(), path)


def attribute_edges_straightforwardly(
    model: nn.Module, pairs: PromptPairs, *, steps: int = STEPS
) -> Tensor:
    """The procedure of the released EAP-IG package, on a stock parallel GPT-NeoX.

    Every head has three residual inputs and one residual output of its own,
    ``[B, T, H, d]`` each, under autograd. Hooks on them fill one tensor of activation
    differences, ``[B, T, U, d]``, and contract it with each gradient as it arrives.
    Steps run in a loop, and parameters ask for gradients, as they do there. Midpoint
    rule, divergence; no padding.
    """
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    base, (batch_size, seq_len) = model.gpt_neox, pairs.clean.shape
    heads, layers = model.config.num_attention_heads, len(base.layers)
    per_layer = 3 * heads + 1
    sources, slots = 1 + layers * (heads + 1), layers * per_layer + 1
    where = torch.arange(seq_len).unsqueeze(0)
    differences = torch.zeros(batch_size, seq_len, sources, model.config.hidden_size)
    scores = torch.zeros(sources, slots)

    def into(first: int, last: int):
        def hook(gradient: Tensor) -> None:
            if gradient.dim() == 3:
                gradient = gradient.unsqueeze(2)
            scores[:written, first:last] += torch.einsum(
                "btud,btvd->uv", differences[:, :, :written], gradient
            )

        written = before  # sources written before this slot reads
        return hook

    def forward(x: Tensor, keep=None) -> Tensor:
        nonlocal before
        before = 0

        def write(value: Tensor) -> None:
            nonlocal before
            if keep is not None:
                differences[:, :, before : before + value.shape[2]] += keep * value
            before += value.shape[2]

        def read(value: Tensor, first: int, last: int) -> Tensor:
            if keep is None:
                value.register_hook(into(first, last))
            return value

        write(x.unsqueeze(2))
        cos, sin = base.rotary_emb(x, where)
        for number, layer in enumerate(base.layers):
            start, attention = number * per_layer, layer.attention
            # rows of the fused projection: head by head, its q, k and v
            weights = attention.query_key_value.weight.unflatten(0, (heads, 3, -1))
            biases = attention.query_key_value.bias.view(heads, 3, -1)
            qkv = []
            for j in range(3):
                own = x.unsqueeze(2).repeat(1, 1, heads, 1)  # (B, T, H, d)
                own = read(own, start + j * heads, start + (j + 1) * heads)
                normed = layer.input_layernorm(own)
                # (B, T, H, d) -> (B, H, T, d_h)
                out = torch.einsum("bthd,hed->bthe", normed, weights[:, j])
                qkv.append((out + biases[:, j]).transpose(1, 2))
            query, key = apply_rotary_pos_emb(qkv[0], qkv[1], cos, sin)
            z = nn.functional.scaled_dot_product_attention(
                query, key, qkv[2], is_causal=True
            )
            to_residual = attention.dense.weight.unflatten(1, (heads, -1))
            results = torch.einsum("bhte,dhe->bthd", z, to_residual)
            own = read(x.clone(), start + per_layer - 1, start + per_layer)
            mlp = layer.mlp(layer.post_attention_layernorm(own))
            write(results)
            write(mlp.unsqueeze(2))
            x = x + results.sum(2) + attention.dense.bias + mlp
        last = base.final_layer_norm(read(x.clone(), slots - 1, slots))
        return model.lm_head(last)[:, -1]

    before = 0
    with torch.no_grad():
        corrupted, clean = (
            base.embed_in(ids) for ids in (pairs.corrupted, pairs.clean)
        )
        forward(corrupted, keep=1)
        target = forward(clean, keep=-1).log_softmax(-1)
    for k in range(steps):
        path = torch.lerp(corrupted, clean, (k + 0.5) / steps).requires_grad_(True)
        log_p = forward(path).log_softmax(-1)
        (target.exp() * (target - log_p)).sum().backward()
    model.zero_grad()
    return scores / steps / len(pairs)


class LensAttribution:
    """EAP-IG on TransformerLens' model with the hook points it offers for it.

    Per-head results and per-slot inputs are switched on, and kept by the forward run
    for the backward one, as the EAP-IG reference package does. Written for this table,
    and kinder to the peer than the package is: parameters are frozen, and one product
    contracts all edges, where the package takes one per reading layer.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
        from transformer_lens.pretrained.weight_conversions import convert_neox_weights

        config = model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        head = config.hidden_size // self.heads
        cfg = HookedTransformerConfig(
            n_layers=self.layers,
            d_model=config.hidden_size,
            n_ctx=config.max_position_embeddings,
            d_head=head,
            n_heads=self.heads,
            d_mlp=config.intermediate_size,
            d_vocab=config.vocab_size,
            act_fn="gelu",
            normalization_type="LN",
            positional_embedding_type="rotary",
            rotary_dim=int(head * config.rope_parameters["partial_rotary_factor"]),
            rotary_base=int(config.rope_parameters["rope_theta"]),
            rotary_adjacent_pairs=False,
            parallel_attn_mlp=True,
            device="cpu",
            default_prepend_bos=False,
        )
        self.model = HookedTransformer(cfg)
        self.model.load_state_dict(
            self._weights(convert_neox_weights, model, cfg), False
        )
        for name in ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in"):
            getattr(self.model, f"set_{name}")(True)
        for p in self.model.parameters():
            p.requires_grad_(False)

    @staticmethod
    def _weights(convert, model, cfg):
        state = convert(_OldHead(model), cfg)
        return {name: value.detach() for name, value in state.items()}

    def __call__(self, pairs: PromptPairs) -> Tensor:
        clean, clean_logits = self._outputs(pairs.clean)
        corrupted, _ = self._outputs(pairs.corrupted)
        differences = corrupted - clean  # (U, B, T, d)
        target = clean_logits.log_softmax(-1)
        total = 0.0
        for k in range(STEPS):
            alpha = (k + 0.5) / STEPS
            slots: dict[str, Tensor] = {}
            path = torch.lerp(corrupted[0], clean[0], alpha).requires_grad_(True)
            hooks = [("hook_embed", lambda value, hook, path=path: path)]
            hooks += [(name, _keep(slots)) for name in self._slot_names()]
            logits = self.model.run_with_hooks(pairs.clean, fwd_hooks=hooks)[:, -1]
            values = (target.exp() * (target - logits.log_softmax(-1))).sum(-1)
            values.sum().backward()
            gradients = []
            for name in self._slot_names():
                grad = slots[name].grad
                # (B, T, H, d) -> (H, B, T, d)
                grad = grad.permute(2, 0, 1, 3) if grad.dim() == 4 else grad[None]
                gradients.append(grad)
            total = total + torch.einsum(
                "ubtd,vbtd->uv", differences, torch.cat(gradients)
            )
        return total / STEPS / len(pairs)

    def _slot_names(self) -> list[str]:
        names = []
        for layer in range(self.layers):
            names += [f"blocks.{layer}.hook_{letter}_input" for letter in "qkv"]
            names.append(f"blocks.{layer}.hook_mlp_in")
        return [*names, f"blocks.{self.layers - 1}.hook_resid_post"]

    @torch.no_grad()
    def _outputs(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        wanted = ["hook_embed"]
        for layer in range(self.layers):
            wanted.append(f"blocks.{layer}.attn.hook_result")
            wanted.append(f"blocks.{layer}.hook_mlp_out")
        logits, cache = self.model.run_with_cache(
            ids, names_filter=lambda name: name in wanted
        )
        rows = [
            cache[name].permute(2, 0, 1, 3)
            if cache[name].dim() == 4
            else cache[name][None]
            for name in wanted
        ]
        return torch.cat(rows), logits[:, -1]


class _OldHead(nn.Module):
    """The head's name in the transformers release the conversion is for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.gpt_neox, self.embed_out = model.gpt_neox, model.lm_head
        self.lm_head = model.lm_head


def _keep(store: dict[str, Tensor]) -> Callable:
    def hook(value, hook):
        value.retain_grad()
        store[hook.name] = value
        return value

    return hook


def peer(model: nn.Module) -> Callable[[PromptPairs], Tensor] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LensAttribution(model)
    except ImportError:
        return None


def rows() -> list[dict]:
    """The table's rows, for `make bench`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _rows()
    finally:
        torch.set_num_threads(threads)


def _rows() -> list[dict]:
    model, pairs = random_model(), random_pairs(16, 20, SIZES["vocab_size"])

    def ours() -> Tensor:
        return attribute_edges(model, pairs, steps=STEPS)

    others: dict[str, Callable[[], Tensor]] = {
        "straightforward, the release's way": lambda: attribute_edges_straightforwardly(
            model, pairs
        ),
        "our readable version, leaner": lambda: attribute_edges_plainly(
            model, pairs, steps=STEPS
        ),
    }
    if lens := peer(model):
        others["EAP-IG on TransformerLens"] = lambda: lens(pairs)
    scores = ours()
    seconds, peak = cpu_seconds(ours), peak_bytes(ours)
    floor = cpu_seconds(lambda: bare_runs(model, pairs))
    table = [
        {
            "name": "attribution / its forward and backward runs alone",
            "ours_s": seconds,
            "other_s": floor,
            "ratio": seconds / floor,
            "note": "what is left to gain; random GPT-NeoX, 6 layers, width 256",
        }
    ]
    for name, function in others.items():
        gap = (scores - function() * (scores != 0)).abs().max() / scores.abs().max()
        if gap > 1e-4:
            raise AssertionError(f"{name}: scores differ by {gap:.1e} of the largest")
        other, used = cpu_seconds(function), peak_bytes(function)
        table.append(
            {
                "name": f"attribution / {name}",
                "ours_s": seconds,
                "other_s": other,
                "ratio": seconds / other,
                "target": 0.2,
                "note": f"peak of new allocations {peak / 1e6:.0f} MB, "
                f"theirs {used / 1e6:.0f} MB: {peak / used:.2f} of it (target 0.5)"
                + ("" if peak <= 0.5 * used else "  MISSED")
                # How much of the other's time nothing that runs the model can save.
                + f"; the runs alone are {floor / other:.2f} of their time"
                + f"; scores agree to {gap:.0e} of the largest",
            }
        )
    if not lens:
        table[-1]["note"] += "; transformer-lens is not here: pip install '.[bench]'"
    return table
