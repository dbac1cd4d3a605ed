"""A tiny reasoning model: running sums, a verifier, and three ways to reward steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "ChainTask",
    "TinyDecoder",
    "policy_gradient_loss",
    "prm_reward",
    "reward_to_go",
    "rollout",
    "value_of_prefixes",
]

KINDS = ("outcome", "advantage", "q")


@dataclass(frozen=True)
class ChainTask:
    """Write the running sums of some digits, then stop.

    The prompt is ``steps`` digits and SEP. A completion is right if it stops with END
    within ``budget`` tokens and its last digit is the sum of the prompt modulo ``p``.
    WAIT may stand anywhere and does nothing.

    Attributes:
        p: modulus; the digits are 0 to p - 1.
        steps: digits in a prompt (k).
        budget: most tokens in a completion (T), more than ``steps``.

    Raises:
        ValueError: ``p < 2``, ``steps < 1`` or a budget that fits no right completion.
    """

    p: int = 5
    steps: int = 4
    budget: int = 10

    def __post_init__(self) -> None:
        if self.p < 2 or self.steps < 1 or self.budget <= self.steps:
            raise ValueError(
                f"p={self.p}, steps={self.steps}, budget={self.budget}: need p >= 2, "
                "steps >= 1 and budget > steps"
            )

    @property
    def wait(self) -> int:
        """Token that does nothing."""
        return self.p

    @property
    def end(self) -> int:
        """Token that stops the completion."""
        return self.p + 1

    @property
    def sep(self) -> int:
        """Token that ends the prompt."""
        return self.p + 2

    @property
    def pad(self) -> int:
        """What follows END."""
        return self.p + 3

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.p + 4

    @property
    def context(self) -> int:
        """Tokens of a prompt and a full completion."""
        return self.steps + 1 + self.budget

    def prompts(self, num: int, *, generator: torch.Generator) -> Tensor:
        """Random prompts, (num, steps + 1)."""
        digits = torch.randint(
            self.p, (num, self.steps), generator=generator, device=generator.device
        )
        return F.pad(digits, (0, 1), value=self.sep)

    def demos(
        self,
        prompts: Tensor,
        *,
        generator: torch.Generator,
        wait: float = 0.15,
        slip: float = 0.15,
    ) -> Tensor:
        """Imperfect demonstrations, (n, budget).

        Each token is WAIT with probability ``wait``, else the next sum; a sum is
        replaced by a uniform digit with probability ``slip``, and the chain goes on
        from what was written. END follows the last sum.
        """
        num, device = len(prompts), prompts.device
        digits = F.pad(prompts[:, : self.steps], (0, 1))
        shape = (self.budget, num)
        waits = torch.rand(shape, generator=generator, device=device) < wait
        slips = torch.rand(shape, generator=generator, device=device) < slip
        noise = torch.randint(self.p, shape, generator=generator, device=device)
        written = torch.zeros(num, dtype=torch.long, device=device)
        total = torch.zeros_like(written)
        ended = torch.zeros_like(written, dtype=torch.bool)
        tokens = []
        for t in range(self.budget):
            step = digits.gather(1, written[:, None])[:, 0]
            digit = torch.where(slips[t], noise[t], (total + step) % self.p)
            token = torch.where(written < self.steps, digit, self.end)
            token = token.masked_fill(waits[t], self.wait)
            token = token.masked_fill(ended, self.pad)
            is_sum = token < self.p
            total = torch.where(is_sum, token, total)
            written = written + is_sum
            ended = ended | (token == self.end)
            tokens.append(token)
        return torch.stack(tokens, 1)

    def verify(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """The verdict, 1.0 or 0.0, (n,): outcome supervision's only label.

        A completion that never ends, or that holds no digit, gets 0. What stands after
        END does not count.

        Raises:
            ValueError: shapes other than (n, steps + 1) and (n, budget).
        """
        num = len(prompts)
        want = ((num, self.steps + 1), (num, self.budget))
        if (tuple(prompts.shape), tuple(completions.shape)) != want:
            raise ValueError(
                f"prompts must be (n, {self.steps + 1}) and completions "
                f"(n, {self.budget}); got {tuple(prompts.shape)} and "
                f"{tuple(completions.shape)}"
            )
        is_open = (completions == self.end).cumsum(1) == 0
        is_digit = (completions < self.p) & is_open
        place = torch.arange(1, completions.shape[1] + 1, device=completions.device)
        last = (is_digit * place).amax(1)
        answer = completions.gather(1, (last - 1).clamp(min=0)[:, None])[:, 0]
        right = answer == prompts[:, : self.steps].sum(1) % self.p
        ended = (completions == self.end).any(1)
        return (right & ended & (last > 0)).float()

    def tags(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """Count tags: i for prompt digit i, else the sums written so far."""
        order = torch.arange(1, self.steps + 2, device=prompts.device)
        order = (order % (self.steps + 1)).expand(len(prompts), -1)  # SEP gets 0
        return torch.cat([order, (completions < self.p).cumsum(1)], 1)

    def text(self, completion: Tensor) -> str:
        """A completion in words."""
        names = {self.wait: "WAIT", self.end: "END", self.sep: "SEP"}
        words = [names.get(t, str(t)) for t in completion.tolist() if t != self.pad]
        return " ".join(words)


class _Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        # (B, L, 3 dim) -> three of (B, heads, L, dim / heads)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        is_causal = True
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
                is_causal = False  # one new token sees all before it
            cache[:] = [k, v]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))  # -> (B, L, dim)
        return x + self.mlp(self.norm2(x))


class TinyDecoder(nn.Module):
    """A decoder-only transformer with token, position and count embeddings.

    The count tag tells a position how many sums have been written; without it so small
    a model cannot line up its digits when WAITs shift them.

    Args:
        task: gives the vocabulary and the context length.
        dim: width.
        num_layers: blocks.
        num_heads: attention heads; divides ``dim``.
        num_outputs: 1 for a value model; default: one logit a token.
        generator: source of the initial weights.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``.
    """

    def __init__(
        self,
        task: ChainTask,
        *,
        dim: int = 32,
        num_layers: int = 2,
        num_heads: int = 2,
        num_outputs: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide dim={dim}")
        self.token = nn.Embedding(task.vocabulary, dim)
        self.position = nn.Embedding(task.context, dim)
        self.count = nn.Embedding(task.budget + 1, dim)
        self.blocks = nn.ModuleList(_Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs or task.vocabulary)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=dim**-0.5, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self, tokens: Tensor, tags: Tensor, cache: list[list[Tensor]] | None = None
    ) -> Tensor:
        """Outputs at every position, (B, L, num_outputs).

        Args:
            tokens: (B, L).
            tags: count tags, (B, L).
            cache: one list a block, empty at first; keys and values of the tokens
                before. Then ``tokens`` holds one new token.
        """
        seen = cache[0][0].shape[2] if cache and cache[0] else 0
        place = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(place) + self.count(tags)
        for number, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[number])
        return self.head(self.norm(x))


@torch.no_grad()
def rollout(
    policy: TinyDecoder,
    task: ChainTask,
    prompts: Tensor,
    *,
    generator: torch.Generator,
    forced: Tensor | None = None,
) -> Tensor:
    """Sample a completion of every prompt, (n, budget); PAD follows END.

    Args:
        policy: what writes the completions.
        task: gives the tokens and the budget.
        prompts: (n, steps + 1).
        generator: source of randomness, on the policy's device.
        forced: the first tokens of every completion, (n, at most budget); the policy
            goes on from them.

    Raises:
        ValueError: ``forced`` has another number of rows or exceeds the budget.

    Notes:
        Keys and values are kept, so a token costs one position, not a whole sequence.
    """
    cache: list[list[Tensor]] = [[] for _ in policy.blocks]
    num = len(prompts)
    if forced is None:
        forced = prompts.new_empty(num, 0)
    if forced.dim() != 2 or len(forced) != num or forced.shape[1] > task.budget:
        raise ValueError(
            f"forced must be ({num}, at most {task.budget}), got {tuple(forced.shape)}"
        )
    tokens, tags = prompts, task.tags(prompts, prompts[:, :0])
    written = prompts.new_zeros(num)
    ended = torch.zeros(num, dtype=torch.bool, device=prompts.device)
    completion = []
    for t in range(task.budget):
        logits = policy(tokens, tags, cache)[:, -1, : task.sep]  # no SEP, no PAD
        if t < forced.shape[1]:
            token = forced[:, t]
        else:
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        token = token.masked_fill(ended, task.pad)
        completion.append(token)
        written = written + (token < task.p)
        ended = ended | (token == task.end)
        tokens, tags = token[:, None], written[:, None]
    return torch.stack(completion, 1)


def value_of_prefixes(
    value_model: TinyDecoder, task: ChainTask, prompts: Tensor, completions: Tensor
) -> Tensor:
    """Logits of success after 0, 1, ..., T tokens, (n, T + 1)."""
    tokens = torch.cat([prompts, completions], 1)
    tags = task.tags(prompts, completions)
    return value_model(tokens, tags)[:, task.steps :, 0]


def prm_reward(kind: str, values: Tensor, verdict: Tensor, mask: Tensor) -> Tensor:
    r"""Step rewards from outcome labels (``eq-supervision-prm``).

    * ``"outcome"``: 0 at every step, the verdict at the last.
    * ``"advantage"``: :math:`V(s_{t+1}) - V(s_t)`.
    * ``"q"``: :math:`V(s_{t+1})`.

    After the last token the value *is* the verdict, whatever a value model says.

    Args:
        kind: one of the three.
        values: success probability after 0, ..., T tokens, (n, T + 1).
        verdict: (n,)
        mask: true on tokens up to and with END, (n, T), one run of trues from the left.

    Returns:
        (n, T), zero where ``mask`` is false.

    Raises:
        ValueError: unknown ``kind``, shapes that disagree.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: allowed are {', '.join(KINDS)}")
    num, length = mask.shape
    if values.shape != (num, length + 1) or verdict.shape != (num,):
        raise ValueError(
            f"mask is {(num, length)}, so values must be {(num, length + 1)} and "
            f"verdict {(num,)}; got {tuple(values.shape)}, {tuple(verdict.shape)}"
        )
    is_last = mask & ~F.pad(mask[:, 1:], (0, 1))
    if kind == "outcome":
        return is_last * verdict[:, None]
    after = torch.where(is_last, verdict[:, None], values[:, 1:])
    reward = after if kind == "q" else after - values[:, :-1]
    return reward.masked_fill(~mask, 0)


def reward_to_go(reward: Tensor) -> Tensor:
    """Sum of the rewards from each step on, (n, T) -> (n, T)."""
    return reward.flip(1).cumsum(1).flip(1)


def policy_gradient_loss(
    policy: TinyDecoder,
    task: ChainTask,
    prompts: Tensor,
    completions: Tensor,
    weight: Tensor,
) -> Tensor:
    """Minus the mean over real tokens of weight times log-probability; a scalar.

    PAD positions carry neither reward nor gradient.
    """
    tokens = torch.cat([prompts, completions], 1)
    tags = task.tags(prompts, completions)
    # Position t predicts token t + 1; the last position predicts nothing.
    logits = policy(tokens[:, :-1], tags[:, :-1])[:, task.steps :, : task.sep]
    mask = completions != task.pad
    picked = completions.masked_fill(~mask, 0)
    log_prob = -F.cross_entropy(logits.transpose(1, 2), picked, reduction="none")
    return -(log_prob * weight * mask).sum() / mask.sum()
