"""Do we need to verify step by step? Process against outcome supervision."""

from icml25.supervision.estimation import (
    fit_outcome_reward,
    fit_process_reward,
    importance_estimate,
    soft_optimal_policy,
)
from icml25.supervision.instances import (
    bandit_chain,
    filler_mdp,
    hedge_mdp,
    random_mdp,
    random_policy,
)
from icml25.supervision.mdp import (
    TabularMDP,
    Trajectories,
    advantage,
    evaluate,
    occupancy,
    plan,
    sample_trajectories,
)
from icml25.supervision.transfer import (
    Coverage,
    coverage,
    mean_transfer,
    null_leak,
    orthogonal_terms,
    second_moment,
    trajectory_coverage,
    worst_case_transfer,
)
