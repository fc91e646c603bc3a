"""The HTTP side of a router: everything between a listening socket and the workers' sessions, given somebody who admits and
places (`Gate`, `Placer`). In the router's one process, or in each of several HTTP processes."""

import asyncio
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from services.router.admission.base import Gate
from services.router.admission.keys import KeyBook
from services.router.config import RouterConfig
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.link import LinkSettings
from services.router.entry import Entry
from services.router.generation import Generator
from services.router.http.api import Api
from services.router.http.app import Told, build_app
from services.router.http.client import Connection
from services.router.metrics import Metrics
from services.router.placing.base import Placer
from services.router.text.tokenizer import ModelText
from services.router.view.view import View
from twinflow.node.registry.base import Registry

BACKLOG = 2048


class _HttpServer(uvicorn.Server):
    """Signals are the process's, not the HTTP server's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class Around:
    """What the HTTP side works with and does not own."""

    registry: Registry
    view: View
    gate: Gate
    placer: Placer
    told: Told


class Front:
    """`start`, and in the end `stop`, once."""

    def __init__(self, config: RouterConfig, text: ModelText, metrics: Metrics, around: Around, events: bool) -> None:
        """`events`: its sessions also feed the view's index. Raises BadRequest for API keys that cannot be read."""
        self._config = config
        settings = LinkSettings(f"router-{uuid.uuid4().hex[:8]}", config.times, config.buffer_tokens, events)
        self.dispatcher = Dispatcher(around.registry, around.view, settings)
        self.keys = KeyBook(config.keys_file)
        self.generator = Generator(config, text, around.placer, self.dispatcher, metrics)
        metrics.watch_generations(lambda: self.generator.running)
        entry = Entry(around.gate, around.placer)
        api = Api(config, text, self.generator, entry, created=int(time.time()))
        self._app = build_app(api, around.view, self.generator, metrics, self.keys, around.told)

    async def start(self, listener: socket.socket) -> None:
        config = self._config
        self._dispatching = asyncio.create_task(self.dispatcher.run(), name="dispatcher")
        self._following = asyncio.create_task(self.keys.watch(config.keys_reload_s), name="keys")
        options = uvicorn.Config(
            self._app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            http=Connection,
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

    def hurry(self) -> None:
        """A stop that is under way does not wait for running requests any more."""
        self._http.force_exit = True

    async def stop(self) -> None:
        """No new requests; running ones get `shutdown_s`, then are cancelled at their workers."""
        self._http.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        for task in (self._dispatching, self._following):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def parts(self) -> set[asyncio.Task[None]]:
        """Tasks that end only by `stop`, or because something broke."""
        return {self._serving, self._dispatching, self._following}


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """`count` sockets on one port, among which the kernel spreads connections. Raises OSError when the port is taken."""
    first = _bound(host, port, shared=False)
    if count == 1:
        return [first]
    port = first.getsockname()[1]
    first.close()  # nobody else has the port, not even shared
    return [_bound(host, port, shared=True) for _ in range(count)]


def _bound(host: str, port: int, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By number: asyncio sets TCP_NODELAY on what it accepts only where the listener says that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        if shared:
            listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {e.strerror}") from e
    listener.setblocking(False)
    return listener
