"""A worker without a model: serves `Worker.Serve` with scripted tokens, delays, events and deaths. No torch.

By itself it echoes the prompt: `python -m tests.router.fake_worker ROUTER_GRPC_ADDRESS MODEL_NAME [ROLE]`.
"""

import asyncio
import dataclasses
import sys
import time
import uuid
from collections.abc import Callable, Sequence

from grpc import aio

from twinflow.contracts.errors import Cancelled, TwinflowError
from twinflow.contracts.events import CacheEvent, EventColumns
from twinflow.contracts.hashing import unpack_tokens
from twinflow.contracts.requests import FinishReason, RequestStats, Sample, TokenLogprobs
from twinflow.contracts.workers import Load, Role, WorkerRecord
from twinflow.node.registry.direct import DirectRegistration
from twinflow.rpc import channel, convert
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc

Script = Callable[[pb.Submit], Sequence[int]]
Out = asyncio.Queue[pb.WorkerMessage | None]


def echo(submit: pb.Submit) -> Sequence[int]:
    ids = unpack_tokens(submit.prompt)
    return [ids[i % len(ids)] for i in range(submit.sampling.max_tokens)]


class FakeWorker(rpc.WorkerServicer):
    """Public attributes are the knobs; `submits` and `cancels` (id → monotonic time) are what arrived."""

    def __init__(self, model: str, id: str = "d0", role: Role = Role.DECODE, **record: object) -> None:
        facts = {
            "fingerprint": "f" * 32,
            "max_model_tokens": 4096,
            "max_request_tokens": 2048,
            "block_tokens": 4,
            "features": ("grammar",),
        } | record
        self.record = WorkerRecord(id, uuid.uuid4().hex[:8], role, (), model, **facts)
        self.script: Script = echo
        self.delay_s = 0.0  # before every token
        self.tokens_per_step = 1
        self.columns = False  # tokens of which there is no more to say go in columns
        self.event_columns = True  # cache events go in columns; False: as a worker of an earlier release tells them
        self.gate: asyncio.Event | None = None  # nothing is generated before it is set
        self.error: TwinflowError | None = None
        self.hello_error: TwinflowError | None = None
        self.muted = False  # neither heartbeats nor anything else
        self.engine_silent_s: float | None = None  # what it says of its engine; None: as a release that says nothing
        self.finish_last = True  # False: stays silent after the last scripted token
        self.die_after: int | None = None  # tokens of one request, then the stream breaks
        self.snapshot: tuple[int, list[CacheEvent]] = (0, [])
        self.stats = RequestStats(cached_tokens=3, route="local", transport="none")
        self.spoil: Callable[[pb.StepReport], None] = lambda step: None  # may change a step before it is sent
        self.services: list[Callable[[aio.Server], None]] = []  # more of them, added at the start
        self.hello = pb.RouterHello()  # of the newest session
        self.submits: list[pb.Submit] = []
        self.cancels: dict[str, float] = {}
        self.resyncs = 0
        self.sessions = 0
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._outs: list[Out] = []  # of the sessions that are up
        self._registering: list[asyncio.Task[None]] = []

    # ---- life ----

    async def start(self, router_address: str | None = None) -> None:
        self._server = channel.new_server()
        rpc.add_WorkerServicer_to_server(self, self._server)
        for add in self.services:
            add(self._server)
        port = channel.bind(self._server, "127.0.0.1", 0)
        await self._server.start()
        self.record = dataclasses.replace(self.record, addresses=(f"127.0.0.1:{port}",))
        if router_address:
            self.register(router_address)

    def register(self, router_address: str) -> None:
        """At one router more."""
        registration = DirectRegistration(router_address, lambda: self.record, interval_s=0.1, max_pause_s=0.2)
        self._registering.append(asyncio.create_task(registration.run()))

    async def stop(self) -> None:
        await self.deregister()
        for task in self._runs.values():
            task.cancel()
        await channel.stop_server(self._server, 0)
        del self._server  # part of a reference cycle; grpc wants it gone while its loop lives

    async def deregister(self) -> None:
        for task in self._registering:
            task.cancel()
        await asyncio.gather(*self._registering, return_exceptions=True)

    def break_stream(self) -> None:
        """Ends the sessions in the middle of everything."""
        for out in self._outs:
            out.put_nowait(None)

    def emit(self, *events: CacheEvent, load: Load | None = None) -> None:
        step = pb.StepReport(**self._told(events))
        if load is not None:
            step.load.CopyFrom(convert.load_to_pb(load))
        for out in self._outs:
            out.put_nowait(pb.WorkerMessage(step=step))

    def _told(self, events: Sequence[CacheEvent]) -> dict[str, object]:
        if self.event_columns and events:
            return {"event_columns": convert.event_columns_to_pb(EventColumns.of(events))}
        return {"events": [convert.event_to_pb(e) for e in events]}

    # ---- the service ----

    async def Serve(self, request_iterator, context):
        first = await anext(request_iterator)
        assert first.WhichOneof("message") == "hello", first
        self.hello = first.hello
        if self.hello_error is not None:
            error = convert.error_to_pb(self.hello_error)
            yield pb.WorkerMessage(hello=pb.WorkerHello(record=convert.record_to_pb(self.record), error=error))
            return
        self.sessions += 1
        out: Out = asyncio.Queue()
        self._outs.append(out)
        runs: set[str] = set()
        yield pb.WorkerMessage(hello=pb.WorkerHello(record=convert.record_to_pb(self.record), protocol=1))
        tasks = [asyncio.create_task(self._read(request_iterator, out, runs)), asyncio.create_task(self._beat(out))]
        try:
            while (message := await out.get()) is not None:
                if not self.muted:
                    if message.WhichOneof("message") == "step":
                        self.spoil(message.step)
                    yield message
        finally:
            self._outs.remove(out)
            for task in [*tasks, *(self._runs.pop(id) for id in runs if id in self._runs)]:
                task.cancel()

    async def _beat(self, out: Out) -> None:
        count = 0
        while True:
            count += 1
            beat = pb.Heartbeat(count=count, engine_silent_s=self.engine_silent_s)
            out.put_nowait(pb.WorkerMessage(heartbeat=beat))
            await asyncio.sleep(0.2)

    async def _read(self, messages, out: Out, runs: set[str]) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self.submits.append(message.submit)
                runs.add(message.submit.id)
                self._runs[message.submit.id] = asyncio.create_task(self._generate(message.submit, out))
            elif kind == "cancel":
                self._cancel(message.cancel.id, out)
            elif kind == "resync":
                self.resyncs += 1
                sequence, events = self.snapshot
                snapshot = pb.Snapshot(sequence=sequence, **self._told(events))
                out.put_nowait(pb.WorkerMessage(snapshot=snapshot))

    def _cancel(self, id: str, out: Out) -> None:
        self.cancels[id] = time.monotonic()
        task = self._runs.pop(id, None)
        if task is not None:
            task.cancel()
            self._report(out, id, [], self.stats, Cancelled("cancelled"))

    async def _generate(self, submit: pb.Submit, out: Out) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            self._report(out, submit.id, [], None, self.error)
            return
        ids = list(self.script(submit))[: submit.sampling.max_tokens]
        for at in range(len(submit.forced) // 4, len(ids), self.tokens_per_step):
            if self.die_after is not None and at >= self.die_after:
                self.break_stream()
                return
            await asyncio.sleep(self.delay_s)
            step = [self._sample(submit, ids, i) for i in range(at, min(at + self.tokens_per_step, len(ids)))]
            self._report(out, submit.id, step, self.stats if step[-1].finish else None)
        if self.finish_last:
            self._runs.pop(submit.id, None)

    def _sample(self, submit: pb.Submit, ids: Sequence[int], i: int) -> Sample:
        sampling = submit.sampling
        finish = None
        if i == len(ids) - 1 and self.finish_last:
            ended = ids[i] in sampling.eos_token_ids or ids[i] in sampling.stop_token_ids
            finish = FinishReason.STOP if ended else FinishReason.LENGTH
        logprobs = None
        if sampling.HasField("logprobs"):
            logprobs = TokenLogprobs(-0.5, tuple((abs(ids[i] - n), -0.5 - n) for n in range(sampling.logprobs)))
        return Sample(ids[i], finish, logprobs)

    def _report(
        self,
        out: Out,
        id: str,
        samples: Sequence[Sample],
        stats: RequestStats | None,
        error: TwinflowError | None = None,
    ) -> None:
        if self.columns and samples and stats is None and not any(s.finish or s.logprobs for s in samples):
            step = pb.StepReport(token_requests=[id] * len(samples), token_ids=[s.token_id for s in samples])
            out.put_nowait(pb.WorkerMessage(step=step))
            return
        output = pb.Output(id=id, samples=convert.samples_to_pb(samples))
        if stats is not None:
            output.stats.CopyFrom(convert.stats_to_pb(stats))
        if error is not None:
            output.error.CopyFrom(convert.error_to_pb(error))
        out.put_nowait(pb.WorkerMessage(step=pb.StepReport(outputs=[output])))


async def main() -> None:
    worker = FakeWorker(sys.argv[2], role=Role(sys.argv[3] if len(sys.argv) > 3 else "decode"))
    worker.delay_s = 0.05
    await worker.start(sys.argv[1])
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
