"""Collusion: one sweep over the shares against pandas and a loop; drawing rows."""

from __future__ import annotations

import math
import time
from functools import partial

import numpy as np
import pandas as pd
import torch
from icml25.collusion import count_tables, figures, planting_certificate
from icml25.collusion.cars import (
    CAR_COLUMNS,
    CAR_LABELS,
    car_law,
    car_signal,
    sample_cars,
)
from icml25.collusion.tables import draw_tables, predict, relabelled, success

N, TESTS, TARGET = 20_000, 2_000, 3
SIZES = tuple(range(400, 8_001, 400))


def rows() -> list[dict]:
    """One row per comparison: seconds of ours and of the other on the same work."""
    config = figures.Planting(N, TESTS, sizes=SIZES)
    x, y = sample_cars(N + TESTS, generator=torch.Generator().manual_seed(0))
    frame = pd.DataFrame(
        {
            name: np.array(values)[x[:, place].numpy()]
            for place, (name, values) in enumerate(CAR_COLUMNS.items())
        }
    )
    frame["label"] = np.array(CAR_LABELS)[y.numpy()]
    ours_s, ours = _best(partial(_sweep, x, y, config))
    masks_s, masks = _best(partial(_with_pandas, frame), repeat=1)
    loop_s, loop = _best(partial(_with_a_loop, frame), repeat=1)
    for other in (masks, loop):
        np.testing.assert_allclose(ours, other, atol=1e-12)
    points = f"{len(SIZES)} points, {N + TESTS:,} rows"
    found = [
        _row(f"figure-1 sweep, {points}: a loop over rows", ours_s, loop_s, 0.01),
        _row(f"figure-1 sweep, {points}: pandas masks", ours_s, masks_s, 0.01),
    ]
    many = 300_000
    generator = torch.Generator().manual_seed(0)
    ours_s, _ = _best(partial(sample_cars, many, generator=generator))
    numpy_s, _ = _best(partial(_numpy_cars, many, np.random.default_rng(0)))
    speed = f"{many / ours_s / 1e6:.1f} million rows a CPU second"
    found.append(
        # No target: numpy's own draw has no label and no rounding of ours, so the ratio
        # says where the generator stands, not whether it is good.
        _row(f"{many:,} car rows: numpy, no label", ours_s, numpy_s, None, speed)
    )
    law, sizes = car_law(car_signal()), torch.full((20,), 50_000)
    ours_s, _ = _best(partial(draw_tables, law, sizes, generator=generator))
    count_s, _ = _best(partial(_draw_and_count, 20, 50_000, generator), repeat=1)
    found.append(
        _row("tables of 20 x 50,000 rows: drawn and counted", ours_s, count_s, 0.01)
    )
    return found


def _sweep(x, y, config):
    signal = car_signal()
    counts, test = figures.prefix_tables(signal, x, y, SIZES, config)
    members, rest = counts[:-1], counts[-1] - counts[:-1]
    bound = planting_certificate(
        members, target=TARGET, population_size=N, test_size=TESTS
    ).value
    label = predict(rest.inside + relabelled(members, TARGET), tie_order=(1, 2, 3, 0))
    return np.array([bound.tolist(), success(label == TARGET, test).tolist()])


def _setting():
    signal = car_signal()
    fixed = {name: CAR_COLUMNS[name][code] for name, code in signal.fixed.items()}
    events = 2 + 2 * 5 + 2 * 5 * 4
    log_level = math.log(events / 0.05)
    return fixed, lambda k: math.sqrt(log_level / 2 / k)


def _bound(share, n, q, delta, radius):
    """The certificate from per-country numbers."""
    slack = 2 * radius(n) + 2 * radius(N - n)
    mass = sum(
        q[c]
        for c in CAR_COLUMNS["Country"]
        if share * (q[c] - 2 * radius(n)) - (1 - share) * (delta[c] + slack) > 0
    )
    return mass - radius(n) - radius(TESTS)


