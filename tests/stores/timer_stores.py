"""Stores of each kind that has timers, and their next owners."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gazette.recoverylog.log.recorder import Recorder
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sql import SQLStore, create_checkpoint_table, create_engine, create_timer_table
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import MemoryLog, take_over
from tools.simulation.remote_store import RemoteDatabase, RemoteStore

KINDS: Final = ("sqlite", "vfs", "rocksdb", "json", "sql", "remote")


class Named:
    """A shard, as far as stores need it."""

    id = "shard-one"
    fqn = "/test/items/shard-one"


SHARD: Any = Named()
Open = Callable[[], Any]
"""Makes the store of the next owner."""


def recorded(tmp_path: Path, make: Callable[[Recorder], Any]) -> Open:
    """Return a function that makes the next owner of one log."""
    log, rng = MemoryLog(), random.Random(1)

    def open_store() -> Any:
        directory = tmp_path / f"owner-{rng.getrandbits(40)}"
        return make(take_over(log, directory, rng))

    return open_store


@contextmanager
def opened(kind: str, tmp_path: Path, url: str = "") -> Iterator[Open]:
    """Return what opens a store of a kind, for the shard. ``url`` is that of an empty database."""
    match kind:
        case "sqlite":
            yield recorded(tmp_path, SQLiteStore)
        case "vfs":
            yield recorded(tmp_path, lambda recorder: SQLiteStore(recorder, mode="vfs"))
        case "rocksdb":
            pytest.importorskip("rocksdict")
            yield recorded(tmp_path, RocksDBStore)
        case "json":
            yield recorded(tmp_path, lambda recorder: JSONFileStore(recorder, dict))
        case "sql":
            engine = create_engine(url or f"sqlite:///{tmp_path}/state.db")
            create_checkpoint_table(engine)
            create_timer_table(engine)
            yield lambda: SQLStore(engine)
            engine.dispose()
        case "remote":
            database = RemoteDatabase()
            yield lambda: RemoteStore(database, SHARD)
