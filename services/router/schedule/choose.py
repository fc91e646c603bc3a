"""The choice: filter workers, score what is left, pick. Pure: the same snapshot, request and policy give the same choice.

Prefill workers are scored by themselves first; only the best few are then paired with every decode worker, so that a cluster
of 64 and 192 takes hundreds of pairs, not thousands.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from services.router.schedule.base import (
    Candidate,
    Choice,
    ChoiceKind,
    Policy,
    Reason,
    RouteRequest,
    Scene,
    Sighted,
    Snapshot,
    Terms,
    WorkerFacts,
)
from services.router.schedule.cost import is_decode_bound
from services.router.schedule.filters import drop, dropped, usable_decoders
from services.router.schedule.limits import fits, limit_tokens, too_long
from services.router.schedule.pick import least
from twinflow.contracts.workers import Role

MAX_CANDIDATES = 4  # offered to a decode worker; also those that are paired with every one of them
MAX_OTHERS = 5  # alternatives that a choice tells
DEFAULT_REPLY_TOKENS = 256.0


@dataclass(frozen=True, slots=True)
class _Option:
    """A decode worker with the best that can be done there."""

    decode: Sighted
    kind: ChoiceKind
    reason: Reason
    peers: tuple[Sighted, ...]  # prefill workers in order
    terms: Terms
    local_max_tokens: int

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def name(self) -> str:
        return self.decode.id if self.kind is ChoiceKind.LOCAL else f"{self.peers[0].id}→{self.decode.id}"


def choose(snapshot: Snapshot, request: RouteRequest, policy: Policy) -> Choice:
    """Raises NoDecodeWorker when nobody can decode, TooLong when no worker could ever hold the request."""
    random = Random(request.tie_seed)
    decoders = usable_decoders(snapshot, request, policy)
    fitting = [w for w in decoders if fits(w.record, request)]
    if not fitting:
        raise too_long([w.record for w in decoders], request.prompt_tokens, request.max_tokens)
    options: list[_Option] = []
    for fingerprint in dict.fromkeys(w.record.fingerprint for w in fitting):
        group = [w for w in fitting if w.record.fingerprint == fingerprint]
        options += _options(group, fingerprint, snapshot, request, policy, random)
    costs = {i: option.total for i, option in enumerate(options)}
    picked = policy.picker(costs, random, request.turn)
    return _choice(options[picked], options, snapshot, request, policy)


def _options(
    decoders: Sequence[WorkerFacts],
    fingerprint: str,
    snapshot: Snapshot,
    request: RouteRequest,
    policy: Policy,
    random: Random,
) -> list[_Option]:
    """One per decode worker of a layout."""
    n = request.prompt_tokens
    peers = [
        Sighted(w, policy.sight(w, n))
        for w in snapshot.workers
        if w.record.role is Role.PREFILL
        and w.record.fingerprint == fingerprint
        and n < limit_tokens(w.record)
        and drop(w, request, policy) is None
    ]
    behind = sum(p.facts.waiting_prompts for p in peers) / len(peers) if peers else 0.0
    reply_tokens = min(request.max_tokens, snapshot.reply_tokens or DEFAULT_REPLY_TOKENS)
    scene = Scene(request, policy, snapshot.fleet, reply_tokens, behind)
    ranked = _rank(peers, scene, random)
    return [_option(Sighted(w, policy.sight(w, n)), ranked, snapshot, scene, random) for w in decoders]


def _rank(peers: Sequence[Sighted], scene: Scene, random: Random) -> list[tuple[Sighted, Terms]]:
    """Prefill workers with their terms, the picker's first choice first, the others by cost."""
    policy, turn = scene.policy, scene.request.turn
    scored = [(p, policy.scorer.prefill(p, scene)) for p in peers]
    if not scored:
        return []
    costs = {i: sum(terms.values()) for i, (_, terms) in enumerate(scored)}
    first = policy.picker(costs, random, turn)
    rest = heapq.nsmallest(4 * MAX_CANDIDATES, (i for i in costs if i != first), lambda i: (costs[i], random.random()))
    return [scored[i] for i in (first, *rest)]


def _option(
    decode: Sighted, ranked: list[tuple[Sighted, Terms]], snapshot: Snapshot, scene: Scene, random: Random
) -> _Option:
    policy, broken = scene.policy, snapshot.broken
    local = policy.scorer.local(decode, scene)
    if decode.facts.record.role is Role.BOTH:
        return _Option(decode, ChoiceKind.LOCAL, Reason.ROLE_BOTH, (), local, scene.request.prompt_tokens)
    healthy = ranked[:MAX_CANDIDATES]
    if broken:
        healthy = [(p, terms) for p, terms in ranked if (p.id, decode.id) not in broken][:MAX_CANDIDATES]
    if not healthy:
        return _Option(decode, ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER, (), local, scene.request.prompt_tokens)
    own = policy.scorer.decode(decode, scene)
    pairs = [(p, terms | policy.scorer.pair(decode, p, terms, scene) | own) for p, terms in healthy]
    if policy.picker is least:  # what a pair costs may change the order that the prefill workers have by themselves
        totals = [sum(terms.values()) for _, terms in pairs]
        first = least(dict(enumerate(totals)), random, scene.request.turn)
        order = sorted(range(len(pairs)), key=lambda i: (i != first, totals[i]))
        pairs = [pairs[i] for i in order]
    peers, remote = tuple(p for p, _ in pairs), pairs[0][1]
    suffix = scene.request.prompt_tokens - decode.hit.usable_tokens
    limit = policy.scorer.local_limit(decode, local, remote, scene)
    if suffix <= limit:
        return _Option(decode, ChoiceKind.LOCAL, Reason.SHORT_SUFFIX, peers, local, limit)
    short = suffix <= policy.local_max_tokens and is_decode_bound(decode.facts, scene)
    reason = Reason.DECODE_BOUND if short else Reason.LONG_SUFFIX
    return _Option(decode, ChoiceKind.REMOTE, reason, peers, remote, limit)


def _choice(
    option: _Option, options: Sequence[_Option], snapshot: Snapshot, request: RouteRequest, policy: Policy
) -> Choice:
    decode, n = option.decode, request.prompt_tokens
    whoever = decode if option.kind is ChoiceKind.LOCAL else option.peers[0]
    others = heapq.nsmallest(MAX_OTHERS, (o for o in options if o is not option), key=lambda o: o.total)
    return Choice(
        kind=option.kind,
        decode=decode.facts.record,
        candidates=tuple(Candidate(p.facts.record, p.hit.usable_tokens) for p in option.peers),
        reason=option.reason,
        decode_attention_tokens=decode.facts.attention_tokens,
        decode_usable_tokens=decode.facts.usable_tokens(n),
        prefill_tokens=n - whoever.facts.usable_tokens(n),
        max_tokens=request.max_tokens,
        prefill_attention_tokens=whoever.facts.attention_tokens,
        local_max_tokens=option.local_max_tokens,
        terms=option.terms | {"total": option.total},
        others={o.name: o.total for o in others},
        dropped=dropped(snapshot.workers, request, policy),
    )
