"""Travel tasks with invented cities and prices, in TravelPlanner's own schema."""

from __future__ import annotations

import math
from datetime import date, timedelta
from typing import Any

import torch

from icml25.hypertree.backends import Exact
from icml25.hypertree.schedule import CITIES
from icml25.hypertree.solve import plan_travel
from icml25.hypertree.travel import Sandbox, Task
from icml25.hypertree.verify import evaluate

CUISINES = (
    "American", "Chinese", "French", "Indian", "Italian", "Mediterranean", "Mexican",
)  # fmt: skip
HOUSE_RULES = ("parties", "smoking", "pets", "visitors", "children under 10")
_REGIONS = ("Northmark", "Eastfold", "Southreach", "Westvale")
_ROOMS = ("Entire home/apt", "Private room", "Shared room")
_ADJECTIVES = ("Blue", "Golden", "Quiet", "Old", "Green", "Silver", "Little", "Royal")
_MEAL_PLACES = ("Spoon", "Kitchen", "Table", "Garden", "Oven", "Corner", "Cellar")
_SIGHTS = (
    "Museum",
    "Park",
    "Castle",
    "Harbour",
    "Bridge",
    "Gallery",
    "Tower",
    "Market",
)
_STAYS = ("Loft", "Cottage", "Studio", "House", "Room", "Flat")


