"""Timers of one shard, which callbacks set and cancel, and the choice of the timer that fires next.

The timers are rows of the store's `TimerTable`. For each domain, memory has a lower bound of the first timer,
and the position up to which the present pass has fired timers.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from gazette.consumer.application import Application, MessageProducer, Shard, Store
from gazette.consumer.timers.timer import (
    BEFORE_ALL,
    EventTime,
    Position,
    TimeDomain,
    Timer,
    TimerRow,
    TimerTable,
    check_domain,
    check_key,
    check_payload,
    time_at,
    unix_us,
)
from gazette.consumer.timers.watermark import Watermark
from gazette.errors import Invalid, NotAllowed
from gazette.message.envelope import Envelope
from gazette.message.message_time import TimeReader
from gazette.protocol.ids import JournalName, split_journal_meta
from gazette.protocol.journal import JournalSpec
from gazette.runtime.clock import Clock

LOOK_S: Final = 30.0
"""Longest wait for timers, in seconds, since the wall clock may jump."""
_TICK_S: Final = 0.001
"""Shortest wait, in seconds."""


class _Queue:
    """Timers of one domain, and the progress of the present pass over them.

    ``cursor`` is the position of the last timer that fired in this pass. ``ahead_from`` is a lower bound of
    the timers after ``cursor``. ``behind_from`` is a lower bound of the other timers, which wait for the next
    pass. A bound is None if there are no such timers.
    """

    def __init__(self, domain: TimeDomain, table: TimerTable) -> None:
        self.domain = domain
        self.table = table
        self.cursor: Position = BEFORE_ALL
        self.ahead_from = self._first_after(BEFORE_ALL)
        self.behind_from: Position | None = None
        self.cancelled_keys: set[str] | None = None
        """Keys that callbacks have cancelled or replaced during the present batch; None between batches."""

    def _first_after(self, after: Position) -> Position | None:
        at_us = self.table.first(self.domain, after)
        return None if at_us is None else (at_us, "")  # A lower bound: no key is less than "".

    def put(self, row: TimerRow) -> None:
        """Set a timer. If its position is not after the cursor, it waits for the next pass."""
        self._note_cancelled(row.key)
        self.table.put(self.domain, row)
        if row.position <= self.cursor:
            self.behind_from = _least(self.behind_from, row.position)
        else:
            self.ahead_from = _least(self.ahead_from, row.position)

    def remove(self, key: str) -> None:
        self._note_cancelled(key)
        self.table.remove(self.domain, key)

    def _note_cancelled(self, key: str) -> None:
        if self.cancelled_keys is not None:
            self.cancelled_keys.add(key)

    def begin_pass(self) -> None:
        """Begin a pass with the first timer: timers that waited for the next pass may fire now."""
        if self.cursor is not BEFORE_ALL:
            self.cursor = BEFORE_ALL
            self.ahead_from = _least(self.ahead_from, self.behind_from)
            self.behind_from = None

    def is_due(self, until_us: int | None) -> bool:
        """Return True if a timer of this pass may be due, by the lower bound ``ahead_from``."""
        return (
            until_us is not None and self.ahead_from is not None and self.ahead_from[0] <= until_us
        )

    def confirm(self, until_us: int | None) -> bool:
        """Return True if a timer is due. Read the store only if `is_due` returns True."""
        if self.is_due(until_us):
            self.ahead_from = self._first_after(self.cursor)
        return self.is_due(until_us)

    def fire(self, until_us: int, limit: int) -> Iterator[TimerRow]:
        """Yield timers that are due, in order, and remove them from the table. If a callback sets an earlier
        timer, put back the timers that have not fired, and end."""
        rows = self.table.take(self.domain, self.cursor, until_us, limit)
        last = rows[-1].position if rows else self.cursor
        # If there are `limit` rows, more timers may follow `last`. Setting a timer lowers `ahead_from`.
        self.ahead_from = last if len(rows) == limit else self._first_after(last)
        self.cancelled_keys = set()
        try:
            for index, row in enumerate(rows):
                if row.key in self.cancelled_keys:
                    continue
                position = row.position  # Only a callback can have set a timer before it.
                if self.ahead_from is not None and self.ahead_from < position:
                    self._put_back(rows[index:])
                    return
                self.cursor = position
                yield row
        finally:
            self.cancelled_keys = None

    def _put_back(self, rows: Collection[TimerRow]) -> None:
        """Put timers back into the table, since a callback has set an earlier timer, at ``ahead_from``."""
        assert self.cancelled_keys is not None
        for row in rows:
            if row.key not in self.cancelled_keys:
                self.table.put(self.domain, row)


def _least(one: Position | None, other: Position | None) -> Position | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


class ShardTimers:
    """Timers of one shard, from its promotion on. Belongs to the shard's thread. Callbacks set and cancel
    timers between `begin` and `finish`."""

    def __init__(
        self,
        open_table: Callable[[], TimerTable],
        event_time: EventTime | None,
        sources: Collection[JournalName],
        clock: Clock,
        shard_id: str,
        times: Mapping[JournalName, str] = MappingProxyType({}),
    ) -> None:
        """Look for the first timers, and restore the watermark. The store's errors reach the caller.
        ``times`` is the result of `declared_times`. For ``NotAllowed`` see `reload`."""
        self._open_table = open_table
        self._event_time = event_time
        self._sources = sources
        self._times = times
        self._clock = clock
        self._shard_id = shard_id
        self._thread = threading.get_ident()
        self._in_transaction = False
        """True from `begin` to `finish`: callbacks may set timers."""
        self._now_us = 0
        """Greatest time that the wall clock has shown, in Unix microseconds."""
        self._processing_turn = True
        """True if timers of processing time fire before messages that are ready."""
        self._table: TimerTable
        self._stored_watermark: bytes | None = None
        """State of the watermark in the store."""
        self._watermark: Watermark | None = None
        self._processing_queue: _Queue
        self._event_queue: _Queue
        self._firing_queue: _Queue
        """Queue whose timers fire in the present batch."""
        self.reload()

    def reload(self) -> None:
        """Read the timers of the store again, after its checkpoint was restored or its changes were undone.
        Raise ``NotAllowed`` if the store has timers of event time, and the application defines no event time.
        """
        self._table = self._open_table()
        self._in_transaction = False
        self._processing_queue = _Queue(TimeDomain.PROCESSING, self._table)
        self._event_queue = _Queue(TimeDomain.EVENT, self._table)
        self._stored_watermark = self._table.event_time()
        if self._event_time is not None:
            now = self._clock_s()
            self._watermark = Watermark(self._event_time, self._sources, now, self._times)
            if self._stored_watermark is not None:
                self._watermark.restore(self._stored_watermark)
        elif self._event_queue.ahead_from is not None:
            raise NotAllowed(
                "the state holds timers of event time, and the application defines none",
                shard=self._shard_id,
                hint="Set the class attribute event_time again, such as event_time = EventTime().",
            )

    # Methods for callbacks.

    @property
    def now(self) -> datetime:
        """Processing time, in UTC. It never goes back while the shard is primary here."""
        return time_at(self._look_at_clock())

    @property
    def watermark(self) -> datetime | None:
        """Watermark, in UTC; None while it is not known. Raises ``NotAllowed`` without event time."""
        if self._watermark is None:
            raise _no_event_time(self._shard_id)
        value = self._watermark.value
        return None if value is None else time_at(value)

    def schedule(self, key: str, at: datetime, payload: bytes, domain: TimeDomain) -> None:
        """Set a timer. Raise ``InvalidValue`` for a bad key, time or payload. For ``NotAllowed`` see
        `_queue`."""
        queue = self._queue(domain)
        queue.put(TimerRow(unix_us(at), check_key(key), check_payload(payload)))

    def cancel(self, key: str, domain: TimeDomain) -> None:
        """Remove a timer, if it exists. Raise ``InvalidValue`` for a bad key. For ``NotAllowed`` see
        `_queue`."""
        self._queue(domain).remove(check_key(key))

    def _queue(self, domain: TimeDomain) -> _Queue:
        """Return the queue of a domain. Raise ``NotAllowed`` on another thread, outside of a transaction, and
        for event time if the application defines no event time."""
        if threading.get_ident() != self._thread:
            raise NotAllowed(
                "timers are set and cancelled on the shard's own thread",
                shard=self._shard_id,
                hint="Call schedule() and cancel() within a callback, and not in a query or a thread.",
            )
        if not self._in_transaction:
            raise NotAllowed(
                "timers are set and cancelled within a transaction",
                shard=self._shard_id,
                hint="Call schedule() and cancel() in consume_message, on_timer, begin_transaction or"
                " finalize_transaction.",
            )
        if check_domain(domain) is TimeDomain.PROCESSING:
            return self._processing_queue
        if self._watermark is None:
            raise _no_event_time(self._shard_id)
        return self._event_queue

    # Methods for the transactor.

    @property
    def observes(self) -> bool:
        """True if the application has event time: call `observe` for each message."""
        return self._watermark is not None

    def begin(self) -> None:
        """Begin a transaction: from now on, callbacks may set timers."""
        self._in_transaction = True
        self._processing_turn = True
        self.begin_pass()

    def finish(self) -> None:
        """End the transaction before it commits: write the watermark to the store if it has changed."""
        if self._watermark is not None:
            value = self._watermark.to_bytes()
            if value != self._stored_watermark:
                self._table.set_event_time(value)
                self._stored_watermark = value
        self._in_transaction = False
        self.begin_pass()  # The next transaction may begin with a timer after the cursor.

    def begin_pass(self) -> None:
        """Begin a pass: timers that were set for a time before the last fired timer may fire now."""
        self._processing_queue.begin_pass()
        self._event_queue.begin_pass()

    def take_turns(self) -> None:
        """Let timers of processing time fire next, after a turn of messages or input."""
        self._processing_turn = True

    def observe(self, envelope: Envelope[Any]) -> bool:
        """Note that a message was consumed. Return True if a timer of event time may be due now."""
        watermark = self._watermark
        assert watermark is not None
        if (at_us := envelope.event_us) is not None:
            watermark.observe(envelope.journal, at_us)
        return self._event_queue.is_due(watermark.value)

    def is_due(self, *, ready: bool) -> bool:
        """Return True if a timer may be due. While messages are ``ready``, timers of processing time and
        messages take turns."""
        if self._watermark is not None:
            self._watermark.watch(self._clock_s())
            if self._event_queue.is_due(self._watermark.value):
                return True
        if self._processing_queue.ahead_from is None or (ready and not self._processing_turn):
            return False
        return self._processing_queue.is_due(self._look_at_clock())

    def confirm_due(self) -> bool:
        """Return True if a timer is due. Read the store, since the first timer may have been cancelled."""
        event = self._watermark is not None and self._event_queue.confirm(self._watermark.value)
        processing = self._processing_queue.confirm(self._look_at_clock())
        return event or processing

    def fire(self, limit: int) -> Iterator[Timer]:
        """Yield at most ``limit`` due timers of one domain, in order, and remove them from the store. The
        domain is event time if a timer of event time is due, otherwise processing time."""
        watermark = None if self._watermark is None else self._watermark.value
        if watermark is not None and self._event_queue.is_due(watermark):
            queue, until_us = self._event_queue, watermark
        else:
            queue, until_us = self._processing_queue, self._look_at_clock()
            self._processing_turn = False
        self._firing_queue = queue
        for row in queue.fire(until_us, limit):
            yield Timer(row.key, time_at(row.at_us), row.payload, queue.domain)

    def cancelled_keys(self) -> frozenset[str]:
        """Return the keys that callbacks have cancelled or replaced in this batch."""
        return frozenset(self._firing_queue.cancelled_keys or ())

    def clear(self) -> None:
        """Remove all timers and the watermark, because another state replaces this state."""
        self._table.clear()
        self.reload()

    def restore_cancelled_keys(self, cancelled_keys: frozenset[str]) -> None:
        """Undo cancellations in the present batch, after a savepoint has undone them in the store.
        ``cancelled_keys`` is the result of `cancelled_keys` at the savepoint."""
        self._firing_queue.cancelled_keys = set(cancelled_keys)

    def wait_s(self) -> float | None:
        """Return the seconds until the next look at timers; None if only messages can make a timer due."""
        waits = [LOOK_S, self.next_s()]
        if waits[1] is None:
            return None
        return max(_TICK_S, min(wait for wait in waits if wait is not None))

    def next_s(self) -> float | None:
        """Return the seconds until the first timer of processing time or, if timers of event time wait, until
        a source becomes idle, if that is earlier. Return None if there is nothing to wait for."""
        waits = []
        if self._processing_queue.ahead_from is not None:
            at_us = self._processing_queue.ahead_from[0]
            # A timer that is not due waits for the wall clock. If that clock went back, the wait is longer
            # than `_now_us` shows.
            is_due = at_us <= self._look_at_clock()
            waits.append((at_us - (self._now_us if is_due else self._clock_us())) / 1e6)
        if self._watermark is not None and self._event_queue.ahead_from is not None:
            idle_at = self._watermark.next_idle_at
            if idle_at is not None:
                waits.append(idle_at - self._clock_s())
        return min(waits, default=None)

    def _look_at_clock(self) -> int:
        self._now_us = max(self._now_us, self._clock_us())
        return self._now_us

    def _clock_us(self) -> int:
        return round(self._clock.now() * 1e6)

    def _clock_s(self) -> float:
        return self._clock.monotonic()


def _no_event_time(shard_id: str) -> NotAllowed:
    return NotAllowed(
        "the application has no event time",
        shard=shard_id,
        hint="Set the class attribute event_time, such as event_time ="
        " EventTime(lateness=timedelta(seconds=10)).",
    )


def defines_timers(application: Application[Any]) -> bool:
    """Return True if an application defines ``on_timer``."""
    callback = application.on_timer
    return getattr(callback, "__func__", callback) is not Application.on_timer


def times_of(
    application: Application[Any], journal: JournalSpec, clock: Clock
) -> TimeReader | None:
    """Return the reader of the declared times of a journal's messages; None if no time is declared."""
    time = application.message_time_of(journal)
    return None if time is None else TimeReader(time, clock.now)


