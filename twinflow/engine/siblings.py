"""Prompts that begin alike and come together: one computes or reads what they share, the others wait for it.

Without that, each of them finds an empty cache, and all do the same work at once: a burst of requests with one long prefix would
take as many times the work, and as many times the memory on the decode worker, as there are requests.
"""

from collections.abc import Mapping

from twinflow.cache.base import Cache
from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.hashing import TokenChain
from twinflow.engine.sequence import Phase, Sequence

WORTH_TOKENS = 128  # of a prompt; computing fewer takes no longer than the step that would be waited for


def shared_blocks(a: TokenChain, b: TokenChain) -> int:
    """Full blocks that both begin with."""
    left, right = 0, min(len(a.block_hashes), len(b.block_hashes))
    while left < right:  # a block's hash stands for all up to it
        middle = (left + right + 1) // 2
        if a.block_hashes[middle - 1] == b.block_hashes[middle - 1]:
            left = middle
        else:
            right = middle - 1
    return left


class Siblings:
    """Owned by the engine's loop. `sequences` are all of the engine's."""

    def __init__(self, cache: Cache, sequences: Mapping[str, Sequence]) -> None:
        self._cache = cache
        self._sequences = sequences
        self._awaited: dict[str, tuple[Sequence, int]] = {}  # by who waits: for whom, and for how many of its blocks

    def hold_back(self, sequence: Sequence) -> bool:
        """Whether the sequence, which is in the queue for memory, is better off waiting: somebody computes, or receives, more of
        its prompt than the cache has. Never for longer than that takes; whoever fails, ends or yields meanwhile is not waited
        for any more."""
        awaited = self._awaited.get(sequence.id)
        if awaited is not None:
            if self._is_coming(sequence, *awaited):
                return True
            del self._awaited[sequence.id]
        leader, blocks = self._furthest(sequence)
        if leader is None:
            return False
        self._awaited[sequence.id] = (leader, blocks)
        position = blocks * leader.chain.block_tokens
        if leader.phase is Phase.RUNNING and leader.fed_tokens < position and position not in leader.cuts:
            leader.plan_cut(position, CheckpointKind.JUNCTION)  # blocks without a state would be computed again
        return True

    @property
    def waiting(self) -> int:
        """Sequences that were held back when last looked at."""
        return len(self._awaited)

    def brought_tokens(self, sequence: Sequence) -> int:
        """Of its prompt, by whom it waits for; 0 if it doesn't."""
        _, blocks = self._awaited.get(sequence.id, (None, 0))
        return blocks * sequence.chain.block_tokens

    def forget(self, sequence: Sequence) -> None:
        """It has left the queue."""
        self._awaited.pop(sequence.id, None)

    def _is_coming(self, sequence: Sequence, leader: Sequence, blocks: int) -> bool:
        """What the sequence waits for is not there yet, but will be, as things stand: for one that computes, the state behind
        the blocks, too. One whose own prompt is computed elsewhere by now has nothing left but to read it: it goes on by itself
        unless the other is as far, since received blocks are only published with the end of the prompt, however long that is."""
        held = leader.holding
        if self._sequences.get(leader.id) is not leader or held is None:
            return False
        if leader.phase is not Phase.RUNNING and leader.phase is not Phase.PULLING:
            return False
        if sequence.intake is not None:
            ended = leader.received or (leader.intake is not None and leader.intake.moved.finished > 0)
            return held.published_blocks < blocks and (ended or not sequence.intake.moved.finished)
        return held.position < blocks * leader.chain.block_tokens

    def _furthest(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """Who has most of its prompt in work, if that is worth waiting for, and how many blocks that is."""
        hashes = sequence.chain.block_hashes
        most = (sequence.start_tokens - 1) // sequence.chain.block_tokens
        best, shared = None, 0
        for other in self._sequences.values():
            theirs = other.chain.block_hashes
            if not hashes or not theirs or theirs[0] != hashes[0] or other is sequence:
                continue
            if sequence.intake is None and other.intake is not None:
                continue  # it will leave no state inside its prompt
            blocks = min(shared_blocks(sequence.chain, other.chain), most)
            if blocks > shared and self._is_coming(sequence, other, blocks):
                best, shared = other, blocks
        if best is None or (shared - self._had(sequence)) * sequence.chain.block_tokens < WORTH_TOKENS:
            return None, 0
        return best, shared

    def _had(self, sequence: Sequence) -> int:
        """Blocks that need not be computed, or read, as things stand."""
        if sequence.intake is not None:
            assert sequence.holding is not None
            return len(sequence.holding.blocks)
        return self._cache.match(sequence.chain).usable_tokens // sequence.chain.block_tokens
