"""What can be done with a request in one layout: every decode worker with its best prefill worker, scored side by side. Pure.

Prefill workers are scored by themselves first; only the best few are then paired with every decode worker. Terms are arrays over
the workers, so that a cluster of 64 and 192 takes about as long as one of 4 and 4.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from services.router.schedule.base import (
    F64,
    Bools,
    Crowd,
    Policy,
    Reason,
    RouteRequest,
    Scene,
    Snapshot,
    Terms,
    WorkerFacts,
)
from services.router.schedule.cost import decode_bound
from services.router.schedule.limits import limit_tokens
from services.router.schedule.pick import least
from twinflow.contracts.facts import fact
from twinflow.contracts.workers import Role

MAX_CANDIDATES = 4  # offered to a decode worker; also those that are paired with every one of them
DEFAULT_REPLY_TOKENS = 256.0


@fact(frozen=True, slots=True)
class Options:
    """The decode workers of a layout, each with the best that can be done there. `peers`: prefill workers, the best by
    themselves first; arrays are (decode,) and (decode, peers)."""

    decode: Crowd
    peers: Crowd
    computed: Terms  # (peers,)
    paired: Terms  # (decode, peers)
    own: Terms  # (decode,)
    pairs: F64  # totals, infinite where a pair is broken
    best: NDArray[np.int64]  # peer of each decode worker
    bound: Bools  # too busy with decoding to compute prompts
    remote: F64  # totals of the best hand-offs, infinite where there is none
    total: F64
    is_local: Bools
    scene: Scene

    def local(self, at: Sequence[int]) -> tuple[Terms, F64]:
        """Terms of those decode workers if they compute the prompt, and the longest suffix that they shall."""
        scene, decode = self.scene, self.decode.take(at)
        scorer, whole = scene.policy.scorer, float(scene.request.prompt_tokens)
        terms = scorer.local(decode, {name: column[at] for name, column in self.own.items()}, scene)
        alone, remote = np.isinf(self.remote[at]), self.remote[at]
        remote = np.where(alone, _sum(terms, (len(at),)), remote)
        limit = scorer.local_limit(decode, terms, remote, self.bound[at], scene)
        return terms, np.where(alone, whole, limit)

    def terms(self, at: int) -> dict[str, float]:
        if self.is_local[at]:
            return {name: float(column[0]) for name, column in self.local([at])[0].items()}
        peer = self.best[at]
        terms = {name: float(column[peer]) for name, column in self.computed.items()}
        terms |= {name: float(column[at, peer]) for name, column in self.paired.items()}
        return terms | {name: float(column[at]) for name, column in self.own.items()}

    def reason(self, at: int) -> Reason:
        if self.decode.facts[at].record.role is Role.BOTH:
            return Reason.ROLE_BOTH
        if np.isinf(self.remote[at]):
            return Reason.NO_PREFILL_WORKER
        if self.is_local[at]:
            return Reason.SHORT_SUFFIX
        request, policy = self.scene.request, self.scene.policy
        short = request.prompt_tokens - self.decode.usable[at] <= policy.local_max_tokens
        return Reason.DECODE_BOUND if short and self.bound[at] else Reason.LONG_SUFFIX

    def order(self, at: int, policy: Policy) -> list[int]:
        """Peers for this decode worker, the best first."""
        if np.isinf(self.remote[at]):
            return []
        healthy: list[int] = np.flatnonzero(np.isfinite(self.pairs[at])).tolist()
        if policy.picker is least:
            healthy.sort(key=lambda p: (p != self.best[at], self.pairs[at, p]))
        return healthy[:MAX_CANDIDATES]

    def name(self, at: int) -> str:
        decode = self.decode.facts[at].record.id
        return decode if self.is_local[at] else f"{self.peers.facts[self.best[at]].record.id}→{decode}"


def options(
    decoders: Sequence[WorkerFacts],
    kept: Sequence[WorkerFacts],
    fingerprint: str,
    snapshot: Snapshot,
    request: RouteRequest,
    policy: Policy,
    random: Random,
) -> Options:
    """`kept`: workers that are options, of all roles and layouts."""
    n, scorer = request.prompt_tokens, policy.scorer
    peers = Crowd.seen(
        [
            w
            for w in kept
            if w.record.role is Role.PREFILL and w.record.fingerprint == fingerprint and n < limit_tokens(w.record)
        ],
        n,
        policy.sight,
    )
    behind = float(peers.waiting.mean()) if len(peers) else 0.0
    reply_tokens = min(request.max_tokens, snapshot.reply_tokens or DEFAULT_REPLY_TOKENS)
    scene = Scene(request, policy, snapshot.fleet, reply_tokens, behind)
    decode = Crowd.seen(decoders, n, policy.sight)
    peers, computed = _ranked(peers, scene, random, 4 * MAX_CANDIDATES if snapshot.broken else MAX_CANDIDATES)
    own = scorer.decode(decode, scene)
    bound = decode_bound(decode, own, scene)
    paired = scorer.pair(decode, peers, computed, scene)
    pairs = _sum(computed, (1, len(peers))) + _sum(paired, (len(decode), len(peers))) + _sum(own, (len(decode), 1))
    for p, d in _broken(peers, decode, snapshot):
        pairs[d, p] = np.inf
    if len(peers):
        best = pairs.argmin(axis=1) if policy.picker is least else np.isfinite(pairs).argmax(axis=1)
        remote = pairs[np.arange(len(decode)), best]
    else:
        best, remote = np.zeros(len(decode), np.int64), np.full(len(decode), np.inf)
    remote[[w.record.role is Role.BOTH for w in decoders]] = np.inf
    made = Options(
        decode,
        peers,
        computed,
        paired,
        own,
        pairs,
        best,
        bound,
        remote,
        remote.copy(),
        np.zeros(len(decode), bool),
        scene,
    )
    short = np.flatnonzero(np.isinf(remote) | (n - decode.usable <= policy.local_max_tokens)).tolist()
    if short:
        local, limit = made.local(short)
        here = n - decode.usable[short] <= limit
        at = np.array(short)[here]
        made.total[at] = _sum(local, (len(short),))[here]
        made.is_local[at] = True
    return made


def _ranked(peers: Crowd, scene: Scene, random: Random, count: int) -> tuple[Crowd, Terms]:
    """The best prefill workers with their terms: the picker's first choice first, the others by cost."""
    if not len(peers):
        return peers, {}
    terms = scene.policy.scorer.prefill(peers, scene)
    costs = _sum(terms, (len(peers),))
    first = scene.policy.picker(costs, random, scene.request.turn)
    shuffled = random.sample(range(len(peers)), len(peers))  # so that equals fall at random
    rest = [i for i in sorted(shuffled, key=costs.tolist().__getitem__) if i != first]
    order = [first, *rest[: count - 1]]
    return peers.take(order), {name: column[order] for name, column in terms.items()}


def _broken(peers: Crowd, decode: Crowd, snapshot: Snapshot) -> list[tuple[int, int]]:
    """Positions of pairs not to be used."""
    if not snapshot.broken:
        return []
    at = {w.record.id: i for i, w in enumerate(decode.facts)}
    of = {w.record.id: i for i, w in enumerate(peers.facts)}
    return [(of[p], at[d]) for p, d in snapshot.broken if p in of and d in at]


def _sum(terms: Terms, shape: tuple[int, ...]) -> F64:
    total = np.zeros(shape)
    for column in terms.values():
        total = total + column.reshape(shape)
    return total
