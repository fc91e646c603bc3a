"""The decode end of a hand-off inside the engine: executes what `Intake` decides, on the cache and the transfer thread.

Everything received lies in memory that this sequence alone holds; it becomes part of the sequence by `Adopt`, which
nothing but a confirmation reaches.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from twinflow.cache.arena import Arena
from twinflow.cache.base import BlockId, Cache, SlotId
from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.errors import HandoffFailed, Incompatible
from twinflow.contracts.tags import StateTag
from twinflow.engine import base
from twinflow.engine.base import Notice, PullDone
from twinflow.engine.sequence import Sequence
from twinflow.transfer import intake
from twinflow.transfer.base import PeerArena, PeerKey, PullFinished
from twinflow.transfer.checksum import crc32
from twinflow.transfer.intake import Intake
from twinflow.transfer.plan import plan_pull
from twinflow.transfer.thread import TransferThread


@dataclass(frozen=True, slots=True)
class AllRead:
    """Of a sequence's hand-off. Its peer is told, and about to confirm it: what needs none of the received bytes can be done
    meanwhile."""

    id: str


class Pulls:
    """Methods return notices for the front and raise HandoffFailed where the hand-off has failed: the caller ends the
    sequence. `reserve` is called when a sequence needs its memory now; `reserved` answers, in that call or later.
    """

    def __init__(
        self,
        arena: Arena,
        cache: Cache,
        fingerprint: str,
        transfer: TransferThread | None,
        verify: bool,
        reserve: Callable[[Sequence], None],
    ) -> None:
        self.arena = arena
        self.cache = cache
        self.fingerprint = fingerprint
        self.transfer = transfer
        self.verify = verify
        self.reserve = reserve
        self._posted: dict[
            str, tuple[Sequence, Intake]
        ] = {}  # by pull id, also after the sequence or hand-off has ended
        self.all_read: list[AllRead] = []  # since the engine last looked; their `PullDone` is among the notices
        self._refused: dict[PeerKey, str] = {}  # peers that cannot be read over a path that is allowed

    def open(self, sequence: Sequence, peer: PeerArena, want_checkpoint_at: int = 0) -> None:
        """A hand-off from `peer` begins; the sequence holds its attention hit."""
        if self.transfer is None:
            raise HandoffFailed("this worker has no transport; set transport=nixl")
        if peer.key in self._refused:
            raise Incompatible(self._refused[peer.key])
        assert sequence.holding is not None
        position = sequence.start_tokens
        sequence.peer = peer
        sequence.handoffs += 1
        sequence.intake = Intake(
            request_id=f"{sequence.id}/{sequence.handoffs}",  # pull ids are unique for ever
            block_tokens=sequence.chain.block_tokens,
            have_blocks=len(sequence.holding.blocks),
            expected=self._tag(sequence, position),
            want=self._tag(sequence, want_checkpoint_at) if want_checkpoint_at else None,
            verify=self.verify,
        )
        self.transfer.connect(peer)

    def announced(self, sequence: Sequence, message: base.BlocksAnnounced) -> list[Notice]:
        assert sequence.intake is not None
        self._wake(sequence)
        actions = sequence.intake.announced(message.first_index, message.blocks, message.checksums)
        return self._execute(sequence, actions)

    def finished(self, sequence: Sequence, message: base.PrefillFinished) -> list[Notice]:
        assert sequence.intake is not None
        sequence.intake.moved.finished = time.monotonic()
        self._wake(sequence)
        theirs = message.stats
        sequence.stats = replace(
            sequence.stats,
            cached_tokens=theirs.cached_tokens,
            prefill_attention_tokens=theirs.prefill_attention_tokens,
            prefill_checkpoints=theirs.prefill_checkpoints,
            prefill_resumed_tokens=theirs.prefill_resumed_tokens,
        )
        actions = sequence.intake.finished(
            message.first_index,
            message.blocks,
            message.checksums,
            message.slot,
            message.slot_checksum,
            message.tag,
            message.checkpoint,
        )
        return self._execute(sequence, actions)

    def reserved(self, sequence: Sequence) -> list[Notice]:
        """The sequence's memory is there (`Cache.complete`). A slot for the checkpoint that was asked for comes on top, if
        there is one."""
        received, held = sequence.intake, sequence.holding
        assert received is not None and held is not None and held.slot is not None
        received.moved.waited_s = time.monotonic() - sequence.waiting_since_s
        spare = self.cache.take_checkpoint_slot(held, received.want.position) if received.want is not None else None
        return self._execute(sequence, received.reserved(held.blocks, held.slot, spare))

    def pull_finished(self, event: PullFinished) -> tuple[Sequence | None, Seq[intake.Action]]:
        """Unpins what the pull wrote to. Returns its sequence and what is to be done next (`proceed`)."""
        if event.pull_id not in self._posted:
            return None, ()
        sequence, received = self._posted.pop(event.pull_id)
        if event.refused and sequence.peer is not None and sequence.intake is received:
            self._refused[sequence.peer.key] = event.error
        actions = received.pull_finished(
            event.pull_id,
            event.ok,
            event.error,
            event.bytes,
            event.seconds,
            event.descriptors,
            event.transport,
            event.began,
        )
        for action in actions:
            if isinstance(action, intake.Unpin):
                self.cache.unpin_io(map(BlockId, action.blocks), map(SlotId, action.slots))
        return sequence, [a for a in actions if not isinstance(a, intake.Unpin)]

    def proceed(self, sequence: Sequence, actions: Seq[intake.Action]) -> list[Notice]:
        return self._execute(sequence, actions)

    def confirm(self, sequence: Sequence) -> None:
        """Confirmed on a live session: what was received becomes the sequence's own, or HandoffFailed is raised."""
        assert sequence.intake is not None
        self._execute(sequence, sequence.intake.confirmed(sequence.intake.session_epoch))

    def cancel(self, sequence: Sequence) -> str:
        """The sequence, or its hand-off, ends: nothing more is posted; what is posted stays pinned until it is terminal.
        Returns why the hand-off had failed by itself before, "" if it had not."""
        if sequence.intake is None:
            return ""
        cause = sequence.intake.fail_reason
        for action in sequence.intake.cancelled():
            if isinstance(action, intake.CancelPull) and self.transfer is not None:
                self.transfer.cancel(action.pull_id)
        return cause.value if cause is not None else ""

    def forget(self, key: PeerKey) -> None:
        self._refused.pop(key, None)
        if self.transfer is not None:
            self.transfer.disconnect(key)

    def close(self) -> None:
        if self.transfer is not None:
            self.transfer.close()

    def _execute(self, sequence: Sequence, actions: Seq[intake.Action]) -> list[Notice]:
        notices: list[Notice] = []
        assert self.transfer is not None and sequence.holding is not None and sequence.intake is not None
        for action in actions:
            match action:
                case intake.Reserve():
                    self.reserve(sequence)
                case intake.Pull():
                    notices += self._pull(sequence, action)
                case intake.CancelPull(pull_id):
                    self.transfer.cancel(pull_id)
                case intake.Verify(blocks, slots):
                    sums = {b: crc32(self.arena.block_bytes(b)) for b in blocks}
                    slot_sums = {s: crc32(self.arena.slot_bytes(s)) for s in slots}
                    notices += self._execute(sequence, sequence.intake.verified(sums, slot_sums))
                case intake.SayPulled(blocks, slots):
                    moved = sequence.intake.moved
                    moved.tail_s = time.monotonic() - moved.finished
                    notices.append(PullDone(sequence.id, blocks, slots))
                    self.all_read.append(AllRead(sequence.id))
                case intake.Adopt(tag, checkpoint):
                    self._adopt(sequence, tag, checkpoint)
                case intake.Fail(reason, message):
                    refused = sequence.peer is not None and sequence.peer.key in self._refused
                    kind = Incompatible if refused else HandoffFailed
                    raise kind(f"hand-off from {self._peer_name(sequence)} failed ({reason.value}): {message}")
        return notices

    def _wake(self, sequence: Sequence) -> None:
        """There is something to read, and what is read of it takes a moment to find out."""
        if self.transfer is not None and sequence.peer is not None:
            self.transfer.wake(sequence.peer.key)

    def _pull(self, sequence: Sequence, pull: intake.Pull) -> list[Notice]:
        assert self.transfer is not None and sequence.peer is not None and sequence.intake is not None
        self.cache.pin_io((BlockId(b) for _, b in pull.blocks), (SlotId(s) for _, s in pull.slots))
        self._posted[pull.pull_id] = (sequence, sequence.intake)
        try:
            ranges = plan_pull(self.arena.geometry, sequence.peer, pull.blocks, pull.slots)
        except ValueError as error:  # names that the peer's own geometry refuses: nothing was posted
            _, actions = self.pull_finished(PullFinished(pull.pull_id, False, str(error)))
            return self._execute(sequence, actions)
        self.transfer.pull(pull.pull_id, sequence.peer.key, ranges)
        return []

    def _adopt(self, sequence: Sequence, tag: StateTag, checkpoint: tuple[int, StateTag] | None) -> None:
        assert sequence.holding is not None and sequence.intake is not None
        self.cache.adopt(sequence.holding, tag)
        sequence.received, sequence.joined_s = True, time.monotonic()
        if checkpoint is not None:
            assert sequence.holding.checkpoint_slot == checkpoint[0]
            self.cache.store_checkpoint(sequence.holding, checkpoint[1])
        self.cache.checkpoint(sequence.holding, CheckpointKind.RECEIVED)  # for a next turn that rewrites the reply
        moved = sequence.intake.moved
        sequence.stats = replace(
            sequence.stats,
            route="remote",
            blocks_moved=moved.blocks,
            slots_moved=moved.slots,
            bytes_moved=moved.bytes,
            transfer_s=moved.seconds,
            transport=moved.transport,
            extra={
                **sequence.stats.extra,
                base.DESCRIPTORS: moved.descriptors,
                base.EARLY_BYTES: moved.early_bytes,
                base.WAIT_S: moved.waited_s,
                base.TAIL_S: moved.tail_s,
                base.PULLS: moved.pulls,
                base.POST_S: moved.began - moved.finished,
                base.CONFIRM_S: sequence.joined_s - moved.finished - moved.tail_s,
            },
        )

    def _tag(self, sequence: Sequence, position: int) -> StateTag:
        return StateTag(sequence.chain.prefix_hash(position), position, self.fingerprint)

    def _peer_name(self, sequence: Sequence) -> str:
        return sequence.peer.worker_id if sequence.peer else "nobody"
