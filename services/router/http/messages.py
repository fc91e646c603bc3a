"""Chat messages and tools as clients send them → as templates expect them. Unknown parts are refused by name."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr

from twinflow.contracts.errors import BadRequest, Unsupported


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: StrictStr
    arguments: StrictStr = "{}"  # JSON text, as OpenAI has it


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: StrictStr = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class FunctionSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionSpec


def _tool(value: Any) -> Any:
    Tool.model_validate(value)
    return value


# Validated, but passed on as the client wrote it: templates print tools as JSON, in the client's order of keys.
SentTool = Annotated[dict[str, Any], BeforeValidator(_tool)]


class Message(BaseModel):
    """`refusal`, `annotations`, `audio` and `function_call` come back, empty, with a dump of an earlier reply."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: StrictStr | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        """As a plain dict. `where` is this message's path, for errors."""
        message: dict[str, Any] = {"role": self.role, "content": self._text(where)}
        if self.tool_calls:
            if self.role != "assistant":
                raise BadRequest(f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
            message["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(self.tool_calls)]
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message

    def _text(self, where: str) -> str:
        """Text parts are joined without a separator, as templates that take lists do."""
        path = f"{where}.content"
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant" and (self.tool_calls or self.reasoning_content):
                return ""
            raise BadRequest(f"{path} is missing", param=path)
        if not isinstance(self.content, list):
            raise BadRequest(f"{path}: expected a string or a list of text parts", param=path)
        return "".join(_part(p, f"{path}[{i}]") for i, p in enumerate(self.content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest(f"{path}: expected an object with a type", param=path)
    if part["type"] != "text":
        raise Unsupported(f"{path}: content parts of type {part['type']!r} are not supported, only text", param=path)
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        extra = sorted(set(part) - {"type", "text"})
        told = f"unknown field {extra[0]!r}" if extra else "text must be a string"
        raise BadRequest(f"{path}: {told}", param=path)
    return part["text"]


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """Arguments become an object, since templates iterate over them."""
    path = f"{where}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as e:
        raise BadRequest(f"{path} is not valid JSON: {e}", param=path) from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{path} must be a JSON object", param=path)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
