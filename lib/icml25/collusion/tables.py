"""What a collective and a platform need to know of the rows: two small count tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

__all__ = [
    "SignalMap",
    "Tables",
    "count_tables",
    "draw_tables",
    "feature_only",
    "predict",
    "relabelled",
    "success",
]

_MAX_CELLS = 100_000_000


class SignalMap:
    """The map ``g``: some columns are set to fixed values, the others left alone.

    Its image, the signal set, holds ``K`` elements: the combinations of the free
    columns' values. ``g`` is idempotent.

    Args:
        columns: name of a column -> how many values it has.
        fixed: name of a column -> the code that ``g`` writes there.

    Raises:
        ValueError: no column, a size that is no positive integer, an unknown column in
            ``fixed``, a value that is no code or lies outside the column's alphabet, or
            a signal set too large for a table.

    Example:
        >>> g = SignalMap({"colour": 3, "size": 2}, fixed={"colour": 2})
        >>> g.num_elements, g.free
        (2, ('size',))
    """

    def __init__(self, columns: Mapping[str, int], fixed: Mapping[str, int]) -> None:
        if not columns:
            raise ValueError("columns is empty: a row needs at least one column")
        for name, size in columns.items():
            if not isinstance(size, Integral) or size < 1:
                raise ValueError(
                    f"columns[{name!r}]={size!r}: give its number of values, 1 or more"
                )
        for name, value in fixed.items():
            if name not in columns:
                raise ValueError(
                    f"unknown column {name!r} in fixed; columns: {list(columns)}"
                )
            if not isinstance(value, Integral):
                raise ValueError(
                    f"fixed[{name!r}]={value!r}: give the value's code, "
                    f"0..{columns[name] - 1}"
                )
            if not 0 <= value < columns[name]:
                raise ValueError(
                    f"the signal leaves the alphabet: {name}={value}, allowed are "
                    f"0..{columns[name] - 1}"
                )
        self.columns = dict(columns)
        self.fixed = dict(fixed)
        self.free = tuple(name for name in columns if name not in fixed)
        self.num_elements = math.prod(columns[name] for name in self.free)
        if self.num_elements > _MAX_CELLS:
            raise ValueError(
                f"the signal set has {self.num_elements:,} elements, more than "
                f"{_MAX_CELLS:,}: fix more columns than {list(fixed)}"
            )

    def __repr__(self) -> str:
        return f"SignalMap(free={self.free}, K={self.num_elements})"

    def element(self, x: Tensor) -> Tensor:
        """Number of the element that ``g`` sends a row to: (n, C) codes -> (n,) int64.

        Mixed radix in the order of the free columns.
        """
        self.check(x)
        names = list(self.columns)
        code = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        for name in self.free:
            code.mul_(self.columns[name]).add_(x[:, names.index(name)])
        return code

    def is_inside(self, x: Tensor) -> Tensor:
        """Whether a row is in the signal set already: (n, C) codes -> (n,) bool."""
        self.check(x)
        inside = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        for place, name in enumerate(self.columns):
            if name in self.fixed:
                inside &= x[:, place] == self.fixed[name]
        return inside

    def apply(self, x: Tensor) -> Tensor:
        """The rows ``g(x)``: a changed copy of (n, C) codes."""
        self.check(x)
        moved = x.clone()
        for place, name in enumerate(self.columns):
            if name in self.fixed:
                moved[:, place] = self.fixed[name]
        return moved

    def rows(self) -> Tensor:
        """The signal set itself: (K, C) int64 codes, row k is element k."""
        columns = [
            torch.arange(size)
            if name not in self.fixed
            else torch.tensor([self.fixed[name]])
            for name, size in self.columns.items()
        ]
        return torch.cartesian_prod(*columns).reshape(self.num_elements, -1)

    def check(self, x: Tensor) -> None:
        """Raise a ValueError unless ``x`` has one column per name."""
        if x.ndim != 2 or x.shape[1] != len(self.columns):
            raise ValueError(
                f"x has shape {tuple(x.shape)}; need (rows, {len(self.columns)})"
            )


@dataclass(frozen=True)
class Tables:
    """Counts of a set of rows at the elements of a signal set; leading axes are free.

    A law is the same thing with probabilities in place of counts.

    Attributes:
        inside: (..., K, Y), rows that are in the signal set as they are.
        mapped: (..., K, Y), all rows, each at the element that ``g`` sends it to.
    """

    inside: Tensor
    mapped: Tensor

    def __post_init__(self) -> None:
        if self.inside.shape != self.mapped.shape or self.inside.ndim < 2:
            raise ValueError(
                f"inside {tuple(self.inside.shape)} and mapped "
                f"{tuple(self.mapped.shape)} must both be (..., K, Y)"
            )

    @property
    def size(self) -> Tensor:
        """Number of rows, (...)."""
        return self.mapped.sum((-2, -1))

    @property
    def mass(self) -> Tensor:
        """Share of the rows that ``g`` sends to each element, (..., K)."""
        return self.mapped.sum(-1).double() / self.size[..., None]

    def __add__(self, other: Tables) -> Tables:
        return Tables(self.inside + other.inside, self.mapped + other.mapped)

    def __sub__(self, other: Tables) -> Tables:
        return Tables(self.inside - other.inside, self.mapped - other.mapped)

    def __mul__(self, rows: Tensor | float) -> Tables:
        """Expected counts of ``rows`` draws from a law; (J,) rows -> (J, K, Y).

        Whole counts times whole numbers stay whole; times fractions they are float64.
        """
        dtype = torch.result_type(self.mapped, torch.as_tensor(rows))
        if dtype.is_floating_point and not self.mapped.is_floating_point():
            dtype = torch.float64
        rows = torch.as_tensor(rows, dtype=dtype, device=self.mapped.device)
        rows = rows[..., None, None]
        return Tables(self.inside * rows, self.mapped * rows)

    def __getitem__(self, index: int | slice | Tensor | None) -> Tables:
        return Tables(self.inside[index], self.mapped[index])


def count_tables(
    signal: SignalMap,
    x: Tensor,
    y: Tensor,
    *,
    num_labels: int,
    at: Sequence[int] | None = None,
) -> Tables:
    """Count the rows, or every prefix of them that a sweep asks for, in one pass.

    Args:
        signal: the map ``g``.
        x: (n, C) codes.
        y: (n,) labels in 0..num_labels-1.
        num_labels: Y.
        at: lengths of the prefixes to count, rising; ``None`` counts all rows.

    Returns:
        int64 tables (K, Y), or (len(at), K, Y).

    Raises:
        ValueError: no rows, shapes that differ, codes or labels that are no integers or
            outside their alphabet, prefixes that do not rise or exceed the data.

    Notes:
        One ``bincount`` over (segment, element, label), then a cumulative sum over
        segments: time O(n + len(at) K Y), whatever the number of sweep points.
    """
    if x.ndim != 2 or y.shape != x.shape[:1] or not len(y):
        raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)}: need (n, C), (n,)")
    signal.check(x)
    for name, codes in (("x", x), ("y", y)):
        if codes.is_floating_point() or codes.is_complex():
            raise ValueError(f"{name} has dtype {codes.dtype}: need integer codes")
    ends = [len(y)] if at is None else [int(end) for end in at]
    if not ends or ends[0] < 0 or ends[-1] > len(y) or ends != sorted(set(ends)):
        raise ValueError(f"at must rise from 0 or more to at most {len(y)}, got {at}")
    x, y = x[: ends[-1]], y[: ends[-1]]
    _check_codes(signal, x, y, num_labels)
    lengths = torch.tensor(ends, device=x.device).diff(
        prepend=torch.zeros(1, dtype=torch.int64, device=x.device)
    )
    shape = (len(ends), signal.num_elements, num_labels)
    if math.prod(shape) > _MAX_CELLS:
        raise ValueError(f"tables of shape {shape} are too large: fix more columns")
    code = torch.arange(len(ends), device=x.device).repeat_interleave(lengths)
    code.mul_(shape[1]).add_(signal.element(x)).mul_(num_labels).add_(y)

    def prefixes(codes: Tensor) -> Tensor:
        return codes.bincount(minlength=math.prod(shape)).view(shape).cumsum(0)

    tables = Tables(prefixes(code[signal.is_inside(x)]), prefixes(code))
    return tables[0] if at is None else tables


def _check_codes(signal: SignalMap, x: Tensor, y: Tensor, num_labels: int) -> None:
    if not len(y):
        return
    checks = [("y", y, num_labels, "labels are")]
    for place, (name, size) in enumerate(signal.columns.items()):
        checks.append((f"column {name!r}", x[:, place], size, "its alphabet is"))
    for what, codes, size, allowed in checks:
        least, largest = (int(end) for end in codes.aminmax())
        if largest >= size or least < 0:
            wrong = largest if largest >= size else least
            raise ValueError(f"{what} holds {wrong}; {allowed} 0..{size - 1}")


def draw_tables(
    law: Tables, sizes: Tensor | int, *, generator: torch.Generator
) -> Tables:
    """Draw the tables of random rows without drawing the rows.

    The tables of n rows are a multinomial over 2KY cells (in the signal set or not,
    element, label), drawn as a chain of binomials: exact, and independent of n in cost.

    Args:
        law: probabilities (K, Y), ``mapped`` summing to one.
        sizes: numbers of rows, any shape (...): one independent draw each.
        generator: its device is used.

    Returns:
        Counts (..., K, Y), float64 (whole numbers).

    Raises:
        ValueError: ``law`` is no law, or a size is negative.
    """
    outside = law.mapped - law.inside
    total = float(law.mapped.sum())
    # Written so that a NaN is refused as well.
    is_law = abs(total - 1) <= 1e-9 and float(outside.min()) >= -1e-12
    if law.mapped.ndim != 2 or not is_law or float(law.inside.min()) < 0:
        raise ValueError(
            "law must be (K, Y) with 0 <= inside <= mapped, mapped summing to 1; got "
            f"{tuple(law.mapped.shape)} with sum {total:g}"
        )
    device = generator.device
    left = torch.as_tensor(sizes, dtype=torch.float64, device=device).clone()
    if bool((left < 0).any()):
        raise ValueError(f"sizes={sizes!r} must not be negative")
    prob = torch.cat([law.inside.flatten(), outside.flatten()]).double().clamp_(min=0)
    remaining = prob.flip(0).cumsum(0).flip(0)  # mass of this cell and of all after it
    cells = []
    for p, tail in zip(prob.tolist(), remaining.tolist(), strict=True):
        share = min(p / tail, 1.0) if tail > 0 else 0.0
        count = torch.binomial(left, torch.full_like(left, share), generator=generator)
        cells.append(count)
        left = left - count
    drawn = torch.stack(cells, -1).unflatten(-1, (2, *law.mapped.shape))
    inside, outside = drawn.unbind(-3)  # (..., 2, K, Y) -> two of (..., K, Y)
    return Tables(inside, inside + outside)


def relabelled(collective: Tables, labels: Tensor | int) -> Tensor:
    """What the strategy ``h(x, y) = (g(x), label of g(x))`` adds to the training table.

    Args:
        collective: the members' own rows, (..., K, Y).
        labels: the label written at each element, (..., K) or one for all.

    Returns:
        Counts on the signal set, (..., K, Y).
    """
    rows = collective.mapped.sum(-1)
    labels = torch.as_tensor(labels, device=rows.device).expand(rows.shape)
    return torch.zeros_like(collective.mapped).scatter_(
        -1, labels[..., None], rows[..., None]
    )


def feature_only(collective: Tables, target: int) -> Tensor:
    """What the feature-only strategy adds: members with label ``target`` move to g(x).

    The others move out of the signal set and keep their label, so they add nothing.
    """
    added = torch.zeros_like(collective.mapped)
    added[..., target] = collective.mapped[..., target]
    return added


def predict(table: Tensor, *, tie_order: Sequence[int] | None = None) -> Tensor:
    """The platform's label at every element: the most frequent one in training.

    Args:
        table: training counts on the signal set, (..., K, Y).
        tie_order: all labels; of equally frequent ones the first here wins (default:
            the smallest code).

    Returns:
        Labels (..., K), int64; -1 where the platform has never seen the element.
    """
    num_labels = table.shape[-1]
    order = list(range(num_labels)) if tie_order is None else list(tie_order)
    if sorted(order) != list(range(num_labels)):
        raise ValueError(f"tie_order={order} must hold each of 0..{num_labels - 1}")
    ranked = torch.tensor(order, device=table.device)
    label = ranked[table[..., ranked].argmax(-1)]
    return label.masked_fill(table.sum(-1) == 0, -1)


def success(cracked: Tensor, test: Tables) -> Tensor:
    """Share of the test rows that ``g`` sends to a cracked element.

    Args:
        cracked: (..., K) bool, such as ``predict(table) == target``.
        test: tables of the test rows; their labels are not used.

    Raises:
        ValueError: there is no test row.
    """
    if bool((test.size == 0).any()):
        raise ValueError("test has no rows")
    return (test.mapped.sum(-1) * cracked).sum(-1).double() / test.size
