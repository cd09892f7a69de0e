"""The line of appends that wait for a journal's pipeline.

A journal has one appender at a time. An append that took its turn and then waited for its client would delay
all later appends. So the broker reads content before the append waits in line: all, or about `AHEAD_BYTES`.

A *small append* is one message of at most `SMALL_BYTES`, which has arrived together with its call. One small
append at a time leads, until it has ended. The leader commits its own content and that of small appends
after it, if their terms permit: a group commit. A group costs the replicas as little as one append.

An append that finds its journal's store unhealthy waits for the store in its turn. Later appends wait for the
store before their turn. These waits do not add up. The limit of each wait counts from the arrival of its
append, or from the begin of the first of these waits, whichever is later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec

from gazette.broker.append.events import AppendTerms, Outcome
from gazette.broker.append.flow_control import too_slow
from gazette.broker.append.idle_timeout import IdleTimeout
from gazette.errors import GazetteError, Unavailable
from gazette.protocol.append_session import SessionAppend

AHEAD_BYTES: Final = 1 << 18
"""Bytes that are read ahead: a client must send them before its append can delay a journal."""
AHEAD_S: Final = 10.0
"""Seconds in which a client must send `AHEAD_BYTES`. A low minimum rate allows more; a rate of 0, any."""
_AHEAD_CHUNKS: Final = 4_096
WAITING_MAX: Final = 512
WAITING_BYTES_MAX: Final = 64 << 20
"""Limits of a journal's waiting appends, in number and in bytes read: at either limit, the line is full."""
SMALL_BYTES: Final = 1 << 16
GROUP_BYTES: Final = 1 << 18
"""Greatest content of one group commit, in bytes."""


class ContentSource(Protocol):
    """The caller's stream, after its opening message."""

    async def next(self) -> bytes | None:
        """Return the next chunk: empty for the intent to commit, None at the end.

        Raise ``Invalid`` for a message that is no chunk. Cancellation: the stream is not used again.
        """
        ...


class ContentAhead:
    """A caller's stream, of which a first part may have been read ahead."""

    def __init__(self, source: ContentSource, ahead: Iterable[bytes | None] = ()) -> None:
        self._source = source
        self._ahead: deque[bytes | None] = deque(ahead)
        self._error: GazetteError | None = None  # The stream's error, for `next` to raise.
        self.held = sum(len(chunk or b"") for chunk in self._ahead)
        """Bytes that were read ahead."""

    async def read_ahead(self, rate_min: int) -> None:
        """Read to the end of the stream, or `AHEAD_BYTES` of it. May be repeated.

        Keep an error of the stream: ``next`` raises it after the chunks that were read. Raise ``Broken`` if
        the caller takes longer than `AHEAD_S`, and is slower than ``rate_min`` bytes/s (0: no limit of time).
        After a cancellation, the source cannot be read again.
        """
        if self._enough():
            return
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

    @property
    def is_ahead(self) -> bool:
        """True if ``take`` has something to return."""
        return bool(self._ahead)

    def take(self) -> bytes | None:
        """Return the next chunk that was read ahead; None at the end of the stream."""
        chunk = self._ahead.popleft()
        if chunk:
            self.held -= len(chunk)
        return chunk

    async def read(self, seconds: float | None) -> tuple[bytes | None, bool]:
        """Return the next chunk, and True if the broker itself stood still meanwhile.

        Raise ``TimeoutError`` if the caller sends no chunk for ``seconds`` (None: for ever). See
        ``ContentSource.next`` for other errors and for cancellation.
        """
        async with IdleTimeout(seconds) as waiting:
            chunk = await self.next()
        return chunk, waiting.stalled

    async def next(self) -> bytes | None:
        """Return the next chunk, as ``ContentSource.next`` does."""
        if self._ahead:
            return self.take()
        if self._error is not None:
            raise self._error
        return await self._source.next()

    def _enough(self) -> bool:
        ended = bool(self._ahead) and self._ahead[-1] is None
        full = self.held >= AHEAD_BYTES or len(self._ahead) >= _AHEAD_CHUNKS
        return ended or full or self._error is not None


class SmallAppend(msgspec.Struct, eq=False):
    """A small append that waits in line.

    The line calls ``lead`` when it is the append's turn to take the pipeline. The owner calls ``Line.leave``
    at the append's end. If another append takes this append along, only ``settle`` is called, at the end.
    """

    terms: AppendTerms
    content: bytes
    session: SessionAppend | None
    arrived: float
    """Monotonic time at which the append began to wait."""
    lead: Callable[[], None]
    settle: Callable[[Outcome], None]


class Line:
    """The appends of one journal that wait here or for the pipeline. Pulses are not counted. Loop-bound."""

    def __init__(self) -> None:
        self._waiting: dict[ContentAhead, None] = {}
        self._small: deque[SmallAppend] = deque()
        self._leader: SmallAppend | None = None  # None: no small append leads.
        self._advancing = False  # True while `_advance` runs.
        self.store_ails_since: float | None = None
        """Monotonic time from which appends wait for the journal's store to be listed, or healthy."""

    @contextmanager
    def wait(self, content: ContentAhead) -> Iterator[None]:
        """Count an append as waiting during the block. Raise ``Unavailable`` if the line is full."""
        self.check_room()
        self._waiting[content] = None
        try:
            yield
        finally:
            del self._waiting[content]

    @property
    def waiting(self) -> int:
        """Number of appends that wait. It counts the leader of the small appends, too."""
        return len(self._waiting) + len(self._small) + (self._leader is not None)

    def check_room(self) -> None:
        """Raise ``Unavailable`` if the line is full."""
        count = self.waiting
        if count < WAITING_MAX and not self._waiting:
            return  # `WAITING_MAX` small appends have fewer bytes than `WAITING_BYTES_MAX`.
        waiting_bytes = sum(content.held for content in self._waiting) + sum(
            len(append.content) for append in self._small
        )
        if count >= WAITING_MAX or waiting_bytes >= WAITING_BYTES_MAX:
            raise Unavailable(
                "too many appends to the journal wait",
                hint="The client repeats the append. Send fewer appends at a time.",
                waiting=count,
                waiting_bytes=waiting_bytes,
            )

    def join(self, *small: SmallAppend) -> None:
        """Let small appends wait, in order. The first of the line leads now if no small append leads."""
        self._small.extend(small)
        self._advance()

    def holds(self, small: SmallAppend) -> bool:
        """Return True if a small append waits or leads; False if another append has taken it along."""
        return small is self._leader or small in self._small

    def leave(self, small: SmallAppend) -> None:
        """Remove a small append that has led, or gives up. No effect if another append took it along."""
        if small is self._leader:
            self._leader = None
            self._advance()
        elif small in self._small:
            self._small.remove(small)

    def take_along(
        self, bytes_max: int, permits: Callable[[SmallAppend], bool]
    ) -> list[SmallAppend]:
        """Remove and return waiting small appends, in order. Stop before an append that ``permits`` refuses,
        or whose content would exceed ``bytes_max`` in total.

        The caller leads, and must settle all returned appends.
        """
        group: list[SmallAppend] = []
        while self._small:
            bytes_max -= len(self._small[0].content)
            if bytes_max < 0 or not permits(self._small[0]):
                break
            group.append(self._small.popleft())
        return group

    def _advance(self) -> None:
        if self._advancing:  # A leader called `leave` at once: the loop below goes on.
            return
        self._advancing = True
        try:
            while self._leader is None and self._small:
                self._leader = self._small.popleft()
                self._leader.lead()
        finally:
            self._advancing = False
