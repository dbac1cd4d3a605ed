"""Experiment A: train on five seconds of counting, speak for minutes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator

from .corpus import CountingConfig, CountingCorpus, counting_corpus
from .generate import generate
from .griffin import GriffinConfig, GriffinLM
from .layers import LanguageModel
from .recogniser import (
    DigitRecogniser,
    RecogniserConfig,
    coherence_over_time,
    digit_error_rate,
    train_recogniser,
)
from .tokens import KMeansTokenizer
from .training import Recipe, nll_by_token, nll_in_ranges, train_lm
from .transformer import TransformerConfig, TransformerLM

__all__ = [
    "CountingRun",
    "build_model",
    "listen_over_time",
    "prepare",
    "run_counting",
    "shipped_model",
    "shipped_tokenizer",
    "train_on_counting",
]

ASSETS = Path(__file__).parent / "assets"
SHIPPED_SEEDS = (0, 1)


@dataclass(frozen=True)
class CountingRun:
    """The comparison on the counting language; the defaults are the laptop's."""

    corpus: CountingConfig = field(default_factory=CountingConfig)
    judge: RecogniserConfig = field(default_factory=RecogniserConfig)
    hybrid: GriffinConfig = field(default_factory=GriffinConfig)
    full: TransformerConfig = field(default_factory=TransformerConfig)
    window: TransformerConfig = field(
        default_factory=lambda: TransformerConfig(window=40)
    )
    models: tuple[str, ...] = ("hybrid", "full", "window")
    recipe: Recipe = field(default_factory=Recipe)
    edges: tuple[int, ...] = (0, 64, 128, 256, 512, 1024, 2048)  # of the NLL's ranges
    prompt_tokens: int = 64  # 2.6 s
    generate_tokens: int = 6000  # 4 minutes
    bin_tokens: int = 250  # 10 s
    shipped: bool = False  # evaluate the checkpoints that come with the package
    save: bool = False  # write them


LAPTOP = CountingRun()
FSDD = CountingRun(
    corpus=CountingConfig(source="fsdd"),
    judge=RecogniserConfig(num_steps=300),  # real takes are harder to tell apart
    models=("hybrid", "full"),
    generate_tokens=3000,
)


def prepare(
    config: CountingRun = LAPTOP,
    *,
    seed: int = 0,
    tokenizer: KMeansTokenizer | None = None,
) -> tuple[CountingCorpus, DigitRecogniser]:
    """The corpus, and a judge that learnt digits but never the rule of counting.

    Args:
        config: their sizes.
        seed: of everything drawn.
        tokenizer: one that is fitted already.
    """
    generator = make_generator(seed)
    corpus = counting_corpus(config.corpus, generator=generator, tokenizer=tokenizer)
    return corpus, train_recogniser(corpus, config.judge, generator=generator)


def build_model(config: CountingRun, name: str, *, seed: int = 0) -> LanguageModel:
    """A fresh model: ``"hybrid"``, ``"full"`` or ``"window"``.

    Raises:
        ValueError: another name.
    """
    if name not in ("hybrid", "full", "window"):
        raise ValueError(f"name must be 'hybrid', 'full' or 'window', got {name!r}")
    generator = make_generator(100 + seed)
    kind = GriffinLM if name == "hybrid" else TransformerLM
    return kind(getattr(config, name), generator=generator)


def train_on_counting(
    model: LanguageModel,
    corpus: CountingCorpus,
    recipe: Recipe,
    *,
    seed: int = 0,
    desc: str = "training",
) -> list[float]:
    """Train on recordings drawn anew at every step, the same ones for every model.

    Returns:
        The loss of every step, nats a token.
    """
    generator = make_generator(200 + seed)
    return train_lm(
        model,
        lambda _: (
            corpus.sample(
                recipe.batch_size, recipe.seq_len + 1, generator=generator
            ).tokens
        ),
        recipe,
        desc=desc,
    )


def listen_over_time(
    model: LanguageModel,
    judge: DigitRecogniser,
    prompt: Tensor,
    num_tokens: int,
    *,
    bin_tokens: int = 250,
    seed: int = 0,
) -> dict[str, Any]:
    """Let a model speak and the judge listen.

    Args:
        model: what speaks, at temperature 1.
        judge: what recognises digits.
        prompt: ``(B, T)`` tokens.
        num_tokens: how many to generate.
        bin_tokens: length of a window of time.
        seed: of the draws.

    Returns:
        ``coherence`` (share of neighbouring digits that count, a window), ``rate``
        (digits a second, a window), ``pairs``, ``tokens`` ``(B, num_tokens)``,
        ``state_bytes`` at the end.
    """
    where = model.embed.weight.device
    generator = make_generator(300 + seed, where)
    tokens, state = generate(model, prompt.to(where), num_tokens, generator=generator)
    rows = coherence_over_time(
        judge.listen(tokens.cpu()), num_tokens=num_tokens, window=bin_tokens
    )
    return {
        "coherence": [row["coherence"] for row in rows],
        "rate": [25 * row["digits"] for row in rows],
        "pairs": [row["pairs"] for row in rows],
        "tokens": tokens.cpu(),
        "state_bytes": state.nbytes(),
    }


