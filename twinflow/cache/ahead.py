"""States that a launched step leaves behind in slots of their own, at positions that it comes by.

Slots are taken before the launch and published when the step has landed. A copy made between two steps (`checkpoint`)
costs a second step over the same prompt; this costs nothing but the slot.
"""

from collections.abc import Mapping

from twinflow.cache.base import SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.publish import Live
from twinflow.cache.room import Room
from twinflow.cache.tree import PrefixTree
from twinflow.cache.worth import Policy
from twinflow.contracts.checkpoints import CheckpointKind


class Ahead:
    """Any number of each holding, in the order of their positions. Best effort, as all caching."""

    def __init__(self, tree: PrefixTree, slots: Pool[SlotId], room: Room, policy: Policy) -> None:
        self._tree = tree
        self._slots = slots
        self._room = room
        self._policy = policy

    def open(self, live: Live, cuts: Mapping[int, CheckpointKind], tick: int) -> dict[int, SlotId]:
        """Private slots for the states at `cuts`, ascending, but for those that the tree has and those for which nothing
        worth less would go. Worth most first: an interval's state does not take the last slot from the prompt's boundary."""
        holding, worth = live.holding, dict[int, float]()
        before = next(reversed(holding.snapshots), 0)  # the one before it, as far as it is not published
        for position, kind in cuts.items():
            if position <= max(before, holding.position):
                raise ValueError(f"{position} is no position ahead of {max(before, holding.position)}")
            there = self._tree.state_at(holding.chain, position)
            if there is None:
                gain = min(self.before(live, position)[1], position - before)
                worth[position] = self._policy.expected(kind, gain, tick)
            else:
                self._slots.used[there] = tick
                if not worth and not holding.snapshots:
                    live.saved_tokens = max(live.saved_tokens, position)
            before = position
        for position in sorted(worth, key=lambda p: (worth[p], p), reverse=True):
            loss = self._room.lowest_for_slot()
            if loss is None or loss > worth[position]:
                break
            holding.snapshots[position] = self._room.take_slot(), cuts[position]
        holding.snapshots = dict(sorted(holding.snapshots.items()))
        return {p: holding.snapshots[p][0] for p in worth if p in holding.snapshots}

    def close(self, live: Live, upto: int, tick: int) -> int:
        """The steps up to there have landed: publishes their states. How many of them the tree has not got meanwhile."""
        holding, new = live.holding, 0
        if upto > holding.position:
            raise ValueError(f"snapshots up to {upto} lie ahead of the cursor, {holding.position}")
        for position in [p for p in holding.snapshots if p <= upto]:
            slot, kind = holding.snapshots.pop(position)
            if self._tree.state_at(holding.chain, position) is None:
                before = self.before(live, position)
                self._tree.store_state(holding.chain, position, slot)
                self._policy.stored(slot, kind, *before)
                new += 1
            live.saved_tokens = max(live.saved_tokens, position)
            self._slots.unref(slot, tick, retire=False)
        return new

    def before(self, live: Live, position: int) -> tuple[SlotId | None, int]:
        """The deepest checkpoint that this holding knows of on its path, if it is still there, and how far `position` is
        behind it."""
        at = live.saved_tokens
        slot = self._tree.state_at(live.holding.chain, at) if 0 < at <= position else None
        return (None, position) if slot is None else (slot, position - at)
