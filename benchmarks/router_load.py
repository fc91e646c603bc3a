"""What the router itself costs: added time to the first token, CPU per token and per answer, memory, start-up.

    python -m benchmarks.router_load [--measures ttft,paced,whole,streams,memory,start] [--processes N]
        [--beside nginx,haproxy,sglang-router,vllm-router,production-stack --peer-python PYTHON]

Load and simulated workers share core 0, the router has core 1 (all others with `--processes`). Workers answer at once, so the
whole time to the first token is added by the router, but for what the simulated worker itself needs (hashes, cache events; told
beside it) and what this client needs to see it (`nginx` beside it shows how much).
CPU is that of the router's processes, from /proc. The peers pass text through; tokenising and detokenising is the engine's
work there, so its time is named apart.
"""

import argparse
import asyncio
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.router_client import Answer, Connection, Prompts, connect, percentile
from benchmarks.router_peers import Peer
from benchmarks.router_sim import Pacing, Script, SimWorker
from services.router.text.tokenizer import ModelText, load_model_text
from twinflow.contracts.hashing import TOKEN_BYTES

MODEL = Path(__file__).parent.parent / "models" / "twinflow-tiny"
SHORT_CHARS = 800
MEASURES = ("start", "ttft", "paced", "whole", "streams", "memory")
READY = re.compile(r"http://([\d.]+:\d+)/v1, workers register at ([\d.]+:\d+)")


@dataclass(frozen=True, slots=True)
class Target:
    """A router under load. `pace` changes how the workers behind it speak; `own_s` takes what they needed themselves for each
    request since the last call, where they say so."""

    name: str
    address: str
    pid: int
    pace: Callable[[Pacing], None]
    tokenises: bool = False
    own_s: Callable[[], list[float]] = list


# ---- processes ----


def family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in family(int(child)))]


def cpu_s(pid: int) -> float:
    """Of a process and its children."""
    total = 0
    for p in family(pid):
        fields = Path(f"/proc/{p}/stat").read_text().rsplit(") ", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class RouterProcess:
    """Ours, started as an operator would; `addresses` are HTTP and gRPC. `stop` in the end."""

    def __init__(self, processes: int, cores: Sequence[int], *options: str) -> None:
        argv = [
            sys.executable,
            "-m",
            "services.router.main",
            "--model",
            str(MODEL),
            "--http-port",
            "0",
            "--grpc-port",
            "0",
        ]
        argv += ["--max-requests", "4096", "--log-level", "WARNING", *options]
        argv += ["--processes", str(processes)] if processes > 1 else []
        began = time.monotonic()
        self._process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *argv], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        found = READY.search(self._process.stdout.readline())
        if found is None:
            raise RuntimeError("the router did not start")
        self.start_s = time.monotonic() - began
        self.pid = self._process.pid
        self.http, self.grpc = found[1], found[2]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@asynccontextmanager
async def ours(text: ModelText, processes: int, *options: str) -> AsyncIterator[Target]:
    cores = sorted(os.sched_getaffinity(0))
    router = RouterProcess(processes, cores[1:] or cores, *options)
    script = Script(text.texts.tokenizer)
    workers = [SimWorker(f"d{i}", MODEL.name, script, Pacing()) for i in range(2)]
    with pinned(cores[0]):
        try:
            for worker in workers:
                await worker.start(router.grpc)
            while not all(w.connected for w in workers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

            def pace(pacing: Pacing) -> None:
                for worker in workers:
                    worker.pacing = pacing

            def own_s() -> list[float]:
                taken = [seconds for worker in workers for seconds in worker.own_s]
                for worker in workers:
                    worker.own_s.clear()
                return taken

            name = "twinflow" if processes == 1 else f"twinflow × {processes}"
            yield Target(name, router.http, router.pid, pace, tokenises=True, own_s=own_s)
        finally:
            for worker in workers:
                await worker.stop()
            router.stop()


@asynccontextmanager
async def peer(name: str, python: str) -> AsyncIterator[Target]:
    cores = sorted(os.sched_getaffinity(0))
    found = await asyncio.to_thread(Peer, name, python, cores[0], cores[-1])
    with pinned(cores[0]):
        try:
            yield Target(name, found.address, found.pid, lambda pacing: None)
        finally:
            await asyncio.to_thread(found.stop)


class pinned:
    """This process on one core."""

    def __init__(self, core: int) -> None:
        self._core = core

    def __enter__(self) -> None:
        self._before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._before)


# ---- load ----


