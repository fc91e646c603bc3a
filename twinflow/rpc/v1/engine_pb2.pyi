from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRecord(_message.Message):
    __slots__ = ("id", "incarnation", "role", "addresses", "model", "fingerprint", "max_model_tokens", "max_request_tokens", "block_tokens", "draining", "load", "block_bytes", "slot_bytes", "features")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    id: str
    incarnation: str
    role: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    model: str
    fingerprint: str
    max_model_tokens: int
    max_request_tokens: int
    block_tokens: int
    draining: bool
    load: Load
    block_bytes: int
    slot_bytes: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., max_model_tokens: _Optional[int] = ..., max_request_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., block_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "queued_prefill_tokens", "free_blocks", "total_blocks", "free_slots", "total_slots", "pace")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    free_slots: int
    total_slots: int
    pace: Pace
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_slots: _Optional[int] = ..., total_slots: _Optional[int] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("steps", "busy_s", "prefill_tokens", "decode_tokens")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    busy_s: float
    prefill_tokens: int
    decode_tokens: int
    def __init__(self, steps: _Optional[int] = ..., busy_s: _Optional[float] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("reason", "message", "param")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    param: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "stop_token_ids", "eos_token_ids", "ignore_eos", "min_tokens", "sample_index", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    sample_index: int
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., sample_index: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "lenient", "field", "think_end", "think_start")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LENIENT_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    THINK_END_FIELD_NUMBER: _ClassVar[int]
    THINK_START_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    lenient: bool
    field: str
    think_end: int
    think_start: int
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., lenient: _Optional[bool] = ..., field: _Optional[str] = ..., think_end: _Optional[int] = ..., think_start: _Optional[int] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("token_id", "finish", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    finish: str
    logprobs: Logprobs
    def __init__(self, token_id: _Optional[int] = ..., finish: _Optional[str] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class StateTag(_message.Message):
    __slots__ = ("prefix_hash", "position", "fingerprint")
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    prefix_hash: bytes
    position: int
    fingerprint: str
    def __init__(self, prefix_hash: _Optional[bytes] = ..., position: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class RequestStats(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "route", "reason", "decode_attention_tokens", "decode_checkpoints", "decode_resumed_tokens", "prefill_attention_tokens", "prefill_checkpoints", "prefill_resumed_tokens", "blocks_moved", "slots_moved", "bytes_moved", "transfer_s", "transport", "prefill_worker", "decode_worker", "extra", "faulty_prefill_workers")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DECODE_ATTENTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ATTENTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MOVED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    FAULTY_PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    route: str
    reason: str
    decode_attention_tokens: int
    decode_checkpoints: _containers.RepeatedScalarFieldContainer[int]
    decode_resumed_tokens: int
    prefill_attention_tokens: int
    prefill_checkpoints: _containers.RepeatedScalarFieldContainer[int]
    prefill_resumed_tokens: int
    blocks_moved: int
    slots_moved: int
    bytes_moved: int
    transfer_s: float
    transport: str
    prefill_worker: str
    decode_worker: str
    extra: _containers.ScalarMap[str, float]
    faulty_prefill_workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., route: _Optional[str] = ..., reason: _Optional[str] = ..., decode_attention_tokens: _Optional[int] = ..., decode_checkpoints: _Optional[_Iterable[int]] = ..., decode_resumed_tokens: _Optional[int] = ..., prefill_attention_tokens: _Optional[int] = ..., prefill_checkpoints: _Optional[_Iterable[int]] = ..., prefill_resumed_tokens: _Optional[int] = ..., blocks_moved: _Optional[int] = ..., slots_moved: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., transfer_s: _Optional[float] = ..., transport: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., extra: _Optional[_Mapping[str, float]] = ..., faulty_prefill_workers: _Optional[_Iterable[str]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("sequence", "kind", "prefix_hash", "position")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: str
    prefix_hash: bytes
    position: int
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[str] = ..., prefix_hash: _Optional[bytes] = ..., position: _Optional[int] = ...) -> None: ...

class EventColumns(_message.Message):
    __slots__ = ("first_sequence", "kinds", "prefix_hashes", "positions")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    kinds: bytes
    prefix_hashes: bytes
    positions: bytes
    def __init__(self, first_sequence: _Optional[int] = ..., kinds: _Optional[bytes] = ..., prefix_hashes: _Optional[bytes] = ..., positions: _Optional[bytes] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "resync", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    resync: Resync
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "protocol_min", "protocol_max", "columns", "event_columns")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    EVENT_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol_min: int
    protocol_max: int
    columns: bool
    event_columns: bool
    def __init__(self, router_id: _Optional[str] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., columns: _Optional[bool] = ..., event_columns: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("id", "prompt", "sampling", "root", "forced", "candidates", "reason", "idempotency_id", "local_max_tokens", "gather_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GATHER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt: bytes
    sampling: Sampling
    root: bytes
    forced: bytes
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    reason: str
    idempotency_id: str
    local_max_tokens: int
    gather_tokens: int
    def __init__(self, id: _Optional[str] = ..., prompt: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., root: _Optional[bytes] = ..., forced: _Optional[bytes] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., reason: _Optional[str] = ..., idempotency_id: _Optional[str] = ..., local_max_tokens: _Optional[int] = ..., gather_tokens: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker_id", "incarnation", "addresses", "predicted_usable_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    predicted_usable_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., predicted_usable_tokens: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("count", "engine_silent_s")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SILENT_S_FIELD_NUMBER: _ClassVar[int]
    count: int
    engine_silent_s: float
    def __init__(self, count: _Optional[int] = ..., engine_silent_s: _Optional[float] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "step", "snapshot", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    step: StepReport
    snapshot: Snapshot
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., step: _Optional[_Union[StepReport, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("record", "protocol", "error")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    protocol: int
    error: Error
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., protocol: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("outputs", "events", "load", "token_requests", "token_ids", "event_columns")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EVENT_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    load: Load
    token_requests: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    event_columns: EventColumns
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., token_requests: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., event_columns: _Optional[_Union[EventColumns, _Mapping]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("id", "samples", "stats", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    stats: RequestStats
    error: Error
    def __init__(self, id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., stats: _Optional[_Union[RequestStats, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("sequence", "events", "event_columns")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EVENT_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    event_columns: EventColumns
    def __init__(self, sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ..., event_columns: _Optional[_Union[EventColumns, _Mapping]] = ...) -> None: ...

class ArenaInfo(_message.Message):
    __slots__ = ("base_address", "total_bytes", "block_bytes", "slot_bytes", "blocks", "slots", "memory", "device_id", "agent_name", "agent_metadata")
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    base_address: int
    total_bytes: int
    block_bytes: int
    slot_bytes: int
    blocks: int
    slots: int
    memory: str
    device_id: int
    agent_name: str
    agent_metadata: bytes
    def __init__(self, base_address: _Optional[int] = ..., total_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., slots: _Optional[int] = ..., memory: _Optional[str] = ..., device_id: _Optional[int] = ..., agent_name: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ...) -> None: ...

class HandoffHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "session_epoch", "generation", "protocol_min", "protocol_max", "features", "fingerprint", "layout", "ranks", "error", "credits")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    session_epoch: int
    generation: int
    protocol_min: int
    protocol_max: int
    features: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: str
    layout: str
    ranks: _containers.RepeatedCompositeFieldContainer[ArenaInfo]
    error: Error
    credits: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., session_epoch: _Optional[int] = ..., generation: _Optional[int] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[ArenaInfo, _Mapping]]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., credits: _Optional[int] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("generation", "ranks")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    ranks: _containers.RepeatedCompositeFieldContainer[ArenaInfo]
    def __init__(self, generation: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[ArenaInfo, _Mapping]]] = ...) -> None: ...

class HandoffRequest(_message.Message):
    __slots__ = ("hello", "open", "pulled", "release", "cancel", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: HandoffHello
    open: Open
    pulled: Pulled
    release: Release
    cancel: Cancel
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[HandoffHello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., pulled: _Optional[_Union[Pulled, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("id", "prompt", "sampling", "root", "forced", "have_tokens", "idempotency_id", "want_checkpoint_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    HAVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_CHECKPOINT_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt: bytes
    sampling: Sampling
    root: bytes
    forced: bytes
    have_tokens: int
    idempotency_id: str
    want_checkpoint_at: int
    def __init__(self, id: _Optional[str] = ..., prompt: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., root: _Optional[bytes] = ..., forced: _Optional[bytes] = ..., have_tokens: _Optional[int] = ..., idempotency_id: _Optional[str] = ..., want_checkpoint_at: _Optional[int] = ...) -> None: ...

class Pulled(_message.Message):
    __slots__ = ("id", "lease_id", "incarnation", "session_epoch", "generation", "blocks", "slots")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    lease_id: str
    incarnation: str
    session_epoch: int
    generation: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[str] = ..., lease_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., session_epoch: _Optional[int] = ..., generation: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class HandoffReply(_message.Message):
    __slots__ = ("hello", "accepted", "blocks", "first_token", "finished", "confirmed", "failed", "heartbeat", "renewed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    hello: HandoffHello
    accepted: Accepted
    blocks: Blocks
    first_token: FirstToken
    finished: Finished
    confirmed: Confirmed
    failed: Failed
    heartbeat: Heartbeat
    renewed: Renewed
    def __init__(self, hello: _Optional[_Union[HandoffHello, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., confirmed: _Optional[_Union[Confirmed, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("id", "lease_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    lease_id: str
    def __init__(self, id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("id", "first_index", "blocks", "checksums")
    ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    id: str
    first_index: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[str] = ..., first_index: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("id", "sample", "stats")
    ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    id: str
    sample: Sample
    stats: RequestStats
    def __init__(self, id: _Optional[str] = ..., sample: _Optional[_Union[Sample, _Mapping]] = ..., stats: _Optional[_Union[RequestStats, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("id", "first_index", "blocks", "checksums", "slot", "slot_checksum", "tag", "stats", "checkpoint", "first_token")
    ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    id: str
    first_index: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    slot_checksum: int
    tag: StateTag
    stats: RequestStats
    checkpoint: OfferedState
    first_token: Sample
    def __init__(self, id: _Optional[str] = ..., first_index: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., slot_checksum: _Optional[int] = ..., tag: _Optional[_Union[StateTag, _Mapping]] = ..., stats: _Optional[_Union[RequestStats, _Mapping]] = ..., checkpoint: _Optional[_Union[OfferedState, _Mapping]] = ..., first_token: _Optional[_Union[Sample, _Mapping]] = ...) -> None: ...

class OfferedState(_message.Message):
    __slots__ = ("slot", "checksum", "tag")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    slot: int
    checksum: int
    tag: StateTag
    def __init__(self, slot: _Optional[int] = ..., checksum: _Optional[int] = ..., tag: _Optional[_Union[StateTag, _Mapping]] = ...) -> None: ...

class Confirmed(_message.Message):
    __slots__ = ("id", "lease_id", "session_epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    lease_id: str
    session_epoch: int
    def __init__(self, id: _Optional[str] = ..., lease_id: _Optional[str] = ..., session_epoch: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("id", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    error: Error
    def __init__(self, id: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...
