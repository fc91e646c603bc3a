"""The load's client against servers that only speak: what it asks, what it measures, what it does not let pass."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.pd_load import LOADS, Load, Target, outcome, prompts, run

LOAD = Load(prefixes=2, prefix_tokens=8, own_tokens=4, requests=6, at_once=3, reply_tokens=2)
WHERE = {"remote_engine_id": "p", "remote_block_ids": [[1, 2]]}


class Server:
    """Answers completions: with a stream of tokens, or, asked for blocks to be moved, with where they lie."""

    def __init__(self, wait_s: float = 0.0, short: bool = False, silent: bool = False) -> None:
        self.asked: list[tuple[str, dict]] = []  # request id, body
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._wait_s, self._short, self._silent = wait_s, short, silent

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            yield f"{host}:{port}"
        await asyncio.gather(*filter(None, self._tasks), return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        while head := await reader.read(65536):
            fields, _, rest = head.partition(b"\r\n\r\n")
            lines = dict(line.split(": ", 1) for line in fields.decode().split("\r\n")[1:])
            length = int(lines["content-length"])
            body = json.loads(rest + (await reader.readexactly(length - len(rest)) if len(rest) < length else b""))
            self.asked.append((lines.get("x-request-id", ""), body))
            await asyncio.sleep(self._wait_s)
            writer.write(self._stream(body) if body["stream"] else self._whole())
        writer.close()
        await writer.wait_closed()

    def _whole(self) -> bytes:
        data = json.dumps({"choices": [], "kv_transfer_params": None if self._silent else WHERE}).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)

    def _stream(self, body: dict) -> bytes:
        tokens = body["max_tokens"] - self._short
        events = [{"choices": [{"text": "t"}]}] * tokens + [{"choices": [], "usage": {"completion_tokens": tokens}}]
        parts = [f"data: {json.dumps(e)}\n\n".encode() for e in events] + [b"data: [DONE]\n\n", b""]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts)
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks


def test_rows_share_no_prompt_and_are_the_same_every_time() -> None:
    rows = {row: prompts(load, list(LOADS).index(row), 150_000) for row, load in LOADS.items()}
    assert rows["shared-48"] == prompts(LOADS["shared-48"], list(LOADS).index("shared-48"), 150_000)
    beginnings = [{tuple(p[:64]) for p in ps} for ps in rows.values()]
    assert sum(map(len, beginnings)) == len(set().union(*beginnings))
    assert [len(b) for b in beginnings] == [4, 4, 4, 2, 2, 192]


async def test_a_router_is_asked_once_for_each_prompt() -> None:
    router = Server()
    async with router.serve() as address:
        answers = await run(LOAD, Target(address, "m", 1000), seed=3)
    assert sorted(body["prompt"] for _, body in router.asked) == sorted(prompts(LOAD, 3, 1000))
    assert all("kv_transfer_params" not in body for _, body in router.asked)
    assert len(answers) == LOAD.requests and outcome("x", LOAD, answers).tokens_per_s > 0


async def test_two_servers_are_asked_one_after_the_other_and_the_time_of_both_counts() -> None:
    prefill, decode = Server(wait_s=0.05), Server(wait_s=0.03)
    async with prefill.serve() as p, decode.serve() as d:
        answers = await run(LOAD, Target(d, "m", 1000, vllm_prefill=p), seed=3)
    first, second = dict(prefill.asked), dict(decode.asked)
    assert len(first) == LOAD.requests and first.keys() == second.keys(), "one id for both parts of a request"
    for name, body in first.items():
        assert (body["max_tokens"], body["stream"], body["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
        assert second[name]["prompt"] == body["prompt"] and second[name]["kv_transfer_params"] == WHERE
        assert (second[name]["max_tokens"], second[name]["stream"]) == (LOAD.reply_tokens, True)
    assert min(a.ttft_s for a in answers) >= 0.08


async def test_a_short_answer_ends_the_run() -> None:
    async with Server(short=True).serve() as address:
        with pytest.raises(SystemExit, match="an answer of 2 tokens ended with"):
            await run(LOAD, Target(address, "m", 1000), seed=3)


async def test_a_prefill_server_that_keeps_its_blocks_ends_the_run() -> None:
    async with Server(silent=True).serve() as p, Server().serve() as d:
        with pytest.raises(SystemExit, match=r"broke off.*kv_transfer_params"):
            await run(LOAD, Target(d, "m", 1000, vllm_prefill=p), seed=3)
