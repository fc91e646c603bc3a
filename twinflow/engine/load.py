"""A worker's load as routers see it: a pure function of the pools and of what runs and waits."""

from collections.abc import Collection, Mapping

from twinflow.cache.base import PoolCounts
from twinflow.contracts.groups import CacheLayout
from twinflow.contracts.workers import Load
from twinflow.engine.sequence import Sequence


def load_of(
    counts: Mapping[str, PoolCounts], layout: CacheLayout, running: Collection[Sequence], waiting: Collection[Sequence]
) -> Load:
    """Queued prefill: tokens that running sequences have not fed yet, and the prompts of those that wait to be computed
    here (a waiting hand-off is computed elsewhere)."""
    blocks, slots = counts[layout.attention.name], counts[layout.state.name]
    todo = sum([s.chain.length - s.holding.position for s in running if s.holding])
    todo += sum(s.start_tokens for s in waiting if not s.intake)
    return Load(
        running=len(running),
        waiting=len(waiting),
        queued_prefill_tokens=todo,
        free_blocks=blocks.free + blocks.cached,
        total_blocks=blocks.total,
        free_slots=slots.free + slots.cached,
        total_slots=slots.total,
    )
