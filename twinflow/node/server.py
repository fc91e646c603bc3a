"""The gRPC server of a node: its services plus health and reflection."""

from collections.abc import Callable, Sequence

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twinflow.rpc.channel import bind, new_server, stop_server


class NodeServer:
    """Holds its port from the start, so that a taken one is known before anything is loaded. Serves health as NOT_SERVING
    from `start`, SERVING from `serving()`, until `stop`: of the whole ("") and of each service. A drain changes nothing here."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError when the port is taken; 0 asks for a free one."""
        self._server = new_server()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._services: tuple[str, ...] = ()
        self.port = bind(self._server, host, port)

    async def start(self, add_services: Callable[[aio.Server], None], services: Sequence[str] = ()) -> None:
        """`services`: full names of what `add_services` adds, for reflection and health."""
        add_services(self._server)
        self._services = tuple(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflected = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server)
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def serving(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.SERVING)

    async def _set(self, status: int) -> None:
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Says NOT_SERVING, lets streams end for `grace_s`, then ends them. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await stop_server(self._server, grace_s)
