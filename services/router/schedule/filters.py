"""Who is no option for a request, and why."""

from services.router.schedule.base import Drop, NoDecodeWorker, Policy, RouteRequest, Snapshot, WorkerFacts
from twinflow.contracts.workers import BOTH, DECODE

DECODERS = (DECODE, BOTH)


def drop(w: WorkerFacts, request: RouteRequest, policy: Policy) -> Drop | None:
    """None: usable. In the order in which it is of use to whoever reads it."""
    r = w.record
    if r.model != request.model:
        return Drop.OTHER_MODEL
    if policy.fingerprint not in ("", r.fingerprint):
        return Drop.OTHER_FINGERPRINT
    if r.draining:
        return Drop.DRAINING
    if not w.connected:
        return Drop.NOT_CONNECTED
    if request.excluded and r.key in request.excluded:
        return Drop.FAILED_BEFORE
    if w.stalled:
        return Drop.STALLED
    return None


def usable_decoders(
    snapshot: Snapshot, request: RouteRequest, policy: Policy, found: list[WorkerFacts] | None = None
) -> list[WorkerFacts]:
    """Never empty: raises NoDecodeWorker that says what is missing. Those that fail again and again only where nobody else is
    left. `found`: those that are options, if that is known already."""
    if found is None:
        found = [w for w in snapshot.workers if w.record.role in DECODERS and drop(w, request, policy) is None]
    if not found:
        raise NoDecodeWorker(why_no_decoder(snapshot, request, policy))
    if not snapshot.broken:
        return found
    return [w for w in found if ("", w.record.id) not in snapshot.broken] or found


def why_no_decoder(snapshot: Snapshot, request: RouteRequest, policy: Policy) -> str:
    """Names the nearest thing to a usable decode worker."""
    decoders = [w for w in snapshot.workers if w.record.role in DECODERS]
    if not decoders:
        return "no decode worker is registered"
    reasons = [drop(w, request, policy) for w in decoders]
    ours = [d for d in reasons if d is not None and d not in (Drop.OTHER_MODEL, Drop.OTHER_FINGERPRINT)]
    if not ours:
        return f"none of {len(decoders)} decode workers serves model {request.model!r} with the expected layout"
    order = list(Drop)
    told = ", ".join(f"{ours.count(d)} {d.value}" for d in sorted(set(ours), key=order.index))
    return f"no decode worker is usable: {told}"
