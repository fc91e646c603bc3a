"""Over ten thousand operations against a model of plain sets of tokens: what is hit is exactly what was kept and not evicted.

The model learns what goes from the events, so it says nothing about *what* is evicted; but that nothing is evicted without
need, and that everything else is hit, up to the last token of it.
"""

import random

import pytest

from tests.cache.world import make_geometry, make_layout
from twinflow.cache.base import BlockId, Holding
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.events import CacheEvent, EventKind
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash

BT = 4
VOCAB = 2
OPERATIONS = 2_200  # by each of the pools below

Path = tuple[str | int, ...]  # the tenant, then tokens


class NoCopies:
    def copy_slot(self, source: int, target: int) -> None: ...

    def copy_block(self, source: int, target: int) -> None: ...


class Oracle:
    """Knows tokens by their hashes. `carriers`: of a state inside a block, the paths of blocks that are known to begin so."""

    def __init__(self) -> None:
        self.paths: dict[bytes, Path] = {}
        self.blocks: set[Path] = set()
        self.carriers: dict[Path, set[Path]] = {}  # of all states; none for those at boundaries
        self.partials: dict[BlockId, Path] = {}

    def learn(self, chain: TokenChain, tenant: str) -> None:
        for p in range(len(chain) + 1):
            self.paths[chain.prefix_hash(p)] = (tenant, *chain.tokens(0, p))

    def apply(self, event: CacheEvent, own: Path) -> None:
        """`own`: all tokens of whoever caused it."""
        path = self.paths[event.prefix_hash]
        assert event.position == len(path) - 1
        match event.kind:
            case EventKind.BLOCK_STORED:
                self.add_block(path)
                assert path not in self.blocks and (len(path) - 1) % BT == 0
                self.blocks.add(path)
            case EventKind.BLOCK_REMOVED:
                self.blocks.remove(path)
                self.drop_block(path)
            case EventKind.CHECKPOINT_STORED:
                assert path not in self.carriers
                full = own[: 1 + -(-event.position // BT) * BT]
                known = {p for p in self.partials.values() if self.begins_with(p, path)}
                self.carriers[path] = (known | ({full} & self.blocks)) if event.position % BT else set()
            case EventKind.CHECKPOINT_REMOVED:
                del self.carriers[path]

    def add_block(self, path: Path) -> None:
        for state, carriers in self.carriers.items():
            if (len(state) - 1) % BT and self.begins_with(path, state):
                carriers.add(path)

    def drop_block(self, path: Path) -> None:
        for carriers in self.carriers.values():
            carriers.discard(path)

    def begins_with(self, block: Path, state: Path) -> bool:
        """Whether the last block of the path `block` has the tokens of `state` behind their common boundary."""
        return (len(block) - 2) // BT == (len(state) - 2) // BT and block[: len(state)] == state

    def match(self, path: Path) -> tuple[int, tuple[int, ...], int]:
        """(attention reach, checkpoints, usable tokens)."""
        tokens, full = len(path) - 1, 0
        while full + BT <= tokens and path[: 1 + full + BT] in self.blocks:
            full += BT
        reach = full
        for partial in self.partials.values():
            if partial[: 1 + full] == path[: 1 + full] and full < len(partial) - 1 < full + BT:
                shared = full
                while shared < min(tokens, len(partial) - 1) and partial[1 + shared] == path[1 + shared]:
                    shared += 1
                reach = max(reach, shared)
        points = tuple(p for p in range(1, tokens + 1) if path[: 1 + p] in self.carriers)
        reach = max([reach, *(p for p in points if full < p < full + BT and self.carriers[path[: 1 + p]])])
        return reach, points, max((p for p in points if p <= min(reach, tokens - 1)), default=0)


class Run:
    def __init__(self, seed: int, blocks: int, slots: int) -> None:
        self.rng = random.Random(seed)
        layout = make_layout(BT)
        self.cache = HybridCache(layout, make_geometry(layout, blocks, slots), NoCopies())
        self.oracle = Oracle()
        self.running: list[tuple[Holding, str]] = []
        self.past: list[Path] = []
        self.hits = self.evicted = 0

    def prompt(self) -> tuple[TokenChain, str]:
        """A new one, one that goes on from an earlier one, or one that parts from it."""
        rng, tenant = self.rng, self.rng.choice(["a", "a", "a", "b"])
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        if self.past and rng.random() < 0.7:
            tenant, *old = rng.choice(self.past[-20:])
            tokens = [*old[: rng.choice([len(old), len(old), rng.randrange(len(old) + 1)])], *tokens][:40]
        return TokenChain(root_hash("f", tenant), BT, pack_tokens(tokens)), tenant

    def step(self) -> None:
        rng, what = self.rng, self.rng.random()
        if what < 0.3 or not self.running:
            self.reserve()
        else:
            holding, tenant = rng.choice(self.running)
            if what < 0.55:
                self.feed(holding, tenant)
            elif what < 0.7:
                self.checkpoint(holding, tenant)
            elif what < 0.98:
                self.release(holding, tenant)
            else:
                self.cache.flush(rng.choice([None, "attention", "state"]))
                self.settle((), removes=True)
        self.check()

    def reserve(self) -> None:
        chain, tenant = self.prompt()
        self.oracle.learn(chain, tenant)
        path = (tenant, *chain.tokens())
        expected = self.oracle.match(path)
        total = len(chain) + self.rng.randrange(1, 6)
        if total > self.cache.max_request_tokens():
            return
        before = self.cache.counts()
        holding = self.cache.reserve(chain, total)
        if holding is None:
            return self.settle((), removes=False)
        reach, points, usable = expected
        assert holding.hit_checkpoints == points
        if holding.written_tokens == reach:  # else the block to copy from was needed itself
            assert holding.resumed_tokens == usable
        else:
            assert holding.written_tokens == reach // BT * BT and holding.resumed_tokens in (*points, 0)
        self.hits += holding.resumed_tokens > 0
        enough = before["attention"].free >= -(-total // BT) and before["state"].free
        removed = self.settle(path, removes=True)
        mine = [e for e in removed if self.oracle.paths[e.prefix_hash] == path[: 1 + holding.resumed_tokens]]
        assert not enough or removed == mine, "evicted without need"
        self.running.append((holding, tenant))

    def feed(self, holding: Holding, tenant: str) -> None:
        chain = holding.chain
        todo = len(chain) - holding.position
        if not todo:
            if len(chain) == len(holding.blocks) * BT:
                return
            chain.append([self.rng.randrange(VOCAB)])
            self.oracle.learn(chain, tenant)
            todo = 1
        self.cache.advance(holding, self.rng.randrange(1, todo + 1))
        self.cache.commit(holding)
        self.settle((tenant, *chain.tokens()), removes=False)

    def checkpoint(self, holding: Holding, tenant: str) -> None:
        path = (tenant, *holding.chain.tokens())
        here, room = path[: 1 + holding.position], self.cache.counts()["state"].free
        there = here in self.oracle.carriers
        stored = self.cache.checkpoint(holding)
        assert not (stored and (there or not holding.position))
        assert stored or there or not holding.position or not room, "a free slot, and the state is not kept"
        self.settle(path, removes=not room)
        assert (here in self.oracle.carriers) == (stored or there)

    def release(self, holding: Holding, tenant: str) -> None:
        path, at, end = (tenant, *holding.chain.tokens()), holding.position, holding.written_tokens
        donate = self.rng.random() < 0.8
        start = at // BT * BT
        self.cache.release(holding, donate=donate)
        self.settle(path, removes=False)
        self.running.remove((holding, tenant))
        if donate and at:
            self.past.append(path[: 1 + at])
            assert path[: 1 + at] in self.oracle.carriers, "the end of a request is not kept"
            end = min(end, start + BT)
            if start < end < start + BT and self.oracle.match(path[: 1 + start])[0] == start:
                self.donated(path[: 1 + end], holding.blocks[start // BT])
        unknown = set(self.cache._tree.blocks()) - set(self.oracle.partials)
        assert len(unknown) == len(self.oracle.blocks)

    def donated(self, path: Path, block: BlockId) -> None:
        """The tail block is kept unless something serves all of it already."""
        reach, _, _ = self.oracle.match(path)
        if reach < len(path) - 1:
            assert self.cache._tree.is_partial(block)
            self.oracle.add_block(path)
            self.oracle.partials[block] = path

    def settle(self, own: Path, *, removes: bool) -> list[CacheEvent]:
        """The oracle learns what has happened; returns what was removed."""
        for block in [b for b in self.oracle.partials if not self.cache._blocks.published[b]]:
            assert removes, "a partial block went in an operation that needs no room"
            self.oracle.drop_block(self.oracle.partials.pop(block))
        events = self.cache.drain_events()
        for event in events:
            self.oracle.apply(event, own)
        gone = [e for e in events if e.kind in (EventKind.BLOCK_REMOVED, EventKind.CHECKPOINT_REMOVED)]
        assert removes or not gone, "something went in an operation that needs no room"
        self.evicted += len(gone)
        return gone

    def check(self) -> None:
        chains = [self.prompt(), *((h.chain, tenant) for h, tenant in self.running[:2])]
        for chain, tenant in chains:
            found = self.cache.match(chain)
            expected = self.oracle.match((tenant, *chain.tokens()))
            assert (found.attention_tokens, found.checkpoints, found.usable_tokens) == expected


@pytest.mark.parametrize(
    ("seed", "blocks", "slots"),
    [(0, 12, 3), (1, 24, 6), (2, 60, 12), (3, 100, 60), (4, 24, 40)],
    ids=["tight", "small", "middle", "nothing is evicted for long", "many states"],
)
def test_what_is_hit_is_what_was_kept(seed, blocks, slots):
    run = Run(seed, blocks, slots)
    for step in range(OPERATIONS):
        run.step()
        if step % 8 == 0 or blocks < 50:
            run.cache.check_integrity()
    assert run.hits > OPERATIONS / 50
    assert run.evicted > OPERATIONS / 20
