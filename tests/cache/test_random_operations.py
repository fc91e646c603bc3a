"""All verbs in any order on tiny pools: integrity and content after each operation."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cache.world import LARGE_STATE, SMALL_STATE, World
from twinflow.cache.arena import ArenaGeometry
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.errors import TooLong
from twinflow.contracts.hashing import TokenChain
from twinflow.contracts.tags import StateTag

VOCAB = 2  # few tokens, so that prompts share prefixes and diverge inside blocks
MAX_IN_FLIGHT = 2


class Operations:
    """One method per operation; the arguments are plain ints, so that hypothesis and a seeded loop can both drive it."""

    def __init__(self, blocks: int, slots: int, block_floor: int | None = None, large_states: bool = False) -> None:
        state = LARGE_STATE if large_states else SMALL_STATE
        self.world = World(blocks, slots, block_floor=block_floor and min(block_floor, blocks), state=state)
        self.served: list[TokenChain] = []  # finished conversations, to be continued or branched
        self.sources: list[tuple[list[int], list[int], object]] = []  # reads that tiers have posted on published units

    def prompt(self, base: int, keep: int, tokens: list[int], tenant: int) -> TokenChain:
        """A new prompt, or a continuation of (part of) an earlier one."""
        names = ("", "other")
        if self.served and base:
            old = self.served[base % len(self.served)]
            kept = old.tokens(0, len(old) - keep % 3 if base % 2 else keep % (len(old) + 1))
            return TokenChain(old.root, old.block_tokens, self.world.chain(kept + tokens).packed())
        return self.world.chain(tokens, names[tenant % 2])

    def reserve(self, chain: TokenChain, extra: int) -> None:
        if len(chain) + extra > self.world.cache.max_request_tokens():
            with pytest.raises(TooLong):
                self.world.cache.reserve(chain, len(chain) + extra)
        else:
            self.world.reserve(chain, extra)

    def hold_prefix(self, chain: TokenChain) -> None:
        self.world.hold_prefix(chain)

    def complete(self, i: int, extra: int) -> None:
        for h in self.some(i, lambda h: h.slot is None):
            fits = 0 < len(h.chain) <= self.world.cache.max_request_tokens() - extra
            if fits and self.world.complete(h, extra) and extra % 2:
                self.world.take_checkpoint_slot(h, 1 + extra % len(h.chain))

    def extend(self, i: int, extra: int) -> None:
        for h in self.some(i, lambda h: h.slot is not None):
            if len(h.chain) + extra <= self.world.cache.max_request_tokens():
                self.world.extend(h, extra)
            else:
                with pytest.raises(TooLong):
                    self.world.cache.extend(h, len(h.chain) + extra)

    def receive(self, i: int) -> None:
        for h in self.some(i, self.receiving):
            n = len(h.chain)
            wrong = StateTag(h.chain.prefix_hash(n), n, "another model")
            with pytest.raises(ValueError, match="tagged"):
                self.world.cache.adopt(h, wrong)
            self.world.receive(h)

    def launch(self, i: int, count: int, tokens: list[int]) -> None:
        """A step over up to `count` running sequences: prefill chunks, or one generated token."""
        if len(self.world.in_flight) >= MAX_IN_FLIGHT:
            self.world.end_step()
        ready = [h for h in self.world.holdings if h.slot is not None and not self.receiving(h)]
        feeds = []
        for h in (ready[i % len(ready) :] + ready[: i % len(ready)])[:count] if ready else []:
            todo = len(h.chain) - h.position
            if not todo and len(h.chain) < len(h.blocks) * self.world.block_tokens:
                h.chain.append([tokens[0] % VOCAB])
                todo = 1
            if todo:
                feeds.append((h, 1 + tokens[-1] * len(tokens) % todo))
        self.world.step(feeds, [n for n in range(1, 12) if 1 << n % 4 & i])

    def end_step(self) -> None:
        if self.world.in_flight:
            self.world.end_step()

    def lend(self, i: int) -> None:
        for h in self.some(i, self.idle):
            at = self.world.cache.match(h.chain).checkpoints
            if h.checkpoint_slot is None and at:
                assert self.world.lend_checkpoint(h, at[i % len(at)]) is not None

    def take_spare(self, i: int) -> None:
        """A checkpoint besides the state at the end is on its way, too."""
        for h in self.some(i, self.receiving):
            if h.checkpoint_slot is None:
                self.world.take_checkpoint_slot(h, 1 + i % len(h.chain))

    def store_spare(self, i: int) -> None:
        for h in self.some(i, lambda h: ([], [h.checkpoint_slot]) in self.world.doomed_io):
            if not self.receiving(h) and not self.world.busy(h):
                self.world.store_checkpoint(h, 1 + i % h.written_tokens)

    def commit(self, i: int) -> None:
        for h in self.some(i, self.idle):
            self.world.cache.commit(h)

    def checkpoint(self, i: int) -> None:
        for h in self.some(i, self.idle):
            self.world.checkpoint(h)

    def finish(self, i: int) -> None:
        for h in self.some(i, self.idle):
            self.served.append(h.chain)
            self.world.release(h, donate=True)
            self.world.cache.release(h, donate=True)  # idempotent

    def cancel(self, i: int) -> None:
        for h in self.some(i, lambda h: True):
            self.world.release(h, donate=False)

    def fail(self, i: int) -> None:
        """What it has is not to be trusted: of its path stays what others hold, or what others hang below."""
        for h in self.some(i, lambda h: True):
            self.world.cache.withdraw(h)
            self.world.check()
            links, refs = self.world.cache._tree.links, self.world.cache._blocks.refs
            left = [b for b in h.blocks if self.world.cache._blocks.published[b]]
            assert all(refs[b] > 1 or links.has_children(b) for b in left)
            self.world.release(h, donate=False)

    def donate_unreceived(self, i: int) -> None:
        for h in self.some(i, self.receiving):
            self.world.release(h, donate=True)

    def scribble(self) -> None:
        self.world.scribble()

    def end_failed_io(self, i: int) -> None:
        held = {s for h in self.world.holdings for s in (h.slot, h.checkpoint_slot)}
        failed = [k for k, (_, slots) in enumerate(self.world.doomed_io) if slots[0] not in held]
        if failed:
            self.world.scribble()
            self.world.end_io(failed[i % len(failed)])

    def read_published(self, i: int) -> None:
        """A tier reads published units for a while: they must stay what they are."""
        tree, device = self.world.cache._tree, self.world.device
        if device.stream or not len(tree) or len(self.sources) > 2:
            return
        block = list(tree.blocks())[i % len(tree)]
        slots = sorted(tree.tails.saved)[i % 2 : i % 2 + 1]
        self.world.cache.pin_io([block], slots)
        self.sources.append(([block], slots, self.content([block], slots)))

    def end_read(self, i: int) -> None:
        if self.sources:
            blocks, slots, content = self.sources.pop(i % len(self.sources))
            assert self.content(blocks, slots) == content, "a unit changed while I/O read it"
            self.world.cache.unpin_io(blocks, slots)

    def flush(self) -> None:
        self.world.cache.flush((None, "attention", "state")[len(self.served) % 3])

    def settle(self) -> None:
        self.world.settle()

    def wind_down(self) -> None:
        """Everything ends: nothing may stay held or doomed, and the largest request fits."""
        while self.sources:
            self.end_read(0)
        for h in list(self.world.holdings):
            self.world.release(h, donate=not self.world.busy(h))
        self.world.settle()
        while self.world.doomed_io:
            self.world.scribble()
            self.world.end_io()
        self.world.check()
        for c in self.world.cache.counts().values():
            assert (c.held, c.doomed, c.pinned_by_io) == (0, 0, 0)
        assert self.world.replayed() == self.world.snapshot()
        chain = self.served[-1] if self.served else self.world.chain([])
        biggest = self.world.reserve(chain, self.world.cache.max_request_tokens() - len(chain))
        assert biggest is not None
        self.world.settle()
        self.world.release(biggest, donate=False)
        self.world.settle()
        self.world.cache.flush()
        self.world.check()
        for c in self.world.cache.counts().values():
            assert c.free == c.total
        self.world.check_split()
        tails = self.world.cache._tree.tails
        assert not any((tails.states, tails.saved, tails.partial, tails._partials, tails._carried))

    # -- choice

    def some(self, i, condition):
        matching = [h for h in self.world.holdings if condition(h)]
        return [matching[i % len(matching)]] if matching else []

    def receiving(self, h) -> bool:
        return h.slot is not None and any(h.slot in slots for _, slots in self.world.doomed_io)

    def idle(self, h) -> bool:
        return h.slot is not None and not self.receiving(h) and not self.world.busy(h)

    def content(self, blocks, slots):
        device = self.world.device
        assert not any(self.world.cache._blocks.is_free(b) for b in blocks)
        return [list(device.kv[b]) for b in blocks], [device.states[s] for s in slots]


INDEX = st.integers(0, 7)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=11)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(2, 9),
        slots=st.integers(1, 4),
        block_floor=st.one_of(st.none(), st.integers(1, 9)),
        large_states=st.booleans(),
    )
    def start(self, blocks, slots, block_floor, large_states):
        self.ops = Operations(blocks, slots, block_floor, large_states)

    @rule(base=INDEX, keep=INDEX, tokens=TOKENS, tenant=st.sampled_from([0, 0, 0, 1]), extra=INDEX)
    def reserve(self, base, keep, tokens, tenant, extra):
        self.ops.reserve(self.ops.prompt(base, keep, tokens, tenant), extra)

    @rule(base=INDEX, keep=INDEX, tokens=TOKENS)
    def hold_prefix(self, base, keep, tokens):
        self.ops.hold_prefix(self.ops.prompt(base, keep, tokens, 0))

    @rule(i=INDEX, extra=INDEX)
    def complete(self, i, extra):
        self.ops.complete(i, extra)

    @rule(i=INDEX, extra=INDEX)
    def extend(self, i, extra):
        self.ops.extend(i, extra)

    @rule(i=INDEX, count=st.integers(1, 3), tokens=TOKENS)
    def launch(self, i, count, tokens):
        self.ops.launch(i, count, tokens)

    @precondition(lambda self: self.ops.world.in_flight)
    @rule()
    def end_step(self):
        self.ops.end_step()

    @rule(
        name=st.sampled_from(["receive", "commit", "checkpoint", "finish", "cancel", "fail", "donate_unreceived"]),
        i=INDEX,
    )
    def on_one(self, name, i):
        getattr(self.ops, name)(i)

    @rule(name=st.sampled_from(["lend", "take_spare", "store_spare"]), i=INDEX)
    def beside(self, name, i):
        getattr(self.ops, name)(i)

    @rule(name=st.sampled_from(["end_failed_io", "read_published", "end_read"]), i=INDEX)
    def io(self, name, i):
        getattr(self.ops, name)(i)

    @rule(name=st.sampled_from(["scribble", "flush", "settle"]))
    def plain(self, name):
        getattr(self.ops, name)()

    @invariant()
    def holds(self):
        if hasattr(self, "ops"):
            self.ops.world.check()

    def teardown(self):
        if hasattr(self, "ops"):
            self.ops.wind_down()


CacheMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


NAMES = (
    ["reserve"] * 4
    + ["extend"] * 2
    + [
        "hold_prefix",
        "complete",
        "receive",
        "commit",
        "checkpoint",
        "finish",
        "finish",
        "cancel",
        "fail",
        "donate_unreceived",
    ]
    + ["launch"] * 4
    + ["end_step"] * 3
    + ["scribble", "end_failed_io", "read_published", "end_read", "settle", "lend", "lend", "take_spare"]
    + ["store_spare"] * 4
)


def run(seed: int, ops: Operations, steps: int = 250) -> list[int]:
    """A seeded run; returns by how many slots the boundary moved, one number for each move."""
    rng = random.Random(seed)
    moves = []
    for _ in range(steps):
        there = ops.world.cache.counts()["state"].total
        name = rng.choice(NAMES) if rng.random() > 0.01 else "flush"
        i = rng.randrange(8)
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        chain = ops.prompt(rng.randrange(8), rng.randrange(8), tokens, rng.randrange(8) == 0)
        if name in ("reserve", "hold_prefix"):
            getattr(ops, name)(chain, *([rng.randrange(8)] if name == "reserve" else []))
        elif name in ("complete", "extend"):
            getattr(ops, name)(i, rng.randrange(6 if name == "complete" else 24))
        elif name == "launch":
            ops.launch(i, rng.randrange(1, 4), tokens)
        elif name in ("end_step", "scribble", "flush", "settle"):
            getattr(ops, name)()
        else:
            getattr(ops, name)(i)
        ops.world.check()
        moves.append(ops.world.cache.counts()["state"].total - there)
    ops.wind_down()
    return [m for m in moves if m]


@pytest.mark.parametrize("seed", range(40), ids=lambda s: f"seed{s}")
def test_long_runs(seed):
    rng = random.Random(seed)
    assert run(seed, Operations(blocks=rng.choice([2, 3, 5, 8, 16]), slots=rng.choice([1, 2, 3, 5]))) == []


@pytest.mark.parametrize("seed", range(40), ids=lambda s: f"seed{s}")
def test_long_runs_with_a_boundary_that_moves(seed):
    rng = random.Random(seed)
    blocks, slots = rng.choice([2, 3, 5, 8, 16, 24]), rng.choice([1, 2, 3, 5])
    run(seed, Operations(blocks, slots, rng.choice([1, 2, 4]), large_states=seed % 2 == 0))


def test_in_long_runs_the_boundary_moves_both_ways():
    moves = [m for seed in range(8) for m in run(seed, Operations(20, 1, 2, large_states=True))]
    assert sum(m > 0 for m in moves) >= 4
    assert sum(m < 0 for m in moves) >= 4


def test_in_long_runs_steps_in_flight_leave_several_states_each(monkeypatch):
    opened = []
    honest = HybridCache.open_snapshots

    def count(cache, holding, cuts):
        before = len(holding.snapshots)
        slots = honest(cache, holding, cuts)
        opened.append((before, len(slots)))
        return slots

    monkeypatch.setattr(HybridCache, "open_snapshots", count)
    for seed in range(4):
        run(seed, Operations(24, 3, 2))
    assert sum(here > 1 for _, here in opened) >= 10
    assert sum(before > 0 and here > 0 for before, here in opened) >= 10


def test_the_model_sees_a_block_and_a_slot_on_the_same_bytes(monkeypatch):
    """A boundary that is one block too far: nothing but the content shows it here."""
    monkeypatch.setattr(HybridCache, "check_integrity", lambda cache: None)
    monkeypatch.setattr(World, "check_split", lambda world: None)
    honest = ArenaGeometry.blocks_beside
    monkeypatch.setattr(ArenaGeometry, "blocks_beside", lambda g, slots: min(g.blocks, honest(g, slots) + 1))

    def runs() -> None:
        for seed in range(10):
            run(seed, Operations(24, 2, 4, large_states=True))

    with pytest.raises(AssertionError, match=r"wrong KV|is not the state|of other tokens|does not carry|has changed"):
        runs()
