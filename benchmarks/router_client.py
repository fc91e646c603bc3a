"""A client of OpenAI's HTTP API that costs little: one keep-alive connection, one request at a time, times of every read.

`Connection.ask` returns an `Answer`. It counts events and does not decode them unless it is told to keep the text.
"""

import asyncio
import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

TEXT = """the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than"""


@dataclass(slots=True)
class Answer:
    """Times are of `time.perf_counter`. `reads` = when something of the body came, `events` the `data:` lines in it."""

    sent_at: float
    status: int = 0
    reads: list[float] = field(default_factory=list)
    events: int = 0
    body: bytearray | None = None
    complete: bool = False
    ended_at: float = 0.0

    @property
    def ok(self) -> bool:
        return self.complete and self.status == 200

    @property
    def ttft_s(self) -> float:
        return self.reads[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Between reads."""
        return [b - a for a, b in zip(self.reads, self.reads[1:], strict=False)]

    def text(self) -> str:
        """Of a kept body, streamed or whole; an error in it raises ValueError."""
        return "".join(_content(e) for e in self.parsed())

    def parsed(self) -> list[dict[str, object]]:
        assert self.body is not None, "the body was not kept"
        if not self.body.startswith((b"data:", b":")):
            return [json.loads(self.body)]
        lines = bytes(self.body).split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ") and line != b"data: [DONE]"]


def _content(event: dict[str, object]) -> str:
    if "error" in event:
        raise ValueError(str(event["error"]))
    choices = event["choices"]
    assert isinstance(choices, list)
    return "".join((c.get("delta") or c.get("message") or {}).get("content") or c.get("text", "") for c in choices)


class Connection(asyncio.Protocol):
    """Of `connect`. `keep`: whether answers keep their bodies."""

    def __init__(self, keep: bool = False) -> None:
        self.open = False
        self._keep = keep
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._head = bytearray()
        self._left: int | None = None  # bytes of a whole body
        self._rest = b""  # of a chunked one, not parsed yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = cast(asyncio.Transport, transport), True

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._finish(False)

    async def ask(self, request: bytes) -> Answer:
        """Until the answer has ended, in whatever way."""
        assert self._transport is not None
        if not self.open:
            return Answer(time.perf_counter())
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._left, self._rest = bytearray(), None, b""
        self._answer = Answer(time.perf_counter(), body=bytearray() if self._keep else None)
        self._transport.write(request)
        return await self._done

    @property
    def answer(self) -> Answer | None:
        """What has come so far."""
        return self._answer

    def pause(self, paused: bool) -> None:
        """A client that does not read."""
        if self._transport is not None and self.open:
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    def leave(self) -> None:
        """Drops the connection at once."""
        if self._transport is not None and self.open:
            self.open = False
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        answer, now = self._answer, time.perf_counter()
        if answer is None or answer.complete:
            return
        if not answer.status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = bytes(self._head[:end]).lower(), bytes(self._head[end + 4 :])
            answer.status = int(head.split(b" ", 2)[1])
            if b"content-length:" in head:
                self._left = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            if not data:
                return
        answer.reads.append(now)
        if self._left is not None:
            if answer.body is not None:
                answer.body += data
            self._left -= len(data)
            if self._left <= 0:
                self._finish(True)
        elif answer.body is None:
            answer.events += (self._rest + data).count(b"data:")
            self._rest = data[-4:]
            if data.endswith(b"0\r\n\r\n"):
                self._finish(True)
        else:
            self._dechunk(self._rest + data, answer, answer.body)

    def _dechunk(self, data: bytes, answer: Answer, body: bytearray) -> None:
        while (line := data.find(b"\r\n")) >= 0:
            size = int(data[:line], 16)
            if len(data) < line + size + 4:
                break
            part, data = data[line + 2 : line + 2 + size], data[line + size + 4 :]
            body += part
            answer.events += part.count(b"data:")
            if not size:
                self._finish(True)
        self._rest = data

    def _finish(self, complete: bool) -> None:
        if self._answer is not None and self._done is not None and not self._done.done():
            self._answer.complete, self._answer.ended_at = complete, time.perf_counter()
            self._done.set_result(self._answer)


async def connect(address: str, keep: bool = False, receive_bytes: int | None = None) -> Connection:
    """`receive_bytes`: of the socket's buffer, small for a client that is to be slow."""
    host, port = address.rsplit(":", 1)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    _, connection = await loop.create_connection(lambda: Connection(keep), sock=sock)
    return connection


class Prompts:
    """Bodies of chat requests with distinct prompts, cut out of one long random text."""

    def __init__(self, model: str, prompt_chars: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._text = " ".join(self._random.choices(TEXT.split(), k=200_000))
        self._chars, self._model, self._count = prompt_chars, model, 0

    def text(self) -> str:
        """Distinct from its first character on."""
        own = f"{self._random.getrandbits(48):x} {self._count} "
        self._count += 1
        room = max(0, self._chars - len(own))
        at = self._random.randrange(len(self._text) - room)
        return own + self._text[at : at + room]

    def request(self, max_tokens: int, stream: bool = True, delay_ms: int = 0) -> bytes:
        """`delay_ms` goes along as `seed`, for workers that take it from there."""
        body = {
            "model": self._model, "messages": [{"role": "user", "content": self.text()}], "stream": stream,
            "max_tokens": max_tokens, "temperature": 0, "seed": delay_ms,
        }  # fmt: skip
        return http_request("/v1/chat/completions", body)

    def request_of_ids(self, max_tokens: int, stream: bool = True, delay_ms: int = 0) -> bytes:
        """As many token ids as the text would have about: a fourth of its characters."""
        ids = [self._random.randrange(300, 4000) for _ in range(self._chars // 4)]
        body = {"model": self._model, "prompt": ids, "stream": stream, "max_tokens": max_tokens, "seed": delay_ms}
        return http_request("/v1/completions", body)


def http_request(path: str, body: dict[str, object]) -> bytes:
    return http_post(path, json.dumps(body).encode())


def http_post(path: str, data: bytes, headers: str = "") -> bytes:
    """`headers`: more of them, a line each."""
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    return f"{head}{headers}\r\n".encode() + data


def percentile(values: Sequence[float], q: float) -> float:
    """NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")
