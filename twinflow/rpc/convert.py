"""Protobuf messages ↔ contracts, both directions side by side; the only place that knows both.

Names: `x_to_pb` makes a message, `x_from_pb` a dataclass. A round trip is the identity, except that probabilities and
penalties are float32 on the wire. Values this release doesn't know (a role, an event kind, a finish reason of a newer
peer) raise `BadRequest` that names them, so that a session can refuse instead of guessing.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeVar

from twinflow.contracts.errors import BadRequest, TwinflowError, from_reason
from twinflow.contracts.events import POSITION_BYTES, CacheEvent, EventColumns, EventKind
from twinflow.contracts.hashing import HASH_BYTES, pack_tokens
from twinflow.contracts.hits import GroupHit
from twinflow.contracts.requests import (
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    RequestStats,
    Sample,
    SamplingParams,
    TokenLogprobs,
)
from twinflow.contracts.tags import StateTag
from twinflow.contracts.workers import Load, Pace, Role, WorkerRecord
from twinflow.rpc.v1 import admin_pb2 as admin_pb
from twinflow.rpc.v1 import engine_pb2 as pb

E = TypeVar("E", bound=Enum)

_EVENT_NAMES = {kind: kind.name.lower() for kind in EventKind}
_FINISHES = {finish.value: finish for finish in FinishReason}
_EVENT_KINDS = {name: kind for kind, name in _EVENT_NAMES.items()}


def _known(kind: type[E], value: str, field: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise _unknown([member.value for member in kind], value, field) from None


def _unknown(known: Iterable[str], value: str, field: str) -> BadRequest:
    return BadRequest(f"unknown {field} {value!r} (known: {', '.join(known)})", param=field)


# ---- requests ----


def sampling_to_pb(s: SamplingParams, m: pb.Sampling | None = None) -> pb.Sampling:
    """`m`: the empty one to fill, where it is part of a message: protobuf copies a part that was made by itself."""
    m = pb.Sampling() if m is None else m
    m.max_tokens = s.max_tokens
    m.seed = s.seed
    m.temperature = s.temperature
    m.top_k = s.top_k
    m.top_p = s.top_p
    m.min_p = s.min_p
    m.presence_penalty = s.presence_penalty
    m.frequency_penalty = s.frequency_penalty
    m.repetition_penalty = s.repetition_penalty
    if s.logit_bias:
        m.logit_bias.extend(pb.LogitBias(token_id=t, bias=b) for t, b in s.logit_bias)
    if s.logprobs is not None:
        m.logprobs = s.logprobs
    if s.stop_token_ids:
        m.stop_token_ids.extend(s.stop_token_ids)
    if s.eos_token_ids:
        m.eos_token_ids.extend(s.eos_token_ids)
    m.ignore_eos = s.ignore_eos
    m.min_tokens = s.min_tokens
    m.sample_index = s.sample_index
    if s.grammar is not None:
        m.grammar.CopyFrom(grammar_to_pb(s.grammar))
    return m


def sampling_from_pb(m: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=m.max_tokens,
        seed=m.seed,
        temperature=m.temperature,
        top_k=m.top_k,
        top_p=m.top_p,
        min_p=m.min_p,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty,
        logit_bias=tuple((b.token_id, b.bias) for b in m.logit_bias),
        logprobs=m.logprobs if m.HasField("logprobs") else None,
        stop_token_ids=tuple(m.stop_token_ids),
        eos_token_ids=tuple(m.eos_token_ids),
        ignore_eos=m.ignore_eos,
        min_tokens=m.min_tokens,
        sample_index=m.sample_index,
        grammar=grammar_from_pb(m.grammar) if m.HasField("grammar") else None,
    )


def grammar_to_pb(g: Grammar) -> pb.Grammar:
    return pb.Grammar(
        kind=g.kind.value,
        text=g.text,
        lenient=g.lenient,
        field=g.field,
        think_end=g.think_end,
        think_start=g.think_start,
    )


def grammar_from_pb(m: pb.Grammar) -> Grammar:
    return Grammar(
        kind=_known(GrammarKind, m.kind, "grammar kind"),
        text=m.text,
        lenient=m.lenient,
        field=m.field,
        think_end=m.think_end if m.HasField("think_end") else None,
        think_start=m.think_start if m.HasField("think_start") else None,
    )


def request_from_submit(m: pb.Submit) -> GenerateRequest:
    """The engine's view of a submission; the candidates stay with the service."""
    return GenerateRequest(
        id=m.id, prompt=m.prompt, sampling=sampling_from_pb(m.sampling), root=m.root, forced=m.forced
    )


