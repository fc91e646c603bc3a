"""The cache of a simulated worker: blocks and states of prefixes in one byte budget, least recently used goes first.

What running requests hold never goes; what they will need is set aside for them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.bench.prompt import RunPrompt
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.workers import WorkerRecord

Entry = tuple[bool, bytes]  # is it a state, hash


@dataclass(frozen=True, slots=True)
class Found:
    """Of one prompt: attention's reach, and from where both groups can resume."""

    reach_tokens: int
    usable_tokens: int


@dataclass(slots=True)
class Held:
    """Memory of a request: blocks that were there, and bytes set aside for what it will store."""

    blocks: list[bytes]
    reserved_bytes: int


class SimCache:
    """Events gather in `events`."""

    def __init__(self, record: WorkerRecord, size_bytes: int) -> None:
        self._record = record
        self._left = size_bytes
        self._positions: dict[Entry, int] = {}
        self._idle: OrderedDict[Entry, None] = OrderedDict()  # those that may go, the oldest first
        self._idle_bytes = 0
        self._holders: dict[bytes, int] = {}  # of blocks that may not go
        self._tails: dict[int, int] = {}  # how many states sit at each position inside a block
        self._sequence = 0
        self.events: list[CacheEvent] = []

    @property
    def free_bytes(self) -> int:
        """Free, or could be at once."""
        return self._left + self._idle_bytes

    def match(self, prompt: RunPrompt) -> Found:
        """Changes nothing."""
        hashes, size, known = prompt.block_hashes(self._record), self._record.block_tokens, self._positions
        blocks = 0
        while blocks < len(hashes) and (False, hashes[blocks]) in known:
            blocks += 1
        reach = blocks * size
        usable = 0
        for k in range(min(blocks, (prompt.tokens - 1) // size), 0, -1):
            if (True, hashes[k - 1]) in known:
                usable = k * size
                break
        last = min(reach + size, prompt.tokens) - 1
        inside = (p for p in range(last, max(usable, reach), -1) if p in self._tails)
        tail = next((p for p in inside if (True, prompt.prefix_hash(p)) in known), 0)
        return Found(max(reach, tail), max(usable, tail))

    # ---- what running requests need ----

    def hold(self, prompt: RunPrompt, reach_tokens: int, needs_bytes: int, force: bool = False) -> Held | None:
        """The blocks within the reach stay, and so many bytes are set aside. None if they cannot be, unless `force`."""
        blocks = prompt.block_hashes(self._record)[: reach_tokens // self._record.block_tokens]
        there = [b for b in blocks if (False, b) in self._positions]
        needs_bytes += (len(blocks) - len(there)) * self._record.block_bytes
        idle = sum((False, b) in self._idle for b in there) * self._record.block_bytes
        if self.free_bytes - idle < needs_bytes and not force:
            return None
        for block in there:
            self._pin(block)
        self._left -= needs_bytes
        self._evict()
        return Held(there, needs_bytes)

    def received(self, held: Held, prompt: RunPrompt) -> None:
        """The prompt's blocks are published, out of what was set aside."""
        mine = set(held.blocks)
        for block in prompt.block_hashes(self._record):
            if block in mine:
                continue
            if (False, block) not in self._positions:
                spent = min(held.reserved_bytes, self._record.block_bytes)
                held.reserved_bytes -= spent
                self._left += spent
            self._put(False, block, 0)  # nobody asks for the position of a block
            self._pin(block)
            held.blocks.append(block)

    def release(self, held: Held) -> None:
        self._left += held.reserved_bytes
        for block in reversed(held.blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._idle[False, block] = None
                self._idle_bytes += self._record.block_bytes

    def _pin(self, block: bytes) -> None:
        if block not in self._holders:
            del self._idle[False, block]
            self._idle_bytes -= self._record.block_bytes
        self._holders[block] = self._holders.get(block, 0) + 1

    # ---- what is kept ----

    def store(self, prompt: RunPrompt, states: Sequence[int] = ()) -> None:
        """All full blocks, and states at these positions. The beginning of the prompt is the youngest then."""
        for position in sorted(states, reverse=True):
            self._put(True, prompt.prefix_hash(position), position)
        size = self._record.block_tokens
        for k, block in reversed(list(enumerate(prompt.block_hashes(self._record)))):
            self._put(False, block, (k + 1) * size)
        self._evict()

    def _evict(self) -> None:
        while self._left < 0 and self._idle:
            entry, _ = self._idle.popitem(last=False)
            is_state, key = entry
            self._left += self._size(is_state)
            self._idle_bytes -= self._size(is_state)
            position = self._positions.pop(entry)
            if is_state:
                self._count_tail(position, -1)
            self._tell(EventKind.CHECKPOINT_REMOVED if is_state else EventKind.BLOCK_REMOVED, key, position)

    def _put(self, is_state: bool, key: bytes, position: int) -> None:
        entry = (is_state, key)
        if entry in self._positions:
            if entry in self._idle:
                self._idle.move_to_end(entry)
            return
        self._positions[entry] = position
        self._idle[entry] = None
        self._left -= self._size(is_state)
        self._idle_bytes += self._size(is_state)
        if is_state:
            self._count_tail(position, 1)
        self._tell(EventKind.CHECKPOINT_STORED if is_state else EventKind.BLOCK_STORED, key, position)

    def _size(self, is_state: bool) -> int:
        return self._record.slot_bytes if is_state else self._record.block_bytes

    def _count_tail(self, position: int, change: int) -> None:
        if position % self._record.block_tokens:
            self._tails[position] = self._tails.get(position, 0) + change
            if not self._tails[position]:
                del self._tails[position]

    def _tell(self, kind: EventKind, key: bytes, position: int) -> None:
        self._sequence += 1
        self.events.append(CacheEvent(self._sequence, kind, key, position))
