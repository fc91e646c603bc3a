"""A device without one: what the arena's memory contains, and a compute stream that runs when it is told to."""

from collections import deque
from collections.abc import Callable

from twinflow.cache.arena import ArenaGeometry

OVERWRITTEN = b"overwritten by the other side of the arena"


class Device:
    """The arena's content and the compute stream. Implements `Copier`.

    Writing to a block destroys the states of all slots that lie on the same bytes, and the reverse.
    """

    def __init__(self, geometry: ArenaGeometry, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.kv: list[list[bytes | None]] = [[None] * block_tokens for _ in range(geometry.blocks)]
        self.states: list[bytes | None] = [None] * geometry.slots
        self.slots_on: list[list[int]] = [[] for _ in range(geometry.blocks)]
        self.blocks_on: list[list[int]] = [[] for _ in range(geometry.slots)]
        for b in range(geometry.blocks):
            for s in range(geometry.slots):
                start, at = geometry.block_offset(b), geometry.slot_offset(s)
                if start < at + geometry.slot_bytes and at < start + geometry.block_bytes:
                    self.slots_on[b].append(s)
                    self.blocks_on[s].append(b)
        self.stream: deque[Callable[[], None]] = deque()
        self.copied_blocks: list[tuple[int, int]] = []
        self.copied_slots: list[tuple[int, int]] = []
        self.fail_copies = False

    def write_kv(self, block: int, values: "dict[int, bytes | None]") -> None:
        """`values` by token within the block."""
        for i, value in values.items():
            self.kv[block][i] = value
        for s in self.slots_on[block]:
            self.states[s] = OVERWRITTEN

    def write_state(self, slot: int, state: bytes | None) -> None:
        self.states[slot] = state
        for b in self.blocks_on[slot]:
            self.kv[b] = [OVERWRITTEN] * self.block_tokens

    def copy_slot(self, source: int, target: int) -> None:
        self._copied(self.copied_slots, source, target)
        self.stream.append(lambda: self.write_state(target, self.states[source]))

    def copy_block(self, source: int, target: int) -> None:
        self._copied(self.copied_blocks, source, target)
        self.stream.append(lambda: self.write_kv(target, dict(enumerate(self.kv[source]))))

    def run(self, count: int | None = None) -> None:
        for _ in range(len(self.stream) if count is None else count):
            self.stream.popleft()()

    def _copied(self, log: list[tuple[int, int]], source: int, target: int) -> None:
        assert source != target
        if self.fail_copies:
            raise RuntimeError("copy failed")
        log.append((source, target))
