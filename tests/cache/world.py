"""A cache with a model of what its memory *contains*: every hit handed out is checked to be the KV and state of those tokens.

`World` plays engine and device. The compute stream is a queue: step writes and copies run only when a step's event fires.
Whatever is off the stream (transfers) writes at once, and a failed transfer writes garbage for as long as it is pinned. So a
unit that changes hands too early, or is labelled with the wrong tokens, shows up as wrong content.

KV of the token at p is modelled by the hash of tokens [0, p], a state after p tokens by the hash of [0, p).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tests.cache.device import Device
from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.base import BlockId, Holding, SlotId
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash
from twinflow.contracts.tags import StateTag

GARBAGE = b"garbage"
SMALL_STATE = (2, 3)  # 24 B beside a block of 128 B
LARGE_STATE = (5, 17)  # 340 B: neither side is a multiple of the other


def make_layout(block_tokens: int = 4, state: tuple[int, ...] = SMALL_STATE) -> CacheLayout:
    kv = tuple(TensorSpec(name, (1, 4), "float32") for name in "kv")
    return CacheLayout(
        "tiny",
        (
            GroupSpec("attention", GroupKind.ATTENTION, (1,), kv, block_tokens),
            GroupSpec("state", GroupKind.STATE, (0,), (TensorSpec("temporal", state, "float32"),)),
        ),
    )


def make_geometry(layout: CacheLayout, blocks: int, slots: int, block_floor: int | None = None) -> ArenaGeometry:
    """At most `blocks` blocks, at least `slots` slots. Without a floor for the blocks the boundary cannot move."""
    total = blocks * layout.block_bytes + slots * layout.slot_bytes
    most = slots if block_floor is None else (total - block_floor * layout.block_bytes) // layout.slot_bytes
    return ArenaGeometry(total, layout.block_bytes, layout.slot_bytes, blocks, most)


class World:
    def __init__(
        self,
        blocks: int = 8,
        slots: int = 3,
        block_tokens: int = 4,
        *,
        block_floor: int | None = None,
        state: tuple[int, ...] = SMALL_STATE,
    ) -> None:
        self.block_tokens = block_tokens
        self.layout = make_layout(block_tokens, state)
        self.geometry = make_geometry(self.layout, blocks, slots, block_floor)
        self.device = Device(self.geometry, block_tokens)
        self.cache = HybridCache(self.layout, self.geometry, self.device)
        self.holdings: list[Holding] = []
        self.in_flight: deque[tuple[int, int, list[Holding]]] = deque()  # step, stream length at launch, who is in it
        self.doomed_io: list[tuple[list[BlockId], list[SlotId]]] = []  # failed transfers that still write
        self.events: list[CacheEvent] = []
        self.snapshots: dict[tuple[int, int], int] = {}  # where steps that leave some behind end, by id() and step
        self.lent: list[tuple[Holding, SlotId, bytes]] = []
        self.shorter: dict[bytes, bytes] = {}  # hash of all KV ever written → that of the token before

    # -- chains

    def chain(self, tokens: Sequence[int], tenant: str = "") -> TokenChain:
        return TokenChain(root_hash("f", tenant), self.block_tokens, pack_tokens(tokens))

    # -- verbs, each followed by a check of what was handed out

    def reserve(self, chain: TokenChain, extra: int = 8) -> Holding | None:
        match = self.cache.match(chain)
        before = self.fingerprint()
        assert self.cache.match(chain) == match
        holding = self.cache.reserve(chain, len(chain) + extra)
        if holding is None:
            assert self.fingerprint() == before, "a refused reserve changed something"
            assert not self.quiet, "an idle cache refused a request that fits"
            return None
        assert len(holding.blocks) == -(-(len(chain) + extra) // self.block_tokens)
        assert holding.position == holding.resumed_tokens <= max(0, len(chain) - 1)
        if holding.written_tokens == match.attention_tokens:  # else the partial hit was given up for room
            assert holding.position in (match.usable_tokens, self.given_up)
        else:
            assert holding.written_tokens == match.attention_tokens // self.block_tokens * self.block_tokens
        assert holding.hit_checkpoints == match.checkpoints
        self.holdings.append(holding)
        self.expect(holding)
        return holding

    def hold_prefix(self, chain: TokenChain) -> Holding:
        holding = self.cache.hold_prefix(chain)
        reach = self.cache.match(chain).attention_tokens
        assert holding.written_tokens == reach // self.block_tokens * self.block_tokens
        self.holdings.append(holding)
        self.expect(holding)
        return holding

    def complete(self, holding: Holding, extra: int = 8) -> bool:
        hits = len(holding.blocks)
        before = self.fingerprint()
        if not self.cache.complete(holding, len(holding.chain) + extra):
            assert self.fingerprint() == before, "a refused complete changed something"
            return False
        assert holding.slot is not None
        self.cache.pin_io(holding.blocks[hits:], [holding.slot])
        self.doomed_io.append((holding.blocks[hits:], [holding.slot]))
        self.scribble()
        return True

    def extend(self, holding: Holding, extra: int) -> bool:
        before = self.fingerprint()
        had = list(holding.blocks)
        if not self.cache.extend(holding, len(holding.chain) + extra):
            assert self.fingerprint() == before, "a refused extend changed something"
            return False
        assert holding.blocks[: len(had)] == had
        assert len(holding.blocks) == max(len(had), -(-(len(holding.chain) + extra) // self.block_tokens))
        return True

    def receive(self, holding: Holding) -> None:
        """The transfer of all of the prompt succeeds: bytes, unpin, adopt."""
        assert holding.slot is not None
        io = next(io for io in self.doomed_io if io[1] == [holding.slot])
        self.doomed_io.remove(io)
        n = len(holding.chain)
        for p in range(holding.written_tokens, n):
            block, at = holding.blocks[p // self.block_tokens], p % self.block_tokens
            self.device.write_kv(block, {at: self.kv_of(holding.chain, p)})
        self.device.write_state(holding.slot, holding.chain.prefix_hash(n))
        self.cache.unpin_io(*io)
        self.cache.adopt(holding, StateTag(holding.chain.prefix_hash(n), n, self.layout.fingerprint()))
        self.expect(holding)

    def lend_checkpoint(self, holding: Holding, position: int) -> SlotId | None:
        """What is lent stays what it is until the holding is released."""
        slot = self.cache.lend_checkpoint(holding, position)
        if slot is not None and (holding, slot) not in [lent[:2] for lent in self.lent]:
            self.lent.append((holding, slot, holding.chain.prefix_hash(position)))
        return slot

    def take_checkpoint_slot(self, holding: Holding, position: int) -> SlotId | None:
        """A transfer into it begins at once."""
        slot = self.cache.take_checkpoint_slot(holding, position)
        if slot is not None:
            self.cache.pin_io([], [slot])
            self.doomed_io.append(([], [slot]))
            self.scribble()
        return slot

    def store_checkpoint(self, holding: Holding, position: int) -> bool:
        """That transfer succeeds."""
        name, slot = holding.chain.prefix_hash(position), holding.checkpoint_slot
        assert slot is not None
        self.device.write_state(slot, name)
        self.doomed_io.remove(([], [slot]))
        self.cache.unpin_io([], [slot])
        return self.cache.store_checkpoint(holding, StateTag(name, position, self.layout.fingerprint()))

    def scribble(self) -> None:
        """Every transfer that has not ended writes garbage to all of its destinations."""
        for blocks, slots in self.doomed_io:
            for b in blocks:
                self.device.write_kv(b, dict.fromkeys(range(self.block_tokens), GARBAGE))
            for s in slots:
                self.device.write_state(s, GARBAGE)

    def end_io(self, index: int = 0) -> None:
        self.cache.unpin_io(*self.doomed_io.pop(index))

    def step(self, feeds: Sequence[tuple[Holding, int]], keep: Sequence[int] = ()) -> int:
        """Launches a step that feeds `tokens` more (already in the chain) to each holding. `keep`: tokens after which each
        leaves its state behind if the cache wants it, as far as it comes by them."""
        step = self.cache.begin_step()
        for holding, tokens in feeds:
            cuts = {holding.position + n: CheckpointKind.INTERVAL for n in sorted(set(keep)) if 0 < n <= tokens}
            self._launch(holding, tokens, self.cache.open_snapshots(holding, cuts))
        self.in_flight.append((step, len(self.device.stream), [h for h, _ in feeds]))
        return step

    def end_step(self) -> None:
        step, length, fed = self.in_flight.popleft()
        self.device.run(length)
        self.in_flight = deque((s, n - length, hs) for s, n, hs in self.in_flight)
        self.cache.end_step(step)
        for holding in fed:
            upto = self.snapshots.pop((id(holding), step), None)
            if upto is not None and not holding.released:
                self.cache.close_snapshots(holding, upto)

    def settle(self) -> None:
        """Ends all steps, then an empty one behind the copies that are still queued."""
        while self.in_flight:
            self.end_step()
        self.step([])
        self.end_step()

    def feed(self, holding: Holding, tokens: int | None = None, *, commit: bool = True) -> None:
        """One whole step for one holding: the rest of its chain by default."""
        self.step([(holding, len(holding.chain) - holding.position if tokens is None else tokens)])
        while self.in_flight:
            self.end_step()
        if commit:
            self.cache.commit(holding)

    def generate(self, holding: Holding, tokens: Sequence[int]) -> None:
        for t in tokens:
            holding.chain.append([t])
            self.feed(holding, 1)

    def checkpoint(self, holding: Holding) -> bool:
        return self.cache.checkpoint(holding)

    def release(self, holding: Holding, *, donate: bool) -> None:
        self.cache.release(holding, donate=donate)
        self.holdings.remove(holding)

    def serve(self, tokens: Sequence[int], reply: Sequence[int] = (), *, tenant: str = "", extra: int = 8) -> Holding:
        """A whole request, donated at its end. Returns the released holding."""
        holding = self.reserve(self.chain(tokens, tenant), extra)
        assert holding is not None
        self.feed(holding)
        self.generate(holding, reply)
        self.release(holding, donate=True)
        return holding

    # -- the shadow

    @property
    def given_up(self) -> int | None:
        """Where a request resumes whose checkpoint lay on the bytes that its blocks need."""
        return 0 if self.geometry.slots > self.geometry.slot_floor else None

    def busy(self, holding: Holding) -> bool:
        return any(h is holding for _, _, hs in self.in_flight for h in hs)

    @property
    def quiet(self) -> bool:
        return (
            not self.holdings
            and not self.in_flight
            and not self.doomed_io
            and not any(c.pinned_by_io for c in self.cache.counts().values())
        )

    def kv_of(self, chain: TokenChain, p: int) -> bytes:
        value = chain.prefix_hash(p + 1)
        self.shorter[value] = chain.prefix_hash(p)
        return value

    def expect(self, holding: Holding) -> None:
        """In stream order from here: the holding's KV and state are what it says they are (to the first step that reads
        them; nobody does if the holding is released before)."""
        read = self._reader(holding, holding.written_tokens)
        self.device.stream.append(lambda: None if holding.released else read())

    def check(self) -> None:
        """Integrity, and, when no copy is queued, the content of everything that is published."""
        self.cache.check_integrity()
        self.check_split()
        self.check_links()
        self.events += self.cache.drain_events()
        if self.device.stream:
            return
        self.lent = [each for each in self.lent if not each[0].released]
        for _, slot, name in self.lent:
            assert self.device.states[slot] == name, f"slot {slot} is lent and has changed"
        tree = self.cache._tree
        for slot, saved in tree.tails.saved.items():
            assert self.device.states[slot] == saved.name, f"slot {slot} is not the state it is labelled"
            for block in saved.carriers:
                carried = self.device.kv[block][saved.position % self.block_tokens - 1]
                assert carried == saved.name, f"block {block} does not carry the state at {saved.position}"
        for block in tree.blocks():
            value = tree.name(block)
            for p in reversed(
                range((tree.position(block) - 1) // self.block_tokens * self.block_tokens, tree.position(block))
            ):
                assert self.device.kv[block][p % self.block_tokens] == value, f"block {block}: wrong KV at {p}"
                value = self.shorter[value]

    def check_links(self) -> None:
        """What eviction remembers of checkpoints behind each other is about those that are there."""
        policy, saved = self.cache._policy, self.cache._tree.tails.saved
        for slot, before in policy._before.items():
            assert slot in saved and before in saved and slot in policy._behind[before]
            assert saved[before].position < saved[slot].position
        assert {s for behind in policy._behind.values() for s in behind} == set(policy._before)

    def check_split(self) -> None:
        """Both sides have their floors and together all of the arena but less than one block."""
        counts, g = self.cache.counts(), self.geometry
        blocks, slots = counts["attention"].total, counts["state"].total
        assert blocks >= g.block_floor and slots >= g.slot_floor
        if g.slots > g.slot_floor and blocks < g.blocks:
            assert 0 <= g.total_bytes - blocks * g.block_bytes - slots * g.slot_bytes < g.block_bytes

    def fingerprint(self) -> object:
        """Everything that a refusal must leave alone, recency included."""
        cache = self.cache
        counts, (_, stored) = cache.counts(), cache.snapshot()
        names = sorted((e.kind.value, e.prefix_hash) for e in stored)
        return counts, names, list(cache._blocks.used), list(cache._slots.used), list(cache._tree.blocks())

    def replayed(self) -> set[tuple[str, bytes, int]]:
        """The router's view after all events so far."""
        self.events += self.cache.drain_events()
        assert [e.sequence for e in self.events] == list(range(1, len(self.events) + 1))
        view: set[tuple[str, bytes, int]] = set()
        for e in self.events:
            what = "block" if e.kind in (EventKind.BLOCK_STORED, EventKind.BLOCK_REMOVED) else "checkpoint"
            entry = (what, e.prefix_hash, e.position)
            if e.kind in (EventKind.BLOCK_STORED, EventKind.CHECKPOINT_STORED):
                assert entry not in view, f"stored twice: {entry}"
                view.add(entry)
            else:
                view.remove(entry)
        return view

    def snapshot(self) -> set[tuple[str, bytes, int]]:
        sequence, stored = self.cache.snapshot()
        assert sequence == (self.events[-1].sequence if self.events else 0)
        kinds = {EventKind.BLOCK_STORED: "block", EventKind.CHECKPOINT_STORED: "checkpoint"}
        return {(kinds[e.kind], e.prefix_hash, e.position) for e in stored}

    def _launch(self, holding: Holding, tokens: int, snapshots: Mapping[int, SlotId]) -> None:
        chain, blocks, slot = holding.chain, list(holding.blocks), holding.slot
        written, start = holding.written_tokens, holding.position
        self.cache.advance(holding, tokens)
        end = holding.position
        values = {p: self.kv_of(chain, p) for p in range(written, end)}
        after = chain.prefix_hash(end)
        kept = {slot: chain.prefix_hash(at) for at, slot in snapshots.items()}
        if kept:
            self.snapshots[id(holding), self.cache._steps.launched] = end
        read = self._reader(holding, written, start)

        def run() -> None:
            read()
            for p, value in values.items():
                self.device.write_kv(blocks[p // self.block_tokens], {p % self.block_tokens: value})
            for other, name in kept.items():
                self.device.write_state(other, name)
            self.device.write_state(slot, after)

        self.device.stream.append(run)

    def _reader(self, holding: Holding, written: int, position: int | None = None) -> Callable[[], None]:
        """Compares content with what it should be now, in tokens and cursor."""
        chain, blocks, slot = holding.chain, list(holding.blocks), holding.slot
        at = holding.position if position is None else position
        values = [self.kv_of(chain, p) for p in range(written)]
        state = chain.prefix_hash(at) if at else None

        def read() -> None:
            for p, value in enumerate(values):
                found = self.device.kv[blocks[p // self.block_tokens]][p % self.block_tokens]
                assert found == value, f"KV of token {p} in block {blocks[p // self.block_tokens]} is of other tokens"
            assert state is None or self.device.states[slot] == state, f"slot {slot} is not the state at {at}"

        return read
