"""GET /v1/internal/explain: the last decisions with their costs, for operators who have the admin token."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse, Response

from services.router.http.errors import new_request_id

MAX_SHOWN = 100


Newest = Callable[[int, str], Awaitable[list[dict[str, Any]]]]  # so many, of this request ("" = of all)


def explain_routes(admin_token: str, newest: Newest) -> APIRouter:
    """Without a token there is no such page."""
    routes = APIRouter()
    if not admin_token:
        return routes

    @routes.get("/v1/internal/explain")
    async def explain(
        authorization: str = Header(""), request_id: str = "", limit: int = Query(20, ge=1, le=MAX_SHOWN)
    ) -> Response:
        given = authorization.removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, admin_token.encode()):
            body = {"error": _error("the admin token is missing or wrong")}
            return JSONResponse(body, status_code=401, headers={"x-request-id": new_request_id()})
        return JSONResponse({"decisions": await newest(limit, request_id)})

    return routes


def _error(message: str) -> dict[str, Any]:
    return {"message": message, "type": "authentication_error", "param": None, "code": "unauthorized"}
