"""What /metrics says: documented, all of it, and equal to what the pools, the leases and the answers say."""

import asyncio
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.flow.conftest import Flow, run_flow
from tests.flow.test_flow import NEW, body, complete, finish
from tests.models.tiny import prompt
from twinflow.engine.sequence import Phase
from twinflow.transfer.loopback import Manual

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `(twinflow_\w+)` \| (\w+) \|([^|]*)\| ")
SECTIONS = {
    "Router": ("router",),
    "Every worker": ("p", "d"),
    "Prefill workers": ("p",),
    "Decode workers": ("d",),
}

Described = dict[str, tuple[str, frozenset[str]]]  # name as exposed → type, labels


def documented(process: str) -> Described:
    found: Described = {}
    for section in DOC.read_text().split("\n## ")[1:]:
        if process in SECTIONS.get(section.split("\n", 1)[0], ()):
            for name, kind, labels in ROW.findall(section):
                assert name not in found, f"{name} is documented twice"
                found[name] = (kind, frozenset(re.findall(r"`(\w+)`", labels)))
    return found


async def scrape(flow: Flow, process: str) -> list[Metric]:
    url = f"{flow.url}/metrics" if process == "router" else flow.fronts[process].scrapes.url
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.get(url)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return [f for f in families if not f.name.endswith("_created")]


def exposed(families: Iterable[Metric]) -> Described:
    found: Described = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.samples, f"{name} has no sample: this test must make one"
        assert family.documentation
        labels = {frozenset(s.labels) - {"le"} for s in family.samples}
        assert len(labels) == 1, (name, labels)
        found[name] = (family.type, labels.pop())
    return found


