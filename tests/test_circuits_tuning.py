"""Circuits: layer importance, CircuitLoRA, tasks, fine-tuning, experiments."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from icml25.circuits import (
    EXPERIMENTS,
    CircuitGraph,
    circuit_lora_config,
    layer_importance,
)
from icml25.circuits.compare import LAPTOP, PAPER, compare_allocations
from icml25.circuits.composition import CompositionConfig, run_composition
from icml25.circuits.data import composition_pairs, mix, small_pairs
from icml25.circuits.drift import DriftConfig, run_drift
from icml25.circuits.encoding import NumberTokenizer, encode_items
from icml25.circuits.lora import add_lora, critical_layers, equal_rank, lora_numel
from icml25.circuits.pairs import PromptPairs
from icml25.circuits.small import (
    BaseConfig,
    accuracy,
    load_base,
    pretrain,
    random_neox,
    train,
)
from icml25.circuits.tasks import (
    TASKS,
    is_held_out,
    make_items,
    split_items,
)
from icml25.core import make_generator, records

GOLDEN = Path(__file__).parent / "golden" / "circuits"


@pytest.fixture(scope="module")
def pythia():
    """Pythia-1.4B's shape without its numbers."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    with torch.device("meta"):
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(
                hidden_size=2048,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=8192,
                vocab_size=50304,
            )
        )


# Which layers


def golden_layers():
    golden = json.loads((GOLDEN / "critical_layers.json").read_text())
    graph = CircuitGraph(golden["n_layers"], golden["n_heads"])
    scores = []
    for side in ("before", "after"):
        matrix = torch.zeros(len(graph.sources), len(graph.nodes), dtype=torch.float64)
        for edge, value in golden[side].items():
            source, target = edge.split("->")
            place = graph.sources.index(source), graph.nodes.index(target)
            matrix[place] = value["score"]
        scores.append(matrix)
    return golden, graph, scores


def test_layers_are_those_of_the_released_rule():
    golden, graph, scores = golden_layers()
    importance = layer_importance(*scores, graph)
    expected = torch.tensor(
        [golden["layer_delta"][str(layer)] for layer in range(golden["n_layers"])],
        dtype=torch.float64,
    )
    torch.testing.assert_close(importance, expected, rtol=1e-6, atol=0)
    assert critical_layers(importance, 3) == sorted(golden["top3"])
    assert critical_layers(importance) == sorted(golden["mean_plus_std"])


def test_the_bar_is_the_population_standard_deviation():
    # Mean 1/2, deviation 1/2: the second layer is just on the bar.
    assert critical_layers(torch.tensor([0.0, 1.0])) == [1]


@pytest.mark.parametrize("num_layers", [1, 3, 5, 6, 7, 12, 24])
def test_equal_layers_are_all_critical(num_layers):
    equal = torch.full((num_layers,), 0.1)
    assert critical_layers(equal) == list(range(num_layers))
    assert critical_layers(equal, 1) == [0]


def test_sums_prefer_early_layers_for_random_scores_and_means_do_not():
    graph = CircuitGraph(24, 16)
    generator = make_generator(0)
    scores = torch.randn(2, *graph.mask.shape, generator=generator) * graph.mask
    total = layer_importance(*scores, graph)
    assert (total[1:] < total[:-1]).all()
    # 18 sources count for layer 0: 17 reach what is read after it, one everything.
    ratio = (17 * (23 * 49 + 1) + 24 * 49 + 1) / (17 * 50)
    assert abs(total[0] / total[22] / ratio - 1) < 0.1
    mean = layer_importance(*scores, graph, normalise=True)
    assert mean.max() / mean.min() < 1.3


def test_importance_by_target_counts_the_same_change():
    _, graph, scores = golden_layers()
    by_source = layer_importance(*scores, graph)
    by_target = layer_importance(*scores, graph, by="target")
    torch.testing.assert_close(by_source.sum(), by_target.sum())


def test_bad_importances_are_refused():
    graph = CircuitGraph(2, 2)
    good = torch.zeros(graph.mask.shape)
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        layer_importance(torch.zeros(3, 3), torch.zeros(3, 3), graph)
    with pytest.raises(ValueError, match="by='edge'"):
        layer_importance(good, good, graph, by="edge")
    for top in (0, 3):
        with pytest.raises(ValueError, match="1 to 2"):
            critical_layers(torch.ones(2), top)
    for wrong in (torch.tensor([1.0, math.nan]), torch.ones(2, 2), torch.ones(0)):
        for top in (None, 1):
            with pytest.raises(ValueError, match="importance=.*finite"):
                critical_layers(wrong, top)


# The configuration


