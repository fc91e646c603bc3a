"""A byte proxy in front of a worker's gRPC port, whose links can be stalled or cut per client process.

The worker advertises the proxy's address, so routers and decode workers come through it. Which process a connection belongs to is
asked of the system: all of them come from one host.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import psutil

READ_BYTES = 1 << 16
OTHER = "other"  # a client that is no process of the cluster


class Link:
    """All connections of one client to one server. `open` by default."""

    def __init__(self) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._cut = False
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def connections(self) -> int:
        return len(self._writers) // 2

    def stall(self) -> None:
        """Connections stay, and new ones are taken, but no byte gets through until `heal`."""
        self._flows.clear()

    def cut(self) -> None:
        """Connections are reset, and so is every new one until `heal`."""
        self._cut = True
        for writer in self._writers:
            writer.transport.abort()

    def heal(self) -> None:
        self._cut = False
        self._flows.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: tuple[str, int]) -> None:
        """Until either side closes."""
        if self._cut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*target)
        except OSError:  # nobody listens, as the client shall see it
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers -= both
            for end in both:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()


class Proxy:
    """One listening port for one worker. `pids`: process id by name, asked at every connection."""

    def __init__(self, port: int, target_port: int, pids: Callable[[], Mapping[str, int]]) -> None:
        self._port = port
        self._target = ("127.0.0.1", target_port)
        self._pids = pids
        self._links: dict[str, Link] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def link(self, client: str) -> Link:
        return self._links.setdefault(client, Link())

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(asyncio.CancelledError):
            client = owner(writer.get_extra_info("peername")[1], self._pids())
            await self.link(client).carry(reader, writer, self._target)


def owner(port: int, pids: Mapping[str, int]) -> str:
    """The process that has a TCP connection from this local port; `OTHER` if none of them has."""
    for name, pid in pids.items():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has just been killed
            if any(c.laddr and c.laddr.port == port and c.raddr for c in psutil.Process(pid).net_connections("tcp")):
                return name
    return OTHER
