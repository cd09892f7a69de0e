"""The state of a summer, in each of the stores: open streams, and how much was published."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from gazette import Shard
from gazette.consumer.application import Store
from gazette.errors import Invalid
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from stream_sum.messages import Sum

STORE_LABEL: Final = "store"
STORES: Final = ("sqlite", "rocksdb", "json", "sql")


class Partial(NamedTuple):
    """The sum of a stream up to a chunk."""

    seq_no: int
    value: int


NEW: Final = Partial(0, 0)


@dataclass(frozen=True, slots=True)
class Totals:
    """The work of a shard since it exists."""

    open_streams: int
    transactions: int
    """Number of transactions that published."""
    sums: int


class StreamState(Store):
    """The methods that the application calls on a store. Changes are gathered, and saved at the end."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.gathered: dict[bytes, Partial | None] = {}
        """Sums that changed. None: the stream has ended."""
        self.ended: list[Sum] = []
        """Sums that the transaction is going to publish."""
        super().__init__(*arguments, **named)

    def open(self, key: bytes) -> Partial:
        """Return the sum so far, as of the running transaction."""
        if key in self.gathered:
            return self.gathered[key] or NEW
        return self.load(key) or NEW

    @abstractmethod
    def load(self, key: bytes) -> Partial | None:
        """Return the sum as of the last transaction."""

    @abstractmethod
    def save(self, changes: dict[bytes, Partial | None], sums: int) -> int:
        """Save changes, and that ``sums`` were published: the number of this transaction, of those
        that published."""

    @abstractmethod
    def totals(self) -> Totals:
        """Return the totals as of the last commit. Any thread."""

    def flush(self, sums: int) -> int:
        transaction = self.save(self.gathered, sums)
        self.gathered = {}
        return transaction


def new_state(kind: str, shard: Shard, recorder: Any, database: str) -> StreamState:
    """Create a store by the name of its kind. Raise ``Invalid`` for an unknown one."""
    if kind == "sqlite":
        return SQLiteState(recorder)
    if kind == "rocksdb":
        from stream_sum.rocksdb_state import RocksDBState

        return RocksDBState(recorder)
    if kind == "json":
        return JSONState(recorder)
    if kind == "sql":
        if not database:
            raise Invalid(
                f"the store sql, of shard {shard.id}, needs a database",
                path="--streamsum.database",
                hint="Give its SQLAlchemy URL, such as postgresql+psycopg://user@host/name.",
            )
        from stream_sum.sql_state import SQLState

        return SQLState(shard, database)
    raise Invalid(
        f"unknown store {kind!r} of shard {shard.id}",
        hint=f"Label the shard {STORE_LABEL}= one of {', '.join(STORES)}.",
    )


class SQLiteState(StreamState, SQLiteStore):
    SCHEMA: ClassVar = """
        CREATE TABLE IF NOT EXISTS streams (id BLOB PRIMARY KEY, seq_no INTEGER, value BLOB) WITHOUT ROWID;
        CREATE TABLE IF NOT EXISTS totals (id INTEGER PRIMARY KEY, transactions INTEGER, sums INTEGER);
        INSERT OR IGNORE INTO totals VALUES (0, 0, 0);
    """

    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder, self.SCHEMA)

    def load(self, key: bytes) -> Partial | None:
        sql = "SELECT seq_no, value FROM streams WHERE id = ?"
        rows: list[tuple[Any, ...]] = self.execute(sql, (key,)).fetchall()
        return Partial(rows[0][0], int.from_bytes(rows[0][1])) if rows else None

    def save(self, changes: dict[bytes, Partial | None], sums: int) -> int:
        changed, ended = changed_and_ended(changes)
        self.executemany("DELETE FROM streams WHERE id = ?", [(key,) for key in ended])
        self.executemany(
            "INSERT OR REPLACE INTO streams VALUES (?, ?, ?)",
            [(key, one.seq_no, one.value.to_bytes(8)) for key, one in changed.items()],
        )
        if sums:
            self.execute(
                "UPDATE totals SET transactions = transactions + 1, sums = sums + ?", (sums,)
            )
        rows: list[tuple[Any, ...]] = self.execute("SELECT transactions FROM totals").fetchall()
        return int(rows[0][0])

    def totals(self) -> Totals:
        sql = "SELECT (SELECT COUNT(*) FROM streams), transactions, sums FROM totals"
        return Totals(*self.query(sql)[0])


class JSONDocument(msgspec.Struct):
    streams: dict[str, Partial] = msgspec.field(default_factory=dict)
    transactions: int = 0
    sums: int = 0


class JSONState(StreamState, JSONFileStore[JSONDocument]):
    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder, JSONDocument)

    def load(self, key: bytes) -> Partial | None:
        return self.state.streams.get(key.hex())

    def save(self, changes: dict[bytes, Partial | None], sums: int) -> int:
        changed, ended = changed_and_ended(changes)
        for key in ended:
            self.state.streams.pop(key.hex(), None)
        self.state.streams.update({key.hex(): one for key, one in changed.items()})
        if sums:
            self.state.transactions += 1
            self.state.sums += sums
        return self.state.transactions

    def totals(self) -> Totals:
        state = self.read()
        return Totals(len(state.streams), state.transactions, state.sums)


def changed_and_ended(
    changes: dict[bytes, Partial | None],
) -> tuple[dict[bytes, Partial], Collection[bytes]]:
    changed = {key: partial for key, partial in changes.items() if partial is not None}
    return changed, changes.keys() - changed.keys()