async def open_loop(
    target: Target, prompts: Prompts, rate: float, seconds: float, tokens: int, ids: bool = False
) -> list[Answer]:
    """Poisson arrivals on as many connections as it takes."""
    gaps, idle = random.Random(3), [await connect(target.address) for _ in range(64)]
    make = prompts.request_of_ids if ids else prompts.request
    requests = []
    for _ in range(int(rate * seconds)):
        requests.append(make(tokens, delay_ms=10))
        await asyncio.sleep(0)  # the workers here have heartbeats to send

    async def one(request: bytes) -> Answer:
        connection = idle.pop() if idle else await connect(target.address)
        answer = await connection.ask(request)
        if connection.open:
            idle.append(connection)
        return answer

    tasks, due = [], time.perf_counter()
    for request in requests:
        due += gaps.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(request)))
    answers = list(await asyncio.gather(*tasks))
    leave(idle)
    return answers


async def closed_loop(
    target: Target, prompts: Prompts, streams: int, tokens: int, count: int, stream: bool = True, delay_ms: int = 10
) -> list[Answer]:
    """`count` requests, `streams` at a time."""
    left, answers = iter(range(count)), list[Answer]()

    async def one() -> None:
        connection = await connect(target.address)
        for _ in left:
            answers.append(await connection.ask(prompts.request(tokens, stream, delay_ms)))
            if not connection.open:
                connection = await connect(target.address)
        leave([connection])

    await asyncio.gather(*(one() for _ in range(streams)))
    return answers


