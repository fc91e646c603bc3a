"""Charges count at once and once; incarnations never mix."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.schedule.base import RouteRequest
from services.router.schedule.choose import choose
from services.router.schedule.policies import policy_named
from services.router.view import view as view_module
from services.router.view.breakers import FAULTS
from services.router.view.prompt import PromptKeys, key_of
from services.router.view.view import EVENTS_LATE_S, View, ViewSettings
from tests.router.view.test_index import IDS, RECORD, stored
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Load, Pace, Role
from twinflow.node.pulse import ENGINE_SILENCE_S

PROMPT = PromptKeys(pack_tokens(IDS))


def view_of(*records) -> View:
    view = View()
    for r in records:
        view.put(r)
        view.set_connected(r.key, True)
    return view


def record(id: str, role: Role = Role.DECODE, **changes):
    return dataclasses.replace(RECORD, id=id, role=role, **changes)


def route(view: View, i: int):
    request = RouteRequest("m", len(IDS), 5, tie_seed=i)
    choice = choose(view.snapshot(PROMPT), request, policy_named("cost", local_max_tokens=0))
    view.charge(str(i), choice)
    return choice


def test_a_burst_spreads_before_any_report_arrives():
    view = view_of(*(record(f"d{i}") for i in range(4)), *(record(f"p{i}", Role.PREFILL) for i in range(4)))
    choices = [route(view, i) for i in range(8)]
    assert sorted(c.decode.id for c in choices) == sorted([f"d{i}" for i in range(4)] * 2)
    assert sorted(c.candidates[0].record.id for c in choices) == sorted([f"p{i}" for i in range(4)] * 2)


@pytest.mark.parametrize("restarted", [False, True], ids=["the same", "another incarnation"])
def test_faults_stay_with_their_incarnation(restarted):
    """Requests that a dying worker has failed end after it is gone, and often after its next incarnation is there."""
    view = view_of(record("d"), record("p", Role.PREFILL))
    choices = [route(view, i) for i in range(FAULTS)]
    if restarted:
        view.remove(("p", "i"))
        again = record("p", Role.PREFILL, incarnation="j")
        view.put(again)
        view.set_connected(again.key, True)
    for choice in choices:
        view.learn(choice, RequestStats(faulty_prefill_workers=("p",)), reply_tokens=5)
    assert view.breakers.open() == (frozenset() if restarted else {("p", "d")})


def test_charges_are_taken_back():
    view = view_of(record("d"), record("p", Role.PREFILL))
    route(view, 0)
    d, p = view.snapshot().workers
    assert (d.active_requests, d.queued_prefill_tokens, p.queued_prefill_tokens) == (1, 0, 20)
    view.prefilled("0")
    assert view.snapshot().workers[1].queued_prefill_tokens == 0
    view.finished("0")
    assert view.snapshot().workers[0].active_requests == 0


def test_reported_load_and_charges_are_not_added():
    view = view_of(record("d"))
    route(view, 0)
    view.set_load(("d", "i"), Load(running=1, queued_prefill_tokens=20))
    (d,) = view.snapshot().workers
    assert (d.active_requests, d.queued_prefill_tokens) == (1, 20)


def test_a_new_incarnation_starts_empty():
    view = view_of(record("d"))
    view.apply(("d", "i"), stored(IDS))
    assert view.snapshot(PROMPT).workers[0].attention_tokens == 20
    view.remove(("d", "i"))
    view.put(record("d", incarnation="j"))
    view.set_connected(("d", "j"), True)
    assert view.snapshot(PROMPT).workers[0].attention_tokens == 0
    view.apply(("d", "i"), stored(IDS))  # late events of the dead one
    assert view.snapshot(PROMPT).workers[0].attention_tokens == 0


def test_a_lost_session_forgets_the_index():
    view = view_of(record("d"))
    view.apply(("d", "i"), stored(IDS))
    view.set_connected(("d", "i"), False)
    view.set_connected(("d", "i"), True)
    assert view.snapshot(PROMPT).workers[0].attention_tokens == 0


def test_a_worker_whose_engine_is_silent_is_passed_over_until_it_is_heard():
    """Whether or not anything runs there. A new session knows nothing of it; who never says anything of it is well."""
    d0, d1 = record("d0"), record("d1")
    view = view_of(d0, d1)

    def stalled() -> dict[str, bool]:
        return {w.record.id: w.stalled for w in view.snapshot().workers}

    view.set_engine_silence(d0.key, ENGINE_SILENCE_S - 0.1)
    assert stalled() == {"d0": False, "d1": False} and view.stall(d0.key) == ""
    view.set_engine_silence(d0.key, ENGINE_SILENCE_S)
    assert stalled() == {"d0": True, "d1": False}
    assert view.stall(d0.key) == "has heard nothing from its engine process for 2.0 s"
    assert {route(view, i).decode.id for i in range(8)} == {"d1"}
    view.set_engine_silence(d0.key, 0.1)
    assert stalled() == {"d0": False, "d1": False} and view.stall(d0.key) == ""
    view.set_engine_silence(d0.key, 60.0)
    view.set_connected(d0.key, False)
    assert not stalled()["d0"] and view.stall(d0.key) == "", "there is nothing to leave"
    view.set_connected(d0.key, True)
    assert not stalled()["d0"]
    view.set_engine_silence(("gone", "1"), 60.0)


def test_a_loop_that_hangs_in_a_process_that_runs_is_found_by_its_steps():
    now = 100.0
    view, d0 = View(ViewSettings(stall_s=10.0), clock=lambda: now), record("d0")
    view.put(d0)
    view.set_connected(d0.key, True)
    view.set_load(d0.key, Load(running=1, pace=Pace(steps=10, busy_s=0.1)))
    view.set_engine_silence(d0.key, 0.2)
    now += 10.0
    assert view.stall(d0.key) == ""
    now += 0.5
    assert view.stall(d0.key) == "has made no step for 10.5 s while requests run there"
    view.set_engine_silence(d0.key, 3.0)
    assert view.stall(d0.key) == "has heard nothing from its engine process for 3.0 s"


def test_registry_updates_keep_the_fresher_load():
    view = view_of(record("d"))
    view.set_load(("d", "i"), Load(running=7))
    view.put(record("d", draining=True, load=Load(running=1)))
    (d,) = view.snapshot().workers
    assert d.record.draining and d.record.load.running == 7


def test_how_many_a_worker_holds_is_seen_when_others_wait_there():
    view = view_of(record("d"))

    def reported(**load: int) -> int:
        view.set_load(("d", "i"), Load(**load))
        (d,) = view.snapshot().workers
        assert [facts.full_at for facts in view.each(Role.DECODE)] == [d.full_at]
        return d.full_at

    assert reported(running=9) == 0, "nobody waited: it may hold any number"
    assert reported(running=8, waiting=2) == 8
    assert reported(running=5) == 8
    assert reported(running=10) == 10, "it holds more by now"
    assert reported(running=3, waiting=1) == 3, "they have grown"


@given(
    prompt=st.integers(0, 20),
    reply=st.integers(1, 20),
    block=st.sampled_from([1, 3, 4, 8]),
    salt=st.sampled_from(["", "s"]),
)
def test_keys_of_a_reply_are_those_of_the_whole(prompt: int, reply: int, block: int, salt: str) -> None:
    ids = list(range(prompt + reply))
    chain = TokenChain(root_hash("f", "", salt), block, pack_tokens(ids))
    worker = record("d", block_tokens=block)
    found = PromptKeys(pack_tokens(ids[:prompt]), cache_salt=salt).reply_keys(worker, pack_tokens(ids[prompt:]))
    filled = chain.block_hashes[prompt // block : (len(ids) - 1) // block]
    assert found.blocks == [key_of(h) for h in filled]
    assert found.states == {at: key_of(chain.prefix_hash(at)) for at in (len(ids) - 1, len(ids))}


@pytest.mark.parametrize("extra", [0, 1], ids=["all but the last token", "all of it"])
def test_the_next_turn_finds_a_reply_before_its_events_come(extra: int) -> None:
    now = 100.0
    view = View(clock=lambda: now)
    for each in (record("d"), record("e"), record("p", Role.PREFILL)):
        view.put(each)
        view.set_connected(each.key, True)
        view.apply(each.key, stored([7, 7, 7, 7]))
    choice = route(view, 0)
    reply = [900 + i for i in range(7)]
    prompt, next_turn = PROMPT, PromptKeys(pack_tokens([*IDS, *reply[: 6 + extra], 1, 2, 3, 4, 5]))

    def usable(id: str) -> int:
        return next(w.usable_tokens(next_turn.tokens) for w in view.snapshot(next_turn).workers if w.record.id == id)

    view.charge("0", choice, prompt)
    view.finished("0")
    assert usable(choice.decode.id) == 0
    view.replied(choice, prompt.reply_keys(choice.decode, pack_tokens(reply)))
    other = "e" if choice.decode.id == "d" else "d"
    assert usable(choice.decode.id) == len(IDS) + 6 + extra and usable(other) == 0
    now += EVENTS_LATE_S
    assert usable(choice.decode.id) == 0, "it did not come true"
    view.remove(choice.decode.key)
    view.replied(choice, prompt.reply_keys(choice.decode, pack_tokens(reply)))


@pytest.fixture
def none_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "SHORT_TOKENS", 0)


@pytest.mark.usefixtures("none_short")
def test_the_next_choice_knows_what_the_last_one_leaves():
    """Hashes of a long prompt that was charged are taken when somebody looks, or when there is time: the same either way."""
    reaches = []
    for caught_up in (False, True):
        view = view_of(record("d"), record("p", Role.PREFILL))
        for i in range(2):
            choice = route(view, i)
            view.charge(str(i), choice, PromptKeys(pack_tokens(IDS)))
            assert view.is_behind
            if caught_up:
                view.catch_up()
        workers = view.snapshot(PROMPT).workers
        reaches.append([(w.record.id, w.attention_tokens, w.checkpoints) for w in workers])
    assert reaches[0] == reaches[1]
    assert {id: reach for id, reach, _ in reaches[0]} == {"d": len(IDS), "p": len(IDS)}


def test_of_a_short_prompt_they_are_taken_at_once():
    view = view_of(record("d"))
    view.charge("0", route(view, 0), PromptKeys(pack_tokens(IDS)))
    assert not view.is_behind and view.snapshot(PROMPT).workers[0].attention_tokens == len(IDS)


@pytest.mark.usefixtures("none_short")
def test_nothing_is_expected_of_a_session_that_has_ended():
    view = view_of(record("d"))
    view.charge("1", route(view, 0), PromptKeys(pack_tokens(IDS)))
    view.set_connected(("d", "i"), True)
    assert view.snapshot(PROMPT).workers[0].attention_tokens == 0


@pytest.mark.parametrize("tokens", [0, 3, 4, 5, 20], ids=str)
@pytest.mark.parametrize("hashed", [False, True], ids=["alone", "among the others"])
def test_the_first_key(tokens, hashed):
    prompt = PromptKeys(pack_tokens(IDS[:tokens]), tenant="t", cache_salt="s")
    if hashed:
        prompt.block_numbers(RECORD)
    first = prompt.first_number(RECORD)
    assert ([] if first is None else [first]) == prompt.block_numbers(RECORD)[:1]