def request_from_open(m: pb.Open) -> GenerateRequest:
    return GenerateRequest(
        id=m.id, prompt=m.prompt, sampling=sampling_from_pb(m.sampling), root=m.root, forced=m.forced
    )


def sample_to_pb(s: Sample) -> pb.Sample:
    message = pb.Sample(token_id=s.token_id, finish=s.finish.value if s.finish else "")
    if s.logprobs is not None:
        message.logprobs.logprob = s.logprobs.logprob
        message.logprobs.top_ids.extend(t for t, _ in s.logprobs.top)
        message.logprobs.top_logprobs.extend(p for _, p in s.logprobs.top)
    return message


def sample_from_pb(m: pb.Sample) -> Sample:
    logprobs = None
    if m.HasField("logprobs"):
        top = tuple(zip(m.logprobs.top_ids, m.logprobs.top_logprobs, strict=True))
        logprobs = TokenLogprobs(m.logprobs.logprob, top)
    finish = m.finish
    return Sample(
        m.token_id, (_FINISHES.get(finish) or _known(FinishReason, finish, "finish")) if finish else None, logprobs
    )


def samples_to_pb(samples: Sequence[Sample]) -> list[pb.Sample]:
    return [sample_to_pb(s) for s in samples]


def samples_from_pb(messages: Sequence[pb.Sample]) -> tuple[Sample, ...]:
    """Of one request: if the first one has no logprobs, none has. Where they have none, hundreds may come at once."""
    if not messages or messages[0].HasField("logprobs"):
        return tuple([sample_from_pb(m) for m in messages])
    return tuple([sample_from_pb(m) if m.finish else Sample(m.token_id) for m in messages])


def stats_to_pb(s: RequestStats) -> pb.RequestStats:
    return pb.RequestStats(
        prompt_tokens=s.prompt_tokens,
        cached_tokens=s.cached_tokens,
        route=s.route,
        reason=s.reason,
        decode_attention_tokens=s.decode_attention_tokens,
        decode_checkpoints=s.decode_checkpoints,
        decode_resumed_tokens=s.decode_resumed_tokens,
        prefill_attention_tokens=s.prefill_attention_tokens,
        prefill_checkpoints=s.prefill_checkpoints,
        prefill_resumed_tokens=s.prefill_resumed_tokens,
        blocks_moved=s.blocks_moved,
        slots_moved=s.slots_moved,
        bytes_moved=s.bytes_moved,
        transfer_s=s.transfer_s,
        transport=s.transport,
        prefill_worker=s.prefill_worker,
        decode_worker=s.decode_worker,
        extra=s.extra,
        faulty_prefill_workers=s.faulty_prefill_workers,
    )


def stats_from_pb(m: pb.RequestStats) -> RequestStats:
    """An empty list is not walked: protobuf's end with an IndexError each, which takes longer than the rest of the list."""
    return RequestStats(
        prompt_tokens=m.prompt_tokens,
        cached_tokens=m.cached_tokens,
        route=m.route,
        reason=m.reason,
        decode_attention_tokens=m.decode_attention_tokens,
        decode_checkpoints=tuple(m.decode_checkpoints) if m.decode_checkpoints else (),
        decode_resumed_tokens=m.decode_resumed_tokens,
        prefill_attention_tokens=m.prefill_attention_tokens,
        prefill_checkpoints=tuple(m.prefill_checkpoints) if m.prefill_checkpoints else (),
        prefill_resumed_tokens=m.prefill_resumed_tokens,
        blocks_moved=m.blocks_moved,
        slots_moved=m.slots_moved,
        bytes_moved=m.bytes_moved,
        transfer_s=m.transfer_s,
        transport=m.transport,
        prefill_worker=m.prefill_worker,
        decode_worker=m.decode_worker,
        extra=dict(m.extra) if m.extra else {},
        faulty_prefill_workers=tuple(m.faulty_prefill_workers) if m.faulty_prefill_workers else (),
    )


# ---- workers ----


def pace_to_pb(x: Pace) -> pb.Pace:
    return pb.Pace(steps=x.steps, busy_s=x.busy_s, prefill_tokens=x.prefill_tokens, decode_tokens=x.decode_tokens)


def load_to_pb(x: Load) -> pb.Load:
    return pb.Load(
        running=x.running,
        waiting=x.waiting,
        queued_prefill_tokens=x.queued_prefill_tokens,
        free_blocks=x.free_blocks,
        total_blocks=x.total_blocks,
        free_slots=x.free_slots,
        total_slots=x.total_slots,
        pace=pace_to_pb(x.pace),
    )


