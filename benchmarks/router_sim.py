"""Simulated workers for load on a router: the real session, registry and event protocol, no model, almost no CPU.

All requests of a worker advance together, one step message for all of them, as a real decode worker's do. What a reply says is
a function of its prompt and the position alone (`Script`), so that it can be checked token by token, and so that a reply that
moves to another worker goes on with the right token.

Used by `router_load` and `router_soak`, and by the tests of the router under load.
"""

import asyncio
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from grpc import aio
from tokenizers import Tokenizer

from twinflow.contracts.events import CacheEvent, EventColumns, EventKind
from twinflow.contracts.hashing import chain_hashes
from twinflow.contracts.workers import Load, Pace, Role, WorkerRecord
from twinflow.node.outbox import Outbox
from twinflow.node.registry.direct import DirectRegistration
from twinflow.rpc import channel, convert
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc

BLOCK_TOKENS = 64
HEARTBEAT_S = 0.5
PACE_EVERY_S = 0.25  # a router hears of steps at least so often
IDLE_S = 0.005  # between looks for something to do
SCRIPT_TOKENS = 65_536


class Script:
    """What replies say: tokens of whole ASCII text, from one long sequence at a place that the prompt tells."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        plain = [i for i in range(tokenizer.get_vocab_size()) if _plain(tokenizer, i)]
        self._ids: list[int] = np.random.default_rng(7).choice(plain, SCRIPT_TOKENS).tolist()
        self._tokenizer = tokenizer

    def start(self, prompt: bytes) -> int:
        """Where the reply to these packed ids begins."""
        return zlib.crc32(prompt) % SCRIPT_TOKENS

    def token(self, at: int) -> int:
        return self._ids[at % SCRIPT_TOKENS]

    def text(self, prompt: bytes, tokens: int) -> str:
        """Of the whole reply."""
        start = self.start(prompt)
        return self._tokenizer.decode([self.token(start + i) for i in range(tokens)])


def _plain(tokenizer: Tokenizer, id: int) -> bool:
    text = tokenizer.decode([id])
    return bool(text) and text.isascii() and text.isprintable()


@dataclass(frozen=True, slots=True)
class Pacing:
    """`first_at_once`: a reply's first token does not wait for a step."""

    step_s: float = 0.01
    tokens_per_step: int = 1
    first_at_once: bool = True
    first_after_s: float = 0.0  # as if a prompt took so long
    cache_blocks: int = 20_000  # what a worker holds; it tells what it stores and drops


@dataclass(slots=True)
class _Run:
    """One request; `at` = next place in the script, `left` = tokens to come, `gather` as in `Submit`."""

    id: str
    at: int
    left: int
    gather: int = 0
    samples: list[pb.Sample] = field(default_factory=list)  # not told yet
    begun: bool = False


@dataclass(slots=True)
class _Session:
    outbox: Outbox[pb.WorkerMessage]
    columns: bool  # its router reads tokens in them
    event_columns: bool  # and cache events
    runs: dict[str, _Run] = field(default_factory=dict)
    told_s: float = 0.0  # when its last message left


