"""Every error answer in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import re
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from services.router.admission.base import Shed
from services.router.http.access import ID, refusal_headers
from services.router.metrics import Metrics
from twinflow.contracts.errors import BadRequest, Internal, TwinflowError, Unsupported

_TYPES = {400: "invalid_request_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
_UNION_TAG = re.compile(
    r"(str|int|float|bool|none|any|(list|dict|tuple|union).*|(function|constrained|literal)[-\[].*)"
)


def error_body(error: TwinflowError) -> dict[str, Any]:
    kind = _TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "server_error")
    why = {"reason": error.refusal.why.value} if isinstance(error, Shed) else {}
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.reason, **why}}


def error_response(error: TwinflowError, retry_after_s: int, request_id: str = "") -> JSONResponse:
    headers = refusal_headers(error, retry_after_s) | ({"x-request-id": request_id} if request_id else {})
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def install(app: FastAPI, metrics: Metrics, retry_after_s: int) -> None:
    """Handlers for our errors, query parameters, unknown paths and methods, and bugs."""

    def answer(request: Request, error: TwinflowError) -> JSONResponse:
        """Under the request's id, a fresh one if it came to none."""
        metrics.refused.of[str(error.http_status), error.reason].inc()
        return error_response(error, retry_after_s, request.scope.get(ID) or new_request_id())

    async def ours(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TwinflowError)
        return answer(request, error)

    async def framework(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        headers = {"x-request-id": new_request_id(), **(error.headers or {})}
        return JSONResponse(body, status_code=error.status_code, headers=headers)

    async def query(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return answer(request, BadRequest(f"{name}: {first['msg'][:1].lower()}{first['msg'][1:]}", param=name))

    async def bug(request: Request, error: Exception) -> JSONResponse:
        return answer(request, Internal("internal error; the router's log has the details"))

    app.add_exception_handler(TwinflowError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(RequestValidationError, query)
    app.add_exception_handler(Exception, bug)


def from_validation(error: ValidationError, where: str = "") -> BadRequest:
    """The first complaint of pydantic, with the field as clients write it: `messages[0].content`. `where`: the path of what was
    validated, if it was a part."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(p for p in (where, field_path(first["loc"])) if p)
    if first["type"] == "extra_forbidden":
        return Unsupported(f"unknown field {param!r}", param=param)
    if first["type"] == "missing":
        return BadRequest(f"missing field {param!r}", param=param)
    return BadRequest(f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}", param=param)


def field_path(loc: Sequence[str | int]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (path and _UNION_TAG.fullmatch(part)):
            path += f".{part}" if path else part
    return path
