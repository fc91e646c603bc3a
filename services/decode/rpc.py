"""The gRPC face of a decode worker: routers come in through `Serve`; hand-offs go out only, nobody reads from here."""

from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from services.decode.config import DecodeConfig
from services.decode.report import Requests
from twinflow.contracts.errors import Unsupported
from twinflow.engine.admin import AdminService
from twinflow.engine.front import Front
from twinflow.node.stream import abort
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.rpc.v1 import engine_pb2_grpc as pb_grpc

Context = aio.ServicerContext


class Servicer(pb_grpc.WorkerServicer):
    def __init__(self, front: Front, requests: Requests) -> None:
        self._front = front
        self._requests = requests

    async def Serve(self, request_iterator: AsyncIterator[pb.RouterMessage], context: "Context[Any, Any]") -> None:
        await self._front.routers.serve(request_iterator, context, self._requests)

    async def Handoff(self, request_iterator: AsyncIterator[pb.HandoffRequest], context: "Context[Any, Any]") -> None:
        await abort(context, Unsupported(f"{self._front.worker_id} is a {self._front.record().role.value} worker"))


class DecodeRole(Requests):
    """`RoleService` and `AdminRole`: the table of requests with its servicer."""

    def __init__(self, front: Front, config: DecodeConfig) -> None:
        super().__init__(front, config)
        self._servicer = Servicer(front, self)
        self._admin = AdminService(front, self)

    def add_to(self, server: aio.Server) -> None:
        pb_grpc.add_WorkerServicer_to_server(self._servicer, server)
        self._admin.add_to(server)
