"""What is learnt from reports, and what is said before anything was."""

import pytest

from services.router.schedule.rates import Curve, Line, Rates, counted, uncounted
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Pace


def test_a_curve_is_straight_between_what_it_knows() -> None:
    curve = Curve()
    assert curve.at(1000) is None
    curve = curve.learn(1024, 20_000.0).learn(4096, 60_000.0)
    assert curve.at(1024) == 20_000 and curve.at(4096) == 60_000
    assert curve.at(2048) == pytest.approx(40_000)
    assert curve.at(1000) == 20_000 and curve.at(1024 / 2**2.5) == pytest.approx(10_000) and curve.at(10**6) == 60_000
    assert curve.at(1) == curve.at(64)


def test_a_curve_follows_and_forgets_outliers() -> None:
    curve = Curve()
    for _ in range(50):
        curve = curve.learn(1000, 100.0)
    curve = curve.learn(1000, 1000.0)
    assert curve.at(1000) == pytest.approx(190)
    for _ in range(50):
        curve = curve.learn(1000, 200.0)
    assert curve.at(1000) == pytest.approx(200, rel=0.02)


def test_a_line_finds_the_slope_of_its_points() -> None:
    line = Line()
    assert line.at(8) is None
    for _ in range(20):
        for batch in (1, 16, 64, 128):
            line = line.learn(batch, 0.004 + 0.00004 * batch)
    assert line.slope == pytest.approx(0.00004, rel=0.05)
    assert line.at(256) == pytest.approx(0.004 + 0.00004 * 256, rel=0.05)


def test_a_line_of_one_point_still_slopes() -> None:
    """A worker that has only ever run 8 sequences is not free to take 100 more."""
    line = Line().learn(8, 0.01)
    assert line.at(8) == pytest.approx(0.01) and line.at(108) > 0.015
    falling = Line().learn(1, 0.02).learn(200, 0.01)
    assert falling.slope == 0 and falling.at(1000) == pytest.approx(falling.at(1))


def test_pace_is_read_by_what_ran() -> None:
    start = Pace(steps=10, busy_s=1.0, prefill_tokens=1000, decode_tokens=500)
    decode = Rates().paced(start, Pace(20, 1.1, 1000, 580), computing_tokens=0)
    assert decode.step.at(8) == pytest.approx(0.01) and decode.prefill.at(100) is None
    prefill = Rates().paced(start, Pace(12, 1.5, 9000, 500), computing_tokens=16_000)
    assert prefill.prefill.at(16_000) == pytest.approx(16_000) and prefill.step.at(1) is None
    mixed = Rates().paced(start, Pace(11, 1.1, 1256, 540), computing_tokens=0)
    assert mixed.prefill.at(256) == pytest.approx(2560)
    blurred = Rates().paced(start, Pace(30, 1.5, 1100, 900), computing_tokens=0)
    assert blurred == Rates()


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 9000])
def test_what_a_prompt_counts_as(tokens: int) -> None:
    assert counted(tokens) == pytest.approx(max(tokens, 57.6 + 0.1 * tokens))
    assert uncounted(counted(tokens)) == pytest.approx(tokens)
    assert uncounted(50) < 0


def test_a_short_prompt_takes_nearly_as_long_as_one_of_64_tokens() -> None:
    """It is mostly a step's own time: 5 tokens in 32 ms say that 64 take little more."""
    start = Pace(steps=10, busy_s=1.0, prefill_tokens=1000, decode_tokens=500)
    one = Rates().paced(start, Pace(11, 1.032, 1005, 500), computing_tokens=5)
    rate = one.prefill.at(64)
    assert rate is not None and 64 / rate == pytest.approx(0.032 * 64 / (0.9 * 64 + 0.5)) and one.prefill.at(5) == rate
    of_several = Rates().paced(start, Pace(14, 1.128, 1020, 500), computing_tokens=0)
    assert of_several == Rates()


@pytest.mark.parametrize(
    "after",
    [Pace(10, 1.0, 1000, 500), Pace(5, 0.5, 10, 10), Pace(11, 1.0, 1100, 500)],
    ids=["same", "restart", "no-time"],
)
def test_nonsense_teaches_nothing(after: Pace) -> None:
    assert Rates().paced(Pace(10, 1.0, 1000, 500), after, 100) == Rates()


def test_links_by_pair() -> None:
    rates = Rates()
    assert rates.link is None
    rates = rates.moved(RequestStats(bytes_moved=10**9, transfer_s=0.1, prefill_worker="a"))
    rates = rates.moved(RequestStats(bytes_moved=10**9, transfer_s=1.0, prefill_worker="b"))
    assert rates.links == {"a": 1e10, "b": 1e9} and rates.link == 5.5e9 and rates.reads == {"a": 1, "b": 1}
    assert rates.moved(RequestStats(bytes_moved=0, transfer_s=1.0, prefill_worker="a")) == rates


def test_a_link_is_as_fast_as_its_fastest_reads() -> None:
    """Nine in ten reads share it with three others and go at a quarter of its speed."""
    rates = Rates()
    for i in range(200):
        rates = rates.moved(RequestStats(bytes_moved=10**9, transfer_s=0.1 if i % 10 else 0.025, prefill_worker="a"))
    assert 3e10 < rates.links["a"] <= 4e10
    for _ in range(300):  # slower for good
        rates = rates.moved(RequestStats(bytes_moved=10**9, transfer_s=0.1, prefill_worker="a"))
    assert rates.links["a"] == pytest.approx(1e10, rel=0.02)
