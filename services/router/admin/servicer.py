"""The `Admin` service of a router: what it knows itself from its view, everything else from the workers."""

from grpc import aio

from services.router.admin.fanout import FanOut
from services.router.text.tokenizer import ModelText
from services.router.view.prompt import PromptKeys
from services.router.view.view import View
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.hashing import pack_tokens, unpack_tokens
from twinflow.node.unary import audited, unary
from twinflow.rpc.convert import hit_to_pb, record_to_pb
from twinflow.rpc.v1 import admin_pb2 as pb
from twinflow.rpc.v1 import admin_pb2_grpc as rpc


class AdminService(rpc.AdminServicer):
    def __init__(self, view: View, text: ModelText, wait_s: float) -> None:
        """`wait_s`: how long a worker may take to answer."""
        self._view = view
        self._text = text
        self._workers = FanOut(view, wait_s)

    def add_to(self, server: aio.Server) -> None:
        rpc.add_AdminServicer_to_server(self, server)

    @unary
    async def ListWorkers(self, request: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
        entries = self._view.index_entries()
        return pb.ListWorkersResponse(
            workers=[
                pb.WorkerStatus(
                    record=record_to_pb(w.record),
                    connected=w.connected,
                    active_requests=w.active_requests,
                    queued_prefill_tokens=w.queued_prefill_tokens,
                    index_entries=entries.get(w.record.id, 0),
                )
                for w in self._workers.targets(request.worker_id)
            ]
        )

    @unary
    async def GetCapacity(self, request: pb.GetCapacityRequest) -> pb.GetCapacityResponse:
        workers = await self._workers.ask("GetCapacity", request, pb.GetCapacityResponse)
        return pb.GetCapacityResponse(workers=workers)

    @unary
    async def MatchPrompt(self, request: pb.MatchPromptRequest) -> pb.MatchPromptResponse:
        ids = await self._token_ids(request)
        tenant, salt = request.tenant, request.cache_salt
        asked = pb.MatchPromptRequest(worker_id=request.worker_id, token_ids=ids, cache_salt=salt, tenant=tenant)
        workers = await self._workers.ask("MatchPrompt", asked, pb.MatchPromptResponse)
        keys = PromptKeys(pack_tokens(ids), tenant, salt)
        predicted = {w.record.id: w.hits for w in self._view.snapshot(keys, detail=True).workers}
        for worker in workers:
            worker.predicted.extend(map(hit_to_pb, predicted.get(worker.worker_id, ())))
        return pb.MatchPromptResponse(prompt_tokens=len(ids), workers=workers)

    async def _token_ids(self, request: pb.MatchPromptRequest) -> list[int]:
        """Raises BadRequest unless there is exactly one prompt of this model's tokens."""
        if request.text and request.token_ids:
            raise BadRequest("give text or token_ids, not both", param="text")
        ids = list(request.token_ids)
        if request.text:
            ids = unpack_tokens(await self._text.encode(request.text, add_special_tokens=True))
        if not ids:
            raise BadRequest("the prompt is empty: give text or token_ids", param="text")
        if max(ids) >= self._text.vocab_size:
            raise BadRequest(
                f"token id {max(ids)} is outside the vocabulary of {self._text.vocab_size}", param="token_ids"
            )
        return ids

    @unary
    async def ListRequests(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        workers = await self._workers.ask("ListRequests", request, pb.ListRequestsResponse)
        return pb.ListRequestsResponse(workers=workers)

    @audited
    async def CancelRequest(self, request: pb.CancelRequestRequest) -> pb.CancelRequestResponse:
        if not request.request_id:
            raise BadRequest("no request_id: ListRequests shows them", param="request_id")
        workers = await self._workers.ask("CancelRequest", request, pb.CancelRequestResponse)
        return pb.CancelRequestResponse(workers=workers)

    @audited
    async def Drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        workers = await self._workers.ask("Drain", request, pb.DrainResponse)
        await self._workers.until_draining([w.worker_id for w in workers if not w.HasField("error")], True)
        return pb.DrainResponse(workers=workers)

    @audited
    async def Undrain(self, request: pb.UndrainRequest) -> pb.UndrainResponse:
        workers = await self._workers.ask("Undrain", request, pb.UndrainResponse)
        await self._workers.until_draining([w.worker_id for w in workers if not w.HasField("error")], False)
        return pb.UndrainResponse(workers=workers)

    @audited
    async def FlushCache(self, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
        workers = await self._workers.ask("FlushCache", request, pb.FlushCacheResponse)
        return pb.FlushCacheResponse(workers=workers)
