"""Recorded runs: whole or not at all, never edited, their configuration still there."""

import importlib
import json
from dataclasses import dataclass

import pytest
from icml25.core import records
from icml25.core.runtime import CHAPTERS


@dataclass(frozen=True)
class Config:
    steps: int = 3
    betas: tuple[float, float] = (0.9, 0.99)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "directory", lambda: tmp_path)
    return tmp_path


def write(**changes):
    arguments = {
        "scale": "laptop",
        "config": Config(),
        "seed": 0,
        "metrics": {"loss": 0.5},
        "wall_s": 1.25,
    }
    return records.write("golore", "digits", **(arguments | changes))


def test_a_record_is_read_back_with_its_provenance(folder):
    write()
    row = records.load("golore", "digits-laptop-seed0")
    assert row["metrics"] == {"loss": 0.5}
    assert row["config"] == {"steps": 3, "betas": [0.9, 0.99]}
    assert "python" in row["versions"]
    assert "CPU core" in row["machine"]
    assert row["commit"]


@pytest.mark.parametrize("metrics", [{"loss": float("nan")}, {"loss": object()}, {}])
def test_a_bad_record_leaves_nothing_behind(folder, metrics):
    with pytest.raises((TypeError, ValueError)):
        write(metrics=metrics)
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_a_number_that_is_not_finite_is_named(folder):
    metrics = {"good": 1.0, "task": {"loss": [0.5, float("inf")]}, "n": float("nan")}
    with pytest.raises(ValueError, match=r"metrics: task\.loss\.1, n must be finite"):
        write(metrics=metrics)


def test_an_interrupted_write_keeps_the_old_record(folder, monkeypatch):
    path = write()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(records.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(metrics={"loss": 9.0})
    assert json.loads(path.read_text())["metrics"] == {"loss": 0.5}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_unknown_record_lists_the_known(folder):
    write()
    with pytest.raises(ValueError, match="no record golore/x; .*digits-laptop-seed0"):
        records.load("golore", "x")


def test_a_file_that_is_no_record_is_refused(folder):
    (folder / "golore").mkdir()
    (folder / "golore" / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="is no record: it lacks commit, config"):
        records.load("golore", "x")


def test_table_shows_result_cost_and_provenance(folder):
    write()
    text = records.table("golore")._repr_html_()
    for part in (
        "digits-laptop-seed0",
        "loss = 0.5",
        "1 s on",
        "seed 0",
        "golore/digits",
    ):
        assert part in text


def stored_records():
    return [
        (slug, name)
        for slug in CHAPTERS
        for name in records.names(slug)
        if records.directory().is_dir()
    ]


@pytest.mark.parametrize(("slug", "name"), stored_records())
def test_a_stored_record_is_of_a_configuration_that_still_exists(slug, name):
    row = records.load(slug, name)
    experiment = importlib.import_module(f"icml25.{slug}").EXPERIMENTS[
        row["experiment"]
    ]
    assert row["config"] == records.config_dict(experiment.config(row["scale"]))
    assert name == f"{row['experiment']}-{row['scale']}-seed{row['seed']}"
