"""The one thread that calls a transport: commands in through a queue, one `PullFinished` per pull out.

A pull is split into posts; a bounded number per peer is in flight, so that a stopped peer holds up nobody else. The event
comes after every post of the pull is terminal, which is when its destinations may be unpinned. While nothing is in flight
and nobody reads from us the thread sleeps on its queue.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinflow.transfer.base import MAX_POST_BYTES, PeerArena, PeerKey, ReadRange, TransferError, Transport
from twinflow.transfer.plan import split_posts

POSTS_PER_PEER = 4
POLL_MIN_S = 20e-6
POLL_MAX_S = 1e-3
SERVE_BUSY_S = 500e-6  # between calls of `progress` while peers are expected to read from us
SERVE_IDLE_S = 20e-3  # otherwise: a peer may be connecting


@dataclass(frozen=True, slots=True)
class PullFinished:
    """Terminal. `bytes` and `descriptors` count DONE posts, `seconds` run from the first post to the last terminal state.
    `transport` as `Transport.transport_in_use` ("" if nothing was posted)."""

    pull_id: str
    ok: bool
    error: str = ""
    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class InFlight:
    """What is posted and not terminal: `oldest_s` is the age of the oldest post."""

    posts: int = 0
    bytes: int = 0
    oldest_s: float = 0.0


@dataclass(slots=True)
class _Pull:
    pull_id: str
    key: PeerKey
    posts: deque[list[ReadRange]]
    started: float | None = None
    flying: int = 0
    error: str = ""
    bytes: int = 0
    descriptors: int = 0


@dataclass(slots=True)
class _Post:
    handle: int
    pull: _Pull
    bytes: int
    descriptors: int
    since: float


@dataclass(slots=True)
class _Peer:
    """`error` is why there is no connection. `leaving`: disconnect once nothing is in flight."""

    error: str = ""
    leaving: bool = False
    waiting: deque[_Pull] = field(default_factory=deque)
    flying: list[_Post] = field(default_factory=list)


class TransferThread:
    """Owns `transport` from here on, closes it in the end. All methods may be called from any thread and never block
    (except `close`). `on_event` runs on the transfer thread; it must be quick and must not raise."""

    def __init__(
        self,
        transport: Transport,
        on_event: Callable[[PullFinished], None],
        *,
        serve: bool = False,
        posts_per_peer: int = POSTS_PER_PEER,
        max_post_bytes: int = MAX_POST_BYTES,
    ) -> None:
        """`serve`: peers read from this transport too (a prefill role), so it is progressed even without own reads."""
        self._transport = transport
        self._on_event = on_event
        self._serve = serve
        self._serving = False
        self._posts_per_peer = posts_per_peer
        self._max_post_bytes = max_post_bytes
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._peers: dict[PeerKey, _Peer] = {}
        self._pulls: dict[str, _Pull] = {}
        self._closing = False
        self._dead = ""
        self._in_flight: tuple[int, int, float | None] = (0, 0, None)
        self._thread = threading.Thread(target=self._run, name=f"transfer {transport.agent_name}", daemon=True)
        self._thread.start()

    # ---- commands ----

    def connect(self, peer: PeerArena) -> None:
        """Idempotent. A failure shows in the pulls from that peer; connecting again tries again."""
        self._commands.put(lambda: self._do_connect(peer))

    def disconnect(self, key: PeerKey) -> None:
        """Forgets a peer as soon as nothing is in flight; pulls not yet posted fail."""
        self._commands.put(lambda: self._do_disconnect(key))

    def pull(self, pull_id: str, key: PeerKey, ranges: Sequence[ReadRange]) -> None:
        """Reads `ranges` from a connected peer. `pull_id` is unique for ever. The destinations are pinned until the event."""
        posts = deque(split_posts(ranges, self._max_post_bytes))
        self._commands.put(lambda: self._do_pull(_Pull(pull_id, key, posts)))

    def cancel(self, pull_id: str) -> None:
        """Posts no more of it; its event comes (not ok) once what is posted is terminal. Unknown ids are ignored."""
        self._commands.put(lambda: self._do_cancel(pull_id))

    def serving(self, active: bool) -> None:
        """Whether peers are expected to read from us right now (leases are open): progress is made more often then."""
        self._commands.put(lambda: setattr(self, "_serving", active))

    def close(self) -> None:
        """Closes the transport, then reports every open pull as failed. Waits for the thread; idempotent. What is asked for
        afterwards is not answered."""
        self._commands.put(self._do_close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def in_flight(self) -> InFlight:
        posts, size, since = self._in_flight
        return InFlight(posts, size, 0.0 if since is None else time.monotonic() - since)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as e:  # the thread's edge: nobody else would ever report the open pulls
            logging.getLogger(__name__).exception("transfer thread of %s", self._transport.agent_name)
            self._dead = f"the transfer thread failed: {type(e).__name__}: {e}"
        self._transport.close()
        self._peers.clear()
        self._in_flight = (0, 0, None)
        self._dead = self._dead or "closed"
        for pull in list(self._pulls.values()):
            self._report(pull, self._dead, "")
        while not (self._closing and self._commands.empty()):  # answer what still comes
            self._commands.get()()

    def _loop(self) -> None:
        pause = POLL_MIN_S
        while not self._closing:
            command = self._next_command(pause)
            moved = command is not None
            while command is not None:
                command()
                command = self._next_command(0.0)
            for key, peer in list(self._peers.items()):
                moved |= self._poll(key, peer)
                moved |= self._post(key, peer)
                self._leave(key, peer)
            flying = [p for peer in self._peers.values() for p in peer.flying]
            self._in_flight = (len(flying), sum(p.bytes for p in flying), min((p.since for p in flying), default=None))
            if self._serve:
                self._transport.progress()
            pause = POLL_MIN_S if moved else min(pause * 1.5, POLL_MAX_S)

    def _next_command(self, pause_s: float) -> Callable[[], None] | None:
        """The next command, or None after `pause_s`; without anything in flight and anyone to serve, waits for one."""
        if pause_s > 0:
            waits = [pause_s] if self._in_flight[0] else []
            if self._serve:
                waits.append(SERVE_BUSY_S if self._serving else SERVE_IDLE_S)
            timeout = min(waits, default=None)
        else:
            timeout = 0.0
        try:
            return self._commands.get(block=timeout != 0.0, timeout=timeout)
        except queue.Empty:
            return None

    def _poll(self, key: PeerKey, peer: _Peer) -> bool:
        moved = False
        for post in list(peer.flying):
            try:
                if not self._transport.poll(post.handle):
                    continue
                post.pull.bytes += post.bytes
                post.pull.descriptors += post.descriptors
            except TransferError as e:
                self._stop(post.pull, str(e))
            self._transport.free(post.handle)
            peer.flying.remove(post)
            post.pull.flying -= 1
            self._settle(post.pull)
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
            since = time.monotonic()
            pull.started = pull.started or since
            try:
                handle = self._transport.post(key, ranges)
            except TransferError as e:
                self._stop(pull, str(e))
                continue
            pull.flying += 1
            peer.flying.append(_Post(handle, pull, sum(r.length for r in ranges), len(ranges), since))
            moved = True
        return moved

    def _leave(self, key: PeerKey, peer: _Peer) -> None:
        """Disconnecting under a read would end it in an error of unknown timing, so it waits for all of them."""
        if peer.leaving and not peer.flying:
            self._transport.disconnect(key)
            del self._peers[key]

    def _stop(self, pull: _Pull, error: str) -> None:
        """Nothing more of it is posted; the first error counts."""
        pull.error = pull.error or error
        pull.posts.clear()

    def _settle(self, pull: _Pull) -> None:
        """Reports the pull if it is terminal."""
        if not pull.posts and not pull.flying and pull.pull_id in self._pulls:
            used = self._transport.transport_in_use(pull.key) if pull.started is not None else ""
            self._report(pull, pull.error, used)

    def _report(self, pull: _Pull, error: str, transport: str) -> None:
        del self._pulls[pull.pull_id]
        seconds = time.monotonic() - pull.started if pull.started is not None else 0.0
        self._on_event(PullFinished(pull.pull_id, not error, error, pull.bytes, seconds, pull.descriptors, transport))

    def _do_connect(self, arena: PeerArena) -> None:
        if self._dead:
            return
        peer = self._peers.get(arena.key)
        if peer is not None and not peer.error:
            peer.leaving = False
            return
        self._peers[arena.key] = peer = _Peer()
        try:
            self._transport.connect(arena)
        except TransferError as e:
            peer.error = f"cannot connect to {arena.worker_id}: {e}"

    def _do_disconnect(self, key: PeerKey) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            peer.leaving = True
            for pull in peer.waiting:
                self._stop(pull, f"disconnected from {key[0]}")
                self._settle(pull)
            self._leave(key, peer)

    def _do_pull(self, pull: _Pull) -> None:
        self._pulls[pull.pull_id] = pull
        peer = self._peers.get(pull.key)
        error = self._dead or (peer.error if peer is not None else f"no connection to {pull.key[0]}")
        if not error and peer is not None and peer.leaving:
            error = f"disconnected from {pull.key[0]}"
        if error or peer is None:
            self._stop(pull, error)
            self._settle(pull)
        else:
            peer.waiting.append(pull)

    def _do_cancel(self, pull_id: str) -> None:
        pull = self._pulls.get(pull_id)
        if pull is not None:
            self._stop(pull, "cancelled")
            self._settle(pull)

    def _do_close(self) -> None:
        self._closing = True
