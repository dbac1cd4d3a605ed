"""CircuitLoRA against LoRA, AdaLoRA, IA3 and controls, at laptop and paper scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from icml25.core import data, make_generator

from .adapter import Adapter
from .attribution import attribute_edges
from .data import LIMIT, small_pairs
from .encoding import NumberTokenizer, encode_items
from .lora import circuit_lora_config, critical_layers, equal_rank, layer_importance
from .pairs import PromptPairs
from .small import BaseConfig, accuracy, adapt, load_base, random_neox, train
from .tasks import make_items, split_items

METHODS = (
    "lora",
    "circuit_lora",
    "circuit_lora_mean",
    "random_layers",
    "early_layers",
    "lora_other",
    "adalora",
    "ia3",
)
#: CircuitLoRA as the released code trains it on the composed task: critical layers
#: learn twice as fast.
FAST, FASTER = "circuit_lora_fast", 2.0
#: Every set of ``num_critical`` layers in turn, each under its own name such as
#: ``layers_0_1``; their mean is what a random choice gives. For models of few layers.
EVERY, MOST = "every_choice", 20


@dataclass(frozen=True)
class CompareConfig:
    """CircuitLoRA against LoRA and others; the sizes are the laptop's."""

    model: str = "small"  # the shipped base model, "random", or a name on the hub
    tasks: tuple[str, ...] = ("add_sub", "mul_div")
    methods: tuple[str, ...] = METHODS
    count: int | None = None  # problems a task; None: the scale's own
    held_out: float = 0.2
    rank_other: int = 2  # r_o, outside the critical layers
    rank_critical: int = 6  # r_c; with two of four layers: 4 on average
    num_critical: int = 2  # K
    probe_rank: int = 2  # of the cheap tuning whose circuits choose the layers
    # The same step size for every LoRA; the others' stand in the paper's ratio or were
    # the best of a small grid on a seed that no result uses.
    lr: float = 1e-2
    lr_adalora: float = 1e-1
    lr_ia3: float = 2e-1
    num_steps: int = 120
    probe_steps: int = 80
    batch_size: int = 128
    circuit_prompts: int = 256
    circuit_batch: int | None = None
    steps: int = 5  # m
    rule: str = "midpoint"
    dtype: str = "float32"
    num_seeds: int = 3


# Four layers have six pairs; running all replaces the random and the early choice.
LAPTOP = CompareConfig(
    methods=(
        "lora",
        "circuit_lora",
        "circuit_lora_mean",
        EVERY,
        "lora_other",
        "adalora",
        "ia3",
    )
)
PAPER = CompareConfig(
    model="EleutherAI/pythia-1.4b-deduped",
    tasks=("add_sub", "mul_div", "sequence", "lcm", "function"),
    held_out=0.1,
    rank_other=16,
    rank_critical=64,
    num_critical=5,
    lr=3e-4,
    lr_adalora=8e-3,
    lr_ia3=8e-3,
    num_steps=280,  # two epochs of 4,500 prompts
    probe_steps=280,
    batch_size=32,
    circuit_prompts=500,
    circuit_batch=32,
    rule="right",
    num_seeds=1,
)


