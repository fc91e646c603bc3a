"""Limits per minute, without a clock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission.base import Ask, KeyFacts, Refusal, Shed, ShedReason
from services.router.admission.buckets import Bucket
from services.router.admission.drain import Drain
from services.router.admission.limits import KeyState
from twinflow.contracts.errors import BadRequest, TooLong


def test_a_minutes_worth_at_once_then_by_the_rate():
    bucket = Bucket.full(60, 0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(30, 10.0) == pytest.approx(20.0)
    assert bucket.wait_s(10, 10.0) == 0
    bucket.take(10, 10.0)
    assert bucket.wait_s(1, 10.5) == pytest.approx(0.5)
    quota = bucket.quota(40.0)
    assert (quota.limit, quota.remaining, quota.reset_s) == (60, 30, pytest.approx(30.0))
    assert bucket.quota(1e6).remaining == 60 and bucket.is_full(1e6)


def test_corrections_never_make_more_than_full_and_overdrafts_are_paid_back():
    bucket = Bucket.full(60, 0.0)
    bucket.take(10, 0.0)
    bucket.give_back(50, 0.0)
    assert bucket.quota(0.0).remaining == 60
    bucket.give_back(-90, 0.0)
    assert bucket.quota(0.0).remaining == 0 and bucket.wait_s(1, 0.0) == pytest.approx(31.0)


def test_another_limit_keeps_what_was_used():
    bucket = Bucket.full(60, 0.0)
    bucket.take(20, 0.0)
    bucket.resize(120, 0.0)
    assert bucket.quota(0.0).remaining == 100
    bucket.resize(10, 0.0)
    assert bucket.quota(0.0).remaining == 0 and bucket.wait_s(1, 0.0) == pytest.approx(66.0)  # 11 at 10 a minute


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 20), st.integers(1, 400)), min_size=1, max_size=60))
def test_no_minute_ever_gets_more_than_two(per_min, asked):
    """Over any stretch of t seconds at most a full bucket and what flows in; and who waits as long as told is served."""
    bucket, now, taken = Bucket.full(per_min, 0.0), 0.0, []
    for gap_s, amount in asked:
        now += gap_s
        amount = min(amount, per_min)
        wait_s = bucket.wait_s(amount, now)
        if wait_s:
            assert bucket.wait_s(amount, now + 0.5 * wait_s) > 0
            now += wait_s + 1e-6
            assert bucket.wait_s(amount, now) == 0
        bucket.take(amount, now)
        taken.append((now, amount))
    for i, (start, _) in enumerate(taken):
        for j in range(i, len(taken)):
            span = taken[j][0] - start
            assert sum(n for _, n in taken[i : j + 1]) <= per_min * (1 + span / 60) + 1e-3


# ---- all limits of a key ----

KEY = KeyFacts("k", "t", requests_per_min=2, tokens_per_min=1000, concurrent=3)


def refused(state: KeyState, ask: Ask, now_s: float = 0.0) -> Refusal:
    with pytest.raises(Shed) as caught:
        state.charge(ask, now_s, 1.0)
    return caught.value.refusal


def test_limits_are_charged_together_or_not_at_all():
    state = KeyState(KEY, 0.0)
    state.charge(Ask(KEY, 100, 800), 0.0, 1.0)
    told = refused(state, Ask(KEY, 100, 200))
    assert (told.why, told.key) == (ShedReason.TOKENS_PER_MIN, "k") and told.retry_after_s == pytest.approx(12.0)
    assert state.quotas(0.0).requests.remaining == 1, "a request that is shed takes none"
    state.charge(Ask(KEY, 50, 50), 0.0, 1.0)
    told = refused(state, Ask(KEY, 0, 0))
    assert told.why is ShedReason.REQUESTS_PER_MIN and told.retry_after_s == pytest.approx(30.0)
    assert told.quotas.tokens.remaining == 0 and "2 requests a minute" in told.message
    assert state.active == 2


def test_what_was_not_used_is_given_back_at_the_end():
    state = KeyState(KEY, 0.0)
    ask = Ask(KEY, 100, 800)
    state.charge(ask, 0.0, 1.0)
    state.correct(ask, 150, 0.0)
    assert state.quotas(0.0).tokens.remaining == 850 and state.active == 0
    assert not state.is_fresh(0.0) and state.is_fresh(30.0)


def test_generations_at_once():
    state = KeyState(KeyFacts("k", concurrent=3), 0.0)
    pair = Ask(state.key, 1, 1, generations=2)
    state.charge(pair, 0.0, 7.0)
    told = refused(state, pair)
    assert told.why is ShedReason.CONCURRENT and "3 generations at once, 2 run or wait" in told.message
    state.correct(pair, 0, 0.0)
    state.charge(pair, 0.0, 1.0)


def test_what_is_over_a_limit_by_itself_is_no_case_for_waiting():
    state = KeyState(KEY, 0.0)
    with pytest.raises(TooLong, match=r"1001 tokens \(1 and 1000\).*1000 a minute of key k") as caught:
        state.charge(Ask(KEY, 1, 1000), 0.0, 1.0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(BadRequest, match=r"n: 4 choices at once, key k may have 3"):
        state.charge(Ask(KEY, 1, 1, generations=4), 0.0, 1.0)
    assert state.is_fresh(0.0)


def test_new_limits_hold_at_once():
    state = KeyState(KEY, 0.0)
    state.charge(Ask(KEY, 100, 0), 0.0, 1.0)
    state.follow(KeyFacts("k", "t", tokens_per_min=2000), 0.0)
    quotas = state.quotas(0.0)
    assert quotas.requests is None and (quotas.tokens.limit, quotas.tokens.remaining) == (2000, 1900)


# ---- how fast the queue drains ----


def test_the_drain_counts_only_time_in_which_somebody_waits():
    drain = Drain()
    assert drain.seconds(1000, 0.0) is None
    drain.waits(0.0)
    for second in range(1, 11):
        drain.let_go(1000, float(second))
    assert drain.seconds(5000, 10.0) == pytest.approx(5.0, rel=0.05)
    drain.empty(10.0)
    assert drain.seconds(5000, 5000.0) == pytest.approx(5.0, rel=0.05)
    drain.waits(5000.0)
    for second in range(1, 101):
        drain.let_go(4000, 5000.0 + second)
    assert drain.seconds(4000, 5100.0) == pytest.approx(1.0, rel=0.05), "the new pace replaces the old one"
