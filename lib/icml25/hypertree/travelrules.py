"""The rule library of TravelPlanner, and the outline of one trip."""

from __future__ import annotations

from collections.abc import Sequence

from icml25.hypertree.backends import Backend, Exact
from icml25.hypertree.planner import HTPlanner, Outline
from icml25.hypertree.travel import MODES, Task
from icml25.hypertree.tree import Child, Node, Rule, RuleLibrary

_MODE_LEAVES = ("availability", "preference", "cost")
_HOTEL_LEAVES = ("minimum stay", "house rule", "room type", "cost")
_DINING_LEAVES = ("cuisine", "cost")


def travel_rules(*, modes: str = "all") -> RuleLibrary:
    """The TravelPlanner library: [Plan] into transport, hotels, sights and meals.

    Args:
        modes: ``"all"``: a leg is divided into its three modes, all looked at (the
            released code); ``"branches"``: the modes are alternatives, one branch each.

    Raises:
        ValueError: another ``modes``.

    Notes:
        For 1, 2, 3 cities the first gives 40, 62, 84 nodes, 25, 41, 57 leaves and 15,
        21, 27 expansions.

    Source: the authors' code; wording ours.
    """
    if modes not in ("all", "branches"):
        raise ValueError(f"modes={modes!r}: 'all' or 'branches'")

    def parts(node: Node) -> list[list[Child]]:
        names = ("Transportation", "Accommodation", "Attraction", "Dining")
        return [[Child(name, f"[{name}]", node.data) for name in names]]

    def legs(node: Node) -> list[list[Child]]:
        return [
            [
                Child("Leg", f"[{a} to {b}]", {**node.data, "leg": i})
                for i, (a, b) in enumerate(node.data["task"].legs)
            ]
        ]

    def mode_nodes(node: Node) -> list[list[Child]]:
        a, b = node.data["task"].legs[node.data["leg"]]
        found = [
            Child("Mode", f"[{mode} from {a} to {b}]", {**node.data, "mode": mode})
            for mode in MODES
        ]
        return [found] if modes == "all" else [[child] for child in found]

    def cities(head: str, what: str):
        def rule(node: Node) -> list[list[Child]]:
            return [
                [
                    Child(head, f"[{what} in {city}]", {**node.data, "city": i})
                    for i, city in enumerate(node.data["task"].cities)
                ]
            ]

        return rule

    def leaves(kinds: Sequence[str]):
        def rule(node: Node) -> list[list[Child]]:
            data = {**node.data, "for": node.head}
            return [[Child("check", f"[{k}]", {**data, "check": k}) for k in kinds]]

        return rule

    rules = [
        Rule("Plan", parts),
        Rule("Transportation", legs),
        Rule("Leg", mode_nodes),
        Rule("Mode", leaves(_MODE_LEAVES)),
        Rule("Accommodation", cities("Hotel", "hotel")),
        Rule("Attraction", cities("Sight", "attraction")),
        Rule("Dining", cities("Meals", "meals")),
        Rule("Hotel", leaves(_HOTEL_LEAVES)),
        Rule("Meals", leaves(_DINING_LEAVES)),
    ]
    return RuleLibrary(rules, atoms=("check", "Sight"))


def travel_outline(
    task: Task, *, backend: Backend | None = None, modes: str = "all"
) -> Outline:
    """The outline of one trip, by Algorithm 1 with the travel library."""
    planner = HTPlanner(travel_rules(modes=modes), backend or Exact())
    return planner.outline(task.query, Child("Plan", "[Plan]", {"task": task}))
