"""What an engine process says to its front, by two threads on one pipe: the loop's reports, and beats from a thread that runs
also while the loop waits for a long step. From outside a long step and a process that stands still would look alike.
"""

import fcntl
import pickle
import struct
import termios
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from twinflow.engine.base import Beat

BEAT_S = 0.25  # an eighth of the silence that counts

_BEAT = pickle.dumps(Beat(), pickle.HIGHEST_PROTOCOL)
_INT = struct.Struct("i")


class Voice:
    """The writing half of a pipe, which two threads share; nobody else may write to it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._writing = threading.Lock()

    def send(self, thing: Any) -> None:
        """Waits until the pipe has room, and for a beat's write at most. Raises OSError once the other end is closed."""
        data = pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
        with self._writing:
            self._pipe.send_bytes(data)

    def beat(self) -> bool:
        """Says that this process runs, unless something that says so is being written or was not read yet: so it neither waits
        for a report, nor for a front that does not read, nor fills its pipe. False once the pipe is closed."""
        if not self._writing.acquire(blocking=False):
            return True
        try:
            if not unread_bytes(self._pipe):
                self._pipe.send_bytes(_BEAT)
        except OSError:
            return False
        finally:
            self._writing.release()
        return True

    def beat_until_closed(self) -> None:
        while self.beat():
            time.sleep(BEAT_S)


def unread_bytes(pipe: Connection) -> int:
    """What the other end has not read yet takes so much of the pipe; 0 where the kernel does not say (some sandboxes), and a beat
    then waits for a front that does not read, as reports do. Raises OSError if the pipe is closed here."""
    number = pipe.fileno()
    try:
        (taken,) = _INT.unpack(fcntl.ioctl(number, termios.TIOCOUTQ, bytes(_INT.size)))
    except OSError:
        return 0
    return int(taken)
