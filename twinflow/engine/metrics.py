"""Metrics that every worker has, whatever its role: pools, hits, queue, steps. `docs/metrics.md` lists them.

Fed by the front with every engine report; a report costs a few assignments, everything else is made when scraped. A role
adds its own to `registry`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinflow.contracts.groups import GroupKind
from twinflow.contracts.requests import RequestStats
from twinflow.contracts.workers import Role, WorkerRecord
from twinflow.engine.base import Done, Report, Transfer
from twinflow.transfer.base import GenerationOpened

MAX_PEERS = 256  # label values for peers; more workers than that share the last one, "other"


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one request found in this worker's own cache. Tokens by group kind; `resumed_tokens` were not computed here."""

    tokens: int
    hit_tokens: dict[GroupKind, int]
    resumed_tokens: int


def lookup_of(stats: RequestStats, side: str) -> Lookup:
    """A hand-off's stats carry both sides'; `side` is the one that is ours."""
    if side == Role.PREFILL.value:
        reach, points, resumed = (
            stats.prefill_attention_tokens, stats.prefill_checkpoints, stats.prefill_resumed_tokens
        )  # fmt: skip
    else:
        reach, points, resumed = stats.decode_attention_tokens, stats.decode_checkpoints, stats.decode_resumed_tokens
    hits = {GroupKind.ATTENTION: reach, GroupKind.STATE: max(points, default=0)}
    return Lookup(stats.prompt_tokens, hits, resumed)


