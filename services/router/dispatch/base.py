"""What dispatch adds to the error tree. Both are the router's own: they never cross a session."""

from twinflow.contracts.errors import HandoffFailed, TwinflowError


class WorkerLost(HandoffFailed):
    """The decode worker's session ended with the request inside."""

    reason = "worker_lost"


class SlowClient(TwinflowError):
    """The client read too slowly; its request was cancelled so that nobody else waits."""

    http_status, grpc_code, reason = 408, "CANCELLED", "slow_client"
