"""What a hand-off moves, and what happens to everything when it does not go as planned."""

import time
from collections.abc import Callable

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Result, Worker, collect, request
from tests.models.tiny import VOCAB, prompt
from twinflow.engine import base
from twinflow.engine.base import Mode
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import Manual

NEW = 6


def settle(pair: Pair, until: Callable[[], bool], turns: int = 2000) -> None:
    for _ in range(turns):
        if until():
            return
        pair.drive(turns=1)
    raise AssertionError("never got there")


def doomed(worker: Worker) -> int:
    return sum(c.doomed for c in worker.engine.cache.counts().values())


# ---- what moves ----


def test_attention_hits_survive_an_empty_state_lookup(pair: Pair, oracle: Oracle) -> None:
    """The decode worker has attention KV of a prefix and no checkpoint inside it: only the rest and one slot move."""
    layout = pair.decode.engine.model.layout
    first = prompt(1, 300)
    pair.remote(first, max_tokens=NEW)
    p = first[:200] + prompt(
        2, 90
    )  # shares 3 full blocks; the only checkpoint of decode is at the end of the first answer
    result = pair.remote(p, max_tokens=NEW)
    assert result.tokens == oracle(p, NEW)
    assert result.stats.decode_attention_tokens == 192  # no state lies inside the fourth block
    assert result.stats.decode_checkpoints == ()
    assert (result.stats.blocks_moved, result.stats.slots_moved) == (2, 1)  # blocks 3 and 4 of 0..4
    assert result.stats.bytes_moved == 2 * layout.block_bytes + layout.slot_bytes


def test_cold_decode_gets_every_block_once(pair: Pair) -> None:
    layout = pair.decode.engine.model.layout
    stats = pair.remote(prompt(3, 200), max_tokens=NEW).stats
    assert (stats.blocks_moved, stats.slots_moved) == (4, 1)
    assert stats.bytes_moved == 4 * layout.block_bytes + layout.slot_bytes
    assert (stats.route, stats.transport) == ("remote", "loopback")


def test_blocks_are_announced_while_the_prefill_still_runs(model: HybridModel) -> None:
    pair = Pair.build(model, chunk_tokens=64, step_tokens=64)
    id = pair.submit(prompt(4, 400), max_tokens=NEW)
    for _ in range(3):
        pair.relay_prefill(pair.prefill.turn())
    intake = pair.decode.engine.sequences[id].intake
    deadline = time.monotonic() + 10
    while (intake is None or intake.moved.blocks < 3) and time.monotonic() < deadline:
        pair.relay_decode(pair.decode.turn())
        intake = pair.decode.engine.sequences[id].intake
    assert intake is not None and intake.moved.blocks >= 3
    assert pair.results[id].tokens == []  # not even the first token exists
    pair.drive()
    pair.close()


def test_a_terminal_first_token_needs_no_pull_of_the_rest(pair: Pair, oracle: Oracle) -> None:
    p = prompt(5, 100)
    (eos,) = oracle(p, 1)
    result = pair.remote(p, max_tokens=NEW, ignore_eos=False, eos_token_ids=(eos,))
    assert result.tokens == [eos] and not result.error
    assert pair.remote(p, max_tokens=1).tokens == [eos]
    settle(pair, pair.quiet)


# ---- the fence: what was read counts only when confirmed ----


@pytest.fixture
def manual(model: HybridModel) -> "tuple[Pair, Manual]":
    scheduler = Manual()
    return Pair.build(model, scheduler), scheduler


def finish_reads(reads: Manual) -> None:
    for read in reads.reads:
        if read.state == "posted":
            read.copy()
            read.done()


def lie(reads: Manual) -> None:
    for read in reads.reads:
        read.done()


