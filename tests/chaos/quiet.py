"""What is left once nothing runs: blocks and slots that nobody gave back, doomed memory, requests, leases."""

import asyncio
import time
from dataclasses import dataclass, replace

from twinflow.contracts.errors import TwinflowError
from twinflow.rpc.admin import call
from twinflow.rpc.v1 import admin_pb2

QUIET_S = 25.0  # longer than lease_s, doomed_limit_s and generation_drain_s of the clusters here, together
POLL_S = 0.25
CALL_S = 5.0


@dataclass(frozen=True, slots=True)
class Left:
    """Over all workers. `silent`: workers that did not answer; then the counts say nothing about these."""

    blocks: int = 0
    slots: int = 0
    doomed: int = 0  # units of either group, part of neither count above
    pinned: int = 0
    requests: int = 0
    leases: int = 0
    silent: tuple[str, ...] = ()
    unbalanced: tuple[str, ...] = ()  # pools whose free + cached + held + doomed is not the total
    after_s: float = 0.0  # how long it took to become so

    @property
    def clean(self) -> bool:
        counts = (self.blocks, self.slots, self.doomed, self.pinned, self.requests, self.leases)
        return not any(counts) and not self.silent and not self.unbalanced


def look(router: str) -> Left:
    """Asks the router at this gRPC address, which asks its workers."""
    capacity = call(router, "GetCapacity", admin_pb2.GetCapacityRequest(), admin_pb2.GetCapacityResponse, CALL_S)
    running = call(router, "ListRequests", admin_pb2.ListRequestsRequest(), admin_pb2.ListRequestsResponse, CALL_S)
    groups = [(w.worker_id, g) for w in capacity.workers for g in w.groups]
    return Left(
        blocks=sum(g.held_units for _, g in groups if g.kind == "attention"),
        slots=sum(g.held_units for _, g in groups if g.kind == "state"),
        doomed=sum(g.doomed_units for _, g in groups),
        pinned=sum(g.pinned_units for _, g in groups),
        requests=sum(len(w.requests) for w in running.workers),
        leases=sum(len(w.leases) for w in running.workers),
        silent=tuple(sorted({w.worker_id for w in (*capacity.workers, *running.workers) if w.HasField("error")})),
        unbalanced=tuple(
            f"{name} {g.group}"
            for name, g in groups
            if g.free_units + g.cached_units + g.held_units + g.doomed_units != g.total_units
        ),
    )


def pinned(worker: str) -> int:
    """Units at the worker with this gRPC address that posted reads may write to; 0 if it does not answer."""
    try:
        told = call(worker, "GetCapacity", admin_pb2.GetCapacityRequest(), admin_pb2.GetCapacityResponse, 1.0)
    except TwinflowError:
        return 0
    return sum(g.pinned_units for w in told.workers for g in w.groups)


async def settle(router: str, within_s: float = QUIET_S) -> Left:
    """Waits until nothing is left, at most `within_s`; the last look. The load must have been drained."""
    began = time.monotonic()
    while True:
        try:
            left = await asyncio.to_thread(look, router)
        except TwinflowError as e:
            left = Left(silent=(f"router ({e.message})",))
        after_s = time.monotonic() - began
        if left.clean or after_s > within_s:
            return replace(left, after_s=after_s)
        await asyncio.sleep(POLL_S)
