"""What a cached entry is worth: a priority for every block and checkpoint, comparable across both pools.

The lowest priority goes first. `Worth` is what the cache runs with; `Recency` (least recently used) is what it is
measured against.

    priority = time of last use + horizon · ln(worth)         worth in (0, 1]

is the order of worth · exp(-age / horizon): worth that fades with age, as a key that does not change while time passes.
The horizon is a part of the time in which the cache is written once over. Per byte, in units of the best that a byte can do:

* A checkpoint that is `gain` tokens deeper than the one before it saves their recomputing, and needs its slot and their KV:
  worth = p · gain / (gain + slot bytes in tokens of KV). When the one before goes, its gain falls to those behind it. p, the
  share of its kind that is resumed from (again) before it goes, is learnt when one is resumed from or goes: not when it is
  saved, or a kind would be given up before its first ones had time to prove themselves. It never falls with the number of times
  that a state was resumed from.
* A block is worth as much as the best checkpoint that it carries. Without one it saves no computing, only its transfer from
  a peer, and shows where prompts part: `BARE_BLOCK` of what a new checkpoint is worth.
* No checkpoint is worth less than such a block. What is evicted early cannot prove itself; and were the state of a request
  that has just ended the first to go, the boundary would swing by a slot with every request.
* A checkpoint whose KV is gone is worth nothing: whoever computes the KV again passes by that state.
"""

import math
from typing import Protocol

from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.tree import Found, PrefixTree
from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.groups import CacheLayout

BARE_BLOCK = 0.1
LONGEST_COUNT = 3  # resumed from this often or more is one class
PRIOR_TRIES = 8.0  # until it has been tried about as often, a class is thought to be like all others
MEMORY_TRIES = 512.0  # older experience counts half
HORIZONS = 0.5  # of the time in which the cache is written once over

Class = tuple[CheckpointKind, int]  # kind, times resumed from


class Policy(Protocol):
    """Told what happens; asked what may go. Owned by the cache."""

    def block(self, block: BlockId) -> float:
        """Priority of a published block that nothing with a block hangs below."""
        ...

    @property
    def bare(self) -> float:
        """Priority of a block that carries no checkpoint, less the tick of its last use."""
        ...

    def slot(self, slot: SlotId) -> float:
        """Priority of a checkpoint."""
        ...

    def expected(self, kind: CheckpointKind, gain_tokens: int, tick: int) -> float:
        """Priority that a new checkpoint would have."""
        ...

    def hit(self, found: Found, resumed: SlotId | None, tick: int) -> None:
        """A prompt was matched and resumes at one of its checkpoints, or at none."""
        ...

    def stored(self, slot: SlotId, kind: CheckpointKind, before: SlotId | None, gain_tokens: int) -> None:
        """A checkpoint was published, `gain_tokens` deeper than `before`, the next shallower one of its path."""
        ...

    def dropped(self, slot: SlotId) -> None:
        """It is gone."""
        ...

    def moved(self, source: SlotId, target: SlotId) -> None:
        """It is in another slot now."""
        ...

    def before(self, slot: SlotId) -> SlotId | None:
        """The next shallower checkpoint of its path, as far as is known."""
        ...

    def thinned(self, slot: SlotId) -> bool:
        """Whether it is one of those that a path is thinned of from the shallow end, whatever each of them is worth."""
        ...

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

    @property
    def bare(self) -> float:
        return 0.0

    def slot(self, slot: SlotId) -> float:
        return self._slots.used[slot]

    def expected(self, kind: CheckpointKind, gain_tokens: int, tick: int) -> float:
        return tick

    def hit(self, found: Found, resumed: SlotId | None, tick: int) -> None:
        for slot in found.checkpoints.values():
            self._slots.used[slot] = tick

    def stored(self, slot: SlotId, kind: CheckpointKind, before: SlotId | None, gain_tokens: int) -> None: ...

    def dropped(self, slot: SlotId) -> None: ...

    def moved(self, source: SlotId, target: SlotId) -> None: ...

    def before(self, slot: SlotId) -> SlotId | None:
        return None

    def thinned(self, slot: SlotId) -> bool:
        return False

    def took(self, blocks: int, tick: int) -> None: ...


