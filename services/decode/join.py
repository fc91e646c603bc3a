"""One request's hand-off: opened at a prefill worker, relayed to the engine, pulled, confirmed, joined.

It may fail at any moment before it is confirmed: the engine gives up what it received, and the request goes to another
prefill worker or is computed here. A first token that was forwarded stays; it is a forced prefix of what follows.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from services.decode.emit import Answer
from services.decode.peers import Peers
from services.decode.session import Session
from twinflow.contracts import errors
from twinflow.contracts.errors import TwinflowError
from twinflow.contracts.requests import GenerateRequest, RequestStats, Sample
from twinflow.engine.base import (
    BlocksAnnounced,
    Command,
    Confirm,
    FirstTokenArrived,
    HandoffFailed,
    PrefillFinished,
    PullDone,
    PullFrom,
)
from twinflow.node.handshake import CHECKPOINT, GRAMMAR
from twinflow.rpc.convert import sample_from_pb, sampling_to_pb, stats_from_pb, tag_from_pb
from twinflow.rpc.v1 import engine_pb2 as pb
from twinflow.transfer.base import OfferedState, PeerArena

log = logging.getLogger(__name__)

ATTEMPTS = 2  # candidates that are tried before the prompt is computed here

Send = Callable[[Command], None]


class Handoff:
    """The `Reader` of a session. Over when confirmed, failed, left, or when the first token was the last one."""

    def __init__(self, request: GenerateRequest, answer: Answer, session: Session, send: Send) -> None:
        self.id = request.id
        self._request = request
        self._answer = answer
        self._session = session
        self._send = send
        self._lease_id = ""
        self._arena: PeerArena | None = None
        self._want_checkpoint_at = 0
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first: Sample | None = None  # forwarded to the client
        self._pulled = False

    async def open(self, have_tokens: int, want_checkpoint_at: int, idempotency_id: str, wait_s: float) -> None:
        """Until the peer has accepted; from then on everything comes by itself. Raises HandoffFailed or what the peer said."""
        r = self._request
        if r.sampling.grammar is not None and GRAMMAR not in self._session.features:
            raise errors.NoCapacity(f"{self._session} is of a release without structured outputs")
        if CHECKPOINT in self._session.features:
            self._want_checkpoint_at = want_checkpoint_at
        message = pb.Open(
            id=r.id,
            prompt=r.prompt,
            sampling=sampling_to_pb(r.sampling),
            root=r.root,
            forced=r.forced,
            have_tokens=have_tokens,
            idempotency_id=idempotency_id,
            want_checkpoint_at=self._want_checkpoint_at,
        )
        await self._session.open(self, message, wait_s)
        try:
            await asyncio.wait_for(self._accepted, wait_s)
        except TimeoutError:
            if not self._lease_id:
                self.leave()
                raise errors.HandoffFailed(f"{self._session} did not accept within {wait_s:g} s") from None
        except asyncio.CancelledError:
            self.leave()
            raise

    @property
    def worker_id(self) -> str:
        return self._session.key[0]

    @property
    def arena(self) -> PeerArena | None:
        return self._arena

    @property
    def loss(self) -> str:
        """Why it failed, if the engine did not say: the session is gone, or the peer gave it up."""
        return "peer" if self._session.live else "session_lost"

    def refuse(self, why: str) -> None:
        """Nothing is read from this peer while its session lasts."""
        self._session.refused = why

    def leave(self) -> None:
        """Nothing more is wanted: the peer stops and ends the lease. Idempotent."""
        self._session.leave(self.id, finished=False)

    def pull_done(self, notice: PullDone) -> None:
        """Every read is DONE: names what was read, to the very lease and session it was read under."""
        if not self._session.live:
            return  # the session's end has already failed this hand-off
        assert self._arena is not None
        self._pulled = True
        message = pb.Pulled(
            id=self.id,
            lease_id=self._lease_id,
            incarnation=self._arena.incarnation,
            session_epoch=self._session.epoch,
            generation=self._arena.generation,
            blocks=notice.blocks,
            slots=notice.slots,
        )
        self._session.pulled(message)

    # ---- what the peer says (Reader) ----

    def accepted(self, message: pb.Accepted) -> None:
        if self._lease_id or not message.lease_id:
            raise errors.HandoffFailed(f"{self._session} accepted twice or without a lease")
        self._lease_id, self._arena = message.lease_id, self._session.arena
        assert self._arena is not None
        self._answer.prefill_worker = self._session.key[0]
        self._answer.prefill_generation = self._arena.generation
        self._send(PullFrom(self.id, self._arena, self._want_checkpoint_at))
        if not self._accepted.done():
            self._accepted.set_result(None)

    def announced(self, message: pb.Blocks) -> None:
        self._check_accepted("blocks")
        self._send(BlocksAnnounced(self.id, message.first_index, tuple(message.blocks), tuple(message.checksums)))

    def first_token(self, message: pb.FirstToken) -> None:
        self._check_accepted("a first token")
        self._answer.prefill_stats = stats_from_pb(message.stats)
        self._send(FirstTokenArrived(self.id, self._forward(message.sample)))

    def _forward(self, message: pb.Sample) -> Sample:
        """The first token, to the client; nothing else of the hand-off is wanted if it is the last one."""
        if self.first is not None:
            raise errors.HandoffFailed(f"{self._session} sent two first tokens")
        sample = self.first = sample_from_pb(message)
        self._answer.add_now(sample)
        if sample.finish is not None:
            self._session.leave(self.id, finished=True)
        return sample

    def finished(self, message: pb.Finished) -> None:
        self._check_accepted("the end of the prompt")
        stats = stats_from_pb(message.stats)
        self._answer.prefill_stats = stats
        first = self._forward(message.first_token) if message.HasField("first_token") else None
        if first is None or first.finish is None:
            self._tell_end(message, stats)  # before the first token: that has time until all is read
        if first is not None:
            self._send(FirstTokenArrived(self.id, first))

    def _tell_end(self, message: pb.Finished, stats: RequestStats) -> None:
        self._send(
            PrefillFinished(
                id=self.id,
                first_index=message.first_index,
                blocks=tuple(message.blocks),
                checksums=tuple(message.checksums),
                slot=message.slot,
                slot_checksum=message.slot_checksum,
                tag=tag_from_pb(message.tag),
                stats=stats,
                checkpoint=checkpoint_from_pb(message),
            )
        )

    def confirmed(self, message: pb.Confirmed) -> None:
        """Only for what was named, under this lease, in this session."""
        said = (message.lease_id, message.session_epoch)
        if not self._pulled or said != (self._lease_id, self._session.epoch):
            raise errors.HandoffFailed(
                f"{self._session} confirmed lease {said[0]!r} epoch {said[1]}, "
                f"expected {self._lease_id!r} epoch {self._session.epoch}{'' if self._pulled else ' and nothing yet'}"
            )
        self._session.forget(self.id)
        self._send(Confirm(self.id))

    def failed(self, error: TwinflowError) -> None:
        if self._lease_id:
            self._send(HandoffFailed(self.id, error.reason, error.message))
        elif not self._accepted.done():
            self._accepted.set_exception(error)

    def _check_accepted(self, what: str) -> None:
        if not self._lease_id:
            raise errors.HandoffFailed(f"{self._session} sent {what} before it accepted")


def checkpoint_from_pb(message: pb.Finished) -> OfferedState | None:
    if not message.HasField("checkpoint"):
        return None
    c = message.checkpoint
    return OfferedState(c.slot, c.checksum, tag_from_pb(c.tag))


async def hand_off(
    candidates: Sequence[pb.Candidate],
    peers: Peers,
    begin: Callable[[Session], Handoff],
    have_tokens: int,
    want_checkpoint_at: int,
    idempotency_id: str,
    wait_s: float,
    not_taken: Callable[[str, TwinflowError], None],
) -> str:
    """Opens a hand-off at the first candidate that takes it. Returns "" then, else why nobody did (nothing was pulled).

    `begin` makes the hand-off and lets its owner know of it before anything can arrive for it. `not_taken` is told of every
    candidate that did not.
    """
    problems = []
    first, later = deque(candidates[:ATTEMPTS]), deque[pb.Candidate]()
    while first or later:
        waits = not first
        candidate = later.popleft() if waits else first.popleft()
        try:
            session = await peers.get(candidate)
            if not waits and not session.has_room:
                later.append(candidate)  # whoever takes it at once is better
                continue
            await begin(session).open(have_tokens, want_checkpoint_at, idempotency_id, wait_s)
            return ""
        except TwinflowError as e:
            log.warning("prefill worker %s did not take a hand-off: %s", candidate.worker_id, e.message)
            not_taken(candidate.worker_id, e)
            problems.append(f"{candidate.worker_id}: {e.message}")
    return "; ".join(problems)