def leave(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.leave()


def failed(answers: Sequence[Answer]) -> str:
    bad = [a for a in answers if not a.ok]
    return f"  {len(bad)} FAILED (status {bad[0].status})" if bad else ""


# ---- measures ----


async def ttft(target: Target, chars: int, what: str, rate: float, seconds: float) -> None:
    """Prompts of token ids are tokenised already: they show what is not tokenising."""
    target.pace(Pacing(step_s=0.01))
    target.own_s()
    used = cpu_s(target.pid)
    answers = await open_loop(target, Prompts(MODEL.name, chars), rate, seconds, 8, ids=what.endswith("ids"))
    used = cpu_s(target.pid) - used
    times, own = [1e3 * a.ttft_s for a in answers if a.ok], [1e3 * s for s in target.own_s()]
    worker = f" ({percentile(own, 0.5):.2f} / {percentile(own, 0.99):.2f} ms in the worker)" if own else ""
    told = f"p50 {percentile(times, 0.5):6.2f} ms  p99 {percentile(times, 0.99):6.2f} ms{worker}"
    told += f"  CPU {1e3 * used / len(answers):.2f} ms a request"
    line(target, f"TTFT at {rate:g}/s, {what}", told + failed(answers))


async def paced(target: Target, rounds: int) -> None:
    target.pace(Pacing(step_s=0.01))
    prompts, used, began = Prompts(MODEL.name, SHORT_CHARS), cpu_s(target.pid), time.perf_counter()
    answers = await closed_loop(target, prompts, 200, 100, 200 * rounds)
    took, used = time.perf_counter() - began, cpu_s(target.pid) - used
    tokens = 100 * len(answers)
    line(target, "200 streams, 10 ms a token", f"CPU {1e6 * used / tokens:5.1f} µs a token  {tokens / took:7.0f} tokens/s"
         + chunks(answers, 100) + failed(answers))  # fmt: skip


async def whole(target: Target, count: int) -> None:
    target.pace(Pacing(step_s=0.01))
    used = cpu_s(target.pid)
    answers = await closed_loop(target, Prompts(MODEL.name, SHORT_CHARS), 32, 8, count, stream=False)
    used = cpu_s(target.pid) - used
    line(target, "whole answers of 8 tokens", f"CPU {1e3 * used / count:.2f} s per 1,000" + failed(answers))


async def streams(target: Target, step_s: float, rounds: int) -> None:
    """256 streams of 256 tokens, all workers at this pace."""
    target.pace(Pacing(step_s=step_s))
    prompts, used, began = Prompts(MODEL.name, SHORT_CHARS), cpu_s(target.pid), time.perf_counter()
    answers = await closed_loop(target, prompts, 256, 256, 256 * rounds, delay_ms=max(1, round(1e3 * step_s)))
    took, used = time.perf_counter() - began, cpu_s(target.pid) - used
    gaps = [1e3 * g for a in answers for g in a.gaps_s]
    over = percentile(gaps, 0.99) - 1e3 * step_s
    told = f"{256 * len(answers) / took:7.0f} tokens/s  p99 gap + {over:.1f} ms"
    told += f"  CPU {1e6 * used / 256 / len(answers):.1f} µs a token"
    line(target, f"256 streams, {1e3 * step_s:.1f} ms a token", told + chunks(answers, 256) + failed(answers))


def chunks(answers: Sequence[Answer], tokens: int) -> str:
    """The last events are the finish and [DONE]."""
    events = statistics.fmean(a.events for a in answers)
    return f"  {tokens / max(1.0, events - 1):.2f} tokens a chunk"


async def memory(target: Target, count: int, chars: int) -> None:
    """Distinct prompts, whole answers of two tokens."""
    target.pace(Pacing(step_s=0.002))
    prompts = Prompts(MODEL.name, chars)
    marks, bad, used, began = [memory_mib(target.pid)], "", cpu_s(target.pid), time.perf_counter()
    for _ in range(8):
        answers = await closed_loop(target, prompts, 32, 2, count // 8, stream=False, delay_ms=1)
        bad = bad or failed(answers)
        marks.append(memory_mib(target.pid))
    took, used = time.perf_counter() - began, cpu_s(target.pid) - used
    slope = 1e3 * (marks[8] - marks[4]) / (count / 2)
    told = " ".join(f"{m:.0f}" for m in marks)
    told = f"of {chars} characters: {told} MiB, in the second half {slope:+.3f} MiB per 1,000; "
    told += f"CPU {1e3 * used / count:.2f} s per 1,000, {took:.0f} s" + bad
    line(target, f"memory over {count:,} prompts", told)


def start(cores: Sequence[int]) -> None:
    times = []
    for _ in range(3):
        router = RouterProcess(1, cores[1:] or cores)
        times.append(router.start_s)
        router.stop()
    told = "import sys, services.router.main; print(len(sys.modules), sorted({'torch', 'nixl'} & set(sys.modules)))"
    modules = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.strip()
    print(
        f"{'twinflow':<18}{'start until ready':<30}{statistics.median(times):.2f} s; modules, of them heavy: {modules}"
    )


async def tokenising(text: ModelText, chars: int) -> str:
    prompts = [Prompts(MODEL.name, chars, seed=i).text() for i in range(21)]
    lengths, times = [], []
    for prompt in prompts:
        began = time.thread_time()
        lengths.append(len(await text.encode(prompt, add_special_tokens=False)) // TOKEN_BYTES)
        times.append(time.thread_time() - began)
    return f"{statistics.fmean(lengths):.0f} tokens, {1e3 * statistics.median(times):.2f} ms to tokenise"


def line(target: Target, what: str, told: str) -> None:
    print(f"{target.name:<18}{what:<30}{told}", flush=True)


async def measure(target: Target, names: Sequence[str], long_chars: int, args: argparse.Namespace) -> None:
    await closed_loop(target, Prompts(MODEL.name, SHORT_CHARS), 8, 4, 300)  # warm
    if "ttft" in names:
        await ttft(target, SHORT_CHARS, "short", 100, args.seconds)
        await ttft(target, long_chars, "8k tokens", args.long_rate, args.seconds)
        if target.tokenises:
            await ttft(target, SHORT_CHARS, "short, as token ids", 100, args.seconds)
            await ttft(target, long_chars, "8k token ids", 100, args.seconds)
    if "paced" in names:
        await paced(target, args.rounds)
    if "whole" in names:
        await whole(target, 1000 * args.rounds)
    if "streams" in names:
        await streams(target, 0.0125, args.rounds)
        await streams(target, 0.005, args.rounds)
    if "memory" in names:
        await memory(target, args.prompts, long_chars if args.prompts <= 50_000 else SHORT_CHARS)


def long_prompt_chars(text: ModelText, tokens: int = 8_000) -> int:
    sample = Prompts(MODEL.name, 40_000).text()
    return round(tokens * 40_000 / len(text.encode_now(sample, add_special_tokens=False)))


async def run(args: argparse.Namespace) -> None:
    names, text = args.measures.split(","), load_model_text(MODEL)
    chars = long_prompt_chars(text)
    print(f"the machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    long, short = await tokenising(text, chars), await tokenising(text, SHORT_CHARS)
    print(f"8k prompts have {chars} characters: {long}; short ones: {short}")
    if "start" in names:
        start(sorted(os.sched_getaffinity(0)))
    async with ours(text, args.processes) as target:
        await measure(target, names, chars, args)
    for name in filter(None, args.beside.split(",")):
        async with peer(name, args.peer_python) as target:
            await measure(target, [n for n in names if n != "start"], chars, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measures", default="start,ttft,paced,whole,streams", help="of " + ",".join(MEASURES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--beside", default="", help="peers, comma-separated")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=5.0, help="of an open loop")
    parser.add_argument("--long-rate", type=float, default=20.0, help="prompts of 8k tokens as text a second: tokenising them "
                        "takes about 10 ms of a core each")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="of a closed loop")
    parser.add_argument(
        "--prompts", type=int, default=4_000, help="distinct ones for memory; over 50,000 they are short"
    )
    args = parser.parse_args()
    unknown = set(args.measures.split(",")) - set(MEASURES)
    if unknown:
        parser.error(f"unknown measures {sorted(unknown)}")
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
