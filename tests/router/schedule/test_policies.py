"""What each policy looks at, and what it does not."""

from collections import Counter

import pytest

from services.router.schedule.base import RouteRequest, Snapshot
from services.router.schedule.choose import choose
from services.router.schedule.policies import POLICIES, policy_named
from tests.router.schedule.test_choose import P, pick, worker
from twinflow.contracts.errors import BadRequest

HOT = worker("hot", P, reach=960, checkpoints=(960,), queued=600)
REACH = worker("reach", P, reach=960)
COLD = worker("cold", P)


def first(name: str, *workers, n: int = 1000, **policy: object) -> str:
    return (
        pick(worker("d"), *workers, n=n, policy=policy_named(name, local_max_tokens=0, **policy))
        .candidates[0]
        .record.id
    )


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("cost", "hot"), ("min_of_groups", "hot"), ("attention_only", "reach"), ("least_loaded", "cold")],
)
def test_what_draws_a_prompt(name: str, chosen: str) -> None:
    """`hot` holds both groups and has a queue, `reach` attention alone, `cold` nothing; the last two are idle."""
    workers = [HOT, REACH, COLD] if name != "least_loaded" else [HOT, COLD]
    assert first(name, *workers) == chosen


def test_min_of_groups_takes_attention_alone_for_nothing_on_decode_workers() -> None:
    workers = [worker("warm", reach=960, active=1), worker("idle"), worker("p", P, reach=960, checkpoints=(960,))]
    policies = {name: policy_named(name, local_max_tokens=0) for name in POLICIES}
    picked = {name: pick(*workers, policy=policy).decode.id for name, policy in policies.items()}
    assert picked["cost"] == "warm" and picked["min_of_groups"] == "idle"


def test_round_robin_goes_round_both_sides() -> None:
    workers = Snapshot((worker("a"), worker("b"), worker("c"), worker("p", P), worker("q", P)))
    policy = policy_named("round_robin")
    choices = [choose(workers, RouteRequest("m", 1000, 10, 7, turn), policy) for turn in range(12)]
    assert [c.decode.id for c in choices] == list("abc" * 4)
    assert [c.candidates[0].record.id for c in choices] == list("pq" * 6)
    assert all(len(c.candidates) == 2 for c in choices)


def test_least_loaded_takes_the_shortest_queue() -> None:
    workers = [worker("a", active=3), worker("b", active=1), worker("p", P, queued=9), worker("q", P, queued=3)]
    choice = pick(*workers, policy=policy_named("least_loaded"))
    assert (choice.decode.id, [c.record.id for c in choice.candidates]) == ("b", ["q", "p"])


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_spreads_equals_and_keeps_to_what_fits(name: str) -> None:
    workers = [worker("a"), worker("b"), worker("small", max_request_tokens=500), worker("x", fingerprint="g"),
               worker("p", P), worker("q", P), worker("y", P, model="other")]  # fmt: skip
    policy = policy_named(name, fingerprint="f")
    snapshot = Snapshot(tuple(workers))
    choices = [choose(snapshot, RouteRequest("m", 1000, 10, turn, turn), policy) for turn in range(200)]
    assert min(Counter(c.decode.id for c in choices).values()) > 60
    assert {c.decode.id for c in choices} == {"a", "b"}
    assert {c.record.id for choice in choices for c in choice.candidates} == {"p", "q"}


def test_an_unknown_policy_names_those_that_there_are() -> None:
    with pytest.raises(BadRequest, match=r"'best' \(known: cost, min_of_groups"):
        policy_named("best")
