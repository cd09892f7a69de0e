"""The queue of events from the event loop to a shard's thread: bounded in bytes, in order.

The loop puts chunks of journals and other events; the thread takes them. A chunk holds many messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gazette.errors import Bug, Closed
from gazette.message.envelope import Envelope
from gazette.runtime.tasks import OpFuture


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a source, at an offset."""

    journal: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Jump:
    """The next bytes of a source are at ``offset``: the bytes before it were deleted."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A source cannot be read."""

    journal: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of a `MessageProducer`, in order per journal and producer."""

    batch: Sequence[Envelope[Any]]


@dataclass(frozen=True, slots=True)
class InputEnded:
    """A `MessageProducer` brings no more messages, for now."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call on the shard's thread, between two steps of its transaction."""

    fn: Callable[[], Any]
    future: OpFuture[Any]


Event = Chunk | Jump | SourceFailed | Messages | InputEnded | Call


class Inbox:
    """Events of one shard.

    ``bytes_max`` bounds the waiting chunks of `put_chunk`. A larger chunk enters only when no chunk waits.
    The shard's thread waits on the condition ``changed``.
    """

    def __init__(
        self,
        bytes_max: int,
        loop: asyncio.AbstractEventLoop,
        changed: threading.Condition | None = None,
    ) -> None:
        self._bytes_max = bytes_max
        self._loop = loop
        self._events: deque[Event] = deque()
        self._bytes = 0
        """Bytes of the chunks that wait."""
        self.inputs = 0
        """Number of waiting events, except calls."""
        self._messages = 0
        """Number of messages of `put_messages` that wait."""
        self._changed = threading.Condition() if changed is None else changed
        """Condition on which the shard's thread waits for events, and `Feed.put` waits for room.

        Use ``notify_all``: ``notify`` may wake a waiter that cannot use the change.
        """
        self._woken = False
        """True if `get` must return even without an event: see `wake`."""
        self.stopped = False
        """True after `stop`, for good. Any thread may read it."""
        self._room = asyncio.Event()
        self._room.set()

    # Called on the event loop:

    async def put_chunk(self, chunk: Chunk) -> None:
        """Wait for room, then add a chunk. Raise ``Closed`` once stopped. A cancelled call adds nothing."""
        while True:
            with self._changed:
                if self.stopped:
                    raise Closed("the shard has stopped")
                if self._bytes == 0 or self._bytes + len(chunk.data) <= self._bytes_max:
                    self._events.append(chunk)
                    self._bytes += len(chunk.data)
                    self.inputs += 1
                    self._changed.notify_all()
                    return
                # Clear the event under the lock, so that a later ``get`` that makes room sets it again.
                self._room.clear()
            await self._room.wait()

    # Called from any thread:

    def put(self, event: Event) -> None:
        """Add an event without waiting for room. After a stop, fail a `Call` and drop any other event."""
        with self._changed:
            if not self.stopped:
                self._events.append(event)
                if not isinstance(event, Call):
                    self.inputs += 1
                if isinstance(event, Chunk):
                    self._bytes += len(event.data)
                self._changed.notify_all()
                return
        if isinstance(event, Call):
            event.future.set_exception(Closed("the shard has stopped"))

    def put_messages(self, batch: Sequence[Envelope[Any]], messages_max: int) -> None:
        """Wait until fewer than ``messages_max`` messages wait, then add ``batch``. Do not call this on the
        loop. Raise ``Closed`` once stopped."""
        with self._changed:
            while self._messages >= messages_max and not self.stopped:
                self._changed.wait()
            self.require_running()
            self._events.append(Messages(batch))
            self.inputs += 1
            self._messages += len(batch)
            self._changed.notify_all()

    def wake(self, _: object = None) -> None:
        """Make the thread decide its next step again, for example because a future is done."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Make the thread's next ``get`` raise ``Closed``. Drop waiting events, and fail waiting calls."""
        with self._changed:
            self.stopped = True
            dropped = list(self._events)
            self._events.clear()
            self._bytes = self.inputs = self._messages = 0
            self._changed.notify_all()
        for event in dropped:
            if isinstance(event, Call):
                event.future.set_exception(Closed("the shard has stopped"))
        self._loop.call_soon_threadsafe(self._room.set)  # `put_chunk` then raises ``Closed``.

    # Called on the shard's thread:

    def require_running(self) -> None:
        """Raise ``Closed`` once stopped. Call this during long work without ``get``."""
        if self.stopped:
            raise Closed("the shard has stopped")

    def get_call(self, timeout_s: float | None) -> Call | None:
        """Return the next call, or None as ``get`` does. Leave all other events for a later ``get``.

        Raise ``Closed`` once the shard has stopped.
        """
        with self._changed:
            call = self._take_call()
            if call is None and not self._woken and not self.stopped:
                self._changed.wait(timeout_s)
                call = self._take_call()
            if self.stopped:
                raise Closed("the shard has stopped")
            self._woken = False
            return call

    def _take_call(self) -> Call | None:
        for event in self._events:
            if isinstance(event, Call):
                self._events.remove(event)
                return event
        return None

    def get(self, timeout_s: float | None) -> Event | None:
        """Return the next event; None when woken, or after ``timeout_s``. Raise ``Closed`` once stopped."""
        with self._changed:
            if not self._events and not self._woken and not self.stopped:
                self._changed.wait(timeout_s)
            if self.stopped:
                raise Closed("the shard has stopped")
            self._woken = False
            return self._pop_first() if self._events else None

    def take_continuation(self, chunk: Chunk) -> Chunk | None:
        """Take the next event if it is a chunk of the same journal, which continues ``chunk``. Otherwise
        return None. Do not wait."""
        with self._changed:
            event = self._events[0] if self._events else None
            if not isinstance(event, Chunk) or event.journal != chunk.journal:
                return None
            self._pop_first()
            return event

    def _pop_first(self) -> Event:
        """Remove and return the first event. Wake callers that wait for room (of chunks: half of it)."""
        event = self._events.popleft()
        if not isinstance(event, Call):  # `inputs` counts all events but calls.
            self.inputs -= 1
        if isinstance(event, Messages):
            self._messages -= len(event.batch)
            self._changed.notify_all()
        if isinstance(event, Chunk):
            self._bytes -= len(event.data)
            if not self._room.is_set() and self._bytes * 2 <= self._bytes_max:
                self._loop.call_soon_threadsafe(self._room.set)
        return event


