"""Decides what one reserve will do, before anything is changed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinflow.cache.base import BlockId, SlotId
from twinflow.cache.pool import Pool
from twinflow.cache.room import Room
from twinflow.cache.tree import Found, PrefixTree
from twinflow.contracts.groups import CacheLayout, GroupKind
from twinflow.contracts.hits import GroupHit, usable_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """`take_over_*`: the matched unit itself is used and leaves the tree, otherwise it is copied."""

    full: Sequence[BlockId]  # shared by reference
    common: BlockId | None  # a block whose first tokens are hit
    reach_tokens: int
    resume_tokens: int
    checkpoint: SlotId | None
    new_blocks: int
    take_over_block: bool
    take_over_slot: bool
    slots: int  # that there have to be: where the boundary goes first


def group_hits(layout: CacheLayout, found: Found, reach_tokens: int) -> tuple[GroupHit, ...]:
    points = tuple(found.checkpoints)
    return tuple(
        GroupHit(g.name, g.kind, reach_tokens)
        if g.kind is GroupKind.ATTENTION
        else GroupHit(g.name, g.kind, points[-1] if points else 0, points)
        for g in layout.groups
    )


class Planner:
    """Reads the tree and the pools, never changes them."""

    def __init__(self, layout: CacheLayout, tree: PrefixTree, slots: Pool[SlotId], room: Room) -> None:
        self._layout = layout
        self._tree = tree
        self._slots = slots
        self._room = room

    def plan(self, found: Found, prompt_tokens: int, total_blocks: int) -> Plan | None:
        """None when it does not fit now."""
        plan = self._plan(found, found.common, prompt_tokens, total_blocks)
        if plan is None and found.common is not None:
            # The block to copy from may be the very one that is needed: without it an idle cache always has room,
            plan = self._plan(found, None, prompt_tokens, total_blocks)
        if plan is None and found.checkpoints:
            # unless the state to resume from lies where blocks are needed.
            plan = self._plan(found, None, prompt_tokens, total_blocks, resumes=False)
        return plan

    def _plan(
        self, found: Found, common: BlockId | None, prompt_tokens: int, total_blocks: int, *, resumes: bool = True
    ) -> Plan | None:
        block_tokens = self._layout.block_tokens
        reach = len(found.full) * block_tokens + (found.common_tokens if common is not None else 0)
        resume = usable_tokens(group_hits(self._layout, found, reach), prompt_tokens) if resumes else 0
        checkpoint = found.checkpoints[resume] if resume else None

        # Extending a block in place loses nothing only where the whole of it is a prefix of this prompt.
        take_block = (
            common is not None
            and self._tree.is_partial(common)
            and self._tree.position(common) == reach
            and self._tree.evictable(common)
        )
        new_blocks = total_blocks - len(found.full) - take_block
        # What was just matched cannot be evicted for it.
        keep = [*found.full, common] if common is not None else found.full
        # A checkpoint inside a block is the end of one conversation; one at a boundary is what siblings share.
        idle = checkpoint is not None and bool(self._slots.reclaimable[checkpoint])
        take_slot = idle and resume % block_tokens != 0
        slots = self._room.fit(new_blocks, int(not take_slot), keep_blocks=keep, keep_slot=checkpoint)
        if slots is None and idle and not take_slot:
            take_slot = True
            slots = self._room.fit(new_blocks, 0, keep_blocks=keep, keep_slot=checkpoint)
        if slots is None:
            return None
        return Plan(found.full, common, reach, resume, checkpoint, new_blocks, take_block, take_slot, slots)
