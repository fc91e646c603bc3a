"""Virtual time: things happen in order, as fast as they can be computed."""

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """Called, it tells the time in seconds since the start."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self._now_s

    def at(self, time_s: float, action: Action) -> None:
        """Runs it then, or as the next thing if that is over."""
        heapq.heappush(self._due, (max(time_s, self._now_s), next(self._count), action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self._now_s + delay_s, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._due:
            self._now_s, _, action = heapq.heappop(self._due)
            action()
