"""The shapes of /v1/responses' answers, as `answers` has those of the others."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from services.router.http.answers import Shape

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(Shape):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Shape):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status


class FunctionCallItem(Shape):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class ReasoningItem(Shape):
    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: Status


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseError(Shape):
    code: str | None
    message: str


class Response(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | FunctionCallItem | ReasoningItem]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    twinflow: dict[str, Any] = Field(default_factory=dict)


class ResponseEvent(Shape):
    """One event of a stream; what else is in it depends on its type."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    sequence_number: int
    response: Response | None = None
