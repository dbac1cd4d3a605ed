"""The weight flow against solved equations, closed forms and its own theorems.

Golden files: ``tests/golden/tar`` (SciPy's LSODA on the flow's equation).
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from icml25 import tar
from icml25.core import make_generator
from icml25.tar.comparison import (
    ShiftConfig,
    candidates,
    make_task,
    mean_and_error,
    run_eerm,
    run_imbalance,
    train_eerm,
    train_task,
)
from icml25.tar.experiments import (
    CBAS_SMALL,
    CostConfig,
    LabelConfig,
    epoch_cost,
    label_orders,
)
from torch_geometric.nn import GCN, SAGEConv
from torch_geometric.utils import to_undirected

GOLDEN = Path(__file__).parent / "golden" / "tar"
CASES = ("karate", "karate_weighted", "path6_two_components")
MOBILITIES = {"upwind": "joint_upwind", "logmean": "logmean", "split": "split_upwind"}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def golden(case):
    with np.load(GOLDEN / f"{case}.npz") as stored:
        return {name: torch.as_tensor(stored[name]) for name in stored.files}


def graph_of(z):
    n = len(z["losses"])
    return tar.FlowGraph.from_edge_index(z["edges"], n, edge_weight=z["weights"])


def random_graph(seed, n=24, m=50, weighted=True):
    generator = make_generator(seed)
    edges = torch.randint(n, (2, m), generator=generator)
    graph = tar.FlowGraph.from_edge_index(edges, n)
    if not weighted:
        return graph
    weight = 0.1 + torch.rand(graph.num_edges, generator=generator).double()
    pairs = torch.stack([graph.src, graph.dst])
    return tar.FlowGraph.from_edge_index(pairs, n, edge_weight=weight)


def random_losses(seed, *shape, scale=2.0):
    generator = make_generator(seed + 99)
    return scale * torch.rand(*shape, generator=generator, dtype=torch.float64)


PAIR = tar.FlowGraph.from_edge_index(torch.tensor([[0], [1]]))


# --- the flow against solved equations ---


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mobility", MOBILITIES)
def test_plain_steps_equal_the_golden_steps(case, mobility):
    z = golden(case)
    step, steps = z["euler/step_and_count"].tolist()
    flow = tar.weight_flow(
        z["losses"],
        graph_of(z),
        beta=float(z["beta"]),
        step=step,
        steps=int(steps),
        q0=z["q0"],
        mobility=mobility,
        adaptive=False,
    )
    torch.testing.assert_close(
        flow.q, z[f"euler/{MOBILITIES[mobility]}"], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mobility", MOBILITIES)
def test_small_steps_follow_the_golden_solution(case, mobility):
    z, step = golden(case), 1e-3
    chosen = [k for k, time in enumerate(z["times"].tolist()) if time <= 0.5]
    steps = round(float(z["times"][chosen[-1]]) / step)
    flow = tar.weight_flow(
        z["losses"],
        graph_of(z),
        beta=float(z["beta"]),
        step=step,
        steps=steps,
        q0=z["q0"],
        mobility=mobility,
        trace=True,
    )
    for k in chosen:
        at = round(float(z["times"][k]) / step)
        expected = z[f"ode/{MOBILITIES[mobility]}"][k]
        # Explicit Euler is off by O(step).
        assert (flow.path[at] - expected).abs().max() < 1e-3
        assert flow.times[at] == pytest.approx(float(z["times"][k]))
        energy = tar.free_energy(flow.path[at], z["losses"], beta=float(z["beta"]))
        golden_energy = z[f"objective/{MOBILITIES[mobility]}"][k + 1]
        assert energy == pytest.approx(float(golden_energy), abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_limit_equals_the_golden_limit(case):
    z, graph = golden(case), graph_of(golden(case))
    beta = float(z["beta"])
    limit = tar.worst_case_limit(z["losses"], graph, beta=beta, q0=z["q0"])
    torch.testing.assert_close(limit, z["limit"], rtol=0, atol=1e-12)
    value = tar.free_energy(limit, z["losses"], beta=beta)
    assert value == pytest.approx(float(z["objective/limit"]), abs=1e-12)


def test_two_nodes_without_entropy_follow_the_closed_form():
    graph = tar.FlowGraph.from_edge_index(
        torch.tensor([[0], [1]]), edge_weight=torch.tensor([0.7]).double()
    )
    losses = torch.tensor([1.3, 0.2], dtype=torch.float64)
    flow = tar.weight_flow(
        losses,
        graph,
        beta=0.0,
        step=1e-3,
        steps=2000,
        q0=torch.tensor([0.3, 0.7]),
    )
    exact = 1 - 0.7 * math.exp(-0.7 * 1.1 * 2)
    assert flow.q[0] == pytest.approx(exact, abs=1e-3)  # O(step)


def test_zero_losses_with_logarithmic_mean_are_plain_diffusion():
    z = golden("karate")
    graph = graph_of(z)
    q0 = torch.rand(34, generator=make_generator(0)).double()
    q0 = q0 / q0.sum()
    zero = torch.zeros(34, dtype=torch.float64)
    flow = tar.weight_flow(
        zero, graph, beta=0.5, step=1e-3, steps=1000, q0=q0, mobility="logmean"
    )
    exact = torch.linalg.matrix_exp(-0.5 * graph.laplacian()) @ q0
    # O(step) of explicit Euler.
    assert (flow.q - exact).abs().max() < 2e-5


def test_flow_reaches_kl_reweighting_on_a_connected_graph():
    z = golden("karate")
    flow = tar.weight_flow(
        z["losses"], graph_of(z), beta=0.5, step=1.0, steps=2000, mobility="logmean"
    )
    kl = torch.softmax(z["losses"] / 0.5, 0)
    assert (flow.q - kl).abs().sum() < 1e-10


# --- properties that hold for every graph ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mobility", ["upwind", "logmean"])
@pytest.mark.parametrize("step", [0.01, 0.3, 30.0])
def test_mass_positivity_and_energy(dtype, mobility, step):
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for seed in range(5):
        graph = random_graph(seed)
        losses = random_losses(seed, graph.num_nodes).to(dtype)
        beta = 0.05 + 0.3 * seed
        flow = tar.weight_flow(
            losses,
            graph,
            beta=beta,
            step=step,
            steps=60,
            mobility=mobility,
            trace=True,
        )
        label = graph.components()
        mass = torch.zeros(61, int(label.max()) + 1, dtype=dtype)
        mass = mass.index_add(1, label, flow.path)
        assert (mass - mass[0]).abs().max() < tolerance
        assert flow.path.min() > 0
        energy = tar.free_energy(flow.path, losses, beta=beta)
        assert energy.diff().min() > -tolerance


@pytest.mark.parametrize("mobility", ["upwind", "logmean"])
def test_energy_never_falls_from_tiny_weights(mobility):
    # With little entropy, weights far below 1/n that grow again bend R hardest.
    for seed in range(12):
        graph, losses = random_graph(seed, n=12), random_losses(seed, 12, scale=3.0)
        q0 = random_losses(seed + 50, 12) ** (1 + 10 * (seed % 4))
        flow = tar.weight_flow(
            losses,
            graph,
            beta=(0.02, 0.05, 0.1)[seed % 3],
            step=30.0,
            steps=120,
            q0=q0 / q0.sum(),
            mobility=mobility,
            trace=True,
        )
        beta = (0.02, 0.05, 0.1)[seed % 3]
        energy = tar.free_energy(flow.path, losses, beta=beta)
        assert energy.diff().min() > -1e-12


def test_split_upwinding_stalls_below_the_worst_case():
    z = golden("karate")
    graph, losses = graph_of(z), z["losses"]
    best = tar.free_energy(z["limit"], losses, beta=0.5)
    start = tar.free_energy(z["q0"], losses, beta=0.5)
    gaps = {}
    for mobility in ("upwind", "split"):
        flow = tar.weight_flow(
            losses, graph, beta=0.5, step=0.02, steps=1500, mobility=mobility
        )
        end = tar.free_energy(flow.q, losses, beta=0.5)
        gaps[mobility] = float((best - end) / (best - start))
    assert gaps["upwind"] < 0.02
    assert gaps["split"] > 0.2


def test_energy_rises_by_the_squared_speed():
    graph, losses = random_graph(1), random_losses(1, 24)
    h = 1e-5
    flow = tar.weight_flow(losses, graph, beta=0.4, step=h, steps=100, trace=True)
    rise = tar.free_energy(flow.path, losses, beta=0.4)
    gained = (rise[-1] - rise[0]).item()
    # length = speed * time while the speed hardly changes.
    assert flow.length.item() ** 2 / flow.time.item() == pytest.approx(gained, rel=1e-2)


def test_a_constant_on_all_losses_changes_nothing():
    graph, losses = random_graph(2), random_losses(2, 24)
    flow = tar.weight_flow(losses, graph, beta=0.2, steps=30)
    shifted = tar.weight_flow(losses + 5, graph, beta=0.2, steps=30)
    torch.testing.assert_close(flow.q, shifted.q, rtol=0, atol=1e-13)


def test_scaling_losses_and_beta_is_scaling_time():
    graph, losses = random_graph(3), random_losses(3, 24)
    flow = tar.weight_flow(losses, graph, beta=0.2, step=0.1, steps=30)
    fast = tar.weight_flow(4 * losses, graph, beta=0.8, step=0.025, steps=30)
    torch.testing.assert_close(flow.q, fast.q, rtol=0, atol=1e-15)


def test_nodes_may_be_renumbered():
    graph, losses = random_graph(4, weighted=False), random_losses(4, 24)
    order = torch.randperm(24, generator=make_generator(5))
    pairs = order[torch.stack([graph.dst, graph.src])]
    renamed = tar.FlowGraph.from_edge_index(pairs, 24)
    moved = torch.empty_like(losses)
    moved[order] = losses
    flow = tar.weight_flow(losses, graph, beta=0.1)
    other = tar.weight_flow(moved, renamed, beta=0.1)
    torch.testing.assert_close(other.q[order], flow.q, rtol=0, atol=1e-15)


def test_a_batch_of_losses_flows_like_each_alone():
    graph, losses = random_graph(5), random_losses(5, 2, 3, 24)
    batch = tar.weight_flow(losses, graph, beta=0.1, steps=15)
    for index in np.ndindex(2, 3):
        alone = tar.weight_flow(losses[index], graph, beta=0.1, steps=15)
        torch.testing.assert_close(batch.q[index], alone.q, rtol=0, atol=1e-15)
        assert batch.time[index] == pytest.approx(alone.time.item())


@pytest.mark.parametrize("steps", [0, 7])
def test_without_steps_or_edges_the_weights_stay_bit_for_bit(steps):
    empty = torch.zeros(2, 0, dtype=torch.int64)
    graph = tar.FlowGraph.from_edge_index(empty, 5) if steps else random_graph(6, n=5)
    flow = tar.weight_flow(random_losses(6, 5), graph, beta=0.1, steps=steps)
    assert torch.equal(flow.q, torch.full((5,), 0.2, dtype=torch.float64))


def test_number_of_steps_may_come_from_numpy():
    losses, graph = random_losses(6, 5), random_graph(6, n=5)
    ours, theirs = (
        tar.weight_flow(losses, graph, beta=0.1, steps=steps, trace=True)
        for steps in (3, np.int64(3))
    )
    assert torch.equal(ours.path, theirs.path)


def test_isolated_node_keeps_its_weight():
    graph = tar.FlowGraph.from_edge_index(torch.tensor([[0], [1]]), 3)
    flow = tar.weight_flow(torch.tensor([0.0, 1.0, 50.0]), graph, beta=0.1)
    assert graph.num_isolated == 1
    assert flow.q[2] == torch.tensor(1 / 3)


def test_mass_flows_into_a_node_without_weight():
    q0 = torch.tensor([1.0, 0.0]).double()
    flow = tar.weight_flow(
        torch.tensor([0.0, 1.0]).double(), PAIR, beta=0.3, step=0.5, steps=200, q0=q0
    )
    exact = torch.softmax(torch.tensor([0.0, 1.0]).double() / 0.3, 0)
    assert (flow.q - exact).abs().max() < 1e-6


def test_extreme_losses_stay_finite():
    losses = torch.tensor([0.0, 1e6, 3.0])
    graph = tar.FlowGraph.from_edge_index(torch.tensor([[0, 1], [1, 2]]))
    flow = tar.weight_flow(losses, graph, beta=0.1, steps=50)
    assert flow.q.isfinite().all() and (flow.q > 0).all()
    assert flow.q.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_flow_runs_where_its_inputs_are(device):
    graph, losses = random_graph(7).to(device), random_losses(7, 24).to(device)
    flow = tar.weight_flow(losses, graph, beta=0.1)
    expected = tar.weight_flow(losses.cpu(), graph.to("cpu"), beta=0.1).q
    assert flow.q.device == losses.device
    torch.testing.assert_close(flow.q.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_half_precision_flow_in_single(dtype):
    n, generator = 20_000, make_generator(0)
    pairs = torch.randint(n, (2, 3 * n), generator=generator)
    graph = tar.FlowGraph.from_edge_index(pairs, n)
    losses = (2 * torch.rand(n, generator=generator)).to(dtype)
    found, expected = (
        (tar.weight_flow(x, graph, beta=0.1), tar.worst_case_limit(x, graph, beta=0.5))
        for x in (losses, losses.float())
    )
    assert torch.equal(found[0].q, expected[0].q)
    assert torch.equal(found[1], expected[1])


def test_flow_is_deterministic():
    graph, losses = random_graph(8), random_losses(8, 24)
    runs = [tar.weight_flow(losses, graph, beta=0.1).q for _ in range(2)]
    assert torch.equal(*runs)


def test_flow_never_builds_a_dense_matrix():
    n = 50_000
    node = torch.arange(n)
    graph = tar.FlowGraph.from_edge_index(torch.stack([node, (node + 1) % n]))
    flow = tar.weight_flow(torch.rand(n, generator=make_generator(0)), graph, beta=0.1)
    # Dense algebra would need 10 GB here.
    assert flow.q.sum() == pytest.approx(1, abs=1e-4)


# --- the theorems ---


@pytest.mark.parametrize("step", [0.02, 0.5])
def test_gap_stays_under_both_bounds(step):
    for seed in range(8):
        graph = random_graph(seed, n=16, m=14 + 4 * seed)
        losses = random_losses(seed, 16)
        beta = 0.1 + 0.2 * (seed % 3)
        flow = tar.weight_flow(
            losses, graph, beta=beta, step=step, steps=80, trace=True
        )
        curves = tar.error_bounds(flow, losses, graph, beta=beta)
        assert (curves.gap <= curves.sharp + 1e-12).all()
        assert (curves.sharp <= curves.coarse + 1e-12).all()


def test_bounds_hold_where_weights_are_tiny():
    # Below 1e-3/n a step may keep less than half of its first-order gain.
    for seed in range(12):
        graph, losses = random_graph(seed, n=12), random_losses(seed, 12, scale=3.0)
        q0 = random_losses(seed + 50, 12) ** (1 + 10 * (seed % 4))
        q0, beta = q0 / q0.sum(), (0.02, 0.05, 0.1)[seed % 3]
        flow = tar.weight_flow(
            losses, graph, beta=beta, step=30.0, steps=120, q0=q0, trace=True
        )
        curves = tar.error_bounds(flow, losses, graph, beta=beta)
        assert (curves.gap <= curves.sharp + 1e-12).all()
        assert (curves.sharp <= curves.coarse + 1e-12).all()


def test_sharp_bound_has_the_slope_of_the_flow_at_last():
    z = golden("karate")
    graph = graph_of(z)
    flow = tar.weight_flow(z["losses"], graph, beta=0.5, steps=1600, trace=True)
    curves = tar.error_bounds(flow, z["losses"], graph, beta=0.5)
    slope = (curves.gap[-1] / curves.gap[1200]).log()
    bound = (curves.sharp[-1] / curves.sharp[1200]).log()
    # The flow is faster than its bound, and tends to it (1.9 at t = 40, 1.2 at 160).
    assert 1 <= slope / bound < 1.25


def test_transport_cost_of_two_nodes_is_the_closed_form():
    start = torch.tensor([0.3, 0.7])
    end = torch.tensor([0.7, 0.3])
    up = 2 * (0.7**0.5 - 0.3**0.5) ** 2
    assert tar.transport_cost(start, end, PAIR).item() == pytest.approx(up, rel=1e-4)
    start, end = torch.tensor([0.2, 0.8]), torch.tensor([0.5, 0.5])
    there = 2 * (0.8**0.5 - 0.5**0.5) ** 2
    back = 2 * (0.5**0.5 - 0.2**0.5) ** 2
    assert tar.transport_cost(start, end, PAIR).item() == pytest.approx(there, rel=1e-3)
    assert tar.transport_cost(end, start, PAIR).item() == pytest.approx(back, rel=1e-3)


def test_transport_cost_is_below_half_the_squared_length_of_the_flow():
    graph, losses = random_graph(0, n=10, m=30), random_losses(0, 10)
    flow = tar.weight_flow(losses, graph, beta=0.2, step=0.01, steps=100, trace=True)
    cost = tar.transport_cost(flow.path[0], flow.q, graph).item()
    gained = tar.free_energy(flow.path, losses, beta=0.2)
    assert 0 < cost <= flow.length.item() ** 2 / 2
    rise = (gained[-1] - gained[0]).item()
    # Euler steps: the two sides of Cauchy-Schwarz agree up to O(step).
    assert flow.length.item() ** 2 <= flow.time.item() * rise * 1.1


def test_transport_between_components_costs_infinity():
    z = golden("path6_two_components")
    moved = z["q0"].clone()
    moved[0] -= 0.05
    moved[-1] += 0.05
    assert tar.transport_cost(z["q0"], moved, graph_of(z)) == torch.inf
    assert tar.transport_cost(z["q0"], z["q0"], graph_of(z)) == 0


# --- graphs ---


def test_directions_duplicates_and_loops_merge():
    messy = torch.tensor([[0, 1, 1, 2, 2, 1], [1, 0, 2, 2, 1, 2]])
    graph = tar.FlowGraph.from_edge_index(messy)
    assert graph.src.tolist() == [0, 1] and graph.dst.tolist() == [1, 2]
    directed = tar.FlowGraph.from_edge_index(torch.tensor([[1, 2], [0, 1]]))
    assert torch.equal(directed.src, graph.src) and torch.equal(directed.dst, graph.dst)


def test_mask_keeps_the_induced_subgraph():
    ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    mask = torch.tensor([True, False, True, True])
    graph = tar.FlowGraph.from_edge_index(ring, mask=mask)
    pairs = set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    assert graph.num_nodes == 3 and pairs == {(0, 2), (1, 2)}


def test_two_hops_reach_through_nodes_outside_the_mask():
    path = torch.tensor([[0, 1], [1, 2]])
    mask = torch.tensor([True, False, True])
    assert tar.FlowGraph.from_edge_index(path, mask=mask).num_isolated == 2
    assert tar.FlowGraph.from_edge_index(path, mask=mask, hops=2).num_edges == 1


def test_normalised_weights_divide_by_root_degrees():
    star = torch.tensor([[0, 0, 0], [1, 2, 3]])
    graph = tar.FlowGraph.from_edge_index(star, normalise=True)
    torch.testing.assert_close(graph.weight, torch.full((3,), 3**-0.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"edge_index": torch.tensor([[0], [9]]), "num_nodes": 3},
            "names nodes 0 to 9",
        ),
        ({"edge_index": torch.tensor([[-1], [1]])}, "names nodes -1 to 1"),
        ({"edge_index": torch.zeros(3, 2).long()}, r"shape \(3, 2\)"),
        ({"edge_index": torch.zeros(2, 0).long()}, "has no node"),
        ({"edge_weight": torch.tensor([1.0, -2.0])}, "holds -2; weights are positive"),
        ({"edge_weight": torch.tensor([1.0, 0.0])}, "holds 0; weights are positive"),
        ({"edge_weight": torch.tensor([1.0, torch.nan])}, "holds nan"),
        ({"edge_weight": torch.tensor([1.0])}, "one weight an edge"),
        ({"edge_weight": torch.tensor([1.0, 1.0]), "hops": 2}, "needs unit weights"),
        ({"mask": torch.zeros(3).bool()}, "mask selects no node"),
        ({"mask": torch.ones(2).bool()}, r"mask has shape \(2,\)"),
        ({"hops": 0}, "hops=0"),
    ],
)
def test_bad_graphs_are_refused(arguments, message):
    arguments = {"edge_index": torch.tensor([[0, 1], [1, 2]]), **arguments}
    with pytest.raises(ValueError, match=message):
        tar.FlowGraph.from_edge_index(**arguments)


def test_two_weights_for_one_edge_are_refused():
    pairs = torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match="both 1 and 2"):
        tar.FlowGraph.from_edge_index(pairs, edge_weight=torch.tensor([1.0, 2.0]))


def test_wrong_dtypes_are_refused():
    with pytest.raises(TypeError, match="edge_index has dtype torch.float32"):
        tar.FlowGraph.from_edge_index(torch.zeros(2, 1))
    with pytest.raises(TypeError, match="mask has dtype"):
        tar.FlowGraph.from_edge_index(torch.tensor([[0], [1]]), mask=torch.ones(2))
    with pytest.raises(TypeError, match="losses have dtype"):
        tar.weight_flow(torch.tensor([1, 2]), PAIR, beta=0.1)
    with pytest.raises(TypeError, match="steps=2.5: a whole number"):
        tar.weight_flow(torch.zeros(2), PAIR, beta=0.1, steps=2.5)
    single = tar.weight_flow(torch.tensor([0.0, 1.0]), PAIR, beta=0.1, trace=True)
    with pytest.raises(TypeError, match="flow has dtype torch.float32"):
        tar.error_bounds(single, torch.tensor([0.0, 1.0]), PAIR, beta=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"losses": torch.zeros(3)}, r"losses have shape \(3,\); the graph has 2"),
        ({"losses": torch.tensor([0.0, torch.nan])}, "1 of 2 are NaN or infinite"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"beta": float("inf")}, "beta=inf: at least 0 and finite"),
        ({"step": float("inf")}, "step=inf: must be positive and finite"),
        ({"q0": torch.tensor([torch.nan, 1.0])}, "must sum to 1; it is off by nan"),
        ({"step": 0.0}, "step=0.0: must be positive"),
        ({"steps": -1}, "steps=-1"),
        ({"mobility": "down"}, "mobility='down'"),
        ({"q0": torch.tensor([0.5, 0.6])}, "must sum to 1; it is off by 0.1"),
        ({"q0": torch.tensor([1.5, -0.5])}, "q0 holds -0.5"),
        ({"q0": torch.ones(3) / 3}, r"q0 has shape \(3,\)"),
    ],
)
def test_bad_flows_are_refused(arguments, message):
    arguments = {"losses": torch.tensor([0.0, 1.0]), "beta": 0.1, **arguments}
    with pytest.raises(ValueError, match=message):
        tar.weight_flow(arguments.pop("losses"), PAIR, **arguments)


def test_a_step_above_the_cap_is_refused_by_name():
    # beta = 0 on two nodes: dq_0/dt = -q_0 * 2, so the cap is 1/2.
    losses = torch.tensor([0.0, 2.0])
    with pytest.raises(ValueError, match=r"step=0.6 is above the cap of 0.5 at step 0"):
        tar.weight_flow(losses, PAIR, beta=0.0, step=0.6, adaptive=False)
    tar.weight_flow(losses, PAIR, beta=0.0, step=0.49, steps=1, adaptive=False)


def test_bad_theory_calls_are_refused():
    losses = torch.tensor([0.0, 1.0]).double()
    untraced = tar.weight_flow(losses, PAIR, beta=0.1)
    with pytest.raises(ValueError, match="trace=True"):
        tar.error_bounds(untraced, losses, PAIR, beta=0.1)
    with pytest.raises(ValueError, match="needs beta > 0"):
        tar.worst_case_limit(losses, PAIR, beta=0.0)
    with pytest.raises(ValueError, match=r"losses have shape \(3,\); \(2,\)"):
        tar.worst_case_limit(torch.zeros(3), PAIR, beta=0.1)
    with pytest.raises(ValueError, match="1 of 2 are NaN or infinite"):
        tar.worst_case_limit(torch.tensor([0.0, torch.inf]), PAIR, beta=0.1)
    with pytest.raises(ValueError, match="it is off by 1"):
        tar.worst_case_limit(losses, PAIR, beta=0.1, q0=torch.ones(2))
    with pytest.raises(ValueError, match=r"q has shape \(3,\), losses \(2,\)"):
        tar.free_energy(torch.ones(3) / 3, losses, beta=0.1)
    with pytest.raises(ValueError, match="start has shape"):
        tar.transport_cost(torch.ones(3) / 3, torch.ones(2) / 2, PAIR)
    with pytest.raises(ValueError, match="end holds -0.5"):
        tar.transport_cost(torch.ones(2) / 2, torch.tensor([1.5, -0.5]), PAIR)


# --- objectives ---


def logits_and_labels(seed, n=24, num_classes=3):
    generator = make_generator(seed)
    logits = torch.randn(n, num_classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(num_classes, (n,), generator=generator)


def test_tar_weighs_the_losses_by_the_flow_and_lets_no_gradient_through():
    graph = random_graph(9)
    logits, y = logits_and_labels(9)
    logits.requires_grad_()
    objective = tar.TAR(graph, beta=0.2, steps=10)
    value = objective(logits, y)
    losses = F.cross_entropy(logits, y, reduction="none")
    q = tar.weight_flow(losses.detach(), graph, beta=0.2, steps=10).q
    torch.testing.assert_close(value, (q * losses).sum())
    torch.testing.assert_close(objective.last_q, q)
    grad = torch.autograd.grad(value, logits)[0]
    expected = torch.autograd.grad((q * losses).sum(), logits)[0]
    torch.testing.assert_close(grad, expected)


def test_tar_without_steps_is_erm():
    logits, y = logits_and_labels(10)
    plain = tar.ERM()(logits, y)
    torch.testing.assert_close(tar.TAR(random_graph(10), steps=0)(logits, y), plain)
    torch.testing.assert_close(plain, F.cross_entropy(logits, y))


def test_tar_starts_afresh_unless_told_otherwise():
    logits, y = logits_and_labels(11)
    afresh = tar.TAR(random_graph(11), steps=5)
    onward = tar.TAR(random_graph(11), steps=5, warm_start=True)
    assert torch.equal(afresh(logits, y), afresh(logits, y))
    first = onward(logits, y)
    torch.testing.assert_close(first, afresh(logits, y))
    assert onward(logits, y) > first


def test_tar_hands_its_mobility_on():
    logits, y = logits_and_labels(11)
    graph = random_graph(11)
    objective = tar.TAR(graph, steps=5, mobility="logmean")
    objective(logits, y)
    losses = F.cross_entropy(logits, y, reduction="none")
    q = tar.weight_flow(losses, graph, beta=0.1, steps=5, mobility="logmean").q
    assert torch.equal(objective.last_q, q)
    upwind = tar.TAR(graph, steps=5)
    upwind(logits, y)
    assert not torch.allclose(upwind.last_q, q)


def test_levers_run_on_a_small_task():
    config = replace(tar.EXPERIMENTS["cbas-small"].laptop, num_seeds=1, epochs=3)
    config = replace(config, tasks=config.tasks[:1])
    found = tar.EXPERIMENTS["levers"].function(
        config, device=torch.device("cpu"), seed=0
    )
    (table,) = found["results"].values()
    assert {name.split()[0] for name in table} == {"ERM", "warm", "log-mean"}


@pytest.mark.parametrize("name", ["ERM", "TAR", "Chi2DRO", "GroupDRO", "IRM"])
def test_objectives_add_half_precision_up_in_single(name):
    n = 3000
    logits = torch.randn(n, 3, generator=make_generator(12)).bfloat16()
    y, env_id, node = torch.arange(n) % 3, torch.arange(n) % 2, torch.arange(n)
    ring = tar.FlowGraph.from_edge_index(torch.stack([node, (node + 1) % n]))
    objective = {
        "ERM": tar.ERM(),
        "TAR": tar.TAR(ring),
        "Chi2DRO": tar.Chi2DRO(1.0),
        "GroupDRO": tar.GroupDRO(env_id, 1.0),
        "IRM": tar.IRM(env_id, 1.0),
    }[name]
    value = objective(logits, y)
    # Each loss has 8 bits, and their errors are of either sign.
    expected = objective(logits.float(), y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=2e-3, atol=0)


def test_tar_refuses_a_diverged_loss():
    logits, y = logits_and_labels(12)
    logits[3] = torch.nan
    with pytest.raises(ValueError, match="has the training diverged"):
        tar.TAR(random_graph(12))(logits, y)


def test_kl_gradient_is_the_softmax_of_the_losses():
    logits, y = logits_and_labels(13)
    losses = F.cross_entropy(logits, y, reduction="none").requires_grad_()
    objective = tar.KLDRO(0.7, node_loss=lambda _, __: losses)
    grad = torch.autograd.grad(objective(logits, y), losses)[0]
    torch.testing.assert_close(grad, torch.softmax(losses / 0.7, 0))


def test_chi2_weights_maximise_the_penalised_risk():
    logits, y = logits_and_labels(14, n=6)
    losses = F.cross_entropy(logits, y, reduction="none")
    tau, n = 0.5, 6

    def risk(q):
        return (q * losses).sum(-1) - tau / (2 * n) * (n * q - 1).square().sum(-1)

    held = losses.clone().requires_grad_()
    value = tar.Chi2DRO(tau, node_loss=lambda _, __: held)(logits, y)
    q = torch.autograd.grad(value, held)[0]
    assert q.sum() == pytest.approx(1) and q.min() >= 0
    others = torch.distributions.Dirichlet(torch.ones(n).double() * 0.7)
    torch.manual_seed(0)
    assert (risk(others.sample((20_000,))) <= risk(q) + 1e-12).all()


def test_environment_penalties_against_their_definitions():
    logits, y = logits_and_labels(15, n=12)
    env_id = torch.tensor([4, 7, 7] * 4)
    means, slopes = [], []
    for env in (4, 7):
        chosen = env_id == env
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        mean = F.cross_entropy(scale * logits[chosen], y[chosen])
        slopes.append(torch.autograd.grad(mean, scale)[0])
        means.append(mean.detach())
    means, slopes = torch.stack(means), torch.stack(slopes)
    vrex = means.mean() + 3 * means.var(correction=0)
    torch.testing.assert_close(tar.VREx(env_id, 3.0)(logits, y), vrex)
    irm = means.mean() + 3 * slopes.square().mean()
    torch.testing.assert_close(tar.IRM(env_id, 3.0)(logits, y), irm)
    group = (torch.softmax(2 * means, 0) * means).sum()
    torch.testing.assert_close(tar.GroupDRO(env_id, 2.0)(logits, y), group)


def test_balanced_objective_averages_class_averages():
    logits, y = logits_and_labels(16)
    each = [F.cross_entropy(logits[y == c], y[y == c]) for c in range(3)]
    torch.testing.assert_close(tar.ClassBalanced()(logits, y), sum(each) / 3)


def test_bad_objectives_are_refused():
    with pytest.raises(ValueError, match="tau=0"):
        tar.KLDRO(0)
    with pytest.raises(ValueError, match="penalty=-1"):
        tar.VREx(torch.zeros(3).long(), -1)
    with pytest.raises(ValueError, match="env_id has shape"):
        tar.GroupDRO(torch.zeros(0).long(), 1.0)
    with pytest.raises(ValueError, match=r"loss has shape \(24,\), env_id \(3,\)"):
        tar.VREx(torch.zeros(3).long(), 1.0)(*logits_and_labels(17))
    with pytest.raises(ValueError, match=r"losses have shape \(24,\); the graph has 2"):
        tar.TAR(PAIR)(*logits_and_labels(17))


# --- splits ---


@pytest.mark.parametrize("kind", ["covariate", "concept"])
def test_split_is_disjoint_and_sized_as_in_good(kind):
    generator = make_generator(0)
    domain = torch.randint(40, (1000,), generator=generator)
    y = torch.randint(7, (1000,), generator=generator)
    split = tar.good_split(domain, y, kind, generator=generator)
    masks = torch.stack([value for key, value in split.items() if key != "env_id"])
    assert masks.sum(0).max() == 1 and masks.any(1).all()
    assert torch.equal(split["env_id"] >= 0, split["train_mask"])
    if kind == "covariate":
        assert split["id_val_mask"].sum() == split["id_test_mask"].sum() == 100


def test_covariate_split_descends_and_never_cuts_ties():
    generator = make_generator(1)
    domain = torch.randint(30, (800,), generator=generator)
    split = tar.good_split(domain, domain % 3, "covariate", generator=generator)
    train = split["train_mask"] | split["id_val_mask"] | split["id_test_mask"]
    val, test = split["ood_val_mask"], split["ood_test_mask"]
    assert domain[train].min() > domain[val].max()
    assert domain[val].min() > domain[test].max()
    assert train.sum() >= 0.6 * 800 and (train | val).sum() >= 0.8 * 800
    for env in split["env_id"].unique().tolist()[1:-1]:
        inside = split["env_id"] == env
        assert domain[inside].min() > domain[split["env_id"] == env + 1].max()


def test_concept_split_ties_label_to_domain_and_turns_it_round():
    generator = make_generator(2)
    n = 20_000
    domain = torch.randint(200, (n,), generator=generator)
    y = torch.randint(2, (n,), generator=generator)
    split = tar.good_split(domain, y, "concept", generator=generator)
    low = domain < domain.double().median()
    agrees = low == (y == 1)
    shares = [agrees[split["env_id"] == env].double().mean() for env in range(3)]
    # Later buckets choose among what the earlier ones left, so they fall short of 90
    # and 85 %; the first chooses among all.
    assert shares[0] == pytest.approx(0.95, abs=0.02)
    assert min(shares) > 0.75 and shares == sorted(shares, reverse=True)
    assert agrees[split["ood_test_mask"]].double().mean() < 0.1


def test_bad_splits_are_refused():
    domain, y = torch.arange(9), torch.zeros(9).long()
    generator = make_generator(0)
    with pytest.raises(ValueError, match="kind='other'"):
        tar.good_split(domain, y, "other", generator=generator)
    with pytest.raises(ValueError, match="one value and one label"):
        tar.good_split(domain, y[:3], "concept", generator=generator)
    with pytest.raises(ValueError, match="five shares"):
        tar.good_split(domain, y, "concept", generator=generator, bias=(1.0,))
    with pytest.raises(ValueError, match="num_envs=0: at least 1"):
        tar.good_split(domain, y, "covariate", generator=generator, num_envs=0)
    with pytest.raises(ValueError, match="domain holds NaN"):
        nan = torch.full((9,), torch.nan)
        tar.good_split(nan, y, "covariate", generator=generator)
    with pytest.raises(ValueError, match="domain has 1 values, too few"):
        tar.good_split(y, y, "covariate", generator=generator)
    with pytest.raises(ValueError, match="kind='x'"):
        tar.cbas("x", generator=generator)
    with pytest.raises(ValueError, match=r"noise=2: must lie"):
        tar.hard_region(noise=2, generator=generator)
    with pytest.raises(ValueError, match="task='Mars/word'"):
        make_task("Mars/word", generator)


def test_cbas_is_the_benchmarks_graph():
    data = tar.cbas("covariate", generator=make_generator(0))
    assert data.num_nodes == 700 and data.is_undirected()
    assert torch.bincount(data.y).tolist() == [300, 160, 160, 80]
    # 295 * 5 edges of the base, 6 of each house, 1 tie each.
    assert data.num_edges == 2 * (295 * 5 + 80 * 6 + 80)
    assert data.train_mask.sum() == 420 and data.ood_test_mask.sum() == 70
    colors = [data.x[data.env_id == env].unique(dim=0) for env in range(5)]
    assert all(len(color) == 1 for color in colors)
    concept = tar.cbas("concept", generator=make_generator(0))
    assert concept.train_mask.sum() == concept.ood_test_mask.sum() == 140


def test_regions_hide_their_rule_in_the_shifted_sets():
    data = tar.hard_region(generator=make_generator(0), noise=0.2)
    shifted = data.ood_val_mask | data.ood_test_mask
    assert data.in_disc[shifted].all() and not data.noisy[shifted].any()
    sign = 2.0 * (data.pos[:, 0] > 0.5).float() - 1
    told = (data.x[:, 0] * sign)[data.in_disc].mean()
    assert told < -0.5 < 0.5 < (data.x[:, 0] * sign)[~data.in_disc].mean()


@pytest.mark.benchmark_data("planetoid")
@pytest.mark.parametrize(("domain", "train_size"), [("word", 1171), ("degree", 1100)])
def test_cora_covariate_split_has_the_known_size(domain, train_size):
    data = tar.citation("Cora", domain, "covariate", generator=make_generator(0))
    assert data.train_mask.sum() == train_size
    assert data.x.shape == (2708, 128)


@pytest.mark.benchmark_data("webkb")
def test_universities_number_their_classes_differently():
    right = label_orders(LabelConfig(), device=torch.device("cpu"), seed=0)
    assert right["webkb"] < 0.2 < 0.7 < right["webkb-matched"]


# --- training ---

TINY = ShiftConfig(CBAS_SMALL.tasks, num_seeds=1, hidden=8, epochs=12, full_grid=False)


def test_ensemble_members_train_as_they_would_alone():
    data = tar.cbas("covariate", generator=make_generator(0))
    both = candidates(data, full_grid=False)

    def run(names):
        model = tar.GCNEnsemble(
            len(names), 4, 8, 4, num_layers=3, generator=make_generator(1)
        )
        chosen = {name: both[name] for name in names}
        return tar.train(model, data, chosen, epochs=10, evaluate_every=5)

    names = list(both)[:3]
    together = run(names)
    for name in names:
        alone = run([name])
        assert alone.loss["ood_test"][name] == pytest.approx(
            together.loss["ood_test"][name], rel=1e-4
        )


def test_ensemble_equals_pygs_own_network():
    data = tar.cbas("covariate", generator=make_generator(0))
    ours = tar.GCNEnsemble(1, 4, 8, 4, num_layers=3, generator=make_generator(1))
    theirs = GCN(4, 8, num_layers=3, out_channels=4)
    for conv, weight, bias in zip(theirs.convs, ours.weights, ours.biases, strict=True):
        conv.lin.weight.data = weight[0].T.detach().clone()
        conv.bias.data = bias[0, 0].detach().clone()
    ours.eval(), theirs.eval()
    torch.testing.assert_close(
        ours(data.x, data.edge_index)[0],
        theirs(data.x, data.edge_index),
        rtol=1e-4,
        atol=1e-5,
    )


def test_ensemble_sees_new_features_on_the_same_edges():
    data = tar.cbas("covariate", generator=make_generator(0))
    model = tar.GCNEnsemble(1, 4, 8, 4, generator=make_generator(1)).eval()
    fresh = tar.GCNEnsemble(1, 4, 8, 4, generator=make_generator(1)).eval()
    model(data.x, data.edge_index)
    other = data.x.flip(0)
    expected = fresh(other, data.edge_index)
    assert torch.equal(model(other, data.edge_index), expected)


@pytest.fixture
def small_ensemble():
    data = tar.cbas("covariate", generator=make_generator(0))
    model = tar.GCNEnsemble(1, 4, 8, 4, generator=make_generator(1)).eval()
    return model, data.x.clone(), data.edge_index.clone()


def test_ensemble_trains_after_inference_mode(small_ensemble):
    model, x, edge_index = small_ensemble
    with torch.inference_mode():
        made = x.clone()
        expected = model(x, edge_index)
    for features in (x, made):
        found = model(features, edge_index)
        found.sum().backward()
        assert torch.equal(found, expected)


def test_ensemble_sees_changes_in_place(small_ensemble):
    model, x, edge_index = small_ensemble
    model(x, edge_index)
    x.mul_(2)
    assert torch.equal(model(x, edge_index), model(x.clone(), edge_index))
    model(x, edge_index)
    edge_index[:, 0] = edge_index[:, 1]
    assert torch.equal(model(x, edge_index), model(x, edge_index.clone()))


def test_ensemble_passes_gradients_to_its_features_again_and_again(small_ensemble):
    model, x, edge_index = small_ensemble
    x.requires_grad_()
    grads = []
    for _ in range(2):
        grads.append(torch.autograd.grad(model(x, edge_index).sum(), x)[0])
    assert torch.equal(*grads) and grads[0].any()


class Sage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(4, 4)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


@pytest.mark.parametrize("make", [Sage, lambda: GCN(4, 8, 2, 4)])
def test_any_pyg_classifier_trains_with_tar(make):
    torch.manual_seed(0)
    data = tar.cbas("covariate", generator=make_generator(0))
    graph = tar.FlowGraph.from_edge_index(
        data.edge_index, data.num_nodes, mask=data.train_mask
    )
    history = tar.train(
        make(), data, {"TAR": tar.TAR(graph)}, epochs=30, lr=0.05, evaluate_every=1
    )
    first, last = history.risk["train"]["TAR"][0], history.risk["train"]["TAR"][-1]
    assert last < first
    assert not torch.equal(history.weights["TAR"][0], history.weights["TAR"][-1])
    assert history.best("TAR")["ood_val_accuracy"] == max(
        history.accuracy["ood_val"]["TAR"]
    )


def test_training_is_deterministic():
    runs = [train_task("cbas/concept", TINY, device="cpu", seed=3) for _ in range(2)]
    assert runs[0][1].loss == runs[1][1].loss


def test_run_shifts_reports_every_task_and_candidate():
    metrics = tar.run_shifts(TINY, device=torch.device("cpu"), seed=0)
    assert set(metrics["results"]) == set(TINY.tasks)
    table = metrics["results"]["cbas/covariate"]
    assert {name.split()[0] for name in table} == set(tar.choose(table))
    assert all(len(v) == 1 for row in table.values() for v in row.values())
    assert "cbas/concept TAR" in metrics


def test_epoch_cost_times_both_methods():
    small = CostConfig(200, 400, 30, 100, hidden=4, steps=2, repeats=3)
    cost = epoch_cost(small, device=torch.device("cpu"), seed=0)
    assert cost["ratio"] == pytest.approx(cost["tar_s"] / cost["erm_s"])
    assert 0 < cost["edges"] < 400


def test_models_and_objectives_must_agree_in_number():
    data = tar.cbas("covariate", generator=make_generator(0))
    model = tar.GCNEnsemble(2, 4, 8, 4, generator=make_generator(0))
    with pytest.raises(ValueError, match="1 objectives need as many models; .* has 2"):
        tar.train(model, data, {"ERM": tar.ERM()}, epochs=1)
    with pytest.raises(ValueError, match="objectives is empty"):
        tar.train(model, data, {})
    with pytest.raises(ValueError, match="epochs=0: at least 1"):
        tar.train(model, data, {"ERM": tar.ERM()}, epochs=0)
    with pytest.raises(ValueError, match="evaluate_every=0: at least 1"):
        tar.train(model, data, {"ERM": tar.ERM()}, evaluate_every=0)


def test_choice_reads_shifted_validation_only():
    def row(val, test):
        return {"ood_val_accuracy": val, "ood_test_accuracy": test}

    table = {"A 1": row([0.5, 0.7], [0.9, 0.9]), "A 2": row([0.8, 0.6], [0.1, 0.1])}
    assert tar.choose(table) == {"A": "A 2"}


def test_mean_and_error():
    mean, error = mean_and_error([1.0, 2.0, 3.0])
    assert mean == 2 and error == pytest.approx(1 / 3**0.5)


# --- EERM: training on edited copies of the graph ---


class Recorder(torch.nn.Module):
    """A graph convolution that keeps the edges it saw."""

    def __init__(self, num_features, num_classes):
        super().__init__()
        self.conv = SAGEConv(num_features, num_classes)

    def forward(self, x, edge_index):
        self.seen = edge_index
        return self.conv(x, edge_index)


def dense(edge_index, n):
    matrix = torch.zeros(n, n, dtype=torch.bool)
    matrix[edge_index[0], edge_index[1]] = True
    return matrix


def views_of(seed, n=12, num_views=3, **options):
    torch.manual_seed(seed)
    pairs = torch.randint(n, (2, 20), generator=make_generator(seed))
    edges = to_undirected(pairs[:, pairs[0] != pairs[1]], num_nodes=n)
    views = tar.EditedViews(
        Recorder(4, 3),
        edges,
        n,
        num_views=num_views,
        generator=make_generator(seed + 1),
        **options,
    )
    return views, edges, torch.randn(n, 4, generator=make_generator(seed + 2))


def copies_seen(views, n, num_views):
    whole = dense(views.model.seen, n * num_views)
    blocks = [whole[k * n : (k + 1) * n, k * n : (k + 1) * n] for k in range(num_views)]
    assert int(whole.sum()) == sum(int(each.sum()) for each in blocks)
    return blocks


@pytest.mark.parametrize("num_partners", [None, 6])
def test_views_flip_a_few_pairs_of_every_node(num_partners):
    views, edges, x = views_of(0, num_partners=num_partners, num_edits=2)
    before = dense(edges, 12)
    views(x, edges)
    for after in copies_seen(views, 12, 3):
        flipped = before ^ after
        assert torch.equal(flipped, flipped.T) and not flipped.diagonal().any()
        # Two draws a node, and a pair drawn from both ends flips once.
        assert (flipped.sum(1) >= 2).all() and 12 <= flipped.sum() / 2 <= 24


def test_flipping_every_pair_gives_the_complement():
    views, edges, x = views_of(1, num_partners=None, num_edits=11)
    views(x, edges)
    complement = ~dense(edges, 12) & ~torch.eye(12, dtype=torch.bool)
    for after in copies_seen(views, 12, 3):
        assert torch.equal(after, complement)


def test_generators_draw_what_their_logits_say():
    views, edges, x = views_of(2, num_partners=None, num_edits=1)
    views.edit_logits.data[:, :, 4] = 50.0  # partner v + 5 of every node v
    views(x, edges)
    ahead = torch.arange(12)
    expected = dense(torch.stack([ahead, (ahead + 5) % 12]), 12)
    for after in copies_seen(views, 12, 3):
        assert torch.equal(after ^ dense(edges, 12), expected | expected.T)
    assert views.log_prob.item() == pytest.approx(0, abs=1e-4)


def test_neighbours_are_among_the_partners():
    views, edges, x = views_of(3, num_partners=10, num_edits=10)
    views(x, edges)
    for after in copies_seen(views, 12, 3):
        degree = dense(edges, 12).sum(1)
        cut = (dense(edges, 12) & ~after).sum(1)
        assert torch.equal(cut[degree <= 5], degree[degree <= 5])


def test_views_leave_the_graph_alone_in_evaluation():
    views, edges, x = views_of(4, num_partners=6)
    assert torch.equal(views.eval()(x, edges), views.model(x, edges))
    assert views.model.seen is edges


def test_eerm_descends_variance_and_mean_and_explores_by_reinforce():
    views, edges, x = views_of(5, num_partners=6, num_edits=2)
    y = torch.randint(3, (12,), generator=make_generator(6))
    logits = views(x, edges)[0]
    risks = torch.stack([F.cross_entropy(logits[:, k], y) for k in range(3)])
    mean, variance = risks.sum() / 3, (risks - risks.mean()).square().sum() / 2
    weights = list(views.model.parameters())
    expected = torch.autograd.grad(variance + 0.7 * mean, weights, retain_graph=True)
    log_slope = torch.autograd.grad(
        views.log_prob, views.edit_logits, retain_graph=True
    )[0]
    tar.EERM(views, 0.7)(logits, y).backward()
    for weight, slope in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, slope)
    # Descent on the objective climbs the log-probability of what made risks differ.
    torch.testing.assert_close(views.edit_logits.grad, -variance * log_slope)
    assert log_slope.abs().max() > 0


def test_eerm_trains_on_common_data_and_budget():
    data = make_task("cbas/concept", make_generator(3))
    both = [train_eerm("cbas/concept", TINY, device="cpu", seed=3) for _ in range(2)]
    assert both[0][0].loss == both[1][0].loss
    history = both[0][0]
    plain = train_task("cbas/concept", TINY, device="cpu", seed=3)[1]
    assert history.epochs == plain.epochs and len(both[0]) == 1
    sizes = {name: int(data[f"{name}_mask"].sum()) for name in history.accuracy}
    for name, size in sizes.items():
        hits = history.accuracy[name]["EERM beta=1 edits=1"][-1] * size
        assert hits == pytest.approx(round(hits), abs=1e-3)
    assert run_eerm(TINY, device=torch.device("cpu"), seed=0)["results"].keys() == set(
        TINY.tasks
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_views": 1}, "num_views=1: at least 2"),
        ({"num_edits": 0}, "num_edits=0: 1 to 6, the partners"),
        ({"num_edits": 7}, "num_edits=7: 1 to 6, the partners"),
        ({"num_partners": 12}, "num_partners=12: 2 to 11 for 12 nodes, or None"),
    ],
)
def test_bad_views_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        views_of(0, **{"num_partners": 6, **options})


def test_eerm_needs_views_in_training():
    views, edges, x = views_of(0, num_partners=6)
    y = torch.zeros(12, dtype=torch.int64)
    with pytest.raises(ValueError, match="beta=0: must be positive"):
        tar.EERM(views, 0)
    with pytest.raises(ValueError, match=r"logits have shape \(12, 3\); EERM needs"):
        tar.EERM(views, 1.0)(views.eval()(x, edges), y)


@pytest.mark.benchmark_data("planetoid")
def test_rare_classes_are_cut_in_training_and_even_in_the_shifted_sets():
    data = tar.imbalanced("Cora", generator=make_generator(0))
    assert torch.equal(data.y[data.ood_test_mask].bincount(), torch.full((7,), 60))
    assert torch.equal(data.y[data.ood_val_mask].bincount(), torch.full((7,), 30))
    size, kept = data.y.bincount(), data.y[data.train_mask | data.id_val_mask]
    rare = data.y[data.is_rare].unique()
    assert len(rare) == 3
    # Of what the shifted sets leave, a tenth; a tenth of that is the ID test set's.
    assert (kept.bincount(minlength=7)[rare] <= (size[rare] - 90) / 10).all()
    with pytest.raises(ValueError, match="num_rare=7: 1 to 6"):
        tar.imbalanced("Cora", generator=make_generator(0), num_rare=7)


@pytest.mark.benchmark_data("planetoid")
def test_imbalance_reports_where_the_weight_of_rare_classes_goes():
    tiny = ShiftConfig(
        ("imbalance/Cora",), num_seeds=1, hidden=8, epochs=3, full_grid=False
    )
    found = run_imbalance(tiny, device=torch.device("cpu"), seed=0)["rare"]
    row = {key: value[0] for key, value in found["imbalance/Cora"].items()}
    data = make_task("imbalance/Cora", make_generator(0))
    rare = data.is_rare & data.train_mask
    assert row["share"] == pytest.approx(
        int(rare.sum()) / int(data.train_mask.sum()), abs=1e-4
    )
    assert row["balanced_mass"] == pytest.approx(3 / 7, abs=1e-4)
    inside = data.train_mask[data.edge_index].all(0)
    src, dst = data.edge_index[:, inside]
    linked = torch.isin(rare.nonzero().squeeze(1), src).double().mean().item()
    assert row["isolated"] == pytest.approx(1 - linked, abs=1e-4)
    crossing = src[rare[src] & ~rare[dst]].unique()
    expected = len(crossing) / int(rare.sum())
    assert row["beside_common"] == pytest.approx(expected, abs=1e-4)
    # Mass cannot leave a component: rare nodes hold at most that of theirs.
    graph = tar.FlowGraph.from_edge_index(
        data.edge_index, data.num_nodes, mask=data.train_mask
    )
    label = graph.components()
    reach = torch.isin(label, label[data.is_rare[data.train_mask]])
    assert 0 < row["tar_mass"] <= reach.double().mean().item()
