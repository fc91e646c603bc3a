"""Round trips of every contract over the wire, through bytes."""

import dataclasses

import pytest

from twinflow.contracts import errors
from twinflow.contracts.events import CacheEvent, EventColumns, EventKind
from twinflow.contracts.hashing import pack_tokens
from twinflow.contracts.requests import (
    FinishReason,
    Grammar,
    GrammarKind,
    RequestStats,
    Sample,
    SamplingParams,
    TokenLogprobs,
)
from twinflow.contracts.tags import StateTag
from twinflow.contracts.workers import Load, Pace, Role, WorkerRecord
from twinflow.rpc import convert
from twinflow.rpc.v1 import engine_pb2 as pb

# Values that float32 holds exactly, every field away from its default.
SAMPLING = SamplingParams(
    max_tokens=7,
    seed=2**64 - 1,
    temperature=0.75,
    top_k=40,
    top_p=0.5,
    min_p=0.125,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    repetition_penalty=1.25,
    logit_bias=((3, -100.0), (9, 2.5)),
    logprobs=0,
    stop_token_ids=(5, 6),
    eos_token_ids=(0, 2),
    ignore_eos=True,
    min_tokens=3,
    sample_index=4,
    grammar=Grammar(GrammarKind.REGEX, "a+", lenient=True, field="f", think_end=0, think_start=7),
)
STATS = RequestStats(
    prompt_tokens=130,
    cached_tokens=64,
    route="remote",
    reason="suffix",
    decode_attention_tokens=128,
    decode_checkpoints=(64, 100),
    decode_resumed_tokens=64,
    prefill_attention_tokens=64,
    prefill_checkpoints=(64,),
    prefill_resumed_tokens=64,
    blocks_moved=1,
    slots_moved=1,
    bytes_moved=2**40,
    transfer_s=0.1,
    transport="tcp",
    prefill_worker="p0",
    decode_worker="d0",
    extra={"queue_s": 0.3},
    faulty_prefill_workers=("p1", "p2"),
)
LOAD = Load(1, 2, 3, 4, 5, 6, 7, Pace(8, 1.5, 9, 10))
RECORD = WorkerRecord("w", "i1", Role.BOTH, ("a:1", "b:2"), "m", "f" * 32, 4096, 2048, 64, True, LOAD, 5, 6, ("x",))

CASES = [
    ("sampling", SAMPLING, pb.Sampling, convert.sampling_to_pb, convert.sampling_from_pb),
    (
        "sampling-no-logprobs",
        dataclasses.replace(SAMPLING, logprobs=None),
        pb.Sampling,
        convert.sampling_to_pb,
        convert.sampling_from_pb,
    ),
    (
        "sampling-no-thoughts",
        dataclasses.replace(SAMPLING, grammar=Grammar(GrammarKind.CHOICE, "[]")),
        pb.Sampling,
        convert.sampling_to_pb,
        convert.sampling_from_pb,
    ),
    ("sample", Sample(9), pb.Sample, convert.sample_to_pb, convert.sample_from_pb),
    (
        "sample-logprobs",
        Sample(9, FinishReason.LENGTH, TokenLogprobs(-0.5, ((9, -0.5), (1, -2.0)))),
        pb.Sample,
        convert.sample_to_pb,
        convert.sample_from_pb,
    ),
    ("stats", STATS, pb.RequestStats, convert.stats_to_pb, convert.stats_from_pb),
    ("load", LOAD, pb.Load, convert.load_to_pb, convert.load_from_pb),
    ("record", RECORD, pb.WorkerRecord, convert.record_to_pb, convert.record_from_pb),
    (
        "event",
        CacheEvent(3, EventKind.CHECKPOINT_STORED, b"h" * 16, 70),
        pb.CacheEvent,
        convert.event_to_pb,
        lambda m: next(iter(convert.events_from_pb([m]))),
    ),
    (
        "event-columns",
        EventColumns(3, bytes([4, 200]), b"h" * 16 + b"i" * 16, pack_tokens([70, 2**32 - 1])),
        pb.EventColumns,
        convert.event_columns_to_pb,
        convert.event_columns_from_pb,
    ),
    ("tag", StateTag(b"t" * 16, 70, "f" * 32), pb.StateTag, convert.tag_to_pb, convert.tag_from_pb),
]