class Values:
    """Samples by name and labels: `v("twinflow_x_total", group="state")` sums those that match."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._samples = [s for f in families for s in f.samples]

    def __call__(self, name: str, **labels: str) -> float:
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"no {name} {labels}"
        return sum(found)


async def values(flow: Flow, process: str) -> Values:
    return Values(await scrape(flow, process))


async def served(flow: Flow, reads: Manual, ids: list[int], **more: Any) -> dict[str, Any]:
    """One request, with every read done as soon as it is posted."""
    task = asyncio.create_task(complete(flow, ids, **more))
    await flow.until(lambda: finish(reads) is None and task.done(), "the request is served")
    return await task


async def failed(flow: Flow, reads: Manual, ids: list[int]) -> dict[str, Any]:
    """One request whose last read fails, after its first token was sent: it is computed again, here."""
    seen = len(reads.reads)
    decoding = flow.engines["d"].sequences
    async with httpx.AsyncClient(base_url=flow.url, timeout=30) as http:
        task = asyncio.create_task(http.post("/v1/completions", json=body(ids)))
        await flow.until(lambda: any(s.first for s in list(decoding.values())), "the first token is there")
        await flow.until(lambda: len(reads.reads) > seen, "a read is posted")
        reads.reads[-1].fail("link down")
        answer = await task
        assert answer.status_code == 200
    finish(reads)  # what else was posted ends by itself
    return answer.json()


async def pools_match(flow: Flow) -> None:
    """The pools in /metrics equal those of the caches, number by number."""
    for name, engine in flow.engines.items():
        v, counts = await values(flow, name), engine.cache.counts()
        assert set(counts) == {"attention", "state"}
        for group, c in counts.items():
            shown = {s: v("twinflow_pool_units", group=group, state=s) for s in ("free", "cached", "held", "doomed")}
            assert shown == {"free": c.free, "cached": c.cached, "held": c.held, "doomed": c.doomed}, (name, group)
            assert sum(shown.values()) == v("twinflow_pool_size_units", group=group) == c.total
            assert v("twinflow_pool_pinned_units", group=group) == c.pinned_by_io


async def test_every_metric_is_documented_and_every_documented_one_is_there(checkpoint: Path) -> None:
    reads = Manual()
    async with run_flow(checkpoint, reads) as flow:
        await served(flow, reads, prompt(1, 200))
        await failed(flow, reads, prompt(2, 100))
        assert flow.prefill is not None
        flow.prefill.offers._max_open = 0  # the next hand-off is refused
        await served(flow, reads, prompt(3, 70))
        async with httpx.AsyncClient(base_url=flow.url, timeout=30) as http:
            assert (await http.post("/v1/completions", json=body([1], max_tokens=0))).status_code == 400
            settings = flow.router.gate._settings
            flow.router.gate._settings = dataclasses.replace(settings, max_requests=0, queue_requests=0)
            assert (await http.post("/v1/completions", json=body([1], max_tokens=1))).status_code == 429
            flow.router.gate._settings = settings
        for process in ("router", "p", "d"):
            assert exposed(await scrape(flow, process)) == documented(process)
        await flow.clean()


async def test_pools_and_leases_in_metrics_are_the_real_ones(checkpoint: Path) -> None:
    reads = Manual()
    async with run_flow(checkpoint, reads) as flow:
        for seed, n in ((1, 200), (1, 200), (2, 65), (1, 260)):
            await served(flow, reads, prompt(seed, n))
        await flow.clean()
        await pools_match(flow)

        waiting = asyncio.create_task(complete(flow, prompt(3, 300)))
        leased = flow.engines["p"].sequences.values()
        await flow.until(lambda: any(s.phase is Phase.LEASED for s in list(leased)), "the prompt is computed")
        await flow.until(lambda: bool(reads.reads) and reads.reads[-1].state == "posted", "reads are posted")
        await asyncio.sleep(0.1)  # the last report is in
        await pools_match(flow)
        d = await values(flow, "d")
        assert d("twinflow_pool_pinned_units", group="attention") > 0
        assert (await values(flow, "p"))("twinflow_leases_open") == 1
        assert (await values(flow, "router"))("twinflow_router_requests_in_flight") == 1

        await flow.until(lambda: finish(reads) is None and waiting.done(), "the request is served")
        await flow.clean()
        await pools_match(flow)
        p = await values(flow, "p")
        assert p("twinflow_leases_open") == 0 and p("twinflow_leases_ended_total", end="confirmed") == 5


async def test_counters_add_up_to_what_the_answers_say(checkpoint: Path) -> None:
    reads = Manual()
    sizes = ((1, 200), (1, 200), (2, 130), (2, 300))
    async with run_flow(checkpoint, reads) as flow:
        answers = [await served(flow, reads, prompt(seed, n)) for seed, n in sizes]
        await served(flow, reads, prompt(9, 100), max_tokens=1)
        await failed(flow, reads, prompt(8, 100))
        await flow.clean()
        router, p, d = [await values(flow, name) for name in ("router", "p", "d")]

    stats = [a["twinflow"] for a in answers]
    lengths = [n for _, n in sizes]
    assert d("twinflow_requests_total", route="remote", outcome="ok") == len(sizes) + 1
    assert d("twinflow_requests_total", route="local", outcome="ok") == 1
    assert router("twinflow_router_requests_total", outcome="ok") == len(sizes) + 2
    assert router("twinflow_router_ttft_seconds_count") == len(sizes) + 2

    for name, key in (("bytes", "bytes_moved"), ("blocks", "blocks_moved"), ("slots", "slots_moved")):
        assert d(f"twinflow_handoff_{name}_total", peer="p") == sum(s[key] for s in stats) > 0
    assert abs(d("twinflow_handoff_seconds_total") - sum(s["transfer_s"] for s in stats)) < 1e-6
    assert d("twinflow_handoff_transport_info", peer="p", transport="loopback") == 1
    for outcome, count in (("confirmed", len(sizes)), ("not_needed", 1), ("failed", 1)):
        assert d("twinflow_handoffs_total", peer="p", outcome=outcome) == count
    assert d("twinflow_handoff_failures_total", reason="handoff_failed") == 1
    ends = {"confirmed": len(sizes), "released": 1, "cancelled": 1, "refused": 0, "expired": 0}
    for end, count in ends.items():
        assert p("twinflow_leases_ended_total", end=end) == count, end

    assert p("twinflow_computed_tokens_total", phase="decode") == 0
    resumed = sum(s["prefill_resumed_tokens"] for s in stats)
    assert p("twinflow_computed_tokens_total", phase="prefill") == sum(lengths) + 200 - resumed
    assert d("twinflow_computed_tokens_total", phase="prefill") == 100 + 1  # the lost one, with its first token forced
    # the lost one: its first token came from the prefill worker, its second from the prompt computed again
    assert d("twinflow_computed_tokens_total", phase="decode") == len(sizes) * (NEW - 1) + NEW - 2
    assert d("twinflow_generated_tokens_total") == len(sizes) * NEW + 1 + NEW

    assert p("twinflow_cache_resumed_tokens_total", side="prefill") == resumed > 0
    for group in ("attention", "state"):
        assert p("twinflow_cache_lookups_total", group=group) == len(sizes) + 2
        assert p("twinflow_cache_lookup_tokens_total", group=group) == sum(lengths) + 200
        looked_up = sum(lengths) + 200 + 1  # the lost one once more, with its first token
        assert d("twinflow_cache_lookup_tokens_total", group=group, side="decode") == looked_up
    assert p("twinflow_cache_hit_tokens_total", group="attention") == sum(s["prefill_attention_tokens"] for s in stats)
    deepest = sum(max(s["prefill_checkpoints"], default=0) for s in stats)
    assert p("twinflow_cache_hit_tokens_total", group="state") == deepest
    assert d("twinflow_cache_hit_tokens_total", group="attention") == sum(s["decode_attention_tokens"] for s in stats)
    assert p("twinflow_cache_hits_total", group="state") == 2
    assert router("twinflow_router_hit_error_tokens_count", hit="resumed") == len(sizes) + 2
