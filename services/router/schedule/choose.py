"""The choice: filter workers, then the least cost; ties fall at random.

Cost of (D, kind), in tokens of prefill compute:

    local   queued(D) + (N − usable_D)                                   D computes its own suffix
    remote  min over P of [queued(P) + (N − usable_P)] + transfer · (N − reach_D)
    both    + active(D) · active_request + no_slot if all of D's slots are taken

The two sides save different things: a prefill worker what `usable_tokens` spares it, a decode worker the transfer of
what its attention already reaches; the final state moves whatever it holds.
"""

from random import Random

from services.router.schedule.base import (
    Candidate,
    Choice,
    ChoiceKind,
    NoDecodeWorker,
    Policy,
    Reason,
    RouteRequest,
    Snapshot,
    WorkerFacts,
)
from services.router.schedule.limits import fits, limit_tokens, too_long
from twinflow.contracts.workers import Role


def choose(snapshot: Snapshot, request: RouteRequest, policy: Policy) -> Choice:
    """Raises NoDecodeWorker when nobody can decode, TooLong when no worker could ever hold the request."""
    random = Random(request.tie_seed)
    live = [w for w in snapshot.workers if eligible(w, request, policy)]
    decoders = usable_decoders(snapshot, request, policy)
    fitting = [w for w in decoders if fits(w.record, request)]
    if not fitting:
        raise too_long([w.record for w in decoders], request.prompt_tokens, request.max_tokens)
    prefillers = [w for w in live if w.record.role is Role.PREFILL]
    choices = [_price(w, prefillers, request, policy, random) for w in fitting]
    return min(choices, key=lambda c: (c.terms["total"], random.random()))


def usable_decoders(snapshot: Snapshot, request: RouteRequest, policy: Policy) -> list[WorkerFacts]:
    """Never empty: raises NoDecodeWorker that says what is missing."""
    found = [w for w in snapshot.workers if w.record.role in (Role.DECODE, Role.BOTH) and eligible(w, request, policy)]
    if not found:
        raise NoDecodeWorker(why_no_decoder(snapshot, request, policy))
    return found


def eligible(w: WorkerFacts, request: RouteRequest, policy: Policy) -> bool:
    """Connected, serving this model under this fingerprint, not draining, not the one that just failed."""
    r = w.record
    return (
        w.connected
        and not r.draining
        and r.model == request.model
        and policy.fingerprint in ("", r.fingerprint)
        and r.key not in request.excluded
    )


def why_no_decoder(snapshot: Snapshot, request: RouteRequest, policy: Policy) -> str:
    """Names the nearest thing to a usable decode worker."""
    decoders = [w for w in snapshot.workers if w.record.role in (Role.DECODE, Role.BOTH)]
    ours = [w for w in decoders if w.record.model == request.model and policy.fingerprint in ("", w.record.fingerprint)]
    if not decoders:
        return "no decode worker is registered"
    if not ours:
        return f"none of {len(decoders)} decode workers serves model {request.model!r} with the expected layout"
    states = {"draining": sum(w.record.draining for w in ours), "not connected": sum(not w.connected for w in ours)}
    told = ", ".join(f"{n} {state}" for state, n in states.items() if n) or "the one that was asked is lost"
    return f"no decode worker is usable: {told}"


def _price(
    d: WorkerFacts, prefillers: list[WorkerFacts], request: RouteRequest, policy: Policy, random: Random
) -> Choice:
    n = request.prompt_tokens
    usable = d.usable_tokens(n)
    peers = [p for p in prefillers if p.record.fingerprint == d.record.fingerprint and n < limit_tokens(p.record)]
    kind, reason = _kind(d.record.role, bool(peers), n - usable, policy)
    load = d.active_requests * policy.active_request_tokens
    if 0 < d.record.load.total_slots <= d.active_requests:
        load += policy.no_slot_tokens
    ordered = sorted(peers, key=lambda p: (_prefill_cost(p, n), p.active_requests, random.random()))
    terms = {"load": load}
    prefill_tokens = n - usable
    if kind is ChoiceKind.LOCAL:
        terms |= {"prefill": float(prefill_tokens), "queued": float(d.queued_prefill_tokens)}
    else:
        prefill_tokens = n - ordered[0].usable_tokens(n)
        terms |= {"prefill": float(prefill_tokens), "queued": float(ordered[0].queued_prefill_tokens)}
        terms["transfer"] = policy.transfer_per_token * (n - min(d.attention_tokens, n))
    offered = () if reason is Reason.ROLE_BOTH else tuple(Candidate(p.record, p.usable_tokens(n)) for p in ordered)
    terms["total"] = sum(terms.values())
    return Choice(
        kind, d.record, offered, reason, d.attention_tokens, usable, prefill_tokens, request.max_tokens, terms
    )


def _kind(role: Role, has_peers: bool, suffix_tokens: int, policy: Policy) -> tuple[ChoiceKind, Reason]:
    if role is Role.BOTH:
        return ChoiceKind.LOCAL, Reason.ROLE_BOTH
    if not has_peers:
        return ChoiceKind.LOCAL, Reason.NO_PREFILL_WORKER
    if suffix_tokens <= policy.local_max_tokens:
        return ChoiceKind.LOCAL, Reason.SHORT_SUFFIX
    return ChoiceKind.REMOTE, Reason.LONG_SUFFIX


def _prefill_cost(p: WorkerFacts, prompt_tokens: int) -> float:
    return float(p.queued_prefill_tokens + prompt_tokens - p.usable_tokens(prompt_tokens))
