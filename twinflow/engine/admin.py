"""The admin API of one worker, the same for every role: questions to the engine, the drain, and what the role adds.

Every answer has one entry, this worker's; a router asks all workers and puts their entries together.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from grpc import aio

from twinflow.contracts.errors import BadRequest, UnknownWorker, Unsupported
from twinflow.contracts.groups import GroupKind, GroupSpec
from twinflow.contracts.hashing import pack_tokens, root_hash
from twinflow.engine.base import Flush, Flushed, Inspect, Inspected, MatchFound, MatchQuery, SequenceInfo
from twinflow.engine.front import Front
from twinflow.engine.limits import check_tokens
from twinflow.node.unary import audited, unary
from twinflow.rpc.convert import hit_to_pb, record_to_pb
from twinflow.rpc.v1 import admin_pb2 as pb
from twinflow.rpc.v1 import admin_pb2_grpc as pb_grpc


class AdminRole(Protocol):
    """What a role adds. Called on the front's loop, must not block."""

    def about(self, request_id: str) -> tuple[str, str]:
        """(who asked for this request, the prefill worker it is handed off from); "" for what is not known."""
        ...

    def leases(self) -> Sequence[pb.Lease]:
        """What others may still read here, oldest first."""
        ...

    def left(self) -> tuple[int, int]:
        """(requests of routers, open hand-offs) that a drain waits for."""
        ...

    def cancel_where(self, meant: Callable[[str], bool]) -> list[str]:
        """Ends the requests whose id is meant; returns those that were not ending already."""
        ...


class AdminService(pb_grpc.AdminServicer):
    def __init__(self, front: Front, role: AdminRole) -> None:
        self._front = front
        self._role = role

    def add_to(self, server: aio.Server) -> None:
        pb_grpc.add_AdminServicer_to_server(self, server)

    @unary
    async def ListWorkers(self, request: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
        self._check(request.worker_id)
        front, load = self._front, self._front.load
        status = pb.WorkerStatus(
            record=record_to_pb(front.record()),
            connected=front.routers.connected > 0,
            active_requests=max(load.running + load.waiting, sum(self._role.left())),
            queued_prefill_tokens=load.queued_prefill_tokens,
        )
        return pb.ListWorkersResponse(workers=[status])

    @unary
    async def GetCapacity(self, request: pb.GetCapacityRequest) -> pb.GetCapacityResponse:
        self._check(request.worker_id)
        seen = await self._inspect()
        groups = [group_capacity(g, seen) for g in self._front.ready.groups]
        capacity = pb.WorkerCapacity(
            worker_id=self._front.worker_id,
            groups=groups,
            capacity_tokens=sum(g.total_units * g.block_tokens for g in groups),
            max_request_tokens=self._front.ready.max_request_tokens,
            arena_bytes=self._front.ready.arena_bytes,
        )
        return pb.GetCapacityResponse(workers=[capacity])

    @unary
    async def MatchPrompt(self, request: pb.MatchPromptRequest) -> pb.MatchPromptResponse:
        self._check(request.worker_id)
        if request.text:
            raise Unsupported("a worker has no tokenizer: give token_ids, or ask a router", param="text")
        if not request.token_ids:
            raise BadRequest("the prompt is empty: give token_ids", param="token_ids")
        packed = pack_tokens(request.token_ids)
        check_tokens("token_ids", packed, self._front.ready.vocab_size)
        root = root_hash(self._front.ready.fingerprint, request.tenant, request.cache_salt)
        found = await self._front.questions.ask(MatchFound, lambda token: MatchQuery(token, root, packed))
        match = pb.WorkerMatch(
            worker_id=self._front.worker_id, groups=map(hit_to_pb, found.hits), usable_tokens=found.usable_tokens
        )
        return pb.MatchPromptResponse(prompt_tokens=len(request.token_ids), workers=[match])

    @unary
    async def ListRequests(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        self._check(request.worker_id)
        seen = await self._inspect()
        running = [running_request(s, *self._role.about(s.id)) for s in seen.sequences]
        entry = pb.WorkerRequests(worker_id=self._front.worker_id, requests=running, leases=self._role.leases())
        return pb.ListRequestsResponse(workers=[entry])

    @audited
    async def CancelRequest(self, request: pb.CancelRequestRequest) -> pb.CancelRequestResponse:
        self._check(request.worker_id)
        if not request.request_id:
            raise BadRequest("no request_id: ListRequests shows them", param="request_id")
        ended = self._role.cancel_where(lambda id: is_meant(id, request.request_id))
        entry = pb.WorkerCancel(worker_id=self._front.worker_id, cancelled=ended)
        return pb.CancelRequestResponse(workers=[entry])

    @audited
    async def Drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        self._check(request.worker_id)
        return pb.DrainResponse(workers=[self._drain(True)])

    @audited
    async def Undrain(self, request: pb.UndrainRequest) -> pb.UndrainResponse:
        self._check(request.worker_id)
        return pb.UndrainResponse(workers=[self._drain(False)])

    @audited
    async def FlushCache(self, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
        self._check(request.worker_id)
        group = request.group or None
        done = await self._front.questions.ask(Flushed, lambda token: Flush(token, group))
        if done.error:
            raise BadRequest(done.error, param="group")
        sizes = {g.name: g.unit_bytes for g in self._front.ready.groups}
        groups = [pb.GroupFlush(group=g, units=n, bytes=n * sizes.get(g, 0)) for g, n in done.units.items()]
        entry = pb.WorkerFlush(worker_id=self._front.worker_id, groups=groups)
        return pb.FlushCacheResponse(workers=[entry])

    def _check(self, worker_id: str) -> None:
        if worker_id not in ("", self._front.worker_id):
            raise UnknownWorker(f"unknown worker {worker_id!r}: this is {self._front.worker_id}", param="worker_id")

    async def _inspect(self) -> Inspected:
        return await self._front.questions.ask(Inspected, lambda token: Inspect(token, walk=False))

    def _drain(self, draining: bool) -> pb.WorkerDrain:
        changed = self._front.drain(draining)
        requests, leases = self._role.left()
        return pb.WorkerDrain(
            worker_id=self._front.worker_id, draining=draining, changed=changed, requests=requests, leases=leases
        )


def group_capacity(group: GroupSpec, seen: Inspected) -> pb.GroupCapacity:
    counts = seen.counts[group.name]
    return pb.GroupCapacity(
        group=group.name,
        kind=group.kind.value,
        unit_bytes=group.unit_bytes,
        block_tokens=(group.block_tokens or 0) if group.kind is GroupKind.ATTENTION else 0,
        total_units=counts.total,
        free_units=counts.free,
        cached_units=counts.cached,
        held_units=counts.held,
        doomed_units=counts.doomed,
        pinned_units=counts.pinned_by_io,
        stored_units=seen.stored[group.name],
    )


def running_request(s: SequenceInfo, owner: str, prefill_worker: str) -> pb.RunningRequest:
    return pb.RunningRequest(
        id=s.id,
        mode=s.mode,
        phase=s.phase,
        prompt_tokens=s.prompt_tokens,
        processed_tokens=s.processed_tokens,
        generated_tokens=s.generated_tokens,
        age_s=s.age_s,
        blocks=s.blocks,
        slots=s.slots,
        owner=owner,
        prefill_worker=prefill_worker,
    )


def is_meant(request_id: str, wanted: str) -> bool:
    """`wanted` is this very id, or the client's id that prompt and attempt numbers were appended to."""
    return request_id.startswith(wanted) and re.fullmatch(r"(-\d+)*", request_id[len(wanted) :]) is not None
