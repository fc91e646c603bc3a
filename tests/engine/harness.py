"""Two engines in one thread, their fronts reduced to a relay: exact, repeatable hand-offs over the loopback transport.

pair = Pair.build(model)                       # prefill + decode, arenas full of NaN
tokens, stats = pair.remote(prompt)            # through both
tokens, stats = pair.decode.local(prompt)      # on one
"""

import queue
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from twinflow.cache.arena import Arena, ArenaGeometry
from twinflow.cache.hybrid import HybridCache
from twinflow.cache.private import PrivateCache
from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.requests import GenerateRequest, RequestStats, Sample, SamplingParams
from twinflow.contracts.workers import Role
from twinflow.engine import base
from twinflow.engine.base import Mode, Notice
from twinflow.engine.build import describe
from twinflow.engine.config import EngineConfig
from twinflow.engine.core import Engine, Inbound
from twinflow.engine.guides import Guides
from twinflow.grammar.base import Compiler
from twinflow.grammar.tokens import TokenCompiler
from twinflow.models.base import HybridModel
from twinflow.transfer.leases import LeaseTable, SessionKey
from twinflow.transfer.loopback import AtPoll, LoopbackNetwork, LoopbackTransport, Scheduler
from twinflow.transfer.thread import TransferThread

ATTEMPTS = 2  # lost hand-offs, then the decode worker computes by itself


