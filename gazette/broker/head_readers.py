"""Stage 9 of the byte path: takes commits from `fragment/index`, gives them to readers at the journal's head.

Bytes for which many readers wait are read once and encoded once. No task of a reader sends these bytes: the
task waits until its reader must continue alone. Appends are answered before readers get their commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gazette.broker.lease_guard import LeaseGuard
from gazette.fragment.index import Index, IndexResult
from gazette.http2.messages import prefixed
from gazette.protocol.content import content_response
from gazette.protocol.ids import Offset
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status

_READERS_PER_TURN: Final = 100
"""Greatest number of readers that are served in one turn of the event loop. Other calls run between turns."""
_MESSAGES: Final = 2
"""Messages of one delivery to a reader: metadata and content."""


class HeadReader:
    """A reader that has got everything before ``offset``. ``send`` takes encoded responses and their number.
    ``send`` sends all of them without a wait, or sends none and returns False.
    """

    __slots__ = ("offset", "send", "woken")

    def __init__(self, offset: Offset, send: Callable[[bytes, int], bool]) -> None:
        self.offset = offset
        self.send = send
        self.woken: asyncio.Future[None] | None = None
        """Wakes the reader's task; None before its first wait."""


class HeadReaders:
    """The readers of one replica that wait for the next commit. Loop-bound. One message has at most
    ``chunk_bytes`` of content."""

    def __init__(self, index: Index, lease: LeaseGuard, chunk_bytes: int) -> None:
        self._index = index
        self._lease = lease
        self._chunk_bytes = chunk_bytes
        self._waiting: dict[Offset, dict[HeadReader, None]] = {}
        """Readers by the offset at which they wait."""
        self._due = False  # True if `_deliver` will be called.

    @property
    def waiting(self) -> int:
        """Number of readers that wait."""
        return sum(map(len, self._waiting.values()))

    async def serve(self, reader: HeadReader) -> None:
        """Serve a reader until it must continue alone, from its ``offset`` at that time.

        A reader must continue alone in four cases: its caller takes no more, the next bytes cannot be read
        at once from memory or a local file, the lease may have ended, or the index fails or closes.
        Cancellation: each sent response is complete.
        """
        reader.woken = asyncio.get_running_loop().create_future()
        self._add(reader)
        try:
            await reader.woken
        finally:
            self._remove(reader)

    def _add(self, reader: HeadReader) -> None:
        self._index.on_change = self._changed
        self._waiting.setdefault(reader.offset, {})[reader] = None

    def _remove(self, reader: HeadReader) -> None:
        readers = self._waiting.get(reader.offset)
        if readers is not None:
            readers.pop(reader, None)
            if not readers:
                del self._waiting[reader.offset]
        if not self._waiting:
            self._index.on_change = None

    def _changed(self) -> None:
        """Deliver soon: the index has changed."""
        if self._waiting and not self._due:
            self._due = True
            loop = asyncio.get_running_loop()
            # Answers to appends leave their sockets in the next turn of the loop. Serve readers after that.
            loop.call_soon(loop.call_soon, self._deliver)

    def _deliver(self) -> None:
        """Serve up to `_READERS_PER_TURN` readers, and wake those that must continue alone.

        Run again in the next turn of the loop if readers, or bytes for them, are left.
        """
        self._due, has_more = False, False
        remaining = _READERS_PER_TURN
        for offset in list(self._waiting):
            try:
                result = self._index.find(offset)
                if result.status is not Status.OK:
                    continue
                shared = self._shared(result)
            except Exception:  # noqa: BLE001 - each reader meets the error in its own read
                shared = None
            # Readers at one offset get the same bytes. A reader that cannot take them continues alone.
            for reader in list(self._waiting[offset])[:remaining]:
                self._remove(reader)
                remaining -= 1
                if shared is not None and reader.send(shared[0], _MESSAGES):
                    reader.offset = shared[1]
                    self._add(reader)
                    has_more = has_more or reader.offset < result.write_head
                elif reader.woken is not None and not reader.woken.done():
                    reader.woken.set_result(None)
            if not remaining:
                break
        if has_more or not remaining:
            self._due = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _shared(self, found: IndexResult) -> tuple[bytes, Offset] | None:
        """Return responses for all readers that wait for ``found``, and the offset after them.

        Return None if each reader must continue alone. Raise ``Unavailable`` if the disk fails.
        """
        if found.local is None or not self._lease.holds:
            return None
        offset = found.offset
        content = found.local.pread_now(offset, self._chunk_bytes)
        if content is None:
            return None
        encoded = located(found).SerializeToString(), content_response(offset, content)
        return b"".join(map(prefixed, encoded)), offset + len(content)


def located(found: IndexResult) -> broker_pb2.ReadResponse:
    """Return the response that says where content is read from, without a signed URL."""
    response = broker_pb2.ReadResponse(
        status=found.status.value,  # type: ignore[arg-type]
        offset=found.offset,
        write_head=found.write_head,
    )
    if found.fragment is not None:
        response.fragment.CopyFrom(found.fragment.to_pb())
    return response
