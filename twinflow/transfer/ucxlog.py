"""What UCX says about the path it chose, since NIXL has no call for it.

With `UCX_PROTO_INFO` UCX logs one table per operation and endpoint configuration. The rows of "remote memory read" name
the transport that READs really take: `cma/memory` (shared memory by process_vm_readv), `rc_mlx5/mlx5_0:1`,
`cuda_ipc/cuda`, or `tcp/eth0` with "software emulation". The log goes to a file of this process; this module sets that up
and reads it.
"""

import ctypes
import os
import re
import tempfile
from dataclasses import dataclass

SHOW_LOGS = "TWINFLOW_NIXL_LOG"  # set to leave NIXL's and UCX's logging as it is
FILE_NAME = "twinflow-ucx-%p.log"  # UCX puts the process id for %p

_READ_TITLE = re.compile(r"remote memory read by ucp_get\S*.*?(into .*?)\s*\|")
_ROW = re.compile(r"\|\s*\S+\s*\|\s*(?P<how>[^|]*?)\s*\|\s*(?P<config>[^|]*?)\s*\|\s*$")
_PROBLEM = re.compile(r"UCX\s+(?:WARN|ERROR|FATAL)\s+(.*)")
_DEVICE = re.compile(r"([a-z][a-z0-9_]*)/[^\s,]+")


@dataclass(frozen=True, slots=True)
class ReadPath:
    """`transports`: UCX names without devices, e.g. ("cma",). `how`: UCX's word, e.g. "zero-copy", "software emulation"."""

    transports: tuple[str, ...]
    how: str

    @property
    def name(self) -> str:
        return "+".join(self.transports)


def quiet_environment() -> None:
    """Changes this process's environment; must run before UCX is loaded. Keeps what the operator has set."""
    # Left to itself UCX reads another process's GPU memory directly only where it sees NVLinks; on a card without any, READs
    # would go through TCP without a word, at a thousandth of the speed.
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # as that one is where there is no GPU
    if os.environ.get(SHOW_LOGS):
        return
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if "UCX_LOG_FILE" not in os.environ:
        os.environ["UCX_LOG_FILE"] = os.path.join(tempfile.gettempdir(), FILE_NAME)
        os.environ.setdefault("UCX_PROTO_INFO", "y")


class UcxLog:
    """Reads on in this process's UCX log, from where it stood when this was built. Empty where the operator logs elsewhere.

    UCX opens the file when it is loaded, once per process; the first reader removes its name, so that nothing is left behind.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._skip = self._size()

    def read(self) -> str:
        """What was logged since the last call. UCX buffers, so all stdio streams of the process are flushed first."""
        where = self._find()
        if where is None:
            return ""
        ctypes.CDLL(None).fflush(None)
        with open(where, errors="replace") as f:
            f.seek(max(self._offset, self._skip))
            text = f.read()
            self._offset = f.tell()
        return text

    def _size(self) -> int:
        where = self._find()
        if where is None:
            return 0
        ctypes.CDLL(None).fflush(None)
        return os.stat(where).st_size

    def _find(self) -> str | None:
        pattern = os.environ.get("UCX_LOG_FILE", "")
        if os.path.basename(pattern) != FILE_NAME:
            return None
        name = pattern.replace("%p", str(os.getpid()))
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue  # the listing's own descriptor
            if target == name:
                os.unlink(name)
            if target.removesuffix(" (deleted)") == name:
                return f"/proc/self/fd/{fd}"
        return None


def read_paths(log: str) -> list[ReadPath]:
    """The paths in order of appearance; of a table with several ranges the last one counts (large reads)."""
    out: list[ReadPath] = []
    reading = False
    last: ReadPath | None = None
    for line in log.splitlines():
        body = line[line.find("|") :] if "|" in line else line
        if _READ_TITLE.search(body):
            reading, last = True, None
        elif reading and (row := _ROW.match(body)) and (names := _DEVICE.findall(row["config"])):
            last = ReadPath(tuple(dict.fromkeys(names)), row["how"])
        elif reading and last is not None and "+--" in line:
            out.append(last)
            reading = False
    return out


def problems(log: str) -> list[str]:
    """UCX's warnings and errors."""
    return [m[1] for line in log.splitlines() if (m := _PROBLEM.search(line))]
