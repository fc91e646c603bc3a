"""The policies by name. `cost` is for use, the others are for comparison.

cost            per-group hits, costs in milliseconds
min_of_groups   the same costs, but a hit is what all groups hold, on decode workers too
attention_only  queue and attention hit in tokens, states unknown: what a router knows that indexes attention blocks
least_loaded    the shortest queue; hits are not looked at
round_robin     one after the other
"""

from dataclasses import replace
from typing import Any

import numpy as np

from services.router.schedule.base import F64, Bools, Crowd, Policy, Scene, Terms
from services.router.schedule.cost import Cost
from services.router.schedule.pick import least, next_in_turn
from twinflow.contracts.errors import BadRequest

# ---- sights ----


def per_group(reach: F64, usable: F64, prompt_tokens: int) -> tuple[F64, F64]:
    return reach, usable


def min_of_groups(reach: F64, usable: F64, prompt_tokens: int) -> tuple[F64, F64]:
    return usable, usable


def attention_only(reach: F64, usable: F64, prompt_tokens: int) -> tuple[F64, F64]:
    return reach, np.minimum(reach, prompt_tokens - 1)


def blind(reach: F64, usable: F64, prompt_tokens: int) -> tuple[F64, F64]:
    return np.zeros_like(reach), np.zeros_like(usable)


# ---- scorers ----


class Queue:
    """What is there already, in requests at the decode worker and tokens at the prefill worker."""

    def prefill(self, workers: Crowd, scene: Scene) -> Terms:
        return {"queued": workers.queued}

    def decode(self, workers: Crowd, scene: Scene) -> Terms:
        return {"active": workers.active}

    def pair(self, decode: Crowd, prefill: Crowd, computed: Terms, scene: Scene) -> Terms:
        return {}

    def local(self, decode: Crowd, own: Terms, scene: Scene) -> Terms:
        return own

    def local_limit(self, decode: Crowd, local: Terms, remote: F64, bound: Bools, scene: Scene) -> F64:
        return np.full(len(decode), float(scene.policy.local_max_tokens))


class Overlap(Queue):
    """Tokens to compute and to wait for; a request that runs counts as a block of 64 and a token to be moved as a twentieth."""

    def prefill(self, workers: Crowd, scene: Scene) -> Terms:
        return {"queued": workers.queued, "prefill": scene.request.prompt_tokens - workers.usable}

    def decode(self, workers: Crowd, scene: Scene) -> Terms:
        return {"active": 64.0 * workers.active}

    def pair(self, decode: Crowd, prefill: Crowd, computed: Terms, scene: Scene) -> Terms:
        moved = np.maximum(0.0, scene.request.prompt_tokens - decode.reach) / 20
        return {"transfer": np.repeat(moved[:, None], len(prefill), axis=1)}

    def local(self, decode: Crowd, own: Terms, scene: Scene) -> Terms:
        return self.prefill(decode, scene) | own


class Nothing(Queue):
    """Everything costs the same."""

    def prefill(self, workers: Crowd, scene: Scene) -> Terms:
        return {"queued": np.zeros(len(workers))}

    def decode(self, workers: Crowd, scene: Scene) -> Terms:
        return {"active": np.zeros(len(workers))}


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
