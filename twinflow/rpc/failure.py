"""Errors of unary calls: the code is gRPC's, the reason of our own tree travels in the trailing metadata."""

from typing import Any

import grpc

from twinflow.contracts.errors import (
    BadRequest,
    DeadlineExceeded,
    HandoffFailed,
    Internal,
    NoCapacity,
    Overloaded,
    TwinflowError,
    Unsupported,
    from_reason,
)

REASON_KEY = "twinflow-reason"

# What a peer that gives no reason means: the library itself, or something between us.
_BY_CODE: dict[grpc.StatusCode, type[TwinflowError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: NoCapacity,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: HandoffFailed,
}


def reason_metadata(error: TwinflowError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a call that ends with `error`."""
    return ((REASON_KEY, error.reason),)


def error_of(failure: grpc.RpcError, peer: str) -> TwinflowError:
    """The error that a failed call stands for. One that the peer did not raise itself is told with the peer's name."""
    if not isinstance(failure, grpc.aio.AioRpcError | grpc.Call):
        return Internal(f"{peer}: {failure}")
    code, details = failure.code(), failure.details() or ""
    trailing: Any = failure.trailing_metadata() or ()  # pairs
    for key, value in trailing:
        if key == REASON_KEY:
            return from_reason(value, details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        details = f"it does not have this call, it is another release ({details})"
    return _BY_CODE.get(code, Internal)(f"{peer}: {code.name}: {details}")
