"""Memory of a cluster, from /proc: the proportional share (PSS) of each child and everything below it, in bytes."""

from collections.abc import Iterable
from pathlib import Path

KIB = 1024
PROC = Path("/proc")


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    found = [pid]
    for at in found:  # grows while it is walked
        for task in (PROC / str(at) / "task").glob("*/children"):
            try:
                found += [int(p) for p in task.read_text().split()]
            except OSError:
                continue  # ended meanwhile
    return found


def pss_bytes(pid: int) -> int:
    """Pages shared by k processes count 1/k. 0 when the process is gone."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * KIB for line in text.splitlines() if line.startswith("Pss:"))


def memory_bytes(pids: Iterable[int]) -> int:
    """Sum over the process trees below `pids`."""
    return sum(pss_bytes(p) for root in pids for p in tree(root))
