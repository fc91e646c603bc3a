"""The one thread that calls a transport: commands in through a queue, one `PullFinished` per pull out.

The event comes after every post of the pull is terminal, which is when its destinations may be unpinned; a change of
generation (`generations.py`) is told by events of its own. While nothing is in flight and nobody reads from us the thread
sleeps on its queue.

While something is in flight it looks at it again and again: for a moment without a pause, since the reads that somebody waits
for take less time than a short sleep does, then each time after a sixteenth of the time since anything moved. Between two looks
the interpreter is the engine loop's.
"""

import ctypes
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

from twinflow.transfer.base import (
    MAX_POST_BYTES,
    PeerArena,
    PeerKey,
    PullFinished,
    ReadRange,
    TransferEvent,
    Transport,
)
from twinflow.transfer.generation import POSTS_PER_PEER, InFlight, PathRule, make_pull
from twinflow.transfer.generations import Generations, RenewalLimits, Reopen
from twinflow.transfer.plan import split_posts

POLL_EAGER_S = 300e-6  # since anything moved; of a read over NVLink 64 MiB take 180 µs
POLL_MIN_S = 20e-6  # then; a sleep as short as that takes 30 to 100 µs
POLL_SHARE = 1 / 16  # of the time since anything moved: how late the end of a read may be seen
POLL_MAX_S = 1e-3
SERVE_BUSY_S = 500e-6  # between calls of `progress` while peers are expected to read from us
SERVE_IDLE_S = 20e-3  # otherwise: a peer may be connecting
PR_SET_TIMERSLACK = 29

__all__ = ["InFlight", "PullFinished", "TransferThread"]


class TransferThread:
    """Owns `transport`, and those that `reopen` makes, from here on; closes them in the end. All methods may be called from
    any thread and never block (except `close`). `on_event` runs on the transfer thread; it must be quick and must not
    raise."""

    def __init__(
        self,
        transport: Transport,
        on_event: Callable[[TransferEvent], None],
        *,
        reopen: Reopen | None = None,
        limits: RenewalLimits | None = None,
        serve: bool = False,
        posts_per_peer: int = POSTS_PER_PEER,
        max_post_bytes: int = MAX_POST_BYTES,
        path_rule: PathRule | None = None,
    ) -> None:
        """`reopen` makes the transport of a later generation, on this thread; None = there is only the first. `serve`:
        peers read from this transport too (a prefill role), so it is progressed even without own reads. `path_rule` says
        of the path that reads from a peer take why it is refused, "" where it is allowed."""
        self._generations = Generations(
            transport, on_event, reopen=reopen, limits=limits, serve=serve, posts_per_peer=posts_per_peer,
            path_rule=path_rule,
        )  # fmt: skip
        self._on_event = on_event
        self._serve = serve
        self._serving = False
        self._max_post_bytes = max_post_bytes
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._closing = False
        self._dead = ""
        self.in_flight = InFlight()  # as of the last turn that changed it, ages as of a moment ago
        self._thread = threading.Thread(target=self._run, name=f"transfer {transport.agent_name}", daemon=True)
        self._thread.start()

    # ---- commands ----

    def connect(self, peer: PeerArena) -> None:
        """Idempotent. A failure shows in the pulls from that peer; connecting again tries again."""
        self._do(lambda: self._generations.connect(peer))

    def disconnect(self, key: PeerKey) -> None:
        """Forgets a peer as soon as nothing is in flight; pulls not yet posted fail."""
        self._do(lambda: self._generations.disconnect(key))

    def wake(self, key: PeerKey) -> None:
        """A pull from that peer is about to come: the way of its READs is made ready meanwhile."""
        self._do(lambda: self._generations.wake(key))

    def pull(self, pull_id: str, key: PeerKey, ranges: Sequence[ReadRange]) -> None:
        """Reads `ranges` from a connected peer. `pull_id` is unique for ever. The destinations are pinned until the event."""
        pull = make_pull(pull_id, key, split_posts(ranges, self._max_post_bytes))

        def start() -> None:
            if self._dead:
                self._on_event(PullFinished(pull_id, False, self._dead))
            else:
                self._generations.pull(pull)

        self._commands.put(start)

    def cancel(self, pull_id: str) -> None:
        """Posts no more of it; its event comes (not ok) once what is posted is terminal. Unknown ids are ignored."""
        self._do(lambda: self._generations.cancel(pull_id))

    def serving(self, active: bool) -> None:
        """Whether peers are expected to read from us right now (leases are open): progress is made more often then."""
        self._commands.put(lambda: setattr(self, "_serving", active))

    def renew(self, why: str) -> None:
        """Opens a new generation now, unless one is still being retired."""
        self._do(lambda: self._generations.renew(why))

    def close(self) -> None:
        """Closes the transport, then reports every open pull as failed. Waits for the thread; idempotent. What is asked for
        afterwards is not answered."""
        self._commands.put(lambda: setattr(self, "_closing", True))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the thread ----

    def _do(self, call: Callable[[], object]) -> None:
        """On the thread, unless it is dead by then."""
        self._commands.put(lambda: None if self._dead else call())

    def _run(self) -> None:
        fine_timer()
        try:
            self._loop()
        except Exception as e:  # the thread's edge: nobody else would ever report the open pulls
            logging.getLogger(__name__).exception("%s", self._thread.name)
            self._dead = f"the transfer thread failed: {type(e).__name__}: {e}"
        self._dead = self._dead or "closed"
        self._generations.close(self._dead)
        self.in_flight = InFlight()
        while not (self._closing and self._commands.empty()):  # answer what still comes
            self._commands.get()()

    def _loop(self) -> None:
        pause, moved_s = 0.0, time.monotonic()
        while not self._closing:
            command = self._next_command(self._wait_s(pause))
            moved = command is not None
            while command is not None:
                command()
                command = self._next_command(0.0)
            moved |= self._generations.turn()
            if moved or pause == POLL_MAX_S:
                self.in_flight = self._generations.in_flight
            if self._serve:
                self._generations.progress()
            now_s = time.monotonic()
            moved_s = now_s if moved else moved_s
            pause = _pause(now_s - moved_s)
            if not pause and self._generations.watching:
                time.sleep(0)  # whoever waits for the interpreter gets it

    def _wait_s(self, pause_s: float) -> float | None:
        """How long to wait for a command: a pause, if something is to be looked at; None = until there is one."""
        waits = [pause_s] if self._generations.watching else []
        if self._serve:
            waits.append(SERVE_BUSY_S if self._serving else SERVE_IDLE_S)
        return min(waits, default=None)

    def _next_command(self, wait_s: float | None) -> Callable[[], object] | None:
        """The next command, or None where none comes in that time."""
        try:
            return self._commands.get(block=wait_s != 0.0, timeout=wait_s)
        except queue.Empty:
            return None


def _pause(still_s: float) -> float:
    """Before the next look, where nothing has moved for so long. Seconds."""
    return 0.0 if still_s < POLL_EAGER_S else min(max(POLL_MIN_S, POLL_SHARE * still_s), POLL_MAX_S)


def fine_timer() -> None:
    """Linux lets a thread's timed waits end up to 50 µs late unless it asks for better: longer than many a read takes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns; without effect where it is refused
