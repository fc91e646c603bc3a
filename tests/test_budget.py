from collections import Counter
from pathlib import Path

import pytest

from tests.budget import COLLECTION_S, FOLDERS_S, PROCESSES, RUN_S, spent, table

ROOT = Path(__file__).parent
ELSEWHERE = {"chart", "clients", "gpu"}  # run by targets of their own


def test_every_folder_has_its_share_of_the_run() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/**/test_*.py")}
    assert set(FOLDERS_S) == folders - ELSEWHERE
    assert sum(FOLDERS_S.values()) <= PROCESSES * (RUN_S - COLLECTION_S)


def report(nodeid: str, when: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when, duration=duration)  # type: ignore[arg-type]


def test_the_table() -> None:
    reports: list[object] = [
        report("tests/rpc/test_x.py::test_a[a/b::c]", w, 4.0) for w in ("setup", "call", "teardown")
    ]
    reports += [
        report("tests/kernels/linear/test_y.py::test_b", "setup", 100.0),
        report("tests/test_z.py::test_c", "call", 1.0),
    ]
    seconds, tests = spent([*reports, "a warning"])
    assert seconds == {"rpc": 12.0, "kernels": 100.0, "tests": 1.0}
    assert tests == Counter(rpc=1, kernels=1)
    lines = [line.split() for line in table(seconds, tests)]
    assert [line[0] for line in lines] == ["folder", "kernels", "rpc", "tests", "all"]
    assert lines[2] == ["rpc", "1", "12", str(FOLDERS_S["rpc"]), "over"]
    assert lines[3] == ["tests", "0", "1", "-"]
    assert lines[4][:3] == ["all", "2", "113"]
