"""Both halves of a stream with hellos and heartbeats: what every bidirectional call from or to a worker has in common."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import grpc
from grpc import aio

from twinflow.contracts.errors import BadRequest, Internal, TwinflowError
from twinflow.node.outbox import Outbox
from twinflow.node.pulse import Pulse, SessionTimes, kind_of, listen
from twinflow.rpc.failure import reason_metadata

M = TypeVar("M")


class Replies(Generic[M]):
    """What the peer says in a call, to be iterated once. Raises Internal for bytes that are no message, gRPC's None."""

    def __init__(self, call: AsyncIterable[M | None]) -> None:
        self._messages = aiter(call)

    def __aiter__(self) -> "Replies[M]":
        return self

    async def __anext__(self) -> M:
        message = await anext(self._messages)
        if message is None:
            raise Internal("it sent bytes that are no message")
        return message


@asynccontextmanager
async def calling(method: Callable[[], Any], outbox: Outbox[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """The dialling half: calls a bidirectional `method`, writes the outbox to it and gives what the peer says, to be iterated
    once. The call and its writer are over when this is; what the outbox still holds then is dropped.

    gRPC's own writer, which it starts when a call is given its requests, is left pending for ever by a call that fails before
    it is connected.
    """
    call = method()
    writer = asyncio.create_task(_write(call, outbox))
    try:
        yield Replies(call)
    finally:
        outbox.close()
        call.cancel()
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


def end_if_cancelled() -> None:
    """For loops that dial again: raises CancelledError if the task that calls it has been cancelled. gRPC tells a cancellation
    that meets the end of its call as a failed call."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _write(call: Any, outbox: Outbox[Any]) -> None:
    """Until the outbox is closed or the call is over: why it is, its reader is told."""
    try:
        async for message in outbox:
            await call.write(message)
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError):
        outbox.close()


async def first_message(messages: AsyncIterator[M], times: SessionTimes) -> M:
    """The hello. Raises BadRequest when none arrives in time or something else does."""
    try:
        message = await asyncio.wait_for(anext(messages), times.hello_s)
    except (TimeoutError, StopAsyncIteration) as e:
        raise BadRequest(f"no hello within {times.hello_s:g} s") from e
    if kind_of(message) != "hello":
        raise BadRequest(f"the first message must be a hello, got {kind_of(message)}")
    return message


async def converse(
    context: "aio.ServicerContext[Any, Any]",
    messages: AsyncIterator[M],
    outbox: Outbox[Any],
    handle: Callable[[M], None],
    pulse: Pulse,
    times: SessionTimes,
    ended: Callable[[str], None],
) -> None:
    """Writes the outbox and handles messages until either side is through; `ended(why)` is called exactly once. The peer is told
    of a message that could not be handled."""
    why = "it cancelled the stream"

    async def listen_and_close() -> None:
        nonlocal why
        try:
            why = await listen(messages, handle, pulse, times)
        except TwinflowError as e:
            outbox.close(e)
        else:
            outbox.close()

    listening = asyncio.create_task(listen_and_close())
    try:
        async for message in outbox:
            await context.write(message)
        if outbox.error is not None:
            why = outbox.error.message
            await abort(context, outbox.error)
    finally:
        outbox.close()
        listening.cancel()
        ended(why)


async def abort(context: "aio.ServicerContext[Any, Any]", error: TwinflowError) -> None:
    """Ends the call with the error's gRPC code, its reason in the trailing metadata."""
    await context.abort(grpc.StatusCode[error.grpc_code], error.message, reason_metadata(error))
