"""The mistakes, as small changes of the source, and the tests that find each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Plant:
    """A mistake: ``right`` becomes ``wrong``, once, in the file ``path``."""

    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def made_in(self, text: str) -> str:
        """Return the text of the file with the mistake. Raise ``ValueError`` if it does not apply once."""
        if text.count(self.right) != 1:
            raise ValueError(f"{self.path} has {text.count(self.right)} times {self.right!r}")
        return text.replace(self.right, self.wrong)


_TIMERS: Final = "gazette/consumer/timers/"
_STORES: Final = "gazette/stores/"
_WINDOWS: Final = "gazette/windows/"
_LISTS: Final = "gazette/consumer/query/all_shards.py"

_HISTORIES: Final = ("tests/stores/test_timer_histories.py",)
_TABLES: Final = ("tests/stores/test_timer_tables.py",)
_APPS: Final = ("tests/consumer/test_timers.py",)
_LARGE: Final = ("tests/windows/test_large_histories.py",)
_DEFINED: Final = ("tests/windows/test_definitions.py",)
_OF_LISTS: Final = ("tests/consumer/test_list_histories.py",)


def _firing() -> Iterator[tuple[str, Plant]]:
    path = "gazette/consumer/transaction/shard_timers.py"

    def plant(right: str, wrong: str, tests: tuple[str, ...] = _HISTORIES) -> Plant:
        return Plant(path, right, wrong, tests)

    yield (
        "overtaken timers fire",
        plant("self.ahead_from < position:", "self.ahead_from < BEFORE_ALL:"),
    )
    yield (
        "revoked timers are put back",
        plant("if row.key not in self.cancelled_keys:", "if row.key:"),
    )
    yield "revoked timers fire", plant("if row.key in self.cancelled_keys:", "if not row.key:")
    yield (
        "the cursor passes the whole batch",
        plant(
            "yield row\n        finally:",
            "yield row\n            self.cursor = last\n        finally:",
        ),
    )
    yield (
        "timers behind are forgotten",
        plant("self.ahead_from = _least(self.ahead_from, self.behind_from)\n", "pass\n"),
    )
    yield (
        "a pass repeats a timer",
        plant("row.position <= self.cursor:", "row.position < self.cursor:"),
    )
    yield (
        "timers behind a full batch wait",
        plant("last if len(rows) == limit else", "None if len(rows) == limit else"),
    )
    yield "replaced timers fire too", plant("self._note_cancelled(row.key)", "pass")
    yield (
        "cancelled timers fire",
        plant("self._note_cancelled(key)\n        self.table.remove", "self.table.remove"),
    )
    yield (
        "a skipped callback's cancellations stay",
        plant("self._firing_queue.cancelled_keys = set(cancelled_keys)", "pass"),
    )
    yield (
        "a new first timer is not noticed",
        plant(
            "else:\n            self.ahead_from = _least(self.ahead_from, row.position)",
            "else:\n            pass",
        ),
    )
    yield (
        "the shard sleeps too long",
        plant("else self._clock_us())) / 1e6)", "else self._clock_us())) / 1e5)"),
    )
    yield (
        "the watermark is not kept",
        plant("if value != self._stored_watermark:", "if value == self._stored_watermark:", _APPS),
    )
    yield "messages wait for all timers", plant("self._processing_turn = False", "pass", _APPS)
    yield (
        "the watermark follows the first source",
        Plant(
            _TIMERS + "watermark.py",
            "least_us is None or at_us < least_us:",
            "least_us is None or at_us > least_us:",
            _APPS,
        ),
    )


def _tables() -> Iterator[tuple[str, Plant]]:
    def plant(path: str, right: str, wrong: str) -> Plant:
        return Plant(_STORES + path, right, wrong, _TABLES)

    yield (
        "SQLite: timers of this moment wait",
        plant("sqlite/timers.py", "AND at <= ? ORDER", "AND at < ? ORDER"),
    )
    yield (
        "SQLite: taken timers stay",
        plant("sqlite/timers.py", "AND (at, key) <= (?, ?)", "AND (at, key) < (?, ?)"),
    )
    yield (
        "SQLite: a payload is not replaced",
        plant(
            "sqlite/timers.py", "at = excluded.at, payload = excluded.payload", "at = excluded.at"
        ),
    )
    yield (
        "RocksDB: scans begin too late",
        plant(
            "rocksdb/timers.py",
            'self._floor[domain] = min(self._floor[domain], (row.at_us, ""))',
            "pass",
        ),
    )
    yield (
        "RocksDB: a replaced timer stays",
        plant(
            "rocksdb/timers.py", "self._set(_at_key(domain, (_at_us(former), key)), None)", "pass"
        ),
    )
    yield (
        "RocksDB: floors of other passes",
        plant("rocksdb/timers.py", "if rows and after <= self._floor[domain]:", "if rows:"),
    )
    yield (
        "SQL: taken timers stay",
        plant("sql/timers.py", "_position(columns) <= _literal", "_position(columns) < _literal"),
    )
    yield (
        "memory: timers of the cursor fire again",
        Plant(
            _TIMERS + "memory_timers.py",
            "begin = bisect_right(order, after)",
            "begin = max(0, bisect_right(order, after) - 1)",
            _TABLES,
        ),
    )


def _windows() -> Iterator[tuple[str, Plant]]:
    def plant(right: str, wrong: str) -> Plant:
        return Plant(_WINDOWS + "windows.py", right, wrong, _LARGE)

    yield "early timers are left by closed windows", plant("if window.early:", "if not window.key:")
    yield (
        "early timers are left by joined sessions",
        plant("if session.early:", "if session.early > 1:"),
    )
    yield (
        "a session grows without its timer",
        plant("kept_session.end != merged_span[1]:", "kept_session.end > merged_span[1]:"),
    )
    yield (
        "timers are left by joined sessions",
        plant("self._cancel(shard, _FINAL, session, key)", "pass"),
    )
    yield (
        "sessions a whole gap apart are joined",
        plant("AND begin < ? AND end > ?", "AND begin <= ? AND end >= ?"),
    )
    yield "a window has one early result", plant("SET early = 0 WHERE", "SET early = 1 WHERE")
    yield "late values open windows", plant("end > closed_us", "end > 0")
    yield "late values open sessions", plant("end <= closed_us:\n", "end <= 0:\n")
    yield (
        "early results close windows",
        plant("if kind == _EARLY:", "if kind != _FINAL + _EARLY and False:"),
    )


def _joins() -> Iterator[tuple[str, Plant]]:
    def stream(right: str, wrong: str) -> Plant:
        return Plant(_WINDOWS + "stream_join.py", right, wrong, _LARGE)

    def table(right: str, wrong: str) -> Plant:
        return Plant(_WINDOWS + "table_join.py", right, wrong, _LARGE)

    yield (
        "LEFT joins have unpaired right rows",
        stream("_RIGHT if self.kind is JoinKind.OUTER else _LEFT", "_RIGHT"),
    )
    yield (
        "late messages are joined",
        stream(
            "watermark is not None and due <= watermark:", "watermark is not None and due <= 0:"
        ),
    )
    yield (
        "old messages are never removed",
        stream('WHERE due <= ?", (until,))', 'WHERE due <= ?", (0,))'),
    )
    yield (
        "pairs of LEFT joins are alone too",
        stream(
            "if self.kind is not JoinKind.INNER:\n            store",
            "if self.kind is JoinKind.OUTER:\n            store",
        ),
    )
    yield "a partner at the bound is late", stream("due = at + later + 1", "due = at + later")
    yield (
        "the bounds of the right side are those of the left",
        stream("earlier, later = later, earlier", "pass"),
    )
    yield (
        "the sweep of a join ends",
        stream("self._sweep.set(shard, store)\n        return unpaired", "return unpaired"),
    )
    yield "late rows are accepted", table("next_at <= watermark:", "next_at <= 0:")
    yield "late messages wait", table("at_us < watermark:", "at_us < 0:")
    yield (
        "a deleted row stays",
        table("due = at_us if row is None else next_at", "due = next_at"),
    )
    yield (
        "old rows are never removed",
        table('{self._table} WHERE due <= ?", (until,))', '{self._table} WHERE due <= ?", (0,))'),
    )
    yield (
        "a replaced row holds for ever",
        table(
            "SET due = ?2 WHERE key = ?1 AND value", "SET due = due WHERE key = ?1 AND ?2 AND value"
        ),
    )
    yield "a row that comes is not noticed", table("SET due = max(at, ?2) + 1", "SET due = due")
    yield (
        "the sweep misses an earlier row",
        Plant(_WINDOWS + "tables.py", "first is None or due < first:", "first is None:", _LARGE),
    )


def _definitions() -> Iterator[tuple[str, Plant]]:
    path = _STORES + "sqlite/definitions.py"
    yield (
        "another definition is taken",
        Plant(path, "if name in definitions:", "if not name:", _DEFINED),
    )
    yield (
        "a definition is not noticed by migrations",
        Plant(
            _STORES + "sqlite/migrations.py",
            "connection.execute(definitions_of(migration)).fetchall()",
            "pass",
            _DEFINED,
        ),
    )
    yield (
        "a definition changes a migration",
        Plant(
            _STORES + "sqlite/migrations.py",
            "without_definitions(migration)",
            "migration",
            _DEFINED,
        ),
    )
    yield (
        "a long key is lost",
        Plant(
            _WINDOWS + "windows.py",
            "kind, key = kind[:-1], timer",
            "kind, _ = kind[:-1], timer",
            _DEFINED,
        ),
    )


def _lists() -> Iterator[tuple[str, Plant]]:
    def plant(right: str, wrong: str) -> Plant:
        return Plant(_LISTS, right, wrong, _OF_LISTS)

    yield (
        "a list is as old as its last answer",
        plant("max(staleness_s, answered.staleness_s)", "answered.staleness_s"),
    )
    yield (
        "a list hides its age",
        plant("QueryResult(result, None, staleness_s)", "QueryResult(result, None)"),
    )
    yield "keys of two shards are not reported", plant("if len(ids) > 1]", "if len(ids) > 2]")
    yield "lists read through nothing", plant("read_through=offsets)", "read_through={})")
    yield "shards wait for sources of others", plant("if name in own}", "if name}")
    yield "the last page is not cut", plant("len(pairs) >= self._limit", "len(pairs) > self._limit")
    yield (
        "ties of shards are cut",
        plant("kept = [item for item in items if item[0] <= last]", "kept = items[: self._limit]"),
    )
    yield (
        "items of shards have any order",
        plant("key=lambda item: item[:2]", "key=lambda item: item[:1]"),
    )
    yield (
        "values of shards have any order",
        plant("for number in sorted(self._values)", "for number in self._values"),
    )


PLANTS: Final = {
    name.replace(" ", "-").replace(":", "").lower(): plant
    for part in (_firing, _tables, _windows, _joins, _definitions, _lists)
    for name, plant in part()
}