@pytest.mark.parametrize(
    ("ranks", "count"),
    [((32, 32), 25_165_824), ((16, 64), 20_447_232), ((8, 32), 10_223_616)],
)
def test_pythias_counts_are_the_papers(pythia, ranks, count):
    layers = [0, 4, 6, 5, 2] if ranks[0] != ranks[1] else []
    config = circuit_lora_config(pythia, layers, r=ranks[0], r_critical=ranks[1])
    assert lora_numel(pythia, config) == count
    share = {25_165_824: 1.7479, 20_447_232: 1.4248, 10_223_616: 0.7175}[count]
    base = sum(p.numel() for p in pythia.parameters())
    assert base == 1_414_647_808
    assert round(100 * count / (base + count), 4) == share


def test_peft_trains_what_the_formula_says(pythia):
    config = circuit_lora_config(pythia, [1, 2], r=4, r_critical=16)
    wrapped = add_lora(pythia, config)  # raises if not
    ranks = {
        name: module.r["default"]
        for name, module in wrapped.named_modules()
        if hasattr(module, "lora_A")
    }
    # Layer 1 must not take layers 11 to 19 with it.
    critical = [name for name, rank in ranks.items() if rank == 16]
    assert len(ranks) == 96 and len(critical) == 8
    assert all(".layers.1." in name or ".layers.2." in name for name in critical)
    scalings = {
        module.scaling["default"]
        for module in wrapped.modules()
        if hasattr(module, "lora_A")
    }
    assert scalings == {2.0}


def test_a_pattern_that_does_not_fit_is_noticed():
    model = random_neox(BaseConfig(num_layers=2, dim=16), 20, 0)
    config = circuit_lora_config(model, [1], r=2, r_critical=4)
    config.rank_pattern = {r"layers\.1\..*": 4, **config.rank_pattern}
    config.target_modules = [r"dense"]
    with pytest.raises((RuntimeError, TypeError)):
        add_lora(model, config)


def test_llama_has_its_own_targets():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=20,
        )
    )
    config = circuit_lora_config(model, [0], r=2, r_critical=4)
    one = 2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24)
    assert lora_numel(model, config) == (2 + 4) * one
    add_lora(model, config)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"layers": [4]}, ValueError, "0 to 3"),
        ({"layers": [-1]}, ValueError, "0 to 3"),
        ({"layers": [1.5]}, TypeError, "whole numbers"),
        ({"r": 0}, ValueError, "at least 1"),
        ({"r_critical": -2}, ValueError, "at least 1"),
        ({"r": 2.5}, TypeError, "whole number"),
    ],
)
def test_bad_allocations_are_refused(options, error, text):
    model = random_neox(BaseConfig(dim=16), 20, 0)
    layers = options.pop("layers", [0])
    with pytest.raises(error, match=text):
        circuit_lora_config(model, layers, **options)


def test_equal_ranks():
    assert equal_rank(16, 64, num_layers=24, num_critical=5) == 26
    assert equal_rank(2, 6, num_layers=4, num_critical=2) == 4
    with pytest.raises(ValueError, match="no uniform rank"):
        equal_rank(8, 31, num_layers=4, num_critical=1)
    with pytest.raises(ValueError, match="1 to 4"):
        equal_rank(8, 32, num_layers=4, num_critical=5)


# The tasks


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_distinct_and_twins_differ(task):
    items = make_items(task, count=60, generator=make_generator(0))
    assert len({item.prompt for item in items}) == 60
    assert all(item.prompt != item.corrupted for item in items)
    assert all(item.answer != item.corrupted_answer for item in items)


def test_answers_are_right():
    generator = make_generator(0)
    for task in ("add_sub", "mul_div", "composition"):
        for item in make_items(task, count=100, generator=generator):
            text = item.prompt.rpartition(":")[2].strip(" =")
            assert eval(text) == item.answer
            twin = item.corrupted.rpartition(":")[2].strip(" =")
            assert eval(twin) == item.corrupted_answer
    for item in make_items("lcm", count=50, generator=generator):
        assert item.answer == math.lcm(*item.operands)
        assert item.prompt.endswith(f"LCM({item.operands[0]}, {item.operands[1]}) =")
    for item in make_items("function", count=50, generator=generator):
        a, b = item.operands
        assert item.answer == 4 * a + b
    for item in make_items("sequence", count=50, generator=generator):
        shown = item.prompt.partition(": ")[2].strip(",").split(", ")
        x = [int(each) for each in shown]
        is_arithmetic = x[3] - x[2] == x[2] - x[1]
        following = 2 * x[3] - x[2] if is_arithmetic else x[3] * x[1] // x[0]
        assert item.answer == following and item.corrupted_answer is None


