"""The owner's side: starts the HTTP processes, answers them, takes back what a dead one held, and starts it again.

Every process listens on a socket of its own on the same port (SO_REUSEPORT: the kernel spreads connections evenly). The owner
keeps the sockets open, so that connections to a process that has just died wait for the next one instead of being refused.
"""

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from prometheus_client import Metric

from services.router.admission.gate import LocalGate
from services.router.config import RouterConfig
from services.router.metrics import Metrics
from services.router.placing.base import Ended, Want
from services.router.placing.local import LocalPlacer
from services.router.processes.line import Line
from services.router.processes.merge import render
from services.router.processes.messages import (
    Begun,
    Enter,
    Failed,
    GiveMetrics,
    Gone,
    Granted,
    Least,
    Leave,
    Newest,
    Ready,
    Scrape,
    Setup,
    Stop,
    Withdrawn,
)
from services.router.schedule.base import Choice
from twinflow.contracts.errors import TwinflowError
from twinflow.node.registry.base import Registry

log = logging.getLogger(__name__)

MAX_PAUSE_S = 5.0  # before a process is started again
METRICS_S = 1.0  # for the answer of each process
END_S = 5.0  # for a process to end after its last request


Scraper = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Owned:
    """What the HTTP processes ask for."""

    registry: Registry
    gate: LocalGate
    placer: LocalPlacer
    metrics: Metrics


