"""icml25.golore: bases, optimisers, theory."""

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from icml25.golore import (
    EXPERIMENTS,
    GoLore,
    GoLoreSGD,
    StallProblem,
    _subspace,
    golore_bound,
    singular_basis,
    split_param_groups,
    state_numel,
    stiefel_uniform,
)
from icml25.golore.bases import SKETCHES
from icml25.golore.stall import sketch_facts
from icml25.golore.theory import golore_lr, llama_shapes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

GOLDEN = Path(__file__).parent / "golden" / "golore"
BASES = {
    "svd": lambda g, r, gen: singular_basis(g, r),
    "rsvd": lambda g, r, gen: singular_basis(g, r, method="rsvd", generator=gen),
    **{
        name: lambda g, r, gen, sketch=sketch: sketch(
            g.shape[-2], r, batch=g.shape[:-2], generator=gen, dtype=g.dtype
        )
        for name, sketch in SKETCHES.items()
    },
}


def make(seed=0):
    return torch.Generator().manual_seed(seed)


def parameters(shapes, seed=0, dtype=torch.float32):
    generator = make(seed)
    return [
        nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes
    ]


def feed(params, generator):
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


# Bases


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("rank", [1, 5, 40])
def test_every_basis_is_orthonormal(name, rank, dtype, tolerance):
    matrix = torch.randn(3, 40, 60, generator=make(), dtype=dtype)
    basis = BASES[name](matrix, rank, make(1))
    assert basis.shape == (3, 40, rank)
    assert basis.dtype == dtype
    eye = torch.eye(rank, dtype=dtype)
    assert (basis.mT @ basis - eye).abs().max() < tolerance


@pytest.mark.parametrize("rows", [7, 10, 16])
@pytest.mark.parametrize("name", SKETCHES)
def test_random_projectors_average_to_a_multiple_of_the_identity(name, rows):
    facts = sketch_facts(SKETCHES[name], rows, 3, 20_000, make())
    assert facts["orthonormality"] < 1e-12
    assert facts["bias"] < 5  # standard errors, over at most 256 entries


def test_random_projection_keeps_its_share_of_any_fixed_gradient():
    gradient = torch.randn(12, 20, generator=make(), dtype=torch.float64)
    gradient[1:] *= 0.01  # nearly rank one: the worst case for the spread
    bases = stiefel_uniform(
        12, 3, batch=(20_000,), generator=make(1), dtype=torch.float64
    )
    share = (bases.mT @ gradient).square().sum((-2, -1)) / gradient.square().sum()
    standard_error = share.std() / math.sqrt(len(share))
    assert abs(share.mean() - 3 / 12) < 5 * standard_error


@pytest.mark.parametrize("seed", range(5))
def test_singular_basis_leaves_at_most_its_share_behind(seed):
    matrix = torch.randn(50, 9, 14, generator=make(seed), dtype=torch.float64)
    for rank in range(1, 10):
        kept = (singular_basis(matrix, rank).mT @ matrix).square().sum((-2, -1))
        whole = matrix.square().sum((-2, -1))
        assert (kept >= rank / 9 * whole * (1 - 1e-12)).all()


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_randomised_basis_keeps_nearly_the_best_energy(decay):
    u, _ = torch.linalg.qr(torch.randn(120, 120, generator=make()))
    v, _ = torch.linalg.qr(torch.randn(200, 120, generator=make(1)))
    values = torch.arange(1.0, 121.0) ** -decay
    matrix = u * values @ v.mT
    basis = singular_basis(matrix, 20, method="rsvd", generator=make(2))
    kept = (basis.mT @ matrix).square().sum() / values[:20].square().sum()
    assert 0.95 < kept < 1 + 1e-5


@pytest.mark.parametrize("method", ["svd", "rsvd"])
def test_zero_gradient_gives_an_orthonormal_basis(method):
    basis = singular_basis(torch.zeros(30, 40), 4, method=method, generator=make())
    assert (basis.mT @ basis - torch.eye(4)).abs().max() < 1e-5


@pytest.mark.parametrize("rank", [0, 6, 2.0])
@pytest.mark.parametrize("name", BASES)
def test_rank_out_of_range_is_named(name, rank):
    with pytest.raises(
        ValueError, match=r"rank must be a whole number between 1 and 5"
    ):
        BASES[name](torch.zeros(5, 7), rank, make())


def test_a_vector_has_no_singular_basis():
    with pytest.raises(ValueError, match=r"matrix must be \(..., m, n\), got \(5,\)"):
        singular_basis(torch.zeros(5), 1)


# Optimisers: identities


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
@pytest.mark.parametrize("switch_step", [None, 0, 5])
def test_full_rank_sgd_is_torch_sgd(shape, switch_step):
    ours, theirs = parameters([shape]), parameters([shape])
    options = {"momentum": 0.9, "dampening": 0.3}
    a = GoLoreSGD(
        ours,
        0.1,
        switch_step=switch_step,
        rank=min(shape),
        update_interval=3,
        **options,
    )
    b = torch.optim.SGD(theirs, 0.1, **options)
    generator = make(1)
    for _ in range(11):
        feed(ours, generator)
        theirs[0].grad = ours[0].grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (GoLore, torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-6}),
        (GoLoreSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.9}),
        (GoLoreSGD, torch.optim.SGD, {"momentum": 0.0, "dampening": 0.0}),
    ],
)
def test_dense_group_is_bitwise_torch(ours, theirs, options):
    shapes = [(6, 9), (5,), (), (2, 3, 4)]
    mine, reference = parameters(shapes), parameters(shapes)
    a = ours(mine, 0.1, switch_step=0, rank=None, **options)
    kind = {"fused": True} if theirs is torch.optim.AdamW else {"foreach": True}
    b = theirs(reference, 0.1, **options, **kind)
    generator = make(1)
    for _ in range(5):
        feed(mine, generator)
        for p, q in zip(mine, reference, strict=True):
            q.grad = p.grad.clone()
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, reference, strict=True))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_one_subspace_is_adamw_on_the_factor(shape):
    weight = parameters([shape])[0]
    start = weight.detach().clone()
    options = {"betas": (0.8, 0.9), "eps": 1e-5}
    a = GoLore([weight], 0.05, switch_step=0, rank=2, update_interval=99, **options)
    factor, b = None, None
    generator = make(3)
    for _ in range(6):
        feed([weight], generator)
        a.step()
        basis = a.state[weight]["basis"]
        low = weight.grad.mT if shape[0] > shape[1] else weight.grad
        if factor is None:
            factor = nn.Parameter(torch.zeros(2, max(shape)))
            b = torch.optim.AdamW([factor], 0.05, weight_decay=0.0, **options)
        factor.grad = basis.mT @ low
        b.step()
    moved = basis @ factor.detach()
    moved = moved.mT if shape[0] > shape[1] else moved
    torch.testing.assert_close(weight.detach(), start + moved, rtol=1e-5, atol=1e-6)


