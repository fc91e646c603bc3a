"""One transfer generation: a transport, the peers it is connected to, and the pulls that go through it.

A pull is split into posts; a bounded number per peer is in flight, so that a stopped peer holds up nobody else. It is over
once every post of it is terminal, which is when its destinations may be unpinned. A pull that was given up (cancelled, or
one of its posts failed) while a post is out is *doomed*: its memory is nobody's until that post ends or the transport is
closed.

Nothing here waits or starts a thread: `turn` does what can be done now. The owner calls everything from one thread.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from twinflow.transfer.base import PeerArena, PeerKey, PullFinished, ReadRange, TransferError, Transport

POSTS_PER_PEER = 4  # of at most 64 MiB each: enough to keep a link busy, and what a stopped peer can hold up

PathRule = Callable[[str], str]  # path as `Transport.transport_in_use` -> why it is refused, "" = allowed


@dataclass(slots=True, eq=False)
class Pull:
    """`size_bytes`: of all its destinations. Monotonic: `started` of the first post, `ended` of the latest one that is terminal,
    `doomed_at`: given up while a post was out."""

    pull_id: str
    key: PeerKey
    posts: deque[list[ReadRange]]
    size_bytes: int
    started: float | None = None
    ended: float = 0.0
    flying: int = 0
    error: str = ""
    refused: bool = False
    doomed_at: float | None = None
    bytes: int = 0
    descriptors: int = 0


@dataclass(frozen=True, slots=True)
class InFlight:
    """What is posted and not terminal: `oldest_s` is the age of the oldest post."""

    posts: int = 0
    bytes: int = 0
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Doomed:
    """Destinations of pulls that were given up and are not over: their bytes, and how long ago the first was given up."""

    bytes: int = 0
    oldest_s: float = 0.0


@dataclass(slots=True)
class _Post:
    handle: int
    pull: Pull
    bytes: int
    descriptors: int
    since: float


@dataclass(slots=True)
class _Peer:
    """`error`: why there is no connection. `refused`: it can be read, but not over the path that reads take. `leaving`:
    disconnect once nothing is in flight."""

    error: str = ""
    refused: str = ""
    path_checked: bool = False
    leaving: bool = False
    waiting: deque[Pull] = field(default_factory=deque)
    flying: list[_Post] = field(default_factory=list)


class Generation:
    """Owns `transport` from here on."""

    def __init__(
        self,
        number: int,
        transport: Transport,
        report: Callable[[PullFinished], None],
        *,
        posts_per_peer: int = POSTS_PER_PEER,
        path_rule: PathRule | None = None,
    ) -> None:
        self.number = number
        self.transport = transport
        self._report = report
        self._posts_per_peer = posts_per_peer
        self._path_rule = path_rule
        self._peers: dict[PeerKey, _Peer] = {}
        self._pulls: dict[str, Pull] = {}
        self._closing = False

    # ---- facts ----

    @property
    def reading(self) -> bool:
        """Whether a post is out."""
        return any(peer.flying for peer in self._peers.values())

    @property
    def in_flight(self) -> InFlight:
        flying = [p for peer in self._peers.values() for p in peer.flying]
        if not flying:
            return InFlight()
        oldest_s = time.monotonic() - min(p.since for p in flying)
        return InFlight(len(flying), sum(p.bytes for p in flying), oldest_s)

    @property
    def doomed(self) -> Doomed:
        given_up = [p for p in self._pulls.values() if p.doomed_at is not None]
        if not given_up:
            return Doomed()
        oldest_s = time.monotonic() - min(p.doomed_at for p in given_up if p.doomed_at is not None)
        return Doomed(sum(p.size_bytes for p in given_up), oldest_s)

    @property
    def healthy_pulls(self) -> int:
        """Pulls that somebody still waits for."""
        return sum(p.doomed_at is None for p in self._pulls.values())

    def knows(self, key: PeerKey) -> bool:
        """Whether that peer was connected to, or tried, and is not leaving."""
        peer = self._peers.get(key)
        return peer is not None and not peer.leaving

    # ---- commands ----

    def connect(self, arena: PeerArena) -> None:
        """Idempotent. A failure shows in the pulls from that peer; connecting again tries again."""
        peer = self._peers.get(arena.key)
        if peer is not None and not peer.error:
            peer.leaving = False
            return
        self._peers[arena.key] = peer = _Peer()
        try:
            self.transport.connect(arena)
        except TransferError as e:
            peer.error = f"cannot connect to {arena.worker_id}: {e}"

    def disconnect(self, key: PeerKey) -> None:
        """Forgets a peer as soon as nothing is in flight; pulls not yet posted fail."""
        peer = self._peers.get(key)
        if peer is not None:
            peer.leaving = True
            for pull in peer.waiting:
                self._stop(pull, f"disconnected from {key[0]}")
                self._settle(pull)
            self._leave(key, peer)

    def wake(self, key: PeerKey) -> None:
        """A pull from that peer is about to come. Where reads are out nothing sleeps."""
        peer = self._peers.get(key)
        if peer is not None and not (peer.error or peer.refused or peer.leaving or self.reading):
            self.transport.wake(key)

    def pull(self, pull: Pull) -> None:
        """Takes it over; fails it at once where the peer cannot be read."""
        self._pulls[pull.pull_id] = pull
        peer = self._peers.get(pull.key)
        if peer is None:
            self._stop(pull, f"no connection to {pull.key[0]}")
        elif peer.leaving:
            self._stop(pull, f"disconnected from {pull.key[0]}")
        elif peer.error or peer.refused:
            pull.refused = not peer.error
            self._stop(pull, peer.error or peer.refused)
        else:
            peer.waiting.append(pull)
            return
        self._settle(pull)

    def cancel(self, pull_id: str, why: str = "cancelled") -> None:
        """Posts no more of it; it is over once what is posted is terminal. Unknown ids are ignored."""
        pull = self._pulls.get(pull_id)
        if pull is not None:
            self._stop(pull, why)
            self._settle(pull)

    def take_waiting(self) -> list[Pull]:
        """Removes and returns the pulls of which nothing was posted yet, for another generation."""
        moved: list[Pull] = []
        for peer in self._peers.values():
            moved += [p for p in peer.waiting if p.started is None and p.posts]
            peer.waiting = deque(p for p in peer.waiting if p.started is not None)
        for pull in moved:
            del self._pulls[pull.pull_id]
        return moved

    def turn(self) -> bool:
        """Polls what is out and posts what may go; True if anything moved. Raises what the transport raises beyond
        TransferError: then its state is unknown and only `close` is left."""
        moved = False
        for key, peer in [] if self._closing else list(self._peers.items()):
            moved |= self._poll(key, peer)
            moved |= self._post(key, peer)
            self._leave(key, peer)
        return moved

    def close(self, why: str) -> tuple[int, int]:
        """Closes the transport, then ends every pull as failed. Returns how many these were and the bytes of their
        destinations. Raises TransferError if the transport is still there; then no pull has ended, nothing more is done with it,
        and it may be closed again."""
        self._closing = True
        self.transport.close()
        self._peers.clear()
        left = list(self._pulls.values())
        for pull in left:
            pull.error = pull.error or why
            self._end(pull, "")
        return len(left), sum(p.size_bytes for p in left)

    # ---- rules ----

    def _poll(self, key: PeerKey, peer: _Peer) -> bool:
        moved = False
        for post in list(peer.flying):
            try:
                if not self.transport.poll(post.handle):
                    continue
                post.pull.ended = time.monotonic()
                post.pull.bytes += post.bytes
                post.pull.descriptors += post.descriptors
                self._check_path(key, peer)
            except TransferError as e:
                post.pull.ended = time.monotonic()
                self._stop(post.pull, str(e))
            peer.flying.remove(post)
            post.pull.flying -= 1
            if peer.refused:
                self._refuse(peer, post.pull)
            self._settle(post.pull)
            self.transport.free(post.handle)
            moved = True
        return moved

    def _post(self, key: PeerKey, peer: _Peer) -> bool:
        moved = False
        while peer.waiting and len(peer.flying) < self._posts_per_peer:
            pull = peer.waiting[0]
            if not pull.posts:
                peer.waiting.popleft()
                self._settle(pull)
                continue
            ranges = pull.posts.popleft()
            try:
                handle = self.transport.post(key, ranges)
            except TransferError as e:
                self._stop(pull, str(e))
                continue
            since = self.transport.posted_s
            pull.started = pull.started or since
            pull.flying += 1
            peer.flying.append(_Post(handle, pull, sum(r.length for r in ranges), len(ranges), since))
            moved = True
        return moved

    def _leave(self, key: PeerKey, peer: _Peer) -> None:
        """Disconnecting under a read would end it in an error of unknown timing, so it waits for all of them."""
        if peer.leaving and not peer.flying:
            self.transport.disconnect(key)
            del self._peers[key]

    def _check_path(self, key: PeerKey, peer: _Peer) -> None:
        """Once per peer, when its first read is DONE: only then is the path known."""
        if self._path_rule is not None and not peer.path_checked:
            peer.path_checked = True
            why = self._path_rule(self.transport.transport_in_use(key))
            peer.refused = f"{key[0]} is not read: {why}" if why else ""

    def _refuse(self, peer: _Peer, pull: Pull) -> None:
        for each in (pull, *peer.waiting):
            each.refused = True
            self._stop(each, peer.refused)

    def _stop(self, pull: Pull, error: str) -> None:
        """Nothing more of it is posted; the first error counts."""
        pull.error = pull.error or error
        pull.posts.clear()
        if pull.flying and pull.doomed_at is None:
            pull.doomed_at = time.monotonic()

    def _settle(self, pull: Pull) -> None:
        """Ends the pull if it is terminal."""
        if not pull.posts and not pull.flying and pull.pull_id in self._pulls:
            self._end(pull, self.transport.transport_in_use(pull.key) if pull.started is not None else "")

    def _end(self, pull: Pull, path: str) -> None:
        del self._pulls[pull.pull_id]
        seconds = max(0.0, pull.ended - pull.started) if pull.started is not None else 0.0
        self._report(
            PullFinished(
                pull.pull_id,
                not pull.error,
                pull.error,
                pull.bytes,
                seconds,
                pull.descriptors,
                path,
                pull.refused,
                pull.started or 0.0,
            )
        )


def make_pull(pull_id: str, key: PeerKey, posts: Sequence[list[ReadRange]]) -> Pull:
    return Pull(pull_id, key, deque(posts), sum(r.length for r in _flat(posts)))


def _flat(posts: Sequence[list[ReadRange]]) -> Iterator[ReadRange]:
    return (r for post in posts for r in post)
