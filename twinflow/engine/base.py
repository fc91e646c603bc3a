"""What the front process and the engine process say: frozen dataclasses, one inbox, one report per step, beats in between.

A worker's front (gRPC, sessions, asyncio) sends `Command`s, the engine's loop answers with `Report`s:

    LOCAL    Submit(LOCAL) ────────────▶ tokens (Continued or Generated) … Done
    decode   Submit(CLAIM) ─▶ Matched ─▶ RunLocal ─▶ tokens … Done
                                      └▶ PullFrom, then as relayed from the peer: BlocksAnnounced* FirstTokenArrived
                                         PrefillFinished ─▶ PullDone ─▶ Confirm ─▶ tokens … Done
                                         a failure before Confirm: HandoffLost, then Matched again
    prefill  Submit(OFFER) ─▶ Offered* · Generated (first token) · Prefilled … EndLease ─▶ Done

Nothing received over a transfer is used before `Confirm`; a report with `PullDone` does not wait for a step. Every
request ends in exactly one `Done`, also after errors.
"""

from dataclasses import dataclass, field
from enum import Enum

from twinflow.cache.base import PoolCounts
from twinflow.contracts.events import EventColumns
from twinflow.contracts.groups import GroupSpec
from twinflow.contracts.hits import GroupHit
from twinflow.contracts.requests import GenerateRequest, RequestStats, Sample
from twinflow.contracts.tags import StateTag
from twinflow.contracts.workers import Load
from twinflow.transfer.base import GenerationClosed, GenerationOpened, OfferedState, PeerArena, PeerKey

# Of a received hand-off, in `RequestStats.extra`.
DESCRIPTORS = "handoff_descriptors"  # ranges read
EARLY_BYTES = "handoff_early_bytes"  # read before the peer had finished the prompt
WAIT_S = "handoff_wait_s"  # until there was memory here
PULLS = "handoff_pulls"  # reads that were asked for one after the other
# What goes by after the end of the prompt was told, part by part:
TAIL_S = "handoff_tail_s"  # until all was read
POST_S = "handoff_post_s"  # of that, until the last read was set going
CONFIRM_S = "handoff_confirm_s"  # until it was confirmed
STEP_S = "handoff_step_s"  # until the first token was drawn here


class Mode(Enum):
    LOCAL = "local"  # compute everything here
    CLAIM = "claim"  # match, hold the hit, report, then wait for RunLocal or PullFrom
    OFFER = "offer"  # compute the prompt for a decode worker, keep it leased until EndLease


# ---- commands: front → engine ----


@dataclass(frozen=True, slots=True)
class Submit:
    """A request id that is already running is ignored (submission is idempotent per id)."""

    request: GenerateRequest
    mode: Mode
    have_tokens: int = 0  # OFFER: the decode side holds attention KV of these (whole blocks)
    want_checkpoint_at: int = 0  # OFFER: the decode side wants the state after so many tokens too; 0 = none


@dataclass(frozen=True, slots=True)
class RunLocal:
    """Answer to `Matched`: prefill the rest here."""

    id: str


@dataclass(frozen=True, slots=True)
class PullFrom:
    """Answer to `Matched`: a hand-off is open at `peer`, which was asked for the state at `want_checkpoint_at` (0 = none)."""

    id: str
    peer: PeerArena
    want_checkpoint_at: int = 0


@dataclass(frozen=True, slots=True)
class BlocksAnnounced:
    """`blocks[i]` on the peer holds block number `first_index + i` of the prompt; its writes are done."""

    id: str
    first_index: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    """Sampled by the prefill side, already forwarded to the router by the front."""

    id: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The last blocks, the slot with the state after all prompt tokens, and the checkpoint that was asked for, if there is
    one."""

    id: str
    first_index: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]
    slot: int
    slot_checksum: int
    tag: StateTag
    stats: RequestStats = field(default_factory=RequestStats)
    checkpoint: OfferedState | None = None


@dataclass(frozen=True, slots=True)
class Confirm:
    """`Confirmed` arrived on a live session: what was pulled may be used."""

    id: str


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The session died, the peer refused or failed: answered by `HandoffLost`, or by `Done` with this error where nothing
    can be recovered."""

    id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """No session to this peer any more; its agent may be forgotten. A `PullFrom` may name it again later."""

    key: PeerKey


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request wherever it is; unknown ids are ignored. Its work so far is donated to the cache where valid."""

    id: str


@dataclass(frozen=True, slots=True)
class EndLease:
    """OFFER only: the lease has ended at the front's table (confirmed, released, session over); memory goes back."""

    id: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Drops unreferenced cache entries, of one group or of all; answered by `Flushed`."""

    token: int = 0
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks for `Inspected`; `walk`: with the full integrity walk, which takes time in proportion to the cache."""

    token: int = 0
    walk: bool = True


