"""The prefill end of a hand-off inside the engine: what may be read, named only after its writes are done."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from twinflow.cache.arena import Arena
from twinflow.cache.base import Cache
from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.tags import StateTag
from twinflow.engine.base import Mode, Notice, Offered, Prefilled
from twinflow.engine.sequence import Sequence
from twinflow.transfer.base import OfferedState
from twinflow.transfer.checksum import crc32
from twinflow.transfer.thread import TransferThread


class Offers:
    """Turns the progress of OFFER sequences into announcements. The sequence holds the memory until `EndLease`."""

    def __init__(
        self, arena: Arena, cache: Cache, fingerprint: str, transfer: TransferThread | None, verify: bool
    ) -> None:
        self.arena = arena
        self.cache = cache
        self.fingerprint = fingerprint
        self.verify = verify
        self._transfer = transfer
        self._serving = False

    def open_for(self, sequences: Iterable[Sequence]) -> None:
        """Peers read from us while hand-offs are open here: over some transports that takes the transfer thread's help."""
        serving = Mode.OFFER in [s.mode for s in sequences]
        if self._transfer is not None and serving != self._serving:
            self._serving = serving
            self._transfer.serving(serving)

    def announce(self, sequence: Sequence) -> list[Notice]:
        """Full blocks that became readable since the last call; the reader's own (below `have_tokens`) are skipped. Called
        when the sequence starts and whenever a step of it has ended but the last one."""
        assert sequence.holding is not None
        self._keep_wanted(sequence)
        bt = sequence.chain.block_tokens
        first = max(sequence.announced_blocks, sequence.have_tokens // bt)
        upto = min(sequence.holding.written_tokens, sequence.start_tokens) // bt
        if upto <= first:
            return []
        sequence.announced_blocks = upto
        blocks = tuple(sequence.holding.blocks[first:upto])
        return [Offered(sequence.id, first, blocks, self._checksums(blocks))]

    def complete(self, sequence: Sequence) -> Prefilled:
        """The prompt is computed: the blocks not announced yet (the partial tail too) and the slot with its tag."""
        self._keep_wanted(sequence)
        holding = sequence.holding
        assert holding is not None and holding.slot is not None and holding.position == sequence.start_tokens
        bt = sequence.chain.block_tokens
        first = max(sequence.announced_blocks, sequence.have_tokens // bt)
        blocks = tuple(holding.blocks[first : -(-sequence.start_tokens // bt)])
        tag = StateTag(sequence.chain.prefix_hash(holding.position), holding.position, self.fingerprint)
        checkpoint = None
        if holding.checkpoint_slot is not None:
            at = sequence.want_checkpoint_at
            wanted = StateTag(sequence.chain.prefix_hash(at), at, self.fingerprint)
            checkpoint = OfferedState(holding.checkpoint_slot, self._slot_sum(holding.checkpoint_slot), wanted)
        sums, slot_sum = self._checksums(blocks), self._slot_sum(holding.slot)
        return Prefilled(sequence.id, first, blocks, sums, holding.slot, slot_sum, tag, sequence.stats, checkpoint)

    def _keep_wanted(self, sequence: Sequence) -> None:
        """The state that the reader wants besides: a cut is planned for it, unless a step is past it already, so that the
        cache keeps a copy in passing; it is lent as soon as it is there. Best effort: without a copy the reader gets none."""
        held, at = sequence.holding, sequence.want_checkpoint_at
        assert held is not None
        if not at or held.checkpoint_slot is not None:
            return
        if held.position >= at:
            self.cache.lend_checkpoint(held, at)
        elif sequence.fed_tokens < at and at not in sequence.cuts:
            sequence.plan_cut(at, CheckpointKind.JUNCTION)

    def _slot_sum(self, slot: int) -> int:
        return crc32(self.arena.slot_bytes(slot)) if self.verify else 0

    def _checksums(self, blocks: Seq[int]) -> tuple[int, ...]:
        return tuple(crc32(self.arena.block_bytes(b)) for b in blocks) if self.verify else ()
