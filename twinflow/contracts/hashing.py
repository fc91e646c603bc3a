"""The one hash of prefixes: full blocks chain, mid-block positions are separated, the root carries model and tenant.

block hash k   = H('block', parent, packed ids of block k)            parent of block 0 = root
prefix hash p  = block hash if p is a block boundary, else H('tail', hash of the last full block, packed tail ids)
root           = H('root', fingerprint, tenant, cache_salt, adapter)

H is blake2b-128. Token ids are packed as little-endian uint32 bytes everywhere: on the wire, in hashes, in the tree.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

TOKEN_BYTES = 4
HASH_BYTES = 16


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32 bytes. Raises OverflowError/TypeError on ids that are no uint32."""
    packed = array("I", ids)
    assert packed.itemsize == TOKEN_BYTES
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of `pack_tokens`. Raises ValueError when the length is no multiple of 4."""
    return array("I", packed).tolist()


def _h(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=HASH_BYTES).digest()


@lru_cache(maxsize=1024)
def root_hash(fingerprint: str, tenant: str = "", cache_salt: str = "", adapter: str = "") -> bytes:
    """The root that every chain of this (model, tenant, salt, adapter) starts from; parts are length-prefixed."""
    parts = [s.encode() for s in (fingerprint, tenant, cache_salt, adapter)]
    return _h(b"root" + b"".join([struct.pack("<I", len(p)) + p for p in parts]))


def block_hash(parent: bytes, block_ids: bytes) -> bytes:
    return _h(b"block" + parent + block_ids)


def tail_hash(parent: bytes, tail_ids: bytes) -> bytes:
    return _h(b"tail" + parent + tail_ids)


def chain_hashes(root: bytes, packed: bytes, block_tokens: int) -> list[bytes]:
    """Hashes of all full blocks of `packed` (uint32 ids), in order."""
    out: list[bytes] = []
    step, blake = block_tokens * TOKEN_BYTES, hashlib.blake2b
    parent = root
    for at in range(
        0, len(packed) - step + 1, step
    ):  # `block_hash`, without its calls: a prompt has hundreds of blocks
        parent = blake(b"block" + parent + packed[at : at + step], digest_size=HASH_BYTES).digest()
        out.append(parent)
    return out


class TokenChain:
    """A growing token sequence with its block hashes; the cursor of everything that labels KV and states.

    Owned by one sequence, appended to by its owner only.
    """

    def __init__(self, root: bytes, block_tokens: int, packed: bytes = b"") -> None:
        if len(packed) % TOKEN_BYTES:
            raise ValueError(f"packed token ids must be a multiple of {TOKEN_BYTES} bytes, got {len(packed)}")
        self.root = root
        self.block_tokens = block_tokens
        self.length = len(packed) // TOKEN_BYTES  # tokens; read-only to others, and cheaper than `len()`
        self._packed = bytearray(packed)
        self._hashes = chain_hashes(root, bytes(packed), block_tokens)

    def __len__(self) -> int:
        """Tokens."""
        return self.length

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hashes of the full blocks."""
        return self._hashes

    def packed(self, start_tokens: int = 0, end_tokens: int | None = None) -> bytes:
        end = len(self) if end_tokens is None else end_tokens
        return bytes(self._packed[start_tokens * TOKEN_BYTES : end * TOKEN_BYTES])

    def token(self, position: int) -> int:
        return int.from_bytes(self._packed[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES], "little")

    def tokens(self, start_tokens: int = 0, end_tokens: int | None = None) -> list[int]:
        return unpack_tokens(self.packed(start_tokens, end_tokens))

    def append(self, ids: Iterable[int]) -> None:
        self._packed += pack_tokens(ids)
        self.length = len(self._packed) // TOKEN_BYTES
        self._hash_full_blocks()

    def push(self, token_id: int) -> None:
        """`append` of a single token. Raises OverflowError for what is no uint32."""
        self._packed += token_id.to_bytes(TOKEN_BYTES, "little")
        self.length += 1
        if not self.length % self.block_tokens:
            self._hash_full_blocks()

    def _hash_full_blocks(self) -> None:
        step = self.block_tokens * TOKEN_BYTES
        while len(self._packed) >= (k := len(self._hashes)) * step + step:
            self._hashes.append(block_hash(self.parent(k), bytes(self._packed[k * step : (k + 1) * step])))

    def parent(self, blocks: int) -> bytes:
        """Hash of the boundary after `blocks` full blocks (the root for 0)."""
        return self._hashes[blocks - 1] if blocks else self.root

    def prefix_hash(self, position: int) -> bytes:
        """Hash of tokens[0:position]. Raises ValueError beyond the end."""
        if not 0 <= position <= len(self):
            raise ValueError(f"position {position} is outside the {len(self)} tokens of this chain")
        blocks, tail = divmod(position, self.block_tokens)
        parent = self.parent(blocks)
        return tail_hash(parent, self.packed(blocks * self.block_tokens, position)) if tail else parent
