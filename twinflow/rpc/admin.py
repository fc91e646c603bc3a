"""Admin calls from a process without an event loop, such as the command line."""

from typing import Any, TypeVar

import grpc

from twinflow.contracts.errors import NoCapacity
from twinflow.rpc.channel import channel_options
from twinflow.rpc.failure import error_of
from twinflow.rpc.v1 import admin_pb2_grpc as pb_grpc

A = TypeVar("A")


def call(address: str, method: str, request: Any, answer: type[A], timeout_s: float) -> A:
    """One call of `Admin` at a router or worker. Raises the error that it ended with, NoCapacity when nobody is there."""
    with grpc.insecure_channel(address, options=channel_options(timeout_s)) as channel:
        try:
            reply = getattr(pb_grpc.AdminStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as e:
            error = error_of(e, address)
            if type(error) is NoCapacity:
                why = error.message.removeprefix(f"{address}: ")
                raise NoCapacity(f"nobody answers at {address} ({why})") from None
            raise error from None
    assert isinstance(reply, answer)
    return reply
