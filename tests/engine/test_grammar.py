"""Replies held to a grammar: the same tokens wherever they are computed, under no mask but their own, and nobody else's change.

The grammars are lists of token ids (`grammar/tokens.py`); what a grammar of text allows: `tests/grammar`.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.engine.harness import Pair, Result, Worker, request
from tests.engine.test_preemption import preempted
from tests.models.tiny import prompt
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.requests import FinishReason, Grammar, GrammarKind
from twinflow.engine import base
from twinflow.engine.base import Generated, Mode
from twinflow.engine.sequence import Phase
from twinflow.grammar.base import Compiled
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork

# Every reply of 8 tokens of which each is one of two: 256 of them, of which greedy and seeded drawing choose.
LENGTH = 8


def lists(*replies: list[int], **more: object) -> Grammar:
    return Grammar(GrammarKind.GRAMMAR, json.dumps(replies), **more)  # type: ignore[arg-type]


def either(length: int = LENGTH, base_id: int = 10) -> Grammar:
    """Token k of the reply is base + 2k or base + 2k + 1."""
    replies: list[list[int]] = [[]]
    for k in range(length):
        replies = [[*r, base_id + 2 * k + c] for r in replies for c in (0, 1)]
    return lists(*replies)


def fits(tokens: list[int], length: int = LENGTH, base_id: int = 10) -> bool:
    return [(t - base_id) // 2 for t in tokens] == list(range(len(tokens))) and len(tokens) <= length


SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}]


@pytest.fixture(params=[1, 2], ids=["one-flight", "two-flights"])
def pair(model: HybridModel, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair.build(model, steps_in_flight=request.param)
    yield pair
    pair.close()


def until_begun(worker: Worker, id: str) -> None:
    """Turns until the grammar of `id` is compiled."""
    while worker.engine.sequences[id].phase is Phase.COMPILING:
        worker.turn()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_the_same_tokens_aggregated_handed_off_and_continued(pair: Pair, sampling: dict[str, float]) -> None:
    p = prompt(1, 100)
    want = pair.decode.local(p, max_tokens=40, grammar=either(), **sampling)
    assert fits(want.tokens) and len(want.tokens) == LENGTH
    got = pair.remote(p, max_tokens=40, grammar=either(), **sampling)
    assert (got.error, got.tokens) == ("", want.tokens)
    for sent in (1, 5, LENGTH - 1):  # another worker goes on: it replays what the client has
        rest = pair.prefill.local(p, forced=want.tokens[:sent], max_tokens=40, grammar=either(), **sampling)
        assert (rest.error, rest.tokens) == ("", want.tokens[sent:])
    assert pair.quiet()


def test_without_a_grammar_the_tokens_are_others(pair: Pair) -> None:
    """Else the tests above would show nothing."""
    assert not fits(pair.decode.local(prompt(1, 100), max_tokens=LENGTH).tokens)


def test_a_batch_with_and_without(pair: Pair) -> None:
    """Nobody's tokens depend on who else is held to a grammar."""
    worker = pair.decode
    prompts = [prompt(i, 30 + 7 * i) for i in range(6)]
    alone = [worker.local(p, max_tokens=20, temperature=0.8).tokens for p in prompts]
    held = [worker.local(p, max_tokens=20, temperature=0.8, grammar=either()).tokens for p in prompts]
    requests = [request(f"f{i}", p, worker.root, max_tokens=20, temperature=0.8) for i, p in enumerate(prompts)]
    requests += [
        request(f"g{i}", p, worker.root, max_tokens=20, temperature=0.8, grammar=either())
        for i, p in enumerate(prompts)
    ]
    results = worker.run(requests)
    assert [results[f"f{i}"].tokens for i in range(6)] == alone
    assert [results[f"g{i}"].tokens for i in range(6)] == held
    assert worker.quiet()


def finishes(worker: Worker, **sampling: object) -> tuple[list[int], FinishReason | None]:
    req = request(worker.next_id(), prompt(2, 40), worker.root, **sampling)
    notices = worker.turn(base.Submit(req, Mode.LOCAL))
    while not any(isinstance(n, base.Done) for n in notices):
        notices += worker.turn()
    samples = [s for n in notices if isinstance(n, Generated) for s in n.samples]
    return [s.token_id for s in samples], samples[-1].finish