def plain_golore(weights, grads_per_step, bases, *, lr, decay, scale, eps, interval):
    """Algorithm 1 with AdamW, one matrix at a time; bases are given."""
    result = []
    for i, weight in enumerate(weights):
        x = weight.double()
        for t, grads in enumerate(grads_per_step):
            g, p = grads[i].double(), bases[t][i].double()
            is_left = x.shape[0] < x.shape[1]
            r = p.mT @ g if is_left else (g @ p).mT
            if t == 0:
                m, v = torch.zeros_like(r), torch.zeros_like(r)
            elif t % interval == 0:
                m = p.mT @ bases[t - 1][i].double() @ m
            m, v = 0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r * r
            n = m / (1 - 0.9 ** (t + 1))
            n = n / ((v / (1 - 0.999 ** (t + 1))).sqrt() + eps)
            update = p @ n if is_left else (p @ n).mT
            x = (1 - lr * decay) * x - lr * scale * update
        result.append(x)
    return result


@pytest.mark.parametrize("tiny", [0, 1 << 14], ids=["per matrix", "stacked"])
def test_buckets_agree_with_the_plain_algorithm(tiny, monkeypatch):
    monkeypatch.setattr(_subspace, "_TINY", tiny)
    params = parameters([(6, 9), (9, 6), (6, 9), (7, 7), (9, 6)])
    start = [p.detach().clone() for p in params]
    options = {"lr": 0.03, "scale": 0.5, "eps": 1e-4}
    optimizer = GoLore(
        params,
        switch_step=4,
        rank=3,
        update_interval=3,
        weight_decay=0.1,
        projection="svd",
        **options,
    )
    generator, grads, bases = make(1), [], []
    for _ in range(10):
        feed(params, generator)
        optimizer.step()
        grads.append([p.grad.clone() for p in params])
        bases.append([optimizer.state[p]["basis"].clone() for p in params])
    # GaLore phase (refreshes 0 and 3): the basis is the gradient's own
    for p, g, basis in zip(params, grads[3], bases[3], strict=True):
        g = g if p.shape[0] < p.shape[1] else g.mT
        u = singular_basis(g, 3)
        torch.testing.assert_close(basis @ basis.mT, u @ u.mT, atol=1e-5, rtol=0)
    # GoLore phase: a new basis at 6 and 9 only, different for every parameter
    assert torch.equal(bases[6][0], bases[8][0])
    assert not torch.equal(bases[8][0], bases[9][0])
    assert not torch.equal(bases[6][0], bases[6][2])
    wanted = plain_golore(start, grads, bases, decay=0.1, interval=3, **options)
    for p, w in zip(params, wanted, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=1e-5, atol=2e-6)


def test_reproject_false_keeps_the_stale_moment():
    moments = {}
    for reproject in (True, False):
        params = parameters([(6, 9)])
        optimizer = GoLoreSGD(
            params,
            0.0,
            switch_step=0,
            rank=2,
            update_interval=2,
            momentum=0.5,
            reproject=reproject,
        )
        generator = make(1)
        for step in range(3):
            feed(params, generator)
            if step == 2:
                params[0].grad.zero_()
                before = {k: v.clone() for k, v in optimizer.state[params[0]].items()}
            optimizer.step()
        after = optimizer.state[params[0]]
        turn = after["basis"].mT @ before["basis"] if reproject else torch.eye(2)
        moments[reproject] = after["momentum_buffer"].clone()
        wanted = 0.5 * turn @ before["momentum_buffer"]
        torch.testing.assert_close(moments[reproject], wanted)
    assert not torch.allclose(moments[True], moments[False])


