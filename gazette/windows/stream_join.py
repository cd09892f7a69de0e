"""Joins of two streams: messages with the same key, whose times are within a bound."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Generic

from gazette.consumer.application import Shard
from gazette.consumer.timers.timer import Timer, duration_us, time_at, unix_us
from gazette.errors import Invalid
from gazette.message.values import ValueEncoding
from gazette.stores.sqlite.definitions import define
from gazette.stores.sqlite.store import SQLiteStore
from gazette.windows.tables import (
    Sweep,
    check_keeps,
    check_name,
    duration,
    watermark_us,
)

if TYPE_CHECKING:
    # This TypeVar has defaults, so that a join without types needs no annotation.
    from typing_extensions import TypeVar

    L = TypeVar("L", default=Any)
    R = TypeVar("R", default=Any)
else:
    from typing import TypeVar

    L = TypeVar("L")
    R = TypeVar("R")

_LEFT: Final = 0
_RIGHT: Final = 1
_NAMES: Final = ("left", "right")
_NEVER: Final = -(1 << 63)
"""A watermark before all times."""


class JoinKind(enum.Enum):
    """The sides whose messages give a result even without a partner."""

    INNER = "inner"
    """No messages without a partner."""
    LEFT = "left"
    """Messages of the left side."""
    OUTER = "outer"
    """Messages of both sides."""


@dataclass(frozen=True, slots=True)
class JoinResult(Generic[L, R]):
    """A pair of messages, with times in UTC. If a partner is missing, its message and time are None."""

    key: str
    left: L | None
    right: R | None
    left_at: datetime | None
    right_at: datetime | None


@dataclass(frozen=True, slots=True)
class JoinOutcome(Generic[L, R]):
    """The outcome of adding a message."""

    late: bool
    """True if the message came too late for any possible partner, and so changed nothing. A message a little
    behind the watermark may not be late: it pairs with the partners that are still in the table."""
    pairs: Sequence[JoinResult[L, R]]
    """The message with each partner so far, in the order of the partners' times."""


