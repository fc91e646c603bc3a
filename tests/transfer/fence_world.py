"""A prefill and a decode worker around one hand-off, small enough to try every order of what can happen.

Real parts: `Intake`, `LeaseTable`, `plan_pull`, `LoopbackTransport` with the manual scheduler. Stubs: two pools that only know
free, held, doomed and pins. `rules` switches single conditions off, to show that the search would notice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from twinflow.cache.arena import ArenaGeometry
from twinflow.contracts.tags import StateTag
from twinflow.transfer.base import PeerArena, TransferError
from twinflow.transfer.intake import Action, Adopt, Fail, Intake, Pull, Reserve, SayPulled, Unpin, Verify
from twinflow.transfer.leases import LeaseTable, SessionKey
from twinflow.transfer.loopback import LoopbackNetwork, LoopbackTransport, Manual
from twinflow.transfer.plan import plan_pull

GEOMETRY = ArenaGeometry(total_bytes=4 * 4 + 2 * 8, block_bytes=4, slot_bytes=8, blocks=4, slots=2)
TAG = StateTag(b"h", 2, "fp")  # two tokens in blocks of one: two blocks
SESSION = SessionKey("d", "1", 1)

Unit = tuple[str, int]


class Violation(Exception):
    pass


@dataclass(frozen=True)
class Rules:
    """All True is the real thing."""

    check_pulled: bool = True  # P verifies `Pulled`
    pin: bool = True  # D dooms what has reads outstanding
    await_confirmed: bool = True  # D adopts at `Confirmed`, not at DONE
    lease_refers: bool = True  # P reuses only what no lease names


@dataclass
class Pool:
    """D's memory by unit. Owners: "" free, "request", "doomed", "other" (who wrote 0xAA and expects to find it)."""

    owner: dict[Unit, str] = field(default_factory=dict)
    pins: dict[Unit, int] = field(default_factory=dict)

    def check(self) -> None:
        total = GEOMETRY.blocks + GEOMETRY.slots
        owners = list(self.owner.values())
        counts = {o: owners.count(o) for o in ("", "request", "doomed", "other")}
        if sum(counts.values()) != total:
            raise Violation(f"accounting: {counts} of {total}")
        for unit, owner in self.owner.items():
            if owner == "doomed" and not self.pins.get(unit):
                raise Violation(f"{unit} is doomed without a read")


def units(blocks: tuple[int, ...], slots: tuple[int, ...]) -> list[Unit]:
    return [("block", b) for b in blocks] + [("slot", s) for s in slots]


SPANS: dict[Unit, slice] = {
    **{("block", b): slice(GEOMETRY.block_offset(b), GEOMETRY.block_offset(b) + 4) for b in range(4)},
    **{("slot", s): slice(GEOMETRY.slot_offset(s), GEOMETRY.slot_offset(s) + 8) for s in range(2)},
}


