"""The front process of a worker, whatever its role: engine, server, registration, and the one reader of engine reports.

    async with open_front(config, engine, make_role) as front:    loaded, served, registered
        await front.wait()                                        raises Internal when the engine dies
    … deregistered, streams ended, requests cancelled, engine closed

A role (`services.prefill`, `services.decode`) adds what it does with requests and with the engine's notices.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from grpc import aio

from twinflow.contracts.errors import BadRequest, Draining, Internal, TwinflowError
from twinflow.contracts.groups import GroupKind
from twinflow.contracts.workers import Load, Pace, Role, WorkerRecord
from twinflow.engine.base import (
    Answer,
    CacheSnapshot,
    Cancel,
    Continued,
    Flushed,
    Inspected,
    MatchFound,
    Notice,
    Ready,
    Report,
    Transfer,
)
from twinflow.engine.client import EngineClient
from twinflow.engine.config import EngineConfig
from twinflow.engine.leaving import Signals, drained
from twinflow.engine.metrics import WorkerMetrics
from twinflow.engine.questions import Questions
from twinflow.engine.routers import RouterStreams, Submissions
from twinflow.engine.silence import EngineSilence
from twinflow.node.handshake import GRAMMAR, Layout
from twinflow.node.pulse import SessionTimes
from twinflow.node.registry.factory import RegistrySettings, registration
from twinflow.node.scrape import ScrapeServer
from twinflow.node.server import NodeServer
from twinflow.node.settings import read_settings, setting, take
from twinflow.transfer.base import GenerationClosed, GenerationOpened

log = logging.getLogger(__name__)

WORKER_SERVICES = ("twinflow.rpc.v1.Worker", "twinflow.rpc.v1.Admin")
STOP_GRACE_S = 1.0  # for streams to end by themselves once everything on them is over


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Settings of any worker; a role's config adds its own. `engine` says what runs behind, its incarnation is drawn at
    start."""

    engine: EngineConfig
    session: SessionTimes = field(default_factory=SessionTimes)
    registry: RegistrySettings = field(default_factory=RegistrySettings)
    host: str = setting("127.0.0.1", "where the gRPC server listens")
    port: int = setting(0, "of the gRPC server, 0 = any free one")
    advertise: str = setting("", "host:port that other processes dial (default: host and port; own name for 0.0.0.0)")
    router: tuple[str, ...] = setting((), "gRPC addresses host:port of the routers to register at (registry=direct)")
    metrics_host: str = setting("127.0.0.1", "where GET /metrics is answered")
    metrics_port: int = setting(0, "of GET /metrics, 0 = any free one (see the ready line), -1 = off")
    # Long enough for most answers; a supervisor that kills earlier (docker stop: 10 s, a pod's grace period) cuts it short.
    drain_s: float = setting(
        60.0, "how long requests and leases have to end after SIGTERM; what is left then is cut off"
    )
    served_model: str = setting("", "name that clients use (default: last part of the model's folder or hub id)")
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR")

    @property
    def model_name(self) -> str:
        return self.served_model or self.engine.model.rstrip("/").rsplit("/", 1)[-1]


C = TypeVar("C", bound=FrontConfig)


@dataclass(frozen=True, slots=True)
class Identity:
    """The options of a worker that end in `EngineConfig` and stand at the top level."""

    model: str = setting("", "folder or hub id")
    worker_id: str = setting("", "unique in the cluster (default: role, host and process id)")
    role: Role | None = field(default=None, metadata={"help": "what this worker does"})


HIDDEN = {f"engine.{name}" for name in ("model", "worker_id", "incarnation", "role")}  # the front fills these in


def tables_of(kind: type[FrontConfig]) -> dict[str, tuple[type, ...]]:
    """What a worker's file and command line can say: the dataclasses behind each table."""
    return {"": (Identity, kind, RegistrySettings), "engine": (EngineConfig,), "session": (SessionTimes,)}


def load_config(kind: type[C], prog: str, argv: Sequence[str], roles: Sequence[Role]) -> C:
    """From `--config file.toml` and options; the latter win. `roles`: what this service can be, the default first.
    Raises BadRequest naming the setting."""
    values = read_settings(prog, tables_of(kind), argv, HIDDEN, description=f"A {roles[0].value} worker.")
    own = values[""]
    identity, registry = take(Identity, own), take(RegistrySettings, own)
    role = identity.role or roles[0]
    if role not in roles:
        raise BadRequest(f"role {role.value!r} is not one of {', '.join(r.value for r in roles)}", param="role")
    if not identity.model:
        raise BadRequest("no model: give --model, a folder or a hub id", param="model")
    worker_id = identity.worker_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}"
    engine = EngineConfig(model=identity.model, worker_id=worker_id, incarnation="", role=role, **values["engine"])
    return kind(engine=engine, session=SessionTimes(**values["session"]), registry=registry, **own)


