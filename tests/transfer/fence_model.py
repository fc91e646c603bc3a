"""A prefill and a decode worker around one request, for a search through every order of what can happen.

Real parts on both sides: `Intake`, `LeaseTable`, `Generations` over the loopback transport with the manual scheduler,
`plan_pull`, and on the decode side the cache itself. Modelled: the network (messages may arrive late, also of a session that is
over), the prefill worker's memory (reused as soon as no lease names it), and what its reader does after a loss: it tries once
more.

Faults are counted, so that a search can be bounded: a cancel, the loss of the session on either side, a restart of the prefill
worker, a lease that the prefill side ends, a new generation on either side, a read that fails. A read that copies early, late,
after reuse, in part, or never is no fault: all of these are tried always.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.transfer.fence_parts import (
    ATTEMPTS,
    BLOCKS,
    CHECKPOINT,
    FAULTS,
    FINGERPRINT,
    GEOMETRY,
    LAYOUT,
    OTHER,
    SLOT,
    TOKENS,
    UNIT,
    WANTED,
    Attempt,
    Clock,
    Message,
    Nothing,
    Prefill,
    Violation,
    add_up,
    expect,
    places,
    right,
    would_change_nothing,
)
from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.hashing import TokenChain, pack_tokens
from twinflow.contracts.tags import StateTag
from twinflow.transfer import intake
from twinflow.transfer.base import GenerationClosed, GenerationOpened, OfferedState, PullFinished
from twinflow.transfer.generation import Generation, make_pull
from twinflow.transfer.generations import Generations, RenewalLimits
from twinflow.transfer.intake import Intake
from twinflow.transfer.leases import SessionKey
from twinflow.transfer.loopback import LoopbackNetwork, LoopbackTransport, Manual, PostedRead
from twinflow.transfer.plan import plan_pull, split_posts


@dataclass
class Model:
    """`actions()` names what can happen next, `do(name)` makes it happen and checks what must always hold. `guard` False lets
    the prefill side confirm without looking, to show that the search would notice."""

    max_faults: int
    guard: bool = True
    faults: int = 0
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.network = LoopbackNetwork()
        self.p = Prefill(self.network)
        self.memory = bytearray(GEOMETRY.total_bytes)
        self.manual = Manual()
        self.cache = HybridCache(LAYOUT, GEOMETRY, Nothing())
        self.events: list[object] = []
        limits = RenewalLimits(doomed_bytes=1 << 30, doomed_s=1e9, drain_s=5.0)
        self.transfer = Generations(self._agent(1), self.events.append, reopen=self._agent, limits=limits)
        self.chain = TokenChain(b"root", 1, pack_tokens(range(TOKENS)))
        self.attempts: list[Attempt] = []
        self.posted: dict[str, Attempt] = {}
        self.epoch = 0
        self.connected = False
        self.to_p: list[Message] = []
        self.to_d: list[Message] = []
        self.whole: set[int] = set()  # numbers of reads that have copied every byte
        self.other: Holding | None = None
        self.reused = False
        self.cancelled = False

    def _agent(self, generation: int) -> LoopbackTransport:
        return LoopbackTransport(self.network, f"d/1/{generation}", self.memory, self.manual)

    # ---- what can happen ----

    @property
    def current(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts and not self.attempts[-1].over else None

    @property
    def adopted(self) -> bool:
        return any(a.used for a in self.attempts)

    def actions(self) -> list[str]:
        p, now = self.p, self.current
        computing = bool(p.lease) and p.connected > 0
        can = {
            "open": now is None and len(self.attempts) < ATTEMPTS and not self.cancelled and not self.adopted
            and (p.free or not self.connected),
            "announce": computing and p.progress == 0,
            "finish": computing and p.progress == 1,
            "deliver to P": bool(self.to_p),
            "deliver to D": bool(self.to_d),
            "P reuses": p.stale,
            "D reuses": not self.reused and now is None and bool(self.attempts) and self._free() > 0,
            "D retires": self.transfer.retiring is not None,
            "P closes": len(p.agents) > 1,
            "poll": any(r.state != "posted" for g in self.transfer.live for r in self._unpolled(g)),
        }  # fmt: skip
        faults = {
            "D cancels": now is not None,
            "D loses": self.connected,
            "P loses": p.connected > 0,
            "P ends": bool(p.lease),
            "P restarts": p.incarnation == 1 and bool(self.attempts),
            "D renews": self.transfer.current.number == 1 and bool(self.posted),
            "P renews": p.generation == 1 and bool(self.attempts),
        }
        names = [n for n, ok in can.items() if ok]
        if self.faults < self.max_faults:
            names += [n for n, ok in faults.items() if ok]
        return names + [name for k, r in enumerate(self.manual.reads) if r.state == "posted" for name in self._reads(k)]

    def _reads(self, k: int) -> list[str]:
        """A copy that would change nothing is left out; in part copies the read with the slot, of the hand-off that is on."""
        read = self.manual.reads[k]
        same = would_change_nothing(read, self.network, self.memory)
        names = [] if k in self.whole and same else [f"copy {k}"]
        if k in self.whole:
            names.append(f"done {k}")
        elif self.current is not None and k == 2 * len(self.attempts) - 1 and not read.copies and not same:
            names.append(f"half {k}")
        return names + ([f"fail {k}"] if self.faults < self.max_faults and self.current is not None else [])

    def _unpolled(self, generation: Generation) -> Iterable[PostedRead]:
        assert isinstance(generation.transport, LoopbackTransport)
        return generation.transport._reads.values()

    def _free(self) -> int:
        return self.cache.counts()["attention"].free

    def do(self, name: str, *, check: bool = True) -> None:
        verb, _, number = name.partition(" ")
        if number.isdigit():
            self._read(verb, int(number))
        else:
            if name in FAULTS:
                self.faults += 1
            plain = {
                "P reuses": self.p.reuse,
                "P restarts": self.p.start,
                "P renews": self.p.renew,
                "poll": self.transfer.turn,
            }
            (plain.get(name) or getattr(self, "_" + name.lower().replace(" ", "_")))()
        self._settle()
        if check:
            self.check()

    def _read(self, verb: str, k: int) -> None:
        read = self.manual.reads[k]
        if verb == "copy" and read.copy() == read.size_bytes:
            self.whole.add(k)
        elif verb == "half":
            read.copy(0, read.size_bytes // 2)
        elif verb == "done":
            read.done()
            if self.current is None:  # nobody waits for it: when it is polled makes no difference
                self.transfer.turn()
        elif verb == "fail":
            self.faults += 1
            read.fail("ERR")

    # ---- what must always hold ----

    def check(self) -> None:
        add_up(self.cache)
        given_up = [a for a in self.attempts if a.over and not a.used]
        doomed = sum(len(a.intake.outstanding_blocks) + len(a.intake.outstanding_slots) for a in given_up)
        if doomed != (found := sum(c.doomed for c in self.cache.counts().values())):
            raise Violation(f"{doomed} units have a read that was given up, {found} are doomed")
        if self.other is not None:
            where = places(self.other.blocks, [self.other.slot])
            expect(self.memory, where, [OTHER] * len(where), "memory of a new owner")
        for attempt in self.attempts:
            if attempt.used:
                self._verify(attempt)

    def _verify(self, attempt: Attempt) -> None:
        """What is used, now and later, are the prompt's bytes. A checkpoint is nobody's: it may be evicted."""
        want = [right("block", i) for i in range(TOKENS)] + [right("slot", TOKENS)]
        where = places(attempt.holding.blocks, [attempt.holding.slot])
        if attempt.kept is not None and WANTED in self.cache.match(self.chain).checkpoints:
            want.append(right("slot", WANTED))
            where += places([], [attempt.kept])
        expect(self.memory, where, want, "used bytes")

    def finish(self) -> None:
        """Everything ends: all memory is free, whatever reads are still posted."""
        for attempt in self.attempts:
            if not attempt.over:
                self._execute(attempt, attempt.intake.cancelled())
            if attempt.used:
                self.cache.release(attempt.holding, donate=False)
        if self.other is not None:
            self.cache.release(self.other, donate=False)
        self.transfer.close("the end")
        self._settle()
        add_up(self.cache, quiet=True)
        if any(read.copy() for read in self.manual.reads):
            raise Violation("a read writes after its agent is gone")

    # ---- the prefill side ----

    def _announce(self) -> None:
        p = self.p
        p.progress, p.free = 1, False
        p.write("block", BLOCKS[0], right("block", 0))
        if p.leases.offer(p.lease, BLOCKS[:1]):
            self.to_d.append(Message(p.connected, "blocks", p.lease))

    def _finish(self) -> None:
        p = self.p
        p.progress = 2
        p.write("block", BLOCKS[1], right("block", 1))
        p.write("slot", SLOT, right("slot", TOKENS))
        p.write("slot", CHECKPOINT, right("slot", WANTED))
        if p.leases.offer(p.lease, BLOCKS[1:], (SLOT, CHECKPOINT)):
            self.to_d.append(Message(p.connected, "finished", p.lease))

    def _deliver_to_p(self) -> None:
        m, p = self.to_p.pop(0), self.p
        session = SessionKey("d", "1", m.epoch)
        if m.said is None:
            over = p.leases.release(m.lease) if p.leases.lease_of(session, "r") == m.lease else None
            p.ended([over] if over else [])
            return
        assert m.arena is not None
        verdict = p.leases.pulled(
            session, m.lease, incarnation=m.arena.incarnation, epoch=m.epoch, generation=m.arena.generation,
            blocks=m.said.blocks, slots=m.said.slots,
        )  # fmt: skip
        p.ended([verdict.ended] if verdict.ended else [])
        kind = "confirmed" if verdict.confirmed or not self.guard else "failed"
        self.to_d.append(Message(m.epoch, kind, m.lease))

    def _p_ends(self) -> None:
        """The lease's time is over, or an operator cancels: the reader is told."""
        over = self.p.leases.release(self.p.lease)
        self.to_d.append(Message(self.p.connected, "failed", self.p.lease))
        self.p.ended([over] if over else [])

    def _p_loses(self) -> None:
        self.p.ended(self.p.leases.end_session(SessionKey("d", "1", self.p.connected)))
        self.p.connected = 0

    def _p_closes(self) -> None:
        lease = self.p.lease
        self.p.close_old()
        if lease and not self.p.lease:
            self.to_d.append(Message(self.p.connected, "failed", lease))

    # ---- the decode side ----

    def _open(self) -> None:
        p = self.p
        if not self.connected or p.connected != self.epoch:
            self.epoch, self.connected = self.epoch + 1, True
            p.ended(p.leases.open_session(SessionKey("d", "1", self.epoch)))
            p.connected = self.epoch
        p.lease, p.progress = p.leases.grant(SessionKey("d", "1", self.epoch), "r"), 0
        p.free = False
        received = Intake(
            request_id=f"r/{len(self.attempts)}", block_tokens=1, have_blocks=0, expected=self._tag(TOKENS),
            want=self._tag(WANTED), session_epoch=self.epoch,
        )  # fmt: skip
        arena = p.arena()
        self.transfer.connect(arena)
        self.attempts.append(Attempt(received, self.epoch, arena, p.lease, self.cache.hold_prefix(self.chain)))

    def _tag(self, position: int) -> StateTag:
        return StateTag(self.chain.prefix_hash(position), position, FINGERPRINT)

    def _deliver_to_d(self) -> None:
        m, now = self.to_d.pop(0), self.current
        if now is None or (m.lease != now.lease and m.kind != "confirmed"):
            return
        if m.kind == "confirmed":  # also one of a dead session
            self._execute(now, now.intake.confirmed(m.epoch) if m.lease == now.lease or not self.guard else [])
        elif not self.connected or m.epoch != self.epoch:
            return
        elif m.kind == "blocks":
            self._execute(now, now.intake.announced(0, BLOCKS[:1]))
        elif m.kind == "finished":
            checkpoint = OfferedState(CHECKPOINT, 0, self._tag(WANTED))
            self._execute(now, now.intake.finished(1, BLOCKS[1:], [], SLOT, 0, self._tag(TOKENS), checkpoint))
        else:
            self._execute(now, now.intake.failed("the peer gave it up"))

    def _d_cancels(self) -> None:
        now = self.current
        assert now is not None
        self.cancelled = True
        self._execute(now, now.intake.cancelled())

    def _d_loses(self) -> None:
        self.connected = False
        if self.current is not None:
            self._execute(self.current, self.current.intake.session_lost())

    def _d_renews(self) -> None:
        self.transfer.renew("asked for")

    def _d_retires(self) -> None:
        self.clock.now += 10
        self.transfer.turn()

    def _d_reuses(self) -> None:
        """The next request gets everything that is free."""
        self.reused, n = True, self._free()
        self.other = self.cache.reserve(TokenChain(b"other", 1, pack_tokens(range(100, 100 + n))), n)
        if self.other is not None:
            for at in places(self.other.blocks, [self.other.slot]):
                self.memory[at : at + UNIT] = OTHER

    def _settle(self) -> None:
        """What the transfer has reported, as the engine handles it."""
        while self.events:
            event = self.events.pop(0)
            if isinstance(event, PullFinished):
                attempt = self.posted.pop(event.pull_id)
                actions = attempt.intake.pull_finished(event.pull_id, event.ok, event.error)
                self._execute(attempt, actions)
            else:
                assert isinstance(event, GenerationOpened | GenerationClosed)

    def _execute(self, attempt: Attempt, actions: list[intake.Action]) -> None:
        for action in actions:
            match action:
                case intake.Reserve():
                    self._reserve(attempt)
                case intake.Pull():
                    self._pull(attempt, action)
                case intake.Unpin(blocks, slots):
                    self.cache.unpin_io(map(BlockId, blocks), map(SlotId, slots))
                case intake.CancelPull(pull_id):
                    self.transfer.cancel(pull_id)
                case intake.SayPulled():
                    self.to_p.append(Message(attempt.epoch, "pulled", attempt.lease, attempt.arena, action))
                case intake.Adopt(tag, checkpoint):
                    self._adopt(attempt, tag, checkpoint)
                case intake.Fail():
                    attempt.over = True
                    self.cache.release(attempt.holding, donate=False)
                    self.to_p.append(Message(attempt.epoch, "leave", attempt.lease))

    def _reserve(self, attempt: Attempt) -> None:
        held = attempt.holding
        if not self.cache.complete(held, TOKENS):
            self._execute(attempt, attempt.intake.cancelled())  # the bounded wait is over
            return
        assert held.slot is not None
        spare = self.cache.take_checkpoint_slot(held, WANTED)
        self._execute(attempt, attempt.intake.reserved(held.blocks, held.slot, spare))

    def _pull(self, attempt: Attempt, pull: intake.Pull) -> None:
        self.cache.pin_io((BlockId(b) for _, b in pull.blocks), (SlotId(s) for _, s in pull.slots))
        self.posted[pull.pull_id] = attempt
        ranges = plan_pull(GEOMETRY, attempt.arena, pull.blocks, pull.slots)
        self.transfer.pull(make_pull(pull.pull_id, attempt.arena.key, split_posts(ranges)))
        self.transfer.turn()

    def _adopt(self, attempt: Attempt, tag: StateTag, checkpoint: tuple[int, StateTag] | None) -> None:
        attempt.over = attempt.used = True
        self.cache.adopt(attempt.holding, tag)
        self.cache.commit(attempt.holding)
        if checkpoint is not None and self.cache.store_checkpoint(attempt.holding, checkpoint[1]):
            attempt.kept = checkpoint[0]
        self._verify(attempt)

    # ---- for the search ----

    def state(self) -> object:
        """Everything that decides what can still happen."""
        held = [(a.holding.blocks, a.holding.slot, a.holding.checkpoint_slot) for a in self.attempts]
        return (
            self.p.state, bytes(self.memory), self.faults, self.epoch, self.connected, self.cancelled,
            tuple(self.to_p), tuple(self.to_d),
            tuple((a.intake.phase, tuple(a.intake._outstanding), a.over, a.used, a.lease) for a in self.attempts),
            tuple((r.state, k in self.whole, r.copies > 0) for k, r in enumerate(self.manual.reads)),
            tuple(self.cache.counts().values()), tuple(map(str, held)), self.reused,
            self.transfer.current.number, self.transfer.retiring is not None, tuple(self.posted),
        )  # fmt: skip
