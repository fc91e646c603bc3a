"""The prefill end of a hand-off inside the engine: what may be read, named only after its writes are done."""

from collections.abc import Sequence as Seq

from twinflow.cache.arena import Arena
from twinflow.cache.base import Cache
from twinflow.contracts.tags import StateTag
from twinflow.engine.base import Notice, Offered, Prefilled
from twinflow.engine.sequence import Sequence
from twinflow.transfer.checksum import crc32


class Offers:
    """Turns the progress of OFFER sequences into announcements. The sequence holds the memory until `EndLease`."""

    def __init__(self, arena: Arena, cache: Cache, fingerprint: str, verify: bool) -> None:
        self.arena = arena
        self.cache = cache
        self.fingerprint = fingerprint
        self.verify = verify

    def announce(self, sequence: Sequence) -> list[Notice]:
        """Full blocks that became readable since the last call; the reader's own (below `have_tokens`) are skipped."""
        assert sequence.holding is not None
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
        holding = sequence.holding
        assert holding is not None and holding.slot is not None and holding.position == sequence.start_tokens
        bt = sequence.chain.block_tokens
        first = max(sequence.announced_blocks, sequence.have_tokens // bt)
        blocks = tuple(holding.blocks[first : -(-sequence.start_tokens // bt)])
        tag = StateTag(sequence.chain.prefix_hash(holding.position), holding.position, self.fingerprint)
        slot_sum = crc32(self.arena.slot_bytes(holding.slot)) if self.verify else 0
        return Prefilled(
            sequence.id, first, blocks, self._checksums(blocks), holding.slot, slot_sum, tag, sequence.stats
        )

    def _checksums(self, blocks: Seq[int]) -> tuple[int, ...]:
        return tuple(crc32(self.arena.block_bytes(b)) for b in blocks) if self.verify else ()
