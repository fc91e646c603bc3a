"""States that a launched step leaves behind in slots of their own, at positions that it passes on its way.

The slot is taken before the launch and published when the step has landed. A copy made between two steps (`checkpoint`)
costs a second step over the same prompt; this costs nothing but the slot.
"""

from twinflow.cache.base import SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.publish import Live
from twinflow.cache.room import Room
from twinflow.cache.tree import PrefixTree
from twinflow.cache.worth import Policy
from twinflow.contracts.checkpoints import CheckpointKind


class Ahead:
    """At most one of each holding at a time. Best effort, as all caching."""

    def __init__(self, tree: PrefixTree, slots: Pool[SlotId], room: Room, policy: Policy) -> None:
        self._tree = tree
        self._slots = slots
        self._room = room
        self._policy = policy

    def open(self, live: Live, position: int, kind: CheckpointKind, tick: int) -> SlotId | None:
        """A private slot for the state at `position`; None when the tree has it or nothing worth less would go for it."""
        holding = live.holding
        if holding.snapshot_slot is not None:
            raise ValueError("the snapshot of a step before is still open")
        there = self._tree.state_at(holding.chain, position)
        if there is not None:
            self._slots.used[there] = tick
            live.saved_tokens = max(live.saved_tokens, position)
            return None
        loss = self._room.lowest_for_slot()
        if loss is None or loss > self._policy.expected(kind, self.before(live, position)[1], tick):
            return None
        holding.snapshot_slot = self._room.take_slot()
        live.snapshot = (position, kind)
        return holding.snapshot_slot

    def close(self, live: Live, tick: int) -> bool:
        """The step has landed: publishes the state. False when the tree has got one of that position meanwhile."""
        holding, slot = live.holding, live.holding.snapshot_slot
        if slot is None or live.snapshot is None:
            raise ValueError("no snapshot is open")
        position, kind = live.snapshot
        if not 0 < position <= holding.position:
            raise ValueError(f"the snapshot at {position} lies ahead of the cursor, {holding.position}")
        new = self._tree.state_at(holding.chain, position) is None
        if new:
            before = self.before(live, position)
            self._tree.store_state(holding.chain, position, slot)
            self._policy.stored(slot, kind, *before)
        live.saved_tokens, live.snapshot, holding.snapshot_slot = max(live.saved_tokens, position), None, None
        self._slots.unref(slot, tick, retire=False)
        return new

    def before(self, live: Live, position: int) -> tuple[SlotId | None, int]:
        """The deepest checkpoint that this holding knows of on its path, if it is still there, and how far `position` is
        behind it."""
        at = live.saved_tokens
        slot = self._tree.state_at(live.holding.chain, at) if 0 < at <= position else None
        return (None, position) if slot is None else (slot, position - at)
