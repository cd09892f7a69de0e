"""The SQLite store against a plain SQLite that executes the same statements."""

# ruff: noqa: S608 - the names of its tables are its own

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import apsw

from gazette.consumer.application import StateView
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.shard_state import ShardState
from gazette.stores.sqlite.databases import RedoDatabases
from gazette.stores.sqlite.redo_recording import RedoRecording
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.sqlite.vfs_recording import VfsRecording
from tools.fuzz_stores.base import Difference, Fuzzer, defaults

Content = dict[str, Any]
Query = Callable[[str], list[tuple[Any, ...]]]

_PAGE_SIZES: Final = (512, 1024, 4096, 4096, 8192, 65536)
_JOURNAL_MODES: Final = ("WAL", "DELETE", "TRUNCATE", "PERSIST")
_TEXTS: Final = ("one two", "two three", "three", "häßlich", "", "x" * 300)
_TABLES: Final = 5
_FTS: Final = "CREATE VIRTUAL TABLE {}.words USING fts5(a, b)"
_RTREE: Final = "CREATE VIRTUAL TABLE {}.boxes USING rtree(id, low, high)"
_BLOBS: Final = "CREATE TABLE {}.blobs (id INTEGER PRIMARY KEY, data BLOB)"


def prepare(connection: apsw.Connection) -> None:
    connection.create_scalar_function("turn", _turn, 1, deterministic=True)
    connection.create_collation("backwards", lambda a, b: (a < b) - (a > b))


def _turn(*values: Any) -> Any:
    (value,) = values
    return value[::-1] if isinstance(value, str | bytes) else value


