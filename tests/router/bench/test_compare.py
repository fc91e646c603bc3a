"""Means over parts and paired differences."""

import dataclasses

import pytest

from services.router.bench.compare import Interval, against, cells, mean
from services.router.bench.report import Summary


def summary(p90: float, good: float, policy: str = "a") -> Summary:
    zeros = {f.name: 0 for f in dataclasses.fields(Summary)}
    return Summary(**zeros | {"policy": policy, "load": 0.9, "ttft_p90_ms": p90, "good": good, "requests": 100})


def test_an_interval_is_of_the_paired_differences() -> None:
    """Student's t of two degrees of freedom is 4.303; the standard error of 1, 2, 3 is 1/√3."""
    found = Interval.of([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == (pytest.approx(2.0), pytest.approx(4.30 / 3**0.5, rel=1e-3))
    assert not found.is_clear and Interval.of([2.0, 2.1, 2.2]).is_clear
    assert Interval.of([5.0]) == Interval(5.0, None) and not Interval.of([5.0]).is_clear
    assert Interval.of([0.0] * 30).half == 0.0


def test_parts_are_paired() -> None:
    """Parts differ tenfold; on each of them one policy is a tenth slower."""
    these = [summary(110.0, 0.8, "b"), summary(1100.0, 0.5, "b")]
    those = [summary(100.0, 0.9), summary(1000.0, 0.6)]
    difference = against(these, those)
    assert (difference.ttft_p90.mean, difference.ttft_p90.half) == (pytest.approx(0.1), pytest.approx(0.0))
    assert difference.good.mean == pytest.approx(-0.1)
    assert cells(difference).split() == ["+10.0", "±", "0.0", "%", "-10.0", "±", "0.0", "points"]


def test_a_mean_is_of_every_column() -> None:
    found = mean([summary(100.0, 0.9), summary(300.0, 0.7)])
    assert (found.ttft_p90_ms, found.good, found.policy, found.requests) == (200.0, pytest.approx(0.8), "a", 100)
