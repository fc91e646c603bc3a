"""Endpoints of OpenAI's API, and of other servers, that are not served: refused by name rather than as an unknown path."""

from fastapi import APIRouter, Request

from twinflow.contracts.errors import Unsupported

METHODS = ["GET", "POST", "DELETE"]
# Path (with everything below it) → what is not served.
REFUSED = {
    "/v1/embeddings": "embeddings are",
    "/v1/audio": "audio is",
    "/v1/images": "images are",
    "/v1/videos": "videos are",
    "/v1/realtime": "the realtime API is",
    "/v1/moderations": "moderations are",
    "/v1/rerank": "reranking is",
    "/v1/score": "scoring is",
    "/v1/files": "files are",
    "/v1/uploads": "files are",
    "/v1/batches": "batches are",
    "/v1/fine_tuning": "fine-tuning is",
    "/v1/vector_stores": "vector stores are",
    "/v1/responses": "stored responses are",
    "/v1/conversations": "stored conversations are",
    "/v1/assistants": "assistants are",
    "/v1/threads": "assistants are",
    "/v1/load_lora_adapter": "LoRA adapters are",
    "/v1/unload_lora_adapter": "LoRA adapters are",
}


def refused_routes() -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    def refuse(path: str, what: str) -> None:
        async def refused(request: Request) -> None:
            raise Unsupported(f"{request.method} {request.url.path}: {what} not served here")

        if path != "/v1/responses":  # creating one is served
            routes.add_api_route(path, refused, methods=METHODS)
        routes.add_api_route(path + "/{rest:path}", refused, methods=METHODS)

    for path, what in REFUSED.items():
        refuse(path, what)
    return routes
