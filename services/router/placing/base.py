"""What placing an attempt takes and says. Everything is plain and can be pickled, so that the HTTP side may live in other
processes than the view (`services.router.processes`)."""

from dataclasses import dataclass
from typing import Protocol

from services.router.dispatch.base import Key
from services.router.schedule.base import Choice
from services.router.view.prompt import PromptKeys, ReplyKeys
from twinflow.contracts.facts import fact
from twinflow.contracts.requests import RequestStats


@fact(frozen=True, slots=True)
class Want:
    """One attempt. `prompt` includes what was sent of the reply. `max_tokens` None: as many as `default_tokens`, or what room is
    left. `permit_id` and `slo_left_s` (None = no limit) of a first attempt: what the gate gave, and how late its first token
    may be from now on."""

    id: str
    prompt: PromptKeys
    max_tokens: int | None
    default_tokens: int
    excluded: frozenset[Key] = frozenset()
    permit_id: int | None = None
    slo_left_s: float | None = None


@dataclass(frozen=True, slots=True)
class TooLate:
    """Nothing was charged: the first token would come so many seconds after the limit."""

    late_s: float


@fact(frozen=True, slots=True)
class Ended:
    """How an attempt ended, as far as the view learns from it. `ok`: with a whole reply of `reply_tokens`; `reply`: what the
    decode worker holds of it. `broke`: it was the decode worker's fault."""

    id: str
    choice: Choice
    stats: RequestStats | None = None
    ok: bool = False
    broke: bool = False
    reply_tokens: int = 0
    reply: ReplyKeys | None = None


class Placer(Protocol):
    async def place(self, want: Want) -> Choice | TooLate:
        """Chooses, and charges the choice at once; to be `ended` exactly once then, whatever becomes of it. Raises NoDecodeWorker
        and TooLong, and charges nothing."""
        ...

    async def least_ttft_s(self, prompt: PromptKeys, max_tokens: int) -> float:
        """The first token of this prompt at the earliest, without waiting for others. Raises as `place`; charges nothing."""
        ...

    def begun(self, id: str) -> None:
        """Its first token came. Returns at once."""
        ...

    def ended(self, end: Ended) -> None:
        """Takes its charges back. Returns at once."""
        ...
