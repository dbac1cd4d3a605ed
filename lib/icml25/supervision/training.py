"""Training the tiny reasoning model: imitation, value model, policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icml25.core import make_generator, progress
from icml25.supervision.reasoning import (
    KINDS,
    ChainTask,
    TinyDecoder,
    policy_gradient_loss,
    prm_reward,
    reward_to_go,
    rollout,
    value_of_prefixes,
)

__all__ = ["ReasoningConfig", "reasoning", "train_policy", "train_reference"]

_ROLLOUTS = 8192  # completions sampled at a time


@dataclass(frozen=True)
class ReasoningConfig:
    """Sizes of the tiny reasoning experiment (the paper has no experiments)."""

    p: int = 5  # modulus of the digits
    steps: int = 4  # digits to add, k
    budget: int = 10  # most tokens, T
    dim: int = 32  # width of the decoder
    num_layers: int = 2
    num_heads: int = 2
    batch_size: int = 128
    sft_steps: int = 500  # imitation of imperfect demonstrations
    sft_lr: float = 3e-3
    value_rollouts: int = 8000  # outcome labels that the value model sees
    value_steps: int = 150
    value_lr: float = 3e-3
    rl_steps: int = 50  # policy-gradient steps a reward
    rl_lr: float = 1e-3
    eval_every: int = 10
    eval_prompts: int = 1000

    @property
    def task(self) -> ChainTask:
        """The task at these sizes."""
        return ChainTask(self.p, self.steps, self.budget)

    def decoder(
        self, generator: torch.Generator, num_outputs: int | None = None
    ) -> TinyDecoder:
        """A fresh decoder on the generator's device."""
        cpu = make_generator(int(torch.randint(2**31, (), generator=generator)))
        return TinyDecoder(
            self.task,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_outputs=num_outputs,
            generator=cpu,
        ).to(generator.device)


def train_reference(
    config: ReasoningConfig, *, generator: torch.Generator
) -> tuple[TinyDecoder, TinyDecoder]:
    r"""The reference policy :math:`\mu` and its value model.

    The policy imitates imperfect demonstrations. The value model learns, from verdicts
    of the policy's own completions alone, how likely each prefix is to end well. It
    turns outcome labels into step labels.
    """
    task = config.task
    policy = config.decoder(generator)
    optimizer, schedule = _adamw(policy, config.sft_lr, config.sft_steps, warmup=50)
    for _ in progress(range(config.sft_steps), "imitation"):
        prompts = task.prompts(config.batch_size, generator=generator)
        demos = task.demos(prompts, generator=generator)
        ones = torch.ones_like(demos, dtype=torch.float32)
        _step(optimizer, policy_gradient_loss(policy, task, prompts, demos, ones))
        schedule.step()
    prompts = task.prompts(config.value_rollouts, generator=generator)
    completions = torch.cat(  # in parts: kept keys and values are the memory's peak
        [
            rollout(policy, task, part, generator=generator)
            for part in prompts.split(_ROLLOUTS)
        ]
    )
    verdict = task.verify(prompts, completions)
    value_model = config.decoder(generator, num_outputs=1)
    optimizer, schedule = _adamw(value_model, config.value_lr, config.value_steps)
    for _ in progress(range(config.value_steps), "value model"):
        rows = torch.randint(
            len(prompts),
            (config.batch_size,),
            generator=generator,
            device=generator.device,
        )
        done = completions[rows]
        logits = value_of_prefixes(value_model, task, prompts[rows], done)
        # Prefixes that still go on: the empty one, and those ending in a real token.
        open_ = (done != task.pad) & (done != task.end)
        weight = F.pad(open_, (1, 0), value=True).float()
        target = verdict[rows, None].expand_as(logits)
        loss = F.binary_cross_entropy_with_logits(logits, target, weight=weight)
        _step(optimizer, loss)
        schedule.step()
    return policy, value_model


