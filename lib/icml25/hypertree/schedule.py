"""Trip planning and calendar scheduling: instances, rule libraries, checkers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from icml25.hypertree.backends import Backend, Check
from icml25.hypertree.planner import HTPlanner, Outline
from icml25.hypertree.tree import Child, Node, Rule, RuleLibrary


@dataclass(frozen=True)
class Trip:
    """Visit every city once, for its stay, over direct flights.

    Attributes:
        stays: city -> days; a day of flight counts for both cities, so that the
            total is the sum less (cities - 1).
        flights: pairs with a direct flight, either way.
        fixed: city -> the day one has to arrive.
    """

    stays: Mapping[str, int]
    flights: frozenset[tuple[str, str]]
    fixed: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.stays or min(self.stays.values()) < 1:
            raise ValueError(
                f"stays={dict(self.stays)}: at least one city, one day each"
            )
        if unknown := set(self.fixed) - set(self.stays):
            raise ValueError(
                f"fixed names unknown cities: {', '.join(sorted(unknown))}"
            )

    @property
    def total_days(self) -> int:
        return sum(self.stays.values()) - (len(self.stays) - 1)

    def direct(self, a: str, b: str) -> bool:
        return (a, b) in self.flights or (b, a) in self.flights


def check_trip(trip: Trip, route: Sequence[str]) -> str | None:
    """``None`` for a valid route, else the first thing wrong with it, in words."""
    if sorted(route) != sorted(trip.stays):
        return "does not visit every city exactly once"
    day = 1
    for i, city in enumerate(route):
        if i and not trip.direct(route[i - 1], city):
            return f"no direct flight from {route[i - 1]} to {city}"
        if trip.fixed.get(city, day) != day:
            return f"{city} is reached on day {day}, not {trip.fixed[city]}"
        day += trip.stays[city] - 1
    return None


def trip_text(trip: Trip, route: Sequence[str]) -> str:
    """A route in the benchmark's day-by-day lines."""
    lines, day = [], 1
    for i, city in enumerate(route):
        if i:
            lines.append(f"Day {day}: fly from {route[i - 1]} to {city}.")
        end = day + trip.stays[city] - 1
        lines.append(f"Day {day}-{end}: visit {city} for {trip.stays[city]} days.")
        day = end
    return "\n".join(lines)


def read_trip(text: str) -> list[tuple[str, int]]:
    """(city, stay) pairs from lines "Day a-b" and "from X to Y".

    Raises:
        ValueError: no such line.
    """
    spans = [(int(a), int(b)) for a, b in re.findall(r"Day (\d+)-(\d+)", text)]
    hops = re.findall(r"from ([\w .]+?) to ([\w .]+?)[.,\n]", text)
    if hops and len(hops) == len(spans) - 1:
        cities = [hops[0][0], *(b for _, b in hops)]
    else:  # a single city is named by its visit only
        cities = re.findall(r"visit ([\w .]+?) for", text)
    if not spans or len(cities) != len(spans):
        raise ValueError(f"no itinerary in {text[:60]!r}")
    return [(c, b - a + 1) for c, (a, b) in zip(cities, spans, strict=True)]


def trip_rules(trip: Trip) -> RuleLibrary:
    """Each partial route branches into the next cities that fit flights and dates.

    Branches are alternatives with one child each, so this hypertree is the tree of
    Tree of Thoughts: the case in which only depth, width and pruning matter.
    """

    def following(node: Node) -> list[list[Child]]:
        route: tuple[str, ...] = node.data["route"]
        day = node.data["day"]
        sets = []
        for city, stay in trip.stays.items():
            if city in route or (route and not trip.direct(route[-1], city)):
                continue
            if trip.fixed.get(city, day) != day:
                continue
            missed = [
                c
                for c, d in trip.fixed.items()
                if c not in route and c != city and d < day + stay - 1
            ]
            if missed:
                continue
            after = (*route, city)
            done = len(after) == len(trip.stays)
            # Cities with few ways on are better visited early: where a simulated
            # expert has to prefer one branch, it prefers these.
            ways = sum(trip.direct(city, c) for c in trip.stays if c not in after)
            data = {"route": after, "day": day + stay - 1, "weight": 1 / (1 + ways)}
            head = "arrived" if done else "route"
            sets.append([Child(head, f"[{' - '.join(after)}]", data)])
        if not sets:
            return [[Child("stuck", "[no city fits]", {"route": route})]]
        return sets

    return RuleLibrary([Rule("route", following)], atoms=("arrived", "stuck"))


