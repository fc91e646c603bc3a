"""Few workers are scored one by one, many in arrays: the same choice, number for number."""

import dataclasses
from random import Random

import pytest

from services.router.schedule.base import Choice, RouteRequest, Snapshot, WorkerFacts
from services.router.schedule.choose import choose, choose_many
from services.router.schedule.few import choose_few
from services.router.schedule.policies import policy_named
from services.router.schedule.rates import Curve, Line, Rates
from twinflow.contracts.workers import Load, Role, WorkerRecord

LAYOUTS = ("f", "g")


def rates(draw: Random) -> Rates:
    """Of nobody, of few observations, of many; close to others and not."""
    seen = draw.choice([0, 2, 9])
    if not seen:
        return Rates()
    speed = draw.choice([20_000.0, 24_000.0, 70_000.0])
    curve = Curve(((8, speed / 2, seen), (12, speed, draw.choice([1, 9]))))
    line = Line(float(seen), 4.0, draw.choice([0.004, 0.005, 0.04]), draw.uniform(0, 50), draw.uniform(-0.01, 0.01))
    peers = draw.sample(["p0", "p1", "p2"], draw.randrange(4))
    return Rates(curve, line, {p: draw.uniform(1e9, 4e10) for p in peers}, {p: draw.choice([1, 9]) for p in peers})


def worker(draw: Random, id: str, role: Role, n: int) -> WorkerFacts:
    block_bytes, slot_bytes = draw.choice([(0, 0), (1 << 21, 50 << 20)])
    load = Load(total_slots=draw.choice([0, 2, 64]))
    record = WorkerRecord(
        id, "i", role, (f"{id}:1",), "m", draw.choice(LAYOUTS), 1 << 17, draw.choice([n // 2 + 1, 1 << 17]), 64,
        load=load, block_bytes=block_bytes, slot_bytes=slot_bytes,
    )  # fmt: skip
    reach = draw.randrange(0, n + 64, 64)
    return WorkerFacts(
        record, True, draw.choice([0, 0, 1, 3, 80]), draw.choice([0, 0, 300, 30_000]), draw.randrange(3),
        attention_tokens=reach, checkpoints=tuple(c for c in (64, 256, 960) if c <= reach), rates=rates(draw),
        reads=draw.choice([0, 1, 7]), moving_bytes=draw.choice([0.0, 0.0, draw.uniform(1e6, 1e10)]),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["cost", "min_of_groups"])
@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 300, 50)], ids=str)
def test_the_same_choice_to_the_last_bit(seeds: range, name: str) -> None:
    for seed in seeds:
        draw = Random(seed)
        n = draw.choice([5, 200, 1000, 8000])
        roles = (
            [Role.DECODE] * draw.randrange(1, 4) + [Role.PREFILL] * draw.randrange(4) + [Role.BOTH] * draw.randrange(2)
        )
        facts = [worker(draw, f"{role.value[0]}{i}", role, n) for i, role in enumerate(roles)]
        fleet = {(layout, role): rates(draw) for layout in LAYOUTS for role in Role if draw.random() < 0.7}
        pairs = [(p, d) for p in ("p1", "p2", "p3") for d in ("d0", "d1", "d2")]
        broken = frozenset(draw.sample(pairs, draw.choice([0, 0, 4, 9])))
        snapshot = Snapshot(tuple(facts), fleet, broken, draw.choice([None, 40.0]))
        policy = policy_named(name, local_max_tokens=draw.choice([0, 256, 2048]))
        request = RouteRequest("m", n, draw.choice([1, 500]), seed)
        fitting = [w for w in facts if w.record.role is not Role.PREFILL]
        few, many = (
            among(fitting, facts, snapshot, request, policy, {"x": "draining"}) for among in (choose_few, choose_many)
        )
        told = [{f.name: getattr(c, f.name) for f in dataclasses.fields(Choice)} for c in (few, many)]
        assert told[0] == told[1], seed


def test_equals_fall_at_random() -> None:
    draw = Random(1)
    one = dataclasses.replace(worker(draw, "d0", Role.DECODE, 1000), rates=Rates(), active_requests=0)
    twins = tuple(
        dataclasses.replace(one, record=dataclasses.replace(one.record, id=f"d{i}", max_request_tokens=1 << 17))
        for i in range(2)
    )
    policy = policy_named("cost")
    chosen = [choose(Snapshot(twins), RouteRequest("m", 1000, 10, seed), policy).decode.id for seed in range(100)]
    assert 30 < chosen.count("d0") < 70
