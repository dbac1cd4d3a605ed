"""The floor's runtime: scale, device, seed, progress, experiments."""

import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from icml25.core import Experiment, device, make_generator, progress, scale
from icml25.core.runtime import leave_processes, make_accelerator


def test_scale_is_laptop_by_default(monkeypatch):
    monkeypatch.delenv("ICML25_SCALE", raising=False)
    assert scale(1, 2) == 1


def test_scale_follows_the_environment(monkeypatch):
    monkeypatch.setenv("ICML25_SCALE", "paper")
    assert scale(1, 2) == 2


def test_unknown_scale_names_the_two(monkeypatch):
    monkeypatch.setenv("ICML25_SCALE", "huge")
    with pytest.raises(ValueError, match="'huge': allowed are 'laptop' and 'paper'"):
        scale(1, 2)


def test_device_takes_a_name():
    assert device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_unusable_device_names_itself(name):
    with pytest.raises(ValueError, match=f"device='{name}' cannot be used here"):
        device(name)


def test_an_accelerator_is_for_the_device_it_is_asked_for():
    state = pytest.importorskip("accelerate.state")
    assert make_accelerator("cpu", precision="bf16").mixed_precision == "bf16"
    # As if that training had been on another device.
    state.PartialState._shared_state["device"] = torch.device("meta")
    after = make_accelerator("cpu", accumulate=3)
    assert after.device.type == "cpu" and after.mixed_precision == "no"
    assert after.gradient_accumulation_steps == 3
    assert make_accelerator("cpu").gradient_accumulation_steps == 1


def test_same_seed_same_numbers():
    first, second = (torch.rand(5, generator=make_generator(3)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("there", "taken"), [("mps", "cpu"), ("cuda", "cuda")])
def test_a_gpu_without_float64_is_taken_by_name_only(there, taken, monkeypatch):
    found = torch.device(there)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: found
    )
    assert device().type == taken


def test_seed_may_come_from_numpy():
    first, second = (make_generator(seed) for seed in (3, np.int64(3)))
    assert first.initial_seed() == second.initial_seed()


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, 2**63])
def test_bad_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed="):
        make_generator(seed)


def test_progress_is_silent_while_outputs_are_stored(monkeypatch, capsys):
    monkeypatch.setenv("ICML25_QUIET", "1")
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_progress_shows_itself_otherwise(monkeypatch, capsys):
    monkeypatch.delenv("ICML25_QUIET", raising=False)
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert "counting" in capsys.readouterr().err


def test_experiment_without_a_paper_scale_has_one_configuration():
    @dataclass(frozen=True)
    class Config:
        steps: int = 1

    experiment = Experiment(lambda config, *, device, seed: {}, laptop=Config())
    assert experiment.config("paper") is experiment.config("laptop")
    with pytest.raises(ValueError, match="scale='big'"):
        experiment.config("big")


def test_importing_the_floor_loads_no_heavy_library():
    code = (
        "import sys, icml25.core\n"
        "heavy = {'torch', 'matplotlib', 'ipywidgets', 'numpy', 'yaml', 'pooch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_leaving_the_processes_is_safe_alone_and_closes_the_group(tmp_path):
    leave_processes()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    leave_processes()
    assert not torch.distributed.is_initialized()
    leave_processes()


@pytest.mark.parametrize(("processes", "torn_down"), [("1", True), ("2", False)])
def test_one_of_several_processes_ends_without_teardown(processes, torn_down):
    code = (
        "import atexit; from icml25.core.runtime import end_process;"
        "atexit.register(print, 'torn down'); print('done'); end_process(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "WORLD_SIZE": processes},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stdout.split("\n")[0] == "done"
    assert ("torn down" in done.stdout) is torn_down
