"""All links: follows the registry, keeps the view's workers and one link per worker incarnation.

A worker that leaves the registry is not chosen any more; its link lives until its requests are done, so that a drain
ends well.
"""

import asyncio
import logging

from services.router.dispatch.base import Key, WorkerLost
from services.router.dispatch.link import LinkSettings, WorkerLink
from services.router.dispatch.stream import RequestStream
from services.router.view.view import View
from twinflow.contracts.workers import WorkerRecord
from twinflow.node.pulse import sleep_until
from twinflow.node.registry.base import ChangeKind, Registry
from twinflow.rpc.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

RETIRE_POLL_S = 0.2
WATCH_S = 0.25  # between looks at whose engine stands still


class Dispatcher:
    """`run` until cancelled; cancelling ends every session, which cancels every request at the workers."""

    def __init__(self, registry: Registry, view: View, settings: LinkSettings) -> None:
        self._registry = registry
        self._view = view
        self._settings = settings
        self._links: dict[Key, WorkerLink] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._retired: set[Key] = set()
        self._stalled: dict[Key, str] = {}  # at the last look, by what

    @property
    def sessions(self) -> int:
        """Workers with a link, connected or not."""
        return len(self._links)

    def submit(self, record: WorkerRecord, message: pb.RouterMessage, prefill: Key | None = None) -> RequestStream:
        """`message` is a submission, `prefill` the worker that is expected to compute its prompt, if it is another one. Raises
        WorkerLost when there is no session with this incarnation."""
        link = self._links.get(record.key)
        if link is None:
            raise WorkerLost(f"worker {record.id} ({record.incarnation}) is gone")
        return link.submit(message, prefill)

    async def run(self) -> None:
        helpers = [asyncio.create_task(self._reap()), asyncio.create_task(self._watch_engines())]
        try:
            async for change in self._registry.watch():
                if change.kind is ChangeKind.LEFT:
                    self._view.remove(change.record.key)
                    self._retired.add(change.record.key)
                else:
                    self._retired.discard(change.record.key)
                    self._view.put(change.record)
                    self._open(change.record)
        finally:
            tasks = [*helpers, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, record: WorkerRecord) -> None:
        link = self._links.get(record.key)
        if link is None:
            link = self._links[record.key] = WorkerLink(record, self._view, self._settings)
            self._tasks[record.key] = asyncio.create_task(link.run(), name=f"link-{record.id}")
        elif link.connected and not self._view.is_connected(record.key):  # registered again, its session went on
            self._view.set_connected(record.key, True)
            link.resync()

    async def _watch_engines(self) -> None:
        """A worker whose heart beats but whose engine stands still, or makes no step, is as good as lost to the requests inside.
        Time in which this process itself was held up doesn't count."""
        now = asyncio.get_running_loop().time
        while True:
            held_up_s = await sleep_until(now() + WATCH_S, WATCH_S)
            if held_up_s:
                self._view.held_up(held_up_s)
            self.look()

    def look(self) -> None:
        """Whose requests are to go on elsewhere, now."""
        before, self._stalled = self._stalled, {k: s for k in self._links if (s := self._view.stall(k))}
        for key, what in self._stalled.items():
            if key not in before:
                log.warning("worker %s is left alone: it %s", key[0], what)
            self._on_stall(key, WorkerLost(f"worker {key[0]} {what}"))
        for key in before:
            if key not in self._stalled and self._view.is_connected(key):
                log.info("worker %s is used again", key[0])

    def _on_stall(self, key: Key, error: WorkerLost) -> None:
        self._links[key].give_up(error)
        if self._view.engine_silent(key):
            return  # a prefill worker's front knows it too: it ends its hand-offs, and their readers go on from what they have
        for other in self._links.values():
            other.give_up(WorkerLost(error.message, culprit=key), prefill=key)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(RETIRE_POLL_S)
            for key in [k for k in self._retired if k in self._links and not self._links[k].in_flight]:
                self._retired.discard(key)
                del self._links[key]
                task = self._tasks.pop(key)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                log.info("session with worker %s is closed", key[0])
