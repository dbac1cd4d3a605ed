"""Preference controllable reinforcement learning (chapter 5): PreCo and its peers.

Source: "Preference Controllable Reinforcement Learning with Advanced Multi-Objective
Optimization" (ICML 2025).
"""

from icml25.pcrl.envs import TabularEnv
from icml25.pcrl.experiments import EXPERIMENTS
from icml25.pcrl.metrics import score
from icml25.pcrl.min_norm import min_norm_weights
from icml25.pcrl.oracle import ray_oracle
from icml25.pcrl.policy import MetaConfig, policy_table
from icml25.pcrl.rules import rule_weights
from icml25.pcrl.train import train_meta, train_ppo, train_tables

__all__ = [
    "EXPERIMENTS",
    "MetaConfig",
    "TabularEnv",
    "min_norm_weights",
    "policy_table",
    "ray_oracle",
    "rule_weights",
    "score",
    "train_meta",
    "train_ppo",
    "train_tables",
]
