"""HTTP body → validated model. All complaints are BadRequest with the field's name."""

import json
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import ValidationError

from services.router.http.errors import from_validation
from services.router.http.fields import GenerationFields, drop_neutral
from twinflow.contracts.errors import BadRequest, UnknownModel

M = TypeVar("M", bound=GenerationFields)


async def read_body(request: Request, kind: type[M], model_name: str, max_bytes: int) -> M:
    """Raises BadRequest (also for JSON that is none) and UnknownModel."""
    body = parse_json(await read_bytes(request, max_bytes))
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    fields = drop_neutral(body, frozenset(kind.model_fields))
    try:
        parsed = kind.model_validate(fields)
    except ValidationError as e:
        raise from_validation(e) from None
    if parsed.model != model_name:
        raise UnknownModel(
            f"model {parsed.model!r} is not served here; this router serves {model_name!r}", param="model"
        )
    if parsed.stream_options is not None and not parsed.stream:
        raise BadRequest("stream_options is only allowed with stream=true", param="stream_options")
    return parsed


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise BadRequest(f"the body is over the limit of {max_bytes} bytes")
    return bytes(data)


def parse_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or Infinity, no lone surrogates."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise BadRequest("the body has half of a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except UnicodeDecodeError as e:
        raise BadRequest(f"the body is not UTF-8: byte {e.start} is 0x{data[e.start]:02x}") from None
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the body is not valid JSON: {e}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
