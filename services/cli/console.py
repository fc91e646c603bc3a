"""What a person sees: prefixed log lines of several processes, a progress line, colour where the output is a terminal."""

import sys
import threading
import time
from typing import TextIO

PALETTE = ("36", "33", "35", "32", "34", "31")  # cyan yellow magenta green blue red
SPINNER = "|/-\\"
QUIET_PROGRESS_S = 5.0  # how often a progress line is printed where it cannot be redrawn
CLEAR_LINE = "\r\x1b[K"


class Console:
    """Serialises all printing; any thread may call it."""

    def __init__(self, out: TextIO | None = None, *, colour: bool | None = None) -> None:
        self._out = out or sys.stdout
        self.is_tty = self._out.isatty()
        self._colour = self.is_tty if colour is None else colour
        self._lock = threading.Lock()
        self._colours: dict[str, str] = {}
        self._progress_shown = False
        self._mid_line = False  # `write` left the cursor behind text
        self._progress_at = 0.0
        self._turn = 0

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def line(self, text: str = "") -> None:
        with self._lock:
            self._clear()
            self._out.write(("\n" if self._mid_line else "") + text + "\n")
            self._mid_line = False
            self._out.flush()

    def write(self, text: str) -> None:
        """Text without a newline, e.g. an answer as it arrives."""
        with self._lock:
            self._clear()
            self._out.write(text)
            self._mid_line = bool(text) and not text.endswith("\n")
            self._out.flush()

    def process_line(self, name: str, line: str) -> None:
        """One line of a process's output: `name | line`, each name in its own colour."""
        code = self._colours.setdefault(name, PALETTE[len(self._colours) % len(PALETTE)])
        self.line(f"{self.paint(f'{name:<10} |', code)} {line}")

    def progress(self, seconds: float, status: str) -> None:
        """Redrawn in place on a terminal, else a line every few seconds."""
        with self._lock:
            if self.is_tty:
                self._turn += 1
                spin = SPINNER[self._turn % len(SPINNER)]
                self._out.write(f"{CLEAR_LINE}{spin} {seconds:5.1f} s  {status}"[:120])
                self._progress_shown = True
            elif time.monotonic() - self._progress_at >= QUIET_PROGRESS_S:
                self._progress_at = time.monotonic()
                self._out.write(f"  {seconds:5.1f} s  {status}\n")
            self._out.flush()

    def _clear(self) -> None:
        if self._progress_shown:
            self._out.write(CLEAR_LINE)
            self._progress_shown = False


def fail(message: str) -> None:
    """One error line on stderr, in the manner of argparse."""
    print(f"twinflow: error: {message}", file=sys.stderr)
