"""GET /docs: the API's description as a page for people. It needs no network but the router, and its policy says so."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
)


def docs_routes() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    page = Path(__file__).with_name("docs.html").read_text()

    @routes.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": POLICY})

    return routes
