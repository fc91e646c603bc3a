"""What dispatch adds to the error tree. All are the router's own: they never cross a session."""

from dataclasses import dataclass

from twinflow.contracts.errors import HandoffFailed, TwinflowError

Key = tuple[str, str]  # worker id, incarnation


@dataclass(slots=True)
class Loss:
    """One worker's, with all the requests inside. `counted` is set by the first that has told whoever keeps account of faults."""

    counted: bool = False


class WorkerLost(HandoffFailed):
    """A worker was lost with the request inside: its session ended, or it makes no steps any more. Each request inside gets a
    copy of its own; their `loss` is the same one."""

    reason = "worker_lost"

    def __init__(self, message: str, *, param: str | None = None, culprit: Key | None = None) -> None:
        """`culprit` if it is another worker than the one that was asked."""
        super().__init__(message, param=param)
        self.culprit = culprit
        self.loss = Loss()


class Untold(TwinflowError):
    """What came of a reply could not be given on. No other worker would help: nobody knows what the client has."""


class SlowClient(TwinflowError):
    """The client read too slowly; its request was cancelled so that nobody else waits."""

    http_status, grpc_code, reason = 408, "CANCELLED", "slow_client"
