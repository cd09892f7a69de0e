"""The application that is killed: ``python -m tests.faults.fold_app serve …``.

Each shard folds its source into a store of some kind, and publishes, in the same transaction, what the
fold of each message was: to two journals, so that a transaction has more than one acknowledgement. So
outputs and state are both functions of the input alone, and each tells if the other is wrong.

``POST /arm`` has the process arm failpoints, ``GET /state/{shard}`` says what this primary has committed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from gazette import Application, Envelope, Message, Publisher, Timer, runconsumer
from gazette.consumer.application import Shard, Store
from gazette.consumer.service import ConsumerService
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.runtime import failpoints
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore
from gazette.stores.sql.store import SQLStore, create_engine
from gazette.stores.sqlite.store import SQLiteStore

KIND: Final = "faults.test/store"
SQL_URL_ENV: Final = "FOLD_APP_{}_URL"
"""The URL of the database behind the stores of a kind: ``postgres``, ``sqlfile``."""
SQL_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS folds (shard TEXT NOT NULL, key TEXT NOT NULL, count INTEGER NOT NULL,"
    " total BIGINT NOT NULL, PRIMARY KEY (shard, key))"
)
FLUSH_EVERY: Final = 3
PLANT_ENV: Final = "FOLD_APP_PLANT"
"""A mistake of the application that the check must find: ``eager`` has outputs committed before its
transaction is, ``forgetful`` keeps its state in memory."""
TIMERS_ENV: Final = "FOLD_APP_TIMERS"
"""If set, outputs of the second journal are published by timers, a little later."""
TIMER_DELAY: Final = timedelta(milliseconds=10)

State = dict[str, tuple[int, int]]
"""By key: how many messages, and the sum of their numbers."""


class Input(Message):
    key: str = ""
    n: int = 0
    nap_s: float = 0.0
    """How long its callback takes …"""
    greedy: bool = False
    """… and whether it lets no other thread run meanwhile."""
    by: str = ""
    """The member that naps; others do not."""


class Output(Message):
    key: str = ""
    n: int = 0
    count: int = 0
    total: int = 0


class Fold(ABC):
    """A store of any kind, as the application uses it."""

    store: Store

    @abstractmethod
    def get(self, key: str) -> tuple[int, int]: ...

    @abstractmethod
    def put(self, key: str, count: int, total: int) -> None: ...

    @abstractmethod
    def committed(self) -> State:
        """Return the committed state. Any thread."""


class SQLiteFold(Fold):
    def __init__(self, recorder: Any) -> None:
        self.store: Any = SQLiteStore(
            recorder,
            "CREATE TABLE IF NOT EXISTS folds (key TEXT PRIMARY KEY, count INTEGER, total INTEGER)",
        )

    def get(self, key: str) -> tuple[int, int]:
        sql = "SELECT count, total FROM folds WHERE key = ?"
        rows = self.store.execute(sql, (key,)).fetchall()
        return rows[0] if rows else (0, 0)

    def put(self, key: str, count: int, total: int) -> None:
        self.store.execute("INSERT OR REPLACE INTO folds VALUES (?, ?, ?)", (key, count, total))

    def committed(self) -> State:
        return {key: (n, total) for key, n, total in self.store.query("SELECT * FROM folds")}


class RocksDBFold(Fold):
    def __init__(self, recorder: Any) -> None:
        # So small that flushes and compactions are part of it.
        options = RocksDBOptions(write_buffer_bytes=64 << 10)
        self.store: Any = RocksDBStore(recorder, options=options)

    def get(self, key: str) -> tuple[int, int]:
        value = self.store.get(key.encode())
        return struct.unpack("<qq", value) if value else (0, 0)

    def put(self, key: str, count: int, total: int) -> None:
        self.store.put(key.encode(), struct.pack("<qq", count, total))

    def committed(self) -> State:
        with self.store.view() as view:
            return {key.decode(): struct.unpack("<qq", value) for key, value in view.iterate()}


class JSONFold(Fold):
    def __init__(self, recorder: Any) -> None:
        self.store: Any = JSONFileStore(recorder, dict[str, tuple[int, int]])

    def get(self, key: str) -> tuple[int, int]:
        found: tuple[int, int] = self.store.state.get(key, (0, 0))
        return found

    def put(self, key: str, count: int, total: int) -> None:
        self.store.state[key] = (count, total)

    def committed(self) -> State:
        found: State = self.store.read()
        return found


class SQLFold(Fold):
    def __init__(self, engine: Any, shard: Shard) -> None:
        self.store: Any = SQLStore(engine)
        self._shard = shard.id

    def get(self, key: str) -> tuple[int, int]:
        rows = self.store.execute(
            "SELECT count, total FROM folds WHERE shard = :shard AND key = :key",
            {"shard": self._shard, "key": key},
        ).all()
        return (rows[0][0], rows[0][1]) if rows else (0, 0)

    def put(self, key: str, count: int, total: int) -> None:
        self.store.execute(
            "INSERT INTO folds VALUES (:shard, :key, :count, :total) ON CONFLICT (shard, key)"
            " DO UPDATE SET count = excluded.count, total = excluded.total",
            {"shard": self._shard, "key": key, "count": count, "total": total},
        )

    def committed(self) -> State:
        rows = self.store.query(
            "SELECT key, count, total FROM folds WHERE shard = :shard", {"shard": self._shard}
        )
        return {key: (n, total) for key, n, total in rows}


class ForgetfulFold(Fold):
    """Right for as long as the process lives."""

    def __init__(self, of: Fold) -> None:
        self.store = of.store
        self._state: State = {}

    def get(self, key: str) -> tuple[int, int]:
        return self._state.get(key, (0, 0))

    def put(self, key: str, count: int, total: int) -> None:
        self._state[key] = (count, total)

    def committed(self) -> State:
        return self._state


def outputs_of(shard_id: str) -> tuple[str, str]:
    return f"out/{shard_id}/a", f"out/{shard_id}/b"


class FoldApplication(Application[Any]):
    message_type = Input

    def __init__(self) -> None:
        self.folds: dict[str, Fold] = {}
        self.engines: dict[str, Any] = {}
        self.member = ""
        self.plant = os.environ.get(PLANT_ENV, "")

    async def initialize(self, service: ConsumerService) -> None:
        self.member = service.process_id.suffix
        service.add_route("/arm", self.arm, methods=["POST"])
        service.add_route("/state/{shard}", self.state)

    async def arm(self, request: Request) -> Response:
        failpoints.arm((await request.body()).decode())
        return PlainTextResponse("armed")

    async def state(self, request: Request) -> Response:
        fold = self.folds[request.path_params["shard"]]
        return JSONResponse(await asyncio.to_thread(fold.committed))

    def new_store(self, shard: Shard, recorder: Any) -> Store:
        kind = shard.spec.labels.value_of(KIND)
        fold: Fold
        match kind:
            case "sqlite":
                fold = SQLiteFold(recorder)
            case "rocksdb":
                fold = RocksDBFold(recorder)
            case "json":
                fold = JSONFold(recorder)
            case "postgres" | "sqlfile":
                fold = SQLFold(self._engine(kind), shard)
            case _:
                raise ValueError(f"no store of kind {kind}")
        self.folds[shard.id] = ForgetfulFold(fold) if self.plant == "forgetful" else fold
        store: Store = fold.store
        return store

    def _engine(self, kind: str) -> Any:
        if kind not in self.engines:
            self.engines[kind] = create_engine(os.environ[SQL_URL_ENV.format(kind.upper())])
        return self.engines[kind]

    def consume_message(
        self, shard: Shard, store: Any, envelope: Envelope[Input], publisher: Publisher
    ) -> None:
        message = envelope.message
        if message.nap_s and message.by == self.member:
            nap(message.nap_s, greedy=message.greedy)
        fold = self.folds[shard.id]
        count, total = fold.get(message.key)
        count, total = count + 1, total + message.n
        fold.put(message.key, count, total)
        output = Output(key=message.key, n=message.n, count=count, total=total)
        for journal in self.journals_of(shard, output):
            mapping = fixed_mapping(journal, CONTENT_JSON_LINES)
            if self.plant == "eager":
                published = publisher.publish_committed(mapping, output)
                if message.n % FLUSH_EVERY == 0:
                    # In its journal before the transaction commits, however soon the process dies then.
                    published.result(10)
            else:
                publisher.publish_uncommitted(mapping, output)
        if message.n % FLUSH_EVERY == 0:
            publisher.flush()  # So that some of a transaction is in the journals before all of it is.

    def journals_of(self, shard: Shard, output: Output) -> Sequence[str]:
        """Return the journals to which the output of a message is published at once."""
        return outputs_of(shard.id)


class TimedFoldApplication(FoldApplication):
    """Publishes to the second journal by a timer for each message."""

    def journals_of(self, shard: Shard, output: Output) -> Sequence[str]:
        # Timers of one moment fire in the order of their keys, which is that of the messages.
        at = shard.now + TIMER_DELAY
        shard.schedule(f"{output.n:012}", at, msgspec.json.encode(output))
        return outputs_of(shard.id)[:1]

    def on_timer(self, shard: Shard, store: Any, timer: Timer, publisher: Publisher) -> None:
        output = msgspec.json.decode(timer.payload, type=Output)
        mapping = fixed_mapping(outputs_of(shard.id)[1], CONTENT_JSON_LINES)
        publisher.publish_uncommitted(mapping, output)
        if output.n % FLUSH_EVERY == 0:
            publisher.flush()


def nap(seconds: float, *, greedy: bool) -> None:
    """Take that long; ``greedy``: within one call into C that keeps the interpreter's lock."""
    if greedy:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    else:
        threading.Event().wait(seconds)


def new_application() -> FoldApplication:
    """Return the application that the environment asks for. Both have one name: that of their state."""
    application = TimedFoldApplication() if os.environ.get(TIMERS_ENV) else FoldApplication()
    application.application_name = "fold"  # type: ignore[misc]
    return application


if __name__ == "__main__":
    runconsumer.main(new_application())