class SQLiteFuzzer(Fuzzer[Content]):
    """See the module."""

    def __init__(self, seed: int, directory: Path, say: Callable[[str], None]) -> None:
        super().__init__(seed, directory, say)
        rng = self.rng
        self._mode: Any = "redo" if rng.randrange(3) else "vfs"
        self._journal_mode = rng.choice(_JOURNAL_MODES)
        self._page_size = rng.choice(_PAGE_SIZES)
        self._group_pages = rng.choice((2, 16))
        self._names: list[str] = []
        self._pragmas: dict[str, Any] = {
            "foreign_keys": rng.random() < 0.5,
            "recursive_triggers": rng.random() < 0.5,
        }
        self._plain = self._connect({})
        self._savepoints: list[str] = []
        self._serial = 0
        say(f"{self._mode} {self._journal_mode} pages of {self._page_size} {self._pragmas}")

    def _connect(self, serialized: dict[str, bytes]) -> apsw.Connection:
        connection = apsw.Connection(":memory:")
        for name in self._names:
            connection.execute(f"ATTACH ':memory:' AS {name}")
        for schema, data in serialized.items():
            if data:
                connection.deserialize(schema, data)
        for name, value in self._pragmas.items():
            connection.execute(f"PRAGMA {name}={int(value)}").fetchall()
        prepare(connection)
        return connection

    # -- of a kind of store

    def open_store(self, recorder: Recorder) -> SQLiteStore:
        rng = self.rng
        for name in ("archive", "more"):
            if name not in self._names and rng.randrange(3) == 0:
                self._names.append(name)
                if not self._plain.in_transaction:
                    self._plain.execute(f"ATTACH ':memory:' AS {name}")
        with contextlib.ExitStack() as stack:
            pages = self._group_pages
            redo = {"checkpoint_frames": 60, "group_pages": pages, "horizon_slack": 96 << 10}
            stack.enter_context(defaults(RedoRecording.__init__, **redo))
            # From one image for each file, as in small databases, to many, as in large ones.
            image_files = rng.choice((1, 2, 5, 1000))
            stack.enter_context(defaults(RedoDatabases.__init__, image_files=image_files))
            vfs = {"horizon_slack": 256 << 10, "journal_mode": self._journal_mode}
            stack.enter_context(defaults(VfsRecording.__init__, **vfs))
            return SQLiteStore(
                recorder,
                mode=self._mode,
                databases=rng.sample(self._names, len(self._names)),
                page_size=self._page_size,
                cache_bytes=rng.choice((16 << 10, 1 << 20)),
                readers=1,
                connection_pragmas=self._pragmas,
                prepare_connection=prepare,
            )

    def new_view(self, directory: Path) -> StateView:
        return SQLiteStore.view(directory, readers=1, prepare_connection=prepare)

    def before_transaction(self) -> None:
        if self.rng.randrange(10) == 0:
            schema = self.rng.choice(self._schemas)
            self.say(f"VACUUM {schema}")
            self.store.vacuum(schema)
            self._plain.execute(f"VACUUM {schema}")

    def commit_plain(self) -> tuple[Content, Any]:
        if self._plain.in_transaction:
            self._plain.execute("COMMIT")
        self._savepoints.clear()
        serialized = {schema: bytes(self._plain.serialize(schema)) for schema in self._schemas}
        return self.content(self._plain), serialized

    def restore_plain(self, snapshot: Any) -> None:
        self._plain.close(True)
        self._savepoints.clear()
        self._plain = self._connect(snapshot)

    @property
    def _schemas(self) -> list[str]:
        return ["main", *self._names]

    def content(self, reader: Any) -> Content:
        if isinstance(reader, apsw.Connection):
            return dump(lambda sql: reader.execute(sql).fetchall())
        for (name,) in reader.query("SELECT name FROM pragma_database_list WHERE name <> 'temp'"):
            if (found := reader.query(f"PRAGMA {name}.integrity_check")) != [("ok",)]:
                raise Difference(f"{name} is damaged: {found[:3]}")
        return dump(reader.query)

    def check_files(self, directory: Path, expected: Content) -> None:
        with ShardState(directory, prepare_connection=prepare) as state:
            self.compare(dump(state.query), expected, "what stock SQLite opens")

    # -- the work

    def work(self) -> None:
        self._both("SELECT 1")
        for _ in range(self.rng.choice((1, 2, 5, 20))):
            schema = self.rng.choice(self._schemas)
            one = self.rng.choices(
                (
                    self._define,
                    self._change,
                    self._virtual,
                    self._blob,
                    self._savepoint,
                    self._misc,
                ),
                (3, 12, 4, 2, 3, 1),
            )[0]
            one(schema)

    def _both(self, sql: str, *bindings: Any) -> list[tuple[Any, ...]]:
        """Execute SQL on both databases. Rows, or the error, must be the same."""
        self.say(f"{sql[:300]} {str(bindings)[:100]}")
        ours = _outcome(lambda: self.store.execute(sql, bindings).fetchall())
        if not self._plain.in_transaction:
            self._plain.execute("BEGIN IMMEDIATE")
        plain = _outcome(lambda: self._plain.execute(sql, bindings).fetchall())
        if ours != plain:
            raise Difference(f"{sql!r} gives {str(ours)[:200]}; plain SQLite {str(plain)[:200]}")
        return ours if isinstance(ours, list) else []

    def _existing(self, schema: str) -> list[str]:
        sql = f"SELECT name FROM {schema}.sqlite_master WHERE type = 'table' AND name GLOB 't[0-9]'"
        return [str(name) for (name,) in self._plain.execute(sql)]

    def _name(self) -> str:
        return f"t{self.rng.randrange(_TABLES)}"

    def _define(self, schema: str) -> None:
        rng, name = self.rng, self._name()
        self._serial += 1
        columns = ", ".join(
            rng.sample(
                [
                    "a TEXT COLLATE backwards",
                    "b BLOB",
                    "c INTEGER CHECK (c <> 13)",
                    "d REFERENCES t0 ON DELETE CASCADE",
                    "e TEXT AS (turn(a))" if rng.randrange(2) else "e DEFAULT (1 + 2)",
                    "g UNIQUE",
                ],
                6,
            )
        )
        match rng.randrange(12):
            case 0 | 1 | 2:
                self._both(f"CREATE TABLE {schema}.{name} (id INTEGER PRIMARY KEY, {columns})")
            case 3:
                sql = f"CREATE TABLE {schema}.{name} (id PRIMARY KEY, {columns}) WITHOUT ROWID"
                self._both(sql)
            case 4:
                self._both(f"DROP TABLE {schema}.{name}")
            case 5:
                on = rng.choice(
                    ("a", "b, c", "turn(a)", "c) WHERE (c > 5", "a COLLATE NOCASE DESC")
                )
                self._both(f"CREATE INDEX {schema}.i{self._serial} ON {name} ({on})")
            case 6:
                sql = f"SELECT name FROM {schema}.sqlite_master WHERE name GLOB '[iv][0-9]*'"
                for (found,) in self._plain.execute(sql).fetchall()[:1]:
                    kind = "INDEX" if str(found).startswith("i") else "TRIGGER"
                    self._both(f"DROP {kind} {schema}.{found}")
            case 7:
                when = rng.choice(("INSERT", "DELETE", "UPDATE OF c"))
                body = rng.choice(
                    (
                        f"UPDATE {self._name()} SET g = NULL WHERE id = 3",
                        f"DELETE FROM {self._name()} WHERE id = abs(old_id())",
                        f"INSERT OR IGNORE INTO {name} (id, c) VALUES (1000 + abs(random() % 1), 1)",
                    )
                )
                self._both(
                    f"CREATE TRIGGER {schema}.v{self._serial} AFTER {when} ON {name} BEGIN {body}; END"
                )
            case 8:
                self._both(f"ALTER TABLE {schema}.{name} ADD COLUMN n{self._serial} DEFAULT 'new'")
            case 9:
                self._both(f"ALTER TABLE {schema}.{name} RENAME TO {self._name()}")
            case 10:
                self._both(f"ALTER TABLE {schema}.{name} DROP COLUMN {rng.choice('bcg')}")
            case _:
                self._both(f"CREATE VIEW {schema}.w{self._serial} AS SELECT id FROM {name}")

    def _value(self) -> Any:
        rng = self.rng
        match rng.randrange(8):
            case 0:
                return None
            case 1 | 2:
                return rng.randrange(-5, 50)
            case 3:
                return rng.randbytes(rng.choice((0, 10, 500, 9000)))
            case 4:
                return bytes(rng.choice((10, 3000)))
            case 5:
                return rng.random()
            case _:
                return rng.choice(_TEXTS) + str(rng.randrange(5))

    def _change(self, schema: str) -> None:
        rng = self.rng
        names = self._existing(schema)
        if not names:
            return self._define(schema)
        name = f"{schema}.{rng.choice(names)}"
        row = rng.randrange(60)
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                how = rng.choice(("", "OR REPLACE", "OR IGNORE", "OR FAIL"))
                self._both(
                    f"INSERT {how} INTO {name} (id, a, b, c, g) VALUES (?, ?, ?, ?, ?)",
                    row,
                    *(self._value() for _ in range(4)),
                )
            case 4:
                many = rng.choice((20, 200))
                numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT ?)"
                self._both(
                    f"{numbers} INSERT OR REPLACE INTO {name} (id, a, c)"
                    " SELECT i + ?, 'many ' || i, i % 9 FROM n",
                    many,
                    row,
                )
            case 5:
                self._both(
                    f"UPDATE {name} SET b = ?, c = c + 1 WHERE id % 3 = ?", self._value(), row % 3
                )
            case 6:
                sql = f"INSERT INTO {name} (id, c) VALUES (?, 1) ON CONFLICT (id) DO UPDATE SET c = c + 7"
                self._both(f"{sql} RETURNING c", row)
            case 7:
                self._both(
                    f"DELETE FROM {name} WHERE id BETWEEN ? AND ?", row, row + rng.randrange(99)
                )
            case 8:
                self._both(f"DELETE FROM {name}")
            case _:
                self._both(f"SELECT id, a, c FROM {name} ORDER BY a, id LIMIT 7")
        return None

    def _virtual(self, schema: str) -> None:
        rng, text = self.rng, self.rng.choice(_TEXTS)
        words, boxes, row = f"{schema}.words", f"{schema}.boxes", self.rng.randrange(40)
        # SQLite itself cannot commit after the roll-back of a savepoint in which FTS5 created a table.
        match rng.randrange(12) if not self._savepoints else rng.randrange(2, 11):
            case 0:
                self._both(_FTS.format(schema))
            case 1:
                self._both(_RTREE.format(schema))
            case 2 | 3 | 4:
                sql = f"INSERT OR REPLACE INTO {words} (rowid, a, b) VALUES (?, ?, ?)"
                self._both(sql, row, text, rng.choice(_TEXTS))
            case 5:
                self._both(f"DELETE FROM {words} WHERE rowid = ?", row)
            case 6:
                command = rng.choice(("optimize", "rebuild", "integrity-check"))
                self._both(f"INSERT INTO {words} (words) VALUES (?)", command)
            case 7:
                self._both(f"SELECT rowid FROM {words} WHERE words MATCH 'two' ORDER BY rowid")
            case 8 | 9:
                sql = f"INSERT OR REPLACE INTO {boxes} VALUES (?, ?, ?)"
                self._both(sql, row, row * 1.5, row * 1.5 + rng.randrange(9))
            case 10:
                self._both(f"DELETE FROM {boxes} WHERE low > ? AND high < ?", row, row + 9)
            case _:
                self._both(f"DROP TABLE {rng.choice((words, boxes))}")

    def _blob(self, schema: str) -> None:
        """Write into a blob without a statement, in pieces."""
        rng, row = self.rng, self.rng.randrange(4)
        self._both(_BLOBS.format(schema).replace("TABLE", "TABLE IF NOT EXISTS"))
        self._both(f"INSERT OR IGNORE INTO {schema}.blobs VALUES (?, zeroblob(?))", row, 20_000)
        pieces = [(rng.randrange(19_000), rng.randbytes(rng.randrange(900))) for _ in range(3)]
        self.say(f"write blob {row} of {schema}")

        def write(connection: apsw.Connection) -> None:
            with connection.blob_open(schema, "blobs", "data", row, True) as blob:
                for offset, data in pieces:
                    blob.seek(offset)
                    blob.write(data)

        outcomes = [_outcome(partial(write, one)) for one in (self.store.connection, self._plain)]
        if outcomes[0] != outcomes[1]:
            raise Difference(f"writing a blob gives {outcomes[0]}; plain SQLite {outcomes[1]}")

    def _savepoint(self, _schema: str) -> None:
        rng = self.rng
        if not self._savepoints or rng.randrange(2):
            self._serial += 1
            self._savepoints.append(f"s{self._serial}")
            self._both(f"SAVEPOINT s{self._serial}")
            return
        at = rng.randrange(len(self._savepoints))
        name = self._savepoints[at]
        if rng.randrange(2):
            del self._savepoints[at + 1 :]
            self._both(f"ROLLBACK TO {name}")
        else:
            del self._savepoints[at:]
            self._both(f"RELEASE {name}")

    def _misc(self, schema: str) -> None:
        number = self.rng.randrange(1000)
        self._both(
            self.rng.choice(
                (
                    f"PRAGMA {schema}.user_version={number}",
                    f"PRAGMA {schema}.application_id={number}",
                    f"ANALYZE {schema}",
                    f"REINDEX {schema}.t1",
                    f"PRAGMA {schema}.foreign_key_check",
                )
            )
        )


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except apsw.Error as error:
        return type(error).__name__, str(error)


