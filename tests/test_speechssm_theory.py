"""SpeechSSM's closed forms, training, and experiments at the smallest size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from icml25.core import make_generator
from icml25.speechssm import EXPERIMENTS, counting, memory, mini, theory
from icml25.speechssm.griffin import GRIFFIN_2B, GriffinConfig, GriffinLM
from icml25.speechssm.scan import linear_scan
from icml25.speechssm.training import (
    Recipe,
    nll_by_token,
    nll_in_ranges,
    train_lm,
    warmup_cosine,
)
from icml25.speechssm.transformer import TransformerConfig, TransformerLM

SMALL = GriffinConfig(
    vocab_size=7, width=16, lru_width=16, num_heads=2, mlp_width=20, window=6
)


def test_half_life_is_where_half_is_left():
    for a, r in ((0.9, 0.5), (0.999, 0.5), (0.99, 1.0)):
        decay = math.exp(8 * r * math.log(a))
        tokens = float(theory.half_life(a, r))
        assert decay**tokens == pytest.approx(0.5)
    # The longest memory at the released initialisation: seven seconds.
    assert float(theory.half_life(0.999, 0.5)) == pytest.approx(173, abs=1)


def test_paper_initialisation_remembers_eight_times_longer():
    a = torch.tensor([0.9, 0.999], dtype=torch.float64)
    ratio = theory.half_life(a ** (1 / 8), 0.5) / theory.half_life(a, 0.5)
    torch.testing.assert_close(ratio, torch.full_like(a, 8.0))


@pytest.mark.parametrize("a, r", [(1.0, 0.5), (0.0, 0.5), (0.5, 0.0), (0.5, 1.5)])
def test_half_life_refuses(a, r):
    with pytest.raises(ValueError, match="must lie in"):
        theory.half_life(a, r)


def test_state_is_bounded():
    """|h| <= X sqrt((1+a)/(1-a)) for constant decay and inputs below X."""
    for a in (0.5, 0.9, 0.999):
        decay = torch.full((1, 20_000, 1), a, dtype=torch.float64)
        x = torch.ones_like(decay)
        h = linear_scan(decay, math.sqrt(1 - a * a) * x)
        bound = math.sqrt((1 + a) / (1 - a))
        assert h.abs().max() <= bound * (1 + 1e-9)
        if a < 0.999:
            assert h.abs().max() > 0.999 * bound  # and the bound is attained


@pytest.mark.parametrize("pattern", ["RRA", "A", "R"])
def test_griffin_bytes_are_the_models(pattern):
    config = replace(SMALL, pattern=pattern)
    model = GriffinLM(config)
    _, state = model(torch.zeros(1, 50, dtype=torch.int64))
    assert theory.griffin_bytes(config) == state.nbytes()


@pytest.mark.parametrize("window", [None, 6])
def test_transformer_bytes_are_the_models(window):
    config = TransformerConfig(
        vocab_size=7, width=16, num_heads=4, num_kv_heads=2, window=window
    )
    model = TransformerLM(config)
    _, state = model(torch.zeros(1, 50, dtype=torch.int64))
    assert theory.transformer_bytes(config, 50) == state.nbytes()


def test_bytes_of_the_paper_size():
    size = theory.griffin_bytes(GRIFFIN_2B, itemsize=2)
    assert 17.2e6 < size < 17.3e6
    gemma = TransformerConfig(
        width=2048, num_layers=18, num_heads=8, num_kv_heads=1, rope_fraction=1.0
    )
    assert theory.transformer_bytes(gemma, 24_000, itemsize=2) > 25 * size


def test_no_attention_weight_exceeds_the_ceiling():
    generator = torch.Generator().manual_seed(0)
    for keys in (1, 2, 50, 1000):
        for bound in (0.0, 1.0, 4.0):
            scores = bound * (2 * torch.rand(300, keys, generator=generator) - 1)
            ceiling = theory.attention_ceiling(bound, keys)
            assert scores.softmax(-1).max() <= ceiling + 1e-6
            best = torch.full((keys,), -bound)
            best[0] = bound
            assert best.softmax(-1)[0].item() == pytest.approx(ceiling, rel=1e-5)
    with pytest.raises(ValueError, match="num_keys"):
        theory.attention_ceiling(1.0, 0)


def test_unseen_turns():
    assert not theory.unseen_turns(12, 128, 128).any()
    seen = theory.unseen_turns(12, 128, 2048)
    wavelength = 2 * math.pi * 10_000 ** (torch.arange(12) / 12)
    assert torch.equal(seen, wavelength > 127)


# --- training and likelihood


def test_nll_in_one_stream_is_the_nll():
    model = GriffinLM(SMALL, generator=make_generator(0)).eval()
    ids = torch.randint(7, (2, 60), generator=make_generator(1))
    with torch.no_grad():
        logits, _ = model(ids[:, :-1])
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), ids[:, 1:], reduction="none"
    )
    for chunk in (1, 7, 59, 256):
        torch.testing.assert_close(
            nll_by_token(model, ids, chunk=chunk), expected, atol=1e-5, rtol=1e-5
        )


def test_nll_in_ranges():
    nll = torch.arange(10.0).repeat(2, 1)
    assert nll_in_ranges(nll, (0, 4, 10)) == [1.5, 6.5]
    for edges in ((0,), (4, 4), (0, 12)):
        with pytest.raises(ValueError, match="edges"):
            nll_in_ranges(nll, edges)
    with pytest.raises(ValueError, match="tokens"):
        nll_by_token(GriffinLM(SMALL), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("name", ["hybrid", "full", "window"])
def test_training_learns_a_cycle_and_is_repeatable(name):
    config = counting.CountingRun(
        hybrid=SMALL,
        full=TransformerConfig(vocab_size=7, width=16, num_heads=2, num_kv_heads=2),
        window=TransformerConfig(
            vocab_size=7, width=16, num_heads=2, num_kv_heads=2, window=6
        ),
    )
    cycle = (torch.arange(8).unsqueeze(1) + torch.arange(31)) % 7
    recipe = Recipe(num_steps=60, warmup=5)
    curves = []
    for _ in range(2):
        model = counting.build_model(config, name, seed=0)
        curves.append(train_lm(model, lambda _: cycle, recipe))
    assert curves[0] == curves[1]
    assert curves[0][-1] < 0.1 < math.log(7) < curves[0][0]


def test_schedule():
    recipe = Recipe(num_steps=100, warmup=10)
    factors = [warmup_cosine(step, recipe) for step in range(101)]
    assert factors[0] == 0.1 and factors[9] == factors[10] == 1.0
    assert factors[-1] == pytest.approx(0.05)


def test_cutting_the_context_changes_nothing_inside_it():
    config = TransformerConfig(vocab_size=7, width=16, num_heads=2, num_kv_heads=2)
    model = TransformerLM(config, generator=make_generator(0)).eval()
    ids = torch.randint(7, (2, 30), generator=make_generator(1))
    cut, whole = counting.cut_context(model, 12)(ids)[0], model(ids)[0]
    torch.testing.assert_close(cut[:, :12], whole[:, :12], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(cut[:, 12:], whole[:, 12:])


def test_build_model_names():
    with pytest.raises(ValueError, match="hybrid"):
        counting.build_model(counting.LAPTOP, "other")
    sizes = {
        name: sum(
            p.numel() for p in counting.build_model(counting.LAPTOP, name).parameters()
        )
        for name in ("hybrid", "full", "window")
    }
    assert sizes["full"] == sizes["window"]
    assert 0.9 < sizes["hybrid"] / sizes["full"] < 1  # no advantage in size


# --- experiments


def test_memory_experiment():
    config = memory.MemoryRun(lengths=(20, 200), batch_sizes=(2,), num_tokens=4)
    found = memory.run_memory(config)
    hybrid = found["hybrid"]["batch2"]["state_bytes"]
    assert hybrid == [2 * theory.griffin_bytes(config.hybrid)] * 2
    assert found["full"]["batch2"]["state_bytes"] == [
        2 * theory.transformer_bytes(config.full, length) for length in (20, 200)
    ]
    assert all(r > 0 for r in found["ratio"]["batch2"])


def test_filled_state_continues_like_a_read_one():
    model = TransformerLM(TransformerConfig(vocab_size=7))
    with torch.no_grad():
        _, read = model(torch.zeros(2, 9, dtype=torch.int64))
        filled = memory.filled_state(model, 2, 9)
        assert filled.nbytes() == read.nbytes()
        _, after = model(torch.zeros(2, 1, dtype=torch.int64), filled)
    assert after.stored == 10
    with pytest.raises(ValueError, match="length"):
        memory.filled_state(model, 2, 0)


def test_mini_dry_run():
    pytest.importorskip("accelerate")
    found = mini.run_mini(replace(mini.LAPTOP, eval_tokens=256))
    assert len(found["loss"]) == 20 and found["loss"][-1] < found["loss"][0]
    assert set(found["nll"]) == {"0-1x", "1-4x"}
    assert found["state_bytes"] == theory.griffin_bytes(mini.LAPTOP.model)


def test_rows_mark_where_documents_begin():
    documents = [torch.full((length,), length) for length in (5, 9, 4)]
    rows = iter(mini._Rows(documents, 6, seed=0))
    ids, starts = (
        torch.cat(x) for x in zip(*(next(rows) for _ in range(12)), strict=True)
    )
    begins = starts.nonzero().flatten().tolist()
    for begin, end in zip(begins, [*begins[1:], None], strict=True):
        document = ids[begin:end]
        assert (document == document[0]).all()
        if end is not None:
            assert len(document) == document[0]


def test_mini_refuses(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="source"):
        mini.run_mini(replace(mini.LAPTOP, source="radio"))
    monkeypatch.setenv("ICML25_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="openslr"):
        list(mini.librispeech_documents("dev-clean"))


def test_experiments_are_registered():
    assert next(iter(EXPERIMENTS)) == "counting"
    assert EXPERIMENTS["mini"].config("paper").model.width == 512
    with torch.device("meta"):
        model = GriffinLM(EXPERIMENTS["mini"].config("paper").model)
    assert 38e6 < sum(p.numel() for p in model.parameters()) < 45e6
