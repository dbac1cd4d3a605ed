"""Lower bounds on a collective's success, from the members' own rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from icml25.collusion import concentration as bounds
from icml25.collusion.tables import Tables, predict

__all__ = [
    "Certificate",
    "erasing_certificate",
    "naive_unplanting_certificate",
    "planting_certificate",
    "second_label",
    "suboptimality_threshold",
    "unplanting_certificate",
]

_CONCENTRATIONS = ("hoeffding", "exact")


@dataclass(frozen=True)
class Certificate:
    """A lower bound that holds with probability 1 - delta, and what it is made of.

    At each element ``margin = push - resistance - slack``; an element is certified when
    its margin is positive.

    Attributes:
        value: (...), the bound on the success.
        certified: (..., K) bool.
        push: (..., K), share of all training rows that members put at the element.
        resistance: (..., K), the lead of the strongest rival label among the others.
        slack: (..., K), what the collective cannot know: all radii and the eps-term.
        mass: (...), share of rows that ``g`` sends to certified elements.
        delta_tilde: level of each single event of the union bound.
    """

    value: Tensor
    certified: Tensor
    push: Tensor
    resistance: Tensor
    slack: Tensor
    mass: Tensor
    delta_tilde: float

    @property
    def margin(self) -> Tensor:
        """(..., K): push - resistance - slack."""
        return self.push - self.resistance - self.slack


def suboptimality_threshold(eps: float, model: str = "contamination") -> float:
    r"""The lead a label needs, so that an eps-suboptimal platform must predict it.

    :math:`\epsilon/(1-\epsilon)` when the platform learns from
    :math:`(1-\epsilon)P + \epsilon Q`; :math:`2\epsilon` when it learns from any
    :math:`P'` with :math:`\mathrm{TV}(P, P') \le \epsilon`.

    Args:
        eps: in [0, 1).
        model: ``"contamination"`` (the paper's number) or ``"tv"`` (the paper's words).

    Raises:
        ValueError: ``eps`` outside [0, 1), or another model.
    """
    if not 0 <= eps < 1:
        raise ValueError(f"eps={eps!r} must be in [0, 1)")
    if model not in ("contamination", "tv"):
        raise ValueError(f"model={model!r}: allowed are 'contamination' and 'tv'")
    return 2 * eps if model == "tv" else eps / (1 - eps)


def planting_certificate(
    collective: Tables,
    *,
    population_size: int,
    test_size: int,
    target: int,
    features_only: bool = False,
    delta: float = 0.05,
    eps: float = 0.0,
    concentration: str = "hoeffding",
    model: str = "contamination",
) -> Certificate:
    r"""Bound the share of test rows that the platform will label ``target`` after g.

    .. math:: \hat S \ge \hat P\{x : \tfrac nN (q_x - 2R_n) - \tfrac{N-n}N
        (\Delta_x + 2R_n + 2R_{N-n}) > \tfrac{\epsilon}{1-\epsilon}\} - R_n - R_{test}

    Args:
        collective: tables (..., K, Y) of the members' own, honest rows.
        population_size: N, members and others.
        test_size: number of test rows.
        target: the planted label y*.
        features_only: members may not change their label; those who hold another one
            leave the signal set.
        delta: the bound may fail with this probability.
        eps: suboptimality of the platform's learner.
        concentration: ``"hoeffding"`` (the paper's) or ``"exact"``: Clopper-Pearson
            from the members to the population, Bernstein back.
        model: see :func:`suboptimality_threshold`.

    Returns:
        A certificate, batched like ``collective``.

    Raises:
        ValueError: n = 0, n >= N, test_size < 1, delta outside (0, 1), eps outside
            [0, 1), an unknown target, concentration or model, or tables that count
            less than nothing, or more rows inside the signal set than in all.

    Source:
        Theorems 3.3 and 3.5. ``"exact"`` is not in the paper.
    """
    _check_label(target, collective, "target")
    _check_tables(collective, "collective")
    counts = collective.inside.double()
    mapped = collective.mapped.double()
    elements, labels = counts.shape[-2:]
    pushed = mapped[..., target] if features_only else mapped.sum(-1)
    wanted = torch.full(counts.shape[:-1], target, device=counts.device)
    return _certificate(
        counts=counts,
        wanted=wanted,
        rivals=~_one_hot(wanted, labels),
        counted=collective.size.double(),
        pushed=pushed,
        members=collective.size.double(),
        outer=mapped.sum(-1),
        population_size=population_size,
        test_size=test_size,
        events=2 + 2 * elements + 2 * elements * labels,
        delta=delta,
        threshold=suboptimality_threshold(eps, model),
        concentration=concentration,
    )


def unplanting_certificate(
    estimation: Tables,
    rest_of_collective: Tables,
    *,
    population_size: int,
    test_size: int,
    avoid: int,
    delta: float = 0.05,
    eps: float = 0.0,
    concentration: str = "hoeffding",
    model: str = "contamination",
) -> Certificate:
    """Bound the share of test rows that will *not* be labelled ``avoid`` after g.

    The members first look at ``estimation`` to choose, element by element, the label
    that is second to ``avoid`` (:func:`second_label`); all of them then report it.

    Args:
        estimation: tables of the n_e rows that choose the labels.
        rest_of_collective: tables of the other n - n_e rows; they bound the resistance.
        avoid: the label y* to move away from.
        population_size, test_size, delta, eps, concentration, model: see
            :func:`planting_certificate`.

    Returns:
        A certificate, batched like the two tables together.

    Raises:
        ValueError: as :func:`planting_certificate`, n_e = 0 or n_e = n, and tables that
            do not broadcast.

    Notes:
        With ``"hoeffding"`` the outer frequency is over all n rows, as printed. The
        labels were chosen from n_e of them, so ``"exact"`` takes the other n - n_e.

    Source:
        Theorem 3.7.
    """
    _check_label(avoid, rest_of_collective, "avoid")
    _check_tables(estimation, "estimation")
    _check_tables(rest_of_collective, "rest_of_collective")
    if bool((estimation.size <= 0).any()):
        raise ValueError("estimation has no rows: n_e must be at least 1")
    sizes = estimation.mapped.shape, rest_of_collective.mapped.shape
    try:
        shape = torch.broadcast_shapes(*sizes)
    except RuntimeError as error:
        raise ValueError(
            f"estimation {tuple(sizes[0])} and rest_of_collective {tuple(sizes[1])}: "
            "(..., K, Y) must be alike but for leading axes of 1"
        ) from error
    estimation, rest_of_collective = (
        Tables(each.inside.expand(shape), each.mapped.expand(shape))
        for each in (estimation, rest_of_collective)
    )
    both = estimation.mapped.double() + rest_of_collective.mapped.double()
    counts = rest_of_collective.inside.double()
    elements, labels = counts.shape[-2:]
    wanted = second_label(estimation, avoid)
    rivals = torch.zeros_like(counts, dtype=torch.bool)
    rivals[..., avoid] = True
    independent = rest_of_collective.mapped.double().sum(-1)
    return _certificate(
        counts=counts,
        wanted=wanted,
        rivals=rivals,
        counted=rest_of_collective.size.double(),
        pushed=both.sum(-1),
        members=both.sum((-2, -1)),
        outer=independent if concentration == "exact" else both.sum(-1),
        population_size=population_size,
        test_size=test_size,
        events=2 + 6 * elements,
        delta=delta,
        threshold=suboptimality_threshold(eps, model),
        concentration=concentration,
    )


def second_label(estimation: Tables, avoid: int) -> Tensor:
    """The most frequent label other than ``avoid`` at every element, (..., K).

    An element without such a row in ``estimation`` takes the label that is second in
    the signal set as a whole.
    """
    counts = estimation.inside.clone()
    counts[..., avoid] = -1
    overall = counts.sum(-2, keepdim=True)
    overall[..., avoid] = -math.inf if overall.is_floating_point() else -(2**62)
    unseen = counts.amax(-1) <= 0
    return torch.where(unseen, overall.argmax(-1), counts.argmax(-1))


def naive_unplanting_certificate(
    collective: Tables, *, avoid: int, delta: float = 0.05, **settings
) -> tuple[Certificate, Tensor]:
    """The plain alternative: plant one label everywhere, the best of the Y - 1 others.

    Choosing the best of several bounds is safe only if each holds, so each is computed
    at level delta / (Y - 1).

    Args:
        collective: tables (..., K, Y) of all members.
        avoid: the label to move away from.
        delta, settings: see :func:`planting_certificate`.

    Returns:
        The best certificate of each batch entry, and its label (...).
    """
    _check_label(avoid, collective, "avoid")
    others = [y for y in range(collective.mapped.shape[-1]) if y != avoid]
    each = [
        planting_certificate(
            collective, target=label, delta=delta / len(others), **settings
        )
        for label in others
    ]
    best = torch.stack([c.value for c in each]).argmax(0)

    def choose(name: str) -> Tensor:
        values = torch.stack([getattr(c, name) for c in each])
        index = best.reshape(1, *best.shape, *[1] * (values.ndim - 1 - best.ndim))
        return values.take_along_dim(index, 0)[0]

    names = ("value", "certified", "push", "resistance", "slack", "mass")
    chosen = Certificate(
        **{name: choose(name) for name in names}, delta_tilde=each[0].delta_tilde
    )
    return chosen, torch.tensor(others, device=best.device)[best]


def erasing_certificate(
    counts: Tensor,
    image: Tensor,
    *,
    margin: float,
    population_size: int,
    test_size: int,
    delta: float = 0.05,
    eps: float = 0.0,
    concentration: str = "hoeffding",
    model: str = "contamination",
) -> Certificate:
    """Bound the share of test rows x with f(g(x)) = f(x): g's information is erased.

    Members keep their features and report the most frequent label at g(x). Where none
    of them has seen g(x), they report their own, and x is not certified.

    Args:
        counts: the members' rows by feature value and label, (..., X, Y).
        image: ``image[x]`` is g(x), (X,); idempotent.
        margin: eta, by how much the most frequent label leads at every x in the
            population: an assumption, the members cannot see it.
        population_size, test_size, delta, eps, concentration, model: see
            :func:`planting_certificate`.

    Returns:
        A certificate over all X feature values.

    Raises:
        ValueError: as :func:`planting_certificate`; an image that is not idempotent;
            a margin outside (0, 1); n or N - n under the theorem's 2 log(1/d~) / eta^2.

    Notes:
        ``"exact"`` shares delta among $|X| Y$ more events than the theorem: those of
        the modes. With eps > 0 an x counts only if g(x) is certified too: the platform
        must also keep the label at g(x). At eps = 0 the margin eta sees to that.

    Source:
        Theorem 3.9.
    """
    if counts.ndim < 2 or not bool((counts >= 0).all()):
        raise ValueError(
            f"counts {tuple(counts.shape)} must be (..., X, Y) and nowhere negative"
        )
    values, labels = counts.shape[-2:]
    if image.shape != (values,) or image.is_floating_point():
        raise ValueError(
            f"image {tuple(image.shape)}, {image.dtype}: need ({values},) integers"
        )
    if not bool(((image >= 0) & (image < values)).all()):
        raise ValueError(f"image {image.tolist()} leaves the alphabet 0..{values - 1}")
    if not torch.equal(image[image], image):
        raise ValueError(f"image {image.tolist()} must satisfy g(g(x)) = g(x)")
    if not 0 < margin < 1:
        raise ValueError(f"margin={margin!r} must be in (0, 1)")
    # The modes at g(x) need Hoeffding's events. Bernstein's do not imply them, so
    # "exact" pays for them beside its own.
    groups = 4 if concentration == "exact" else 3
    events = 2 + 2 * values + groups * values * labels
    log_level = log_level_of(events, delta)
    counts = counts.double()
    size = counts.sum((-2, -1))
    need = 2 * log_level / margin**2
    if bool((torch.minimum(size, population_size - size) < need).any()):
        raise ValueError(
            f"n={_texts(size)} of N={population_size}: the erasing theorem needs "
            f"n and N - n of at least {math.ceil(need)} at margin {margin:g}"
        )
    wanted = predict(counts)[..., image]
    # Where g(x) is unknown nobody pushes, and every label is a rival.
    is_known = wanted >= 0
    wanted = wanted.clamp(min=0)
    threshold = suboptimality_threshold(eps, model)
    return _certificate(
        counts=counts,
        wanted=wanted,
        rivals=~(_one_hot(wanted, labels) & is_known[..., None]),
        counted=size,
        pushed=counts.sum(-1) * is_known,
        members=size,
        outer=counts.sum(-1),
        population_size=population_size,
        test_size=test_size,
        events=events,
        delta=delta,
        threshold=threshold,
        concentration=concentration,
        also=image if threshold > 0 else None,
    )


def _certificate(
    *,
    counts: Tensor,
    counted: Tensor,
    wanted: Tensor,
    rivals: Tensor,
    pushed: Tensor,
    members: Tensor,
    outer: Tensor,
    population_size: int,
    test_size: int,
    events: int,
    delta: float,
    threshold: float,
    concentration: str,
    also: Tensor | None = None,
) -> Certificate:
    """All theorems in one: they differ in who pushes, who resists, who is counted.

    ``counts`` (..., K, Y) are ``counted`` honest rows, ``wanted`` (..., K) the label
    written, ``rivals`` (..., K, Y) the labels to beat, ``pushed`` (..., K) the members
    that write it, ``outer`` (..., K) the rows behind the outer frequency.
    """
    if concentration not in _CONCENTRATIONS:
        raise ValueError(f"concentration={concentration!r}: use {_CONCENTRATIONS}")
    check_sizes(counted, members, population_size, test_size)
    log_level = log_level_of(events, delta)
    share = (members / population_size)[..., None]
    others = population_size - members[..., None]
    push = share * pushed / members[..., None]
    rate = counts / counted[..., None, None]
    resistance = (1 - share) * _lead(rate, rate, wanted, rivals)
    if concentration == "hoeffding":
        r_members, r_counted, r_others = (
            bounds.hoeffding(size, log_level)
            for size in (members[..., None], counted[..., None], others)
        )
        slack = 2 * share * r_members + 2 * (1 - share) * (r_counted + r_others)
        slack = slack + threshold
    else:
        low_push = bounds.carry_lower(
            pushed, members[..., None], members[..., None], log_level
        )
        sizes = counted[..., None, None], others[..., None]
        low = bounds.carry_lower(counts, *sizes, log_level)
        high = bounds.carry_upper(counts, *sizes, log_level)
        lead = _lead(low, high, wanted, rivals)
        slack = push - resistance - (share * low_push - (1 - share) * lead - threshold)
    slack = slack.expand(push.shape)
    certified = push - resistance - slack > 0
    if also is not None:
        certified = certified & certified[..., also]
    rows, outer_size = (outer * certified).sum(-1), outer.sum(-1)
    mass = rows / outer_size
    if concentration == "hoeffding":
        test = torch.full_like(mass, test_size)
        value = mass - r_members.squeeze(-1) - bounds.hoeffding(test, log_level)
    else:
        value = bounds.carry_lower(rows, outer_size, test_size, log_level)
    return Certificate(
        value=value,
        certified=certified,
        push=push,
        resistance=resistance,
        slack=slack,
        mass=mass,
        delta_tilde=math.exp(-log_level),
    )


def log_level_of(events: int, delta: float) -> float:
    """log(1 / delta~): stays finite however many events share delta."""
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta!r} must be in (0, 1)")
    return math.log(events) - math.log(delta)


def _lead(low: Tensor, high: Tensor, wanted: Tensor, rivals: Tensor) -> Tensor:
    """Delta: the strongest rival's (upper) rate less the wanted label's (lower) one."""
    strongest = high.masked_fill(~rivals, -math.inf).amax(-1)
    return strongest - low.gather(-1, wanted[..., None]).squeeze(-1)


def _texts(sizes: Tensor) -> str:
    return ", ".join(f"{size:.10g}" for size in sizes.unique().tolist())


def _one_hot(labels: Tensor, num_labels: int) -> Tensor:
    return torch.nn.functional.one_hot(labels, num_labels).bool()


def _check_label(label: int, tables: Tables, name: str) -> None:
    num_labels = tables.mapped.shape[-1]
    if isinstance(label, bool) or not isinstance(label, Integral):
        raise ValueError(f"{name}={label!r}: give one label, 0..{num_labels - 1}")
    if not 0 <= label < num_labels:
        raise ValueError(f"{name}={label} is no label; labels are 0..{num_labels - 1}")


def _check_tables(tables: Tables, name: str) -> None:
    inside, mapped = tables.inside, tables.mapped
    # A law's tables are sums in different orders: equal up to rounding.
    if not bool(((inside >= 0) & (inside <= mapped * (1 + 1e-9))).all()):
        raise ValueError(
            f"{name}: need 0 <= inside <= mapped at every element and label, got "
            f"inside from {inside.min().item():g} and mapped - inside from "
            f"{(mapped - inside).min().item():g}"
        )


def check_sizes(
    counted: Tensor, members: Tensor, population_size: int, test_size: int
) -> None:
    # Written so that a NaN is refused as well.
    if not bool(((members > 0) & (counted > 0)).all()):
        raise ValueError("the collective has no rows to count: n (and n - n_e) >= 1")
    if not bool((members < population_size).all()):
        raise ValueError(
            f"n={members.max().item():g} must be less than population_size="
            f"{population_size}"
        )
    if not test_size >= 1:
        raise ValueError(f"test_size={test_size!r} must be at least 1")
