"""Every term of the cost, from hand-made workers with known rates."""

import dataclasses

import numpy as np
import pytest

from services.router.schedule.base import Crowd, RouteRequest, Scene, Snapshot, Terms, WorkerFacts
from services.router.schedule.choose import choose
from services.router.schedule.cost import Cost, decode_bound, decode_terms, prefill_ms
from services.router.schedule.policies import policy_named
from services.router.schedule.rates import Curve, Line, Rates
from tests.router.schedule.test_choose import P, pick, worker
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Load, Role

COST = Cost()
RATES = Rates(
    prefill=Curve(((10, 10_000.0, 9),)),
    step=Line(100.0, 10.0, 0.010, 1e9, 1e9 * 0.0001),
    links={"p": 1e9},
    reads={"p": 9},
)


def scene(n: int = 10_000, behind: float = 0.0, **policy: object) -> Scene:
    values = {"others": 0.5, "behind": 1.0, "second": 1.0, "sharing": 0.0, "local_max_tokens": 2048, **policy}
    return Scene(RouteRequest("m", n, 100, 0), policy_named("cost", **values), {}, 100.0, behind)


def known(
    id: str, role=None, reach: int = 0, usable: int = 0, slots: int = 64, waiting: int = 0, **facts: object
) -> Crowd:
    seen = {name: facts.pop(name) for name in ("reads", "moving_bytes") if name in facts}
    made = worker(id, role, **facts) if role is not None else worker(id, **facts)
    record = dataclasses.replace(
        made.record, load=Load(total_slots=slots), block_tokens=100, block_bytes=10**6, slot_bytes=5 * 10**7
    )
    made = dataclasses.replace(made, record=record, rates=RATES, waiting_prompts=waiting, **seen)
    return crowd(made, reach, usable)


def crowd(made: WorkerFacts, reach: int = 0, usable: int = 0) -> Crowd:
    return Crowd.of([made], np.array([float(reach)]), np.array([float(usable)]))


def of_one(terms: Terms) -> dict[str, float]:
    return {name: column.item() for name, column in terms.items()}


def test_a_prefill_worker_waits_computes_and_holds_others_up() -> None:
    busy = known("p", P, usable=4_000, queued=2_000, waiting=5)
    terms = of_one(COST.prefill(busy, scene(behind=2.0)))
    assert terms == {"wait": pytest.approx(200), "prefill": pytest.approx(600), "behind": pytest.approx(1200)}
    idle = of_one(COST.prefill(known("p", P, usable=4_000), scene(behind=9.0)))
    assert idle == {"wait": 0, "prefill": pytest.approx(600), "behind": pytest.approx(150)}


def pair(decode: Crowd, prefill: Crowd, prefill_ms: float, where: Scene, wait_ms: float = 0.0) -> dict[str, float]:
    computed = {"wait": np.array([wait_ms]), "prefill": np.array([prefill_ms])}
    return of_one(COST.pair(decode, prefill, computed, where))


def test_a_transfer_is_what_attention_lacks_and_one_slot_and_hides_behind_the_prompt() -> None:
    terms = pair(known("d", reach=4_000), known("p", P), 30.0, scene())
    assert terms["transfer"] == pytest.approx(60 + 50)  # 6,000 tokens of 10 kB, 50 MB, at 1 GB/s
    assert terms["hidden"] == pytest.approx(-30)
    terms = pair(known("d", reach=9_000), known("p", P), 30.0, scene())
    assert terms["transfer"] + terms["hidden"] == pytest.approx(50)


