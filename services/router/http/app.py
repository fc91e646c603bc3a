"""The application, built from its parts; no state of its own."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Depends, FastAPI
from starlette.types import ASGIApp

from services.router.admission.keys import KeyBook
from services.router.generation import Generator
from services.router.http.access import access
from services.router.http.api import Api
from services.router.http.chat import chat_routes
from services.router.http.completions import completion_routes
from services.router.http.direct import Direct
from services.router.http.docs import docs_routes
from services.router.http.errors import install
from services.router.http.explain import Newest, explain_routes
from services.router.http.openapi import serve
from services.router.http.ops import health_routes, longest_tokens, model_routes
from services.router.http.refused import refused_routes
from services.router.http.responses import response_routes
from services.router.http.tokens import token_routes
from services.router.metrics import Metrics
from services.router.view.view import View


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of the whole router, whichever process answers. `waiting`: requests in the queue."""

    newest: Newest
    scrape: Callable[[], Awaitable[bytes]]
    waiting: Callable[[], int]


def build_app(api: Api, view: View, generator: Generator, metrics: Metrics, book: KeyBook, told: Told) -> ASGIApp:
    app = FastAPI(title="Twinflow router", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    serve(app, api.config.model_name)
    install(app, metrics, api.config.retry_after_s)
    known = access(book)
    generating = (chat_routes(api), completion_routes(api), response_routes(api))
    for routes in (
        *generating,
        token_routes(api, lambda: longest_tokens(view, api.config.model_name)),
        model_routes(api, view),
        refused_routes(),
    ):
        app.include_router(routes, dependencies=[Depends(known)])
    app.include_router(explain_routes(api.config.admin_token, told.newest))
    app.include_router(docs_routes())
    app.include_router(health_routes(api.config, view, generator, told.scrape, told.waiting))
    return Direct(app, generating, before=(known,))
