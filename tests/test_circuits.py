"""Circuits: graph, attribution, interventions.

Golden values (tests/golden/circuits, see its README) come from the EAP-IG reference
package on TransformerLens 3.9, its older copy in the paper's repository, and an
independent exact patching; they are facts about those programs, on a random model.
"""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.bench_circuits import attribute_edges_straightforwardly
from icml25.circuits import (
    CircuitGraph,
    PromptPairs,
    attribute_edges,
    faithfulness,
    patch_effects,
    run_circuit,
)
from icml25.circuits.adapter import Adapter
from icml25.circuits.attribution import pull_back_norm, quadrature
from icml25.circuits.lora import add_lora, circuit_lora_config, wrap
from icml25.circuits.pairs import kl_divergence, label_logit, logit_difference
from icml25.circuits.reference import attribute_edges_plainly
from icml25.circuits.theory import affine_neox, completeness
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

GOLDEN = Path(__file__).parent / "golden" / "circuits"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def tensors(name):
    with np.load(GOLDEN / name) as file:
        return {key: torch.from_numpy(file[key]) for key in file}


@pytest.fixture(scope="module")
def golden():
    config = json.loads((GOLDEN / "tiny_neox_config.json").read_text())
    rotary = config.pop("rotary_pct")
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            **config,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": rotary,
            },
        )
    )
    model.load_state_dict(tensors("tiny_neox_weights.npz"))
    values = tensors("tiny_neox_eap.npz") | tensors("tiny_neox_eap_right5.npz")
    pairs = PromptPairs(
        values["clean"].long(), values["corrupted"].long(), values["label"].long()
    )
    return model.eval(), pairs, values


def neox(is_parallel=True, **changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 40,
        "initializer_range": 0.15,
    }
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(**sizes | changes, use_parallel_residual=is_parallel)
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # norms and biases: nothing trivially zero or one
                p += 0.1 * torch.randn_like(p)
    return model.eval()


def llama(num_kv_heads=4):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            intermediate_size=64,
            vocab_size=40,
            initializer_range=0.15,
        )
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.1 * torch.randn_like(p)
    return model.eval()


MODELS = {
    "parallel GPT-NeoX": lambda: neox(True),
    "sequential GPT-NeoX": lambda: neox(False),
    "Llama": llama,
    "Llama with grouped queries": lambda: llama(2),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def pairs():
    return some_pairs(6, 7)


def some_pairs(count, length, seed=1):
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(40, (count, length), generator=g) for _ in range(2)]
    ends = [torch.randint(40, (count,), generator=g) for _ in range(2)]
    return PromptPairs(*ids, *ends)