@pytest.mark.parametrize("whose", ["d", "p"])
def test_what_is_on_its_way_over_either_link_comes_first(whose: str) -> None:
    """200 MB take 200 ms, of which the prompts before this one at P cover 50, and its own computing 100."""
    facts = {"reads": 2, "moving_bytes": 2e8}
    d, p = (known(id, role, **(facts if whose == id else {})) for id, role in (("d", Role.DECODE), ("p", P)))
    terms = pair(d, p, 100.0, scene(), wait_ms=50.0)
    assert terms["link"] == pytest.approx(150) and terms["transfer"] == pytest.approx(150)
    assert terms["hidden"] == pytest.approx(-100) and terms["second"] == 0
    assert pair(d, p, 100.0, scene(), wait_ms=900.0)["link"] == 0


def test_a_wait_for_the_second_token_weighs_less() -> None:
    terms = pair(known("d"), known("p", P), 30.0, scene(second=0.3))
    assert sum(terms.values()) == pytest.approx(0.3 * (100 + 50 - 30))


def test_reads_that_share_a_link_hold_each_other_up() -> None:
    """150 ms more for each that is there; at an idle link a quarter of one may still come."""
    d, p = known("d", reads=1, moving_bytes=1.0), known("p", P, reads=3, moving_bytes=1.0)
    assert pair(d, p, 1e6, scene(sharing=0.2))["sharing"] == pytest.approx(0.2 * 3.25 * 150)
    assert pair(known("d"), known("p", P), 1e6, scene(sharing=0.2))["sharing"] == pytest.approx(0.2 * 0.25 * 150)


def test_of_two_decode_workers_the_one_whose_link_is_idle() -> None:
    busy = dataclasses.replace(worker("d"), reads=5, moving_bytes=1e12)
    for workers in ((busy, worker("e")), (worker("e"), busy)):
        assert pick(*workers, worker("p", P), policy=policy_named("cost", local_max_tokens=0)).decode.id == "e"


def test_an_unknown_pair_goes_by_the_others() -> None:
    """The same decode worker's links first, then everybody's, then a guess that is equal for all."""
    assert pair(known("d"), known("q", P), 0.0, scene())["transfer"] == pytest.approx(150)
    fresh = dataclasses.replace(known("d").facts[0], rates=Rates())
    fleet = dataclasses.replace(scene(), fleet={("f", Role.DECODE): Rates(links={"any": 2e9})})
    unknown = crowd(fresh)
    assert pair(unknown, known("q", P), 0.0, fleet)["transfer"] == pytest.approx(75)
    assert pair(unknown, known("q", P), 0.0, scene())["transfer"] == pytest.approx(15)


def test_one_sequence_more_slows_all_of_them() -> None:
    terms = of_one(decode_terms(known("d", active=9), scene()))
    assert terms["step"] == pytest.approx(10.0) and terms["slot"] == 0
    assert terms["streams"] == pytest.approx(0.5 * 100 * 0.1 * 10)  # others · reply · slope · sequences


def test_a_full_worker_costs_the_wait_for_a_slot() -> None:
    assert decode_terms(known("d", active=3, slots=4), scene())["slot"] == 0
    waits = [decode_terms(known("d", active=n, slots=4), scene())["slot"].item() for n in (4, 5, 8)]
    assert 0 < waits[0] < waits[1] < waits[2]


def test_local_streams_stand_still_meanwhile() -> None:
    d = known("d", usable=9_000, active=10)
    terms = COST.local(d, decode_terms(d, scene()), scene())
    assert terms["prefill"] == pytest.approx(100)
    assert terms["streams"] - decode_terms(d, scene())["streams"] == pytest.approx(0.5 * 10 * 100)


def limit_of(d: Crowd, remote_ms: float, where: Scene) -> float:
    local = COST.local(d, decode_terms(d, where), where)
    return COST.local_limit(d, local, np.array([remote_ms]), decode_bound(d, {}, where), where).item()


def test_the_local_limit_is_where_both_cost_the_same() -> None:
    d, remote_ms = known("d", usable=9_000), 350.0
    limit = limit_of(d, remote_ms, scene(local_max_tokens=10**6))
    shorter = known("d", usable=10_000 - int(limit))
    at_limit = COST.local(shorter, decode_terms(shorter, scene()), scene())
    assert sum(at_limit.values()) == pytest.approx(remote_ms, abs=0.2)
    assert limit_of(d, remote_ms, scene(local_max_tokens=700)) == 700
    assert limit_of(d, 0.0, scene()) == 0


