"""How fast the cluster takes what waits here: tokens let go per second while anything waited. Pure; the time is passed in."""

import math
from dataclasses import dataclass

MEMORY_S = 20.0  # of waiting time, after which an observation counts e times less
ENOUGH_S = 0.5  # seen before anything is predicted


@dataclass(slots=True)
class Drain:
    _tokens: float = 0.0
    _seconds: float = 0.0
    _since_s: float | None = None  # the last look, while something waits

    def waits(self, now_s: float) -> None:
        """Something waits from now on, if nothing did before."""
        if self._since_s is None:
            self._since_s = now_s

    def let_go(self, tokens: int, now_s: float) -> None:
        self._pass(now_s)
        self._tokens += tokens

    def empty(self, now_s: float) -> None:
        """Nothing waits any more: time that passes says nothing about the cluster."""
        self._pass(now_s)
        self._since_s = None

    def seconds(self, tokens: float, now_s: float) -> float | None:
        """Until so many tokens are let go. None: nothing is known yet."""
        self._pass(now_s)
        if self._seconds < ENOUGH_S or self._tokens <= 0:
            return None
        return tokens * self._seconds / self._tokens

    def _pass(self, now_s: float) -> None:
        if self._since_s is None:
            return
        passed_s = max(0.0, now_s - self._since_s)
        kept = math.exp(-passed_s / MEMORY_S)
        self._tokens *= kept
        self._seconds = self._seconds * kept + passed_s
        self._since_s = now_s
