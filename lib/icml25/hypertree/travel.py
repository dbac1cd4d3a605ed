"""TravelPlanner: tasks, the sandbox, and the thirteen checks a plan must pass."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from icml25.core import data

MODES = ("Self-driving", "Taxi", "Flight")
MEALS = ("breakfast", "lunch", "dinner")
FIELDS = ("transportation", *MEALS, "attraction", "accommodation")
SEATS = {"Self-driving": 5, "Taxi": 4, "Flight": 1}
ROOM_TYPES = {
    "shared room": "Shared room",
    "private room": "Private room",
    "entire room": "Entire home/apt",
}
_EMPTY = (None, "", "-")
_LATER = "You don't need to fill in the information for this or later days."
_ROUTE = re.compile(r"from\s+(.+?)\s+to\s+([^,]+)(?=[,\s]|$)")
_PLACE = re.compile(r"(.*?),\s*([^,]+)(\(\w[\w\s]*\))?$")


@dataclass(frozen=True)
class Task:
    """One travel query with its reference information.

    Attributes:
        org, dest: where the trip starts; a city (3 days) or a state (5, 7 days).
        days, dates: 3, 5 or 7 days, and one ISO date each.
        cities: the cities to visit, in order.
        people, budget: number of travellers; dollars for all of them.
        constraint: ``house rule``, ``cuisine`` (a list), ``room type`` and
            ``transportation``; ``None`` where the query asks for nothing.
        info: the reference information, ``"Restaurants in X"`` and so on, in the
            benchmark's own schema.
    """

    org: str
    dest: str
    days: int
    dates: tuple[str, ...]
    cities: tuple[str, ...]
    people: int
    budget: float
    constraint: Mapping[str, Any]
    info: Mapping[str, Any] = field(repr=False)
    level: str = ""
    query: str = ""
    annotated_plan: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.days < 1 or len(self.dates) != self.days:
            raise ValueError(
                f"days={self.days} with {len(self.dates)} dates: one date a day, "
                "at least one day"
            )
        if not self.cities:
            raise ValueError("cities is empty: a trip visits at least one city")
        if not self.budget >= 0 or not math.isfinite(self.budget):
            raise ValueError(f"budget={self.budget!r}: a finite number of dollars >= 0")

    @property
    def legs(self) -> list[tuple[str, str]]:
        """The trips between cities: out, onward, and home."""
        stops = (self.org, *self.cities, self.org)
        return list(zip(stops, stops[1:], strict=False))


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


def _bare(city: str | None) -> str:
    """A city without its state: ``"Rockford(Illinois)"`` -> ``"Rockford"``."""
    match = re.match(r"(.*?)\([^)]*\)", city or "")
    return match.group(1).strip() if match else (city or "")


def _route(text: str) -> tuple[str | None, str | None]:
    match = _ROUTE.search(text)
    return match.groups() if match else (None, None)


def _place(text: str) -> tuple[str, str]:
    """``"Name, with commas, City(State)"`` -> name and city."""
    match = _PLACE.search(text)
    if not match:
        return "-", "-"
    return match.group(1).strip(), _bare(match.group(2).strip()).strip()


def _mode(text: str) -> str | None:
    lower = text.lower()
    for mode in ("taxi", "self-driving", "flight"):
        if mode in lower:
            return mode.capitalize()
    return None


def _cost_of(sentence: str) -> float | None:
    match = re.search(r"cost:\s*([\d,.]+)", sentence)
    return float(match.group(1).replace(",", "")) if match else None


class Sandbox:
    """The world plans are checked against: tables by city, flights, routes.

    Args:
        infos: reference information of one or more tasks; repeated rows count once.
        states: state of each city (the route check needs it for trips over 3 days).

    Notes:
        Look-ups are dictionaries by city; a check touches a few dozen rows.
    """

    def __init__(
        self, infos: Iterable[Mapping[str, Any]], states: Mapping[str, str]
    ) -> None:
        self.states = dict(states)
        self.restaurants: dict[str, list[dict]] = {}
        self.attractions: dict[str, list[dict]] = {}
        self.hotels: dict[str, list[dict]] = {}
        self.flights: dict[str, list[dict]] = {}
        self.routes: dict[tuple[str, str, str], float | None] = {}
        tables = {
            "Restaurants in ": self.restaurants,
            "Attractions in ": self.attractions,
            "Accommodations in ": self.hotels,
        }
        for info in infos:
            for key, value in info.items():
                for prefix, table in tables.items():
                    if key.startswith(prefix) and not isinstance(value, str):
                        table.setdefault(key.removeprefix(prefix), list(value))
                self._transport(key, value)

    def _transport(self, key: str, value: Any) -> None:
        if key.startswith("Flight from ") and not isinstance(value, str):
            for row in value:
                rows = self.flights.setdefault(row["Flight Number"], [])
                if row not in rows:
                    rows.append(row)
        for mode in ("Self-driving", "Taxi"):
            if key.startswith(f"{mode} from "):
                self.routes[(mode, *_route(key))] = _cost_of(value)

    @staticmethod
    def find(table: Mapping[str, list[dict]], text: str, strict: bool) -> list[dict]:
        """Rows named by a plan's entry: by substring, or exactly when strict."""
        name, city = _place(text)
        rows = table.get(city, ())
        key = "NAME" if rows and "NAME" in rows[0] else "Name"
        if strict:
            return [row for row in rows if str(row[key]).strip() == name]
        return [row for row in rows if name in str(row[key])]


