"""What dispatch adds to the error tree. All are the router's own: they never cross a session."""

from twinflow.contracts.errors import HandoffFailed, TwinflowError

Key = tuple[str, str]  # worker id, incarnation


class WorkerLost(HandoffFailed):
    """A worker was lost with the request inside: its session ended, or it makes no steps any more. All requests inside get the
    same one; `counted` is set by the first that has told whoever keeps account of faults."""

    reason = "worker_lost"

    def __init__(self, message: str, *, param: str | None = None, culprit: Key | None = None) -> None:
        """`culprit` if it is another worker than the one that was asked."""
        super().__init__(message, param=param)
        self.culprit = culprit
        self.counted = False


class Untold(TwinflowError):
    """What came of a reply could not be given on. No other worker would help: nobody knows what the client has."""


class SlowClient(TwinflowError):
    """The client read too slowly; its request was cancelled so that nobody else waits."""

    http_status, grpc_code, reason = 408, "CANCELLED", "slow_client"
