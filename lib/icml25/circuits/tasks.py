"""The paper's mathematical tasks: prompts, answers, and corrupted twins."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_SENTENCE = (
    "Calculate the result of the following arithmetic expression and provide only "
    "the final answer: "
)
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "max": max,
    "min": min,
}


@dataclass(frozen=True)
class Item:
    """One prompt with its answer and its corrupted twin.

    Attributes:
        prompt: the clean prompt.
        answer: its answer, a whole number.
        corrupted: the twin.
        corrupted_answer: the twin's answer; ``None`` where it has none.
        operands: what identifies the problem; train and test never share it.
        numbers: every number that is written out, for the single-token rule.
        kind: the operator that the paper balances, if any.
    """

    prompt: str
    answer: int
    corrupted: str
    corrupted_answer: int | None
    operands: tuple[int, ...]
    numbers: tuple[int, ...]
    kind: str = ""


class _Draw:
    """Whole numbers from a torch generator, a block at a time."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator, self.pool = generator, []

    def __call__(self, low: int, high: int) -> int:
        """Uniform on ``low..high``, both ends included."""
        if high < low:
            return low
        if not self.pool:
            self.pool = torch.rand(4096, generator=self.generator).tolist()
        return min(high, low + int(self.pool.pop() * (high - low + 1)))


def _add_sub(draw: _Draw, limit: int, short: bool) -> Item | None:
    b, a = sorted((draw(1, limit), draw(1, limit)))
    sign, other = ("+", "-") if draw(0, 1) else ("-", "+")
    start = "" if short else _SENTENCE
    answers = OPERATORS[sign](a, b), OPERATORS[other](a, b)
    return Item(
        f"{start}{a} {sign} {b} =",
        answers[0],
        f"{start}{a} {other} {b} =",
        answers[1],
        (a, b),
        (a, b, *answers),
        sign,
    )


