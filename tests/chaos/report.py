"""What a run has shown: the counts, the verdict on them, the table for people."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from tests.chaos.load import HUNG, LOST, Exchange
from tests.chaos.quiet import Left
from tests.chaos.schedule import Fault, Kind
from tests.chaos.watch import Line

# Codes of errors that say what a fault did. `internal` would be a bug, `bad_request` the load's own.
CLEAR = frozenset({"worker_lost", "no_decode_worker", "handoff_failed", "no_capacity", "overloaded", "deadline"})
EXPLAINS_S = 12.0  # a fault explains errors until so long after its end
UCX_ENDS = re.compile(r"\bucp_\S+ +Fatal: ")
SLOW_S = 5.0  # to go on, once it is noticed
NOTICEABLE_S = 4.0  # beyond 3 s of silence
LOOSE_NOTICE_S = 10.0  # 3 s of silence, on a machine that has other things to do


@dataclass(slots=True)
class Happened:
    """One fault as it was. Times are `time.monotonic()`; None = has not happened."""

    fault: Fault
    at: float
    until: float
    noticed_s: float | None = None  # the last of those who noticed; None for what was too short for anybody
    went_on_s: float = 0.0  # until the request that had to wait longest went on, or had its error
    cut_short: bool = False  # the next fault came into that wait, which counts there
    amid_read: bool = False  # a decode worker had READs posted when the victim, a prefill worker, was stopped
    sought_at: float | None = None  # when the wanted moment was first looked for, where that alone holds processes up
    back_s: float | None = None  # from the start of a new process until it serves

    @property
    def recovered_s(self) -> float | None:
        """From when it was noticed; from its end where the router stood still, who alone could tell anybody anything."""
        if self.noticed_s is None or self.cut_short:
            return None
        paused_router = self.fault.kind is Kind.PAUSE and "router" in self.fault.victims
        begins_s = max(self.noticed_s, self.until - self.at) if paused_router else self.noticed_s
        return max(0.0, self.went_on_s - begins_s)


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended though nobody killed it. `tail`: its last lines."""

    name: str
    code: int
    tail: tuple[str, ...]

    @property
    def by_transport(self) -> bool:
        """UCX said that it ends the process."""
        return any(UCX_ENDS.search(line) for line in self.tail)


