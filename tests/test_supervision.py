"""Process and outcome supervision: oracles, golden values, properties, bad input.

The golden arrays come from an independent implementation; see
``golden/supervision/README.md``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.bench_supervision import cholesky_power
from icml25 import supervision as sv
from icml25.supervision.bounds import (
    LemmaConfig,
    PreferencesConfig,
    SearchConfig,
    lemma,
    preferences,
    search_worst_case,
)
from icml25.supervision.estimation import (
    asymptotic_variance,
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
from icml25.supervision.labels import LabelsConfig, RewardsConfig, labels, rewards
from icml25.supervision.mdp import (
    Trajectories,
    advantage,
    expected_return,
    occupancy,
    sample_trajectories,
)
from icml25.supervision.reasoning import (
    ChainTask,
    TinyDecoder,
    policy_gradient_loss,
    reward_to_go,
    rollout,
)
from icml25.supervision.training import ReasoningConfig, _weight, reasoning
from icml25.supervision.transfer import (
    null_leak,
    orthogonal_terms,
    second_moment,
    trajectory_coverage,
)
from icml25.supervision.whitening import _WhitenedMoment

GOLDEN = Path(__file__).parent / "golden" / "supervision"
F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def instance(seed=0, batch=20, horizon=4, states=3, actions=2, **options):
    """A random process, its best policy and a data policy of full support."""
    g = generator(seed)
    mdp = random_mdp(batch, horizon, states, actions, generator=g, **options)
    off = random_policy(mdp, generator=g)
    f = torch.randn(mdp.shape, generator=g, dtype=F64)
    return mdp, sv.plan(mdp)[0], off, f


def moments(mdp, policy, f):
    """Mean and mean square of X by the dense matrix."""
    flat = f.flatten(1)
    square = (flat * (second_moment(mdp, policy) @ flat[..., None])[..., 0]).sum(-1)
    return (occupancy(mdp, policy) * f).flatten(1).sum(-1), square


def enumerate_paths(mdp):
    """Every trajectory of a process as cells (number, H); brute force."""
    _, horizon, states, actions = mdp.shape
    cells = range(states * actions)
    return torch.tensor(list(itertools.product(cells, repeat=horizon)))


def path_probability(mdp, paths, action_prob):
    """(number,): probability of each path of the first process.

    ``action_prob(h, paths)`` may look at the whole past of a path.
    """
    actions = mdp.shape[3]
    s, a = paths // actions, paths % actions
    prob = mdp.start[0, s[:, 0]]
    for h in range(mdp.shape[1]):
        prob = prob * action_prob(h, paths)
        if h < mdp.shape[1] - 1:
            prob = prob * mdp.transition[0, h, s[:, h], a[:, h], s[:, h + 1]]
    return prob


def markov(policy):
    flat = policy[0].flatten(1)
    return lambda h, paths: flat[h, paths[:, h]]


def features(mdp, paths):
    """One-hot visited cells of each path, (number, HSA)."""
    _, horizon, states, actions = mdp.shape
    hot = torch.nn.functional.one_hot(paths, states * actions)
    return hot.flatten(1).to(F64)


# ---------------------------------------------------------------- golden values


@pytest.fixture(params=[0, 1, 2])
def golden(request):
    with np.load(GOLDEN / f"mdp_{request.param}.npz") as file:
        z = {name: torch.from_numpy(file[name]) for name in file.files}
    return sv.TabularMDP(z["rho"], z["P"], z["r"]), z


def close(got, want, tolerance=1e-8):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-10)


def test_occupancies_and_coverage_match_the_reference(golden):
    mdp, z = golden
    close(occupancy(mdp, z["pi"]), z["occ_pi"])
    close(occupancy(mdp, z["pi_off"]), z["occ_off"])
    cover = sv.coverage(mdp, z["pi"], z["pi_off"])
    close(cover.ratio, z["C_h"])
    close(cover.chi2, z["chi2_h"])
    close(trajectory_coverage(mdp, z["pi"], z["pi_off"]).exp(), z["C_traj"])


@pytest.mark.parametrize("method", ["krylov", "eigh"])
def test_worst_cases_match_the_reference(golden, method):
    mdp, z = golden
    found = sv.worst_case_transfer(mdp, z["pi"], z["pi_off"], method=method)
    close(found, z["lambda_max"], 1e-6)
    close(sv.mean_transfer(mdp, z["pi"], z["pi_off"]), z["mean_sup"], 1e-6)


def test_values_and_plans_match_the_reference(golden):
    mdp, z = golden
    q, v = sv.evaluate(mdp, z["pi_off"])
    close(q, z["Q_off"])
    close(v, z["V_off"])
    close(expected_return(mdp, sv.plan(mdp)[0]), z["J_opt"])
    close(expected_return(mdp, z["pi"]), z["J_pi"])
    close(expected_return(mdp, z["pi_off"]), z["J_off"])
    a = advantage(mdp, z["pi_off"])
    close(expected_return(mdp, sv.plan(mdp, a)[0]), z["J_of_argmax_sum_A_off"])
    close(expected_return(mdp, sv.plan(mdp, q)[0]), z["J_of_argmax_sum_Q_off"])
    close(expected_return(mdp, z["pi"], a), z["sum_A_off_under_pi"])


def test_moments_and_orthogonal_terms_match_the_reference(golden):
    mdp, z = golden
    for name, policy in (("off", z["pi_off"]), ("pi", z["pi"])):
        mean, square = moments(mdp, policy, z["f"])
        close(mean, z[f"E_{name}_X"])
        close(square, z[f"E_{name}_X2"])
    first, rest = orthogonal_terms(mdp, z["pi_off"], z["f"])
    close(first, z["E_off_V1_sq"])
    close(rest, z["E_off_delta2_h"])


# ---------------------------------------------------------------------- oracles


def test_second_moment_matches_enumeration_of_all_paths():
    mdp, _, off, _ = instance(batch=1, horizon=3, states=2)
    paths = enumerate_paths(mdp)
    prob = path_probability(mdp, paths, markov(off))
    phi = features(mdp, paths)
    close(prob.sum(), torch.tensor(1.0, dtype=F64))
    close(second_moment(mdp, off)[0], phi.T @ (prob[:, None] * phi))


def test_trajectory_coverage_matches_enumeration_of_all_paths():
    mdp, _, off, _ = instance(batch=1, horizon=4, states=2, seed=3)
    target = random_policy(mdp, generator=generator(9))
    paths = enumerate_paths(mdp)
    p, p_off = (path_probability(mdp, paths, markov(x)) for x in (target, off))
    possible = p > 0
    want = (p[possible] / p_off[possible]).max()
    close(trajectory_coverage(mdp, target, off)[0].exp(), want)


@pytest.mark.parametrize("horizon", [1, 2, 5, 12, 32])
@pytest.mark.parametrize("p", [0.5, 0.1, 0.02])
def test_bandit_chain_attains_its_closed_form(horizon, p):
    mdp, target, off = bandit_chain(horizon, p)
    want = torch.tensor([1 + horizon * (1 / p - 1)], dtype=F64)
    for method in ("krylov", "eigh"):
        close(sv.worst_case_transfer(mdp, target, off, method=method), want, 1e-10)
    close(sv.mean_transfer(mdp, target, off), want, 1e-10)
    log_ratio = trajectory_coverage(mdp, target, off)
    close(log_ratio, -horizon * torch.tensor([p], dtype=F64).log(), 1e-10)


@pytest.mark.parametrize(("y", "q", "horizon"), [(0.55, 0.01, 2), (0.175, 0.01, 8)])
def test_hedge_closed_form(y, q, horizon):
    mdp, mu = hedge_mdp(horizon, y, q)
    by_q, best = sv.plan(mdp, sv.evaluate(mdp, mu)[0])
    want = [(1 - q**horizon) / (1 - q), horizon * y]  # risky, safe
    close(best[0, 0, 0], torch.tensor(want, dtype=F64), 1e-10)
    assert y > want[0] / horizon, "Q must fail here"
    close(expected_return(mdp, by_q), torch.tensor([y], dtype=F64), 1e-12)
    by_a, _ = sv.plan(mdp, advantage(mdp, mu))
    close(expected_return(mdp, by_a), torch.tensor([1.0], dtype=F64), 1e-12)


def test_filler_plans_have_the_known_sums_and_lengths():
    mdp, mu = filler_mdp()
    q, v = sv.evaluate(mdp, mu)
    assert v[0, 0, 0].item() == pytest.approx(0.5988658402613922, abs=1e-12)
    lengths, sums = {}, {}
    for name, reward in (("a", q - v[..., None]), ("q", q)):
        plan, best = sv.plan(mdp, reward)
        sums[name] = best[0, 0, 0].max().item()
        state, taken = 0, []
        for h in range(mdp.shape[1]):
            action = int(plan[0, h, state].argmax())
            taken.append(action)
            if action == 2:
                break
            state = int(mdp.transition[0, h, state, action].argmax())
        lengths[name] = taken
    assert sums["a"] == pytest.approx(0.4011341597386078, abs=1e-12)
    assert sums["q"] == pytest.approx(9.15872255249766, abs=1e-12)
    assert lengths["a"] == [0, 0, 0, 0, 2]
    assert lengths["q"].count(3) == 5 and len(lengths["q"]) == 10


def test_all_paths_to_the_worst_case_agree():
    for seed, transitions in enumerate(["stochastic", "deterministic"] * 2):
        mdp, target, off, _ = instance(
            seed, horizon=6, states=4, actions=3, transitions=transitions
        )
        fast = sv.worst_case_transfer(mdp, target, off)
        dense = sv.worst_case_transfer(mdp, target, off, method="eigh")
        close(fast, dense, 1e-6)
        if transitions == "stochastic":
            # An independent route: the null space removed by hand, no eigenvectors.
            third = cholesky_power(mdp, target, off)
            close(third, fast, 1e-6)
            close(third, dense, 1e-6)


@pytest.mark.parametrize("horizon", [1, 3])
def test_cholesky_path_needs_full_support(horizon):
    mdp, target, off, _ = instance(2, horizon=horizon, transitions="deterministic")
    if horizon == 1:  # nothing is hidden, whatever the transitions
        third = cholesky_power(mdp, target, off)
        close(third, sv.worst_case_transfer(mdp, target, off), 1e-6)
    else:
        with pytest.raises(torch.linalg.LinAlgError):
            cholesky_power(mdp, target, off)


def test_return_is_the_reward_summed_over_the_occupancies():
    mdp, _, off, f = instance(6)
    close(expected_return(mdp, off), moments(mdp, off, mdp.reward)[0], 1e-12)
    close(expected_return(mdp, off, f), moments(mdp, off, f)[0], 1e-12)


def test_whitened_operator_is_symmetric():
    mdp, target, off, _ = instance(batch=3)
    d, d_off = occupancy(mdp, target), occupancy(mdp, off)
    operator = _WhitenedMoment(mdp, target, d, d_off)
    size = operator.start().shape[1]
    x, y = torch.randn(2, 3, size, generator=generator(), dtype=F64)
    close((operator(x) * y).sum(-1), (x * operator(y)).sum(-1), 1e-10)


def test_outcome_regression_solves_the_ridge_problem():
    mdp, _, off, _ = instance(batch=2, horizon=3)
    data = sample_trajectories(mdp, off, 300, generator=generator())
    got = sv.fit_outcome_reward(data.index, data.returns, 6)
    for b in range(2):
        phi = features(mdp, data.index[b])
        gram = phi.T @ phi + (1e-3 + 1e-6 * 300) * torch.eye(18, dtype=F64)
        want = 0.5 + torch.linalg.solve(gram, phi.T @ (data.returns[b] - 1.5))
        close(got[b].flatten(), want, 1e-7)


def test_process_estimate_is_the_mean_of_each_cell():
    index = torch.tensor([[[0, 1], [0, 2], [3, 2]]])
    reward = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]], dtype=F64)
    got = fit_process_reward(Trajectories(index, reward), 4)
    want = [[0.5, 0.5, 0.5, 1.0], [0.5, 0.0, 0.5, 0.5]]
    close(got[0], torch.tensor(want, dtype=F64))


@pytest.mark.parametrize("normalise", [False, True])
def test_importance_sampling_weighs_trajectories_by_their_ratio(normalise):
    mdp, _, off, _ = instance(batch=2, horizon=3)
    target = random_policy(mdp, generator=generator(4))
    data = sample_trajectories(mdp, off, 50, generator=generator())
    got = importance_estimate(mdp, data, target, off, normalise=normalise)
    ratio = (target / off).flatten(2)
    for b in range(2):
        weight = torch.stack([ratio[b, h, data.index[b, :, h]] for h in range(3)])
        weight = weight.prod(0)
        total = weight.sum() if normalise else 50
        close(got[b], (weight * data.returns[b]).sum() / total)


def test_importance_sampling_without_any_weight():
    mdp, heads, coin = bandit_chain(3, 0.5)
    tails = torch.ones(1, 4, 3, dtype=torch.long)  # the target never plays them
    data = Trajectories(tails, torch.ones(1, 4, 3, dtype=F64))
    assert importance_estimate(mdp, data, heads, coin).item() == 0
    mean = importance_estimate(mdp, data, heads, coin, normalise=True)
    assert mean.item() == pytest.approx(3.0)


def test_soft_optimal_policy_matches_enumeration():
    mdp, _, off, _ = instance(batch=1, horizon=3, states=2, transitions="deterministic")
    start = torch.tensor([[1.0, 0.0]], dtype=F64)
    mdp = sv.TabularMDP(start, mdp.transition, mdp.reward)
    policy, regularised = soft_optimal_policy(mdp, off, 0.3)
    paths = enumerate_paths(mdp)
    prob = path_probability(mdp, paths, markov(off))
    returns = mdp.reward[0].flatten(1)[torch.arange(3), paths].sum(1)
    tilted = prob * (returns / 0.3).exp()
    close(regularised[0], 0.3 * tilted.sum().log())
    close(path_probability(mdp, paths, markov(policy)), tilted / tilted.sum())


def test_asymptotic_variance_matches_enumeration():
    mdp, target, off, _ = instance(batch=1, horizon=3, states=2)
    process, outcome = asymptotic_variance(mdp, target, off)
    paths = enumerate_paths(mdp)
    phi, prob = features(mdp, paths), path_probability(mdp, paths, markov(off))
    noise = phi @ (mdp.reward * (1 - mdp.reward)).flatten()
    mean = occupancy(mdp, target).flatten()
    inverse = torch.linalg.pinv(second_moment(mdp, off)[0], rtol=1e-10)
    influence = phi @ (inverse @ mean)
    close(outcome[0], (prob * influence**2 * noise).sum(), 1e-7)
    ratio = (occupancy(mdp, target) / occupancy(mdp, off)).flatten()
    cell_noise = (mdp.reward * (1 - mdp.reward)).flatten()
    close(process[0], (mean * ratio * cell_noise).sum())


def test_asymptotic_variance_of_equal_noise_has_the_closed_form():
    mdp, target, off, _ = instance(horizon=5)
    half = torch.full(mdp.shape, 0.5, dtype=F64)
    even = sv.TabularMDP(mdp.start, mdp.transition, half)
    process, outcome = asymptotic_variance(even, target, off)
    close(4 * process, (1 + sv.coverage(mdp, target, off).chi2).sum(-1))
    close(4 * outcome, 5 * sv.mean_transfer(mdp, target, off))


# ------------------------------------------------------------------- properties


@pytest.mark.parametrize("transitions", ["stochastic", "deterministic"])
@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_lemma_holds_and_terms_are_orthogonal(transitions, horizon):
    mdp, target, off, f = instance(7, 100, horizon, transitions=transitions)
    cover = sv.coverage(mdp, target, off)
    mean, square = moments(mdp, target, f)
    mean_off, square_off = moments(mdp, off, f)
    first, rest = orthogonal_terms(mdp, off, f)
    close(first + rest.sum(-1), square_off, 1e-10)
    chi2 = cover.chi2.sum(-1)
    slack = 1 + 1e-10
    assert (mean**2 <= (1 + chi2) * square_off * slack).all()
    assert (square <= cover.total * square_off * slack).all()
    centred = (mean - mean_off) ** 2
    assert (centred <= chi2 * (square_off - mean_off**2) * slack + 1e-12).all()
    worst = sv.worst_case_transfer(mdp, target, off)
    assert (square <= worst * square_off * slack).all()
    assert (worst <= cover.total * (1 + 1e-8)).all()
    average = sv.mean_transfer(mdp, target, off)
    assert (average <= worst * (1 + 1e-6)).all()
    assert (average <= (1 + chi2) * slack).all()
    assert (1 + cover.chi2 <= cover.ratio * slack).all()
    log_ratio = trajectory_coverage(mdp, target, off)
    assert (cover.worst.log() <= log_ratio + 1e-10).all()


def test_lemma_holds_for_a_target_that_remembers():
    mdp, _, off, _ = instance(batch=1, horizon=3, states=2)
    paths = enumerate_paths(mdp)
    phi, prob_off = features(mdp, paths), path_probability(mdp, paths, markov(off))
    g = generator(5)
    cells = mdp.shape[2] * mdp.shape[3]
    for _ in range(20):
        # A law over actions for every history and state.
        tables = [
            torch.rand(cells**h, 2, 2, generator=g, dtype=F64).pow(4) for h in range(3)
        ]
        tables = [t / t.sum(-1, keepdim=True) for t in tables]

        def remembers(h, paths, tables=tables):
            past = torch.zeros(len(paths), dtype=torch.long)
            for k in range(h):
                past = past * cells + paths[:, k]
            return tables[h].flatten(1)[past, paths[:, h]]

        prob = path_probability(mdp, paths, remembers)
        d = (phi.T @ prob).view(3, -1)
        d_off = (phi.T @ prob_off).view(3, -1)
        total = (d / d_off).amax(-1).sum()
        f = torch.randn(12, generator=g, dtype=F64)
        x = (phi @ f) ** 2
        assert (prob @ x) <= total * (prob_off @ x)


def test_lemma_fails_when_the_data_policy_remembers():
    # Data: the second action repeats the first. Target: 0, then 1. X = f1 - f1.
    off = torch.tensor([[0.5, 0.0], [0.0, 0.5]], dtype=F64)
    x = torch.tensor([[0.0, 2.0], [-2.0, 0.0]], dtype=F64)
    assert (off * x**2).sum() == 0
    assert x[0, 1] ** 2 == 4  # under a target with C_1 = C_2 = 2


def test_identical_policies_have_unit_transfer():
    mdp, _, off, _ = instance()
    ones = torch.ones(mdp.shape[0], dtype=F64)
    close(sv.worst_case_transfer(mdp, off, off), ones, 1e-8)
    close(sv.worst_case_transfer(mdp, off, off, method="eigh"), ones, 1e-8)
    close(sv.mean_transfer(mdp, off, off), ones, 1e-12)
    cover = sv.coverage(mdp, off, off)
    close(cover.ratio, torch.ones_like(cover.ratio))
    close(trajectory_coverage(mdp, off, off), torch.zeros_like(ones))


def test_single_step_and_single_action():
    mdp, target, off, _ = instance(horizon=1)
    cover = sv.coverage(mdp, target, off)
    close(sv.worst_case_transfer(mdp, target, off), cover.ratio[:, 0])
    close(sv.mean_transfer(mdp, target, off), 1 + cover.chi2[:, 0])
    mdp, target, off, _ = instance(actions=1)
    assert torch.equal(target, off)
    close(sv.worst_case_transfer(mdp, target, off), torch.ones(20, dtype=F64))
    data = sample_trajectories(mdp, off, 5, generator=generator())
    assert data.index.shape == (20, 5, 4)


def test_second_moment_identities():
    mdp, _, off, _ = instance()
    moment, d = second_moment(mdp, off), occupancy(mdp, off).flatten(1)
    assert torch.equal(moment, moment.mT)
    assert torch.linalg.eigvalsh(moment).min() > -1e-12
    close(d.view(20, 4, -1).sum(-1), torch.ones(20, 4, dtype=F64))
    for h in range(4):
        close(moment[:, :, 6 * h : 6 * (h + 1)].sum(-1), d)


@pytest.mark.parametrize("transitions", ["stochastic", "deterministic"])
def test_target_sees_nothing_that_outcomes_hide(transitions):
    mdp, target, off, _ = instance(transitions=transitions)
    assert null_leak(mdp, target, off).max() < 1e-10


def test_advantage_ranks_all_policies_as_their_return_does():
    mdp, target, mu, _ = instance()
    gain = expected_return(mdp, target) - expected_return(mdp, mu)
    close(expected_return(mdp, target, advantage(mdp, mu)), gain, 1e-12)


def test_reachability_limits_trajectory_coverage():
    mdp, target, off, _ = instance(batch=1, states=2)
    start = torch.tensor([[1.0, 0.0]], dtype=F64)
    stay = torch.eye(2, dtype=F64)[:, None].expand(1, 3, 2, 2, 2)
    mdp = sv.TabularMDP(start, stay, mdp.reward)
    off = off.clone()
    off[:, :, 1] = torch.tensor([1e-9, 1 - 1e-9], dtype=F64)  # state 1 is never seen
    want = (target / off)[0, :, 0].amax(-1).log().sum()
    close(trajectory_coverage(mdp, target, off)[0], want)
    # Nobody leaves state 0, so a cell's ratio is that of its action alone.
    actions = (target / off)[0, :, 0].amax(-1)
    close(sv.coverage(mdp, target, off).ratio[0], actions)
    assert sv.worst_case_transfer(mdp, target, off).isfinite().all()


def test_sampler_reproduces_the_occupancy():
    mdp, _, off, _ = instance(batch=2, horizon=3)
    data = sample_trajectories(mdp, off, 20_000, generator=generator())
    count = torch.nn.functional.one_hot(data.index, 6).double().mean(1)
    # Five standard deviations of a frequency of 20,000 draws.
    assert (count - occupancy(mdp, off).flatten(2)).abs().max() < 5 * 0.5 / 141
    quiet = sample_trajectories(mdp, off, 3, generator=generator(), noise="none")
    want = mdp.reward.flatten(2).transpose(1, 2).gather(1, quiet.index)
    assert torch.equal(quiet.reward, want)
    again = sample_trajectories(mdp, off, 20_000, generator=generator())
    assert torch.equal(again.index, data.index)


def test_all_step_rewards_with_equal_outcomes_give_equal_values():
    mdp, target, _, _ = instance()
    shift = torch.tensor([1.0, -3.0, 4.0, -2.0], dtype=F64)  # sums to zero
    moved = mdp.reward + shift[:, None, None]
    close(expected_return(mdp, target, moved), expected_return(mdp, target))


# ------------------------------------------------------------------ experiments


def test_lemma_experiment_has_no_violation():
    config = LemmaConfig(num_mdps=30, chunk=20)
    result = lemma(config, device="cpu", seed=1)
    assert result["largest_ratio"] <= 1 + 1e-8
    assert result["largest_mean_ratio"] <= 1 + 1e-8
    assert result["largest_leak"] < 1e-10
    assert result == lemma(config, device="cpu", seed=1)


def test_search_reaches_the_constant_and_never_passes_it():
    config = SearchConfig(horizons=(2,), restarts=64)
    result = search_worst_case(config, device="cpu", seed=3)
    assert 0.98 < result["found"][0] <= result["exact"][0] + 1e-3
    assert result["exact"][0] <= 1 + 1e-8


def test_errors_fall_as_predicted():
    config = LabelsConfig(horizons=(4,), sizes=(800, 12_800))
    for row in labels(config, device="cpu", seed=2)["rows"]:
        for name in ("process", "outcome"):
            # A root mean square over 32 processes is known to about 1 / sqrt(64).
            assert 0.6 < row[name] / row[f"{name}_predicted"] < 1.5


def test_labels_take_all_processes_whatever_the_chunk():
    config = LabelsConfig(horizons=(2,), sizes=(800, 1600), num_mdps=5)
    whole = labels(config, device="cpu", seed=2)["rows"][0]
    parts = labels(replace(config, chunk=2), device="cpu", seed=2)["rows"][0]
    for name in ("gap_off", "process_predicted", "outcome_predicted"):
        assert parts[name] == pytest.approx(whole[name])
    # Other draws of the same processes.
    assert parts["process"] == pytest.approx(whole["process"], rel=1.0)
    assert parts["process"] != whole["process"]


def test_advantage_is_optimal_and_q_is_not():
    result = rewards(RewardsConfig(num_mdps=100), device="cpu", seed=4)
    assert result["largest_advantage_gap"] <= 1e-12
    assert all(row["identity_error"] < 1e-13 for row in result["rows"])
    assert max(row["q_suboptimal"] for row in result["rows"]) > 0.9


def test_preference_corollary_holds():
    for error in (0.05, 0.5, 3.0):
        config = PreferencesConfig(num_mdps=200, error=error)
        result = preferences(config, device="cpu", seed=5)
        assert result["largest_ratio"] <= 1
        assert result["identity_error"] < 1e-10


# -------------------------------------------------------- the tiny reasoning model

TASK = ChainTask()
WAIT, END, PAD = TASK.wait, TASK.end, TASK.pad


def completion(*tokens):
    return torch.tensor([list(tokens) + [PAD] * (TASK.budget - len(tokens))])


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [
        ((1, 3, 1, 0, END), 1.0),
        ((1, WAIT, 3, 1, WAIT, 0, END), 1.0),
        ((4, 4, 0, END), 1.0),  # only the last digit counts
        ((1, 3, 1, 0, WAIT, END), 1.0),
        ((1, 3, 1, 2, END), 0.0),
        ((1, 3, 1, 0), 0.0),  # never ends
        ((WAIT,) * 10, 0.0),
        ((WAIT, END), 0.0),  # no digit at all
        ((END,), 0.0),
    ],
)
def test_verifier(tokens, verdict):
    prompt = torch.tensor([[1, 2, 3, 4, TASK.sep]])  # the sum is 10 = 0 mod 5
    assert TASK.verify(prompt, completion(*tokens)).item() == verdict


def test_perfect_demonstrations_are_right():
    prompts = TASK.prompts(200, generator=generator())
    demos = TASK.demos(prompts, generator=generator(1), wait=0.0, slip=0.0)
    assert TASK.verify(prompts, demos).all()
    assert (demos[:, 5:] == PAD).all()
    noisy = TASK.demos(prompts, generator=generator(1))
    assert 0.4 < TASK.verify(prompts, noisy).mean() < 0.8


def test_kept_keys_give_the_same_logits_as_the_whole_sequence():
    model = TinyDecoder(TASK, generator=generator())
    prompts = TASK.prompts(8, generator=generator())
    done = TASK.demos(prompts, generator=generator())
    tokens, tags = torch.cat([prompts, done], 1), TASK.tags(prompts, done)
    whole = model(tokens, tags)
    cache = [[] for _ in model.blocks]
    parts = [model(tokens[:, :5], tags[:, :5], cache)]
    for t in range(5, tokens.shape[1]):
        parts.append(model(tokens[:, t : t + 1], tags[:, t : t + 1], cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_rollouts_pad_after_the_end_and_repeat_with_the_seed():
    model = TinyDecoder(TASK, generator=generator())
    prompts = TASK.prompts(300, generator=generator())
    done = rollout(model, TASK, prompts, generator=generator(2))
    after = (done == END).cumsum(1) - (done == END).long()
    assert ((done == PAD) == (after > 0)).all()
    assert not (done == TASK.sep).any()
    assert torch.equal(done, rollout(model, TASK, prompts, generator=generator(2)))


def test_rollouts_go_on_from_forced_tokens():
    model = TinyDecoder(TASK, generator=generator())
    prompts = TASK.prompts(50, generator=generator())
    free = rollout(model, TASK, prompts, generator=generator(2))
    # Forced to repeat itself, the model repeats itself, and PAD still follows END.
    again = rollout(model, TASK, prompts, generator=generator(3), forced=free)
    assert torch.equal(again, free)
    waits = prompts.new_full((50, 6), WAIT)
    done = rollout(model, TASK, prompts, generator=generator(2), forced=waits)
    assert (done[:, :6] == WAIT).all() and done.shape == (50, TASK.budget)
    for bad in (waits[:3], prompts.new_full((50, 11), WAIT), waits[0]):
        with pytest.raises(ValueError, match=r"forced must be \(50, at most 10\)"):
            rollout(model, TASK, prompts, generator=generator(), forced=bad)


def test_what_stands_after_the_end_does_not_count():
    prompt = torch.tensor([[1, 2, 3, 4, TASK.sep]])  # the sum is 0 mod 5
    after = torch.tensor([[3, END, 0, END] + [PAD] * 6])
    assert TASK.verify(prompt, after).item() == 0
    before = torch.tensor([[0, END, 3, END] + [PAD] * 6])
    assert TASK.verify(prompt, before).item() == 1


def prm_inputs():
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    values = torch.rand(2, 5, generator=generator(), dtype=F64)
    return values, torch.tensor([1.0, 0.0], dtype=F64), mask


def test_summed_advantage_is_the_outcome_with_a_baseline():
    values, verdict, mask = prm_inputs()
    reward = sv.prm_reward("advantage", values, verdict, mask)
    to_go = reward_to_go(reward)
    close(to_go[:, 0], verdict - values[:, 0])
    want = torch.where(mask, verdict[:, None] - values[:, :-1], 0)
    close(to_go, want)


@pytest.mark.parametrize("kind", ["outcome", "advantage", "q"])
def test_last_reward_uses_the_verdict_and_pads_carry_none(kind):
    values, verdict, mask = prm_inputs()
    reward = sv.prm_reward(kind, values, verdict, mask)
    other = values.clone()
    other[0, 3:] = 77.0  # what the model says of an ended completion
    other[1, 4:] = 77.0
    close(sv.prm_reward(kind, other, verdict, mask), reward)
    assert reward[0, 3] == 0
    last = {"outcome": 0.0, "q": 0.0, "advantage": -values[1, 3]}[kind]
    close(reward[1, 3], torch.as_tensor(last, dtype=F64))


def test_pads_carry_no_gradient():
    model = TinyDecoder(TASK, generator=generator()).double()
    prompts = TASK.prompts(1, generator=generator())
    done = completion(1, 2, END)
    grads = []
    for filler in (0.0, 5.0):
        weight = torch.full((1, TASK.budget), filler, dtype=F64)
        weight[:, :3] = 1.0
        model.zero_grad()
        policy_gradient_loss(model, TASK, prompts, done, weight).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_policy_gradient_loss_has_the_right_gradient():
    small = ChainTask(p=2, steps=1, budget=2)
    model = TinyDecoder(small, dim=4, num_layers=1, generator=generator()).double()
    prompts = small.prompts(3, generator=generator())
    done = small.demos(prompts, generator=generator())
    weight = torch.randn(3, 2, generator=generator(), dtype=F64)
    head = model.head.weight.detach().clone().requires_grad_()

    def loss(head):
        parameters = {"head.weight": head}
        shim = _Shim(model, parameters)
        return policy_gradient_loss(shim, small, prompts, done, weight)

    assert torch.autograd.gradcheck(loss, (head,))


class _Shim:
    """The model with some of its parameters replaced."""

    def __init__(self, model, parameters):
        self.model, self.parameters = model, parameters

    def __call__(self, *inputs):
        return torch.func.functional_call(self.model, self.parameters, inputs)


def test_second_moment_and_coverage_are_differentiable():
    mdp, _, off, f = instance(batch=1, horizon=2, states=2)
    logits = off.log().requires_grad_()

    def ratio(logits):
        policy = logits.softmax(-1)
        _, square = moments(mdp, policy, f)
        return square / sv.coverage(mdp, policy, off).chi2.exp().sum(-1)

    assert torch.autograd.gradcheck(ratio, (logits,))


def test_all_rewards_but_the_advantage_get_a_baseline_by_position():
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    returns = torch.randn(3, 3, generator=generator(), dtype=F64) * mask
    for kind in ("outcome", "q"):
        weight = _weight(kind, returns, mask)
        close((weight * mask).sum(0), torch.zeros(3, dtype=F64))
    weight = _weight("advantage", returns, mask)
    close(weight, returns / ((returns**2).sum() / mask.sum()).sqrt())
    # A batch without any signal is not blown up: the scale has a floor of 0.1.
    close(_weight("advantage", returns * 1e-6, mask), returns * 1e-5)


def test_training_repeats_with_the_seed():
    config = ReasoningConfig(
        sft_steps=3, value_rollouts=50, value_steps=2, rl_steps=2, eval_prompts=50
    )
    config = replace(config, batch_size=16)
    first, second = (reasoning(config, seed=3) for _ in range(2))
    assert first == second
    assert set(first["curves"]) == {"outcome", "advantage", "q"}


# -------------------------------------------------------------------- bad input


def test_uncovered_cells_are_refused_not_guessed():
    mdp, _, off, _ = instance(batch=1)
    off = off.clone()
    off[:, 1] = torch.tensor([1.0, 0.0], dtype=F64)
    target = torch.full(mdp.shape, 0.5, dtype=F64)
    assert sv.coverage(mdp, target, off).worst.isinf().all()
    assert trajectory_coverage(mdp, target, off).isinf().all()
    for method in ("krylov", "eigh"):
        with pytest.raises(ValueError, match="never visits 3 cells"):
            sv.worst_case_transfer(mdp, target, off, method=method)
    with pytest.raises(ValueError, match="never visits"):
        sv.mean_transfer(mdp, target, off)
    with pytest.raises(ValueError, match="never visits"):
        asymptotic_variance(mdp, target, off)
    data = sample_trajectories(mdp, off, 5, generator=generator())
    with pytest.raises(ValueError, match="never visits"):
        importance_estimate(mdp, data, target, off)


def rare(mass, first_rows):
    """Two states, two steps; the data take action 1 with probability ``mass``."""
    start = torch.tensor([[0.5, 0.5]], dtype=F64)
    rows = [[first_rows[0], [0.5, 0.5]], [first_rows[1], [0.5, 0.5]]]
    transition = torch.tensor([[rows]], dtype=F64)
    mdp = sv.TabularMDP(start, transition, torch.zeros(1, 2, 2, 2, dtype=F64))
    off = torch.full(mdp.shape, 0.5, dtype=F64)
    target = off.clone()
    off[:, 0] = torch.tensor([1 - mass, mass], dtype=F64)
    return mdp, target, off


@pytest.mark.parametrize("method", ["krylov", "eigh"])
@pytest.mark.parametrize("mass", [1e-6, 1e-10, 1e-14])
def test_rare_cells_keep_their_weight(method, mass):
    mdp, target, off = rare(mass, [[1.0, 0.0], [1.0, 0.0]])
    found = sv.worst_case_transfer(mdp, target, off, method=method)
    # d(s, a = 1) is a half against mass: the ratio is 1 / (2 mass).
    close(found * mass, torch.tensor([0.5], dtype=F64), 1e-5)


@pytest.mark.parametrize("method", ["krylov", "eigh"])
def test_a_direction_too_rare_for_float64_is_refused(method):
    # Only action 1 tells V_2(s_2) from a function of s_1: once in 1e14 draws.
    mdp, target, off = rare(1e-14, [[1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(ValueError, match="too close to failing"):
        sv.worst_case_transfer(mdp, target, off, method=method)


def test_cells_that_nobody_visits_do_no_harm():
    mdp, _, off, _ = instance(batch=2, states=3)
    start = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=F64)
    transition = mdp.transition.clone()
    transition[..., 2] = 0
    transition = transition / transition.sum(-1, keepdim=True)
    mdp = sv.TabularMDP(start, transition, mdp.reward)
    target = sv.plan(mdp)[0]
    fast = sv.worst_case_transfer(mdp, target, off)
    close(fast, sv.worst_case_transfer(mdp, target, off, method="eigh"), 1e-6)
    assert (fast <= sv.coverage(mdp, target, off).total).all()
    smaller = sv.TabularMDP(
        start[:, :2], transition[:, :, :2, :, :2], mdp.reward[:, :, :2]
    )
    close(sv.worst_case_transfer(smaller, target[:, :, :2], off[:, :, :2]), fast, 1e-6)


def test_policies_must_be_laws():
    mdp, target, off, _ = instance(batch=1)
    with pytest.raises(ValueError, match="policy must sum to one"):
        occupancy(mdp, off * 2)
    with pytest.raises(ValueError, match="negative probability: -1"):
        occupancy(mdp, target * 2 - 1)
    with pytest.raises(ValueError, match="policy has shape"):
        occupancy(mdp, off[:, :2])
    with pytest.raises(ValueError, match="not finite"):
        occupancy(mdp, off * torch.nan)
    with pytest.raises(TypeError, match=r"float64 tensor, got torch\.int64"):
        occupancy(mdp, off.long())
    with pytest.raises(TypeError, match="got NoneType"):
        sv.evaluate(mdp, None)


@pytest.mark.parametrize(
    "function",
    [
        sv.coverage,
        trajectory_coverage,
        sv.mean_transfer,
        sv.worst_case_transfer,
        null_leak,
        asymptotic_variance,
        lambda mdp, _, off: orthogonal_terms(mdp, off, mdp.reward),
    ],
)
def test_a_bad_data_policy_is_called_by_its_name(function):
    mdp, target, off, _ = instance(batch=1)
    with pytest.raises(ValueError, match="^policy_off must sum to one"):
        function(mdp, target, off * 2)


def test_processes_must_be_well_formed():
    mdp, _, _, _ = instance(batch=1)
    with pytest.raises(ValueError, match="transition has shape"):
        sv.TabularMDP(mdp.start, mdp.transition[:, :1], mdp.reward)
    with pytest.raises(ValueError, match="start must sum to one"):
        sv.TabularMDP(mdp.start * 0.5, mdp.transition, mdp.reward)
    with pytest.raises(ValueError, match="no empty axis"):
        sv.TabularMDP(mdp.start, mdp.transition, mdp.reward[:, :0])
    with pytest.raises(ValueError, match="at least 1"):
        random_mdp(1, 0, 2, 2)
    with pytest.raises(ValueError, match="transitions='odd'"):
        random_mdp(1, 1, 2, 2, transitions="odd")
    with pytest.raises(ValueError, match="rewards='odd'"):
        random_mdp(1, 1, 2, 2, rewards="odd")
    with pytest.raises(ValueError, match="0 < p <= 1"):
        bandit_chain(3, 0.0)
    with pytest.raises(ValueError, match="horizon >= 2"):
        hedge_mdp(1, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"safe_value from 0\.5 to 1\.5"):
        hedge_mdp(2, torch.tensor([0.5, 1.5]), 0.5)
    with pytest.raises(ValueError, match=r"good_prob from 1 to 1: .* in \(0, 1\)"):
        hedge_mdp(2, 0.5, 1.0)
    with pytest.raises(ValueError, match="1 <= steps < budget"):
        filler_mdp(4, 4)


def test_single_precision_is_converted_with_a_warning():
    mdp, target, off, _ = instance(batch=2)
    with pytest.warns(UserWarning, match=r"reward is torch\.float32; converted"):
        again = sv.TabularMDP(mdp.start, mdp.transition, mdp.reward.float())
    assert again.reward.dtype == F64
    with pytest.warns(UserWarning, match=r"policy is torch\.float32"):
        d = occupancy(mdp, off.float())
    assert d.dtype == F64
    close(d, occupancy(mdp, off), 1e-5)


def test_no_and_few_trajectories_still_give_finite_rewards():
    mdp, target, off, _ = instance(batch=2, horizon=8, states=4, actions=3)
    for num in (0, 1, 5):  # 96 unknowns
        data = sample_trajectories(mdp, off, num, generator=generator())
        fit = sv.fit_outcome_reward(data.index, data.returns, 12)
        assert fit.isfinite().all() and fit.shape == (2, 8, 12)
        assert fit_process_reward(data, 12).isfinite().all()
        if num == 0:
            assert (fit == 0.5).all()
    empty = sample_trajectories(mdp, off, 0, generator=generator())
    with pytest.raises(ValueError, match="at least one trajectory"):
        importance_estimate(mdp, empty, target, off)
    with pytest.raises(ValueError, match="num=-1"):
        sample_trajectories(mdp, off, -1)


def test_bad_options_are_named():
    mdp, target, off, _ = instance(batch=1)
    big = sv.TabularMDP(mdp.start, mdp.transition, mdp.reward + 1)
    with pytest.raises(ValueError, match=r"rewards in \[0, 1\]"):
        sample_trajectories(big, off, 3)
    with pytest.raises(ValueError, match=r"rewards in \[0, 1\]"):
        asymptotic_variance(big, target, off)
    with pytest.raises(ValueError, match="noise='odd'"):
        sample_trajectories(mdp, off, 3, noise="odd")
    with pytest.raises(ValueError, match="method='odd'"):
        sv.worst_case_transfer(mdp, target, off, method="odd")
    with pytest.raises(ValueError, match="tol=0"):
        sv.worst_case_transfer(mdp, target, off, tol=0)
    with pytest.raises(ValueError, match=r"sizes=\(200, 800\): .* two sizes of 800"):
        labels(LabelsConfig(sizes=(200, 800)))
    cells, nan = torch.zeros(1, 1, 1).long(), torch.full((1, 1), torch.nan)
    with pytest.raises(ValueError, match="returns holds values that are not finite"):
        sv.fit_outcome_reward(cells, nan, 4)
    with pytest.raises(ValueError, match="reward holds values that are not finite"):
        fit_process_reward(Trajectories(cells, nan[..., None]), 4)
    with pytest.raises(TypeError, match=r"int64 tensor of cells, got torch\.float32"):
        sv.fit_outcome_reward(cells.float(), torch.ones(1, 1), 4)
    with pytest.raises(ValueError, match="ridge=nan"):
        sv.fit_outcome_reward(cells, torch.ones(1, 1), 4, ridge=float("nan"))
    with pytest.raises(ValueError, match="num_heads=3 must divide dim=32"):
        TinyDecoder(TASK, num_heads=3)
    # END too late, and prompts that would be repeated without a word.
    late = torch.full((2, 15), END)
    with pytest.raises(ValueError, match=r"completions \(n, 10\); got .* \(2, 15\)"):
        TASK.verify(TASK.prompts(2, generator=generator()), late)
    with pytest.raises(ValueError, match=r"got \(1, 5\) and \(2, 10\)"):
        TASK.verify(TASK.prompts(1, generator=generator()), late[:, :10])
    with pytest.raises(ValueError, match="cells from 0 to 9; allowed are 0 to 3"):
        sv.fit_outcome_reward(torch.tensor([[[0, 9]]]), torch.ones(1, 1), 4)
    with pytest.raises(ValueError, match="ridge=0"):
        sv.fit_outcome_reward(torch.zeros(1, 1, 1).long(), torch.ones(1, 1), 4, ridge=0)
    with pytest.raises(ValueError, match=r"returns \(B, n\)"):
        sv.fit_outcome_reward(torch.zeros(1, 1, 1).long(), torch.ones(1, 2), 4)
    with pytest.raises(ValueError, match="they must agree"):
        fit_process_reward(
            Trajectories(torch.zeros(1, 2, 1).long(), torch.ones(1, 1, 1)), 4
        )
    with pytest.raises(ValueError, match="temperature=0"):
        soft_optimal_policy(mdp, off, 0)
    with pytest.raises(ValueError, match="budget > steps"):
        ChainTask(budget=4)
    values, verdict, mask = prm_inputs()
    with pytest.raises(ValueError, match="kind='odd'"):
        sv.prm_reward("odd", values, verdict, mask)
    with pytest.raises(ValueError, match="values must be"):
        sv.prm_reward("q", values[:, 1:], verdict, mask)


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
def test_core_stays_on_its_device(device):
    mdp, target, off, _ = instance(batch=4)
    want = sv.worst_case_transfer(mdp, target, off)
    moved = mdp.to(device)
    got = sv.worst_case_transfer(moved, target.to(device), off.to(device))
    assert got.device.type == device
    close(got.cpu(), want, 1e-6)


def test_worst_case_forms_no_large_matrix():
    mdp, target, off, _ = instance(batch=2, horizon=32, states=8, actions=4)
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    with Watch():
        sv.worst_case_transfer(mdp, target, off)
    assert max(sizes) < 2 * (32 * 8 * 4) ** 2 / 16
