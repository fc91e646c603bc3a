"""Whose request it is, from its API key, and what its answer's headers say of limits."""

import math
from collections.abc import Awaitable, Callable

from fastapi import Request

from services.router.admission.base import KeyFacts, Quotas, Shed, WaitedTooLong
from services.router.admission.keys import KeyBook
from twinflow.contracts.errors import TwinflowError

KEY, ID = "twinflow.key", "twinflow.id"  # in the scope: of whoever asks, of the answer
WORTH_A_RETRY = (429, 502, 503, 504)


def access(book: KeyBook) -> Callable[[Request], Awaitable[None]]:
    """Runs before a route, and before its body is read. Raises Unauthorized."""

    async def known(request: Request) -> None:
        request.scope[KEY] = book.find(header(request, b"authorization"))

    return known


def header(request: Request, name: bytes) -> str:
    """The first of this name (lower case), "" if there is none. The framework's table of headers takes longer to make."""
    for key, value in request.scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""


def key_of(request: Request) -> KeyFacts:
    key: KeyFacts = request.scope[KEY]
    return key


def refusal_headers(error: TwinflowError, default_s: int) -> dict[str, str]:
    """When to try again, where that makes sense, and what is left of the key's limits."""
    headers = {}
    if error.http_status in WORTH_A_RETRY:
        wait_s = error.refusal.retry_after_s if isinstance(error, Shed | WaitedTooLong) else default_s
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers | (quota_headers(error.refusal.quotas) if isinstance(error, Shed) else {})


def quota_headers(quotas: Quotas) -> dict[str, str]:
    """As OpenAI's; none for a limit that there is not."""
    headers = {}
    for name, quota in (("requests", quotas.requests), ("tokens", quotas.tokens)):
        if quota is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(quota.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(quota.remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(quota.reset_s)
    return headers


def duration(seconds: float) -> str:
    """`250ms`, `7.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    if seconds <= 59.9:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