class Feed:
    """The queue through which a `MessageProducer` passes messages to its shard.

    Use it in any thread but the event loop's. ``put`` blocks while ``messages_max`` messages wait.
    """

    def __init__(self, inbox: Inbox, messages_max: int) -> None:
        self._inbox = inbox
        self._messages_max = messages_max
        self._ended = False

    @property
    def closed(self) -> bool:
        """True if the feed or its shard has ended: `put` raises ``Closed``."""
        return self._ended or self._inbox.stopped

    def put(self, batch: Sequence[Envelope[Any]]) -> None:
        """Put messages, in order per journal and producer. Block while ``messages_max`` messages wait.

        Raise ``Closed`` when the shard has stopped, or the feed was closed. Raise ``Bug`` on the event loop.
        """
        self._require_open()
        if asyncio._get_running_loop() is not None:
            raise Bug(
                "cannot wait for a feed on the event loop",
                hint="Use a thread, for instance: await asyncio.to_thread(feed.put, batch).",
            )
        if batch:
            self._inbox.put_messages(batch, self._messages_max)

    def close(self) -> None:
        """End the input. May be repeated.

        The shard consumes and commits the messages put so far. Then it restores the checkpoint from the
        store, and calls ``start_reading`` again with a new feed.
        """
        if not self.closed:
            self._ended = True
            self._inbox.put(InputEnded())

    def fail(self, error: Exception) -> None:
        """Make the shard fail with ``error``, because its messages cannot be read."""
        if not self.closed:
            self._ended = True
            self._inbox.put(SourceFailed("of the application", error))

    def _require_open(self) -> None:
        self._inbox.require_running()
        if self._ended:
            raise Closed("the feed was closed")
