"""The dialling half of a stream against peers that are not there, do not speak, or leave."""

import asyncio
import gc
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import grpc
import pytest

from twinflow.contracts.errors import Internal
from twinflow.contracts.workers import Role, WorkerRecord
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import Pulse, SessionTimes, listen
from twinflow.node.registry.direct import DirectRegistration
from twinflow.node.stream import calling
from twinflow.rpc.channel import bind, new_server, open_channel, stop_server
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc

WAIT_S = 0.3


@pytest.fixture
def nobody() -> int:
    """A port that refuses."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def mute() -> Iterator[int]:
    """A port that takes connections and says nothing, as a worker that is stopped does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def beat(count: int) -> pb.RouterMessage:
    return pb.RouterMessage(heartbeat=pb.Heartbeat(count=count))


async def dial(port: int, beats: int) -> None:
    """One call that gets no answer."""
    outbox: Outbox[pb.RouterMessage] = Outbox()
    for count in range(beats):
        outbox.put(beat(count))
    with pytest.raises((grpc.RpcError, TimeoutError)):
        async with (
            open_channel(f"127.0.0.1:{port}", WAIT_S) as channel,
            asyncio.timeout(WAIT_S),
            calling(rpc.WorkerStub(channel).Serve, outbox) as replies,
        ):
            await anext(replies)
    assert outbox.closed


def left_over() -> list[str]:
    """Tasks that the test has not begun itself, but for gRPC's own that takes the end of a call: that one comes to its end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    return [text for text in map(repr, tasks) if "_handle_status_once_received" not in text]


@pytest.mark.parametrize("beats", [0, 1], ids=["nothing-to-say", "a-message-waits"])
@pytest.mark.parametrize("peer", ["nobody", "mute"])
async def test_a_call_that_never_connects_leaves_no_writer(
    peer: str, beats: int, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that is collected while it is pending says so in the log."""
    port = request.getfixturevalue(peer)
    with caplog.at_level(logging.ERROR, "asyncio"):
        for _ in range(5):
            await dial(port, beats)
            assert left_over() == []
        gc.collect()
        await asyncio.sleep(0)
    assert caplog.records == []


class Echo(rpc.WorkerServicer):
    """Answers every beat with a beat; ends the stream after `last`."""

    def __init__(self, last: int) -> None:
        self._last = last

    async def Serve(self, request_iterator: Any, context: Any) -> None:
        async for message in request_iterator:
            await context.write(pb.WorkerMessage(heartbeat=message.heartbeat))
            if message.heartbeat.count == self._last:
                return


@asynccontextmanager
async def calling_echo(last: int, outbox: Outbox[pb.RouterMessage]) -> AsyncIterator[AsyncIterator[pb.WorkerMessage]]:
    server = new_server()
    rpc.add_WorkerServicer_to_server(Echo(last), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with (
        open_channel(f"127.0.0.1:{port}", 3.0) as channel,
        calling(rpc.WorkerStub(channel).Serve, outbox) as replies,
    ):
        yield replies
    await server.stop(None)


async def test_messages_go_both_ways_until_the_peer_ends_it() -> None:
    outbox: Outbox[pb.RouterMessage] = Outbox()
    async with calling_echo(3, outbox) as replies:
        for count in range(1, 6):
            outbox.put(beat(count))
        assert [m.heartbeat.count async for m in replies] == [1, 2, 3]
    assert outbox.closed


async def test_closing_the_outbox_ends_the_call_after_what_it_holds() -> None:
    outbox: Outbox[pb.RouterMessage] = Outbox()
    async with calling_echo(0, outbox) as replies:
        outbox.put(beat(1))
        outbox.put(beat(2))
        outbox.close()
        assert [m.heartbeat.count async for m in replies] == [1, 2]


@asynccontextmanager
async def babbling(service: str, method: str, *said: bytes) -> AsyncIterator[str]:
    """Where every call of the method is answered with these bytes, as they are. Calls end with their peer."""

    async def answer(request_iterator: AsyncIterator[bytes], context: Any) -> None:
        await anext(request_iterator)
        for data in said:
            await context.write(data)
        async for _ in request_iterator:
            pass

    server = new_server()
    handler = grpc.stream_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(f"twinflow.rpc.v1.{service}", {method: handler})]
    )
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{port}"
    await stop_server(server, 0)


BABBLE = b"\xff\xff\xff"


async def test_bytes_that_are_no_message_are_not_passed_over() -> None:
    """gRPC reads them as None and goes on."""
    good = pb.WorkerMessage(heartbeat=pb.Heartbeat(count=1)).SerializeToString()
    outbox, got = Outbox[pb.RouterMessage](), list[int]()
    outbox.put(beat(1))
    times = SessionTimes()
    async with (
        babbling("Worker", "Serve", good, BABBLE, good) as address,
        open_channel(address, 3.0) as channel,
        calling(rpc.WorkerStub(channel).Serve, outbox) as replies,
    ):
        with pytest.raises(Internal, match="bytes that are no message"):
            await listen(replies, lambda m: got.append(m.heartbeat.count), Pulse(times, lambda n: None), times)
    assert got == [1]


@pytest.mark.parametrize("first", [(), (b"",)], ids=["at-once", "once-registered"])
async def test_a_registration_outlives_a_router_that_babbles(
    first: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """It dials again, ever more rarely, although it is taken in each time."""
    dialled: list[float] = []

    def record() -> WorkerRecord:
        dialled.append(time.monotonic())
        return WorkerRecord("w0", "i1", Role.DECODE, ("127.0.0.1:1",), "m", "f", 4096, 2048, 64)

    async with babbling("Registry", "Join", *first, BABBLE) as address:
        running = asyncio.create_task(DirectRegistration(address, record, interval_s=60.0).run())
        async with asyncio.timeout(10):
            while len(dialled) < 5:  # one a dial
                await asyncio.sleep(0.01)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert all(b - a > 0.9 * least for (a, b), least in zip(pairwise(dialled), (0.05, 0.1, 0.2, 0.4), strict=True))
    assert f"not registered at {address}: it sent bytes that are no message" in caplog.text


class Stuck:
    """A gRPC call that has failed before its metadata was sent: it has an end, its writes have none."""

    def __init__(self) -> None:
        self.cancelled = False
        self.writing = asyncio.Event()

    async def write(self, message: pb.RouterMessage) -> None:
        self.writing.set()
        await asyncio.Event().wait()

    async def __aiter__(self) -> AsyncIterator[pb.WorkerMessage]:
        await self.writing.wait()
        raise ConnectionError("failed to connect")
        yield

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_write_without_end_ends_with_the_call() -> None:
    call, outbox = Stuck(), Outbox[pb.RouterMessage]()
    outbox.put(beat(1))
    with pytest.raises(ConnectionError):
        async with calling(lambda: call, outbox) as replies:
            await anext(replies)
    assert call.cancelled and outbox.closed
    assert asyncio.all_tasks() == {asyncio.current_task()}
