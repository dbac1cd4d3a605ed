"""The chapter's experiments, E1 to E6 of the book's page."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from icml25.core import Experiment, make_generator, progress
from icml25.hypertree import blocksworld as bw
from icml25.hypertree import schedule
from icml25.hypertree.backends import Exact, NoisyExpert
from icml25.hypertree.endpoint import OpenAICompatible
from icml25.hypertree.harness import run_harness, scores
from icml25.hypertree.minitasks import mini_tasks
from icml25.hypertree.modelruns import (
    PremiseConfig,
    ProbeConfig,
    SmallPlansConfig,
    SpeedConfig,
    premise,
    probe,
    small_plans,
    speed,
)
from icml25.hypertree.planner import HTPlanner
from icml25.hypertree.solve import PLANNERS, plan_travel
from icml25.hypertree.travel import Sandbox, Task, load_tasks
from icml25.hypertree.travelrules import travel_outline
from icml25.hypertree.tree import Child
from icml25.hypertree.verify import evaluate

SOURCES = ("mini", "travelplanner")


def _tasks(source: str, num: int, seed: int) -> tuple[list[Task], Sandbox]:
    if source not in SOURCES:
        raise ValueError(f"source={source!r}: one of {', '.join(SOURCES)}")
    if source == "travelplanner":
        tasks, sandbox = load_tasks()
        return tasks[:num], sandbox
    return mini_tasks(num, generator=make_generator(seed))


@dataclass(frozen=True)
class OutlinesConfig:
    source: str = "mini"  # invented tasks, or TravelPlanner's 45 training tasks
    num_tasks: int = 18
    modes: str = "all"  # transport modes: all looked at, or alternative branches


def outlines(
    config: OutlinesConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """E1: outlines and their counts, by number of cities."""
    tasks, _ = _tasks(config.source, config.num_tasks, seed)
    table: dict[str, list[int]] = {}
    same = True
    for task in tasks:
        outline = travel_outline(task, modes=config.modes)
        row = [
            len(outline.steps),
            len(outline.chain.nodes),
            len(outline.chain.leaves),
            outline.tree.n_chains(),
        ]
        same &= table.setdefault(str(len(task.cities)), row) == row
        same &= outline.complete
    return {
        "num_tasks": len(tasks),
        "expansions_nodes_leaves_chains": table,
        "same_for_every_task": same,
    }


@dataclass(frozen=True)
class LlmPlansConfig:
    min_instances: int = 25  # lengths with fewer instances are left out of the curve
    num_bootstrap: int = 200


def llm_plans(
    config: LlmPlansConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """E2: 5,000 published plans of language models, re-executed, against length."""
    instances, plans = bw.load_instances(), bw.load_llm_plans()
    generator = make_generator(seed)
    agree = total = 0
    settings = {}
    for setting, rows in progress(plans.items(), "settings"):
        lengths = [len(instances[key].reference) for key in rows]
        right = [bw.solves(instances[key], plan) for key, (plan, _) in rows.items()]
        flags = [flag for _, flag in rows.values()]
        agree += sum(a == b for a, b in zip(right, flags, strict=True))
        total += len(rows)
        curve = {}
        for length in sorted(set(lengths)):
            here = [ok for ok, at in zip(right, lengths, strict=True) if at == length]
            if len(here) >= config.min_instances:
                share = mean(here)
                error = (share * (1 - share) / len(here)) ** 0.5
                curve[str(length)] = [share, error, len(here)]
        fit = bw.fit_decay(
            lengths, right, generator=generator, num_bootstrap=config.num_bootstrap
        )
        settings[setting] = {"success": mean(right), "curve": curve, "fit": fit}
    decays = sum(row["fit"]["high"] < 1 for row in settings.values())
    valid = sum(bw.solves(i, i.reference) for i in instances.values())
    return {
        "flags_agree": agree,
        "plans": total,
        "references_valid": valid,
        "instances": len(instances),
        "settings_that_decay": decays,
        "settings": settings,
    }


@dataclass(frozen=True)
class ExactConfig:
    source: str = "mini"
    num_tasks: int = 18  # travel tasks
    num_blocks_instances: int = 50  # per number of blocks; "mini" only
    blocks: tuple[int, ...] = (3, 5, 8)
    num_trips: int = 20  # per number of cities
    cities: tuple[int, ...] = (3, 5, 7)
    width: int = 5  # hyperchains kept for trips
    num_meetings: int = 20
    people: int = 4


def exact(config: ExactConfig, *, device: torch.device, seed: int) -> dict[str, Any]:
    """E3: what the rules and exact leaves solve, in four domains."""
    tasks, sandbox = _tasks(config.source, config.num_tasks, seed)
    solutions = [plan_travel(task, Exact()) for task in tasks]
    result: dict[str, Any] = {"travel_tasks": len(tasks)}
    for strict in (False, True):
        reports = [
            evaluate(task, solution.plan, sandbox, strict=strict)
            for task, solution in zip(tasks, solutions, strict=True)
        ]
        name = "travel_strict" if strict else "travel_official"
        result[name] = sum(report.passed for report in reports)
    result["decisions_per_task"] = mean(s.decisions for s in solutions)
    generator = make_generator(seed + 1)
    if config.source == "mini":
        instances = [
            instance
            for blocks in config.blocks
            for instance in bw.random_instances(
                config.num_blocks_instances, blocks, generator=generator
            )
        ]
    else:
        instances = list(bw.load_instances().values())
    planner = HTPlanner(bw.blocksworld_rules(), Exact())
    plans = []
    for instance in instances:
        root = Child("plan", "[Plan]", {"instance": instance})
        plans.append(bw.plan_blocks(instance, planner.outline("", root).leaves))
    result["blocks"] = len(instances)
    result["blocks_solved"] = sum(map(bw.solves, instances, plans))
    result["blocks_steps"] = sum(map(len, plans))
    if config.source != "mini":
        result["blocks_reference_steps"] = sum(len(i.reference) for i in instances)
    trips: dict[str, float] = {}
    for cities in config.cities:
        pairs = schedule.random_trips(config.num_trips, cities, generator=generator)
        routes = [
            schedule.plan_trip(trip, Exact(), width=config.width)[0]
            for trip, _ in pairs
        ]
        checks = [
            schedule.check_trip(t, r) for (t, _), r in zip(pairs, routes, strict=True)
        ]
        trips[str(cities)] = mean(why is None for why in checks)
    result["trips_solved_share"] = trips
    meetings = schedule.random_meetings(
        config.num_meetings, config.people, generator=generator
    )
    starts = [schedule.plan_meeting(meeting, Exact()) for meeting in meetings]
    result["meetings"] = len(meetings)
    result["meetings_solved"] = sum(
        start is not None and schedule.check_meeting(meeting, start) is None
        for meeting, start in zip(meetings, starts, strict=True)
    )
    return result


@dataclass(frozen=True)
class NoiseConfig:
    source: str = "mini"
    num_tasks: int = 18
    # (error with nothing in view, error added per fact); slope 0 is the control
    settings: tuple[tuple[float, float], ...] = (
        (0.01, 0.0005),
        (0.02, 0.001),
        (0.05, 0.001),
        (0.05, 0.0),
    )
    num_seeds: int = 5


def noise(config: NoiseConfig, *, device: torch.device, seed: int) -> dict[str, Any]:
    """E4, a simulation: success of the three planners with a noisy expert."""
    tasks, sandbox = _tasks(config.source, config.num_tasks, seed)
    trees = [travel_outline(task) for task in tasks]
    rows = []
    for eps0, slope in progress(config.settings, "noise"):
        row: dict[str, Any] = {"eps0": eps0, "slope": slope}
        for planner in PLANNERS:
            passed = torch.zeros(config.num_seeds, len(tasks), dtype=torch.bool)
            for i in range(config.num_seeds):
                expert = NoisyExpert(
                    eps0=eps0, slope=slope, generator=make_generator(seed + i)
                )
                for j, (task, tree) in enumerate(zip(tasks, trees, strict=True)):
                    solution = plan_travel(task, expert, planner=planner, outline=tree)
                    passed[i, j] = evaluate(task, solution.plan, sandbox).passed
            per_seed = passed.double().mean(1)
            row[planner] = float(per_seed.mean())
            # Tasks are fixed; the spread over seeds is the simulation's own noise.
            row[f"{planner}_se"] = float(per_seed.std() / config.num_seeds**0.5)
            row[f"{planner}_by_days"] = {
                str(days): float(
                    passed[:, [t.days == days for t in tasks]].double().mean()
                )
                for days in sorted({task.days for task in tasks})
            }
        rows.append(row)
    return {"num_tasks": len(tasks), "num_seeds": config.num_seeds, "rows": rows}


@dataclass(frozen=True)
class HarnessConfig:
    source: str = "mini"
    num_tasks: int = 6
    methods: tuple[str, ...] = ("cot", "htp")


def harness(
    config: HarnessConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """E6: chain of thought and HTP with the endpoint the environment names."""
    tasks, sandbox = _tasks(config.source, config.num_tasks, seed)
    rows = [
        run_harness(tasks, sandbox, OpenAICompatible(), method=method)
        for method in config.methods
    ]
    annotated = [
        evaluate(task, task.annotated_plan, sandbox)
        for task in tasks
        if task.annotated_plan
    ]
    result: dict[str, Any] = {"num_tasks": len(tasks), "rows": rows}
    if annotated:
        result["annotated"] = scores(annotated)
    return result


EXPERIMENTS = {
    "noise": Experiment(
        noise,
        laptop=NoiseConfig(),
        paper=NoiseConfig(source="travelplanner", num_tasks=45, num_seeds=10),
        summary="simulation: chain, tree, hypertree under noise (paper: real tasks)",
    ),
    "outlines": Experiment(
        outlines,
        laptop=OutlinesConfig(),
        paper=OutlinesConfig(source="travelplanner", num_tasks=45),
        summary="outlines and their counts (paper: the 45 real tasks)",
    ),
    "exact": Experiment(
        exact,
        laptop=ExactConfig(),
        paper=ExactConfig(source="travelplanner", num_tasks=45),
        summary="four domains with exact leaves (paper: real travel and PlanBench)",
    ),
    "llm-plans": Experiment(
        llm_plans,
        laptop=LlmPlansConfig(),
        summary="5,000 published plans of language models against length",
    ),
    "premise": Experiment(
        premise,
        laptop=PremiseConfig(),
        paper=PremiseConfig(num_questions=120),
        summary="a real small model's checks with 1, 3, 9 facts in view",
    ),
    "probe": Experiment(
        probe,
        laptop=ProbeConfig(),
        summary="a linear head on the small model's hidden states",
    ),
    "small-plans": Experiment(
        small_plans,
        laptop=SmallPlansConfig(),
        summary="the small model as a planner, end to end",
    ),
    "speed": Experiment(
        speed,
        laptop=SpeedConfig(),
        summary="leaves a second, prompt tokens a trip, plans checked a second",
    ),
    "harness": Experiment(
        harness,
        laptop=HarnessConfig(),
        paper=HarnessConfig(source="travelplanner", num_tasks=45),
        summary="chain of thought and HTP over a configured endpoint",
    ),
}
