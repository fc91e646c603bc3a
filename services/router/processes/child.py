"""An HTTP process: HTTP, text, and sessions with the workers; gate and choice are the owner's.

    python -m services.router.processes.child LINE_FD LISTEN_FD

It lives as long as the owner: when the line ends it takes no new connections, gives running replies `shutdown_s`, and ends.
"""

import asyncio
import logging
import signal
import socket
import sys
from typing import Any

from services.router.front import Around, Front
from services.router.http.app import Told
from services.router.loop import fastest_loop, spare_the_collector
from services.router.metrics import Metrics
from services.router.processes.line import Line
from services.router.processes.messages import GiveMetrics, Newest, Ready, Scrape, Setup, Stop
from services.router.processes.remote import Owner, RemoteGate, RemotePlacer
from services.router.text.tokenizer import load_model_text
from services.router.view.view import View, ViewSettings
from twinflow.contracts.errors import TwinflowError
from twinflow.node.registry.base import Change, ChangeKind
from twinflow.node.registry.memory import MemoryRegistry

log = logging.getLogger(__name__)

INDEX_BYTES = 1  # the smallest: the owner's view has the index


class HttpProcess:
    def __init__(self, line: Line, setup: Setup) -> None:
        """Reads the model's folder. Raises ModelError, and BadRequest for API keys that cannot be read."""
        config = setup.config
        self._line = line
        self._owner = Owner(line)
        self._registry = MemoryRegistry()
        self._metrics = Metrics()
        view = View(ViewSettings(INDEX_BYTES, config.stall_s))
        gate = RemoteGate(self._owner)
        placer = RemotePlacer(self._owner, lambda: self._registry.records().values())
        told = Told(self._newest, self._scrape, lambda: gate.waiting)
        text = load_model_text(config.model, config.tool_parser, config.reasoning_parser)
        around = Around(self._registry, view, gate, placer, told)
        self.front = Front(config, text, self._metrics, around, events=False)
        if setup.index == 0:  # all of them read the same file
            self._metrics.watch_keys(lambda: self.front.keys.failed_reloads)

    async def run(self, listener: socket.socket) -> None:
        """Returns after the owner's `Stop` or end."""
        await self.front.start(listener)
        spare_the_collector()
        self._line.send(0, Ready())
        reading = asyncio.create_task(self._read())
        await asyncio.wait({reading, *self.front.parts}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            log.error("a part of this HTTP process has ended")
        stopping = asyncio.create_task(self.front.stop())
        owned = not reading.done() or reading.result()
        while owned and not stopping.done():  # the owner still answers, and may be in a hurry
            reading = reading if not reading.done() else asyncio.create_task(self._read())
            await asyncio.wait({stopping, reading}, return_when=asyncio.FIRST_COMPLETED)
            owned = not reading.done() or reading.result()
        await stopping
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> bool:
        """Until the owner wants an end (True), or is gone (False)."""
        while (frame := await self._line.receive()) is not None:
            number, message = frame
            match message:
                case Change(kind, record):
                    if kind is ChangeKind.LEFT:
                        self._registry.remove(record)
                    else:
                        self._registry.put(record)
                case GiveMetrics():
                    self._line.send(number, list(self._metrics.registry.collect()))
                case Stop(hurry):
                    if hurry:
                        self.front.hurry()
                    return True
                case _:
                    self._owner.answered(number, message)
        self._owner.lost()
        log.error("the router's main process is gone")
        return False

    async def _newest(self, limit: int, request_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._owner.ask(Newest(limit, request_id))
        return found

    async def _scrape(self) -> bytes:
        page: bytes = await self._owner.ask(Scrape())
        return page


async def run(line_fd: int, listen_fd: int) -> None:
    line = await Line.over(socket.socket(fileno=line_fd))
    frame = await line.receive()
    if frame is None:
        return
    setup = frame[1]
    assert isinstance(setup, Setup), setup
    form = f"%(asctime)s %(levelname)s http-{setup.index} %(name)s %(message)s"
    logging.basicConfig(level=setup.config.log_level.upper(), format=form, datefmt="%H:%M:%S")
    await HttpProcess(line, setup).run(socket.socket(fileno=listen_fd))
    line.close()


def main() -> None:
    for sig in (signal.SIGINT, signal.SIGTERM):  # the owner says when
        signal.signal(sig, signal.SIG_IGN)
    try:
        with asyncio.Runner(loop_factory=fastest_loop()) as runner:
            runner.run(run(int(sys.argv[1]), int(sys.argv[2])))
    except (TwinflowError, OSError) as e:
        print(f"an HTTP process of the router: {e}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
