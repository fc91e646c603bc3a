"""A real `redis-server` on a free port, for tests: started, killed, started again (empty, at the same port)."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

HOW = "these tests run a real redis-server; install it, e.g. apt-get install -y redis-server"
PASSWORD = "hunter2-secret"


class RedisServer:
    """`url` has the password in it."""

    def __init__(self, folder: Path) -> None:
        self._binary = shutil.which("redis-server")
        if self._binary is None:
            missing = pytest.fail if os.environ.get("CI") else pytest.skip  # CI is never softer than this
            missing(f"redis-server is not on the PATH: {HOW}")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "requirepass": PASSWORD}
        argv = [self._binary, *(word for k, v in options.items() for word in (f"--{k}", str(v)))]
        self._process = subprocess.Popen(
            argv,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"]},
        )
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        """As a lost machine: no goodbye, nothing saved. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