def train_policy(
    kind: str,
    policy: TinyDecoder,
    value_model: TinyDecoder,
    config: ReasoningConfig,
    *,
    generator: torch.Generator,
) -> list[dict[str, Any]]:
    """Policy gradient from the reference, with one of the three step rewards.

    Args:
        kind: ``"outcome"``, ``"advantage"`` or ``"q"``.
        policy: the reference; trained in place.
        value_model: its value model, not trained further.
        config: sizes.
        generator: source of prompts and of sampled tokens.

    Returns:
        One dict an evaluation: ``step``, ``accuracy``, ``tokens`` and ``samples``, a
        few completions of the same prompts each time.
    """
    task = config.task
    optimizer = torch.optim.Adam(policy.parameters(), config.rl_lr)
    shown = task.prompts(4, generator=make_generator(7)).to(generator.device)
    history = [_evaluate(policy, task, config, shown, generator, step=0)]
    for step in progress(range(1, config.rl_steps + 1), f"reward: {kind}"):
        prompts = task.prompts(config.batch_size, generator=generator)
        completions = rollout(policy, task, prompts, generator=generator)
        mask = completions != task.pad
        with torch.no_grad():
            values = value_of_prefixes(value_model, task, prompts, completions)
        reward = prm_reward(
            kind, values.sigmoid(), task.verify(prompts, completions), mask
        )
        weight = _weight(kind, reward_to_go(reward), mask)
        loss = policy_gradient_loss(policy, task, prompts, completions, weight)
        _step(optimizer, loss, clip=policy.parameters())
        if step % config.eval_every == 0 or step == config.rl_steps:
            history.append(_evaluate(policy, task, config, shown, generator, step))
    return history


def reasoning(
    config: ReasoningConfig, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """One seed of the tiny reasoning model under all three step rewards.

    Returns:
        ``reference_accuracy``, ``reference_tokens``; per reward ``<kind>_accuracy`` and
        ``<kind>_tokens`` at the end; ``wait_value``, the value model's mean opinion of
        a completion that has only waited, for 0, 1, ..., T tokens; ``wait_success``,
        how often the reference then still answers right; ``curves``, the whole
        histories.
    """
    generator = make_generator(seed, device)
    reference, value_model = train_reference(config, generator=generator)
    task = config.task
    prompts = task.prompts(256, generator=generator)
    waits = prompts.new_full((len(prompts), task.budget), task.wait)
    with torch.no_grad():
        opinion = value_of_prefixes(value_model, task, prompts, waits).sigmoid()
    curves = {}
    for kind in KINDS:
        policy = config.decoder(generator)
        policy.load_state_dict(reference.state_dict())
        curves[kind] = train_policy(
            kind, policy, value_model, config, generator=generator
        )
    success = [
        task.verify(
            prompts,
            rollout(
                reference, task, prompts, generator=generator, forced=waits[:, :num]
            ),
        )
        .mean()
        .item()
        for num in range(task.budget + 1)
    ]
    first = curves["outcome"][0]
    metrics = {
        "reference_accuracy": first["accuracy"],
        "reference_tokens": first["tokens"],
    }
    for kind, history in curves.items():
        metrics[f"{kind}_accuracy"] = history[-1]["accuracy"]
        metrics[f"{kind}_tokens"] = history[-1]["tokens"]
    return {
        **metrics,
        "wait_value": opinion.mean(0).tolist(),
        "wait_success": success,
        "curves": curves,
    }


def _weight(kind: str, returns: Tensor, mask: Tensor) -> Tensor:
    """Baseline and scale of the returns; the advantage is its own baseline."""
    count = mask.sum(0).clamp(min=1)
    if kind != "advantage":
        returns = (returns - (returns * mask).sum(0) / count) * mask
    rms = ((returns**2).sum() / mask.sum()).sqrt()
    return returns / rms.clamp(min=0.1)


def _evaluate(
    policy: TinyDecoder,
    task: ChainTask,
    config: ReasoningConfig,
    shown: Tensor,
    generator: torch.Generator,
    step: int,
) -> dict[str, Any]:
    prompts = task.prompts(config.eval_prompts, generator=generator)
    completions = rollout(policy, task, prompts, generator=generator)
    samples = rollout(policy, task, shown, generator=generator)
    return {
        "step": step,
        "accuracy": task.verify(prompts, completions).mean().item(),
        "tokens": (completions != task.pad).sum(1).float().mean().item(),
        "samples": [
            {"prompt": task.text(p), "completion": task.text(c), "right": bool(v)}
            for p, c, v in zip(shown, samples, task.verify(shown, samples), strict=True)
        ],
    }


def _adamw(model: TinyDecoder, lr: float, steps: int, warmup: int = 1):
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warmup, 1, max(steps - t, 1) / (0.4 * steps))
    )
    return optimizer, schedule


def _step(optimizer: torch.optim.Optimizer, loss: Tensor, clip=None) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(clip, 1.0)
    optimizer.step()
