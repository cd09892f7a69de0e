"""The line of appends that wait for a journal's pipeline, and what each must have before it may wait.

A journal has one appender at a time. An append that took its turn and then waited for its client would delay
all later appends. So its content is read ahead first: to its end, or `AHEAD_BYTES` of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from gazette.broker.append.flow_control import too_slow
from gazette.broker.append.idle_timeout import IdleTimeout
from gazette.errors import GazetteError, Unavailable

AHEAD_BYTES: Final = 1 << 18
"""Bytes that are read ahead. A client must send as many before it can hold up a journal."""
AHEAD_S: Final = 10.0
"""Seconds in which to send them; more if the minimum rate of appends allows more."""
_AHEAD_CHUNKS: Final = 4_096
WAITING_MAX: Final = 512
WAITING_BYTES_MAX: Final = 64 << 20


class ContentSource(Protocol):
    """The caller's stream, after its opening message."""

    async def next(self) -> bytes | None:
        """Return the next chunk: empty for the intent to commit, None at the end.

        Raise ``Invalid`` for a message that is no chunk. Cancellation: the stream is not used again.
        """
        ...


class ContentAhead:
    """A caller's stream, of which a part may have been read ahead."""

    def __init__(self, source: ContentSource) -> None:
        self._source = source
        self._ahead: deque[bytes | None] = deque()
        self._error: GazetteError | None = None
        self.held = 0
        """Bytes that were read ahead."""

    async def read_ahead(self, rate_min: int) -> None:
        """Read to the end of the stream, or `AHEAD_BYTES` of it. May be repeated.

        An error of the stream is kept: ``next`` raises it behind the chunks before it. Raise
        ``Broken`` if the caller takes longer than `AHEAD_S`, or than ``rate_min`` bytes/s allows
        (0: no limit). Cancellation: as ``next``.
        """
        try:
            async with IdleTimeout(max(AHEAD_S, AHEAD_BYTES / rate_min) if rate_min else None):
                while not self._enough():
                    chunk = await self._source.next()
                    self._ahead.append(chunk)
                    self.held += len(chunk or b"")
        except TimeoutError:
            raise too_slow(rate_min) from None
        except GazetteError as error:
            self._error = error

    async def read(self, seconds: float | None) -> tuple[bytes | None, bool]:
        """Return the next chunk, and True if the broker itself stood still meanwhile.

        Raise ``TimeoutError`` if the caller sends none for ``seconds`` (None: for ever). Raise and cancel as
        ``ContentSource.next``.
        """
        if self._ahead:
            return await self.next(), False  # Does not wait.
        async with IdleTimeout(seconds) as waiting:
            chunk = await self.next()
        return chunk, waiting.stalled

    async def next(self) -> bytes | None:
        """Return the next chunk, as ``ContentSource.next`` does."""
        if self._ahead:
            chunk = self._ahead.popleft()
            self.held -= len(chunk or b"")
            return chunk
        if self._error is not None:
            raise self._error
        return await self._source.next()

    def _enough(self) -> bool:
        ended = bool(self._ahead) and self._ahead[-1] is None
        full = self.held >= AHEAD_BYTES or len(self._ahead) >= _AHEAD_CHUNKS
        return ended or full or self._error is not None


class Line:
    """The appends of one journal that wait here or for the pipeline. Pulses are not counted."""

    def __init__(self) -> None:
        self._waiting: dict[ContentAhead, None] = {}

    @contextmanager
    def wait(self, content: ContentAhead) -> Iterator[None]:
        """Count an append while it waits. Raise ``Unavailable`` if the line is full."""
        held = sum(one.held for one in self._waiting)
        if len(self._waiting) >= WAITING_MAX or held >= WAITING_BYTES_MAX:
            raise Unavailable(
                "too many appends to the journal wait",
                hint="The append is retried. Send fewer appends at a time.",
                waiting=len(self._waiting),
                waiting_bytes=held,
            )
        self._waiting[content] = None
        try:
            yield
        finally:
            del self._waiting[content]
