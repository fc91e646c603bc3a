"""Commands about no request: what the front asks of the engine, each answered by one notice of the same turn."""

import time
from collections.abc import Iterable

from twinflow.cache.base import Cache
from twinflow.contracts.errors import BadRequest
from twinflow.contracts.events import EventColumns
from twinflow.contracts.hashing import TokenChain
from twinflow.engine import base
from twinflow.engine.sequence import Sequence

Question = base.Flush | base.Inspect | base.MatchQuery | base.Resync


def answer(question: Question, cache: Cache, block_tokens: int, sequences: Iterable[Sequence]) -> base.Answer:
    """Only `Flush` changes anything. `sequences` are in order of arrival."""
    match question:
        case base.Flush(token, group):
            return flush(cache, token, group)
        case base.Inspect(token, walk):
            problem = integrity_problem(cache) if walk else ""
            infos = tuple(map(info, sequences))
            return base.Inspected(token, cache.counts(), cache.stored(), infos, problem)
        case base.MatchQuery(token, root, prompt):
            found = cache.match(TokenChain(root, block_tokens, prompt))
            return base.MatchFound(token, found.hits, found.usable_tokens)
        case base.Resync(token):
            # events not yet reported are part of the snapshot; they follow it with lower numbers and are ignored
            sequence, events = cache.snapshot()
            return base.CacheSnapshot(token, sequence, EventColumns.of(events))


def flush(cache: Cache, token: int, group: str | None) -> base.Flushed:
    groups = list(cache.counts()) if group is None else [group]
    try:
        return base.Flushed(token, {name: cache.flush(name) for name in groups})
    except BadRequest as error:
        return base.Flushed(token, {}, error.message)


def integrity_problem(cache: Cache) -> str:
    try:
        cache.check_integrity()
    except AssertionError as error:
        return str(error) or "integrity check failed"
    return ""


def info(s: Sequence) -> base.SequenceInfo:
    held = s.holding
    return base.SequenceInfo(
        id=s.id,
        mode=s.mode.value,
        phase=s.phase.value,
        prompt_tokens=s.request.prompt_tokens,
        processed_tokens=held.position or held.written_tokens if held is not None else 0,
        generated_tokens=len(s.generated),
        age_s=time.monotonic() - s.started_s,
        blocks=len(held.blocks) if held is not None else 0,
        slots=int(held is not None and held.slot is not None),
    )
