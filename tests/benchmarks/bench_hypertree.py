"""Leaves scored in batches, prompt tokens, and the travel evaluator's look-ups."""

from __future__ import annotations

import re
import time

import torch
from icml25.hypertree import Exact, HyperTree, evaluate, mini_tasks, plan_travel
from icml25.hypertree.backends import Question
from icml25.hypertree.modelruns import best_s, prompt_lengths
from icml25.hypertree.premise import house_rule_quiz
from icml25.hypertree.smollm import INSTALL, SmolLM2, SmolLM2Backend, weights_path
from icml25.hypertree.tree import Child

NOMINAL = 1000.0  # tokens a second, to write counts of tokens as times


def words(text: str) -> int:
    """Words and signs, which need no tokenizer."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def pandas_lookups(tables, plans) -> int:
    """The look-ups of one evaluation the way the official code does them."""
    found = 0
    for plan in plans:
        for day in plan:
            for key in ("breakfast", "lunch", "dinner", "attraction", "accommodation"):
                text = day[key].rstrip(";")
                if text == "-":
                    continue
                name, city = (part.strip() for part in text.rsplit(",", 1))
                kind = key if key in ("attraction", "accommodation") else "meal"
                frame = tables[kind]
                # Once for the sandbox check, once for the cost.
                for _ in range(1 if kind == "attraction" else 2):
                    named = frame["name"].str.contains(re.escape(name))
                    found += len(frame[named & (frame["city"] == city)]) > 0
    return found


def evaluator_row() -> dict:
    import pandas as pd

    tasks, sandbox = mini_tasks(18, generator=torch.Generator().manual_seed(0))
    plans = [plan_travel(task, Exact()).plan for task in tasks]

    def frame(table, key):
        rows = [(r[key], city) for city, each in table.items() for r in each]
        return pd.DataFrame(rows, columns=["name", "city"])

    tables = {
        "meal": frame(sandbox.restaurants, "Name"),
        "attraction": frame(sandbox.attractions, "Name"),
        "accommodation": frame(sandbox.hotels, "NAME"),
    }

    def ours() -> None:
        for task, plan in zip(tasks, plans, strict=True):
            if not evaluate(task, plan, sandbox).passed:
                raise AssertionError("a right plan failed")

    fast = best_s(ours)
    slow = best_s(lambda: pandas_lookups(tables, plans))
    return {
        "name": "hypertree: evaluator, 18 plans",
        "ours_s": fast,
        "other_s": slow,
        "ratio": fast / slow,
        "target": 0.2,
        "note": f"{len(tasks) / fast:,.0f} plans/s, all 13 checks; other: the "
        "official way's pandas look-ups alone",
    }


def token_row() -> dict:
    tasks, _ = mini_tasks(9, generator=torch.Generator().manual_seed(0))
    ours, longest = prompt_lengths(tasks, "hypertree", words)
    other, chain_longest = prompt_lengths(tasks, "chain", words)
    return {
        "name": "hypertree: prompt tokens a task, at 1,000 tokens/s",
        "ours_s": ours / NOMINAL,
        "other_s": other / NOMINAL,
        "ratio": ours / other,
        "target": 0.5,
        "note": f"{ours:,.0f} against a chain's {other:,.0f} (words and signs of "
        f"the leaf prompts); longest prompt {longest:,} against {chain_longest:,}",
    }


def chains_row() -> dict:
    tree = HyperTree("t", "root")
    for u in tree.add_branch(0, [Child("t", str(i)) for i in range(7)]):
        for b in range(4):
            tree.add_branch(u, [Child("t", f"{u}-{b}")], weight=1.0 + (b * u) % 5)
    fast = best_s(lambda: tree.best_chains(5))

    def listed():
        chains = sorted(tree.hyperchains(), key=lambda c: -c.weight)
        return [c.weight for c in chains[:5]]

    slow = best_s(listed, 2)
    if [c.weight for c in tree.best_chains(5)] != listed():
        raise AssertionError("best_chains differs from the full list")
    return {
        "name": "hypertree: 5 best of 16,384 hyperchains",
        "ours_s": fast,
        "other_s": slow,
        "ratio": fast / slow,
        "target": 0.05,
        "note": "other: list them all and sort",
    }


def leaf_row() -> dict:
    """A level of leaves that share examples: one batch against one by one."""
    model = SmolLM2()
    quiz = house_rule_quiz(12, 3, shots=8, generator=torch.Generator().manual_seed(0))
    questions = [
        Question(quiz.prefix + q.prompt, q.options, q.answer) for q in quiz.questions
    ]
    backend = SmolLM2Backend(model)
    # Forward passes take seconds: one timed run of the slow way is enough.
    begin = time.perf_counter()
    alone = [backend.choose([question])[0] for question in questions]
    slow = time.perf_counter() - begin
    together = backend.choose(questions)
    fast = best_s(lambda: backend.choose(questions), 2)
    gap = (torch.tensor(together) - torch.tensor(alone)).abs().max()
    if gap > 1e-3:
        raise AssertionError(f"batched scores are off by {gap:.1e}")
    return {
        "name": "hypertree: 12 leaves of one level, shared prefix",
        "ours_s": fast,
        "other_s": slow,
        "ratio": fast / slow,
        "target": 0.25,
        "note": f"{12 / fast:.1f} leaves/s against {12 / slow:.1f} one at a time; "
        f"same to {gap:.0e}",
    }


def rows() -> list[dict]:
    """One row a comparison: ours / other, and the largest acceptable ratio."""
    table = [evaluator_row(), token_row(), chains_row()]
    if weights_path() is None:
        print(f"    leaves of the embedded model: skipped, its weights need {INSTALL}")
    else:
        table.append(leaf_row())
    return table


if __name__ == "__main__":
    for row in rows():
        print(row)