# Golden trajectories of the authors' code (see golden/golore/README.md)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", ["sgd", "adamw"])
def test_golden_fixed_subspace(method, side):
    gold = np.load(GOLDEN / f"fixed_subspace_{side}.npz")
    lr, decay = gold["lr"].item(), gold["weight_decay"].item()
    common = {
        "switch_step": None,
        "rank": gold["rank"].item(),
        "scale": gold["scale"].item(),
        "update_interval": 100,
        "projection": "svd",
    }
    later = 1.0
    if method == "adamw":
        betas = tuple(gold["betas"].tolist())
        later = 1 - lr * decay
        weight = nn.Parameter(torch.from_numpy(gold["W0"]) / later)
        optimizer = GoLore([weight], lr, betas=betas, weight_decay=decay, **common)
    else:
        weight = nn.Parameter(torch.from_numpy(gold["W0"]))
        momentum = gold["momentum"].item()
        optimizer = GoLoreSGD([weight], lr, momentum=momentum, dampening=0.0, **common)
    for t, grad in enumerate(gold["grads"]):
        if method == "adamw":
            eps = gold["eps"].item() / math.sqrt(1 - betas[1] ** (t + 1))
            optimizer.param_groups[0]["eps"] = eps
        weight.grad = torch.from_numpy(grad)
        optimizer.step()
        reached = later * weight.detach().numpy()
        np.testing.assert_allclose(reached, gold[f"W_{method}"][t], rtol=0, atol=2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", ["sgd", "adamw"])
def test_golden_momentum_reprojection(method, side):
    gold = np.load(GOLDEN / f"reproject_{method}_{side}.npz")
    weight = nn.Parameter(torch.from_numpy(gold["W0"]))
    common = {
        "lr": gold["lr"].item(),
        "switch_step": None,
        "rank": gold["rank"].item(),
        "update_interval": gold["tau"].item(),
        "projection": "svd",
    }
    if method == "adamw":
        betas = tuple(gold["betas"].tolist())
        optimizer = GoLore([weight], betas=betas, **common)
    else:
        momentum = gold["momentum"].item()
        optimizer = GoLoreSGD([weight], momentum=momentum, dampening=0.0, **common)
    for t, (x, y) in enumerate(zip(gold["X"], gold["Y"], strict=True)):
        if method == "adamw":
            eps = gold["eps"].item() / math.sqrt(1 - betas[1] ** (t + 1))
            optimizer.param_groups[0]["eps"] = eps
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        weight.grad = (x @ weight.detach().mT - y).mT @ x / 6
        optimizer.step()
        reached = weight.detach().numpy()
        np.testing.assert_allclose(reached, gold["W"][t], rtol=0, atol=2e-5)


def golden_counterexample(signs):
    gold = np.load(GOLDEN / "counterexample_galore_sgd.npz")
    problem = StallProblem(generator=make(42))
    weight = nn.Parameter(torch.from_numpy(gold["X0"]).double())
    optimizer = GoLoreSGD(
        [weight],
        gold["lr"].item(),
        switch_step=None,
        rank=4,
        update_interval=gold["tau"].item(),
        momentum=0.0,
        side="left",
        projection="svd",
    )
    block = torch.zeros(10, 10, dtype=torch.float64)
    block[6:, 6:] = torch.eye(4)
    losses = []
    for sign in signs:
        losses.append(problem.loss(weight.detach()).item())
        weight.grad = problem.grad(weight.detach()) + sign * block
        optimizer.step()
    return gold, problem, np.array(losses), weight.detach()


def test_golden_counterexample_and_its_independence_of_the_noise():
    signs = np.load(GOLDEN / "counterexample_galore_sgd.npz")["signs"]
    gold, problem, losses, final = golden_counterexample(signs)
    np.testing.assert_allclose(problem._offset[:, :6], gold["D"], rtol=0, atol=1e-6)
    assert problem.f_star == pytest.approx(gold["f_star"].item(), abs=1e-5)
    np.testing.assert_allclose(losses, gold["loss"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(final[:6], gold["X_top_final"], rtol=0, atol=1e-3)
    flipped = golden_counterexample(-signs)[-1]
    # the sign enters the SVD, whose round-off is all that may differ
    torch.testing.assert_close(flipped[:6], final[:6], rtol=0, atol=1e-9)


# Optimisers: state


def mixed(cls, params, **options):
    groups = [
        {"params": params[:3], "rank": 2},
        {"params": params[3:5], "rank": 3, "side": "right", "projection": "svd"},
        {"params": params[5:], "rank": None},
    ]
    return cls(groups, 0.05, switch_step=4, update_interval=3, seed=7, **options)


MIXED = [(6, 9), (9, 6), (6, 9), (5, 8), (8, 8), (4,), (3, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", [GoLore, GoLoreSGD])
@pytest.mark.parametrize("stop", [1, 3, 5])  # the next refreshes are at 3 and 6
def test_resume_is_bitwise_and_crosses_a_refresh(cls, dtype, stop, tmp_path):
    params = [p.data.to(dtype) for p in parameters(MIXED)]
    params = [nn.Parameter(p) for p in params]
    optimizer = mixed(cls, params)
    generator = make(1)
    for _ in range(stop):
        feed(params, generator)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = mixed(cls, copies)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(5):
        feed(params, generator)
        for p, q in zip(params, copies, strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        resumed.step()
        assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))


def test_state_holds_tensors_only_and_the_formula_counts_them():
    params = parameters(MIXED)
    for cls, num_moments in ((GoLore, 2), (GoLoreSGD, 1)):
        optimizer = mixed(cls, params)
        feed(params, make(1))
        optimizer.step()
        values = [v for s in optimizer.state.values() for v in s.values()]
        assert all(isinstance(v, torch.Tensor) for v in values)
        # (8, 8) on the right: min = max; (5, 8) on the right stores 8 x 3 and 5 x 3
        counted = sum(v.numel() for v in values if v.dim())
        wanted = (
            state_numel(MIXED[:3], rank=2, num_moments=num_moments)
            + state_numel([(8, 8)], rank=3, num_moments=num_moments)
            + 3 * (8 + num_moments * 5)
            + state_numel(MIXED[5:], rank=None, num_moments=num_moments)
        )
        assert counted == wanted


def test_copies_and_pickles_go_on_alike():
    params = parameters(MIXED)
    optimizer = mixed(GoLore, params)
    feed(params, make(1))
    optimizer.step()
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for _ in range(4):
        feed(params, make(2))
        optimizer.step()
        for twin in twins:
            others = [p for g in twin.param_groups for p in g["params"]]
            for p, q in zip(params, others, strict=True):
                q.grad = p.grad.clone()
            twin.step()
            assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_copies_carry_the_refresh_gradients():
    params = parameters([(6, 9)])
    options = {"rank": 2, "switch_step": None, "projection": "svd"}
    optimizer = GoLore(params, refresh_grads=eyes, **options)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (q,) = twin.param_groups[0]["params"]
        q.grad = torch.randn(q.shape, generator=make(1))
        twin.step()
        # the basis of the eye's singular vectors: nothing of the step's own gradient
        basis = twin.state[q]["basis"]
        assert torch.equal(basis, singular_basis(torch.eye(6, 9), 2))


def eyes(params):
    return [torch.eye(*p.shape) for p in params]


def test_resume_after_a_missing_gradient_differs_by_rounding_only():
    params = parameters([(6, 9)] * 3)
    options = {"switch_step": 0, "rank": 2, "update_interval": 3}
    optimizer = GoLore(params, 0.05, **options)
    for missing in (None, 0, 1):  # two buckets, whose step counts come to agree
        feed(params, make(1))
        if missing is not None:
            params[missing].grad = None
        optimizer.step()
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = GoLore(copies, 0.05, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(5):
        feed(params, make(2))
        for p, q in zip(params, copies, strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        resumed.step()
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # float32 rounding


def test_half_precision_weights_keep_float32_state():
    params = [nn.Parameter(p.data.bfloat16()) for p in parameters(MIXED)]
    exact = [nn.Parameter(p.data.float()) for p in params]
    optimizer, reference = mixed(GoLore, params), mixed(GoLore, exact)
    generator = make(1)
    for _ in range(8):
        feed(params, generator)
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    for p, q in zip(params, exact, strict=True):
        assert p.dtype == torch.bfloat16
        kinds = {v.dtype for k, v in optimizer.state[p].items() if k != "refresh_count"}
        assert kinds == {torch.float32}
        # 8 updates of 0.05, each rounded to 8 bits
        torch.testing.assert_close(p.float(), q.detach(), rtol=0.02, atol=0.05)


def test_missing_gradients_postpone_a_parameter_and_only_it():
    params, twins = parameters(MIXED[:3]), parameters(MIXED[:3])
    options = {"switch_step": 0, "rank": 2, "update_interval": 2}
    optimizer, reference = GoLore(params, 0.1, **options), GoLore(twins, 0.1, **options)
    generator = make(1)
    for step in range(7):
        feed(params, generator)
        if step in (0, 3):  # the first and third matrix share a bucket
            params[2].grad = None
        for p, q in zip(params, twins, strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        # the reference never sees the third: the others must not notice
        twins[2].grad = None
        reference.step()
    assert torch.equal(params[0], twins[0])
    assert torch.equal(params[1], twins[1])
    assert optimizer.state[params[0]]["step"] == 7
    assert optimizer.state[params[2]]["step"] == 5
    assert optimizer.state[params[2]]["refresh_count"] == 3  # at its steps 0, 2, 4
    assert twins[2] not in reference.state


@pytest.mark.parametrize("cls", [GoLore, GoLoreSGD])
def test_a_part_frozen_in_mid_training_leaves_the_rest_going(cls):
    def block():
        sizes = {"attn": (16, 16), "mlp_in": (16, 64), "mlp_out": (64, 16)}
        return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})

    net = nn.ModuleList([block(), block()])
    # Buckets of several shapes, each with more than one parameter, the dense included.
    optimizer = cls(split_param_groups(net), 0.1, rank=4, switch_step=0)

    def step():
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=make())
        for part in net:
            x = x + part["attn"](x)
            x = x + part["mlp_out"](part["mlp_in"](x))
        x.square().mean().backward()
        optimizer.step()

    step()
    frozen = net[1]["mlp_out"].requires_grad_(False)
    before = {name: p.clone() for name, p in net.named_parameters()}
    for _ in range(2):
        step()
    for name, p in net.named_parameters():
        still = name.startswith("1.mlp_out")
        assert torch.equal(p, before[name]) == still, name
        assert optimizer.state[p]["step"] == (1 if still else 3)
    frozen.requires_grad_(True)
    step()
    assert optimizer.state[frozen.weight]["step"] == 2


def test_scheduler_and_closure_are_honoured():
    params = parameters([(6, 9)])
    optimizer = GoLore(params, 0.1, switch_step=0, rank=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step)

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    start = params[0].detach().clone()
    assert torch.equal(optimizer.step(closure), start.square().sum())
    moved = params[0].detach().clone()
    assert not torch.equal(moved, start)
    schedule.step()  # lr is 0 now
    optimizer.step(closure)
    assert torch.equal(params[0], moved)


def test_refresh_gradients_choose_the_basis_only_when_it_is_singular():
    params = parameters([(6, 9), (9, 6)])
    calls = []

    def refresh_grads(due):
        calls.append([id(p) for p in due])
        return torch.autograd.grad(sum((p**3).sum() for p in due), due)

    optimizer = GoLore(
        params,
        0.0,
        switch_step=3,
        rank=2,
        update_interval=2,
        projection="svd",
        refresh_grads=refresh_grads,
    )
    for _ in range(6):
        feed(params, make(1))
        optimizer.step()
        if len(calls) == 1:
            u = singular_basis(3 * params[0].detach() ** 2, 2)
            basis = optimizer.state[params[0]]["basis"]
            torch.testing.assert_close(basis @ basis.mT, u @ u.mT, atol=1e-5, rtol=0)
    assert calls == [[id(p) for p in params]] * 2  # steps 0 and 2, not 4
    optimizer = GoLore(
        params, switch_step=None, rank=2, refresh_grads=lambda due: [due[0]]
    )
    with pytest.raises(ValueError, match="refresh_grads must return one gradient"):
        optimizer.step()


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        for t in torch.utils._pytree.tree_leaves(result):
            if (
                isinstance(t, torch.Tensor)
                and t.untyped_storage().data_ptr() not in known
            ):
                self.largest = max(self.largest, t.numel())
        return result


@pytest.mark.parametrize("cls", [GoLore, GoLoreSGD])
def test_step_and_random_refresh_make_no_full_size_copy_and_never_wait(cls):
    params = parameters([(128, 256)] * 3 + [(256, 128)] * 2)
    optimizer = cls(params, switch_step=0, rank=4, update_interval=2, weight_decay=0.1)
    feed(params, make(1))
    optimizer.step()
    for _ in range(2):  # an ordinary step, then a refresh
        with Watch() as watch:
            optimizer.step()
        # largest: the projected gradients of the bucket of three, 3 x 4 x 256
        assert watch.largest <= 3 * 4 * 256
        assert "_local_scalar_dense" not in watch.names
        assert watch.names.count("addmm_") == 5


def test_moments_of_a_bucket_are_updated_in_one_go():
    ops = []
    for count in (8, 32):
        params = parameters([(128, 256)] * count)
        optimizer = GoLore(params, switch_step=0, rank=4)
        feed(params, make(1))
        optimizer.step()
        with Watch() as watch:
            optimizer.step()
        ops.append(
            sum(n not in ("mm", "addmm_", "t", "transpose") for n in watch.names)
        )
    assert ops[0] < 30
    assert ops[1] < ops[0] + 8  # unbinding aside, no work per matrix but two products


# Optimisers: replicas


def test_bases_depend_on_seed_position_and_count_only():
    bases = []
    for global_seed, seed in ((1, 0), (2, 0), (1, 5)):
        torch.manual_seed(global_seed)
        params = parameters([(6, 9), (6, 9)])
        optimizer = GoLore(params, switch_step=0, rank=2, update_interval=1, seed=seed)
        for _ in range(2):
            feed(params, make(global_seed))
            optimizer.step()
        bases.append([optimizer.state[p]["basis"].clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(bases[0], bases[1], strict=True))
    assert not torch.equal(bases[0][0], bases[2][0])
    assert not torch.equal(bases[0][0], bases[0][1])


def replica(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/sync", rank=rank, world_size=2
    )
    for projection in ("svd", "rsvd"):
        train_replica(rank, f"{folder}/{projection}", projection)
    torch.distributed.destroy_process_group()


def train_replica(rank, path, projection):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("mlp", nn.Linear(9, 6))
    model.add_module("attn", nn.Linear(6, 30))
    model.add_module("head", nn.Linear(30, 3))
    torch.manual_seed(100 + rank)  # replicas differ in their global state from here on
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = GoLore(
        split_param_groups(model),
        0.01,
        switch_step=3,
        rank=2,
        update_interval=2,
        projection=projection,
    )
    for _ in range(7):
        optimizer.zero_grad()
        parallel(torch.randn(8, 9)).square().sum().backward()  # own data
        optimizer.step()
    state = [v for p in model.parameters() for v in optimizer.state[p].values()]
    torch.save([*model.parameters(), *state], f"{path}{rank}.pt")


def test_data_parallel_replicas_stay_bitwise_equal(tmp_path):
    torch.multiprocessing.spawn(replica, (str(tmp_path),), nprocs=2)
    for projection in ("svd", "rsvd"):
        first, second = (torch.load(tmp_path / f"{projection}{r}.pt") for r in (0, 1))
        assert len(first) > 6
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Optimisers: bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0"),
        ({"lr": math.nan}, "lr must be a finite number"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number"),
        ({"rank": 0}, "rank must be a whole number >= 1 or None, got 0"),
        ({"rank": 2.0}, "rank must be a whole number"),
        ({"rank": True}, "rank must be a whole number"),
        (
            {"rank": 7},
            r"rank must be at most min\(m, n\), got 7 for parameter 0 \(6, 9\)",
        ),
        ({"update_interval": 0}, "update_interval must be a whole number >= 1, got 0"),
        ({"switch_step": -1}, "switch_step must be a whole number >= 0 or None"),
        ({"switch_step": 0.8}, "switch_step must be a whole number >= 0 or None"),
        ({"seed": 1.5}, "seed must be a whole number >= 0, got 1.5"),
        ({"scale": 0.0}, "scale must be a finite number > 0"),
        ({"projection": "qr"}, "projection must be one of .*'qr'"),
        ({"sketch": "dct"}, "sketch must be one of .*'dct'"),
        ({"side": "up"}, "side must be one of .*'up'"),
    ],
)
@pytest.mark.parametrize("cls", [GoLore, GoLoreSGD])
def test_option_out_of_range_is_named(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(parameters([(6, 9)]), **{"switch_step": 0, "rank": 2, **options})


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (GoLore, {"betas": (0.9, 1.0)}, "betas must lie in"),
        (GoLore, {"betas": 0.9}, "betas must be two numbers, got 0.9"),
        (GoLore, {"eps": -1.0}, "eps must be >= 0"),
        (GoLoreSGD, {"momentum": 1.0}, "momentum must lie in"),
        (GoLoreSGD, {"dampening": -0.5}, "dampening must lie in"),
    ],
)
def test_own_option_out_of_range_is_named(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(parameters([(6, 9)]), switch_step=0, rank=2, **options)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3, 2, 2)])
def test_only_matrices_are_projected(shape):
    with pytest.raises(ValueError, match="a group with a rank holds matrices only"):
        GoLore(parameters([shape]), switch_step=0, rank=1)


@pytest.mark.parametrize("rank", [2, None])
@pytest.mark.parametrize("cls", [GoLore, GoLoreSGD])
def test_complex_parameter_is_refused(cls, rank):
    p = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64, generator=make()))
    with pytest.raises(ValueError, match=r"real floating point, got torch\.complex64"):
        cls([p], switch_step=0, rank=rank)


