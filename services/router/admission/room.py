"""Whether workers should get more now, from the facts of the view. Pure.

There is room while some decode worker has a free slot and some prefill worker of the same layout has less than `work_s` seconds
of prompts before it; without prefill workers the decode worker's own queue counts. So workers hold just what keeps them busy, and
what is beyond that waits where the order is fair. Requests that were let go and are not charged to anybody yet count as taken.

Looking ends at the first room found, so that it costs next to nothing while there is plenty.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from services.router.schedule.base import NO_RATES, Policy, RouteRequest, WorkerFacts
from services.router.schedule.cost import PREFILL_TOKENS_PER_S
from services.router.schedule.filters import DECODERS, drop
from services.router.schedule.rates import Rates
from twinflow.contracts.facts import fact
from twinflow.contracts.workers import BOTH, PREFILL, Role

UNKNOWN_SLOTS = 1 << 30  # of a worker that tells none
MORE = 16  # a worker is tried with one request more for as many as it could hold


class Room(Enum):
    FREE = "free"
    FULL = "full"
    NOBODY = "nobody"  # no worker could take anything at all: waiting would not help


FREE, FULL, NOBODY = Room  # as with roles


@fact(frozen=True, slots=True)
class Ahead:
    """Let go, but not charged to the view yet."""

    generations: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class _Spare:
    """Of the workers of one layout. Seconds are of prompts that may still be put before workers."""

    slots: int = 0
    prefill_s: float = 0.0
    local_s: float = 0.0  # on decode workers
    rate: float = PREFILL_TOKENS_PER_S
    has_decode: bool = False
    has_prefill: bool = False

    def free(self, prefill_s: float, ahead: Ahead) -> bool:
        return self.slots > ahead.generations and prefill_s > ahead.prompt_tokens / self.rate


def look(
    workers: Iterable[WorkerFacts],
    fleet: Mapping[tuple[str, Role], Rates],
    request: RouteRequest,
    policy: Policy,
    work_s: float,
    ahead: Ahead,
) -> Room:
    """`request` tells the model; its lengths do not matter."""
    layouts: dict[str, _Spare] = {}
    for w in workers:
        if drop(w, request, policy) is not None:
            continue
        record = w.record
        spare = layouts.get(record.fingerprint)
        if spare is None:
            spare = layouts[record.fingerprint] = _Spare()
        rate = _rate(w, fleet, ahead)
        left_s = work_s - w.queued_prefill_tokens / rate
        if left_s < 0:
            left_s = 0.0
        if record.role in DECODERS:
            spare.has_decode = True
            spare.slots += _free_slots(w)
            spare.local_s += left_s
        if record.role is PREFILL:
            spare.has_prefill = True
            spare.rate = rate
            spare.prefill_s += left_s
        if spare.free(spare.local_s if record.role is BOTH else spare.prefill_s, ahead):
            return FREE
    for spare in layouts.values():
        if spare.has_decode and not spare.has_prefill and spare.free(spare.local_s, ahead):
            return FREE
    return FULL if any(spare.has_decode for spare in layouts.values()) else NOBODY


def _free_slots(w: WorkerFacts) -> int:
    """Requests that a decode worker could take at once; none while some wait there already. One that was full before gets a few
    more than it could hold then, to see whether it can by now."""
    load = w.record.load
    if load.waiting:
        return 0
    slots = load.total_slots or UNKNOWN_SLOTS
    if w.full_at:
        slots = min(slots, w.full_at + 1 + w.full_at // MORE)
    return slots - w.active_requests if slots > w.active_requests else 0


def _rate(w: WorkerFacts, fleet: Mapping[tuple[str, Role], Rates], ahead: Ahead) -> float:
    """Prompt tokens per second of what it has before it and what is on its way; short ones are slower."""
    tokens = w.queued_prefill_tokens + ahead.prompt_tokens or 1
    own = w.rates.prefill.at(tokens)
    if own:
        return own
    like = fleet.get((w.record.fingerprint, w.record.role), NO_RATES)
    return like.prefill.at(tokens) or PREFILL_TOKENS_PER_S
