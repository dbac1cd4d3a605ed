"""What `python -m icml25 run golore [name]` runs, the paper's own run first."""

from __future__ import annotations

from icml25.core import Experiment

from . import digits, memory, pretrain, stall

EXPERIMENTS = {
    "pretrain": Experiment(
        pretrain.run_pretrain,
        laptop=pretrain.LAPTOP,
        paper=pretrain.PAPER,
        summary="pre-train a Llama: tiny on text, or the paper's 60M on C4",
    ),
    "stall": Experiment(
        stall.run_stall,
        laptop=stall.LAPTOP,
        paper=stall.PAPER,
        summary="the counterexample: GaLore stalls, GoLore converges",
    ),
    "sweeps": Experiment(
        stall.run_sweeps,
        laptop=stall.LAPTOP,
        paper=stall.PAPER,
        summary="the counterexample against refresh batch, rank and re-projection",
    ),
    "bound": Experiment(
        stall.check_bound,
        laptop=stall.BoundConfig(),
        summary="the convergence theorem, checked on the counterexample",
    ),
    "sketches": Experiment(
        stall.compare_sketches,
        laptop=stall.SketchConfig(),
        summary="coordinate and Hadamard subspaces in GoLore's place",
    ),
    "digits": Experiment(
        digits.run_digits,
        laptop=digits.LAPTOP,
        paper=digits.PAPER,
        summary="the same failure on digits with unpredictable side outputs",
    ),
    "memory": Experiment(
        memory.run_memory,
        laptop=memory.MemoryConfig(),
        summary="bytes of optimiser state for Llama 60M, 130M and 7B",
    ),
}
