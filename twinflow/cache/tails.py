"""What lies inside blocks: partial blocks with their tokens, and states at any position with the blocks that carry them.

Full blocks keep no tokens, their names say what they are. Where a prompt parts from a full block inside it, its KV is of use
only up to a saved state: without one, computing starts at the boundary anyway. So a state behind a boundary keeps its few
tokens (the *tail*), and knows the blocks whose KV begins with them, its *carriers*. A partial block keeps its tokens, and is
used up to where a prompt parts from them.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from twinflow.cache.base import BlockId, SlotId
from twinflow.contracts.hashing import TOKEN_BYTES, tail_hash

NOTHING: dict[bytes, SlotId] = {}  # never written to


@dataclass(slots=True)
class Saved:
    """A checkpoint: `tail` are the packed tokens between `boundary`, the name of the last block boundary, and `position`."""

    boundary: bytes
    tail: bytes
    position: int
    carriers: list[BlockId] = field(default_factory=list)  # none where the tail is empty

    @property
    def name(self) -> bytes:
        return tail_hash(self.boundary, self.tail) if self.tail else self.boundary


@dataclass(frozen=True, slots=True)
class Partial:
    """A block of which only the first `tokens` (packed, fewer than a block's) are valid, behind `boundary`."""

    boundary: bytes
    tokens: bytes

    @property
    def name(self) -> bytes:
        return tail_hash(self.boundary, self.tokens)


def common_prefix_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences share at their start."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return (n - (differing.bit_length() + 7) // 8) // TOKEN_BYTES


class Tails:
    """Owned by the tree. Sizes are those of what it keeps: nothing per full block, unless that carries a state inside."""

    def __init__(self, block_tokens: int) -> None:
        self.states: dict[
            bytes, dict[bytes, SlotId]
        ] = {}  # boundary → tail → slot; boundaries without any are not in it
        self.saved: dict[SlotId, Saved] = {}
        self.partial: dict[BlockId, Partial] = {}
        self._block_tokens = block_tokens
        self._partials: dict[bytes, list[tuple[bytes, BlockId]]] = {}  # boundary → sorted by tokens
        self._carried: dict[BlockId, list[SlotId]] = {}  # the reverse of `Saved.carriers`

    # -- questions

    def behind(self, boundary: bytes) -> dict[bytes, SlotId]:
        """All checkpoints from a boundary on, before the next one: tail → slot."""
        return self.states.get(boundary, NOTHING)

    def along(self, boundary: bytes, tokens: bytes) -> list[tuple[bytes, SlotId]]:
        """(tail, slot) of those on the way of `tokens`, the packed ones behind the boundary; ascending."""
        here = self.behind(boundary)
        if len(here) > self._block_tokens:  # many siblings: look up each length instead of comparing each tail
            tails = [tokens[:end] for end in range(0, len(tokens) + 1, TOKEN_BYTES) if tokens[:end] in here]
        else:
            tails = sorted((t for t in here if tokens.startswith(t)), key=len)
        return [(t, here[t]) for t in tails]

    def closest(self, boundary: bytes, tokens: bytes) -> tuple[BlockId | None, int]:
        """The block behind the boundary that serves most of `tokens`, and how many of them; (None, 0) if none serves any.

        A partial block serves up to where the tokens part (in sorted order a longest common prefix is always with a
        neighbour of the insertion point), a full one up to the deepest state that it carries.
        """
        best, best_tokens = None, 0
        partials = self._partials.get(boundary, ())
        at = bisect_right(partials, tokens, key=itemgetter(0))
        for held, block in partials[max(0, at - 1) : at + 1]:
            shared = common_prefix_tokens(held, tokens)
            if shared > best_tokens:
                best, best_tokens = block, shared
        for tail, slot in reversed(self.along(boundary, tokens)):
            if len(tail) <= best_tokens * TOKEN_BYTES:
                break
            if carriers := self.saved[slot].carriers:
                return carriers[0], len(tail) // TOKEN_BYTES
        return best, best_tokens

    def carried(self, block: BlockId) -> Sequence[SlotId]:
        """Checkpoints inside the block."""
        return self._carried.get(block, ())

    # -- changes

    def add_state(self, saved: Saved, slot: SlotId, full: BlockId | None) -> None:
        """`full`: the full block, if it is there, that begins with the tail by the same chain of tokens."""
        self.states.setdefault(saved.boundary, {})[saved.tail] = slot
        self.saved[slot] = saved
        if not saved.tail:
            return
        partials = self._partials.get(saved.boundary, ())
        at = bisect_left(partials, saved.tail, key=itemgetter(0))
        while at < len(partials) and partials[at][0].startswith(saved.tail):
            self._link(slot, partials[at][1])
            at += 1
        if full is not None:
            self._link(slot, full)

    def remove_state(self, slot: SlotId) -> Saved:
        saved = self.saved.pop(slot)
        here = self.states[saved.boundary]
        del here[saved.tail]
        if not here:
            del self.states[saved.boundary]
        for block in saved.carriers:
            self._carried[block].remove(slot)
            if not self._carried[block]:
                del self._carried[block]
        return saved

    def add_block(self, block: BlockId, boundary: bytes, tokens: bytes) -> None:
        """A block with these tokens lies behind the boundary from now on."""
        for tail, slot in self.along(boundary, tokens):
            if tail:
                self._link(slot, block)

    def add_partial(self, block: BlockId, partial: Partial) -> None:
        self.partial[block] = partial
        insort(self._partials.setdefault(partial.boundary, []), (partial.tokens, block))
        self.add_block(block, partial.boundary, partial.tokens)

    def remove_block(self, block: BlockId) -> None:
        """A block, full or partial, is gone."""
        for slot in self._carried.pop(block, ()):
            self.saved[slot].carriers.remove(block)
        self._unlist(block)

    def rehome_block(self, source: BlockId, target: BlockId) -> None:
        carried = self._carried.pop(source, None)
        if carried is not None:
            self._carried[target] = carried
            for slot in carried:
                carriers = self.saved[slot].carriers
                carriers[carriers.index(source)] = target
        partial = self._unlist(source)
        if partial is not None:
            self.partial[target] = partial
            insort(self._partials.setdefault(partial.boundary, []), (partial.tokens, target))

    def rehome_state(self, source: SlotId, target: SlotId) -> None:
        saved = self.saved[target] = self.saved.pop(source)
        self.states[saved.boundary][saved.tail] = target
        for block in saved.carriers:
            carried = self._carried[block]
            carried[carried.index(source)] = target

    def _link(self, slot: SlotId, block: BlockId) -> None:
        self.saved[slot].carriers.append(block)
        self._carried.setdefault(block, []).append(slot)

    def _unlist(self, block: BlockId) -> Partial | None:
        partial = self.partial.pop(block, None)
        if partial is not None:
            here = self._partials[partial.boundary]
            del here[bisect_left(here, (partial.tokens, block))]  # there may be very many short conversations
            if not here:
                del self._partials[partial.boundary]
        return partial
