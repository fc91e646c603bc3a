"""One child process of a cluster: its command, its output line by line, its end. Used by `cluster`.

A child leads a process group of its own, so that Ctrl-C in the terminal reaches only the parent, which then stops children
in order; the group is also how an engine process is found when the process in front of it is gone.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TAIL_LINES = 30
LineSink = Callable[[str, str], None]  # (process name, one line without its newline); called from a thread per process


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """`name` is unique in the cluster ("decode-0"); `env` adds to the parent's environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class ProcessDied(Exception):
    """A child ended without being asked to. `code` as in `subprocess` (negative = signal); `tail` = its last lines."""

    def __init__(self, name: str, code: int, tail: tuple[str, ...]) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        super().__init__(f"{name} {how}")
        self.name = name
        self.code = code
        self.tail = tail


class Process:
    """Runs from construction until it exits. Not thread-safe: one owner calls it."""

    def __init__(self, spec: ProcessSpec, sink: LineSink, log_file: Path | None = None) -> None:
        self.spec = spec
        self.expected_end = False  # set once the owner asked it to stop
        self._group_ended = False
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._popen = subprocess.Popen(
            spec.argv,
            env={**os.environ, **spec.env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(sink, log_file), name=f"log-{spec.name}", daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._tail)

    def died(self) -> ProcessDied | None:
        """The report of an end that nobody asked for, None otherwise."""
        code = self.returncode
        if code is None or self.expected_end:
            return None
        self._reader.join(timeout=1.0)  # its last words
        return ProcessDied(self.name, code, self.tail)

    def send(self, sig: signal.Signals) -> None:
        """Signals the child alone (not its group). SIGTERM and SIGKILL make its end an expected one."""
        if sig in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
            self.expected_end = True
        if self.returncode is None:
            self._popen.send_signal(sig)

    def stop(self, grace_s: float) -> bool:
        """SIGTERM, up to `grace_s` seconds, then SIGKILL for it and whatever is left of its group. True if it ended by
        itself within the grace."""
        self.send(signal.SIGTERM)
        return self.wait(grace_s)

    def wait(self, grace_s: float) -> bool:
        """Second half of `stop`, for owners that signal several children first."""
        clean = True
        try:
            self._popen.wait(timeout=max(0.0, grace_s))
        except subprocess.TimeoutExpired:
            clean = False
        self.kill_group()
        self._reader.join(timeout=1.0)
        return clean

    def kill_group(self) -> None:
        """SIGKILL to the child and everything it started. Idempotent."""
        self.expected_end = True
        if self._group_ended:  # its number may belong to somebody else by now
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._group_ended = True

    def _read(self, sink: LineSink, log_file: Path | None) -> None:
        assert self._popen.stdout is not None
        log = log_file.open("a", buffering=1) if log_file else None
        try:
            for raw in self._popen.stdout:
                line = raw.rstrip("\n")
                self._tail.append(line)
                if log:
                    log.write(f"{time.strftime('%H:%M:%S')} {line}\n")
                sink(self.name, line)
        finally:
            self._popen.stdout.close()
            if log:
                log.close()
