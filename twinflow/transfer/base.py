"""The contract of a transport, and the facts that both ends of a hand-off exchange.

`plan.py` decides what is read, a `Transport` only executes. All calls on a transport come from the one transfer thread
(`thread.py`), never from asyncio or the compute loop.

A read outlives cancel, timeout and session loss: destinations stay pinned from `post` until `poll` reports a terminal
state (DONE, or it raises TransferError) or until `close()` of the transport returns.
"""

from dataclasses import dataclass
from typing import Protocol

MAX_POST_BYTES = 64 << 20

PeerKey = tuple[str, str, int]  # worker id, incarnation, transfer generation


@dataclass(frozen=True, slots=True)
class PeerArena:
    """What the prefill side says of its arena in `HandoffHello` (one rank)."""

    worker_id: str
    incarnation: str
    generation: int
    base_address: int
    total_bytes: int
    block_bytes: int
    slot_bytes: int
    blocks: int
    slots: int
    memory: str  # "DRAM" | "VRAM"
    device_id: int
    agent_name: str
    agent_metadata: bytes

    @property
    def key(self) -> PeerKey:
        return (self.worker_id, self.incarnation, self.generation)


@dataclass(frozen=True, slots=True)
class ReadRange:
    """One contiguous read: `length` bytes at `remote_offset` of the peer's arena into `local_offset` of ours."""

    remote_offset: int
    local_offset: int
    length: int


class TransferError(Exception):
    """A read ended in ERR, the peer is gone, or the transport refused the post. Terminal for that handle."""


class Transport(Protocol):
    """Executes READs into the local arena, which it registered when it was built. One thread calls it."""

    @property
    def agent_name(self) -> str: ...

    @property
    def agent_metadata(self) -> bytes:
        """What a peer needs to read from us."""
        ...

    def connect(self, peer: PeerArena) -> None:
        """Makes `peer` readable; idempotent per key. Raises TransferError."""
        ...

    def disconnect(self, key: PeerKey) -> None:
        """Forgets a peer; idempotent. Posted reads may still run."""
        ...

    def post(self, key: PeerKey, ranges: list[ReadRange]) -> int:
        """Starts one READ over all `ranges` (at most MAX_POST_BYTES together); returns a handle. Raises TransferError,
        then nothing was started."""
        ...

    def poll(self, handle: int) -> bool:
        """True = DONE, False = still running. Raises TransferError in a terminal failure."""
        ...

    def free(self, handle: int) -> None:
        """Drops a handle that is terminal."""
        ...

    def progress(self) -> None:
        """Lets peers that read from us get on: a first connection, and every read over a software path, needs the target's
        help. Cheap; call it again and again while peers may read."""
        ...

    def transport_in_use(self, key: PeerKey) -> str:
        """Name of the software or hardware path to that peer as far as it can be known, e.g. "ucx/shm", "loopback"."""
        ...

    def close(self) -> None:
        """Destroys the agent. After it returns no posted read writes any more."""
        ...
