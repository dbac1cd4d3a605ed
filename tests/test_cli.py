"""The command line: helpful, honest about errors, no half-written record."""

import subprocess
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from icml25.__main__ import main
from icml25.core import Experiment, records


@dataclass(frozen=True)
class Config:
    steps: int = 2


@pytest.fixture
def chapter(monkeypatch, tmp_path):
    """A stand-in for a chapter's module, with a folder for its records."""
    module = types.ModuleType("icml25.golore")

    def run(config, *, device, seed):
        return {"sum": config.steps + seed}

    def interrupt(config, *, device, seed):
        raise KeyboardInterrupt

    def lacks(config, *, device, seed):
        import no_such_package  # noqa: F401

    def fails(config, *, device, seed):
        return torch.ones(2) @ torch.ones(3)

    module.EXPERIMENTS = {
        "add": Experiment(run, laptop=Config(), paper=Config(100), summary="adds"),
        "interrupt": Experiment(interrupt, laptop=Config()),
        "lacks": Experiment(lacks, laptop=Config()),
        "fails": Experiment(fails, laptop=Config()),
    }
    monkeypatch.setitem(sys.modules, "icml25.golore", module)
    monkeypatch.setattr(records, "directory", lambda: tmp_path)
    return tmp_path


def test_run_takes_the_first_experiment_and_prints_its_metrics(chapter, capsys):
    assert main(["run", "golore", "--device", "cpu", "--seed", "5"]) == 0
    assert '"sum": 7' in capsys.readouterr().out


def test_paper_scale_is_a_flag(chapter, capsys):
    assert main(["run", "golore", "add", "--scale", "paper"]) == 0
    assert '"sum": 100' in capsys.readouterr().out


def test_record_is_written(chapter):
    assert main(["run", "golore", "--record"]) == 0
    assert records.load("golore", "add-laptop-seed0")["metrics"] == {"sum": 2}


def test_only_the_first_of_several_processes_prints_and_records(
    chapter, capsys, monkeypatch
):
    monkeypatch.setenv("RANK", "1")
    assert main(["run", "golore", "--record"]) == 0
    assert '"sum"' not in capsys.readouterr().out
    assert not list(chapter.iterdir())


def test_list_names_the_experiments_and_runs_none(chapter, capsys):
    assert main(["run", "golore", "--list"]) == 0
    assert "  add: adds\n  interrupt:" in capsys.readouterr().out


def test_a_missing_package_is_named_also_when_it_is_imported_late(chapter, capsys):
    assert main(["run", "golore", "lacks"]) == 2
    message = "needs the package 'no_such_package': pip install -e '.[all]'"
    assert message in capsys.readouterr().err


def test_an_error_of_pytorch_keeps_its_traceback(chapter):
    with pytest.raises(RuntimeError, match="size"):
        main(["run", "golore", "fails"])


def test_a_record_that_could_not_be_kept_stops_the_run_before_it_starts(
    chapter, capsys, monkeypatch
):
    def nowhere():
        raise FileNotFoundError("no book here")

    monkeypatch.setattr(records, "directory", nowhere)
    assert main(["run", "golore", "interrupt", "--record"]) == 2
    assert "no book here" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m icml25 claims | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0
    assert not done.stderr


def test_interrupt_leaves_no_record(chapter, capsys):
    assert main(["run", "golore", "interrupt", "--record"]) == 130
    assert "nothing was recorded" in capsys.readouterr().err
    assert not list(chapter.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nonesuch"], "no chapter 'nonesuch'; chapters: supervision, golore"),
        (["run", "golore", "nonesuch"], "add: adds"),
        (["run", "golore", "--device", "nonesuch"], "device='nonesuch' cannot be used"),
        (["claims", "nonesuch"], "no chapter 'nonesuch'"),
        (["data", "nonesuch"], "nonesuch"),
    ],
)
def test_what_is_unknown_is_named_with_the_known(chapter, capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_claims_lists_the_ledger(capsys):
    assert main(["claims", "golore"]) == 0
    assert "golore-8" in capsys.readouterr().out


def test_data_lists_the_registry(capsys):
    assert main(["data"]) == 0
    assert "planetoid" in capsys.readouterr().out


def test_help_names_the_chapters(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "circuits" in capsys.readouterr().out