def load_from_pb(m: pb.Load) -> Load:
    """Comes with every step: arguments by place, and `pace` got from the message once."""
    pace = m.pace
    return Load(
        m.running,
        m.waiting,
        m.queued_prefill_tokens,
        m.free_blocks,
        m.total_blocks,
        m.free_slots,
        m.total_slots,
        Pace(pace.steps, pace.busy_s, pace.prefill_tokens, pace.decode_tokens),
    )


def record_to_pb(r: WorkerRecord) -> pb.WorkerRecord:
    return pb.WorkerRecord(
        id=r.id,
        incarnation=r.incarnation,
        role=r.role.value,
        addresses=r.addresses,
        model=r.model,
        fingerprint=r.fingerprint,
        max_model_tokens=r.max_model_tokens,
        max_request_tokens=r.max_request_tokens,
        block_tokens=r.block_tokens,
        draining=r.draining,
        load=load_to_pb(r.load),
        block_bytes=r.block_bytes,
        slot_bytes=r.slot_bytes,
        features=r.features,
    )


def record_from_pb(m: pb.WorkerRecord) -> WorkerRecord:
    return WorkerRecord(
        id=m.id,
        incarnation=m.incarnation,
        role=_known(Role, m.role, "role"),
        addresses=tuple(m.addresses),
        model=m.model,
        fingerprint=m.fingerprint,
        max_model_tokens=m.max_model_tokens,
        max_request_tokens=m.max_request_tokens,
        block_tokens=m.block_tokens,
        draining=m.draining,
        load=load_from_pb(m.load),
        block_bytes=m.block_bytes,
        slot_bytes=m.slot_bytes,
        features=tuple(m.features),
    )


# ---- cache, errors ----


def event_to_pb(e: CacheEvent) -> pb.CacheEvent:
    return pb.CacheEvent(
        sequence=e.sequence, kind=_EVENT_NAMES[EventKind(e.kind)], prefix_hash=e.prefix_hash, position=e.position
    )


def events_from_pb(messages: Sequence[pb.CacheEvent]) -> Iterable[CacheEvent]:
    """Those of a peer that tells them one by one. As columns if they are numbered without gaps, as they should be."""
    messages = list(messages)
    try:
        kinds = bytes([_EVENT_KINDS[m.kind] for m in messages])
    except KeyError as e:
        raise _unknown(_EVENT_KINDS, str(e.args[0]), "event kind") from None
    sequences, hashes = [m.sequence for m in messages], [m.prefix_hash for m in messages]
    positions = [m.position for m in messages]
    if any(len(h) != HASH_BYTES for h in hashes):
        raise BadRequest(f"a cache event has a hash that is not {HASH_BYTES} bytes long")
    first = sequences[0] if sequences else 1
    if sequences == list(range(first, first + len(sequences))):
        return EventColumns(first, kinds, b"".join(hashes), pack_tokens(positions))
    return list(map(CacheEvent, sequences, kinds, hashes, positions))


def event_columns_to_pb(e: EventColumns) -> pb.EventColumns:
    return pb.EventColumns(first_sequence=e.first, kinds=e.kinds, prefix_hashes=e.hashes, positions=e.positions)


def event_columns_from_pb(m: pb.EventColumns) -> EventColumns:
    """Kinds of a newer peer stay as they are."""
    e = EventColumns(m.first_sequence, m.kinds, m.prefix_hashes, m.positions)
    n = len(e.kinds)
    if len(e.hashes) != n * HASH_BYTES or len(e.positions) != n * POSITION_BYTES:
        raise BadRequest(
            f"columns of cache events do not match: {n} kinds, {len(e.hashes)} bytes of hashes, {len(e.positions)} of positions"
        )
    return e


def hit_to_pb(h: GroupHit) -> admin_pb.GroupMatch:
    return admin_pb.GroupMatch(group=h.group, kind=h.kind.value, tokens=h.tokens, checkpoints=h.checkpoints)


def tag_to_pb(t: StateTag) -> pb.StateTag:
    return pb.StateTag(prefix_hash=t.prefix_hash, position=t.position, fingerprint=t.fingerprint)


def tag_from_pb(m: pb.StateTag) -> StateTag:
    return StateTag(m.prefix_hash, m.position, m.fingerprint)


def error_to_pb(e: TwinflowError) -> pb.Error:
    return pb.Error(reason=e.reason, message=e.message, param=e.param or "")


def error_from_pb(m: pb.Error) -> TwinflowError:
    """The error to raise; a reason of a newer peer becomes `Internal`."""
    return from_reason(m.reason, m.message, m.param or None)
