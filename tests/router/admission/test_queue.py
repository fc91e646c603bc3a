"""Deficit round robin: who goes next, over any arrivals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission.queue import QUANTUM_TOKENS, FairQueue

KEYS = ("a", "b", "c", "d")
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 10.0])
TOKENS = st.one_of(st.integers(1, 300), st.integers(1, 40_000))


def drain(queue: FairQueue[str]) -> list[str]:
    return [queue.pop().what for _ in range(len(queue))]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.tuples(*[WEIGHTS] * len(KEYS)),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from(KEYS), TOKENS, st.integers(-3, 3)),
            st.tuples(st.just("pop"), st.integers(1, 8)),
            st.tuples(st.just("leave"), st.integers(0, 50)),
        ),
        max_size=120,
    ),
    backlog=st.lists(st.tuples(TOKENS, TOKENS), min_size=30, max_size=30),
)
def test_two_keys_that_wait_get_tokens_by_weight(weights, events, backlog):
    """`a` and `b` always wait, whatever c and d do beside them: at every moment what they got per weight differs by at most a
    quantum and their longest requests."""
    queue: FairQueue[tuple[str, int]] = FairQueue(5.0)
    weight = dict(zip(KEYS, weights, strict=True))
    for mine, theirs in backlog:
        queue.push("a", weight["a"], mine, 0, 0.0, ("a", mine))
        queue.push("b", weight["b"], theirs, 0, 0.0, ("b", theirs))
    got = dict.fromkeys(KEYS, 0)
    longest = {"a": max(m for m, _ in backlog), "b": max(t for _, t in backlog)}
    entries, left, now = [], {"a": len(backlog), "b": len(backlog)}, 0.0
    for event in [*events, *[("pop", 8)] * 10]:
        now += 1.0
        if event[0] == "push":
            _, key, tokens, priority = event
            entries.append(queue.push(key, weight[key], tokens, priority, now, (key, tokens)))
            if key in left:
                left[key] += 1
                longest[key] = max(longest[key], tokens)
        elif event[0] == "leave":
            if entries and queue.remove(entry := entries.pop(event[1] % len(entries))) and entry.key in left:
                left[entry.key] -= 1
        else:
            for _ in range(event[1]):
                if min(left.values()) <= 1:  # only what happens while both wait is promised
                    return
                key, tokens = queue.pop().what
                got[key] += tokens
                if key in left:
                    left[key] -= 1
                bound = QUANTUM_TOKENS + sum(longest[k] / weight[k] for k in ("a", "b"))
                assert abs(got["a"] / weight["a"] - got["b"] / weight["b"]) <= bound


def test_a_flood_of_small_requests_gets_no_more_than_few_large_ones():
    queue: FairQueue[str] = FairQueue(5.0)
    for _ in range(4000):
        queue.push("small", 1.0, 10, 0, 0.0, "small")
    for _ in range(10):
        queue.push("large", 1.0, 4000, 0, 0.0, "large")
    tokens = {"small": 0, "large": 0}
    for _ in range(2100):
        entry = queue.pop()
        tokens[entry.what] += entry.tokens
        if entry.what == "large" and tokens["large"] == 20_000:
            break
    assert tokens["large"] == 20_000 and abs(tokens["small"] - 20_000) <= QUANTUM_TOKENS + 4000


def test_a_newcomer_waits_for_one_turn_of_the_others_not_for_their_backlog():
    queue: FairQueue[str] = FairQueue(5.0)
    for _ in range(1000):
        queue.push("flood", 1.0, 1000, 0, 0.0, "flood")
    queue.pop()
    queue.push("new", 1.0, 1000, 0, 1.0, "new")
    assert "new" in [queue.pop().what for _ in range(4)]


def test_idle_keys_save_nothing():
    """What a key did not use while it had nothing to send is not owed to it."""
    queue: FairQueue[str] = FairQueue(5.0)
    for _ in range(3):
        queue.push("rare", 1.0, 1, 0, 0.0, "rare")
        assert queue.pop().what == "rare"
    for _ in range(40):
        queue.push("rare", 1.0, QUANTUM_TOKENS, 0, 0.0, "rare")
        queue.push("busy", 1.0, QUANTUM_TOKENS, 0, 0.0, "busy")
    first = [queue.pop().what for _ in range(10)]
    assert first.count("rare") == 5


def test_requests_longer_than_many_quanta_go_without_counting_rounds_one_by_one():
    queue: FairQueue[str] = FairQueue(5.0)
    queue.push("a", 1e-3, 10**9, 0, 0.0, "a")
    queue.push("b", 1e-3, 2 * 10**9, 0, 0.0, "b")
    assert drain(queue) == ["a", "b"]


def test_what_was_not_used_comes_back_while_the_key_waits():
    """Both ask for 10,000 tokens each time; `modest` uses 1,000 of them. In tokens used both get the same."""
    queue: FairQueue[str] = FairQueue(5.0)
    for _ in range(600):
        queue.push("modest", 1.0, 10_000, 0, 0.0, "modest")
        queue.push("full", 1.0, 10_000, 0, 0.0, "full")
    used = {"modest": 0, "full": 0}
    for _ in range(330):
        entry = queue.pop()
        actual = 1000 if entry.what == "modest" else 10_000
        used[entry.what] += actual
        queue.used_less(entry.key, entry.tokens - actual)
    assert abs(used["modest"] - used["full"]) <= 20_000 + QUANTUM_TOKENS


# ---- priorities ----


def test_priorities_go_first_within_their_key():
    queue: FairQueue[str] = FairQueue(5.0)
    for name, priority, at_s in (("low", -1, 0.0), ("first", 0, 0.0), ("second", 0, 1.0), ("high", 3, 2.0)):
        queue.push("k", 1.0, 10, priority, at_s, name)
    assert drain(queue) == ["high", "first", "second", "low"]


def test_priorities_take_nothing_from_other_keys():
    queue: FairQueue[str] = FairQueue(5.0)
    for _ in range(50):
        queue.push("vip", 1.0, QUANTUM_TOKENS, 100, 0.0, "vip")
        queue.push("plain", 1.0, QUANTUM_TOKENS, 0, 0.0, "plain")
    assert [queue.pop().what for _ in range(20)].count("plain") == 10


def test_a_low_priority_starves_for_a_bounded_time_only():
    """A stream of requests two steps above comes for ever, one a second; what came at 0 goes once those are 10 s younger."""
    queue: FairQueue[str] = FairQueue(5.0)
    queue.push("k", 1.0, 10, 0, 0.0, "humble")
    for second in range(100):
        queue.push("k", 1.0, 10, 2, float(second), "vip")
        if queue.pop().what == "humble":
            break
    assert second == 10  # then both count as equally old, and it came first


# ---- bounds ----


def test_the_worst_is_the_last_of_the_key_with_most_waiting_per_weight():
    queue: FairQueue[str] = FairQueue(5.0)
    queue.push("heavy", 10.0, 5000, 0, 0.0, "heavy")
    queue.push("light", 1.0, 600, 0, 0.0, "light first")
    queue.push("light", 1.0, 600, 1, 1.0, "light urgent")
    assert queue.worst().what == "light first"
    queue.push("heavy", 10.0, 8000, 0, 0.0, "heavy last")
    assert queue.worst().what == "heavy last"


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_who_leaves_is_gone_once(taken):
    queue: FairQueue[int] = FairQueue(5.0)
    entries = [queue.push("k", 1.0, 10, 0, 0.0, i) for i in range(3)]
    assert queue.remove(entries[taken]) and not queue.remove(entries[taken])
    assert (len(queue), queue.tokens) == (2, 20)
    assert drain(queue) == [i for i in range(3) if i != taken]
    with pytest.raises(IndexError):
        queue.pop()


def test_ahead_tells_what_goes_before():
    queue: FairQueue[str] = FairQueue(5.0)
    for _ in range(100):
        queue.push("flood", 1.0, 1000, 0, 0.0, "flood")
    last = queue.push("flood", 1.0, 1000, 0, 0.0, "last")
    new = queue.push("new", 1.0, 1000, 0, 0.0, "new")
    assert queue.ahead_tokens(last) == 102_000  # all of both
    assert queue.ahead_tokens(new) == 2000  # itself, and as much of the other