def _with_pandas(frame: pd.DataFrame) -> np.ndarray:
    """Per point: masks over string columns, crosstabs, arg-max."""
    fixed, radius = _setting()
    target, countries = CAR_LABELS[TARGET], list(CAR_COLUMNS["Country"])
    names = list(fixed)
    test = frame.iloc[N:]["Country"].value_counts(normalize=True)
    bounds, reached = [], []
    for n in SIZES:
        members, others = frame.iloc[:n], frame.iloc[n:N]
        tables = []
        for group in (members, others):
            inside = group[(group[names] == pd.Series(fixed)).all(axis=1)]
            table = pd.crosstab(inside["Country"], inside["label"])
            tables.append(
                table.reindex(index=countries, columns=list(CAR_LABELS), fill_value=0)
            )
        q = members["Country"].value_counts(normalize=True)
        honest = tables[0] / n
        delta = honest.drop(columns=target).max(axis=1) - honest[target]
        bounds.append(_bound(n / N, n, q, delta, radius))
        training = tables[1]
        training[target] += (q * n).round().astype(int)
        # The released order among equally frequent labels.
        label = training[["Good", "Average", "Poor", "Excellent"]].idxmax(axis=1)
        reached.append(sum(test[c] for c in countries if label[c] == target))
    return np.array([bounds, reached])


def _with_a_loop(frame: pd.DataFrame) -> np.ndarray:
    """Per point: one pass over the rows in plain Python."""
    fixed, radius = _setting()
    target, countries = CAR_LABELS[TARGET], CAR_COLUMNS["Country"]
    records = frame.to_dict("records")
    bounds, reached = [], []
    for n in SIZES:
        tables = [
            {
                c: dict.fromkeys(("Good", "Average", "Poor", "Excellent"), 0)
                for c in countries
            }
            for _ in range(2)
        ]
        q = dict.fromkeys(countries, 0)
        for place, row in enumerate(records[:N]):
            if all(row[name] == value for name, value in fixed.items()):
                tables[place >= n][row["Country"]][row["label"]] += 1
            if place < n:
                q[row["Country"]] += 1
        honest = tables[0]
        delta = {
            c: (max(v for y, v in honest[c].items() if y != target) - honest[c][target])
            / n
            for c in countries
        }
        share = {c: q[c] / n for c in countries}
        bounds.append(_bound(n / N, n, share, delta, radius))
        hit = 0
        for c in countries:
            tables[1][c][target] += q[c]
        for row in records[N:]:
            votes = tables[1][row["Country"]]
            hit += max(votes, key=votes.get) == target
        reached.append(hit / TESTS)
    return np.array([bounds, reached])


def _numpy_cars(count: int, rng: np.random.Generator) -> np.ndarray:
    """The same columns with numpy's own choice, without the label."""
    from icml25.collusion import cars

    x = np.empty((count, len(CAR_COLUMNS)), dtype=np.uint8)
    x[:, 0] = rng.choice(8, count, p=cars._MODEL)
    is_suv = x[:, 0] == 1
    for place, (name, values) in enumerate(list(CAR_COLUMNS.items())[1:], 1):
        favourite, often = cars._FAVOURITE[name]
        draw = rng.integers(len(values), size=count)
        keep = is_suv & (rng.random(count) < often)
        x[:, place] = np.where(keep, favourite, draw)
    return x


def _draw_and_count(repetitions: int, size: int, generator: torch.Generator) -> None:
    for _ in range(repetitions):
        x, y = sample_cars(size, generator=generator)
        count_tables(car_signal(), x, y, num_labels=4)


def _best(work, repeat: int = 9):
    times = []
    for _ in range(repeat):
        begin = time.process_time()  # of one thread: other work does not count
        result = work()
        times.append(time.process_time() - begin)
    return min(times), result


def _row(name, ours_s, other_s, target, note=""):
    return {
        "name": name,
        "ours_s": ours_s,
        "other_s": other_s,
        "ratio": ours_s / other_s,
        "target": target,
        "note": note,
    }