def test_stale_read_is_never_used(manual: tuple[Pair, Manual], oracle: Oracle) -> None:
    """The lease ends and the memory gets a new owner before the read copies: what was read is given up, the request starts
    over from what is held here, and no token is wrong or sent twice."""
    pair, reads = manual
    p = prompt(1, 150)
    id = pair.submit(p, max_tokens=NEW)
    settle(pair, lambda: len(pair.results[id].tokens) == 1 and len(reads.reads) >= 1)
    pair.end_lease(id)
    pair.prefill.flush()
    for i in range(3):  # new owners overwrite what the lease held
        pair.prefill.local(prompt(20 + i, 300), max_tokens=2)
    settle(pair, lambda: finish_reads(reads) or not pair.open)
    assert len(pair.lost[id]) == 1 and "lease" in pair.lost[id][0]
    assert (pair.results[id].error, pair.results[id].tokens) == ("", oracle(p, NEW))
    settle(pair, pair.quiet)
    pair.close()


def test_late_write_finds_its_memory_still_doomed(manual: tuple[Pair, Manual], oracle: Oracle) -> None:
    """Cancelled while a read is out: its memory serves nobody until the read is terminal, however late that is."""
    pair, reads = manual
    id = pair.submit(prompt(1, 150), max_tokens=NEW)
    settle(pair, lambda: len(reads.reads) >= 1)
    late = list(reads.reads)
    pair.relay_decode(pair.decode.turn(base.Cancel(id)))
    assert doomed(pair.decode) == 4  # 3 blocks and the slot
    other = prompt(2, 180)
    assert pair.decode.local(other, max_tokens=NEW).tokens == oracle(other, NEW)
    for read in late:
        read.copy()  # the late write
    assert pair.decode.local(other, max_tokens=NEW).tokens == oracle(other, NEW)
    assert doomed(pair.decode) == 4
    for read in late:
        read.done()
    settle(pair, pair.quiet)
    pair.close()


def test_read_that_never_ends_stays_counted_until_the_agent_is_gone(manual: tuple[Pair, Manual]) -> None:
    pair, reads = manual
    id = pair.submit(prompt(1, 150), max_tokens=NEW)
    settle(pair, lambda: len(reads.reads) >= 1)
    pair.relay_decode(pair.decode.turn(base.Cancel(id)))
    for _ in range(5):
        pair.decode.turn()
    assert doomed(pair.decode) == 4
    pair.decode.close()
    pair.decode.turn()
    assert doomed(pair.decode) == 0
    assert [r.copy() for r in reads.reads] == [0] * len(reads.reads)  # and it writes no more
    pair.prefill.close()


