"""Trees in hyperbolic space: the arithmetic, the directions, the construction.

Golden files: 1,400-bit arithmetic and the authors' public code; see their README.
"""

import itertools
import json
import math
import os
import shutil
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from icml25.core import data
from icml25.hsdte import (
    EXPERIMENTS,
    Expansion,
    RootedTree,
    distance_to_prototypes,
    embed_tree,
    expansion,
    level,
    max_scale,
    reference,
    sphere_points,
)
from icml25.hsdte.arithmetic import (
    fast_two_sum,
    product_is_exact,
    renormalize,
    two_prod,
    two_sum,
)
from icml25.hsdte.distances import (
    AncestorViews,
    deficit,
    pairwise_distance,
    poincare_distance,
    tree_blocks,
)
from icml25.hsdte.expansion import max_radius
from icml25.hsdte.experiments import load_tree
from icml25.hsdte.law import delaunay_scale, drift_angle, ratio_bound
from icml25.hsdte.metrics import distortion
from icml25.hsdte.sphere import (
    METHODS,
    direction_table,
    rankin_angle,
    smallest_angle,
)

GOLDEN = Path(__file__).parent / "golden" / "hsdte"
DTYPES = [torch.float64, torch.float32]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
BITS = {torch.float64: 53, torch.float32: 24}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def golden(name):
    return np.load(GOLDEN / f"{name}.npz")


