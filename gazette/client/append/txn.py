"""Stage 1 of the byte path: one append in the making, written by one thread and released whole."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gazette.client.append.backlog import Backlog
from gazette.client.append.content import SEGMENT_BYTES, Segment, segments_of
from gazette.client.append.queue import JournalQueue
from gazette.errors import Bug
from gazette.protocol.content import BytesLike
from gazette.runtime.tasks import OpFuture

if TYPE_CHECKING:
    from gazette.client.append.appender import AppendParams, AppendResult


class AppendTxn:
    """One append, begun by `AppendService.start_append`.

    Until it is released or rolled back, no other append to the same journal can begin, so be brief. Used by
    one thread at a time. As a context manager it is released at the end of the block, or rolled back by an
    exception.
    """

    __slots__ = ("_backlog", "_dependencies", "_params", "_queue", "_segments", "_staging")

    def __init__(
        self,
        backlog: Backlog,
        queue: JournalQueue,
        params: AppendParams,
        dependencies: AbstractSet[OpFuture[Any]],
    ) -> None:
        self._backlog = backlog
        self._queue = queue
        self._params = params
        self._dependencies = dependencies
        self._staging: bytearray | None = queue.staging
        """None once it was released or rolled back."""
        self._segments: list[Segment] | None = None

    def write(self, content: BytesLike) -> None:
        """Add content, which is copied. May wait for brokers or a disk, never on the event loop."""
        staging = self._staging
        if staging is None:
            raise Bug("write to an append that was released or rolled back")
        if len(content) >= SEGMENT_BYTES:
            self._write_large(content)
            return
        staging += content
        if len(staging) >= SEGMENT_BYTES:
            self._cut(staging)

    def _cut(self, staging: bytearray) -> None:
        self._staging = self._queue.staging = bytearray()
        self._hold(Segment(staging))

    def _write_large(self, content: BytesLike) -> None:
        if self._staging:
            self._cut(self._staging)
        for segment in segments_of(content):
            self._hold(segment)

    def _hold(self, segment: Segment) -> None:
        if self._segments is None:
            self._segments = []
        self._segments.append(segment)
        self._backlog.hold(self._queue, segment)

    def release(self) -> OpFuture[AppendResult]:
        """Enqueue the append. Return its future, which all appends of the same RPC share.

        If the journal has failed, so has the future; that is not raised. May wait like ``write``.
        """
        staging = self._staging
        if staging is None:
            raise Bug("append was released or rolled back already")
        self._staging = None
        queue = self._queue
        try:
            return self._backlog.enqueue(
                queue, self._params, self._dependencies, staging, self._segments
            )
        finally:
            staging.clear()
            queue.lock.release()

    def roll_back(self) -> None:
        """Forget this append only. Has no effect after ``release``."""
        staging = self._staging
        if staging is None:
            return
        self._staging = None
        staging.clear()
        if self._segments is not None:
            self._backlog.discard(self._queue, self._segments)
        self._queue.lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.roll_back()
        elif self._staging is not None:
            self.release()
