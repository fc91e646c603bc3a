"""How a worker leaves: SIGTERM drains it, SIGINT or a second signal ends it at once.

Draining: the registry is told, nothing new is taken, what runs is finished, and what others may still read is kept until
they have read it. Then the process ends with code 0.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
SAY_EVERY_S = 10.0


@dataclass
class Signals:
    """`serving` is set by the owner once there is something to drain; until then every signal means `stop`."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    serving: bool = False

    @classmethod
    def install(cls) -> "Signals":
        """Call once, in the running loop of the main thread."""
        signals, loop = cls(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, signals.stop.set)
        loop.add_signal_handler(signal.SIGTERM, signals.terminate)
        return signals

    def terminate(self) -> None:
        if self.serving and not self.drain.is_set():
            self.drain.set()
        else:
            self.stop.set()


async def drained(left: Callable[[], tuple[int, int]], limit_s: float) -> bool:
    """Waits until `left()`, requests and leases, is (0, 0); False if that takes longer than `limit_s`."""
    now = asyncio.get_running_loop().time
    until, say_at = now() + limit_s, now()
    while (open_now := left()) != (0, 0):
        if now() >= until:
            log.warning("%d requests and %d leases are left after %g s: they are cut off", *open_now, limit_s)
            return False
        if now() >= say_at:
            log.info("draining: %d requests and %d leases are left", *open_now)
            say_at = now() + SAY_EVERY_S
        await asyncio.sleep(LOOK_EVERY_S)
    log.info("nothing is left")
    return True
