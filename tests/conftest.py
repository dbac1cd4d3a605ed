"""The marker of tests on data from outside, and the built book that tests share."""

import built_book
import pytest
from icml25.core import data


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "benchmark_data(*names): needs these data sets of icml25.core.data"
    )


def pytest_runtest_setup(item):
    for marker in item.iter_markers("benchmark_data"):
        for name in marker.args:
            # Only what is missing is skipped: altered data must turn the test red.
            state = data.status(name)
            if state.missing and not state.faults:
                filename, why = next(iter(state.missing.items()))
                pytest.skip(f"data set {name}: {filename} {why}")


@pytest.fixture(scope="session")
def book(tmp_path_factory, worker_id):
    """The folder of the built pages; built once, whatever the number of workers."""
    shared = tmp_path_factory.getbasetemp()
    return built_book.build(shared if worker_id == "master" else shared.parent)
