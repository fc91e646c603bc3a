"""The prefill side's leases: who may still read what, and whether what was read may be used. Pure; lives in the front.

A lease is granted per accepted hand-off, belongs to exactly one session, and ends once: confirmed, released, or with
its session. An ended lease is forgotten and its id never used again. `Confirmed` holds iff six conditions do:

(a) each announcement followed the event behind the last write: the engine reports units only after that event, only
    such reports reach `offer`, and `pulled` refuses every other name;
(b) nothing leased was changed, moved or taken over: the engine holds a reference per lease until it is told that the
    lease ended, which is exactly what the methods here return as `Ended`;
(c) incarnation, session epoch, lease and generation are checked when `Pulled` arrives: `pulled`, one `if` each;
(d) a session's end ends its leases for good: `end_session`, and `open_session` for the same worker's older sessions;
(e) `Pulled` follows DONE on every handle it names: decode side, `intake.Intake._advance`;
(f) a `Confirmed` of a dead session is discarded: decode side, `intake.Intake.confirmed`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Refusal(Enum):
    """Why a `Pulled` is not confirmed."""

    INCARNATION = "incarnation"  # read from an earlier start of this worker
    SESSION = "session"  # that session is over, or the epoch is not this session's
    LEASE = "lease"  # never granted to this session, or ended
    GENERATION = "generation"  # read through another transfer generation than the lease was granted in
    NOT_OFFERED = "not_offered"  # names something that was never announced under this lease


@dataclass(frozen=True, slots=True)
class SessionKey:
    """One stream of one decode worker. `epoch` is drawn by the decode side."""

    worker_id: str
    incarnation: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that just ended: its memory goes back to the engine (`EndLease`)."""

    lease_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to `Pulled`. Confirmed (`refusal` None): `ended` is the lease, which ends with this answer."""

    refusal: Refusal | None
    message: str = ""
    ended: Ended | None = None

    @property
    def confirmed(self) -> bool:
        return self.refusal is None


@dataclass(slots=True)
class _Lease:
    lease_id: str
    request_id: str
    session: SessionKey
    generation: int
    blocks: set[int] = field(default_factory=set)
    slots: set[int] = field(default_factory=set)

    @property
    def ended(self) -> Ended:
        return Ended(self.lease_id, self.request_id)


class LeaseTable:
    """All leases of one prefill worker. One owner (the front's event loop), no locking."""

    def __init__(self, incarnation: str, generation: int) -> None:
        self.incarnation = incarnation
        self.generation = generation
        self._granted = 0
        self._leases: dict[str, _Lease] = {}
        self._sessions: dict[SessionKey, dict[str, str]] = {}  # session -> request id -> lease id

    def __len__(self) -> int:
        """Live leases; a drain waits for 0."""
        return len(self._leases)

    def open_session(self, session: SessionKey) -> list[Ended]:
        """Returns the leases of older sessions of the same decode worker, which end now: that worker has already given
        up what they are for. Raises ValueError if this very session is open."""
        if session in self._sessions:
            raise ValueError(f"session {session} is already open")
        older = [s for s in self._sessions if s.worker_id == session.worker_id]
        ended = [e for s in older for e in self.end_session(s)]
        self._sessions[session] = {}
        return ended

    def end_session(self, session: SessionKey) -> list[Ended]:
        """Ends the session's leases for good; idempotent."""
        return [self._leases.pop(lease_id).ended for lease_id in self._sessions.pop(session, {}).values()]

    def grant(self, session: SessionKey, request_id: str) -> str:
        """A new lease, nothing offered yet. Raises ValueError if the session is over or the request already has one."""
        requests = self._sessions.get(session)
        if requests is None:
            raise ValueError(f"session {session} is not open")
        if request_id in requests:
            raise ValueError(f"request {request_id!r} already has lease {requests[request_id]}")
        self._granted += 1
        lease_id = f"{self.incarnation}/{self.generation}/{self._granted}"
        self._leases[lease_id] = _Lease(lease_id, request_id, session, self.generation)
        requests[request_id] = lease_id
        return lease_id

    def lease_of(self, session: SessionKey, request_id: str) -> str | None:
        """The request's live lease (messages name requests)."""
        return self._sessions.get(session, {}).get(request_id)

    def offer(self, lease_id: str, blocks: Iterable[int], slots: Iterable[int] = ()) -> bool:
        """These units are written and about to be announced. False = the lease has ended: announce nothing."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.blocks.update(blocks)
        lease.slots.update(slots)
        return True

    def pulled(
        self,
        session: SessionKey,
        lease_id: str,
        *,
        incarnation: str,
        epoch: int,
        generation: int,
        blocks: Iterable[int],
        slots: Iterable[int],
    ) -> Verdict:
        """May what was read be used? `session` is the stream that `Pulled` came on, the rest is what it says.

        A refusal changes nothing; a confirmation ends the lease, so that a second `Pulled` is refused.
        """
        if incarnation != self.incarnation:
            return Verdict(Refusal.INCARNATION, f"read from incarnation {incarnation!r}, this is {self.incarnation!r}")
        if session not in self._sessions or epoch != session.epoch:
            return Verdict(Refusal.SESSION, f"session epoch {epoch} of {session.worker_id!r} is not a live session")
        lease = self._leases.get(lease_id)
        if lease is None or lease.session != session:
            return Verdict(Refusal.LEASE, f"lease {lease_id!r} has ended or was not granted to this session")
        if generation != lease.generation:
            return Verdict(Refusal.GENERATION, f"read through generation {generation}, leased in {lease.generation}")
        for kind, named, offered in (("block", blocks, lease.blocks), ("slot", slots, lease.slots)):
            for unit in named:
                if unit not in offered:
                    return Verdict(Refusal.NOT_OFFERED, f"{kind} {unit} was not announced under lease {lease_id!r}")
        self._forget(lease)
        return Verdict(None, ended=lease.ended)

    def release(self, lease_id: str) -> Ended | None:
        """Ends one lease unconfirmed; None if it has already ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        self._forget(lease)
        return lease.ended

    def open_generation(self, generation: int) -> None:
        """The arena can be read through a new agent: leases from now on are of that generation. Older ones stay, since the
        older agent does."""
        self.generation = generation

    def close_generation(self, generation: int) -> list[Ended]:
        """Its agent is gone: its leases end, as nothing more can be read under them. Idempotent; sessions stay."""
        over = [lease for lease in self._leases.values() if lease.generation == generation]
        for lease in over:
            self._forget(lease)
        return [lease.ended for lease in over]

    def named(self, lease_id: str) -> tuple[int, int]:
        """How many blocks and slots were offered under a live lease."""
        lease = self._leases[lease_id]
        return len(lease.blocks), len(lease.slots)

    def leased(self) -> tuple[set[int], set[int]]:
        """Blocks and slots offered under any live lease."""
        blocks: set[int] = set()
        slots: set[int] = set()
        for lease in self._leases.values():
            blocks |= lease.blocks
            slots |= lease.slots
        return blocks, slots

    def _forget(self, lease: _Lease) -> None:
        del self._leases[lease.lease_id]
        del self._sessions[lease.session][lease.request_id]
