"""One run: load, faults, a look at what is left after each round, and the account of all of it."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.cluster import ChaosCluster
from tests.chaos.load import Load, Question
from tests.chaos.network import Network
from tests.chaos.quiet import settle
from tests.chaos.report import Happened, Report
from tests.chaos.schedule import WORKERS, Fault, Kind, Point
from tests.chaos.watch import GENERATION, HANDED_OFF, MOVED_ON, RECOVERED, TROUBLE

BACK_S = 90.0  # a worker loads its model and warms up, on a machine that has other things to do
POINT_S = 4.0  # waiting for a request in the wanted phase
CATCH_S = 30.0  # trying to stop a process amid a read
STAYS_S = 0.5  # a read that is posted for so long after its source has stopped is not another worker's, nor on its way
RECOVERED_S = 15.0  # waiting for requests to go on before the next fault
GOES_ON_S = 10.0  # a wait that began so long after a fault, or after the next one, is not of its making
LATEST_S = 15.0  # to notice that a process is gone
CALM_S = 4.0  # of load alone, before each round
AFTERWARDS_S = 1.0  # what was noticed just before the end is said just after it
AT_ONCE = (Kind.KILL, Kind.CUT)  # noticed when it begins
Say = Callable[[str], None]


async def run(
    faults: Sequence[Fault],
    known: Sequence[Question],
    report: Report,
    *,
    model: str,
    log_dir: Path,
    workers: Sequence[str] = WORKERS,
    clients: int = 4,
    round_faults: int = 20,
    say: Say = lambda text: None,
    after_round: Callable[[], None] = lambda: None,
    network: Network | None = None,
) -> None:
    """`faults` one after another; after each `round_faults` of them the load rests and nothing may be left.

    `report` is complete after every round, when `after_round` is called, and at the end, also where the run is cancelled or
    breaks. Raises AssertionError if the cluster is wrong without any fault or does not leave when it is asked to."""
    seed = report.seed
    async with ChaosCluster(model, workers, log_dir, network) as cluster:
        load = Load(cluster.base_url, cluster.model, seed, known, clients)
        runner = Runner(cluster, load, report, random.Random(seed), say)
        lag = asyncio.create_task(runner.watch_itself())
        try:
            await runner.baseline(known)
            for i in range(0, len(faults), round_faults):
                await runner.round(faults[i : i + round_faults])
                await asyncio.to_thread(runner.account)  # proxies go on meanwhile
                await asyncio.to_thread(after_round)
        finally:
            lag.cancel()
            await load.close()
            runner.account()


class Runner:
    def __init__(self, cluster: ChaosCluster, load: Load, report: Report, rng: random.Random, say: Say) -> None:
        self._cluster = cluster
        self._load = load
        self._report = report
        self._rng = rng
        self._say = say
        self._began = time.monotonic()
        self._returning: list[asyncio.Task[None]] = []

    async def watch_itself(self) -> None:
        """While this process stands still its proxies do, too, and everybody falls silent: that would be a fault of its own."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.1)
            self._report.held_up_s = max(self._report.held_up_s, time.monotonic() - began - 0.1)

    async def baseline(self, known: Sequence[Question]) -> None:
        """Raises AssertionError unless the cluster, left alone, gives the answers that all others are compared with."""
        for i, question in enumerate(known):
            got = await self._load.once(question, f"baseline {i}")
            assert got.right, f"without any fault: {got.text!r} ({got.error} {got.message}), expected {question.text!r}"

    async def round(self, faults: Sequence[Fault]) -> None:
        self._load.start()
        await asyncio.sleep(CALM_S)
        left_to_do = list(faults)
        while left_to_do:
            fault = await self._next(left_to_do)
            left_to_do.remove(fault)
            await self._one(fault)
        await asyncio.gather(*self._returning)
        self._returning.clear()
        await self._load.drain()
        self._report.not_back += sorted(await self._cluster.wait_up(set(self._cluster.names), BACK_S))
        left = await settle(self._cluster.router_grpc)
        self._report.quiet.append(left)
        self._say(f"quiet after {left.after_s:.1f} s: {'nothing left' if left.clean else left}")

    async def _next(self, faults: Sequence[Fault]) -> Fault:
        """The first one whose victims are there: those of others may still load their model."""
        for fault in faults:
            if not await self._cluster.wait_up(set(fault.victims), 0.0):
                return fault
        return faults[0]

    async def _one(self, fault: Fault) -> None:
        if self._report.happened and not fault.overlaps:
            await self._recovered(self._report.happened[-1])
        await asyncio.sleep(fault.rest_s)
        missing = await self._cluster.wait_up(set(fault.victims), BACK_S)
        if missing:
            self._report.not_back += sorted(missing)
            return
        sought_at = time.monotonic()
        amid_read = await self._reach(fault)
        at = time.monotonic()
        affected = self._load.open
        happened = Happened(fault, at, at + fault.lasts_s, amid_read=amid_read, sought_at=sought_at)
        self._report.happened.append(happened)
        await self._do(happened)
        happened.until = time.monotonic()
        self._say(f"{len(self._report.happened):4d}  {fault}, {len(affected)} requests under way")

    async def _recovered(self, before: Happened) -> None:
        """Whoever waited when the fault was over, and long enough after its begin to be noticed, has had a sign since."""
        over = max(before.until, before.at + (AFTERWARDS_S if before.fault.kind in AT_ONCE else 0.0))
        await asyncio.sleep(max(0.0, over - time.monotonic()))
        until = time.monotonic() + RECOVERED_S
        while any(e.began < over and not e.sign_since(over) for e in self._load.open) and time.monotonic() < until:
            await asyncio.sleep(0.05)

    async def _reach(self, fault: Fault) -> bool:
        """A moment with a request in the wanted phase, or `POINT_S` later whatever is. True: amid a posted read."""
        until = time.monotonic() + POINT_S
        while fault.point is not Point.ANY and time.monotonic() < until:
            begun = [bool(e.text) for e in self._load.open]
            if (fault.point is Point.DECODING) in begun:
                break
            await asyncio.sleep(0.01)
        if fault.point is Point.READING:
            return await self._catch_read(fault)
        await asyncio.sleep(fault.delay_s)
        return False

    async def _catch_read(self, fault: Fault) -> bool:
        """A READ takes milliseconds. So the process is stopped for a moment again and again, until one is found posted. (A
        cable comes out only then: connections take seconds to recover from that.)"""
        cluster, victim, until = self._cluster, fault.victims[0], time.monotonic() + CATCH_S
        frozen = fault.kind is Kind.FREEZE
        stop, go_on = (cluster.freeze, cluster.thaw) if frozen else (cluster.pause, cluster.resume)
        caught = False
        while not caught and time.monotonic() < until:
            stop(victim)
            caught = await self._stays_posted()
            if caught and fault.kind is Kind.UNPLUG:
                cluster.unplug(victim)
            if not caught or fault.kind is Kind.UNPLUG:
                go_on(victim)
            await asyncio.sleep(0.02)
        return caught

    async def _stays_posted(self) -> bool:
        began = time.monotonic()
        while await self._cluster.reads_posted():
            if time.monotonic() - began > STAYS_S:
                return True
            await asyncio.sleep(0.05)
        return False

    async def _do(self, happened: Happened) -> None:
        fault, cluster = happened.fault, self._cluster
        if fault.kind is Kind.KILL:
            cluster.kill(*fault.victims)
            await asyncio.sleep(fault.lasts_s)
            self._returning.append(asyncio.create_task(self._return(happened, cluster.restart(*fault.victims))))
        elif fault.kind is Kind.PAUSE:
            cluster.pause(*fault.victims)
            await asyncio.sleep(fault.lasts_s)
            cluster.resume(*fault.victims)
        elif fault.kind is Kind.FREEZE:
            cluster.freeze(*fault.victims)
            await asyncio.sleep(fault.lasts_s)
            cluster.thaw(*fault.victims)
        elif fault.kind is Kind.UNPLUG:
            cluster.unplug(*fault.victims)
            await asyncio.sleep(fault.lasts_s)
            cluster.plug(*fault.victims)
        elif fault.kind is Kind.SLOW:
            cluster.slow(*fault.victims)
            await asyncio.sleep(fault.lasts_s)
            cluster.fast(*fault.victims)
        else:
            link = cluster.link(*fault.victims)
            link.stall() if fault.kind is Kind.STALL else link.cut()
            await asyncio.sleep(fault.lasts_s)
            link.heal()

    async def _return(self, happened: Happened, since: float) -> None:
        happened.back_s = await self._cluster.back_s(happened.fault.victims[0], since, BACK_S)

    def account(self) -> None:
        """What the logs and later faults tell of what has happened so far."""
        report, watch = self._report, self._cluster.watch
        report.seconds = time.monotonic() - self._began
        report.exchanges = [e for e in self._load.exchanges if e.ended is not None]
        report.exits = self._cluster.exits
        report.generations = len(watch.matching(GENERATION))
        report.handed_off = len(watch.matching(HANDED_OFF))
        report.recovered = len(watch.matching(RECOVERED))
        report.moved_on = len(watch.matching(MOVED_ON))
        report.trouble = watch.matching(TROUBLE)
        for i, happened in enumerate(report.happened):
            later = report.happened[i + 1 :]
            happened.noticed_s = watch.noticed_s(happened.fault, happened.at, noticeable_s(happened, later))
            next_s = later[0].at - happened.at if later else GOES_ON_S
            unaware_s = happened.noticed_s or 0.0  # until then it may be asked to do something
            there = [
                e for e in report.exchanges if e.began < happened.at + unaware_s and happened.at < (e.ended or 0.0)
            ]
            waits = [e.silence_after(happened.at, min(GOES_ON_S, next_s)) for e in there]
            happened.went_on_s = max(waits, default=0.0)
            happened.cut_short = bool(later) and happened.went_on_s > next_s


def noticeable_s(happened: Happened, later: Sequence[Happened]) -> float:
    """How long after its begin a fault can be noticed: until it is over, or the next one of its victims begins."""
    over = happened.at + LATEST_S if happened.fault.kind is Kind.KILL else happened.until + AFTERWARDS_S
    next_at = (h.at for h in later if set(h.fault.victims) & set(happened.fault.victims))
    return min(over, next(next_at, over)) - happened.at
