"""What a cached entry is worth: a priority for every block and checkpoint, comparable across both pools.

The lowest priority goes first. `Worth` is what the cache runs with; `Recency` (least recently used) is what it is
measured against.

    priority = time of last use + horizon · ln(worth)         worth in (0, 1]

is the order of worth · exp(-age / horizon): worth that fades with age, as a key that does not change while time passes.
The horizon is the time in which the cache is written once over. Per byte, in units of the best that a byte can do:

* A checkpoint that is `gain` tokens deeper than the one before saves their recomputing, and needs its slot and their KV:
  worth = p · gain / (gain + slot bytes in tokens of KV). p, the share of its kind that is resumed from (again), is learnt.
* A block is worth as much as the best checkpoint that it carries. Without one it saves no computing, only its transfer from
  a peer, and shows where prompts part: `BARE_BLOCK`.
* A checkpoint whose KV is gone is worth nothing: whoever computes the KV again passes by that state.
"""

import math
from typing import Protocol

from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.checkpoints import CheckpointKind
from twinflow.cache.pool import Pool
from twinflow.cache.tree import Found, PrefixTree
from twinflow.contracts.groups import CacheLayout

BARE_BLOCK = 0.05
LONGEST_COUNT = 3  # resumed from this often or more is one class
PRIOR_HITS, PRIOR_TRIES = 4.0, 8.0
MEMORY_TRIES = 512.0  # older experience counts half

Class = tuple[CheckpointKind, int]  # kind, times resumed from


class Policy(Protocol):
    """Told what happens; asked what may go. Owned by the cache."""

    def block(self, block: BlockId) -> float:
        """Priority of a published block that nothing with a block hangs below."""
        ...

    def slot(self, slot: SlotId) -> float:
        """Priority of a checkpoint."""
        ...

    def expected(self, kind: CheckpointKind, gain_tokens: int, tick: int) -> float:
        """Priority that a new checkpoint would have."""
        ...

    def cost(self, priority: float, tick: int) -> float:
        """What is lost per byte with an entry of this priority."""
        ...

    def hit(self, found: Found, resumed: SlotId | None, tick: int) -> None:
        """A prompt was matched and resumes at one of its checkpoints, or at none."""
        ...

    def stored(self, slot: SlotId, kind: CheckpointKind, gain_tokens: int) -> None: ...

    def took(self, blocks: int, tick: int) -> None:
        """So many blocks were handed out."""
        ...


class Recency:
    """Least recently used; everything that a prompt passes counts as used."""

    def __init__(self, layout: CacheLayout, tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId]) -> None:
        self._blocks = blocks
        self._slots = slots

    def block(self, block: BlockId) -> float:
        return self._blocks.used[block]

    def slot(self, slot: SlotId) -> float:
        return self._slots.used[slot]

    def expected(self, kind: CheckpointKind, gain_tokens: int, tick: int) -> float:
        return tick

    def cost(self, priority: float, tick: int) -> float:
        return priority

    def hit(self, found: Found, resumed: SlotId | None, tick: int) -> None:
        for slot in found.checkpoints.values():
            self._slots.used[slot] = tick

    def stored(self, slot: SlotId, kind: CheckpointKind, gain_tokens: int) -> None: ...

    def took(self, blocks: int, tick: int) -> None: ...


class Worth:
    """Recompute time saved per byte, aged by use."""

    def __init__(self, layout: CacheLayout, tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId]) -> None:
        self._tree = tree
        self._blocks = blocks
        self._slots = slots
        self._slot_tokens = layout.slot_bytes * layout.block_tokens / layout.block_bytes
        self._class: list[Class] = [(CheckpointKind.END, 0)] * slots.size
        self._share = [0.0] * slots.size  # gain / (gain + slot in tokens)
        self._tries: dict[Class, float] = {}
        self._hits: dict[Class, float] = {}
        self._log_chance: dict[Class, float] = {}
        self._taken = self._since = 0
        self._bare = math.log(BARE_BLOCK)
        self.horizon = float(max(1, blocks.total))

    def block(self, block: BlockId) -> float:
        node = self._tree.block_nodes[block]
        best = self._blocks.used[block] + self.horizon * self._bare
        for slot in self._tree.carried(node):
            best = max(best, self._slot(slot))
        return best

    def slot(self, slot: SlotId) -> float:
        node, tail = self._tree.slot_homes[slot]
        return self._slot(slot) if self._tree.carries(node, tail) else -math.inf

    def expected(self, kind: CheckpointKind, gain_tokens: int, tick: int) -> float:
        return tick + self.horizon * (self._chance((kind, 0)) + math.log(self._share_of(gain_tokens)))

    def cost(self, priority: float, tick: int) -> float:
        return math.exp(min(0.0, (priority - tick) / self.horizon))

    def hit(self, found: Found, resumed: SlotId | None, tick: int) -> None:
        if resumed is None:
            return
        self._slots.used[resumed] = tick
        kind, uses = self._class[resumed]
        self._hits[kind, uses] = self._hits.get((kind, uses), 0.0) + 1
        self._log_chance.pop((kind, uses), None)
        self._class[resumed] = (kind, min(uses + 1, LONGEST_COUNT))
        self._try(self._class[resumed])

    def stored(self, slot: SlotId, kind: CheckpointKind, gain_tokens: int) -> None:
        self._class[slot] = (kind, 0)
        self._share[slot] = math.log(self._share_of(gain_tokens))
        self._try((kind, 0))

    def took(self, blocks: int, tick: int) -> None:
        self._taken += blocks
        if self._taken >= self._blocks.total:
            self.horizon = max(1.0, (tick - self._since) * self._blocks.total / self._taken)
            self._taken, self._since = 0, tick

    def _slot(self, slot: SlotId) -> float:
        return self._slots.used[slot] + self.horizon * (self._chance(self._class[slot]) + self._share[slot])

    def _share_of(self, gain_tokens: int) -> float:
        gain = max(1, gain_tokens)
        return gain / (gain + self._slot_tokens)

    def _chance(self, which: Class) -> float:
        """ln of the learnt probability that a checkpoint of this class is resumed from."""
        known = self._log_chance.get(which)
        if known is None:
            hits, tries = self._hits.get(which, 0.0) + PRIOR_HITS, self._tries.get(which, 0.0) + PRIOR_TRIES
            known = self._log_chance[which] = math.log(min(1.0, hits / tries))
        return known

    def _try(self, which: Class) -> None:
        tries = self._tries.get(which, 0.0) + 1
        if tries > MEMORY_TRIES:
            tries /= 2
            self._hits[which] = self._hits.get(which, 0.0) / 2
        self._tries[which] = tries
        self._log_chance.pop(which, None)
