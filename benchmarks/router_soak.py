"""Many streams for a long time, with clients that leave, clients that read slowly, and workers that die: is every answer right?

    python -m benchmarks.router_soak [--streams 2000] [--seconds 300] [--kill-every 60] [--processes N]

What a reply must say is a function of its prompt (`router_sim.Script`), so every whole answer is compared token by token, those
of slow clients and those that moved to another worker included. In the end nothing may be left: no request at a worker, none at
the router, no connection. Nor may memory grow by more than `--grows` with the answers of the second half; what an answer leaves
behind shows there, the filling of caches and of the index before. A short form of this is in the tests.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import uvloop

from benchmarks.router_client import Answer, Connection, connect, http_request, percentile
from benchmarks.router_load import MODEL, RouterProcess, memory_mib
from benchmarks.router_sim import Pacing, Script, SimWorker
from services.router.text.tokenizer import load_model_text
from twinflow.contracts.hashing import pack_tokens

SLOW_BYTES = 4096  # of the socket's buffer of a client that reads slowly


@dataclass(frozen=True, slots=True)
class Plan:
    """`leave`, `slow`: shares of all requests. Tokens and pauses are drawn evenly from their ranges."""

    streams: int = 2000
    seconds: float = 300.0
    ramp_s: float = 30.0  # in which clients come
    leave: float = 0.05
    slow: float = 0.02
    kill_every_s: float = 60.0
    kills: int = 1_000_000  # no more than these
    tokens: tuple[int, int] = (20, 200)
    prompt_tokens: tuple[int, int] = (8, 300)
    pause_s: tuple[float, float] = (0.5, 5.0)  # in which a slow client reads nothing, in the middle of its answer
    stuck_s: float = 60.0  # without any byte


@dataclass(slots=True)
class Tally:
    ended: Counter[str] = field(default_factory=Counter)  # whole, left, slow
    wrong: list[str] = field(default_factory=list)  # anything that should not be, in words
    gaps_s: list[float] = field(default_factory=list)  # the longest of each whole answer of a client that reads
    kills: int = 0


class Fleet:
    """The simulated workers; `kill` replaces one by a new incarnation."""

    def __init__(self, router: str, script: Script, pacing: Pacing, count: int, model: str = MODEL.name) -> None:
        self._router = router
        self._make = lambda i, n: SimWorker(f"d{i}", model, script, pacing, incarnation=str(n))
        self.workers = [self._make(i, 0) for i in range(count)]
        self._made = 0
        self.script = script

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start(self._router)

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop()

    @property
    def running(self) -> int:
        return sum(worker.running for worker in self.workers)

    @property
    def connected(self) -> bool:
        """All of them have a session."""
        return all(worker.connected for worker in self.workers)

    async def kill(self, i: int) -> None:
        """In the middle of everything."""
        await self.workers[i].stop()
        self._made += 1
        self.workers[i] = self._make(i, self._made)
        await self.workers[i].start(self._router)


class Soak:
    def __init__(self, plan: Plan, address: str, script: Script, fleet: Fleet, model: str = MODEL.name) -> None:
        self.tally = Tally()
        self._plan = plan
        self._address = address
        self._script = script
        self._fleet = fleet
        self._model = model
        self._random = random.Random(11)
        self._count = 0

    async def run(self) -> Tally:
        """Returns after the plan's time and the end of what runs then."""
        ends = time.monotonic() + self._plan.seconds
        killing = asyncio.create_task(self._kill())
        try:
            await asyncio.gather(*(self._client(ends, i) for i in range(self._plan.streams)))
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        if killing.done() and not killing.cancelled() and killing.exception() is not None:
            self.tally.wrong.append(f"killing workers failed: {killing.exception()!r}")
        return self.tally

    async def _kill(self) -> None:
        while self.tally.kills < self._plan.kills:
            await asyncio.sleep(self._plan.kill_every_s)
            while not self._fleet.connected:  # noqa: ASYNC110 - one at a time, so that there is somebody to go on
                await asyncio.sleep(0.05)
            await self._fleet.kill(self.tally.kills % len(self._fleet.workers))
            self.tally.kills += 1

    async def _client(self, ends: float, number: int) -> None:
        await asyncio.sleep(self._plan.ramp_s * number / self._plan.streams)
        connection: Connection | None = None
        while time.monotonic() < ends:
            kind = self._random.random()
            slow = self._plan.leave <= kind < self._plan.leave + self._plan.slow
            if connection is None or not connection.open or slow:
                if connection is not None:
                    connection.leave()
                connection = await connect(self._address, keep=True, receive_bytes=SLOW_BYTES if slow else None)
            ok = await self._request(connection, "left" if kind < self._plan.leave else "slow" if slow else "whole")
            if slow:
                connection.leave()
            if not ok:  # no flood of what fails at once
                await asyncio.sleep(1.0)
        if connection is not None:
            connection.leave()

    async def _request(self, connection: Connection, kind: str) -> bool:
        draw, plan = self._random, self._plan
        self._count += 1
        tokens = draw.randint(*plan.tokens)
        ids = [draw.randrange(300, 4000) for _ in range(draw.randint(*plan.prompt_tokens))]
        body = {"model": self._model, "prompt": ids, "max_tokens": tokens, "stream": True, "temperature": 0}
        what = f"request {self._count} ({kind}, {len(ids)} + {tokens} tokens)"
        asked = asyncio.ensure_future(connection.ask(http_request("/v1/completions", body)))
        if kind == "left":
            await asyncio.wait({asked}, timeout=draw.uniform(0.0, 2.0))
            connection.leave()
        elif kind == "slow":
            await asyncio.wait({asked}, timeout=draw.uniform(0.0, 1.0))
            connection.pause(True)
            await asyncio.sleep(draw.uniform(*plan.pause_s))
            connection.pause(False)
        answer = await self._unless_stuck(asked, connection)
        if answer is None:
            self.tally.wrong.append(f"{what} is stuck")
        elif kind != "left":
            self._check(answer, what, self._script.text(pack_tokens(ids), tokens), kind)
        self.tally.ended[kind] += 1
        return answer is not None and (answer.ok or kind == "left")

    async def _unless_stuck(self, asked: "asyncio.Future[Answer]", connection: Connection) -> Answer | None:
        last_s = time.perf_counter()
        while not asked.done():
            await asyncio.wait({asked}, timeout=max(0.1, last_s + self._plan.stuck_s - time.perf_counter()))
            if connection.answer is not None and connection.answer.reads:
                last_s = max(last_s, connection.answer.reads[-1])
            if not asked.done() and time.perf_counter() > last_s + self._plan.stuck_s:
                connection.leave()
                await asked
                return None
        return asked.result()

    def _check(self, answer: Answer, what: str, expected: str, kind: str) -> None:
        if not answer.ok:
            self.tally.wrong.append(f"{what}: status {answer.status}, complete {answer.complete}: {answer.body!r:.300}")
            return
        try:
            text = answer.text()
        except ValueError as e:
            self.tally.wrong.append(f"{what}: {e}")
            return
        if text != expected:
            same = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), len(text))
            told = f"{text[same : same + 30]!r} instead of {expected[same : same + 30]!r}"
            self.tally.wrong.append(f"{what}: from character {same} of {len(expected)} on: {told}")
        if kind == "whole":
            self.tally.gaps_s.append(max(answer.gaps_s, default=0.0))