def answers(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits[:, -1]


# The graph


@pytest.mark.parametrize(
    ("sizes", "edges"),
    [
        ((24, 16, True), 231_493),
        ((24, 16, False), 231_877),
        ((4, 4), 463),
        ((3, 4), 250),
    ],
)
def test_edge_counts_follow_the_formula(sizes, edges):
    graph = CircuitGraph(*sizes)
    layers, heads = sizes[:2]
    formula = (3 * heads + 1) * sum(1 + l * (heads + 1) for l in range(layers))  # noqa: E741
    formula += 1 + layers * (heads + 1) + (0 if graph.is_parallel else layers * heads)
    assert graph.num_edges == formula == edges


def test_the_edge_mask_is_the_references(golden):
    assert torch.equal(CircuitGraph(3, 4).mask, golden[2]["edge_mask"].bool())


def test_heads_feed_their_layers_mlp_in_sequential_blocks_only():
    for is_parallel in (True, False):
        graph = CircuitGraph(2, 2, is_parallel)
        edge = graph.sources.index("a1.h0"), graph.slots.index("m1")
        assert graph.mask[edge] == (not is_parallel)


def test_grouped_queries_share_key_and_value_slots():
    graph = CircuitGraph(1, 4, False, num_kv_heads=2)
    assert graph.slots[:8] == [
        *(f"a0.h{h}<q>" for h in range(4)),
        *(f"a0.h{g}<{letter}>" for letter in "kv" for g in range(2)),
    ]
    owners = graph.membership[graph.slots.index("a0.h1<k>")].nonzero().flatten()
    assert [graph.nodes[i] for i in owners.tolist()] == ["a0.h2", "a0.h3"]


def test_merging_adds_scores_and_keeps_their_total():
    for graph in (CircuitGraph(3, 4), CircuitGraph(2, 4, False, num_kv_heads=2)):
        scores = torch.randn(graph.mask.shape) * graph.mask
        merged = graph.merge_qkv(scores)
        torch.testing.assert_close(merged.sum(1), scores.sum(1))
    graph = CircuitGraph(2, 2)
    scores = torch.randn(graph.mask.shape) * graph.mask
    merged = graph.merge_qkv(scores)
    columns = [graph.slots.index(f"a1.h1<{letter}>") for letter in "qkv"]
    assert torch.allclose(
        merged[:, graph.nodes.index("a1.h1")], scores[:, columns].sum(1)
    )


def test_pruning_leaves_no_loose_end():
    graph = CircuitGraph(4, 4)
    for seed in range(5):
        torch.manual_seed(seed)
        circuit = graph.top_edges(torch.randn(graph.mask.shape), 60)
        graphs = graph.to_networkx(circuit)
        for node in graphs:
            assert node == "input" or graphs.in_degree(node)
            assert node == "logits" or graphs.out_degree(node)
        assert torch.equal(graph.prune(circuit), circuit)


def test_a_circuit_of_one_edge_that_leads_nowhere_is_pruned_to_nothing():
    graph = CircuitGraph(2, 2)
    scores = torch.zeros(graph.mask.shape)
    scores[graph.sources.index("a0.h0"), graph.slots.index("m1")] = 1.0
    assert not graph.top_edges(scores, 1).any()
    assert graph.top_edges(scores, 1, prune=False).sum() == 1


def test_comparison_of_circuits_by_hand():
    graph = CircuitGraph(1, 1)
    before, after = (torch.zeros_like(graph.mask) for _ in range(2))
    place = {name: i for i, name in enumerate(graph.slots)}
    for circuit, names in ((before, "qk"), (after, "v")):
        for letter in names:
            circuit[0, place[f"a0.h0<{letter}>"]] = True
        circuit[1, place["logits"]] = True
    after[0, place["m0"]] = after[2, place["logits"]] = True
    merged = graph.compare(before, after)
    # before: input->a0, a0->logits; after: the same, input->m0, m0->logits.
    assert merged["edge_jaccard"] == 0.5 and merged["edge_change"] == 1.0
    assert merged["node_jaccard"] == 2 / 3 and merged["at_changed_nodes"] == 1.0
    slots = graph.compare(before, after, merge=False)
    assert slots["edge_jaccard"] == 1 / 6


def test_a_union_holds_both_and_is_cut_to_the_strongest():
    graph = CircuitGraph(3, 2)
    torch.manual_seed(0)
    scores = [torch.randn(graph.mask.shape) * graph.mask for _ in range(2)]
    circuits = [graph.top_edges(each, 20) for each in scores]
    whole = graph.union(*circuits, scores=tuple(scores), n=graph.num_edges)
    assert torch.equal(whole, graph.prune(circuits[0] | circuits[1]))
    assert graph.union(*circuits, scores=tuple(scores), n=10).sum() <= 10


def test_an_edge_in_both_circuits_counts_with_its_mean():
    graph = CircuitGraph(1, 1)
    u, v = graph.sources.index, graph.slots.index
    shared, inner, outer = (0, v("logits")), (0, v("m0")), (u("m0"), v("logits"))
    first, second = (torch.zeros(graph.mask.shape) for _ in range(2))
    first[shared] = second[shared] = 1.0  # the sum, 2, would beat the next
    first[outer], first[inner] = 1.5, 5.0
    union = graph.union(first > 0, second > 0, scores=(first, second), n=2)
    assert union[inner] and union[outer] and union.sum() == 2


def test_a_run_without_one_edge_is_that_edge_patched(model, pairs):
    adapter = Adapter(model)
    graph = adapter.graph
    clean = answers(model, pairs.clean)
    edges = [("a0.h1", "m1"), ("a1.h2", "m2"), ("m1", "a2.h0<k>")]
    if not graph.is_parallel:
        edges.append(("a1.h0", "m1"))  # within a layer
    for source, slot in edges:
        one = torch.zeros_like(graph.mask)
        one[graph.sources.index(source), graph.slots.index(slot)] = True
        logits = run_circuit(model, pairs, graph.mask & ~one)
        effect = patch_effects(model, pairs, edges=one).sum()
        assert effect.abs() > 1e-5
        assert abs(kl_divergence(logits, clean, pairs).mean() - effect) < 1e-5


@pytest.mark.parametrize("n", [-1, 251, 2.5, True])
def test_impossible_circuit_sizes_are_refused(n):
    with pytest.raises(ValueError, match="0 to 250"):
        CircuitGraph(3, 4).top_edges(torch.zeros(16, 40), n)


def test_bad_scores_and_graphs_are_refused():
    graph = CircuitGraph(3, 4)
    with pytest.raises(ValueError, match=r"\(16, 40\)"):
        graph.top_edges(torch.zeros(3, 3), 1)
    with pytest.raises(ValueError, match="NaN"):
        graph.top_edges(torch.full((16, 40), torch.nan), 1)
    with pytest.raises(ValueError, match="num_layers=0"):
        CircuitGraph(0, 4)
    with pytest.raises(ValueError, match="must divide"):
        CircuitGraph(2, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="without edges"):
        graph.compare(torch.zeros_like(graph.mask), graph.mask)


# Attribution


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("eap_logit", {"metric": "logit", "rule": "eap"}),
        ("eapig_left5_kl", {"rule": "left"}),
        ("eapig_left20_logit", {"rule": "left", "steps": 20, "metric": "logit"}),
        ("eapig_right5_kl", {"rule": "right"}),
    ],
)
def test_scores_are_the_references(golden, key, options):
    model, pairs, values = golden
    scores = attribute_edges(model, pairs, **options)
    assert (scores - values[key]).abs().max() < 2e-6


