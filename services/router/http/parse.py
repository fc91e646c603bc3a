"""HTTP body → validated model. All complaints are BadRequest with the field's name."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from services.router.http.client import client_of
from services.router.http.errors import from_validation
from services.router.http.fields import GenerationFields, drop_neutral
from twinflow.contracts.errors import BadRequest, TooLarge, UnknownModel

M = TypeVar("M", bound=GenerationFields)
F = TypeVar("F", bound=BaseModel)


async def read_body(
    request: Request,
    kind: type[M],
    model_name: str,
    max_bytes: int,
    refused: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    parse: Callable[[bytes], Any] | None = None,
) -> M:
    """`refused` besides what every endpoint refuses, with the values that change nothing. `parse` in the stead of `parse_json`.
    Raises BadRequest (also for JSON that is none) and UnknownModel."""
    parsed = await read_fields(request, lambda _: kind, model_name, max_bytes, refused, parse)
    if parsed.stream_options is not None and not parsed.stream:
        raise BadRequest("stream_options is only allowed with stream=true", param="stream_options")
    return parsed


async def read_fields(
    request: Request,
    kind_of: Callable[[dict[str, Any]], type[F]],
    model_name: str,
    max_bytes: int,
    refused: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    parse: Callable[[bytes], Any] | None = None,
) -> F:
    """`kind_of` the body tells what it must be. Raises as `read_body`; a `model` that is None is this router's."""
    body = (parse or parse_json)(await read_bytes(request, max_bytes))
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    kind = kind_of(body)
    fields = drop_neutral(body, _names_of(kind), refused)
    try:
        parsed = kind.model_validate(fields)
    except ValidationError as e:
        raise from_validation(e) from None
    named = getattr(parsed, "model", None)
    if named is not None and named != model_name:
        raise UnknownModel(f"model {named!r} is not served here; this router serves {model_name!r}", param="model")
    return parsed


@cache
def _names_of(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(kind.model_fields)


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    client = client_of(request.scope)
    whole = client.whole_body() if client is not None else None
    if whole is not None and len(whole) <= max_bytes:
        return whole
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise TooLarge(f"the body is over the limit of {max_bytes} bytes")
    return bytes(data)


def parse_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or Infinity, no lone surrogates."""
    try:
        return from_json(data, allow_inf_nan=False)  # several times as fast, in lists of token ids above all
    except ValueError:
        return _parse_json(data)


def _parse_json(data: bytes) -> Any:
    """Says what is wrong."""
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
