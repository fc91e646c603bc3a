"""The policies by name. `cost` is for use, the others are for comparison.

cost            per-group hits, costs in milliseconds
min_of_groups   the same costs, but a hit is what all groups hold, on decode workers too
attention_only  queue and attention hit in tokens, states unknown: what a router knows that indexes attention blocks
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

    def decode(self, worker: Sighted, scene: Scene) -> Terms:
        return {"active": float(worker.facts.active_requests)}

    def pair(self, decode: Sighted, prefill: Sighted, computed: Terms, scene: Scene) -> Terms:
        return {}

    def local(self, decode: Sighted, scene: Scene) -> Terms:
        return {"active": float(decode.facts.active_requests)}

    def local_limit(self, decode: Sighted, local: Terms, remote: Terms, scene: Scene) -> int:
        return scene.policy.local_max_tokens


class Overlap:
    """Tokens to compute and to wait for; a request that runs counts as a block of 64 and a token to be moved as a twentieth."""

    def prefill(self, worker: Sighted, scene: Scene) -> Terms:
        tokens = scene.request.prompt_tokens - worker.hit.usable_tokens
        return {"queued": float(worker.facts.queued_prefill_tokens), "prefill": float(tokens)}

    def decode(self, worker: Sighted, scene: Scene) -> Terms:
        return {"active": 64.0 * worker.facts.active_requests}

    def pair(self, decode: Sighted, prefill: Sighted, computed: Terms, scene: Scene) -> Terms:
        return {"transfer": max(0, scene.request.prompt_tokens - decode.hit.reach_tokens) / 20}

    def local(self, decode: Sighted, scene: Scene) -> Terms:
        return self.prefill(decode, scene) | self.decode(decode, scene)

    def local_limit(self, decode: Sighted, local: Terms, remote: Terms, scene: Scene) -> int:
        return scene.policy.local_max_tokens


class Nothing:
    """Everything costs the same."""

    def prefill(self, worker: Sighted, scene: Scene) -> Terms:
        return {"queued": 0.0}

    def decode(self, worker: Sighted, scene: Scene) -> Terms:
        return {"active": 0.0}

    def pair(self, decode: Sighted, prefill: Sighted, computed: Terms, scene: Scene) -> Terms:
        return {}

    def local(self, decode: Sighted, scene: Scene) -> Terms:
        return {"active": 0.0}

    def local_limit(self, decode: Sighted, local: Terms, remote: Terms, scene: Scene) -> int:
        return scene.policy.local_max_tokens


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy("cost", per_group, Cost(), least),
        Policy("min_of_groups", min_of_groups, Cost(), least),
        Policy("attention_only", attention_only, Overlap(), least),
        Policy("least_loaded", blind, Queue(), least),
        Policy("round_robin", blind, Nothing(), next_in_turn),
    )
}


def policy_named(name: str, **settings: Any) -> Policy:
    """With other values for some of its settings. Raises BadRequest naming the policies that there are."""
    if name not in POLICIES:
        raise BadRequest(f"unknown policy {name!r} (known: {', '.join(POLICIES)})", param="policy")
    return replace(POLICIES[name], **settings)
