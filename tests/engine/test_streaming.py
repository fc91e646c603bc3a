"""A hand-off whose decode worker has no memory: it waits in line, all or none, for a bounded time, and the prefill worker
computes on all the while."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.conftest import Oracle
from tests.engine.harness import Pair, Worker
from tests.models.tiny import prompt
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash
from twinflow.engine import base
from twinflow.engine.pulls import Pulls
from twinflow.engine.sequence import Phase, Sequence
from twinflow.models.base import HybridModel
from twinflow.transfer.intake import Phase as IntakePhase
from twinflow.transfer.intake import Pull
from twinflow.transfer.loopback import LoopbackNetwork, Manual
from twinflow.transfer.thread import TransferThread

NEW = 4
BLOCKS = 12


class Tight:
    """A decode worker of 12 blocks and a prefill worker with plenty."""

    def __init__(self, model: HybridModel, chunk_tokens: int = 64, **config: Any) -> None:
        network, layout = LoopbackNetwork(), model.layout
        self.reads = Manual()
        chunks = {"chunk_tokens": chunk_tokens, "step_tokens": chunk_tokens}
        slots = {"max_running": 4, "checkpoint_slots": 1, "growth_tokens": 64}
        budget = 5 * layout.slot_bytes + BLOCKS * layout.block_bytes + 256
        decode = Worker(model, "decode", network, self.reads, cache_bytes=budget, **slots, **chunks, **config)
        self.pair = Pair(Worker(model, "prefill", network, **chunks), decode)

    def fill(self, blocks: int) -> None:
        """Somebody else has so many blocks of the decode worker."""
        holding = self.pair.decode.engine.cache.reserve(self.chain(prompt(90, blocks * 64)), blocks * 64)
        assert holding is not None
        self.held = holding

    def chain(self, tokens: list[int]) -> TokenChain:
        return TokenChain(root_hash("filler"), 64, pack_tokens(tokens))

    def free(self) -> None:
        self.pair.decode.engine.cache.release(self.held, donate=False)
        self.pair.decode.flush()

    def sequence(self, id: str) -> Sequence:
        return self.pair.decode.engine.sequences[id]

    def turns(self, n: int) -> None:
        self.pair.drive(turns=n)

    def settle(self, until: Callable[[], bool]) -> None:
        for _ in range(3000):
            if until():
                return
            for read in self.reads.reads:
                read.copy()
                read.done()
            self.pair.drive(turns=1)
        raise AssertionError("never got there")

    @property
    def work(self) -> int:
        return self.pair.prefill.engine.runner.work.prefill_tokens

    def blocks_held(self) -> int:
        return self.pair.decode.engine.cache.counts()["attention"].held


@pytest.fixture
def tight(model: HybridModel) -> Iterator[Tight]:
    tight = Tight(model)
    yield tight
    tight.pair.close()


def test_memory_is_taken_at_the_first_announcement(model: HybridModel) -> None:
    tight = Tight(model, chunk_tokens=16)
    id = tight.pair.submit(prompt(1, 300), max_tokens=NEW)
    tight.pair.relay_decode(tight.pair.decode.turn())
    assert tight.sequence(id).intake is not None and tight.blocks_held() == 0, "accepted, and nothing is announced"
    while not tight.blocks_held():
        assert tight.work < 300
        tight.turns(1)
    assert tight.work < 300, "while the prompt is being computed"
    assert tight.blocks_held() >= 5, "all that the request needs to run, at once"
    tight.settle(lambda: not tight.pair.open)
    tight.pair.close()


def test_no_memory_delays_the_pull_and_never_the_prefill(tight: Tight, oracle: Oracle) -> None:
    p = prompt(1, 300)
    tight.fill(BLOCKS - 2)
    id = tight.pair.submit(p, max_tokens=NEW)
    steps = 0
    while tight.work < 300:
        tight.turns(1)
        steps += 1
        assert steps < 40
    tight.turns(10)
    assert len(tight.pair.results[id].tokens) == 1, "the first token is there"
    prefill = tight.pair.prefill.engine.sequences[id]
    assert prefill.phase is Phase.LEASED
    waiting = tight.sequence(id)
    assert (waiting.phase, waiting.intake.phase) == (Phase.WAITING, IntakePhase.OPEN)
    assert tight.reads.reads == [] and tight.blocks_held() == BLOCKS - 2, "nothing was taken, nothing is read"
    another = tight.pair.prefill.local(prompt(5, 200), max_tokens=NEW)
    assert another.tokens == oracle(prompt(5, 200), NEW), "the prefill worker's steps go on"
    tight.free()
    tight.settle(lambda: not tight.pair.open)
    assert tight.pair.results[id].tokens == oracle(p, NEW)
    assert tight.pair.results[id].stats.extra[base.WAIT_S] > 0
    tight.settle(tight.pair.quiet)


def test_in_line_and_all_or_none(tight: Tight, oracle: Oracle) -> None:
    """The first in line is large, the one behind it would fit: it waits its turn, and the large one takes nothing before it
    can have everything."""
    large, small = prompt(1, 500), prompt(2, 70)
    tight.fill(BLOCKS - 4)
    first = tight.pair.submit(large, max_tokens=NEW)
    second = tight.pair.submit(small, max_tokens=NEW)
    for _ in range(60):
        tight.turns(1)
    assert all(len(tight.pair.results[id].tokens) == 1 for id in (first, second)), "both prompts are computed"
    assert [s.id for s in tight.pair.decode.engine.waiting] == [first, second]
    assert tight.blocks_held() == BLOCKS - 4 and tight.reads.reads == []
    tight.free()
    tight.settle(lambda: not tight.pair.open)
    assert tight.pair.results[first].tokens == oracle(large, NEW)
    assert tight.pair.results[second].tokens == oracle(small, NEW)
    tight.settle(tight.pair.quiet)


def test_the_wait_is_bounded_and_everything_comes_back(model: HybridModel, oracle: Oracle) -> None:
    tight = Tight(model, reserve_wait_s=0.2)
    tight.fill(BLOCKS - 1)
    id = tight.pair.submit(prompt(1, 200), max_tokens=NEW)
    tight.settle(lambda: id not in tight.pair.open)
    assert "no memory for" in tight.pair.results[id].error
    tight.free()
    tight.settle(tight.pair.quiet)
    tight.pair.submit(prompt(1, 200), max_tokens=NEW)
    tight.settle(lambda: not tight.pair.open)
    tight.settle(tight.pair.quiet)
    tight.pair.close()


def test_a_lease_is_not_held_by_who_waits_for_a_prompt(model: HybridModel) -> None:
    """A prefill worker that has no memory yet: its hand-off waits, nothing is announced, and a cancel leaves nothing."""
    tight = Tight(model)
    prefill = tight.pair.prefill
    chain = tight.chain(prompt(50, 64))
    blocks = prefill.engine.cache.counts()["attention"].total
    held = prefill.engine.cache.reserve(chain, (blocks - 1) * 64)
    assert held is not None
    id = tight.pair.submit(prompt(1, 300), max_tokens=NEW)
    tight.turns(20)
    assert prefill.engine.sequences[id].phase is Phase.WAITING
    assert tight.sequence(id).intake is not None and tight.blocks_held() == 0
    tight.pair.relay_decode(tight.pair.decode.turn(base.Cancel(id)))
    prefill.engine.cache.release(held, donate=False)
    tight.settle(tight.pair.quiet)
    tight.pair.close()


def test_after_the_last_chunk_only_that_chunk_and_a_slot_remain(tight: Tight) -> None:
    """Everything announced before has been read by the time the prompt is computed."""
    id = tight.pair.submit(prompt(1, 400), max_tokens=NEW)
    layout = tight.pair.decode.engine.model.layout

    def finished() -> bool:
        for read in tight.reads.reads:
            read.copy()
            read.done()
        intake = tight.sequence(id).intake
        return intake is not None and intake._finished

    for _ in range(2000):
        if finished():
            break
        tight.pair.relay_prefill(tight.pair.prefill.turn())
        for _ in range(5):
            tight.pair.relay_decode(tight.pair.decode.turn())
            finished()
    intake = tight.sequence(id).intake
    assert intake is not None
    left = 7 * layout.block_bytes + layout.slot_bytes - intake.moved.bytes
    assert left <= 2 * layout.block_bytes + layout.slot_bytes, "the last chunk is 64 tokens"
    tight.settle(lambda: not tight.pair.open)


def test_the_way_of_reads_is_woken_before_they_are_planned(model: HybridModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each announcement: what a pull is made of takes a moment to find out, and a sleeping device one to wake."""
    told: list[object] = []
    plan = Pulls._pull

    def planned(pulls: Pulls, sequence: Sequence, action: Pull) -> list[base.Notice]:
        told.append("planned")
        return plan(pulls, sequence, action)

    monkeypatch.setattr(TransferThread, "wake", lambda thread, key: told.append(key))
    monkeypatch.setattr(Pulls, "_pull", planned)
    pair = Pair.build(model, chunk_tokens=64, step_tokens=64)
    pair.decode.local(prompt(1, 100))
    assert not told, "nothing is read"
    pair.remote(prompt(2, 150))
    key = pair.prefill.peer.key
    assert told.count(key) == 3, "two full blocks, each with its chunk, then the tail with the slot"
    assert told[0] == key and told[-2:] == [key, "planned"]
    pair.close()
