"""Where a prompt is computed, decided after the engine has matched its own cache. Pure."""

from dataclasses import dataclass
from enum import Enum

from twinflow.contracts.workers import Role
from twinflow.engine.base import Matched


class Kind(Enum):
    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason` is for people: logs and the request's stats."""

    kind: Kind
    reason: str


def needs_match(role: Role, candidates: int) -> bool:
    """False when the decision does not depend on what the cache holds."""
    return role is not Role.BOTH and candidates > 0


def decide(role: Role, matched: Matched, candidates: int, local_max_tokens: int) -> Decision:
    """Local if nobody else can do it or the suffix past the usable prefix is short, else remote."""
    suffix_tokens = matched.prompt_tokens - matched.usable_tokens
    if role is Role.BOTH:
        return Decision(Kind.LOCAL, "this worker prefills its own requests")
    if candidates == 0:
        return Decision(Kind.LOCAL, "no prefill worker was offered")
    if suffix_tokens <= local_max_tokens:
        return Decision(Kind.LOCAL, f"{suffix_tokens} tokens to compute, at most {local_max_tokens} run here")
    return Decision(Kind.REMOTE, f"{suffix_tokens} tokens to compute, more than {local_max_tokens}")
