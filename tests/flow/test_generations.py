"""A read that never ends, through all three services: its request goes on, others are served, and its memory comes back with a
new transfer generation; /metrics tells all of it."""

import asyncio
from pathlib import Path

from tests.flow.conftest import Flow, run_flow
from tests.flow.test_flow import NEW, Oracle, complete, finish, text_of
from tests.flow.test_metrics import served, values
from tests.models.tiny import prompt
from twinflow.transfer.loopback import Manual, PostedRead


class Stuck(Manual):
    """Reads end as soon as they are looked at, except those that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.holding = False
        self.held: list[PostedRead] = []

    def posted(self, read: PostedRead) -> None:
        super().posted(read)
        if self.holding:
            self.held.append(read)

    def polled(self, read: PostedRead) -> None:
        if not any(read is h for h in self.held):
            read.copy()
            read.done()


def counts_add_up(flow: Flow) -> None:
    for name, engine in flow.engines.items():
        for group, c in engine.cache.counts().items():
            assert c.free + c.cached + c.held + c.doomed == c.total, (name, group, c)


async def test_a_read_that_never_ends_costs_a_generation(checkpoint: Path, oracle: Oracle) -> None:
    reads = Stuck()
    async with run_flow(checkpoint, reads, doomed_limit_s=4.0, generation_drain_s=5.0) as flow:
        await complete(flow, prompt(1, 70))
        reads.holding = True
        stuck = asyncio.create_task(complete(flow, prompt(2, 300)))
        await flow.until(lambda: bool(reads.held), "a read is posted")
        reads.holding = False
        (session,) = flow.decode.peers.sessions
        session.end("cut")
        answer = await stuck
        assert answer["choices"][0]["text"] == text_of(flow, oracle(prompt(2, 300), NEW))
        engine = flow.engines["d"]
        held = sum(r.size_bytes for r in reads.held)

        async def doomed_bytes() -> float:
            d = await values(flow, "d")
            counts_add_up(flow)
            assert d("twinflow_transfer_generation") == 1
            return d("twinflow_pool_doomed_bytes")

        assert await doomed_bytes() >= held > 0
        other = await complete(flow, prompt(3, 100))  # meanwhile
        assert other["choices"][0]["text"] == text_of(flow, oracle(prompt(3, 100), NEW))
        assert other["twinflow"]["route"] == "remote"

        def back() -> bool:
            return all(c.doomed == 0 for c in engine.cache.counts().values())

        await flow.until(back, "doomed memory is free again")
        assert [r.copy() for r in reads.held] == [0] * len(reads.held), "and nothing writes to it any more"
        after = await complete(flow, prompt(4, 100))
        assert after["twinflow"]["route"] == "remote"
        assert after["choices"][0]["text"] == text_of(flow, oracle(prompt(4, 100), NEW))
        d = await values(flow, "d")
        assert d("twinflow_transfer_generation") == 2
        assert d("twinflow_transfer_generations_closed_total") == 1
        assert d("twinflow_transfer_freed_bytes_total") >= held
        assert d("twinflow_pool_doomed_bytes") == 0
        assert d("twinflow_handoff_failures_total", cause="session_lost") >= 1
        counts_add_up(flow)
        await flow.clean()


async def test_a_prefill_worker_with_a_new_agent_serves_on(checkpoint: Path, oracle: Oracle) -> None:
    """What was accepted before is read through the old agent, what comes after through the new one."""
    reads = Manual()
    async with run_flow(checkpoint, reads, generation_drain_s=1.0) as flow:
        old = asyncio.create_task(complete(flow, prompt(1, 200)))
        await flow.until(lambda: bool(reads.reads), "a read is posted")
        transfer = flow.engines["p"].pulls.transfer
        assert transfer is not None and flow.prefill is not None
        transfer.renew("asked for")
        (session,) = flow.decode.peers.sessions
        await flow.until(lambda: session.arena.generation == 2, "the decode worker knows")
        new = asyncio.create_task(complete(flow, prompt(2, 200)))
        await flow.until(lambda: len({r.agent_name for r in reads.reads}) == 2, "the new one is read")
        await flow.until(lambda: finish(reads) is None and old.done() and new.done(), "both are served")
        for task, n in ((old, 1), (new, 2)):
            answer = await task
            assert answer["twinflow"]["route"] == "remote", answer["twinflow"]["reason"]
            assert answer["choices"][0]["text"] == text_of(flow, oracle(prompt(n, 200), NEW))
        closed = "twinflow_transfer_generations_closed_total"
        for _ in range(100):
            if (await values(flow, "p"))(closed) == 1:
                break
            await asyncio.sleep(0.05)
        p = await values(flow, "p")
        assert (p(closed), p("twinflow_transfer_generation")) == (1, 2)
        assert p("twinflow_leases_ended_total", end="confirmed") == 2
        assert (await values(flow, "d"))("twinflow_handoff_generation", peer="p") in (1, 2), "whichever ended last"
        last = await served(flow, reads, prompt(3, 100))
        assert last["twinflow"]["route"] == "remote"
        assert (await values(flow, "d"))("twinflow_handoff_generation", peer="p") == 2
        await flow.clean()


async def test_what_moves_early_is_counted(checkpoint: Path) -> None:
    """Small chunks: most of a long prompt's blocks are here before its last token is computed."""
    async with run_flow(checkpoint, chunk_tokens=64, step_tokens=64) as flow:
        stats = (await complete(flow, prompt(1, 700)))["twinflow"]
        d = await values(flow, "d")
        moved, early = d("twinflow_handoff_bytes_total", peer="p"), d("twinflow_handoff_early_bytes_total", peer="p")
        assert moved == stats["bytes_moved"] and 0 < early < moved
        assert 2 <= d("twinflow_handoff_descriptors_total", peer="p") <= stats["blocks_moved"] + 1
        assert d("twinflow_handoff_wait_seconds_total", peer="p") >= 0
        assert 0 < d("twinflow_handoff_tail_seconds_total", peer="p") < 20
        await flow.clean()