class SimWorker(rpc.WorkerServicer):
    """`start`, `register`, and in the end `stop`; `kill` ends its sessions in the middle of everything."""

    def __init__(self, id: str, model: str, script: Script, pacing: Pacing, incarnation: str = "1") -> None:
        self.record = WorkerRecord(
            id, incarnation, Role.DECODE, (), model, "f" * 32, 1 << 17, 1 << 17, BLOCK_TOKENS,
            False, Load(total_slots=4096, free_slots=4096), 1 << 21, 50 << 20,
        )  # fmt: skip
        self.pacing = pacing
        self.requests = 0
        self.own_s: list[float] = []  # of each request, from its arrival until its first token is on its way
        self._script = script
        self._sessions: list[_Session] = []
        self._cache: OrderedDict[bytes, int] = OrderedDict()  # block hash → tokens up to its end
        self._events: list[CacheEvent] = []
        self._sequence = 0
        self._pace = Pace(0, 0.0, 0, 0)
        self._made = 0  # tokens since the last load
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life ----

    async def start(self, *routers: str) -> None:
        self._server = channel.new_server()
        rpc.add_WorkerServicer_to_server(self, self._server)
        port = channel.bind(self._server, "127.0.0.1", 0)
        await self._server.start()
        self.record = replace(self.record, addresses=(f"127.0.0.1:{port}",))
        self._tasks = [asyncio.create_task(self._steps())]
        for router in routers:
            registration = DirectRegistration(router, lambda: self.record, interval_s=0.5, max_pause_s=0.2)
            self._tasks.append(asyncio.create_task(registration.run()))

    async def stop(self) -> None:
        """As a lost machine looks: whatever runs ends without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await channel.stop_server(self._server, 0)
        del self._server  # grpc wants its servers gone while their loop lives

    @property
    def running(self) -> int:
        return sum(len(s.runs) for s in self._sessions)

    @property
    def connected(self) -> bool:
        return bool(self._sessions)

    # ---- the service ----

    async def Serve(
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: "aio.ServicerContext[object, object]"
    ) -> AsyncIterator[pb.WorkerMessage]:
        hello = (await anext(request_iterator)).hello
        session = _Session(Outbox(), hello.columns, hello.event_columns)
        session.outbox.put(pb.WorkerMessage(hello=pb.WorkerHello(record=convert.record_to_pb(self.record), protocol=1)))
        self._sessions.append(session)
        self._send(session, pb.StepReport())  # its load
        helpers = [asyncio.create_task(self._read(request_iterator, session)), asyncio.create_task(_beat(session))]
        try:
            async for message in session.outbox:
                yield message
        finally:
            self._sessions.remove(session)
            for task in helpers:
                task.cancel()

    async def _read(self, messages: AsyncIterator[pb.RouterMessage], session: _Session) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(message.submit, session)
                case "cancel":
                    if session.runs.pop(message.cancel.id, None) is not None:
                        error = pb.Error(reason="cancelled", message="cancelled")
                        output = pb.Output(id=message.cancel.id, stats=_stats(), error=error)
                        self._send(session, pb.StepReport(outputs=[output]))
                case "resync":
                    stored = EventKind.BLOCK_STORED
                    snapshot = pb.Snapshot(sequence=self._sequence)
                    _tell_events(snapshot, session, [CacheEvent(0, stored, h, p) for h, p in self._cache.items()])
                    session.outbox.put(pb.WorkerMessage(snapshot=snapshot))
        session.outbox.close()

    def _submit(self, submit: pb.Submit, session: _Session) -> None:
        self.requests += 1
        came_s = time.perf_counter()
        forced = len(submit.forced) // 4
        at = self._script.start(submit.prompt) + forced
        run = _Run(submit.id, at, submit.sampling.max_tokens - forced, submit.gather_tokens)
        self._store(chain_hashes(submit.root, submit.prompt, BLOCK_TOKENS))
        self._pace = replace(self._pace, prefill_tokens=self._pace.prefill_tokens + len(submit.prompt) // 4)
        if self.pacing.first_after_s:
            asyncio.get_running_loop().call_later(self.pacing.first_after_s, self._begin, run, session)
        else:
            self._begin(run, session)
        self.own_s.append(time.perf_counter() - came_s)

    def _begin(self, run: _Run, session: _Session) -> None:
        if self.pacing.first_at_once:
            self._send(session, self._report([run], 1, session.columns))
        if run.left:
            session.runs[run.id] = run

    def _store(self, hashes: Sequence[bytes]) -> None:
        for i, h in enumerate(hashes):
            if h in self._cache:
                self._cache.move_to_end(h)
                continue
            self._cache[h] = (i + 1) * BLOCK_TOKENS
            self._tell(EventKind.BLOCK_STORED, h, self._cache[h])
            if len(self._cache) > self.pacing.cache_blocks:
                self._tell(EventKind.BLOCK_REMOVED, *self._cache.popitem(last=False))

    def _tell(self, kind: EventKind, prefix_hash: bytes, position: int) -> None:
        self._sequence += 1
        self._events.append(CacheEvent(self._sequence, kind, prefix_hash, position))

    # ---- steps ----

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self.running and not self._events:
                await asyncio.sleep(IDLE_S)
                due = loop.time()
                continue
            due = max(due + self.pacing.step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self._step()

    def _step(self) -> None:
        for session in self._sessions:
            step = self._report(session.runs.values(), self.pacing.tokens_per_step, session.columns)
            session.runs = {id: run for id, run in session.runs.items() if run.left}
            told = step.outputs or step.token_ids or self._events
            if told or time.monotonic() > session.told_s + PACE_EVERY_S:
                self._send(session, step)

    def _report(self, runs: Iterable[_Run], tokens: int, columns: bool) -> pb.StepReport:
        """So many more tokens of each, as far as they are told now."""
        step = pb.StepReport()
        for run in runs:
            count = min(tokens, run.left)
            run.left -= count
            run.samples += [pb.Sample(token_id=self._script.token(run.at + i)) for i in range(count)]
            run.at += count
            self._made += count
            if not run.left:
                run.samples[-1].finish = "length"
                step.outputs.append(pb.Output(id=run.id, samples=run.samples, stats=_stats()))
            elif not run.begun or len(run.samples) >= run.gather:
                if columns and run.gather <= 1:
                    step.token_requests.extend([run.id] * len(run.samples))
                    step.token_ids.extend(s.token_id for s in run.samples)
                else:
                    step.outputs.append(pb.Output(id=run.id, samples=run.samples))
                run.samples, run.begun = [], True
        return step

    def _send(self, session: _Session, step: pb.StepReport) -> None:
        session.told_s = time.monotonic()
        p = self._pace
        self._pace = Pace(p.steps + 1, p.busy_s + 0.01, p.prefill_tokens, p.decode_tokens + self._made)
        self._made = 0
        running = self.running
        load = Load(running, 0, 0, free_slots=4096 - running, total_slots=4096, pace=self._pace)
        self.record = replace(self.record, load=load)
        step.load.CopyFrom(convert.load_to_pb(load))
        if self._events:
            events, self._events = self._events, []
            for other in self._sessions:
                if other is not session:
                    message = pb.WorkerMessage()
                    _tell_events(message.step, other, events)
                    other.outbox.put(message)
            _tell_events(step, session, events)
        session.outbox.put(pb.WorkerMessage(step=step))


def _tell_events(message: pb.StepReport | pb.Snapshot, session: _Session, events: Sequence[CacheEvent]) -> None:
    if session.event_columns:
        message.event_columns.CopyFrom(convert.event_columns_to_pb(EventColumns.of(events)))
    else:
        message.events.extend(map(convert.event_to_pb, events))


async def _beat(session: _Session) -> None:
    count = 0
    while True:
        count += 1
        session.outbox.put(pb.WorkerMessage(heartbeat=pb.Heartbeat(count=count)))
        await asyncio.sleep(HEARTBEAT_S)


def _stats() -> pb.RequestStats:
    return pb.RequestStats(route="local", reason="no_prefill_worker", transport="none")
