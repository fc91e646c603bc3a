"""The prompt of one request as the index looks it up: hashes per (fingerprint, block size), computed once each."""

from collections.abc import Sequence

import numpy as np

from services.router.view.table import U64
from twinflow.contracts.hashing import HASH_BYTES, TOKEN_BYTES, TokenChain, root_hash
from twinflow.contracts.workers import WorkerRecord

KEY_BYTES = 8


class PromptKeys:
    """`packed` uint32 ids and the salt; owned by one request."""

    def __init__(self, packed: bytes, tenant: str = "", cache_salt: str = "") -> None:
        self.packed = packed
        self.tokens = len(packed) // TOKEN_BYTES
        self._tenant = tenant
        self._salt = cache_salt
        self._chains: dict[tuple[str, int], TokenChain] = {}
        self._block_keys: dict[tuple[str, int], U64] = {}
        self._block_numbers: dict[tuple[str, int], list[int]] = {}
        self._roots: dict[str, bytes] = {}

    def extended(self, packed: bytes) -> "PromptKeys":
        """Of the prompt with these tokens behind it."""
        return PromptKeys(self.packed + packed, self._tenant, self._salt)

    def root(self, fingerprint: str) -> bytes:
        root = self._roots.get(fingerprint)
        if root is None:
            root = self._roots[fingerprint] = root_hash(fingerprint, self._tenant, self._salt)
        return root

    def block_hashes(self, record: WorkerRecord) -> list[bytes]:
        return list(self._chain(record).block_hashes)

    def block_keys(self, record: WorkerRecord) -> U64:
        """(full blocks,) key of every block boundary, ascending."""
        key = (record.fingerprint, record.block_tokens)
        if key not in self._block_keys:
            self._block_keys[key] = keys_of(self._chain(record).block_hashes)
        return self._block_keys[key]

    def block_numbers(self, record: WorkerRecord) -> list[int]:
        """`block_keys` as plain numbers; not to be changed."""
        key = (record.fingerprint, record.block_tokens)
        if key not in self._block_numbers:
            self._block_numbers[key] = self.block_keys(record).tolist()
        return self._block_numbers[key]

    def tail_keys(self, record: WorkerRecord, positions: Sequence[int]) -> U64:
        """(n,) keys of these prefixes."""
        chain = self._chain(record)
        return keys_of([chain.prefix_hash(p) for p in positions])

    def _chain(self, record: WorkerRecord) -> TokenChain:
        key = (record.fingerprint, record.block_tokens)
        if key not in self._chains:
            self._chains[key] = TokenChain(self.root(record.fingerprint), record.block_tokens, self.packed)
        return self._chains[key]


def keys_of(hashes: Sequence[bytes]) -> U64:
    """The first 64 bits of each hash."""
    words = np.frombuffer(b"".join(hashes), np.dtype("<u8"))
    keys: U64 = words[:: HASH_BYTES // KEY_BYTES].astype(np.uint64)
    return keys


def key_of(prefix_hash: bytes) -> int:
    return int.from_bytes(prefix_hash[:KEY_BYTES], "little")
