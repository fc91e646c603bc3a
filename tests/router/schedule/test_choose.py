"""Choices from hand-made snapshots: kind, order, refusals, ties. Pure."""

import dataclasses
from collections import Counter
from random import Random

import pytest

from services.router.schedule.base import (
    ChoiceKind,
    NoDecodeWorker,
    Policy,
    Reason,
    RouteRequest,
    Snapshot,
    WorkerFacts,
)
from services.router.schedule.choose import choose
from services.router.schedule.limits import reply_tokens
from services.router.schedule.policies import policy_named
from services.router.schedule.rates import Curve, Line, Rates
from twinflow.contracts.errors import TooLong
from twinflow.contracts.hits import usable_tokens
from twinflow.contracts.workers import Load, Role, WorkerRecord

POLICY = policy_named("cost", local_max_tokens=100)


def worker(
    id: str, role: Role = Role.DECODE, reach: int = 0, checkpoints=(), active=0, queued=0, connected=True, **record
):
    facts = {
        "model": "m",
        "fingerprint": "f",
        "max_model_tokens": 8192,
        "max_request_tokens": 4096,
        "block_tokens": 64,
    } | record
    rec = WorkerRecord(id, "i", role, (f"{id}:1",), **facts)
    return WorkerFacts(rec, connected, active, queued, attention_tokens=reach, checkpoints=tuple(checkpoints))


def stalled(facts: WorkerFacts) -> WorkerFacts:
    return dataclasses.replace(facts, stalled=True)


P, B = Role.PREFILL, Role.BOTH


def pick(
    *workers: WorkerFacts, n: int = 1000, max_tokens: int = 10, tie_seed: int = 0, policy: Policy = POLICY, **request
):
    return choose(Snapshot(workers), RouteRequest("m", n, max_tokens, tie_seed, **request), policy)


@pytest.mark.parametrize(
    ("workers", "kind", "reason"),
    [
        ([worker("d")], ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER),
        ([worker("b", B), worker("p", P)], ChoiceKind.LOCAL, Reason.ROLE_BOTH),
        ([worker("d"), worker("p", P)], ChoiceKind.REMOTE, Reason.LONG_SUFFIX),
        ([worker("d", reach=960, checkpoints=(900,)), worker("p", P)], ChoiceKind.LOCAL, Reason.SHORT_SUFFIX),
        ([worker("d", reach=960, checkpoints=(899,)), worker("p", P)], ChoiceKind.REMOTE, Reason.LONG_SUFFIX),
        ([worker("d", reach=960), worker("p", P)], ChoiceKind.REMOTE, Reason.LONG_SUFFIX),
        ([worker("d", reach=800, checkpoints=(950,)), worker("p", P)], ChoiceKind.REMOTE, Reason.LONG_SUFFIX),
        ([worker("d"), worker("p", P, fingerprint="g")], ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER),
        ([worker("d"), worker("p", P, draining=True)], ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER),
        ([worker("d"), worker("p", P, connected=False)], ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER),
        ([worker("d"), worker("p", P, model="other")], ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER),
        ([worker("d"), worker("p", P, max_request_tokens=999)], ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER),
        ([stalled(worker("p", P)), worker("d")], ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER),
    ],
    ids=["alone", "both", "cold", "suffix-100", "suffix-101", "no-state", "unreachable-state", "other-fingerprint",
         "draining", "unconnected", "other-model", "small", "stalled"],
)  # fmt: skip
def test_kind(workers, kind, reason):
    choice = pick(*workers)
    assert (choice.kind, choice.reason) == (kind, reason)
    assert bool(choice.candidates) == (reason in (Reason.LONG_SUFFIX, Reason.SHORT_SUFFIX))


def test_attention_without_state_still_attracts_a_remote_choice():
    """Transfer is saved by reach alone, so attention hits survive an empty state lookup."""
    choice = pick(worker("cold"), worker("warm", reach=960), worker("p", P))
    assert (choice.decode.id, choice.kind) == ("warm", ChoiceKind.REMOTE)
    assert (choice.decode_attention_tokens, choice.decode_usable_tokens) == (960, 0)


def test_load_outweighs_a_small_hit():
    assert pick(worker("busy", reach=64, active=8), worker("idle"), worker("p", P)).decode.id == "idle"


def test_a_worker_without_free_slots_is_last():
    full = dataclasses.replace(
        worker("full", reach=960, checkpoints=(960,), active=4),
        record=dataclasses.replace(worker("full").record, load=Load(running=4, total_slots=4)),
    )
    assert pick(full, worker("idle"), max_tokens=500).decode.id == "idle"


def test_candidates_by_what_they_would_compute_and_wait():
    choice = pick(
        worker("d"),
        worker("cold", P),
        worker("hot", P, reach=960, checkpoints=(960,)),
        worker("hot-but-queued", P, reach=960, checkpoints=(960,), queued=500),
        worker("attention-only", P, reach=960, queued=1),
    )
    assert [c.record.id for c in choice.candidates] == ["hot", "hot-but-queued", "cold", "attention-only"]
    assert [c.usable_tokens for c in choice.candidates] == [960, 960, 0, 0]
    assert choice.prefill_tokens == 40


