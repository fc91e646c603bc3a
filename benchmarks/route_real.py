"""One point of `twinflow bench route` on real workers: does the simulation say of a policy what a cluster then does?

    python -m benchmarks.route_real --trace FILE [--policies cost,round_robin] [--sessions N] [--turns N]
    python -m benchmarks.route_real --trace FILE --address 127.0.0.1:8000 --model NAME --config FOLDER/config.json ...

Two prefill and two decode workers of the shipped model on this machine's CPU, over NIXL, behind the real HTTP router, are asked
what sessions of a trace ask, with lengths divided by `--divide`; every reply is forced to the token that the next turn expects.
Then the same sessions run in the simulation, with the times of these workers: prompts of several lengths and replies, measured on
the idle cluster before. Processes share the cores of this machine, which the simulation knows nothing of, so what is compared is
the order of the policies and which tokens are hit, by group; beside it, what the router predicted and the workers then found.

With `--address` a cluster is asked that runs already, of any size and model; its policy is its own, and the simulation is told
what it is made of. Pause = the longest time between two tokens of a reply.
"""

import argparse
import http.client
import itertools
import json
import statistics
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from services.cli.cluster import Cluster
from services.cli.topology import ClusterSettings, plan, size, with_model_here
from services.router.bench.prompt import Run
from services.router.bench.replay import Replay, Setup, prepare
from services.router.bench.report import quantile, tpot_s, ttft_s
from services.router.bench.timing import Points, Timing
from services.router.bench.trace import Session, Turn, read_trace
from services.router.schedule.policies import policy_named
from twinflow.models.checkpoint import read_json
from twinflow.models.shape import describe_model

MODEL, VOCABULARY, FIRST_TOKEN = "models/twinflow-tiny", 4096, 64
LOCAL_MAX_TOKENS = 64
READY_S = 300.0
PROBES = (128, 512, 1024, 2048)  # tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request: seconds, and what the router told in the end."""

    ttft_s: float
    total_s: float
    pause_s: float
    reply_tokens: int
    told: dict[str, Any]

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / max(1, self.reply_tokens - 1)


