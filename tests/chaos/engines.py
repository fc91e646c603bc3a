"""Of a worker's two processes, the one with the loop."""

from pathlib import Path

from services.cli.memory import tree

SPAWNED = "--multiprocessing-fork"  # on the command line of what a front spawns; not of a helper of its own


def engine_of(front: int) -> int:
    """Raises ProcessLookupError while there is none."""
    for pid in tree(front)[1:]:
        if SPAWNED in command_of(pid):
            return pid
    raise ProcessLookupError(f"process {front} has no engine")


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []  # it ended meanwhile