def test_scores_agree_with_the_plain_version(model, pairs):
    for options in ({}, {"metric": "logit_diff", "rule": "gauss", "steps": 3}):
        scores = attribute_edges(model, pairs, **options)
        plain = attribute_edges_plainly(model, pairs, **options)
        assert scores.abs().max() > 1e-2
        assert (scores - plain).abs().max() < 2e-6


def test_scores_do_not_depend_on_batches_or_folding(model, pairs):
    whole = attribute_edges(model, pairs)
    for options in ({"batch_size": 4}, {"fold": True}, {"fold": True, "batch_size": 5}):
        other = attribute_edges(model, pairs, **options)
        assert (whole - other).abs().max() < 1e-6


def test_scores_agree_with_the_straightforward_version_that_is_timed():
    model, pairs = neox(), some_pairs(5, 7)
    asking = [p.requires_grad for p in model.parameters()]
    for steps in (1, 3):
        ours = attribute_edges(model, pairs, steps=steps)
        theirs = attribute_edges_straightforwardly(model, pairs, steps=steps)
        assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()
    assert [p.requires_grad for p in model.parameters()] == asking


def test_cost_grows_with_steps_by_the_runs_of_the_model_alone():
    # A step more is one run forward and one back; the wide products stay as they are.
    from torch.utils.flop_counter import FlopCounterMode

    model, pairs = neox(), some_pairs(5, 7)

    def flops(function):
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    def run():
        path = model.gpt_neox.embed_in(pairs.clean).detach().requires_grad_(True)
        out = model(inputs_embeds=path, logits_to_keep=1).logits
        out.sum().backward()

    one, three = (
        flops(lambda steps=steps: attribute_edges(model, pairs, steps=steps))
        for steps in (1, 3)
    )
    for p in model.parameters():
        p.requires_grad_(False)
    # The rest of a step: U' n d for the projections on the normalised input.
    graph, (n, d) = Adapter(model).graph, (pairs.clean.numel(), 32)
    shares = 2 * sum(graph.first_source(layer) for layer in range(3)) * n * (d + 12)
    assert (three - one) / 2 <= flops(run) + shares


def test_column_sums_are_residual_differences_times_gradients(golden):
    # sum_u (a_u^corr - a_u^clean) = x_v^corr - x_v^clean: biases cancel.
    model, pairs, _ = golden
    adapter = Adapter(model)
    from icml25.circuits.attribution import _differences, _Run

    runs = [_Run.of(adapter, ids, pairs) for ids in (pairs.clean, pairs.corrupted)]
    total = _differences(adapter, *runs, pairs).sum(0)
    ends = []
    for ids in (pairs.clean, pairs.corrupted):
        kept = []
        handle = model.gpt_neox.final_layer_norm.register_forward_pre_hook(
            lambda module, args, kept=kept: kept.append(args[0])
        )
        answers(model, ids)
        handle.remove()
        ends.append(kept[0])
    torch.testing.assert_close(total, ends[1] - ends[0], rtol=1e-4, atol=1e-5)