def test_how_it_ends(pair: Pair) -> None:
    worker, eos = pair.decode, 7
    worker.grammars.eos_token_ids = (eos,)
    abc = lists([10, 11, 12])
    common = {"eos_token_ids": (eos,), "ignore_eos": False}
    assert finishes(worker, grammar=abc, max_tokens=9, **common) == ([10, 11, 12], FinishReason.STOP)
    assert finishes(worker, grammar=abc, max_tokens=3, **common) == ([10, 11, 12], FinishReason.STOP)
    assert finishes(worker, grammar=abc, max_tokens=2, **common) == ([10, 11], FinishReason.LENGTH)
    # what is fulfilled and cannot go on ends, whatever min_tokens and ignore_eos want
    assert finishes(worker, grammar=abc, max_tokens=9, min_tokens=6, **common) == ([10, 11, 12], FinishReason.STOP)
    assert finishes(worker, grammar=abc, max_tokens=9, ignore_eos=True) == ([10, 11, 12], FinishReason.STOP)
    # what may end or go on: the ending token is drawn only where it may be
    more = lists([10], [10, 11, 12])
    wants_eos = {"logit_bias": ((eos, 100.0),)}
    assert finishes(worker, grammar=more, max_tokens=9, **common, **wants_eos) == ([10, eos], FinishReason.STOP)
    for longer in ({"min_tokens": 2, **common}, {"ignore_eos": True, "eos_token_ids": (eos,)}):
        got = finishes(worker, grammar=more, max_tokens=9, **longer, **wants_eos)
        assert got == ([10, 11, 12], FinishReason.STOP)
    assert finishes(worker, grammar=lists([]), max_tokens=9, **common)[1] is FinishReason.STOP
    assert finishes(worker, grammar=more, max_tokens=9, stop_token_ids=(11,))[0] == [10, 11]


def test_a_first_token_may_be_the_last(pair: Pair) -> None:
    got = pair.remote(prompt(3, 80), grammar=lists([33]), max_tokens=9)
    assert (got.error, got.tokens, got.stats.slots_moved) == ("", [33], 0)
    assert pair.quiet()


def test_thoughts_come_before_it(pair: Pair) -> None:
    """Free until the token that ends them, which may not be passed over; then held."""
    think, end, eos = 20, 21, 7
    free = pair.decode.local(prompt(4, 50), max_tokens=5).tokens
    opened = lists([30, 31], think_end=end)
    held = pair.remote(prompt(4, 50), max_tokens=5, grammar=opened, ignore_eos=False, eos_token_ids=(eos,))
    assert held.tokens == free and eos not in free
    ending = {"eos_token_ids": (eos,), "ignore_eos": False, "logit_bias": ((eos, 100.0), (end, 50.0))}
    assert pair.remote(prompt(4, 50), max_tokens=9, grammar=opened, **ending).tokens == [end, 30, 31]
    may = replace(opened, think_start=think)
    assert pair.remote(prompt(4, 50), max_tokens=9, grammar=may, **ending).tokens == [30, 31]
    ending["logit_bias"] = ((think, 100.0), (end, 50.0), (think, 1.0))
    assert pair.remote(prompt(4, 50), max_tokens=3, grammar=may, **ending).tokens == [think] * 3
    forced = pair.decode.local(prompt(4, 50), forced=[think, 5, end], max_tokens=9, grammar=may)
    assert forced.tokens == [30, 31]


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.CLAIM, Mode.OFFER])
def test_what_is_no_grammar_is_refused_before_anything_is_computed(pair: Pair, mode: Mode) -> None:
    worker = pair.decode
    bad = Grammar(GrammarKind.GRAMMAR, "nonsense", field="structured_outputs.grammar")
    notices = worker.turn(base.Submit(request("r", prompt(1, 30), worker.root, grammar=bad), mode))
    while not any(isinstance(n, base.Done) for n in notices):
        notices += worker.turn()
    (done,) = notices
    assert isinstance(done, base.Done)
    assert (done.error_reason, done.error_param) == ("bad_request", "structured_outputs.grammar")
    assert "structured_outputs.grammar" in done.error_message
    assert worker.quiet()


def test_forced_tokens_that_are_outside_end_the_request(pair: Pair) -> None:
    result = pair.decode.local(prompt(1, 30), forced=[99], max_tokens=9, grammar=lists([10, 11]))
    assert "99" in result.error and not result.tokens
    assert pair.quiet()