def plan_trip(
    trip: Trip,
    backend: Backend,
    *,
    width: int = 5,
    depth: int | None = None,
    prune: str = "probability",
) -> tuple[list[str], Outline]:
    """A route by Algorithm 1, and its outline; an incomplete route if none was found.

    Args:
        width, prune: hyperchains kept in a round, and by which rule.
        depth: rounds; default twice the number of cities.
    """
    rules = trip_rules(trip)
    planner = HTPlanner(
        rules, backend, depth=depth or 2 * len(trip.stays), width=width, prune=prune
    )
    root = Child("route", "[route]", {"route": (), "day": 1})
    outline = planner.outline(f"Visit {', '.join(trip.stays)}.", root)
    # A dead end has no divisible leaf either: prefer a chain that arrived.
    end = outline.leaves[-1]
    if end.head != "arrived":
        arrived = (node for node in outline.tree.nodes if node.head == "arrived")
        end = next(arrived, end)
    return list(end.data["route"]), outline


def random_trips(
    num: int,
    num_cities: int,
    *,
    extra_flights: float = 0.3,
    num_fixed: int = 1,
    generator: torch.Generator | None = None,
) -> list[tuple[Trip, list[str]]]:
    """Solvable trips with a hidden route.

    Args:
        num, num_cities: instances; cities of each, 1 to 20.
        extra_flights: chance of a direct flight beyond those of the route.
        num_fixed: cities with a fixed arrival.

    Raises:
        ValueError: an argument out of range.
    """
    if num < 1 or not 1 <= num_cities <= len(CITIES):
        raise ValueError(
            f"num={num}, num_cities={num_cities}: >= 1, 1 to {len(CITIES)}"
        )
    if not 0 <= extra_flights <= 1 or not 0 <= num_fixed <= num_cities:
        raise ValueError(
            f"extra_flights={extra_flights}, num_fixed={num_fixed}: a probability, "
            "and at most one a city"
        )
    found = []
    for _ in range(num):
        order = torch.randperm(len(CITIES), generator=generator).tolist()
        route = [CITIES[i] for i in order[:num_cities]]
        lengths = torch.randint(2, 6, (num_cities,), generator=generator).tolist()
        chance = torch.rand(num_cities, num_cities, generator=generator)
        flights = set(zip(route, route[1:], strict=False))
        names = sorted(route)
        for i, a in enumerate(names):
            for j, b in enumerate(names[:i]):
                if chance[i, j] < extra_flights:
                    flights.add((a, b))
        stays = dict(zip(route, lengths, strict=True))
        arrival, day = {}, 1
        for city in route:
            arrival[city] = day
            day += stays[city] - 1
        which = torch.randperm(num_cities, generator=generator)[:num_fixed].tolist()
        fixed = {route[i]: arrival[route[i]] for i in which}
        stays = {name: stays[name] for name in names}  # the order tells nothing
        found.append((Trip(stays, frozenset(flights), fixed), route))
    return found


CITIES = (
    "Arlen", "Brindle", "Corvane", "Delmora", "Estholm", "Farrow", "Galdine",
    "Harrowby", "Istria Bay", "Jorvale", "Kestrel", "Lunden", "Marwick", "Norvane",
    "Orrin", "Pellham", "Quarry Hill", "Rosedene", "Selwick", "Tarn",
)  # fmt: skip


