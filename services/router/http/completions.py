"""POST /v1/completions: a string, token ids, or a list of either."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool
from starlette.responses import Response

from services.router.admission.base import KeyFacts
from services.router.generation import Job, Outcome
from services.router.http.access import ID, key_of
from services.router.http.api import Api, collect_all, decision_headers, held, merge, new_id, stats, usage, wants_stats
from services.router.http.events import DONE, EventFrame, Lane, Whole, event, open_events, unless_gone
from services.router.http.fields import MAX_LOGPROBS, GenerationFields, Ids, as_ids
from services.router.http.id_arrays import IdArrays
from services.router.http.parse import read_body
from services.router.http.structured import ResponseFormat, StructuredOutputs, answer_grammar
from services.router.text.reply import TokenText
from twinflow.contracts.errors import BadRequest, Unsupported


class CompletionFields(GenerationFields):
    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: StrictBool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def prompts(self, most: int) -> list[str | Ids]:
        """Raises BadRequest unless it is a string, token ids, or a non-empty list of one kind of these."""
        one = self.prompt if isinstance(self.prompt, str) else as_ids(self.prompt)
        if one is not None:
            return [one]
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else []
        texts: list[str | Ids] = [p for p in given if isinstance(p, str)]
        found = texts or [p for p in map(as_ids, given) if p is not None]
        if not given or len(found) != len(given):
            raise BadRequest(
                "prompt: expected a string, a list of strings, token ids or lists of token ids", param="prompt"
            )
        if len(given) > most:
            raise BadRequest(f"prompt: at most {most} prompts in one request, got {len(given)}", param="prompt")
        return found


def completion_routes(api: Api) -> APIRouter:
    routes, arrays = APIRouter(), IdArrays("prompt")

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        fields = await read_body(
            request, CompletionFields, api.config.model_name, api.config.max_body_bytes, parse=arrays.parse
        )
        id = request.scope[ID] = new_id("cmpl")
        jobs = await make_jobs(api, id, fields, key_of(request))
        outcomes = [Outcome(prompt_tokens=job.prompt_tokens) for job in jobs]
        answer = CompletionAnswer(api, id, fields, outcomes, echoed(api, fields, len(jobs)), wants_stats(request))
        if fields.stream:
            lane = answer.lane() if len(jobs) == 1 else None
            events = answer.events(jobs, lane)
            return await open_events(request, events, api.limits, answer.headers, answer.held, lane)
        return Whole(await unless_gone(request, answer.body(jobs)), answer.headers())

    return routes


async def make_jobs(api: Api, id: str, fields: CompletionFields, key: KeyFacts) -> list[Job]:
    prompts = fields.prompts(api.config.max_prompts)
    grammar = answer_grammar(fields.response_format, fields.structured_outputs)
    all_ids = []
    for i, prompt in enumerate(prompts):
        where = f"prompt[{i}]" if len(prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            ids = await api.text.encode(prompt, add_special_tokens=True)
        else:
            ids = prompt.known(api.text.vocab_size, where, "prompt")
        if not ids:
            raise BadRequest(f"{where} is empty", param="prompt")
        all_ids.append(ids)
    return api.jobs(id, fields, all_ids, fields.logprobs, api.config.default_completion_tokens, key, grammar)


def echoed(api: Api, fields: CompletionFields, count: int) -> list[str]:
    """The prompt of each of `count` choices as text, empty unless it is asked for. Raises Unsupported with logprobs, since none
    are computed of prompts."""
    if fields.echo and fields.logprobs is not None:
        raise Unsupported("echo=True does not go with logprobs: there are none of the prompt", param="echo")
    if not fields.echo:
        return [""] * count
    prompts = fields.prompts(api.config.max_prompts)
    texts = [p if isinstance(p, str) else api.text.decode(list(p.tokens)) for p in prompts]
    return [text for text in texts for _ in range(fields.n)]


class CompletionAnswer:
    """Shapes generations as OpenAI's text completion, `n` choices per prompt."""

    def __init__(
        self,
        api: Api,
        id: str,
        fields: CompletionFields,
        outcomes: Sequence[Outcome],
        echoed: Sequence[str],
        with_stats: bool,
    ) -> None:
        """`echoed`: what each choice's text begins with."""
        self._api = api
        self._fields = fields
        self._outcomes = outcomes
        self._echoed = list(echoed)
        self._with_stats = with_stats
        self._head: dict[str, Any] = {
            "id": id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": fields.model,
        }

    async def body(self, jobs: Sequence[Job]) -> dict[str, Any]:
        async with self._api.entry.admitted(jobs, self._outcomes):
            done = await collect_all([self._api.generator.run(*run) for run in zip(jobs, self._outcomes, strict=True)])
        choices = [self._choice(i, self._begun(i, d.text), d.tokens, d.finish) for i, d in enumerate(done)]
        return {**self._head, "choices": choices, "usage": usage(self._outcomes, self._fields.n)} | self._stats()

    def lane(self) -> Lane:
        """Of the only choice's text."""
        return Lane(self._frame(0).event)

    def _frame(self, index: int) -> EventFrame:
        return EventFrame({**self._head, "choices": [self._choice(index, EventFrame.PLACE, (), None)]})

    async def events(self, jobs: Sequence[Job], lane: Lane | None = None) -> AsyncGenerator[bytes, None]:
        with_usage = self._fields.stream_options is not None and self._fields.stream_options.include_usage
        running = len(jobs)
        runs = [self._api.generator.run(*run, lane) for run in zip(jobs, self._outcomes, strict=True)]
        frames = [self._frame(i) for i in range(running)]
        async with self._api.entry.admitted(jobs, self._outcomes), aclosing(merge(runs)) as pieces:
            async for i, piece in pieces:
                text = self._begun(i, piece.text)
                if piece.finish is None and self._fields.logprobs is None:  # almost all
                    yield frames[i].event(text)
                    continue
                running -= piece.finish is not None
                last = not running and not with_usage
                choice = self._choice(i, text, piece.tokens, piece.finish)
                yield event({**self._head, "choices": [choice]} | (self._stats() if last else {}))
        if with_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._outcomes, self._fields.n)} | self._stats())
        yield DONE

    def held(self) -> bool:
        return held(self._outcomes)

    def headers(self) -> dict[str, str]:
        return {"x-request-id": self._head["id"]} | decision_headers(self._outcomes)

    def _begun(self, index: int, text: str) -> str:
        """The prompt before the first text of a choice that echoes it."""
        text, self._echoed[index] = self._echoed[index] + text, ""
        return text

    def _choice(self, index: int, text: str, tokens: Sequence[TokenText], finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def _stats(self) -> dict[str, Any]:
        return {"twinflow": stats(self._outcomes)} if self._with_stats else {}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if self._fields.logprobs is None:
            return None
        return {
            "tokens": [t.text for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{text: p for text, _, p in t.top} for t in tokens] if self._fields.logprobs else None,
            "text_offset": [t.offset for t in tokens],
        }
