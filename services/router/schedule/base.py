"""What a choice is made from and what it says. Facts only: `view` computes them, a policy weighs them.

A policy is data: how it reads hits, what it scores by, and how it picks (`policies`). All times are milliseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Protocol, TypeVar

from services.router.schedule.rates import Rates
from twinflow.contracts.errors import NoCapacity
from twinflow.contracts.groups import GroupKind
from twinflow.contracts.hits import GroupHit, usable_tokens
from twinflow.contracts.workers import Role, WorkerRecord

T = TypeVar("T")

NO_RATES = Rates()

Key = tuple[str, str]  # worker id, incarnation
Terms = dict[str, float]  # name → ms; negative ones are saved


class ChoiceKind(Enum):
    LOCAL = "local"
    REMOTE = "remote"


class Reason(Enum):
    """Why a choice has its kind; the `reason` of metrics and of the request's stats."""

    NO_PREFILL_WORKER = "no_prefill_worker"
    ROLE_BOTH = "role_both"
    SHORT_SUFFIX = "short_suffix"  # computing the rest on the decode worker costs less than a hand-off
    LONG_SUFFIX = "long_suffix"
    DECODE_BOUND = "decode_bound"  # short, but the decode worker is too busy to prefill


class Drop(Enum):
    """Why a worker is no option for a request."""

    OTHER_MODEL = "of another model"
    OTHER_FINGERPRINT = "of another layout"
    DRAINING = "draining"
    NOT_CONNECTED = "not connected"
    FAILED_BEFORE = "lost under this request"
    STALLED = "without a step while requests run"
    BREAKER_OPEN = "failing"


class NoDecodeWorker(NoCapacity):
    """No worker that decodes this model is connected (or all of them drain)."""

    reason = "no_decode_worker"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker as seen for one prompt. Loads already include what this router has charged; `attention_tokens` and
    `checkpoints` are this prompt's hits. `waiting_prompts` are not computed yet."""

    record: WorkerRecord
    connected: bool
    active_requests: int
    queued_prefill_tokens: int
    waiting_prompts: int = 0
    stalled: bool = False
    full_at: int = 0  # requests that ran there when others had to wait for memory or a slot, 0 = never seen
    attention_tokens: int = 0  # reach
    checkpoints: tuple[int, ...] = ()  # ascending; at least the deepest usable one
    rates: Rates = field(default_factory=Rates)

    @property
    def hits(self) -> tuple[GroupHit, ...]:
        return (
            GroupHit("attention", GroupKind.ATTENTION, self.attention_tokens),
            GroupHit("state", GroupKind.STATE, max(self.checkpoints, default=0), self.checkpoints),
        )

    def usable_tokens(self, prompt_tokens: int) -> int:
        return usable_tokens(self.hits, prompt_tokens) if self.checkpoints else 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`fleet`: rates of all workers of a fingerprint and role together. `broken`: pairs (prefill, decode) of ids that fail each
    other, ("", decode) for a worker by itself. `reply_tokens`: mean length, None before the first one."""

    workers: tuple[WorkerFacts, ...]
    fleet: Mapping[tuple[str, Role], Rates] = field(default_factory=dict)
    broken: frozenset[tuple[str, str]] = frozenset()
    reply_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """`tie_seed` decides between equals and `turn` counts requests, so that a choice is a function of its inputs."""

    model: str
    prompt_tokens: int
    max_tokens: int
    tie_seed: int
    turn: int = 0
    excluded: frozenset[Key] = frozenset()  # workers that already failed this request


@dataclass(frozen=True, slots=True)
class Hit:
    """One worker's hit of the prompt, as the policy reads it: what it need not be sent, what it need not compute."""

    reach_tokens: int
    usable_tokens: int


@dataclass(frozen=True, slots=True)
class Sighted:
    """A worker with its hit."""

    facts: WorkerFacts
    hit: Hit

    @property
    def id(self) -> str:
        return self.facts.record.id


@dataclass(frozen=True, slots=True)
class Scene:
    """What every score may look at besides the workers themselves. `behind`: prompts that wait per prefill worker."""

    request: RouteRequest
    policy: "Policy"
    fleet: Mapping[tuple[str, Role], Rates]
    reply_tokens: float
    behind: float

    def fleet_of(self, w: WorkerFacts) -> Rates:
        """Rates of all workers like this one."""
        return self.fleet.get((w.record.fingerprint, w.record.role), NO_RATES)


class Sight(Protocol):
    """How a policy reads a worker's hits. Pure."""

    def __call__(self, facts: WorkerFacts, prompt_tokens: int) -> Hit: ...


class Scorer(Protocol):
    """Costs in named terms; the least sum is the best. Pure."""

    def prefill(self, worker: Sighted, scene: Scene) -> Terms:
        """Of the prompt at this prefill worker, whoever decodes."""
        ...

    def decode(self, worker: Sighted, scene: Scene) -> Terms:
        """Of one sequence more at this decode worker, whoever prefills."""
        ...

    def pair(self, decode: Sighted, prefill: Sighted, computed: Terms, scene: Scene) -> Terms:
        """Of what lies between the two; `computed` are the prefill worker's terms."""
        ...

    def local(self, decode: Sighted, scene: Scene) -> Terms:
        """Of the prompt on the decode worker alone."""
        ...

    def local_limit(self, decode: Sighted, local: Terms, remote: Terms, scene: Scene) -> int:
        """The longest suffix that the decode worker shall compute itself rather than hand off."""
        ...


class Picker(Protocol):
    """One of several, by their costs. Pure."""

    def __call__(self, costs: Mapping[T, float], random: Random, turn: int) -> T:
        """`costs` is not empty; its order is the workers' own."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """See `policies` for those that there are. Weights are tuned by replay, see `docs/router.md`."""

    name: str
    sight: Sight
    scorer: Scorer
    picker: Picker
    fingerprint: str = ""  # "" = any, but always the same on both sides of a hand-off
    local_max_tokens: int = 256  # suffixes up to this long are short; 0 = never local where there is an alternative
    decode_bound_ms: float = 50.0  # a decode worker whose step takes so long computes no prompts
    others: float = 0.03  # of a millisecond that other streams lose, relative to one of this request's first token
    behind: float = 1.5  # of a millisecond that prompts behind this one wait


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefill worker offered to the decode worker."""

    record: WorkerRecord
    usable_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`candidates` are in order of preference; a LOCAL choice has them too where there are any, since the decode worker's
    own match decides, by `local_max_tokens`. `prefill_tokens` = what whoever prefills is predicted to compute. `terms` are the
    costs behind the choice, `others` the totals of the next best ones by name."""

    kind: ChoiceKind
    decode: WorkerRecord
    candidates: tuple[Candidate, ...]
    reason: Reason
    decode_attention_tokens: int
    decode_usable_tokens: int
    prefill_tokens: int
    max_tokens: int
    prefill_attention_tokens: int = 0  # reach of whoever prefills
    local_max_tokens: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)  # worker id → why
