"""Replays in miniature: what the policy must do with a hot prefix, a cold worker and a wrong world. Time is virtual."""

from collections import Counter
from dataclasses import replace

import pytest

from services.router.bench.prompt import Run
from services.router.bench.replay import Replay, Setup, prepare
from services.router.bench.report import Targets, quantile, summarise, ttft_s
from services.router.bench.timing import PREFILL, STEP, Timing
from services.router.bench.trace import REPLY_IDS, Session, Turn
from services.router.bench.wire import Disturbance
from services.router.schedule.policies import POLICIES, policy_named

HOT = Run(1, 20_000)


def requests(count: int, every_s: float, shared: Run | None = HOT, own: int = 2_000, reply: int = 20) -> list[Session]:
    """One a time, all with the shared prefix, a suffix of their own behind it."""
    prefix = (shared,) if shared is not None else ()
    return [Session(i * every_s, (Turn((*prefix, Run(100 + i, own)), reply, REPLY_IDS + i),)) for i in range(count)]


def replay(sessions: list[Session], setup: Setup, span_s: float, policy: str = "cost") -> Replay:
    """`span_s`: from the first arrival to the last."""
    workload = prepare(sessions, setup)
    made = Replay(workload, setup, policy_named(policy, local_max_tokens=256), workload.work_s / setup.prefill / span_s)
    assert made.span_s == pytest.approx(span_s)
    made.run()
    return made


def prefilled_at(made: Replay) -> Counter[str]:
    return Counter(a.stats.prefill_worker for a in made.asked if a.stats.route == "remote")


def ttfts(made: Replay) -> list[float]:
    return [ttft_s(a) for a in made.asked]


OPEN = Setup(admitted=100.0)


def test_everybody_gets_every_token_and_nothing_is_left_charged() -> None:
    made = replay(requests(40, 0.1), OPEN, 4.0)
    assert len(made.asked) == 40
    for a in made.asked:
        assert a.first_s is not None and a.ended_s is not None and a.ended_s > a.first_s > a.asked_s
    for facts in made.view.snapshot().workers:
        assert (facts.active_requests, facts.queued_prefill_tokens) == (0, 0)


def test_a_hot_prefix_stays_where_it_is_while_its_holder_keeps_up() -> None:
    """Computing the suffix takes 55 ms, the whole prompt 350: one holder is enough, replicas would be a waste."""
    made = replay(requests(60, 0.2), OPEN, 12.0)
    (_, most), *rest = prefilled_at(made).most_common()
    assert most >= 57 and sum(n for _, n in rest) <= 3


def test_a_hot_prefix_is_replicated_when_its_holder_saturates() -> None:
    """60 a second of 55 ms each are more than three workers' work: no one is piled upon, all serve, nobody waits for long."""
    made = replay(requests(600, 1.0), OPEN, 600 / 60)
    served = prefilled_at(made)
    assert len(served) == 4 and min(served.values()) > 80
    assert quantile(ttfts(made)[100:], 0.9) < 0.8
    hits = [a.stats.prefill_resumed_tokens > 15_000 for a in made.asked[100:]]
    assert sum(hits) > 0.95 * len(hits)


def test_one_burst_before_any_report_spreads() -> None:
    made = replay(requests(16, 0.0001, shared=None, own=8_000), OPEN, 0.0005)
    assert sorted(prefilled_at(made).values()) == [4, 4, 4, 4]
    assert sorted(Counter(a.choice.decode.id for a in made.asked if a.choice).values()) == [4, 4, 4, 4]


def test_a_burst_of_siblings_is_computed_once() -> None:
    """They come while the first one is still being computed: what is expected counts as held."""
    made = replay(requests(8, 0.001, shared=Run(1, 20_480), own=300), OPEN, 0.008)
    assert len(prefilled_at(made)) == 1
    assert sum(a.stats.prefill_resumed_tokens == 0 for a in made.asked) == 1


