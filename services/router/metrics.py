"""Prometheus metrics of a router, in a registry of its own. Times in seconds, lengths in tokens."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.router.schedule.base import Choice
from twinflow.contracts.requests import RequestStats

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "twinflow_router_requests", "Generations by outcome: ok, cancelled or an error's reason", ["outcome"],
            registry=r,
        )  # fmt: skip
        self.refused = Counter(
            "twinflow_router_http_errors", "HTTP error answers by status and code", ["status", "code"], registry=r
        )
        self.in_flight = Gauge("twinflow_router_requests_in_flight", "Generations running now", registry=r)
        self.decisions = Counter(
            "twinflow_router_decisions", "Choices by kind and reason", ["kind", "reason"], registry=r
        )
        self.retries = Counter("twinflow_router_retries", "Unstarted requests tried on another worker", registry=r)
        self.prompt_tokens = Counter("twinflow_router_prompt_tokens", "Prompt tokens", registry=r)
        self.cached_tokens = Counter("twinflow_router_cached_tokens", "Prompt tokens not computed anywhere", registry=r)
        self.completion_tokens = Counter("twinflow_router_completion_tokens", "Generated tokens", registry=r)
        self.bytes_moved = Counter("twinflow_router_bytes_moved", "Bytes moved between workers", registry=r)
        self.ttft = Histogram(
            "twinflow_router_ttft_seconds", "Request to first token", ["kind"], buckets=_TTFT_S, registry=r
        )
        self.tpot = Histogram(
            "twinflow_router_tpot_seconds", "Mean time per token after the first", buckets=_TPOT_S, registry=r
        )

    def watch_workers(self, counts: Callable[[], Mapping[str, int]], entries: Callable[[], Mapping[str, int]]) -> None:
        """Reads the view at every scrape."""
        self.registry.register(_Workers(counts, entries))

    def chosen(self, choice: Choice) -> None:
        self.decisions.labels(choice.kind.value, choice.reason.value).inc()

    def finished(self, outcome: str, stats: RequestStats | None, prompt_tokens: int, completion_tokens: int) -> None:
        self.requests.labels(outcome).inc()
        self.prompt_tokens.inc(prompt_tokens)
        self.completion_tokens.inc(completion_tokens)
        if stats is not None:
            self.cached_tokens.inc(stats.cached_tokens)
            self.bytes_moved.inc(stats.bytes_moved)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Workers(Collector):
    def __init__(self, counts: Callable[[], Mapping[str, int]], entries: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts
        self._entries = entries

    def collect(self) -> Iterable[GaugeMetricFamily]:
        workers = GaugeMetricFamily("twinflow_router_workers", "Connected workers by role", labels=["role"])
        for role, n in self._counts().items():
            workers.add_metric([role], n)
        yield workers
        index = GaugeMetricFamily("twinflow_router_index_entries", "Index entries by worker", labels=["worker"])
        for worker, n in self._entries().items():
            index.add_metric([worker], n)
        yield index
