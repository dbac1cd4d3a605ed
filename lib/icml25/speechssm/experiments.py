"""What `python -m icml25 run speechssm [name]` runs, the main comparison first."""

from __future__ import annotations

from dataclasses import replace

from icml25.core import Experiment

from . import counting, memory, mini

EXPERIMENTS = {
    "counting": Experiment(
        counting.run_counting,
        laptop=counting.LAPTOP,
        summary="train on 5 s of counting, speak for minutes: hybrid and Transformers",
    ),
    "checkpoints": Experiment(
        counting.run_counting,
        laptop=replace(counting.LAPTOP, save=True, generate_tokens=500),
        summary="train and write the checkpoints that ship with the package",
    ),
    "shipped": Experiment(
        counting.run_counting,
        laptop=replace(counting.LAPTOP, shipped=True),
        summary="four minutes from the shipped checkpoints (seeds 0 and 1)",
    ),
    "fsdd": Experiment(
        counting.run_counting,
        laptop=counting.FSDD,
        summary="the same comparison on recorded digits of real speakers",
    ),
    "memory": Experiment(
        memory.run_memory,
        laptop=memory.LONG,
        summary="bytes of state and tokens a second after up to 16,000 tokens",
    ),
    "mini": Experiment(
        mini.run_mini,
        laptop=mini.LAPTOP,
        paper=mini.PAPER,
        summary="a 40M hybrid on LibriSpeech with accelerate (laptop: a dry run)",
    ),
}
