"""Windows in a SQLite store: values by key and window. Timers of event time close windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Generic, NamedTuple, TypeVar

from gazette.consumer.application import Shard
from gazette.consumer.timers.timer import (
    KEY_BYTES_MAX,
    TimeDomain,
    Timer,
    duration_us,
    time_at,
    unix_us,
)
from gazette.errors import Invalid, InvalidValue
from gazette.message.message_time import FIRST_US, LAST_US
from gazette.message.values import ValueEncoding, finite
from gazette.stores.sqlite.definitions import define
from gazette.stores.sqlite.store import SQLiteStore
from gazette.windows.aggregate import Aggregate
from gazette.windows.spans import Hopping, Sessions, Span, Tumbling
from gazette.windows.tables import MICROSECOND, check_keeps, check_name, watermark_us

S = TypeVar("S")
V = TypeVar("V")
R = TypeVar("R")

_FINAL: Final = "final"
_EARLY: Final = "early"


@dataclass(frozen=True, slots=True)
class WindowResult(Generic[R]):
    """The value of one window of one key. ``begin`` and ``end`` are in UTC."""

    key: str
    begin: datetime
    end: datetime
    value: R
    final: bool
    """True if the window has closed. If False, the window will have further results."""


class _Open(NamedTuple):
    """A window that has not closed."""

    begin: int
    end: int
    state: str
    early: int
    """Time in Unix microseconds for which a timer for an early result is set. 0 if no timer is set, 1 if a
    former version has set the timer, for a time that is not known."""


def _window(row: Any) -> _Open:
    return _Open(*row)


def _require_years(span: Span, at: datetime) -> None:
    """Raise ``InvalidValue`` for a window that begins or ends outside of the years 1 to 9999."""
    if span[0] < FIRST_US or span[1] > LAST_US:  # A span is (begin, end).
        raise InvalidValue(
            f"a window of the time is not within the years 1 to 9999 ({at})",
            path="at",
            hint="Use None for a time that is not known, and not the end of the calendar.",
        )


class Windows(Generic[S, V, R]):
    """Windows over event time, by key, with an aggregate of their values.

        class PerMinute(Application[SQLiteStore]):
            event_time = EventTime(lateness=timedelta(seconds=10))
            clicks = Windows("clicks", Tumbling(timedelta(minutes=1)), count())

            def new_store(self, shard, recorder):
                return SQLiteStore(recorder, self.clicks.schema)

            def consume_message(self, shard, store, envelope, publisher):
                self.clicks.add(shard, store, envelope.message.user, envelope.time, 1)

            def on_timer(self, shard, store, timer, publisher):
                for result in self.clicks.on_timer(shard, store, timer):
                    publisher.publish_uncommitted(...)

    A window closes when the watermark reaches its end, and then has one final result. Queries may read
    the rows of open windows in the table ``name``: ``key``, ``begin`` and ``end`` in Unix microseconds, and
    ``state`` as JSON.

    With ``early``, a changed window also has results before it closes: at most one in each interval of
    ``early``, by the clock of the member.
    """

    def __init__(
        self,
        name: str,
        spans: Tumbling | Hopping | Sessions,
        aggregate: Aggregate[S, V, R],
        *,
        early: timedelta | None = None,
    ) -> None:
        """Create windows. Raise ``Invalid`` for a bad name, for ``spans`` of another type, and for an
        ``early`` below 1 µs. Raise ``Invalid`` also for a ``state_type`` that JSON cannot hold, and for
        `Sessions` if the aggregate has no ``merge``.
        """
        if not isinstance(spans, Tumbling | Hopping | Sessions):
            raise Invalid(
                f"spans are of type {type(spans).__name__}",
                path="spans",
                hint="Use Tumbling, Hopping or Sessions.",
            )
        if isinstance(spans, Sessions) and aggregate.merge is None:
            raise Invalid(
                "the aggregate of sessions has no merge",
                path="aggregate",
                hint="Give Aggregate(merge=…): a message may join two sessions.",
            )
        if early is not None:
            duration_us("early", early, MICROSECOND)
        self.name = check_name(name, "windows")
        self._table = f'"{name}"'
        self.spans = spans
        self.aggregate = aggregate
        self.early = early
        self._states: ValueEncoding[S] = ValueEncoding(aggregate.state_type, "aggregate.state_type")

    @property
    def schema(self) -> str:
        """SQL that creates the table if it is absent, and stores the definition of the windows."""
        return define(
            self.name,
            kind="windows",
            key="text",
            spans=str(self.spans),
            aggregate=self.aggregate.name,
            state=self._states.identity,
        ) + (
            f"CREATE TABLE IF NOT EXISTS {self._table} (key TEXT NOT NULL, begin INTEGER NOT NULL,"
            " end INTEGER NOT NULL, state TEXT NOT NULL, early INTEGER NOT NULL,"
            " PRIMARY KEY (key, begin)) WITHOUT ROWID;\n"
        )

    def add(self, shard: Shard, store: SQLiteStore, key: str, at: datetime, value: V) -> bool:
        """Add a value to the windows of its key and time.

        Return False, and change nothing, if the value is late: all its windows have closed. Raise
        ``Invalid`` for another kind of store. Raise ``InvalidValue``, and change nothing, for a bad key or
        time, for a state that would not read back equal, or for a result that is NaN, infinite or too
        large. Raise ``NotAllowed`` if the application has no ``event_time``.
        """
        key = check_keeps(store, key, "windows")
        closed_us = watermark_us(shard)
        try:
            if isinstance(self.spans, Sessions):
                span = self.spans.span_of(unix_us(at))
                return self._add_to_session(shard, store, key, span, value, closed_us)
            return self._add_to_spans(shard, store, key, at, value, closed_us)
        except InvalidValue as error:
            error.facts |= {"windows": self.name, "key": key}
            raise

    def _add_to_spans(
        self,
        shard: Shard,
        store: SQLiteStore,
        key: str,
        at: datetime,
        value: V,
        closed_us: int | None,
    ) -> bool:
        """Add a value to the windows of its time that end after ``closed_us``. Return False for no window."""
        assert not isinstance(self.spans, Sessions)
        all_spans = self.spans.spans_of(unix_us(at))
        spans = [(begin, end) for begin, end in all_spans if closed_us is None or end > closed_us]
        for span in spans:
            _require_years(span, at)
        # Compute all states first: a value that the aggregate refuses must change no window.
        changed = [(span, *self._with_value(store, key, span, value)) for span in spans]
        for span, former, state in changed:
            if former is None:
                self._schedule(shard, key, span)
            self._put(shard, store, key, span, state, former)
        return bool(spans)

    def _with_value(
        self, store: SQLiteStore, key: str, span: Span, value: V
    ) -> tuple[_Open | None, str]:
        """Return the present window or None, and the encoded state with the value added."""
        rows = store.execute(
            f"SELECT begin, end, state, early FROM {self._table} WHERE key = ? AND begin = ?",  # noqa: S608
            (key, span[0]),
        ).fetchall()
        former = _window(rows[0]) if rows else None
        state = self.aggregate.zero() if former is None else self._decode(key, former)
        return former, self._encode(self.aggregate.add(state, value))

    def _add_to_session(
        self,
        shard: Shard,
        store: SQLiteStore,
        key: str,
        span: Span,
        value: V,
        closed_us: int | None,
    ) -> bool:
        """Merge the open sessions that ``span`` touches, and add a value. If there are none, begin a session.

        Return False if the span touches no open session, and the watermark ``closed_us`` has reached the end
        of the span.
        """
        begin, end = span
        touched = [
            _window(row)
            for row in store.execute(
                f"SELECT begin, end, state, early FROM {self._table}"  # noqa: S608
                " WHERE key = ? AND begin < ? AND end > ? ORDER BY begin",
                (key, end, begin if closed_us is None else max(begin, closed_us)),
            ).fetchall()
        ]
        if not touched and closed_us is not None and end <= closed_us:
            return False
        _require_years(span, time_at(begin))
        merged_span = (
            min([begin, *(session.begin for session in touched)]),
            max([end, *(session.end for session in touched)]),
        )
        # Add the value to the first session, and merge the other sessions in the order of their begins.
        first = self.aggregate.zero() if not touched else self._decode(key, touched[0])
        state = self.aggregate.add(first, value)
        for session in touched[1:]:
            state = self._merge(state, self._decode(key, session))
        text = self._encode(state)
        kept_session: _Open | None = None
        for session in touched:
            if session.begin == merged_span[0]:
                kept_session = session
                continue
            store.execute(
                f"DELETE FROM {self._table} WHERE key = ? AND begin = ?",  # noqa: S608
                (key, session.begin),
            )
            self._cancel(shard, _FINAL, session, key)
            if session.early:
                self._cancel(shard, _EARLY, session, key)
        if kept_session is None or kept_session.end != merged_span[1]:
            self._schedule(shard, key, merged_span)
        self._put(shard, store, key, merged_span, text, kept_session)
        return True

    def _put(
        self,
        shard: Shard,
        store: SQLiteStore,
        key: str,
        span: Span,
        state: str,
        former: _Open | None,
    ) -> None:
        """Write a window in place of ``former``. Set the timer of its early result, unless it is set already.

        Set the timer again if it is overdue by ``early``, since a poison policy may have skipped it.
        """
        begin, end = span
        early = 0 if former is None else former.early
        if self.early is not None:
            now, early_us = shard.now, duration_us("early", self.early)
            if not early or early + early_us <= unix_us(now):
                at = now if early else now + self.early
                timer, payload = self._timer(_EARLY, begin, key)
                shard.schedule(timer, at, payload)
                early = unix_us(at)
        store.execute(
            f"INSERT INTO {self._table} VALUES (?, ?, ?, ?, ?) ON CONFLICT (key, begin) DO UPDATE"  # noqa: S608
            " SET end = excluded.end, state = excluded.state, early = excluded.early",
            (key, begin, end, state, early),
        )

    def _schedule(self, shard: Shard, key: str, span: Span) -> None:
        timer, payload = self._timer(_FINAL, span[0], key)
        shard.schedule(timer, time_at(span[1]), payload, domain=TimeDomain.EVENT)

    def _cancel(self, shard: Shard, kind: str, window: _Open, key: str) -> None:
        domain = TimeDomain.EVENT if kind == _FINAL else TimeDomain.PROCESSING
        shard.cancel(self._timer(kind, window.begin, key)[0], domain=domain)

    def _timer(self, kind: str, begin: int, key: str) -> tuple[str, bytes]:
        """Return key and payload of a timer. If the window's key is too long, put it into the payload."""
        name = f"{self.name}:{kind}:{begin}:{key}"
        encoded = key.encode()
        if len(name) - len(key) + len(encoded) <= KEY_BYTES_MAX:
            return name, b""
        return f"{self.name}:{kind}#:{begin}:{sha256(encoded).hexdigest()}", encoded

    def _encode(self, state: S) -> str:
        """Return a state as JSON. Raise ``InvalidValue`` for a state without a valid result."""
        text = self._states.encode(state, "state").decode()
        self._result(state)
        return text

    def _result(self, state: S) -> R:
        """Return the result of a state. Raise ``InvalidValue`` if it is NaN, infinite or not computable."""
        try:
            return finite(self.aggregate.result(state), "result")
        except ArithmeticError as error:
            raise InvalidValue(
                f"cannot be computed: {error}",
                path="result",
                hint="Leave such values out, or have Aggregate(result=…) return None.",
            ) from error

    def _merge(self, earlier: S, later: S) -> S:
        assert self.aggregate.merge is not None
        return self.aggregate.merge(earlier, later)

    def _decode(self, key: str, window: _Open) -> S:
        return self._states.decode(window.state, "state", windows=self.name, key=key)

    def on_timer(self, shard: Shard, store: SQLiteStore, timer: Timer) -> Sequence[WindowResult[R]]:
        """Return the result of a timer's window. Close the window if the result is final.

        Call this for each timer: it returns an empty list for timers of other objects, and of windows that
        are gone. Raise ``InvalidValue`` for a result that is NaN, infinite or too large: another version of
        the aggregate must have written the state.
        """
        return list(self._results(shard, store, timer))

    def _results(self, shard: Shard, store: SQLiteStore, timer: Timer) -> Iterator[WindowResult[R]]:
        """Yield at most one result: no result for a timer of another object or of a window that is gone."""
        # The parts of a timer's key: see `_timer`.
        name, _, remainder = timer.key.partition(":")
        kind, _, remainder = remainder.partition(":")
        begin, _, key = remainder.partition(":")
        if kind.endswith("#"):
            kind, key = kind[:-1], timer.payload.decode()
        if name != self.name or kind not in (_FINAL, _EARLY):
            return
        window_id = (key, int(begin))
        rows = store.execute(
            f"SELECT begin, end, state, early FROM {self._table} WHERE key = ? AND begin = ?",  # noqa: S608
            window_id,
        ).fetchall()
        if not rows:
            return
        window = _window(rows[0])
        if kind == _EARLY:
            store.execute(
                f"UPDATE {self._table} SET early = 0 WHERE key = ? AND begin = ?",  # noqa: S608
                window_id,
            )
        else:
            store.execute(f"DELETE FROM {self._table} WHERE key = ? AND begin = ?", window_id)  # noqa: S608
            if window.early:
                self._cancel(shard, _EARLY, window, key)
        try:
            value = self._result(self._decode(key, window))
        except InvalidValue as error:
            error.facts |= {"windows": self.name, "key": key}
            raise
        yield WindowResult(key, time_at(window.begin), time_at(window.end), value, kind == _FINAL)
