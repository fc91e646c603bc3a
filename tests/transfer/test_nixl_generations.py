"""A stopped peer and a new generation, with real NIXL over TCP between processes: its read never ends by itself, the other
peer is read all the while, and what was doomed is free again."""

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.transfer.nixl_peer import BLOCK_BYTES, SLOT_BYTES
from tests.transfer.test_nixl import GEOMETRY, Peer
from twinflow.cache.arena import Arena
from twinflow.cache.base import Holding, SlotId
from twinflow.cache.hybrid import HybridCache
from twinflow.contracts.groups import CacheLayout, GroupKind, GroupSpec, TensorSpec
from twinflow.contracts.hashing import TokenChain, pack_tokens, root_hash
from twinflow.transfer.base import GenerationClosed, GenerationOpened, PeerArena, PullFinished
from twinflow.transfer.generations import RenewalLimits
from twinflow.transfer.nixl import NixlTransport, agent_name
from twinflow.transfer.plan import plan_pull
from twinflow.transfer.thread import TransferThread

pytest.importorskip("nixl")
pytestmark = pytest.mark.timeout(120)

BLOCK_TOKENS = 64
BLOCKS = 200  # of one pull: 19 MiB
LAYOUT = CacheLayout(
    "test",
    (
        GroupSpec(
            "attention",
            GroupKind.ATTENTION,
            (0,),
            (TensorSpec("k", (1, 192), "float32"), TensorSpec("v", (1, 192), "float32")),
            BLOCK_TOKENS,
        ),
        GroupSpec("state", GroupKind.STATE, (1,), (TensorSpec("temporal", (160, 1024), "float32"),)),
    ),
)


class Decode:
    """The reader: the cache whose memory is at stake, and the transfer thread."""

    def __init__(self, limits: RenewalLimits) -> None:
        assert (LAYOUT.block_bytes, LAYOUT.slot_bytes) == (BLOCK_BYTES, SLOT_BYTES)
        self.arena = Arena(LAYOUT, GEOMETRY)
        self.cache = HybridCache(LAYOUT, GEOMETRY, self.arena)
        self.events: queue.Queue[object] = queue.Queue()
        self.incarnation = str(time.monotonic_ns())
        self.thread = TransferThread(self.open(1), self.events.put, reopen=self.open, limits=limits)
        self.pinned: dict[str, Holding] = {}
        self.seen: list[object] = []

    def open(self, number: int) -> NixlTransport:
        return NixlTransport(agent_name("decode-0", self.incarnation, number), self.arena.storage)

    def pull(self, id: str, peer: PeerArena, blocks: int = BLOCKS) -> Holding:
        """As a hand-off does it: memory for the request, pinned, posted."""
        chain = TokenChain(root_hash(id), BLOCK_TOKENS, pack_tokens(range(blocks * BLOCK_TOKENS)))
        holding = self.cache.hold_prefix(chain)
        assert self.cache.complete(holding, len(chain)) and holding.slot is not None
        self.cache.pin_io(holding.blocks, [holding.slot])
        self.pinned[id] = holding
        pairs = [(i, b) for i, b in enumerate(holding.blocks)]
        self.thread.pull(id, peer.key, plan_pull(GEOMETRY, peer, pairs, [(0, holding.slot)]))
        return holding

    def cancel(self, id: str) -> None:
        self.thread.cancel(id)
        self.cache.release(self.pinned[id], donate=False)

    def until(self, condition: Callable[[], bool], within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"never happened; seen {self.seen}"
            try:
                event = self.events.get(timeout=0.02)
            except queue.Empty:
                continue
            self.seen.append(event)
            if isinstance(event, PullFinished):
                holding = self.pinned[event.pull_id]
                assert holding.slot is not None
                self.cache.unpin_io(holding.blocks, [SlotId(holding.slot)])
                self.cache.check_integrity()

    def of(self, kind: type) -> list:
        return [e for e in self.seen if isinstance(e, kind)]

    def finished(self, id: str) -> bool:
        return any(e.pull_id == id for e in self.of(PullFinished))

    def ok(self, id: str) -> bool:
        return any(e.pull_id == id and e.ok for e in self.of(PullFinished))

    @property
    def doomed_bytes(self) -> int:
        counts = self.cache.counts()
        return counts["attention"].doomed * BLOCK_BYTES + counts["state"].doomed * SLOT_BYTES

    def total(self) -> None:
        for name, c in self.cache.counts().items():
            assert c.free + c.cached + c.held + c.doomed == c.total, (name, c)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Peer, Peer]]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    p, q = Peer("tcp", "p1", seed=1), Peer("tcp", "q1", seed=2)
    yield p, q
    p.stop()
    q.stop()


