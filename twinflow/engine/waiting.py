"""The queue for memory: in order of arrival, all groups or none. The head waits; nobody overtakes it.

Who waits for a sibling (`siblings`) asks for no memory: until that one is done, the next in line is the head.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping

from twinflow.cache.base import Cache
from twinflow.contracts.errors import NoCapacity
from twinflow.contracts.workers import Load
from twinflow.engine.config import EngineConfig
from twinflow.engine.sequence import Phase, Sequence
from twinflow.engine.siblings import Siblings


class Waiting:
    """Owned by the engine's loop. A sequence in it is in phase WAITING and holds at most its hit."""

    def __init__(self, cache: Cache, config: EngineConfig, sequences: Mapping[str, Sequence]) -> None:
        """`sequences`: all of the engine's, among which a sibling may be found."""
        self._cache = cache
        self._siblings = Siblings(cache, sequences) if config.prefix_cache else None
        self._config = config
        self._queue: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._queue

    @property
    def head(self) -> Sequence | None:
        """The first that waits for nothing but memory."""
        siblings = self._siblings
        return next((s for s in self._queue if siblings is None or not siblings.hold_back(s)), None)

    @property
    def asking(self) -> int:
        """Those that ask for memory: who waits for a sibling doesn't."""
        return len(self._queue) - (self._siblings.waiting if self._siblings is not None else 0)

    @property
    def prompt_tokens(self) -> int:
        """To be computed here for those that wait (the prompt of a hand-off is computed elsewhere), less what siblings bring."""
        brought = self._siblings.brought_tokens if self._siblings is not None else lambda _: 0
        return sum(s.start_tokens - brought(s) for s in self._queue if not s.intake)

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """`first`: one that had to yield and arrived before everybody here."""
        sequence.phase = Phase.WAITING
        sequence.waiting_since_s = time.monotonic()
        if first:
            self._queue.appendleft(sequence)
        else:
            self._queue.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Unknown ones are ignored."""
        if sequence in self._queue:
            self._queue.remove(sequence)
            if self._siblings is not None:
                self._siblings.forget(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """The head gets its memory and is out of the queue; False = not now. Raises TooLong for what can never fit."""
        tokens = sequence.needs_tokens(self._config.growth_tokens)
        if sequence.intake:
            self._hold_more(sequence)
            assert sequence.holding is not None
            if not self._cache.complete(sequence.holding, tokens):
                return False
        else:
            holding = self._cache.reserve(sequence.chain, tokens)
            if holding is None:
                return False
            claimed, sequence.holding = sequence.holding, holding
            if claimed is not None:  # the claim kept the hit alive until here
                self._cache.release(claimed, donate=False)
        self.remove(sequence)
        return True

    def _hold_more(self, sequence: Sequence) -> None:
        """Of a hand-off: what has come into the cache since the prompt was matched need not be read, and takes no memory."""
        assert sequence.intake is not None and sequence.holding is not None
        size = sequence.chain.block_tokens
        found = self._cache.match(sequence.chain).attention_tokens // size
        if not len(sequence.holding.blocks) < found <= sequence.start_tokens // size:  # more: with a block of the reply
            return
        claimed, sequence.holding = sequence.holding, self._cache.hold_prefix(sequence.chain)
        self._cache.release(claimed, donate=False)
        sequence.intake.hold(found)
        sequence.note_held()

    def drop_claims(self) -> bool:
        """Nothing runs and the head does not fit: what keeps its memory can only be the hits that requests behind it
        hold. They match again on their turn. False = there was nothing to drop."""
        claims = [s for s in self._queue if s.holding is not None and s.intake is None]
        for sequence in claims:
            assert sequence.holding is not None
            self._cache.release(sequence.holding, donate=False)
            sequence.holding = None
        return bool(claims)

    def overdue(self) -> list[tuple[Sequence, float]]:
        """Hand-offs that waited too long (and how long, in seconds): the other side keeps a lease meanwhile. A local
        request waits for its turn or a cancel."""
        now = time.monotonic()
        waits = [(s, now - s.waiting_since_s) for s in self._queue if s.intake]
        return [(s, waited) for s, waited in waits if waited > self._config.reserve_wait_s]


def no_memory(sequence: Sequence, waited_s: float, load: Load) -> NoCapacity:
    """Why a hand-off that waited so long is given up."""
    return NoCapacity(
        f"no memory for {len(sequence.chain)} tokens within {waited_s:.1f} s: {load.free_blocks} of {load.total_blocks} "
        f"blocks and {load.free_slots} of {load.total_slots} slots are free"
    )
