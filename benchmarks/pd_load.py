"""Loads of prompts through a running cluster's router: what a client of a prefill and a decode worker sees.

    twinflow up --model FOLDER --set prefill:engine.device=cuda:0 --set decode:engine.device=cuda:1 ... &
    python -m benchmarks.pd_load --address 127.0.0.1:8000 --model NAME [--rows NAMES] [--json FILE]

Prompts are random token ids; replies have a fixed length. Rows:

    one-N         four prompts of N tokens, one at a time, 64 tokens each
    shared-48     256 prompts on 2 shared prefixes of 16,384 tokens with 1,024 of their own, 256 tokens each, 48 at once
    shared-256    the same, all at once
    own           192 prompts of 4,096 tokens that share nothing, 256 tokens each, 64 at once

TTFT = from the request until the first token is read; TPOT = from the first to the last token, by token. Every answer must be
whole: an error or a short reply ends the run.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from benchmarks.router_client import Answer, connect, http_request, percentile


@dataclass(frozen=True, slots=True)
class Load:
    prefixes: int
    prefix_tokens: int
    own_tokens: int
    requests: int
    at_once: int
    reply_tokens: int


LOADS = {
    "one-1024": Load(1, 0, 1024, 4, 1, 64),
    "one-4096": Load(1, 0, 4096, 4, 1, 64),
    "one-16384": Load(1, 0, 16384, 4, 1, 64),
    "shared-48": Load(2, 16384, 1024, 256, 48, 256),
    "shared-256": Load(2, 16384, 1024, 256, 256, 256),
    "own": Load(1, 0, 4096, 192, 64, 256),
}
WARM = (Load(1, 512, 64, 2, 1, 8), Load(2, 16384, 1024, 2, 2, 4), Load(1, 0, 2048, 64, 64, 64))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds."""

    row: str
    duration_s: float
    tokens_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float

    def line(self) -> str:
        return (
            f"{self.row:<11} {self.duration_s:7.2f} s  {self.tokens_per_s:8,.0f} tok/s  TTFT mean {1e3 * self.ttft_mean_s:7.0f} "
            f"p50 {1e3 * self.ttft_p50_s:7.0f} p99 {1e3 * self.ttft_p99_s:7.0f} ms  TPOT mean {1e3 * self.tpot_mean_s:6.2f} "
            f"p99 {1e3 * self.tpot_p99_s:6.2f} ms"
        )


def prompts(load: Load, seed: int, vocabulary: int) -> list[list[int]]:
    rnd = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rnd.randrange(10, vocabulary) for _ in range(count)]

    prefixes = [ids(load.prefix_tokens) for _ in range(load.prefixes)]
    return [prefixes[i % load.prefixes] + ids(load.own_tokens) for i in range(load.requests)]


async def run(row: str, load: Load, address: str, model: str, seed: int, vocabulary: int) -> Outcome:
    bodies = [
        http_request(
            "/v1/completions",
            {"model": model, "prompt": ids, "max_tokens": load.reply_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
             "stream_options": {"include_usage": True}},
        )
        for ids in prompts(load, seed, vocabulary)
    ]  # fmt: skip
    bodies.reverse()  # taken from the end
    answers: list[Answer] = []

    async def client() -> None:
        connection = await connect(address, keep=True)
        while bodies:
            answers.append(await connection.ask(bodies.pop()))
        connection.leave()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.at_once)))
    duration_s = time.perf_counter() - began
    for answer in answers:
        check(answer, load.reply_tokens)
    ttft = [a.ttft_s for a in answers]
    tpot = [(a.ended_at - a.reads[0]) / (load.reply_tokens - 1) for a in answers]
    return Outcome(
        row,
        duration_s,
        load.requests * load.reply_tokens / duration_s,
        mean(ttft),
        percentile(ttft, 0.5),
        percentile(ttft, 0.99),
        mean(tpot),
        percentile(tpot, 0.99),
    )


def check(answer: Answer, reply_tokens: int) -> None:
    """Raises SystemExit unless it is whole."""
    if not answer.ok:
        raise SystemExit(f"an answer with status {answer.status} broke off: {bytes(answer.body or b'')[-300:]!r}")
    last = answer.parsed()[-1]
    usage = last.get("usage")
    if not isinstance(usage, dict) or usage.get("completion_tokens") != reply_tokens:
        raise SystemExit(f"an answer of {reply_tokens} tokens ended with {last}")


async def run_all(args: argparse.Namespace) -> None:
    outcomes = []
    for i, load in enumerate(() if args.cold else WARM):
        await run("warm", load, args.address, args.model, 1000 + i, args.vocabulary)
    for i, row in enumerate(args.rows):
        outcomes.append(await run(row, LOADS[row], args.address, args.model, i, args.vocabulary))
        print(outcomes[-1].line(), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")


def names(text: str) -> Sequence[str]:
    rows = text.split(",")
    unknown = [r for r in rows if r not in LOADS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such row; there are {', '.join(LOADS)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:8000", help="of the router's HTTP")
    parser.add_argument("--model", required=True, help="as the router serves it")
    parser.add_argument("--rows", type=names, default=list(LOADS), help="comma-separated (default: all)")
    parser.add_argument("--vocabulary", type=int, default=150_000, help="ids are below it")
    parser.add_argument("--cold", action="store_true", help="without the requests that warm the cluster up")
    parser.add_argument("--json", type=Path)
    asyncio.run(run_all(parser.parse_args()))


if __name__ == "__main__":
    main()
