"""Where a prompt is computed, decided after the engine has matched its own cache. Pure."""

from dataclasses import dataclass
from enum import Enum

from twinflow.contracts.groups import GroupKind
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


def wanted_checkpoint(matched: Matched, block_tokens: int, local_max_tokens: int) -> int:
    """Where a state would let later siblings of this prompt run here, if they are like this one; 0 = nowhere.

    Attention reaches deeper than any state: an earlier prompt went another way from there on, and others may. The state is
    worth having at the last block boundary within that reach, which a sibling will share; it cannot be computed here, where the
    tokens before it are not.
    """
    reach = min((h.tokens for h in matched.hits if h.kind is GroupKind.ATTENTION), default=0)
    at = min(reach, matched.prompt_tokens - 1) // block_tokens * block_tokens
    return at if at > matched.usable_tokens and matched.prompt_tokens - at <= local_max_tokens else 0
