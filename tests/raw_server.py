"""A server of raw bytes that is gone with all its connections when its block ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gazette.runtime.tasks import TaskScope

Answer = Callable[[StreamReader, StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RawServer:
    port: int
    refuse: Callable[[], object]
    """Take no more connections. Those that are there go on."""

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


class _Protocol(StreamReaderProtocol):
    def __init__(self, reader: StreamReader) -> None:
        super().__init__(reader)
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost.set()


@asynccontextmanager
async def raw_server(
    answer: Answer, context: ssl.SSLContext | None = None
) -> AsyncIterator[RawServer]:
    """Serve each connection by ``answer``, then close it. At the end, cut those that are left.

    `asyncio.start_server` waits for none of its connections: one that was accepted as the test ended is
    collected in a later test, which then fails by its unclosed socket.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    scope = TaskScope("raw server")
    sockets = [listener]

    async def accept() -> None:
        with listener:
            while True:
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
                sockets.append(accepted)
                serving = _serve(accepted, answer, context)
                scope.spawn(serving, name=f"connection {len(sockets) - 1}")

    accepting = scope.spawn(accept(), name="accept")
    try:
        yield RawServer(listener.getsockname()[1], accepting.cancel)
    finally:
        await scope.stop()
        for each in sockets:  # Also one whose task had not begun.
            each.close()
    assert scope.failure is None, scope.failure


async def _serve(accepted: socket.socket, answer: Answer, context: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    reader = StreamReader()
    protocol = _Protocol(reader)
    try:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context)
    except OSError:  # As of a client that refuses the certificate.
        accepted.close()
        return
    writer = StreamWriter(transport, protocol, reader, loop)
    try:
        await answer(reader, writer)
        transport.close()
        await protocol.lost.wait()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # The client has gone.
    finally:
        transport.abort()
        await protocol.lost.wait()
