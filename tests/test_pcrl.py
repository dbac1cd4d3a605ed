"""PCRL: the quadratic program, the rules, the tables, the metrics, the training.

Golden files and their provenance: tests/golden/pcrl/README.md.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from icml25.core import make_generator
from icml25.pcrl import (
    EXPERIMENTS,
    MetaConfig,
    TabularEnv,
    min_norm_weights,
    policy_table,
    ray_oracle,
    rule_weights,
    score,
    train_meta,
    train_ppo,
    train_tables,
)
from icml25.pcrl.experiments import (
    NetworkConfig,
    TablesConfig,
    TreasureConfig,
    run_network,
    run_tables,
    run_treasure,
)
from icml25.pcrl.metrics import (
    hull_hypervolume,
    hypervolume,
    nondominated,
    simplex_grid,
    sparsity,
)
from icml25.pcrl.min_norm import project_simplex
from icml25.pcrl.policy import MetaPolicy, sample_preferences
from icml25.pcrl.rules import (
    RULES,
    pull_blend,
    pull_residual,
    similarity,
    similarity_full_gradient,
    similarity_semigrad,
)
from icml25.pcrl.tasks import fruit_tree, leaf_values, treasure
from icml25.pcrl.toy import run_toy, toy_normal, toy_preferences, toy_value
from icml25.pcrl.train import rollout

GOLDEN = Path(__file__).parent / "golden" / "pcrl"
F64 = torch.float64
PULLED = ("preco", "sdmgrad", "blend")


def golden(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as data:
        return {key: torch.as_tensor(data[key]) for key in data.files}


def problems(num: int, m: int, size: int, seed: int = 0) -> torch.Tensor:
    """``(num, size, m)``: random gradients, the columns are the objectives."""
    return torch.randn(num, size, m, generator=make_generator(seed), dtype=F64)


def positive(num: int, m: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(num, m, generator=make_generator(seed), dtype=F64) + 0.05


@pytest.fixture(scope="module")
def tree() -> TabularEnv:
    return fruit_tree()


@pytest.fixture(scope="module")
def sea() -> TabularEnv:
    return treasure()


# ---------------------------------------------------------------- the quadratic program
@pytest.mark.parametrize("m", [2, 3, 4, 6])
def test_min_norm_equals_the_golden_solutions(m: int) -> None:
    data = golden("min_norm")
    vectors = data[f"mn{m}_vectors"].double()
    weights = min_norm_weights(vectors @ vectors.mT)
    norm = (weights[..., None] * vectors).sum(1).norm(dim=-1)
    exact = data[f"mn{m}_norm_exact"]
    assert (norm - exact).abs().max() <= 1e-6 * (1 + exact.max())
    assert (norm <= data[f"mn{m}_norm_author_fw"] + 1e-6).all()
    assert torch.allclose(weights, data[f"mn{m}_w_exact"], atol=1e-6)


@pytest.mark.parametrize(
    ("m", "size"), [(1, 3), (2, 1), (3, 2), (6, 3), (6, 30), (8, 9)]
)
def test_min_norm_satisfies_the_optimality_conditions(m: int, size: int) -> None:
    gradients = problems(64, m, size)
    gram, pull = gradients.mT @ gradients, 3 * positive(64, m)
    w = min_norm_weights(gram, pull)
    assert (w >= 0).all()
    assert (w.sum(-1) - 1).abs().max() < 1e-12
    slope = (gram @ (w + pull)[..., None])[..., 0]  # <g_i, d>
    gap = (w * slope).sum(-1) - slope.amin(-1)  # zero exactly at the optimum
    assert (gap / gram.diagonal(dim1=1, dim2=2).sum(-1)).max() < 1e-8


def test_enumeration_and_projected_gradient_agree_beyond_eight_objectives() -> None:
    gradients = problems(4, 8, 12)
    # Two more objectives, too long to shorten the combination by much.
    pad = 10 * problems(4, 2, 12, seed=1)
    wide = torch.cat([gradients, pad], -1)
    exact = min_norm_weights(gradients.mT @ gradients)
    iterated = min_norm_weights(wide.mT @ wide, iterations=3000)
    assert iterated.shape == (4, 10) and (iterated >= 0).all()
    assert torch.allclose(iterated.sum(-1), torch.ones(4, dtype=F64))
    short = (wide @ iterated[..., None])[..., 0]
    # Optimality of the ten-objective problem, which contains the eight-objective one.
    slope = (wide.mT @ short[..., None])[..., 0]
    assert ((iterated * slope).sum(-1) - slope.amin(-1)).max() < 1e-6
    best = (gradients @ exact[..., None])[..., 0].norm(dim=-1)
    assert (short.norm(dim=-1) <= best + 1e-9).all()


def test_projected_gradient_reaches_the_exact_objective() -> None:
    from icml25.pcrl.min_norm import _all_supports, _projected_gradient

    gradients = problems(32, 6, 8)
    gram = gradients.mT @ gradients
    gram = gram / gram.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    linear = (gram @ positive(32, 6)[..., None])[..., 0]
    a = _all_supports(gram, linear)
    b = _projected_gradient(gram, linear, iterations=3000)

    def objective(w: torch.Tensor) -> torch.Tensor:
        return (w * (0.5 * (gram @ w[..., None])[..., 0] + linear)).sum(-1)

    assert (objective(a) - objective(b)).abs().max() < 1e-9


def test_the_origin_inside_the_hull_is_found() -> None:
    # Three plane vectors around the origin: Pareto stationary, singular Gram matrix.
    angle = torch.tensor([0.1, 2.2, 4.3], dtype=F64)
    vectors = torch.stack([angle.cos(), angle.sin()], -1)
    w = min_norm_weights(vectors @ vectors.T)
    assert (w @ vectors).norm() < 1e-12 and (w > 0.1).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e20])
def test_extreme_gram_matrices_give_feasible_weights(dtype, scale: float) -> None:
    for gram in (torch.eye(3, dtype=dtype), torch.ones(3, 3, dtype=dtype)):
        w = min_norm_weights(scale * gram)
        assert w.dtype == dtype and w.isfinite().all()
        assert (w >= 0).all() and abs(float(w.sum()) - 1) < 1e-6


def test_leading_sizes_broadcast() -> None:
    grads, p, v = problems(1, 3, 5)[0], positive(4, 3), positive(4, 3, seed=1)
    gram = grads.mT @ grads
    many = gram.expand(4, 3, 3)
    assert torch.equal(min_norm_weights(gram, p), min_norm_weights(many, p))
    assert torch.equal(min_norm_weights(many, p[0]), min_norm_weights(many, p[:1]))
    for rule in RULES:
        for q, u in ((p, v), (p[0], v), (p, v[0])):
            weights = rule_weights(gram, q, u, rule=rule)
            each = rule_weights(many, q.expand(4, 3), u.expand(4, 3), rule=rule)
            assert torch.equal(weights, each)
    full = similarity_full_gradient(p[0], v)
    assert torch.equal(full, similarity_full_gradient(p[0].expand(4, 3), v))
    with pytest.raises(ValueError, match="leading sizes do not broadcast: gram"):
        min_norm_weights(many, p[:3])
    with pytest.raises(TypeError, match=r"gram has dtype torch\.int64"):
        min_norm_weights(torch.eye(3, dtype=torch.long))


def test_one_objective_and_an_empty_batch() -> None:
    assert min_norm_weights(torch.zeros(4, 1, 1)).tolist() == [[1.0]] * 4
    assert min_norm_weights(torch.zeros(0, 3, 3)).shape == (0, 3)


def test_batching_changes_nothing() -> None:
    gradients = problems(12, 4, 5)
    gram, pull = gradients.mT @ gradients, positive(12, 4)
    batch = min_norm_weights(gram.reshape(3, 4, 4, 4), pull.reshape(3, 4, 4))
    single = torch.stack([min_norm_weights(gram[i], pull[i]) for i in range(12)])
    assert torch.allclose(batch.reshape(12, 4), single, atol=1e-14)


def test_simplex_projection_is_idempotent_and_nearest() -> None:
    x = problems(200, 5, 1)[:, 0] * 2
    projected = project_simplex(x)
    assert torch.allclose(project_simplex(projected), projected, atol=1e-15)
    rivals = torch.distributions.Dirichlet(torch.ones(5, dtype=F64)).sample((50, 200))
    best = (projected - x).norm(dim=-1)
    assert (best <= (rivals - x).norm(dim=-1) + 1e-12).all()


# --------------------------------------------------------------------- the similarity
def test_similarity_is_zero_on_the_ray_and_scales() -> None:
    p, v = positive(50, 4), positive(50, 4, seed=1)
    assert (similarity(p, v) <= 0).all()
    assert similarity(p, 2.5 * p).abs().max() < 1e-30
    assert torch.allclose(similarity(p, 3 * v), 9 * similarity(p, v))
    assert torch.allclose(similarity_semigrad(7 * p, v), similarity_semigrad(p, v))


def test_semigradient_asks_no_objective_to_get_worse() -> None:
    p, v = positive(50, 4), positive(50, 4, seed=1)
    s = similarity_semigrad(p, v)
    assert (s >= 0).all()
    best = (v / p).argmax(-1, keepdim=True)
    assert (s.gather(-1, best) == 0).all()


def test_full_gradient_is_the_gradient_and_the_semigradient_is_not() -> None:
    p = positive(50, 4)
    v = positive(50, 4, seed=1).requires_grad_()
    # An independent form of Psi, differentiated by autograd through the maximum.
    psi = -0.5 * ((v / p).amax(-1, keepdim=True) * p - v).square().sum()
    (truth,) = torch.autograd.grad(psi, v)
    full = similarity_full_gradient(p, v.detach())
    assert torch.allclose(full, truth, atol=1e-12)
    assert (full.amin(-1) < 0).all()


def test_similarity_passes_gradcheck() -> None:
    p = positive(3, 4)
    v = positive(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: similarity(p, x), v)


# -------------------------------------------------------------------------- the rules
@pytest.mark.parametrize("rule", PULLED)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_ascent_identity(rule: str, dtype: torch.dtype) -> None:
    gradients = problems(256, 5, 7)
    gram = (gradients.mT @ gradients).to(dtype)
    p, v, lam = positive(256, 5).to(dtype), positive(256, 5, seed=1).to(dtype), 3.0
    omega = rule_weights(gram, p, v, rule=rule, lam=lam)
    pull = omega - min_norm_weights(gram, _pull(rule, p, v, lam))
    slope = (gram @ omega[..., None])[..., 0]
    left = slope.amin(-1) + (pull * slope).sum(-1)
    right = (omega * slope).sum(-1)  # |d|^2
    tolerance = 1e-6 if dtype == F64 else 2e-4
    assert ((left - right) / right.clamp_min(1.0)).abs().max() < tolerance


def _pull(rule: str, p, v, lam: float) -> torch.Tensor:
    if rule == "preco":
        return lam * similarity_semigrad(p, v)
    if rule == "blend":
        return lam * pull_blend(p, v)
    return (lam * p / p.sum(-1, keepdim=True)).expand_as(v)


def test_preco_direction_solves_the_dual_problem() -> None:
    # d* maximises min_i <g_i, d> + lam <G s, d> - |d|^2 / 2 over all d.
    g = problems(20, 3, 4)
    p, v, lam = positive(20, 3), positive(20, 3, seed=1), 2.0
    d = (g @ rule_weights(g.mT @ g, p, v, lam=lam)[..., None])[..., 0]
    pulled = lam * (g @ similarity_semigrad(p, v)[..., None])[..., 0]

    def dual(x: torch.Tensor) -> torch.Tensor:
        worst = (g.mT @ x[..., None])[..., 0].amin(-1)
        return worst + (pulled * x).sum(-1) - 0.5 * x.square().sum(-1)

    best = dual(d)
    for seed in range(200):
        step = problems(20, 1, 4, seed=seed)[..., 0]
        assert (dual(d + 10.0 ** (-(seed % 5)) * step) <= best + 1e-12).all()


def test_cagrad_solves_its_own_problem() -> None:
    # max_d min_i <g_i, d> within |d - g0| <= c |g0|; its d is ours up to scale.
    g = problems(20, 3, 6)
    p = positive(20, 3)
    share = p / p.sum(-1, keepdim=True)
    omega = rule_weights(g.mT @ g, p, p, rule="cagrad")
    reference = (g @ share[..., None])[..., 0]
    mu = omega.sum(-1, keepdim=True) - 1.0  # the reference's share is mu p, w sums to 1
    d = (g @ omega[..., None])[..., 0] / mu
    radius = 0.5 * reference.norm(dim=-1)
    off = d - reference
    assert ((off.norm(dim=-1) - radius).abs() / radius).max() < 1e-2
    off = off * (radius / off.norm(dim=-1))[..., None]

    def worst(x: torch.Tensor) -> torch.Tensor:
        return (g.mT @ x[..., None])[..., 0].amin(-1)

    best = worst(reference + off)
    scale = reference.norm(dim=-1) * g.norm(dim=1).amax(-1)
    for seed in range(200):
        step = torch.nn.functional.normalize(
            problems(20, 1, 6, seed=seed)[..., 0], dim=-1
        )
        near = torch.nn.functional.normalize(off + 0.1 * step * radius[:, None], dim=-1)
        for ball in (step, near):
            rival = worst(reference + radius[:, None] * ball)
            assert ((rival - best) / scale).max() < 1e-3


def test_weighted_sum_is_the_limit_of_sdmgrad() -> None:
    g = problems(20, 4, 6)
    gram, p = g.mT @ g, positive(20, 4)
    far = rule_weights(gram, p, p, rule="sdmgrad", lam=1e7)
    near = rule_weights(gram, p, p, rule="ls")
    assert torch.allclose(far / far.sum(-1, keepdim=True), near, atol=1e-6)


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"preco-full", "residual"}))
def test_weights_are_a_certificate(rule: str) -> None:
    g = problems(30, 4, 6)
    omega = rule_weights(g.mT @ g, positive(30, 4), positive(30, 4, seed=1), rule=rule)
    assert (omega >= 0).all() and (omega.sum(-1) > 0).all()


def test_the_full_gradient_can_have_a_negative_weight() -> None:
    g = problems(30, 4, 6)
    p, v = positive(30, 4), positive(30, 4, seed=1)
    omega = rule_weights(g.mT @ g, p, v, rule="preco-full")
    assert (omega.amin(-1) < 0).any()


@pytest.mark.parametrize("rule", RULES)
def test_only_the_direction_of_the_preference_matters(rule: str) -> None:
    g = problems(30, 4, 6)
    p, v = positive(30, 4), positive(30, 4, seed=1)
    one = rule_weights(g.mT @ g, p, v, rule=rule)
    two = rule_weights(g.mT @ g, 9 * p, v, rule=rule)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    assert torch.allclose(unit(one), unit(two), atol=1e-9)


def test_lambda_may_differ_by_row() -> None:
    g = problems(3, 4, 6)
    p, v = positive(3, 4), positive(3, 4, seed=1)
    lam = torch.tensor([[0.0], [1.0], [9.0]], dtype=F64)
    rows = rule_weights(g.mT @ g, p, v, lam=lam)
    for i in range(3):
        alone = rule_weights(g[i].mT @ g[i], p[i], v[i], lam=float(lam[i]))
        assert torch.allclose(rows[i], alone, atol=1e-12)
    assert torch.allclose(rows[0], min_norm_weights(g[0].mT @ g[0]), atol=1e-12)


# ----------------------------------------------------------- against the authors' code
def test_golden_on_policy_direction() -> None:
    data = golden("onpolicy_preco")
    gamma, lam = float(data["gamma"]), float(data["lam"])
    rewards = data["rewards"].double()
    returns, running = torch.zeros_like(rewards), torch.zeros(6, dtype=F64)
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * running * (~data["dones"][t])
        returns[t] = running
    advantage = returns - data["critic_values"].double()  # (24, 6)
    pull = pull_residual(data["preference"], returns)
    assert torch.allclose(
        advantage @ pull, data["similarity_direction"].double(), atol=1e-5
    )
    mixed = -(advantage + lam * (advantage @ pull)[:, None]) / (1 + lam)
    assert torch.allclose(mixed.T, data["mixed_vectors"].double(), atol=1e-5)
    gram = advantage.T @ advantage
    omega = min_norm_weights(gram, lam * pull) + lam * pull
    direction = -(advantage @ omega) / (1 + lam)
    assert torch.allclose(direction, data["direction"].double(), atol=1e-4)


def test_golden_off_policy_direction() -> None:
    data = golden("offpolicy_actor")
    q = data["q_values"].double()  # (B, A, m)
    prob = data["logits"].double().softmax(-1)
    value = (prob[..., None] * q).sum(1)
    p = data["preference"].double()
    pull = pull_blend(p, value, sharpness=float(data["exp_sharpness"]))
    centred = q - q.mean(1, keepdim=True)
    steer = (centred * pull[:, None]).sum(-1)
    assert torch.allclose(steer, data["g_sim"].double(), atol=1e-5)
    lam = float(data["lam"])
    w = min_norm_weights(centred.mT @ centred, lam * pull)
    direction = (centred * (w + lam * pull)[:, None]).sum(-1)
    theirs = data["direction"].double()
    # Their solver stops early, by about 0.1 %.
    assert (direction - theirs).norm() / theirs.norm() < 2e-3
    loss = -(prob * direction).sum(-1).mean()
    assert abs(float(loss - data["loss"])) < 2e-3 * abs(float(data["loss"])) + 1e-3


# -------------------------------------------------------------------- the environments
TRACES = {
    "fruit_tree_v0_d5": ("fruit-tree-v0", {"depth": 5}),
    "fruit_tree_v0_d6": ("fruit-tree-v0", {"depth": 6}),
    "fruit_tree_v0_d7": ("fruit-tree-v0", {"depth": 7}),
    "deep_sea_treasure_v0": ("deep-sea-treasure-v0", {}),
    "deep_sea_treasure_concave_v0": ("deep-sea-treasure-concave-v0", {}),
    "deep_sea_treasure_mirrored_v0": ("deep-sea-treasure-mirrored-v0", {}),
    "resource_gathering_v0": ("resource-gathering-v0", {}),
}


@pytest.mark.parametrize("key", TRACES)
def test_tables_equal_mo_gymnasium_step_by_step(key: str) -> None:
    name, options = TRACES[key]
    env = TabularEnv.from_gymnasium(name, **options)
    data = {k.split("__")[1]: x for k, x in golden("env_traces").items() if key in k}
    index = {tuple(obs): i for i, obs in enumerate(env.obs.tolist())}
    state = torch.tensor([index[tuple(obs)] for obs in data["obs"].tolist()])
    action = data["action"]
    num_outcomes = env.prob.shape[-1]
    matched = torch.zeros(len(state), dtype=torch.bool)
    for outcome in range(num_outcomes):  # a random step must match one outcome
        reward = env.reward[state, action, outcome]
        done = env.done[state, action, outcome]
        same = (reward == data["reward"]).all(-1) & (done == data["terminated"])
        landed = env.obs[env.next_state[state, action, outcome]]
        same &= done | (landed == data["next_obs"]).all(-1)
        matched |= same
    assert matched.all()


@pytest.mark.parametrize("name", ["fruit_tree_v0_d6", "deep_sea_treasure_concave_v0"])
@pytest.mark.parametrize("gamma", [1.0, 0.99])
def test_exact_values_reach_the_known_front(name: str, gamma: float) -> None:
    gym_name, options = TRACES[name]
    env = TabularEnv.from_gymnasium(gym_name, gamma=gamma, **options)
    front = golden("env_traces")[f"{name}__front_g{'1' if gamma == 1 else '099'}"]
    # Follow the front's corners by value iteration over many weights.
    weights = simplex_grid(env.num_objectives, 9 if env.num_objectives == 6 else 40)
    v = torch.zeros(len(weights), env.num_states, env.num_objectives, dtype=F64)
    for _ in range(40):
        q = env._backup(v, slice(None))
        best = torch.einsum("ksam,km->ksa", q, weights).argmax(-1)
        v = q.gather(2, best[..., None, None].expand(-1, -1, 1, v.shape[-1]))[:, :, 0]
    policy = torch.nn.functional.one_hot(best, env.num_actions).double()
    reached = env.solve(0.999999 * policy + 1e-6 / env.num_actions).value
    gap = (reached[:, None] - front[None]).abs().amax(-1).amin(-1)
    assert gap.max() < 1e-2  # the policy explores a little to keep I - gamma P regular


def test_exact_value_agrees_with_sampling(tree: TabularEnv) -> None:
    g = make_generator(0)
    policy = torch.rand(3, 63, 2, generator=g).softmax(-1)
    _, _, returns = rollout(tree, policy, 4000, generator=g)
    error = returns[0].std(1) / 4000**0.5
    exact = tree.solve(policy).value
    # 18 numbers: 4 standard errors are passed once in 900 runs; the seed is fixed.
    assert ((returns[0].mean(1) - exact).abs() < 4 * error).all()


def test_tree_sweep_equals_the_linear_solve(tree: TabularEnv) -> None:
    policy = torch.rand(4, 63, 2, generator=make_generator(1), dtype=F64).softmax(-1)
    v, visits = tree._invert(policy)
    solution = tree.solve(policy)
    assert torch.allclose(v, solution.v) and torch.allclose(visits, solution.occupancy)


@pytest.mark.parametrize("name", ["tree", "sea"])
def test_value_is_occupancy_times_reward(name: str, request) -> None:
    env = request.getfixturevalue(name)
    shape = (4, env.num_states, env.num_actions)
    policy = torch.rand(shape, generator=make_generator(1), dtype=F64).softmax(-1)
    solution = env.solve(policy)
    mean = (env.prob[..., None] * env.reward).sum(2).double()
    flow = solution.occupancy[..., None] * policy
    value = torch.einsum("ksa,sam->km", flow, mean) + env.offset
    assert torch.allclose(value, solution.value)
    gain = (policy[..., None] * solution.advantage).sum(2)
    assert gain.abs().max() < 1e-5  # float32 rewards


def test_tree_occupancy_is_a_geometric_sum(tree: TabularEnv) -> None:
    policy = torch.rand(4, 63, 2, generator=make_generator(1), dtype=F64).softmax(-1)
    total = tree.solve(policy).occupancy.sum(-1)
    expected = (1 - 0.99**6) / (1 - 0.99)
    assert torch.allclose(total, torch.full_like(total, expected))


def test_advantage_is_the_policy_gradient(sea: TabularEnv) -> None:
    # d v_i / d logits[s, a] = d(s) pi(a|s) A_i(s, a), against autograd through solve.
    logits = torch.randn(1, sea.num_states, 4, generator=make_generator(2), dtype=F64)
    logits.requires_grad_()
    solution = sea.solve(logits.softmax(-1))
    (truth,) = torch.autograd.grad(solution.value[0, 0], logits)
    flow = solution.occupancy[..., None] * logits.softmax(-1)
    assert torch.allclose(truth, flow * solution.advantage[..., 0], atol=1e-8)


def test_random_outcomes_follow_their_probabilities() -> None:
    env = TabularEnv.from_gymnasium("resource-gathering-v0")
    risky = ((env.reward[..., 0] < 0) & (env.prob < 0.5)).nonzero()[0]
    state = risky[0].expand(20000)
    action = risky[1].expand(20000)
    _, reward, done = env.step(state, action, generator=make_generator(0))
    share = (reward[:, 0] < 0).double().mean()
    assert abs(float(share) - 0.1) < 4 * (0.09 / 20000) ** 0.5
    assert torch.equal(done, reward[:, 0] < 0)


def test_ray_oracle_equals_the_program_over_leaves(tree: TabularEnv) -> None:
    from scipy.optimize import linprog

    leaves = leaf_values(tree).numpy()
    preference = positive(5, 6)
    ours = ray_oracle(tree, preference)
    for p, t in zip(preference.numpy(), ours.tolist(), strict=True):
        solved = linprog(
            np.r_[np.zeros(64), -1.0],
            A_ub=np.c_[-leaves.T, p],
            b_ub=np.zeros(6),
            A_eq=np.r_[np.ones(64), 0.0][None],
            b_eq=[1.0],
        )
        assert abs(-solved.fun - t) < 1e-5 * t


def test_no_policy_beats_the_ray_oracle(sea: TabularEnv) -> None:
    preference = toy_preferences(7)
    ceiling = ray_oracle(sea, preference)
    policy = torch.randn(7, sea.num_states, 4, generator=make_generator(0), dtype=F64)
    value = sea.solve((3 * policy).softmax(-1)).value
    assert ((value / preference).amin(-1) <= ceiling + 1e-6).all()


# -------------------------------------------------------------------------- the metrics
def brute_hypervolume(points: np.ndarray) -> float:
    """Volume by cutting space along every coordinate: independent and slow."""
    m = points.shape[1]
    grids = [np.unique(np.r_[0.0, points[:, i]]) for i in range(m)]
    lower = np.stack(np.meshgrid(*[g[:-1] for g in grids], indexing="ij"), -1)
    upper = np.stack(np.meshgrid(*[g[1:] for g in grids], indexing="ij"), -1)
    lower, upper = lower.reshape(-1, m), upper.reshape(-1, m)
    is_inside = (points[:, None] >= upper[None]).all(-1).any(0)
    return float(np.prod(upper - lower, axis=1)[is_inside].sum())


@pytest.mark.parametrize("m", [2, 3, 4])
def test_hypervolume_equals_brute_force(m: int) -> None:
    points = positive(8, m, seed=m)
    assert hypervolume(points) == pytest.approx(brute_hypervolume(points.numpy()))
    shuffled = points[torch.randperm(8, generator=make_generator(0))]
    assert hypervolume(shuffled) == pytest.approx(hypervolume(points))
    assert hypervolume(points[:5]) <= hypervolume(points) + 1e-12


def test_golden_indicators() -> None:
    data = golden("indicators")
    for m in (2, 3, 4, 6):
        for n in (1, 5, 25):
            points = data[f"m{m}_n{n}_points"]
            key = f"m{m}_n{n}_"
            assert hypervolume(points) == pytest.approx(
                float(data[key + "hv"]), rel=1e-6
            )
            assert sparsity(points) == pytest.approx(
                float(data[key + "sparsity"]), rel=1e-6, abs=1e-9
            )
            ratio = float(nondominated(points).double().mean())
            assert ratio == pytest.approx(float(data[key + "nd_ratio"]))


def test_estimated_hypervolume_is_within_one_percent(tree: TabularEnv) -> None:
    leaves = leaf_values(tree)
    estimate = hypervolume(leaves, num_samples=50_000)
    assert estimate == pytest.approx(hypervolume(leaves), rel=0.01)


@pytest.mark.parametrize("depth", [5, 6, 7])
def test_golden_hypervolume_of_all_leaves(depth: int) -> None:
    env = TabularEnv.from_gymnasium("fruit-tree-v0", depth=depth, gamma=1.0)
    leaves, data = leaf_values(env), golden("indicators")
    assert nondominated(leaves).all() and len(leaves) == 2**depth
    for m in (2, 3, 4) if depth == 7 else (2, 3, 4, 5, 6):
        expected = float(data[f"fruit_d{depth}_m{m}_hv_ref0"])
        assert hypervolume(leaves[:, :m]) == pytest.approx(expected, rel=1e-6)


def test_hull_hypervolume_of_two_points_is_a_trapezoid() -> None:
    points = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
    assert hull_hypervolume(points) == pytest.approx(1 * 3 + (2 - 1) * (3 + 1) / 2)
    assert hull_hypervolume(points) >= hypervolume(points)


def test_eta_is_one_at_the_point_asked_for(tree: TabularEnv) -> None:
    preference = simplex_grid(6, 7)
    ceiling = ray_oracle(tree, preference)
    result = score(ceiling[:, None] * preference, preference, ceiling)
    assert result["eta"] == pytest.approx(1) and result["cosine"] == pytest.approx(1)


def test_eta_can_be_one_off_the_ray_where_the_ray_misses_the_front() -> None:
    # Two actions pay (1, 9) and (9, 1); nobody can be paid 20 to 1.
    env = TabularEnv.from_tables(
        next_state=torch.zeros(1, 2, 1, dtype=torch.long),
        reward=torch.tensor([[1.0, 9], [9, 1]], dtype=F64).reshape(1, 2, 1, 2),
        done=torch.ones(1, 2, 1, dtype=torch.bool),
    )
    preference = torch.tensor([[20.0, 1.0]], dtype=F64)
    ceiling = ray_oracle(env, preference)
    assert float(ceiling) == pytest.approx(9 / 20)
    result = score(torch.tensor([[9.0, 1.0]], dtype=F64), preference, ceiling)
    assert result["eta"] == pytest.approx(1) and result["cosine"] < 0.999


def test_simplex_grid_counts() -> None:
    assert simplex_grid(6, 9).shape == (56, 6)  # C(8, 5)
    assert simplex_grid(3, 10, interior=False).shape == (66, 3)  # C(12, 2)
    grid = simplex_grid(4, 8)
    assert (grid > 0).all() and torch.allclose(grid.sum(-1), torch.ones(35, dtype=F64))
    assert len(grid.unique(dim=0)) == 35


# ------------------------------------------------------------------ the method at work
LAMBDAS = (1.0, 5.0, 20.0)


@pytest.fixture(scope="module")
def toy() -> tuple[torch.Tensor, object]:
    """All lambdas in one batch: rows are lambda by lambda, 11 preferences each."""
    lam = torch.tensor(LAMBDAS, dtype=F64).repeat_interleave(11)[:, None]
    preference = toy_preferences().repeat(3, 1)
    run = run_toy(preference, lam=lam, steps=1200, generator=make_generator(0))
    return lam, run


def test_toy_ends_on_the_front_and_meets_the_bound(toy) -> None:
    lam, run = toy
    still = run.residual[-1] < 1e-6
    assert still[:22].all()  # lambda 20 needs more steps
    assert run.off_front[still].max() < 1e-6
    p = toy_preferences().repeat(3, 1)
    lack = similarity_semigrad(p, run.value)
    best = (run.value / p).argmax(-1, keepdim=True)
    # The front's normal from geometry: with the run's own weights the bound would
    # hold by construction.
    normal = toy_normal(run.x.sum(1) / 20**0.5)
    assert (run.weights - normal)[still].abs().max() < 1e-6
    bound = (1 / normal.gather(-1, best) - 1) / lam
    assert (lack.sum(-1) <= bound[:, 0] + 1e-6)[still].all()


def test_toy_table_of_lambda(toy) -> None:
    # Mean cosine and mean distance of an independent implementation with other starts;
    # over ten seeds ours spread by 0.02 and 0.03.
    _, run = toy
    cosine = run.cosine.reshape(3, 11).mean(1)
    distance = run.distance.reshape(3, 11).mean(1)
    theirs = torch.tensor([0.944, 0.9939, 0.9995], dtype=F64)
    assert (cosine - theirs).abs().max() < 0.03
    theirs = torch.tensor([0.172, 0.0545, 0.0156], dtype=F64)
    assert (distance - theirs).abs().max() < 0.04
    assert (distance.diff() < 0).all()


def test_toy_full_gradient_leaves_the_front(toy) -> None:
    full = run_toy(
        toy_preferences(), rule="preco-full", steps=800, generator=make_generator(0)
    )
    assert full.off_front.max() > 0.1 > toy[1].off_front[11:22].max()


def test_toy_value_on_the_front() -> None:
    a = torch.full((20,), 20**-0.5, dtype=F64)
    value = toy_value(0.3 * a)
    assert torch.allclose(value[0] / value[1], torch.tensor(4 * 0.3, dtype=F64).exp())


def test_preco_beats_the_weighted_sum_on_tables() -> None:
    # Depth 5 and few updates; the notebook runs depth 6 at the stated margins.
    config = TablesConfig(
        rules=(("ls", 0.0), ("preco", 5.0)), resolution=7, depth=5, iterations=150
    )
    result = run_tables(config, device=torch.device("cpu"))
    assert result["preco"]["eta"] > result["ls"]["eta"] + 0.25
    assert result["preco"]["cosine"] > 0.99


def test_weighted_sum_stays_at_the_ends_of_a_concave_front() -> None:
    config = TreasureConfig(num_preferences=7, iterations=300)
    result = run_treasure(config, device=torch.device("cpu"))
    assert result["ls"]["distinct"] <= 3 < result["preco"]["distinct"]
    # More than any number of deterministic policies could: the ten treasures together.
    ten = hypervolume(torch.tensor(result["front"])) / result["hull"]
    assert result["preco"]["hypervolume"] > ten > result["ls"]["hypervolume"]
    assert min(result["preco"]["eta_each"]) > 0.95 > min(result["ls"]["eta_each"])
    assert result["preco"]["hypervolume"] <= 1 + 1e-6  # the hull is the ceiling
    assert result["mgda"]["distinct"] == 1


SMALL = MetaConfig(iterations=3, num_preferences=4, num_episodes=4, hidden=16)


@pytest.mark.parametrize("train", [train_meta, train_ppo])
def test_training_is_deterministic_and_leaves_the_global_seed(train, tree) -> None:
    before = torch.random.get_rng_state()
    one, _ = train(tree, SMALL, generator=make_generator(3))
    two, _ = train(tree, SMALL, generator=make_generator(3))
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains_the_network(rule: str, tree: TabularEnv) -> None:
    config = MetaConfig(rule=rule, iterations=2, num_preferences=3, hidden=8)
    policy, _ = train_meta(tree, config, generator=make_generator(0))
    table = policy_table(tree, policy, sample_preferences(5, 6))
    assert torch.allclose(table.sum(-1), torch.ones(5, 63))


@pytest.mark.parametrize("train", [train_meta, train_ppo])
def test_a_short_training_aligns(train, tree: TabularEnv) -> None:
    config = MetaConfig(
        iterations=60,
        num_preferences=16,
        num_episodes=16,
        hidden=32,
        lr=5e-3,
        entropy=(0.3, 0.1),
    )
    grid = simplex_grid(6, 8)
    ceiling = ray_oracle(tree, grid)
    policy, log = train(tree, config, generator=make_generator(0))
    uniform = tree.solve(torch.full((21, 63, 2), 0.5, dtype=F64)).value
    with torch.no_grad():
        trained = tree.solve(policy_table(tree, policy, grid)).value.double()
    gain = score(trained, grid, ceiling)["eta"] - score(uniform, grid, ceiling)["eta"]
    assert gain > 0.05
    assert log["iteration"][-1] == 59


def test_split_first_layer_equals_a_joint_one() -> None:
    network = MetaPolicy(5, 3, 2, hidden=7, generator=make_generator(0)).double()
    features, preference = positive(4, 5), positive(6, 3)
    joint = torch.cat([network.on_state.weight, network.on_preference.weight], 1)
    unit = torch.nn.functional.normalize(preference, dim=-1)
    for k in range(6):
        x = torch.cat([features, unit[k].expand(4, 3)], 1)
        hidden = x @ joint.T + network.on_state.bias
        assert torch.allclose(
            network(features, preference[:, None])[k], network.head(hidden)
        )


def test_training_preferences_stay_off_the_axes() -> None:
    p = sample_preferences(2000, 6, generator=make_generator(0))
    assert torch.allclose(p.sum(-1), torch.ones(2000))
    assert p.min() > 0.02 / 1.12  # renormalised after the clamp


def test_no_python_loop_over_preferences(tree: TabularEnv) -> None:
    # The number of tensor operations does not depend on the number of preferences.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.calls += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for k in (2, 64):
        Count.calls = 0
        with Count():
            train_tables(tree, positive(k, 6), iterations=2)
        counts.append(Count.calls)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_have_frozen_configurations(name: str) -> None:
    for scale in ("laptop", "paper"):
        config = EXPERIMENTS[name].config(scale)
        with pytest.raises(AttributeError):
            config.seed = 1


@pytest.mark.skipif(
    importlib.util.find_spec("mujoco") is None, reason="needs mo-gymnasium[mujoco]"
)
def test_hopper_runs() -> None:
    from icml25.pcrl.continuous import HopperConfig, run_hopper

    config = HopperConfig(
        iterations=1, num_preferences=2, horizon=8, resolution=3, epochs=1
    )
    result = run_hopper(config, device=torch.device("cpu"))
    assert result["untrained"]["steps"] == 0
    for rule in ("ls", "preco"):
        row = result[rule]
        assert 0 < row["cosine"] <= 1
        assert len(row["value"]) == len(row["preference"]) == 2
        assert 0 < row["steps"] <= 16


# ---------------------------------------------------------------------------- bad input
EYE = torch.eye(3)
ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: rule_weights(EYE, torch.tensor([1.0, 0, 1]), ONES),
            "preference holds 0",
        ),
        (lambda: rule_weights(EYE, torch.tensor([1.0, -2, 1]), ONES), "holds -2"),
        (lambda: rule_weights(EYE, ONES, torch.tensor([1.0, -1, 1])), "value holds -1"),
        (lambda: rule_weights(EYE, ONES, ONES * torch.nan), "value holds nan"),
        (
            lambda: rule_weights(EYE, torch.ones(2), torch.ones(2)),
            "2 objectives, gram 3",
        ),
        (
            lambda: rule_weights(EYE, torch.ones(2), ONES),
            "numbers of objectives differ",
        ),
        (lambda: rule_weights(EYE * torch.nan, ONES, ONES), "NaN or infinity"),
        (
            lambda: rule_weights(EYE, ONES, ONES, rule="best"),
            "rule='best': allowed are",
        ),
        (lambda: rule_weights(EYE, ONES, ONES, lam=-1.0), "lam=-1.0: give a number"),
        (lambda: min_norm_weights(torch.ones(2, 3)), r"gram has shape \(2, 3\)"),
        (lambda: min_norm_weights(EYE, torch.ones(2)), "pull has 2 entries"),
        (lambda: similarity_semigrad(ONES, torch.zeros(3)), "value holds 0"),
        (lambda: TabularEnv.from_gymnasium("fruit-tree-v0", depth=4), "depth=4"),
        (lambda: TabularEnv.from_gymnasium("mo-mountaincar-v0"), "is not tabular here"),
        (lambda: TabularEnv.from_gymnasium("no-such-env"), "cannot be made"),
        (lambda: TabularEnv.from_gymnasium("fruit-tree-v0", gamma=0.0), "gamma=0.0"),
        (lambda: simplex_grid(6, 5), "no preference"),
        (
            lambda: hypervolume(torch.tensor([[1.0, torch.nan]])),
            "must be .n, m. and finite",
        ),
        (lambda: score(torch.ones(2, 3), torch.ones(2, 2)), "shapes differ"),
        (lambda: hull_hypervolume(-torch.ones(2, 2)), "below the reference"),
        (lambda: MetaPolicy(0, 3, 2), "must be positive"),
    ],
)
def test_bad_input_is_named(call, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_bad_tables_are_named() -> None:
    next_state = torch.zeros(1, 2, 1, dtype=torch.long)
    done = torch.ones(1, 2, 1, dtype=torch.bool)
    reward = torch.ones(1, 2, 1, 3)
    broken = reward.clone()
    broken[0, 1, 0, 2] = torch.nan
    with pytest.raises(ValueError, match=r"reward\[\[0, 1, 0, 2\]\] is not finite"):
        TabularEnv.from_tables(next_state, broken, done)
    with pytest.raises(ValueError, match="must agree in"):
        TabularEnv.from_tables(next_state, reward[:, :1], done)
    with pytest.raises(ValueError, match="must lie in"):
        TabularEnv.from_tables(next_state + 1, reward, done)
    with pytest.raises(ValueError, match="sum to one"):
        TabularEnv.from_tables(
            next_state, reward, done, prob=torch.full((1, 2, 1), 0.5)
        )
    with pytest.raises(ValueError, match=r"must be \(S, A, O\)"):
        TabularEnv.from_tables(next_state[0], reward, done)
    with pytest.raises(ValueError, match="start=1: states are 0..0"):
        TabularEnv.from_tables(next_state, reward, done, start=1)
    with pytest.raises(ValueError, match="gamma=1.5"):
        TabularEnv.from_tables(next_state, reward, done, gamma=1.5)
    with pytest.raises(ValueError, match=r"prob \(2,\) must be \(1, 2, 1\)"):
        TabularEnv.from_tables(next_state, reward, done, prob=torch.ones(2))
    with pytest.raises(ValueError, match="prob holds -1"):
        TabularEnv.from_tables(next_state, reward, done, prob=-torch.ones(1, 2, 1))
    with pytest.raises(TypeError, match=r"done has dtype torch\.uint8"):
        TabularEnv.from_tables(next_state, reward, done.byte())
    with pytest.raises(TypeError, match=r"reward has dtype torch\.int64"):
        TabularEnv.from_tables(next_state, reward.long(), done)


def test_tables_stay_on_their_device() -> None:
    next_state = torch.tensor([[[1], [1]], [[0], [0]]])
    done = torch.tensor([[[False], [False]], [[True], [True]]])
    reward = torch.ones(2, 2, 1, 2)
    with torch.device("meta"):  # where a tensor without a device of its own would go
        env = TabularEnv.from_tables(next_state, reward, done)
    made = [x for x in vars(env).values() if isinstance(x, torch.Tensor)]
    assert {x.device.type for x in (*made, *env.levels)} == {"cpu"}
    assert len(env.levels) == 2


@pytest.mark.parametrize("name", ["tree", "sea"])
def test_a_preference_may_be_coarser_or_finer_than_the_tables(name, request) -> None:
    env = request.getfixturevalue(name)
    fine = replace(env, reward=env.reward.to(F64), offset=env.offset.to(F64))
    preference = torch.full((1, env.num_objectives), 0.5, dtype=F64)
    values = [
        train_tables(tables, asked, iterations=3)[1].value
        for tables in (env, fine)
        for asked in (preference, preference.float())
    ]
    assert [value.dtype for value in values] == [F64, torch.float32] * 2
    for value in values:
        torch.testing.assert_close(
            value, values[-2], check_dtype=False, rtol=1e-4, atol=1e-4
        )


def test_bad_training_input_is_named(tree: TabularEnv, sea: TabularEnv) -> None:
    with pytest.raises(ValueError, match=r"needs \(K, 6\)"):
        train_tables(tree, torch.ones(4, 3))
    with pytest.raises(ValueError, match="preference holds 0; every entry must be"):
        train_tables(tree, torch.zeros(4, 6))
    with pytest.raises(ValueError, match="rule='sgd'"):
        train_meta(tree, MetaConfig(rule="sgd"))
    with pytest.raises(ValueError, match="lam=-1.0: give a number >= 0"):
        train_tables(tree, torch.ones(1, 6), lam=-1.0)
    with pytest.raises(ValueError, match="lam=nan"):
        train_meta(tree, MetaConfig(lam=float("nan")))
    with pytest.raises(ValueError, match="iterations=0: give a number > 0"):
        MetaConfig(iterations=0)
    with pytest.raises(ValueError, match=r"entropy=\(-1.0, 0.1\)"):
        MetaConfig(entropy=(-1.0, 0.1))
    with pytest.raises(ValueError, match=r"dtype torch.int64; give floating"):
        train_tables(tree, torch.ones(1, 6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"dtype torch.int64; give floats"):
        ray_oracle(tree, torch.ones(1, 6, dtype=torch.long))
    raw = TabularEnv.from_gymnasium("deep-sea-treasure-concave-v0")
    with pytest.raises(ValueError, match=r"objectives \[1\] are never positive"):
        train_tables(raw, torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"preference has shape \(1, 3\); need"):
        run_toy(torch.ones(1, 3))
    with pytest.raises(ValueError, match="preference holds 0"):
        run_toy(torch.tensor([[0.0, 1.0]]))
    with pytest.raises(ValueError, match="bounded length"):
        train_ppo(sea, SMALL)
    with pytest.raises(ValueError, match=r"need \(K, 63, 2\)"):
        tree.solve(torch.ones(1, 5, 2))
    with pytest.raises(ValueError, match="entries must be > 0"):
        ray_oracle(tree, torch.zeros(1, 6))
    with pytest.raises(ValueError, match="every entry must be positive"):
        sea.with_utility(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="num=7"):
        tree.with_objectives(7)
    with pytest.raises(ValueError, match="preference has 3 objectives"):
        MetaPolicy(4, 2, 2)(torch.ones(1, 4), torch.ones(1, 3))


def test_weights_are_drawn_where_the_generator_lives() -> None:
    class OnMeta(torch.Generator):  # stands in for a GPU's generator
        device = torch.device("meta")

    policy = MetaPolicy(4, 2, 3, generator=OnMeta())
    assert all(parameter.is_meta for parameter in policy.parameters())
    assert next(MetaPolicy(4, 2, 3).parameters()).device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_everything_runs_on_a_gpu(tree: TabularEnv) -> None:
    env = tree.to("cuda")
    for train in (train_meta, train_ppo):
        policy, _ = train(env, SMALL, generator=make_generator(0, "cuda"))
        assert next(policy.parameters()).is_cuda
    where = torch.device("cuda")
    for sampled in (False, True):
        network = NetworkConfig(runs=(SMALL,), resolution=7, sampled=sampled)
        assert run_network(network, device=where)[SMALL.rule]["eta"] > 0
    run_tables(TablesConfig(resolution=7, iterations=2), device=where)
    run_treasure(TreasureConfig(num_preferences=3, iterations=2), device=where)
    rays = toy_preferences(3).to(where)
    assert run_toy(rays, steps=2, generator=make_generator(0, where)).x.is_cuda
