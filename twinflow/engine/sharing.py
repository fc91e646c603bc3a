"""Which prefixes the sequences of a decode step share, so that attention reads those once for all of them.

Found from the block tables when the batch changes, not at every step: contexts only grow, and what they grow by is nobody
else's.
"""

from dataclasses import replace

import numpy as np

from twinflow.engine.batch import BlockTables, Plan
from twinflow.kernels.paged_attention.shared import SharedPrefixes, group_prefixes

LEAST_TOKENS = 16_384  # reading fewer tokens twice costs less than a launch of the kernel that reads prefixes


class Sharing:
    """Owned by the runner. Remembers the last batch."""

    def __init__(self, tables: BlockTables, block_tokens: int) -> None:
        self._tables = tables
        self._block_tokens = block_tokens
        self._pinned = tables.table.device.type == "cuda"
        self._key: tuple[int, tuple[int, ...]] | None = None
        self._shared: SharedPrefixes | None = None

    def of(self, plan: Plan, sequences: int) -> SharedPrefixes | None:
        """For a decode step padded to `sequences`, on the host (pinned beside a GPU); None where sharing does not pay, or there
        is nobody to share with."""
        if len(plan.parts) < 2:
            return None
        seats = self._tables.seats
        key = (sequences, tuple([seats[s.row] for s in plan.sequences if s.row is not None]))
        if key != self._key:
            self._key, self._shared = key, self._find(plan, sequences)
        return self._shared

    def _find(self, plan: Plan, sequences: int) -> SharedPrefixes | None:
        contexts = np.zeros(sequences, dtype=np.int64)
        contexts[: len(plan.parts)] = plan.contexts
        if contexts.sum() < LEAST_TOKENS:
            return None
        rows = np.full(sequences, self._tables.empty_row)
        rows[: len(plan.parts)] = [p.sequence.row for p in plan.parts]
        width = int(contexts.max()) // self._block_tokens + 1
        found = group_prefixes(self._tables.host[:, :width][rows], contexts, self._block_tokens)
        if found is None or saved_tokens(found, self._block_tokens) < LEAST_TOKENS:
            return None
        return replace(found, buffer=found.buffer.pin_memory()) if self._pinned else found  # only the buffer is copied


def saved_tokens(shared: SharedPrefixes, block_tokens: int) -> int:
    """Tokens of context that need not be read again."""
    start, end, first, last = shared.prefixes.long().unbind(1)
    return int(((end - start - 1).clamp(min=0) * (last - first)).sum()) * block_tokens
