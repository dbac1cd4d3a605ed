"""The shipped checkpoints do what the chapter says; the pictures and players draw."""

from __future__ import annotations

import base64
import math

import pytest
import torch
from icml25.speechssm import counting, drawings
from icml25.speechssm.griffin import GriffinConfig
from icml25.speechssm.training import nll_by_token, nll_in_ranges
from icml25.speechssm.transformer import TransformerConfig

EDGES = (64, 256, 512, 1024, 2048)


@pytest.fixture(scope="module", params=counting.SHIPPED_SEEDS)
def shipped(request):
    seed = request.param
    tokenizer = counting.shipped_tokenizer(seed=seed)
    corpus, judge = counting.prepare(seed=seed, tokenizer=tokenizer)
    models = {
        name: counting.shipped_model(name=name, seed=seed)
        for name in counting.LAPTOP.models
    }
    return corpus, judge, models


def test_shipped_models_far_beyond_their_training(shipped):
    corpus, _, models = shipped
    nll = {
        name: nll_in_ranges(nll_by_token(model, corpus.held_out.tokens), EDGES)
        for name, model in models.items()
    }
    # Of 4.2 nats for a uniform guess; both know the language within their training.
    assert abs(nll["hybrid"][0] - nll["full"][0]) < 0.15
    assert abs(nll["hybrid"][-1] - nll["hybrid"][0]) < 0.15
    assert nll["full"][-1] - nll["full"][0] > 0.4
    cut = counting.cut_context(models["full"], 128)
    found = nll_in_ranges(nll_by_token(cut, corpus.held_out.tokens), EDGES)
    assert found[-1] - found[0] < 0.4 * (nll["full"][-1] - nll["full"][0])


def test_shipped_hybrid_speaks_for_a_minute(shipped):
    corpus, judge, models = shipped
    prompt = corpus.held_out.tokens[:, :64]
    spoken = counting.listen_over_time(models["hybrid"], judge, prompt, 1500)
    assert spoken["tokens"].shape == (4, 1500)
    assert min(spoken["coherence"]) > 0.35
    assert all(1.5 < rate < 2.7 for rate in spoken["rate"])  # as fast as real speech


def test_shipped_files_are_small():
    for path in counting.ASSETS.glob("*.safetensors"):
        assert path.stat().st_size < 5e6


def test_unknown_checkpoint_is_named():
    with pytest.raises(FileNotFoundError, match="hybrid-seed9"):
        counting.shipped_model(seed=9)


def test_gate_figure_and_length_frame_draw():
    figure = drawings.gate_figure(0.999, 0.5)
    assert "6.9 s" in figure.axes[1].get_title(loc="left") + figure.axes[1].get_title()
    frame = drawings.length_frame(
        20,
        {"hybrid": [1.0, 0.9], "full": [0.9, 0.2]},
        GriffinConfig(),
        TransformerConfig(),
        sounds={"hybrid": "data:audio/mpeg;base64,AAAA"},
    )
    assert frame.count("<img alt=") == 1 and frame.count("<audio") == 1


def test_players_are_sounds():
    wave = torch.sin(torch.arange(8000) * 0.3)
    shown = drawings.players({"a < tone": wave}, 16_000)
    page = shown._repr_html_()
    assert "a &lt; tone" in page and repr(shown) == "sounds: a < tone"
    encoded = page.split("base64,")[1].split('"')[0]
    assert len(base64.b64decode(encoded)) > 500
    for bad in (torch.zeros(10), torch.zeros(0), torch.tensor([math.nan])):
        with pytest.raises(ValueError, match="audio"):
            drawings.mp3_uri(bad, 16_000)
