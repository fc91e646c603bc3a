"""What one worker incarnation holds, from its sequenced events: block hashes and checkpoint hashes.

Events apply only in sequence. After a gap the index keeps what it has (a stale hint is still a hint), holds back later
events and asks for a snapshot, which replaces everything. The index is bounded: the oldest entry goes first.
"""

from collections import Counter
from collections.abc import Iterable

from services.router.view.prompt import PromptKeys
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.groups import GroupKind
from twinflow.contracts.hits import GroupHit
from twinflow.contracts.workers import WorkerRecord

MAX_ENTRIES = 500_000  # per worker; about 100 B each
MAX_PENDING_EVENTS = 100_000
MAX_TAIL_TRIES = 1024  # mid-block checkpoint positions hashed per lookup, the deepest first


class WorkerIndex:
    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.sequence = 0  # last event applied
        self._max_entries = max_entries
        self._blocks: dict[bytes, None] = {}  # in order of arrival
        self._checkpoints: dict[bytes, int] = {}  # hash → position
        self._positions: Counter[int] = Counter()  # how many checkpoints sit at each position
        self._pending: dict[int, CacheEvent] = {}

    def __len__(self) -> int:
        return len(self._blocks) + len(self._checkpoints)

    @property
    def has_gap(self) -> bool:
        """True while events are missing, until a snapshot closes the gap."""
        return bool(self._pending)

    def apply(self, events: Iterable[CacheEvent]) -> bool:
        """Takes events in any order; returns True when a gap has just opened: ask for a snapshot."""
        had_gap = self.has_gap
        for e in events:
            if e.sequence == self.sequence + 1:
                self._apply(e)
            elif e.sequence > self.sequence and len(self._pending) < MAX_PENDING_EVENTS:
                self._pending[e.sequence] = e
        self._drain_pending()
        return self.has_gap and not had_gap

    def replace(self, sequence: int, contents: Iterable[CacheEvent]) -> bool:
        """A snapshot that includes everything up to `sequence`. Returns True when a gap is still open after it."""
        if sequence < self.sequence:  # overtaken by events that came meanwhile
            return self.has_gap
        self._blocks.clear()
        self._checkpoints.clear()
        self._positions.clear()
        for e in contents:
            self._store(e)
        self.sequence = sequence
        self._pending = {n: e for n, e in self._pending.items() if n > sequence}
        self._drain_pending()
        return self.has_gap

    def hits(self, record: WorkerRecord, prompt: PromptKeys) -> tuple[GroupHit, GroupHit]:
        """Predicted hits of the attention and the state group. A checkpoint inside the block after the attention reach
        extends it: a donated state comes with its partial tail block."""
        hashes = prompt.block_hashes(record)
        blocks = 0
        while blocks < len(hashes) and hashes[blocks] in self._blocks:
            blocks += 1
        block_tokens = record.block_tokens
        reach = blocks * block_tokens
        points = [(i + 1) * block_tokens for i, h in enumerate(hashes[:blocks]) if h in self._checkpoints]
        tail = self._deepest_tail(record, prompt, min(reach + block_tokens, prompt.tokens) - 1, max(points, default=0))
        if tail is not None:
            points.append(tail)
            reach = max(reach, tail)
        return (
            GroupHit("attention", GroupKind.ATTENTION, reach),
            GroupHit("state", GroupKind.STATE, max(points, default=0), tuple(sorted(points))),
        )

    def _deepest_tail(self, record: WorkerRecord, prompt: PromptKeys, last: int, beyond: int) -> int | None:
        tries = [p for p in self._positions if beyond < p <= last and p % record.block_tokens]
        for position in sorted(tries, reverse=True)[:MAX_TAIL_TRIES]:
            if prompt.prefix_hash(record, position) in self._checkpoints:
                return position
        return None

    def _drain_pending(self) -> None:
        while (e := self._pending.pop(self.sequence + 1, None)) is not None:
            self._apply(e)

    def _apply(self, e: CacheEvent) -> None:
        self.sequence = e.sequence
        if e.kind is EventKind.BLOCK_REMOVED:
            self._blocks.pop(e.prefix_hash, None)
        elif e.kind is EventKind.CHECKPOINT_REMOVED:
            self._drop_checkpoint(e.prefix_hash)
        else:
            self._store(e)

    def _store(self, e: CacheEvent) -> None:
        if e.kind is EventKind.BLOCK_STORED:
            self._blocks.setdefault(e.prefix_hash)
        elif e.prefix_hash not in self._checkpoints:
            self._checkpoints[e.prefix_hash] = e.position
            self._positions[e.position] += 1
        if len(self._blocks) > self._max_entries:
            self._blocks.pop(next(iter(self._blocks)))
        if len(self._checkpoints) > self._max_entries:
            self._drop_checkpoint(next(iter(self._checkpoints)))

    def _drop_checkpoint(self, prefix_hash: bytes) -> None:
        position = self._checkpoints.pop(prefix_hash, None)
        if position is not None:
            self._positions[position] -= 1
            if not self._positions[position]:
                del self._positions[position]