class StreamJoin(Generic[L, R]):
    """Joins messages of two streams, by key, within a bound of event time.

        class Bought(Application[SQLiteStore]):
            event_time = EventTime(lateness=timedelta(seconds=10))
            views = Source("views", View, key="user")
            orders = Source("orders", Order, key="user")
            bought = StreamJoin(
                "bought",
                before=timedelta(0),
                after=timedelta(hours=1),
                left_type=View,
                right_type=Order,
            )

            def new_store(self, shard, recorder):
                return SQLiteStore(recorder, self.bought.schema)

            def consume_message(self, shard, store, envelope, publisher):
                message = envelope.message
                side = self.bought.add_left if isinstance(message, View) else self.bought.add_right
                for pair in side(shard, store, message.user, envelope.time, message).pairs:
                    publisher.publish_uncommitted(...)

            def on_timer(self, shard, store, timer, publisher):
                for alone in self.bought.on_timer(shard, store, timer):
                    publisher.publish_uncommitted(...)

    A right message is a partner of a left message if it has the same key, and is at most ``before`` earlier
    and at most ``after`` later. Both bounds are inclusive. The call that adds the second message of a pair
    returns the pair, unless the first message was removed. A message waits until the watermark has passed
    the last possible time of a partner, and is then removed. `on_timer` returns messages that found no
    partner, if the ``kind`` asks for them.

    Values are kept as JSON, in the table ``name``. Their types are ``left_type`` and ``right_type``. Without
    a type, a side has only values of JSON. Type checkers check calls and results by these types. If a type
    is no class, such as a union, write both types: ``StreamJoin[View, Put | Delete](…)``.
    """

    def __init__(
        self,
        name: str,
        *,
        before: timedelta,
        after: timedelta,
        kind: JoinKind = JoinKind.INNER,
        left_type: type[L] | UnionType | None = None,
        right_type: type[R] | UnionType | None = None,
    ) -> None:
        """Create a join. Raise ``Invalid`` for a bad name, bound or kind."""
        if not isinstance(kind, JoinKind):
            raise Invalid(
                f"kind is of type {type(kind).__name__}",
                path="kind",
                hint="Use JoinKind.INNER, JoinKind.LEFT or JoinKind.OUTER.",
            )
        self.name = check_name(name, "a join")
        self.kind = kind
        self._before = duration_us("before", before)
        self._after = duration_us("after", after)
        self._table = f'"{name}"'
        self._sweep = Sweep(name, self._table)
        self._sides: Sequence[ValueEncoding[Any]] = (
            ValueEncoding(Any if left_type is None else left_type, "left_type"),
            ValueEncoding(Any if right_type is None else right_type, "right_type"),
        )

    @property
    def schema(self) -> str:
        """SQL that creates the table if it is absent, and stores the definition of the join."""
        return define(
            self.name,
            kind="join of streams",
            key="text",
            before=duration(self._before),
            after=duration(self._after),
            results=self.kind.value,
            left=self._sides[_LEFT].identity,
            right=self._sides[_RIGHT].identity,
        ) + (
            f"CREATE TABLE IF NOT EXISTS {self._table} (key TEXT NOT NULL, side INTEGER NOT NULL,"
            " at INTEGER NOT NULL, number INTEGER NOT NULL, due INTEGER NOT NULL,"
            " paired INTEGER NOT NULL, value TEXT NOT NULL,"
            " PRIMARY KEY (key, side, at, number)) WITHOUT ROWID;\n"
            f'CREATE INDEX IF NOT EXISTS "{self.name}.due" ON {self._table} (due);\n'
        )

    def add_left(
        self, shard: Shard, store: SQLiteStore, key: str, at: datetime, value: L
    ) -> JoinOutcome[L, R]:
        """Add a message of the left side. Return its pairs with messages that were added before.

        Raise ``Invalid`` for another kind of store. Raise ``InvalidValue`` for a bad key or time, or for a
        value that would not read back equal. Raise ``NotAllowed`` if the application has no ``event_time``.
        """
        return self._add(shard, store, _LEFT, key, unix_us(at), value)

    def add_right(
        self, shard: Shard, store: SQLiteStore, key: str, at: datetime, value: R
    ) -> JoinOutcome[L, R]:
        """Add a message of the right side. Return its pairs with messages that were added before. Raise the
        errors of `add_left`."""
        return self._add(shard, store, _RIGHT, key, unix_us(at), value)

    def _add(
        self, shard: Shard, store: SQLiteStore, side: int, key: str, at: int, value: Any
    ) -> JoinOutcome[L, R]:
        key = check_keeps(store, key, "a join")
        text = self._sides[side].encode(value, _NAMES[side], join=self.name, key=key).decode()
        watermark = watermark_us(shard)
        earlier, later = self._before, self._after  # Greatest distances of partners from `at`.
        if side == _RIGHT:
            earlier, later = later, earlier
        # A message at the watermark is not late: a row is due 1 µs after the last possible partner.
        due = at + later + 1
        if watermark is not None and due <= watermark:
            return JoinOutcome(True, ())
        other = 1 - side
        partners = store.execute(
            f"SELECT at, number, value FROM {self._table}"  # noqa: S608
            " WHERE key = ? AND side = ? AND at BETWEEN ? AND ? AND due > ? ORDER BY at, number",
            (key, other, at - earlier, at + later, _NEVER if watermark is None else watermark),
        ).fetchall()
        self._sweep.add(shard, store, due)
        store.execute(
            f"INSERT INTO {self._table}"  # noqa: S608
            " SELECT ?1, ?2, ?3, ifnull(max(number) + 1, 0), ?4, ?5, ?6"
            f" FROM {self._table} WHERE key = ?1 AND side = ?2 AND at = ?3",
            (key, side, at, due, int(bool(partners)), text),
        )
        if not partners:
            return JoinOutcome(False, ())
        if self.kind is not JoinKind.INNER:
            store.executemany(
                f"UPDATE {self._table} SET paired = 1"  # noqa: S608
                " WHERE key = ? AND side = ? AND at = ? AND number = ? AND paired = 0",
                [(key, other, pair_at, number) for pair_at, number, _ in partners],
            )
        # Decode both values, so that both have the declared types.
        own = (side, at, text)
        pairs = [
            self._joined(key, own, (other, pair_at, partner)) for pair_at, _, partner in partners
        ]
        return JoinOutcome(False, pairs)

    def on_timer(
        self, shard: Shard, store: SQLiteStore, timer: Timer
    ) -> Sequence[JoinResult[L, R]]:
        """Remove messages that can have no further partner, some at a time. Return the removed messages that
        found no partner, if the ``kind`` asks for their side.

        Call this for each timer: it returns nothing for timers of other objects.
        """
        if timer.key != self._sweep.key:
            return ()
        watermark = watermark_us(shard)
        assert watermark is not None
        until = self._sweep.until(store, watermark)
        unpaired: list[JoinResult[L, R]] = []
        if self.kind is not JoinKind.INNER:
            # Return unpaired messages of both sides, or only of the left side.
            last_side = _RIGHT if self.kind is JoinKind.OUTER else _LEFT
            rows: list[Any] = store.execute(
                f"SELECT key, side, at, value FROM {self._table}"  # noqa: S608
                " WHERE due <= ? AND paired = 0 AND side <= ? ORDER BY due, key, side, at, number",
                (until, last_side),
            ).fetchall()
            unpaired = [self._joined(key, (side, at_us, text)) for key, side, at_us, text in rows]
        store.execute(f"DELETE FROM {self._table} WHERE due <= ?", (until,))  # noqa: S608
        self._sweep.set(shard, store)
        return unpaired

    def _joined(self, key: str, *rows: Sequence[Any]) -> JoinResult[L, R]:
        """Return the result of one row or a pair. A row is its side, its time in Unix µs, and its value."""
        values: list[Any] = [None, None]
        times: list[datetime | None] = [None, None]
        for side, at_us, text in rows:
            values[side] = self._sides[side].decode(text, _NAMES[side], join=self.name, key=key)
            times[side] = time_at(at_us)
        return JoinResult(key, *values, *times)
