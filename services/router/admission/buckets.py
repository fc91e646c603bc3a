"""Limits per minute: a bucket that refills steadily and holds a minute's worth. Pure; the time is passed in."""

from dataclasses import dataclass

from services.router.admission.base import Quota

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """Starts full, so a whole minute's worth may come at once. May be overdrawn by a correction; it is paid back by waiting."""

    per_min: int
    _level: float
    _at_s: float

    @staticmethod
    def full(per_min: int, now_s: float) -> "Bucket":
        return Bucket(per_min, per_min, now_s)

    @property
    def rate(self) -> float:
        """Per second."""
        return self.per_min / MINUTE_S

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much can be taken, 0 = now. Asks for at most `per_min`: more is never in it."""
        short = amount - self._refilled(now_s)
        return short / self.rate if short > 1e-9 else 0.0

    def take(self, amount: float, now_s: float) -> None:
        self._refilled(now_s)
        self._level -= amount

    def give_back(self, amount: float, now_s: float) -> None:
        """Negative amounts take more."""
        self._level = self._refilled(now_s) + amount

    def resize(self, per_min: int, now_s: float) -> None:
        """The limit has changed: what was used stays used."""
        used = self.per_min - self._refilled(now_s)
        self.per_min, self._level = per_min, per_min - used

    def quota(self, now_s: float) -> Quota:
        level = self._refilled(now_s)
        return Quota(self.per_min, max(0, int(level + 1e-9)), (self.per_min - level) / self.rate)

    def is_full(self, now_s: float) -> bool:
        return self._refilled(now_s) >= self.per_min

    def _refilled(self, now_s: float) -> float:
        self._level = min(self.per_min, self._level + max(0.0, now_s - self._at_s) * self.rate)
        self._at_s = max(self._at_s, now_s)
        return self._level