def test_refused_parameter_is_called_by_its_name():
    (bias,) = parameters([(5,)])
    with pytest.raises(ValueError, match=r"got parameter 'head.bias' \(5,\)"):
        GoLore([("head.bias", bias)], switch_step=0, rank=1)


def test_refresh_gradients_that_cannot_be_called():
    with pytest.raises(TypeError, match="refresh_grads must be callable"):
        GoLore(parameters([(6, 9)]), switch_step=0, rank=2, refresh_grads="same")


def test_dampening_follows_the_momentum_unless_it_is_given():
    groups = [{"params": parameters([(6, 9)]), "momentum": 0.5}]
    groups.append({"params": parameters([(6, 9)]), "dampening": 0.0})
    optimizer = GoLoreSGD(groups, switch_step=0, rank=2, momentum=0.8)
    assert [g["dampening"] for g in optimizer.param_groups] == [0.5, 0.0]


def test_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = GoLore(parameters([(6, 9)]), switch_step=0, rank=2)
    with pytest.raises(ValueError, match="rank"):
        optimizer.add_param_group({"params": parameters([(3, 3)]), "rank": 9})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_gradient_at_a_singular_refresh_changes_nothing(value):
    params = parameters([(6, 9), (4,)])
    names = [("body.weight", params[0]), ("bias", params[1])]
    groups = [{"params": names[:1]}, {"params": names[1:], "rank": None}]
    optimizer = GoLore(groups, switch_step=None, rank=2, update_interval=1)
    feed(params, make(1))
    optimizer.step()
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    params[0].grad[2, 3] = value
    with pytest.raises(ValueError, match=r"'body.weight' \(6, 9\) is not finite"):
        optimizer.step()
    after = (params, optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_bad_gradient_never_reaches_a_random_basis():
    params = parameters([(6, 9)])
    optimizer = GoLore(params, switch_step=0, rank=2)
    feed(params, make(1))
    params[0].grad[0, 0] = math.nan
    optimizer.step()
    assert optimizer.state[params[0]]["basis"].isfinite().all()


def test_sparse_gradient_is_refused():
    params = parameters([(6, 9)])
    params[0].grad = torch.randn(6, 9).to_sparse()
    with pytest.raises(RuntimeError, match="GoLore does not support sparse gradients"):
        GoLore(params, switch_step=0, rank=2).step()


@pytest.mark.parametrize(("key", "value"), [("rank", 3), ("side", "right")])
def test_changed_rank_or_side_is_refused(key, value):
    params = parameters([(6, 9)])
    saved = {"rank": 2, "side": "left"}
    optimizer = GoLore(params, switch_step=0, **saved)
    feed(params, make(1))
    optimizer.step()
    other = GoLore(params, switch_step=0, **{**saved, key: value})
    with pytest.raises(ValueError, match=f"saved with {key}="):
        other.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match="rank or side of a group changed"):
        optimizer.step()


