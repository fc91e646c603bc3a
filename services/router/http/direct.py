"""The way of a generation's request past the framework: routing, dependency injection and its exit stacks cost more than the rest
of a short request. Only the paths that carry the load take it; everything else, the description included, is the framework's.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.http.client import forget_client
from twinflow.contracts.errors import TwinflowError

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class Direct:
    """An ASGI application in front of another. Endpoints must take the request alone and return a response."""

    def __init__(
        self, app: FastAPI, routers: Iterable[APIRouter], before: Sequence[Callable[[Request], Awaitable[None]]] = ()
    ) -> None:
        """POST routes of `routers`, with the app's handlers of errors. `before`: run in order ahead of each."""
        self._app = app
        self._before = before
        self._endpoints: dict[str, Endpoint] = {
            route.path: route.endpoint
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and route.methods == {"POST"} and "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        try:
            if endpoint is None:
                await self._app(scope, receive, send)
                return
            request = Request(scope, receive)
            response = await self._respond(request, endpoint)
            await response(scope, receive, send)
        finally:
            forget_client(scope)

    async def _respond(self, request: Request, endpoint: Endpoint) -> Response:
        try:
            for step in self._before:
                await step(request)
            return await endpoint(request)
        except TwinflowError as e:
            return await self._answer(request, e, TwinflowError)
        except Exception as e:  # process edge: a bug is an answer, too
            log.exception("%s failed", request.url.path)
            return await self._answer(request, e, Exception)

    async def _answer(self, request: Request, error: Exception, kind: type[Exception]) -> Response:
        answer = self._app.exception_handlers[kind](request, error)
        return await answer if isinstance(answer, Awaitable) else answer
