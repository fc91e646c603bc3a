"""`HybridCache`: the four verbs over two pools and one prefix tree. See `base.Cache` for the contract.

Order inside a verb: count first, change afterwards. A verb that refuses has changed nothing; one that has begun cannot run
out of memory. Copies come last; if one raises, everything is given back.

What runs on the compute stream is ordered by the stream. What does not (transfers) writes only into memory that `complete`
gave out, and that has passed the fence of every copy queued before. A loop that goes idle behind a queued copy should run
one empty step (`begin_step`, event, `end_step`), so that this memory is not withheld from `complete` until the next request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from twinflow.cache.ahead import Ahead
from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import BlockId, Copier, Holding, Match, PoolCounts, SlotId
from twinflow.cache.events import EventLog
from twinflow.cache.eviction import Evictor
from twinflow.cache.integrity import check
from twinflow.cache.mover import Mover
from twinflow.cache.plan import Plan, Planner, group_hits
from twinflow.cache.pool import Pool, StepClock
from twinflow.cache.publish import Live, Publisher
from twinflow.cache.room import Room
from twinflow.cache.tree import Found, PrefixTree
from twinflow.cache.worth import Recency, Worth
from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.errors import BadRequest, TooLong
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.groups import CacheLayout
from twinflow.contracts.hashing import TokenChain
from twinflow.contracts.hits import usable_tokens
from twinflow.contracts.tags import StateTag


class HybridCache:
    """Implements `base.Cache`. Owned by the engine loop's thread."""

    def __init__(
        self,
        layout: CacheLayout,
        geometry: ArenaGeometry,
        copier: Copier,
        policy: type[Worth] | type[Recency] = Worth,
    ) -> None:
        self.layout = layout
        self.geometry = geometry
        self._fingerprint = layout.fingerprint()
        self._block_tokens = layout.block_tokens
        self._steps = StepClock()
        self._blocks = Pool(layout.attention.name, geometry.blocks, BlockId, self._steps)
        self._slots = Pool(layout.state.name, geometry.slots, SlotId, self._steps, total=geometry.slot_floor)
        self._log = EventLog()
        self._tree = PrefixTree(layout.block_tokens, self._blocks, self._slots, self._log)
        self._policy = policy(layout, self._tree, self._blocks, self._slots)
        self._evictor = Evictor(self._tree, self._blocks, self._slots, self._policy)
        self._mover = Mover(self._tree, self._blocks, self._slots, self._policy, copier)
        self._room = Room(geometry, self._tree, self._blocks, self._slots, self._evictor, self._policy, self._mover)
        self._ahead = Ahead(self._tree, self._slots, self._room, self._policy)
        self._planner = Planner(layout, self._tree, self._slots, self._room)
        self._publisher = Publisher(self._tree, self._blocks, self._slots)
        self._live: dict[int, Live] = {}  # unreleased holdings by id(); kept alive by it, so ids are unique
        self._tick = 0  # logical time of the last verb that used something

    def match(self, chain: TokenChain) -> Match:
        found = self._tree.walk(chain)
        reach = len(found.full) * self._block_tokens + found.common_tokens
        hits = group_hits(self.layout, found, reach)
        return Match(hits, reach, tuple(found.checkpoints), usable_tokens(hits, len(chain)))

    def reserve(self, chain: TokenChain, total_tokens: int) -> Holding | None:
        self._check_fits(chain, total_tokens)
        found = self._tree.walk(chain)
        plan = self._planner.plan(found, len(chain), self._blocks_for(total_tokens))
        return None if plan is None else self._execute(chain, found, plan)

    def hold_prefix(self, chain: TokenChain) -> Holding:
        found = self._tree.walk(chain)
        holding = self._hold_path(chain, found, found.full, None)
        holding.written_tokens = holding.hit_attention_tokens = len(found.full) * self._block_tokens
        return holding

    def complete(self, holding: Holding, total_tokens: int) -> bool:
        self._require(holding, slot=False)
        self._check_fits(holding.chain, total_tokens)
        need = self._blocks_for(total_tokens) - len(holding.blocks)
        slots = self._room.fit(need, 1, off_stream=True)
        if slots is None:
            return False
        self._room.move(slots, off_stream=True)
        holding.slot = self._room.take_slot(leave_blocks=need, off_stream=True)
        holding.blocks += self._room.take_blocks(need, self._tick, off_stream=True)
        return True

    def extend(self, holding: Holding, total_tokens: int) -> bool:
        self._require(holding)
        self._check_fits(holding.chain, total_tokens)
        need = self._blocks_for(total_tokens) - len(holding.blocks)
        if need <= 0:
            return True
        slots = self._room.fit(need, 0)
        if slots is None:
            return False
        self._room.move(slots)
        holding.blocks += self._room.take_blocks(need, self._tick)
        return True

    def adopt(self, holding: Holding, tag: StateTag) -> None:
        self._require(holding)
        limit = min(len(holding.chain), self._capacity_tokens(holding))
        if not 0 < tag.position <= limit:
            raise ValueError(
                f"state at {tag.position} is outside the chain or the reserved blocks, which end at {limit}"
            )
        expected = StateTag(holding.chain.prefix_hash(tag.position), tag.position, self._fingerprint)
        if tag != expected:
            raise ValueError(f"received state is tagged {tag}, expected {expected}")
        holding.position = tag.position
        holding.written_tokens = max(holding.written_tokens, tag.position)

    def advance(self, holding: Holding, tokens: int) -> None:
        self._require(holding)
        position = holding.position + tokens
        limit = min(len(holding.chain), self._capacity_tokens(holding))
        if tokens < 0 or position > limit:
            raise ValueError(
                f"cannot feed {tokens} tokens at {holding.position}: chain or reserved blocks end at {limit}"
            )
        holding.position = position
        holding.written_tokens = max(holding.written_tokens, position)

    def advance_each(self, holdings: Iterable[Holding]) -> None:
        live, size = self._live, self._block_tokens
        for holding in holdings:
            position = holding.position + 1
            room = position <= holding.chain.length and position <= len(holding.blocks) * size
            if not room or holding.slot is None or id(holding) not in live:
                self.advance(holding, 1)  # says what is wrong
            holding.position = position
            if position > holding.written_tokens:
                holding.written_tokens = position
            if position // size > holding.published_blocks:
                self.commit(holding)

    def commit(self, holding: Holding) -> None:
        self._require(holding)
        if holding.position // self._block_tokens > holding.published_blocks:
            self._publisher.publish(holding, holding.position // self._block_tokens)

    def checkpoint(self, holding: Holding, kind: CheckpointKind = CheckpointKind.BOUNDARY) -> bool:
        live = self._require(holding)
        if holding.slot is None or holding.position == 0:
            return False
        self._tick += 1
        there = self._tree.state_at(holding.chain, holding.position)
        if there is not None:
            self._slots.used[there] = self._tick
            live.saved_tokens = holding.position
            return False
        loss = self._room.lowest_for_slot()
        if loss is None or loss > self._policy.expected(kind, self._before(live)[1], self._tick):
            return False
        slot = self._room.take_slot()
        try:
            self._mover.copy_slot(holding.slot, slot)
            before = self._before(live)
            self._tree.store_state(holding.chain, holding.position, slot)
            self._policy.stored(slot, kind, *before)
            live.saved_tokens = holding.position
        finally:
            self._slots.unref(slot, self._tick, retire=False)
        return True

    def lend_checkpoint(self, holding: Holding, position: int) -> SlotId | None:
        self._require(holding)
        if holding.checkpoint_slot is not None:
            return holding.checkpoint_slot
        slot = self._tree.state_at(holding.chain, position)
        if slot is not None:
            self._tick += 1
            self._slots.ref(slot, self._tick)
            holding.checkpoint_slot = slot
        return slot

    def take_checkpoint_slot(self, holding: Holding, position: int) -> SlotId | None:
        self._require(holding)
        loss, slots = self._room.lowest_for_slot(), self._room.fit(0, 1, off_stream=True)
        worth = self._policy.expected(CheckpointKind.JUNCTION, position, self._tick)
        if holding.checkpoint_slot is not None or slots is None or loss is None or loss > worth:
            return None
        self._room.move(slots, off_stream=True)
        holding.checkpoint_slot = self._room.take_slot(off_stream=True)
        return holding.checkpoint_slot

    def store_checkpoint(self, holding: Holding, tag: StateTag) -> bool:
        live, slot = self._require(holding), holding.checkpoint_slot
        if slot is None or self._slots.published[slot] or not 0 < tag.position <= holding.written_tokens:
            raise ValueError(
                f"no state at {tag.position} was received: slot {slot}, KV of {holding.written_tokens} tokens"
            )
        if tag != (expected := StateTag(holding.chain.prefix_hash(tag.position), tag.position, self._fingerprint)):
            raise ValueError(f"received checkpoint is tagged {tag}, expected {expected}")
        self._tick += 1
        new = self._tree.state_at(holding.chain, tag.position) is None and slot not in self._slots.pins
        if new:
            self._tree.store_state(holding.chain, tag.position, slot)
            self._policy.stored(slot, CheckpointKind.JUNCTION, None, tag.position)
            live.saved_tokens = tag.position
        holding.checkpoint_slot = None
        self._slots.unref(slot, self._tick, retire=False)
        return new

    def open_snapshots(self, holding: Holding, cuts: Mapping[int, CheckpointKind]) -> dict[int, SlotId]:
        self._tick += 1
        return self._ahead.open(self._require(holding), cuts, self._tick)

    def close_snapshots(self, holding: Holding, upto: int) -> int:
        self._tick += 1
        return self._ahead.close(self._require(holding), upto, self._tick)

    def withdraw(self, holding: Holding) -> None:
        self._require(holding, slot=None)
        self._evictor.withdraw(self._tree.walk(holding.chain), holding)

    def release(self, holding: Holding, *, donate: bool) -> None:
        if holding.released:
            return
        live = self._require(holding, slot=None)
        self._tick += 1
        before = self._before(live)
        stored = self._publisher.donate(holding, self._tick) if donate else None
        if stored is not None:
            self._policy.stored(stored, CheckpointKind.END, *before)
        for block in reversed(holding.blocks):
            self._blocks.unref(block, self._tick)
        for slot in holding.slots:
            self._slots.unref(slot, self._tick)
        holding.released = True
        del self._live[id(holding)]

    def pin_io(self, blocks: Iterable[BlockId], slots: Iterable[SlotId]) -> None:
        for block in blocks:
            self._blocks.pin(block)
        for slot in slots:
            self._slots.pin(slot)

    def unpin_io(self, blocks: Iterable[BlockId], slots: Iterable[SlotId]) -> None:
        for block in blocks:
            self._blocks.unpin(block)
        for slot in slots:
            self._slots.unpin(slot)

    def begin_step(self) -> int:
        self._steps.launched += 1
        return self._steps.launched

    def end_step(self, step: int) -> None:
        if step > self._steps.launched:
            raise ValueError(f"step {step} ended but only {self._steps.launched} were launched")
        if step > self._steps.done:
            self._steps.done = step
            self._blocks.end_step()
            self._slots.end_step()

    def flush(self, group: str | None = None) -> int:
        evict: dict[str, Callable[[], int]] = {
            self._blocks.name: lambda: self._evictor.evict_blocks(self._blocks.total),
            self._slots.name: self._evictor.evict_slot,
        }
        if group is not None and group not in evict:
            raise BadRequest(f"unknown cache group {group!r} (known: {', '.join(evict)})", param="group")
        before = self._blocks.free + self._slots.free
        for name in evict if group is None else (group,):
            while evict[name]():
                pass
        return self._blocks.free + self._slots.free - before

    def drain_events(self) -> Sequence[CacheEvent]:
        return self._log.drain()

    def snapshot(self) -> tuple[int, Sequence[CacheEvent]]:
        last = self._log.sequence
        stored: list[CacheEvent] = []
        for block in self._tree.blocks():
            if not self._tree.is_partial(block):
                position = self._tree.position(block)
                stored.append(CacheEvent(last, EventKind.BLOCK_STORED, self._tree.name(block), position))
        for saved in self._tree.tails.saved.values():
            stored.append(CacheEvent(last, EventKind.CHECKPOINT_STORED, saved.name, saved.position))
        return last, stored

    def counts(self) -> dict[str, PoolCounts]:
        return {self._blocks.name: self._blocks.counts(), self._slots.name: self._slots.counts()}

    def stored(self) -> dict[str, int]:
        return {self._blocks.name: len(self._tree), self._slots.name: len(self._tree.tails.saved)}

    def max_request_tokens(self) -> int:
        if not self.geometry.slots:
            return 0
        return self.geometry.blocks_beside(max(1, self.geometry.slot_floor)) * self._block_tokens

    def check_integrity(self) -> None:
        holdings = [live.holding for live in self._live.values()]
        check(self._tree, self._blocks, self._slots, self._evictor, holdings, self.geometry)

    def _execute(self, chain: TokenChain, found: Found, plan: Plan) -> Holding:
        """Carries out a plan that fits. What is only copied from is referenced meanwhile, so that it is not evicted."""
        holding = self._hold_path(chain, found, plan.full, plan.checkpoint)
        source = plan.common
        if source is not None:
            self._blocks.ref(source, self._tick)
        if plan.checkpoint is not None:
            self._slots.ref(plan.checkpoint, self._tick)
        if plan.take_over_block and source is not None:
            holding.blocks.append(source)
        if plan.take_over_slot:
            holding.slot = plan.checkpoint
        try:
            self._room.move(plan.slots)
            if holding.slot is None:
                holding.slot = self._room.take_slot(leave_blocks=plan.new_blocks)
            holding.blocks += self._room.take_blocks(plan.new_blocks, self._tick)
            if source is not None and not plan.take_over_block:
                self._mover.copy_block(source, holding.blocks[len(plan.full)])
            if plan.checkpoint is not None and not plan.take_over_slot:
                self._mover.copy_slot(plan.checkpoint, holding.slot)
        except BaseException:
            self.release(holding, donate=False)
            raise
        finally:
            if source is not None and not plan.take_over_block:
                self._blocks.unref(source, self._tick, retire=False)
            if plan.checkpoint is not None and not plan.take_over_slot:
                self._slots.unref(plan.checkpoint, self._tick, retire=False)
        live = self._live[id(holding)]
        if plan.checkpoint is not None:
            slot = self._policy.before(plan.checkpoint) if plan.take_over_slot else plan.checkpoint
            live.saved_tokens = 0 if slot is None else self._tree.tails.saved[slot].position
        self._take_over(plan)
        holding.written_tokens = holding.hit_attention_tokens = plan.reach_tokens
        holding.position = holding.resumed_tokens = plan.resume_tokens
        return holding

    def _take_over(self, plan: Plan) -> None:
        """The holding has the only reference: what it will write into leaves the tree."""
        if plan.take_over_block and plan.common is not None:
            assert self._blocks.exclusive(plan.common)
            self._tree.drop_block(plan.common)
        if plan.take_over_slot and plan.checkpoint is not None:
            assert self._slots.exclusive(plan.checkpoint)
            self._tree.drop_state(plan.checkpoint)

    def _hold_path(
        self, chain: TokenChain, found: Found, full: Sequence[BlockId], checkpoint: SlotId | None
    ) -> Holding:
        """A new holding with references on full blocks, that will resume at `checkpoint`."""
        self._tick += 1
        self._policy.hit(found, checkpoint, self._tick)
        holding = Holding(chain, published_blocks=len(full), hit_checkpoints=tuple(found.checkpoints))
        for block in full:
            self._blocks.ref(block, self._tick)
        holding.blocks += full
        self._live[id(holding)] = Live(holding)
        return holding

    def _before(self, live: Live) -> tuple[SlotId | None, int]:
        return self._ahead.before(live, live.holding.position)

    def _require(self, holding: Holding, *, slot: bool | None = True) -> Live:
        """Raises ValueError for a holding that is released, of another cache, or without (with) a slot."""
        live = self._live.get(id(holding))
        if live is None or live.holding is not holding:
            raise ValueError("this holding is released or belongs to another cache")
        if slot is not None and slot != (holding.slot is not None):
            raise ValueError("this holding has no slot yet" if slot else "this holding is complete already")
        return live

    def _check_fits(self, chain: TokenChain, total_tokens: int) -> None:
        if total_tokens < len(chain):
            raise ValueError(f"total_tokens {total_tokens} is less than the chain's {len(chain)}")
        if total_tokens > self.max_request_tokens():
            raise TooLong(
                f"a request of {total_tokens} tokens needs {self._blocks_for(total_tokens)} blocks of {self._block_tokens} "
                f"tokens and 1 state slot; this worker has {self.max_request_tokens() // self._block_tokens} "
                f"blocks and {self.geometry.slots} slots, enough for {self.max_request_tokens()} tokens"
            )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _capacity_tokens(self, holding: Holding) -> int:
        return len(holding.blocks) * self._block_tokens
