"""Circuits: which edges of a language model do a task; what fine-tuning changes."""

from .attribution import attribute_edges
from .experiments import EXPERIMENTS
from .graph import CircuitGraph
from .intervene import faithfulness, patch_effects, run_circuit
from .lora import circuit_lora_config, layer_importance
from .pairs import PromptPairs

__all__ = [
    "EXPERIMENTS",
    "CircuitGraph",
    "PromptPairs",
    "attribute_edges",
    "circuit_lora_config",
    "faithfulness",
    "layer_importance",
    "patch_effects",
    "run_circuit",
]
