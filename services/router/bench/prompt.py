"""A prompt made of runs of one token each, hashed as any other: it stands in for `PromptKeys` without holding its tokens."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.view.prompt import PromptKeys, keys_of
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
        self.tokens = sum(r.tokens for r in runs)
        self._block_tokens = block_tokens
        self._root = root_hash(fingerprint)
        self._hashes: list[bytes] = list(before._hashes) if before is not None else []
        for k in range(len(self._hashes), self.tokens // block_tokens):
            ids = self._ids(k * block_tokens, (k + 1) * block_tokens)
            self._hashes.append(block_hash(self._parent(k), ids))
        self._keys = keys_of(self._hashes)
        self._tails: dict[int, bytes] = {}  # of positions that somebody has asked for

    def block_hashes(self, record: WorkerRecord) -> list[bytes]:
        return self._hashes

    def block_keys(self, record: WorkerRecord) -> U64:
        return self._keys

    def tail_keys(self, record: WorkerRecord, positions: Sequence[int]) -> U64:
        return keys_of([self.prefix_hash(p) for p in positions])

    def prefix_hash(self, position: int) -> bytes:
        blocks, tail = divmod(position, self._block_tokens)
        if not tail:
            return self._parent(blocks)
        if position not in self._tails:
            self._tails[position] = tail_hash(self._parent(blocks), self._ids(position - tail, position))
        return self._tails[position]

    def _parent(self, blocks: int) -> bytes:
        return self._hashes[blocks - 1] if blocks else self._root

    def _ids(self, start: int, end: int) -> bytes:
        """Packed ids of tokens[start:end]."""
        parts, at = [], 0
        for run in self.runs:
            first, last = max(start, at), min(end, at + run.tokens)
            if first < last:
                parts.append(struct.pack("<I", run.token_id) * (last - first))
            at += run.tokens
            if at >= end:
                break
        return b"".join(parts)