def test_short_prompts_take_nearly_the_same_and_the_shortest_is_best() -> None:
    """So either every short suffix is worth computing here, or hardly any; and between equals a hit decides."""
    one, half, whole = (prefill_ms(known("d"), np.array([n]), scene()).item() for n in (1.0, 32.0, 64.0))
    assert one == pytest.approx(whole * (0.9 + 0.1 / 64)) and one < half < whole
    for tokens in (1, 60):
        d = known("d", usable=10_000 - tokens)
        itself_ms = prefill_ms(d, np.array([float(tokens)]), scene()).item()
        rest_ms = sum(of_one(COST.local(d, decode_terms(d, scene()), scene())).values()) - itself_ms
        assert limit_of(d, rest_ms + 0.89 * whole, scene()) == 0
        assert limit_of(d, rest_ms + 0.95 * whole, scene()) == pytest.approx(32, abs=1)
        assert 64 <= limit_of(d, rest_ms + 1.05 * whole, scene()) < 68


@pytest.mark.parametrize(
    ("facts", "bound"),
    [({"active": 10}, False), ({"active": 600, "slots": 1000}, True), ({"active": 4, "slots": 4}, True)],
    ids=["idle", "slow steps", "no slot"],
)
def test_decode_bound(facts: dict[str, int], bound: bool) -> None:
    d = known("d", usable=9_999, **facts)
    assert decode_bound(d, {}, scene()).item() is bound
    assert (limit_of(d, 1e6, scene()) == 0) is bound


def test_a_decode_bound_worker_never_prefills_while_somebody_else_can() -> None:
    full = worker("d", reach=995, checkpoints=(990,), active=4)
    full = dataclasses.replace(full, record=dataclasses.replace(full.record, load=Load(running=4, total_slots=4)))
    choice = pick(full, worker("p", P, queued=10**6))
    assert (choice.kind.value, choice.reason.value, choice.local_max_tokens) == ("remote", "decode_bound", 0)
    assert pick(full).kind.value == "local"  # alone it must


@pytest.mark.parametrize(
    ("active", "queued", "kind"),
    [(2, 0, "local"), (8, 0, "remote"), (8, 10_000, "local"), (60, 10_000, "remote")],
    ids=["few streams", "more streams", "more, but the prefill worker is busy", "too many even so"],
)
def test_a_long_suffix_goes_where_less_is_lost_if_the_limit_lets_it(active: int, queued: int, kind: str) -> None:
    """8,000 tokens here, 10,000 there, at 10,000/s each."""
    policy = policy_named("cost", local_max_tokens=32_768)
    d = dataclasses.replace(known("d", active=active).facts[0], attention_tokens=2_000, checkpoints=(2_000,))
    p = known("p", P, queued=queued).facts[0]
    long = {"max_model_tokens": 16_384, "max_request_tokens": 16_384}
    workers = [dataclasses.replace(w, record=dataclasses.replace(w.record, **long)) for w in (d, p)]
    choice = pick(*workers, n=10_000, policy=policy)
    assert choice.kind.value == kind
    short = pick(*workers, n=10_000, policy=dataclasses.replace(policy, local_max_tokens=2048))
    assert short.kind.value == "remote" and short.local_max_tokens <= 2048