def facts(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def from_last_axis(array):
    """Golden files keep the components last."""
    return Expansion(torch.from_numpy(np.moveaxis(array, -1, 0).copy()))


def random_expansion(shape, terms, dtype, seed):
    """Generic expansions: every component is about one ulp of the one before."""
    draw = torch.randn(terms, *shape, generator=generator(seed), dtype=torch.float64)
    scale = 2.0 ** (-torch.arange(terms) * (BITS[dtype] + 1)).double()
    x = (draw * scale.reshape(-1, *[1] * len(shape))).to(dtype)
    return Expansion(renormalize(list(x), terms))


def worst_bits(result, exact, scale=None):
    """log2 of the largest error relative to the scale (default: the exact value)."""
    worst = mpmath.mpf(0)
    for i, value in enumerate(exact):
        size = abs(value) if scale is None else scale[i]
        worst = max(worst, abs(result.to_mpmath(i) - value) / size)
    return float(mpmath.log(worst, 2)) if worst else -math.inf


@pytest.fixture(autouse=True)
def _precision():
    with mpmath.workprec(1400):
        yield


# Error-free transformations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_products_are_exact_in_fractions(dtype, device):
    draw = torch.randn(2, 2000, generator=generator(), dtype=torch.float64)
    exponent = torch.randint(-20, 20, (2, 2000), generator=generator(1))
    a, b = torch.ldexp(draw, exponent).to(dtype).to(device)
    s, e = two_sum(a, b)
    p, f = two_prod(a, b)
    big, small = (
        torch.where(a.abs() > b.abs(), a, b),
        torch.where(a.abs() > b.abs(), b, a),
    )
    q, g = fast_two_sum(big, small)
    columns = [map(Fraction, x.tolist()) for x in (a, b, s, e, p, f, q, g)]
    for a, b, s, e, p, f, q, g in zip(*columns, strict=True):
        assert s + e == a + b == q + g
        assert p + f == a * b


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dekker_product_passes_the_self_test(dtype, device):
    assert product_is_exact("dekker", dtype=dtype, device=device)


def test_self_test_sees_a_product_without_its_error_term(monkeypatch):
    # What a compiler or an old processor does to the fused form: the error is 0.
    monkeypatch.setattr(torch, "addcmul", lambda c, a, b: c + a * b)
    assert not product_is_exact("fma")
    assert product_is_exact("dekker")


@pytest.mark.parametrize("terms", [2, 3, 4])
def test_fused_products_agree_where_the_self_test_allows_them(terms):
    if not product_is_exact("fma"):
        pytest.skip("no fused addcmul in this mode: the self-test keeps it out")
    x, y = (random_expansion((500,), terms, torch.float64, s) for s in (0, 1))
    fused = Expansion(x.components, product="fma") * y
    assert torch.equal(fused.components, (x * y).components)


def test_fused_products_are_refused_where_the_self_test_fails(monkeypatch):
    monkeypatch.setattr(expansion, "_is_fused", lambda device, dtype: False)
    with pytest.raises(ValueError, match="not fused on cpu"):
        Expansion(torch.zeros(2, 1), product="fma")


# Inductor needs a C++ compiler, and fails in torch itself without vector kernels.
CAN_COMPILE = shutil.which("g++") and not os.environ.get("ATEN_CPU_CAPABILITY")


@pytest.mark.skipif(not os.environ.get("ICML25_SLOW"), reason="40 s; ICML25_SLOW=1")
@pytest.mark.skipif(not CAN_COMPILE, reason="torch.compile has no C++ compiler here")
def test_compiled_dekker_product_is_exact():
    assert product_is_exact("dekker", compiled=True)


@pytest.mark.skipif(not os.environ.get("ICML25_SLOW"), reason="2 min; ICML25_SLOW=1")
@pytest.mark.skipif(not CAN_COMPILE, reason="torch.compile has no C++ compiler here")
@pytest.mark.parametrize("terms", [1, 2])
def test_compiled_construction_repeats_every_bit(terms):
    for tree in (RootedTree.balanced(3, 4), load_tree("carnivores")):
        plain, fused = (
            embed_tree(tree, 6, terms=terms, generator=generator(), compiled=compiled)
            for compiled in (False, True)
        )
        assert torch.equal(plain.points.components, fused.points.components)


@pytest.fixture
def forget_compiled_steps():
    level.compiled_steps.cache_clear()
    yield
    level.compiled_steps.cache_clear()


def test_compiled_steps_take_levels_of_any_size(monkeypatch, forget_compiled_steps):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    caterpillar = RootedTree([-1, 0, 0, 1, 1, 3, 3, 5, 6, 6]).recentered()
    for dim in (2, 5):
        plain, fused = (
            embed_tree(caterpillar, dim, terms=3, twist=False, compiled=compiled)
            for compiled in (False, True)
        )
        assert torch.equal(plain.points.components, fused.points.components)


def test_a_compiler_that_changes_the_bits_is_refused(
    monkeypatch, forget_compiled_steps
):
    def careless(function, **options):
        def run(*given):
            return tuple(c * (1 + 2.0**-52) for c in function(*given))

        return run

    monkeypatch.setattr(torch, "compile", careless)
    with pytest.raises(RuntimeError, match="changes the arithmetic of 2 terms"):
        embed_tree(RootedTree.balanced(2, 3), 3, terms=2, compiled=True)


def test_a_missing_compiler_is_named(monkeypatch, forget_compiled_steps):
    def missing(function, **options):
        def run(*given):
            raise RuntimeError("No working C++ compiler found")

        return run

    monkeypatch.setattr(torch, "compile", missing)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler.*No working"):
        embed_tree(RootedTree.balanced(2, 3), 3, terms=2, compiled=True)
    one = embed_tree(RootedTree.balanced(2, 3), 3, terms=1, compiled=True)
    assert float(one.edge_errors().abs().max()) < 0.2  # has nothing to compile


# Expansion arithmetic


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_operations_against_1400_bits(terms):
    g = golden("fpe_ops_f64")
    a, b, c = (from_last_axis(g[f"t{terms}_{name}"]) for name in "abc")
    exact = {
        name: [mpmath.fsum(map(float, row)) for row in g[f"t{terms}_{name}"]]
        for name in ("add", "addc", "mul", "div", "sqrt_abs_a")
    }
    size = [
        max(abs(a.to_mpmath(i)), abs(b.to_mpmath(i)), abs(c.to_mpmath(i)))
        for i in range(64)
    ]
    absolute = Expansion(a.components * a.components[0].sign())
    # 2^(-tp+1) is what a good implementation reaches; Newton's last step costs a few.
    assert worst_bits(a + b, exact["add"], size) <= -53 * terms + 1
    assert worst_bits(a * b, exact["mul"]) <= -53 * terms + 1
    assert worst_bits(a / b, exact["div"]) <= -53 * terms + 5
    assert worst_bits(absolute.sqrt(), exact["sqrt_abs_a"]) <= -53 * terms + 6
    assert worst_bits(a + c, exact["addc"], size) <= -53 * terms - 40  # cancels exactly


@pytest.mark.parametrize(
    ("dtype", "terms"),
    [(torch.float64, t) for t in (1, 2, 3, 4, 6, 8)]
    + [(torch.float32, t) for t in (1, 2, 3, 4)],
)
def test_all_operations_keep_t_times_p_bits(dtype, terms):
    x, y = (random_expansion((40, 6), terms, dtype, s) for s in (2, 3))
    rows = range(40)
    exact = [
        mpmath.fsum(x.to_mpmath((i, k)) * y.to_mpmath((i, k)) for k in range(6))
        for i in rows
    ]
    size = [
        mpmath.fsum(abs(x.to_mpmath((i, k)) * y.to_mpmath((i, k))) for k in range(6))
        for i in rows
    ]
    bits = BITS[dtype] * terms
    assert worst_bits(x.dot(y), exact, size) <= -bits + 3
    total = [mpmath.fsum(x.to_mpmath((i, k)) for k in range(6)) for i in rows]
    assert worst_bits(x.sum(), total, [mpmath.mpf(4)] * 40) <= -bits + 3
    square = x.dot(x)
    norm = [mpmath.fsum(x.to_mpmath((i, k)) ** 2 for k in range(6)) for i in rows]
    assert worst_bits(square, norm) <= -bits + 3
    root = square.rsqrt()
    assert worst_bits(root, [1 / mpmath.sqrt(v) for v in norm]) <= -bits + 10
    assert worst_bits(square.reciprocal(), [1 / v for v in norm]) <= -bits + 10


@pytest.mark.parametrize(
    ("dtype", "terms"),
    [(torch.float64, t) for t in (1, 2, 3, 4, 8)]
    + [(torch.float32, t) for t in (1, 2, 3, 4)],
)
def test_joint_operations_keep_t_times_p_bits(dtype, terms):
    a, b, c = (random_expansion((60,), terms, dtype, s) for s in (11, 12, 13))
    u = random_expansion((60,), 1, dtype, 14)
    exact, size = [], []
    for i in range(60):
        x, y, z, w = (e.to_mpmath(i) for e in (a, b, c, u))
        exact.append(x + w * y + z * y)
        size.append(abs(x) + abs(w * y) + abs(z * y))
    bits = BITS[dtype] * terms
    assert worst_bits(a.add_products((u, b), (c, b)), exact, size) <= -bits + 3
    noise = generator(15)
    near = 1 + torch.randint(-8, 9, (60,), generator=noise) * 2.0 ** -BITS[dtype]
    near = Expansion.from_float(near.to(dtype), terms)
    if terms > 1:
        near = near + b * 2.0 ** -(BITS[dtype] + 4)
    roots = [1 / mpmath.sqrt(near.to_mpmath(i)) for i in range(60)]
    assert worst_bits(near.rsqrt_near_one(), roots) <= -bits + 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_differences_as_floats_are_right_however_much_cancels(terms, dtype):
    a, b = (random_expansion((100,), terms, dtype, s) for s in (16, 17))
    cases = [b]
    for place in range(terms):  # agrees with a in all components before this one
        near = a.components.clone()
        near[place:] = b.components[place:] * a.components[0] / b.components[0]
        cases.append(Expansion(renormalize(list(near), terms)))
        near = a.components.clone()  # one unit apart, and then back by most of it
        near[place] *= 1 + 2.0 ** (1 - BITS[dtype])
        near[place + 1 :] -= near[place] - a.components[place]
        cases.append(Expansion(renormalize(list(near), terms)))
    for other in cases:
        gap = a.minus_as_float(other)
        assert gap.dtype == torch.float64
        for i in range(100):
            exact = a.to_mpmath(i) - other.to_mpmath(i)
            assert abs(float(gap[i]) - exact) <= 2.0**-50 * abs(exact)


@pytest.mark.parametrize("terms", [2, 3, 4])
def test_components_do_not_overlap_and_the_last_is_used(terms):
    x, y = (random_expansion((400,), terms, torch.float64, s) for s in (4, 5))
    for z in (x * y, x + y, x.dot(y)[None], x.reciprocal(), (x - y) * x):
        head, tail = z.components[:-1], z.components[1:]
        ulp = torch.ldexp(torch.ones_like(head), torch.frexp(head)[1] - 53)
        assert bool((tail.abs() <= ulp).all())
        assert (tail[-1] != 0).double().mean() > 0.95


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_sums_that_cancel_lose_nothing(terms):
    x = random_expansion((200,), terms, torch.float64, 6)
    assert bool(((x - x).components == 0).all())
    tiny = x.components.clone()
    tiny[-1] *= 1.25
    gap = (Expansion(tiny) - x).to_float()
    assert torch.equal(gap, tiny[-1] - x.components[-1])


def test_renormalize_survives_zeros_and_disorder():
    zero, one = torch.zeros(1).double(), torch.ones(1).double()
    tiny = one * 2.0**-80
    for order in itertools.permutations([zero, one, -one, tiny, tiny * 2.0**-60]):
        total = renormalize(list(order), 2)
        assert float(total[0]) == 2.0**-80 and float(total[1]) == 2.0**-140


def test_roots_and_quotients_at_the_border():
    zero = Expansion(torch.zeros(3, 1).double())
    assert float(zero.sqrt().to_float()) == 0
    assert not math.isfinite(float(zero.reciprocal().to_float()))
    minus = Expansion.from_float(-torch.ones(1).double(), 3)
    assert math.isnan(float(minus.sqrt().to_float()))


@pytest.mark.parametrize("terms", [2, 3])
def test_scalars_and_plain_tensors_keep_every_bit(terms):
    x = random_expansion((50,), terms, torch.float64, 7)
    plain = torch.randn(50, generator=generator(8)).double()
    exact = [x.to_mpmath(i) * mpmath.mpf(float(plain[i])) for i in range(50)]
    assert worst_bits(x * plain, exact) <= -53 * terms + 2
    values = [x.to_mpmath(i) for i in range(50)]
    assert worst_bits(x / 3.0, [v / 3 for v in values]) <= -53 * terms + 5
    assert worst_bits(1 / x, [1 / v for v in values]) <= -53 * terms + 5


def test_decimal_texts_enter_and_leave():
    x = Expansion.from_mpmath(["0.1", "1e-30"], 4)
    assert abs(x.to_mpmath(0) - mpmath.mpf("0.1")) < mpmath.mpf(2) ** -214
    assert float(x.to_float()[0]) == 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_devices_agree_to_the_bit(device):
    x, y = (random_expansion((300,), 3, torch.float64, s) for s in (9, 10))
    there = x.to(device) * y.to(device) + x.to(device)
    assert torch.equal((x * y + x).components, there.to("cpu").components)


def test_gradients_are_those_of_the_represented_value():
    x = torch.rand(3, 4, generator=generator(), dtype=torch.float64) + 0.5
    y = torch.rand(4, generator=generator(1), dtype=torch.float64) + 0.5

    def function(x, y):
        a, b = Expansion.from_float(x, 3), Expansion.from_float(y, 2)
        mixed = (a * b - b / a + a.sqrt() * 2.0).dot(b) + a.sum() * b.sum()
        joint = mixed.add_products((a.sum(), b.sum()[None]), (mixed, mixed))
        gap = joint.minus_as_float(mixed * 0.5)
        return (mixed * mixed.rsqrt() - 1.0).to_float() + gap

    leaves = x.requires_grad_(), y.requires_grad_()
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Expansion(torch.zeros(2, 3, dtype=torch.int64)), TypeError, "float64"),
        (lambda: Expansion(torch.zeros(0, 3)), ValueError, "1 to 4 terms"),
        (lambda: Expansion(torch.zeros(2), product="fast"), ValueError, "dekker"),
        (lambda: Expansion.from_float(torch.zeros(1), 5), ValueError, "1 to 4"),
        (lambda: Expansion.from_mpmath(["1"], 9), ValueError, "1 to 8"),
        (
            lambda: Expansion(torch.zeros(2)) + Expansion(torch.zeros(2).double()),
            TypeError,
            "mixed dtypes",
        ),
        (lambda: Expansion(torch.zeros(2)) + "1", TypeError, "no arithmetic"),
        (lambda: max_radius(0), ValueError, "terms=0"),
        (lambda: max_radius(2, torch.float16), ValueError, "float16"),
    ],
)
def test_expansions_refuse(call, error, text):
    with pytest.raises(error, match=text):
        call()


