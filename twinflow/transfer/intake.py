"""The decode side's half of one hand-off, as a pure state machine: inputs are calls, outputs actions as data.

    OPEN ──reserved──▶ RESERVED ──▶ PULLING ──all read──▶ PULLED ──confirmed──▶ CONFIRMED
      └──────────── failed · cancelled · session lost ───────────▶ FAILED ──last read ends──▶ TERMINAL

The engine executes the actions in the order given and knows no rule of its own:

    Reserve      take memory for the whole request, then call `reserved`; while there is none, wait and keep asking
    Pull         pin the local units, plan, post; call `pull_finished` when it is terminal (also if planning refused it)
    Unpin        these units' reads are terminal
    CancelPull   ask the transfer thread to post no more of it; `pull_finished` still comes
    Verify       compute the checksums of these local units, then call `verified`
    SayPulled    send `Pulled` naming these remote units
    Adopt        the received bytes are valid: `cache.adopt`, and keep the checkpoint
    Fail         give the memory back (what is pinned becomes doomed until `Unpin`) and recover the request

Adopt comes out of `confirmed` alone, and only in PULLED: finished seen, every needed block and the slot read DONE,
`SayPulled` issued after that, the confirmation received after that, of the same live session.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from twinflow.contracts.tags import StateTag
from twinflow.transfer.base import OfferedState


class Phase(Enum):
    OPEN = "open"
    RESERVED = "reserved"
    PULLING = "pulling"
    PULLED = "pulled"
    CONFIRMED = "confirmed"
    FAILED = "failed"  # reads may still be outstanding
    TERMINAL = "terminal"  # failed, and no read is outstanding


class FailReason(Enum):
    PEER = "peer"  # the prefill side said so, or refused to confirm
    SESSION_LOST = "session_lost"
    TRANSFER = "transfer"  # a read failed or could not be planned
    PROTOCOL = "protocol"  # the peer contradicts itself
    TAG = "tag"  # the offered state is not the one expected
    CHECKSUM = "checksum"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Reserve:
    pass


@dataclass(frozen=True, slots=True)
class Pull:
    """Pairs of (remote, local)."""

    pull_id: str
    blocks: tuple[tuple[int, int], ...]
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Unpin:
    """Local units."""

    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelPull:
    pull_id: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Local units."""

    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SayPulled:
    """Remote units, all of which were read DONE."""

    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adopt:
    """`checkpoint`: the local slot with a state of the prompt's inside, to be kept for siblings, and its tag."""

    tag: StateTag
    checkpoint: tuple[int, StateTag] | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    reason: FailReason
    message: str


Action = Reserve | Pull | Unpin | CancelPull | Verify | SayPulled | Adopt | Fail


@dataclass(slots=True)
class Moved:
    """What this hand-off moved so far. Bytes and counts of DONE reads; `seconds`: while any of its pulls was out, those at
    once counted once. `early_bytes` moved before the peer had finished the prompt, `waited_s` went by until there was memory,
    `tail_s` from the end of the prompt until all was read (and compared, with checksums)."""

    blocks: int = 0
    slots: int = 0
    bytes: int = 0
    early_bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    pulls: int = 0
    transport: str = ""
    waited_s: float = 0.0
    tail_s: float = 0.0
    began: float = field(default=0.0, compare=False)  # when the newest of them was posted; monotonic, as the next two
    until: float = 0.0  # when the newest of them ended
    finished: float = 0.0  # when the end of the prompt was told

    def took(self, began: float, seconds: float) -> None:
        """A pull that has ended now; they are told in the order of their ends."""
        self.seconds += max(0.0, began + seconds - max(began, self.until))
        self.began = max(self.began, began)
        self.until = max(self.until, began + seconds)


