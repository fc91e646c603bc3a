"""The API's description for /docs and /openapi.json. Bodies are read by hand, so that every complaint names its field; here their
models are described, beside what each path may answer."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.router.http.chat import ChatFields
from services.router.http.completions import CompletionFields
from services.router.http.responses import ResponseFields
from services.router.http.tokens import ChatTokenizeFields, DetokenizeFields, PlainTokenizeFields

BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/chat/completions": (ChatFields,),
    "/v1/completions": (CompletionFields,),
    "/v1/responses": (ResponseFields,),
    "/tokenize": (PlainTokenizeFields, ChatTokenizeFields),
    "/detokenize": (DetokenizeFields,),
}
ERRORS = {
    "400": "a bad value, or something that is not served",
    "401": "no API key, or an unknown one, where keys are configured",
    "404": "another model",
    "429": "too many requests; `retry-after` says when, `reason` which limit it was",
    "500": "a bug",
    "502": "a worker was lost",
    "503": "nobody can take it; `retry-after` says when",
    "504": "no token in time",
}
_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "reason": {"type": "string"},
            },
        }
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description; made once."""
    spec: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [kind for kinds in BODIES.values() for kind in kinds]
    _, models = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    schemas = spec.setdefault("components", {}).setdefault("schemas", {})
    schemas |= models["$defs"] | {"Error": _ERROR}
    spec["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    wrong = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for path, kinds_of_path in BODIES.items():
        operation = spec["paths"][path]["post"]
        refs = [{"$ref": _REF.format(model=kind.__name__)} for kind in kinds_of_path]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        operation["responses"].pop("422", None)
        operation["security"] = [{"key": []}, {}]
        for status, what in ERRORS.items():
            operation["responses"][status] = {"description": what, "content": wrong}
    return spec


def serve(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
