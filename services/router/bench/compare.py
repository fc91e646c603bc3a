"""Several replays of one policy at one load, each of another part of a trace: their mean, and how another policy differs on the
same parts.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from services.router.bench.report import Summary

# Student's t, two-sided 95 %, by degrees of freedom: Abramowitz & Stegun, table 26.10
T95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of paired differences and half of its 95 % interval; None for one pair."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Interval":
        n = len(differences)
        if n < 2:
            return cls(differences[0], None)
        t = T95[min(n - 2, len(T95) - 1)]
        return cls(statistics.fmean(differences), t * statistics.stdev(differences) / math.sqrt(n))

    @property
    def is_clear(self) -> bool:
        """Zero lies outside."""
        return self.half is not None and abs(self.mean) > self.half


@dataclass(frozen=True, slots=True)
class Against:
    """One policy less another, pair by pair. Of p90 the difference is relative to the other's."""

    ttft_p90: Interval
    good: Interval

    def as_json(self) -> dict[str, object]:
        return {name: (i.mean, i.half) for name, i in (("ttft_p90", self.ttft_p90), ("good", self.good))}


def against(these: Sequence[Summary], those: Sequence[Summary]) -> Against:
    """Both in the order of the parts."""
    pairs = list(zip(these, those, strict=True))
    return Against(
        Interval.of([a.ttft_p90_ms / b.ttft_p90_ms - 1 for a, b in pairs]),
        Interval.of([a.good - b.good for a, b in pairs]),
    )


def mean(summaries: Sequence[Summary]) -> Summary:
    """Of one policy at one load."""
    first = summaries[0]
    means: dict[str, Any] = {
        f.name: statistics.fmean(getattr(s, f.name) for s in summaries) for f in fields(first) if f.name != "policy"
    }
    counts = {name: round(means[name]) for name in ("requests", "shed")}
    return replace(first, **(means | counts))


HEAD = f"{'p90 against':>17}{'good against':>20}"


def cells(difference: Against) -> str:
    p90, good = difference.ttft_p90, difference.good
    return f"{_cell(p90.mean, p90.half, ' %'):>17}{_cell(good.mean, good.half, ' points'):>20}"


def _cell(mean: float, half: float | None, unit: str) -> str:
    return f"{100 * mean:+.1f}" + ("" if half is None else f" ± {100 * half:.1f}") + unit
