"""The hand-offs that are open here: engine notices in, messages to the reader out, every lease ended exactly once."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from services.prefill.admit import admit
from services.prefill.metrics import End, PrefillMetrics
from twinflow.contracts.errors import BadRequest, Cancelled, HandoffFailed, TwinflowError, from_reason
from twinflow.engine.base import Cancel, Command, Done, EndLease, Generated, Mode, Offered, Prefilled, Ready, Submit
from twinflow.node.handshake import FIRST_WITH_END
from twinflow.node.outbox import Outbox
from twinflow.rpc.convert import error_to_pb, sample_to_pb, stats_to_pb, tag_to_pb
from twinflow.rpc.v1 import admin_pb2 as admin_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.transfer.base import OfferedState
from twinflow.transfer.leases import Ended, LeaseTable, SessionKey

log = logging.getLogger(__name__)

Replies = Outbox[pb.HandoffReply]


@dataclass(slots=True)
class Offer:
    """One open hand-off. `prefilled_s` (monotonic) is set once its prompt is computed: its lease then only waits. `first`: a
    first token that the end of the prompt, told with it, takes along (`first_with_end`), or else goes alone."""

    id: str
    session: SessionKey
    replies: Replies
    lease_id: str
    prompt_tokens: int
    have_tokens: int
    idempotency: tuple[str, int]  # idempotency id, sample index; ("", _) = none
    first_with_end: bool  # the reader takes both in one message, half a message's time earlier
    first: pb.FirstToken | None = None
    opened_s: float = field(default_factory=time.monotonic)
    prefilled_s: float | None = None


class Offers:
    """Owned by the front's loop. An entry exists exactly as long as its lease."""

    def __init__(
        self,
        leases: LeaseTable,
        metrics: PrefillMetrics,
        send: Callable[[Command], None],
        ready: Ready,
        max_open: int,
        lease_s: float,
    ) -> None:
        self.leases = leases
        self._metrics = metrics
        self._send = send
        self._ready = ready
        self._max_open = max_open
        self._lease_s = lease_s
        self._offers: dict[str, Offer] = {}
        self._ending: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._offers)

    # ---- what the decode worker says ----

    def open(self, session: SessionKey, replies: Replies, message: pb.Open, features: Collection[str]) -> None:
        """Accepts or fails a hand-off to a reader with these features; the same Open twice in one session counts once."""
        known = self._offers.get(message.id)
        if known is not None and known.session == session:
            return
        try:
            if known is not None:
                raise BadRequest(f"request id {message.id!r} is open for {known.session.worker_id}", param="id")
            request = admit(message, self._ready, len(self._offers), self._max_open)
        except TwinflowError as e:
            log.warning("hand-off %s of %s was refused: %s", message.id, session.worker_id, e.message)
            self._metrics.refused(e)
            replies.put(failed(message.id, e))
            return
        self._finish()
        idempotency = (message.idempotency_id, request.sampling.sample_index)
        self._supersede(idempotency)
        lease_id = self.leases.grant(session, request.id)
        prompt_tokens = request.prompt_tokens + len(request.forced) // 4
        self._offers[request.id] = Offer(
            request.id, session, replies, lease_id, prompt_tokens, message.have_tokens, idempotency,
            FIRST_WITH_END in features,
        )  # fmt: skip
        self._send(Submit(request, Mode.OFFER, message.have_tokens, message.want_checkpoint_at))
        replies.put(pb.HandoffReply(accepted=pb.Accepted(id=request.id, lease_id=lease_id)))

    def pulled(self, session: SessionKey, replies: Replies, message: pb.Pulled) -> None:
        """The fence: confirmed, or failed for good."""
        lease_id = self.leases.lease_of(session, message.id)
        verdict = self.leases.pulled(
            session,
            message.lease_id if message.lease_id == lease_id else "",  # another hand-off's lease is none of this one's
            incarnation=message.incarnation,
            epoch=message.session_epoch,
            generation=message.generation,
            blocks=message.blocks,
            slots=message.slots,
        )
        if verdict.ended is not None:
            confirmed = pb.Confirmed(id=message.id, lease_id=message.lease_id, session_epoch=session.epoch)
            replies.put(pb.HandoffReply(confirmed=confirmed))
            what = f"{len(message.blocks)} blocks and {len(message.slots)} slots read"
            self._close(verdict.ended, End.CONFIRMED, what)
            return
        assert verdict.refusal is not None
        self._metrics.unconfirmed(verdict.refusal)
        error = HandoffFailed(f"what was read is not confirmed ({verdict.refusal.value}): {verdict.message}")
        log.warning("hand-off %s of %s: %s", message.id, session.worker_id, error.message)
        replies.put(failed(message.id, error))
        self.leave(session, message.id, End.REFUSED)

    def leave(self, session: SessionKey, request_id: str, end: End, why: str = "") -> None:
        """Release or cancel; unknown ids, and those of other sessions, are ignored."""
        lease_id = self.leases.lease_of(session, request_id)
        ended = self.leases.release(lease_id) if lease_id else None
        if ended is not None:
            self._close(ended, end, why)

    def close_all(self, ended: Iterable[Ended], why: str) -> None:
        """Leases that the table has ended with their session."""
        for lease in ended:
            self._close(lease, End.SESSION, why)

    # ---- what the engine says ----

    def announced(self, notice: Offered) -> None:
        offer = self._offers.get(notice.id)
        if offer is not None and self.leases.offer(offer.lease_id, notice.blocks):
            blocks = pb.Blocks(
                id=notice.id, first_index=notice.first_index, blocks=notice.blocks, checksums=notice.checksums
            )
            offer.replies.put(pb.HandoffReply(blocks=blocks))

    def generated(self, notice: Generated) -> None:
        offer = self._offers.get(notice.id)
        if offer is not None:
            stats = stats_to_pb(notice.stats) if notice.stats else None
            offer.first = pb.FirstToken(id=notice.id, sample=sample_to_pb(notice.samples[0]), stats=stats)
            if offer.first_with_end:
                asyncio.get_running_loop().call_soon(self._first_alone, offer)
            else:
                self._first_alone(offer)

    def _first_alone(self, offer: Offer) -> None:
        """Unless the same report had the end of the prompt, or the hand-off is over."""
        first, offer.first = offer.first, None
        if first is not None and self._offers.get(offer.id) is offer:
            offer.replies.put(pb.HandoffReply(first_token=first))

    def prefilled(self, notice: Prefilled) -> None:
        offer = self._offers.get(notice.id)
        slots = (notice.slot, *((notice.checkpoint.slot,) if notice.checkpoint is not None else ()))
        if offer is None or not self.leases.offer(offer.lease_id, notice.blocks, slots):
            return
        offer.prefilled_s = time.monotonic()
        first, offer.first = offer.first, None
        finished = pb.Finished(
            id=notice.id,
            first_index=notice.first_index,
            blocks=notice.blocks,
            checksums=notice.checksums,
            slot=notice.slot,
            slot_checksum=notice.slot_checksum,
            tag=tag_to_pb(notice.tag),
            stats=stats_to_pb(notice.stats),
            checkpoint=checkpoint_to_pb(notice.checkpoint),
            first_token=first.sample if first is not None else None,
        )
        offer.replies.put(pb.HandoffReply(finished=finished))

    def done(self, notice: Done) -> None:
        """Of a hand-off that is still open: the engine gave it up."""
        if notice.id in self._offers:
            reason = notice.error_reason or "internal"
            error = from_reason(reason, notice.error_message or "the engine ended it", notice.error_param)
            self.fail(notice.id, error)

    # ---- the admin API ----

    def about(self, request_id: str) -> tuple[str, str]:
        offer = self._offers.get(request_id)
        return (offer.session.worker_id if offer is not None else "", "")

    def describe(self) -> list[admin_pb.Lease]:
        now = time.monotonic()
        return [lease_to_pb(o, *self.leases.named(o.lease_id), now) for o in self._offers.values()]

    def cancel_where(self, meant: Callable[[str], bool]) -> list[str]:
        """Their readers are told."""
        ids = [id for id in self._offers if meant(id)]
        for id in ids:
            self.fail(id, Cancelled("cancelled by an operator"))
        return ids

    # ---- ends ----

    def fail(self, request_id: str, error: TwinflowError, end: End = End.FAILED) -> None:
        """Tells the reader, then ends the lease."""
        offer = self._offers[request_id]
        offer.replies.put(failed(request_id, error))
        self.leave(offer.session, request_id, end, f"{error.reason}: {error.message}")

    def fail_all(self, error: TwinflowError) -> None:
        for request_id in list(self._offers):
            self.fail(request_id, error)

    def generation_closed(self, generation: int) -> None:
        """What was leased in it can be read no more; the readers are told and start over."""
        over = HandoffFailed(f"transfer generation {generation} was closed before this was read")
        for lease in self.leases.close_generation(generation):
            self._offers[lease.request_id].replies.put(failed(lease.request_id, over))
            self._close(lease, End.GENERATION, over.message)

    def expire(self) -> None:
        """Fails hand-offs whose reader has had `lease_s` since their prompt was computed."""
        now = time.monotonic()
        for offer in list(self._offers.values()):
            if offer.prefilled_s is not None and now - offer.prefilled_s > self._lease_s:
                silence = HandoffFailed(f"nothing was said for {self._lease_s:g} s after the prompt was done")
                self.fail(offer.id, silence, End.EXPIRED)

    def _supersede(self, idempotency: tuple[str, int]) -> None:
        """A newer attempt of the same request: the older one has no reader any more that anybody listens to."""
        for offer in list(self._offers.values()):
            if idempotency[0] and offer.idempotency == idempotency:
                newer = HandoffFailed("a newer attempt of this request was opened here")
                self.fail(offer.id, newer, End.SUPERSEDED)

    def _close(self, ended: Ended, end: End, why: str) -> None:
        """The one way out. A prompt still being computed is stopped, a computed one only given back. The engine is told when
        what the reader is told is on its way, which it waits for."""
        offer = self._offers.pop(ended.request_id)
        self._metrics.ended(end)

        def finish() -> None:
            self._send(EndLease(offer.id) if offer.prefilled_s is not None else Cancel(offer.id))
            log.info(
                "hand-off %s for %s: %s%s, %d prompt tokens of which the reader had %d, open for %.3f s",
                offer.id,
                offer.session.worker_id,
                end.value,
                f", {why}" if why else "",
                offer.prompt_tokens,
                offer.have_tokens,
                time.monotonic() - offer.opened_s,
            )

        self._ending.append(finish)
        asyncio.get_running_loop().call_soon(self._finish)

    def _finish(self) -> None:
        """What is still to be said of ended leases, before anything new is begun under their ids."""
        while self._ending:
            self._ending.popleft()()


def lease_to_pb(offer: Offer, blocks: int, slots: int, now_s: float) -> admin_pb.Lease:
    return admin_pb.Lease(
        lease_id=offer.lease_id,
        request_id=offer.id,
        reader=offer.session.worker_id,
        reader_incarnation=offer.session.incarnation,
        age_s=now_s - offer.opened_s,
        prefilled=offer.prefilled_s is not None,
        blocks=blocks,
        slots=slots,
    )


def checkpoint_to_pb(state: OfferedState | None) -> pb.OfferedState | None:
    return (
        None if state is None else pb.OfferedState(slot=state.slot, checksum=state.checksum, tag=tag_to_pb(state.tag))
    )


def failed(request_id: str, error: TwinflowError) -> pb.HandoffReply:
    return pb.HandoffReply(failed=pb.Failed(id=request_id, error=error_to_pb(error)))
