"""The engine as a process of its own: spawned by the front, one duplex pipe, gone when either end goes.

The child imports torch; this module does not, so that a front stays light.
"""

import asyncio
import logging
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

from twinflow.contracts.errors import Internal, ModelError
from twinflow.engine.base import Beat, Command, Ready, Report, Shutdown
from twinflow.engine.config import EngineConfig
from twinflow.engine.outbox import Outbox

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0


class ProcessEngine:
    """`EngineClient` over a spawned process. Use from one asyncio loop."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None
        self._outbox: Outbox | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._queue: asyncio.Queue[Report | None] = asyncio.Queue()
        self._closing = False
        self._heard_at: float | None = None  # time.monotonic() of the last thing it said; written by the reader thread

    async def start(self, config: EngineConfig) -> Ready:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(config, theirs), name="engine", daemon=True)
        self._process.start()
        theirs.close()
        self._outbox = Outbox(self._pipe)
        try:
            ready = await asyncio.to_thread(self._pipe.recv)
        except EOFError:
            raise ModelError("the engine process died while loading; its log says why") from None
        if ready.error:
            await self.close()
            raise ModelError(ready.error)
        self._heard_at = time.monotonic()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="engine-reader", daemon=True).start()
        return ready

    def send(self, command: Command) -> None:
        if self._outbox is None or self._closing:
            return
        try:
            self._outbox.send(command)
        except OSError:
            log.warning("engine is gone, dropped %s", type(command).__name__)

    async def reports(self) -> AsyncIterator[Report]:
        while (report := await self._queue.get()) is not None:
            yield report
        if not self._closing:
            raise Internal("the engine process died; its log says why")

    @property
    def unheard_s(self) -> float:
        return 0.0 if self._heard_at is None else time.monotonic() - self._heard_at

    async def close(self) -> None:
        if self._process is None or self._closing:
            return
        self.send(Shutdown())
        self._closing = True
        await asyncio.to_thread(self._process.join, CLOSE_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        if self._outbox is not None:
            self._outbox.close()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reader thread: from the pipe into the asyncio queue; None marks the end."""
        assert self._pipe is not None
        try:
            while True:
                said = self._pipe.recv()
                self._heard_at = time.monotonic()
                if not isinstance(said, Beat):
                    loop.call_soon_threadsafe(self._queue.put_nowait, said)
        except (EOFError, OSError):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._queue.put_nowait, None)


def _child(config: EngineConfig, pipe: Connection) -> None:
    """Entry of the engine process."""
    from twinflow.engine.child import main  # torch is imported here and not in the front

    main(config, pipe)