def dump(query: Query) -> Content:
    """Read everything that a connection has: definitions, rows, and what full-text search finds."""
    content: Content = {}
    schemas = [
        str(name) for (name,) in query("SELECT name FROM pragma_database_list ORDER BY name")
    ]
    for schema in schemas:
        if schema == "temp":
            continue
        definitions = query(
            f"SELECT type, name, tbl_name, sql FROM {schema}.sqlite_master"
            " WHERE tbl_name NOT LIKE 'gazette_%' ORDER BY name, type"
        )
        if definitions:
            content[schema] = definitions
        for pragma in ("user_version", "application_id"):
            if (value := query(f"PRAGMA {schema}.{pragma}")) != [(0,)]:
                content[f"{schema}.{pragma}"] = value
        for name in _tables(definitions):
            rows = query(f'SELECT * FROM {schema}."{name}"')
            content[f"{schema}.{name}"] = sorted(repr(row) for row in rows)
            if name == "words":
                sql = f"SELECT rowid FROM {schema}.words WHERE words MATCH 'two' ORDER BY rowid"
                content[f"{schema}.words found"] = query(sql)
    return content


def _tables(definitions: list[tuple[Any, ...]]) -> Iterator[str]:
    """Yield the tables to compare, without statistics and the tables behind virtual tables.

    Statistics count our own tables too. The content behind virtual tables depends on the page size.
    """
    for kind, name, _, _ in definitions:
        if kind == "table" and not str(name).startswith(("words_", "boxes_", "sqlite_stat")):
            yield cast("str", name)