def compare_allocations(
    config: CompareConfig = LAPTOP,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Fine-tune every task by every method; accuracies on held-out problems.

    All LoRA variants but ``lora_other`` train equally many numbers with one step size
    and the same steps and batches. Variants that choose the same layers are one run.

    Args:
        config: what to run. ``model="random"`` is the dry run of the paper's code path.
        device: where to run; under ``accelerate launch`` the index is its own.
        seed: the first of ``num_seeds`` seeds: of adapters' starts, batches, random
            layers. The split is the same for all.

    Returns:
        By task: ``base`` accuracy, by method ``accuracy`` (one a seed), ``trainable``,
        ``layers`` and ``train_loss`` (a seed: the mean of each tenth of the training);
        LoRA's gain over the base by task, ``<task>_points``; and the mean gain of
        CircuitLoRA over LoRA with the 95% interval over (task, seed) pairs; gains in
        percentage points.

    Raises:
        ValueError: an unknown method or task, ranks without a uniform equal, or
            ``every_choice`` of more than 20 sets of layers.
        icml25.core.data.DataError: the hub's model cannot be reached.
    """
    known = (*METHODS, FAST, EVERY)
    if unknown := set(config.methods) - set(known):
        raise ValueError(f"methods must be among {known}, got {sorted(unknown)}")
    base, tokenizer = _load(config, torch.device(device))
    num_layers = base.config.num_hidden_layers
    choices = math.comb(num_layers, config.num_critical)
    if EVERY in config.methods and choices > MOST:
        raise ValueError(
            f"methods: {EVERY!r} of {config.num_critical} among {num_layers} layers "
            f"are {choices:,} runs, at most {MOST} are allowed; take 'random_layers'"
        )
    sizes = {"num_layers": num_layers, "num_critical": config.num_critical}
    uniform = equal_rank(config.rank_other, config.rank_critical, **sizes)
    result: dict[str, Any] = {"equal_rank": uniform}
    for task in config.tasks:
        fit, test = _task_pairs(config, task, tokenizer, device)
        result[task] = {
            "base": accuracy(base, test),
            "prompts": [len(fit), len(test)],
            "methods": {},
        }
        for index in range(config.num_seeds):
            _compare_once(config, base, fit, test, seed + index, uniform, result[task])
    return result | _gains(config, result)


def _compare_once(
    config: CompareConfig,
    base: nn.Module,
    fit: PromptPairs,
    test: PromptPairs,
    seed: int,
    uniform: int,
    row: dict[str, Any],
) -> None:
    num_layers = base.config.num_hidden_layers
    chosen = _choose_layers(config, base, fit, seed)
    row.setdefault("importance", []).append(chosen.pop("importance"))
    done: dict[tuple, tuple] = {}
    for method, layers in _named_methods(config, num_layers):
        ranks = (config.rank_other, config.rank_critical)
        if method in chosen:
            layers = chosen[method]
        elif method == "random_layers":
            order = torch.randperm(num_layers, generator=make_generator(seed))
            layers = sorted(order[: config.num_critical].tolist())
        elif method == "lora":
            ranks = (uniform, uniform)
        is_own = method in ("adalora", "ia3", FAST)
        key = (method,) if is_own else (*ranks, *layers)
        entry = row["methods"].setdefault(
            method, {"accuracy": [], "layers": [], "train_loss": []}
        )
        if key not in done:
            lora = circuit_lora_config(base, layers, r=ranks[0], r_critical=ranks[1])
            peft_config, lr = _peft_config(config, base, method, lora, uniform)
            model = adapt(base, peft_config, seed=seed)
            count = sum(p.numel() for p in model.parameters() if p.requires_grad)
            losses = train(
                model,
                fit,
                num_steps=config.num_steps,
                batch_size=config.batch_size,
                lr=lr,
                generator=make_generator(seed),
                desc=f"{method}, seed {seed}",
                critical=_in_layers(layers),
                critical_lr=FASTER if method == FAST else 1.0,
            )
            parts = torch.tensor(losses).tensor_split(min(10, len(losses)))
            done[key] = accuracy(model, test), count, [p.mean().item() for p in parts]
        score, entry["trainable"], curve = done[key]
        entry["accuracy"].append(score)
        entry["train_loss"].append(curve)
        entry["layers"].append(layers)


def _named_methods(
    config: CompareConfig, num_layers: int
) -> Iterator[tuple[str, list[int]]]:
    """Methods with the layers that their names give, where they give them."""
    for method in config.methods:
        if method == EVERY:
            for layers in combinations(range(num_layers), config.num_critical):
                yield "_".join(map(str, ("layers", *layers))), list(layers)
        elif method == "early_layers":
            yield method, list(range(config.num_critical))
        else:
            yield method, []


def _in_layers(layers: list[int]) -> Callable[[str], bool]:
    """Whether a parameter's name is of one of these layers."""
    return lambda name: any(f".layers.{layer}." in name for layer in layers)


def _choose_layers(
    config: CompareConfig, base: nn.Module, fit: PromptPairs, seed: int
) -> dict[str, Any]:
    """Critical layers from the circuits before and after a cheap tuning."""
    names = {"circuit_lora": False, FAST: False, "circuit_lora_mean": True}
    if not set(names) & set(config.methods):
        return {"importance": []}
    lora = circuit_lora_config(base, [], r=config.probe_rank)
    probe = adapt(base, lora, seed=seed)
    train(
        probe,
        fit,
        num_steps=config.probe_steps,
        batch_size=config.batch_size,
        lr=config.lr,
        generator=make_generator(seed + 1_000),
        desc=f"probe, seed {seed}",
    )
    some = fit[: config.circuit_prompts]
    scores = [
        attribute_edges(
            model,
            some,
            steps=config.steps,
            rule=config.rule,
            batch_size=config.circuit_batch,
        )
        for model in (base, probe)
    ]
    graph = Adapter(base).graph
    found: dict[str, Any] = {}
    for name, normalise in names.items():
        importance = layer_importance(*scores, graph, normalise=normalise)
        found[name] = critical_layers(importance, config.num_critical)
        if not normalise:
            found["importance"] = importance.tolist()
    return found


def _peft_config(config, base, method, lora, uniform):
    """What a method hands to peft, and its step size."""
    from peft import AdaLoraConfig, IA3Config

    if method == "adalora":
        # Starts at the uniform rank, as large as LoRA, and prunes to half of it.
        return (
            AdaLoraConfig(
                init_r=uniform,
                target_r=max(1, uniform // 2),
                lora_alpha=2 * uniform,
                tinit=config.num_steps // 10,
                tfinal=config.num_steps // 4,
                total_step=config.num_steps,
                target_modules=lora.target_modules,
                task_type="CAUSAL_LM",
            ),
            config.lr_adalora,
        )
    if method == "ia3":
        return IA3Config(task_type="CAUSAL_LM"), config.lr_ia3
    return lora, config.lr


def _gains(config: CompareConfig, result: dict[str, Any]) -> dict[str, float]:
    """Gains in percentage points: LoRA's by task, CircuitLoRA's over LoRA."""
    found = {}
    for task in config.tasks if "lora" in config.methods else ():
        after = result[task]["methods"]["lora"]["accuracy"]
        mean = sum(after) / len(after)
        found[f"{task}_points"] = 100 * (mean - result[task]["base"])
    if not {"lora", "circuit_lora"} <= set(config.methods):
        return found
    gains = torch.tensor(
        [
            100 * (ours - plain)
            for task in config.tasks
            for ours, plain in zip(
                result[task]["methods"]["circuit_lora"]["accuracy"],
                result[task]["methods"]["lora"]["accuracy"],
                strict=True,
            )
        ],
        dtype=torch.float64,
    )
    found["gain_points"] = gains.mean().item()
    if len(gains) > 1:
        from scipy.stats import t

        half = t.ppf(0.975, len(gains) - 1) * gains.std() / len(gains) ** 0.5
        found["gain_low"] = (gains.mean() - half).item()
        found["gain_high"] = (gains.mean() + half).item()
    return found


def _load(config: CompareConfig, device: torch.device) -> tuple[nn.Module, Any]:
    """Base model and tokenizer."""
    if config.model == "small":
        model, tokenizer = load_base()
    elif config.model == "random":
        tokenizer = NumberTokenizer(LIMIT)
        model = random_neox(BaseConfig(dim=32), tokenizer.vocab_size, 0)
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(config.model)
            model = AutoModelForCausalLM.from_pretrained(
                config.model, dtype=getattr(torch, config.dtype)
            )
        except OSError as error:
            raise data.DataError(
                f"{config.model} comes from the Hugging Face hub, which could not be "
                "reached: go online, unset HF_HUB_OFFLINE, or try the run dry with "
                f"model='random' [{type(error).__name__}: {error}]"
            ) from error
    for p in model.parameters():
        p.requires_grad_(False)
    return model.eval().to(device), tokenizer


def _task_pairs(
    config: CompareConfig, task: str, tokenizer: Any, device: torch.device | str
) -> tuple[PromptPairs, PromptPairs]:
    """Training and held-out pairs of one task, in the model's own numbers."""
    if config.model in ("small", "random"):
        return small_pairs(task, count=config.count, device=device)

    def single(item) -> bool:
        return all(
            len(tokenizer(str(n), add_special_tokens=False).input_ids) == 1
            for n in (item.answer, item.corrupted_answer)
            if n is not None
        )

    items = make_items(
        task, count=config.count, accept=single, generator=make_generator(0)
    )
    sides = split_items(items, config.held_out)
    fit, test = (encode_items(side, tokenizer, end="\n")[0] for side in sides)
    return fit.to(device), test.to(device)
