"""Prometheus metrics of a router, in a registry of its own. Times in seconds, lengths in tokens."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.router.admission.base import ANONYMOUS, ShedReason
from services.router.instruments import Counter, Histogram
from services.router.schedule.base import Choice, ChoiceKind
from twinflow.contracts.requests import RequestStats

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ERROR_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
_WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)


_REMOTE = ChoiceKind.REMOTE.value
MAX_KEYS = 64  # of API keys with series of their own


class Metrics:
    def __init__(self) -> None:
        self._keys: set[str] = set()
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "twinflow_router_requests", "Generations by outcome: ok, cancelled or an error's reason", ["outcome"],
            registry=r,
        )  # fmt: skip
        self.refused = Counter(
            "twinflow_router_http_errors", "HTTP error answers by status and code", ["status", "code"], registry=r
        )
        self.decisions = Counter(
            "twinflow_router_decisions", "Choices by kind and reason", ["kind", "reason"], registry=r
        )
        self.retries = Counter("twinflow_router_retries", "Unstarted requests tried on another worker", registry=r)
        self.migrations = Counter("twinflow_router_migrations", "Replies that went on at another worker", registry=r)
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
        self.hit_error = Histogram(
            "twinflow_router_hit_error_tokens", "Predicted hits beside those found", ["hit", "direction"],
            buckets=_ERROR_TOKENS, registry=r,
        )  # fmt: skip

        self.queue_wait = Histogram(
            "twinflow_router_queue_wait_seconds", "Wait for room at the workers", buckets=_WAIT_S, registry=r
        )
        self.shed = Counter("twinflow_router_shed", "Requests not taken", ["reason", "key"], registry=r)
        self.key_requests = Counter(
            "twinflow_router_key_requests", "Requests that were let through and have ended", ["key"], registry=r
        )
        self.key_tokens = Counter("twinflow_router_key_tokens", "Tokens that they used", ["key"], registry=r)

    def watch_generations(self, running: Callable[[], int]) -> None:
        gauge = Gauge("twinflow_router_requests_in_flight", "Generations running now", registry=self.registry)
        gauge.set_function(running)

    def watch_queue(self, requests: Callable[[], int], tokens: Callable[[], int]) -> None:
        """Reads the gate at every scrape."""
        gauge = Gauge("twinflow_router_queue_requests", "Requests that wait", registry=self.registry)
        gauge.set_function(requests)
        gauge = Gauge("twinflow_router_queue_tokens", "Tokens that they may take", registry=self.registry)
        gauge.set_function(tokens)

    def watch_keys(self, failed_reloads: Callable[[], int]) -> None:
        gauge = Gauge(
            "twinflow_router_keys_failed_reloads", "Changed key files that could not be used", registry=self.registry
        )
        gauge.set_function(failed_reloads)

    def shed_one(self, key: str, why: ShedReason) -> None:
        self.shed.of[why.value, self._key(key)].inc()

    def left(self, key: str, tokens: int) -> None:
        name = self._key(key)
        self.key_requests.of[name,].inc()
        self.key_tokens.of[name,].inc(tokens)

    def _key(self, name: str) -> str:
        """A bounded number of them: names come and go with the operator's file."""
        if name not in self._keys and name != ANONYMOUS:
            if len(self._keys) >= MAX_KEYS:
                return "other"
            self._keys.add(name)
        return name

    def watch_workers(self, counts: Callable[[], Mapping[str, int]], entries: Callable[[], Mapping[str, int]]) -> None:
        """Reads the view at every scrape."""
        self.registry.register(_Workers(counts, entries))

    def watch_index(self, index_bytes: Callable[[], int]) -> None:
        gauge = Gauge("twinflow_router_index_bytes", "Memory of the index in use", registry=self.registry)
        gauge.set_function(index_bytes)

    def watch_registry(self, up: Callable[[], bool], workers: Callable[[], int]) -> None:
        """Reads the registry at every scrape."""
        Gauge("twinflow_router_registry_up", "1 while the registry answers", registry=self.registry).set_function(up)
        registered = Gauge("twinflow_router_registered_workers", "Workers that are listed", registry=self.registry)
        registered.set_function(workers)

    def chosen(self, choice: Choice) -> None:
        self.decisions.of[choice.kind.value, choice.reason.value].inc()

    def begun(self, kind: str, ttft_s: float) -> None:
        self.ttft.of[kind,].observe(ttft_s)

    def finished(self, outcome: str, stats: RequestStats | None, prompt_tokens: int, completion_tokens: int) -> None:
        self.requests.of[outcome,].inc()
        self.prompt_tokens.inc(prompt_tokens)
        self.completion_tokens.inc(completion_tokens)
        if stats is not None and stats.cached_tokens:
            self.cached_tokens.inc(stats.cached_tokens)
        if stats is not None and stats.bytes_moved:
            self.bytes_moved.inc(stats.bytes_moved)

    def compare(self, choice: Choice, stats: RequestStats) -> None:
        """What the choice predicted, beside what the workers then found."""
        resumed = stats.decode_resumed_tokens
        predicted: int | None = choice.decode_usable_tokens
        if stats.route == _REMOTE:
            resumed = stats.prefill_resumed_tokens
            usable = {c.record.id: c.usable_tokens for c in choice.candidates}
            predicted = usable.get(stats.prefill_worker)
        self._error("attention", choice.decode_attention_tokens - stats.decode_attention_tokens)
        if predicted is not None:
            self._error("resumed", predicted - resumed)

    def _error(self, hit: str, tokens: int) -> None:
        direction = "exact" if tokens == 0 else "over" if tokens > 0 else "under"
        self.hit_error.of[hit, direction].observe(abs(tokens))

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