def _mul_div(draw: _Draw, limit: int, short: bool) -> Item | None:
    start = "" if short else _SENTENCE
    if draw(0, 1):
        a, b = draw(2, limit), draw(2, min(limit, 180))
        c = draw(2, min(99, limit))
        if c == a:
            return None
        return Item(
            f"{start}{a} * {b} =",
            a * b,
            f"{start}{c} * {b} =",
            c * b,
            (a, b),
            (a, b, c, a * b, c * b),
            "*",
        )
    b, quotient = draw(2, limit), draw(2, limit)
    other = draw(2, max(2, 199 // b))
    a, c = b * quotient, b * other
    # A divisor of 100 or more has no other multiple below 200.
    if other == quotient or c >= 200:
        return None
    return Item(
        f"{start}{a} / {b} =",
        quotient,
        f"{start}{c} / {b} =",
        other,
        (quotient, b),
        (a, b, c, quotient, other),
        "/",
    )


def _sequence(draw: _Draw, limit: int, short: bool) -> Item | None:
    if draw(0, 1):
        first, step = draw(1, limit), draw(1, max(1, limit // 5))
        terms = [first + k * step for k in range(5)]
        key = (first, step)
    else:
        first, ratio = draw(1, min(10, limit)), draw(2, min(10, limit))
        terms = [first * ratio**k for k in range(5)]
        key = (first, ratio, -1)
    wrong = list(terms)
    wrong[2 + draw(0, 1)] += draw(1, max(1, limit // 5))
    start = "" if short else "Derive the following sequence: "
    return Item(
        f"{start}{_listed(terms[:4], short)}",
        terms[4],
        f"{start}{_listed(wrong[:4], short)}",
        None,
        key,
        (*terms, *wrong),
    )


def _listed(terms: Sequence[int], short: bool) -> str:
    return (
        " ".join(map(str, terms)) + " >" if short else ", ".join(map(str, terms)) + ","
    )


def _lcm_pair(draw: _Draw, limit: int) -> tuple[int, int]:
    kind = draw(0, 2)
    if kind == 0:
        base = draw(1, min(50, limit))
        return base, base * draw(2, 10)
    if kind == 1:
        a, b = draw(1, min(100, limit)), draw(1, min(100, limit))
        return (a, b) if math.gcd(a, b) == 1 else (a, a)
    base = draw(2, min(50, limit))
    return base * draw(2, 10), base * draw(2, 10)


def _lcm(draw: _Draw, limit: int, short: bool) -> Item | None:
    (a, b), (d, e), (f, g) = (_lcm_pair(draw, limit) for _ in range(3))
    c, answer, other = math.lcm(a, b), math.lcm(d, e), math.lcm(f, g)
    if answer == other or d == e or f == g:
        return None
    if short:
        start = "lcm "
        texts = [f"{start}{x} {y} =" for x, y in ((d, e), (f, g))]
        numbers = (d, e, f, g, answer, other)
    else:
        start = "Calculate the least common multiple (LCM) of two numbers. "
        texts = [
            f"{start}LCM({a}, {b}) = {c}, LCM({x}, {y}) =" for x, y in ((d, e), (f, g))
        ]
        numbers = (a, b, c, d, e, f, g, answer, other)
    return Item(texts[0], answer, texts[1], other, (d, e), numbers)


def _function(draw: _Draw, limit: int, short: bool) -> Item | None:
    a, b, c = draw(1, min(20, limit)), draw(1, limit), draw(1, limit)
    if b == c:
        return None
    lines = [[a * x + shift for x in (1, 2, 3, 4)] for shift in (b, c)]
    if short:
        texts = [f"f {y[0]} {y[1]} {y[2]} =" for y in lines]
    else:
        texts = [
            f"There is a function y=ax+b. Given x=1,2,3,4, y={y[0]},{y[1]},{y[2]},"
            for y in lines
        ]
    return Item(
        texts[0], lines[0][3], texts[1], lines[1][3], (a, b), (*lines[0], *lines[1])
    )


def _composition(draw: _Draw, limit: int, short: bool) -> Item | None:
    inner = "+" if draw(0, 1) else "-"
    outer = ("max", "min") if short else ("*", "/")
    outer = outer[draw(0, 1)]
    y, x = sorted((draw(1, limit), draw(2, limit)))
    bracket = OPERATORS[inner](x, y)
    if short:
        # The corruption must exercise both steps, so both operators flip.
        z = draw(1, 2 * limit)
        other = {"+": "-", "-": "+"}[inner], {"max": "min", "min": "max"}[outer]
        answers = [
            OPERATORS[o](OPERATORS[i](x, y), z) for i, o in ((inner, outer), other)
        ]
        return Item(
            f"{x} {inner} {y} {outer} {z} =",
            answers[0],
            f"{x} {other[0]} {y} {other[1]} {z} =",
            answers[1],
            (x, y, z),
            (x, y, z, *answers),
            outer,
        )
    if outer == "*":
        z, w = draw(2, limit), draw(2, limit)
    else:
        divisors = [k for k in range(2, bracket + 1) if bracket % k == 0]
        if len(divisors) < 2:
            return None
        z = divisors[draw(0, len(divisors) - 1)]
        w = divisors[draw(0, len(divisors) - 1)]
    if z == w:
        return None
    answers = [OPERATORS[outer](bracket, each) for each in (z, w)]
    texts = [f"{_SENTENCE}({x} {inner} {y}) {outer} {each} =" for each in (z, w)]
    return Item(
        texts[0],
        answers[0],
        texts[1],
        answers[1],
        (x, y, z),
        (x, y, z, w, *answers),
        outer,
    )


@dataclass(frozen=True)
class _Task:
    draw: Callable[[_Draw, int, bool], Item | None]
    limit: int  # the paper's largest operand
    count: int  # the paper's number of prompts
    num_kinds: int = 1  # operators that share the prompts evenly


TASKS = {
    "add_sub": _Task(_add_sub, 300, 5000, 2),
    "mul_div": _Task(_mul_div, 200, 2000, 2),
    "sequence": _Task(_sequence, 500, 5000),
    "lcm": _Task(_lcm, 100, 2500),
    "function": _Task(_function, 500, 5000),
    "composition": _Task(_composition, 100, 5000, 2),
}


def make_items(
    task: str,
    *,
    count: int | None = None,
    limit: int | None = None,
    short: bool = False,
    accept: Callable[[Item], bool] | None = None,
    generator: torch.Generator | None = None,
) -> list[Item]:
    """Draw distinct problems of one of the paper's tasks, half of each operator.

    Args:
        task: ``add_sub``, ``mul_div``, ``sequence``, ``lcm``, ``function`` or
            ``composition``.
        count: how many (default: the paper's).
        limit: the largest operand drawn (default: the paper's; 100 to 500 for
            ``add_sub``, 300 in the rebuttal's table).
        short: one token a number and a symbol, no sentence around it; the composed task
            then is ``x +- y max/min z`` and its twin flips both operators. Otherwise
            the paper's wording.
        accept: keep only items it says yes to, such as those whose numbers are single
            tokens.
        generator: where the draws come from.

    Returns:
        ``count`` items with distinct prompts.

    Raises:
        ValueError: an unknown task, sizes below 1, or a space that has fewer problems
            than asked for.

    Source:
        Templates, ranges and corruptions as in the authors' code, generated anew.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r}: allowed are {', '.join(TASKS)}")
    count = TASKS[task].count if count is None else count
    limit = TASKS[task].limit if limit is None else limit
    if count < 1 or limit < 2:
        raise ValueError(f"count={count}, limit={limit}: give at least 1 and 2")
    draw, seen, items = _Draw(generator), set(), []
    quota, kinds = -(-count // TASKS[task].num_kinds), Counter()
    for _ in range(200 * count):
        item = TASKS[task].draw(draw, limit, short)
        if item is None or item.prompt in seen or (accept and not accept(item)):
            continue
        if kinds[item.kind] >= quota:
            continue
        kinds[item.kind] += 1
        seen.add(item.prompt)
        items.append(item)
        if len(items) == count:
            return items
    raise ValueError(
        f"only {len(items)} of {count} distinct {task} problems with limit={limit} "
        "were found: ask for fewer or raise the limit"
    )


def is_held_out(operands: Sequence[int], share: float = 0.2) -> bool:
    """Whether a problem belongs to the test side: a fixed hash of its operands.

    The order of the operands does not matter, and no seed does: what was held out of
    one training is held out of the next.
    """
    text = ",".join(map(str, sorted(operands)))
    return zlib.crc32(text.encode()) % 1000 < 1000 * share


def split_items(items: Sequence[Item], share: float = 0.2) -> tuple[list, list]:
    """Training and held-out items; no problem's operands are on both sides."""
    sides: tuple[list, list] = ([], [])
    for item in items:
        sides[is_held_out(item.operands, share)].append(item)
    return sides
