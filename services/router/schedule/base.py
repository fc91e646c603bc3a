"""What a choice is made from and what it says. Facts only: `view` computes them, a policy weighs them.

A policy is data: how it reads hits, what it scores by, and how it picks (`policies`). All times are milliseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.router.schedule.rates import Rates
from twinflow.contracts.errors import NoCapacity
from twinflow.contracts.facts import fact
from twinflow.contracts.groups import GroupKind
from twinflow.contracts.hits import GroupHit
from twinflow.contracts.workers import Role, WorkerRecord

NO_RATES = Rates()

Key = tuple[str, str]  # worker id, incarnation
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]
Terms = dict[str, F64]  # name → ms of each worker, or of each pair; negative ones are saved


class ChoiceKind(Enum):
    LOCAL = "local"
    REMOTE = "remote"


LOCAL, REMOTE = ChoiceKind  # as with roles


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
    STALLED = "whose engine stands still"
    BREAKER_OPEN = "failing"


class NoDecodeWorker(NoCapacity):
    """No worker that decodes this model is connected (or all of them drain)."""

    reason = "no_decode_worker"


@fact(frozen=True, slots=True)
class WorkerFacts:
    """One worker as seen for one prompt. Loads already include what this router has charged; `attention_tokens` and
    `checkpoints` are this prompt's hits. `waiting_prompts` are not computed yet. `reads`: hand-offs of which `moving_bytes` are
    still to pass its link, out of a prefill worker, into a decode worker."""

    record: WorkerRecord
    connected: bool
    active_requests: int
    queued_prefill_tokens: int
    waiting_prompts: int = 0
    stalled: bool = False
    full_at: int = 0  # requests that ran there when others had to wait for memory or a slot, 0 = never seen
    attention_tokens: int = 0  # reach
    checkpoints: tuple[int, ...] = ()  # ascending; at least the deepest usable one
    rates: Rates = NO_RATES
    reads: int = 0
    moving_bytes: float = 0.0

    @property
    def hits(self) -> tuple[GroupHit, ...]:
        return (
            GroupHit("attention", GroupKind.ATTENTION, self.attention_tokens),
            GroupHit("state", GroupKind.STATE, max(self.checkpoints, default=0), self.checkpoints),
        )

    def usable_tokens(self, prompt_tokens: int) -> int:
        """As `contracts.hits` defines it, for these two groups."""
        held = self.checkpoints
        if not held:
            return 0
        last = min(self.attention_tokens, prompt_tokens - 1)
        if held[-1] <= last:  # nearly always: of each worker, that alone is asked for
            return held[-1]
        return max((c for c in held if c <= last), default=0)


@fact(frozen=True, slots=True)
class Snapshot:
    """`fleet`: rates of all workers of a fingerprint and role together. `broken`: pairs (prefill, decode) of ids that fail each
    other, ("", decode) for a worker by itself. `reply_tokens`: mean length, None before the first one."""

    workers: tuple[WorkerFacts, ...]
    fleet: Mapping[tuple[str, Role], Rates] = field(default_factory=dict)
    broken: frozenset[tuple[str, str]] = frozenset()
    reply_tokens: float | None = None


@fact(frozen=True, slots=True)
class RouteRequest:
    """`tie_seed` decides between equals and `turn` counts requests, so that a choice is a function of its inputs."""

    model: str
    prompt_tokens: int
    max_tokens: int
    tie_seed: int
    turn: int = 0
    excluded: frozenset[Key] = frozenset()  # workers that already failed this request


@fact(frozen=True, slots=True)
class Crowd:
    """Workers of one layout side by side, with their hits as the policy reads them. Arrays are (workers,)."""

    facts: tuple[WorkerFacts, ...]
    reach: F64  # tokens that they need not be sent
    usable: F64  # tokens that they need not compute
    active: F64  # requests
    queued: F64  # tokens of prompts
    waiting: F64  # prompts
    slots: F64  # 0 = unknown
    reads: F64  # hand-offs
    moving: F64  # bytes

    @classmethod
    def of(cls, facts: Sequence[WorkerFacts], reach: F64, usable: F64) -> "Crowd":
        rows = [
            (
                w.active_requests,
                w.queued_prefill_tokens,
                w.waiting_prompts,
                w.record.load.total_slots,
                w.reads,
                w.moving_bytes,
            )
            for w in facts
        ]
        return cls(tuple(facts), reach, usable, *np.array(rows, np.float64).reshape(len(rows), 6).T)

    @classmethod
    def seen(cls, facts: Sequence[WorkerFacts], prompt_tokens: int, sight: "Sight") -> "Crowd":
        """With their hits of a prompt of that length."""
        reach = np.array([w.attention_tokens for w in facts], np.float64)
        usable = np.array([w.usable_tokens(prompt_tokens) for w in facts], np.float64)
        return cls.of(facts, *sight(reach, usable, prompt_tokens))

    def __len__(self) -> int:
        return len(self.facts)

    def take(self, at: Sequence[int]) -> "Crowd":
        """Those workers, in that order."""
        columns = (
            self.reach, self.usable, self.active, self.queued, self.waiting, self.slots, self.reads, self.moving
        )  # fmt: skip
        return Crowd(tuple(self.facts[i] for i in at), *(c[list(at)] for c in columns))


@fact(frozen=True, slots=True)
class Scene:
    """What every score may look at besides the workers themselves. `behind`: prompts that wait per prefill worker."""

    request: RouteRequest
    policy: "Policy"
    fleet: Mapping[tuple[str, Role], Rates]
    reply_tokens: float
    behind: float

    def fleets(self, workers: Crowd) -> list[Rates]:
        """Of each worker the rates of all like it. They are of one layout, so only their roles differ."""
        by_role: dict[int, Rates] = {}
        found = []
        for w in workers.facts:
            role = id(w.record.role)
            if role not in by_role:
                by_role[role] = self.fleet.get((w.record.fingerprint, w.record.role), NO_RATES)
            found.append(by_role[role])
        return found


class Sight(Protocol):
    """How a policy reads hits. Pure."""

    def __call__(self, reach: F64, usable: F64, prompt_tokens: int) -> tuple[F64, F64]:
        """Of each worker what attention holds and from where all groups can resume → what it need not be sent, what it need
        not compute."""
        ...


class Scorer(Protocol):
    """Costs in named terms; the least sum is the best. Pure."""

    def prefill(self, workers: Crowd, scene: Scene) -> Terms:
        """(workers,) of the prompt at each prefill worker, whoever decodes."""
        ...

    def decode(self, workers: Crowd, scene: Scene) -> Terms:
        """(workers,) of one sequence more at each decode worker, whoever prefills."""
        ...

    def pair(self, decode: Crowd, prefill: Crowd, computed: Terms, scene: Scene) -> Terms:
        """(decode, prefill) of what lies between the two; `computed` are the prefill workers' terms."""
        ...

    def local(self, decode: Crowd, own: Terms, scene: Scene) -> Terms:
        """(decode,) of the prompt on the decode worker alone; `own` are its terms for one sequence more."""
        ...

    def local_limit(self, decode: Crowd, local: Terms, remote: F64, bound: Bools, scene: Scene) -> F64:
        """(decode,) the longest suffix that a decode worker shall compute itself rather than hand off; `remote` is the total
        of its best hand-off, `bound` those that are busy enough with decoding."""
        ...


class Picker(Protocol):
    """One of several, by their costs. Pure."""

    def __call__(self, costs: F64, random: Random, turn: int) -> int:
        """`costs` (n ≥ 1,) in the workers' own order."""
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
    others: float = 0.06  # of a millisecond that other streams lose, relative to one of this request's first token
    behind: float = 1.5  # of a millisecond that prompts behind this one wait
    second: float = 0.3  # of a millisecond that the second token waits for what is read: the first does not
    sharing: float = 0.2  # of a millisecond that other reads on the same link wait


@fact(frozen=True, slots=True)
class Candidate:
    """A prefill worker offered to the decode worker."""

    record: WorkerRecord
    usable_tokens: int


@fact(frozen=True, slots=True)
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
