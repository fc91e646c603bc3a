"""The embedded registry: workers dial the router and stay registered for as long as their stream talks.

Router side: `DirectRegistry`, a `Registry` and a gRPC servicer. The stream's end or `silence_s` without a record
removes the worker. A second incarnation under a live id is refused (two workers with one id are a mistake of the setup;
after a crash the old stream ends, and the newcomer gets in on one of its next tries).

Worker side: `DirectRegistration(addresses, record_provider).run()`. It repeats the record every second, so load and
draining travel with it, and dials again with a growing, jittered pause for as long as it runs. Cancelling `run`
deregisters.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc
from grpc import aio

from twinflow.contracts.errors import BadRequest, TwinflowError
from twinflow.contracts.workers import WorkerRecord
from twinflow.node.registry.base import Change, record_problem
from twinflow.node.registry.memory import MemoryRegistry
from twinflow.node.stream import Replies, end_if_cancelled
from twinflow.rpc.channel import open_channel
from twinflow.rpc.convert import record_from_pb, record_to_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as rpc

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
LOOKS = 6  # within it: what one of them takes longer was this process's own delay
REACH_S = 3.0  # one attempt to reach a router


class DirectRegistry(rpc.RegistryServicer):
    """`HostedRegistry`; one event loop owns it."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._table = MemoryRegistry()
        self._silence_s = silence_s
        self._reads: set[asyncio.Future[pb.WorkerRecord]] = set()

    @property
    def up(self) -> bool:
        return True

    def add_to(self, server: aio.Server) -> None:
        rpc.add_RegistryServicer_to_server(self, server)

    async def run(self) -> None:
        """Workers come by themselves; cancelling ends every stream, which is to happen before the server stops."""
        try:
            await asyncio.Event().wait()
        finally:
            self.close()

    def close(self) -> None:
        """Ends every stream."""
        for read in self._reads:
            read.cancel()

    def records(self) -> Mapping[str, WorkerRecord]:
        return self._table.records()

    def watch(self) -> AsyncIterator[Change]:
        return self._table.watch()

    async def Join(self, request_iterator: object, context: aio.ServicerContext) -> None:
        joined: WorkerRecord | None = None
        try:
            while (record := await self._next(context)) is not None:
                refusal = self._refusal(joined, record)
                if refusal:
                    log.warning("refused worker %s: %s", record.id, refusal)
                    await context.write(pb.JoinReply(error=refusal))
                    return
                self._table.put(record)
                if joined is None:
                    log.info("worker %s (%s) joined, incarnation %s", record.id, record.role.value, record.incarnation)
                    await context.write(pb.JoinReply())
                joined = record
        finally:
            if joined is not None:
                log.info("worker %s left, incarnation %s", joined.id, joined.incarnation)
                self._table.remove(joined)

    async def _next(self, context: aio.ServicerContext) -> WorkerRecord | None:
        """The next record; None at the stream's end, after too long a silence, or on `close`."""
        read = asyncio.ensure_future(context.read())
        self._reads.add(read)
        try:
            await self._hear(read)
            if not read.done() or read.cancelled():
                return None
            message = read.result()
        finally:
            read.cancel()
            self._reads.discard(read)
        if not isinstance(message, pb.WorkerRecord):  # EOF
            return None
        try:
            return record_from_pb(message)
        except BadRequest as e:
            await context.write(pb.JoinReply(error=e.message))
            return None

    async def _hear(self, read: "asyncio.Future[pb.WorkerRecord]") -> None:
        """Until it is read, or for `silence_s`. Time in which this process itself was held up doesn't count."""
        for _ in range(LOOKS):
            await asyncio.wait({read}, timeout=self._silence_s / LOOKS)
            if read.done():
                return

    def _refusal(self, joined: WorkerRecord | None, record: WorkerRecord) -> str:
        if problem := record_problem(record):
            return problem
        if joined is not None:
            return "" if joined.key == record.key else "one stream registers one worker; open another stream"
        known = self._table.records().get(record.id)
        if known is not None:
            return f"worker id {record.id!r} is taken by the live incarnation {known.incarnation} at {known.addresses}"
        return ""


class DirectRegistration:
    """Keeps one worker registered at every given router (`host:port`, or several, also comma-separated)."""

    def __init__(
        self,
        router_addresses: str | Sequence[str],
        record_provider: Callable[[], WorkerRecord],
        *,
        interval_s: float = HEARTBEAT_S,
        max_pause_s: float = 2.0,
    ) -> None:
        """`record_provider` is called on the event loop before every heartbeat and must not block."""
        given = router_addresses.split(",") if isinstance(router_addresses, str) else router_addresses
        self._addresses = [a.strip() for a in given if a.strip()]
        self._provide = record_provider
        self._interval_s = interval_s
        self._max_pause_s = max_pause_s
        self._joined: set[str] = set()
        self._poke = asyncio.Event()

    @property
    def registered(self) -> bool:
        """True while at least one router lists this worker."""
        return bool(self._joined)

    def announce(self) -> None:
        """Sends the record now instead of at the next beat, e.g. when draining starts."""
        self._poke.set()

    async def run(self) -> None:
        """Runs until cancelled. A router that is away or refuses is retried for ever; every change is logged."""
        async with asyncio.TaskGroup() as group:
            for address in self._addresses:
                group.create_task(self._keep(address))

    async def _keep(self, address: str) -> None:
        pause_s, last_problem, now = 0.1, "", asyncio.get_running_loop().time
        while True:
            begun_s = now()
            problem = await self._session(address)
            end_if_cancelled()
            self._joined.discard(address)
            if now() - begun_s > self._max_pause_s:  # not one that takes every worker in and drops it at once
                pause_s = 0.1
            if problem != last_problem:
                log.warning("not registered at %s: %s; dialling again", address, problem)
                last_problem = problem
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._max_pause_s)

    async def _session(self, address: str) -> str:
        """One stream from dial to end; returns why it ended."""
        channel = open_channel(address, REACH_S)
        try:
            call = rpc.RegistryStub(channel).Join()
            beats = asyncio.create_task(self._beat(call))
            try:
                return await self._listen(call, address)
            finally:
                beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)
                call.cancel()
        except TwinflowError as e:
            return e.message
        except grpc.RpcError as e:
            return f"{e.code().name}: {e.details()}" if isinstance(e, aio.AioRpcError) else str(e)
        finally:
            await channel.close(None)

    async def _beat(self, call: aio.StreamStreamCall) -> None:
        while True:
            self._poke.clear()
            await call.write(record_to_pb(self._provide()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):  # wait_for loses a cancellation before Python 3.12
                    await self._poke.wait()

    async def _listen(self, call: aio.StreamStreamCall, address: str) -> str:
        async for reply in Replies[pb.JoinReply](call):
            if reply.error:
                return str(reply.error)
            if address not in self._joined:
                self._joined.add(address)
                log.info("registered at %s", address)
        return "the router ended the stream"
