"""The router's process: builds every object from the configuration, runs them, and stops them in order.

    python -m services.router.main --model FOLDER [--http-port 8000] [--grpc-port 7000] [--config FILE]

Tests and the demo use `Router` directly; it takes any registry and free ports.
"""

import asyncio
import dataclasses
import logging
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

from grpc import aio

from services.router.admin.servicer import AdminService
from services.router.admission.cluster import Cluster
from services.router.admission.gate import GateEvents, LocalGate
from services.router.admission.keys import KeyBook
from services.router.config import RouterConfig, read_config
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.link import LinkSettings
from services.router.front import Around, Front, listen
from services.router.generation import Generator
from services.router.http.app import Told
from services.router.loop import fastest_loop, spare_the_collector
from services.router.metrics import Metrics
from services.router.placing.local import LocalPlacer
from services.router.processes.children import Children, Owned
from services.router.text.tokenizer import load_model_text
from services.router.view.view import View, ViewSettings
from twinflow.contracts.errors import TwinflowError
from twinflow.node.registry.factory import RegistryKind, hosted_registry
from twinflow.node.server import NodeServer

log = logging.getLogger(__name__)


class Router:
    """`start`, then `http_address` and `grpc_address` are set; `stop` in the end, once. One process, or this one and
    `config.processes` for HTTP: then it has the view, the choice and the gate, and they ask it."""

    def __init__(self, config: RouterConfig) -> None:
        """Reads the model's folder and the API keys. Raises ModelError, and BadRequest for keys that cannot be read."""
        config = self.config = dataclasses.replace(config, served_model=config.model_name)  # looked up once
        self.metrics = Metrics()
        self.view = View(ViewSettings(config.index_bytes, config.stall_s))
        self.registry = hosted_registry(config.registry, config.silence_s, self.view.is_connected)
        text = load_model_text(config.model, config.tool_parser, config.reasoning_parser)
        cluster = Cluster(self.view, config.model_name, config.scheduling, config.worker_queue_s)
        told = GateEvents(self.metrics.queue_wait.observe, self.metrics.shed_one, self.metrics.left)
        self.gate = LocalGate(config.gate, cluster.look, cluster.check_fits, time.monotonic, told)
        self.placer = LocalPlacer(
            self.view, self.gate, config.model_name, config.scheduling, chosen=self.metrics.chosen
        )
        self.admin = AdminService(self.view, text, config.admin_s)
        self.front: Front | None = None
        self.children: Children | None = None
        if config.processes == 1:
            around = Around(
                self.registry, self.view, self.gate, self.placer, Told(self._newest, self._scrape, self._waiting)
            )
            self.front = Front(config, text, self.metrics, around, events=True)
            self.dispatcher = self.front.dispatcher
            keys = self.front.keys
            self.metrics.watch_keys(lambda: keys.failed_reloads)
        else:
            KeyBook(config.keys_file)  # raises what is wrong with it here, too
            self.children = Children(config, Owned(self.registry, self.gate, self.placer, self.metrics))
            self.dispatcher = Dispatcher(
                self.registry, self.view, LinkSettings(f"router-{uuid.uuid4().hex[:8]}", config.times)
            )
        self.metrics.watch_queue(lambda: self.gate.waiting, lambda: self.gate.waiting_tokens)
        self.metrics.watch_workers(self.view.counts, self.view.index_entries)
        self.metrics.watch_index(lambda: self.view.index_bytes)
        self.metrics.watch_registry(lambda: self.registry.up, lambda: len(self.registry.records()))
        self.http_address = ""
        self.grpc_address = ""
        self._parts: set[asyncio.Task[None]] = set()

    @property
    def generator(self) -> Generator:
        """Of a router in one process."""
        assert self.front is not None, "its HTTP processes have one each"
        return self.front.generator

    async def start(self) -> None:
        """Listens on both ports. Raises OSError when one is taken, and when an HTTP process does not start."""
        config = self.config
        self._grpc = NodeServer(config.grpc_host, config.grpc_port)
        listeners = listen(config.http_host, config.http_port, config.processes)
        await self._grpc.start(self._add_services, services_of(config))
        self._watching = asyncio.create_task(self.registry.run(), name="registry")
        if self.front is not None:
            await self.front.start(listeners[0])
            self._parts = {self._watching, *self.front.parts}
        if self.children is not None:
            self._dispatching = asyncio.create_task(self.dispatcher.run(), name="dispatcher")
            try:
                self._parts = {self._watching, self._dispatching, *await self.children.start(listeners)}
            except OSError:
                await self.stop()
                raise
        self.http_address = f"{config.http_host}:{listeners[0].getsockname()[1]}"
        self.grpc_address = f"{config.grpc_host}:{self._grpc.port}"
        await self._grpc.serving()

    def _add_services(self, server: aio.Server) -> None:
        self.registry.add_to(server)
        self.admin.add_to(server)

    async def _newest(self, limit: int, request_id: str) -> list[dict[str, Any]]:
        return self.placer.decisions.newest(limit, request_id)

    async def _scrape(self) -> bytes:
        return self.metrics.render()

    def _waiting(self) -> int:
        return self.gate.waiting

    def hurry(self) -> None:
        """A stop that is under way does not wait for running requests any more."""
        if self.front is not None:
            self.front.hurry()
        if self.children is not None:
            self.children.hurry()

    async def stop(self) -> None:
        """No new requests; running ones get `shutdown_s`, then are cancelled at their workers."""
        if self.front is not None:
            await self.front.stop()
        if self.children is not None:
            await self.children.stop()
            await cancelled(self._dispatching)
        await cancelled(self._watching)
        await self._grpc.stop(0.5)
        del self._grpc  # grpc wants its servers gone while their loop lives

    async def wait(self) -> None:
        """Returns, or raises, only when a part has ended by itself."""
        done, _ = await asyncio.wait(self._parts, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def services_of(config: RouterConfig) -> tuple[str, ...]:
    """Full names of the gRPC services."""
    direct = config.registry.registry is RegistryKind.DIRECT
    return ("twinflow.rpc.v1.Admin", *(("twinflow.rpc.v1.Registry",) if direct else ()))


async def run(config: RouterConfig) -> None:
    """Serves until SIGINT or SIGTERM; a second signal does not wait for running requests."""
    router = Router(config)
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            router.hurry()
        stopping.set()

    loop = asyncio.get_running_loop()
    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, on_signal)
    await router.start()
    spare_the_collector()
    print(
        f"twinflow router ready: model {config.model_name}, http://{router.http_address}/v1, "
        f"workers register at {router.grpc_address}",
        flush=True,
    )
    waits = [asyncio.create_task(stopping.wait()), asyncio.create_task(router.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if waits[1].done():
            waits[1].result()
    finally:
        for task in waits:
            task.cancel()
        await router.stop()


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config = read_config(sys.argv[1:] if argv is None else argv)
        level, form = config.log_level.upper(), "%(asctime)s %(levelname)s %(name)s %(message)s"
        logging.basicConfig(level=level, format=form, datefmt="%H:%M:%S")
        with asyncio.Runner(loop_factory=fastest_loop()) as runner:
            runner.run(run(config))
    except (TwinflowError, OSError, ValueError) as e:
        print(f"router: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
