"""Experiments that need the embedded model: premise, leaf head, plans, speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from icml25.core import make_generator, progress
from icml25.hypertree.backends import Backend, Check, Exact, Question
from icml25.hypertree.minitasks import mini_tasks
from icml25.hypertree.premise import (
    Quiz,
    auc,
    auc_interval,
    disjoint_quizzes,
    fit_probe,
    house_rule_quiz,
    is_yes,
    probe_scores,
)
from icml25.hypertree.smollm import SmolLM2, SmolLM2Backend
from icml25.hypertree.solve import plan_travel
from icml25.hypertree.travel import Task
from icml25.hypertree.verify import evaluate


@dataclass(frozen=True)
class PremiseConfig:
    facts: tuple[int, ...] = (1, 3, 9)  # hotels in view
    num_questions: int = 40
    shots: int = 4
    num_bootstrap: int = 500
    dtype: str = "bfloat16"  # or "float32", several times slower on a CPU


def premise(
    config: PremiseConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """E5: a real 135M model answers one check with more and more facts in view."""
    model = _model(config.dtype, device)
    rows = []
    for facts in progress(config.facts, "facts in view"):
        generator = make_generator(seed)
        quiz = house_rule_quiz(
            config.num_questions, facts, shots=config.shots, generator=generator
        )
        score, yes = _hidden(model, quiz) @ _lean(model), is_yes(quiz)
        low, high = auc_interval(
            score, yes, num_bootstrap=config.num_bootstrap, generator=generator
        )
        rows.append(
            {
                "facts": facts,
                "auc": auc(score, yes),
                "low": low,
                "high": high,
                "raw_accuracy": _accuracy(score > 0, yes),
                "prompt_tokens": sum(
                    len(model.encode(quiz.prefix + q.prompt)) for q in quiz.questions
                ),
            }
        )
    return {"num_questions": config.num_questions, "rows": rows}


def _model(dtype: str, device: torch.device) -> SmolLM2:
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype={dtype!r}: 'bfloat16' or 'float32'")
    return SmolLM2(device=device, dtype=getattr(torch, dtype))


def _accuracy(said: torch.Tensor, truth: torch.Tensor) -> float:
    return float((said == truth).double().mean())


@dataclass(frozen=True)
class ProbeConfig:
    facts: tuple[int, ...] = (1, 9)  # hotels in view
    num_train: int = 80  # labelled checks
    num_test: int = 76  # other checks
    ridge: float = 10.0
    dtype: str = "bfloat16"  # or "float32", several times slower on a CPU


def probe(config: ProbeConfig, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Three ways to read the same check: as said, with a moved threshold, by a head.

    ``raw`` takes the more probable of " yes" and " no". ``shifted`` moves that
    threshold to the median of the labelled checks, half of which are yes: all that is
    learnt is the model's lean. ``head`` is a linear head trained on the last hidden
    states. All three answer the same test checks, none of which was labelled.
    """
    model = _model(config.dtype, device)
    lean = _lean(model)
    rows = []
    for facts in progress(config.facts, "facts in view"):
        generator = make_generator(seed)
        train, test = disjoint_quizzes(
            config.num_train, config.num_test, facts, generator=generator
        )
        known, new = (_hidden(model, quiz) for quiz in (train, test))
        fitted = fit_probe(known, is_yes(train), ridge=config.ridge)
        odds, score, truth = new @ lean, probe_scores(fitted, new), is_yes(test)
        row: dict[str, Any] = {"facts": facts}
        for name, values in (("raw", odds), ("head", score)):
            row[f"{name}_auc"] = auc(values, truth)
            row[f"{name}_interval"] = auc_interval(values, truth, generator=generator)
            row[f"{name}_accuracy"] = _accuracy(values > 0, truth)
        middle = (known @ lean).median()
        row["shifted_accuracy"] = _accuracy(odds > middle, truth)
        rows.append(row)
    return {
        "num_train": config.num_train,
        "num_test": config.num_test,
        "rows": rows,
    }


def _lean(model: SmolLM2) -> torch.Tensor:
    """(dim,): its product with a last state is the log-odds of " yes" and " no"."""
    yes, no = (model.head[model.encode(word)[0]] for word in (" yes", " no"))
    return (yes.double() - no.double()).cpu()


def _hidden(model: SmolLM2, quiz: Quiz) -> torch.Tensor:
    """(num_questions, dim), float64: the state that the answer is read from."""
    prompts = [quiz.prefix + q.prompt for q in quiz.questions]
    return model.last_hidden(prompts).double().cpu()


@dataclass
class Graded(Backend):
    """Passes questions on to a model and notes how often it is right.

    Args:
        inner: the model; the right answers of the questions stay hidden from it.
    """

    inner: Backend
    _checks: list[tuple[bool, bool]] = field(default_factory=list, repr=False)
    _picks: list[tuple[bool, float]] = field(default_factory=list, repr=False)

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        probs = self.inner.choose(questions)
        for q, p in zip(questions, probs, strict=True):
            if q.options == (" yes", " no"):
                self._checks.append((q.answer == 0, p[0] >= p[1]))
            elif len(q.options) > 1:
                best = max(range(len(p)), key=p.__getitem__)
                self._picks.append((best == q.answer, 1 / len(q.options)))
        return probs

    def grades(self) -> dict[str, float]:
        """Counts and shares; ``balanced`` is the mean of both classes' recalls.

        Raises:
            ValueError: no check with answer yes, none with no, or no choice so far.
        """
        yes = [said for truth, said in self._checks if truth]
        no = [not said for truth, said in self._checks if not truth]
        if not (yes and no and self._picks):
            raise ValueError(
                f"{len(yes)} checks to affirm, {len(no)} to deny, {len(self._picks)} "
                "choices: at least one of each is needed"
            )
        return {
            "checks": len(self._checks),
            "said_yes": mean(said for _, said in self._checks),
            "balanced": (mean(yes) + mean(no)) / 2,
            "picks": len(self._picks),
            "picks_right": mean(right for right, _ in self._picks),
            "picks_by_chance": mean(chance for _, chance in self._picks),
        }


