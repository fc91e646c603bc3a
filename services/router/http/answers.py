"""The shapes of answers, for the description that /openapi.json gives: answers themselves are built as plain dicts by the
endpoints, and tests hold them against these. A field with a default may be left out."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None
    code: str | None
    reason: str = ""


class Error(Shape):
    error: ErrorDetail


class CachedTokens(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class Call(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[Call] = []


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    twinflow: dict[str, Any] = {}


class FunctionDelta(Shape):
    name: str = ""
    arguments: str


class CallDelta(Shape):
    """`id`, `type` and the name come with the first one of an index."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Shape):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = []


class ChunkChoice(Shape):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Shape):
    """`choices` is empty in the one with `usage`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    twinflow: dict[str, Any] = {}


class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(Shape):
    """`finish_reason` is null before a stream's last piece."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Shape):
    """Whole, and each event of a stream; `choices` is empty in the one with `usage`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    twinflow: dict[str, Any] = {}


class Tokens(Shape):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(Shape):
    prompt: str


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    capabilities: dict[str, bool]


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class Live(Shape):
    status: Literal["live"]


class Ready(Shape):
    status: Literal["ready"]


class NotReady(Shape):
    status: Literal["not ready"]
    reason: str
    message: str


class WorkerHealth(Shape):
    id: str
    role: str
    connected: bool
    draining: bool
    active_requests: int
    queued_prefill_tokens: int
    free_blocks: int
    total_blocks: int


class Health(Shape):
    status: str
    model: str
    running: int
    waiting: int
    workers: list[WorkerHealth]


class Decisions(Shape):
    """Newest first; the operations page tells what is in one."""

    decisions: list[dict[str, Any]]
