"""The thirteen checks a TravelPlanner plan must pass, and the benchmark's metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from icml25.hypertree.travel import (
    FIELDS,
    MEALS,
    SEATS,
    Sandbox,
    Task,
    bare_city,
    place_of,
    room_fits,
    route_of,
)

_EMPTY = (None, "", "-")
_LATER = "You don't need to fill in the information for this or later days."


@dataclass(frozen=True)
class Report:
    """What the checks say of one plan.

    Attributes:
        commonsense: eight checks, true where the plan passes.
        hard: five checks; ``None`` where the query has no such constraint.
        counted: whether the hard checks count (complete, and inside the sandbox).
        cost: dollars for the whole party.
        reasons: for each failed check, one sentence.
    """

    commonsense: dict[str, bool]
    hard: dict[str, bool | None]
    counted: bool
    cost: float
    reasons: dict[str, str]

    @property
    def passed(self) -> bool:
        """Every commonsense check and every hard one: the benchmark's success."""
        hard = all(value is not False for value in self.hard.values())
        return self.counted and hard and all(self.commonsense.values())


def _mode(text: str) -> str | None:
    lower = text.lower()
    for mode in ("taxi", "self-driving", "flight"):
        if mode in lower:
            return mode.capitalize()
    return None


@dataclass
class _Day:
    """One day of a plan, read once."""

    raw: Mapping[str, Any]
    strict: bool

    def __post_init__(self) -> None:
        self.city = str(self.raw.get("current_city") or "")
        a, b = route_of(self.city) if "from" in self.city else (None, None)
        self.travels = a is not None
        self.cities = (
            [bare_city(a), bare_city(b)] if self.travels else [bare_city(self.city)]
        )

    def __getitem__(self, key: str) -> str:
        value = self.raw.get(key)
        return "-" if value in _EMPTY else str(value)

    def filled(self, key: str) -> bool:
        return self[key] != "-"

    @property
    def attractions(self) -> list[str]:
        if not self.filled("attraction"):
            return []
        pieces = self["attraction"].split(";")
        if self.strict:
            return [piece.strip() for piece in pieces if piece.strip()]
        return pieces[:-1]  # The benchmark drops what follows the last ";".

    @property
    def meals(self) -> list[str]:
        return [self[meal] for meal in MEALS if self.filled(meal)]

    def leg(self) -> tuple[str | None, str | None]:
        """Cities of the transport entry, else those of the day."""
        a, b = route_of(self["transportation"])
        if a is None:
            a, b = route_of(self.city)
        return (bare_city(a), bare_city(b)) if a else (None, None)

    def flight_number(self) -> str:
        match = re.search(r"flight number:\s*([^,]+)", self["transportation"], re.I)
        return match.group(1).strip() if match else ""


def evaluate(
    task: Task,
    plan: Sequence[Mapping[str, Any]],
    sandbox: Sandbox,
    *,
    strict: bool = False,
) -> Report:
    r"""The eight commonsense and five hard checks of TravelPlanner.

    Args:
        task: the query.
        plan: one mapping a day with ``current_city``, ``transportation``, the three
            meals, ``attraction`` and ``accommodation``; ``"-"`` where there is none.
        sandbox: the world.
        strict: false reproduces the official evaluator, quirks included; true mends

            1. the city of a day without travel is compared whole (officially: any of
               its letters, so that the check cannot fail);
            2. names must match exactly (officially: by substring, first row wins);
            3. a flight must fly on the day it is taken;
            4. minimum nights hold for a name that several rows contain, too;
            5. transport modes are read without regard to case in every check;
            6. "at least half filled" counts the six fields only (officially ``days``
               and ``current_city`` as well);
            7. days beyond the trip's end fail the plan (officially: not read);
            8. the piece after the last ``;`` of the attractions counts.

    Returns:
        A ``Report``. A plan with missing days or fields fails the check
        ``complete``; it does not raise.

    Raises:
        TypeError: ``plan`` is not a list of mappings.

    Source: TravelPlanner (Xie et al., ICML 2024), Table 1.
    """
    if isinstance(plan, Mapping | str) or not all(isinstance(d, Mapping) for d in plan):
        raise TypeError("plan: a list with one mapping a day")
    days = [_Day(raw, strict) for raw in plan[: task.days]]
    reasons: dict[str, str] = {}
    checks = {
        "sandbox": _in_sandbox,
        "complete": _complete,
        "current_city": _in_current_city,
        "route": _reasonable_route,
        "restaurants": _diverse_restaurants,
        "attractions": _diverse_attractions,
        "transport": _consistent_transport,
        "minimum_nights": _minimum_nights,
    }
    commonsense = {}
    for name, check in checks.items():
        why = check(task, days, sandbox, strict) if days else "the plan has no days"
        if name == "complete" and strict and len(plan) > task.days:
            why = why or f"{len(plan)} days planned for a trip of {task.days}"
        commonsense[name] = why is None
        if why:
            reasons[name] = why
    cost = _cost(task, days, sandbox, strict)
    counted = commonsense["complete"] and commonsense["sandbox"]
    hard = _hard(task, days, sandbox, strict, reasons)
    hard["budget"] = cost <= task.budget
    if not hard["budget"]:
        reasons["budget"] = f"costs ${cost:,.0f} of ${task.budget:,.0f}"
    return Report(commonsense, hard, counted, cost, reasons)


