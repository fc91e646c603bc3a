"""A path of blocks goes at once: the same blocks in the same order as if each had been asked for by itself."""

import random
from collections import Counter

import pytest

from tests.cache.test_random_operations import Operations, run
from tests.cache.world import LARGE_STATE, World, make_geometry, make_layout
from twinflow.cache.base import BlockId
from twinflow.cache.events import EventLog
from twinflow.cache.eviction import Evictor
from twinflow.cache.hybrid import HybridCache
from twinflow.cache.pool import Pool, StepClock
from twinflow.cache.queue import Queue
from twinflow.cache.worth import Recency, Worth
from twinflow.contracts.checkpoints import CheckpointKind
from twinflow.contracts.events import EventKind
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash

HONEST = Evictor.evict_blocks
BLOCK_TOKENS = 4
ROOT = root_hash("paths")


def one_at_a_time(evictor, most, limit=None):
    return HONEST(evictor, 1, limit)


class NoCopies:
    def copy_slot(self, source: int, target: int) -> None: ...

    def copy_block(self, source: int, target: int) -> None: ...


class Traffic:
    """Prompts of up to 40 blocks in a cache for some 600, in which many of them begin alike. Some are received, off the stream,
    some computed here; some are turns of an earlier one. What a state is worth changes all the time."""

    def __init__(self, seed: int, policy: type[Worth] | type[Recency], kept: int) -> None:
        self.rng = random.Random(seed)
        layout = make_layout(BLOCK_TOKENS, LARGE_STATE)
        self.cache = HybridCache(layout, make_geometry(layout, 600, 12, 300), NoCopies(), policy)
        self.fingerprint = layout.fingerprint()
        self.kept = kept  # so many prompts are there to be continued
        self.prompts: list[list[int]] = []
        self.running = []
        self.events: list[tuple[EventKind, bytes, int]] = []

    def prompt(self) -> TokenChain:
        rng = self.rng
        old = rng.choice(self.prompts)[: rng.randrange(160)] if self.prompts and rng.random() < 0.4 else []
        tokens = (old + [rng.randrange(1000) for _ in range(rng.randrange(1, 100))])[:160]
        self.prompts = [*self.prompts, tokens][-self.kept :]
        return TokenChain(ROOT, BLOCK_TOKENS, pack_tokens(tokens))

    def come(self) -> None:
        cache, rng, chain = self.cache, self.rng, self.prompt()
        step = cache.begin_step()
        if rng.random() < 0.5:
            holding = cache.hold_prefix(chain)
            if not cache.complete(holding, len(chain) + 8):
                cache.release(holding, donate=False)
                holding = None
        else:
            holding = cache.reserve(chain, len(chain) + 8)
        if holding is not None:
            while holding.position < len(chain):
                cache.advance(holding, min(rng.randrange(8, 64), len(chain) - holding.position))
                cache.end_step(step)
                cache.commit(holding)
                if rng.random() < 0.5:
                    cache.checkpoint(holding, rng.choice(list(CheckpointKind)))
                step = cache.begin_step()
            self.running.append(holding)
        while len(self.running) > rng.randrange(4):
            cache.release(self.running.pop(rng.randrange(len(self.running))), donate=rng.random() < 0.8)
        cache.end_step(step)
        self.events += [event[1:] for event in cache.drain_events()]


@pytest.mark.parametrize("seed", range(3), ids=lambda s: f"seed{s}")
def test_a_path_at_once_is_one_block_after_the_other(monkeypatch, seed):
    """Where no priority falls by itself, so that it does not matter when the sweep comes by."""
    at_once, one_by_one = Traffic(seed, Recency, 40), Traffic(seed, Recency, 40)
    gone = 0
    for _ in range(200):
        at_once.come()
        monkeypatch.setattr(Evictor, "evict_blocks", one_at_a_time)
        one_by_one.come()
        monkeypatch.undo()
        assert at_once.events == one_by_one.events
        assert at_once.cache.counts() == one_by_one.cache.counts()
        gone += sum(kind == EventKind.BLOCK_REMOVED for kind, _, _ in at_once.events)
        at_once.events, one_by_one.events = [], []
    at_once.cache.check_integrity()
    assert gone > 1500