@pytest.mark.parametrize("end", ["done", "fail"])
def test_a_read_that_ends_after_its_handoff_was_lost_gives_its_memory_back(
    manual: tuple[Pair, Manual], oracle: Oracle, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """The request waits for its next attempt meanwhile, with no hand-off at all."""
    pair, reads = manual
    p = prompt(1, 150)
    id = pair.submit(p, max_tokens=NEW)
    settle(pair, lambda: len(reads.reads) >= 1)
    lost = pair.decode.turn(base.HandoffFailed(id, "handoff_failed", "the session was lost"))
    assert pair.decode.engine.sequences[id].intake is None
    assert doomed(pair.decode) == 4  # 3 blocks and the slot
    for read in reads.reads:
        read.copy()
        read.done() if end == "done" else read.fail("link down")
    settle(pair, lambda: doomed(pair.decode) == 0)
    assert [r.message for r in caplog.records if r.levelname == "ERROR"] == []
    pair.relay_decode(lost)
    settle(pair, lambda: finish_reads(reads) or not pair.open)
    assert (pair.results[id].error, pair.results[id].tokens) == ("", oracle(p, NEW))
    settle(pair, pair.quiet)
    pair.close()


def test_a_request_survives_a_raising_read(manual: tuple[Pair, Manual], oracle: Oracle) -> None:
    pair, reads = manual
    id = pair.submit(prompt(1, 150), max_tokens=NEW)
    settle(pair, lambda: len(reads.reads) >= 1)
    reads.reads[0].fail("remote disconnected")
    settle(pair, lambda: finish_reads(reads) or not pair.open)
    assert len(pair.lost[id]) == 1 and "remote disconnected" in pair.lost[id][0]
    assert (pair.results[id].error, pair.results[id].tokens) == ("", oracle(prompt(1, 150), NEW))
    settle(pair, pair.quiet)
    p = prompt(2, 90)
    again = pair.submit(p, max_tokens=NEW)
    settle(pair, lambda: finish_reads(reads) or not pair.open)
    assert pair.results[again].tokens == oracle(p, NEW)
    pair.close()


def test_done_without_a_copy_is_caught_by_checksums(model: HybridModel, oracle: Oracle) -> None:
    """Hardware that lies, each time: with verify=checksum a READ that reports DONE too early is given up; after two lost
    hand-offs the decode worker computes by itself."""
    reads = Manual()
    pair = Pair.build(model, reads, verify="checksum")
    id = pair.submit(prompt(1, 150), max_tokens=NEW)
    settle(pair, lambda: lie(reads) or not pair.open)
    assert len(pair.lost[id]) == 2 and all("crc32" in why for why in pair.lost[id])
    assert (pair.results[id].error, pair.results[id].tokens) == ("", oracle(prompt(1, 150), NEW))
    settle(pair, pair.quiet)
    pair.close()


def test_checksums_pass_when_all_is_well(model: HybridModel, oracle: Oracle) -> None:
    pair = Pair.build(model, verify="checksum")
    for n in (1, 64, 150):
        assert pair.remote(prompt(n, n), max_tokens=NEW).tokens == oracle(prompt(n, n), NEW)
    pair.close()


# ---- cancel, refusal, failure: everything is given back ----


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6, 8, 12])
def test_cancel_after_any_number_of_turns(model: HybridModel, oracle: Oracle, turns: int) -> None:
    pair = Pair.build(model, chunk_tokens=64, step_tokens=64)
    p = prompt(1, 300)
    id = pair.submit(p, max_tokens=200)
    pair.drive(turns=turns)
    pair.relay_decode(pair.decode.turn(base.Cancel(id)))
    settle(pair, pair.quiet)
    got = pair.results[id].tokens
    assert got == oracle(p, 200)[: len(got)]
    assert pair.remote(p, max_tokens=NEW).tokens == oracle(p, NEW)  # what it left in the caches is right
    pair.close()


def test_what_never_fits_is_refused_with_the_numbers(pair: Pair) -> None:
    too_long = prompt(1, 64 * 70)
    result = pair.decode.local(too_long, max_tokens=NEW)
    assert f"{64 * 70} prompt tokens + max_tokens {NEW} exceed" in result.error
    assert pair.decode.quiet()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, VOCAB]}, f"vocabulary ends at {VOCAB - 1}"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 100_000}, "exceed"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_bad_requests_are_refused_by_name(pair: Pair, change: dict[str, object], says: str) -> None:
    values = {"prompt": [1, 2, 3], "max_tokens": NEW, **change}
    result = pair.decode.local(values.pop("prompt"), **values)  # type: ignore[arg-type]
    assert says in result.error
    assert pair.decode.quiet()
    assert not pair.decode.local([1, 2, 3]).error


def test_a_failing_step_ends_its_requests_only(pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prompt(1, 100)

    class Broken:
        def forward(self, *_: object) -> None:
            raise RuntimeError("device fault")

    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.engine.runner, "model", Broken())
        assert "device fault" in pair.decode.local(p).error
    assert pair.decode.quiet()
    assert pair.decode.local(p, max_tokens=NEW).tokens == oracle(p, NEW)


def test_handoff_without_memory_ends_after_a_bounded_wait(model: HybridModel) -> None:
    pair = Pair.build(model, max_running=1, checkpoint_slots=1, reserve_wait_s=0.2)
    blocker = request("blocker", prompt(9, 50), pair.decode.root, max_tokens=1500)
    pair.results["blocker"] = Result()
    pair.decode.turn(base.Submit(blocker, Mode.LOCAL))
    id = pair.submit(prompt(1, 100), max_tokens=NEW)
    settle(pair, lambda: id not in pair.open)
    assert "no memory for" in pair.results[id].error or "within" in pair.results[id].error
    pair.decode.turn(base.Cancel("blocker"))
    settle(pair, pair.quiet)
    pair.close()


def test_submission_is_idempotent(pair: Pair) -> None:
    req = request("same", prompt(1, 40), pair.decode.root)
    pair.decode.turn(base.Submit(req, Mode.LOCAL), base.Submit(req, Mode.LOCAL))
    assert len(pair.decode.engine.sequences) == 1