def test_a_cold_worker_gets_its_share_of_what_is_cold() -> None:
    """A hot prefix keeps a worker or two busy; prompts that nobody knows, three workers' work, go to the others first."""
    warm = requests(100, 0.1)
    cold = [Session(i * 0.1 + 0.05, (Turn((Run(9_000 + i, 14_000),), 20, REPLY_IDS + 500 + i),)) for i in range(100)]
    made = replay(sorted(warm + cold, key=lambda s: s.start_s), OPEN, 10.0)
    places = {True: Counter(), False: Counter()}
    for a in made.asked:
        places[a.prompt.runs[0] == HOT][a.stats.prefill_worker] += 1
    holders = [worker for worker, n in places[True].items() if n > 10]
    others = [n for worker, n in places[False].items() if worker not in holders]
    assert len(holders) <= 2 and len(others) == 4 - len(holders) and min(others) >= 30
    assert len(places[False]) == 4 and min(others) > max(places[False][worker] for worker in holders)
    assert quantile(ttfts(made), 0.9) < 0.3  # alone a cold prompt takes 0.24


def test_a_slow_worker_gets_less() -> None:
    class Slow(Timing):
        def prefill_s(self, have_tokens: int, tokens: int) -> float:
            return 4 * super().prefill_s(have_tokens, tokens)

    setup = OPEN
    workload = prepare(requests(200, 0.1, shared=None, own=8_000), setup)
    made = Replay(workload, setup, policy_named("cost", local_max_tokens=0), workload.work_s / 4 / 16.0)
    made.prefill["prefill-0"]._timing = Slow()
    made.run()
    served = prefilled_at(made)
    assert served["prefill-0"] < 0.6 * min(served[f"prefill-{i}"] for i in (1, 2, 3))


def test_wrong_rates_late_events_and_overstated_hits_cost_time_only() -> None:
    wrong = Setup(
        admitted=100.0, disturbance=Disturbance(rates=0.3, events_s=5.0, lost_removals=0.5), cache_bytes=4 << 30
    )
    made = replay(requests(300, 0.1), wrong, 20.0)
    assert all(a.ended_s is not None for a in made.asked)
    assert quantile(ttfts(made), 0.9) < 1.5


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_is_asked_and_shed_the_same(policy: str) -> None:
    setup = Setup(prefill=2, decode=2, admitted=0.8, burst_s=0.5)
    sessions = requests(200, 0.1, shared=None, own=8_000)
    workload = prepare(sessions, setup)
    made = Replay(workload, setup, policy_named(policy), load=1.5)
    asked = made.run()
    again = Replay(workload, setup, policy_named("cost"), load=1.5)
    again.run()
    assert [(a.id, a.shed) for a in made.asked] == [(a.id, a.shed) for a in again.asked]
    summary = summarise(policy, 1.5, asked, Targets())
    assert 0.3 < summary.shed / summary.requests < 0.6
    assert summary.good <= 1 - summary.shed / summary.requests


def test_a_replay_is_the_same_every_time() -> None:
    first, second = (replay(requests(50, 0.1), OPEN, 3.0) for _ in range(2))
    assert ttfts(first) == ttfts(second)


def test_a_session_goes_on_after_its_reply_and_runs_where_it_is_held() -> None:
    turns = tuple(Turn((Run(50 + k, 200 if k else 9_000),), 30, REPLY_IDS + k, 0.5) for k in range(4))
    made = replay([Session(0.0, turns), Session(1.0, (Turn((Run(7, 900),), 2, REPLY_IDS + 9),))], OPEN, 3.0)
    of_session = [a for a in made.asked if a.prompt.runs[0].token_id == 50]
    assert [a.prompt.tokens for a in of_session] == [9_000, 9_230, 9_460, 9_690]
    local = [a for a in of_session if a.stats.route == "local"]
    assert local and of_session[0] not in local  # what costs nearly the same may go either way
    assert {a.id: a.stats.decode_resumed_tokens for a in local}.items() <= {
        "0-1": 9_029, "0-2": 9_259, "0-3": 9_489
    }.items()  # fmt: skip


