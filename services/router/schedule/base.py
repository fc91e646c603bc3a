"""What a choice is made from and what it says. Facts only: `view` computes them, `choose` weighs them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from twinflow.contracts.errors import NoCapacity
from twinflow.contracts.hits import GroupHit, usable_tokens
from twinflow.contracts.workers import WorkerRecord


class ChoiceKind(Enum):
    LOCAL = "local"
    REMOTE = "remote"


class Reason(Enum):
    """Why a choice has its kind; the `reason` of metrics and of the request's stats."""

    NO_PREFILL_WORKER = "no_prefill_worker"
    ROLE_BOTH = "role_both"
    SHORT_SUFFIX = "short_suffix"
    LONG_SUFFIX = "long_suffix"


class NoDecodeWorker(NoCapacity):
    """No worker that decodes this model is connected (or all of them drain)."""

    reason = "no_decode_worker"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker as seen for one prompt. `active_requests` and `queued_prefill_tokens` already include what this router
    has charged; `hits` are this prompt's, per group."""

    record: WorkerRecord
    connected: bool
    active_requests: int
    queued_prefill_tokens: int
    hits: tuple[GroupHit, ...] = ()
    attention_tokens: int = 0  # reach of the attention group

    def usable_tokens(self, prompt_tokens: int) -> int:
        return usable_tokens(self.hits, prompt_tokens)


@dataclass(frozen=True, slots=True)
class Snapshot:
    workers: tuple[WorkerFacts, ...]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """`tie_seed` decides between equals, so that a choice is a function of its inputs."""

    model: str
    prompt_tokens: int
    max_tokens: int
    tie_seed: int
    excluded: frozenset[tuple[str, str]] = frozenset()  # (id, incarnation) that already failed this request


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights in prompt tokens of prefill compute, the unit of all costs."""

    local_max_tokens: int = 256  # a suffix up to this long is prefilled by the decode worker itself
    transfer_per_token: float = 0.05  # moving one token's KV, relative to computing one
    active_request_tokens: float = 64.0  # what one more running request costs everybody on its worker
    no_slot_tokens: float = 8192.0  # waiting for a slot of a full worker
    fingerprint: str = ""  # "" = any, but always the same on both sides of a hand-off


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefill worker offered to the decode worker."""

    record: WorkerRecord
    usable_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`candidates` are in order of preference; a LOCAL choice has them too where there are any, since the decode worker's
    own match decides. `prefill_tokens` = what whoever prefills is predicted to compute. `terms` shows the costs behind
    the choice, in tokens."""

    kind: ChoiceKind
    decode: WorkerRecord
    candidates: tuple[Candidate, ...]
    reason: Reason
    decode_attention_tokens: int
    decode_usable_tokens: int
    prefill_tokens: int
    max_tokens: int
    terms: Mapping[str, float] = field(default_factory=dict)