def test_ties_are_spread_and_reproducible():
    workers = [worker("a"), worker("b"), worker("p", P), worker("q", P)]
    picks = [pick(*workers, tie_seed=s) for s in range(200)]
    for counts in (Counter(c.decode.id for c in picks), Counter(c.candidates[0].record.id for c in picks)):
        assert len(counts) == 2 and min(counts.values()) > 60
    assert picks == [pick(*workers, tie_seed=s) for s in range(200)]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([], "no decode worker is registered"),
        ([worker("p", P)], "no decode worker is registered"),
        ([worker("d", model="other")], "serves model 'm'"),
        ([worker("d", draining=True)], "1 draining"),
        ([worker("d", connected=False), worker("e", draining=True)], "1 draining, 1 not connected"),
    ],
    ids=["none", "prefill-only", "other-model", "draining", "unconnected"],
)
def test_no_decode_worker(workers, message):
    with pytest.raises(NoDecodeWorker, match=message) as e:
        pick(*workers)
    assert (e.value.reason, e.value.http_status) == ("no_decode_worker", 503)


def test_never_another_fingerprint_when_one_is_pinned():
    policy = dataclasses.replace(POLICY, fingerprint="g")
    workers = [worker("d"), worker("e", fingerprint="g", active=50), worker("p", P), worker("q", P, fingerprint="g")]
    choice = pick(*workers, policy=policy)
    assert (choice.decode.id, [c.record.id for c in choice.candidates]) == ("e", ["q"])


def test_failed_workers_are_excluded():
    workers = [worker("a"), worker("b", active=9)]
    assert pick(*workers, excluded=frozenset({("a", "i")})).decode.id == "b"


@pytest.mark.parametrize(
    ("n", "max_tokens", "numbers", "param"),
    [
        (4096, 1, ["4096 tokens", "cache's limit of 4096"], "prompt"),
        (4000, 97, ["4000 tokens", "97", "4097", "cache's limit of 4096"], "max_tokens"),
    ],
    ids=["prompt", "reply"],
)
def test_too_long_names_the_numbers(n, max_tokens, numbers, param):
    with pytest.raises(TooLong) as e:
        pick(worker("small", max_request_tokens=100), worker("d"), n=n, max_tokens=max_tokens)
    assert e.value.param == param
    assert all(text in e.value.message for text in numbers), e.value.message


def test_too_long_for_the_model():
    with pytest.raises(TooLong, match="the model's limit of 2000"):
        pick(worker("d", max_model_tokens=2000), n=2500)


def test_only_workers_that_can_hold_it():
    assert (
        pick(worker("small", max_request_tokens=1005), worker("big", active=30), n=1000, max_tokens=6).decode.id
        == "big"
    )


def test_reply_tokens():
    records = [worker("a", max_request_tokens=100).record, worker("b", max_request_tokens=300).record]
    assert reply_tokens(records, 250, 1024) == 50
    assert reply_tokens(records, 250, 16) == 16
    with pytest.raises(TooLong, match="limit of 300"):
        reply_tokens(records, 300, 16)


@pytest.mark.parametrize("name", ["cost", "min_of_groups", "attention_only", "least_loaded"])
@pytest.mark.parametrize("seed", range(8), ids=lambda s: f"seed{s}")
def test_workers_side_by_side_cost_what_they_cost_alone(seed: int, name: str) -> None:
    """Every decode worker alone with the prefill workers gets the total that it has among all; the least of them is chosen."""
    draw = Random(seed)

    def one(id: str, role: Role = Role.DECODE) -> WorkerFacts:
        reach = draw.choice([0, 320, 960])
        made = worker(id, role, reach, [c for c in (256, 900) if c <= reach], draw.randrange(5), draw.randrange(4000))
        rates = Rates(
            Curve(((9, draw.uniform(9e3, 9e4), 9),)), Line(9.0, 4.0, draw.uniform(0.003, 0.03)), {"p0": 1e10}, {"p0": 9}
        )
        record = dataclasses.replace(made.record, load=Load(total_slots=4))
        return dataclasses.replace(made, record=record, rates=rates, waiting_prompts=draw.randrange(3))

    peers = [one(f"p{i}", P) for i in range(3)]
    decoders = [one(f"d{i}") for i in range(6)]
    policy = policy_named(name, local_max_tokens=700)
    alone = {d.record.id: pick(d, *peers, policy=policy) for d in decoders}
    choice = pick(*decoders, *peers, policy=policy)
    totals = {id: c.terms["total"] for id, c in alone.items()}
    assert choice.terms["total"] == pytest.approx(min(totals.values()))
    same = alone[choice.decode.id]
    assert (choice.kind, choice.reason, choice.local_max_tokens) == (same.kind, same.reason, same.local_max_tokens)
    others = {name.split("→")[-1]: total for name, total in choice.others.items()}
    assert len(others) == 5
    assert others == {id: pytest.approx(totals[id]) for id in others}


def test_usable_tokens_are_those_of_the_contract() -> None:
    draw = Random(0)
    for _ in range(300):
        reach = draw.randrange(0, 12)
        facts = worker("d", reach=reach, checkpoints=sorted(draw.sample(range(1, 12), draw.randrange(4))))
        n = draw.randrange(1, 14)
        assert facts.usable_tokens(n) == usable_tokens(facts.hits, n)
