"""Options hold on a real socket: big messages pass, a taken port is an error, a dead peer reads as gone."""

import asyncio

import grpc
import pytest

from twinflow.rpc import channel
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc


class Echo(rpc.WorkerServicer):
    async def Serve(self, request_iterator, context):
        async for message in request_iterator:
            yield pb.WorkerMessage(hello=pb.WorkerHello(protocol=len(message.submit.prompt)))


async def start() -> tuple[grpc.aio.Server, int]:
    server = channel.new_server()
    rpc.add_WorkerServicer_to_server(Echo(), server)
    port = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    return server, port


def test_messages_of_64_mib_pass():
    async def scenario():
        server, port = await start()
        ch = channel.open_channel(f"127.0.0.1:{port}", 5.0)
        call = rpc.WorkerStub(ch).Serve()
        await call.write(pb.RouterMessage(submit=pb.Submit(prompt=bytes(64 << 20))))
        answer = await call.read()
        call.cancel()
        await channel.close_channels([ch])
        await channel.stop_server(server, 0)
        return answer.hello.protocol

    assert asyncio.run(scenario()) == 64 << 20


def test_taken_port_is_an_oserror():
    async def scenario():
        server, port = await start()
        other = channel.new_server()
        try:
            with pytest.raises(OSError, match=str(port)):
                channel.bind(other, "127.0.0.1", port)
        finally:
            await channel.stop_server(server, 0)
            await channel.stop_server(other, 0)

    asyncio.run(scenario())


def test_unreachable_peer_is_gone():
    async def scenario():
        server, port = await start()
        await channel.stop_server(server, 0)
        ch = channel.open_channel(f"127.0.0.1:{port}", 5.0)
        call = rpc.WorkerStub(ch).Serve()
        with pytest.raises(grpc.RpcError) as failure:
            await call.read()
        await channel.close_channels([ch])
        return failure.value

    assert channel.is_gone(asyncio.run(scenario()))