def scaled(
    sessions: Sequence[Session], divide: int, turns: int, limit: int, vocabulary: int = VOCABULARY
) -> list[Session]:
    """Shorter sessions whose runs are ids of the model's vocabulary, each of them one."""
    ids: dict[int, int] = {}

    def token(id: int) -> int:
        made = ids.setdefault(id, FIRST_TOKEN + len(ids))
        if made >= vocabulary:
            raise SystemExit("too many different blocks for the vocabulary: fewer --sessions or --turns")
        return made

    made = []
    for session in sessions:
        kept, tokens = [], 0
        for turn in session.turns[:turns]:
            new = tuple(Run(token(r.token_id), max(1, r.tokens // divide)) for r in turn.new)
            reply = max(2, turn.reply_tokens // divide)
            tokens += sum(r.tokens for r in new) + reply
            if tokens > limit:
                break
            kept.append(Turn(new, reply, token(turn.reply_id), turn.delay_s))
        made.append(Session(session.start_s, tuple(kept)))
    return made


class Client:
    def __init__(self, base_url: str, model: str) -> None:
        url = urllib.parse.urlsplit(base_url)
        self._where, self._model = (url.hostname or "", url.port), model

    def ask(self, runs: Sequence[Run], reply: Run) -> Answer:
        """Raises RuntimeError on any error."""
        ids = "".join(f"{r.token_id}," * r.tokens for r in runs)  # as lists they would hold the other streams up
        body = {
            "model": self._model,
            "prompt": "IDS",
            "max_tokens": reply.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": {str(reply.token_id): 100},
            "stream": True,
        }
        encoded = json.dumps(body).replace('"IDS"', f"[{ids[:-1]}]")
        connection = http.client.HTTPConnection(*self._where, timeout=120)
        try:
            began_s = time.monotonic()
            connection.request("POST", "/v1/completions", encoded, {"x-twinflow-stats": "1"})
            response = connection.getresponse()
            at_s, told = [], b"{}"
            for line in response:
                if response.status != 200 or line.startswith(b'data: {"error"'):
                    raise RuntimeError(f"HTTP {response.status}: {line.decode()}")
                if line.startswith(b"data: {"):
                    at_s.append(time.monotonic() - began_s)
                    if b'"twinflow":' in line:
                        told = line.removeprefix(b"data: ")
            if not at_s:
                raise RuntimeError(f"HTTP {response.status} without a token")
            pause_s = max((b - a for a, b in itertools.pairwise(at_s)), default=0.0)
            return Answer(at_s[0], at_s[-1], pause_s, reply.tokens, json.loads(told)["twinflow"])
        finally:
            connection.close()


def measured(client: Client, probes: Sequence[int], vocabulary: int, link_bytes_per_s: float) -> Timing:
    """Prompts nobody has seen, one at a time, and replies of one stream and of four."""
    prefill: list[tuple[int, float]] = []
    fresh = iter(range(vocabulary - 1, 0, -1))
    for tokens in probes:
        times = [client.ask([Run(next(fresh), tokens)], Run(FIRST_TOKEN, 1)).ttft_s for _ in range(3)]
        prefill.append((tokens, statistics.median(times)))
    steps = []
    for streams in (1, 4):
        prompts = [[Run(next(fresh), 64)] for _ in range(streams)]
        with ThreadPoolExecutor(streams) as pool:
            answers = list(pool.map(lambda prompt: client.ask(prompt, Run(FIRST_TOKEN, 33)), prompts))
        steps.append((max(1, streams // 2), statistics.median(a.tpot_s for a in answers)))
    base: Points = ((0, prefill[0][1] / 2), *prefill)
    slope = max(0.0, steps[1][1] - steps[0][1])
    return Timing(
        prefill=base,
        step=((0, steps[0][1]), (1, steps[0][1]), (2, steps[0][1] + slope)),
        link_bytes_per_s=link_bytes_per_s,
    )


def drive(client: Client, sessions: Sequence[Session], starts_s: Sequence[float], stretch: float) -> list[Answer]:
    answers: list[Answer] = []
    began_s = time.monotonic()

    def live(number: int, session: Session) -> None:
        time.sleep(max(0.0, began_s + starts_s[number] - time.monotonic()))
        runs: list[Run] = []
        for k, turn in enumerate(session.turns):
            if k:
                time.sleep(turn.delay_s * stretch)
            runs += turn.new
            reply = Run(turn.reply_id, turn.reply_tokens)
            answers.append(client.ask(runs, reply))
            runs.append(reply)

    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(live, range(len(sessions)), sessions))
    return answers


def sized(setup: Setup, config: Path, dtype: str) -> Setup:
    """With the sizes of the model's own layout."""
    layout = describe_model(read_json(config), dtype=dtype).layout
    return replace(setup, token_bytes=layout.block_bytes // layout.block_tokens, slot_bytes=layout.slot_bytes)


def cluster_of(policy: str, setup: Setup, log_dir: Path) -> Cluster:
    settings = ClusterSettings(
        MODEL, prefill=setup.prefill, decode=setup.decode, port=0, dtype="float32", cache_bytes=setup.cache_bytes,
        extra=(("router", f"policy={policy}"), ("router", f"local-max-tokens={LOCAL_MAX_TOKENS}")),
    )  # fmt: skip
    return Cluster(plan(with_model_here(settings)), log_dir=log_dir)


@contextmanager
def asked_of(args: argparse.Namespace, policy: str, setup: Setup) -> Iterator[Client]:
    """The cluster that runs already, or one for this policy."""
    if args.address:
        yield Client(f"http://{args.address}", args.model)
        return
    with tempfile.TemporaryDirectory() as folder, cluster_of(policy, setup, Path(folder)) as cluster:
        cluster.start_all()
        cluster.wait_ready(READY_S)
        yield Client(cluster.base_url, Path(MODEL).name)


HEAD = (
    f"{'':<28}{'TTFT p50':>9}{'p90':>7}{'TPOT p90':>10}{'pause p50':>11}{'p90':>7}"
    f"{'P both':>9}{'D att.':>8}{'D both':>8}{'local':>7}"
)


def row(
    name: str, ttft: Sequence[float], tpot: Sequence[float], pauses: Sequence[float], told: Sequence[dict[str, Any]]
) -> str:
    """Milliseconds, and shares of the prompt tokens. The simulation does not know pauses."""
    tokens = sum(t["prompt_tokens"] for t in told)
    columns = ("prefill_resumed_tokens", "decode_attention_tokens", "decode_resumed_tokens")
    shares = [sum(t[c] for t in told) / tokens for c in columns]
    local = sum(t["route"] == "local" for t in told) / len(told)
    paused = [f"{1e3 * quantile(pauses, q):.1f}" if pauses else "" for q in (0.5, 0.9)]
    return (
        f"{name:<28}{1e3 * quantile(ttft, 0.5):9.0f}{1e3 * quantile(ttft, 0.9):7.0f}{1e3 * quantile(tpot, 0.9):10.1f}"
        f"{paused[0]:>11}{paused[1]:>7}{shares[0]:9.1%}{shares[1]:8.1%}{shares[2]:8.1%}{local:7.1%}"
    )


def errors(answers: Sequence[Answer]) -> str:
    """What the router said before, less what the workers found: a reply's last token may be held or not."""
    off = [abs(a.told["predicted"]["decode_attention_tokens"] - a.told["decode_attention_tokens"]) for a in answers]
    right = sum(tokens <= 1 for tokens in off) / len(off)
    return f"{right:.0%} of the predicted decode hits right to a token; off by {statistics.fmean(off):.0f} on average"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--trace", type=Path, required=True)
    add("--policies", default="cost,round_robin", help="of a cluster that runs already: its own, one")
    add("--sessions", type=int, default=16)
    add("--turns", type=int, default=5, help="of each session at most")
    add("--divide", type=int, default=48, help="lengths by this")
    add("--load", type=float, default=0.25, help="of all prefill workers, with all cores to themselves")
    add("--address", default="", help="HOST:PORT of a router that runs; then also:")
    add("--model", default="", help="name that it serves")
    add("--config", type=Path, default=Path(MODEL) / "config.json")
    add("--dtype", default="float32")
    add("--prefill", type=int, default=2)
    add("--decode", type=int, default=2)
    add("--cache-bytes", type=size, default=256 << 20)
    add("--slots", type=int, default=16)
    add("--local-max-tokens", type=int, default=LOCAL_MAX_TOKENS, help="of router and decode workers")
    add("--vocabulary", type=int, default=VOCABULARY)
    add("--longest", type=int, default=4000, help="tokens of a session at most")
    add("--probes", default=",".join(map(str, PROBES)), help="lengths of prompts whose times are measured")
    add("--link-gbytes-per-s", type=float, default=1.3)
    args = parser.parse_args()
    read = read_trace(args.trace)[: args.sessions]
    sessions = scaled(read, args.divide, args.turns, args.longest, args.vocabulary)
    made = Setup(
        prefill=args.prefill, decode=args.decode, cache_bytes=args.cache_bytes, block_tokens=64, decode_slots=args.slots,
        burst_s=1e9,
    )  # fmt: skip
    setup = sized(made, args.config, args.dtype)
    timing, starts_s, stretch = None, [0.0], 1.0
    for policy in args.policies.split(","):
        with asked_of(args, policy, setup) as client:
            if timing is None:  # of the first cluster, for all policies
                probes = [int(n) for n in args.probes.split(",")]
                timing = measured(client, probes, args.vocabulary, args.link_gbytes_per_s * 1e9)
                setup = replace(setup, timing=timing)
                workload = prepare(sessions, setup)
                span_s = workload.work_s / (args.load * setup.prefill)
                stretch = span_s / workload.span_s
                begins = [s.start_s for s in sessions]
                first_s, last_s = min(begins), max(begins)
                starts_s = [span_s * (s - first_s) / max(1e-9, last_s - first_s) for s in begins]  # as `Replay.run`
                print("prompt ms: " + ", ".join(f"{n} {1e3 * s:.0f}" for n, s in timing.prefill[1:]), end="; ")
                print("step ms: " + ", ".join(f"{n} {1e3 * s:.1f}" for n, s in timing.step[1:]))
                print(f"{len(sessions)} sessions, {sum(len(s.turns) for s in sessions)} requests in {span_s:.0f} s")
                print(HEAD, flush=True)
            answers = drive(client, sessions, starts_s, stretch)
            times = [[getattr(a, name) for a in answers] for name in ("ttft_s", "tpot_s", "pause_s")]
            print(row(f"{policy}, real", *times, [a.told for a in answers]), flush=True)
            print(f"{'':<28}{errors(answers)}")
        chosen = policy_named(policy, local_max_tokens=args.local_max_tokens)
        replay = Replay(workload, setup, chosen, args.load)
        replay.run()
        asked, stats = replay.asked, [asdict(a.stats) for a in replay.asked]
        print(
            row(f"{policy}, simulated", [ttft_s(a) for a in asked], [tpot_s(a) for a in asked], [], stats), flush=True
        )


if __name__ == "__main__":
    main()
