"""One error tree, one table to HTTP status and gRPC code.

TwinflowError
├── BadRequest            client's fault; names the field                 400  INVALID_ARGUMENT
│   ├── Unsupported       field or model feature we refuse by name        400  INVALID_ARGUMENT
│   ├── TooLong           can never fit; carries the numbers              400  INVALID_ARGUMENT
│   └── TooLarge          the body, in bytes                              413  INVALID_ARGUMENT
├── UnknownModel                                                          404  NOT_FOUND
├── UnknownWorker         names those that are known                      404  NOT_FOUND
├── Overloaded            shed; retry later                               429  RESOURCE_EXHAUSTED
├── NoCapacity            no worker can take it                           503  UNAVAILABLE
│   └── Draining          this worker takes nothing new                   503  UNAVAILABLE
├── DeadlineExceeded                                                      504  DEADLINE_EXCEEDED
├── Cancelled             the client left                                 499  CANCELLED
├── HandoffFailed         transfer or peer failed                         502  ABORTED
│   └── Incompatible      fingerprints differ; prints both sides          502  FAILED_PRECONDITION
├── ModelError            checkpoint or config unusable (at load)         500  FAILED_PRECONDITION
└── Internal              a bug                                           500  INTERNAL
"""

from typing import ClassVar


class TwinflowError(Exception):
    """`message` names the value and the remedy; `reason` is machine-readable; `param` names the request field, if any."""

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "internal"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(TwinflowError):
    http_status, grpc_code, reason = 400, "INVALID_ARGUMENT", "bad_request"


class Unsupported(BadRequest):
    reason = "unsupported"


class TooLong(BadRequest):
    reason = "too_long"


class TooLarge(BadRequest):
    http_status, reason = 413, "too_large"


class UnknownModel(TwinflowError):
    http_status, grpc_code, reason = 404, "NOT_FOUND", "unknown_model"


class UnknownWorker(TwinflowError):
    http_status, grpc_code, reason = 404, "NOT_FOUND", "unknown_worker"


class Overloaded(TwinflowError):
    http_status, grpc_code, reason = 429, "RESOURCE_EXHAUSTED", "overloaded"


class NoCapacity(TwinflowError):
    http_status, grpc_code, reason = 503, "UNAVAILABLE", "no_capacity"


class Draining(NoCapacity):
    reason = "draining"


class DeadlineExceeded(TwinflowError):
    http_status, grpc_code, reason = 504, "DEADLINE_EXCEEDED", "deadline"


class Cancelled(TwinflowError):
    http_status, grpc_code, reason = 499, "CANCELLED", "cancelled"


class HandoffFailed(TwinflowError):
    http_status, grpc_code, reason = 502, "ABORTED", "handoff_failed"


class Incompatible(HandoffFailed):
    grpc_code, reason = "FAILED_PRECONDITION", "incompatible"


class ModelError(TwinflowError):
    grpc_code, reason = "FAILED_PRECONDITION", "model_error"


class Internal(TwinflowError):
    pass


BY_REASON: dict[str, type[TwinflowError]] = {
    c.reason: c
    for c in (
        BadRequest,
        Unsupported,
        TooLong,
        TooLarge,
        UnknownModel,
        UnknownWorker,
        Overloaded,
        NoCapacity,
        Draining,
        DeadlineExceeded,
        Cancelled,
        HandoffFailed,
        Incompatible,
        ModelError,
        Internal,
    )
}


def from_reason(reason: str, message: str, param: str | None = None) -> TwinflowError:
    """Rebuilds an error that crossed the wire; an unknown reason (newer peer) becomes `Internal`."""
    return BY_REASON.get(reason, Internal)(message, param=param)
