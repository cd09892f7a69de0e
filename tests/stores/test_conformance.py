"""Our own stores do what every recorded store must."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gazette.recoverylog.log.recorder import Recorder
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.store_tests import RecordedStoreTests


class TestJSONFileStore(RecordedStoreTests):
    def open(self, recorder: Recorder | None) -> JSONFileStore[dict[str, int]]:
        return JSONFileStore(recorder, dict[str, int], dict)

    def change(self, store: Any, rng: random.Random) -> None:
        word = f"word {rng.randrange(20)}"
        store.state[word] = store.state.get(word, 0) + 1

    def content(self, store: Any) -> Any:
        return dict(store.state)


class SQLiteTests(RecordedStoreTests):
    def change(self, store: Any, rng: random.Random) -> None:
        store.execute(
            "INSERT INTO word VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1",
            (f"word {rng.randrange(20)}",),
        )

    def content(self, store: Any) -> Any:
        return store.connection.execute("SELECT * FROM word ORDER BY w").fetchall()


SCHEMA = "CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY, n INTEGER)"


class TestSQLiteStoreRedo(SQLiteTests):
    def open(self, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA)


class TestSQLiteStoreVfs(SQLiteTests):
    def open(self, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA, mode="vfs", page_size=1024)


class TestRocksDBStore(RecordedStoreTests):
    @pytest.fixture(autouse=True)
    def _needs_rocksdict(self) -> None:
        pytest.importorskip("rocksdict")

    def open(self, recorder: Recorder | None) -> RocksDBStore:
        return RocksDBStore(recorder)

    def change(self, store: Any, rng: random.Random) -> None:
        key = b"word %d" % rng.randrange(20)
        store.put(key, b"%d" % (int(store.get(key) or b"0") + 1))

    def content(self, store: Any) -> Any:
        return list(store.iterate())
