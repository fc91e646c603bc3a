"""The shipped fake: transports inside one process over plain memory, with an explicit scheduler.

A real READ may copy at any time between its post and its terminal state, in any pieces, or never. Here a `Scheduler`
decides: `AtPoll` (default), `AtPost`, or `Manual`, where a test holds each `PostedRead` and calls `copy`, `done`, `fail`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinflow.transfer.base import MAX_POST_BYTES, PeerArena, PeerKey, ReadRange, TransferError


def as_memory(storage: Any) -> memoryview:
    """Writable bytes of a CPU uint8 torch tensor, or of a bytearray."""
    view = memoryview(storage.numpy() if hasattr(storage, "untyped_storage") else storage)
    return view.cast("B")


class LoopbackNetwork:
    """Which agents' arenas can be read, by agent name. Shared by the transports of one process."""

    def __init__(self) -> None:
        self._arenas: dict[str, memoryview] = {}

    def join(self, agent_name: str, memory: memoryview) -> None:
        """Raises ValueError for a name in use: a restarted worker has a new one (incarnation, generation)."""
        if agent_name in self._arenas:
            raise ValueError(f"agent {agent_name!r} exists already")
        self._arenas[agent_name] = memory

    def leave(self, agent_name: str) -> None:
        self._arenas.pop(agent_name, None)

    def memory(self, agent_name: str) -> memoryview:
        try:
            return self._arenas[agent_name]
        except KeyError:
            raise TransferError(f"agent {agent_name!r} is gone") from None


@dataclass(slots=True)
class PostedRead:
    """One posted READ, as a scheduler sees it."""

    handle: int
    key: PeerKey
    agent_name: str
    ranges: tuple[ReadRange, ...]
    network: LoopbackNetwork
    local: memoryview
    state: str = "posted"  # "posted" | "done" | "failed" | "dead" (its transport was closed)
    error: str = ""
    copies: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(r.length for r in self.ranges)

    def copy(self, start: int = 0, end: int | None = None) -> int:
        """Copies bytes [start, end) of this read's ranges as they follow each other, from what the source holds **now**.
        Returns the bytes copied: 0 once terminal or after the transport was closed."""
        if self.state != "posted":
            return 0
        try:
            source = self.network.memory(self.agent_name)
        except TransferError as e:
            self.fail(str(e))
            return 0
        end = self.size_bytes if end is None else end
        copied = at = 0
        for r in self.ranges:
            lo, hi = max(start - at, 0), min(end - at, r.length)
            if lo < hi:
                target = self.local[r.local_offset + lo : r.local_offset + hi]
                target[:] = source[r.remote_offset + lo : r.remote_offset + hi]
                copied += hi - lo
            at += r.length
        self.copies += 1
        return copied

    def done(self) -> None:
        """The next poll says DONE, whether all was copied or not: a scheduler can lie as hardware would not."""
        if self.state == "posted":
            self.state = "done"

    def fail(self, error: str) -> None:
        """The next poll raises."""
        if self.state == "posted":
            self.state, self.error = "failed", error


class Scheduler(Protocol):
    """Called by the transport's thread."""

    def posted(self, read: PostedRead) -> None: ...

    def polled(self, read: PostedRead) -> None:
        """Only for reads that are still posted."""
        ...


class AtPoll:
    """Copies and is DONE at the first poll."""

    def posted(self, read: PostedRead) -> None:
        pass

    def polled(self, read: PostedRead) -> None:
        read.copy()
        read.done()


class AtPost:
    """Copies inside `post`, as shared memory does."""

    def posted(self, read: PostedRead) -> None:
        read.copy()
        read.done()

    def polled(self, read: PostedRead) -> None:
        pass


@dataclass
class Manual:
    """Nothing happens by itself."""

    reads: list[PostedRead] = field(default_factory=list)

    def posted(self, read: PostedRead) -> None:
        self.reads.append(read)

    def polled(self, read: PostedRead) -> None:
        pass


class LoopbackTransport:
    """A `Transport` over `storage` (CPU uint8 tensor or bytearray), readable by the others of `network` until closed."""

    def __init__(
        self, network: LoopbackNetwork, agent_name: str, storage: Any, scheduler: Scheduler | None = None
    ) -> None:
        self._network = network
        self._name = agent_name
        self._memory = as_memory(storage)
        self._scheduler: Scheduler = scheduler or AtPoll()
        self._peers: dict[PeerKey, PeerArena] = {}
        self._reads: dict[int, PostedRead] = {}
        self._posts = 0
        self.posted_s = 0.0
        network.join(agent_name, self._memory)

    @property
    def agent_name(self) -> str:
        return self._name

    @property
    def agent_metadata(self) -> bytes:
        return self._name.encode()

    def connect(self, peer: PeerArena) -> None:
        if peer.agent_metadata != peer.agent_name.encode():
            raise TransferError(f"metadata is not that of agent {peer.agent_name!r}")
        self._network.memory(peer.agent_name)
        self._peers[peer.key] = peer

    def disconnect(self, key: PeerKey) -> None:
        self._peers.pop(key, None)

    def wake(self, key: PeerKey) -> None:
        """Nothing sleeps here."""

    def post(self, key: PeerKey, ranges: Sequence[ReadRange]) -> int:
        peer = self._peers.get(key)
        if peer is None:
            raise TransferError(f"no connection to {key}")
        source = self._network.memory(peer.agent_name)
        for r in ranges:
            if not 0 <= r.remote_offset <= len(source) - r.length:
                raise TransferError(f"{r} is outside the peer's {len(source)} B")
            if not 0 <= r.local_offset <= len(self._memory) - r.length:
                raise TransferError(f"{r} is outside our {len(self._memory)} B")
        if sum(r.length for r in ranges) > MAX_POST_BYTES:
            raise TransferError(f"a post of more than {MAX_POST_BYTES} B")
        self._posts += 1
        read = PostedRead(self._posts, key, peer.agent_name, tuple(ranges), self._network, self._memory)
        self._reads[read.handle] = read
        self.posted_s = time.monotonic()
        self._scheduler.posted(read)
        return read.handle

    def poll(self, handle: int) -> bool:
        read = self._reads[handle]
        if read.state == "posted":
            self._scheduler.polled(read)
        if read.state == "failed":
            raise TransferError(read.error)
        return read.state == "done"

    def free(self, handle: int) -> None:
        """Raises ValueError for a read that is not terminal: it still owns its destinations."""
        if self._reads[handle].state == "posted":
            raise ValueError(f"read {handle} is not terminal")
        del self._reads[handle]

    def progress(self) -> None:
        pass

    def transport_in_use(self, key: PeerKey) -> str:
        return "loopback"

    def close(self) -> None:
        """Idempotent. Reads that others posted against this arena fail at their next copy."""
        for read in self._reads.values():
            if read.state == "posted":
                read.state = "dead"
        self._reads.clear()
        self._peers.clear()
        self._network.leave(self._name)
