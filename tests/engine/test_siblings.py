"""Prompts that begin alike and come together: what they share is computed once, moved once and held once."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Worker, request
from tests.models.tiny import prompt
from twinflow.contracts.hashing import TokenChain, pack_tokens
from twinflow.engine import base
from twinflow.engine.base import Mode
from twinflow.engine.sequence import Phase
from twinflow.engine.siblings import WORTH_TOKENS, shared_blocks
from twinflow.models.base import HybridModel
from twinflow.transfer.loopback import LoopbackNetwork, Manual

BLOCK = 64
PREFIX = prompt(1, 10 * BLOCK)
OWN = 70
PROMPTS = [PREFIX + prompt(100 + i, OWN) for i in range(5)]
NEW = 4


@pytest.mark.parametrize("shared", [0, 1, 63, 64, 65, 640, 700])
def test_shared_blocks_are_those_that_both_begin_with(shared: int) -> None:
    tokens = prompt(3, 700)
    other = tokens[:shared] + [t + 1 for t in tokens[shared:]]
    a, b = (TokenChain(b"root", BLOCK, pack_tokens(t)) for t in (tokens, other))
    assert shared_blocks(a, b) == shared_blocks(b, a) == shared // BLOCK
    assert shared_blocks(a, TokenChain(b"another", BLOCK, pack_tokens(tokens))) == 0


@pytest.mark.parametrize("chunk_tokens", [128, 512, 4096])
def test_a_burst_computes_its_prefix_once(model: HybridModel, oracle: Oracle, chunk_tokens: int) -> None:
    worker = Worker(model, "w", LoopbackNetwork(), chunk_tokens=chunk_tokens, step_tokens=chunk_tokens)
    requests = [request(worker.next_id(), p, worker.root, max_tokens=NEW) for p in PROMPTS]
    results = worker.run(requests)
    assert [results[r.id].tokens for r in requests] == [oracle(p, NEW) for p in PROMPTS]
    # A state is left behind where the prompts part, so that nothing of the prefix is computed again.
    assert worker.engine.runner.work.prefill_tokens == len(PREFIX) + len(PROMPTS) * OWN
    assert [results[r.id].stats.decode_resumed_tokens for r in requests] == [0] + [len(PREFIX)] * 4
    assert worker.quiet()
    worker.close()


def test_a_burst_moves_its_prefix_once_and_holds_it_once(model: HybridModel, oracle: Oracle) -> None:
    blocks = len(PREFIX) // BLOCK + len(PROMPTS) * 2 + 2
    budget = 14 * model.layout.slot_bytes + blocks * model.layout.block_bytes
    network = LoopbackNetwork()
    prefill = Worker(model, "prefill", network, chunk_tokens=128, step_tokens=128)
    pair = Pair(prefill, Worker(model, "decode", network, cache_bytes=budget))
    ids = [pair.submit(p, max_tokens=NEW) for p in PROMPTS]
    pair.drive()
    assert [pair.results[id].tokens for id in ids] == [oracle(p, NEW) for p in PROMPTS]
    assert not pair.lost
    stats = [pair.results[id].stats for id in ids]
    assert [s.route for s in stats] == ["remote"] * 5
    assert [s.blocks_moved for s in stats] == [12, 2, 2, 2, 2]
    assert [s.decode_attention_tokens for s in stats] == [0] + [len(PREFIX)] * 4
    assert pair.prefill.engine.runner.work.prefill_tokens == len(PREFIX) + len(PROMPTS) * OWN
    assert pair.quiet()
    pair.close()


def test_who_waits_for_a_sibling_asks_for_no_memory(model: HybridModel) -> None:
    reads = Manual()  # nothing is ever read
    pair = Pair.build(model, reads, chunk_tokens=128, step_tokens=128)
    for p in PROMPTS[:3]:
        pair.submit(p, max_tokens=NEW)
    loads = []
    for _ in range(20):
        pair.drive(turns=1)
        loads.append((pair.prefill.engine._load(), pair.decode.engine._load()))
    assert [s.phase for s in pair.decode.engine.sequences.values()] == [Phase.PULLING, Phase.WAITING, Phase.WAITING]
    assert {(p.waiting, d.waiting) for p, d in loads} == {(0, 0)}  # a router takes a worker with some for full
    assert max(p.queued_prefill_tokens for p, _ in loads) <= len(PROMPTS[0]) + 2 * OWN
    pair.close()


def test_nobody_waits_for_less_than_it_is_worth(model: HybridModel) -> None:
    prefix = prompt(2, WORTH_TOKENS // BLOCK * BLOCK - BLOCK)
    worker = Worker(model, "w", LoopbackNetwork())
    requests = [request(worker.next_id(), prefix + prompt(i, 80), worker.root, max_tokens=2) for i in (1, 2)]
    worker.turn(*(base.Submit(r, Mode.LOCAL) for r in requests))
    assert [s.phase for s in worker.engine.sequences.values()] == [Phase.RUNNING] * 2
    while not worker.quiet():
        pass
    worker.close()


def test_others_go_past_those_who_wait(model: HybridModel, oracle: Oracle) -> None:
    worker = Worker(model, "w", LoopbackNetwork(), chunk_tokens=64, step_tokens=256)
    siblings = [request(worker.next_id(), p, worker.root, max_tokens=NEW) for p in PROMPTS[:2]]
    other = request(worker.next_id(), prompt(9, 40), worker.root, max_tokens=NEW)
    tokens: dict[str, list[int]] = {r.id: [] for r in (*siblings, other)}
    told = worker.turn(*(base.Submit(r, Mode.LOCAL) for r in (*siblings, other)))
    phases = {s.id: s.phase for s in worker.engine.sequences.values()}
    assert phases == {siblings[0].id: Phase.RUNNING, siblings[1].id: Phase.WAITING, other.id: Phase.RUNNING}
    for _ in range(100):
        notices = worker.turn()
        for notice in told + notices:
            if isinstance(notice, base.Generated):
                tokens[notice.id] += [s.token_id for s in notice.samples]
        told = []
    assert tokens[other.id] == oracle(prompt(9, 40), NEW)
    assert [tokens[r.id] for r in siblings] == [oracle(p, NEW) for p in PROMPTS[:2]]
    assert worker.quiet()
    worker.close()


@pytest.mark.parametrize("turns", [0, 1, 3, 8])
def test_when_the_first_one_leaves_the_next_one_takes_its_place(model: HybridModel, oracle: Oracle, turns: int) -> None:
    worker = Worker(model, "w", LoopbackNetwork(), chunk_tokens=64, step_tokens=64)
    requests = [request(worker.next_id(), p, worker.root, max_tokens=NEW) for p in PROMPTS[:3]]
    worker.turn(*(base.Submit(r, Mode.LOCAL) for r in requests))
    for _ in range(turns):
        worker.turn()
    notices = worker.turn(base.Cancel(requests[0].id))
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    for _ in range(200):
        for notice in notices:
            if isinstance(notice, base.Generated):
                tokens[notice.id] += [s.token_id for s in notice.samples]
        notices = worker.turn()
    assert [tokens[r.id] for r in requests[1:]] == [oracle(p, NEW) for p in PROMPTS[1:3]]
    computed = worker.engine.runner.work.prefill_tokens
    assert computed <= len(PREFIX) + 2 * OWN + (turns + 3) * 64  # at most what the first one had done was for nothing
    assert worker.quiet()
    worker.close()


def turns_with_all_read(pair: Pair, reads: Manual) -> Iterator[int]:
    """Turns until nothing is open; whatever is to be read is read before each."""
    for turn in range(20_000):
        if not pair.open:
            return
        for read in reads.reads:
            read.copy()
            read.done()
        pair.drive(turns=1)
        yield turn


@pytest.mark.parametrize("fails", [True, False], ids=["its-read-fails", "it-is-cancelled"])
def test_who_waits_for_a_hand_off_goes_on_without_it(model: HybridModel, oracle: Oracle, fails: bool) -> None:
    reads = Manual()
    pair = Pair.build(model, reads)
    ids = [pair.submit(p, max_tokens=NEW) for p in PROMPTS[:3]]
    for _ in range(2000):
        pair.drive(turns=1)
        if pair.decode.engine.sequences[ids[0]].phase is Phase.PULLING and reads.reads:
            break
    phases = [pair.decode.engine.sequences[id].phase for id in ids]
    assert phases[0] is Phase.PULLING and Phase.PULLING not in phases[1:]
    if fails:
        reads.reads.pop(0).fail("the link is down")
    else:
        pair.relay_decode(pair.decode.turn(base.Cancel(ids[0])))
    for _ in turns_with_all_read(pair, reads):
        pass
    assert not pair.open
    assert [pair.results[id].tokens for id in ids[1:]] == [oracle(p, NEW) for p in PROMPTS[1:3]]
    if fails:
        assert pair.results[ids[0]].tokens == oracle(PROMPTS[0], NEW)
    assert pair.quiet()
    pair.close()


def test_a_short_prompt_does_not_stand_for_the_rest_of_a_longer_one(model: HybridModel, oracle: Oracle) -> None:
    reads = Manual()
    pair = Pair.build(model, reads, chunk_tokens=128, step_tokens=256)
    prompts = [PREFIX + prompt(7, 1400), PROMPTS[0], PROMPTS[1]]
    ids = [pair.submit(p, max_tokens=NEW) for p in prompts]
    done: dict[str, int] = {}
    for turn in turns_with_all_read(pair, reads):
        for id in ids:
            if id not in pair.open:
                done.setdefault(id, turn)
    assert done[ids[1]] < done[ids[0]] and done[ids[2]] < done[ids[0]]
    assert [pair.results[id].tokens for id in ids] == [oracle(p, NEW) for p in prompts]
    assert not pair.lost
    assert pair.quiet()
    pair.close()


def test_without_a_prefix_cache_nobody_waits(model: HybridModel, oracle: Oracle) -> None:
    worker = Worker(model, "w", LoopbackNetwork(), prefix_cache=False, cache_bytes=16 << 20)
    requests = [request(worker.next_id(), p, worker.root, max_tokens=2) for p in PROMPTS[:2]]
    worker.turn(*(base.Submit(r, Mode.LOCAL) for r in requests))
    assert [s.phase for s in worker.engine.sequences.values()] == [Phase.RUNNING] * 2
    while not worker.quiet():
        pass
    worker.close()
