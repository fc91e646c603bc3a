"""POST /v1/responses: text and function calls; nothing is stored."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictStr
from starlette.responses import Response

from services.router.generation import Job, Outcome
from services.router.http.access import ID, key_of
from services.router.http.api import Api, collect, decision_headers, held, new_id, stats, usage, wants_stats
from services.router.http.conversation import Chat, render
from services.router.http.errors import error_body
from services.router.http.events import Whole, named_event, open_events, unless_gone
from services.router.http.fields import GenerationFields, Tokens
from services.router.http.parse import read_body
from services.router.http.response_input import SentFunctionTool, template_messages, template_tools
from services.router.http.response_items import ResponseItems, Told
from services.router.http.structured import TextOptions, reply_grammar
from services.router.http.tools import choose_tools
from services.router.text.calls.base import Event, Reasoning
from twinflow.contracts.errors import TooLong, TwinflowError
from twinflow.contracts.hashing import TOKEN_BYTES

# What this endpoint refuses besides what all do, with the values that change nothing. Some are chat's names of fields.
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "logprobs": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "messages": (),
    "n": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_retention": (),
    "reasoning": ({},),
    "stop": (),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class ResponseFields(GenerationFields):
    input: Any
    instructions: StrictStr | None = None
    max_output_tokens: Tokens | None = None
    tools: list[SentFunctionTool] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def reply_limit(self) -> int | None:
        return self.max_output_tokens


def response_routes(api: Api) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses")
    async def responses(request: Request) -> Response:
        config = api.config
        fields = await read_body(request, ResponseFields, config.model_name, config.max_body_bytes, REFUSED)
        id = request.scope[ID] = new_id("resp")
        answer_only = fields.text.grammar() if fields.text is not None else None
        tools, may_call = template_tools(fields.tools), api.text.calls is not None
        chosen = choose_tools(tools, fields.tool_choice, fields.parallel_tool_calls, may_call, path="tools[{}]")
        messages = template_messages(fields.input, fields.instructions)
        chat = await render(api, messages, chosen, fields.chat_template_kwargs, "input")
        grammar = reply_grammar(api.text, chat.text, chosen, answer_only)
        (job,) = api.jobs(id, fields, [chat.prompt], None, config.default_max_tokens, key_of(request), grammar)
        answer = ResponseAnswer(api, id, fields, chat, wants_stats(request))
        try:
            if fields.stream:
                return await open_events(request, answer.events(job), api.limits, answer.headers, answer.held)
            body = await unless_gone(request, answer.body(job))
        except TooLong as e:
            names = {"prompt": "input", "max_tokens": "max_output_tokens"}
            raise TooLong(e.message, param=names.get(e.param or "", e.param)) from None
        return Whole(body, answer.headers())

    return routes


class ResponseAnswer:
    """Shapes one generation as OpenAI's response, whole or as its events."""

    def __init__(self, api: Api, id: str, fields: ResponseFields, chat: Chat, with_stats: bool) -> None:
        self._api = api
        self._id = id
        self._fields = fields
        self._outcome = Outcome(prompt_tokens=chat.prompt_tokens)
        self._parser = api.text.parser(chat.text, chat.tools)
        self._items = ResponseItems()
        self._reasoning: list[str] = []
        self._with_stats = with_stats
        self._created = int(time.time())

    def headers(self) -> dict[str, str]:
        return {"x-request-id": self._id} | decision_headers([self._outcome])

    def held(self) -> bool:
        return held([self._outcome])

    async def body(self, job: Job) -> dict[str, Any]:
        """Calls that broke are left out: their text is in the answer."""
        async with self._api.entry.admitted([job], [self._outcome]):
            done = await collect(self._api.generator.run(job, self._outcome))
        self._take([*self._parser.push(done.text), *self._parser.finish()])
        self._items.end(_status(done.finish))
        output = [item for item in self._items.output if not any(item is b for b in self._items.broken)]
        return await self._ended(_status(done.finish), output)

    async def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        """The first one waits for the reply to begin, so that an early error has its own HTTP status."""
        number, finish = 0, ""
        try:
            run = self._api.generator.run(job, self._outcome)
            async with self._api.entry.admitted([job], [self._outcome]), aclosing(run) as pieces:
                async for piece in pieces:
                    told = [] if number else self._begun()
                    events = self._parser.push(piece.text)
                    if piece.finish is not None:
                        finish = piece.finish
                        events += self._parser.finish()
                    told += self._take(events)
                    if told:
                        yield _written(told, number)
                        number += len(told)
            status = _status(finish)
            told = self._items.end(status)
            told.append({"type": f"response.{status}", "response": await self._ended(status, self._items.output)})
        except TwinflowError as e:
            if not number:
                raise
            told = [{"type": "response.failed", "response": self._failed(e)}]
        yield _written(told, number)

    def _begun(self) -> list[Told]:
        response = self._response("in_progress", [])
        return [{"type": f"response.{word}", "response": response} for word in ("created", "in_progress")]

    def _take(self, events: list[Event]) -> list[Told]:
        self._reasoning += [e.text for e in events if isinstance(e, Reasoning)]
        return self._items.push(events)

    async def _ended(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        response = self._response(status, output)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        told = usage([self._outcome])
        thoughts = await self._api.text.encode("".join(self._reasoning), add_special_tokens=False)
        response["usage"] = {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(len(thoughts) // TOKEN_BYTES, told["completion_tokens"])},
            "total_tokens": told["total_tokens"],
        }
        return response | ({"twinflow": stats([self._outcome])} if self._with_stats else {})

    def _failed(self, error: TwinflowError) -> dict[str, Any]:
        response = self._response("failed", self._items.output)
        told = error_body(error)["error"]
        response["error"] = {"code": told["code"], "message": told["message"]}
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        fields = self._fields
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": {},
            "model": fields.model,
            "output": output,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": fields.text.told() if fields.text is not None else {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools,
            "top_p": fields.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
        }


def _status(finish: str) -> str:
    return "incomplete" if finish == "length" else "completed"


def _written(told: list[Told], number: int) -> bytes:
    return b"".join(named_event({**t, "sequence_number": number + i}) for i, t in enumerate(told))