def test_split_refuses_one_text_which_would_be_read_letter_by_letter():
    with pytest.raises(TypeError, match="include must be a sequence of names"):
        split_param_groups(nn.Linear(3, 3), include="attn")


def test_split_names_what_it_could_not_find():
    with pytest.raises(ValueError, match=r"include=\('attn', 'mlp'\) matches no"):
        split_param_groups(nn.Sequential(nn.Linear(3, 3)))


def test_split_takes_linear_weights_of_the_named_blocks():
    model = nn.ModuleDict(
        {"attn": nn.Linear(4, 4), "mlp_norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
    )
    model["head"].bias.requires_grad_(False)
    projected, dense = split_param_groups(model)
    assert [name for name, _ in projected["params"]] == ["attn.weight"]
    assert dense["rank"] is None
    assert len(dense["params"]) == 4


# The counterexample


def test_levels_of_the_paper_instance():
    problem = StallProblem(generator=make(42))
    # The draws are single precision; without vector kernels their last bits differ.
    assert problem.loss(problem.start).item() == pytest.approx(0.810729, abs=1e-5)
    assert problem.f_star == pytest.approx(-23.217441, abs=1e-5)
    assert problem.f_stall(problem.start).item() == pytest.approx(-20.776177, abs=1e-5)
    values = torch.linalg.svdvals(problem.signal(problem.start))
    known = torch.tensor([5.0450, 3.9469, 1.9764, 1.4958, 0.8941, 0.2883])
    torch.testing.assert_close(values.float(), known, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("n", "rank", "sigma"), [(5, 1, 0.3), (8, 7, 2.0)])
def test_gradient_and_loss_belong_together(n, rank, sigma):
    problem = StallProblem(n, rank, sigma, generator=make())
    x = torch.randn(3, n, n, generator=make(1), dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(problem.loss(x).sum(), x)
    torch.testing.assert_close(grad, problem.grad(x))
    # f = 1/2 ||A X||^2 + <B, X>, written out
    kept = n - rank
    a = torch.eye(kept, n, dtype=torch.float64)
    b = torch.zeros(n, n, dtype=torch.float64)
    b[:kept] = problem.grad(torch.zeros(n, n, dtype=torch.float64))[:kept]
    direct = 0.5 * (a @ x).square().sum((-2, -1)) + (b * x).sum((-2, -1))
    torch.testing.assert_close(problem.loss(x), direct)


@pytest.mark.parametrize("law", ["blocked", "isotropic"])
@pytest.mark.parametrize("num_samples", [1, 7])
def test_noise_is_unbiased_and_has_the_stated_power(law, num_samples):
    problem = StallProblem(generator=make(42))
    x = problem.start.expand(20_000, 10, 10)
    noise = problem.noisy_grad(x, generator=make(), num_samples=num_samples, law=law)
    noise = noise - problem.grad(problem.start)
    power = noise.square().sum((-2, -1))
    # 5 standard errors; a blocked draw of one sample has no spread at all
    slack = 5 * power.std() / math.sqrt(len(power)) + 1e-9
    assert abs(power.mean() - problem.noise_power / num_samples) < slack
    error = noise.mean(0).abs() - 5 * noise.std(0) / math.sqrt(len(noise))
    assert (error <= 1e-9).all()


@pytest.mark.parametrize("cls", [GoLore, GoLoreSGD])
def test_below_the_noise_no_state_or_step_size_moves_galore(cls):
    problem = StallProblem(generator=make(42))
    x = problem.start.clone()
    u, values, v = torch.linalg.svd(problem.signal(x), full_matrices=False)
    x[:6] += (u * (values.clamp(max=0.9) - values)) @ v  # all s_i < sigma
    weight = nn.Parameter(x)
    optimizer = cls(
        [weight],
        0.5,
        switch_step=None,
        rank=4,
        update_interval=3,
        side="left",
        projection="svd",
    )
    start = x[:6].clone()
    for _ in range(50):
        noisy = problem.noisy_grad(weight.detach()[None], generator=make())
        weight.grad = noisy[0]
        optimizer.step()
    torch.testing.assert_close(weight.detach()[:6], start, rtol=0, atol=1e-10)
    assert problem.loss(weight.detach()) > problem.f_star + 0.1


def test_below_the_noise_a_shared_column_frees_galore():
    """The stall needs a zero upper right block: without it the noise helps."""
    problem = StallProblem(generator=make(42))
    x = problem.start.clone()
    x[:6] = -problem.grad(torch.zeros_like(x))[:6]  # S = 0 ...
    x[:6, :6] += 0.5 * torch.eye(6)  # ... and now all s_i = 0.5
    gaps = []
    for shared in (0.0, 0.5):
        y = x.clone()
        y[:6, 6:] = shared * torch.eye(6, 4)
        assert torch.linalg.svdvals(problem.signal(y)).max() < problem.sigma
        weight = nn.Parameter(y)
        options = {"rank": 4, "side": "left", "projection": "svd"}
        optimizer = GoLoreSGD(
            [weight], 0.03, switch_step=None, update_interval=10, **options
        )
        start, noise = problem.loss(weight.detach()), make(1)
        for _ in range(200):
            weight.grad = problem.noisy_grad(weight.detach(), generator=noise)
            optimizer.step()
        gaps.append((start - problem.loss(weight.detach())).item())
    assert abs(gaps[0]) < 1e-9
    assert gaps[1] > 0.3
    with pytest.raises(ValueError, match="zero in its upper right block"):
        problem.f_stall(y)


@pytest.mark.parametrize("sigma", [0.1, 0.3])
def test_stall_level_with_more_signal_than_rank(sigma):
    """All six components exceed the noise and all end in its last interval."""
    problem = StallProblem(generator=make(42))
    problem.sigma = sigma  # the same signal, less noise
    weight = nn.Parameter(problem.start.clone())
    options = {"rank": 4, "side": "left", "projection": "svd", "momentum": 0.0}
    optimizer = GoLoreSGD(
        [weight], 0.02, switch_step=None, update_interval=5, **options
    )
    noise = make(1)
    for _ in range(500):
        weight.grad = problem.noisy_grad(weight.detach(), generator=noise)
        optimizer.step()
    values = torch.linalg.svdvals(problem.signal(weight.detach()))
    wanted = torch.linalg.svdvals(problem.signal(problem.start)).clamp(max=sigma)
    assert (values <= wanted + 1e-9).all()
    assert (values >= wanted * (1 - 0.02) ** 5 - 1e-9).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 10}, "rank must be between 1 and n - 1 = 9"),
        ({"sigma": 0.0}, "sigma must be finite and > 0"),
    ],
)
def test_no_such_problem(options, message):
    with pytest.raises(ValueError, match=message):
        StallProblem(**options)


