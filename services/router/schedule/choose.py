"""The choice: filter workers, score what is left, pick. Pure: the same snapshot, request and policy give the same choice."""

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np

from services.router.schedule.base import (
    F64,
    Candidate,
    Choice,
    ChoiceKind,
    Policy,
    RouteRequest,
    Snapshot,
    WorkerFacts,
)
from services.router.schedule.few import FEW, MAX_OTHERS, can_choose, choose_few
from services.router.schedule.filters import DECODERS, drop, usable_decoders
from services.router.schedule.limits import fits, too_long
from services.router.schedule.options import Options, options


def choose(snapshot: Snapshot, request: RouteRequest, policy: Policy) -> Choice:
    """Raises NoDecodeWorker when nobody can decode, TooLong when no worker could ever hold the request."""
    kept: list[WorkerFacts] = []
    dropped: dict[str, str] = {}
    for w in snapshot.workers:
        reason = drop(w, request, policy)
        if reason is None:
            kept.append(w)
        else:
            dropped[w.record.id] = reason.value
    decoders = usable_decoders(snapshot, request, policy, [w for w in kept if w.record.role in DECODERS])
    fitting = [w for w in decoders if fits(w.record, request)]
    if not fitting:
        raise too_long([w.record for w in decoders], request.prompt_tokens, request.max_tokens)
    among = choose_few if len(kept) <= FEW and can_choose(policy) else choose_many
    return among(fitting, kept, snapshot, request, policy, dropped)


def choose_many(
    fitting: Sequence[WorkerFacts],
    kept: Sequence[WorkerFacts],
    snapshot: Snapshot,
    request: RouteRequest,
    policy: Policy,
    dropped: Mapping[str, str],
) -> Choice:
    """As `few.choose_few`, with arrays."""
    random = Random(request.tie_seed)
    layouts = list(dict.fromkeys(w.record.fingerprint for w in fitting))
    groups = [
        options([w for w in fitting if w.record.fingerprint == layout], kept, layout, snapshot, request, policy, random)
        for layout in layouts
    ]
    total = np.concatenate([group.total for group in groups])
    picked = policy.picker(total, random, request.turn)
    return _choice(groups, total, picked, request, policy, dropped)


def _choice(
    groups: Sequence[Options],
    total: F64,
    picked: int,
    request: RouteRequest,
    policy: Policy,
    dropped: Mapping[str, str],
) -> Choice:
    places = [(group, at) for group in groups for at in range(len(group.decode))]
    best, at = places[picked]
    n, decode = request.prompt_tokens, best.decode.facts[at]
    peers = [best.peers.facts[p] for p in best.order(at, policy)]
    usable = {id(w): int(u) for w, u in zip(best.peers.facts, best.peers.usable, strict=True)}
    local = bool(best.is_local[at])
    whoever = decode if local else peers[0]
    order = [i for i in np.argsort(total, kind="stable")[: MAX_OTHERS + 1].tolist() if i != picked][:MAX_OTHERS]
    return Choice(
        kind=ChoiceKind.LOCAL if local else ChoiceKind.REMOTE,
        decode=decode.record,
        candidates=tuple(Candidate(p.record, usable[id(p)]) for p in peers),
        reason=best.reason(at),
        decode_attention_tokens=decode.attention_tokens,
        decode_usable_tokens=decode.usable_tokens(n),
        prefill_tokens=n - whoever.usable_tokens(n),
        max_tokens=request.max_tokens,
        prefill_attention_tokens=whoever.attention_tokens,
        local_max_tokens=int(best.local([at])[1][0]),
        terms=best.terms(at) | {"total": float(best.total[at])},
        others={places[i][0].name(places[i][1]): float(total[i]) for i in order},
        dropped=dropped,
    )