def test_messages_for_unknown_requests_are_ignored(pair: Pair) -> None:
    for command in (base.Cancel("x"), base.Confirm("x"), base.RunLocal("x"), base.EndLease("x")):
        pair.decode.turn(command)
    assert pair.decode.quiet()


def test_claims_behind_a_large_head_do_not_block_it(model: HybridModel, oracle: Oracle) -> None:
    """Queued requests keep their hits alive; where those hits are the memory that the head needs, the head still runs."""
    layout = model.layout
    pair = Pair.build(
        model, max_running=2, checkpoint_slots=2, cache_bytes=4 * layout.slot_bytes + 6 * layout.block_bytes
    )
    decode = pair.decode
    warm = [prompt(1, 130), prompt(2, 130)]  # 2 full blocks each, 5 of 6 blocks cached
    for p in warm:
        decode.local(p, max_tokens=2)
    head = prompt(3, 330)
    claims = [request(f"c{i}", p, decode.root, max_tokens=NEW) for i, p in enumerate([head, *warm])]
    results = {r.id: Result() for r in claims}
    notices = decode.turn(*(base.Submit(r, Mode.CLAIM) for r in claims))
    notices += decode.turn(*(base.RunLocal(r.id) for r in claims))
    for _ in range(200):
        for notice in notices:
            if getattr(notice, "id", "") in results:
                collect(results, notice)
        notices = decode.turn()
    assert [r.tokens for r in results.values()] == [oracle(p, NEW) for p in (head, *warm)]
    assert decode.quiet()
    pair.close()


@pytest.mark.parametrize("after_first_token", [False, True], ids=["before the first token", "after it"])
@pytest.mark.parametrize("loss", ["prefill worker is gone", "read fails"])
def test_recovery_neither_repeats_nor_changes_a_token(
    manual: tuple[Pair, Manual], oracle: Oracle, after_first_token: bool, loss: str
) -> None:
    """Sampled too: what the client has is a forced prefix, and positions go on counting."""
    pair, reads = manual
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    p = prompt(4, 150)
    want = pair.prefill.local(p, **params).tokens
    pair.prefill.flush()
    id = pair.submit(p, **params)
    if after_first_token:
        settle(pair, lambda: len(pair.results[id].tokens) == 1 and bool(reads.reads))
    elif loss == "read fails":
        settle(pair, lambda: bool(reads.reads))
    if loss == "read fails":
        reads.reads[-1].fail("link down")
    else:
        pair.decode.inbox.put(base.HandoffFailed(id, "handoff_failed", "the session was lost"))
    settle(pair, lambda: finish_reads(reads) or not pair.open)
    assert len(pair.lost[id]) == 1
    assert (pair.results[id].error, pair.results[id].tokens) == ("", want)
    settle(pair, pair.quiet)
    pair.close()


def test_a_first_token_that_overtakes_the_loss_is_forced(manual: tuple[Pair, Manual], oracle: Oracle) -> None:
    """The front forwarded it before it learnt that the engine had given the hand-off up."""
    pair, _ = manual
    p = prompt(5, 100)
    want = oracle(p, NEW)
    decode = pair.decode
    req = request("late", p, decode.root, max_tokens=NEW)
    pair.results["late"] = Result()
    decode.turn(base.Submit(req, Mode.CLAIM))
    decode.turn(base.PullFrom("late", pair.prefill.peer))
    notices = decode.turn(base.HandoffFailed("late", "handoff_failed", "lost"))
    assert [type(n) for n in notices] == [base.HandoffLost, base.Matched]
    decode.turn(base.FirstTokenArrived("late", base.Sample(want[0])), base.HandoffFailed("late", "x", "stale"))
    tokens: list[int] = []
    notices = decode.turn(base.RunLocal("late"))
    for _ in range(50):
        tokens += [s.token_id for n in notices if isinstance(n, base.Generated) for s in n.samples]
        notices = decode.turn()
    assert tokens == want[1:]
    assert decode.quiet()
    pair.close()
