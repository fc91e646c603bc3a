"""Fronts over fake engines on loopback, and raw peers that say whatever a test wants."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from services.decode.config import DecodeConfig
from services.decode.rpc import DecodeRole
from services.prefill.config import PrefillConfig
from services.prefill.rpc import PrefillRole
from tests.services.fake_engine import FakeEngine
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.requests import SamplingParams
from twinflow.contracts.workers import Role
from twinflow.engine.config import EngineConfig
from twinflow.engine.front import Front, open_front
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import SessionTimes
from twinflow.rpc.channel import open_channel
from twinflow.rpc.convert import sampling_to_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as pb_grpc

TIMES = SessionTimes(heartbeat_s=0.1, silence_s=1.0, hello_s=1.0, open_s=1.0, idle_s=30.0, lease_s=30.0)
ROOT = b"r" * 16
PROMPT = pack_tokens(range(1, 11))  # 10 tokens: two full blocks of 4 and a tail


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Polls; fails the test when it does not come true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def decode_front(
    engine: FakeEngine,
    *,
    worker_id: str = "d0",
    role: Role = Role.DECODE,
    times: SessionTimes = TIMES,
    verify: str = "none",
    **options: Any,
) -> AsyncIterator[tuple[Front, DecodeRole]]:
    config = DecodeConfig(
        engine=EngineConfig("fake", worker_id, "", role, verify=verify),
        session=times,
        **{"local_max_tokens": 4, **options},
    )
    roles: list[DecodeRole] = []

    def make(front: Front) -> DecodeRole:
        roles.append(DecodeRole(front, config))
        return roles[0]

    async with open_front(config, engine, make) as front:
        yield front, roles[0]


@contextlib.asynccontextmanager
async def prefill_front(
    engine: FakeEngine, *, worker_id: str = "p0", times: SessionTimes = TIMES, max_open: int = 8, port: int = 0
) -> AsyncIterator[tuple[Front, PrefillRole]]:
    config = PrefillConfig(
        engine=EngineConfig("fake", worker_id, "", Role.PREFILL), session=times, max_open=max_open, port=port
    )
    roles: list[PrefillRole] = []

    def make(front: Front) -> PrefillRole:
        roles.append(PrefillRole(front, max_open))
        return roles[0]

    async with open_front(config, engine, make) as front:
        yield front, roles[0]


def candidate(front: Front, incarnation: str = "") -> pb.Candidate:
    return pb.Candidate(
        worker_id=front.worker_id, incarnation=incarnation or front.incarnation, addresses=[front.address]
    )


def submit(request_id: str, *candidates: pb.Candidate, max_tokens: int = 4, prompt: bytes = PROMPT) -> pb.Submit:
    sampling = sampling_to_pb(SamplingParams(max_tokens=max_tokens, seed=1))
    return pb.Submit(
        id=request_id,
        prompt=prompt,
        sampling=sampling,
        root=ROOT,
        candidates=candidates,
        reason="test",
        idempotency_id=request_id,
    )


def open_message(request_id: str, *, have_tokens: int = 0, idempotency_id: str = "", prompt: bytes = PROMPT) -> pb.Open:
    sampling = sampling_to_pb(SamplingParams(max_tokens=4, seed=1))
    return pb.Open(
        id=request_id,
        prompt=prompt,
        sampling=sampling,
        root=ROOT,
        have_tokens=have_tokens,
        idempotency_id=idempotency_id,
    )


class Stream:
    """The dialling half of any stream, raw: `put` says, `got` lists what came. Beats unless `mute`."""

    def __init__(self, address: str, method: str, beat: Any) -> None:
        self._channel = open_channel(address, 5.0)
        self.outbox: Outbox = Outbox()
        self.call = getattr(pb_grpc.WorkerStub(self._channel), method)(aiter(self.outbox))
        self.got: list = []
        self.ended: str | None = None
        self.mute = False
        self._beat = beat
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beats())]

    def put(self, message: Any) -> None:
        self.outbox.put(message)

    def of(self, kind: str) -> list:
        return [getattr(m, kind) for m in self.got if m.WhichOneof("message") == kind]

    async def wait(self, kind: str, count: int = 1, within_s: float = 5.0) -> Any:
        await until(lambda: len(self.of(kind)) >= count, within_s)
        return self.of(kind)[count - 1]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self.got.append(message)
            self.ended = "ended"
        except aio.AioRpcError as e:
            self.ended = f"{e.code().name}: {e.details()}"

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if not self.mute:
                self.put(self._beat)


class RouterClient(Stream):
    def __init__(self, address: str, router_id: str = "r0", **reads: bool) -> None:
        """`reads`: what its hello says that it reads."""
        super().__init__(address, "Serve", pb.RouterMessage(heartbeat=pb.Heartbeat()))
        hello = pb.RouterHello(router_id=router_id, protocol_min=1, protocol_max=1, **reads)
        self.put(pb.RouterMessage(hello=hello))

    def submit(self, message: pb.Submit) -> None:
        self.put(pb.RouterMessage(submit=message))

    def cancel(self, request_id: str) -> None:
        self.put(pb.RouterMessage(cancel=pb.Cancel(id=request_id)))

    @property
    def outputs(self) -> dict[str, list[pb.Output]]:
        by_id: dict[str, list[pb.Output]] = defaultdict(list)
        for step in self.of("step"):
            for output in step.outputs:
                by_id[output.id].append(output)
        return by_id

    def tokens(self, request_id: str) -> list[int]:
        return [s.token_id for o in self.outputs[request_id] for s in o.samples]

    def terminal(self, request_id: str) -> list[pb.Output]:
        return [o for o in self.outputs[request_id] if o.HasField("error") or any(s.finish for s in o.samples)]

    async def end_of(self, request_id: str, within_s: float = 5.0) -> pb.Output:
        """The one terminal output, after making sure that nothing follows it."""
        await until(lambda: self.terminal(request_id), within_s)
        await asyncio.sleep(0.05)
        assert len(self.terminal(request_id)) == 1
        assert self.outputs[request_id][-1] == self.terminal(request_id)[0]
        return self.terminal(request_id)[0]


class DecodeClient(Stream):
    """A decode worker that says what it is told to."""

    def __init__(
        self,
        address: str,
        *,
        worker_id: str = "dx",
        incarnation: str = "i1",
        epoch: int = 99,
        fingerprint: str = "f" * 32,
        features: tuple[str, ...] = (),
    ) -> None:
        super().__init__(address, "Handoff", pb.HandoffRequest(heartbeat=pb.Heartbeat()))
        self.epoch = epoch
        hello = pb.HandoffHello(
            worker_id=worker_id, incarnation=incarnation, session_epoch=epoch, protocol_min=1, protocol_max=1,
            fingerprint=fingerprint, layout=f"layout of {fingerprint}", features=features,
        )  # fmt: skip
        self.put(pb.HandoffRequest(hello=hello))

    def open(self, message: pb.Open) -> None:
        self.put(pb.HandoffRequest(open=message))

    def pulled(self, **fields: Any) -> None:
        self.put(pb.HandoffRequest(pulled=pb.Pulled(**fields)))


class PrefillServer(pb_grpc.WorkerServicer):
    """A prefill worker that says what it is told to: `say` to the newest session; `heard` lists what came."""

    def __init__(self, worker_id: str = "px", incarnation: str = "i1", fingerprint: str = "f" * 32) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.fingerprint = fingerprint
        self.heard: list[pb.HandoffRequest] = []
        self.mute = False
        self.epoch = 0
        self.sessions = 0
        self.outbox: Outbox = Outbox()
        self.address = ""

    def of(self, kind: str) -> list:
        return [getattr(m, kind) for m in self.heard if m.WhichOneof("message") == kind]

    def say(self, **message: Any) -> None:
        self.outbox.put(pb.HandoffReply(**message))

    def hello(self) -> pb.HandoffHello:
        return pb.HandoffHello(
            worker_id=self.worker_id, incarnation=self.incarnation, session_epoch=self.epoch, generation=3,
            protocol_min=1, protocol_max=1, fingerprint=self.fingerprint, layout=f"layout of {self.fingerprint}",
            ranks=[pb.ArenaInfo(block_bytes=512, slot_bytes=1024)],
        )  # fmt: skip

    def candidate(self) -> pb.Candidate:
        return pb.Candidate(worker_id=self.worker_id, incarnation=self.incarnation, addresses=[self.address])

    async def Handoff(self, request_iterator, context):
        messages = aiter(request_iterator)
        self.epoch = (await anext(messages)).hello.session_epoch
        self.sessions += 1
        self.outbox = Outbox()
        self.say(hello=self.hello())

        async def read() -> None:
            async for message in messages:
                self.heard.append(message)
            self.outbox.close()

        async def beat() -> None:
            while True:
                await asyncio.sleep(0.1)
                if not self.mute:
                    self.say(heartbeat=pb.Heartbeat())

        tasks = [asyncio.create_task(read()), asyncio.create_task(beat())]
        try:
            async for message in self.outbox:
                await context.write(message)
        finally:
            for task in tasks:
                task.cancel()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["PrefillServer"]:
        server = aio.server()
        pb_grpc.add_WorkerServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            self.outbox.close()
            await server.stop(0)