@dataclass(frozen=True)
class SmallPlansConfig:
    num_tasks: int = 3  # trips whose decisions the model takes
    days: int = 3  # length of these trips: 3, 5 or 7
    dtype: str = "bfloat16"  # or "float32", several times slower on a CPU
    planners: tuple[str, ...] = ("chain", "hypertree")


def small_plans(
    config: SmallPlansConfig, *, device: torch.device, seed: int
) -> dict[str, Any]:
    """The embedded model as a planner, end to end, on generated trips."""
    model = _model(config.dtype, device)
    # Trips of the three lengths take turns.
    tasks, sandbox = mini_tasks(3 * config.num_tasks, generator=make_generator(seed))
    tasks = [task for task in tasks if task.days == config.days]
    if not tasks:
        raise ValueError(f"days={config.days}, num_tasks={config.num_tasks}: no trip")
    decided = []
    for planner in config.planners:
        graded = Graded(SmolLM2Backend(model))
        plans = [
            plan_travel(task, graded, planner=planner)
            for task in progress(tasks, planner)
        ]
        reports = [
            evaluate(task, solution.plan, sandbox)
            for task, solution in zip(tasks, plans, strict=True)
        ]
        decided.append(
            {
                "planner": planner,
                "passed": sum(report.passed for report in reports),
                "left_open": sum(bool(solution.infeasible) for solution in plans),
                "commonsense": mean(
                    mean(report.commonsense.values()) for report in reports
                ),
                "prompt_tokens": graded.inner.usage.prompt_tokens,
                **graded.grades(),
            }
        )
    return {"num_tasks": len(tasks), "decided": decided}


@dataclass
class Counting(Exact):
    """Knows every answer; adds up the lengths of the prompts that pose the decisions.

    Args:
        length: tokens of a text.
    """

    length: Callable[[str], int]
    total: int = 0
    longest: int = 0

    def _read(self, *texts: str) -> None:
        count = self.length("\n".join(texts))
        self.total += count
        self.longest = max(self.longest, count)

    def keep(self, checks: Sequence[Check]) -> list[list[bool]]:
        for check in checks:
            self._read(*check.view, check.requirement, *check.candidates)
        return super().keep(checks)

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        for question in questions:
            self._read(question.prompt, *question.options)
        return super().choose(questions)


def prompt_lengths(
    tasks: Sequence[Task], planner: str, length: Callable[[str], int]
) -> tuple[float, int]:
    """Mean tokens a task of all prompts of its decisions, and the longest prompt."""
    backend = Counting(length)
    for task in tasks:
        plan_travel(task, backend, planner=planner)
    return backend.total / len(tasks), backend.longest


def best_s(
    fn: Callable[[], object],
    repeats: int = 3,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Shortest of several runs in seconds: the one that was disturbed least."""
    times = []
    for _ in range(repeats):
        begin = clock()
        fn()
        times.append(clock() - begin)
    return min(times)


@dataclass(frozen=True)
class SpeedConfig:
    num_leaves: int = 12  # leaves of one level
    num_facts: int = 3
    shots: int = 8  # worked examples that all of them share
    num_tasks: int = 9  # trips whose prompts and plans are counted
    repeats: int = 1  # timed runs, the best of which counts
    dtype: str = "bfloat16"  # or "float32", several times slower on a CPU


def speed(config: SpeedConfig, *, device: torch.device, seed: int) -> dict[str, Any]:
    """Leaves a second batched and one by one, prompt tokens a trip, plans checked.

    On a CPU, seconds are processor time: with one thread what an idle machine needs.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    model = _model(config.dtype, device)
    quiz = house_rule_quiz(
        config.num_leaves,
        config.num_facts,
        shots=config.shots,
        generator=make_generator(seed),
    )
    prompts = [quiz.prefix + q.prompt for q in quiz.questions]
    options = [q.options for q in quiz.questions]
    together = best_s(
        lambda: model.log_probs(prompts, options), config.repeats, clock=clock
    )
    alone = best_s(
        lambda: [
            model.log_probs([p], [o]) for p, o in zip(prompts, options, strict=True)
        ],
        config.repeats,
        clock=clock,
    )
    tasks, sandbox = mini_tasks(config.num_tasks, generator=make_generator(seed))
    tokens = {
        planner: prompt_lengths(tasks, planner, lambda text: len(model.encode(text)))
        for planner in ("chain", "hypertree")
    }
    plans = [plan_travel(task, Exact()).plan for task in tasks]
    check = best_s(
        lambda: [evaluate(t, p, sandbox) for t, p in zip(tasks, plans, strict=True)],
        config.repeats,
        clock=clock,
    )
    return {
        "leaves_per_s": config.num_leaves / together,
        "leaves_per_s_one_by_one": config.num_leaves / alone,
        "batch_gain": alone / together,
        "tokens_per_trip": {name: total for name, (total, _) in tokens.items()},
        "longest_prompt": {name: most for name, (_, most) in tokens.items()},
        "plans_checked_per_s": len(tasks) / check,
    }
