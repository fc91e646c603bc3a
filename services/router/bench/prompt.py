"""A prompt made of runs of one token each, hashed as any other: it stands in for `PromptKeys` without holding its tokens."""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.router.view.prompt import PromptKeys, ReplyKeys, key_of, keys_of
from services.router.view.table import U64
from twinflow.contracts.hashing import block_hash, root_hash, tail_hash
from twinflow.contracts.workers import WorkerRecord


@dataclass(frozen=True, slots=True)
class Run:
    token_id: int
    tokens: int


class RunPrompt(PromptKeys):
    """For workers of one layout. `before`: a prompt that this one begins with; its hashes are taken over."""

    def __init__(
        self, runs: Sequence[Run], fingerprint: str, block_tokens: int, before: "RunPrompt | None" = None
    ) -> None:
        super().__init__(b"")
        self.runs = tuple(runs)
        self._starts = list(accumulate((r.tokens for r in runs), initial=0))
        self.tokens = self._starts.pop()
        self._block_tokens = block_tokens
        self._root = root_hash(fingerprint)
        self._blocks: list[bytes] = list(before._blocks) if before is not None else []
        for k in range(len(self._blocks), self.tokens // block_tokens):
            ids = self._ids(k * block_tokens, (k + 1) * block_tokens)
            self._blocks.append(block_hash(self._parent(k), ids))
        self._keys = keys_of(self._blocks)
        self._tails: dict[int, bytes] = {}  # of positions that somebody has asked for

    def block_hashes(self, record: WorkerRecord) -> list[bytes]:
        return self._blocks

    def block_keys(self, record: WorkerRecord) -> U64:
        return self._keys

    def tail_keys(self, record: WorkerRecord, positions: Sequence[int]) -> U64:
        return keys_of([self.prefix_hash(p) for p in positions])

    def keys_of_reply(self, record: WorkerRecord, whole: "RunPrompt") -> ReplyKeys:
        """`whole`: this prompt with the reply."""
        position = whole.tokens - 1
        blocks = slice(self.tokens // self._block_tokens, position // self._block_tokens)
        return ReplyKeys(whole.block_numbers(record)[blocks], {position: key_of(whole.prefix_hash(position))})

    def prefix_hash(self, position: int) -> bytes:
        blocks, tail = divmod(position, self._block_tokens)
        if not tail:
            return self._parent(blocks)
        if position not in self._tails:
            self._tails[position] = tail_hash(self._parent(blocks), self._ids(position - tail, position))
        return self._tails[position]

    def _parent(self, blocks: int) -> bytes:
        return self._blocks[blocks - 1] if blocks else self._root

    def _ids(self, start: int, end: int) -> bytes:
        """Packed ids of tokens[start:end]."""
        parts, k = [], bisect_right(self._starts, start) - 1
        while start < end:
            until = min(end, self._starts[k] + self.runs[k].tokens)
            parts.append(struct.pack("<I", self.runs[k].token_id) * (until - start))
            start, k = until, k + 1
        return b"".join(parts)
