"""A TCP proxy in front of a real service, which loses bytes on purpose."""

from __future__ import annotations

import asyncio
from typing import Self

from gazette.errors import GazetteError
from gazette.runtime.tasks import TaskScope

_CHUNK = 64 << 10


class TcpProxy:
    """Forwards a loopback port to ``(host, port)``.

    ``async with TcpProxy(host, port) as proxy`` listens at ``proxy.port``, which stays the same
    over ``refuse`` and ``accept``.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._scope = TaskScope("tcp proxy")
        self._writers: set[asyncio.StreamWriter] = set()
        self._requests = asyncio.Event()
        self._replies = asyncio.Event()
        self.port = 0
        self.connections = 0
        """Number of connections that were accepted so far."""

    async def __aenter__(self) -> Self:
        self.release()
        await self.accept()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.refuse()
        await self._scope.stop()

    async def accept(self) -> None:
        """Listen, for the first time or again."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Stop listening and reset every connection: the service seems to be gone."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Reset every connection. Bytes on their way are lost."""
        for writer in self._writers:
            writer.transport.abort()

    def hold_requests(self) -> None:
        """Hold requests from now on: the service receives nothing."""
        self._requests.clear()

    def hold_replies(self) -> None:
        """Hold replies from now on: clients receive nothing, although the service does."""
        self._replies.clear()

    def release(self) -> None:
        """Forward held and later bytes."""
        self._requests.set()
        self._replies.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._scope.spawn(self._serve(reader, writer), name=f"connection {self.connections}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            upstream_reader, upstream = await asyncio.open_connection(*self._target)
        except OSError:
            self._drop(writer)
            return
        self._writers.add(upstream)
        try:
            async with TaskScope("proxied connection") as scope:
                scope.spawn(_forward(reader, upstream, self._requests), name="requests")
                scope.spawn(_forward(upstream_reader, writer, self._replies), name="replies")
        except _Ended:
            return
        finally:
            self._drop(writer)
            self._drop(upstream)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()


class _Ended(GazetteError):
    """One side has ended, so the other side ends too."""


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
) -> None:
    try:
        while chunk := await reader.read(_CHUNK):
            await gate.wait()
            writer.write(chunk)
            await writer.drain()
    except OSError as error:
        raise _Ended("reset") from error
    raise _Ended("end of stream")
