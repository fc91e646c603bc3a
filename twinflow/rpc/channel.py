"""Channels and servers of every gRPC edge, with their options in one place.

Liveness is the application's: sessions carry heartbeats of their own, so gRPC keepalive stays off (it would only
measure that the peer's kernel is alive). gRPC sets TCP_NODELAY itself; nothing here turns it off. Names are resolved
by gRPC, which reconnects with the back-off below; how long one attempt to connect may take is the caller's to say.
"""

import asyncio
from collections.abc import Iterable

import grpc
from grpc import aio

MESSAGE_BYTES = 256 << 20  # largest message: a snapshot of a big cache; prompts of 1M tokens are 4 MiB
STOP_GRACE_S = 5.0

_SHARED: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2**31 - 1),  # off
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (*_SHARED, ("grpc.so_reuseport", 0))  # a taken port is an error


def channel_options(wait_s: float) -> tuple[tuple[str, int], ...]:
    """Of a channel whose owner waits so long for an answer. An attempt to connect, the HTTP/2 handshake included, gets twice
    that, so that the owner's own deadline is the one that ends it. Pauses between attempts are short all the same."""
    return (
        *_SHARED,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.min_reconnect_backoff_ms", max(1, round(2 * wait_s * 1e3))),  # an attempt's deadline, despite the name
        ("grpc.enable_retries", 0),  # a session is resumed by its owner, never replayed by the library
        ("grpc.use_local_subchannel_pool", 1),  # one connection per channel: closing one never touches another
    )


def open_channel(address: str, wait_s: float) -> aio.Channel:
    """A lazy channel to `host:port`; the caller closes it. `wait_s`: how long the caller waits for the first answer."""
    return aio.insecure_channel(address, options=channel_options(wait_s))


def new_server() -> aio.Server:
    """A server without services; add them, `bind`, `start`, and in the end `stop_server`."""
    return aio.server(options=SERVER_OPTIONS)


def bind(server: aio.Server, host: str, port: int) -> int:
    """Binds and returns the port in use (0 asks for a free one). Raises OSError when it is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as e:
        raise OSError(f"cannot listen on {address}: {e}") from e
    if bound == 0:
        raise OSError(f"cannot listen on {address}: the port is taken or the host is not local")
    return bound


async def stop_server(server: aio.Server, grace_s: float = STOP_GRACE_S) -> None:
    """Takes no new streams, lets running ones end for `grace_s`, then ends them. Safe to call twice."""
    await server.stop(grace_s)


async def close_channels(channels: Iterable[aio.Channel]) -> None:
    """Closes all, ending their streams at once."""
    await asyncio.gather(*(c.close(None) for c in channels))


def is_gone(error: grpc.RpcError) -> bool:
    """True when the peer is unreachable or the stream was ended, false when the peer answered with an error."""
    code = error.code() if hasattr(error, "code") else None
    return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
