from twinflow.rpc.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListWorkersRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("record", "connected", "active_requests", "queued_prefill_tokens", "index_entries")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    record: _engine_pb2.WorkerRecord
    connected: bool
    active_requests: int
    queued_prefill_tokens: int
    index_entries: int
    def __init__(self, record: _Optional[_Union[_engine_pb2.WorkerRecord, _Mapping]] = ..., connected: _Optional[bool] = ..., active_requests: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., index_entries: _Optional[int] = ...) -> None: ...

class GetCapacityRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class GetCapacityResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCapacity]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerCapacity, _Mapping]]] = ...) -> None: ...

class WorkerCapacity(_message.Message):
    __slots__ = ("worker_id", "error", "groups", "capacity_tokens", "max_request_tokens", "arena_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    error: _engine_pb2.Error
    groups: _containers.RepeatedCompositeFieldContainer[GroupCapacity]
    capacity_tokens: int
    max_request_tokens: int
    arena_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., error: _Optional[_Union[_engine_pb2.Error, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupCapacity, _Mapping]]] = ..., capacity_tokens: _Optional[int] = ..., max_request_tokens: _Optional[int] = ..., arena_bytes: _Optional[int] = ...) -> None: ...

class GroupCapacity(_message.Message):
    __slots__ = ("group", "kind", "unit_bytes", "block_tokens", "total_units", "free_units", "cached_units", "held_units", "doomed_units", "pinned_units", "stored_units")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_UNITS_FIELD_NUMBER: _ClassVar[int]
    FREE_UNITS_FIELD_NUMBER: _ClassVar[int]
    CACHED_UNITS_FIELD_NUMBER: _ClassVar[int]
    HELD_UNITS_FIELD_NUMBER: _ClassVar[int]
    DOOMED_UNITS_FIELD_NUMBER: _ClassVar[int]
    PINNED_UNITS_FIELD_NUMBER: _ClassVar[int]
    STORED_UNITS_FIELD_NUMBER: _ClassVar[int]
    group: str
    kind: str
    unit_bytes: int
    block_tokens: int
    total_units: int
    free_units: int
    cached_units: int
    held_units: int
    doomed_units: int
    pinned_units: int
    stored_units: int
    def __init__(self, group: _Optional[str] = ..., kind: _Optional[str] = ..., unit_bytes: _Optional[int] = ..., block_tokens: _Optional[int] = ..., total_units: _Optional[int] = ..., free_units: _Optional[int] = ..., cached_units: _Optional[int] = ..., held_units: _Optional[int] = ..., doomed_units: _Optional[int] = ..., pinned_units: _Optional[int] = ..., stored_units: _Optional[int] = ...) -> None: ...

class MatchPromptRequest(_message.Message):
    __slots__ = ("worker_id", "token_ids", "text", "cache_salt", "tenant")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    cache_salt: str
    tenant: str
    def __init__(self, worker_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class MatchPromptResponse(_message.Message):
    __slots__ = ("prompt_tokens", "workers")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerMatch]
    def __init__(self, prompt_tokens: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerMatch, _Mapping]]] = ...) -> None: ...

class WorkerMatch(_message.Message):
    __slots__ = ("worker_id", "error", "groups", "usable_tokens", "predicted")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    error: _engine_pb2.Error
    groups: _containers.RepeatedCompositeFieldContainer[GroupMatch]
    usable_tokens: int
    predicted: _containers.RepeatedCompositeFieldContainer[GroupMatch]
    def __init__(self, worker_id: _Optional[str] = ..., error: _Optional[_Union[_engine_pb2.Error, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupMatch, _Mapping]]] = ..., usable_tokens: _Optional[int] = ..., predicted: _Optional[_Iterable[_Union[GroupMatch, _Mapping]]] = ...) -> None: ...

class GroupMatch(_message.Message):
    __slots__ = ("group", "kind", "tokens", "checkpoints")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    group: str
    kind: str
    tokens: int
    checkpoints: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., kind: _Optional[str] = ..., tokens: _Optional[int] = ..., checkpoints: _Optional[_Iterable[int]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerRequests]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerRequests, _Mapping]]] = ...) -> None: ...

class WorkerRequests(_message.Message):
    __slots__ = ("worker_id", "error", "requests", "leases")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    error: _engine_pb2.Error
    requests: _containers.RepeatedCompositeFieldContainer[RunningRequest]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, worker_id: _Optional[str] = ..., error: _Optional[_Union[_engine_pb2.Error, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[RunningRequest, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class RunningRequest(_message.Message):
    __slots__ = ("id", "mode", "phase", "prompt_tokens", "processed_tokens", "generated_tokens", "age_s", "blocks", "slots", "owner", "prefill_worker")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    id: str
    mode: str
    phase: str
    prompt_tokens: int
    processed_tokens: int
    generated_tokens: int
    age_s: float
    blocks: int
    slots: int
    owner: str
    prefill_worker: str
    def __init__(self, id: _Optional[str] = ..., mode: _Optional[str] = ..., phase: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., processed_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., blocks: _Optional[int] = ..., slots: _Optional[int] = ..., owner: _Optional[str] = ..., prefill_worker: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "request_id", "reader", "reader_incarnation", "age_s", "prefilled", "blocks", "slots")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    request_id: str
    reader: str
    reader_incarnation: str
    age_s: float
    prefilled: bool
    blocks: int
    slots: int
    def __init__(self, lease_id: _Optional[str] = ..., request_id: _Optional[str] = ..., reader: _Optional[str] = ..., reader_incarnation: _Optional[str] = ..., age_s: _Optional[float] = ..., prefilled: _Optional[bool] = ..., blocks: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("worker_id", "request_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    request_id: str
    def __init__(self, worker_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCancel]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerCancel, _Mapping]]] = ...) -> None: ...

class WorkerCancel(_message.Message):
    __slots__ = ("worker_id", "error", "cancelled")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    error: _engine_pb2.Error
    cancelled: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., error: _Optional[_Union[_engine_pb2.Error, _Mapping]] = ..., cancelled: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDrain]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerDrain, _Mapping]]] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDrain]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerDrain, _Mapping]]] = ...) -> None: ...

class WorkerDrain(_message.Message):
    __slots__ = ("worker_id", "error", "draining", "changed", "requests", "leases")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    error: _engine_pb2.Error
    draining: bool
    changed: bool
    requests: int
    leases: int
    def __init__(self, worker_id: _Optional[str] = ..., error: _Optional[_Union[_engine_pb2.Error, _Mapping]] = ..., draining: _Optional[bool] = ..., changed: _Optional[bool] = ..., requests: _Optional[int] = ..., leases: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("worker_id", "group")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    group: str
    def __init__(self, worker_id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerFlush]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerFlush, _Mapping]]] = ...) -> None: ...

class WorkerFlush(_message.Message):
    __slots__ = ("worker_id", "error", "groups")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    error: _engine_pb2.Error
    groups: _containers.RepeatedCompositeFieldContainer[GroupFlush]
    def __init__(self, worker_id: _Optional[str] = ..., error: _Optional[_Union[_engine_pb2.Error, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupFlush, _Mapping]]] = ...) -> None: ...

class GroupFlush(_message.Message):
    __slots__ = ("group", "units", "bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    group: str
    units: int
    bytes: int
    def __init__(self, group: _Optional[str] = ..., units: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
