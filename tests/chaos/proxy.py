"""A byte proxy in front of a worker's gRPC port, whose links can be stalled or cut per client process.

The worker advertises the proxy's address, so routers and decode workers come through it. Whose a connection is, its address tells
where that worker has a host of its own; the others share one, and the system is asked. `connect_s` makes connections slow to
begin, as those of a far host are.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping

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

    @property
    def healthy(self) -> bool:
        return self._flows.is_set() and not self._cut

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

    def join(self, *writers: asyncio.StreamWriter) -> None:
        """These, both ends of one connection, are of this link from now on."""
        self._writers |= set(writers)
        if self._cut:
            self.cut()

    def leave(self, *writers: asyncio.StreamWriter) -> None:
        self._writers -= set(writers)

    async def open(self) -> None:
        """Waits until bytes may pass."""
        await self._flows.wait()


class Proxy:
    """One listening socket, which it owns, for one worker. `pids`: process id by name, asked at every connection; `hosts`: name
    by address, of those that are alone there; `connect_s`: from a connection until its first byte passes."""

    def __init__(
        self,
        listening: socket.socket,
        target: tuple[str, int],
        pids: Callable[[], Mapping[str, int]],
        connect_s: float = 0.0,
        hosts: Mapping[str, str] | None = None,
    ) -> None:
        self._socket = listening
        self._target = target
        self._pids = pids
        self._connect_s = connect_s
        self._hosts = hosts or {}
        self._links: dict[str, Link] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def link(self, client: str) -> Link:
        return self._links.setdefault(client, Link())

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._socket)

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
            await self._carry(reader, writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either side closes. Whose it is takes a while to find out: bytes wait for that only where it matters."""
        connection = Connection(writer)
        finding = asyncio.create_task(self._find(connection))

        async def may_pass() -> None:
            if not all(link.healthy for link in self._links.values()):
                await asyncio.shield(finding)
                await connection.open()

        try:
            await asyncio.sleep(self._connect_s)
            await may_pass()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            connection.add(far_writer)
            pumps = [pump(reader, far_writer, may_pass), pump(far_reader, writer, may_pass)]
            await first_of(pumps)
        except OSError:  # nobody listens, as the client shall see it
            writer.transport.abort()
        finally:
            await asyncio.gather(finding, return_exceptions=True)
            await connection.close()

    async def _find(self, connection: "Connection") -> None:
        client = self._hosts.get(connection.client[0])
        client = client or await asyncio.to_thread(owner, connection.client, self._pids())
        connection.belongs(self.link(client))


class Connection:
    """The two ends of what one client has opened; its link once that is known."""

    def __init__(self, near: asyncio.StreamWriter) -> None:
        self._writers = [near]
        self._link: Link | None = None
        self.client: tuple[str, int] = near.get_extra_info("peername")[:2]

    def add(self, far: asyncio.StreamWriter) -> None:
        self._writers.append(far)
        if self._link is not None:
            self._link.join(far)

    def belongs(self, link: Link) -> None:
        self._link = link
        link.join(*self._writers)

    async def open(self) -> None:
        if self._link is not None:
            await self._link.open()

    async def close(self) -> None:
        if self._link is not None:
            self._link.leave(*self._writers)
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: Callable[[], Awaitable[None]]
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            await may_pass()
            writer.write(data)
            await writer.drain()


async def first_of(pumps: Iterable[Coroutine[object, object, None]]) -> None:
    """Runs all until the first ends, then ends the others."""
    tasks = [asyncio.create_task(p) for p in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def slow_way(target_port: int, connect_s: float) -> AsyncIterator[str]:
    """The address of a proxy in front of this port, every connection to which takes so long to begin."""
    listening = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(listening, ("127.0.0.1", target_port), dict, connect_s)
    await proxy.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await proxy.close()


def owner(client: tuple[str, int], pids: Mapping[str, int]) -> str:
    """The process that has a TCP connection from this address and port; `OTHER` if none of them has."""
    for name, pid in pids.items():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has just been killed
            for c in psutil.Process(pid).net_connections("tcp"):
                if (
                    c.raddr and (c.laddr.ip.removeprefix("::ffff:"), c.laddr.port) == client
                ):  # IPv4, maybe in a socket of IPv6
                    return name
    return OTHER
