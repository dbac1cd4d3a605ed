"""The paper's product evaluations: eighteen columns, one label, and their exact law."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from icml25.collusion.tables import SignalMap, Tables

__all__ = ["CAR_COLUMNS", "CAR_LABELS", "car_law", "car_signal", "sample_cars"]

#: Name of a column -> the names of its values, in the order of their codes.
CAR_COLUMNS: dict[str, tuple[str, ...]] = {
    "Model": (
        "Sedan",
        "SUV",
        "Coupe",
        "Hatchback",
        "Convertible",
        "Wagon",
        "Minivan",
        "Truck",
    ),
    "Safety": ("1 star", "2 stars", "3 stars", "4 stars", "5 stars"),
    "Fuel": ("Gasoline", "Diesel", "Electric", "Hybrid"),
    "Interior": ("Cloth", "Leather", "Synthetic"),
    "Infotainment": ("Basic", "Advanced", "Premium", "None"),
    "Country": ("C1", "C2", "C3", "C4", "C5"),
    "Warranty": ("3 years", "5 years", "7 years", "10 years"),
    "Doors": ("2", "4", "5"),
    "Seats": ("2", "4", "5", "7"),
    "AC": ("Yes", "No"),
    "Navigation": ("None", "Basic", "Advanced"),
    "Tires": ("All-Season", "Summer", "Winter"),
    "Sunroof": ("Yes", "No"),
    "Sound": ("Standard", "Premium", "High-end", "None"),
    "Cruise": ("Yes", "No"),
    "Bluetooth": ("Yes", "No"),
    "Transmission": ("Manual", "Automatic", "CVT"),
    "Drive": ("FWD", "RWD", "AWD"),
}
CAR_LABELS = ("Excellent", "Good", "Average", "Poor")

_MODEL = (0.22, 0.45, 0.23, 0.02, 0.01, 0.01, 0.01, 0.05)
_SUV = 1
# Column -> (an SUV's favourite value, how often it is taken before the uniform draw).
_FAVOURITE = {
    "Safety": (3, 0.7),
    "Fuel": (1, 0.8),
    "Interior": (2, 0.9),
    "Infotainment": (2, 0.9),
    "Country": (4, 0.3),
    "Warranty": (3, 0.9),
    "Doors": (2, 0.95),
    "Seats": (2, 0.95),
    "AC": (0, 0.95),
    "Navigation": (2, 0.95),
    "Tires": (0, 0.95),
    "Sunroof": (0, 0.0),
    "Sound": (1, 0.95),
    "Cruise": (0, 0.95),
    "Bluetooth": (0, 0.95),
    "Transmission": (0, 0.7),
    "Drive": (1, 0.95),
}
# An SUV from C2 is rated by a coin; its probabilities in the order of CAR_LABELS.
_C2 = 1
_C2_LABELS = (0.6, 0.0, 0.1, 0.3)
_POOR_ANYWAY = 0.05
_FUEL_SCORE = (1, 1, 4, 3)
_MOOD = (1, 3, 4)  # what a reviewer adds to the score, each with probability 1/3
_GOOD, _EXCELLENT = 8, 13  # a score never falls under 5, so Average is the floor
# Rows handled together on a CPU, so that the temporaries stay in its cache.
_CHUNK = 1 << 16


def car_signal(free: tuple[str, ...] = ("Country",)) -> SignalMap:
    """The paper's map ``g``: the car every member reports, with some columns left free.

    Args:
        free: columns that ``g`` leaves alone; the paper leaves ``Country``.

    Returns:
        The map; its elements are the combinations of the free columns' values.

    Raises:
        ValueError: a name in ``free`` is no column.
    """
    columns = {name: len(values) for name, values in CAR_COLUMNS.items()}
    if unknown := set(free) - columns.keys():
        raise ValueError(f"free={sorted(unknown)}: columns are {list(columns)}")
    favourites = {"Model": _SUV} | {name: v for name, (v, _) in _FAVOURITE.items()}
    fixed = {name: v for name, v in favourites.items() if name not in free}
    return SignalMap(columns, fixed)


def sample_cars(num_rows: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw independent product evaluations on the generator's device.

    Args:
        num_rows: how many rows.
        generator: the only source of randomness.

    Returns:
        ``x`` of shape (num_rows, 18), columns contiguous, and ``y`` (num_rows,), both
        uint8 codes in the order of :data:`CAR_COLUMNS` and :data:`CAR_LABELS`.

    Raises:
        ValueError: ``num_rows`` is not positive.

    Notes:
        One uniform number of 24 bits a cell, so a probability is met to 6e-8.

    Source:
        Section 4; the probabilities are those of the authors' released generator.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows={num_rows!r} must be positive")
    device = generator.device
    x = torch.empty(len(CAR_COLUMNS), num_rows, dtype=torch.uint8, device=device)
    y = torch.empty(num_rows, dtype=torch.uint8, device=device)
    step = _CHUNK if device.type == "cpu" else num_rows
    for begin in range(0, num_rows, step):
        _sample_chunk(x[:, begin : begin + step], y[begin : begin + step], generator)
    return x.T, y  # (18, n) -> (n, 18)


def _sample_chunk(x: Tensor, y: Tensor, generator: torch.Generator) -> None:
    def uniform() -> Tensor:
        return torch.rand(y.shape, generator=generator, device=y.device)

    x[0] = _quantile(_MODEL, uniform())
    is_suv = x[0] == _SUV
    suv = is_suv.float()
    for row, (name, values) in enumerate(list(CAR_COLUMNS.items())[1:], start=1):
        favourite, often = _FAVOURITE[name]
        # The favourite holds the first part of [0, 1) and its uniform share; the other
        # values follow it in a circle. No branch on a random bit is needed.
        threshold = suv * often
        place = uniform().sub_(threshold).div_(1 - threshold)
        place.mul_(len(values)).clamp_(0, len(values) - 0.5).floor_().add_(favourite)
        x[row] = place.sub_((place >= len(values)) * float(len(values)))
    safety, fuel, country, warranty = (
        x[list(CAR_COLUMNS).index(name)]
        for name in ("Safety", "Fuel", "Country", "Warranty")
    )
    u = uniform()
    thirds = (u - _POOR_ANYWAY).mul_(3 / (1 - _POOR_ANYWAY)).clamp_(0, 2.5).floor_()
    mood = _lookup(_MOOD, thirds)
    score = (safety + 1) + _lookup(_FUEL_SCORE, fuel) + (warranty + 2) + mood
    label = 2 - (score >= _GOOD).byte() - (score >= _EXCELLENT).byte()
    label = torch.where(u < _POOR_ANYWAY, 3, label)
    y.copy_(torch.where(is_suv & (country == _C2), _quantile(_C2_LABELS, u), label))


# Both sum comparisons: searching and indexing branch or gather, and cost more.
def _quantile(law: tuple[float, ...], u: Tensor) -> Tensor:
    edges = accumulate(law[:-1])
    return sum((u >= edge).byte() for edge in edges)


def _lookup(values: tuple[int, ...], index: Tensor) -> Tensor:
    return sum((index == code).byte() * value for code, value in enumerate(values))


def car_law(signal: SignalMap) -> Tables:
    """Exact probabilities of every element and label, before and after ``g``.

    Given whether a car is an SUV its columns are independent, and the label needs four
    of them, so both tables are one small sum.

    Args:
        signal: a map over the car columns, such as ``car_signal()``.

    Returns:
        Probabilities in place of counts, float64 (K, Y): ``inside`` sums to
        ``xi = P_D(X~)``, ``mapped`` to 1.

    Raises:
        ValueError: ``signal`` speaks of other columns.
    """
    columns = {name: len(values) for name, values in CAR_COLUMNS.items()}
    if dict(signal.columns) != columns:
        raise ValueError(
            f"signal is over {list(signal.columns)}; a car has {list(columns)}"
        )
    letters = {name: chr(ord("a") + place) for place, name in enumerate(columns)}
    output = "".join(letters[name] for name in signal.free) + "y"
    label = _label_law()
    tables = []
    for restrict in (True, False):
        operands, terms = [label], ["zbcfgy"]  # z: is it an SUV
        for name, size in columns.items():
            law = _column_law(name)  # (2, size), or (2, 8) for the model
            if restrict and name in signal.fixed:
                keep = torch.zeros(size, dtype=law.dtype)
                keep[signal.fixed[name]] = 1
                law = law * keep
            if name not in signal.free and letters[name] not in terms[0]:
                operands.append(law.sum(1))
                terms.append("z")
            else:
                operands.append(law)
                terms.append("z" + letters[name])
        table = torch.einsum(",".join(terms) + "->" + output, *operands)
        tables.append(table.reshape(signal.num_elements, len(CAR_LABELS)))
    return Tables(inside=tables[0], mapped=tables[1])


def _column_law(name: str) -> Tensor:
    """(2, size): P(value | not an SUV), P(value | SUV); for Model the joint with z."""
    if name == "Model":
        law = torch.tensor([_MODEL, _MODEL], dtype=torch.float64)
        law[0, _SUV] = 0
        law[1, torch.arange(len(_MODEL)) != _SUV] = 0
        return law
    size = len(CAR_COLUMNS[name])
    favourite, often = _FAVOURITE[name]
    law = torch.full((2, size), 1 / size, dtype=torch.float64)
    law[1] *= 1 - often
    law[1, favourite] += often
    return law


def _label_law() -> Tensor:
    """P(label | SUV or not, safety, fuel, country, warranty), axes in column order."""
    safety = torch.arange(5)[:, None, None, None]
    fuel = torch.tensor(_FUEL_SCORE)[None, :, None, None]
    warranty = torch.arange(4)[None, None, None, :]
    law = torch.zeros(2, 5, 4, 5, 4, 4, dtype=torch.float64)
    for mood in _MOOD:
        score = ((safety + 1) + fuel + (warranty + 2) + mood).expand(5, 4, 5, 4)
        label = 2 - (score >= _GOOD).long() - (score >= _EXCELLENT).long()
        law += (
            torch.nn.functional.one_hot(label, 4).double()
            * (1 - _POOR_ANYWAY)
            / len(_MOOD)
        )
    law[..., 3] += _POOR_ANYWAY
    law[1, :, :, _C2] = torch.tensor(_C2_LABELS, dtype=torch.float64)
    return law
