"""The socket between the owner and one HTTP process: frames of 4 bytes of length and a pickled (number, message).

Numbers belong to questions: those of HTTP processes are positive, those of the owner negative, an answer has its question's; what
needs no answer has 0. Frames arrive in order.
"""

import asyncio
import pickle
import socket
import struct

_LENGTH = struct.Struct("<I")


class Line:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> "Line":
        """Takes a connected socket over."""
        sock.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, number: int, message: object) -> None:
        """Returns at once; to a peer that is gone it goes nowhere."""
        if self._writer.is_closing():
            return
        data = pickle.dumps((number, message), pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> tuple[int, object] | None:
        """The next frame; None once the peer is gone."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            number, message = pickle.loads(await self._reader.readexactly(*_LENGTH.unpack(head)))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return number, message

    def close(self) -> None:
        self._writer.close()