def test_the_timing_is_what_was_measured() -> None:
    timing = Timing()
    for tokens, seconds in PREFILL[1:]:
        assert timing.prefill_s(0, tokens) == pytest.approx(seconds)
    for batch, seconds in STEP[1:]:
        assert timing.step_s(batch, batch * 1024) == pytest.approx(seconds)
    assert timing.step_s(32, 32 * 8192) == pytest.approx(7.18e-3, rel=0.01)
    assert timing.prefill_s(16_384, 100) == timing.prefill_s(0, 100)  # a short suffix is bound by its launch
    assert timing.prefill_s(16_384, 16_384) == pytest.approx(0.613 - 0.278)


def test_what_is_not_there_needs_memory_and_waits_for_it() -> None:
    """Three prompts of 20 blocks at a decode worker with room for two and their states: the third one's blocks are not read
    before another has ended, and its second token waits; its first one does not."""
    size = OPEN.token_bytes * OPEN.block_tokens
    small = replace(OPEN, prefill=3, decode=1, cache_bytes=50 * size)
    made = replay(requests(3, 0.0001, shared=None, own=10_000, reply=200), small, 0.0003)
    stood = sorted(a.stats.extra["stood_s"] for a in made.asked)
    assert stood[1] < 0.1 < 0.5 < stood[2]
    assert max(ttfts(made)) < 0.3
    roomy = replay(
        requests(3, 0.0001, shared=None, own=10_000, reply=200), replace(small, cache_bytes=80 * size), 0.0003
    )
    assert max(a.stats.extra["stood_s"] for a in roomy.asked) < 0.1


def test_attention_that_is_there_is_neither_moved_nor_needs_memory() -> None:
    """The same prefix for all three: the second and third need their own blocks only, and fit."""
    size = OPEN.token_bytes * OPEN.block_tokens
    small = replace(OPEN, prefill=1, decode=1, cache_bytes=60 * size)
    made = replay(requests(3, 0.3, shared=Run(1, 10_240), own=1_000, reply=200), small, 0.9)
    first, *others = sorted(made.asked, key=lambda a: a.asked_s)
    assert first.stats.bytes_moved == 22 * size + OPEN.slot_bytes
    for each in others:
        assert each.stats.decode_attention_tokens == 10_240
        assert each.stats.route == "local" or each.stats.bytes_moved <= 2 * size + 2 * OPEN.slot_bytes
        assert each.stats.extra["stood_s"] < 0.1


def test_a_sibling_of_siblings_runs_where_a_state_was_asked_for() -> None:
    """Prompts part behind 10,240 tokens. The second one's decode worker holds the blocks without a state there, asks for one,
    and the third runs on it alone."""
    one = replace(OPEN, prefill=1, decode=1)
    made = replay(requests(3, 1.0, shared=Run(1, 10_240), own=100, reply=5), one, 3.0)
    states = [a.stats.decode_resumed_tokens for a in made.asked]
    assert states == [0, 0, 10_240] and made.asked[2].stats.route == "local"
    assert made.asked[1].stats.bytes_moved == OPEN.token_bytes * OPEN.block_tokens + 2 * OPEN.slot_bytes


def test_hand_offs_share_the_link_of_their_decode_worker() -> None:
    """Four prefill workers, one decode worker on a slow link: the same reads take longer together than one after the other."""
    slow = replace(OPEN, decode=1, timing=Timing(link_bytes_per_s=1e9))
    at_once = replay(requests(4, 0.0001, shared=None, own=8_000), slow, 0.0004)
    apart = replay(requests(4, 5.0, shared=None, own=8_000), slow, 20.0)
    stood = [max(a.stats.extra["stood_s"] for a in made.asked) for made in (at_once, apart)]
    assert stood[0] > 2 * stood[1] > 0


def test_a_warm_up_is_the_same_requests_for_every_policy() -> None:
    turns = [
        (Turn((Run(10 * k, 4_000),), 20, REPLY_IDS + k), Turn((Run(10 * k + 1, 300),), 20, REPLY_IDS + 500 + k, 0.1))
        for k in range(30)
    ]
    workload = prepare([Session(k * 0.05, t) for k, t in enumerate(turns)], OPEN)
    counted = [
        sorted(a.id for a in Replay(workload, OPEN, policy_named(name), load=2.0).run())
        for name in ("cost", "round_robin")
    ]
    assert counted[0] == counted[1] == sorted(f"{k}-{t}" for k in range(3, 30) for t in (0, 1))