def _in_sandbox(task, days, sandbox, strict):
    for i, day in enumerate(days):
        mode = _mode(day["transportation"]) if day.filled("transportation") else None
        a, b = day.leg()
        if mode == "Flight":
            rows = sandbox.flights.get(day.flight_number(), ())
            rows = [
                r for r in rows if (r["OriginCityName"], r["DestCityName"]) == (a, b)
            ]
            if strict:
                rows = [r for r in rows if r["FlightDate"] == task.dates[i]]
            if not rows:
                return f"day {i + 1}: no such flight from {a} to {b}"
        elif mode and sandbox.routes.get((mode, a, b)) is None:
            return f"day {i + 1}: no {mode.lower()} from {a} to {b}"
        elif mode is None and strict and day.filled("transportation"):
            return f"day {i + 1}: unknown transport {day['transportation']!r}"
        for text in day.meals:
            if not sandbox.find(sandbox.restaurants, text, strict):
                return f"day {i + 1}: no restaurant {text!r}"
        for text in day.attractions:
            if not sandbox.find(sandbox.attractions, text, strict):
                return f"day {i + 1}: no attraction {text!r}"
        hotel = day["accommodation"]
        if hotel != "-" and not sandbox.find(sandbox.hotels, hotel, strict):
            return f"day {i + 1}: no accommodation {hotel!r}"
    return None


def _complete(task, days, sandbox, strict):
    present = [d for d in days if d.raw and d.city != _LATER]
    if len(present) != task.days:
        return f"{len(present)} of {task.days} days are planned"
    visited = {city for day in days for city in day.cities} - {task.org}
    if len(visited) != len(task.cities) or days[0].cities[0] != task.org:
        return f"visits {len(visited)} cities, not {len(task.cities)}"
    filled = 0
    for i, day in enumerate(days):
        for key in FIELDS:
            if key not in day.raw:
                return f"day {i + 1} lacks the field {key!r}"
        if day.travels and not day.filled("transportation"):
            return f"day {i + 1}: no transport on a day of travel"
        if not day.travels and not day.filled("attraction"):
            return f"day {i + 1}: no attraction"
        if not day.travels and len(day.meals) < len(MEALS):
            return f"day {i + 1}: a meal is missing"
        if i != task.days - 1 and not day.filled("accommodation"):
            return f"day {i + 1}: no accommodation"
        counted = FIELDS if strict else day.raw
        filled += sum(day.raw[key] not in _EMPTY for key in counted)
    if 2 * filled < 6 * task.days:
        return f"only {filled} of {6 * task.days} fields are filled"
    return None


def _in_current_city(task, days, sandbox, strict):
    for i, day in enumerate(days):
        # Officially the city of a stay is a string and its letters are looked for.
        cities = day.cities if day.travels or strict else list(day.cities[0])

        def here(text, cities=cities):
            if strict:
                return place_of(text)[1] in cities
            return any(city in text for city in cities)

        if day.filled("transportation"):
            if strict:
                wrong = list(day.leg()) != day.cities
            else:
                wrong = any(city not in day["transportation"] for city in cities)
            if wrong:
                return f"day {i + 1}: the transport does not serve {day.city}"
        for text in (*day.meals, *day.attractions):
            if not here(text):
                return f"day {i + 1}: {text!r} is not in {day.city}"
        hotel = day["accommodation"]
        if hotel != "-":
            last = cities[-1] if cities else ""
            wrong = place_of(hotel)[1] != last if strict else last not in hotel
            if wrong:
                return f"day {i + 1}: {hotel!r} is not in {day.city}"
    return None


def _reasonable_route(task, days, sandbox, strict):
    if days[0].travels and days[0].cities[0] != task.org:
        return f"does not start in {task.org}"
    cities = [city for day in days for city in day.cities]
    if cities[0] != cities[-1]:
        return "does not return to where it starts"
    runs = [(city, len(list(run))) for city, run in groupby(cities)]
    if len(cities) < 3 or len(runs) < 2:
        return "goes nowhere"
    inner = [city for city, _ in runs[1:-1]]
    if len(set(inner)) != len(inner) or runs[0][0] in inner:
        return "visits a city twice"
    if any(length == 1 for _, length in runs[1:-1]):
        return "passes through a city without staying"
    for i, city in enumerate(cities):
        if city not in sandbox.states:
            return f"{city!r} is not a known city"
        inside = 0 < i < len(cities) - 1
        if inside and task.days > 3 and sandbox.states[city] != task.dest:
            return f"{city} is not in {task.dest}"
    return None


