"""Links of simulated workers: each reads, and is read from, at one speed, which all reads at that time share.

A read goes as fast as the fuller of its two ends allows: speed / max(reads out of the source, reads into the target).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.router.bench.clock import VirtualClock


@dataclass(slots=True, eq=False)
class Read:
    """From `source` to `target`, as blocks are announced; `done` is called when all of `size_bytes` has arrived."""

    source: str
    target: str
    size_bytes: int
    done: Callable[[], None]
    busy_s: float = 0.0  # while something was on its way
    announced_bytes: float = 0.0
    _left: float = 0.0  # announced, not arrived
    _rate: float = 0.0
    _at_s: float = 0.0  # of these numbers
    _version: int = 0


@dataclass(slots=True)
class Links:
    clock: VirtualClock
    bytes_per_s: float
    _out: dict[str, list[Read]] = field(default_factory=dict)
    _into: dict[str, list[Read]] = field(default_factory=dict)

    def announce(self, read: Read, size_bytes: float) -> None:
        """So much more of it can be read."""
        if size_bytes <= 0:
            return
        read.announced_bytes += size_bytes
        if read._left:
            self._settle(read)
            read._left += size_bytes
            self._plan(read)
            return
        read._left, read._at_s, read._rate = size_bytes, self.clock(), 0.0
        self._out.setdefault(read.source, []).append(read)
        self._into.setdefault(read.target, []).append(read)
        self._share(read)

    def _share(self, changed: Read) -> None:
        out, into = self._out[changed.source], self._into[changed.target]
        for read in [*out, *(r for r in into if r.source != changed.source)]:
            self._settle(read)
            at_once = max(len(self._out[read.source]), len(self._into[read.target]))
            read._rate = self.bytes_per_s / at_once
            self._plan(read)

    def _settle(self, read: Read) -> None:
        passed_s = self.clock() - read._at_s
        read._left -= read._rate * passed_s
        read.busy_s += passed_s
        read._at_s = self.clock()

    def _plan(self, read: Read) -> None:
        read._version += 1
        version = read._version
        wait_s = max(0.0, read._left / read._rate)
        self.clock.after(wait_s, lambda: self._arrived(read) if version == read._version else None)

    def _arrived(self, read: Read) -> None:
        self._settle(read)
        read._left = 0.0
        self._out[read.source].remove(read)
        self._into[read.target].remove(read)
        self._share(read)
        if read.announced_bytes >= read.size_bytes - 1:
            read.done()