def test_rates_of_all_where_a_worker_is_like_them_its_own_where_not_a_guess_at_first() -> None:
    """Others' rates are those of workers of the same role."""
    like = {("f", Role.DECODE): Rates(prefill=Curve(((10, 40_000.0, 9),))), ("f", Role.PREFILL): RATES}
    known_fleet = dataclasses.replace(scene(), fleet=like)

    def ms(rate: float | None, where: Scene) -> float:
        rates = Rates(prefill=Curve(((10, rate, 9),))) if rate else Rates()
        one = crowd(WorkerFacts(worker("a").record, True, 0, 0, rates=rates))
        return prefill_ms(one, np.array([1000.0]), where).item()

    assert ms(None, scene()) == pytest.approx(50)
    assert ms(10_000.0, scene()) == pytest.approx(100)
    assert ms(None, known_fleet) == pytest.approx(25)
    assert ms(10_000.0, known_fleet) == pytest.approx(100)  # four times slower is no noise
    assert ms(28_000.0, known_fleet) == ms(52_000.0, known_fleet) == pytest.approx(25)
    assert prefill_ms(known("a"), np.zeros(1), scene()) == 0


def test_a_choice_carries_its_terms_and_the_others() -> None:
    choice = pick(worker("d"), worker("e", active=3), worker("p", P), worker("x", model="other"))
    terms = dict(choice.terms)
    total = terms.pop("total")
    assert total == pytest.approx(sum(terms.values()))
    assert list(choice.others) == ["p→e"] and choice.others["p→e"] > total
    assert choice.dropped == {"x": "of another model"}


def test_a_faster_worker_is_worth_a_longer_queue() -> None:
    fast = dataclasses.replace(worker("fast", P, queued=3000), rates=Rates(prefill=Curve(((10, 100_000.0, 9),))))
    slow = dataclasses.replace(worker("slow", P), rates=Rates(prefill=Curve(((10, 10_000.0, 9),))))
    assert pick(worker("d"), fast, slow).candidates[0].record.id == "fast"


def test_broken_pairs_are_not_offered() -> None:
    workers = (worker("d"), worker("p", P), worker("q", P, queued=5000))
    request = RouteRequest("m", 1000, 10, 0)
    policy = policy_named("cost", local_max_tokens=0)
    broken = Snapshot(workers, broken=frozenset({("p", "d")}))
    assert [c.record.id for c in choose(broken, request, policy).candidates] == ["q"]
    alone = Snapshot(workers, broken=frozenset({("p", "d"), ("q", "d")}))
    assert choose(alone, request, policy).kind.value == "local"
    failing = Snapshot((*workers, worker("e", active=9)), broken=frozenset({("", "d")}))
    assert choose(failing, request, policy).decode.id == "e"
    assert choose(Snapshot(workers, broken=frozenset({("", "d")})), request, policy).decode.id == "d"


@pytest.mark.parametrize("observations", [1, 6])
def test_one_bad_measurement_makes_nobody_an_outcast(observations: int) -> None:
    """A worker that is never asked is never measured again: what it did once counts for nothing, what it does again does."""
    fleet = {
        ("f", role): Rates(Curve(((10, 50_000.0, 99),)), Line(50.0, 1.0, 0.005), {"any": 1e10})
        for role in (P, Role.DECODE)
    }
    curve, line, rates = Curve(), Line(), Rates()
    for _ in range(observations):
        curve, line = curve.learn(1000, 2_000.0), line.learn(1, 0.1)
        rates = rates.moved(RequestStats(bytes_moved=10**9, transfer_s=10.0, prefill_worker="p"))
    rates = dataclasses.replace(rates, prefill=curve, step=line)
    known_fleet = dataclasses.replace(scene(1000), fleet=fleet)
    p = crowd(dataclasses.replace(worker("p", P), rates=rates))
    d = crowd(dataclasses.replace(worker("d"), rates=rates))
    slow = observations > 1
    assert COST.prefill(p, known_fleet)["prefill"].item() == pytest.approx(500 if slow else 20)
    link = pair(d, p, 0.0, known_fleet)["transfer"]
    assert link == pytest.approx((1000 * 32768 + (50 << 20)) / (1e8 if slow else 1e10) * 1e3)
