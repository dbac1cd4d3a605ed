"""The scan, a training step and decoding, against the library's Griffin and attention.

Other side of the scan rows: the sequential scan of `transformers`' RecurrentGemma; of
the step rows: its whole model, where "ours" is the same model with only the scan
replaced; of the decoding rows: a Transformer of equal size with a preallocated cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

import torch
from icml25.speechssm.griffin import GriffinConfig, GriffinLM, released_state
from icml25.speechssm.memory import LONG, filled_state, seconds_per_token
from icml25.speechssm.scan import linear_scan
from icml25.speechssm.transformer import TransformerLM
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRglru,
)

SIZE = {
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "hidden_size": 96,
    "lru_width": 96,
    "intermediate_size": 2 * 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "attention_window_size": 40,
    "block_types": ["recurrent", "recurrent", "attention"],
}


def best(work: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs, in seconds of this process."""
    shortest = float("inf")
    for _ in range(repeats):
        gc.collect()
        begin = time.process_time()
        work()
        shortest = min(shortest, time.process_time() - begin)
    return shortest


def scan_rows() -> list[dict]:
    """Forward and backward of the scan alone, (1, T, 256)."""
    peer = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=256))
    found = []
    for length, target, repeats in ((1_500, 0.05, 3), (6_000, 0.01, 1)):
        torch.manual_seed(0)
        a = 0.7 + 0.3 * torch.rand(1, length, 256)
        b = torch.randn(1, length, 256)
        a.requires_grad_()
        b.requires_grad_()
        never = torch.zeros(1, length, 1, dtype=torch.bool)

        def other(a=a, b=b, never=never):
            h, _ = peer._rnn_scan(b, a, never, None)
            return h, torch.autograd.grad(h.sum(), (a, b))

        ours_s = {}
        for method in ("chunk", "logstep"):

            def ours(a=a, b=b, method=method):
                h = linear_scan(a, b, method=method)
                return h, torch.autograd.grad(h.sum(), (a, b))

            _agree(f"scan, {method}", ours()[0], linear_scan(a, b, method="loop"))
            ours_s[method] = best(ours, 7)
        other_s = best(other, repeats)
        for method, seconds in ours_s.items():
            goal = target if method == "chunk" else None
            name = f"scan ({method}) forward+backward, T={length}"
            found.append(_row(name, seconds, other_s, goal, "other = sequential scan"))
    return found


def _swapped_scan(hidden_states, recurrent_gate, reset, recurrent_states, **_):
    h = linear_scan(recurrent_gate * ~reset, hidden_states, recurrent_states)
    return h.to(hidden_states.dtype), h[:, -1]


def step_rows() -> list[dict]:
    """One training step of one model: the library's, with our scan, and ours."""
    found = []
    for batch, length, target in ((16, 128, 0.8), (8, 512, 0.7), (1, 2_048, 0.5)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            peer, swapped = (
                RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SIZE)).eval()
                for _ in range(2)
            )
        swapped.load_state_dict(peer.state_dict())
        for module in swapped.modules():
            if isinstance(module, RecurrentGemmaRglru):
                module._rnn_scan = _swapped_scan
        scale = torch.tensor(96.0).sqrt().bfloat16().item()
        whole = GriffinLM(GriffinConfig(embed_scale=scale)).eval()
        whole.load_state_dict(released_state(peer.state_dict()))
        ids = torch.randint(64, (batch, length + 1))

        def logits(model, ids=ids):
            given = ids[:, :-1]
            if isinstance(model, GriffinLM):
                return model(given)[0]
            return model(given, use_cache=False).logits

        def step(model, ids=ids, logits=logits):
            loss = torch.nn.functional.cross_entropy(
                logits(model).flatten(0, 1), ids[:, 1:].flatten()
            )
            loss.backward()
            model.zero_grad()

        with torch.no_grad():
            expected = logits(peer)
            _agree("swapped", logits(swapped), expected)
            _agree("ours", logits(whole), expected)
        times = {
            name: best(partial(step, model), 2 if name == "peer" else 3)
            for name, model in (("peer", peer), ("swapped", swapped), ("ours", whole))
        }
        note = "other = the library's model"
        name = f"training step {batch} x {length}, scan swapped"
        found.append(_row(name, times["swapped"], times["peer"], target, note))
        name = f"training step {batch} x {length}, whole model"
        found.append(_row(name, times["ours"], times["peer"], None, note))
    return found


def decode_rows() -> list[dict]:
    """Time of one token for a batch, against the growing cache."""
    generator = torch.Generator().manual_seed(0)
    hybrid = GriffinLM(LONG.hybrid, generator=generator).eval()
    full = TransformerLM(LONG.full, generator=generator).eval()
    found = []
    for batch in (1, 16):
        for length in LONG.lengths:
            seconds, sizes = [], []
            for model in (hybrid, full):
                state = filled_state(model, batch, length, generator=generator)
                sizes.append(state.nbytes())
                seconds.append(seconds_per_token(model, state, 24))
                del state
            target = 0.2 if (batch, length) == (16, 4_000) else None
            note = (
                f"{batch / seconds[0]:.0f} and {batch / seconds[1]:.0f} tokens/s; "
                f"state {sizes[0] / 1e6:.3f} and {sizes[1] / 1e6:.1f} MB"
            )
            name = f"decoding a token after {length}, batch {batch}"
            found.append(_row(name, *seconds, target, note))
    return found


def rows() -> list[dict]:
    """All rows; one thread."""
    torch.set_num_threads(1)
    return [*scan_rows(), *step_rows(), *decode_rows()]


def _agree(name: str, ours: torch.Tensor, other: torch.Tensor) -> None:
    gap = (ours - other).abs().max().item()
    if gap > 1e-4:
        raise AssertionError(f"{name}: the two sides differ by {gap:.1e}")


def _row(name: str, ours: float, other: float, target: float | None, note: str) -> dict:
    return {
        "name": f"speechssm: {name}",
        "ours_s": ours,
        "other_s": other,
        "ratio": ours / other,
        "target": target,
        "note": note,
    }


if __name__ == "__main__":
    for row in rows():
        print(
            f"{row['name']:<62} {row['ours_s']:9.4f} {row['other_s']:9.4f} "
            f"{row['ratio']:7.4f} (<= {row['target']}) {row['note']}"
        )
