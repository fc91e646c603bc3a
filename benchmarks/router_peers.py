"""Other routers, and simulated HTTP workers behind them, for `router_load`.

They pass text through: templates and tokens are the engine's work there, so the workers get the client's body and answer with
ready-made events. The commands assume nginx, haproxy, `sglang-router` and `vllm-router` as their packages install them; the
production stack (Python) runs from its source folder, which PYTHONPATH names, since its module is called as vllm-router's.
"""

import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import cast

PORT = 8050
WORKER_PORTS = (9051, 9052)
MODEL = "twinflow-tiny"

_NGINX = """worker_processes 1; daemon off; pid {folder}/pid; error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_buffer_size 512k; keepalive_requests 10000000;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream workers {{ {servers} keepalive 512; keepalive_requests 10000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""
_HAPROXY = """global
    nbthread 1
    maxconn 8192
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option http-no-delay
frontend in
    bind 127.0.0.1:{port}
    default_backend workers
backend workers
    balance roundrobin
    http-reuse always
{servers}
"""


def command(name: str, python: str, folder: Path) -> list[str]:
    """Of a peer by name; `python` has its package. Raises ValueError for an unknown one."""
    urls = [f"http://127.0.0.1:{p}" for p in WORKER_PORTS]
    bind = ["--host", "127.0.0.1", "--port", str(PORT), "--policy", "cache_aware", "--prometheus-port", "29051"]
    if name == "nginx":
        servers = " ".join(f"server 127.0.0.1:{p};" for p in WORKER_PORTS)
        (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, port=PORT, servers=servers))
        return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    if name == "haproxy":
        servers = "\n".join(f"    server w{p} 127.0.0.1:{p}" for p in WORKER_PORTS)
        (folder / "haproxy.cfg").write_text(_HAPROXY.format(port=PORT, servers=servers))
        return ["haproxy", "-f", str(folder / "haproxy.cfg")]
    if name == "sglang-router":
        return [python, "-m", "sglang_router.launch_router", *bind, "--worker-urls", *urls, "--log-level", "warn"]
    if name == "vllm-router":
        return [python, "-m", "vllm_router.launch_router", *bind, "--worker-urls", *urls, "--log-level", "warning"]
    if name == "production-stack":
        found = [
            "--service-discovery",
            "static",
            "--static-backends",
            ",".join(urls),
            "--static-models",
            f"{MODEL},{MODEL}",
        ]
        return [
            python,
            "-m",
            "vllm_router.app",
            *bind[:4],
            *found,
            "--routing-logic",
            "prefixaware",
            "--log-level",
            "warning",
        ]
    raise ValueError(f"unknown peer {name!r} (known: nginx, haproxy, sglang-router, vllm-router, production-stack)")


class Peer:
    """A running one with two workers; `stop` in the end. The router runs on `router_core`, the workers on `load_core`."""

    def __init__(self, name: str, python: str, load_core: int, router_core: int) -> None:
        for port in (PORT, *WORKER_PORTS):  # what an earlier run has left would be measured in its place
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    raise RuntimeError(f"port {port} is taken: end what listens there")
        self._folder = tempfile.TemporaryDirectory()
        self._log = (Path(self._folder.name) / "log").open("w")
        module = [sys.executable, "-m", "benchmarks.router_peers"]
        self._workers = [self._start(load_core, [*module, str(p)]) for p in WORKER_PORTS]
        for port in WORKER_PORTS:
            _until_up(port)
        router = self._start(router_core, command(name, python, Path(self._folder.name)))
        self._workers.append(router)
        self.pid, self.address = router.pid, f"127.0.0.1:{PORT}"
        _until_up(PORT)

    def _start(self, core: int, argv: list[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["taskset", "-c", str(core), *argv], stdout=self._log, stderr=self._log)

    def stop(self) -> None:
        for process in reversed(self._workers):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()
        self._folder.cleanup()


def _until_up(port: int, within_s: float = 60.0) -> None:
    ends = time.monotonic() + within_s
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=1).read()
            return
        except OSError as e:
            if time.monotonic() > ends:
                raise TimeoutError(f"nothing usable on port {port}: {e}") from e
            time.sleep(0.2)


# ---- the worker ----

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.I)
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')  # a router may send the newer name for the older one
_DELAY = re.compile(rb'"seed"\s*:\s*(\d+)')


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


def _whole(body: object) -> bytes:
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
    return head + data


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKEN = _event({"content": " token"})
_LAST = _event({}, "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "x"}]}
_INFO = {
    "model_path": MODEL,
    "is_generation": True,
    "served_model_name": MODEL,
    "tp_size": 1,
    "dp_size": 1,
}
_MESSAGE = {"role": "assistant", "content": "eight tokens of text, as it is said"}
_ANSWER = {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL,
           "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
           "usage": {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}}  # fmt: skip


class HttpWorker(asyncio.Protocol):
    """`max_tokens` events, `seed` milliseconds apart; the first one at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._data = cast(asyncio.Transport, transport), bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while self._task is None and (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data, 0, end + 2)
            stop = end + 4 + (int(length[1]) if length else 0)
            if len(self._data) < stop:
                return
            head, body = bytes(self._data[:end]), bytes(self._data[end + 4 : stop])
            del self._data[:stop]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self._transport.write(_whole(_MODELS if b"models" in head.split(b"\r\n")[0] else _INFO))
        elif b'"stream": true' in body or b'"stream":true' in body:
            tokens, delay = _TOKENS.search(body), _DELAY.search(body)
            assert tokens and delay, body
            self._task = asyncio.create_task(self._stream(int(tokens[1]), int(delay[1]) / 1e3))
        else:
            self._transport.write(_whole(_ANSWER))

    async def _stream(self, tokens: int, delay_s: float) -> None:
        self._transport.write(_HEAD + _TOKEN)
        for _ in range(tokens - 1):
            await asyncio.sleep(delay_s)
            self._transport.write(_TOKEN)
        self._transport.write(_LAST)
        self._task = None


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(HttpWorker, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(int(sys.argv[1])))