class _Draw:
    """Small helpers over one generator."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def int(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def some(self, items: tuple, k: int) -> list:
        order = torch.randperm(len(items), generator=self.generator)[:k]
        return [items[i] for i in order.tolist()]


def _city_tables(draw: _Draw, city: str) -> dict[str, list[dict[str, Any]]]:
    def named(kinds: tuple[str, ...], count: int) -> list[str]:
        names = tuple(f"{a} {b}" for a in _ADJECTIVES for b in kinds)
        return draw.some(names, count)

    restaurants = [
        {
            "Name": name,
            "Average Cost": draw.int(10, 100),
            "Cuisines": ", ".join(draw.some(CUISINES, draw.int(1, 3))),
            "City": city,
        }
        for name in named(_MEAL_PLACES, 20)
    ]
    hotels = [
        {
            "NAME": name,
            "price": float(draw.int(40, 900)),
            "room type": draw.some(_ROOMS, 1)[0],
            "house_rules": " & ".join(
                f"No {rule}" for rule in draw.some(HOUSE_RULES, draw.int(0, 3))
            ),
            "minimum nights": float(draw.int(1, 4)),
            "maximum occupancy": draw.int(1, 6),
            "city": city,
        }
        for name in named(_STAYS, 16)
    ]
    sights = [{"Name": name, "City": city} for name in named(_SIGHTS, 10)]
    return {
        f"Attractions in {city}": sights,
        f"Restaurants in {city}": restaurants,
        f"Accommodations in {city}": hotels,
    }


class _World:
    """Cities on a map, with their tables and distances, drawn once."""

    def __init__(self, draw: _Draw) -> None:
        self.states = {city: _REGIONS[i % 4] for i, city in enumerate(CITIES)}
        self.tables = {city: _city_tables(draw, city) for city in CITIES}
        xy = torch.rand(len(CITIES), 2, generator=draw.generator) * 900
        self.place = dict(zip(CITIES, xy.tolist(), strict=True))

    def distance(self, a: str, b: str) -> int:
        return 50 + int(math.dist(self.place[a], self.place[b]))


def _transport(
    draw: _Draw, world: _World, a: str, b: str, day: str, number: int
) -> dict[str, Any]:
    km = world.distance(a, b)
    hours, minutes = divmod(int(km / 95 * 60), 60)
    how = f"from {a} to {b}, duration: {hours} hours {minutes} mins, distance: {km} km"
    flights: Any = [
        {
            "Flight Number": f"F{number + i:07d}",
            "Price": draw.int(60, 350),
            "DepTime": f"{8 + 3 * i:02d}:15",
            "ArrTime": f"{9 + 3 * i:02d}:45",
            "FlightDate": day,
            "OriginCityName": a,
            "DestCityName": b,
        }
        for i in range(draw.int(0, 4))
    ]
    if not flights:
        flights = f"There is no flight from {a} to {b} on {day}."
    return {
        f"Flight from {a} to {b} on {day}": flights,
        f"Self-driving from {a} to {b}": f"self-driving, {how}, cost: {int(km * 0.05)}",
        f"Taxi from {a} to {b}": f"taxi, {how}, cost: {km}",
    }


def _constraint(draw: _Draw, level: str) -> dict[str, Any]:
    wish: dict[str, Any] = dict.fromkeys(
        ("house rule", "cuisine", "room type", "transportation")
    )
    for key in draw.some(tuple(wish), {"easy": 0, "medium": 1, "hard": 3}[level]):
        wish[key] = {
            "house rule": lambda: draw.some(HOUSE_RULES, 1)[0],
            "cuisine": lambda: draw.some(CUISINES, draw.int(2, 4)),
            "room type": lambda: draw.some(("entire room", "private room"), 1)[0],
            "transportation": lambda: draw.some(("no flight", "no self-driving"), 1)[0],
        }[key]()
    return wish


def mini_tasks(
    num: int, *, slack: float = 1.3, generator: torch.Generator | None = None
) -> tuple[list[Task], Sandbox]:
    """Solvable travel tasks in the benchmark's schema, over one invented world.

    Lengths 3, 5, 7 days (1, 2, 3 cities) and levels easy, medium, hard (0, 1, 3
    constraints) take turns.

    Args:
        num: tasks, at least 1.
        slack: budget over the cost of the plan that exact leaves find, >= 1; the
            budget is rounded up to 100 dollars.
        generator: the world and the tasks.

    Raises:
        ValueError: ``num`` or ``slack`` out of range.
    """
    if num < 1 or not slack >= 1:
        raise ValueError(f"num={num}, slack={slack}: at least 1 each")
    draw = _Draw(generator)
    world = _World(draw)
    tasks: list[Task] = []
    number = 1000
    while len(tasks) < num:
        turn = len(tasks)
        n = 1 + turn % 3
        level = ("easy", "medium", "hard")[turn // 3 % 3]
        region = draw.some(_REGIONS, 1)[0]
        inside = tuple(c for c in CITIES if world.states[c] == region)
        outside = tuple(c for c in CITIES if world.states[c] != region)
        cities = tuple(draw.some(inside, n))
        org = draw.some(outside, 1)[0]
        days = 2 * n + 1
        first = date(2025, 3, 1) + timedelta(draw.int(0, 25))
        dates = tuple(str(first + timedelta(i)) for i in range(days))
        info: dict[str, Any] = {}
        for city in cities:
            info |= world.tables[city]
        stops = (org, *cities, org)
        for i, (a, b) in enumerate(zip(stops, stops[1:], strict=False)):
            number += 10
            info |= _transport(draw, world, a, b, dates[2 * i], number)
        people = draw.int(1, 6)
        task = Task(
            org=org,
            dest=region if n > 1 else cities[0],
            days=days,
            dates=dates,
            cities=cities,
            people=people,
            budget=1e9,
            constraint=_constraint(draw, level),
            info=info,
            level=level,
        )
        solution = plan_travel(task, Exact())
        if solution.infeasible:
            continue
        report = evaluate(task, solution.plan, Sandbox([info], world.states))
        budget = 100.0 * math.ceil(slack * report.cost / 100)
        values = {**task.__dict__, "budget": budget}
        tasks.append(Task(**{**values, "query": _query(Task(**values))}))
    return tasks, Sandbox([task.info for task in tasks], world.states)


def _query(task: Task) -> str:
    wish = task.constraint
    asks = [
        text
        for key, text in (
            ("house rule", f"The hotels must allow {wish['house rule']}."),
            ("cuisine", f"We want to eat {', '.join(wish['cuisine'] or ())} food."),
            ("room type", f"The accommodation must be: {wish['room type']}."),
            ("transportation", f"Travel with {wish['transportation']}."),
        )
        if wish[key]
    ]
    return " ".join(
        [
            f"Plan a {task.days}-day trip from {task.org} to {', '.join(task.cities)} "
            f"for {task.people} people, starting {task.dates[0]}, with a budget of "
            f"${task.budget:,.0f}.",
            *asks,
        ]
    )