def open_timers(
    application: Application[Any],
    shard: Shard,
    store: Store,
    clock: Clock,
    sources: Collection[JournalName] | None = None,
) -> ShardTimers | None:
    """Return the timers of a shard, or None if its application defines no ``on_timer``.

    Call this on the shard's thread, once the checkpoint is restored. ``sources`` hold the watermark back
    (default: the sources of the shard). Raise ``NotAllowed`` for a store without timers, and for a state with
    timers that the application would not handle. Raise ``Invalid`` for an ``event_time`` of another type.
    """
    if not defines_timers(application):
        if store.holds_timers:
            raise NotAllowed(
                f"the state holds timers, and {type(application).__name__} defines no on_timer",
                shard=shard.id,
                hint="Define on_timer again. To drop the timers, let it do nothing.",
            )
        return None
    event_time: object = application.event_time
    if event_time is not None and not isinstance(event_time, EventTime):
        raise Invalid(
            f"event_time is of type {type(event_time).__name__}",
            path="event_time",
            hint="Set event_time = EventTime(lateness=timedelta(seconds=10)).",
        )
    if isinstance(application, MessageProducer):
        sources = ()
    elif sources is None:
        sources = tuple(source.journal for source in shard.spec.sources)
    declared = declared_times(application, shard)
    return ShardTimers(
        lambda: store.timer_table(shard), event_time, sources, clock, shard.id, declared
    )