@dataclass(slots=True)
class Intake:
    """One hand-off. One owner, the engine loop.

    `expected` names the state after all prompt tokens. The decode side already holds the first `have_blocks` blocks;
    what the peer announces of these is ignored. `want` names the state inside the prompt that was asked for besides: it is
    taken if the peer has it and memory for it is here.
    """

    request_id: str
    block_tokens: int
    have_blocks: int
    expected: StateTag
    want: StateTag | None = None
    verify: bool = False
    session_epoch: int = 0

    phase: Phase = Phase.OPEN
    fail_reason: FailReason | None = None
    moved: Moved = field(default_factory=Moved)
    _finished: bool = False
    _verifying: bool = False
    _asked: bool = False  # Reserve was issued
    _remote: dict[int, int] = field(default_factory=dict)  # index in the prompt -> remote block
    _named: set[int] = field(default_factory=set)  # remote blocks, each announced once
    _checksums: dict[int, int] = field(default_factory=dict)  # index -> crc32
    _offered: tuple[OfferedState, ...] = ()  # remote slots: the state after the prompt, then the checkpoint, if any
    _local: Sequence[int] = ()  # index -> local block
    _local_slots: tuple[int, ...] = ()  # for `_offered`, in that order
    _waiting: list[int] = field(default_factory=list)  # announced indices without a pull
    _slots_wait: bool = False
    _outstanding: dict[str, Pull] = field(default_factory=dict)
    _read: set[int] = field(default_factory=set)  # local blocks read DONE
    _slots_read: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.have_blocks <= self.total_blocks:
            raise ValueError(f"have_blocks={self.have_blocks} is outside 0..{self.total_blocks}")

    @property
    def total_blocks(self) -> int:
        """Blocks of the prompt, a partial last one included."""
        return -(-self.expected.position // self.block_tokens)

    @property
    def over(self) -> bool:
        """Failed or confirmed: no input but `pull_finished` has an effect any more."""
        return self.phase in (Phase.CONFIRMED, Phase.FAILED, Phase.TERMINAL)

    @property
    def outstanding_blocks(self) -> tuple[int, ...]:
        """Local blocks with a read that is not terminal."""
        return tuple(local for p in self._outstanding.values() for _, local in p.blocks)

    @property
    def outstanding_slots(self) -> tuple[int, ...]:
        return tuple(local for p in self._outstanding.values() for _, local in p.slots)

    # ---- inputs ----

    def announced(self, first_index: int, blocks: Sequence[int], checksums: Sequence[int] = ()) -> list[Action]:
        """`blocks[i]` at the peer holds block `first_index + i` of the prompt, written."""
        if self.over:
            return []
        if self._finished:
            return self._fail(FailReason.PROTOCOL, "blocks were announced after the prefill had finished")
        wrong = self._record(first_index, blocks, checksums)
        return self._fail(FailReason.PROTOCOL, wrong) if wrong else self._advance()

    def finished(
        self,
        first_index: int,
        blocks: Sequence[int],
        checksums: Sequence[int],
        slot: int,
        slot_checksum: int,
        tag: StateTag,
        checkpoint: OfferedState | None = None,
    ) -> list[Action]:
        """The rest of the blocks, the slot with the state after the prompt, and the wanted checkpoint if the peer has it."""
        if self.over:
            return []
        if self._finished:
            return self._fail(FailReason.PROTOCOL, "the prefill finished twice")
        if tag != self.expected:
            return self._fail(FailReason.TAG, f"the offered state is {tag}, expected {self.expected}")
        if checkpoint is not None and self.want is not None and checkpoint.tag != self.want:
            return self._fail(FailReason.TAG, f"the offered checkpoint is {checkpoint.tag}, expected {self.want}")
        wrong = self._record(first_index, blocks, checksums)
        if wrong:
            return self._fail(FailReason.PROTOCOL, wrong)
        missing = [i for i in range(self.have_blocks, self.total_blocks) if i not in self._remote]
        if missing:
            return self._fail(FailReason.PROTOCOL, f"finished without block {missing[0]} ({len(missing)} missing)")
        state = OfferedState(slot, slot_checksum, tag)
        wanted = checkpoint if self.want is not None else None
        if wanted is not None and wanted.slot == slot:
            return self._fail(FailReason.PROTOCOL, f"remote slot {slot} was announced for two states")
        self._offered = (state,) if wanted is None else (state, wanted)
        self._finished = self._slots_wait = True
        return self._advance()

    def hold(self, blocks: int) -> None:
        """So many of the prompt's first blocks are here by now: what the peer announces of these, or has announced, is ignored.
        Raises ValueError after `reserved`, and for less than before."""
        if self.phase is not Phase.OPEN or not self.have_blocks <= blocks <= self.total_blocks:
            raise ValueError(f"{self.request_id}: {blocks} of {self.total_blocks} blocks, in {self.phase.value}")
        self.have_blocks = blocks
        self._waiting = [i for i in self._waiting if i >= blocks]
        self._remote = {i: remote for i, remote in self._remote.items() if i >= blocks}
        self._checksums = {i: checksum for i, checksum in self._checksums.items() if i >= blocks}

    def reserved(
        self, local_blocks: Sequence[int], local_slot: int, local_checkpoint: int | None = None
    ) -> list[Action]:
        """Memory: `local_blocks[i]` for block i of the prompt (more are ignored), the slot, and maybe one for what is wanted."""
        if self.over:
            return []
        if self.phase is not Phase.OPEN:
            raise ValueError(f"{self.request_id}: reserved twice")
        local = tuple(local_blocks[: self.total_blocks])
        if len(local) < self.total_blocks or len(set(local)) < len(local):
            raise ValueError(f"{self.request_id}: {self.total_blocks} distinct local blocks are needed, got {local}")
        self._local_slots = (local_slot,) if local_checkpoint is None else (local_slot, local_checkpoint)
        self._local, self.phase = local, Phase.RESERVED
        return self._advance()

    def pull_finished(
        self,
        pull_id: str,
        ok: bool,
        error: str = "",
        bytes: int = 0,
        seconds: float = 0.0,
        descriptors: int = 0,
        transport: str = "",
        began: float = 0.0,
    ) -> list[Action]:
        """A pull is terminal. Unknown and repeated ids are ignored."""
        pull = self._outstanding.pop(pull_id, None)
        if pull is None:
            return []
        actions: list[Action] = [Unpin(tuple(d for _, d in pull.blocks), tuple(d for _, d in pull.slots))]
        self.moved.bytes += bytes
        self.moved.early_bytes += 0 if self._finished else bytes
        self.moved.took(began, seconds)
        self.moved.descriptors += descriptors
        self.moved.pulls += 1
        self.moved.transport = transport or self.moved.transport
        if self.phase is Phase.FAILED and not self._outstanding:
            self.phase = Phase.TERMINAL
        if self.over:
            return actions
        if not ok:
            return actions + self._fail(FailReason.TRANSFER, error or "a read failed")
        self._read.update(d for _, d in pull.blocks)
        self._slots_read = self._slots_read or bool(pull.slots)
        self.moved.blocks += len(pull.blocks)
        self.moved.slots += len(pull.slots)
        return actions + self._advance()

    def verified(self, block_checksums: Mapping[int, int], slot_checksums: Mapping[int, int]) -> list[Action]:
        """Answer to `Verify`: crc32 by local block, and by local slot."""
        if self.over or not self._verifying:
            return []
        self._verifying = False
        for index, want in sorted(self._checksums.items()):
            got = block_checksums.get(self._local[index])
            if got != want:
                return self._fail(FailReason.CHECKSUM, f"block {index}: crc32 {got} here, {want} at the peer")
        for state, local in self._states():
            if (got := slot_checksums.get(local)) != state.checksum:
                why = f"slot of position {state.tag.position}: crc32 {got} here, {state.checksum} at the peer"
                return self._fail(FailReason.CHECKSUM, why)
        return self._say_pulled()

    def confirmed(self, session_epoch: int = 0) -> list[Action]:
        """`Confirmed` arrived on the session `session_epoch`. Ignored when over or of another session."""
        if self.over or session_epoch != self.session_epoch:
            return []
        if self.phase is not Phase.PULLED:
            return self._fail(FailReason.PROTOCOL, f"confirmed in phase {self.phase.value}, before `Pulled` was said")
        self.phase = Phase.CONFIRMED
        kept = [(local, state.tag) for state, local in self._states()][1:]
        return [Adopt(self.expected, kept[0] if kept else None)]

    def failed(self, message: str) -> list[Action]:
        """The peer failed, or refused to confirm."""
        return self._fail(FailReason.PEER, message)

    def session_lost(self, message: str = "the session to the prefill worker is over") -> list[Action]:
        """From here on a `Confirmed` is of a dead session."""
        return self._fail(FailReason.SESSION_LOST, message)

    def cancelled(self) -> list[Action]:
        """Not needed any more (client gone, terminal first token, deadline)."""
        return self._fail(FailReason.CANCELLED, "cancelled")

    # ---- rules ----

    def _record(self, first_index: int, blocks: Sequence[int], checksums: Sequence[int]) -> str:
        """Notes an announcement; returns what is wrong with it, "" if nothing."""
        if len(checksums) != len(blocks) and (checksums or self.verify):
            return f"{len(blocks)} blocks came with {len(checksums)} checksums"
        if blocks and not 0 <= first_index <= self.total_blocks - len(blocks):
            last = first_index + len(blocks) - 1
            return f"blocks {first_index}..{last} are outside the prompt's {self.total_blocks} blocks"
        for i, remote in enumerate(blocks):
            index = first_index + i
            if index < self.have_blocks:
                continue
            if index in self._remote:
                return f"block {index} of the prompt was announced twice"
            if remote in self._named:
                return f"remote block {remote} was announced for two blocks of the prompt"
            self._remote[index] = remote
            self._named.add(remote)
            self._waiting.append(index)
            if self.verify:
                self._checksums[index] = checksums[i]
        return ""

    def _advance(self) -> list[Action]:
        """The next thing to do, if any: reserve, pull what waits, or, with everything read DONE, verify and say so."""
        if self.phase is Phase.OPEN:
            if self._asked or not (self._waiting or self._finished):
                return []
            self._asked = True
            return [Reserve()]
        if self._waiting or self._slots_wait:
            return [self._pull()]
        if not self._finished or self._outstanding or self._verifying or self.phase is Phase.PULLED:
            return []
        if not self._slots_read or any(self._local[i] not in self._read for i in self._remote):
            raise AssertionError(f"{self.request_id}: nothing waits and nothing is outstanding, yet not all is read")
        if self.verify:
            self._verifying = True
            slots = tuple(local for _, local in self._states())
            return [Verify(tuple(self._local[i] for i in sorted(self._remote)), slots)]
        return self._say_pulled()

    def _pull(self) -> Pull:
        blocks = tuple((self._remote[i], self._local[i]) for i in self._waiting)
        slots = tuple((state.slot, local) for state, local in self._states()) if self._slots_wait else ()
        pull = Pull(f"{self.request_id}/{self.moved.pulls + len(self._outstanding) + 1}", blocks, slots)
        self._waiting, self._slots_wait = [], False
        self._outstanding[pull.pull_id] = pull
        self.phase = Phase.PULLING
        return pull

    def _states(self) -> Iterator[tuple[OfferedState, int]]:
        """What is offered and has memory here: the state after the prompt, then maybe the checkpoint."""
        return zip(self._offered, self._local_slots, strict=False)

    def _say_pulled(self) -> list[Action]:
        self.phase = Phase.PULLED
        slots = tuple(state.slot for state, _ in self._states())
        return [SayPulled(tuple(self._remote[i] for i in sorted(self._remote)), slots)]

    def _fail(self, reason: FailReason, message: str) -> list[Action]:
        if self.over:
            return []
        self.fail_reason = reason
        self.phase = Phase.FAILED if self._outstanding else Phase.TERMINAL
        return [*(CancelPull(p) for p in self._outstanding), Fail(reason, message)]
