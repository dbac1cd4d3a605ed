"""Self-guided planning of a trip: leaf operators, and the three planners."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from icml25.hypertree.backends import Backend, Check, Question
from icml25.hypertree.planner import Outline
from icml25.hypertree.travel import (
    SEATS,
    Task,
    cost_of,
    fact_lines,
    flight_line,
    hotel_line,
    meal_line,
    room_fits,
)
from icml25.hypertree.travelrules import travel_outline

PLANNERS = ("chain", "tree", "hypertree")
STEP_FACTS = 5  # facts that one finished step adds to a chain's context


@dataclass(frozen=True)
class Solution:
    """A plan, the decisions it took, and the sub-tasks that had no candidate left."""

    plan: list[dict[str, Any]]
    decisions: int
    infeasible: tuple[str, ...]


@dataclass
class _Desk:
    """Poses decisions with the facts the planner keeps in view, and counts them."""

    backend: Backend
    planner: str
    everything: tuple[str, ...]
    done: int = 0

    def view(self, lines: tuple[str, ...], checks: int) -> tuple[tuple[str, ...], int]:
        """Text in view and its number of facts for a sub-task with ``checks`` checks.

        hypertree: the sub-task's own lines. tree: these lines for each of its checks,
        which one thought settles together. chain: all lines, and what was done so far.
        """
        if self.planner == "chain":
            return self.everything, len(self.everything) + STEP_FACTS * self.done
        if self.planner == "tree":
            return lines, len(lines) * checks
        return lines, len(lines)

    def check(self, requirement, candidates, keep, lines, checks) -> Check:
        view, facts = self.view(lines, checks)
        self.done += 1
        return Check(requirement, tuple(candidates), tuple(keep), view, facts)

    def question(self, ask, options, costs, lines, checks) -> Question:
        view, facts = self.view(lines, checks)
        self.done += 1
        best = min(range(len(costs)), key=costs.__getitem__)
        prompt = "\n".join(view) + f"\nQuestion: {ask}\nAnswer:"
        return Question(prompt, tuple(f" {o}" for o in options), best, facts)


def _rows(info: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = info.get(key, ())
    return [] if isinstance(value, str) else list(value)


def travel_days(task: Task) -> list[tuple[int | None, int]]:
    """For each day: the leg travelled (or ``None``) and the city slept in.

    Days are shared evenly; the last one goes home (its city is the last visited).

    Raises:
        ValueError: fewer than two days for a city, home leg included.
    """
    n = len(task.cities)
    if task.days < 2 * n + 1:
        raise ValueError(f"{task.days} days for {n} cities: at least {2 * n + 1}")
    nights = [(task.days - 1) // n + (i < (task.days - 1) % n) for i in range(n)]
    days: list[tuple[int | None, int]] = []
    for city, stay in enumerate(nights):
        days += [(city, city)] + [(None, city)] * (stay - 1)
    return [*days, (n, n - 1)]


def plan_travel(
    task: Task,
    backend: Backend,
    *,
    planner: str = "hypertree",
    outline: Outline | None = None,
) -> Solution:
    """Self-guided planning: solve the outline's leaves and write the plan.

    The three planners pose the same decisions; they differ in what is in view.

    Args:
        task: the query.
        backend: answers the decisions; never sees the truth unless it is simulated.
        planner: ``"chain"``, ``"tree"`` or ``"hypertree"``.
        outline: default ``travel_outline(task)``; its leaves say what is solved.

    Returns:
        A ``Solution``; a sub-task without candidates is named in ``infeasible`` and
        left ``"-"`` in the plan.

    Raises:
        ValueError: an unknown planner; a trip too short for its cities.

    Notes:
        Independent leaves go to the backend as one batch: all checks first, then one
        batch of choices a round. :math:`O(\\text{facts})` a task.
    """
    if planner not in PLANNERS:
        raise ValueError(f"planner={planner!r}: one of {', '.join(PLANNERS)}")
    days = travel_days(task)
    outline = outline or travel_outline(task)
    leaves = [leaf.data for leaf in outline.leaves]
    desk = _Desk(backend, planner, fact_lines(task.info))
    infeasible: list[str] = []
    legs = _solve_transport(task, desk, leaves, days, infeasible)
    hotels = _solve_hotels(task, desk, leaves, days, infeasible)
    meals = _solve_meals(task, desk, leaves, days, infeasible)
    sights = _solve_sights(task, desk, leaves, days, infeasible)
    plan = []
    for number, (leg, city) in enumerate(days):
        home = leg == len(task.cities)
        name = task.cities[city]
        moves = leg is not None
        a, b = task.legs[leg] if moves else ("", "")
        plan.append(
            {
                "days": number + 1,
                "current_city": f"from {a} to {b}" if moves else name,
                "transportation": legs[leg] if moves else "-",
                "breakfast": "-" if moves else meals[city].pop(0),
                "attraction": "-" if moves else f"{sights[city].pop(0)};",
                "lunch": "-" if moves else meals[city].pop(0),
                "dinner": "-" if home else meals[city].pop(0),
                "accommodation": "-" if home else hotels[city],
            }
        )
    return Solution(plan, desk.done, tuple(infeasible))


def _solve_transport(task, desk, leaves, days, infeasible):
    """Filter each mode of each leg; then drive throughout, or fly and take taxis."""
    info = task.info
    first_day = {leg: i for i, (leg, _) in enumerate(days) if leg is not None}
    asked = {
        (d["leg"], d["mode"]): None
        for d in leaves
        if d.get("for") == "Mode" and d["check"] == "availability"
    }
    forbidden = (task.constraint.get("transportation") or "").removeprefix("no ")
    offers, checks, owners = {}, [], []
    for leg, mode in asked:
        a, b = task.legs[leg]
        if mode == "Flight":
            rows = _rows(
                info, f"Flight from {a} to {b} on {task.dates[first_day[leg]]}"
            )
            lines = tuple(flight_line(row) for row in rows)
            exists = bool(rows)
        else:
            text = info.get(f"{mode} from {a} to {b}", "")
            rows, lines, exists = [], (text,), cost_of(text) is not None
        offers[leg, mode] = (rows, lines, exists)
        label = f"{mode} from {a} to {b}"
        lines = lines or (f"{label}: none",)
        checks.append(desk.check(f"Is there a {label}?", [label], [exists], lines, 3))
        owners.append((leg, mode))
        if forbidden:
            allowed = mode.lower() != forbidden
            ask = f"Is this allowed, if the traveller wants no {forbidden}?"
            checks.append(desk.check(ask, [label], [allowed], lines, 3))
            owners.append((leg, mode))
    answers = desk.backend.keep(checks)
    open_ = dict.fromkeys(asked, True)
    for owner, (keep,) in zip(owners, answers, strict=True):
        open_[owner] = open_[owner] and keep
    flights = [o for o in asked if o[1] == "Flight" and open_[o] and offers[o][0]]
    questions = [
        desk.question(
            "Which flight is the cheapest?",
            [row["Flight Number"] for row in offers[o][0]],
            [row["Price"] for row in offers[o][0]],
            offers[o][1],
            3,
        )
        for o in flights
    ]
    chosen = dict(zip(flights, desk.backend.pick(questions), strict=True))

    def entry(leg, mode):
        """Text and price for the party; a mode believed in but not there is free."""
        a, b = task.legs[leg]
        rows, lines, exists = offers[leg, mode]
        party = math.ceil(task.people / SEATS[mode])
        if mode != "Flight":
            text = lines[0] if exists else f"{mode}, from {a} to {b}"
            return text[:1].upper() + text[1:], (cost_of(lines[0]) or 0) * party
        if not rows:
            return f"Flight Number: unknown, from {a} to {b}", 0.0
        row = rows[chosen[leg, mode]]
        text = (
            f"Flight Number: {row['Flight Number']}, from {a} to {b}, Departure "
            f"Time: {row['DepTime']}, Arrival Time: {row['ArrTime']}"
        )
        return text, row["Price"] * party

    ways = []
    for modes in (("Self-driving",), ("Flight", "Taxi")):
        texts, total = [], 0.0
        for leg in range(len(task.legs)):
            here = [entry(leg, mode) for mode in modes if open_.get((leg, mode))]
            if not here:
                break
            text, price = min(here, key=lambda pair: pair[1])
            texts.append(text)
            total += price
        else:
            ways.append((" or ".join(modes).lower(), texts, total))
    if not ways:
        infeasible.append("Transportation: no way that covers every leg")
        return ["-"] * len(task.legs)
    lines = tuple(f"{name}: ${total:.0f}" for name, _, total in ways)
    names, costs = [w[0] for w in ways], [w[2] for w in ways]
    ask = "Which way of travelling is the cheapest?"
    question = desk.question(ask, names, costs, lines, 1)
    return ways[desk.backend.pick([question])[0]][1]


def _solve_hotels(task, desk, leaves, days, infeasible):
    rule, kind = task.constraint.get("house rule"), task.constraint.get("room type")
    cities = [d["city"] for d in leaves if d.get("for") == "Hotel"]
    tables, checks, owners = {}, [], []
    for city in dict.fromkeys(cities):
        rows = _rows(task.info, f"Accommodations in {task.cities[city]}")
        lines = tuple(hotel_line(row) for row in rows)
        tables[city] = (rows, lines)
        nights = sum(c == city for leg, c in days[:-1])
        names = [row["NAME"] for row in rows]
        wishes = [
            (
                f"Can one stay {nights} nights?",
                [row["minimum nights"] <= nights for row in rows],
            )
        ]
        if rule:
            allowed = [f"No {rule}" not in str(row["house_rules"]) for row in rows]
            wishes.append((f"Does the hotel allow {rule}?", allowed))
        if kind:
            wishes.append((f"Is it: {kind}?", [room_fits(row, kind) for row in rows]))
        for ask, keep in wishes:
            checks.append(desk.check(ask, names, keep, lines, 4))
            owners.append(city)
    keep = {city: [True] * len(rows) for city, (rows, _) in tables.items()}
    for city, answer in zip(owners, desk.backend.keep(checks), strict=True):
        keep[city] = [a and b for a, b in zip(keep[city], answer, strict=True)]
    left = {}
    for city, (rows, _) in tables.items():
        left[city] = [r for r, ok in zip(rows, keep[city], strict=True) if ok]
        if not left[city]:
            infeasible.append(f"Accommodation in {task.cities[city]}: none is left")
    asked = [city for city in left if left[city]]
    questions = [
        desk.question(
            f"Which is the cheapest for {task.people} people?",
            [row["NAME"] for row in left[city]],
            [
                row["price"] * math.ceil(task.people / row["maximum occupancy"])
                for row in left[city]
            ],
            tables[city][1],
            4,
        )
        for city in asked
    ]
    result = ["-"] * len(task.cities)
    for city, i in zip(asked, desk.backend.pick(questions), strict=True):
        result[city] = f"{left[city][i]['NAME']}, {task.cities[city]}"
    return result


def _solve_meals(task, desk, leaves, days, infeasible):
    """Cheapest restaurant of each wanted cuisine, dealt out over cities; then cheap."""
    wanted = list(task.constraint.get("cuisine") or ())
    asked = list(dict.fromkeys(d["city"] for d in leaves if d.get("for") == "Meals"))
    n = len(task.cities)
    need = [
        sum((1 if leg is not None else 3) for leg, c in days[:-1] if c == city)
        for city in range(n)
    ]
    tables = {
        city: _rows(task.info, f"Restaurants in {task.cities[city]}") for city in asked
    }
    lines = {c: tuple(meal_line(row) for row in rows) for c, rows in tables.items()}
    wishes = {city: wanted[city::n] for city in asked}
    todo = [(city, cuisine) for city in asked for cuisine in wishes[city]]
    checks = [
        desk.check(
            f"Does it serve {cuisine} food?",
            [row["Name"] for row in tables[city]],
            [cuisine in row["Cuisines"] for row in tables[city]],
            lines[city],
            2,
        )
        for city, cuisine in todo
    ]
    serving = dict(zip(todo, desk.backend.keep(checks), strict=True))
    free = {city: list(range(len(tables[city]))) for city in asked}
    chosen: dict[int, list[str]] = {city: [] for city in asked}
    for turn in range(max(need)):
        open_, options = [], []
        for city in asked:
            if turn >= need[city]:
                continue
            left = free[city]
            if turn < len(wishes[city]):
                cuisine = wishes[city][turn]
                left = [i for i in left if serving[city, cuisine][i]]
                if not left:
                    infeasible.append(
                        f"Dining in {task.cities[city]}: no {cuisine} restaurant left"
                    )
                    left = free[city]
            if left:
                open_.append(city)
                options.append(left)
            else:
                infeasible.append(f"Dining in {task.cities[city]}: too few restaurants")
                chosen[city].append("-")
        questions = [
            desk.question(
                "Which restaurant is the cheapest?",
                [tables[city][i]["Name"] for i in left],
                [tables[city][i]["Average Cost"] for i in left],
                lines[city],
                2,
            )
            for city, left in zip(open_, options, strict=True)
        ]
        picks = desk.backend.pick(questions)
        for city, left, i in zip(open_, options, picks, strict=True):
            row = tables[city][left[i]]
            free[city].remove(left[i])
            chosen[city].append(f"{row['Name']}, {task.cities[city]}")
    return {c: chosen.get(c, []) or ["-"] * need[c] for c in range(n)}


def _solve_sights(task, desk, leaves, days, infeasible):
    asked = list(
        dict.fromkeys(d["city"] for d in leaves if "city" in d and "for" not in d)
    )
    need = [
        sum(leg is None and c == city for leg, c in days)
        for city in range(len(task.cities))
    ]
    result = {c: ["-"] * need[c] for c in range(len(task.cities))}
    for city in asked:
        name = task.cities[city]
        rows = _rows(task.info, f"Attractions in {name}")
        lines = tuple(row["Name"] for row in rows)
        left = list(lines)
        for i in range(need[city]):
            if not left:
                infeasible.append(f"Attraction in {name}: too few")
                break
            ask = "Which attraction comes first in the list?"
            question = desk.question(ask, left, range(len(left)), lines, 1)
            place = left.pop(desk.backend.pick([question])[0])
            result[city][i] = f"{place}, {name}"
    return result
