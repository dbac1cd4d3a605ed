"""pyproject.toml, constraints.txt and environment.yml say one thing."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.-]+)==(\S+)", line).groups()
            found[canonicalize_name(name)] = version
    return found


def requirements():
    listed = [*PROJECT["dependencies"], *(each for e in EXTRAS.values() for each in e)]
    parsed = [Requirement(text) for text in listed]
    return [each for each in parsed if each.name != "icml25"]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_admits_its_pin(requirement):
    version = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True)


def test_the_book_is_pinned_to_the_versions_that_draw_it_right():
    assert pins()["jupyter-book"] == "1.0.4.post1"
    assert pins()["sphinx-book-theme"] == "1.2.0"
    assert pins()["torch"] == "2.13.0"


def test_all_is_the_union_of_the_chapters():
    (text,) = EXTRAS["all"]
    named = set(re.search(r"\[(.*)\]", text)[1].split(","))
    assert named == EXTRAS.keys() - {"all", "book", "test", "lab", "bench", "mujoco"}


def test_conda_brings_python_and_pip_and_pip_the_rest():
    rattler = pytest.importorskip("rattler")
    door = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, last = door["dependencies"]
    names = [rattler.MatchSpec(spec).name.normalized for spec in conda]
    assert names == ["python", "pip"]
    assert last["pip"] == ["-c constraints.txt", "-e .[all,book,test,lab]"]


def test_conda_offers_a_python_that_the_package_takes():
    door = yaml.safe_load((ROOT / "environment.yml").read_text())
    version = re.search(r"python\s*=+\s*([\d.]+)", door["dependencies"][0])[1]
    wanted = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert wanted.contains(version)


def test_make_and_conda_install_the_same_extras():
    assert ".[all,book,test,lab]" in (ROOT / "Makefile").read_text()
