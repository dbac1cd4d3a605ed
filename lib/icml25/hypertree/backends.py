"""What answers the planner's questions: an exact expert, a noisy one, or a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


class BackendError(RuntimeError):
    """A backend could not answer."""


class ReplyError(BackendError):
    """A backend answered something that is none of the options."""


@dataclass(frozen=True)
class Question:
    """A prompt and the options one of which answers it.

    Attributes:
        prompt: what a model reads.
        options: at least one; the answers a model may give.
        answer: index of the right one, known to simulated experts only; models are
            never shown it.
        facts: how many facts are in view (the noise of a simulated expert grows
            with it).
    """

    prompt: str
    options: tuple[str, ...]
    answer: int = 0
    facts: int = 0

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError(f"options of {self.prompt[:60]!r} are empty")
        if not 0 <= self.answer < len(self.options):
            raise ValueError(
                f"answer={self.answer}: one of the {len(self.options)} options"
            )


@dataclass(frozen=True)
class Check:
    """A leaf's filter: which candidates satisfy one requirement.

    ``keep`` is the truth, known to simulated experts only.
    """

    requirement: str
    candidates: tuple[str, ...]
    keep: tuple[bool, ...]
    view: tuple[str, ...] = ()
    facts: int = 0

    def __post_init__(self) -> None:
        if len(self.keep) != len(self.candidates):
            raise ValueError(
                f"keep has {len(self.keep)} entries for "
                f"{len(self.candidates)} candidates"
            )


@dataclass
class Usage:
    """What a backend has done so far."""

    calls: int = 0
    questions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0


@dataclass
class Backend:
    """Base of all backends.

    A subclass answers ``choose`` (probabilities over the options of each question; one
    call a batch) and, if it can, ``generate``. ``keep`` and ``pick``, the two leaf
    decisions, are built on ``choose``; simulated experts override them, because their
    noise model is stated per decision.
    """

    usage: Usage = field(default_factory=Usage, kw_only=True)
    writes = False

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities over each question's options."""
        raise NotImplementedError(f"{type(self).__name__} does not choose")

    def generate(self, prompt: str, *, max_tokens: int = 256) -> str:
        """Free text; only backends with ``writes`` do it."""
        raise BackendError(f"{type(self).__name__} does not write text")

    def keep(self, checks: Sequence[Check]) -> list[list[bool]]:
        """Which candidates pass each check: yes/no questions, all in one batch."""
        questions = [
            Question(
                "\n".join(check.view) + f"\nQuestion: {check.requirement}\n"
                f"Candidate: {candidate}\nAnswer yes or no:",
                (" yes", " no"),
                0 if truth else 1,
                check.facts,
            )
            for check in checks
            for candidate, truth in zip(check.candidates, check.keep, strict=True)
        ]
        answers = iter(self.choose(questions) if questions else [])
        return [[(p := next(answers))[0] >= p[1] for _ in c.keep] for c in checks]

    def pick(self, questions: Sequence[Question]) -> list[int]:
        """The most probable option of each question (the first on a tie)."""
        probs = self.choose(questions) if questions else []
        return [max(range(len(p)), key=p.__getitem__) for p in probs]


@dataclass
class Exact(Backend):
    """Knows every answer: what the rules alone achieve."""

    def _count(self, questions: int) -> None:
        self.usage.calls += 1
        self.usage.questions += questions

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        self._count(len(questions))
        return [
            [float(i == q.answer) for i in range(len(q.options))] for q in questions
        ]

    def keep(self, checks: Sequence[Check]) -> list[list[bool]]:
        self._count(len(checks))
        return [list(check.keep) for check in checks]


@dataclass
class NoisyExpert(Exact):
    r"""A *simulated* expert whose errors grow with the facts in view.

    A decision with :math:`\ell` facts in view is wrong with probability

    .. math:: \varepsilon(\ell) = \min\{1/2,\; \varepsilon_0 + s\,\ell\} .

    A wrong check keeps every candidate; a wrong choice is uniform. Every decision uses
    two random numbers whatever its outcome, so that planners that meet the same
    decisions with the same seed differ through the facts in view only.

    Args:
        eps0: error with nothing in view, in [0, 1].
        slope: added error per fact, >= 0; 0 is the control.
        generator: where the random numbers come from.

    Raises:
        ValueError: ``eps0`` or ``slope`` out of range.
    """

    eps0: float = 0.02
    slope: float = 0.001
    generator: torch.Generator | None = None
    _draws: list[float] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.eps0 <= 1:
            raise ValueError(f"eps0={self.eps0!r}: a probability")
        if not 0 <= self.slope < float("inf"):
            raise ValueError(f"slope={self.slope!r}: a finite number >= 0")

    def error(self, facts: int) -> float:
        """:math:`\\varepsilon(\\ell)` at ``facts`` in view."""
        return min(0.5, self.eps0 + self.slope * facts)

    def _wrong(self, facts: int) -> tuple[bool, float]:
        if not self._draws:
            drawn = torch.rand(2048, generator=self.generator, dtype=torch.float64)
            self._draws = drawn.tolist()
        first, second = self._draws.pop(), self._draws.pop()
        return first < self.error(facts), second

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        self._count(len(questions))
        probs = []
        for q in questions:
            wrong, u = self._wrong(q.facts)
            chosen = int(u * len(q.options)) if wrong else q.answer
            probs.append([float(i == chosen) for i in range(len(q.options))])
        return probs

    def keep(self, checks: Sequence[Check]) -> list[list[bool]]:
        self._count(len(checks))
        return [
            [True] * len(c.keep) if self._wrong(c.facts)[0] else list(c.keep)
            for c in checks
        ]


def read_index(reply: str, num_options: int) -> int:
    """The option a written reply names, counted from 1 in the reply, 0 in the result.

    Raises:
        ReplyError: no number in the reply, or one outside ``1..num_options``.
    """
    match = re.search(r"-?\d+", reply)
    if not match:
        raise ReplyError(f"no option number in the reply {reply[:80]!r}")
    digits = match.group()
    # Python refuses to convert thousands of digits.
    number = int(digits) if len(digits) < 10 else 0
    if not 1 <= number <= num_options:
        raise ReplyError(f"option {digits[:12]} of {num_options} in {reply[:80]!r}")
    return number - 1


def read_children(reply: str) -> list[list[str]]:
    """Child sets of a written expansion: ``[a] [b]`` a set, ``;`` between sets.

    Raises:
        ReplyError: no bracketed child.
    """
    sets = [re.findall(r"\[([^\[\]]+)\]", part) for part in reply.split(";")]
    sets = [[name.strip() for name in each if name.strip()] for each in sets]
    sets = [each for each in sets if each]
    if not sets:
        raise ReplyError(f"no bracketed [task] in the reply {reply[:80]!r}")
    return sets
