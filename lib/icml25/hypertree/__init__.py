r"""HyperTree Planning: divide a task into sets of sub-tasks, then solve the leaves.

A hypertree's branch leads to a *set* of children that must all be solved; several
branches at a node are alternatives. The planner grows one from a library of rules
(selection, expansion), keeps one hyperchain (decision), and solves its leaves, each
with its own facts in view only (self-guided planning). A backend answers its
questions: ``Exact``, the simulated ``NoisyExpert``, the embedded ``SmolLM2Backend`` or
any ``OpenAICompatible`` endpoint.

Submodules: ``travel`` (checks of TravelPlanner), ``solve`` (travel leaves and the
three planners), ``blocksworld``, ``schedule`` (trips and calendars), ``minitasks``,
``theory``, ``premise``, ``harness``, ``smollm``.

Example:
    >>> from icml25.hypertree import Exact, evaluate, mini_tasks, plan_travel
    >>> tasks, sandbox = mini_tasks(1)
    >>> evaluate(tasks[0], plan_travel(tasks[0], Exact()).plan, sandbox).passed
    True

Source: Gui et al., HyperTree Planning, ICML 2025.
"""

from icml25.hypertree.backends import (
    Backend,
    BackendError,
    Exact,
    NoisyExpert,
    Question,
    ReplyError,
)
from icml25.hypertree.endpoint import EndpointError, OpenAICompatible
from icml25.hypertree.experiments import EXPERIMENTS
from icml25.hypertree.minitasks import mini_tasks
from icml25.hypertree.planner import HTPlanner, Outline, Step
from icml25.hypertree.smollm import SmolLM2, SmolLM2Backend
from icml25.hypertree.solve import plan_travel, travel_outline, travel_rules
from icml25.hypertree.travel import Report, Sandbox, Task, evaluate, load_tasks
from icml25.hypertree.tree import (
    Child,
    Hyperchain,
    HyperTree,
    Node,
    Rule,
    RuleCycle,
    RuleError,
    RuleLibrary,
)

__all__ = [
    "EXPERIMENTS",
    "Backend",
    "BackendError",
    "Child",
    "EndpointError",
    "Exact",
    "HTPlanner",
    "HyperTree",
    "Hyperchain",
    "Node",
    "NoisyExpert",
    "OpenAICompatible",
    "Outline",
    "Question",
    "ReplyError",
    "Report",
    "Rule",
    "RuleCycle",
    "RuleError",
    "RuleLibrary",
    "Sandbox",
    "SmolLM2",
    "SmolLM2Backend",
    "Step",
    "Task",
    "evaluate",
    "load_tasks",
    "mini_tasks",
    "plan_travel",
    "travel_outline",
    "travel_rules",
]
