"""Input items and tools of /v1/responses → messages and tools as templates expect them. Unknown items and parts are refused
by name."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, ValidationError

from services.router.http.errors import from_validation
from services.router.http.messages import FunctionCall, Message, ToolCall
from twinflow.contracts.errors import BadRequest, Unsupported

I = TypeVar("I", bound=BaseModel)  # noqa: E741


class _Item(BaseModel):
    """`id` and `status` come back with the items of an earlier response; they change nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: StrictStr | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class _MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Any


class _CallItem(_Item):
    type: Literal["function_call"]
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr


class _OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: StrictStr
    output: Any


class _ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)
    content: Any = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _tool(value: Any) -> Any:
    FunctionTool.model_validate(value)
    return value


# As sent: templates print tools as JSON, in the client's order of keys.
SentFunctionTool = Annotated[dict[str, Any], BeforeValidator(_tool)]


def template_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the shape that chat has, `function` apart."""
    return [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]


def template_messages(input: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Reasoning and calls belong to the assistant's message that they stand beside, as chat has it."""
    messages: list[tuple[str, Message]] = []
    if instructions is not None:
        messages.append(("instructions", Message(role="system", content=instructions)))
    if isinstance(input, str):
        messages.append(("input", Message(role="user", content=input)))
    elif isinstance(input, list) and input:
        for i, item in enumerate(input):
            _add(messages, item, f"input[{i}]")
    else:
        raise BadRequest("input: expected a string or a list of items", param="input")
    return [m.for_template(where) for where, m in messages]


def _add(messages: list[tuple[str, Message]], item: Any, where: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    last = messages[-1][1] if messages and messages[-1][1].role == "assistant" else None
    if kind == "message":
        sent = _parsed(_MessageItem, item, where)
        content = _text(sent.content, f"{where}.content")
        if sent.role == "assistant" and last is not None and last.content is None and not last.tool_calls:
            last.content = content
        else:
            messages.append((where, Message(role=sent.role, content=content)))
    elif kind == "function_call":
        asked = _parsed(_CallItem, item, where)
        call = ToolCall(id=asked.call_id, function=FunctionCall(name=asked.name, arguments=asked.arguments))
        if last is None:
            messages.append((where, Message(role="assistant", tool_calls=[call])))
        else:
            last.tool_calls = [*(last.tool_calls or ()), call]
    elif kind == "function_call_output":
        told = _parsed(_OutputItem, item, where)
        output = _text(told.output, f"{where}.output")
        messages.append((where, Message(role="tool", content=output, tool_call_id=told.call_id)))
    elif kind == "reasoning":
        thought = _parsed(_ReasoningItem, item, where)
        reasoning = _text(thought.content or [], f"{where}.content")
        messages.append((where, Message(role="assistant", reasoning_content=reasoning)))
    elif kind is None:
        raise BadRequest(f"{where}: expected an object", param=where)
    else:
        raise Unsupported(f"{where}: items of type {kind!r} are not supported", param=where)


def _parsed(kind: type[I], item: dict[str, Any], where: str) -> I:
    try:
        return kind.model_validate({k: v for k, v in item.items() if v is not None})
    except ValidationError as e:
        raise from_validation(e, where) from None


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{path}: expected a string or a list of text parts", param=path)
    return "".join(_part(p, f"{path}[{i}]") for i, p in enumerate(content))


_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "text")
_NEUTRAL_OF_A_PART = ("annotations", "logprobs")  # come back, empty, with an earlier response's text


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest(f"{path}: expected an object with a type", param=path)
    if part["type"] not in _TEXT_PARTS:
        raise Unsupported(f"{path}: content parts of type {part['type']!r} are not supported, only text", param=path)
    for name in part.keys() - {"type", "text"}:
        if name not in _NEUTRAL_OF_A_PART or part[name]:
            raise Unsupported(f"{path}: {name!r} is not supported", param=path)
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{path}: text must be a string", param=path)
    return str(part["text"])