@dataclass(slots=True)
class Report:
    seed: int
    happened: list[Happened] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    quiet: list[Left] = field(default_factory=list)  # after each round
    exits: list[Exit] = field(default_factory=list)
    trouble: list[Line] = field(default_factory=list)  # errors and tracebacks in the logs
    generations: int = 0
    handed_off: int = 0  # answers that a prefill worker began
    recovered: int = 0  # answers that lost a hand-off and went on
    moved_on: int = 0  # times that the router took a request from a lost worker to another
    not_back: list[str] = field(default_factory=list)
    seconds: float = 0.0
    held_up_s: float = 0.0  # the longest that this process itself stood still

    @property
    def wrong(self) -> list[Exchange]:
        return [e for e in self.exchanges if e.contradicts]

    @property
    def errors(self) -> Counter[str]:
        return Counter(e.error for e in self.exchanges if e.error)

    @property
    def calm_waits_s(self) -> list[float]:
        """The longest wait of each answered request that no fault came near: what computing alone takes here."""
        times = [(h.sought_at or h.at, max(h.until + (h.back_s or 0.0), h.at + h.went_on_s)) for h in self.happened]
        calm = [
            e for e in self.exchanges if not e.error and not any(a < (e.ended or 0.0) and e.began < b for a, b in times)
        ]
        return sorted(e.longest_wait_s for e in calm)

    @property
    def slow(self) -> list[Happened]:
        return [h for h in self.happened if (h.recovered_s or 0.0) > SLOW_S]

    @property
    def aborts(self) -> list[Exit]:
        return [e for e in self.exits if e.by_transport]

    def defects(self) -> list[str]:
        """Everything that must not be; empty when the run is good."""
        found = [f"wrong answer: {e.text!r} ({e.error or 'ok'}), expected {e.question.text!r}" for e in self.wrong]
        found += [f"hung: no sign for too long after {len(e.marks)} events" for e in self.exchanges if e.error == HUNG]
        found += [
            f"unclear error {e.error}: {e.message}"
            for e in self.exchanges
            if e.error and e.error not in {*CLEAR, LOST, HUNG}
        ]
        found += [
            f"{e.error} without a fault: {e.message}" for e in self.exchanges if e.error and not self.explained(e)
        ]
        found += [f"left behind after quiet: {left}" for left in self.quiet if not left.clean]
        found += [f"{e.name} ended with {e.code}: {' | '.join(e.tail[-5:])}" for e in self.exits if not e.by_transport]
        found += [f"{line.name} logs: {line.text}" for line in self.trouble]
        found += [f"not back: {name}" for name in self.not_back]
        found += ["no answer came through a hand-off"] if self.exchanges and not self.handed_off else []
        found += [
            f"of {len(long)} faults {group!r} none was noticed: do they reach anybody?"
            for group, long in self._silent()
        ]
        late = [h for h in self.happened if h.noticed_s is not None and h.noticed_s > LOOSE_NOTICE_S]
        return found + [f"noticed only after {h.noticed_s:.1f} s: {h.fault}" for h in late]

    def _silent(self) -> list[tuple[str, list[Happened]]]:
        """Kinds of which nobody noticed one, though several lasted long enough."""
        long = [h for h in self.happened if h.until - h.at > NOTICEABLE_S and h.fault.kind is not Kind.SLOW]
        groups = {g: [h for h in long if h.fault.group == g] for g in sorted({h.fault.group for h in long})}
        return [(g, hs) for g, hs in groups.items() if len(hs) >= 3 and all(h.noticed_s is None for h in hs)]

    def explained(self, exchange: Exchange) -> bool:
        """A fault was there while it ran, or shortly before; a lost connection needs one of the router."""
        assert exchange.ended is not None
        return any(
            h.at <= exchange.ended
            and exchange.began <= h.until + (h.back_s or 0.0) + EXPLAINS_S
            and (exchange.error != LOST or "router" in h.fault.victims)
            for h in self.happened
        )

    def lines(self) -> list[str]:
        """Markdown: a table by kind of fault, then the counts."""
        return [*self._by_kind(), "", *self._counts()]

    def _by_kind(self) -> list[str]:
        head = ["fault", "times", "noticed", "detection p50", "max", "recovery p50", "max", "serves again p50", "max"]
        rows = [head, ["---", *["---:"] * (len(head) - 1)]]
        groups = sorted({h.fault.group for h in self.happened})
        for group in [*groups, "all"]:
            mine = [h for h in self.happened if group in (h.fault.group, "all")]
            noticed = present(h.noticed_s for h in mine)
            times = [noticed, present(h.recovered_s for h in mine), present(h.back_s for h in mine)]
            rows.append([group, str(len(mine)), str(len(noticed)), *(cell for t in times for cell in p50_max(t))])
        return ["| " + " | ".join(row) + " |" for row in rows]

    def _counts(self) -> list[str]:
        errors = self.errors
        lost, hung = errors.pop(LOST, 0), errors.pop(HUNG, 0)
        last = self.quiet[-1] if self.quiet else Left()
        recovered = present(h.recovered_s for h in self.happened)
        counts = {
            "requests": len(self.exchanges),
            "answered, equal to the fault-free answer": sum(e.right for e in self.exchanges),
            "answers that came through a hand-off": self.handed_off,
            "answers that went on after a lost hand-off": self.recovered,
            "requests that went on at another decode worker": self.moved_on,
            "wrong answers": len(self.wrong),
            "clear errors": f"{sum(errors.values())} ({', '.join(f'{n} {k}' for k, n in errors.items()) or 'none'})",
            "connections that a dead router broke or refused": lost,
            "hung requests": hung,
            "left after quiet, worst of all looks: blocks, slots": self._worst("blocks", "slots"),
            "requests, leases": self._worst("requests", "leases"),
            "doomed, pinned units": self._worst("doomed", "pinned"),
            "seconds until quiet, most": f"{max((q.after_s for q in self.quiet), default=0.0):.1f}",
            "new transfer generations": f"{self.generations} (doomed at the end: {last.doomed})",
            "faults amid a posted read": sum(h.amid_read for h in self.happened),
            f"recoveries that took longer than {SLOW_S:g} s": f"{len(self.slow)} of {len(recovered)}",
            "recoveries that the next fault came into, which counts them": sum(h.cut_short for h in self.happened),
            "longest wait of a request that no fault came near: p50, p99, max": waits_text(self.calm_waits_s),
            "processes ended by their transport": len(self.aborts),
            "processes ended otherwise, unasked": len(self.exits) - len(self.aborts),
            "errors in the logs": len(self.trouble),
            "the harness itself held up, most": f"{self.held_up_s:.1f} s",
        }
        return ["| what | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in counts.items())]

    def _worst(self, *names: str) -> str:
        return ", ".join(str(max((getattr(left, name) for left in self.quiet), default=0)) for name in names)


def present(times: Iterable[float | None]) -> list[float]:
    return [t for t in times if t is not None]


def p50_max(times: list[float]) -> list[str]:
    return [f"{median(times):.1f} s", f"{max(times):.1f} s"] if times else ["–", "–"]


def waits_text(times: list[float]) -> str:
    """Of sorted times."""
    if not times:
        return "–"
    at = (times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)], times[-1])
    return f"{', '.join(f'{t:.1f} s' for t in at)} ({len(times)} requests)"
