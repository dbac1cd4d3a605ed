"""SpeechSSM: minutes of speech from a language model with a constant memory.

A hybrid of gated linear recurrences and local attention (Griffin) over 25 Hz speech
tokens, its Transformer baselines, and the windowed stages before and after it.
"""

from icml25.speechssm.experiments import EXPERIMENTS
from icml25.speechssm.generate import generate, stream
from icml25.speechssm.griffin import RGLRU, GriffinConfig, GriffinLM
from icml25.speechssm.scan import linear_scan
from icml25.speechssm.transformer import TransformerLM

__all__ = [
    "EXPERIMENTS",
    "RGLRU",
    "GriffinConfig",
    "GriffinLM",
    "TransformerLM",
    "generate",
    "linear_scan",
    "stream",
]