def test_ranges_and_balance_are_the_papers():
    items = make_items("add_sub", count=400, limit=300, generator=make_generator(0))
    assert sum(" + " in item.prompt for item in items) == 200
    for item in items:
        a, b = item.operands
        assert 1 <= b <= a <= 300
    for item in make_items("mul_div", count=200, generator=make_generator(0)):
        a, b = item.operands
        assert 2 <= a <= 200 and 2 <= b <= 200
        words = item.corrupted.rpartition(": ")[2].split()
        # The twin divides another multiple of the divisor, below 200.
        assert words[1] != "/" or int(words[0]) < 200 and int(words[0]) % b == 0


def test_held_out_problems_are_never_trained_on():
    fit, held = split_items(make_items("add_sub", generator=make_generator(0)))
    assert not {i.operands for i in fit} & {i.operands for i in held}
    assert 0.15 < len(held) / 5000 < 0.25
    assert is_held_out((3, 8)) == is_held_out((8, 3))


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="add_sub"):
        make_items("poetry")
    with pytest.raises(ValueError, match="ask for fewer"):
        make_items("add_sub", count=100, limit=3, generator=make_generator(0))
    with pytest.raises(ValueError, match="count=0"):
        make_items("lcm", count=0)
    with pytest.raises(ValueError, match="'x' is no token"):
        NumberTokenizer(10)("3 + x =")
    with pytest.raises(ValueError, match="'11' is no token"):
        NumberTokenizer(10)("11 + 2 =")


def test_encoding_keeps_single_tokens_and_equal_lengths():
    items = make_items(
        "mul_div", count=60, limit=9, short=True, generator=make_generator(0)
    )

    def by_digits(text, add_special_tokens=False):
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=[ord(c) for c in text])

    pairs, kept = encode_items(items, by_digits, end="\n")
    assert 0 < len(kept) < 60
    assert all(0 <= i.answer < 10 and 0 <= i.corrupted_answer < 10 for i in kept)
    rows = torch.arange(len(kept))
    assert (pairs.clean[rows, pairs.last] == ord("\n")).all()
    assert pairs.attention_mask is not None
    with pytest.raises(ValueError, match="single-token"):
        encode_items([i for i in items if i.answer > 9], by_digits)


@pytest.mark.parametrize("task", TASKS)
def test_small_tasks_fit_the_small_model(task):
    fit, test = small_pairs(task)
    assert len(fit) > len(test) > 30
    assert fit.attention_mask is None
    again, _ = small_pairs(task)
    assert torch.equal(fit.clean, again.clean)


def test_mixing_pads_on_the_right():
    parts = composition_pairs()
    both = mix([side[0] for side in parts.values()])
    assert isinstance(both, PromptPairs) and len(both) == sum(
        len(side[0]) for side in parts.values()
    )
    rows = torch.arange(len(both))
    tokenizer = NumberTokenizer(100)
    assert (both.clean[rows, both.last] == tokenizer.ids["="]).all()


# Training and experiments


def test_the_shipped_base_can_add_and_cannot_subtract():
    model, tokenizer = load_base()
    fit, test = small_pairs("add_sub")
    is_sum = (test.clean == tokenizer.ids["+"]).any(1)
    assert accuracy(model, test[is_sum]) > 0.95
    assert accuracy(model, test[~is_sum]) < 0.1


def test_pretraining_starts_as_the_shipped_base_was_made():
    config = BaseConfig(num_steps=2, batch_size=8)
    models = [pretrain(config, seed=0) for _ in range(2)]
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a, b)
    shapes = {k: v.shape for k, v in load_base()[0].state_dict().items()}
    assert shapes == {k: v.shape for k, v in models[0].state_dict().items()}


def test_critical_parameters_can_train_faster():
    model = random_neox(BaseConfig(num_layers=2, dim=16), 111, 0)
    start = {name: p.clone() for name, p in model.named_parameters()}
    fit, _ = small_pairs("add_sub")
    losses = train(
        model,
        fit,
        num_steps=1,
        batch_size=16,
        lr=1e-4,
        weight_decay=0.0,
        generator=make_generator(0),
        critical=lambda name: ".layers.1." in name,
        critical_lr=2.0,
    )
    assert len(losses) == 1 and not model.training
    moved = {
        layer: max(
            (p - start[name]).abs().max().item()
            for name, p in model.named_parameters()
            if f".layers.{layer}." in name
        )
        for layer in (0, 1)
    }
    # The first step of Adam is its step size.
    assert abs(moved[1] / moved[0] - 2) < 0.05


def test_training_needs_labels():
    fit, _ = small_pairs("add_sub")
    with pytest.raises(ValueError, match="label"):
        train(
            random_neox(BaseConfig(num_layers=1, dim=16), 111, 0),
            PromptPairs(fit.clean, fit.corrupted),
            num_steps=1,
            batch_size=4,
            lr=1e-3,
            generator=make_generator(0),
        )


