"""A worker's load as routers see it: a pure function of the pools and of what runs and waits."""

from collections.abc import Collection, Mapping

from twinflow.cache.base import PoolCounts
from twinflow.contracts.groups import CacheLayout
from twinflow.contracts.workers import Load
from twinflow.engine.sequence import Sequence
from twinflow.engine.waiting import Waiting


def load_of(
    counts: Mapping[str, PoolCounts], layout: CacheLayout, running: Collection[Sequence], waiting: Waiting
) -> Load:
    """Queued prefill: tokens that running sequences have not fed yet, and what will be left of the prompts that wait to be
    computed here. Waiting are those that ask for memory: routers take it for a sign that there is none."""
    blocks, slots = counts[layout.attention.name], counts[layout.state.name]
    todo = sum([s.chain.length - s.holding.position for s in running if s.holding])
    todo += waiting.prompt_tokens
    return Load(
        running=len(running),
        waiting=waiting.asking,
        queued_prefill_tokens=todo,
        free_blocks=blocks.free + blocks.cached,
        total_blocks=blocks.total,
        free_slots=slots.free + slots.cached,
        total_slots=slots.total,
    )
