"""The engine as a thread of this process: all three services in one process for tests, over the loopback transport."""

import asyncio
import threading
from collections.abc import AsyncIterator

from twinflow.contracts.errors import ModelError, TwinflowError
from twinflow.engine.base import Command, Ready, Report, Shutdown
from twinflow.engine.build import TransportFactory, build_engine
from twinflow.engine.config import EngineConfig
from twinflow.engine.core import Engine
from twinflow.engine.loop import Inbox, run_loop


class ThreadEngine:
    """`EngineClient` over a thread. `transport` as for `build_engine`; `engine` is there for tests to look into."""

    def __init__(self, transport: TransportFactory | None) -> None:
        self._transport = transport
        self._inbox: Inbox = Inbox()
        self._queue: asyncio.Queue[Report | None] = asyncio.Queue()
        self._thread: threading.Thread | None = None
        self.engine: Engine | None = None

    async def start(self, config: EngineConfig) -> Ready:
        try:
            self.engine, ready = await asyncio.to_thread(build_engine, config, self._inbox.put, self._transport)
        except (TwinflowError, ValueError) as error:
            raise ModelError(str(error)) from error
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop, self.engine), name="engine", daemon=True)
        self._thread.start()
        return ready

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    async def reports(self) -> AsyncIterator[Report]:
        while (report := await self._queue.get()) is not None:
            yield report

    @property
    def unheard_s(self) -> float:
        """Its process is this one: whoever asks has heard of it."""
        return 0.0

    async def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _run(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        def send(report: Report) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, report)

        run_loop(engine, self._inbox, send)
        engine.close()
        loop.call_soon_threadsafe(self._queue.put_nowait, None)
