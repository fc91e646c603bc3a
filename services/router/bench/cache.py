"""The cache of a simulated worker: blocks and states of prefixes in one byte budget, least recently used goes first."""

from collections import OrderedDict
from dataclasses import dataclass

from services.router.bench.prompt import RunPrompt
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.workers import WorkerRecord


@dataclass(frozen=True, slots=True)
class Found:
    """Of one prompt: attention's reach, and from where both groups can resume."""

    reach_tokens: int
    usable_tokens: int


class SimCache:
    """Events gather in `events`. What running requests hold is not modelled as pinned: a budget that is many times theirs."""

    def __init__(self, record: WorkerRecord, size_bytes: int) -> None:
        self._record = record
        self._left = size_bytes
        self._entries: OrderedDict[tuple[bool, bytes], int] = OrderedDict()  # (is a state, hash) → position
        self._tails: dict[int, int] = {}  # how many states sit at each position inside a block
        self._sequence = 0
        self.events: list[CacheEvent] = []

    def match(self, prompt: RunPrompt) -> Found:
        """Changes nothing."""
        hashes, size = prompt.block_hashes(self._record), self._record.block_tokens
        blocks = 0
        while blocks < len(hashes) and (False, hashes[blocks]) in self._entries:
            blocks += 1
        reach = blocks * size
        usable = 0
        for k in range(min(blocks, (prompt.tokens - 1) // size), 0, -1):
            if (True, hashes[k - 1]) in self._entries:
                usable = k * size
                break
        last = min(reach + size, prompt.tokens) - 1
        inside = (p for p in range(last, max(usable, reach), -1) if p in self._tails)
        tail = next((p for p in inside if (True, prompt.prefix_hash(p)) in self._entries), 0)
        return Found(max(reach, tail), max(usable, tail))

    def store(self, prompt: RunPrompt, states: "tuple[int, ...]" = ()) -> None:
        """All full blocks, and states at these positions. The beginning of the prompt is the youngest then."""
        for position in sorted(states, reverse=True):
            self._put(True, prompt.prefix_hash(position), position, self._record.slot_bytes)
        size = self._record.block_tokens
        for k, block in reversed(list(enumerate(prompt.block_hashes(self._record)))):
            self._put(False, block, (k + 1) * size, self._record.block_bytes)
        while self._left < 0:
            (is_state, key), position = self._entries.popitem(last=False)
            self._left += self._record.slot_bytes if is_state else self._record.block_bytes
            if is_state:
                self._count_tail(position, -1)
            kind = EventKind.CHECKPOINT_REMOVED if is_state else EventKind.BLOCK_REMOVED
            self._tell(kind, key, position)

    def _put(self, is_state: bool, key: bytes, position: int, size_bytes: int) -> None:
        if (is_state, key) in self._entries:
            self._entries.move_to_end((is_state, key))
            return
        self._entries[is_state, key] = position
        self._left -= size_bytes
        if is_state:
            self._count_tail(position, 1)
        self._tell(EventKind.CHECKPOINT_STORED if is_state else EventKind.BLOCK_STORED, key, position)

    def _count_tail(self, position: int, change: int) -> None:
        if position % self._record.block_tokens:
            self._tails[position] = self._tails.get(position, 0) + change
            if not self._tails[position]:
                del self._tails[position]

    def _tell(self, kind: EventKind, key: bytes, position: int) -> None:
        self._sequence += 1
        self.events.append(CacheEvent(self._sequence, kind, key, position))
