"""Whether a front hears its engine's process, which beats four times a second unless it is stopped, frozen, or held by a call
that keeps Python's interpreter. What becomes of the requests of routers is for those to decide; a prefill worker ends its
hand-offs itself.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable

from twinflow.node.pulse import ENGINE_SILENCE_S, sleep_until

log = logging.getLogger(__name__)

LOOK_S = 0.25


class EngineSilence:
    """`silent_s` and `lasts` are as of the last `look`. Owned by the front's loop."""

    def __init__(self, unheard_s: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        """`unheard_s` as of `EngineClient`. `listeners` are called when the silence has lasted too long, and when it is over."""
        self.silent_s = 0.0
        self.listeners: list[Callable[[], None]] = []
        self._unheard_s = unheard_s
        self._clock = clock
        self._since = -math.inf  # what lies before is excused

    @property
    def lasts(self) -> bool:
        """The engine's process is taken to stand still."""
        return self.silent_s >= ENGINE_SILENCE_S

    def look(self, held_up_s: float = 0.0) -> None:
        """`held_up_s` of the time since the last look this process itself was held up: that doesn't count."""
        lasted, before_s, now = self.lasts, self.silent_s, self._clock()
        self.silent_s = max(0.0, min(self._unheard_s(), now - self._since) - held_up_s)
        if held_up_s:
            self._since = now - self.silent_s
        if self.lasts and not lasted:
            log.warning("the engine's process has said nothing for %.1f s", self.silent_s)
        elif lasted and not self.lasts:
            log.warning("the engine's process is heard again, after %.1f s at least", before_s)
        if self.lasts is not lasted:
            for changed in self.listeners:
                changed()

    async def watch(self) -> None:
        """Looks until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            self.look(await sleep_until(now() + LOOK_S, LOOK_S))