def test_the_embeddings_row_adds_up_to_the_metrics_change(model, pairs):
    # The readers of the embedding share its total gradient: a line integral.
    total, change = completeness(model, pairs, steps=128)
    assert abs(total - change) < 0.02 * change
    clean, corrupted = (answers(model, ids) for ids in (pairs.clean, pairs.corrupted))
    assert abs(change - kl_divergence(corrupted, clean, pairs).mean()) < 1e-6


def test_the_end_of_the_line_gives_nothing_for_a_divergence(model, pairs):
    assert attribute_edges(model, pairs, rule="eap").abs().max() < 1e-5


def test_equal_twins_score_zero(model, pairs):
    same = PromptPairs(pairs.clean, pairs.clean)
    scores = attribute_edges(model, same)
    assert torch.equal(scores, torch.zeros_like(scores))


def test_attribution_is_exact_where_the_model_is_linear():
    model, pairs = affine_neox(), some_pairs(5, 6)

    def metric(logits, clean_logits, batch):
        return logits[:, 3]

    for rule in ("eap", "midpoint"):
        scores = attribute_edges(model, pairs, metric=metric, rule=rule)
        exact = patch_effects(model, pairs, metric=metric)
        assert exact.abs().max() > 1e-2
        assert (scores - exact).abs().max() < 1e-5


@pytest.mark.parametrize("centre", [True, False])
def test_pulling_back_through_a_norm_is_its_vector_jacobian_product(centre):
    torch.manual_seed(0)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    gain, g = torch.randn(2, 8, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True) if centre else x
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    (expected,) = torch.autograd.grad((centred * scale * gain * g).sum(), x)
    with torch.no_grad():
        ours = pull_back_norm(
            (gain * g).expand(5, 8), centred * scale, scale, centre=centre
        )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_rules_integrate_polynomials():
    for steps in (1, 2, 5):
        points, weights = quadrature("gauss", steps)
        for degree in range(2 * steps):
            total = sum(w * p**degree for p, w in zip(points, weights, strict=True))
            assert abs(total - 1 / (degree + 1)) < 1e-12
    assert quadrature("left", 2)[0] == [0.0, 0.5]
    assert quadrature("midpoint", 2)[0] == [0.25, 0.75]
    assert quadrature("right", 2)[0] == [0.5, 1.0]


def test_parameters_are_as_before_and_the_model_is_unhooked(model, pairs):
    asking = [p.requires_grad for p in model.parameters()]
    before = answers(model, pairs.clean)
    attribute_edges(model, pairs)
    run_circuit(model, pairs, Adapter(model).graph.mask)
    patch_effects(model, pairs[:2], edges=Adapter(model).graph.mask, metric="logit")
    assert [p.requires_grad for p in model.parameters()] == asking
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(answers(model, pairs.clean), before)


# Circuits and patches


@pytest.mark.parametrize("n", [20, 60, 120])
def test_circuits_and_their_runs_are_the_references(golden, n):
    model, pairs, values = golden
    graph = CircuitGraph(3, 4)
    circuit = graph.top_edges(values["eapig_left5_kl"], n)
    assert torch.equal(circuit, values[f"circuit_top{n}"].bool())
    assert torch.equal(graph.node_mask(circuit), values[f"circuit_top{n}_nodes"].bool())
    logits = run_circuit(model, pairs, circuit)
    clean = answers(model, pairs.clean)
    kl = kl_divergence(logits, clean, pairs)
    assert (kl - values[f"circuit_top{n}_kl_vs_clean"]).abs().max() < 1e-5
    label = label_logit(logits, clean, pairs)
    assert (label - values[f"circuit_top{n}_label_logit"]).abs().max() < 1e-5


def test_exact_patching_is_the_references(golden):
    model, pairs, values = golden
    effects = patch_effects(model, pairs, metric="logit")
    assert (effects - values["exact_patch_label_logit"]).abs().max() < 2e-6


def test_the_whole_graph_is_the_model_and_the_empty_one_the_corrupted_run(model, pairs):
    graph = Adapter(model).graph
    whole = run_circuit(model, pairs, graph.mask, batch_size=4)
    assert (whole - answers(model, pairs.clean)).abs().max() < 1e-5
    with pytest.warns(UserWarning, match="no edges"):
        empty = run_circuit(model, pairs, torch.zeros_like(graph.mask))
    assert (empty - answers(model, pairs.corrupted)).abs().max() < 1e-5


