"""What admission says and takes: facts of a key, what a request asks for, the permit it gets, why it is shed.

All of it is frozen and plain, so that a gate may live in another process than the HTTP server that asks it.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from twinflow.contracts.errors import DeadlineExceeded, Overloaded, TwinflowError
from twinflow.contracts.facts import fact

ANONYMOUS = "anonymous"  # the key of who sends none


class Unauthorized(TwinflowError):
    """No API key, or one that is not known here."""

    http_status, grpc_code, reason = 401, "UNAUTHENTICATED", "invalid_api_key"


class ShedReason(Enum):
    """Why a request is not taken; the `reason` of the answer and of metrics."""

    REQUESTS_PER_MIN = "requests_per_min"
    TOKENS_PER_MIN = "tokens_per_min"
    CONCURRENT = "concurrent"
    QUEUE_FULL = "queue_full"
    SLO = "slo"  # the first token would come later than the key's slo_ttft_s
    DEADLINE = "deadline"  # it waited here for queue_s


@fact(frozen=True, slots=True)
class Quota:
    """One limit per minute as clients are told of it."""

    limit: int
    remaining: int
    reset_s: float  # until nothing counts against it any more


@fact(frozen=True, slots=True)
class Quotas:
    """None = no such limit."""

    requests: Quota | None = None
    tokens: Quota | None = None


NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """One API key without the key itself. None = no limit. `name` is for people: logs, metrics, the key's file."""

    name: str
    tenant: str = ""
    isolate: bool = True
    requests_per_min: int | None = None
    tokens_per_min: int | None = None  # of prompts, cached or not, and replies
    concurrent: int | None = None  # generations, waiting ones too
    weight: float = 1.0  # share of the cluster's work beside other keys that wait
    max_priority: int = 0
    slo_ttft_s: float | None = None

    def cache_tenant(self, cache_salt: str) -> str:
        """What separates its cached prefixes from those of others; "" = shared with all that do not isolate."""
        return self.tenant if self.isolate or cache_salt else ""


@fact(frozen=True, slots=True)
class Ask:
    """One HTTP request, all its choices together. `reply_tokens`: the most that they may generate. `least_ttft_s`: predicted time
    to its first token once it is let go, without waiting for others; `waited_s`: since it arrived."""

    key: KeyFacts
    prompt_tokens: int
    reply_tokens: int
    generations: int = 1
    priority: int = 0
    longest: tuple[int, int] = (1, 1)  # prompt and reply tokens of its longest generation
    least_ttft_s: float = 0.0
    waited_s: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens


@fact(frozen=True, slots=True)
class Permit:
    """To be left exactly once, whatever becomes of the request."""

    id: int
    waited_s: float
    quotas: Quotas = field(default_factory=Quotas)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken now, and when it might be. `message` and `key` (its name) are for people."""

    message: str
    why: ShedReason
    key: str
    retry_after_s: float
    quotas: Quotas = field(default_factory=Quotas)


class Shed(Overloaded):
    """Not now: too much of this key, or of all. Never crosses a worker's session."""

    reason = "rate_limit_exceeded"

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.args = (refusal,)  # what it is made of again after a trip to another process
        self.refusal = refusal


class WaitedTooLong(DeadlineExceeded):
    """In the queue here, for as long as anything may wait."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.args = (refusal,)
        self.refusal = refusal


class Gate(Protocol):
    """Lets requests through to the choice of workers while there is room, in fair order otherwise."""

    @property
    def idle(self) -> bool:
        """A request would be let through at once, as far as is known here. A hint: it may be a moment old."""
        ...

    async def enter(self, ask: Ask) -> Permit:
        """Charges the key, then waits for room. Cancelling gives everything back. Raises Shed, WaitedTooLong, and TooLong or
        BadRequest for what could never be let through."""
        ...

    def placed(self, permit_id: int) -> None:
        """One of its generations was given to workers, and the view was charged. Returns at once; no answer is needed. More calls
        than generations, and calls after `leave`, change nothing."""
        ...

    def leave(self, permit_id: int, tokens: int) -> None:
        """The request is over and has used so many tokens. As `placed`; a second call changes nothing."""
        ...