class Children:
    """`start` and `stop` once."""

    def __init__(self, config: RouterConfig, owned: Owned) -> None:
        self._config = config
        self._owned = owned
        self._children: list[Child] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: Sequence[socket.socket] = ()

    @property
    def pids(self) -> list[int]:
        """Of those that run."""
        return [child.pid for child in self._children if child.pid]

    async def start(self, listeners: Sequence[socket.socket]) -> set[asyncio.Task[None]]:
        """One process per socket; returns once all serve. The tasks end only by `stop`. Raises OSError if one does not
        start."""
        self._listeners = listeners
        self._children = [Child(self._config, i, s, self._owned, self.scrape) for i, s in enumerate(listeners)]
        self._tasks = {asyncio.create_task(child.run(), name=f"http-{child.index}") for child in self._children}
        ready = asyncio.create_task(self._all_ready())
        await asyncio.wait({ready, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        failed = [task for task in self._tasks if task.done()]
        if failed:
            await self.stop()
            failed[0].result()
        return self._tasks

    async def _all_ready(self) -> None:
        for child in self._children:
            await child.ready.wait()

    def hurry(self) -> None:
        for child in self._children:
            child.stop(hurry=True)

    async def stop(self) -> None:
        for child in self._children:
            child.stop()
        _, late = await asyncio.wait(self._tasks, timeout=self._config.shutdown_s + END_S)
        for child in self._children if late else ():
            child.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def scrape(self) -> bytes:
        """Metrics of all processes; one that does not answer is left out."""
        told = await asyncio.gather(*(child.metrics() for child in self._children))
        return render([list(self._owned.metrics.registry.collect()), *(families for families in told if families)])


class Child:
    """One place among the HTTP processes, whichever process has it at the moment."""

    def __init__(
        self, config: RouterConfig, index: int, listener: socket.socket, owned: Owned, scrape: Scraper
    ) -> None:
        self.index = index
        self.pid = 0
        self.ready = asyncio.Event()
        self._config = config
        self._listener = listener
        self._owned = owned
        self._scrape = scrape
        self._line: Line | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._numbers = itertools.count(-1, -1)
        self._asked: dict[int, asyncio.Future[object]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # questions that take time, by number
        self._permits: dict[int, int] = {}  # granted and not left: by number of the question
        self._placed: dict[str, Choice] = {}  # and not ended

    # ---- the process ----

    async def run(self) -> None:
        """Until `stop`. Raises OSError when the process ends before it ever served."""
        pause_s = 0.1
        while True:
            code = await self._life()
            if self._stopping:
                return
            if not self.ready.is_set():
                raise OSError(f"HTTP process {self.index} did not start (exit code {code}); its output says why")
            log.error("HTTP process %d ended with code %s; it is started again", self.index, code)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _life(self) -> int:
        """Of one process, to its end."""
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._listener.fileno())
        argv = (sys.executable, "-m", "services.router.processes.child", *map(str, fds))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *argv, pass_fds=fds, stdin=asyncio.subprocess.DEVNULL, env=env
            )
        self.pid = self._process.pid
        line = self._line = await Line.over(ours)
        line.send(0, Setup(self._config, self.index))
        if self._stopping:
            line.send(0, Stop())
        changes = asyncio.create_task(self._tell_changes(line))
        try:
            while (frame := await line.receive()) is not None:
                await self._handle(line, *frame)
        finally:
            changes.cancel()
            await asyncio.gather(changes, return_exceptions=True)
            self.pid, self._line = 0, None
            line.close()
            await self._take_back()
        return await self._process.wait()

    def stop(self, hurry: bool = False) -> None:
        self._stopping = True
        if self._line is not None:
            self._line.send(0, Stop(hurry))

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _take_back(self) -> None:
        """What it held, and what it waited for."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for permit_id in self._permits.values():
            self._owned.gate.leave(permit_id, 0)
        for id, choice in self._placed.items():
            self._owned.placer.ended(Ended(id, choice))
        self._tasks, self._permits, self._placed = {}, {}, {}
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)

    async def _tell_changes(self, line: Line) -> None:
        async for change in self._owned.registry.watch():
            line.send(0, change)

    # ---- what is said ----

    async def metrics(self) -> list[Metric] | None:
        """None when it does not answer."""
        if self._line is None:
            return None
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._line.send(number, GiveMetrics())
        try:
            async with asyncio.timeout(METRICS_S):
                found = await answer
        except TimeoutError:
            return None
        finally:
            del self._asked[number]
        return found if isinstance(found, list) else None

    async def _handle(self, line: Line, number: int, message: object) -> None:
        """In order; nothing here waits but for the gate, which has a task."""
        placer = self._owned.placer
        match message:
            case Want():
                await self._place(line, number, message)
            case Begun(id):
                placer.begun(id)
            case Ended():
                self._placed.pop(message.id, None)
                placer.ended(message)
            case Gone(id):
                choice = self._placed.pop(id, None)
                if choice is not None:
                    placer.ended(Ended(id, choice))
            case Enter():
                self._tasks[number] = asyncio.create_task(self._enter(line, number, message))
            case Withdrawn(withdrawn):
                self._withdraw(withdrawn)
            case Leave(permit_id, tokens):
                self._permits = {n: id for n, id in self._permits.items() if id != permit_id}
                self._owned.gate.leave(permit_id, tokens)
            case Least(prompt, max_tokens):
                try:
                    line.send(number, await placer.least_ttft_s(prompt, max_tokens))
                except TwinflowError as e:
                    line.send(number, Failed(e))
            case Scrape():
                self._tasks[number] = asyncio.create_task(self._send_metrics(line, number))
            case Newest(limit, request_id):
                line.send(number, placer.decisions.newest(limit, request_id))
            case Ready():
                self.ready.set()
            case _ if number < 0:
                if number in self._asked and not self._asked[number].done():
                    self._asked[number].set_result(message)

    async def _place(self, line: Line, number: int, want: Want) -> None:
        try:
            found = await self._owned.placer.place(want)
        except TwinflowError as e:
            line.send(number, Failed(e))
            return
        if isinstance(found, Choice):
            self._placed[want.id] = found
        line.send(number, found)

    async def _enter(self, line: Line, number: int, enter: Enter) -> None:
        gate = self._owned.gate
        try:
            permit = await gate.enter(enter.ask)
            self._permits[number] = permit.id
            line.send(number, Granted(permit, gate.idle, gate.waiting))
        except TwinflowError as e:
            line.send(number, Failed(e))
        finally:
            self._tasks.pop(number, None)

    def _withdraw(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None:
            task.cancel()
        permit_id = self._permits.pop(number, None)
        if permit_id is not None:
            self._owned.gate.leave(permit_id, 0)

    async def _send_metrics(self, line: Line, number: int) -> None:
        try:
            line.send(number, await self._scrape())
        finally:
            self._tasks.pop(number, None)
