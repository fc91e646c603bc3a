"""The generations of one process's transfer, one after the other: when a new one is opened, and when the old one is closed.

A read that was given up keeps its destinations until it ends, and with a stopped peer or a cut link that can take for
ever. Nothing but destroying the agent that posted it ends it for certain. So, once what is doomed passes a bound:

    open a new agent over the same arena ──▶ new pulls go there ──▶ healthy pulls of the old one finish, bounded
                                                                     ──▶ close the old one: what it doomed is free

The same is done for a transport that cannot make progress any more. Peers that read from us learn of a new agent by
`GenerationOpened`, and keep the old one until it is closed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from twinflow.transfer.base import (
    GenerationClosed,
    GenerationOpened,
    PeerArena,
    PeerKey,
    TransferError,
    TransferEvent,
    Transport,
)
from twinflow.transfer.generation import POSTS_PER_PEER, Generation, InFlight, PathRule, Pull

log = logging.getLogger(__name__)

Reopen = Callable[[int], Transport]  # number of the generation -> its transport; raises TransferError

RETRY_S = 1.0  # between attempts to open a generation: it takes the transfer thread's time from healthy pulls


@dataclass(frozen=True, slots=True)
class RenewalLimits:
    """When doomed memory is worth a new generation. Closing the old one stalls all reads for 0.1 to 0.25 s."""

    doomed_bytes: int = 1 << 62  # more than this
    doomed_s: float = 10.0  # or anything doomed for so long: healthy reads end long before
    drain_s: float = 5.0  # how long healthy pulls of the old generation, and readers of it, have to finish


class Generations:
    """Called from one thread. `on_event` must be quick and must not raise. Without `reopen` there is one generation."""

    def __init__(
        self,
        transport: Transport,
        on_event: Callable[[TransferEvent], None],
        *,
        reopen: Reopen | None = None,
        limits: RenewalLimits | None = None,
        serve: bool = False,
        posts_per_peer: int = POSTS_PER_PEER,
        path_rule: PathRule | None = None,
    ) -> None:
        """`transport` is generation 1. `serve`: peers read from us, so an old generation lives as long as they may need it."""
        self._on_event = on_event
        self._reopen = reopen
        self._limits = limits or RenewalLimits()
        self._serve = serve
        self._posts_per_peer = posts_per_peer
        self._path_rule = path_rule
        self._known: dict[PeerKey, PeerArena] = {}
        self._retry_at = 0.0
        self._refused = ""  # why the newest attempt to open one failed
        self._retiring_since = 0.0
        self.retiring: Generation | None = None
        self.current = self._generation(1, transport)

    @property
    def live(self) -> list[Generation]:
        """Oldest first."""
        return [g for g in (self.retiring, self.current) if g is not None]

    @property
    def in_flight(self) -> InFlight:
        parts = [g.in_flight for g in self.live]
        return InFlight(sum(p.posts for p in parts), sum(p.bytes for p in parts), max(p.oldest_s for p in parts))

    @property
    def watching(self) -> bool:
        """Whether time alone can make `turn` do something."""
        return self.retiring is not None or self.current.reading

    # ---- commands ----

    def connect(self, arena: PeerArena) -> None:
        """Idempotent. Later generations connect by themselves, with the first pull."""
        self._known[arena.key] = arena
        self.current.connect(arena)

    def disconnect(self, key: PeerKey) -> None:
        self._known.pop(key, None)
        for generation in self.live:
            generation.disconnect(key)

    def wake(self, key: PeerKey) -> None:
        self.current.wake(key)

    def pull(self, pull: Pull) -> None:
        arena = self._known.get(pull.key)
        if arena is not None and not self.current.knows(pull.key):
            self.current.connect(arena)
        self.current.pull(pull)

    def cancel(self, pull_id: str) -> None:
        for generation in self.live:
            generation.cancel(pull_id)

    def turn(self) -> bool:
        """What can be done now; True if anything moved."""
        moved = False
        for generation in self.live:
            moved |= generation.turn()
        return self._retire() or self._renew_when_due() or moved

    def progress(self) -> None:
        """Lets readers get on, in every generation that they may know. One that cannot is replaced; raises TransferError
        where that is not possible."""
        for generation in self.live:
            try:
                generation.transport.progress()
            except TransferError as e:
                if self._reopen is None:
                    raise
                if generation is self.current:
                    self.renew(str(e))

    def renew(self, why: str) -> bool:
        """Opens a new generation. False if that is not possible now: one is still being retired, or opening failed."""
        if self._reopen is None or self.retiring is not None or time.monotonic() < self._retry_at:
            return False
        number, began = self.current.number + 1, time.monotonic()
        try:
            transport = self._reopen(number)
        except TransferError as e:
            self._retry_at = time.monotonic() + RETRY_S
            if str(e) != self._refused:  # where its network is gone, say, every second for as long as that takes
                log.warning("transfer generation %d cannot be opened, trying on (%s): %s", number, why, e)
            self._refused = str(e)
            return False
        self._refused = ""
        log.warning("transfer generation %d is opened in %.3f s: %s", number, time.monotonic() - began, why)
        self.retiring, self._retiring_since = self.current, time.monotonic()
        self.current = self._generation(number, transport)
        self._on_event(GenerationOpened(number, transport.agent_name, transport.agent_metadata, why))
        for pull in self.retiring.take_waiting():
            self.pull(pull)
        return True

    def close(self, why: str) -> None:
        """Closes every transport, then ends every pull as failed; those of one that cannot be closed never end."""
        for generation in self.live:
            try:
                generation.close(why)
            except TransferError as e:
                log.error("transfer generation %d: %s", generation.number, e)
        self.retiring = None

    # ---- rules ----

    def _generation(self, number: int, transport: Transport) -> Generation:
        return Generation(
            number, transport, self._on_event, posts_per_peer=self._posts_per_peer, path_rule=self._path_rule
        )

    def _renew_when_due(self) -> bool:
        doomed = self.current.doomed
        if doomed.bytes > self._limits.doomed_bytes:
            return self.renew(f"{doomed.bytes} B are doomed, more than {self._limits.doomed_bytes}")
        if doomed.bytes and doomed.oldest_s > self._limits.doomed_s:
            return self.renew(f"{doomed.bytes} B have been doomed for {doomed.oldest_s:.1f} s")
        return False

    def _retire(self) -> bool:
        old = self.retiring
        if old is None:
            return False
        waited_s = time.monotonic() - self._retiring_since
        if waited_s < self._limits.drain_s and (self._serve or old.healthy_pulls):
            return False
        began = time.monotonic()
        try:
            pulls, freed = old.close(f"transfer generation {old.number} was closed")
        except TransferError as e:  # what it has doomed stays so
            log.error("transfer generation %d: %s", old.number, e)
            self._retiring_since = time.monotonic()
            return False
        self.retiring = None
        log.warning(
            "transfer generation %d is closed in %.3f s: %d pulls ended, %d B are free again",
            old.number, time.monotonic() - began, pulls, freed,
        )  # fmt: skip
        self._on_event(GenerationClosed(old.number, pulls, freed))
        return True
