"""What holds for every test, before any module under test is imported."""

import gc
import os

import pytest
import torch

from tests.budget import spent, table

# Read when a kernel is defined, by whichever test comes to import one first. Without a GPU nothing else runs Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # imports and collection make a million objects that stay, and walking through them again and again is slow


def pytest_collection_finish() -> None:
    gc.freeze()  # nor are they walked through while tests run
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds, tests = spent(report for reports in terminalreporter.stats.values() for report in reports)
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder")
        terminalreporter.write("\n".join([*table(seconds, tests), ""]))
