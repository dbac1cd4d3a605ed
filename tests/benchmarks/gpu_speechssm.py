"""SpeechSSM on a CUDA device: the scan, a compiled training step, a graphed decoder.

    python tests/benchmarks/gpu_speechssm.py

About three minutes; says so and stops where there is no CUDA device. Prints one JSON
object: milliseconds of the scan by method and length, of a training step of the `mini`
size (plain and compiled), and of one decoded token (eager, in a CUDA graph, and with
the Transformer's growing cache), each after a check against the reference.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from icml25.speechssm.griffin import MINI, GriffinLM
from icml25.speechssm.layers import LMState
from icml25.speechssm.memory import filled_state
from icml25.speechssm.scan import linear_scan
from icml25.speechssm.transformer import TransformerConfig, TransformerLM


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time of some runs after two to warm up."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    spent = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(end))
    return statistics.median(spent)


def scan_rows() -> list[dict]:
    """Forward and backward, (8, T, 1024), against a float64 scan on the CPU."""
    found = []
    for length in (750, 6_000):
        torch.manual_seed(0)
        a = 0.7 + 0.3 * torch.rand(8, length, 1024, device="cuda")
        b = torch.randn_like(a)
        few = linear_scan(a[:1, :, :8].double().cpu(), b[:1, :, :8].double().cpu())
        a.requires_grad_()
        b.requires_grad_()
        for name, options in (
            ("chunk", {"method": "chunk"}),
            ("chunk of 64", {"method": "chunk", "chunk": 64}),
            ("logstep", {"method": "logstep"}),
        ):

            def work(a=a, b=b, options=options):
                h = linear_scan(a, b, **options)
                torch.autograd.grad(h.sum(), (a, b))
                return h

            gap = (work()[:1, :, :8].double().cpu() - few).abs().max().item()
            if gap > 1e-4:
                raise AssertionError(f"{name}, T={length}: off by {gap:.1e}")
            found.append({"scan": name, "T": length, "ms": milliseconds(work)})
    return found


def training_rows() -> list[dict]:
    """One step of the `mini` size in bfloat16 autocast, 16 x 750 tokens."""
    found = []
    ids = torch.randint(MINI.vocab_size, (16, 751), device="cuda")
    model = GriffinLM(MINI).cuda()
    for name in ("plain", "compiled"):
        run = torch.compile(model) if name == "compiled" else model

        def work(run=run):
            with torch.autocast("cuda", torch.bfloat16):
                logits, _ = run(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            model.zero_grad()

        found.append({"step": name, "ms": milliseconds(work, repeats=10)})
    return found


class GraphedDecoder:
    """One greedy decoding step in a CUDA graph: the state's size never changes."""

    def __init__(self, model: GriffinLM, state: LMState) -> None:
        self.state = state.select(torch.arange(len(state.age), device="cuda"))
        self.token = torch.zeros(
            len(state.age), 1, dtype=torch.int64, device=state.age.device
        )
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(self.token, self.state)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            logits, after = model(self.token, self.state)
            for old, new in zip(self.state.layers, after.layers, strict=True):
                for name in old:
                    old[name].copy_(new[name])
            self.state.age.copy_(after.age)
            self.token.copy_(logits[:, -1:].argmax(-1))

    def step(self) -> None:
        self.graph.replay()


@torch.no_grad()
def decoding_rows() -> list[dict]:
    """One token for a batch of 64 after 1,000 and 16,000 tokens."""
    found = []
    hybrid = GriffinLM(MINI).cuda().eval()
    full = (
        TransformerLM(
            TransformerConfig(
                vocab_size=1024, width=512, num_layers=12, num_heads=8, mlp_width=1536
            )
        )
        .cuda()
        .eval()
    )
    for length in (1_000, 16_000):
        state = filled_state(hybrid, 64, length)
        graphed = GraphedDecoder(hybrid, state)
        token, eager = torch.zeros_like(graphed.token), state
        for _ in range(5):
            logits, eager = hybrid(token, eager)
            token = logits[:, -1:].argmax(-1)
            graphed.step()
        gap = (graphed.state.layers[0]["h"] - eager.layers[0]["h"]).abs().max().item()
        if not torch.equal(graphed.token, token) or gap > 1e-3:
            raise AssertionError(f"the graph decodes other tokens, states off {gap}")

        def eager_step(state=state):
            hybrid(torch.zeros_like(state.age).unsqueeze(1), state)

        found += [
            {"decode": "hybrid, graph", "after": length, "batch": 64}
            | {"ms": milliseconds(graphed.step), "state_mb": state.nbytes() / 1e6},
            {"decode": "hybrid, eager", "after": length, "batch": 64}
            | {"ms": milliseconds(eager_step), "state_mb": state.nbytes() / 1e6},
        ]
        cache = [filled_state(full, 64, length)]
        size = cache[0].nbytes() / 1e6

        def grow(cache=cache):
            token = torch.zeros_like(cache[0].age).unsqueeze(1)
            _, cache[0] = full(token, cache[0])

        found.append(
            {"decode": "Transformer", "after": length, "batch": 64}
            | {"ms": milliseconds(grow), "state_mb": size}
        )
        del cache, grow
    return found


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return 0
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "scan": scan_rows(),
        "training": training_rows(),
        "decoding": decoding_rows(),
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