class Worth:
    """Recompute time saved per byte, aged by use."""

    def __init__(self, layout: CacheLayout, tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId]) -> None:
        self._tree = tree
        self._blocks = blocks
        self._slots = slots
        self._slot_tokens = layout.slot_bytes * layout.block_tokens / layout.block_bytes
        self._class: list[Class] = [(CheckpointKind.END, 0)] * slots.size
        self._gain = [0] * slots.size
        self._log_share = [0.0] * slots.size  # of the gain: ln(gain / (gain + slot))
        self._before: dict[SlotId, SlotId] = {}
        self._behind: dict[SlotId, list[SlotId]] = {}
        self._chances = Chances()
        self._taken = self._since = 0
        self.horizon = float(max(1, blocks.total))

    def block(self, block: BlockId) -> float:
        best = self._blocks.used[block] + self.horizon * self._chances.log_of_bare
        for slot in self._tree.carried(block):
            if (carried := self._slot(slot)) > best:
                best = carried
        return best

    @property
    def bare(self) -> float:
        return self.horizon * self._chances.log_of_bare

    def slot(self, slot: SlotId) -> float:
        return self._slot(slot) if self._tree.carries(slot) else -math.inf

    def expected(self, kind: CheckpointKind, gain_tokens: int, tick: int) -> float:
        return tick + self.horizon * self._log_worth((kind, 0), self._log_share_of(gain_tokens))

    def hit(self, found: Found, resumed: SlotId | None, tick: int) -> None:
        if resumed is not None:
            self._slots.used[resumed] = tick
            self._class[resumed] = self._chances.hit(self._class[resumed])

    def stored(self, slot: SlotId, kind: CheckpointKind, before: SlotId | None, gain_tokens: int) -> None:
        self._class[slot] = (kind, 0)
        self._gains(slot, gain_tokens)
        if before is not None:
            self._before[slot] = before
            self._behind.setdefault(before, []).append(slot)

    def dropped(self, slot: SlotId) -> None:
        self._chances.missed(self._class[slot])
        before, behind = self._before.pop(slot, None), self._behind.pop(slot, [])
        if before is not None:
            self._behind[before].remove(slot)
            self._behind[before] += behind
        for each in behind:
            self._gains(each, self._gain[each] + self._gain[slot])
            if before is None:
                del self._before[each]
            else:
                self._before[each] = before

    def moved(self, source: SlotId, target: SlotId) -> None:
        self._class[target] = self._class[source]
        self._gains(target, self._gain[source])
        before, behind = self._before.pop(source, None), self._behind.pop(source, [])
        if before is not None:
            self._before[target] = before
            self._behind[before].remove(source)
            self._behind[before].append(target)
        if behind:
            self._behind[target] = behind
            self._before.update(dict.fromkeys(behind, target))

    def before(self, slot: SlotId) -> SlotId | None:
        return self._before.get(slot)

    def thinned(self, slot: SlotId) -> bool:
        return self._class[slot][0] is CheckpointKind.INTERVAL

    def took(self, blocks: int, tick: int) -> None:
        self._taken += blocks
        if self._taken >= self._blocks.total:
            self.horizon = max(1.0, HORIZONS * (tick - self._since) * self._blocks.total / self._taken)
            self._taken, self._since = 0, tick

    def _slot(self, slot: SlotId) -> float:
        return self._slots.used[slot] + self.horizon * self._log_worth(self._class[slot], self._log_share[slot])

    def _log_worth(self, which: Class, log_share: float) -> float:
        worth, bare = self._chances.log_of(which) + log_share, self._chances.log_of_bare
        return worth if worth > bare else bare

    def _gains(self, slot: SlotId, tokens: int) -> None:
        self._gain[slot] = tokens
        self._log_share[slot] = self._log_share_of(tokens)

    def _log_share_of(self, gain_tokens: int) -> float:
        gain = max(1, gain_tokens)
        return math.log(gain / (gain + self._slot_tokens))


LOG_BARE = math.log(BARE_BLOCK)


class Chances:
    """How likely a checkpoint is to be resumed from before it goes, learnt per class and in logarithms.

    One that was resumed from more often never counts less than one of its kind that was so less often. Few are, so the first
    ones may all be unlucky, and a class thought to be useless is evicted before it can show otherwise.
    """

    def __init__(self) -> None:
        self._tries: dict[Class, float] = {}
        self._hits: dict[Class, float] = {}
        self._known: dict[Class, float] = {}
        self._new = (0.0, 0.0)  # hits and tries of all that are new
        self.log_of_new = math.log(0.5)
        self.log_of_bare = self.log_of_new + LOG_BARE  # of the worth of a block without a checkpoint

    def log_of(self, which: Class) -> float:
        known = self._known.get(which)
        if known is None:
            hits = self._hits.get(which, 0.0) + PRIOR_TRIES * math.exp(self.log_of_new)
            known = math.log(hits / (self._tries.get(which, 0.0) + PRIOR_TRIES))
            if which[1]:
                known = max(known, self.log_of((which[0], which[1] - 1)))
            self._known[which] = known
        return known

    def missed(self, which: Class) -> None:
        """One of this class went without being resumed from (again)."""
        self._count(which, 0.0)

    def hit(self, which: Class) -> Class:
        """One of this class was resumed from; returns its class from now on."""
        self._count(which, 1.0)
        return which[0], min(which[1] + 1, LONGEST_COUNT)

    def _count(self, which: Class, hit: float) -> None:
        self._hits[which], self._tries[which] = _faded(self._hits.get(which, 0.0), self._tries.get(which, 0.0), hit)
        for times in range(which[1], LONGEST_COUNT + 1):
            self._known.pop((which[0], times), None)
        if which[1] == 0:
            self._new = _faded(*self._new, hit)
            self.log_of_new = math.log((self._new[0] + 1.0) / (self._new[1] + 2.0))
            self.log_of_bare = self.log_of_new + LOG_BARE


def _faded(hits: float, tries: float, hit: float) -> tuple[float, float]:
    """One try more."""
    fade = 0.5 if tries >= MEMORY_TRIES else 1.0
    return fade * hits + hit, fade * tries + 1.0
