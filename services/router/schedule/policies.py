"""The policies by name. `cost` is for use, the others are for comparison: each leaves out one thing that `cost` knows.

    cost            per-group hits, costs in milliseconds
    min_of_groups   the same costs, but a hit is the least of the groups' own hits, and nothing where that has no checkpoint
    attention_only  the same costs, but states count as if they were wherever attention is
    least_loaded    the shortest queue; hits are not looked at
    round_robin     one after the other
"""

from dataclasses import replace
from typing import Any

from services.router.schedule.base import Hit, Policy, Scene, Sighted, Terms, WorkerFacts
from services.router.schedule.cost import Cost
from services.router.schedule.pick import least, next_in_turn
from twinflow.contracts.errors import BadRequest

# ---- sights ----


def per_group(facts: WorkerFacts, prompt_tokens: int) -> Hit:
    return Hit(facts.attention_tokens, facts.usable_tokens(prompt_tokens))


def min_of_groups(facts: WorkerFacts, prompt_tokens: int) -> Hit:
    usable = facts.usable_tokens(prompt_tokens)
    return Hit(usable, usable)


def attention_only(facts: WorkerFacts, prompt_tokens: int) -> Hit:
    return Hit(facts.attention_tokens, min(facts.attention_tokens, prompt_tokens - 1))


def blind(facts: WorkerFacts, prompt_tokens: int) -> Hit:
    return Hit(0, 0)


# ---- scorers ----


class Queue:
    """What is there already, in requests at the decode worker and tokens at the prefill worker."""

    def prefill(self, worker: Sighted, scene: Scene) -> Terms:
        return {"queued": float(worker.facts.queued_prefill_tokens)}

    def remote(self, decode: Sighted, prefill: Sighted, computed: Terms, scene: Scene) -> Terms:
        return {"active": float(decode.facts.active_requests)}

    def local(self, decode: Sighted, scene: Scene) -> Terms:
        return {"active": float(decode.facts.active_requests)}

    def local_limit(self, decode: Sighted, local: Terms, remote: Terms, scene: Scene) -> int:
        return scene.policy.local_max_tokens


class Nothing:
    """Everything costs the same."""

    def prefill(self, worker: Sighted, scene: Scene) -> Terms:
        return {"queued": 0.0}

    def remote(self, decode: Sighted, prefill: Sighted, computed: Terms, scene: Scene) -> Terms:
        return {"active": 0.0}

    def local(self, decode: Sighted, scene: Scene) -> Terms:
        return {"active": 0.0}

    def local_limit(self, decode: Sighted, local: Terms, remote: Terms, scene: Scene) -> int:
        return scene.policy.local_max_tokens


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy("cost", per_group, Cost(), least),
        Policy("min_of_groups", min_of_groups, Cost(), least),
        Policy("attention_only", attention_only, Cost(), least),
        Policy("least_loaded", blind, Queue(), least),
        Policy("round_robin", blind, Nothing(), next_in_turn),
    )
}


def policy_named(name: str, **settings: Any) -> Policy:
    """With other values for some of its settings. Raises BadRequest naming the policies that there are."""
    if name not in POLICIES:
        raise BadRequest(f"unknown policy {name!r} (known: {', '.join(POLICIES)})", param="policy")
    return replace(POLICIES[name], **settings)
