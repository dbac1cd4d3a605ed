"""Blocksworld: an executor for plans, a rule library, and instances."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from icml25.core import data
from icml25.hypertree.tree import Child, Node, Rule, RuleLibrary

_FACT = re.compile(r"on (\w+) (\w+)|ontable (\w+)|clear (\w+)|holding (\w+)|handempty")
_ARITY = {"pick-up": 1, "put-down": 1, "unstack": 2, "stack": 2}


@dataclass(frozen=True)
class Instance:
    """Initial facts, goal facts, and a reference plan if one is known."""

    init: frozenset[str]
    goal: frozenset[str]
    reference: tuple[str, ...] = ()


def facts(text: str) -> frozenset[str]:
    """``"on a b; clear a"`` -> a set of facts.

    Raises:
        ValueError: something that is no Blocksworld fact.
    """
    items = [item.strip() for item in text.split(";") if item.strip()]
    for item in items:
        if not _FACT.fullmatch(item):
            raise ValueError(
                f"{item!r} is no fact: on x y, ontable x, clear x, holding x, handempty"
            )
    return frozenset(items)


@dataclass(frozen=True)
class Execution:
    """The state a plan leads to; ``failed_at`` is the first step that cannot be done.

    ``state`` is the state before that step.
    """

    state: frozenset[str]
    failed_at: int | None = None
    reason: str = ""


def _effects(name: str, args: Sequence[str]) -> tuple[set[str], set[str], set[str]]:
    """STRIPS operator: needs, deletes, adds."""
    x, y = (*args, "")[:2]
    if name == "pick-up":
        needs = {f"clear {x}", f"ontable {x}", "handempty"}
        return needs, needs, {f"holding {x}"}
    if name == "put-down":
        needs = {f"holding {x}"}
        return needs, needs, {f"clear {x}", f"ontable {x}", "handempty"}
    if name == "unstack":
        needs = {f"on {x} {y}", f"clear {x}", "handempty"}
        return needs, needs, {f"holding {x}", f"clear {y}"}
    needs = {f"holding {x}", f"clear {y}"}
    return needs, needs, {"handempty", f"clear {x}", f"on {x} {y}"}


def execute(state: Iterable[str], plan: Sequence[str] | str) -> Execution:
    """Run a plan; stops at the first action whose preconditions do not hold.

    Args:
        state: facts such as ``"on a b"``.
        plan: actions such as ``"unstack a b"``, as a list or separated by ``;``.
            A malformed action counts as a step that cannot be done: plans are data,
            nothing in them is evaluated.
    """
    if isinstance(plan, str):
        plan = [step for step in plan.split(";") if step.strip()]
    now = set(state)
    for i, step in enumerate(plan):
        name, *args = step.split() or [""]
        if _ARITY.get(name) != len(args):
            return Execution(frozenset(now), i, f"{step!r} is no action")
        needs, deletes, adds = _effects(name, args)
        if missing := needs - now:
            reason = f"{step}: {', '.join(sorted(missing))} does not hold"
            return Execution(frozenset(now), i, reason)
        now = (now - deletes) | adds
    return Execution(frozenset(now))


def solves(instance: Instance, plan: Sequence[str] | str) -> bool:
    """Whether the whole plan can be executed and ends in the goal."""
    result = execute(instance.init, plan)
    return result.failed_at is None and instance.goal <= result.state


def _pairs(items: Iterable[str]) -> dict[str, str]:
    """Block -> what it stands on, from the ``on`` facts."""
    return {f.split()[1]: f.split()[2] for f in items if f.startswith("on ")}


def ordered_goals(goal: Iterable[str]) -> list[tuple[str, str]]:
    """The ``on x y`` goals, lower pairs of a tower first.

    Raises:
        ValueError: the goal asks for a block to stand on itself, directly or not.
    """
    below = _pairs(goal)

    def height(block: str, seen: tuple[str, ...] = ()) -> int:
        if block in seen:
            raise ValueError(f"goal runs in a cycle: {' on '.join((*seen, block))}")
        return 1 + height(below[block], (*seen, block)) if block in below else 0

    return sorted(below.items(), key=lambda pair: (height(pair[0]), pair))


def blocksworld_rules() -> RuleLibrary:
    """[Plan] -> on(x, y) bottom-up; on(x, y) -> {clear x, clear y, move x onto y}.

    The paper does not print its Blocksworld rules; these are a reconstruction.
    """

    def goals(node: Node) -> list[list[Child]]:
        instance = node.data["instance"]
        pairs = ordered_goals(instance.goal)
        bases = {f.split()[1] for f in instance.goal if f.startswith("ontable")}
        clear = [f.split()[1] for f in instance.goal if f.startswith("clear")]
        bases |= _trapping(_pairs(instance.init), pairs, clear)
        table = [Child("table", f"[{x} on the table]", {"x": x}) for x in sorted(bases)]
        on = [Child("on", f"[{x} on {y}]", {"x": x, "y": y}) for x, y in pairs]
        # "clear x" goals come last: building towers may cover x.
        last = [Child("clear", f"[clear {x}]", {"x": x}) for x in sorted(clear)]
        return [table + on + last] if table + on + last else []

    def on(node: Node) -> list[list[Child]]:
        x, y = node.data["x"], node.data["y"]
        pair = {"pair": (x, y)}
        return [
            [
                Child("clear", f"[clear {x}]", {"x": x, **pair}),
                Child("clear", f"[clear {y}]", {"x": y, **pair}),
                Child("move", f"[move {x} onto {y}]", {"x": x, "y": y, **pair}),
            ]
        ]

    rules = [Rule("plan", goals, "goals bottom-up"), Rule("on", on)]
    return RuleLibrary(rules, atoms=("clear", "move", "table"))


def solve_leaf(head: str, x: str, y: str, state: Iterable[str]) -> list[str]:
    """Actions that do one leaf from ``state``: clear x, move x onto y, x to the table.

    Raises:
        ValueError: an unknown leaf.
    """
    below = _pairs(state)
    above = {b: a for a, b in below.items()}
    if head == "clear":
        tower = []
        while x in above:
            x = above[x]
            tower.append(x)
        return [
            step for b in reversed(tower) for step in _to_table(b, below.get(b)) if step
        ]
    if head == "table":
        rest = solve_leaf("clear", x, "", state)
        return rest + (_to_table(x, below[x]) if x in below else [])
    if head == "move":
        if below.get(x) == y:
            return []
        take = f"unstack {x} {below[x]}" if x in below else f"pick-up {x}"
        return [take, f"stack {x} {y}"]
    raise ValueError(f"unknown leaf {head!r}: clear, move or table")


def _to_table(block: str, under: str | None) -> list[str]:
    return [f"unstack {block} {under}", f"put-down {block}"]


def plan_blocks(instance: Instance, leaves: Sequence[Node]) -> list[str]:
    """Self-guided planning: do the leaves of an outline in order, state by state.

    A pair that already stands, with everything below it in place, is left alone.
    """
    plan: list[str] = []
    state = instance.init
    want = _pairs(instance.goal)
    for leaf in leaves:
        pair = leaf.data.get("pair")
        if pair and _settled(pair[0], _pairs(state), want):
            continue
        steps = solve_leaf(leaf.head, leaf.data["x"], leaf.data.get("y", ""), state)
        result = execute(state, steps)
        if result.failed_at is not None:
            break
        plan += steps
        state = result.state
    return plan


def _trapping(
    below: dict[str, str], pairs: Sequence[tuple[str, str]], clear: Sequence[str]
) -> set[str]:
    """Bases of goal towers that stand above a block some goal still has to reach."""
    blocks = {b for pair in pairs for b in pair}.union(clear)
    bases = {y for _, y in pairs} - {x for x, _ in pairs}
    found = set()
    for base in bases:
        under = below.get(base)
        while under is not None:
            if under in blocks:
                found.add(base)
            under = below.get(under)
    return found


def _settled(block: str, below: dict[str, str], want: dict[str, str]) -> bool:
    """Whether ``block`` and all it should rest on are where the goal wants them."""
    while block in want:
        if below.get(block) != want[block]:
            return False
        block = want[block]
    return True


def random_instances(
    num: int, num_blocks: int, *, generator: torch.Generator | None = None
) -> list[Instance]:
    """Random initial towers and goal towers over blocks a, b, c, ...

    Raises:
        ValueError: sizes out of range (2 to 26 blocks).
    """
    if num < 1 or not 2 <= num_blocks <= 26:
        raise ValueError(f"num={num}, num_blocks={num_blocks}: >= 1, and 2 to 26")
    names = [chr(97 + i) for i in range(num_blocks)]

    def towers() -> list[list[str]]:
        order = torch.randperm(num_blocks, generator=generator).tolist()
        cut = (torch.rand(num_blocks, generator=generator) < 0.4).tolist()
        stacks: list[list[str]] = [[]]
        for i, start in zip(order, cut, strict=True):
            if start and stacks[-1]:
                stacks.append([])
            stacks[-1].append(names[i])
        return stacks

    found = []
    while len(found) < num:
        init = {"handempty"}
        for stack in towers():
            init |= {f"ontable {stack[0]}", f"clear {stack[-1]}"}
            init |= {f"on {a} {b}" for b, a in zip(stack, stack[1:], strict=False)}
        goal = {
            f"on {a} {b}"
            for stack in towers()
            for b, a in zip(stack, stack[1:], strict=False)
        }
        if goal and not goal <= init:
            found.append(Instance(frozenset(init), frozenset(goal)))
    return found


def load_instances() -> dict[str, Instance]:
    """PlanBench's 501 Blocksworld instances, by id."""
    raw = json.loads(data.fetch("planbench_blocksworld", "instances.json").read_text())
    return {
        key: Instance(
            facts(item["init"]),
            facts(item["goal"]),
            tuple(item["reference_plan"].split(";")),
        )
        for key, item in raw.items()
    }