@dataclass(frozen=True)
class Meeting:
    """Find a slot in which everybody is free.

    Attributes:
        busy: name -> (start, end) intervals in minutes after midnight.
        duration: minutes.
        hours: (start, end) of the working day, in minutes after midnight.
    """

    busy: Mapping[str, tuple[tuple[int, int], ...]]
    duration: int
    hours: tuple[int, int] = (9 * 60, 17 * 60)

    def __post_init__(self) -> None:
        start, end = self.hours
        if not 0 < self.duration <= end - start:
            raise ValueError(f"duration={self.duration}: 1 to {end - start} minutes")


def check_meeting(meeting: Meeting, start: int) -> str | None:
    """``None`` for a slot that suits everybody, else who cannot come."""
    end = start + meeting.duration
    if start < meeting.hours[0] or end > meeting.hours[1]:
        return "outside working hours"
    for name, busy in meeting.busy.items():
        if any(start < b and a < end for a, b in busy):
            return f"{name} is busy"
    return None


def calendar_rules(meeting: Meeting) -> RuleLibrary:
    """[Meeting] into one task per person; each looks at one calendar only."""

    def people(node: Node) -> list[list[Child]]:
        return [[Child("person", f"[{n}]", {"name": n}) for n in meeting.busy]]

    def free(node: Node) -> list[list[Child]]:
        data = node.data
        return [[Child("free", f"[free slots of {data['name']}]", data)]]

    rules = [Rule("meeting", people), Rule("person", free)]
    return RuleLibrary(rules, atoms=("free",))


def plan_meeting(meeting: Meeting, backend: Backend, *, step: int = 30) -> int | None:
    """Earliest start that suits everybody, or ``None``.

    The outline gives one leaf a person; a leaf filters the day's slots by one calendar
    and the slots that all leaves keep are joined.
    """
    if step < 1:
        raise ValueError(f"step={step}: at least one minute")
    planner = HTPlanner(calendar_rules(meeting), backend)
    outline = planner.outline("Find a slot.", Child("meeting", "[Meeting]"))
    slots = range(meeting.hours[0], meeting.hours[1] - meeting.duration + 1, step)
    checks = []
    for leaf in outline.leaves:
        name = leaf.data["name"]
        alone = Meeting({name: meeting.busy[name]}, meeting.duration, meeting.hours)
        lines = tuple(
            f"{name} is busy {clock(a)}-{clock(b)}" for a, b in meeting.busy[name]
        )
        checks.append(
            Check(
                f"Is {name} free for {meeting.duration} minutes from then?",
                tuple(clock(slot) for slot in slots),
                tuple(check_meeting(alone, slot) is None for slot in slots),
                lines,
                len(lines),
            )
        )
    answers = backend.keep(checks)
    for i, slot in enumerate(slots):
        if all(answer[i] for answer in answers):
            return slot
    return None


def clock(minutes: int) -> str:
    """Minutes after midnight as ``HH:MM``."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def random_meetings(
    num: int,
    num_people: int,
    *,
    duration: int = 30,
    generator: torch.Generator | None = None,
) -> list[Meeting]:
    """Meetings with at least one slot that suits everybody.

    Raises:
        ValueError: ``num`` below 1, ``num_people`` not 1 to 10, or a ``duration`` that
            does not fit into the day.
    """
    if num < 1 or not 1 <= num_people <= 10 or not 1 <= duration <= 480:
        raise ValueError(
            f"num={num}, num_people={num_people}, duration={duration}: >= 1, 1 to 10, "
            "1 to 480 minutes"
        )
    half_hours = -(-duration // 30)
    found: list[Meeting] = []
    for _ in range(num):
        taken = torch.rand(num_people, 16, generator=generator) < 0.35
        free = int(torch.randint(17 - half_hours, (), generator=generator))
        taken[:, free : free + half_hours] = False
        busy = {
            f"Person {chr(65 + i)}": tuple(
                (540 + 30 * j, 570 + 30 * j) for j in range(16) if taken[i, j]
            )
            for i in range(num_people)
        }
        found.append(Meeting(busy, duration))
    return found
