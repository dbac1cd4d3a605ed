"""The paper's run against a model that writes: outline, leaves, plan, verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from icml25.hypertree.backends import Backend, BackendError, ReplyError
from icml25.hypertree.travel import Sandbox, Task, fact_lines
from icml25.hypertree.travelrules import travel_outline
from icml25.hypertree.verify import Report, evaluate

_FORMAT = (
    "Write the plan as a JSON list with one object a day and the keys days, "
    "current_city, transportation, breakfast, attraction, lunch, dinner, "
    'accommodation. Use "-" where there is nothing. A day of travel has current_city '
    '"from A to B" and a transportation such as "Flight Number: F0123456, from A to '
    'B, Departure Time: 10:00, Arrival Time: 12:00" or "Self-driving, from A to B". '
    'Places are written "Name, City"; attractions end in ";". Reply with the JSON '
    "only."
)


def read_plan(reply: str) -> list[dict[str, Any]]:
    """The JSON list of days inside a written reply; nothing in it is executed.

    Raises:
        ReplyError: no JSON list of objects.
    """
    start, end = reply.find("["), reply.rfind("]")
    try:
        plan = json.loads(reply[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):  # no JSON, or numbers or nesting too long
        plan = None
    if not isinstance(plan, list) or not all(isinstance(day, dict) for day in plan):
        raise ReplyError(f"no JSON list of days in the reply {reply[:80]!r}")
    return [{str(k): _text(v) for k, v in day.items()} for day in plan]


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return "".join(f"{item};" for item in value) or "-"
    return value if isinstance(value, str | int | float) else "-"


def write_plan(task: Task, backend: Backend, *, method: str) -> list[dict[str, Any]]:
    """One plan written by a model.

    Args:
        task: the query.
        backend: one that writes.
        method: ``"cot"``: reason step by step with everything in view, then write;
            ``"htp"``: solve each leaf group of the outline with its own facts, then
            write.

    Raises:
        ValueError: another method.
        BackendError: the backend does not write or fails.
        ReplyError: two replies in a row that hold no plan.
    """
    if method not in ("cot", "htp"):
        raise ValueError(f"method={method!r}: 'cot' or 'htp'")
    if not backend.writes:
        raise BackendError(f"{type(backend).__name__} does not write text")
    if method == "cot":
        reasoning = backend.generate(
            "\n".join(fact_lines(task.info))
            + f"\n\nTask: {task.query}\nReason step by step about transport, hotels, "
            "attractions and meals."
        )
    else:
        reasoning = _by_outline(task, backend)
    ask = f"Task: {task.query}\nReasoning:\n{reasoning}\n\n{_FORMAT}"
    reply = backend.generate(ask)
    try:
        return read_plan(reply)
    except ReplyError:
        return read_plan(backend.generate(f"{_FORMAT}\nYour reply was:\n{reply}"))


def _by_outline(task: Task, backend: Backend) -> str:
    """Self-guided planning: each sub-task of the outline sees only its own facts."""
    outline = travel_outline(task, backend=backend)
    tree = outline.tree
    notes = [str(outline)]
    for node in (tree.nodes[i] for i in outline.chain.nodes):
        if node.head not in ("Leg", "Hotel", "Meals", "Sight"):
            continue
        if node.head == "Leg":
            a, b = task.legs[node.data["leg"]]
            facts = _only(task, f"from {a} to {b}")
        else:
            kind = {"Hotel": "Accommodations", "Meals": "Restaurants"}
            city = task.cities[node.data["city"]]
            facts = _only(task, f"{kind.get(node.head, 'Attractions')} in {city}")
        leaves = [tree.nodes[u].label for u in outline.chain.leaves]
        checks = [
            label
            for u, label in zip(outline.chain.leaves, leaves, strict=True)
            if node.index in {n.index for n in tree.path(u)}
        ]
        notes.append(
            f"{node.label}: "
            + backend.generate(
                "\n".join(facts)
                + f"\n\nTask: {task.query}\nSolve only {node.label}; look at "
                f"{', '.join(checks)}. End with what you choose."
            )
        )
    return "\n".join(notes)


def _only(task: Task, key: str) -> tuple[str, ...]:
    """Facts whose heading contains ``key``."""
    return fact_lines({k: v for k, v in task.info.items() if key in k})


def scores(reports: Sequence[Report]) -> dict[str, float]:
    """The benchmark's metrics over a set of plans, as fractions.

    Micro: passed checks over applicable checks; macro: plans that pass all of a kind.
    A hard check of a plan that is incomplete or outside the sandbox is not passed.
    """
    if not reports:
        raise ValueError("reports is empty")
    n = len(reports)
    hard = [
        (bool(value) and r.counted)
        for r in reports
        for value in r.hard.values()
        if value is not None
    ]
    macro_hard = [
        r.counted and all(v is not False for v in r.hard.values()) for r in reports
    ]
    return {
        "commonsense_micro": sum(sum(r.commonsense.values()) for r in reports) / 8 / n,
        "commonsense_macro": sum(all(r.commonsense.values()) for r in reports) / n,
        "hard_micro": sum(hard) / len(hard),
        "hard_macro": sum(macro_hard) / n,
        "success": sum(r.passed for r in reports) / n,
    }


def run_harness(
    tasks: Sequence[Task], sandbox: Sandbox, backend: Backend, *, method: str
) -> dict[str, Any]:
    """The benchmark's metrics of one method over tasks, with the usage.

    A task whose plan could not be read is not delivered: it counts as failed in every
    metric. An endpoint that fails stops the run.
    """
    reports: list[Report] = []
    delivered = 0
    for task in tasks:
        try:
            plan = write_plan(task, backend, method=method)
            delivered += 1
        except ReplyError:
            plan = []  # Passes no check: an empty day would pass several.
        reports.append(evaluate(task, plan, sandbox))
    used = backend.usage
    return {
        "method": method,
        "delivered": delivered / len(tasks),
        **scores(reports),
        "calls": used.calls,
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "retries": used.retries,
    }
