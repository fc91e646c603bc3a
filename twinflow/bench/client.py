"""A worker asked from outside, as a router asks it: one session, requests one by one, the time of each token."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType

import grpc
import numpy as np

from twinflow.contracts.errors import Internal, NoCapacity, TwinflowError
from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.requests import RequestStats, SamplingParams
from twinflow.node.handshake import PROTOCOL_MAX, PROTOCOL_MIN
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import Pulse, SessionTimes, listen
from twinflow.node.stream import calling
from twinflow.rpc.channel import open_channel
from twinflow.rpc.convert import record_from_pb, sampling_to_pb, stats_from_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as pb_grpc

TIMES = SessionTimes()
RETRY_S = 0.2


@dataclass(slots=True)
class Answer:
    """`marks`: when each token came, `time.monotonic()`."""

    marks: list[float] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    error: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: pb.Output) -> None:
        self.marks += [time.monotonic()] * len(output.samples)
        if output.HasField("stats"):
            self.stats, self.error = stats_from_pb(output.stats), output.error.message
            self.over.set()


class Worker:
    """A session with one worker, as a router has. Use as an async context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._outbox: Outbox[pb.RouterMessage] = Outbox()
        self._answers: dict[str, Answer] = {}
        self._numbers = itertools.count()

    async def __aenter__(self) -> "Worker":
        """Raises grpc.RpcError while nobody serves there."""
        async with AsyncExitStack() as opened:
            channel = await opened.enter_async_context(open_channel(self._address, TIMES.hello_s))
            replies = await opened.enter_async_context(calling(pb_grpc.WorkerStub(channel).Serve, self._outbox))
            hello = pb.RouterHello(router_id="bench", protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX)
            self._outbox.put(pb.RouterMessage(hello=hello))
            self.record = record_from_pb((await anext(replies)).hello.record)
            self._reading = asyncio.create_task(self._listen(replies))
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._opened.aclose()

    async def generate(self, prompt: np.ndarray, prefill: "Worker", max_tokens: int, within_s: float) -> Answer:
        """Raises Internal if it fails or takes longer."""
        id = f"bench-{next(self._numbers)}"
        answer = self._answers[id] = Answer()
        far = prefill.record
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        message = pb.Submit(
            id=id, prompt=pack_tokens(prompt.tolist()), sampling=sampling_to_pb(sampling), idempotency_id=id,
            root=root_hash(self.record.fingerprint, cache_salt="bench"), reason="bench",
            candidates=[pb.Candidate(worker_id=far.id, incarnation=far.incarnation, addresses=far.addresses)],
        )  # fmt: skip
        self._outbox.put(pb.RouterMessage(submit=message))
        try:
            await asyncio.wait_for(answer.over.wait(), within_s)
        except TimeoutError:
            raise Internal(f"a request of {len(prompt)} tokens gave no answer within {within_s:g} s") from None
        if answer.error:
            raise Internal(f"a request of {len(prompt)} tokens failed: {answer.error}")
        return answer

    async def _listen(self, replies: AsyncIterator[pb.WorkerMessage]) -> None:
        pulse = Pulse(TIMES, lambda n: self._outbox.put(pb.RouterMessage(heartbeat=pb.Heartbeat(count=n))))
        try:
            why = await listen(replies, self._handle, pulse, TIMES)
        except TwinflowError as e:
            why = e.message
        for answer in self._answers.values():
            answer.error = answer.error or f"the session with {self._address} is over: {why}"
            answer.over.set()

    def _handle(self, message: pb.WorkerMessage) -> None:
        for output in message.step.outputs:
            self._answers[output.id].take(output)


async def reach(address: str, within_s: float, check: Callable[[], None]) -> Worker:
    """Entered, once somebody serves there. `check` is called meanwhile and may raise; NoCapacity if nobody does in time."""
    until = time.monotonic() + within_s
    while True:
        try:
            return await Worker(address).__aenter__()
        except (grpc.RpcError, StopAsyncIteration):
            check()
            if time.monotonic() > until:
                raise NoCapacity(f"nobody serves at {address} after {within_s:g} s") from None
            await asyncio.sleep(RETRY_S)