def test_patching_an_edge_is_the_circuit_without_it(model, pairs):
    graph = Adapter(model).graph
    effects = patch_effects(model, pairs, max_rows=13)
    clean = answers(model, pairs.clean)
    for u, v in graph.mask.nonzero()[:: graph.num_edges // 12]:
        circuit = graph.mask.clone()
        circuit[u, v] = False
        logits = run_circuit(model, pairs, circuit)
        change = kl_divergence(logits, clean, pairs).mean()
        assert abs(change - effects[u, v]) < 1e-6


def test_faithfulness_is_100_for_the_graph_and_0_for_nothing(model, pairs):
    graph = Adapter(model).graph
    whole = faithfulness(model, pairs, graph.mask)
    assert abs(whole["faithfulness"] - 100) < 1e-2 and whole["kl"] < 1e-6
    assert whole["accuracy"] == whole["model_accuracy"]
    with pytest.warns(UserWarning, match="no edges"):
        empty = faithfulness(model, pairs, torch.zeros_like(graph.mask))
    assert abs(empty["faithfulness"]) < 1e-2


def test_padding_changes_nothing(model, pairs):
    short = some_pairs(3, 5, seed=2)
    mask = torch.ones(9, 7, dtype=torch.long)
    mask[6:, 5:] = 0
    tail = torch.full((3, 2), 7)
    both = PromptPairs(
        *(
            torch.cat([long, torch.cat([few, tail], 1)])
            for long, few in (
                (pairs.clean, short.clean),
                (pairs.corrupted, short.corrupted),
            )
        ),
        label=torch.cat([pairs.label, short.label]),
        attention_mask=mask,
    )
    apart = (6 * attribute_edges(model, pairs) + 3 * attribute_edges(model, short)) / 9
    assert (attribute_edges(model, both) - apart).abs().max() < 1e-6
    graph = Adapter(model).graph
    circuit = graph.top_edges(apart, 60)
    logits = run_circuit(model, both, circuit)
    expected = torch.cat([run_circuit(model, each, circuit) for each in (pairs, short)])
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["LoRA", "IA3", "AdaLoRA"])
def test_adapters_count_as_what_they_do(name, pairs):
    from peft import AdaLoraConfig, IA3Config

    model = neox()
    if name == "LoRA":
        wrapped = add_lora(model, circuit_lora_config(model, [1], r=2, r_critical=4))
    elif name == "IA3":
        wrapped = wrap(model, IA3Config(task_type="CAUSAL_LM"))
    else:
        wrapped = wrap(
            model,
            AdaLoraConfig(
                init_r=4,
                target_r=2,
                total_step=10,
                task_type="CAUSAL_LM",
                target_modules=["query_key_value", "dense"],
            ),
        )
    torch.manual_seed(0)
    for key, p in wrapped.named_parameters():
        if "lora_" in key or "ia3" in key:
            p.data += 0.2 * torch.randn_like(p)
    wrapped.eval()
    scores = attribute_edges(wrapped, pairs)
    assert (scores - attribute_edges(model, pairs)).abs().max() > 1e-3
    assert (scores - attribute_edges_plainly(wrapped, pairs)).abs().max() < 2e-6
    graph = Adapter(wrapped).graph
    circuit = graph.top_edges(scores, 80)
    logits = run_circuit(wrapped, pairs, circuit)
    effects = patch_effects(wrapped, pairs, edges=circuit)
    merged = wrapped.merge_and_unload().eval()
    assert (scores - attribute_edges(merged, pairs)).abs().max() < 1e-5
    assert (logits - run_circuit(merged, pairs, circuit)).abs().max() < 1e-5
    again = patch_effects(merged, pairs, edges=circuit)
    assert (effects - again).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_finite_float32_scores(pairs, dtype):
    exact = attribute_edges(neox(), pairs, metric="logit")
    model = neox().to(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores = attribute_edges(model, pairs, metric="logit")
    assert any("underflow" in str(w.message) for w in caught) == (
        dtype == torch.float16
    )
    assert scores.dtype == torch.float32 and torch.isfinite(scores).all()
    both = torch.stack([scores.flatten(), exact.flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.99


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(pairs, dtype):
    model = neox()
    scores, whole = attribute_edges(model, pairs), Adapter(model).graph.mask
    logits, share = run_circuit(model, pairs, whole), faithfulness(model, pairs, whole)
    standard = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(attribute_edges(model, pairs), scores)
        assert torch.equal(run_circuit(model, pairs, whole), logits)
        assert faithfulness(model, pairs, whole) == share
    finally:
        torch.set_default_dtype(standard)


@pytest.mark.parametrize("device", DEVICES)
def test_results_live_where_the_model_lives(device, pairs):
    model = neox().to(device)
    scores = attribute_edges(model, pairs.to(device))
    assert scores.device.type == device
    circuit = Adapter(model).graph.top_edges(scores, 50)
    assert run_circuit(model, pairs.to(device), circuit).device.type == device


def test_one_forward_and_one_backward_a_step(pairs):
    # The cost that matters: steps + 2 forward runs, whatever the number of edges.
    model, calls = neox(), []
    model.gpt_neox.register_forward_hook(lambda *_: calls.append(1))
    attribute_edges(model, pairs, steps=5)
    assert len(calls) == 7


# Bad input


def test_pairs_are_validated():
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(2, 4\).*equal lengths"):
        PromptPairs(ids, ids[:, :4])
    with pytest.raises(TypeError, match="integer tensor"):
        PromptPairs(ids.float(), ids)
    with pytest.raises(ValueError, match="no prompts"):
        PromptPairs(ids[:0], ids[:0])
    with pytest.raises(ValueError, match="one token a prompt"):
        PromptPairs(ids, ids, ids[0])
    for row in ([0, 1, 1, 1, 1], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]):
        with pytest.raises(ValueError, match="padding on the right"):
            PromptPairs(ids, ids, attention_mask=torch.tensor([row, row]))


def test_unsupported_models_are_named(pairs):
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=40))
    with pytest.raises(NotImplementedError, match="GPT2LMHeadModel.*gpt_neox, llama"):
        attribute_edges(gpt2.eval(), pairs)
    with pytest.raises(TypeError, match="torch module"):
        attribute_edges("pythia", pairs)
    with pytest.raises(ValueError, match="training mode"):
        attribute_edges(neox().train(), pairs)