def load_llm_plans() -> dict[str, dict[str, tuple[str, bool]]]:
    """Plans of ten language models: setting -> instance -> (plan, published flag)."""
    raw = json.loads(data.fetch("planbench_blocksworld", "llm_plans.json").read_text())
    return {
        setting: {key: (plan, bool(flag)) for key, (plan, flag) in plans.items()}
        for setting, plans in raw.items()
    }


def fit_decay(
    lengths: Sequence[int],
    success: Sequence[bool],
    *,
    generator: torch.Generator | None = None,
    num_bootstrap: int = 200,
) -> dict[str, float]:
    r"""Fit :math:`P(\text{success}) = a\,q^{L}` by likelihood; q with a 95% interval.

    Args:
        lengths: reference length of each instance (steps).
        success: whether the plan was right.
        generator: for the bootstrap over instances.
        num_bootstrap: resamples.

    Returns:
        ``a``, ``q``, ``low`` and ``high``.

    Raises:
        ValueError: no data, or lengths that do not match.

    Notes:
        A grid over q (0.5 to 1.2, values above 1 meaning no decay) with a solved on a
        grid as well: 2 parameters, no local optimum to fall into.
    """
    if not lengths or len(lengths) != len(success):
        raise ValueError(f"{len(lengths)} lengths for {len(success)} results")
    f64 = torch.float64
    y = torch.as_tensor(success, dtype=f64)
    steps = torch.as_tensor(lengths, dtype=f64)
    values, where = steps.unique(return_inverse=True)
    q = torch.linspace(0.5, 1.2, 141, dtype=f64)
    a = torch.linspace(0.02, 3, 150, dtype=f64)
    # (A, Q, L) probabilities, kept off 0 and 1 where the logarithm ends.
    p = (a[:, None, None] * q[:, None] ** values).clamp(1e-4, 1 - 1e-4)
    log_p = p.log().reshape(-1, len(values))
    log_not = (-p).log1p().reshape(-1, len(values))

    def best(index: torch.Tensor) -> tuple[float, float]:
        won = torch.zeros(len(values), dtype=f64).index_add_(0, where[index], y[index])
        all_ = torch.zeros(len(values), dtype=f64).index_add_(
            0, where[index], torch.ones_like(y[index])
        )
        i = int((log_p @ won + log_not @ (all_ - won)).argmax())
        return float(a[i // len(q)]), float(q[i % len(q)])

    n = len(y)
    scale, ratio = best(torch.arange(n))
    draws = sorted(
        best(torch.randint(n, (n,), generator=generator))[1]
        for _ in range(num_bootstrap)
    )
    low = draws[int(0.025 * num_bootstrap)]
    high = draws[math.ceil(0.975 * num_bootstrap) - 1]
    return {"a": scale, "q": ratio, "low": low, "high": high}
