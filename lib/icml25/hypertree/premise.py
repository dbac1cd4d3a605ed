"""Is the premise true in a real model? One check, with more and more facts in view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from icml25.hypertree.backends import Backend, Question
from icml25.hypertree.minitasks import HOUSE_RULES

RULES = (*HOUSE_RULES, "candles", "bicycles", "loud music")
NUM_FORBIDDEN = 3  # rules of every hotel
_DRAWS = 4  # draws for each different check that is wanted


@dataclass(frozen=True)
class Quiz:
    """Balanced yes/no questions about one hotel among ``num_facts`` in view."""

    num_facts: int
    prefix: str
    questions: tuple[Question, ...]


def _block(rules: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        f"Hotel {i + 1} forbids: {', '.join(each)}." for i, each in enumerate(rules)
    )


def house_rule_quiz(
    num_questions: int,
    num_facts: int,
    *,
    shots: int = 4,
    generator: torch.Generator | None = None,
) -> Quiz:
    """Questions "does hotel i forbid pets?" with ``num_facts`` hotels' rules in view.

    Half of the answers are yes. Every hotel forbids three of eight rules, drawn before
    the question is: neither what is in view nor the rule that is asked for tells the
    answer, only both together do. (Were each rule forbidden by a coin, hotels with the
    answer yes would list more rules, and counting would beat chance.) The ``shots``
    examples have the same number of facts, and are the same for every question.

    Raises:
        ValueError: a count below 1, or an odd number of questions.
    """
    if num_questions < 2 or num_questions % 2 or num_facts < 1 or shots < 0:
        raise ValueError(
            f"num_questions={num_questions}, num_facts={num_facts}, shots={shots}: "
            "an even number >= 2, >= 1, >= 0"
        )

    def example(answer: bool) -> str:
        order = torch.rand(num_facts, len(RULES), generator=generator).argsort(1)
        forbidden = order[:, :NUM_FORBIDDEN].sort(1).values.tolist()
        asked = int(torch.randint(num_facts, (), generator=generator))
        inside, outside = order[asked].split(
            [NUM_FORBIDDEN, len(RULES) - NUM_FORBIDDEN]
        )
        among = inside if answer else outside
        rule = RULES[among[torch.randint(len(among), (), generator=generator)]]
        rules = [[RULES[i] for i in each] for each in forbidden]
        return f"{_block(rules)}\nDoes hotel {asked + 1} forbid {rule}? Answer:"

    answers = (" yes", " no")
    prefix = "".join(f"{example(i % 2 == 0)}{answers[i % 2]}\n\n" for i in range(shots))
    questions = tuple(
        Question(example(i % 2 == 0), answers, i % 2, num_facts)
        for i in range(num_questions)
    )
    return Quiz(num_facts, prefix, questions)


def disjoint_quizzes(
    num_train: int,
    num_test: int,
    num_facts: int,
    *,
    shots: int = 4,
    generator: torch.Generator | None = None,
) -> tuple[Quiz, Quiz]:
    """Two balanced quizzes with the same examples and no check in common.

    Every check occurs once, and none is among the examples. With one hotel in view
    there are only 168 different checks to affirm, so that independent draws overlap.

    Raises:
        ValueError: a count that is not even or below 2, or more checks than there are.
    """
    for name, value in (("num_train", num_train), ("num_test", num_test)):
        if value < 2 or value % 2:
            raise ValueError(f"{name}={value}: an even number >= 2")
    need = num_train + num_test
    pool = house_rule_quiz(_DRAWS * need, num_facts, shots=shots, generator=generator)
    once = {q.prompt: q for q in pool.questions if q.prompt not in pool.prefix}
    parts: tuple[list[Question], list[Question]] = ([], [])
    for answer in (0, 1):
        checks = [q for q in once.values() if q.answer == answer]
        if len(checks) < need // 2:
            raise ValueError(
                f"num_train={num_train}, num_test={num_test}: with {num_facts} in view "
                f"there are {2 * len(checks)} different checks"
            )
        # Rare checks are drawn last: shuffled, they fall to both parts alike.
        order = torch.randperm(len(checks), generator=generator).tolist()
        parts[0].extend(checks[i] for i in order[: num_train // 2])
        parts[1].extend(checks[i] for i in order[num_train // 2 : need // 2])
    train, test = (Quiz(num_facts, pool.prefix, tuple(part)) for part in parts)
    shared = {q.prompt for q in train.questions} & {q.prompt for q in test.questions}
    if shared:
        raise AssertionError(f"{len(shared)} checks are in both quizzes")
    return train, test


def auc(score: torch.Tensor, positive: torch.Tensor) -> float:
    r"""Area under the ROC curve: P(a positive scores above a negative), ties half.

    Raises:
        ValueError: one class is missing, or a score is not a number.
    """
    if score.isnan().any():
        raise ValueError("score holds NaN")
    yes, no = score[positive], score[~positive]
    if not len(yes) or not len(no):
        raise ValueError("positive: both classes are needed")
    gap = yes[:, None] - no[None, :]
    return float(((gap > 0).double() + 0.5 * (gap == 0).double()).mean())


def auc_interval(
    score: torch.Tensor,
    positive: torch.Tensor,
    *,
    num_bootstrap: int = 500,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """95% bootstrap interval of the AUC, resampling within each class."""
    yes, no = score[positive], score[~positive]
    i = torch.randint(len(yes), (num_bootstrap, len(yes)), generator=generator)
    j = torch.randint(len(no), (num_bootstrap, len(no)), generator=generator)
    gap = yes[i][:, :, None] - no[j][:, None, :]
    values = ((gap > 0).double() + 0.5 * (gap == 0).double()).mean((1, 2)).sort().values
    low, high = int(0.025 * num_bootstrap), int(0.975 * num_bootstrap)
    return float(values[low]), float(values[min(high, num_bootstrap - 1)])


def log_odds(backend: Backend, quiz: Quiz) -> torch.Tensor:
    """log p(yes) - log p(no) of each question, (num_questions,)."""
    prompts = [
        Question(quiz.prefix + q.prompt, q.options, q.answer, q.facts)
        for q in quiz.questions
    ]
    prob = torch.tensor(backend.choose(prompts), dtype=torch.float64).clamp_min(1e-30)
    return prob[:, 0].log() - prob[:, 1].log()


def is_yes(quiz: Quiz) -> torch.Tensor:
    """(num_questions,) true where the right answer is yes."""
    return torch.tensor([q.answer == 0 for q in quiz.questions])


def fit_probe(
    states: torch.Tensor, positive: torch.Tensor, *, ridge: float = 10.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""A ridge classifier on hidden states: least squares to :math:`\pm 1`.

    Args:
        states: (N, D) features.
        positive: (N,) labels.
        ridge: penalty, > 0.

    Returns:
        Weights (D,), and the mean and scale (D,) that standardise the features.

    Raises:
        ValueError: shapes that do not match, or ``ridge`` not positive.

    Notes:
        Solved in the dual, :math:`O(N^2 D)`: there are fewer labels than features.
    """
    if states.ndim != 2 or len(states) != len(positive) or not ridge > 0:
        raise ValueError(
            f"states {tuple(states.shape)}, positive {tuple(positive.shape)}, "
            f"ridge={ridge}: (N, D), (N,), > 0"
        )
    x = states.double()
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-6)
    x = (x - mean) / scale
    y = positive.double() * 2 - 1
    gram = x @ x.T + ridge * x.shape[1] * torch.eye(len(x), dtype=x.dtype) / len(x)
    return x.T @ torch.linalg.solve(gram, y - y.mean()), mean, scale


def probe_scores(probe: Any, states: torch.Tensor) -> torch.Tensor:
    """(N,) scores of a fitted probe."""
    weight, mean, scale = probe
    return ((states.double() - mean) / scale) @ weight