class World:
    """`actions()` names what can happen next, `do(name)` makes it happen and checks what must always hold."""

    P_UNITS = (("block", 2), ("block", 3), ("slot", 1))  # of the prompt, in order
    D_UNITS = (("block", 0), ("block", 1), ("slot", 0))

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        network = LoopbackNetwork()
        self.p = bytearray(GEOMETRY.total_bytes)
        for k, unit in enumerate(self.P_UNITS):
            self.p[SPANS[unit]] = bytes([k + 1]) * len(self.p[SPANS[unit]])
        LoopbackTransport(network, "p", self.p)
        self.d = bytearray(GEOMETRY.total_bytes)
        self.manual = Manual()
        self.transport = LoopbackTransport(network, "d", self.d, self.manual)
        g = GEOMETRY
        self.peer = PeerArena("p", "1", 1, 0, g.total_bytes, 4, 8, g.blocks, g.slots, "DRAM", 0, "p", b"p")
        self.transport.connect(self.peer)
        self.pool = Pool(dict.fromkeys([("block", b) for b in range(4)] + [("slot", s) for s in range(2)], ""))
        self.leases = LeaseTable("1", 1)
        self.leases.open_session(SESSION)
        self.lease = self.leases.grant(SESSION, "r")
        self.p_released: set[Unit] = set()
        self.p_reused: set[Unit] = set()
        self.intake = Intake("r", 1, 0, TAG, session_epoch=1)
        self.announced = 0
        self.pulls: dict[int, str] = {}  # handle -> pull id
        self.whole: set[int] = set()  # handles of reads that have copied all their bytes
        self.to_p: list[SayPulled | str] = []
        self.to_d: list[str] = []
        self.d_connected = self.p_connected = True
        self.adopted = self.closed = False

    # ---- what can happen ----

    def actions(self) -> list[str]:
        can: dict[str, bool] = {
            "announce": self.announced == 0 and self.p_connected and not self.p_released,
            "finish": self.announced == 1 and self.p_connected and not self.p_released,
            "poll": any(r.state in ("done", "failed") for r in self.manual.reads if r.handle in self.pulls),
            "deliver to P": bool(self.to_p) and self.p_connected,
            "deliver to D": bool(self.to_d),
            "D loses the session": self.d_connected,
            "P loses the session": self.p_connected,
            "P ends the lease": self.p_connected and len(self.leases) > 0,
            "P reuses": bool(self.p_reusable() - self.p_reused),
            "D cancels": not self.intake.over and self.d_connected,
            "D reuses": any(o == "" for o in self.pool.owner.values()) and self.intake.over,
            "close": not self.closed and self.intake.over and bool(self.pulls),
        }
        names = [n for n, ok in can.items() if ok]
        for r in self.manual.reads:
            if r.state == "posted":
                # DONE means that every byte was copied, at whatever time. The read with the slot may also copy in part, or fail.
                names.append(f"copy {r.handle}")
                if r.handle in self.whole:
                    names.append(f"done {r.handle}")
                elif r.handle == 2:
                    names.append("half 2")
                if r.handle == 2:
                    names.append("fail 2")
        return names

    def p_reusable(self) -> set[Unit]:
        return self.p_released if self.rules.lease_refers else set(self.P_UNITS)

    def do(self, name: str, *, check: bool = True) -> None:
        verb, _, handle = name.partition(" ")
        if verb in ("copy", "half", "done", "fail") and handle.isdigit():
            read = self.manual.reads[int(handle) - 1]
            steps: dict[str, Callable[[], object]] = {
                "copy": lambda: (read.copy(), self.whole.add(read.handle)),
                "half": lambda: read.copy(0, read.size_bytes // 2),
                "done": read.done,
                "fail": lambda: read.fail("ERR"),
            }
            steps[verb]()
        else:
            getattr(self, "_" + name.lower().replace(" ", "_"))()
        if check:
            self.check()

    def check(self) -> None:
        self.pool.check()
        for unit, owner in self.pool.owner.items():
            if owner == "other" and self.d[SPANS[unit]].strip(b"\xaa"):
                raise Violation(f"{unit} of a new owner was overwritten by a late read")

    # ---- prefill side ----

    def _announce(self) -> None:
        self.announced = 1
        if self.leases.offer(self.lease, [2]):
            self.to_d.append("blocks")

    def _finish(self) -> None:
        self.announced = 2
        if self.leases.offer(self.lease, [3], [1]):
            self.to_d.append("finished")

    def _ended(self) -> None:
        self.p_released = set(self.P_UNITS)

    def _deliver_to_p(self) -> None:
        said = self.to_p.pop(0)
        if isinstance(said, SayPulled):
            verdict = self.leases.pulled(
                SESSION, self.lease, incarnation="1", epoch=1, generation=1, blocks=said.blocks, slots=said.slots
            )
            if verdict.ended:
                self._ended()
            if self.p_connected:
                self.to_d.append("confirmed" if verdict.confirmed or not self.rules.check_pulled else "failed")
        elif self.leases.release(self.lease):
            self._ended()

    def _p_loses_the_session(self) -> None:
        self.p_connected = False
        if self.leases.end_session(SESSION):
            self._ended()

    def _p_ends_the_lease(self) -> None:
        """For reasons of its own (a time limit, a new generation); the decode side isn't told."""
        self.leases.release(self.lease)
        self._ended()

    def _p_reuses(self) -> None:
        for unit in self.p_reusable():
            self.p[SPANS[unit]] = b"\x99" * len(self.p[SPANS[unit]])
        self.p_reused |= self.p_reusable()

    # ---- decode side ----

    def _deliver_to_d(self) -> None:
        message = self.to_d.pop(0)
        # An old session's messages may still sit in a queue when the session is over: they are delivered all the same.
        steps: dict[str, Callable[[], list[Action]]] = {
            "blocks": lambda: self.intake.announced(0, [2]),
            "finished": lambda: self.intake.finished(1, [3], [], 1, 0, TAG),
            "confirmed": lambda: self.intake.confirmed(1),
            "failed": lambda: self.intake.failed("refused"),
        }
        self._execute(steps[message]())

    def _d_loses_the_session(self) -> None:
        self.d_connected = False
        self._execute(self.intake.session_lost())

    def _d_cancels(self) -> None:
        self._execute(self.intake.cancelled())
        self.to_p.append("release")

    def _d_reuses(self) -> None:
        for unit, owner in self.pool.owner.items():
            if owner == "":
                self.pool.owner[unit] = "other"
                self.d[SPANS[unit]] = b"\xaa" * len(self.d[SPANS[unit]])

    def _poll(self) -> None:
        for handle in list(self.pulls):
            try:
                if self.transport.poll(handle):
                    self._terminal(handle, True)
            except TransferError:
                self._terminal(handle, False)

    def _close(self) -> None:
        self.transport.close()
        self.closed = True
        for handle in list(self.pulls):
            self._terminal(handle, False, free=False)

    def _terminal(self, handle: int, ok: bool, *, free: bool = True) -> None:
        if free:
            self.transport.free(handle)
        self._execute(self.intake.pull_finished(self.pulls.pop(handle), ok))

    def _execute(self, actions: list[Action]) -> None:
        for a in actions:
            if isinstance(a, Reserve):
                for unit in self.D_UNITS:
                    self.pool.owner[unit] = "request"
                self._execute(self.intake.reserved([0, 1], 0))
            elif isinstance(a, Pull):
                for unit in self._targets(a):
                    self.pool.pins[unit] = self.pool.pins.get(unit, 0) + 1
                ranges = plan_pull(GEOMETRY, self.peer, a.blocks, a.slots)
                self.pulls[self.transport.post(self.peer.key, ranges)] = a.pull_id
            elif isinstance(a, Unpin):
                for unit in units(a.blocks, a.slots):
                    self.pool.pins[unit] -= 1
                    if not self.pool.pins[unit] and self.pool.owner[unit] == "doomed":
                        self.pool.owner[unit] = ""
            elif isinstance(a, SayPulled):
                if self.d_connected:
                    self.to_p.append(a)
                if not self.rules.await_confirmed:
                    self._adopt()
            elif isinstance(a, Adopt):
                self._adopt()
            elif isinstance(a, Fail):
                for unit, owner in self.pool.owner.items():
                    if owner == "request":
                        pinned = self.rules.pin and bool(self.pool.pins.get(unit))
                        self.pool.owner[unit] = "doomed" if pinned else ""
            elif isinstance(a, Verify):
                raise AssertionError("not asked for")

    def _targets(self, pull: Pull) -> list[Unit]:
        return units(tuple(d for _, d in pull.blocks), tuple(d for _, d in pull.slots))

    def _adopt(self) -> None:
        self.adopted = True
        for k, unit in enumerate(self.D_UNITS):
            if set(self.d[SPANS[unit]]) != {k + 1}:
                raise Violation(f"{unit} was adopted with bytes that are not the prompt's: {self.d[SPANS[unit]]!r}")

    def state(self) -> object:
        """Everything that decides what can still happen."""
        i = self.intake
        return (
            bytes(self.p),
            bytes(self.d),
            i.phase,
            i.outstanding_blocks,
            i.outstanding_slots,
            i.moved.pulls,
            self.announced,
            tuple((r.state, r.handle in self.pulls, r.handle in self.whole) for r in self.manual.reads),
            tuple(type(m).__name__ for m in self.to_p),
            tuple(self.to_d),
            self.d_connected,
            self.p_connected,
            bool(self.p_released),
            len(self.p_reused),
            len(self.leases),
            tuple(sorted(self.pool.owner.items())),
            self.adopted,
            self.closed,
        )
