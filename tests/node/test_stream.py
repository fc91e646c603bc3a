"""The dialling half of a stream against peers that are not there, do not speak, or leave."""

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from twinflow.node.outbox import Outbox
from twinflow.node.stream import calling
from twinflow.rpc.channel import bind, new_server, open_channel
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
