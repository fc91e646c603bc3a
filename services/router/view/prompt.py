"""The prompt of one request as the index looks it up: hashes per (fingerprint, block size), computed once each."""

from twinflow.contracts.hashing import TOKEN_BYTES, TokenChain, root_hash
from twinflow.contracts.workers import WorkerRecord


class PromptKeys:
    """`packed` uint32 ids and the salt; owned by one request."""

    def __init__(self, packed: bytes, tenant: str = "", cache_salt: str = "") -> None:
        self.packed = packed
        self.tokens = len(packed) // TOKEN_BYTES
        self._tenant = tenant
        self._salt = cache_salt
        self._chains: dict[tuple[str, int], TokenChain] = {}
        self._tails: dict[tuple[str, int, int], bytes] = {}

    def root(self, fingerprint: str) -> bytes:
        return root_hash(fingerprint, self._tenant, self._salt)

    def block_hashes(self, record: WorkerRecord) -> list[bytes]:
        return list(self._chain(record).block_hashes)

    def prefix_hash(self, record: WorkerRecord, position: int) -> bytes:
        key = (record.fingerprint, record.block_tokens, position)
        if key not in self._tails:
            self._tails[key] = self._chain(record).prefix_hash(position)
        return self._tails[key]

    def _chain(self, record: WorkerRecord) -> TokenChain:
        key = (record.fingerprint, record.block_tokens)
        if key not in self._chains:
            self._chains[key] = TokenChain(self.root(record.fingerprint), record.block_tokens, self.packed)
        return self._chains[key]
