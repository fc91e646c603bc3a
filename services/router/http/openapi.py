"""The API's description for /docs and /openapi.json. Bodies are read by hand, so that every complaint names its field; here their
models are described, beside what each path may answer."""

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from services.router.http import answers, response_answers
from services.router.http.access import WORTH_A_RETRY
from services.router.http.bodies import BODIES, Schema, example, ref, schemas_of

# What a path answers with 200: its body, and the events of a stream if it may be one.
ANSWERS: dict[str, tuple[type[BaseModel], type[BaseModel] | None]] = {
    "/v1/chat/completions": (answers.ChatCompletion, answers.ChatCompletionChunk),
    "/v1/completions": (answers.Completion, answers.Completion),
    "/v1/responses": (response_answers.Response, response_answers.ResponseEvent),
    "/tokenize": (answers.Tokens, None),
    "/detokenize": (answers.Text, None),
    "/v1/models": (answers.ModelList, None),
    "/v1/models/{id}": (answers.ModelCard, None),
    "/v1/internal/explain": (answers.Decisions, None),
    "/live": (answers.Live, None),
    "/ready": (answers.Ready, None),
    "/health": (answers.Health, None),
}
ERRORS = {
    "400": "a bad value, or something that is not served",
    "401": "no API key, or an unknown one, where keys are configured",
    "404": "another model",
    "413": "the body is over the limit",
    "429": "too many requests; `retry-after` says when, `reason` which limit it was",
    "500": "a bug",
    "502": "a worker was lost",
    "503": "nobody can take it; `retry-after` says when",
    "504": "no token in time",
}
GENERATION_ERRORS = ("400", "401", "404", "413", "429", "500", "502", "503", "504")
TEXT_ERRORS = ("400", "401", "404", "413", "500")
ERRORS_OF = {
    "/v1/chat/completions": GENERATION_ERRORS,
    "/v1/completions": GENERATION_ERRORS,
    "/v1/responses": GENERATION_ERRORS,
    "/tokenize": TEXT_ERRORS,
    "/detokenize": TEXT_ERRORS,
    "/v1/models": ("401",),
    "/v1/models/{id}": ("401", "404"),
    "/v1/internal/explain": ("400", "401"),
}


def describe(app: FastAPI, model_name: str) -> Schema:
    """The whole description; made once."""
    spec: Schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    told = [kind for pair in ANSWERS.values() for kind in pair if kind is not None]
    schemas = schemas_of([*told, answers.Error, answers.NotReady], model_name)
    spec["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    for path, operations in spec["paths"].items():
        for operation in operations.values():
            operation["responses"] = responses(path)
            if "401" in operation["responses"]:
                operation["security"] = [{"key": []}, {}]
            if path in BODIES:
                kinds = [ref(kind) for kind in BODIES[path]]
                schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schema, "example": example(path, model_name)}},
                }
    return spec


def responses(path: str) -> Schema:
    if path == "/metrics":
        return {"200": {"description": "Prometheus", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    body, events = ANSWERS[path]
    content = {"application/json": {"schema": ref(body)}}
    if events is not None:
        content["text/event-stream"] = {"schema": stream_event(events)}
    found: Schema = {"200": {"description": "served", "content": content}}
    if path == "/ready":
        found["503"] = {
            "description": "no usable path",
            "content": {"application/json": {"schema": ref(answers.NotReady)}},
        }
    for status in ERRORS_OF.get(path, ()):
        found[status] = {
            "description": ERRORS[status],
            "headers": {name: {"required": True, "schema": {"type": "string"}} for name in error_headers(status)},
            "content": {"application/json": {"schema": ref(answers.Error)}},
        }
    return found


def stream_event(kind: type[BaseModel]) -> Schema:
    """One server-sent event. An error after the first token is one, too; responses have none of either."""
    told: list[Schema] = [ref(kind)]
    ends: list[Schema] = []
    if kind is not response_answers.ResponseEvent:
        told.append(ref(answers.Error))
        ends.append({"const": "[DONE]"})
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": told}}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [*ends, data]}}}


def error_headers(status: str) -> list[str]:
    return ["x-request-id"] + (["retry-after"] if int(status) in WORTH_A_RETRY else [])


def serve(app: FastAPI, model_name: str) -> None:
    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app, model_name)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