@dataclass
class _Day:
    """One day of a plan, read once."""

    raw: Mapping[str, Any]
    strict: bool

    def __post_init__(self) -> None:
        self.city = str(self.raw.get("current_city") or "")
        a, b = _route(self.city) if "from" in self.city else (None, None)
        self.travels = a is not None
        self.cities = [_bare(a), _bare(b)] if self.travels else [_bare(self.city)]

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
        a, b = _route(self["transportation"])
        if a is None:
            a, b = _route(self.city)
        return (_bare(a), _bare(b)) if a else (None, None)

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
                return _place(text)[1] in cities
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
            wrong = _place(hotel)[1] != last if strict else last not in hotel
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
        if kind == "not shared room":
            bad = [h["NAME"] for h in hotels if h["room type"] == "Shared room"]
        else:
            bad = [h["NAME"] for h in hotels if h["room type"] != ROOM_TYPES[kind]]
        result["room_type"] = not bad
        if bad:
            reasons["room_type"] = f"{bad[0]!r} is not: {kind}"
    if wanted := wish.get("cuisine"):
        eaten = set()
        for text in (meal for day in days for meal in day.meals):
            if _place(text)[1] != task.org:
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


def load_tasks() -> tuple[list[Task], Sandbox]:
    """The 45 training tasks of TravelPlanner and the sandbox they live in.

    Raises:
        DataError: the data set is not here (the message says how to get it).
    """
    name = "travelplanner_train"
    raw = json.loads(data.fetch(name, "train_tasks.json").read_text())
    lines = data.fetch(name, "train_ref_info.jsonl").read_text().splitlines()
    infos = [json.loads(line) for line in lines]
    table = data.fetch(name, "citySet_with_states.txt").read_text().splitlines()
    states = dict(line.split("\t") for line in table if line)
    tasks = [
        Task(
            org=item["org"],
            dest=item["dest"],
            days=item["days"],
            dates=tuple(item["date"]),
            cities=tuple(item["cities_in_order"]),
            people=item["people_number"],
            budget=item["budget"],
            constraint=item["local_constraint"],
            info=info,
            level=item["level"],
            query=item["query"],
            annotated_plan=item["annotated_plan"],
        )
        for item, info in zip(raw, infos, strict=True)
    ]
    return tasks, Sandbox(infos, states)
