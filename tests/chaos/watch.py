"""What the processes say: when each of them noticed a fault, what went wrong inside, which transfer generations were opened."""

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.chaos.schedule import Fault, Kind

TROUBLE = re.compile(r"\bERROR\b|\bCRITICAL\b|^Traceback|was never retrieved|never awaited")
HANDED_OFF = re.compile(r"services.decode.emit request .* tokens in .*, remote")
RECOVERED = re.compile(r"services.decode.emit request .* tokens in .*lost hand-offs")
MOVED_ON = re.compile(r"a request leaves worker")
GENERATION = re.compile(r"transfer generation (\d+) is opened")


@dataclass(frozen=True, slots=True)
class Line:
    at: float  # time.monotonic()
    name: str  # of the process
    text: str


class Watch:
    """A line sink of a `Cluster`: called from a thread per process; `list.append` needs no lock."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def __call__(self, name: str, text: str) -> None:
        self.lines.append(Line(time.monotonic(), name, text))

    def matching(self, pattern: "re.Pattern[str] | str", names: Iterable[str] | None = None) -> list[Line]:
        wanted = None if names is None else set(names)
        return [x for x in list(self.lines) if (wanted is None or x.name in wanted) and re.search(pattern, x.text)]

    def session_up(self, worker: str, since: float) -> bool:
        """The router has a session with this worker that began after `since`."""
        return any(x.at > since for x in self.matching(rf"session with worker {worker} .*is up", ["router"]))

    def noticed_s(self, fault: Fault, at: float, within_s: float) -> float | None:
        """Seconds until the last of those who noticed had; None if nobody did. Who had no session has nothing to notice."""
        first: dict[
            str, float | None
        ] = {}  # None: its session began after the fault, what becomes of that is another matter
        lines = list(self.lines)
        for line in lines[
            bisect_left(lines, at - 1.0, key=lambda x: x.at) :
        ]:  # their order is that of threads: nearly this one
            after_s = line.at - at
            if after_s > within_s + 1.0:
                break
            if 0 < after_s < within_s and line.name not in first:
                if tells(fault, line, lost):
                    first[line.name] = after_s
                elif tells(fault, line, met):
                    first[line.name] = None
        return max((s for s in first.values() if s is not None), default=None)


def tells(fault: Fault, line: Line, what: Callable[[str, str], str]) -> bool:
    """The line says that its process has `lost`, or `met`, the victim, or the other end of the link. Of an engine the router
    alone says so: all sessions go on."""
    *client, server = fault.victims
    if fault.kind is Kind.FREEZE:
        return line.name == "router" and what is lost and f"worker {server} is left alone: " in line.text
    if client:
        told = [(client[0], what(client[0], server)), (server, what(server, client[0]))]
        return any(line.name == name and re.search(pattern, line.text) for name, pattern in told)
    return line.name != server and re.search(what(line.name, server), line.text) is not None


def lost(observer: str, peer: str) -> str:
    """How `observer` says that its session with `peer` has ended; matches nothing where there is none."""
    match observer.split("-")[0], peer.split("-")[0]:
        case "router", _:
            return rf"no session with worker {peer} |session with worker {peer} is closed|worker {peer} left,"
        case _, "router":
            return r"router \S+ is gone"
        case "decode", "prefill":
            return rf"session to prefill worker {peer}\b.* is over"
        case "prefill", "decode":
            return rf"session with decode worker {peer} is over"
        case _:
            return r"(?!)"


def met(observer: str, peer: str) -> str:
    """How `observer` says that its session with `peer` has begun."""
    match observer.split("-")[0], peer.split("-")[0]:
        case "router", _:
            return rf"session with worker {peer} .*is up"
        case _, "router":
            return r"router \S+ connected"
        case "decode", "prefill":
            return rf"session to prefill worker {peer}\b.* is open"
        case "prefill", "decode":
            return rf"session with decode worker {peer},.* is open"
        case _:
            return r"(?!)"
