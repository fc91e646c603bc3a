"""A minimal router: speaks `Worker.Serve` to one worker and chooses the prefill candidates itself.

Tests use it to force a route that the real scheduler would not take, and to compare token ids instead of text.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.contracts.requests import RequestStats, SamplingParams
from twinflow.node.handshake import PROTOCOL_MAX, PROTOCOL_MIN
from twinflow.rpc.channel import open_channel
from twinflow.rpc.convert import record_from_pb, sampling_to_pb, stats_from_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as pb_grpc

BEAT_S = 0.5


@dataclass
class Generation:
    """`over` is set once the terminal output is here."""

    tokens: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    error: str = ""
    first: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerClient:
    """One stream to one worker; use as an async context manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: dict[str, Generation] = {}
        self._outgoing: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self._ids = itertools.count()

    async def __aenter__(self) -> "WorkerClient":
        self._channel: aio.Channel = open_channel(self.address, 5.0)
        replies = aiter(pb_grpc.WorkerStub(self._channel).Serve(self._send()))
        hello = pb.RouterHello(router_id=f"test-{id(self)}", protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX)
        self._outgoing.put_nowait(pb.RouterMessage(hello=hello))
        self.record = record_from_pb((await anext(replies)).hello.record)
        self._tasks = [asyncio.create_task(self._read(replies)), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def candidate(self) -> pb.Candidate:
        """This worker, as others are told to hand off from it."""
        r = self.record
        return pb.Candidate(worker_id=r.id, incarnation=r.incarnation, addresses=r.addresses)

    def submit(
        self, prompt: Iterable[int], *, prefill: Sequence["WorkerClient"] = (), salt: str = "", **sampling: Any
    ) -> str:
        values: dict[str, Any] = {"max_tokens": 16, "seed": 1, "temperature": 0.0, "ignore_eos": True, **sampling}
        id = f"{self.record.id}-{next(self._ids)}-{salt}"
        self.requests[id] = Generation()
        message = pb.Submit(
            id=id,
            prompt=pack_tokens(prompt),
            sampling=sampling_to_pb(SamplingParams(**values)),
            root=root_hash(self.record.fingerprint, cache_salt=salt),
            candidates=[p.candidate() for p in prefill],
            reason="test",
            idempotency_id=id,
        )
        self._outgoing.put_nowait(pb.RouterMessage(submit=message))
        return id

    def cancel(self, id: str) -> None:
        self._outgoing.put_nowait(pb.RouterMessage(cancel=pb.Cancel(id=id)))

    async def generate(self, prompt: Iterable[int], **options: Any) -> Generation:
        """Submits and waits for the end. Raises TimeoutError after a minute: nothing may hang."""
        request = self.requests[self.submit(prompt, **options)]
        await asyncio.wait_for(request.over.wait(), 60)
        return request

    async def _send(self) -> AsyncIterator[pb.RouterMessage]:
        while True:
            yield await self._outgoing.get()

    async def _beat(self) -> None:
        for count in itertools.count():
            self._outgoing.put_nowait(pb.RouterMessage(heartbeat=pb.Heartbeat(count=count)))
            await asyncio.sleep(BEAT_S)

    async def _read(self, replies: AsyncIterator[pb.WorkerMessage]) -> None:
        try:
            await self._deliver(replies)
        finally:
            for request in self.requests.values():
                if not request.over.is_set():
                    request.error = "the stream has ended"
                    request.over.set()

    async def _deliver(self, replies: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in replies:
            for output in message.step.outputs:
                request = self.requests[output.id]
                request.tokens += [s.token_id for s in output.samples]
                if request.tokens:
                    request.first.set()
                if output.HasField("stats"):
                    request.stats = stats_from_pb(output.stats)
                    request.error = output.error.message
                    request.over.set()