def test_nothing_goes_while_the_queue_knows_of_something_worth_less(monkeypatch):
    met: Counter[str] = Counter()
    honest = Queue.pass_through

    def pass_through(queue, ahead):
        offered = []
        known = [min(queue._heap.key(u), queue._key(u)) for u in queue._heap if queue._ready(u)]
        sure = [max(queue._heap.key(u), queue._key(u)) for u in queue._heap if queue._ready(u)]
        passed = honest(queue, (offered.append(each) or each for each in ahead))
        assert passed == [u for u, _ in offered[: len(passed)]] and len(offered) - len(passed) in (0, 1)
        assert all(key < first for _, key in offered[: len(passed)] for first in sure)
        for u, key in offered[len(passed) :]:
            assert u in queue and any(key >= first for first in known)
            met["ended by what goes before it"] += 1
        met["long" if len(passed) > 8 else "short"] += 1
        queue.check_order()
        return passed

    monkeypatch.setattr(Queue, "pass_through", pass_through)
    traffic = Traffic(0, Worth, 40)
    for _ in range(300):
        traffic.come()
    traffic.cache.check_integrity()
    assert all(met[what] >= 5 for what in ("long", "short", "ended by what goes before it")), met


def test_a_sweep_finds_what_is_worth_less_by_now():
    worth = {BlockId(u): (float(u), 0) for u in range(8)}
    queue = Queue(Pool("blocks", 8, BlockId, StepClock()), worth.__getitem__, lambda u: True)
    for u in worth:
        queue.offer(u)
    worth[BlockId(7)] = (0.5, 0)  # nobody says so
    queue.sweep(1000)
    assert [queue.pop() for _ in range(3)] == [0, 7, 1]


def test_each_block_that_goes_takes_a_look_at_one_that_stays(monkeypatch):
    looks: Counter[int] = Counter()
    honest = Queue.sweep

    def sweep(queue, times):
        looks[id(queue)] += times
        honest(queue, times)

    monkeypatch.setattr(Queue, "sweep", sweep)
    traffic = Traffic(0, Worth, 40)
    for _ in range(300):
        traffic.come()
    gone = Counter(kind for kind, _, _ in traffic.events)
    evictor = traffic.cache._evictor
    assert looks[id(evictor.block_queue)] >= gone[EventKind.BLOCK_REMOVED] > 1500
    assert looks[id(evictor.slot_queue)] >= gone[EventKind.CHECKPOINT_REMOVED] > 100


@pytest.mark.parametrize("seed", range(4), ids=lambda s: f"seed{s}")
def test_in_any_order_of_operations_the_same_events(monkeypatch, seed):
    told: dict[str, list[tuple[EventKind, bytes, int]]] = {}

    def events(way: str) -> list[tuple[EventKind, bytes, int]]:
        log = told[way] = []
        honest = EventLog.drain

        def drain(events_of):
            new = honest(events_of)
            log.extend(event[1:] for event in new)
            return new

        monkeypatch.setattr(EventLog, "drain", drain)
        if way == "one by one":
            monkeypatch.setattr(Evictor, "evict_blocks", one_at_a_time)
        run(seed, Operations(24, 3, 4, large_states=seed % 2 == 0))
        monkeypatch.undo()
        return log

    assert events("at once") == events("one by one")
    assert any(kind == EventKind.BLOCK_REMOVED for kind, _, _ in told["at once"])


def test_a_path_ends_below_what_is_held_shared_or_carries_a_state(monkeypatch):
    gone = []
    monkeypatch.setattr(
        Evictor, "evict_blocks", lambda e, most, limit=None: gone.append(HONEST(e, most, limit)) or gone[-1]
    )
    world = World(blocks=16, slots=8)
    first = world.reserve(world.chain(range(32)), 0)
    world.feed(first, 8)
    assert world.checkpoint(first)  # at the end of the second block
    world.feed(first)
    world.release(first, donate=False)
    held = world.hold_prefix(world.chain(range(4)))
    world.reserve(world.chain([90] * 60), 0)
    world.check()
    assert gone == [6, 1]  # down to the block with the state, which goes by itself; the first is held
    assert world.cache.match(world.chain(range(32))).attention_tokens == 4
    world.cache.release(held, donate=False)


def test_a_path_ends_where_a_slot_is_worth_less(monkeypatch):
    world = World(blocks=16, slots=4)
    lower = world.reserve(world.chain(range(32)), 0)
    world.feed(lower)
    world.release(lower, donate=False)
    upper = world.hold_prefix(world.chain(range(12)))  # the first three blocks are used once more
    world.cache.release(upper, donate=False)
    evictor, tree, chain = world.cache._evictor, world.cache._tree, world.chain(range(32))
    priority = [world.cache._policy.block(tree.names.find(name)) for name in chain.block_hashes]
    assert priority[2] > priority[3] == priority[7]
    assert evictor.evict_blocks(16, priority[3]) == 5
    world.check()
    assert evictor.evict_blocks(16, priority[3]) == 1  # the first one asked for goes in any case
    assert evictor.evict_blocks(16, priority[0]) == 2
    assert evictor.evict_blocks(16) == 0
    world.check()
