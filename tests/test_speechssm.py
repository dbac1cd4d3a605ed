"""SpeechSSM's sequence models against closed forms, a loop and the released Griffin.

Golden values: tests/golden/speechssm/README.md.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from icml25.speechssm.attention import LocalAttention
from icml25.speechssm.generate import generate, prefill, sample_next, stream
from icml25.speechssm.griffin import (
    GRIFFIN_2B,
    GRIFFIN_9B,
    MINI,
    RGLRU,
    GriffinConfig,
    GriffinLM,
    RecurrentBlock,
    released_state,
)
from icml25.speechssm.scan import linear_scan, sqrt_clipped
from icml25.speechssm.transformer import TransformerConfig, TransformerLM

GOLDEN = Path(__file__).parent / "golden" / "speechssm"
METHODS = ["chunk", "logstep"]
TINY = GriffinConfig(
    vocab_size=11, width=16, lru_width=24, num_heads=2, mlp_width=20, window=6
)
MODELS = {
    "RRA": lambda: GriffinLM(TINY, generator=seeded()),
    "RAR": lambda: GriffinLM(replace(TINY, pattern="RAR"), generator=seeded()),
    "window": lambda: TransformerLM(tiny_transformer(window=6), generator=seeded()),
    "full": lambda: TransformerLM(tiny_transformer(), generator=seeded()),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tiny_transformer(**changes):
    base = TransformerConfig(
        vocab_size=11, width=16, num_heads=2, num_kv_heads=2, mlp_width=20
    )
    return replace(base, **changes)


def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {
            key: str(value) if value.dtype.kind == "U" else torch.from_numpy(value)
            for key, value in arrays.items()
        }


def draw_scan(batch, length, dim, *, low=0.7, dtype=torch.float64, seed=0):
    generator = seeded(seed)
    a = low + (1 - low) * torch.rand(
        batch, length, dim, generator=generator, dtype=dtype
    )
    b = torch.randn(batch, length, dim, generator=generator, dtype=dtype)
    h0 = torch.randn(batch, dim, generator=generator, dtype=dtype)
    return a, b, h0


# --- the scan


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 65])
@pytest.mark.parametrize("chunk", [None, 1, 2, 7, 17, 200])
def test_scan_is_the_loop_forward_and_backward(method, length, chunk):
    inputs = [x.requires_grad_() for x in draw_scan(2, length, 3)]
    cotangent = torch.randn(2, length, 3, generator=seeded(1), dtype=torch.float64)
    expected = linear_scan(*inputs, method="loop")
    found = linear_scan(*inputs, method=method, chunk=chunk)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    expected = torch.autograd.grad(expected, inputs, cotangent)
    found = torch.autograd.grad(found, inputs, cotangent)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_scan_of_four_minutes_in_single_precision(method):
    a, b, h0 = draw_scan(1, 6000, 8, dtype=torch.float32)
    expected = linear_scan(a.double(), b.double(), h0.double(), method="loop")
    found = linear_scan(a, b, h0, method=method)
    # Two ulp of a state of size ten; the shortcut by cumulative products has no digit.
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_scan_gradients_numerically(method):
    inputs = [x.requires_grad_() for x in draw_scan(2, 9, 2)]
    assert torch.autograd.gradcheck(
        lambda *args: linear_scan(*args, method=method, chunk=4), inputs
    )


@pytest.mark.parametrize("method", ["loop", *METHODS])
def test_scan_closed_forms(method):
    a, b, _ = draw_scan(2, 50, 3)
    ones = torch.ones_like(a)
    t = torch.arange(1, 51, dtype=a.dtype).view(1, -1, 1)
    constant = linear_scan(0.9 * ones, ones, method=method)
    expected = ((1 - 0.9**t) / (1 - 0.9)).expand_as(a)
    torch.testing.assert_close(constant, expected, atol=1e-12, rtol=1e-12)
    assert torch.equal(linear_scan(0 * ones, b, method=method), b)
    torch.testing.assert_close(linear_scan(ones, b, method=method), b.cumsum(1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", [1, 2, 31, 32, 63])
def test_scan_in_two_parts_is_the_scan(method, cut):
    a, b, h0 = draw_scan(2, 64, 3)
    whole = linear_scan(a, b, h0, method=method)
    first = linear_scan(a[:, :cut], b[:, :cut], h0, method=method)
    rest = linear_scan(a[:, cut:], b[:, cut:], first[:, -1], method=method)
    torch.testing.assert_close(
        torch.cat((first, rest), 1), whole, atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_zero_decay_forgets_bitwise(method):
    a, b, h0 = draw_scan(1, 40, 3)
    a[:, 23] = 0
    other = b.clone()
    other[:, :23] += 100
    kept = linear_scan(a, b, h0, method=method)[:, 23:]
    assert torch.equal(kept, linear_scan(a, other, h0 + 5, method=method)[:, 23:])


def test_half_precision_is_accumulated_in_single():
    a, b, _ = draw_scan(1, 3000, 4, low=0.99, dtype=torch.float32)
    half = linear_scan(a.bfloat16(), b.bfloat16())
    assert half.dtype == torch.float32
    same = linear_scan(a.bfloat16().float(), b.bfloat16().float())
    assert torch.equal(half, same)


def test_cumulative_products_overflow_where_the_scan_does_not():
    a = torch.full((1, 400, 1), 0.7)
    b = torch.ones_like(a)
    log = a.log().cumsum(1)
    shortcut = log.exp() * (b * (-log).exp()).cumsum(1)
    assert not shortcut.isfinite().all()
    assert linear_scan(a, b).isfinite().all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"method": "fast"}, ValueError, "method"),
        ({"chunk": 0}, ValueError, "chunk"),
        ({"a": torch.ones(2, 0, 3), "b": torch.ones(2, 0, 3)}, ValueError, "T = 0"),
        ({"b": torch.ones(2, 5, 4)}, ValueError, r"\(2, 5, 4\)"),
        ({"h0": torch.ones(3, 3)}, ValueError, "h0"),
        ({"b": torch.ones(2, 5, 3).double()}, TypeError, "one dtype"),
        ({"a": torch.ones(2, 5, 3, dtype=torch.int64)}, TypeError, "floating"),
    ],
)
def test_scan_refuses(change, error, message):
    given = {"a": torch.ones(2, 5, 3), "b": torch.ones(2, 5, 3), "h0": None} | change
    options = {k: given.pop(k) for k in ("method", "chunk") if k in given}
    with pytest.raises(error, match=message):
        linear_scan(given["a"], given["b"], given["h0"], **options)


def test_clipped_root():
    u = torch.tensor([0.0, 1e-12, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    root = sqrt_clipped(u)
    root.sum().backward()
    assert torch.equal(root, u.detach().sqrt())
    expected = torch.tensor([1000.0, 1000.0, 1.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(u.grad, expected)


# --- the unit


def golden_rglru(arrays):
    unit = RGLRU(arrays["a_param"].numel(), len(arrays["in_w"])).double()
    unit.load_state_dict(
        {
            "decay": arrays["a_param"],
            "input_weight": arrays["in_w"],
            "input_bias": arrays["in_b"],
            "recurrent_weight": arrays["rec_w"],
            "recurrent_bias": arrays["rec_b"],
        }
    )
    return unit


@pytest.mark.parametrize("case", ["rglru_a", "rglru_resets", "rglru_state"])
@pytest.mark.parametrize("method", ["loop", *METHODS])
def test_rglru_is_the_released_one(case, method):
    arrays = golden(case)
    unit = golden_rglru(arrays)
    unit.method = method
    x = arrays["x"].requires_grad_()
    h0 = arrays["h0"].double() if "h0" in arrays else None
    y, last = unit(x, h0, arrays["position_ids"] == 0)
    # The reference accumulates in float32.
    torch.testing.assert_close(y, arrays["y"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(last.float(), arrays["h_last"], atol=1e-6, rtol=1e-6)
    (y * arrays["cot"]).sum().backward()
    for found, name in [
        (x.grad, "grad_x"),
        (unit.decay.grad, "grad_a_param"),
        (unit.input_weight.grad, "grad_in_w"),
        (unit.recurrent_weight.grad, "grad_rec_w"),
    ]:
        torch.testing.assert_close(found, arrays[name], atol=2e-5, rtol=2e-5)


def test_rglru_keeps_the_variance_of_white_input_at_one():
    unit = RGLRU(64, 1, generator=seeded(3))
    torch.nn.init.zeros_(unit.input_weight)
    torch.nn.init.constant_(unit.input_bias, 30.0)  # i_t = 1
    # Gates of their own: independent of the input, different at every step.
    x = torch.randn(1, 6000, 64, generator=seeded())
    noise = torch.randn(1, 6000, 64, generator=seeded(1))
    log_a, _ = unit.gates(noise)
    root = sqrt_clipped(-torch.expm1(2 * log_a))
    h = linear_scan(log_a.exp(), root * x, torch.randn(1, 64, generator=seeded(2)))
    # 64 channels of about 6000/50 independent values each.
    assert abs(h[:, 500:].var().item() - 1) < 0.05


@pytest.mark.parametrize("init", ["code", "paper"])
def test_initial_decays_lie_where_they_should(init):
    unit = RGLRU(4096, 1, init=init, generator=seeded())
    a = torch.exp(-torch.nn.functional.softplus(unit.decay.double()))
    value = a**8 if init == "paper" else a
    assert 0.9 <= value.min() < 0.902 and 0.998 < value.max() <= 0.99901


@pytest.mark.parametrize("p", [-40.0, 40.0])
def test_extreme_decays_stay_finite(p):
    unit = RGLRU(8, 2, generator=seeded())
    torch.nn.init.constant_(unit.decay, p)
    x = torch.randn(2, 30, 8, generator=seeded(), requires_grad=True)
    y, _ = unit(x)
    y.square().sum().backward()
    grads = [x.grad, *(q.grad for q in unit.parameters())]
    assert y.isfinite().all() and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RGLRU(10, 4), "multiple of num_blocks"),
        (lambda: RGLRU(8, 2, init="other"), "init"),
        (lambda: RGLRU(8, 2)(torch.ones(1, 3, 7)), r"\(B, T, 8\)"),
        (
            lambda: RGLRU(8, 2)(torch.ones(1, 3, 8), None, torch.ones(1, 2) > 0),
            "reset",
        ),
        (lambda: RecurrentBlock(8, 8, 2, conv_width=0), "conv_width"),
        (lambda: LocalAttention(10, 4), "multiple of num_heads"),
        (lambda: LocalAttention(16, 4, num_kv_heads=3), "num_kv_heads"),
        (lambda: LocalAttention(16, 4, window=0), "window"),
        (lambda: LocalAttention(12, 2, rope_fraction=0.5), "even number"),
        (lambda: GriffinLM(replace(TINY, pattern="RXA")), "pattern"),
    ],
)
def test_sizes_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- blocks and models against the released ones


def test_recurrent_block_is_the_released_one():
    arrays = golden("recurrent_block")
    block = RecurrentBlock(16, 16, 4).double()
    weights = {k[6:]: v for k, v in arrays.items() if k.startswith("param.")}
    block.load_state_dict(released_state(weights))
    state = block.init_state(2, device="cpu", dtype=torch.float64)
    positions = torch.arange(29).expand(2, 29)
    y, _ = block(arrays["x"], positions=positions, state=state, packed=False)
    torch.testing.assert_close(y, arrays["y"], atol=1e-6, rtol=1e-6)


def test_local_attention_is_the_released_one():
    arrays = golden("local_attention")
    layer = LocalAttention(
        16,
        int(arrays["num_heads"]),
        num_kv_heads=int(arrays["num_kv_heads"]),
        window=int(arrays["window"]),
    ).double()
    layer.load_state_dict(
        {k[6:]: v for k, v in arrays.items() if k.startswith("param.")}
    )
    state = layer.init_state(2, device="cpu", dtype=torch.float64)
    positions = torch.arange(27).expand(2, 27)
    y, _ = layer(arrays["x"], positions=positions, state=state, packed=False)
    torch.testing.assert_close(y, arrays["y"], atol=1e-6, rtol=1e-6)


def released_model():
    arrays = golden("tiny_griffin")
    size = json.loads(arrays["config"])
    config = GriffinConfig(
        vocab_size=size["vocab_size"],
        width=size["hidden_size"],
        lru_width=size["lru_width"],
        num_layers=size["num_hidden_layers"],
        num_heads=size["num_heads"],
        num_kv_heads=size["num_kv_heads"],
        mlp_width=size["mlp_width"],
        window=size["window_keys_including_self"],
        embed_scale=5.65625,  # the reference rounds sqrt(32) to bfloat16
    )
    model = GriffinLM(config)
    weights = {k[6:]: v for k, v in arrays.items() if k.startswith("param.")}
    model.load_state_dict(released_state(weights))
    return model.eval(), arrays


def test_griffin_is_the_released_one():
    model, arrays = released_model()
    logits, _ = model(arrays["ids"])
    torch.testing.assert_close(logits, arrays["logits"], atol=2e-5, rtol=2e-5)
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), arrays["ids"][:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(nll.view(2, -1), arrays["nll"], atol=2e-5, rtol=2e-5)


def test_released_griffin_token_by_token():
    model, arrays = released_model()
    state, steps = None, []
    for token in arrays["ids"].split(1, 1):
        logits, state = model(token, state)
        steps.append(logits)
    torch.testing.assert_close(
        torch.cat(steps, 1), arrays["logits"], atol=2e-5, rtol=2e-5
    )


def test_griffin_is_the_installed_peer():
    """Fresh weights and a wider model than the golden one; the peer is an oracle."""
    transformers = pytest.importorskip("transformers")
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=4,
        vocab_size=50,
        hidden_size=48,
        intermediate_size=2 * 72,  # the port halves it
        num_attention_heads=4,
        num_key_value_heads=1,
        lru_width=48,
        attention_window_size=9,
        head_dim=12,
        block_types=["recurrent", "recurrent", "attention"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        peer = transformers.RecurrentGemmaForCausalLM(config).eval()
    ours = GriffinLM(
        GriffinConfig(
            vocab_size=50,
            width=48,
            lru_width=48,
            num_layers=4,
            num_heads=4,
            mlp_width=72,
            window=9,
            embed_scale=torch.tensor(48.0).sqrt().bfloat16().item(),
        )
    )
    ours.load_state_dict(released_state(peer.state_dict()))
    ids = torch.randint(50, (2, 60), generator=seeded())
    with torch.no_grad():
        theirs = peer(ids, use_cache=False).logits
        found, _ = ours.eval()(ids)
    torch.testing.assert_close(found, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "config, vocab_size, count",
    [
        (GRIFFIN_2B, 256_000, 2_682_862_080),
        (GRIFFIN_9B, 256_000, 8_579_977_216),
        (GRIFFIN_2B, 32_768, 2_111_388_160),
        (GRIFFIN_9B, 32_768, 7_665_618_944),
    ],
)
def test_parameter_counts_of_the_paper_sizes(config, vocab_size, count):
    with torch.device("meta"):
        model = GriffinLM(replace(config, vocab_size=vocab_size))
    assert sum(p.numel() for p in model.parameters()) == count


def test_pattern_is_repeated_and_may_end_anywhere():
    assert GRIFFIN_2B.kinds().count("R") == 18 and GRIFFIN_2B.kinds().count("A") == 8
    assert GRIFFIN_9B.kinds().count("R") == 26 and GRIFFIN_9B.kinds().count("A") == 12
    assert MINI.kinds() == "RRA" * 4


# --- properties of the models


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 13, 40])
def test_any_cut_gives_the_same_logits(name, length):
    model = MODELS[name]().double()
    ids = torch.randint(11, (2, length), generator=seeded())
    with torch.no_grad():
        whole, _ = model(ids)
        for sizes in ([1] * length, [length], [7, 8, 1, 13, length]):
            state, pieces, at = None, [], 0
            for size in sizes:
                piece = ids[:, at : at + size]
                at += size
                if piece.shape[1]:
                    logits, state = model(piece, state)
                    pieces.append(logits)
            torch.testing.assert_close(
                torch.cat(pieces, 1), whole, atol=1e-10, rtol=1e-10
            )


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_do_not_see_each_other(name):
    model = MODELS[name]().double()
    ids = torch.randint(11, (2, 30), generator=seeded())
    reset = torch.zeros(2, 30, dtype=torch.bool)
    reset[0, 13] = reset[1, 5] = reset[1, 21] = True
    packed, state = model(ids, None, reset)
    for row, first, last in [(0, 0, 13), (0, 13, 30), (1, 0, 5), (1, 5, 21)]:
        alone, _ = model(ids[row : row + 1, first:last])
        torch.testing.assert_close(
            packed[row : row + 1, first:last], alone, atol=1e-10, rtol=1e-10
        )
    more = torch.randint(11, (2, 9), generator=seeded(1))
    after, _ = model(more, state)  # each row goes on from its own document
    for row, first in [(0, 13), (1, 21)]:
        document = torch.cat((ids[row, first:], more[row])).unsqueeze(0)
        alone, _ = model(document)
        torch.testing.assert_close(
            after[row : row + 1], alone[:, -9:], atol=1e-10, rtol=1e-10
        )


@pytest.mark.parametrize("name", MODELS)
def test_reset_blocks_values_bitwise_and_gradients(name):
    model = MODELS[name]()
    ids = torch.randint(11, (1, 30), generator=seeded())
    reset = torch.zeros(1, 30, dtype=torch.bool)
    reset[0, 12] = True
    other = ids.clone()
    other[0, :12] = (ids[0, :12] + 3) % 11
    after = model(ids, None, reset)[0][:, 12:]
    assert torch.equal(after, model(other, None, reset)[0][:, 12:])
    seen = []
    model.embed.register_forward_hook(lambda _m, _i, out: seen.append(out))
    logits, _ = model(ids, None, reset)
    (grad,) = torch.autograd.grad(logits[:, 12:].sum(), seen)
    assert (grad[:, :12] == 0).all() and (grad[:, 12:] != 0).any()


@pytest.mark.parametrize("name", MODELS)
def test_no_token_sees_a_later_one(name):
    model = MODELS[name]()
    ids = torch.randint(11, (1, 30), generator=seeded())
    other = ids.clone()
    other[0, 20] = (ids[0, 20] + 1) % 11
    before, _ = model(ids)
    after, _ = model(other)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20], after[:, 20])


def test_reach_of_windows_and_of_recurrences():
    ids = torch.randint(11, (1, 40), generator=seeded())
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 11

    def reached(model):
        with torch.no_grad():
            change = (model(ids)[0] - model(other)[0]).abs().amax(-1)[0]
        return int(change.nonzero().max())

    for layers in (1, 2, 3):
        config = replace(TINY, pattern="A", num_layers=layers)
        model = GriffinLM(config, generator=seeded()).double()
        assert reached(model) == layers * (TINY.window - 1)
    assert reached(MODELS["RRA"]().double()) == 39


@pytest.mark.parametrize("name", ["RRA", "RAR", "window"])
def test_state_is_constant_and_as_large_as_the_formula(name):
    model = MODELS[name]()
    sizes = set()
    for length in (1, 5, 6, 7, 60):
        _, state = model(torch.zeros(3, length, dtype=torch.int64))
        sizes.add(state.nbytes())
    recurrent = 0 if name == "window" else name.count("R")
    attention, kv = (3, 2) if name == "window" else (1, 1)
    expected = recurrent * 24 * (4 + 3 * 4) + attention * 2 * 5 * kv * 8 * 4 + 8
    assert sizes == {3 * expected}
    assert model.init_state(3).nbytes() == 3 * expected


@pytest.mark.parametrize("name", ["RRA", "RAR", "window"])
def test_a_state_holds_no_more_memory_than_it_counts(name):
    with torch.no_grad():
        _, state = MODELS[name]()(torch.zeros(3, 200, dtype=torch.int64))
    tensors = [state.age, *(t for layer in state.layers for t in layer.values())]
    held = sum(t.untyped_storage().nbytes() for t in tensors)
    assert held == state.nbytes()


def test_full_cache_grows_by_the_formula():
    model = MODELS["full"]()
    for length in (1, 10, 100):
        _, state = model(torch.zeros(3, length, dtype=torch.int64))
        assert state.nbytes() == 3 * (3 * 2 * 16 * 4 * length + 8)


def test_full_cache_is_written_in_place_and_only_once():
    model = MODELS["full"]()
    token = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        _, state = model(token.expand(1, 5))
        _, state = model(token, state)
        buffer = state.layers[0]["keys"].untyped_storage().data_ptr()
        copy = state.select(torch.tensor([0]))
        logits, later = model(token, state)
        assert later.layers[0]["keys"].untyped_storage().data_ptr() == buffer
        with pytest.raises(ValueError, match="continued already"):
            model(token, state)
        assert torch.equal(model(token, copy)[0], logits)


@pytest.mark.parametrize("name", ["RRA", "window"])
def test_a_constant_state_can_be_continued_twice(name):
    model = MODELS[name]()
    ids = torch.randint(11, (2, 20), generator=seeded())
    with torch.no_grad():
        _, state = model(ids[:, :12])
        first, _ = model(ids[:, 12:], state)
        model(torch.zeros(2, 3, dtype=torch.int64), state)
        again, _ = model(ids[:, 12:], state)
    assert torch.equal(first, again)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_flow_through_a_state(name):
    model = MODELS[name]()
    ids = torch.randint(11, (1, 12), generator=seeded())
    _, state = model(ids[:, :6])
    logits, _ = model(ids[:, 6:], state)
    two = torch.autograd.grad(logits.sum(), model.embed.weight)[0]
    logits, _ = model(ids)
    one = torch.autograd.grad(logits[:, 6:].sum(), model.embed.weight)[0]
    torch.testing.assert_close(two, one, atol=1e-4, rtol=1e-4)


def test_windowed_and_full_attention_agree_inside_the_window():
    full = MODELS["full"]()
    windowed = TransformerLM(tiny_transformer(window=20))
    windowed.load_state_dict(full.state_dict())
    ids = torch.randint(11, (2, 20), generator=seeded())
    torch.testing.assert_close(full(ids)[0], windowed(ids)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m: m(torch.tensor([[3, 11]])), IndexError, "token id 11"),
        (lambda m: m(torch.tensor([[-1, 2]])), IndexError, "token id -1"),
        (lambda m: m(torch.ones(1, 3)), TypeError, "integers"),
        (lambda m: m(torch.zeros(3, dtype=torch.int64)), ValueError, r"\(B, T\)"),
        (lambda m: m(torch.zeros(1, 0, dtype=torch.int64)), ValueError, r"\(1, 0\)"),
        (
            lambda m: m(torch.tensor([[1]]), m.init_state(2)),
            ValueError,
            "batch of 2",
        ),
        (
            lambda m: m(torch.tensor([[1]]), None, torch.tensor([[1]])),
            ValueError,
            "reset",
        ),
        (lambda m: m.init_state(0), ValueError, "batch_size"),
    ],
)
def test_bad_input_is_named(name, call, error, message):
    with pytest.raises(error, match=message):
        call(MODELS[name]())


def test_state_of_another_model_is_refused():
    models = [make() for make in MODELS.values()]
    models.append(GriffinLM(replace(TINY, window=7)))
    models.append(GriffinLM(replace(TINY, num_layers=4)))
    token = torch.tensor([[1]])
    for at, model in enumerate(models):
        for other in models[:at] + models[at + 1 :]:
            with pytest.raises(ValueError, match="state"):
                model(token, other(token)[1])


# --- generation


@pytest.mark.parametrize("name", MODELS)
def test_generation_rows_are_independent_of_the_batch(name):
    model = MODELS[name]()
    prompt = torch.randint(11, (3, 5), generator=seeded())
    uniforms = torch.rand(3, 25, generator=seeded(1))
    together, _ = generate(model, prompt, 25, uniforms=uniforms)
    for row in range(3):
        at = slice(row, row + 1)
        alone, _ = generate(model, prompt[at], 25, uniforms=uniforms[at])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("name", MODELS)
def test_generation_goes_on_from_its_state(name):
    model = MODELS[name]()
    prompt = torch.randint(11, (2, 5), generator=seeded())
    whole, _ = generate(model, prompt, 30, generator=seeded(4))
    generator = seeded(4)
    first, state = generate(model, prompt, 12, generator=generator)
    rest, _ = generate(model, first[:, -1:], 18, generator=generator, state=state)
    assert torch.equal(torch.cat((first, rest), 1), whole)


def test_two_streams_of_one_model_do_not_meet():
    model = MODELS["RRA"]()
    prompts = torch.randint(11, (2, 1, 5), generator=seeded())
    alone = [generate(model, p, 20, generator=seeded(7))[0] for p in prompts]
    streams = [stream(model, p, generator=seeded(7)) for p in prompts]
    mixed = [[], []]
    for _ in range(20):
        for at, tokens in enumerate(streams):
            mixed[at].append(next(tokens)[0])
    for tokens, expected in zip(mixed, alone, strict=True):
        assert torch.equal(torch.stack(tokens, 1), expected)


@pytest.mark.parametrize("chunk", [1, 3, 500])
def test_prefill_in_chunks(chunk):
    model = MODELS["RRA"]()
    prompt = torch.randint(11, (2, 17), generator=seeded())
    logits, _ = prefill(model, prompt, chunk=chunk)
    torch.testing.assert_close(logits, model(prompt)[0][:, -1], atol=1e-5, rtol=1e-5)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    uniform = (torch.arange(10_000) + 0.5) / 10_000
    tokens = sample_next(logits.expand(10_000, 4), uniform=uniform, temperature=0.7)
    share = tokens.bincount(minlength=4) / 10_000
    expected = (logits[0] / 0.7).softmax(0)
    # A grid of uniforms inverts the distribution to within one grid step.
    torch.testing.assert_close(share, expected, atol=2e-4, rtol=0)
    assert sample_next(logits, temperature=0).item() == 3
    edge = torch.tensor([1 - 2**-24])
    assert 0 <= sample_next(logits, uniform=edge).item() < 4


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    never = -math.inf
    logits = torch.tensor([[never, 0.0, never, 0.0, never]])
    token = sample_next(logits, uniform=torch.tensor([uniform]))
    assert token.item() == (1 if uniform < 0.5 else 3)


def test_generation_refuses():
    model, prompt = MODELS["RRA"](), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_tokens"):
        generate(model, prompt, 0)
    with pytest.raises(ValueError, match="temperature"):
        generate(model, prompt, 3, temperature=-1.0)
    with pytest.raises(ValueError, match="temperature"):
        generate(model, prompt, 3, temperature=math.nan)
    with pytest.raises(ValueError, match="uniforms"):
        generate(model, prompt, 3, uniforms=torch.rand(2, 4))
    with pytest.raises(ValueError, match="prompt"):
        generate(model, prompt[:, :0], 3)
    with pytest.raises(ValueError, match="chunk"):
        prefill(model, prompt, chunk=0)
    with pytest.raises(ValueError, match="uniform"):
        sample_next(torch.zeros(1, 4))
