"""The contract of a transport, and the facts that both ends of a hand-off exchange.

`plan.py` decides what is read, a `Transport` only executes. All calls on a transport come from the one transfer thread
(`thread.py`), never from asyncio or the compute loop.

A read outlives cancel, timeout and session loss: destinations stay pinned from `post` until `poll` reports a terminal
state (DONE, or it raises TransferError) or until `close()` of the transport returns.
"""

from dataclasses import dataclass
from typing import Protocol

from twinflow.contracts.tags import StateTag

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


@dataclass(frozen=True, slots=True)
class OfferedState:
    """A checkpoint that the prefill side leases beside the state after the whole prompt. `checksum` as `checksum.crc32`, 0
    where nothing is verified."""

    slot: int
    checksum: int
    tag: StateTag


@dataclass(frozen=True, slots=True)
class PullFinished:
    """Terminal. `bytes` and `descriptors` count DONE posts, `seconds` run from the first post (`began`, monotonic) to the last
    terminal state.
    `transport` as `Transport.transport_in_use` ("" if nothing was posted). `refused`: the peer is readable, but over a path
    that is not allowed; so will be every later pull from it."""

    pull_id: str
    ok: bool
    error: str = ""
    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    transport: str = ""
    refused: bool = False
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationOpened:
    """New pulls go through this agent; peers that read from us learn of it and may read through the older one until that
    is closed. `why` is for people."""

    generation: int
    agent_name: str
    agent_metadata: bytes
    why: str


@dataclass(frozen=True, slots=True)
class GenerationClosed:
    """That agent is gone: none of its reads writes any more, and what peers read through it counts no more (over some paths
    they still could: leases refuse it). `pulls` of it were ended by that, their destinations are `freed_bytes`; their
    `PullFinished` came before this."""

    generation: int
    pulls: int
    freed_bytes: int


TransferEvent = PullFinished | GenerationOpened | GenerationClosed


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

    def wake(self, key: PeerKey) -> None:
        """READs from that peer are about to come, after a pause: whatever sleeps on their way may be woken. A hint that costs
        little and never raises."""
        ...

    def post(self, key: PeerKey, ranges: list[ReadRange]) -> int:
        """Starts one READ over all `ranges` (at most MAX_POST_BYTES together); returns a handle. Raises TransferError,
        then nothing was started."""
        ...

    @property
    def posted_s(self) -> float:
        """When the latest `post` set its READ going (monotonic), with all lists for it made."""
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
        """Destroys the agent; idempotent. After it returns no posted read writes any more. Raises TransferError if the agent
        is still there: then nothing can be said of its reads, and it may be tried again."""
        ...
