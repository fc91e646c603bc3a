"""The `Admin` service of a fake worker: fixed answers, knobs for slowness and errors, a log of what was asked."""

import asyncio
import dataclasses
from typing import Any

from grpc import aio

from tests.router.fake_worker import FakeWorker
from twinflow.contracts.errors import TwinflowError
from twinflow.node.stream import abort
from twinflow.rpc.v1 import admin_pb2 as pb
from twinflow.rpc.v1 import admin_pb2_grpc as rpc


class FakeAdmin(rpc.AdminServicer):
    """Of `worker`; add with `FakeWorker.services`. `calls`: (method, request)."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.delay_s = 0.0
        self.error: TwinflowError | None = None
        self.stubborn = False  # answers Drain, but registers as before
        self.calls: list[tuple[str, Any]] = []
        worker.services.append(lambda server: rpc.add_AdminServicer_to_server(self, server))

    async def _called(self, method: str, request: Any, context: "aio.ServicerContext[Any, Any]") -> str:
        self.calls.append((method, request))
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            await abort(context, self.error)
        return self.worker.record.id

    async def GetCapacity(self, request, context):
        id = await self._called("GetCapacity", request, context)
        return pb.GetCapacityResponse(workers=[pb.WorkerCapacity(worker_id=id, capacity_tokens=7)])

    async def MatchPrompt(self, request, context):
        id = await self._called("MatchPrompt", request, context)
        match = pb.WorkerMatch(worker_id=id, usable_tokens=len(request.token_ids) - 1)
        return pb.MatchPromptResponse(prompt_tokens=len(request.token_ids), workers=[match])

    async def ListRequests(self, request, context):
        id = await self._called("ListRequests", request, context)
        return pb.ListRequestsResponse(workers=[pb.WorkerRequests(worker_id=id)])

    async def CancelRequest(self, request, context):
        id = await self._called("CancelRequest", request, context)
        return pb.CancelRequestResponse(workers=[pb.WorkerCancel(worker_id=id, cancelled=[request.request_id])])

    async def Drain(self, request, context):
        return pb.DrainResponse(workers=[await self._drain("Drain", request, context, True)])

    async def Undrain(self, request, context):
        return pb.UndrainResponse(workers=[await self._drain("Undrain", request, context, False)])

    async def _drain(self, method: str, request: Any, context: Any, draining: bool) -> pb.WorkerDrain:
        id = await self._called(method, request, context)
        changed = self.worker.record.draining is not draining
        if not self.stubborn:
            self.worker.record = dataclasses.replace(self.worker.record, draining=draining)
        return pb.WorkerDrain(worker_id=id, draining=draining, changed=changed)

    async def FlushCache(self, request, context):
        id = await self._called("FlushCache", request, context)
        group = pb.GroupFlush(group=request.group or "all", units=3)
        return pb.FlushCacheResponse(workers=[pb.WorkerFlush(worker_id=id, groups=[group])])
