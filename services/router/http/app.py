"""The FastAPI application, built from its parts; no state of its own."""

from fastapi import FastAPI

from services.router.generation import Generator
from services.router.http.api import Api
from services.router.http.chat import chat_routes
from services.router.http.completions import completion_routes
from services.router.http.errors import install
from services.router.http.explain import explain_routes
from services.router.http.openapi import serve
from services.router.http.ops import health_routes, longest_tokens, model_routes
from services.router.http.refused import refused_routes
from services.router.http.responses import response_routes
from services.router.http.tokens import token_routes
from services.router.metrics import Metrics
from services.router.view.view import View


def build_app(api: Api, view: View, generator: Generator, metrics: Metrics) -> FastAPI:
    app = FastAPI(title="Twinflow router", docs_url="/docs", redoc_url=None, openapi_url="/openapi.json")
    serve(app)
    install(app, metrics, api.config.retry_after_s)
    app.include_router(chat_routes(api))
    app.include_router(completion_routes(api))
    app.include_router(response_routes(api))
    app.include_router(token_routes(api, lambda: longest_tokens(view, api.config.model_name)))
    app.include_router(model_routes(api, view))
    app.include_router(refused_routes())
    app.include_router(explain_routes(api.config.admin_token, generator.decisions))
    app.include_router(health_routes(api.config, view, generator, metrics))
    return app