class WorkerMetrics:
    """Owned by the front's loop."""

    def __init__(
        self,
        record: Callable[[], WorkerRecord],
        registered: Callable[[], bool],
        unit_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        """All are asked at every scrape; `unit_bytes` is by group."""
        self.registry = CollectorRegistry()
        self._side = (Role.PREFILL if record().role is Role.PREFILL else Role.DECODE).value
        self._last = _LastReport(record, registered, unit_bytes)
        self.registry.register(self._last)
        labels, r = ["group", "side"], self.registry
        self._lookups = Counter(
            "twinflow_cache_lookups", "Prompts looked up in this worker's cache", labels, registry=r
        )
        self._lookup_tokens = Counter("twinflow_cache_lookup_tokens", "Tokens of those prompts", labels, registry=r)
        self._hits = Counter("twinflow_cache_hits", "Prompts of which the group held something", labels, registry=r)
        self._hit_tokens = Counter(
            "twinflow_cache_hit_tokens", "Tokens that the group held: attention's reach, the deepest checkpoint of state",
            labels, registry=r,
        )  # fmt: skip
        self._resumed_tokens = Counter(
            "twinflow_cache_resumed_tokens", "Prompt tokens that this worker resumed from and did not compute", ["side"],
            registry=r,
        )  # fmt: skip
        for kind in GroupKind:
            for counter in (self._lookups, self._lookup_tokens, self._hits, self._hit_tokens):
                counter.labels(kind.value, self._side)
        self._resumed_tokens.labels(self._side)
        self._generation = Gauge("twinflow_transfer_generation", "Of this process's transfer, from 1", registry=r)
        self._generation.set(1)
        self._silences = Counter(
            "twinflow_engine_silences", "Times that the engine's process said nothing for 2 s", registry=r
        )
        self._closed = Counter(
            "twinflow_transfer_generations_closed", "Generations closed, with the reads that did not end", registry=r
        )
        self._freed = Counter(
            "twinflow_transfer_freed_bytes", "Memory of reads that ended with their generation", registry=r
        )

    def engine_silence(self, begins: bool) -> None:
        self._silences.inc(begins)

    def transfer(self, notice: Transfer) -> None:
        if isinstance(notice, GenerationOpened):
            self._generation.set(notice.generation)
        else:
            self._closed.inc()
            self._freed.inc(notice.freed_bytes)

    def reported(self, report: Report) -> None:
        self._last.report = report
        for notice in report.notices:
            if isinstance(notice, Done) and notice.stats.prompt_tokens:  # else it ended before it looked
                self._looked_up(lookup_of(notice.stats, self._side))

    def _looked_up(self, lookup: Lookup) -> None:
        for kind, hit_tokens in lookup.hit_tokens.items():
            labels = (kind.value, self._side)
            self._lookups.labels(*labels).inc()
            self._lookup_tokens.labels(*labels).inc(lookup.tokens)
            self._hits.labels(*labels).inc(hit_tokens > 0)
            self._hit_tokens.labels(*labels).inc(hit_tokens)
        self._resumed_tokens.labels(self._side).inc(lookup.resumed_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _LastReport(Collector):
    """The engine's last word, as metrics."""

    def __init__(
        self,
        record: Callable[[], WorkerRecord],
        registered: Callable[[], bool],
        unit_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        self.report: Report | None = None
        self._unit_bytes = unit_bytes
        self._record = record
        self._registered = registered

    def collect(self) -> Iterable[Metric]:
        record = self._record()
        about = {
            "worker": record.id,
            "incarnation": record.incarnation,
            "role": record.role.value,
            "model": record.model,
            "fingerprint": record.fingerprint,
        }
        info = GaugeMetricFamily("twinflow_worker_info", "This worker; always 1", labels=list(about))
        info.add_metric(list(about.values()), 1)
        yield info
        yield GaugeMetricFamily("twinflow_worker_draining", "1 while it takes nothing new", value=record.draining)
        yield GaugeMetricFamily("twinflow_worker_registered", "1 while the registry hears it", value=self._registered())
        if self.report is not None:
            yield from _pools(self.report, self._unit_bytes())
            yield from _queue(self.report)
            yield from _work(self.report)


def _pools(report: Report, unit_bytes: Mapping[str, int]) -> Iterable[Metric]:
    units = GaugeMetricFamily(
        "twinflow_pool_units", "Blocks or slots by state; they add up to the size", labels=["group", "state"]
    )
    size = GaugeMetricFamily("twinflow_pool_size_units", "Blocks or slots that there are", labels=["group"])
    pinned = GaugeMetricFamily(
        "twinflow_pool_pinned_units", "Of them, held or doomed: posted reads may write to them", labels=["group"]
    )
    doomed = GaugeMetricFamily(
        "twinflow_pool_doomed_bytes", "Memory that reads which were given up may still write to", labels=["group"]
    )
    for group, counts in report.counts.items():
        doomed.add_metric([group], counts.doomed * unit_bytes.get(group, 0))
        for state in ("free", "cached", "held", "doomed"):
            units.add_metric([group, state], getattr(counts, state))
        size.add_metric([group], counts.total)
        pinned.add_metric([group], counts.pinned_by_io)
    yield from (units, size, pinned, doomed)


def _queue(report: Report) -> Iterable[Metric]:
    load = report.load
    requests = GaugeMetricFamily("twinflow_queue_requests", "Requests in the engine by state", labels=["state"])
    requests.add_metric(["running"], load.running)
    requests.add_metric(["waiting"], load.waiting)
    yield requests
    yield GaugeMetricFamily(
        "twinflow_queue_prefill_tokens", "Tokens still to compute", value=load.queued_prefill_tokens
    )


def _work(report: Report) -> Iterable[Metric]:
    work = report.work
    yield CounterMetricFamily("twinflow_steps", "Steps of the engine", value=work.steps)
    tokens = CounterMetricFamily("twinflow_computed_tokens", "Tokens run through the model", labels=["phase"])
    tokens.add_metric(["prefill"], work.prefill_tokens)
    tokens.add_metric(["decode"], work.decode_tokens)
    yield tokens


class PeerLabels:
    """Worker ids as label values, a bounded number of them."""

    def __init__(self, limit: int = MAX_PEERS) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def label(self, worker_id: str) -> str:
        if worker_id not in self._known:
            if len(self._known) >= self._limit:
                return "other"
            self._known.add(worker_id)
        return worker_id
