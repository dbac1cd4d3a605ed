"""The chapter's experiments (the paper itself has none), at both scales."""

from icml25.core import Experiment
from icml25.supervision.bounds import (
    LemmaConfig,
    PreferencesConfig,
    SearchConfig,
    lemma,
    preferences,
    search_worst_case,
)
from icml25.supervision.labels import LabelsConfig, RewardsConfig, labels, rewards
from icml25.supervision.training import ReasoningConfig, reasoning

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = {
    "lemma": Experiment(
        lemma,
        laptop=LemmaConfig(),
        paper=LemmaConfig(
            num_mdps=65_536,
            chunk=4096,
            num_leak=4,
            states=8,
            actions=4,
            settings=tuple((h, "stochastic") for h in (2, 4, 8, 16, 32)),
        ),
        summary="the lemma against its exact worst case",
    ),
    "lemma-large": Experiment(
        lemma,
        laptop=LemmaConfig(
            num_mdps=2048,
            chunk=256,
            num_leak=4,
            states=8,
            actions=4,
            settings=tuple((h, "stochastic") for h in (2, 4, 8, 16, 32)),
        ),
        summary="the same at the paper scale's sizes, with fewer processes",
    ),
    "search": Experiment(
        search_worst_case,
        laptop=SearchConfig(),
        summary="gradient ascent towards a violation of the lemma",
    ),
    "labels": Experiment(
        labels,
        laptop=LabelsConfig(),
        paper=LabelsConfig(
            horizons=(4, 8, 16, 32, 64),
            sizes=(800, 3200, 12_800, 51_200, 204_800),
            num_mdps=512,
            chunk=16,
        ),
        summary="step labels against outcomes",
    ),
    "rewards": Experiment(
        rewards,
        laptop=RewardsConfig(),
        paper=RewardsConfig(num_mdps=100_000),
        summary="advantage against Q as a step reward",
    ),
    "preferences": Experiment(
        preferences,
        laptop=PreferencesConfig(),
        summary="the preference corollary",
    ),
    "reasoning": Experiment(
        reasoning,
        laptop=ReasoningConfig(),
        paper=ReasoningConfig(
            p=11,
            steps=8,
            budget=24,
            dim=128,
            num_layers=4,
            num_heads=4,
            batch_size=256,
            sft_steps=2000,
            value_rollouts=50_000,
            value_steps=1000,
            rl_steps=500,
            eval_every=25,
        ),
        summary="a tiny reasoning model under three step rewards",
    ),
    "reasoning-long": Experiment(
        reasoning,
        laptop=ReasoningConfig(rl_steps=250, eval_every=25),
        summary="the same with five times the policy-gradient steps",
    ),
    "reasoning-eight": Experiment(
        reasoning,
        laptop=ReasoningConfig(
            p=11,
            steps=8,
            budget=24,
            dim=64,
            sft_steps=1000,
            value_steps=250,
            rl_steps=80,
            eval_every=20,
        ),
        summary="paper scale's task (eight digits modulo 11) with a smaller decoder",
    ),
}
