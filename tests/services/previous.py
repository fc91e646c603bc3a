"""Workers of the previous release, as far as the wire goes: its frozen protocol, in a descriptor pool of its own, and peers
that say and know nothing beyond it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc import aio

from twinflow.node.outbox import Outbox

FROZEN = Path(__file__).parent / "data" / "engine-0.binpb"  # a serialized FileDescriptorProto
METHOD = "/twinflow.rpc.v1.Worker/Handoff"


class Previous:
    """Message classes by name, e.g. `Previous().Open(id="a")`."""

    def __init__(self) -> None:
        file = descriptor_pb2.FileDescriptorProto.FromString(FROZEN.read_bytes())
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        for message in file.message_type:
            found = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            setattr(self, message.name, message_factory.GetMessageClass(found))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the previous release has no message {name}")


class PreviousDecode:
    """Opens a session to a prefill worker of this release."""

    def __init__(self, address: str, fingerprint: str = "f" * 32) -> None:
        self.pb = Previous()
        self.got: list[Any] = []
        self.ended: str | None = None
        self._outbox: Outbox = Outbox()
        self._channel = aio.insecure_channel(address)
        dial = self._channel.stream_stream(
            METHOD,
            request_serializer=self.pb.HandoffRequest.SerializeToString,
            response_deserializer=self.pb.HandoffReply.FromString,
        )
        self._call = dial(aiter(self._outbox))
        hello = self.pb.HandoffHello(
            worker_id="old", incarnation="i1", session_epoch=7, protocol_min=1, protocol_max=1, fingerprint=fingerprint
        )
        self.put(hello=hello)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    def put(self, **message: Any) -> None:
        self._outbox.put(self.pb.HandoffRequest(**message))

    def of(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.got if m.WhichOneof("message") == kind]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.got.append(message)
            self.ended = "ended"
        except aio.AioRpcError as e:
            self.ended = e.details()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.put(heartbeat=self.pb.Heartbeat())


class PreviousPrefill:
    """Serves hand-offs as the previous release did: a prompt of 10 tokens in blocks of 4, everything at once. It refuses
    `want_checkpoint_at`, which it did not support."""

    def __init__(self) -> None:
        self.pb = Previous()
        self.address = ""
        self.heard: list[Any] = []

    def candidate(self) -> tuple[str, str, str]:
        return "old", "i1", self.address

    def of(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.heard if m.WhichOneof("message") == kind]

    async def _handoff(self, messages: AsyncIterator[Any], context: Any) -> None:
        pb, outbox = self.pb, Outbox[Any]()

        def say(**message: Any) -> None:
            outbox.put(pb.HandoffReply(**message))

        async def read() -> None:
            async for message in messages:
                self.heard.append(message)
                self._answer(message, say)
            outbox.close()

        async def beat() -> None:
            while True:
                await asyncio.sleep(0.1)
                say(heartbeat=pb.Heartbeat())

        tasks = [asyncio.create_task(read()), asyncio.create_task(beat())]
        try:
            async for message in outbox:
                await context.write(message)
        finally:
            for task in tasks:
                task.cancel()

    def _answer(self, message: Any, say: Any) -> None:
        pb = self.pb
        match message.WhichOneof("message"):
            case "hello":
                say(
                    hello=pb.HandoffHello(
                        worker_id="old", incarnation="i1", session_epoch=message.hello.session_epoch, generation=1,
                        protocol_min=1, protocol_max=1, fingerprint=message.hello.fingerprint,
                        ranks=[pb.ArenaInfo(block_bytes=512, slot_bytes=1024)],
                    )
                )  # fmt: skip
            case "open" if message.open.want_checkpoint_at:
                error = pb.Error(reason="unsupported", message="want_checkpoint_at is not supported yet")
                say(failed=pb.Failed(id=message.open.id, error=error))
            case "open":
                self._prefill(message.open, say)
            case "pulled":
                p = message.pulled
                say(confirmed=pb.Confirmed(id=p.id, lease_id=p.lease_id, session_epoch=p.session_epoch))

    def _prefill(self, message: Any, say: Any) -> None:
        pb = self.pb
        say(accepted=pb.Accepted(id=message.id, lease_id="l1"))
        have = message.have_tokens // 4
        say(blocks=pb.Blocks(id=message.id, first_index=have, blocks=list(range(20 + have, 22))))
        say(first_token=pb.FirstToken(id=message.id, sample=pb.Sample(token_id=5)))
        tag = pb.StateTag(prefix_hash=b"h" * 16, position=10, fingerprint="f" * 32)
        say(finished=pb.Finished(id=message.id, first_index=2, blocks=[22], slot=3, tag=tag))

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["PreviousPrefill"]:
        handler = grpc.stream_stream_rpc_method_handler(
            self._handoff,
            request_deserializer=self.pb.HandoffRequest.FromString,
            response_serializer=self.pb.HandoffReply.SerializeToString,
        )
        server = aio.server()
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("twinflow.rpc.v1.Worker", {"Handoff": handler}),)
        )
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0)
