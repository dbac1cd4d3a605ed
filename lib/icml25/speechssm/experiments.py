"""What `python -m icml25 run speechssm [name]` runs, the main comparison first."""

from __future__ import annotations

from dataclasses import replace

from icml25.core import Experiment

from . import counting, digits, joins, longform, memory, mini, persistence

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
    "windows": Experiment(
        joins.run_windows,
        laptop=joins.LAPTOP_WINDOWS,
        summary="tokens at the joins of windows; the cue that speech is about to end",
    ),
    "windows-librispeech": Experiment(
        joins.run_windows,
        laptop=joins.RECORDED_WINDOWS,
        summary="the same on recorded readers",
    ),
    "voices": Experiment(
        persistence.run_voices,
        laptop=persistence.LAPTOP_VOICES,
        summary="the voice over a long reading, decoded with and without a prompt",
    ),
    "voices-librispeech": Experiment(
        persistence.run_voices,
        laptop=persistence.RECORDED_VOICES,
        summary="the same on recorded readers",
    ),
    "voices-shipped": Experiment(
        persistence.run_voices,
        laptop=persistence.SHIPPED_VOICES,
        summary="train and write the decoders that ship with the package",
    ),
    "digits": Experiment(
        digits.run_digits,
        laptop=digits.LAPTOP_DIGITS,
        summary="digit errors from tokens to sound and back",
    ),
    "longform": Experiment(
        longform.run_longform,
        laptop=longform.LAPTOP_LONGFORM,
        summary="the long-form measures over time on four kinds of continuation",
    ),
    "longform-librispeech": Experiment(
        longform.run_longform,
        laptop=longform.RECORDED_LONGFORM,
        summary="the same on recorded readers, with judges of voice and naturalness",
    ),
    "longform-transcripts": Experiment(
        longform.run_longform,
        laptop=longform.TRANSCRIBED_LONGFORM,
        summary="recorded readers again, judged by their transcripts",
    ),
}