class RoleService(Submissions, Protocol):
    """What a role adds. Everything is called on the front's loop and must not block."""

    def add_to(self, server: aio.Server) -> None:
        """Registers the gRPC servicers: `WORKER_SERVICES`."""
        ...

    def notice(self, notice: Notice) -> None:
        """A notice about a request, `Continued` excepted."""
        ...

    def token(self, request_id: str, token_id: int) -> None:
        """The next token of a request that goes on."""
        ...

    def engine_lost(self, error: TwinflowError) -> None:
        """Every request ends with this error."""
        ...

    def left(self) -> tuple[int, int]:
        """(requests of routers, open hand-offs) that a drain waits for."""
        ...

    async def close(self) -> None:
        """Ends sessions and cancels what still runs."""
        ...


class Front:
    """What every role shares once the engine is ready; built by `open_front`."""

    def __init__(self, config: FrontConfig, engine: EngineClient) -> None:
        engine_config = dataclasses.replace(config.engine, incarnation=secrets.token_hex(8))
        self.config = dataclasses.replace(config, engine=engine_config)
        self.engine = engine
        self.ready = Ready()
        self.address = ""
        self.load = Load()
        self.draining = False
        self.announce: Callable[[], None] = lambda: None  # tells the registry the record as it is now
        self.registration = registration(config.registry, config.router, self.record)
        self.metrics = WorkerMetrics(self.record, lambda: self.registration.registered, self._unit_bytes)
        self.scrapes = ScrapeServer(self.metrics.render)
        self.questions = Questions(engine.send)
        self.silence = EngineSilence(lambda: engine.unheard_s)
        self.silence.listeners.append(self._engine_silence)
        self.routers = RouterStreams(self.record, engine.send, config.session, lambda: self.silence.silent_s)
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def worker_id(self) -> str:
        return self.config.engine.worker_id

    @property
    def incarnation(self) -> str:
        return self.config.engine.incarnation

    def _unit_bytes(self) -> dict[str, int]:
        return {group.name: group.unit_bytes for group in self.ready.groups}

    @property
    def layout(self) -> Layout:
        return Layout(self.worker_id, self.ready.fingerprint, self.ready.layout)

    def drain(self, draining: bool) -> bool:
        """From now on this worker takes (no) new work; True if that is a change, which the registry is told at once."""
        changed, self.draining = self.draining is not draining, draining
        if changed:
            log.info("%s %s", self.worker_id, "is draining" if draining else "takes new work again")
            self.announce()
        return changed

    def check_not_draining(self) -> None:
        """Raises Draining while this worker takes nothing new."""
        if self.draining:
            raise Draining(f"{self.worker_id} is draining: it finishes what it has and takes nothing new")

    def record(self) -> WorkerRecord:
        unit_bytes = {group.kind: group.unit_bytes for group in self.ready.groups}
        return WorkerRecord(
            id=self.worker_id,
            incarnation=self.incarnation,
            role=self.config.engine.role,
            addresses=(self.address,),
            model=self.config.model_name,
            fingerprint=self.ready.fingerprint,
            max_model_tokens=self.ready.max_model_tokens,
            max_request_tokens=self.ready.max_request_tokens,
            block_tokens=self.ready.block_tokens,
            draining=self.draining,
            load=self.load,
            block_bytes=unit_bytes.get(GroupKind.ATTENTION, 0),
            slot_bytes=unit_bytes.get(GroupKind.STATE, 0),
            features=(GRAMMAR,),
        )

    def read_reports(self, role: RoleService) -> None:
        """Starts the one task that reads the engine, and the one that notices when there is nothing to read."""
        self._reader = asyncio.create_task(self._read(role), name="engine-reports")
        self._watcher = asyncio.create_task(self.silence.watch(), name="engine-silence")

    async def wait(self) -> None:
        """For ever, that is until cancelled. Raises Internal if the engine ends first."""
        assert self._reader is not None
        await asyncio.shield(self._reader)
        raise Internal("the engine has shut down by itself")

    def check_engine(self) -> None:
        """Raises what ended the engine, if it has ended by itself."""
        reader = self._reader
        if reader is not None and reader.done() and not reader.cancelled() and (error := reader.exception()):
            raise error

    async def _read(self, role: RoleService) -> None:
        try:
            async for report in self.engine.reports():
                self._handle(report, role)
        except TwinflowError as e:
            self.questions.lost(e)
            role.engine_lost(e)
            raise

    def _engine_silence(self) -> None:
        """It has fallen silent, or is heard again."""
        self.metrics.engine_silence(self.silence.lasts)
        self.routers.beat()

    def _handle(self, report: Report, role: RoleService) -> None:
        work = report.work
        pace = Pace(work.steps, report.busy_s, work.prefill_tokens, work.decode_tokens)
        self.load = dataclasses.replace(report.load, pace=pace)
        self.metrics.reported(report)
        for notice in report.notices:
            if isinstance(notice, Continued):
                self._continued(notice, role)
                continue
            try:
                self._dispatch(notice, role)
            except Exception:  # process edge: what another process said must not stop this one
                log.exception("a %s could not be handled", type(notice).__name__)
                if not isinstance(notice, Answer | Transfer):
                    self.engine.send(Cancel(notice.id))
        self.routers.publish(report.events)

    def _continued(self, notice: Continued, role: RoleService) -> None:
        for request_id, token_id in zip(notice.ids, notice.token_ids, strict=True):
            try:
                role.token(request_id, token_id)
            except Exception:  # process edge: one token must not cost the others theirs
                log.exception("a token of request %s could not be handled", request_id)
                self.engine.send(Cancel(request_id))

    def _dispatch(self, notice: Notice, role: RoleService) -> None:
        match notice:
            case CacheSnapshot():
                self.routers.snapshot(notice)
            case Flushed() | Inspected() | MatchFound():
                self.questions.answered(notice)
            case GenerationOpened() | GenerationClosed():
                self.metrics.transfer(notice)
                role.notice(notice)
            case _:
                role.notice(notice)

    async def close(self) -> None:
        for task in (self._watcher, self._reader):
            if task is not None:
                await _cancelled(task)
        await self.engine.close()


