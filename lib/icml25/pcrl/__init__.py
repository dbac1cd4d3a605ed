"""Preference controllable reinforcement learning (chapter 5): PreCo and its peers.

Source: "Preference Controllable Reinforcement Learning with Advanced Multi-Objective
Optimization" (ICML 2025).
"""

from icml25.pcrl.envs import Solution, TabularEnv, ray_oracle
from icml25.pcrl.experiments import EXPERIMENTS
from icml25.pcrl.metrics import hypervolume, score, simplex_grid
from icml25.pcrl.moo import RULES, min_norm_weights, rule_weights, similarity_semigrad
from icml25.pcrl.train import (
    MetaConfig,
    MetaPolicy,
    policy_table,
    train_meta,
    train_ppo,
    train_tables,
)

__all__ = [
    "EXPERIMENTS",
    "RULES",
    "MetaConfig",
    "MetaPolicy",
    "Solution",
    "TabularEnv",
    "hypervolume",
    "min_norm_weights",
    "policy_table",
    "ray_oracle",
    "rule_weights",
    "score",
    "similarity_semigrad",
    "simplex_grid",
    "train_meta",
    "train_ppo",
    "train_tables",
]