# Directions


@pytest.mark.parametrize("dim", [2, 3, 7, 20])
def test_closed_forms_reach_rankins_bound_and_nothing_exceeds_it(dim):
    for count in range(2, 2 * dim + 1):
        points = sphere_points(count, dim, generator=generator())
        assert torch.allclose(points.norm(dim=1), torch.ones(count).double())
        assert float(smallest_angle(points)) == pytest.approx(
            rankin_angle(count, dim), abs=1e-6
        )
    for method in METHODS:
        count = min(4, dim)
        try:
            angle = smallest_angle(
                sphere_points(count, dim, method, generator=generator())
            )
        except ValueError:
            continue
        assert float(angle) <= rankin_angle(count, dim) + 1e-6


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("dim", "count", "optimum"),
    # Known optima: simplex, orthoplex, square antiprism, icosahedron.
    [
        (20, 4, 109.4712),
        (20, 11, 95.7392),
        (10, 17, 90),
        (3, 8, 74.8585),
        (3, 12, 63.4349),
    ],
)
def test_annealed_softmax_finds_known_optima(dim, count, optimum, seed):
    points = sphere_points(count, dim, "softmax", generator=generator(seed))
    assert float(smallest_angle(points)) == pytest.approx(optimum, abs=0.1)


def test_softmax_beats_mam_and_mam_beats_energies_for_crowded_spheres():
    angle = {}
    for method in ("softmax", "mam", "energy_0", "energy_1", "energy_2"):
        points = sphere_points(60, 8, method, generator=generator())
        angle[method] = float(smallest_angle(points))
    energies = (angle[f"energy_{s}"] for s in (0, 1, 2))
    assert angle["softmax"] > angle["mam"] > max(energies)


@pytest.mark.parametrize("case", ["n4_d5", "n8_d10", "n12_d4"])
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("mam", "min_angles"),
        ("energy_0", "mhe_log"),
        ("energy_1", "mhe_1"),
        ("energy_2", "mhe_2"),
    ],
)
def test_optimisers_repeat_the_authors_code(case, method, name):
    g, info = (
        golden("sphere_points"),
        facts("sphere_points"),
    )
    start = torch.from_numpy(g[f"{case}_init"])
    points = sphere_points(*start.shape, method, start=start)
    # float32, and MAM is not smooth: the authors' own tolerance.
    final = torch.from_numpy(g[f"{case}_{name}_final"]).double()
    assert float((points - final).abs().max()) < 1e-3
    expected = info[f"{case}_{name}"]["min_angle_deg"]
    assert float(smallest_angle(points)) == pytest.approx(expected, abs=0.05)


