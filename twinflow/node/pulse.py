"""Liveness of a session, measured by the application: beats for the peer, and the peer's silence.

`listen` is the reading half of every stream: it hands each message on, beats meanwhile, and ends when the stream is over,
whatever the reason. A message that cannot be handled is such a reason: what it said is lost, and whoever went on without it
would go on with less than the peer said. Kinds of message that only a newer release knows are no such thing; who handles
messages ignores them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from twinflow.contracts.errors import BadRequest, Internal, TwinflowError
from twinflow.node.settings import setting

M = TypeVar("M")

log = logging.getLogger(__name__)


# An engine's process that said nothing to its front for so long stands still. It beats eight times as often, and front and
# routers look four times a second, which makes 2.5 s: less than `silence_s`, after which a worker that is silent as a whole is
# lost. Fronts and routers go by the same number, so it is no setting.
ENGINE_SILENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """Seconds. A peer counts as lost after `silence_s` without any message; both sides beat every `heartbeat_s`."""

    heartbeat_s: float = setting(0.5, "how often each side of a session beats")
    silence_s: float = setting(3.0, "a peer that said nothing for so long is lost")
    hello_s: float = setting(3.0, "connecting and the exchange of hellos")
    open_s: float = setting(10.0, "until a prefill worker accepts a hand-off")
    idle_s: float = setting(60.0, "a session without hand-offs is closed after this")
    lease_s: float = setting(60.0, "how long a computed prompt waits for its reader")

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < self.silence_s:
            raise BadRequest(
                f"session.heartbeat_s={self.heartbeat_s} must lie between 0 and session.silence_s={self.silence_s}"
            )


async def sleep_until(wake_at: float, grace_s: float) -> float:
    """Until then by the running loop's clock. Returns for how long this process itself was held up meanwhile, which says nothing
    about anybody whom it did not hear; 0 if for no longer than `grace_s`."""
    now = asyncio.get_running_loop().time
    await asyncio.sleep(max(0.0, wake_at - now()))
    late_s = now() - wake_at
    return late_s if late_s > grace_s else 0.0


class Pulse:
    """One side of a session: calls `beat(count)` every heartbeat, `heard()` resets the peer's silence."""

    def __init__(self, times: SessionTimes, beat: Callable[[int], None]) -> None:
        self._times = times
        self._beat = beat
        self._count = 0
        self._heard_at = asyncio.get_running_loop().time()

    def heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    async def run_until_silence(self) -> None:
        """Returns once nothing was heard for `silence_s`. Time in which this process itself was held up doesn't count."""
        now = asyncio.get_running_loop().time
        next_beat = now()
        while now() < self._heard_at + self._times.silence_s:
            if now() >= next_beat:
                self._count += 1
                self._beat(self._count)
                next_beat = now() + self._times.heartbeat_s
            wake_at = min(next_beat, self._heard_at + self._times.silence_s)
            held_up_s = await sleep_until(wake_at, self._times.heartbeat_s)
            self._heard_at += held_up_s  # not in one: it is heard meanwhile


async def listen(messages: AsyncIterator[M], handle: Callable[[M], None], pulse: Pulse, times: SessionTimes) -> str:
    """Hands every message to `handle` until the peer ends the stream, breaks it or falls silent; returns which.

    `handle` must not block. What it raises is logged; then this raises Internal, which names the message's kind and the error.
    """
    reader = asyncio.create_task(_read(messages, handle, pulse))
    beater = asyncio.create_task(pulse.run_until_silence())
    try:
        await asyncio.wait({reader, beater}, return_when=asyncio.FIRST_COMPLETED)
        return reader.result() if reader.done() else f"it was silent for {times.silence_s:g} s"
    finally:
        reader.cancel()
        beater.cancel()
        await asyncio.gather(reader, beater, return_exceptions=True)


async def _read(messages: AsyncIterator[M], handle: Callable[[M], None], pulse: Pulse) -> str:
    try:
        async for message in messages:
            pulse.heard()
            try:
                handle(message)
            except Exception as e:  # process edge: a message of another process
                log.exception("a %s could not be handled", kind_of(message))
                raise unhandled(kind_of(message), e) from e
    except TwinflowError:
        raise
    except grpc.RpcError as e:
        return describe(e)
    except Exception as e:  # process edge: grpc ends an iteration in many ways
        return f"the stream broke ({type(e).__name__}: {e})"
    return "it ended the stream"


def unhandled(what: str, error: Exception) -> Internal:
    """For the peer and for clients. An error that isn't of this project is named and not quoted: its text may be of anybody."""
    said = error.message if isinstance(error, TwinflowError) else type(error).__name__
    return Internal(f"a {what} could not be handled: {said}")


def kind_of(message: object) -> str:
    """Which of a oneof a protobuf message carries, for logs."""
    which = getattr(message, "WhichOneof", None)
    return (which("message") if which else None) or type(message).__name__


def describe(error: grpc.RpcError) -> str:
    """One line of a gRPC failure."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