def test_unknown_law_of_the_noise():
    problem = StallProblem()
    with pytest.raises(ValueError, match="law must be one of"):
        problem.noisy_grad(problem.start, law="uniform")
    with pytest.raises(ValueError, match="num_samples must be >= 1, got 0"):
        problem.noisy_grad(problem.start, num_samples=0)


# The bound


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("interval", [1, 4, 10])
def test_golore_keeps_the_bound_on_random_quadratics(seed, interval):
    """f(X) = 1/2 <X - Z, A (X - Z) B>, noise of full rank: nothing is special."""
    generator = make(seed)
    m, n, rank, num_steps, replicas = 6, 8, 2, 400, 16
    draw = {"generator": generator, "dtype": torch.float64}
    a, b = torch.randn(m, m, **draw), torch.randn(n, n, **draw)
    a, b = a @ a.mT, b @ b.mT
    target = torch.randn(m, n, **draw)
    delta = rank / m
    theorem = {
        "smoothness": (torch.linalg.norm(a, 2) * torch.linalg.norm(b, 2)).item(),
        "gap": 0.5 * (target * (a @ target @ b)).sum().item(),
        "update_interval": interval,
        "num_steps": num_steps,
        "noise": delta * m * n,  # unit Gaussian entries, independent of the basis
    }
    lr = golore_lr(**theorem)
    params = [
        nn.Parameter(torch.zeros(m, n, dtype=torch.float64)) for _ in range(replicas)
    ]
    optimizer = GoLoreSGD(
        params,
        lr,
        switch_step=0,
        rank=rank,
        update_interval=interval,
        momentum=0.0,
        seed=seed,
    )
    squares = []
    for step in range(num_steps):
        true = a @ (torch.stack([p.data for p in params]) - target) @ b
        if step % interval == 0:
            squares.append(true.square().sum((-2, -1)))
        for p, g in zip(params, true, strict=True):
            p.grad = g + torch.randn(m, n, **draw)
        optimizer.step()
    measured = torch.stack(squares).mean()
    assert measured <= golore_bound(delta=delta, lr=lr, **theorem)


