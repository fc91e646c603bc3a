"""What holds for every test, before any module under test is imported."""

import gc
import os
from collections.abc import Generator

import pytest
import torch

from tests.budget import spent, table

# Read when a kernel is defined, by whichever test comes to import one first. Without a GPU nothing else runs Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

CLUSTERS = ("tests/e2e/", "tests/chaos/test_faults.py", "tests/cli/test_real_cluster.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for clusters come first. A process of the run that has nothing left takes over the last tests of another;
    so what is long begins early, and those of the one shared cluster stay together."""

    def rank(item: pytest.Item) -> int:
        if not item.nodeid.startswith(CLUSTERS):
            return 2
        return 0 if "workers" in getattr(item, "fixturenames", ()) else 1

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make a million objects that stay. The collector neither walks through them meanwhile nor while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds, tests = spent(report for reports in terminalreporter.stats.values() for report in reports)
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder")
        terminalreporter.write("\n".join([*table(seconds, tests), ""]))