def utterance_coherence(
    model: LanguageModel,
    judge: DigitRecogniser,
    corpus: CountingCorpus,
    *,
    num_prompts: int = 64,
    prompt_tokens: int = 24,
    total_tokens: int = 128,
    seed: int = 0,
) -> float:
    """Coherence of continuations that end within the training length.

    Args:
        model: what speaks, at temperature 1.
        judge: what recognises digits.
        corpus: gives held-out prompts.
        num_prompts: how many.
        prompt_tokens: one second, about two digits.
        total_tokens: of prompt and continuation: the training length.
        seed: of prompts and draws.

    Returns:
        Share of neighbouring digits, the prompt's included, that count on.
    """
    generator = make_generator(400 + seed)
    prompts = corpus.sample(
        num_prompts, prompt_tokens, generator=generator, test=True
    ).tokens
    spoken = listen_over_time(
        model,
        judge,
        prompts,
        total_tokens - prompt_tokens,
        bin_tokens=total_tokens,
        seed=seed,
    )["tokens"]
    heard = judge.listen(torch.cat((prompts, spoken), 1))
    row = coherence_over_time(heard, num_tokens=total_tokens, window=total_tokens)
    return row[0]["coherence"]


def run_counting(
    config: CountingRun = LAPTOP,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Train the models on five seconds; measure likelihood and coherence over minutes.

    Args:
        config: corpus, models, recipe, lengths.
        device: where the models live.
        seed: of corpus, weights, data order and draws.

    Returns:
        ``judge_error`` (digit error rate on held-out speech) and ``real_coherence``
        (what the judge hears in real counting); for each model ``params``, ``loss``
        (curve), ``nll`` (nats a token, a range of positions), ``utterance`` (coherence
        within the training length), ``coherence`` and ``rate`` a window of time,
        ``state_bytes``; and, to be read at a glance, the coherence of an utterance and
        of the windows from the third on.
    """
    tokenizer = shipped_tokenizer(config, seed=seed) if config.shipped else None
    corpus, judge = prepare(config, seed=seed, tokenizer=tokenizer)
    held_out = corpus.held_out
    heard = judge.listen(held_out.tokens)
    said = [held_out.digits.row(i) for i in range(len(held_out.tokens))]
    real = coherence_over_time(
        heard, num_tokens=held_out.tokens.shape[1], window=held_out.tokens.shape[1]
    )
    result: dict[str, Any] = {
        "judge_error": digit_error_rate([t.digits for t in heard], said),
        "real_coherence": real[0]["coherence"],
    }
    for name in config.models:
        found: dict[str, Any] = {}
        if config.shipped:
            model = shipped_model(config, name, seed=seed).to(device)
        else:
            model = build_model(config, name, seed=seed).to(device)
            found["loss"] = train_on_counting(
                model, corpus, config.recipe, seed=seed, desc=f"{name}, seed {seed}"
            )
        if config.save:
            _save(name, model, corpus.tokenizer, seed)
        nll = nll_by_token(model, held_out.tokens.to(device))
        found["nll"] = nll_in_ranges(nll, config.edges)
        prompt = held_out.tokens[:, : config.prompt_tokens]
        spoken = listen_over_time(
            model,
            judge,
            prompt,
            config.generate_tokens,
            bin_tokens=config.bin_tokens,
            seed=seed,
        )
        del spoken["tokens"]
        found["utterance"] = utterance_coherence(
            model, judge, corpus, total_tokens=config.recipe.seq_len, seed=seed
        )
        found["params"] = sum(p.numel() for p in model.parameters())
        result[name] = found | spoken
        result[f"{name}, utterance"] = found["utterance"]
        late = spoken["coherence"][2:]
        if late:
            result[f"{name}, after {2 * config.bin_tokens // 25} s"] = sum(late) / len(
                late
            )
    return result


def cut_context(model: TransformerLM, window: int) -> TransformerLM:
    """The same weights with attention cut to the last ``window`` tokens.

    No training: it tells whether a full-attention model fails far out because of what
    it has learnt, or because of what it is shown.

    Args:
        model: a full-attention model.
        window: tokens a query may see, itself included.
    """
    cut = TransformerLM(replace(model.config, window=window)).to(
        model.embed.weight.device
    )
    cut.load_state_dict(model.state_dict())
    return cut.eval()


def shipped_model(
    config: CountingRun = LAPTOP, name: str = "hybrid", *, seed: int = 0
) -> LanguageModel:
    """A checkpoint of ours: ``python -m icml25 run speechssm checkpoints --seed 0``.

    Args:
        config: sizes.
        name: ``"hybrid"``, ``"full"`` or ``"window"``.
        seed: one of the shipped seeds.

    Raises:
        FileNotFoundError: no checkpoint of that name and seed.
    """
    model = build_model(config, name, seed=seed)
    tensors = _load(f"{name}-seed{seed}.safetensors")
    model.load_state_dict({key: value.float() for key, value in tensors.items()})
    return model.eval()


def shipped_tokenizer(
    config: CountingRun = LAPTOP, *, seed: int = 0
) -> KMeansTokenizer:
    """The tokeniser that the checkpoints of a seed were trained with.

    It is shipped because k-means need not end at the same centres on another processor.

    Raises:
        FileNotFoundError: no tokeniser of that seed.
    """
    tensors = _load(f"tokenizer-seed{seed}.safetensors")
    return KMeansTokenizer.from_state(config.corpus.tokenizer, tensors)


def _load(name: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = ASSETS / name
    if not path.exists():
        have = sorted(p.name for p in ASSETS.glob("*.safetensors"))
        raise FileNotFoundError(f"no checkpoint {name}; shipped are {have}")
    return load_file(path)


def _save(
    name: str, model: LanguageModel, tokenizer: KMeansTokenizer, seed: int
) -> None:
    from safetensors.torch import save_file

    ASSETS.mkdir(exist_ok=True)
    half = {
        key: value.detach().cpu().half().contiguous()
        for key, value in model.state_dict().items()
    }
    save_file(half, ASSETS / f"{name}-seed{seed}.safetensors")
    fitted = {key: value.contiguous() for key, value in tokenizer.state_dict().items()}
    save_file(fitted, ASSETS / f"tokenizer-seed{seed}.safetensors")