def test_codes_have_the_angles_that_theory_gives():
    assert float(smallest_angle(sphere_points(8, 20, "hadamard"))) == pytest.approx(90)
    # exact only if the dimension is a multiple of the code's length, here 7
    code = sphere_points(8, 14, "simplex_code")
    assert float(smallest_angle(code)) == pytest.approx(math.degrees(math.acos(-1 / 7)))


def test_directions_are_solved_once_for_each_degree():
    table = direction_table([3, 3, 0, 1, 5, 3], 4, generator=generator())
    assert sorted(table) == [1, 3, 5]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 3), "count=0"),
        ((3, 1), "dim=1"),
        ((3.0, 3), "count=3.0"),
        ((17, 20, "hadamard"), "16 rows that fit"),
        ((21, 20, "simplex_code"), "exceeds dim"),
        ((9, 4, "orthoplex"), "exceeds 2 dim"),
        ((6, 4, "simplex"), r"exceeds dim \+ 1"),
        ((5, 3, "polygon"), "in the plane"),
        ((5, 3, "best"), "allowed are"),
    ],
)
def test_directions_refuse(arguments, text):
    with pytest.raises(ValueError, match=text):
        sphere_points(*arguments)


@pytest.mark.parametrize("method", ["mam", "min_cos", "energy_2"])
def test_only_the_directions_of_a_start_matter(method):
    start = 5 * torch.randn(30, 5, generator=generator(), dtype=torch.float64)
    points = sphere_points(30, 5, method, start=start)
    assert torch.isfinite(points).all()
    unit = start / start.norm(dim=1, keepdim=True)
    assert torch.equal(sphere_points(30, 5, method, start=unit), points)


@pytest.mark.parametrize(
    "device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
)
def test_directions_are_searched_on_the_device_of_their_start(device):
    start = torch.randn(9, 3, generator=generator()).to(device)
    for method in ("softmax", "mam"):
        points = sphere_points(9, 3, method, start=start)
        assert points.device.type == device
    tree = RootedTree.balanced(9, 1)
    table = {9: points, 1: torch.eye(1, 3, device=device)}
    found = embed_tree(tree, 3, tau=2.0, points=table, device=device).points
    assert found.device.type == device


@pytest.mark.parametrize(
    "start",
    [
        torch.ones(4, 3),
        torch.full((9, 3), math.nan),
        torch.full((9, 3), math.inf),
        torch.zeros(9, 3),
    ],
)
def test_starts_of_another_shape_or_without_direction_are_refused(start):
    with pytest.raises(ValueError, match=r"give \(9, 3\) finite"):
        sphere_points(9, 3, "mam", start=start)


# Trees


def random_tree(size, seed=0, weighted=True):
    draw = np.random.default_rng(seed)
    parent = [-1] + [int(draw.integers(0, i)) for i in range(1, size)]
    weight = draw.uniform(0.5, 2, size) if weighted else None
    return RootedTree(parent, weight)


