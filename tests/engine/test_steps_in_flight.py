"""The next step is launched before the last one has landed, as on a GPU: the same tokens, and nothing is named too early.

On CPU a launched step is computed at once, but the engine learns of it only when it lands.
"""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Worker, each, request
from tests.engine.test_preemption import preempted
from tests.models.tiny import prompt
from twinflow.contracts.requests import FinishReason
from twinflow.engine import base
from twinflow.engine.base import Generated, Mode
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork

NEW = 12


@pytest.fixture
def pair(model: HybridModel) -> Iterator[Pair]:
    pair = Pair.build(model, steps_in_flight=2)
    yield pair
    pair.close()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 193, 333])
def test_cold_and_warm_everywhere(pair: Pair, oracle: Oracle, tokens: int) -> None:
    p = prompt(tokens, tokens)
    want = oracle(p, NEW)
    for _ in range(2):
        assert pair.remote(p, max_tokens=NEW).tokens == want
        assert pair.decode.local(p, max_tokens=NEW).tokens == want
        assert pair.quiet()


def test_many_at_once_do_not_mix(pair: Pair, oracle: Oracle) -> None:
    prompts = [prompt(i, n) for i, n in enumerate((5, 64, 130, 65, 1, 200, 64, 90, 31, 129))]
    ids = [pair.submit(p, max_tokens=NEW + i) for i, p in enumerate(prompts)]
    pair.drive()
    assert [pair.results[i].tokens for i in ids] == [oracle(p, NEW + i) for i, p in enumerate(prompts)]
    assert pair.quiet()


def test_two_steps_are_in_flight_while_decoding(pair: Pair) -> None:
    pair.decode.turn(base.Submit(request("r", prompt(1, 20), pair.decode.root, max_tokens=8), Mode.LOCAL))
    sequence = pair.decode.engine.sequences["r"]
    pair.decode.turn()
    assert (pair.decode.engine.steps.in_flight, sequence.flying_tokens) == (1, 1)
    assert sequence.holding is not None and sequence.holding.position == 20  # the token in flight is not fed yet
    assert sequence.known_tokens == len(sequence.chain) + 1
    pair.decode.turn(base.Cancel("r"))
    assert pair.decode.quiet()


def test_a_reply_that_ends_early_feeds_its_last_token_and_nothing_after(pair: Pair, oracle: Oracle) -> None:
    """The step behind the one that drew the ending token is in flight already: what it draws is dropped, its state kept."""
    p = prompt(4, 70)
    reply = oracle(p, NEW)
    stop = reply[5]
    first = reply.index(stop)
    result = pair.decode.local(p, max_tokens=NEW, ignore_eos=True, stop_token_ids=(stop,))
    assert result.tokens == reply[: first + 1]
    assert pair.decode.quiet()
    talk = [*p, *result.tokens, *prompt(5, 20)]
    again = pair.decode.local(talk, max_tokens=NEW)
    assert again.stats.decode_resumed_tokens == len(p) + first + 1  # the ending token too
    assert again.tokens == oracle(talk, NEW)


@pytest.mark.parametrize("turns", range(1, 9))
def test_cancelled_at_any_turn_gives_everything_back(pair: Pair, oracle: Oracle, turns: int) -> None:
    worker, p = pair.decode, prompt(6, 150)
    worker.turn(base.Submit(request("r", p, worker.root, max_tokens=50), Mode.LOCAL))
    made: list[int] = []
    for _ in range(turns):
        made += [s.token_id for n in worker.turn() if isinstance(n, Generated) for s in n.samples]
    done = worker.turn(base.Cancel("r"))
    assert [type(n) for n in done].count(base.Done) == 1
    assert not any(isinstance(n, Generated) for n in done)
    assert worker.quiet()
    talk = [*p, *oracle(p, 50)[: len(made)], *prompt(7, 9)]
    again = worker.local(talk, max_tokens=NEW)
    assert again.tokens == oracle(talk, NEW)
    assert again.stats.decode_resumed_tokens == len(p) + len(made) or turns < 2


def test_a_cancelled_id_can_be_used_again_at_once(pair: Pair, oracle: Oracle) -> None:
    worker = pair.decode
    worker.turn(base.Submit(request("r", prompt(1, 90), worker.root, max_tokens=40), Mode.LOCAL))
    for _ in range(4):
        worker.turn()
    p = prompt(2, 40)
    results = {"r": ""}
    made = []
    notices = worker.turn(base.Cancel("r"), base.Submit(request("r", p, worker.root, max_tokens=NEW), Mode.LOCAL))
    while results:
        for n in notices:
            if isinstance(n, Generated):
                made += [s.token_id for s in n.samples]
            if isinstance(n, base.Done) and made:
                results.pop("r", None)
        notices = worker.turn()
    assert made == oracle(p, NEW)
    assert worker.quiet()