@pytest.mark.parametrize("bound", ["bytes", "age"])
def test_a_stopped_peer_costs_a_generation_and_nothing_else(peers: tuple[Peer, Peer], bound: str) -> None:
    p, q = peers
    limits = RenewalLimits(doomed_bytes=1 << 20, drain_s=5.0)
    if bound == "age":
        limits = RenewalLimits(doomed_s=1.5, drain_s=5.0)
    d = Decode(limits)
    try:
        for peer in (p, q):
            d.thread.connect(peer.arena)
        d.pull("warm-p", p.arena, 1)
        d.pull("warm-q", q.arena, 1)
        d.until(lambda: d.ok("warm-p") and d.ok("warm-q"))
        p.pause()
        stuck = d.pull("stuck", p.arena)
        d.until(lambda: d.thread.in_flight.posts > 0)
        time.sleep(0.3)
        d.until(lambda: True)
        assert not d.finished("stuck"), "the read stays where it is"
        cancelled = time.monotonic()
        d.cancel("stuck")
        assert d.doomed_bytes == BLOCKS * BLOCK_BYTES + SLOT_BYTES
        d.total()
        served = 0
        while not d.of(GenerationClosed):  # the other peer is read before, during and after the change
            served += 1
            d.pull(f"q{served}", q.arena, 20)
            d.until(lambda n=served: d.finished(f"q{n}"))
            assert d.ok(f"q{served}"), d.seen[-1]
            got = d.arena.storage[GEOMETRY.block_offset(d.pinned[f"q{served}"].blocks[0]) :][:BLOCK_BYTES]
            assert torch.equal(got, q.bytes[:BLOCK_BYTES])
            d.cancel(f"q{served}")
            assert time.monotonic() < cancelled + 20
        took = time.monotonic() - cancelled
        (closed,) = d.of(GenerationClosed)
        assert closed == GenerationClosed(1, 1, BLOCKS * BLOCK_BYTES + SLOT_BYTES)
        assert [o.generation for o in d.of(GenerationOpened)] == [2]
        d.cancel("warm-p")
        d.cancel("warm-q")
        assert all(c.held == c.doomed == c.pinned_by_io == 0 for c in d.cache.counts().values())
        d.total()
        print(f"\n{bound}: free again {took:.2f} s after it was given up, {served} reads from the other peer meanwhile")
        d.arena.block_bytes(stuck.blocks[0]).fill_(7)
        os.kill(p.process.pid or 0, signal.SIGCONT)  # the late write that must not come
        time.sleep(0.3)
        assert bool((d.arena.block_bytes(stuck.blocks[0]) == 7).all())
        d.pull("after", q.arena, 20)
        d.until(lambda: d.ok("after"))
        d.cancel("after")
    finally:
        d.thread.close()
    assert d.thread.in_flight.posts == 0


@pytest.mark.parametrize("tls", [None, "tcp"], ids=["default", "tcp"])
def test_a_peer_with_a_new_agent_is_read_through_either(monkeypatch: pytest.MonkeyPatch, tls: str | None) -> None:
    """Until it closes the old one: over TCP, reads through that end in an error then. The new one goes on."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    p, d = Peer(tls, "p1", seed=1), Decode(RenewalLimits())
    try:
        d.thread.connect(p.arena)
        d.pull("old", p.arena, 20)
        d.until(lambda: d.ok("old"))
        d.cancel("old")
        p.conn.send("renew")
        renewed: PeerArena = p.conn.recv()
        assert (renewed.generation, renewed.agent_name) == (2, "prefill-0/p1/2")
        d.thread.connect(renewed)
        for id, arena in (("new", renewed), ("old again", p.arena), ("new again", renewed)):
            d.pull(id, arena, 20)
            d.until(lambda n=id: d.finished(n))
            assert d.ok(id), d.seen[-1]
            got = d.arena.storage[GEOMETRY.block_offset(d.pinned[id].blocks[0]) :][:BLOCK_BYTES]
            assert torch.equal(got, p.bytes[:BLOCK_BYTES])
            d.cancel(id)
        p.conn.send("closed")
        assert p.conn.recv() == "closed"
        d.pull("too late", p.arena, 20)
        d.until(lambda: d.finished("too late"))
        assert d.ok("too late") == (tls is None), (
            "shared memory is read without the agent's help: only the lease refuses it"
        )
        d.thread.disconnect(p.arena.key)
        d.pull("on", renewed, 20)
        d.until(lambda: d.finished("on"))
        assert d.ok("on"), d.seen[-1]
        d.cancel("too late")
        d.cancel("on")
        assert all(c.held == c.doomed == c.pinned_by_io == 0 for c in d.cache.counts().values())
        d.total()
    finally:
        d.thread.close()
        p.stop()
