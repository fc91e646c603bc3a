"""Lengths: what a worker can hold, what a reply may use, and the error that names both sides."""

from collections.abc import Sequence

from services.router.schedule.base import RouteRequest
from twinflow.contracts.errors import TooLong
from twinflow.contracts.workers import WorkerRecord


def limit_tokens(record: WorkerRecord) -> int:
    """Prompt and reply together, what model and cache of this worker allow."""
    model, cache = record.max_model_tokens, record.max_request_tokens
    return model if model < cache else cache


def fits(record: WorkerRecord, request: RouteRequest) -> bool:
    return request.prompt_tokens + request.max_tokens <= limit_tokens(record)


def reply_tokens(records: Sequence[WorkerRecord], prompt_tokens: int, wanted: int) -> int:
    """`wanted`, or what the roomiest worker leaves after the prompt. Raises TooLong when that is nothing."""
    room = max(map(limit_tokens, records), default=0) - prompt_tokens
    if room < 1:
        raise too_long(records, prompt_tokens, 1)
    return min(room, wanted)


def too_long(records: Sequence[WorkerRecord], prompt_tokens: int, max_tokens: int) -> TooLong:
    """The error that names both numbers, and which limit it was."""
    best = max(records, key=limit_tokens)
    model, cache = best.max_model_tokens, best.max_request_tokens
    whose = f"the model's limit of {model}" if model <= cache else f"the cache's limit of {cache}"
    asked = f"the prompt has {prompt_tokens} tokens"
    if prompt_tokens < limit_tokens(best):
        asked += f" and max_tokens is {max_tokens}, together {prompt_tokens + max_tokens}"
        return TooLong(f"{asked}, which is over {whose} tokens for prompt and reply", param="max_tokens")
    return TooLong(f"{asked}, which leaves no room for a reply under {whose} tokens", param="prompt")