# ---- on its own ----


def growth(samples: Sequence[tuple[int, float]]) -> float:
    """MiB per 1,000 answers in the second half of (answers, MiB): between the means of its two halves."""
    quarter = max(1, len(samples) // 4)
    third, last = samples[-2 * quarter : -quarter] or samples[:1], samples[-quarter:]
    answers = fmean(n for n, _ in last) - fmean(n for n, _ in third)
    return 1000 * (fmean(m for _, m in last) - fmean(m for _, m in third)) / answers if answers else 0.0


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def run(args: argparse.Namespace) -> int:
    plan = Plan(
        args.streams, args.seconds, ramp_s=args.ramp, kill_every_s=args.kill_every, tokens=(20, args.max_tokens)
    )
    router = RouterProcess(args.processes, sorted(os.sched_getaffinity(0)))
    script = Script(load_model_text(MODEL).texts.tokenizer)
    fleet = Fleet(router.grpc, script, Pacing(step_s=args.step_s, first_at_once=False), args.workers)
    try:
        await fleet.start()
        while not fleet.connected:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        before = open_files(router.pid)
        soak = Soak(plan, router.http, script, fleet)
        running, told = asyncio.create_task(soak.run()), 0
        samples: list[tuple[int, float]] = []  # answers, MiB
        while not running.done():
            await asyncio.wait({running}, timeout=10)
            t = soak.tally
            for wrong in t.wrong[told:10]:
                print("WRONG:", wrong, flush=True)
            told = len(t.wrong)
            samples.append((t.ended.total(), memory_mib(router.pid)))
            print(f"{dict(t.ended)}, {t.kills} kills, {len(t.wrong)} wrong, {samples[-1][1]:.0f} MiB", flush=True)
        tally = await running
        await asyncio.sleep(3)
        page = await connect(router.http, keep=True)
        metrics = bytes((await page.ask(b"GET /metrics HTTP/1.1\r\nhost: r\r\n\r\n")).body or b"").decode()
        page.leave()
        left = [line for line in metrics.splitlines() if line.startswith("twinflow_router_requests_in_flight ")]
        print(
            f"requests left: {fleet.running} at workers, at the router {left}; files {before} → {open_files(router.pid)}"
        )
        print(f"longest gap of an answer: p50 {percentile(tally.gaps_s, 0.5):.2f} s, p99 {percentile(tally.gaps_s, 0.99):.2f} s, "
              f"longest of all {max(tally.gaps_s, default=0):.2f} s")  # fmt: skip
        grows = growth(samples)
        print(f"memory: {grows:+.2f} MiB per 1,000 answers in the second half, at most {args.grows:g} allowed")
        return 1 if tally.wrong or fleet.running or grows > args.grows else 0
    finally:
        await fleet.stop()
        router.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--ramp", type=float, default=30.0, help="seconds in which the clients come")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.2, help="seconds between two tokens of a stream")
    parser.add_argument("--max-tokens", type=int, default=200, help="a reply survives two kills, so that many steps should take "
                        "less than three times as long as between two")  # fmt: skip
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--grows", type=float, default=1.0, help="MiB per 1,000 answers")
    return uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
