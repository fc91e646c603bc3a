"""Objects into a pipe from an asyncio loop that must not wait until they are read: a stopped engine would stop its front."""

import asyncio
import pickle
import socket
import struct
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

_LENGTH = struct.Struct("!i")  # before each pickled object, as `Connection.recv` expects it


class Outbox:
    """Writes what fits at once and keeps the rest until there is room. Of one loop's thread; the connection may be read by
    another. `Connection.send` is not to be used beside it."""

    def __init__(self, connection: Connection) -> None:
        # A duplicate: it shares its flags with the connection, which stays blocking, so each write asks not to wait.
        self._socket = socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        self._loop = asyncio.get_running_loop()
        self._left: deque[memoryview] = deque()

    def send(self, thing: Any) -> None:
        """Never blocks. Raises OSError once the other end is closed."""
        data = pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
        message = memoryview(_LENGTH.pack(len(data)) + data)
        if not self._left:
            message = message[self._write(message) :]
            if not message:
                return
            self._loop.add_writer(self._socket, self._go_on)
        self._left.append(message)

    def close(self) -> None:
        """Idempotent. What is left is dropped."""
        self._stop()
        self._socket.close()

    def _write(self, message: memoryview) -> int:
        try:
            return self._socket.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _go_on(self) -> None:
        try:
            while self._left:
                written = self._write(self._left[0])
                if written < len(self._left[0]):
                    self._left[0] = self._left[0][written:]
                    return
                self._left.popleft()
        except OSError:  # the other end is gone, as whoever reads from it notices
            pass
        self._stop()

    def _stop(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)
        self._left.clear()