def test_one_row_is_handed_from_request_to_request(model: HybridModel, oracle: Oracle) -> None:
    worker = Worker(model, "one", LoopbackNetwork(), steps_in_flight=2, max_running=1, checkpoint_slots=2)
    prompts = [prompt(i, 30 + i) for i in range(5)]
    results = worker.run([request(f"r{i}", p, worker.root, max_tokens=NEW) for i, p in enumerate(prompts)])
    assert [results[f"r{i}"].tokens for i in range(5)] == [oracle(p, NEW) for p in prompts]
    assert worker.quiet()
    worker.close()


def test_who_yields_loses_no_token(model: HybridModel, oracle: Oracle) -> None:
    layout = model.layout
    budget = 6 * layout.slot_bytes + 7 * layout.block_bytes + 256
    worker = Worker(
        model,
        "tight",
        LoopbackNetwork(),
        steps_in_flight=2,
        max_running=5,
        checkpoint_slots=1,
        cache_bytes=budget,
        growth_tokens=64,
    )
    prompts = [prompt(i, 70 + 10 * i) for i in range(4)]
    results, times = preempted(
        worker, [request(f"r{i}", p, worker.root, max_tokens=190) for i, p in enumerate(prompts)]
    )
    assert times > 0, "the pool is too large to show anything"
    for i, p in enumerate(prompts):
        assert (results[f"r{i}"].error, results[f"r{i}"].tokens) == ("", oracle(p, 190)), i
    assert worker.quiet()
    worker.close()


def test_states_at_cuts_are_those_of_their_positions(model: HybridModel, oracle: Oracle) -> None:
    """A chunk that ends where its state is kept is waited for, so that the copy is not one chunk too late."""
    pair = Pair.build(model, steps_in_flight=2, chunk_tokens=64, checkpoint_interval_tokens=64, checkpoint_slots=12)
    p = prompt(8, 400)
    assert pair.decode.local(p, max_tokens=NEW).tokens == oracle(p, NEW)
    for shared in (64, 130, 200, 384):  # each resumes at another checkpoint of the first
        q = [*p[:shared], *prompt(shared, 40)]
        result = pair.decode.local(q, max_tokens=NEW)
        assert result.stats.decode_resumed_tokens == shared // 64 * 64
        assert result.tokens == oracle(q, NEW)
    pair.close()


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_failing_step_ends_its_requests_only(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    worker, p = pair.decode, prompt(1, 100)
    real, calls = worker.engine.runner.model, iter(range(1000))

    class Breaks:
        def forward(self, *args: object) -> object:
            if next(calls) == at:
                raise RuntimeError("device fault")
            return real.forward(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine.runner, "model", Breaks())
        assert "device fault" in worker.local(p, max_tokens=NEW).error
        assert worker.quiet()
    assert worker.local(p, max_tokens=NEW).tokens == oracle(p, NEW)


def test_finish_reasons_arrive_with_the_last_token(pair: Pair) -> None:
    worker = pair.decode
    notices = worker.turn(base.Submit(request("r", prompt(1, 20), worker.root, max_tokens=3), Mode.LOCAL))
    for _ in range(8):
        notices += worker.turn()
    finishes = [s.finish for n in notices if isinstance(n, Generated) for s in n.samples]
    assert finishes == [None, None, FinishReason.LENGTH]


def test_what_a_step_draws_for_requests_that_go_on_is_one_notice(pair: Pair, oracle: Oracle) -> None:
    """Last tokens, and those with log-probabilities, come on their own, all in the order of their request."""
    worker = pair.decode
    prompts = [prompt(20 + i, 30 + i) for i in range(4)]
    asks = [{"max_tokens": 3}, {"max_tokens": 5}, {"max_tokens": 5}, {"max_tokens": 4, "logprobs": 1}]
    submits = [
        base.Submit(request(f"r{i}", p, worker.root, **ask), Mode.LOCAL)
        for i, (p, ask) in enumerate(zip(prompts, asks, strict=True))
    ]
    notices = list(worker.engine.turn(submits).notices)
    while worker.engine.sequences:
        report = worker.engine.turn(())
        notices += report.notices if report else ()
    made: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}
    for n in each(notices):
        if isinstance(n, Generated):
            made[n.id] += [s.token_id for s in n.samples]
    assert made == {f"r{i}": oracle(p, asks[i]["max_tokens"]) for i, p in enumerate(prompts)}
    together = [n.ids for n in notices if isinstance(n, base.Continued)]
    assert together == [("r0", "r1", "r2")] * 2 + [("r1", "r2")] * 2
    alone = [n for n in notices if isinstance(n, Generated)]
    assert sorted(n.id for n in alone) == ["r0", "r1", "r2", *["r3"] * 4]
    assert all(s.finish or s.logprobs for n in alone for s in n.samples)
    assert worker.quiet()