def request(id: str, prompt: Iterable[int], root: bytes, **sampling: Any) -> GenerateRequest:
    params: dict[str, Any] = {"max_tokens": 8, "seed": 1, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(id, pack_tokens(prompt), SamplingParams(**params), root)


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    error: str = ""


class Worker:
    """One engine with a loopback transport; `turn` runs it once. `inbox` may be filled by the transfer thread."""

    def __init__(
        self, model: HybridModel, name: str, network: LoopbackNetwork, scheduler: Scheduler | None = None, **config: Any
    ) -> None:
        budget = 24 * model.layout.slot_bytes + 64 * model.layout.block_bytes
        values: dict[str, Any] = {"max_running": 8, "checkpoint_slots": 8, "cache_bytes": budget, **config}
        slots = values["max_running"] + values["checkpoint_slots"]
        geometry = ArenaGeometry.split(model.layout, values["cache_bytes"], slots)
        self.arena = Arena(model.layout, geometry)
        self.arena.storage.fill_(0xFF)  # NaN: what was never written must never be used
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.transport = LoopbackTransport(network, f"{name}/1/1", self.arena.storage, scheduler or AtPoll())
        settings = EngineConfig(model="", worker_id=name, incarnation="1", role=Role.BOTH, **values)
        thread = TransferThread(self.transport, self.inbox.put, serve=True)
        cache = (HybridCache if settings.prefix_cache else PrivateCache)(model.layout, geometry, self.arena)
        ready = describe(settings, model, self.arena, cache, self.transport)
        assert ready.arena is not None
        self.peer = replace(ready.arena, base_address=0)  # the loopback transport has offsets only
        self.grammars = TokenCompiler(model.vocab_size, model.eos_token_ids)
        compiler: Future[Compiler] = Future()
        compiler.set_result(self.grammars)
        rows = values["max_running"]
        guides = Guides(compiler, model.vocab_size, model.eos_token_ids, rows, "cpu", 2, done=self.inbox.put)
        self.engine = Engine(settings, model, self.arena, cache, thread, ready, guides)
        self.root = root_hash(model.layout.fingerprint())
        self.requests = 0

    def next_id(self) -> str:
        self.requests += 1
        return f"{self.peer.worker_id}-{self.requests}"

    def turn(self, *commands: Inbound) -> list[Notice]:
        """One turn with the inbox and `commands`; integrity is checked after it."""
        inbound: list[Inbound] = []
        while not self.inbox.empty():
            inbound.append(self.inbox.get())
        report = self.engine.turn([*inbound, *commands])
        self.engine.cache.check_integrity()
        return each(report.notices) if report else []

    def local(self, prompt: Iterable[int], *, forced: Iterable[int] = (), **sampling: Any) -> Result:
        req = request(self.next_id(), prompt, self.root, **sampling)
        req = GenerateRequest(req.id, req.prompt, req.sampling, req.root, pack_tokens(forced))
        return self.run([req])[req.id]

    def run(self, requests: list[GenerateRequest]) -> dict[str, Result]:
        """All of them at once, on this worker alone."""
        results = {r.id: Result() for r in requests}
        notices = self.turn(*(base.Submit(r, Mode.LOCAL) for r in requests))
        open_ = set(results)
        for _ in range(100_000):
            for notice in notices:
                collect(results, notice)
                if isinstance(notice, base.Done):
                    open_.discard(notice.id)
            if not open_:
                return results
            notices = self.turn()
        raise AssertionError(f"requests {open_} never ended")

    def flush(self) -> None:
        self.turn(base.Flush())

    def quiet(self) -> bool:
        """Nothing held, doomed or pinned."""
        self.turn()
        counts = self.engine.cache.counts().values()
        return not self.engine.sequences and all(c.held == c.doomed == c.pinned_by_io == 0 for c in counts)

    def close(self) -> None:
        self.engine.close()


def each(notices: Iterable[Notice]) -> list[Notice]:
    """Tokens that came together, request by request."""
    found: list[Notice] = []
    for n in notices:
        if isinstance(n, base.Continued):
            found += [base.Generated(id, (Sample(token),)) for id, token in zip(n.ids, n.token_ids, strict=True)]
        else:
            found.append(n)
    return found


def collect(results: dict[str, Result], notice: Notice) -> None:
    if isinstance(notice, base.Generated):
        results[notice.id].tokens += [s.token_id for s in notice.samples]
    elif isinstance(notice, base.Done):
        results[notice.id].stats = notice.stats
        results[notice.id].error = notice.error_message


class Pair:
    """A prefill and a decode worker and the messages between them, relayed in order. Leases as the real front keeps them."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill = prefill
        self.decode = decode
        self.session = SessionKey("decode", "1", 7)
        self.leases = LeaseTable("1", 1)
        self.leases.open_session(self.session)
        self.results: dict[str, Result] = {}
        self.open: set[str] = set()
        self.phase_of: dict[str, str] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.lost: dict[str, list[str]] = {}  # why hand-offs of a request failed

    @classmethod
    def build(cls, model: HybridModel, scheduler: Scheduler | None = None, **config: Any) -> "Pair":
        network = LoopbackNetwork()
        return cls(Worker(model, "prefill", network, **config), Worker(model, "decode", network, scheduler, **config))

    def remote(self, prompt: Iterable[int], **sampling: Any) -> Result:
        id = self.submit(prompt, **sampling)
        self.drive()
        return self.results[id]

    def submit(self, prompt: Iterable[int], **sampling: Any) -> str:
        req = request(self.decode.next_id(), prompt, self.decode.root, **sampling)
        self.results[req.id] = Result()
        self.open.add(req.id)
        self.requests[req.id] = req
        self.relay_decode(self.decode.turn(base.Submit(req, Mode.CLAIM)))
        return req.id

    def drive(self, turns: int = 100_000) -> None:
        """Until every request is over (or `turns` turns of both workers have run)."""
        for _ in range(turns):
            if not self.open:
                return
            self.relay_prefill(self.prefill.turn())
            self.relay_decode(self.decode.turn())
        if turns == 100_000:
            raise AssertionError(f"requests {self.open} never ended")

    def relay_decode(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            match notice:
                case base.HandoffLost(id):
                    self.lost.setdefault(id, []).append(notice.message)
                    self.end_lease(id)
                    forced = pack_tokens(self.results[id].tokens)
                    self.requests[id] = replace(self.requests[id], forced=forced)
                case base.Matched() if len(self.lost.get(notice.id, [])) >= ATTEMPTS:
                    self.decode.inbox.put(base.RunLocal(notice.id))
                case base.Matched():
                    self.phase_of[notice.id] = "open"
                    self.leases.grant(self.session, notice.id)
                    offer = base.Submit(self.requests[notice.id], Mode.OFFER, notice.hold_tokens)
                    self.decode.inbox.put(base.PullFrom(notice.id, self.prefill.peer))
                    self.relay_prefill(self.prefill.turn(offer))
                case base.PullDone(id, blocks, slots):
                    self.phase_of[id] = "pulled"
                    self.confirm(id, blocks, slots)
                case base.Done():
                    self.open.discard(notice.id)
                    self.end_lease(notice.id)
            collect(self.results, notice)

    def confirm(self, id: str, blocks: Iterable[int], slots: Iterable[int]) -> None:
        lease = self.leases.lease_of(self.session, id) or "none"
        verdict = self.leases.pulled(
            self.session, lease, incarnation="1", epoch=7, generation=1, blocks=blocks, slots=slots
        )
        if verdict.confirmed:
            self.prefill.inbox.put(base.EndLease(id))
            self.decode.inbox.put(base.Confirm(id))
        else:
            self.decode.inbox.put(base.HandoffFailed(id, "handoff_failed", verdict.message))

    def end_lease(self, id: str) -> None:
        lease = self.leases.lease_of(self.session, id)
        if lease is not None:
            self.leases.release(lease)
            self.relay_prefill(self.prefill.turn(base.EndLease(id)))

    def relay_prefill(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            send = self.decode.inbox.put
            match notice:
                case base.Offered(id, first, blocks, checksums):
                    self.offer(id, blocks)
                    send(base.BlocksAnnounced(id, first, blocks, checksums))
                case base.Generated(id, samples):
                    self.results[id].tokens.append(samples[0].token_id)
                    send(base.FirstTokenArrived(id, samples[0]))
                case base.Prefilled():
                    self.offer(notice.id, notice.blocks, (notice.slot,))
                    send(
                        base.PrefillFinished(
                            notice.id, notice.first_index, notice.blocks, notice.checksums, notice.slot,
                            notice.slot_checksum, notice.tag, notice.stats,
                        )
                    )  # fmt: skip
                case base.Done() if notice.error_reason:
                    send(base.HandoffFailed(notice.id, notice.error_reason, notice.error_message))

    def offer(self, id: str, blocks: Iterable[int], slots: Iterable[int] = ()) -> None:
        if lease := self.leases.lease_of(self.session, id):
            self.leases.offer(lease, blocks, slots)

    def quiet(self) -> bool:
        return self.prefill.quiet() and self.decode.quiet() and not len(self.leases)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