@contextlib.asynccontextmanager
async def open_front(
    config: FrontConfig, engine: EngineClient, make_role: Callable[[Front], RoleService]
) -> AsyncIterator[Front]:
    """Starts everything, registers once all is ready, and ends everything in the opposite order."""
    front = Front(config, engine)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(front.close)
        if config.metrics_port >= 0:
            await front.scrapes.start(config.metrics_host, config.metrics_port)
            stack.push_async_callback(front.scrapes.close)
        server = NodeServer(config.host, config.port)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        front.address = config.advertise or f"{reachable(config.host)}:{server.port}"
        front.ready = await engine.start(front.config.engine)
        role = make_role(front)
        await server.start(role.add_to, WORKER_SERVICES)
        front.read_reports(role)
        stack.push_async_callback(role.close)
        stack.callback(front.routers.close)
        await server.serving()
        front.announce = front.registration.announce
        stack.push_async_callback(_cancelled, asyncio.create_task(front.registration.run(), name="registration"))
        log.info(ready_line(front))
        yield front
        log.info("%s is stopping", front.worker_id)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def reachable(host: str) -> str:
    """The name under which others reach a server bound to `host`."""
    return socket.gethostname() if host in ("", "0.0.0.0", "::") else host


def ready_line(front: Front) -> str:
    """Role, address, model, fingerprint, arena, transport: one line once a worker serves."""
    ready, engine = front.ready, front.config.engine
    arena = "no arena to read from"
    if ready.arena is not None:
        a = ready.arena
        arena = (
            f"arena {a.total_bytes >> 20} MiB {a.memory}: up to {a.blocks} blocks of {a.block_bytes} B"
            f" or {a.slots} slots of {a.slot_bytes} B"
        )
    return (
        f"ready: {engine.role.value} worker {engine.worker_id} at {front.address}, model {front.config.model_name}"
        f", fingerprint {ready.fingerprint}, {arena}, transport {engine.transport}, incarnation {engine.incarnation}"
        f", metrics {front.scrapes.url or 'off'}"
    )


async def run_front(config: FrontConfig, engine: EngineClient, make_role: Callable[[Front], RoleService]) -> None:
    """The whole life of the process: until SIGINT, or SIGTERM and the drain that follows it (also while loading, then at
    once). Raises Internal if the engine dies."""
    signals = Signals.install()
    made: list[tuple[Front, RoleService]] = []

    def make(front: Front) -> RoleService:
        made.append((front, make_role(front)))
        return made[0][1]

    async def serve() -> None:
        async with open_front(config, engine, make) as front:
            signals.serving = True
            await front.wait()

    async def leave() -> None:
        await signals.drain.wait()
        front, role = made[0]
        front.drain(True)
        await drained(role.left, config.drain_s)

    serving, stopping = asyncio.create_task(serve()), asyncio.create_task(signals.stop.wait())
    leaving = asyncio.create_task(leave())
    await asyncio.wait({serving, stopping, leaving}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, leaving):
        task.cancel()
    if serving.done():
        await serving
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    for front, _ in made:  # a dead engine leaves nothing to wait for either: that is no clean end
        front.check_engine()
    log.info("stopped")


def run_process(prog: str, load: Callable[[], C], run: Callable[[C], Coroutine[Any, Any, None]]) -> int:
    """`main` of a worker: settings, log, loop; returns the exit code. Errors are one line, defects a traceback."""
    try:
        config = load()
        level, form = config.log_level.upper(), "%(asctime)s %(levelname)s %(name)s %(message)s"
        logging.basicConfig(level=level, format=form, datefmt="%H:%M:%S")
        asyncio.run(run(config))
    except (TwinflowError, OSError, ValueError) as e:
        print(f"{prog}: error: {e}", file=sys.stderr)
        return 1
    return 0
