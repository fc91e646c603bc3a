"""Loads of prompts through a running cluster's router: what a client of a prefill and a decode worker sees.

    twinflow up --model FOLDER --set prefill:engine.device=cuda:0 --set decode:engine.device=cuda:1 ... &
    python -m benchmarks.pd_load --address 127.0.0.1:8000 --model NAME [--rows NAMES] [--json FILE]
    python -m benchmarks.pd_load --address DECODE --vllm-prefill PREFILL --model NAME       the same through two vLLM servers

Prompts are random token ids; replies have a fixed length. Rows:

    one-N         four prompts of N tokens, one at a time, 64 tokens each
    shared-48     256 prompts on 2 shared prefixes of 16,384 tokens with 1,024 of their own, 256 tokens each, 48 at once
    shared-256    the same, all at once
    own           192 prompts of 4,096 tokens that share nothing, 256 tokens each, 64 at once

TTFT = from the request until the first token is read; TPOT = from the first to the last token, by token. Every answer must be
whole: an error or a short reply ends the run. A row's prompts are the same in every run, and no two rows share any.

vLLM's servers (NixlConnector) are asked as its own proxy asks them: one token of the prefill server, then the decode server with
what that said about where the blocks lie. The time of both counts.
"""

import argparse
import asyncio
import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from benchmarks.router_client import Answer, Connection, connect, http_post, percentile


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


@dataclass(frozen=True, slots=True)
class Target:
    address: str  # of a router, or of vLLM's decode server
    model: str
    vocabulary: int
    vllm_prefill: str | None = None

    def client(self) -> "Client":
        return VllmClient(self.vllm_prefill, self.address) if self.vllm_prefill else Client(self.address)


def prompts(load: Load, seed: int, vocabulary: int) -> list[list[int]]:
    rnd = random.Random(seed)

    def ids(count: int) -> list[int]:
        return rnd.choices(range(10, vocabulary), k=count)

    prefixes = [ids(load.prefix_tokens) for _ in range(load.prefixes)]
    return [prefixes[i % load.prefixes] + ids(load.own_tokens) for i in range(load.requests)]


TO_BE_MOVED: dict[str, object] = {
    "do_remote_decode": True, "do_remote_prefill": False,
    "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class Client:
    """Asks a router, one request at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._open: dict[str, Connection] = {}

    async def ask(self, prompt: bytes, fields: dict[str, object]) -> Answer:
        """`prompt`: its ids as JSON; `fields`: the rest of the request."""
        return await self._send(self._address, prompt, fields)

    async def _send(self, address: str, prompt: bytes, fields: dict[str, object], headers: str = "") -> Answer:
        if address not in self._open or not self._open[address].open:
            self._open[address] = await connect(address, keep=True)
        data = json.dumps(fields).encode()[:-1] + b', "prompt": ' + prompt + b"}"
        return await self._open[address].ask(http_post("/v1/completions", data, headers))

    def leave(self) -> None:
        for connection in self._open.values():
            connection.leave()


class VllmClient(Client):
    """Asks vLLM's prefill server, then its decode server."""

    def __init__(self, prefill: str, decode: str) -> None:
        super().__init__(decode)
        self._prefill = prefill

    async def ask(self, prompt: bytes, fields: dict[str, object]) -> Answer:
        headers = f"x-request-id: {uuid.uuid4()}\r\n"
        alone = {k: v for k, v in fields.items() if k != "stream_options"}
        alone |= {"max_tokens": 1, "stream": False, "kv_transfer_params": TO_BE_MOVED}
        first = await self._send(self._prefill, prompt, alone, headers)
        where = first.parsed()[0].get("kv_transfer_params") if first.ok else None
        if not where:
            first.complete = False
            return first
        answer = await self._send(self._address, prompt, fields | {"kv_transfer_params": where}, headers)
        answer.sent_at = first.sent_at
        return answer


async def run(load: Load, target: Target, seed: int) -> list[Answer]:
    """Answers in the order in which they ended."""
    bodies = [json.dumps(ids).encode() for ids in prompts(load, seed, target.vocabulary)]
    bodies.reverse()  # taken from the end
    fields: dict[str, object] = {
        "model": target.model, "max_tokens": load.reply_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    answers: list[Answer] = []

    async def ask_in_turn() -> None:
        client = target.client()
        try:
            while bodies:
                answers.append(await client.ask(bodies.pop(), fields))
        finally:
            client.leave()

    await asyncio.gather(*(ask_in_turn() for _ in range(load.at_once)))
    for answer in answers:
        check(answer, load.reply_tokens)
    return answers


def outcome(row: str, load: Load, answers: list[Answer]) -> Outcome:
    duration_s = max(a.ended_at for a in answers) - min(a.sent_at for a in answers)
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
    target = Target(args.address, args.model, args.vocabulary, args.vllm_prefill)
    for i, load in enumerate(() if args.cold else WARM):
        await run(load, target, 1000 + i)
    for row in args.rows:
        load = LOADS[row]
        outcomes.append(outcome(row, load, await run(load, target, list(LOADS).index(row))))
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
    parser.add_argument(
        "--vllm-prefill", metavar="ADDRESS", help="of vLLM's prefill server; --address is its decode server"
    )
    parser.add_argument("--model", required=True, help="as it is served")
    parser.add_argument("--rows", type=names, default=list(LOADS), help="comma-separated (default: all)")
    parser.add_argument("--vocabulary", type=int, default=150_000, help="ids are below it")
    parser.add_argument("--cold", action="store_true", help="without the requests that warm the cluster up")
    parser.add_argument("--json", type=Path)
    asyncio.run(run_all(parser.parse_args()))


if __name__ == "__main__":
    main()
