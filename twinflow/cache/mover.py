"""Moves cached entries within their pool: same tokens, same events, another place. Only what nobody references.

The copy runs on the compute stream; both places are fenced for whatever does not.
"""

from twinflow.cache.base import BlockId, Copier, SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.tree import PrefixTree
from twinflow.cache.worth import Policy


class Mover:
    """Executes all copies of the cache; the owner of the fences."""

    def __init__(
        self, tree: PrefixTree, blocks: Pool[BlockId], slots: Pool[SlotId], policy: Policy, copier: Copier
    ) -> None:
        self._tree = tree
        self._blocks = blocks
        self._slots = slots
        self._policy = policy
        self._copier = copier

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        self._blocks.fence(source)
        self._blocks.fence(target)
        self._copier.copy_block(source, target)

    def copy_slot(self, source: SlotId, target: SlotId) -> None:
        self._slots.fence(source)
        self._slots.fence(target)
        self._copier.copy_slot(source, target)

    def move_block(self, source: BlockId) -> None:
        """To a free block; the caller knows that there is one."""
        assert self._blocks.exclusive(source, references=0)
        (target,), used = self._blocks.take(1), self._blocks.used[source]
        try:
            self.copy_block(source, target)
        except BaseException:
            self._blocks.unref(target, used, retire=False)
            raise
        self._blocks.ref(source, used)
        self._tree.rehome_block(source, target)
        self._blocks.unref(target, used, retire=False)
        self._blocks.unref(source, used, retire=False)

    def move_slot(self, source: SlotId) -> None:
        """To a free slot; the caller knows that there is one."""
        assert self._slots.exclusive(source, references=0)
        (target,), used = self._slots.take(1), self._slots.used[source]
        try:
            self.copy_slot(source, target)
        except BaseException:
            self._slots.unref(target, used, retire=False)
            raise
        self._slots.ref(source, used)
        self._tree.rehome_state(source, target)
        self._policy.moved(source, target)
        self._slots.unref(target, used, retire=False)
        self._slots.unref(source, used, retire=False)
