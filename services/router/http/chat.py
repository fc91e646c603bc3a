"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool
from starlette.responses import Response

from services.router.generation import Job, Outcome
from services.router.http.access import ID, key_of
from services.router.http.api import (
    Api,
    Finished,
    collect_all,
    decision_headers,
    held,
    merge,
    new_id,
    stats,
    usage,
    wants_stats,
)
from services.router.http.choices import Deltas, message
from services.router.http.conversation import Chat, ConversationFields, render_chat
from services.router.http.events import DONE, EventFrame, Lane, Whole, event, open_events, unless_gone
from services.router.http.fields import MAX_LOGPROBS, GenerationFields, Tokens
from services.router.http.parse import read_body
from services.router.http.structured import ResponseFormat, StructuredOutputs, answer_grammar, reply_grammar
from services.router.text.reply import Piece, TokenText
from twinflow.contracts.errors import BadRequest, TooLong


class ChatFields(GenerationFields, ConversationFields):
    max_completion_tokens: Tokens | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

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


def chat_routes(api: Api) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        fields = await read_body(request, ChatFields, api.config.model_name, api.config.max_body_bytes)
        id = request.scope[ID] = new_id("chatcmpl")
        answer_only = answer_grammar(fields.response_format, fields.structured_outputs)
        chat = await render_chat(api, fields)
        grammar = reply_grammar(api.text, chat.text, chat.chosen, answer_only)
        logprobs, default = fields.wanted_logprobs(), api.config.default_max_tokens
        jobs = api.jobs(id, fields, [chat.prompt], logprobs, default, key_of(request), grammar)
        answer = ChatAnswer(api, id, fields, chat, wants_stats(request))
        try:
            if fields.stream:
                lane = answer.lane() if len(jobs) == 1 else None
                events = answer.events(jobs, lane)
                return await open_events(request, events, api.limits, answer.headers, answer.held, lane)
            body = await unless_gone(request, answer.body(jobs))
        except TooLong as e:
            raise TooLong(e.message, param="messages" if e.param == "prompt" else e.param) from None
        return Whole(body, answer.headers())

    return routes


class ChatAnswer:
    """Shapes `n` generations as OpenAI's chat completion, whole or in chunks."""

    def __init__(self, api: Api, id: str, fields: ChatFields, chat: Chat, with_stats: bool) -> None:
        self._api = api
        self._fields = fields
        self._outcomes = [Outcome(prompt_tokens=chat.prompt_tokens) for _ in range(fields.n)]
        self._parsers = [api.text.parser(chat.text, chat.tools) for _ in range(fields.n)]
        self._streams: dict[int, tuple[Deltas, EventFrame]] = {}  # of each choice that has begun
        self._frame_of: EventFrame | None = None  # the first choice's
        self._with_stats = with_stats
        self._head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": fields.model}

    def headers(self) -> dict[str, str]:
        return {"x-request-id": self._head["id"]} | decision_headers(self._outcomes)

    def held(self) -> bool:
        return held(self._outcomes)

    async def body(self, jobs: Sequence[Job]) -> dict[str, Any]:
        async with self._api.entry.admitted(jobs, self._outcomes):
            done = await collect_all(self._runs(jobs))
        choices = [self._choice(i, d) for i, d in enumerate(done)]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": self._usage()} | self._stats()

    def lane(self) -> Lane:
        """Of the only choice's text, which has begun when the lane opens."""
        if self._parsers[0].plain:
            return Lane(self._frame(0).event)
        return Lane(lambda text: self._event(0, Piece(text), False))

    async def events(self, jobs: Sequence[Job], lane: Lane | None = None) -> AsyncGenerator[bytes, None]:
        with_usage = self._fields.stream_options is not None and self._fields.stream_options.include_usage
        running = len(jobs)
        async with self._api.entry.admitted(jobs, self._outcomes), aclosing(merge(self._runs(jobs, lane))) as pieces:
            async for i, piece in pieces:
                running -= piece.finish is not None
                data = self._event(i, piece, not running and not with_usage)
                if data is not None:
                    yield data
        if with_usage:
            yield event({**self._chunk_head(), "choices": [], "usage": self._usage()} | self._stats())
        yield DONE

    def _event(self, index: int, piece: Piece, with_stats: bool) -> bytes | None:
        """None: nothing to send yet."""
        if index not in self._streams:
            self._streams[index] = Deltas(self._parsers[index]), self._frame(index)
        deltas, frame = self._streams[index]
        sent = deltas.push(piece)
        if sent is None:
            return None
        delta, tokens, finish = sent
        if finish is None and not self._fields.logprobs and len(delta) == 1 and "content" in delta:
            return frame.event(delta["content"])
        return self._chunk(index, delta, tokens, finish, with_stats)

    def _runs(self, jobs: Sequence[Job], lane: Lane | None = None) -> list[AsyncGenerator[Piece, None]]:
        return [self._api.generator.run(*run, lane) for run in zip(jobs, self._outcomes, strict=True)]

    def _choice(self, index: int, done: Finished) -> dict[str, Any]:
        told, finish = message(self._parsers[index], done.text, done.finish)
        return {"index": index, "message": told, "logprobs": self._logprobs(done.tokens), "finish_reason": finish}

    def _chunk(
        self, index: int, delta: dict[str, Any], tokens: Sequence[TokenText], finish: str | None, with_stats: bool
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": finish}
        return event({**self._chunk_head(), "choices": [choice]} | (self._stats() if with_stats else {}))

    def _frame(self, index: int) -> EventFrame:
        """Of chunks that say nothing but text: almost all. The lane's is the first choice's."""
        if index == 0 and self._frame_of is not None:
            return self._frame_of
        choice = {"index": index, "delta": {"content": EventFrame.PLACE}, "logprobs": None, "finish_reason": None}
        frame = EventFrame({**self._chunk_head(), "choices": [choice]})
        if index == 0:
            self._frame_of = frame
        return frame

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _usage(self) -> dict[str, Any]:
        return usage(self._outcomes, self._fields.n)

    def _stats(self) -> dict[str, Any]:
        return {"twinflow": stats(self._outcomes)} if self._with_stats else {}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        return {"content": [self._token(t) for t in tokens], "refusal": None}

    def _token(self, t: TokenText) -> dict[str, Any]:
        top = [{"token": text, "logprob": p, "bytes": list(raw)} for text, raw, p in t.top]
        return {"token": t.text, "logprob": t.logprob, "bytes": list(t.raw), "top_logprobs": top}
