"""How fast workers are, learnt from what they report: prompt tokens per second by length, bytes per second per link, time of a
decode step by batch. Frozen: learning returns a new object, so a snapshot keeps what it was made with.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import field, replace

from twinflow.contracts.facts import fact
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Pace

NEWEST = 0.1  # weight of a new observation once there are ten
FASTER = 0.5  # weight of a read that went faster than known
SLOWER = 0.02  # and of a slower one: then others may have shared the link
MIN_LENGTH = 64  # tokens; a shorter prompt takes nearly as long as one of these
SHORT_SHARE = 0.9  # of that time, however short
MAX_MIXED_STEPS = 4  # in an interval from which a rate of prefill beside decode is learnt
SLOPE_PRIOR = 0.01  # share by which one more sequence slows a step down, as long as nothing better is known
SLOPE_WEIGHT = 200.0  # of that prior, in squared sequences of spread
MEMORY = 0.98  # of a line, per observation


def counted(tokens: float) -> float:
    """Tokens that a prompt of at least one counts as."""
    return tokens if tokens >= MIN_LENGTH else SHORT_SHARE * MIN_LENGTH + (1 - SHORT_SHARE) * tokens


def uncounted(tokens: float) -> float:
    """Of the longest prompt that counts as no more; below 0 none does."""
    return tokens if tokens >= MIN_LENGTH else (tokens - SHORT_SHARE * MIN_LENGTH) / (1 - SHORT_SHARE)


@fact(frozen=True, slots=True)
class Curve:
    """Tokens per second by length: means in buckets of powers of two, straight between them. Longer ones than any known go as
    fast as the longest; of shorter ones half the length is a third slower, since part of the time is the same for all."""

    buckets: tuple[tuple[int, float, int], ...] = ()  # (log2 of the length, mean, observations), ascending

    def learn(self, length: float, value: float) -> "Curve":
        at, buckets = round(math.log2(length if length > MIN_LENGTH else MIN_LENGTH)), self.buckets
        i = bisect_left(buckets, (at,))
        known = i < len(buckets) and buckets[i][0] == at
        _, mean, n = buckets[i] if known else (at, 0.0, 0)
        weight = 1 / (n + 1)
        learnt = (at, mean + (value - mean) * (weight if weight > NEWEST else NEWEST), n + 1)
        return Curve((*buckets[:i], learnt, *buckets[i + known :]))

    def at(self, length: float, observations: int = 1) -> float | None:
        """From buckets with so many observations; None without any."""
        x, before = math.log2(length if length > MIN_LENGTH else MIN_LENGTH), None
        for bucket, mean, n in self.buckets:
            if n < observations:
                continue
            if x <= bucket:
                if before is None:
                    below = x - bucket + 0.5
                    return mean * 2 ** (below / 2) if below < 0 else mean
                share = (x - before[0]) / (bucket - before[0])
                return before[1] + share * (mean - before[1])
            before = (bucket, mean)
        return None if before is None else before[1]


@fact(frozen=True, slots=True)
class Line:
    """y = a + b·x with b ≥ 0, by least squares over the last observations; where they don't tell b it is 1 % of y."""

    n: float = 0.0
    x: float = 0.0  # means
    y: float = 0.0
    xx: float = 0.0  # sums of squares around them
    xy: float = 0.0

    def learn(self, x: float, y: float) -> "Line":
        n = MEMORY * self.n + 1
        dx, dy = x - self.x, y - self.y
        mean_x, mean_y = self.x + dx / n, self.y + dy / n
        kept = MEMORY
        return Line(n, mean_x, mean_y, kept * self.xx + dx * (x - mean_x), kept * self.xy + dx * (y - mean_y))

    @property
    def slope(self) -> float:
        slope = (self.xy + SLOPE_WEIGHT * SLOPE_PRIOR * self.y) / (self.xx + SLOPE_WEIGHT)
        return slope if slope > 0 else 0.0

    def at(self, x: float) -> float | None:
        """None before anything was learnt; never less than half of the mean."""
        return max(self.y / 2, self.y + self.slope * (x - self.x)) if self.n else None


@fact(frozen=True, slots=True)
class Rates:
    """Of one worker, or of all together. `links`: bytes per second by the worker that is read from, of reads alone on a link."""

    prefill: Curve = field(default_factory=Curve)  # tokens per second by tokens to compute
    step: Line = field(default_factory=Line)  # seconds of a decode step by sequences
    links: Mapping[str, float] = field(default_factory=dict)
    reads: Mapping[str, int] = field(default_factory=dict)  # that each of `links` was learnt from

    def paced(self, before: Pace, now: Pace, computing_tokens: int) -> "Rates":
        """`computing_tokens`: of the prompt that was computed meanwhile, 0 = unknown. Steps with a bit of both tell nothing."""
        steps, busy_s = now.steps - before.steps, now.busy_s - before.busy_s
        prefill, decode = now.prefill_tokens - before.prefill_tokens, now.decode_tokens - before.decode_tokens
        if steps <= 0 or busy_s <= 0 or prefill < 0 or decode < 0:
            return self
        if prefill == 0:
            return Rates(self.prefill, self.step.learn(decode / steps, busy_s / steps), self.links, self.reads)
        if decode == 0 or steps <= MAX_MIXED_STEPS:
            length = computing_tokens or prefill
            if length >= MIN_LENGTH:
                return replace(self, prefill=self.prefill.learn(length, prefill / busy_s))
            if computing_tokens:  # one; of several it is not known how many
                rate = prefill / busy_s * counted(length) / length
                return replace(self, prefill=self.prefill.learn(MIN_LENGTH, rate))
        return self

    def moved(self, stats: RequestStats) -> "Rates":
        """A hand-off has ended."""
        if not stats.bytes_moved or stats.transfer_s <= 0:
            return self
        peer, rate = stats.prefill_worker, stats.bytes_moved / stats.transfer_s
        known = self.links.get(peer, rate)
        learnt = known + (FASTER if rate > known else SLOWER) * (rate - known)
        return replace(
            self, links={**self.links, peer: learnt}, reads={**self.reads, peer: self.reads.get(peer, 0) + 1}
        )

    @property
    def link(self) -> float | None:
        """Bytes per second over whatever link."""
        return sum(self.links.values()) / len(self.links) if self.links else None
