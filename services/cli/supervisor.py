"""Starts again what ends unasked in a cluster of `twinflow up`: after a pause that grows, and not for ever.

A worker that comes back is another incarnation, so nothing of the old one is mistaken for it; routers and peers go on meanwhile
as after any loss. What does not come to serve is given up on, with its last words.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.cli.cluster import Cluster
from services.cli.process import ProcessDied

FIRST_PAUSE_S = 0.5  # before the first new start, doubled with every end in a row
MAX_PAUSE_S = 10.0
STEADY_S = 30.0  # who has served for so long begins a new row of ends
SERVING_POLL_S = 1.0


class GivenUp(Exception):
    """A process ended too often in a row. `died` is its last end."""

    def __init__(self, died: ProcessDied, ends: int) -> None:
        row = f"; it has ended {ends} times without {STEADY_S:g} s of service between" if ends > 1 else ""
        super().__init__(f"{died}{row}")
        self.died = died


@dataclass(slots=True)
class _Ends:
    """Of one process, since it last served for `STEADY_S`. Times as of the clock."""

    count: int = 0
    start_at: float | None = None  # None unless it waits for its new start
    serves_since: float | None = None


@dataclass(slots=True)
class Supervisor:
    """`look` is called every moment by the thread that started the cluster: children end with it. `restarts` is how many new
    starts in a row a process gets; 0 gives up at the first end."""

    cluster: Cluster
    restarts: int
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _ends: dict[str, _Ends] = field(default_factory=dict)
    _asked_at: float = float("-inf")

    def look(self) -> None:
        """Takes note of who ended, and starts those whose pause is over. Raises GivenUp."""
        for died in self.cluster.died():
            self._on_end(died)
        for name, ends in self._ends.items():
            if ends.start_at is not None and self.clock() >= ends.start_at:
                ends.start_at = None
                self.cluster.start(name)
        if self._ends and self.clock() >= self._asked_at + SERVING_POLL_S:
            self._asked_at = self.clock()
            self._note_service(self.cluster.serving())

    def _on_end(self, died: ProcessDied) -> None:
        self.cluster.kill(died.name)  # an engine that outlived its front would keep its memory
        ends = self._ends.setdefault(died.name, _Ends())
        ends.count, ends.serves_since = ends.count + 1, None
        if ends.count > self.restarts:
            raise GivenUp(died, ends.count)
        pause_s = min(FIRST_PAUSE_S * 2 ** (ends.count - 1), MAX_PAUSE_S)
        ends.start_at = self.clock() + pause_s
        self.say(f"{died}; it starts again in {pause_s:g} s")

    def _note_service(self, serving: set[str]) -> None:
        for name in list(self._ends):
            ends = self._ends[name]
            if name not in serving or ends.start_at is not None:
                ends.serves_since = None
            elif ends.serves_since is None:
                ends.serves_since = self.clock()
            elif self.clock() - ends.serves_since >= STEADY_S:
                del self._ends[name]
