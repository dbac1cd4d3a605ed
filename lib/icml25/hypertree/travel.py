"""TravelPlanner: tasks, and the sandbox of places, flights and prices."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
_WISHES = {
    "room type": (*ROOM_TYPES, "not shared room"),
    "transportation": ("no flight", "no self-driving"),
}
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

    Raises:
        ValueError: days and dates that do not match, no cities, nobody travelling, a
            budget that is no number, an unknown room type or way of travelling.
        TypeError: ``cuisine`` is a text instead of a list.
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
        if not isinstance(self.people, int) or self.people < 1:
            raise ValueError(f"people={self.people!r}: a whole number >= 1")
        for wish, allowed in _WISHES.items():
            asked = self.constraint.get(wish)
            if asked and asked not in allowed:
                raise ValueError(f"{wish}={asked!r}: None or {', '.join(allowed)}")
        if isinstance(self.constraint.get("cuisine"), str):
            raise TypeError(f"cuisine={self.constraint['cuisine']!r}: a list, or None")

    @property
    def legs(self) -> list[tuple[str, str]]:
        """The trips between cities: out, onward, and home."""
        stops = (self.org, *self.cities, self.org)
        return list(zip(stops, stops[1:], strict=False))


def bare_city(city: str | None) -> str:
    """A city without its state: ``"Rockford(Illinois)"`` -> ``"Rockford"``."""
    match = re.match(r"(.*?)\([^)]*\)", city or "")
    return match.group(1).strip() if match else (city or "")


def route_of(text: str) -> tuple[str | None, str | None]:
    match = _ROUTE.search(text)
    return match.groups() if match else (None, None)


def place_of(text: str) -> tuple[str, str]:
    """``"Name, with commas, City(State)"`` -> name and city."""
    match = _PLACE.search(text)
    if not match:
        return "-", "-"
    return match.group(1).strip(), bare_city(match.group(2).strip()).strip()


def cost_of(sentence: str) -> float | None:
    match = re.search(r"cost:\s*([\d,.]+)", sentence)
    return float(match.group(1).replace(",", "")) if match else None


def room_fits(row: Mapping[str, Any], kind: str) -> bool:
    """Whether a hotel's row is of the kind of room that a query asks for."""
    if kind == "not shared room":
        return row["room type"] != "Shared room"
    return row["room type"] == ROOM_TYPES[kind]


def fact_lines(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Every fact of a task's reference information, one a line."""
    lines = []
    for key, value in info.items():
        if isinstance(value, str):
            lines.append(value)
        elif key.startswith("Restaurants"):
            lines += [meal_line(row) for row in value]
        elif key.startswith("Accommodations"):
            lines += [hotel_line(row) for row in value]
        elif key.startswith("Attractions"):
            lines += [f"{row['Name']} in {row['City']}" for row in value]
        else:
            lines += [flight_line(row) for row in value]
    return tuple(lines)


def hotel_line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['NAME']}: {row['room type']}, ${row['price']:.0f} a night, "
        f"{row['house_rules']}, at least {row['minimum nights']:.0f} nights, "
        f"sleeps {row['maximum occupancy']}"
    )


def meal_line(row: Mapping[str, Any]) -> str:
    return f"{row['Name']}: {row['Cuisines']}, ${row['Average Cost']}"


def flight_line(row: Mapping[str, Any]) -> str:
    return (
        f"Flight {row['Flight Number']} from {row['OriginCityName']} to "
        f"{row['DestCityName']}, {row['DepTime']}-{row['ArrTime']}, ${row['Price']}"
    )


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
                self.routes[(mode, *route_of(key))] = cost_of(value)

    @staticmethod
    def find(table: Mapping[str, list[dict]], text: str, strict: bool) -> list[dict]:
        """Rows named by a plan's entry: by substring, or exactly when strict."""
        name, city = place_of(text)
        rows = table.get(city, ())
        key = "NAME" if rows and "NAME" in rows[0] else "Name"
        if strict:
            return [row for row in rows if str(row[key]).strip() == name]
        return [row for row in rows if name in str(row[key])]


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
