"""Metrics of a prefill worker beside those of every worker: its leases are its requests."""

from collections.abc import Callable
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge

from twinflow.contracts.errors import TwinflowError
from twinflow.transfer.leases import Refusal


class End(Enum):
    """How a lease ended."""

    CONFIRMED = "confirmed"  # read, and the reader may use it
    REFUSED = "refused"  # read, but not under this lease
    RELEASED = "released"  # the reader needs nothing of it
    CANCELLED = "cancelled"  # the reader wants it no more
    FAILED = "failed"  # the prompt could not be computed
    EXPIRED = "expired"  # computed, and nobody came
    GENERATION = "generation_closed"  # its transfer generation was closed before it was read
    SUPERSEDED = "superseded"  # a newer attempt of the same request
    SESSION = "session_lost"


class PrefillMetrics:
    def __init__(self, registry: CollectorRegistry, leases: Callable[[], int], sessions: Callable[[], int]) -> None:
        """Both are asked at every scrape."""
        self._ended = Counter("twinflow_leases_ended", "Leases by how they ended", ["end"], registry=registry)
        self._unconfirmed = Counter(
            "twinflow_lease_refusals", "Reads that were not confirmed by reason", ["reason"], registry=registry
        )
        self._refused = Counter(
            "twinflow_handoffs_refused", "Hand-offs that were not taken by reason", ["reason"], registry=registry
        )
        Gauge(
            "twinflow_leases_open", "Leases now, prompts still being computed included", registry=registry
        ).set_function(leases)
        Gauge("twinflow_handoff_sessions", "Sessions of decode workers", registry=registry).set_function(sessions)
        for end in End:
            self._ended.labels(end.value)
        for refusal in Refusal:
            self._unconfirmed.labels(refusal.value)

    def ended(self, end: End) -> None:
        self._ended.labels(end.value).inc()

    def unconfirmed(self, refusal: Refusal) -> None:
        self._unconfirmed.labels(refusal.value).inc()

    def refused(self, error: TwinflowError) -> None:
        self._refused.labels(error.reason).inc()