def _first_repeat(items):
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def _diverse_restaurants(task, days, sandbox, strict):
    again = _first_repeat(meal for day in days for meal in day.meals)
    return again and f"eats twice at {again!r}"


def _diverse_attractions(task, days, sandbox, strict):
    again = _first_repeat(place for day in days for place in day.attractions)
    return again and f"sees {again!r} twice"


def _consistent_transport(task, days, sandbox, strict):
    if not days[0].filled("transportation"):
        return "day 1: no transport"
    used = {_mode(d["transportation"]) for d in days if d.filled("transportation")}
    if "Self-driving" in used and used & {"Flight", "Taxi"}:
        return "mixes self-driving with " + " and ".join(
            sorted(m.lower() for m in used - {"Self-driving", None})
        )
    return None


def _minimum_nights(task, days, sandbox, strict):
    if any("accommodation" not in day.raw for day in days):
        return "a day has no accommodation field"
    for hotel, run in groupby(day["accommodation"] for day in days):
        nights = len(list(run))
        if hotel == "-":
            continue
        rows = sandbox.find(sandbox.hotels, hotel, strict)
        if rows and (strict or len(rows) == 1):
            least = rows[0]["minimum nights"]
            if nights < least:
                return f"{hotel!r} wants {least:.0f} nights, not {nights}"
    return None


def _hard(task, days, sandbox, strict, reasons):
    """Room rule, room type, cuisine and transport; ``None`` where not asked for."""
    wish = task.constraint
    hotels = []
    for day in days:
        if day.filled("accommodation"):
            hotels += sandbox.find(sandbox.hotels, day["accommodation"], strict)[:1]
    result: dict[str, bool | None] = dict.fromkeys(
        ("room_rule", "room_type", "cuisine", "transportation")
    )
    if rule := wish.get("house rule"):
        bad = [h["NAME"] for h in hotels if f"No {rule}" in str(h["house_rules"])]
        result["room_rule"] = not bad
        if bad:
            reasons["room_rule"] = f"{bad[0]!r} forbids {rule}"
    if kind := wish.get("room type"):
        bad = [h["NAME"] for h in hotels if not room_fits(h, kind)]
        result["room_type"] = not bad
        if bad:
            reasons["room_type"] = f"{bad[0]!r} is not: {kind}"
    if wanted := wish.get("cuisine"):
        eaten = set()
        for text in (meal for day in days for meal in day.meals):
            if place_of(text)[1] != task.org:
                for row in sandbox.find(sandbox.restaurants, text, True)[:1]:
                    eaten |= {c for c in wanted if c in row["Cuisines"]}
        result["cuisine"] = len(eaten) == len(wanted)
        if not result["cuisine"]:
            lacking = ", ".join(sorted(set(wanted) - eaten))
            reasons["cuisine"] = f"never eats {lacking}"
    if forbidden := wish.get("transportation"):
        word = {"no flight": "Flight", "no self-driving": "Self-driving"}[forbidden]
        texts = [day["transportation"] for day in days]
        if strict:
            word, texts = word.lower(), [text.lower() for text in texts]
        result["transportation"] = not any(word in text for text in texts)
        if not result["transportation"]:
            reasons["transportation"] = f"the query asks for {forbidden}"
    return result


def _cost(task, days, sandbox, strict):
    """Dollars of a plan; what the sandbox does not know costs nothing."""
    total = 0.0
    for day in days:
        a, b = day.leg()
        mode = _mode(day["transportation"]) if day.filled("transportation") else None
        if mode == "Flight":
            rows = sandbox.flights.get(day.flight_number(), ())
            if strict:
                rows = [
                    row
                    for row in rows
                    if (row["OriginCityName"], row["DestCityName"]) == (a, b)
                ]
            price = rows[0]["Price"] if rows else 0.0
        else:
            price = sandbox.routes.get((mode, a, b)) or 0.0
        total += price * math.ceil(task.people / SEATS.get(mode, 1))
        for text in day.meals:
            for row in sandbox.find(sandbox.restaurants, text, strict)[:1]:
                total += row["Average Cost"] * task.people
        if day.filled("accommodation"):
            for row in sandbox.find(sandbox.hotels, day["accommodation"], strict)[:1]:
                rooms = math.ceil(task.people / row["maximum occupancy"])
                total += row["price"] * rooms
    return total
