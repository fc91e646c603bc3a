"""What each folder of tests may take of `make test`, and the table of what it took, printed when a run ends.

Seconds as pytest counts them (setup, call and teardown of each test), of a run with two processes on two idle cores; the
two share what is listed, so a run lasts about half the sum. Nothing fails on time: on a busy machine all of it is longer.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

RUN_S = 9 * 60
PROCESSES = 2
FOLDERS_S = {
    "bench": 1,
}


def spent(reports: Iterable[object]) -> tuple[Counter[str], Counter[str]]:
    """(seconds, tests) by folder, of all phases of all tests among the reports."""
    seconds, tests = Counter[str](), Counter[str]()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            folder = report.nodeid.split("/")[1]
            seconds[folder] += report.duration
            tests[folder] += report.when == "setup"
    return seconds, tests


def table(seconds: Counter[str], tests: Counter[str]) -> list[str]:
    """A line per folder, the longest first, and one of the sums."""
    lines = [f"{'folder':<12}{'tests':>7}{'seconds':>9}{'budget':>8}"]
    for folder, took_s in seconds.most_common():
        budget_s = FOLDERS_S.get(folder, 0)
        over = "  over" if took_s > budget_s else ""
        lines.append(f"{folder:<12}{tests[folder]:>7}{took_s:>9.0f}{budget_s:>8}{over}")
    lines.append(f"{'all':<12}{tests.total():>7}{seconds.total():>9.0f}{sum(FOLDERS_S.values()):>8}")
    return lines
