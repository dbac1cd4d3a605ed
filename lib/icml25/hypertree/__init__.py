r"""HyperTree Planning: divide a task into sets of sub-tasks, then solve the leaves.

A hypertree's branch leads to a *set* of children that must all be solved; several
branches at a node are alternatives. The planner grows one from a library of rules
(selection, expansion), keeps one hyperchain (decision), and solves its leaves, each
with its own facts in view only (self-guided planning). A backend answers its
questions: ``Exact``, the simulated ``NoisyExpert``, the embedded ``SmolLM2Backend`` or
any ``OpenAICompatible`` endpoint.

Everything else lives in the submodules: ``tree`` and ``planner`` (Algorithm 1),
``backends``, ``endpoint`` and ``smollm`` (who answers), ``travel``, ``verify``,
``travelrules``, ``solve`` and ``minitasks`` (trips), ``blocksworld``, ``schedule``
(city trips and calendars), ``theory``, ``premise``, ``harness``, ``modelruns``.

Example:
    >>> from icml25.hypertree import Exact, evaluate, mini_tasks, plan_travel
    >>> tasks, sandbox = mini_tasks(1)
    >>> evaluate(tasks[0], plan_travel(tasks[0], Exact()).plan, sandbox).passed
    True

Source: Gui et al., HyperTree Planning, ICML 2025.
"""

from icml25.hypertree.backends import Exact
from icml25.hypertree.endpoint import OpenAICompatible
from icml25.hypertree.experiments import EXPERIMENTS
from icml25.hypertree.minitasks import mini_tasks
from icml25.hypertree.planner import HTPlanner
from icml25.hypertree.solve import plan_travel
from icml25.hypertree.tree import HyperTree
from icml25.hypertree.verify import evaluate

__all__ = [
    "EXPERIMENTS",
    "Exact",
    "HTPlanner",
    "HyperTree",
    "OpenAICompatible",
    "evaluate",
    "mini_tasks",
    "plan_travel",
]
