"""The short form of `benchmarks.router_soak`: every answer right, nothing left behind."""

import asyncio

from benchmarks.router_load import MODEL
from benchmarks.router_sim import Pacing, Script
from benchmarks.router_soak import Fleet, Plan, Soak
from tests.router.conftest import running, until

PLAN = Plan(
    streams=100,
    seconds=5.0,
    ramp_s=1.0,
    leave=0.05,
    slow=0.05,
    kill_every_s=1.5,
    kills=2,  # what a request survives, however slow the machine is
    tokens=(10, 40),
    pause_s=(0.2, 1.0),
    stuck_s=30.0,
)


async def test_a_hundred_streams_while_clients_leave_or_dawdle_and_workers_die():
    async with running(MODEL, served_model=MODEL.name, shutdown_s=5.0, silence_s=30.0) as c:
        router = c.router
        fleet = Fleet(router.grpc_address, Script(c.text.texts.tokenizer), Pacing(step_s=0.05, first_at_once=False), 3)
        await fleet.start()
        try:
            await until(lambda: router.view.counts()["decode"] == 3)
            tasks = len(asyncio.all_tasks())
            soak = Soak(PLAN, router.http_address, fleet.script, fleet)
            tally = await soak.run()
            assert tally.wrong == []
            assert tally.kills
            assert tally.ended["whole"] > PLAN.streams // 2
            assert tally.ended["left"]
            assert tally.ended["slow"]
            moved = router.metrics.registry.get_sample_value("twinflow_router_migrations_total")
            assert moved, "no reply was in the middle when its worker was killed"

            await until(lambda: not router.generator.running and not fleet.running)
            assert router.gate.held == 0
            assert {w.active_requests for w in router.view.snapshot().workers} == {0}
            assert {w.queued_prefill_tokens for w in router.view.snapshot().workers} == {0}
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
        finally:
            await fleet.stop()
