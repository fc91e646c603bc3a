"""GET: the models list, health for orchestrators, metrics."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from services.router.config import RouterConfig
from services.router.generation import Generator
from services.router.http.api import Api
from services.router.schedule.base import NoDecodeWorker, RouteRequest
from services.router.schedule.filters import usable_decoders
from services.router.schedule.limits import limit_tokens
from services.router.text.tokenizer import ModelText
from services.router.view.view import View
from twinflow.contracts.errors import UnknownModel


def longest_tokens(view: View, model: str) -> int | None:
    """Prompt and reply together, of the roomiest worker; None while no worker is known."""
    records = [w.record for w in view.snapshot().workers if w.record.model == model]
    return max(map(limit_tokens, records), default=None)


def capabilities(text: ModelText) -> dict[str, bool]:
    return {
        "completions": True,
        "chat": bool(text.template),
        "streaming": True,
        "logprobs": True,
        "tools": bool(text.template) and text.calls is not None,
        "reasoning": text.thinks,
        "structured_outputs": True,
        "vision": False,
        "audio": False,
        "embeddings": False,
        "lora": False,
    }


def model_routes(api: Api, view: View) -> APIRouter:
    routes = APIRouter()
    name = api.config.model_name

    def card() -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": api.created,
            "owned_by": "twinflow",
            "max_model_len": longest_tokens(view, name),
            "capabilities": capabilities(api.text),
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @routes.get("/v1/models/{id:path}")
    async def model(id: str) -> dict[str, Any]:
        if id != name:
            raise UnknownModel(f"model {id!r} is not served here; this router serves {name!r}", param="model")
        return card()

    return routes


def health_routes(
    config: RouterConfig,
    view: View,
    generator: Generator,
    scrape: Callable[[], Awaitable[bytes]],
    waiting: Callable[[], int],
) -> APIRouter:
    """`waiting`: requests in the queue."""
    routes = APIRouter()
    probe = RouteRequest(model=config.model_name, prompt_tokens=1, max_tokens=1, tie_seed=0)
    policy = config.scheduling

    def problem() -> NoDecodeWorker | None:
        try:
            usable_decoders(view.snapshot(), probe, policy)
        except NoDecodeWorker as e:
            return e
        return None

    @routes.get("/live")
    async def live() -> dict[str, str]:
        """The process answers: nothing else."""
        return {"status": "live"}

    @routes.get("/ready")
    async def ready() -> Response:
        """A usable path exists: some worker can decode (alone, if it must)."""
        e = problem()
        if e is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": e.reason, "message": e.message}, status_code=503)

    @routes.get("/health")
    async def health() -> dict[str, Any]:
        """For people: who is there and how busy."""
        e = problem()
        workers = [
            {
                "id": w.record.id,
                "role": w.record.role.value,
                "connected": w.connected,
                "draining": w.record.draining,
                "active_requests": w.active_requests,
                "queued_prefill_tokens": w.queued_prefill_tokens,
                "free_blocks": w.record.load.free_blocks,
                "total_blocks": w.record.load.total_blocks,
            }
            for w in view.snapshot().workers
        ]
        status = "ok" if e is None else e.reason
        busy = {"running": generator.running, "waiting": waiting()}
        return {"status": status, "model": config.model_name, **busy, "workers": workers}

    @routes.get("/metrics")
    async def prometheus() -> Response:
        return PlainTextResponse(await scrape(), media_type=CONTENT_TYPE_LATEST)

    return routes
