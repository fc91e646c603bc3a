"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field, StrictBool
from starlette.responses import Response

from services.router.generation import Job, Outcome
from services.router.http.api import Api, collect, new_id, stats, usage, wants_stats
from services.router.http.events import DONE, event, open_events, unless_gone
from services.router.http.fields import MAX_LOGPROBS, GenerationFields, Tokens
from services.router.http.messages import Message, SentTool
from services.router.http.parse import read_body
from services.router.text.reply import TokenText
from services.router.text.templates import RESERVED
from twinflow.contracts.errors import BadRequest, TooLong, Unsupported


class ChatFields(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[SentTool] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # variables of the model's template

    def reply_limit(self) -> int | None:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise BadRequest(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} differ; give one",
                param="max_completion_tokens",
            )
        return next(iter(both), None)

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_tools(self) -> Sequence[Any] | None:
        """None when there are none or tool_choice is "none"; a forced choice is refused."""
        if self.tool_choice not in (None, "none", "auto"):
            raise Unsupported(
                f"tool_choice={self.tool_choice!r} is not supported, only none and auto", param="tool_choice"
            )
        if not self.tools or self.tool_choice == "none":
            return None
        return self.tools

    def template_messages(self) -> list[dict[str, Any]]:
        return [m.for_template(f"messages[{i}]") for i, m in enumerate(self.messages)]


def chat_routes(api: Api) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        fields = await read_body(request, ChatFields, api.config.model_name, api.config.max_body_bytes)
        id = new_id("chatcmpl")
        job = await make_job(api, id, fields)
        outcome = Outcome(prompt_tokens=len(job.prompt))
        answer = ChatAnswer(api, id, fields, outcome, wants_stats(request))
        try:
            if fields.stream:
                return await open_events(request, answer.events(job), api.limits, {"x-request-id": id})
            body = await unless_gone(request, answer.body(job))
        except TooLong as e:
            raise TooLong(e.message, param="messages" if e.param == "prompt" else e.param) from None
        return JSONResponse(body, headers={"x-request-id": id})

    return routes


async def make_job(api: Api, id: str, fields: ChatFields) -> Job:
    variables = fields.chat_template_kwargs
    for name in RESERVED & variables.keys():
        raise BadRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
    text = api.text.template.render(fields.template_messages(), fields.template_tools(), extra=variables)
    prompt = await api.text.encode(text, add_special_tokens=False)
    if not prompt:
        raise BadRequest("the messages make an empty prompt", param="messages")
    return api.job(id, fields, prompt, fields.wanted_logprobs(), api.config.default_max_tokens)


class ChatAnswer:
    """Shapes one generation as OpenAI's chat completion, whole or in chunks."""

    def __init__(self, api: Api, id: str, fields: ChatFields, outcome: Outcome, with_stats: bool) -> None:
        self._api = api
        self._fields = fields
        self._outcome = outcome
        self._with_stats = with_stats
        self._head = {"id": id, "created": int(time.time()), "model": fields.model}

    async def body(self, job: Job) -> dict[str, Any]:
        done = await collect(self._api.generator.run(job, self._outcome))
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": done.text, "refusal": None},
            "logprobs": self._logprobs(done.tokens),
            "finish_reason": done.finish,
        }
        body = {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage([self._outcome])}
        return body | self._stats()

    async def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        with_usage = self._fields.stream_options is not None and self._fields.stream_options.include_usage
        first = True
        async with aclosing(self._api.generator.run(job, self._outcome)) as pieces:
            async for piece in pieces:
                delta: dict[str, Any] = {"role": "assistant"} if first else {}
                if piece.text or first:
                    delta["content"] = piece.text
                first = False
                last = piece.finish is not None
                yield self._chunk(delta, self._logprobs(piece.tokens), piece.finish, last and not with_usage)
        if with_usage:
            yield event({**self._chunk_head(), "choices": [], "usage": usage([self._outcome])} | self._stats())
        yield DONE

    def _chunk(self, delta: dict[str, Any], logprobs: Any, finish: str | None, with_stats: bool) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._chunk_head(), "choices": [choice]} | (self._stats() if with_stats else {}))

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _stats(self) -> dict[str, Any]:
        return {"twinflow": stats([self._outcome])} if self._with_stats else {}

    def _logprobs(self, tokens: tuple[TokenText, ...]) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        return {"content": [self._token(t) for t in tokens], "refusal": None}

    def _token(self, t: TokenText) -> dict[str, Any]:
        top = [{"token": text, "logprob": p, "bytes": list(raw)} for text, raw, p in t.top]
        return {"token": t.text, "logprob": t.logprob, "bytes": list(t.raw), "top_logprobs": top}
