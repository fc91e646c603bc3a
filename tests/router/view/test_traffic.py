"""What is charged to links: how much is on its way, and for how long."""

import dataclasses

import pytest

from services.router.schedule.base import Choice, RouteRequest, Snapshot
from services.router.schedule.choose import choose
from services.router.schedule.policies import POLICIES, policy_named
from services.router.view.prompt import PromptKeys
from services.router.view.traffic import Traffic
from services.router.view.view import View
from tests.router.schedule.test_choose import worker
from tests.router.view.test_index import IDS, RECORD
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.workers import Role

RECORD_OF_100 = dataclasses.replace(worker("d").record, block_tokens=10, block_bytes=10**6, slot_bytes=5 * 10**7)
MB = 10**6


def choice(**terms: float) -> Choice:
    made = {"wait": 100.0, "prefill": 300.0, "link": 0.0, "transfer": 500.0, "hidden": -300.0} | terms
    request = RouteRequest("m", 1000, 10, 0)
    remote = choose(_snapshot(), request, policy_named("cost", local_max_tokens=0))
    return dataclasses.replace(remote, decode=RECORD_OF_100, decode_attention_tokens=400, terms=made)


def _snapshot() -> Snapshot:
    return Snapshot((worker("d"), worker("p", Role.PREFILL)))


def test_bytes_leave_evenly_from_when_the_prompt_is_computed() -> None:
    traffic = Traffic()
    traffic.hand_off("1", choice(), 1000, now_s=7.0)
    whole = 60 * MB + 50 * MB  # 600 tokens and a slot, from 7.1 to 7.6
    for at_s, left in ((7.0, 1.0), (7.1, 1.0), (7.35, 0.5), (7.6, 0.0)):
        assert traffic.left_bytes(at_s) == pytest.approx(left * whole)
        assert traffic.reads == (left > 0)


def test_what_several_have_left_adds_up() -> None:
    traffic = Traffic()
    traffic.hand_off("1", choice(wait=0.0), 1000, now_s=0.0)
    traffic.hand_off("2", choice(wait=0.0, link=400.0), 1000, now_s=0.1)
    assert traffic.left_bytes(0.3) == pytest.approx(110 * MB * (0.4 + 7 / 9))
    assert traffic.reads == 2 and traffic.left_bytes(0.6) == pytest.approx(110 * MB * 4 / 9) and traffic.reads == 1


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("cost", "min_of_groups")])
def test_terms_that_are_no_times_charge_no_link(policy: str) -> None:
    made = choose(_snapshot(), RouteRequest("m", 1000, 10, 0), policy_named(policy, local_max_tokens=0))
    traffic = Traffic()
    traffic.hand_off("1", dataclasses.replace(made, decode=RECORD_OF_100), 1000, now_s=0.0)
    assert traffic.left_bytes(0.0) == 0


@pytest.mark.parametrize("ends", [False, True], ids=["by its time", "with its request"])
def test_the_links_of_both_workers_are_charged_and_seen_until_it_is_over(ends: bool) -> None:
    now = 50.0
    view = View(clock=lambda: now)
    sizes = {"block_bytes": 10**6, "slot_bytes": 10**6}
    for id, role in (("d", Role.DECODE), ("e", Role.DECODE), ("p", Role.PREFILL), ("q", Role.PREFILL)):
        record = dataclasses.replace(RECORD, id=id, role=role, **sizes)
        view.put(record)
        view.set_connected(record.key, True)
    prompt = PromptKeys(pack_tokens(IDS))
    made = choose(view.snapshot(prompt), RouteRequest("m", len(IDS), 5, 0), policy_named("cost", local_max_tokens=0))
    view.charge("1", made, prompt)

    def moving() -> dict[str, tuple[int, float]]:
        return {w.record.id: (w.reads, w.moving_bytes) for w in view.snapshot(prompt).workers if w.reads}

    moved = (1, pytest.approx(10**6 * (len(IDS) / RECORD.block_tokens + 1)))
    chosen = {made.decode.id, made.candidates[0].record.id}
    assert moving() == dict.fromkeys(chosen, moved)
    if ends:
        view.finished("1")  # cancelled, say
    else:
        now += 3600.0
    assert moving() == {}


def test_a_prompt_that_its_decode_worker_computes_moves_nothing() -> None:
    view = View()
    for id, role in (("d", Role.DECODE), ("p", Role.PREFILL)):
        record = dataclasses.replace(RECORD, id=id, role=role, block_bytes=10**6, slot_bytes=10**6)
        view.put(record)
        view.set_connected(record.key, True)
    prompt = PromptKeys(pack_tokens(IDS))
    made = choose(view.snapshot(prompt), RouteRequest("m", len(IDS), 5, 0), policy_named("cost"))
    assert made.kind.value == "local"
    view.charge("1", made, prompt)
    assert [w.reads for w in view.snapshot(prompt).workers] == [0, 0]
