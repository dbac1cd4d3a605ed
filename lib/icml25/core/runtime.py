"""Where an experiment runs: scale, device, seed, progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

SCALES = ("laptop", "paper")
CHAPTERS = (
    "supervision",
    "golore",
    "speechssm",
    "tar",
    "pcrl",
    "timefilter",
    "hsdte",
    "collusion",
    "id2",
    "hypertree",
    "circuits",
)


def repository() -> Path:
    """The clone this package was installed from (it holds the ledger and the book).

    Raises:
        FileNotFoundError: the package was installed without its repository.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "book" / "claims.yml").is_file():
        raise FileNotFoundError(
            f"no book/claims.yml under {root}: this needs a clone of the repository, "
            "installed with `pip install -e .`"
        )
    return root


def scale_name() -> str:
    """The scale that the environment asks for, ``"laptop"`` unless told otherwise.

    Raises:
        ValueError: ``ICML25_SCALE`` is neither ``laptop`` nor ``paper``.
    """
    name = os.environ.get("ICML25_SCALE") or "laptop"
    if name not in SCALES:
        raise ValueError(f"ICML25_SCALE={name!r}: allowed are 'laptop' and 'paper'")
    return name


def scale(laptop: Any, paper: Any) -> Any:
    """Choose between a chapter's two configurations by ``ICML25_SCALE``.

    Args:
        laptop: the configuration that runs in seconds on two CPU cores.
        paper: the paper's own configuration.

    Returns:
        One of the two, unchanged.

    Raises:
        ValueError: ``ICML25_SCALE`` is neither ``laptop`` nor ``paper``.
    """
    return paper if scale_name() == "paper" else laptop


def device(name: str | None = None) -> torch.device:
    """The device to run on: ``name`` if given, else a GPU if any, else the CPU.

    A Mac's GPU (``mps``) is taken only by name: it has no float64, which closed forms
    and checks in most chapters need.

    Raises:
        ValueError: ``name`` is no device, or a device this machine does not have.
    """
    import torch

    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type == "mps":
            return torch.device("cpu")
        return accelerator
    try:
        chosen = torch.device(name)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={name!r} cannot be used here: {error}") from error
    return chosen


def make_accelerator(
    device: str | torch.device,
    *,
    accumulate: int = 1,
    precision: str | None = None,
) -> Accelerator:
    """An ``Accelerator`` of accelerate for this device, whatever was trained before.

    Args:
        device: a CPU or an accelerator; accelerate picks the index.
        accumulate: batches of one step, all processes together: each passes over its
            share, at least one, kept as ``gradient_accumulation_steps``.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``; default: what the launcher says.
    """
    import torch
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from torch import distributed

    # accelerate keeps the first device and precision for as long as Python runs. Joined
    # processes keep their devices; alone, each training names its own.
    if not (distributed.is_available() and distributed.is_initialized()):
        AcceleratorState._reset_state(reset_partial_state=True)
    is_cpu = torch.device(device).type == "cpu"
    share = max(1, accumulate // PartialState(cpu=is_cpu).num_processes)
    return Accelerator(
        gradient_accumulation_steps=share, mixed_precision=precision, cpu=is_cpu
    )


def leave_processes() -> None:
    """Leave the processes that ``torchrun`` or ``accelerate launch`` joined, if any.

    PyTorch asks for it before a process ends.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def end_process(status: int) -> NoReturn:
    """End this process; one of several ends at once, without Python's own teardown.

    A background thread that asks for Python while it is being torn down aborts the
    process. Alone, that is a message; among several, the launcher then stops the others
    and calls a run that had done all its work a failure.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def make_generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A seeded random generator; the only source of randomness an experiment uses.

    Raises:
        ValueError: ``seed`` is not a whole number from 0 to 2**63 - 1.
    """
    import torch

    is_whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not is_whole or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: give a whole number from 0 to 2**63 - 1")
    return torch.Generator(device=device).manual_seed(int(seed))


def is_quiet() -> bool:
    """True while outputs are stored or checked (``ICML25_QUIET=1``)."""
    return os.environ.get("ICML25_QUIET", "") not in ("", "0")


def progress(
    iterable: Iterable | None = None,
    desc: str = "",
    *,
    total: int | None = None,
    unit: str = "it",
) -> Any:
    """A ``tqdm`` progress bar that falls silent while outputs are stored or checked.

    Args:
        iterable: what to loop over; ``None`` for a bar moved by hand (``bar.update``).
        desc: a few words shown before the bar.
        total: number of iterations where ``iterable`` does not know its length.
        unit: what one iteration is called.

    Returns:
        The bar: iterate over it, or use it as a context manager.
    """
    from tqdm.auto import tqdm

    # None would fall silent in a notebook too (it has no terminal).
    return tqdm(iterable, desc=desc, total=total, unit=unit, disable=is_quiet())


@dataclass(frozen=True)
class Experiment:
    """One experiment of a chapter and the configurations it is run with.

    Attributes:
        function: ``function(config, *, device, seed) -> dict`` of plain metrics
            (numbers, strings, lists and dicts of them).
        laptop: frozen dataclass, seconds to minutes on two CPU cores.
        paper: frozen dataclass with the paper's own sizes; ``None`` where laptop scale
            *is* the paper's.
        summary: one line, which the command line lists.
    """

    function: Callable[..., dict[str, Any]]
    laptop: Any
    paper: Any = None
    summary: str = ""

    def config(self, scale: str | None = None) -> Any:
        """The configuration at ``scale`` (default: what ``ICML25_SCALE`` says)."""
        name = scale_name() if scale is None else scale
        if name not in SCALES:
            raise ValueError(f"scale={name!r}: allowed are 'laptop' and 'paper'")
        if name == "paper" and self.paper is not None:
            return self.paper
        return self.laptop