def declared_times(application: Application[Any], shard: Shard) -> dict[JournalName, str]:
    """Return the text of each declared time, by source. A source without a declared time has no entry."""
    if isinstance(application, MessageProducer):
        return {}
    times = {}
    for source in shard.spec.sources:
        time = application.message_time_of(JournalSpec(split_journal_meta(source.journal)[0]))
        if time is not None:
            times[source.journal] = time.text
    return times


class WithTimers(ABC):
    """The methods of a shard by which callbacks set timers."""

    @abstractmethod
    def _open_timers(self) -> ShardTimers:
        """Return the timers. Raise ``NotAllowed`` for a shard without timers."""

    @property
    def now(self) -> datetime:
        return self._open_timers().now

    @property
    def watermark(self) -> datetime | None:
        return self._open_timers().watermark

    def schedule(
        self,
        key: str,
        at: datetime,
        payload: bytes = b"",
        *,
        domain: TimeDomain = TimeDomain.PROCESSING,
    ) -> None:
        self._open_timers().schedule(key, at, payload, domain)

    def cancel(self, key: str, *, domain: TimeDomain = TimeDomain.PROCESSING) -> None:
        self._open_timers().cancel(key, domain)


def no_timers(application: Application[Any] | None, shard_id: str) -> NotAllowed:
    """Return the error of a shard that has no timers, or whose timers are not open yet."""
    if application is not None and not defines_timers(application):
        return NotAllowed(
            f"{type(application).__name__} defines no on_timer, so nothing would fire a timer",
            shard=shard_id,
            hint="Define on_timer(shard, store, timer, publisher).",
        )
    return NotAllowed(
        "timers are set and cancelled within a transaction",
        shard=shard_id,
        hint="Call schedule() and cancel() in consume_message, on_timer, begin_transaction or"
        " finalize_transaction.",
    )