def test_who_compiles_holds_nobody_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, p = pair.decode, prompt(5, 40)
    may, compile = threading.Event(), worker.grammars.compile

    def slow(grammar: Grammar) -> Compiled:
        assert may.wait(60)
        return compile(grammar)

    monkeypatch.setattr(worker.grammars, "compile", slow)
    for id in ("slow", "cancelled"):
        worker.turn(base.Submit(request(id, p, worker.root, grammar=lists([10, 11])), Mode.LOCAL))
    assert len(worker.local(p, max_tokens=5).tokens) == 5
    assert worker.engine.sequences["slow"].phase is Phase.COMPILING
    worker.turn(base.Cancel("cancelled"))
    again = request("cancelled", p, worker.root, max_tokens=3)
    results = worker.run([again])  # the id was free again; the late grammar of the first is not its own
    may.set()
    made: list[base.Notice] = []
    while "slow" in worker.engine.sequences:
        made += worker.turn()
    assert len(results["cancelled"].tokens) == 3
    assert [s.token_id for n in made if isinstance(n, Generated) for s in n.samples] == [10, 11]
    assert worker.quiet()


def test_who_yields_goes_on_in_its_grammar(model: HybridModel) -> None:
    layout = model.layout
    budget = 6 * layout.slot_bytes + 7 * layout.block_bytes + 256
    values = {"max_running": 5, "checkpoint_slots": 1, "cache_bytes": budget, "growth_tokens": 64}
    long = lists([10 + k % 50 for k in range(150)])
    for flights in (1, 2):
        worker = Worker(model, f"tight{flights}", LoopbackNetwork(), steps_in_flight=flights, **values)
        requests = [
            request(f"r{i}", prompt(i, 70 + 10 * i), worker.root, max_tokens=190, grammar=long) for i in range(4)
        ]
        results, times = preempted(worker, requests)
        assert times > 0, "the pool is too large to show anything"
        for i in range(4):
            assert (results[f"r{i}"].error, results[f"r{i}"].tokens) == ("", [10 + k % 50 for k in range(150)])
        assert worker.quiet()
        worker.close()


def test_a_lost_hand_off_keeps_its_place(pair: Pair) -> None:
    """The first token is with the client when the hand-off fails; what follows is drawn here, from the second on."""
    p = prompt(6, 150)
    want = pair.decode.local(p, max_tokens=40, grammar=either()).tokens
    pair.decode.flush()
    id = pair.submit(p, max_tokens=40, grammar=either())
    while not pair.results[id].tokens:
        pair.relay_prefill(pair.prefill.turn())
        pair.relay_decode(pair.decode.turn())
    pair.decode.inbox.put(base.HandoffFailed(id, "handoff_failed", "lost"))
    pair.drive()
    result: Result = pair.results[id]
    assert (result.error, result.tokens, len(pair.lost[id])) == ("", want, 1)


def test_two_steps_stay_in_flight_and_draws_wait_for_their_masks(model: HybridModel) -> None:
    worker = Worker(model, "two", LoopbackNetwork(), steps_in_flight=2)
    worker.turn(base.Submit(request("r", prompt(1, 20), worker.root, max_tokens=40, grammar=either()), Mode.LOCAL))
    until_begun(worker, "r")
    steps, runner, seen = worker.engine.steps, worker.engine.runner, []
    launch, draw = runner.launch, runner.draw

    def launched(parts):  # type: ignore[no-untyped-def]
        flight = launch(parts)
        seen.append(("launch", steps.in_flight, flight.undrawn is not None))
        return flight

    def drawn(flight, masks):  # type: ignore[no-untyped-def]
        seen.append(("draw", steps.in_flight, masks is not None))
        draw(flight, masks)

    runner.launch, runner.draw = launched, drawn  # type: ignore[method-assign]
    while "r" in worker.engine.sequences:
        worker.turn()
    decoding = seen[seen.index(("launch", 1, True)) :]
    assert decoding[:4] == [("launch", 1, True), ("draw", 1, True)] * 2
    worker.close()


def test_packed_forced_tokens_count(pair: Pair) -> None:
    req = request("r", prompt(7, 30), pair.decode.root, max_tokens=2, grammar=lists([10, 11, 12]))
    req = replace(req, forced=pack_tokens([10]))
    assert pair.decode.run([req])["r"].tokens == [11]
