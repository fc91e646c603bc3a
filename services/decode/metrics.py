"""Metrics of a decode worker beside those of every worker: requests, and hand-offs by the prefill worker they came from."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.decode.emit import Answer
from twinflow.contracts.errors import TwinflowError
from twinflow.contracts.requests import RequestStats
from twinflow.engine.base import DESCRIPTORS, EARLY_BYTES, TAIL_S, WAIT_S, Done
from twinflow.engine.metrics import PeerLabels

ROUTES = ("local", "remote")


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry, sessions: Callable[[], int]) -> None:
        r, peer = registry, ["peer"]
        self._peers = PeerLabels()
        self._transports: dict[str, str] = {}  # peer label → transport last used
        self.requests = Counter(
            "twinflow_requests", "Requests by where the prompt was computed and outcome: ok or an error's reason",
            ["route", "outcome"], registry=r,
        )  # fmt: skip
        self.tokens = Counter("twinflow_generated_tokens", "Tokens sent to routers", registry=r)
        self.handoffs = Counter("twinflow_handoffs", "Hand-offs by outcome", ["peer", "outcome"], registry=r)
        self.failures = Counter(
            "twinflow_handoff_failures",
            "Hand-offs that failed by reason and cause",
            ["peer", "reason", "cause"],
            registry=r,
        )
        self.bytes = Counter("twinflow_handoff_bytes", "Bytes of confirmed hand-offs", peer, registry=r)
        self.seconds = Counter("twinflow_handoff_seconds", "Seconds of reads of confirmed hand-offs", peer, registry=r)
        self.blocks = Counter("twinflow_handoff_blocks", "Attention blocks of confirmed hand-offs", peer, registry=r)
        self.slots = Counter("twinflow_handoff_slots", "State slots of confirmed hand-offs", peer, registry=r)
        self.descriptors = Counter(
            "twinflow_handoff_descriptors", "Ranges read in confirmed hand-offs, coalesced ones once", peer, registry=r
        )
        self.early_bytes = Counter(
            "twinflow_handoff_early_bytes", "Bytes read before the prompt was computed to its end", peer, registry=r
        )
        self.wait_seconds = Counter(
            "twinflow_handoff_wait_seconds", "Seconds that confirmed hand-offs waited for memory here", peer, registry=r
        )
        self.tail_seconds = Counter(
            "twinflow_handoff_tail_seconds", "Seconds from the end of prompts until all was read", peer, registry=r
        )
        self.generation = Gauge(
            "twinflow_handoff_generation", "The prefill worker's transfer generation in the last one", peer, registry=r
        )
        self.transport = Gauge(
            "twinflow_handoff_transport_info",
            "1 for the transport of the last hand-off",
            ["peer", "transport"],
            registry=r,
        )
        Gauge("twinflow_handoff_sessions", "Sessions to prefill workers", registry=r).set_function(sessions)
        for route in ROUTES:
            self.requests.labels(route, "ok")

    def refused(self, error: TwinflowError) -> None:
        """A request that was not even started."""
        self.requests.labels("none", error.reason).inc()

    def ended(self, answer: Answer) -> None:
        """Alone where there is no `Done`, since the engine is lost."""
        self.requests.labels(answer.route or "none", answer.outcome).inc()
        self.tokens.inc(answer.tokens)

    def finished(self, answer: Answer, done: Done) -> None:
        self.ended(answer)
        if not answer.prefill_worker:
            return
        peer = self._peers.label(answer.prefill_worker)
        if done.stats.route == "remote":  # the engine's own word: what was pulled was confirmed and joined
            self._moved(peer, done.stats)
            self.generation.labels(peer).set(answer.prefill_generation)
        elif answer.cancelled:
            self.handoffs.labels(peer, "cancelled").inc()
        elif done.error_reason:
            self._failed(peer, answer.outcome, "request")
        else:  # the first token was the last
            self.handoffs.labels(peer, "not_needed").inc()

    def lost(self, worker_id: str, reason: str, cause: str) -> None:
        """A hand-off failed before it was confirmed; the request goes on elsewhere."""
        self._failed(self._peers.label(worker_id), reason, cause)

    def not_taken(self, worker_id: str, error: TwinflowError) -> None:
        """A prefill worker could not be reached or refused the hand-off."""
        self._failed(self._peers.label(worker_id), error.reason, "not_taken")

    def _failed(self, peer: str, reason: str, cause: str) -> None:
        self.handoffs.labels(peer, "failed").inc()
        self.failures.labels(peer, reason, cause).inc()

    def _moved(self, peer: str, stats: RequestStats) -> None:
        self.handoffs.labels(peer, "confirmed").inc()
        self.bytes.labels(peer).inc(stats.bytes_moved)
        self.seconds.labels(peer).inc(stats.transfer_s)
        self.blocks.labels(peer).inc(stats.blocks_moved)
        self.slots.labels(peer).inc(stats.slots_moved)
        self.descriptors.labels(peer).inc(stats.extra.get(DESCRIPTORS, 0))
        self.early_bytes.labels(peer).inc(stats.extra.get(EARLY_BYTES, 0))
        self.wait_seconds.labels(peer).inc(stats.extra.get(WAIT_S, 0))
        self.tail_seconds.labels(peer).inc(stats.extra.get(TAIL_S, 0))
        before = self._transports.get(peer)
        if stats.transport and stats.transport != before:
            if before is not None:
                self.transport.remove(peer, before)
            self._transports[peer] = stats.transport
            self.transport.labels(peer, stats.transport).set(1)