@pytest.mark.parametrize(("value", "message", "to_pb", "from_pb"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_round_trip(value, message, to_pb, from_pb):
    wire = to_pb(value).SerializeToString()
    assert from_pb(message.FromString(wire)) == value


@pytest.mark.parametrize("contract", [SAMPLING, STATS, LOAD, RECORD], ids=lambda c: type(c).__name__)
def test_no_field_is_forgotten(contract):
    """Each case above sets every field, so a forgotten one would fail its round trip."""
    for field in dataclasses.fields(contract):
        if field.default is not dataclasses.MISSING:
            assert getattr(contract, field.name) != field.default, field.name


@pytest.mark.parametrize("kind", errors.BY_REASON.values(), ids=lambda k: k.__name__)
def test_errors_keep_their_kind(kind):
    back = convert.error_from_pb(convert.error_to_pb(kind("what happened", param="seed")))
    assert (type(back), back.message, back.param) == (kind, "what happened", "seed")
    assert convert.error_from_pb(convert.error_to_pb(kind("x"))).param is None


def test_unknown_error_reason_becomes_internal():
    assert type(convert.error_from_pb(pb.Error(reason="from_the_future", message="x"))) is errors.Internal


@pytest.mark.parametrize(
    "call",
    [
        lambda: convert.sample_from_pb(pb.Sample(finish="melted")),
        lambda: convert.record_from_pb(pb.WorkerRecord(role="melted")),
        lambda: convert.events_from_pb([pb.CacheEvent(kind="block_stored"), pb.CacheEvent(kind="melted")]),
    ],
    ids=["finish", "role", "event"],
)
def test_unknown_values_are_named(call):
    with pytest.raises(errors.BadRequest, match="melted"):
        call()


EVENTS = [CacheEvent(7 + i, kind, bytes([i]) * 16, 2**32 - 1 - i) for i, kind in enumerate(EventKind)]


@pytest.mark.parametrize("events", [[], EVENTS[:1], EVENTS], ids=len)
def test_events_one_by_one_and_in_columns_say_the_same(events):
    columns = EventColumns.of(events)
    assert list(columns) == events and len(columns) == len(events) and not columns.unknown_kinds
    found = convert.events_from_pb([convert.event_to_pb(e) for e in events])
    assert found == columns


def test_events_with_gaps_between_their_numbers_keep_them():
    events = [EVENTS[0], EVENTS[3], EVENTS[1], EVENTS[1]]
    assert convert.events_from_pb([convert.event_to_pb(e) for e in events]) == events


def test_names_and_numbers_of_event_kinds_are_those_of_the_protocol():
    names = [convert.event_to_pb(CacheEvent(1, n, b"h" * 16, 0)).kind for n in (1, 2, 3, 4)]
    assert names == ["block_stored", "block_removed", "checkpoint_stored", "checkpoint_removed"]


@pytest.mark.parametrize("length", [0, 3, 15, 17])
def test_a_hash_of_another_length_is_none(length):
    messages = [convert.event_to_pb(e) for e in EVENTS]
    messages[2].prefix_hash = b"?" * length
    with pytest.raises(errors.BadRequest, match="not 16 bytes long"):
        convert.events_from_pb(messages)


def test_submit_and_open_make_requests():
    sampling = convert.sampling_to_pb(SAMPLING)
    for make, message in (
        (convert.request_from_submit, pb.Submit(id="r", prompt=b"1234", sampling=sampling, root=b"R", forced=b"5678")),
        (convert.request_from_open, pb.Open(id="r", prompt=b"1234", sampling=sampling, root=b"R", forced=b"5678")),
    ):
        request = make(message)
        assert (request.id, request.prompt_tokens, request.sampling) == ("r", 1, SAMPLING)
        assert (request.root, request.forced) == (b"R", b"5678")


@pytest.mark.parametrize("logprobs", [None, TokenLogprobs(-0.5, ((9, -0.5),))], ids=["plain", "logprobs"])
@pytest.mark.parametrize("finish", [None, FinishReason.STOP], ids=["amid", "end"])
def test_samples_of_one_request(logprobs, finish):
    samples = (*(Sample(i, None, logprobs) for i in range(40)), Sample(40, finish, logprobs))
    for told in (samples, samples[-1:], ()):
        assert convert.samples_from_pb(convert.samples_to_pb(told)) == told


def test_an_unknown_finish_is_refused_wherever_it_is():
    odd, plain = pb.Sample(token_id=1, finish="weary"), pb.Sample(token_id=2)
    for told in ([odd], [plain, odd], [odd, plain]):
        with pytest.raises(errors.BadRequest, match="weary"):
            convert.samples_from_pb(told)