@dataclass(frozen=True, slots=True)
class MatchQuery:
    """Asks for `MatchFound`: what the cache holds of this prompt. Changes nothing."""

    token: int
    root: bytes
    prompt: bytes  # packed uint32 ids


@dataclass(frozen=True, slots=True)
class Resync:
    """Asks for `CacheSnapshot`."""

    token: int = 0


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


Command = (
    Submit
    | RunLocal
    | PullFrom
    | BlocksAnnounced
    | FirstTokenArrived
    | PrefillFinished
    | Confirm
    | HandoffFailed
    | PeerGone
    | Cancel
    | EndLease
    | Flush
    | Inspect
    | MatchQuery
    | Resync
    | Shutdown
)


# ---- notices: engine → front, carried in a Report ----


@dataclass(frozen=True, slots=True)
class Matched:
    """Own match of a CLAIM request. `hold_tokens` = attention KV now referenced (whole blocks)."""

    id: str
    hits: tuple[GroupHit, ...]
    usable_tokens: int
    hold_tokens: int
    prompt_tokens: int  # prompt + forced


@dataclass(frozen=True, slots=True)
class HandoffLost:
    """CLAIM: the hand-off failed before it was confirmed, everything received is given up; `Matched` follows with what is
    held now. A first token that was forwarded is a forced prefix from here on. `reason` as in contracts.errors; `cause` as in
    transfer.intake.FailReason where it failed here, "" where the front said so."""

    id: str
    reason: str
    message: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens of one request, where `Continued` does not say it. A finishing sample and its `Done` share a report. OFFER: the
    first token only, with this side's `stats`; CLAIM: without the first token if a peer sampled it."""

    id: str
    samples: tuple[Sample, ...]
    stats: RequestStats | None = None


@dataclass(frozen=True, slots=True)
class Continued:
    """What a step drew for all requests of which there is no more to say: `token_ids[i]` is the next token of `ids[i]`, not its
    last one, and no log-probabilities were asked for. One object, because a step of a full batch has hundreds."""

    ids: tuple[str, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """OFFER: full blocks, written, that the decode side may read now."""

    id: str
    first_index: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """OFFER: everything is computed; rest of the blocks, the slot and its tag, the checkpoint that was asked for."""

    id: str
    first_index: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]
    slot: int
    slot_checksum: int
    tag: StateTag
    stats: RequestStats
    checkpoint: OfferedState | None = None


@dataclass(frozen=True, slots=True)
class PullDone:
    """All reads of this request are DONE; the front now says `Pulled` with these remote names."""

    id: str
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The request is over: finished, cancelled (no finish, no error) or failed; its id is free again. OFFER: only on
    failure or after EndLease or Cancel."""

    id: str
    stats: RequestStats
    error_reason: str = ""
    error_message: str = ""
    error_param: str | None = None


@dataclass(frozen=True, slots=True)
class Flushed:
    """Units freed by group name; `error` (and nothing freed) when the group does not exist."""

    token: int
    units: dict[str, int]
    error: str = ""


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One request inside the engine. `processed_tokens`: hit, received or fed so far."""

    id: str
    mode: str
    phase: str
    prompt_tokens: int
    processed_tokens: int
    generated_tokens: int
    age_s: float
    blocks: int
    slots: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """Of one moment. `stored`: units that the prefix tree lists, by group. `sequences`: oldest first. `problem` is empty when
    `check_integrity()` passed or was not asked for."""

    token: int
    counts: dict[str, PoolCounts]
    stored: dict[str, int]
    sequences: tuple[SequenceInfo, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class MatchFound:
    """Answer to `MatchQuery`."""

    token: int
    hits: tuple[GroupHit, ...]
    usable_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    token: int
    sequence: int
    events: EventColumns


Answer = Flushed | Inspected | MatchFound | CacheSnapshot  # to a command with that token, about no request
Transfer = GenerationOpened | GenerationClosed  # of this worker's own transfer, about no request
Notice = Matched | HandoffLost | Generated | Continued | Offered | Prefilled | PullDone | Done | Answer | Transfer


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine has computed since its start. A prompt's tokens count as prefill, forced ones too."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """At most one per loop turn."""

    notices: tuple[Notice, ...]
    events: EventColumns
    load: Load
    counts: dict[str, PoolCounts]
    work: Work = field(default_factory=Work)
    busy_s: float = 0.0  # of the loop's turns with a step, since its start


@dataclass(frozen=True, slots=True)
class Beat:
    """The engine's process runs, whatever its loop waits for. Between reports, from `Ready` on."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine's first message: loaded and warm (or `error`)."""

    error: str = ""
    model_id: str = ""
    fingerprint: str = ""
    layout: str = ""
    max_model_tokens: int = 0
    max_request_tokens: int = 0
    block_tokens: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    groups: tuple[GroupSpec, ...] = ()  # of the cache
    arena: PeerArena | None = None  # worker_id and incarnation as given in `config.EngineConfig`
    weights_bytes: int = 0
    arena_bytes: int = 0
