"""The router's process: builds every object from the configuration, runs them, and stops them in order.

    python -m services.router.main --model FOLDER [--http-port 8000] [--grpc-port 7000] [--config FILE]

Tests and the demo use `Router` directly; it takes any registry and free ports.
"""

import asyncio
import dataclasses
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from grpc import aio

from services.router.admin.servicer import AdminService
from services.router.admission.cluster import Cluster
from services.router.admission.gate import GateEvents, LocalGate
from services.router.admission.keys import KeyBook
from services.router.config import RouterConfig, read_config
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.link import LinkSettings
from services.router.entry import Entry
from services.router.generation import Generator
from services.router.http.api import Api
from services.router.http.app import build_app
from services.router.metrics import Metrics
from services.router.text.tokenizer import load_model_text
from services.router.view.view import View, ViewSettings
from twinflow.contracts.errors import TwinflowError
from twinflow.node.registry.factory import RegistryKind, hosted_registry
from twinflow.node.server import NodeServer

log = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """Signals are the process's, not the HTTP server's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Router:
    """`start`, then `http_address` and `grpc_address` are set; `stop` in the end, once."""

    def __init__(self, config: RouterConfig) -> None:
        """Reads the model's folder and the API keys. Raises ModelError, and BadRequest for keys that cannot be read."""
        config = self.config = dataclasses.replace(config, served_model=config.model_name)  # looked up once
        self.metrics = Metrics()
        self.view = View(ViewSettings(config.index_bytes, config.stall_s))
        self.registry = hosted_registry(config.registry, config.silence_s, self.view.is_connected)
        text = load_model_text(config.model, config.tool_parser, config.reasoning_parser)
        settings = LinkSettings(
            router_id=f"router-{uuid.uuid4().hex[:8]}",
            times=config.times,
            buffer_tokens=config.buffer_tokens,
        )
        self.dispatcher = Dispatcher(self.registry, self.view, settings)
        self.keys = KeyBook(Path(config.api_keys) if config.api_keys else None)
        cluster = Cluster(self.view, config.model_name, config.scheduling, config.worker_queue_s)
        told = GateEvents(self.metrics.queue_wait.observe, self.metrics.shed_one, self.metrics.left)
        self.gate = LocalGate(config.gate, cluster.look, cluster.check_fits, time.monotonic, told)
        self.generator = Generator(config, text, self.view, self.dispatcher, self.metrics, self.gate)
        self.metrics.watch_queue(lambda: self.gate.waiting, lambda: self.gate.waiting_tokens)
        self.metrics.watch_keys(lambda: self.keys.failed_reloads)
        self.metrics.watch_workers(self.view.counts, self.view.index_entries)
        self.metrics.watch_registry(lambda: self.registry.up, lambda: len(self.registry.records()))
        self.admin = AdminService(self.view, text, config.admin_s)
        entry = Entry(self.gate, self.view, config.model_name, config.scheduling)
        api = Api(config, text, self.generator, entry, created=int(time.time()))
        self.app = build_app(api, self.view, self.generator, self.metrics, self.keys, lambda: self.gate.waiting)
        self.http_address = ""
        self.grpc_address = ""

    async def start(self) -> None:
        """Listens on both ports. Raises OSError when one is taken."""
        config = self.config
        self._grpc = NodeServer(config.grpc_host, config.grpc_port)
        listener = listen(config.http_host, config.http_port)
        await self._grpc.start(self._add_services, services_of(config))
        self._watching = asyncio.create_task(self.registry.run(), name="registry")
        self._dispatching = asyncio.create_task(self.dispatcher.run(), name="dispatcher")
        self._following = asyncio.create_task(self.keys.watch(config.keys_reload_s), name="keys")
        options = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,  # longer than clients keep idle connections, so that none is closed under a request
            timeout_graceful_shutdown=max(1, round(config.shutdown_s)),
        )
        self._http = _HttpServer(options)
        self._serving = asyncio.create_task(self._http.serve(sockets=[listener]), name="http")
        while not self._http.started:
            if self._serving.done():
                self._serving.result()
                raise OSError("the HTTP server did not start")
            await asyncio.sleep(0.01)
        self.http_address = f"{config.http_host}:{listener.getsockname()[1]}"
        self.grpc_address = f"{config.grpc_host}:{self._grpc.port}"
        await self._grpc.serving()

    def _add_services(self, server: aio.Server) -> None:
        self.registry.add_to(server)
        self.admin.add_to(server)

    async def stop(self) -> None:
        """No new requests; running ones get `shutdown_s`, then are cancelled at their workers."""
        self._http.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        for task in (self._dispatching, self._watching, self._following):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._grpc.stop(0.5)
        del self._grpc  # grpc wants its servers gone while their loop lives

    async def wait(self) -> None:
        """Returns, or raises, only when a part has ended by itself."""
        parts = {self._serving, self._dispatching, self._watching, self._following}
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def services_of(config: RouterConfig) -> tuple[str, ...]:
    """Full names of the gRPC services."""
    direct = config.registry.registry is RegistryKind.DIRECT
    return ("twinflow.rpc.v1.Admin", *(("twinflow.rpc.v1.Registry",) if direct else ()))


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By number: asyncio sets TCP_NODELAY on what it accepts only where the listener says that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {e.strerror}") from e
    listener.setblocking(False)
    return listener


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where there is one."""
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


async def run(config: RouterConfig) -> None:
    """Serves until SIGINT or SIGTERM; a second signal does not wait for running requests."""
    router = Router(config)
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            router._http.force_exit = True
        stopping.set()

    loop = asyncio.get_running_loop()
    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, on_signal)
    await router.start()
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