def test_any_numbering_is_brought_into_breadth_first_order():
    tree = RootedTree([3, 0, 0, -1, 3], [1, 2, 3, 9, 5], list("abrtz"))
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1]
    assert tree.labels == ("t", "a", "z", "b", "r")
    assert tree.order.tolist() == [3, 0, 4, 1, 2]
    assert tree.weight.tolist() == [0, 1, 5, 2, 3]
    assert tree.height.tolist() == [0, 1, 5, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_distances_agree_with_networkx_and_survive_rerooting(seed):
    import networkx as nx

    tree = random_tree(40, seed)
    graph = nx.Graph()
    for child, parent in enumerate(tree.parent.tolist()[1:], 1):
        graph.add_edge(parent, child, weight=float(tree.weight[child]))
    lengths = dict(nx.all_pairs_dijkstra_path_length(graph))
    expected = torch.tensor([[lengths[i][j] for j in range(40)] for i in range(40)])
    assert torch.allclose(tree.distances(), expected.double())
    centred = tree.recentered()
    there = centred.distances()
    original = torch.argsort(tree.order)[centred.order]
    back = tree.distances()[original][:, original]
    assert torch.allclose(there, back)
    assert centred.eccentricity == pytest.approx(float(expected.amax(1).min()))
    again = RootedTree.from_networkx(graph, root=0)
    assert again.eccentricity == pytest.approx(tree.eccentricity)


def test_depth_first_places_make_subtrees_contiguous():
    tree = random_tree(60, 1)
    for node in range(60):
        below = {node}
        for child in range(node + 1, 60):
            if int(tree.parent[child]) in below:
                below.add(child)
        places = sorted(int(tree.depth_first[i]) for i in below)
        assert places == list(range(places[0], places[0] + len(below)))
        assert int(tree.subtree_size[node]) == len(below)
        assert len(tree.subtree(node)) == len(below)


def test_yule_trees_end_at_one_time():
    tree = RootedTree.yule(50, generator())
    leaves = tree.height[tree.num_children == 0]
    assert len(leaves) == 50
    assert torch.allclose(leaves, leaves[0].expand(50))


def test_labels_may_hold_tabs_and_unicode(tmp_path):
    path = tmp_path / "tree.tsv"
    path.write_text(
        "node\tparent\tweight\tlabel\n0\t-1\t0\tŵurzel\n1\t0\t2\ta\tb\n", "utf-8"
    )
    assert RootedTree.from_tsv(path).labels == ("ŵurzel", "a\tb")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: RootedTree([-1, 2, 3, 1]), "a cycle"),
        (lambda: RootedTree([-1, -1, 0]), "2 roots"),
        (lambda: RootedTree([1, 0]), "0 roots"),
        (lambda: RootedTree([-1, 5]), "out of range"),
        (lambda: RootedTree([]), "n >= 1"),
        (lambda: RootedTree([-1.0, 0.5]), "whole numbers"),
        (lambda: RootedTree([-1, 0], [0, -1]), "finite and positive"),
        (lambda: RootedTree([-1, 0], [0, math.nan]), "finite and positive"),
        (lambda: RootedTree([-1, 0], [0, 0]), "contract it first"),
        (lambda: RootedTree([-1, 0], [1]), "weight has shape"),
        (lambda: RootedTree([-1, 0], labels=["a"]), "labels has shape"),
        (lambda: RootedTree([-1, 0], [[1], [1]]), r"shape \(2, 1\)"),
        (lambda: RootedTree([-1, 0], [None, 1.0]), "weight must hold numbers"),
        (lambda: RootedTree.balanced(2.5, 2), "branching=2.5"),
        (lambda: RootedTree.balanced(0, 1), "branching=0"),
        (lambda: RootedTree.yule(1), "leaves=1"),
        (lambda: RootedTree.balanced(2, 1).rerooted(3), "root=3"),
    ],
)
def test_trees_refuse(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_networkx_graphs_that_are_no_trees_are_refused():
    import networkx as nx

    with pytest.raises(ValueError, match="a cycle"):
        RootedTree.from_networkx(nx.cycle_graph(4))
    with pytest.raises(ValueError, match="not connected"):
        RootedTree.from_networkx(nx.Graph([(0, 1), (2, 3)]))
    with pytest.raises(ValueError, match="no node"):
        RootedTree.from_networkx(nx.Graph())
    for graph in (nx.DiGraph([(0, 1)]), nx.MultiGraph([(0, 1)]), [(0, 1)]):
        with pytest.raises(TypeError, match="undirected networkx.Graph"):
            RootedTree.from_networkx(graph)


def test_tree_files_are_read_by_node_number(tmp_path):
    path = tmp_path / "tree.tsv"
    head, a, b, c = (
        "node\tparent\tweight\n",
        "2\t1\t3\tc\n",
        "0\t-1\t0\ta\n",
        "1\t0\t2\n",
    )
    path.write_text(head + a + b + c, "utf-8")
    tree = RootedTree.from_tsv(path)
    assert tree.labels == ("a", "", "c") and tree.height.tolist() == [0, 2, 5]
    path.write_text(head + b + "one\t0\t1\n", "utf-8")
    with pytest.raises(ValueError, match="line 3.*node, parent, weight"):
        RootedTree.from_tsv(path)
    path.write_text(head + b + "0\t0\t1\n", "utf-8")
    with pytest.raises(ValueError, match="each once"):
        RootedTree.from_tsv(path)


# Distances


@pytest.mark.parametrize(
    ("group", "stored_bits"), [("r30_k1", 1e-3), ("r60_k2", 2e-8), ("r135_k4", 2e-9)]
)
def test_distances_against_1400_bits(group, stored_bits):
    g = golden("poincare_distances")
    x, y = from_last_axis(g[f"{group}_x"]), from_last_axis(g[f"{group}_y"])
    exact = torch.from_numpy(g[f"{group}_dist"])
    near = poincare_distance(x, y, guard=0)
    assert float((near / exact - 1).abs().max()) < stored_bits
    # One component more than stored: right to the last digits of a double.
    assert float((poincare_distance(x, y) / exact - 1).abs().max()) < 1e-14
    m = deficit(x.with_terms(x.terms + 1))
    exact_m = torch.from_numpy(g[f"{group}_one_minus_x2"])
    assert torch.allclose(m, exact_m, rtol=1e-14, atol=0)


def test_one_component_agrees_with_geoopt():
    geoopt = pytest.importorskip("geoopt")
    embedded = embed_tree(RootedTree.balanced(3, 3), 4, tau=2.5, generator=generator())
    x = embedded.points.to_float()
    theirs = geoopt.PoincareBall().dist(x[:, None], x)
    ours = pairwise_distance(embedded.points)
    off = ~torch.eye(len(x), dtype=torch.bool)
    assert torch.allclose(ours[off], theirs[off], rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("terms", [1, 2, 4])
def test_ancestor_distances_agree_with_direct_ones(terms, seed):
    tree = random_tree(50, seed).recentered()
    tau = max_scale(tree, terms, margin=8)
    embedded = embed_tree(tree, 5, tau=tau, terms=terms, generator=generator(seed))
    direct = pairwise_distance(embedded.points)
    # Both read the same stored points, which are right to e^(R - R_max) = e^-8 nats.
    assert float((embedded.distances() - direct).abs().max()) < 3 * math.exp(-8)


def test_blocks_hold_every_pair_once():
    tree = random_tree(70, 2)
    embedded = embed_tree(tree, 3, tau=0.5, generator=generator())
    seen = torch.zeros(70, 70, dtype=torch.int64)
    place = tree.depth_first
    ordered = torch.zeros(70, 70).double()
    ordered[place[:, None], place] = tree.distances()
    for rows, cols, _, path in tree_blocks(
        AncestorViews(tree, embedded.points), max_elements=50
    ):
        seen[rows, cols] += 1
        assert torch.allclose(path, ordered[rows, cols])
    assert torch.equal(seen, torch.ones(70, 70).triu(1).long())


def test_a_hub_is_measured_in_pieces():
    # 500 edges of one row and 500 columns; each comparison holds at most 600 pairs.
    from icml25.hsdte.metrics import tree_distortion

    tree = RootedTree([-1] + [0] * 500)
    table = {1: torch.eye(1, 9), 500: sphere_points(500, 9, "random")}
    points = embed_tree(tree, 9, tau=3.0, points=table, twist=False).points
    held = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.le.Tensor:
                held.append(out.numel())
            return out

    whole = tree_distortion(tree, points, 3.0, max_elements=1 << 20)
    with Watch():
        pieces = tree_distortion(tree, points, 3.0, max_elements=600)
    for name in ("map", "d_ave", "d_wc"):  # products of other shapes round otherwise
        found, expected = getattr(pieces, name), getattr(whole, name)
        assert found == pytest.approx(expected, rel=1e-12)
    assert max(held) <= 600


def test_a_path_of_one_term_is_cured_by_another_or_a_smaller_scale():
    tree = RootedTree([-1, *range(499)]).recentered()
    tau = max_scale(tree, 1)
    worst = [
        embed_tree(tree, 3, tau=share * tau, terms=terms, generator=generator())
        .report()
        .d_wc
        for share, terms in ((1, 1), (1, 2), (0.8, 1))
    ]
    assert worst[0] > 1.05 and worst[1] < 1 + 1e-9 and worst[2] < 1.005


def test_prototype_distances_and_their_gradient():
    tree = RootedTree.balanced(2, 4)
    points = embed_tree(tree, 3, tau=4.0, terms=2, generator=generator()).points
    z = (torch.rand(5, 3, generator=generator(), dtype=torch.float64) - 0.5) * 0.9
    expected = poincare_distance(Expansion(z[None, :, None]), points)
    assert torch.allclose(distance_to_prototypes(z, points), expected)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: distance_to_prototypes(z, points), z)


def test_prototype_gradient_is_finite_on_a_prototype_and_near_the_border():
    kwargs = {"dtype": torch.float64}
    points = Expansion(torch.tensor([[[0.5, 0.0], [0.0, 1 - 1e-15]]], **kwargs))
    z = torch.tensor([[0.5, 0.0], [0.0, 1 - 1e-14]], requires_grad=True, **kwargs)
    distance_to_prototypes(z, points).sum().backward()
    assert bool(z.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plain_prototypes_need_one_subtraction(dtype):
    points = Expansion(torch.rand(1, 7, 3, generator=generator(), dtype=dtype) * 0.5)
    z = torch.rand(5, 3, generator=generator(), dtype=dtype, requires_grad=True)
    both = [
        Expansion.from_float(z, 2)[:, None].minus_as_float(points, leading=leading)
        for leading in (False, True)
    ]
    slopes = [torch.autograd.grad(each.square().sum(), z)[0] for each in both]
    assert torch.equal(*both) and torch.equal(*slopes)


@pytest.mark.parametrize("terms", [1, 2])
def test_outputs_wider_than_the_prototypes_are_not_rounded(terms):
    points = Expansion(torch.zeros(terms, 1, 2))
    z = torch.tensor([[1 - 1e-9, 0.0]], dtype=torch.float64)
    expected = 2 * math.atanh(1 - 1e-9)
    assert distance_to_prototypes(z, points).item() == pytest.approx(expected)


def test_prototypes_that_do_not_look_give_nan_outside():
    points = Expansion(torch.zeros(1, 1, 2).double())
    z = torch.tensor([[0.5, 0.0], [1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    found = distance_to_prototypes(z, points, validate=False)
    assert torch.equal(found[:1], distance_to_prototypes(z[:1], points))
    assert found.isnan().flatten().tolist() == [False, True, True]


def test_prototypes_refuse_points_outside():
    points = Expansion(torch.zeros(1, 2, 3).double())
    with pytest.raises(ValueError, match="outside the unit sphere"):
        distance_to_prototypes(torch.tensor([[1.0, 0.0, 0.0]]), points)
    with pytest.raises(ValueError, match="outside the unit sphere"):
        distance_to_prototypes(torch.full((1, 3), math.nan), points)
    with pytest.raises(ValueError, match=r"\(B, d\)"):
        distance_to_prototypes(torch.zeros(1, 2), points)
    with pytest.raises(TypeError, match="Expansion"):
        distance_to_prototypes(torch.zeros(1, 3), torch.zeros(2, 3))


# Metrics


@pytest.mark.parametrize(("case", "tau"), [("a", 1.0), ("b", 0.7)])
def test_metrics_repeat_the_authors_code(case, tau):
    g, info = golden("metrics"), facts("metrics")[case]
    tree = RootedTree(g[f"{case}_parent"], g[f"{case}_weight"])
    matrix = torch.from_numpy(g[f"{case}_dist"])[tree.order][:, tree.order]
    report = distortion(tree, matrix, tau)
    # Their tree distances are float32.
    assert report.d_ave == pytest.approx(info["d_ave"], rel=1e-6)
    assert report.d_max == pytest.approx(info["d_rel_max"], rel=1e-6)
    assert report.d_wc == pytest.approx(info["d_wc"], rel=1e-6)
    assert report.map == pytest.approx(info["map"], rel=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_streamed_metrics_agree_with_the_matrix(weighted):
    tree = random_tree(80, 3, weighted).recentered()
    embedded = embed_tree(tree, 4, terms=2, generator=generator())
    streamed, whole = (
        embedded.report(),
        distortion(tree, embedded.distances(), embedded.tau),
    )
    for name in ("d_ave", "d_max", "d_wc", "map", "map_ceiling"):
        assert getattr(streamed, name) == pytest.approx(getattr(whole, name), rel=1e-9)
    assert streamed.pairs == whole.pairs == 80 * 79 // 2


def test_short_edges_far_from_the_root_are_still_nearest():
    # Paths are differences of heights; their rounding must not lose a neighbour.
    for short in (0.001, 0.002, 0.003, 0.005):
        tree = RootedTree([-1, 0, 0, 1, 1, 2], [0, 361.1, 9, short, short, short])
        report = embed_tree(tree, 3, tau=0.05).report()
        ceiling = distortion(tree, tree.distances()).map
        assert report.map_ceiling == pytest.approx(ceiling)


def test_metrics_refuse_a_matrix_of_another_size():
    with pytest.raises(ValueError, match="the tree has 7 nodes"):
        distortion(RootedTree.balanced(2, 2), torch.zeros(3, 3))


# Construction


@pytest.mark.parametrize(
    "name", ["ternary3_d5", "binary5_d2", "ternary3_deep_d5", "rand40w_d8"]
)
def test_coordinates_repeat_the_exact_embedding(name):
    g, info = golden("embeddings"), facts("embeddings")
    info = info[name]
    tree = RootedTree(g[f"{name}_parent"], g[f"{name}_weight"])
    points = {
        int(key.rsplit("points", 1)[1]): torch.from_numpy(g[key])
        for key in g.files
        if key.startswith(f"{name}_points")
    }
    points.setdefault(1, sphere_points(1, info["dim"]))
    embedded = embed_tree(
        tree, info["dim"], tau=info["tau"], terms=4, points=points, twist=False
    )
    exact = from_last_axis(g[f"{name}_x"])
    # Directions are doubles: an angle's 1e-16 is a coordinate's near the origin.
    assert float((embedded.points - exact).to_float().abs().max()) < 1e-15
    expected = torch.from_numpy(g[f"{name}_dist"])
    assert torch.allclose(embedded.distances(), expected, rtol=1e-13, atol=1e-13)
    report = embedded.report()
    assert report.d_ave == pytest.approx(info["d_ave"], rel=1e-10)
    assert report.d_max == pytest.approx(info["d_rel_max"], rel=1e-10)
    assert report.d_wc == pytest.approx(info["d_wc"], rel=1e-10)
    if f"{name}_official_x" in g.files:
        official = torch.from_numpy(g[f"{name}_official_x"])
        single = embed_tree(
            tree, info["dim"], tau=info["tau"], points=points, twist=False
        )
        # The authors' float path has float32 radii.
        assert float((single.points.to_float() - official).abs().max()) < 5e-8


@pytest.mark.parametrize("terms", [1, 2])
def test_batches_repeat_the_loop_over_nodes(terms):
    tree = random_tree(25, 7).recentered()
    table = direction_table(tree.degree.tolist(), 4, generator=generator())
    tau = max_scale(tree, terms, margin=15)
    kwargs = {"tau": tau, "terms": terms, "points": table}
    plain = reference.embed_by_node(tree, **kwargs)
    batched = embed_tree(tree, 4, twist=False, **kwargs)
    exact = [[float(each) for each in row] for row in plain]
    gap = batched.points.to_float() - torch.tensor(exact, dtype=torch.float64)
    assert float(gap.abs().max()) < 1e-14
    pairs = [(0, 5), (3, 20), (11, 24)]
    with mpmath.workprec(53 * terms):
        for i, j in pairs:
            expected = reference.distance_by_mpmath(plain[i], plain[j])
            # the stored points are right to about e^-15 nats
            assert float(batched.distances()[i, j]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [2, 5])
def test_edges_are_exact_up_to_the_precision_law(dim, terms, dtype):
    tree = RootedTree.balanced(3, 4)
    for gap in (12.0, 6.0, 3.0):
        tau = max_scale(tree, terms, dtype, margin=gap)
        embedded = embed_tree(
            tree, dim, tau=tau, terms=terms, dtype=dtype, generator=generator()
        )
        # e^(R - R_max) times a constant of about 1; 2 leaves room for other seeds.
        assert float(embedded.edge_errors().abs().max()) < 2 * math.exp(-gap)


@pytest.mark.parametrize("seed", range(3))
def test_weighted_edges_are_exact_and_no_pair_is_stretched(seed):
    tree = random_tree(60, seed).recentered()
    embedded = embed_tree(
        tree,
        6,
        tau=max_scale(tree, 2, margin=12),
        terms=2,
        generator=generator(seed),
    )
    assert float(embedded.edge_errors().abs().max()) < 1e-5
    ratio = embedded.distances() / (embedded.tau * tree.distances()).fill_diagonal_(1)
    assert float(ratio.max()) < 1 + 1e-5


def test_star_has_the_closed_form_distance():
    count, tau = 6, 3.0
    tree = RootedTree([-1] + [0] * count)
    d = embed_tree(tree, 8, tau=tau).distances()[1, 2]
    sine = math.sqrt(count / (2 * (count - 1)))
    assert float(d) == pytest.approx(2 * math.asinh(math.sinh(tau) * sine), rel=1e-12)


def test_path_graph_is_exact():
    path = RootedTree([-1, *range(20)]).recentered()
    report = embed_tree(path, 2, terms=2, tau=2.0).report()
    assert report.d_ave < 1e-12 and report.d_wc < 1 + 1e-12


def test_largest_error_follows_the_law():
    report = embed_tree(
        RootedTree.balanced(3, 4), 5, tau=12.0, terms=2, twist=False
    ).report()
    law = 2 * (6 * 0.5 * math.log(1.5) + 0.5 * math.log(4 / 3)) / (8 * 12)
    assert report.d_max == pytest.approx(law, rel=2e-5)


@pytest.mark.parametrize("seed", range(4))
def test_distortion_never_exceeds_the_proved_bound(seed):
    tree = random_tree(60, seed, weighted=seed % 2 == 1).recentered()
    table = direction_table(tree.degree.tolist(), 6, generator=generator(seed))
    theta = min(
        math.radians(float(smallest_angle(p))) for m, p in table.items() if m > 1
    )
    for length in (2.0, 3.5, 6.0):
        tau = length / float(tree.weight[1:].min())
        embedded = embed_tree(
            tree, 6, tau=tau, terms=8, points=table, generator=generator(seed)
        )
        bound = ratio_bound(theta, length)
        target = (tau * tree.distances()).fill_diagonal_(1)
        loss = 1 - (embedded.distances() / target).fill_diagonal_(1).min()
        assert 0.2 * bound < float(loss) <= bound


def test_drift_has_a_fixed_point_only_where_corners_are_blunt_enough():
    for length in (0.5, 1.0, 3.0):
        border = 2 * math.asin(1 / math.cosh(length / 2))
        assert math.isnan(drift_angle(border * 0.999, length))
        delta = drift_angle(border * 1.01, length)
        assert 0 < delta < border
    # far from the border: 2 exp(-l) cot(theta / 2)
    expected = 2 * math.exp(-8) / math.tan(1.0)
    assert drift_angle(2.0, 8.0) == pytest.approx(expected, rel=1e-3)


def test_beyond_the_delaunay_scale_a_node_is_nearest_to_its_neighbours():
    for dim in (2, 5):
        tree = RootedTree.balanced(4, 3)
        table = direction_table(tree.degree.tolist(), dim, generator=generator())
        theta = min(math.radians(float(smallest_angle(p))) for p in table.values())
        tau = 1.01 * delaunay_scale(theta)
        points = embed_tree(
            tree, dim, tau=tau, terms=2, points=table, generator=generator()
        )
        distances, hops = points.distances(), tree.distances()
        # Greedy routing: from a towards b, the next node on the path is nearer to b.
        for a, b in itertools.permutations(range(0, len(tree), 7), 2):
            neighbours = torch.nonzero(hops[a] == 1).flatten()
            step = neighbours[hops[neighbours, b].argmin()]
            assert distances[step, b] < distances[a, b]


def test_twist_changes_no_edge_and_no_angle():
    tree = random_tree(40, 5, weighted=False).recentered()
    table = direction_table(tree.degree.tolist(), 4, generator=generator())
    kwargs = {"tau": 2.0, "terms": 4, "points": table}
    plain = embed_tree(tree, 4, twist=False, **kwargs)
    turned = embed_tree(tree, 4, twist=True, generator=generator(), **kwargs)
    hops = tree.distances()
    near = hops <= 2  # edges, and pairs of neighbours of one node
    assert torch.allclose(plain.distances()[near], turned.distances()[near], rtol=1e-12)
    assert not torch.allclose(plain.distances(), turned.distances(), rtol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_twist_uncurls_phylogenies(seed):
    tree = RootedTree.yule(200, generator(seed)).recentered()
    kwargs = {"tau": 3.0, "terms": 1}
    plain = embed_tree(tree, 10, twist=False, **kwargs).report()
    turned = embed_tree(tree, 10, generator=generator(seed), **kwargs).report()
    assert turned.d_wc < plain.d_wc / 2


def test_inside_the_limit_more_components_change_nothing():
    tree = RootedTree.balanced(3, 4)
    one, four = (
        embed_tree(tree, 5, tau=5.0, terms=t, generator=generator()).distances()
        for t in (1, 4)
    )
    assert float((one - four).abs().max()) < 3 * math.exp(20 - max_radius(1))


def test_float32_components_reach_their_limit_without_nan():
    tree = load_tree("mammals")
    errors = []
    for terms in (1, 2, 3, 4):
        report = embed_tree(
            tree, 20, terms=terms, dtype=torch.float32, generator=generator()
        ).report()
        assert report.map == 1.0
        errors.append(report.d_ave)
    assert errors == sorted(errors, reverse=True)


def test_more_components_halve_the_distortion_of_wordnets_mammals():
    config = EXPERIMENTS["precision"].laptop
    out = EXPERIMENTS["precision"].function(config, device=torch.device("cpu"), seed=0)
    d_ave = {t: out[f"d_ave t={t}"] for t in (1, 2, 4)}
    # 34.4/71.2 of R_max - 3 is 2.07; the law's constant moves a little with the angles.
    assert 1.9 < d_ave[1] / d_ave[2] < 2.25
    assert 1.9 < d_ave[2] / d_ave[4] < 2.15
    assert all(out[f"map t={t}"] == 1.0 for t in (1, 2, 4))


def test_same_seed_same_bits():
    tree = load_tree("carnivores")
    first, second = (
        embed_tree(tree, 6, terms=2, generator=generator(3)).points.components
        for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_gives_the_cpus_result(device):
    tree = random_tree(80, 6).recentered()
    here = embed_tree(tree, 5, terms=2, tau=1.5, generator=generator()).report()
    there = embed_tree(
        tree, 5, terms=2, tau=1.5, generator=generator(), device=device
    ).report()
    assert there.d_ave == pytest.approx(here.d_ave, rel=1e-9)


def test_work_is_counted_in_levels_not_in_nodes():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Counter.calls += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for branching in (2, 5):  # 31 and 781 nodes, both of height 4
        Counter.calls = 0
        tree = RootedTree.balanced(branching, 4)
        with Counter():
            embed_tree(tree, 10, tau=5.0, terms=2, generator=generator())
        counts.append(Counter.calls)
    assert counts[1] < 1.2 * counts[0]


def test_awkward_trees():
    single = embed_tree(RootedTree([-1]), 3)
    assert single.report().pairs == 0 and single.distances().shape == (1, 1)
    edge = embed_tree(RootedTree([-1, 0]), 2, tau=3.0)
    assert float(edge.distances()[0, 1]) == pytest.approx(3.0, rel=1e-12)
    hung_at_a_leaf = embed_tree(RootedTree([-1, 0, 1, 1]), 3, tau=2.0, terms=2)
    assert float(hung_at_a_leaf.edge_errors().abs().max()) < 1e-12
    star = embed_tree(RootedTree([-1] + [0] * 2000), 3, tau=8.0, points="random")
    assert star.report().pairs == 2001 * 2000 // 2


def test_a_long_caterpillar_is_streamed():
    spine = 150  # every node of the spine carries one leaf
    parent = [-1] + [i - 1 for i in range(1, spine)] + list(range(spine))
    tree = RootedTree(parent).recentered()
    report = embed_tree(tree, 3, terms=2, tau=0.2, generator=generator()).report()
    assert report.pairs == 2 * spine * (2 * spine - 1) // 2
    assert report.d_max < 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dim": 1}, "dim=1"),
        ({"dim": 2.5}, "dim=2.5"),
        ({"tau": "1"}, "tau='1'"),
        ({"points": dict.fromkeys((1, 3, 4), torch.eye(3))}, r"points\[1\]"),
        (
            {"points": {m: torch.full((m, 3), math.nan) for m in (1, 3, 4)}},
            "unit vectors",
        ),
        ({"tau": 13.0}, r"R = 52.0.*R_max = 37.4.*terms=2 would do"),
        ({"tau": 200.0}, "no terms will do"),
        ({"tau": 5.0, "dtype": torch.float32}, "terms=2 would do"),
        ({"tau": math.nan}, "tau=nan"),
        ({"tau": -1.0}, "positive, finite"),
        ({"points": "best"}, "allowed are"),
        ({"points": {3: torch.eye(3)}}, r"points\[1\]"),
        ({"terms": 9}, "terms=9"),
        ({"dtype": torch.float16}, "float16"),
    ],
)
def test_construction_refuses(options, text):
    with pytest.raises(ValueError, match=text):
        embed_tree(RootedTree.balanced(3, 4), **{"dim": 3, **options})


def test_graphs_and_margins_without_room_are_refused():
    with pytest.raises(TypeError, match="RootedTree"):
        embed_tree([-1, 0], 2)
    with pytest.raises(ValueError, match="R_max = 37.4"):
        max_scale(RootedTree.balanced(2, 2), 1, margin=40.0)


def test_no_operation_leaves_the_device():
    embedded = embed_tree(RootedTree.balanced(3, 3), 4, terms=3, device="meta")
    assert embedded.distances().device.type == "meta"


def test_hadamard_directions_refuse_large_degrees():
    with pytest.raises(ValueError, match="rows that fit"):
        embed_tree(RootedTree([-1] + [0] * 9), 8, points="hadamard")


@pytest.mark.benchmark_data("trees")
def test_twist_halves_the_worst_case_on_european_mammals():
    tree = RootedTree.from_tsv(data.fetch("trees", "euro_mammals.tsv")).recentered()
    plain = embed_tree(tree, 10, twist=False).report()
    assert plain.map_ceiling < 0.9
    for seed in range(3):
        turned = embed_tree(tree, 10, generator=generator(seed)).report()
        assert turned.d_wc < plain.d_wc / 2
