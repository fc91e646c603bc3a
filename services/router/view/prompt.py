"""The prompt of one request as the index looks it up: hashes per (fingerprint, block size), computed once each."""

from array import array
from collections.abc import Sequence

import numpy as np

from services.router.view.table import U64
from twinflow.contracts.facts import fact
from twinflow.contracts.hashing import HASH_BYTES, TOKEN_BYTES, block_hash, chain_hashes, root_hash, tail_hash
from twinflow.contracts.workers import WorkerRecord

KEY_BYTES = 8
FEW_BLOCKS = 16  # of prompts that are looked up block by block: fewer are not worth an array


@fact(frozen=True, slots=True)
class ReplyKeys:
    """What a worker holds once a reply is over, beside the prompt's blocks: keys of the blocks that it filled, and of the state
    by position. That is behind all but the last token, which nothing need be computed of, or behind all: an end is found while
    the step that follows runs."""

    blocks: list[int]
    states: dict[int, int]


class PromptKeys:
    """`packed` uint32 ids and the salt; owned by one request."""

    def __init__(self, packed: bytes, tenant: str = "", cache_salt: str = "") -> None:
        self.packed = packed
        self.tokens = len(packed) // TOKEN_BYTES
        self._tenant = tenant
        self._salt = cache_salt
        self._hashes: dict[tuple[str, int], list[bytes]] = {}
        self._numbers: dict[tuple[str, int], list[int]] = {}
        self._roots: dict[str, bytes] = {}

    def extended(self, packed: bytes) -> "PromptKeys":
        """Of the prompt with these tokens behind it."""
        return PromptKeys(self.packed + packed, self._tenant, self._salt)

    def reply_keys(self, record: WorkerRecord, reply: bytes) -> ReplyKeys:
        """Of packed ids that were generated behind the prompt, one at least."""
        size, hashes = record.block_tokens * TOKEN_BYTES, self.block_hashes(record)
        whole = len(hashes) * size
        rest = self.packed[whole:] + reply
        chain = [hashes[-1] if hashes else self.root(record.fingerprint)]
        chain += chain_hashes(chain[0], rest, record.block_tokens)
        states = {}
        for end in (len(rest) - TOKEN_BYTES, len(rest)):
            tail = rest[end // size * size : end]
            found = tail_hash(chain[end // size], tail) if tail else chain[end // size]
            states[(whole + end) // TOKEN_BYTES] = key_of(found)
        filled = (len(rest) - TOKEN_BYTES) // size
        return ReplyKeys(list(map(key_of, chain[1 : filled + 1])), states)

    def root(self, fingerprint: str) -> bytes:
        root = self._roots.get(fingerprint)
        if root is None:
            root = self._roots[fingerprint] = root_hash(fingerprint, self._tenant, self._salt)
        return root

    def block_hashes(self, record: WorkerRecord) -> list[bytes]:
        """Of the full blocks; not to be changed."""
        key = (record.fingerprint, record.block_tokens)
        hashes = self._hashes.get(key)
        if hashes is None:
            root = self.root(record.fingerprint)
            hashes = self._hashes[key] = chain_hashes(root, self.packed, record.block_tokens)
        return hashes

    def block_keys(self, record: WorkerRecord) -> U64:
        """(full blocks,) key of every block boundary, ascending."""
        return keys_of(self.block_hashes(record))

    def block_numbers(self, record: WorkerRecord) -> list[int]:
        """`block_keys` as plain numbers; not to be changed."""
        key = (record.fingerprint, record.block_tokens)
        numbers = self._numbers.get(key)
        if numbers is None:
            numbers = self._numbers[key] = numbers_of(b"".join(self.block_hashes(record))).tolist()
        return numbers

    def first_number(self, record: WorkerRecord) -> int | None:
        """The first of `block_numbers`, without the others; None where there is none."""
        key, size = (record.fingerprint, record.block_tokens), record.block_tokens * TOKEN_BYTES
        if (
            len(self.packed) < FEW_BLOCKS * size or key in self._hashes
        ):  # all of a short one cost at most twice this one
            return next(iter(self.block_numbers(record)), None)
        return key_of(block_hash(self.root(record.fingerprint), self.packed[:size]))

    def tail_keys(self, record: WorkerRecord, positions: Sequence[int]) -> U64:
        """(n,) keys of these prefixes."""
        hashes, size = (self.root(record.fingerprint), *self.block_hashes(record)), record.block_tokens
        found = []
        for at in positions:
            blocks, tail = divmod(at, size)
            ids = self.packed[(at - tail) * TOKEN_BYTES : at * TOKEN_BYTES]
            found.append(tail_hash(hashes[blocks], ids) if tail else hashes[blocks])
        return keys_of(found)


def keys_of(hashes: Sequence[bytes]) -> U64:
    """The first 64 bits of each hash."""
    words = np.frombuffer(b"".join(hashes), np.dtype("<u8"))
    keys: U64 = words[:: HASH_BYTES // KEY_BYTES].astype(np.uint64)
    return keys


def numbers_of(hashes: bytes) -> "array[int]":
    """The same as numbers, of hashes that are joined: for few of them a fraction of the work. Little-endian machines only."""
    return array("Q", hashes)[:: HASH_BYTES // KEY_BYTES]


def key_of(prefix_hash: bytes) -> int:
    return int.from_bytes(prefix_hash[:KEY_BYTES], "little")