def dry(config, **changes):
    return replace(
        config,
        model="random",
        num_critical=2,
        rank_other=1,
        rank_critical=3,
        num_steps=4,
        probe_steps=2,
        batch_size=8,
        circuit_prompts=16,
        circuit_batch=8,
        **changes,
    )


def test_the_papers_run_goes_through_on_a_random_model():
    config = dry(PAPER, count=60, num_seeds=2)
    found = compare_allocations(config, seed=3)
    assert found["equal_rank"] == 2
    assert {"gain_points", "gain_low", "gain_high"} <= set(found)
    for task in PAPER.tasks:
        methods = found[task]["methods"]
        counts = {
            methods[name]["trainable"]
            for name in ("lora", "circuit_lora", "circuit_lora_mean", "random_layers")
        }
        assert len(counts) == 1
        assert methods["lora_other"]["trainable"] < counts.pop()
        assert all(len(m["accuracy"]) == 2 for m in methods.values())
        assert all(len(layers) == 2 for layers in methods["circuit_lora"]["layers"])
    json.dumps(found, allow_nan=False)


def test_twice_as_fast_is_another_training_of_the_same_layers():
    methods = ("lora", "circuit_lora", "circuit_lora_fast")
    config = dry(LAPTOP, count=100, num_seeds=1, methods=methods, tasks=("add_sub",))
    found = compare_allocations(config)["add_sub"]["methods"]
    slow, fast = found["circuit_lora"], found["circuit_lora_fast"]
    assert slow["layers"] == fast["layers"]
    assert slow["trainable"] == fast["trainable"] == found["lora"]["trainable"]
    # One start; the first step already parts them.
    assert slow["train_loss"][0][0] == fast["train_loss"][0][0]
    assert slow["train_loss"][0][1:] != fast["train_loss"][0][1:]


def test_ranks_of_a_run_are_what_its_name_says(monkeypatch):
    from icml25.circuits import compare

    ranks = {}

    def watched(model, config, *, seed):
        adapted = adapt(model, config, seed=seed)
        ranks[len(ranks)] = [
            module.r["default"]
            for name, module in adapted.named_modules()
            if name.endswith("attention.dense")
        ]
        return adapted

    adapt = compare.adapt
    monkeypatch.setattr(compare, "adapt", watched)
    methods = ("lora", "early_layers", "lora_other")
    config = dry(LAPTOP, count=100, num_seeds=1, methods=methods, tasks=("add_sub",))
    compare_allocations(config)
    assert list(ranks.values()) == [[2, 2, 2, 2], [3, 3, 1, 1], [1, 1, 1, 1]]


def test_every_choice_is_each_pair_of_layers_once():
    config = dry(
        LAPTOP,
        count=100,
        num_seeds=1,
        methods=("circuit_lora", "every_choice"),
        tasks=("add_sub",),
    )
    found = compare_allocations(config)["add_sub"]["methods"]
    chosen = found.pop("circuit_lora")
    pairs = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert [each["layers"][0] for each in found.values()] == pairs
    assert list(found)[:2] == ["layers_0_1", "layers_0_2"]
    (layers,) = chosen["layers"]
    assert found[f"layers_{layers[0]}_{layers[1]}"] == chosen  # one run
    assert len({each["train_loss"][0][-1] for each in found.values()}) == 6


def test_every_choice_of_many_is_refused(monkeypatch):
    from icml25.circuits import compare

    monkeypatch.setattr(compare, "MOST", 5)
    with pytest.raises(ValueError, match="2 among 4 layers are 6 runs.*random_layers"):
        compare_allocations(dry(LAPTOP, count=100))


def test_an_unreachable_hub_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RuntimeError, match="could not be reached.*model='random'"):
        compare_allocations(replace(PAPER, model="nobody/no-such-model"))


def test_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="dora"):
        compare_allocations(replace(PAPER, methods=("dora",)))


def test_drift_and_composition_return_plain_numbers():
    drift = run_drift(
        DriftConfig(num_steps=4, every=2, circuit_prompts=16, num_seeds=1)
    )
    assert 0 <= drift["edge_change_0.2"][0] <= 1
    composed = run_composition(
        CompositionConfig(num_steps=2, batch_size=8, circuit_prompts=16, num_seeds=1)
    )
    assert composed["coverage_union"][0] >= composed["coverage_matched"][0]
    json.dumps([drift, composed], allow_nan=False)


@pytest.mark.parametrize("name", records.names("circuits"))
def test_records_are_of_configurations_that_exist(name):
    record = records.load("circuits", name)
    config = EXPERIMENTS[record["experiment"]].config(record["scale"])
    assert record["config"] == records.config_dict(config)
