"""One admin call to many workers at once: every one of them has an entry in the end, within a bounded time."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from services.router.dispatch.base import WorkerLost
from services.router.schedule.base import WorkerFacts
from services.router.view.view import View
from twinflow.contracts.errors import DeadlineExceeded, NoCapacity, TwinflowError, UnknownWorker
from twinflow.contracts.workers import WorkerRecord
from twinflow.rpc.channel import open_channel
from twinflow.rpc.convert import error_to_pb
from twinflow.rpc.failure import error_of
from twinflow.rpc.v1 import admin_pb2_grpc as rpc

POLL_S = 0.01


class FanOut:
    """Knows the workers from the view. Requests have a `worker_id`, responses a repeated `workers` whose entries have
    `worker_id` and `error`."""

    def __init__(self, view: View, wait_s: float) -> None:
        self._view = view
        self._wait_s = wait_s

    def targets(self, worker_id: str) -> list[WorkerFacts]:
        """The named worker, or all of them by id. Raises UnknownWorker naming those that there are."""
        known = sorted(self._view.snapshot().workers, key=lambda w: w.record.id)
        if not worker_id:
            return known
        found = [w for w in known if w.record.id == worker_id]
        if not found:
            ids = ", ".join(w.record.id for w in known) or "none"
            raise UnknownWorker(f"unknown worker {worker_id!r} (known: {ids})", param="worker_id")
        return found

    async def ask(self, method: str, request: Any, response: type[Any]) -> list[Any]:
        """Entries in the order of `targets`. A worker that fails has an entry with its error."""
        records = [w.record for w in self.targets(request.worker_id)]
        return list(await asyncio.gather(*(self._ask(r, method, request, response) for r in records)))

    async def until_draining(self, worker_ids: Sequence[str], draining: bool) -> None:
        """Returns once the view shows these workers so, or has lost them, but no later than `wait_s`."""
        deadline = asyncio.get_running_loop().time() + self._wait_s
        while asyncio.get_running_loop().time() < deadline:
            records = [w.record for w in self._view.snapshot().workers]
            if all(r.draining is draining for r in records if r.id in worker_ids):
                return
            await asyncio.sleep(POLL_S)

    async def _ask(self, record: WorkerRecord, method: str, request: Any, response: type[Any]) -> Any:
        try:
            return await self._call(record, method, request)
        except TwinflowError as e:
            failed = response().workers.add()
            failed.worker_id = record.id
            failed.error.CopyFrom(error_to_pb(e))
            return failed

    async def _call(self, record: WorkerRecord, method: str, request: Any) -> Any:
        """The one entry of a worker's answer. The request names the worker: another one may live at its address by now."""
        named = type(request)()
        named.CopyFrom(request)
        named.worker_id = record.id
        address = record.addresses[0]
        try:
            async with open_channel(address, self._wait_s) as channel:
                answer = await getattr(rpc.AdminStub(channel), method)(named, timeout=self._wait_s)
        except grpc.RpcError as e:
            error = error_of(e, f"worker {record.id} at {address}")
            if type(error) is DeadlineExceeded:
                error = DeadlineExceeded(f"worker {record.id} at {address} did not answer within {self._wait_s:g} s")
            raise WorkerLost(error.message) if type(error) is NoCapacity else error from None
        if len(answer.workers) != 1:
            raise WorkerLost(f"worker {record.id} at {address} answered with {len(answer.workers)} entries")
        return answer.workers[0]