def test_prompt_learning_adapters_are_refused(pairs):
    from peft import PromptTuningConfig

    wrapped = wrap(
        neox(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(NotImplementedError, match="prompt-learning"):
        attribute_edges(wrapped.eval(), pairs)


def test_metrics_that_fail_name_their_batch(pairs):
    def broken(logits, clean_logits, batch):
        return logits[:, 0] * (torch.nan if len(batch) < 4 else 1.0)

    with pytest.raises(ValueError, match="batch 1"):
        attribute_edges(neox(), pairs, metric=broken, batch_size=4)
    with pytest.raises(ValueError, match="one number a prompt"):
        attribute_edges(neox(), pairs, metric=lambda x, *_: x)
    with pytest.raises(ValueError, match="metric='l2'.*kl"):
        attribute_edges(neox(), pairs, metric="l2")
    with pytest.raises(ValueError, match="label"):
        attribute_edges(neox(), PromptPairs(pairs.clean, pairs.clean), metric="logit")


def test_bad_rules_and_steps_are_refused(pairs):
    with pytest.raises(ValueError, match="rule='simpson'.*midpoint"):
        attribute_edges(neox(), pairs, rule="simpson")
    for steps in (0, 2.5):
        with pytest.raises(ValueError, match="steps"):
            attribute_edges(neox(), pairs, steps=steps)
    with pytest.raises(ValueError, match="batch_size=0"):
        attribute_edges(neox(), pairs, batch_size=0)


def test_bad_circuits_are_refused(pairs):
    with pytest.raises(TypeError, match="boolean"):
        run_circuit(neox(), pairs, torch.ones(16, 40))
    with pytest.raises(ValueError, match=r"\(16, 40\)"):
        run_circuit(neox(), pairs, torch.ones(2, 2, dtype=torch.bool))


def test_faithfulness_needs_a_corruption_that_matters(pairs):
    same = PromptPairs(pairs.clean, pairs.clean)
    with pytest.raises(ValueError, match="undefined"):
        faithfulness(neox(), same, CircuitGraph(3, 4).mask)


def test_metrics_by_hand(pairs):
    logits = torch.zeros(6, 40)
    logits.scatter_(1, pairs.label.unsqueeze(1), 2.0)
    assert torch.equal(label_logit(logits, logits, pairs), torch.full((6,), 2.0))
    expected = 2.0 * (pairs.label != pairs.foil)
    assert torch.equal(logit_difference(logits, logits, pairs), expected)
    assert kl_divergence(logits, logits, pairs).abs().max() < 1e-6