def test_bound_is_smallest_at_its_own_step_size():
    theorem = {
        "smoothness": 2.0,
        "gap": 3.0,
        "update_interval": 5,
        "num_steps": 10_000,
        "noise": 4.0,
    }
    lr = golore_lr(**theorem)
    best = golore_bound(delta=0.25, **theorem)
    assert best == golore_bound(delta=0.25, lr=lr, **theorem)
    # at the inner minimum: (24/7) sqrt(17/12) sqrt(L Delta s / T) / delta
    inner = 24 / 7 * math.sqrt(17 / 12) * math.sqrt(2 * 3 * 4 / 10_000) / 0.25
    assert best == pytest.approx(inner)
    for factor in (0.8, 1.2):
        assert golore_bound(delta=0.25, lr=factor * lr, **theorem) > best


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 1.5}, "delta must be at most 1"),
        ({"delta": 0.0}, "delta must be finite and > 0, got 0.0"),
        ({"smoothness": math.inf}, "smoothness must be finite and > 0, got inf"),
        ({"gap": -1.0}, "gap must be finite and >= 0, got -1.0"),
        ({"noise": math.nan}, "noise must be finite and >= 0, got nan"),
        ({"num_steps": 101}, "num_steps must be a multiple of update_interval=5"),
        ({"lr": 0.06}, r"lr must lie in \(0, 1/\(4 L tau\)\]"),
    ],
)
def test_bound_outside_its_assumptions(options, message):
    theorem = {
        "smoothness": 1.0,
        "gap": 1.0,
        "delta": 0.5,
        "update_interval": 5,
        "num_steps": 100,
        "noise": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        golore_bound(**{**theorem, **options})


# State sizes


def test_state_bytes_of_the_llamas():
    projected, dense = llama_shapes("60M")
    assert state_numel(projected + dense, rank=None, num_moments=1) == 58_073_600
    low = state_numel(projected, rank=128) + state_numel(dense, rank=None)
    assert 4 * state_numel(projected + dense, rank=None) == 464_588_800
    assert 4 * low == 327_487_488
    projected, dense = llama_shapes("7B")
    assert state_numel(projected + dense, rank=None, num_moments=1) == 6_738_415_616
    with pytest.raises(ValueError, match=r"rank=5 does not fit .* \(4, 9\)"):
        state_numel([(4, 9)], rank=5)
    with pytest.raises(ValueError, match="name must be one of"):
        llama_shapes("8B")


# Experiments


def small(name, **options):
    return replace(EXPERIMENTS[name].laptop, **options)


def run(name, config):
    return EXPERIMENTS[name].function(config, device="cpu", seed=0)


def test_counterexample_run_shows_the_stall():
    config = small("stall", num_steps=2_000, num_replicas=2, lr=6e-3)
    result = run("stall", config)
    assert result["steps"][-1] == 2_000
    for optimizer in ("sgd", "adamw"):
        runs = result[optimizer]
        assert all(len(r["curve"]) == len(result["steps"]) for r in runs.values())
        # a component freezes between sigma (1 - lr)^(tau + 1 / b1) and sigma
        slack = 0.5 * 4 * (1 - (1 - config.lr) ** (2 * (10 + 10)))
        stalled = runs["galore"]
        assert stalled["lowest"] >= result["f_stall"] - slack
        assert runs["full"]["highest"] < result["f_star"] + 0.01
        for name in ("large batch", "isotropic", "golore@75", "golore@100"):
            assert runs[name]["highest"] < result["f_star"] + 0.3


def test_runs_repeat_themselves():
    config = small("stall", num_steps=60, num_replicas=2)
    assert run("stall", config) == run("stall", config)


def test_bound_run_keeps_the_theorem_and_galore_breaks_it():
    config = small("bound", num_steps=2_000, num_replicas=3, intervals=(5,))
    (row,) = run("bound", config)["rows"]
    assert row["golore_highest"] <= row["bound"] < row["floor"]
    assert row["floor"] <= row["galore_lowest"]


def test_sweeps_and_sketches_run():
    sweeps = run("sweeps", small("sweeps", num_steps=40, num_replicas=1))
    assert list(sweeps["batch"]) == ["1", "4", "16", "64", "256", "1024"]
    assert set(sweeps["rank"]["8"]) == {"galore", "golore"}
    assert set(sweeps["reproject"]["10"]) == {"with", "without"}
    sketches = run("sketches", small("sketches", num_steps=40, num_draws=500))
    assert set(SKETCHES) <= set(sketches)


def test_digits_fail_under_noise_and_not_without_it():
    pytest.importorskip("sklearn")
    result = run("digits", small("digits", num_steps=600, num_replicas=2))
    grad = {
        side: {name: np.mean(r["grad"]) for name, r in runs.items()}
        for side, runs in result.items()
    }
    assert grad["noisy"]["galore"] > 2 * grad["noisy"]["golore@100"]
    assert grad["control"]["galore"] < 2 * grad["control"]["golore@100"]
    assert grad["noisy"]["full"] == grad["control"]["full"]  # sides do not mix


def test_counted_bytes_equal_the_formula():
    result = run("memory", EXPERIMENTS["memory"].laptop)
    assert result["measured_bytes"] == result["rows"][0]["golore_bytes"]


def test_tiny_llama_trains():
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    config = small("pretrain", num_steps=8, warmup=2, num_seeds=1, eval_batches=2)
    result = run("pretrain", config)
    for method in config.methods:
        losses = result[method]["train_loss"]
        assert losses[-1] < losses[0] - 0.2
    assert result["galore"]["state_bytes"] < 0.3 * result["adamw"]["state_bytes"]
    # before the switch both are the same run
    assert result["galore"]["train_loss"][:7] == result["golore@20"]["train_loss"][:7]


def test_paper_run_goes_dry_on_generated_tokens():
    """LLaMA-60M in bfloat16 as in the paper, fewer and shorter sequences."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    config = replace(
        EXPERIMENTS["pretrain"].paper,
        corpus="generated",
        num_steps=20,
        warmup=2,
        batch_size=1,
        accumulate=2,
        seq_len=16,
        eval_batches=1,
        update_interval=8,
        methods=("golore@20",),
    )
    result = run("pretrain", config)
    assert result["params"] == 58_073_600
    assert result["golore@20"]["state_bytes"] == 327_487_488
    assert len(result["golore@20"]["train_loss"]) == 20
    assert all(math.isfinite(x) for x in result["golore@20"]["train_loss"])


def test_paper_run_says_that_it_is_offline(monkeypatch):
    pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match=r"Hugging Face hub .* could not be reached"):
        run("pretrain", replace(EXPERIMENTS["pretrain"].paper, num_steps=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "wiki"}, "corpus must be one of"),
        ({"methods": ("lora",)}, "methods must be among"),
    ],
)
def test_unknown_corpus_or_method(options, message):
    with pytest.raises(ValueError, match=message):
        run("pretrain", small("pretrain", **options))
