"""What the processes say: when each of them noticed a fault, what went wrong inside, which transfer generations were opened."""

import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.chaos.schedule import Fault, Kind

LOST, MET = "lost", "met"
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
        # None: its session began after the fault, what becomes of that is another matter
        first: dict[str, float | None] = {}
        lines = list(self.lines)
        begin = bisect_left(lines, at - 1.0, key=lambda x: x.at)  # their order is that of threads: nearly this one
        for line in lines[begin:]:
            after_s = line.at - at
            if after_s > within_s + 1.0:
                break
            if 0 < after_s < within_s and line.name not in first and (said := says(fault, line)):
                first[line.name] = after_s if said == LOST else None
        return max((s for s in first.values() if s is not None), default=None)


def says(fault: Fault, line: Line) -> str:
    """Whether the line says that its process has `LOST`, or `MET`, the victim, or the other end of the link; "" if neither. Of an
    engine the router alone says so: all sessions go on."""
    *client, server = fault.victims
    if fault.kind is Kind.FREEZE:
        return LOST if line.name == "router" and f"worker {server} is left alone: " in line.text else ""
    if client:
        peer = {client[0]: server, server: client[0]}.get(line.name)
    else:
        peer = server if line.name != server else None
    if peer is None:
        return ""
    return next((said for said, pattern in session(line.name, peer) if re.search(pattern, line.text)), "")


def session(observer: str, peer: str) -> Sequence[tuple[str, str]]:
    """How `observer` says that its session with `peer` has ended, and begun; nothing where there is none."""
    match observer.split("-")[0], peer.split("-")[0]:
        case "router", _:
            ends = rf"no session with worker {peer} |session with worker {peer} is closed|worker {peer} left,"
            begins = rf"session with worker {peer} .*is up"
        case _, "router":
            ends, begins = r"router \S+ is gone", r"router \S+ connected"
        case "decode", "prefill":
            of = rf"session to prefill worker {peer}\b.*"
            ends, begins = of + " is over", of + " is open"
        case "prefill", "decode":
            of = rf"session with decode worker {peer}"
            ends, begins = of + " is over", of + ",.* is open"
        case _:
            return ()
    return (LOST, ends), (MET, begins)
