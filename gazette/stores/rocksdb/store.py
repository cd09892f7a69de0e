"""Stage 14 of the byte path: keys and values of a shard in RocksDB, replicated to its recovery log.

Needs the extra ``pygazette[rocksdb]``. Flushes and compactions run in the background. Each commit,
with its checkpoint, reaches the recovery log as one append.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from gazette.consumer.application import Shard, StateView, Store
from gazette.consumer.contract.error_cause import ErrorCause
from gazette.consumer.timers.timer import TimerTable
from gazette.errors import Closed, Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.rocksdb.keys import (
    CHECKPOINT_KEY,
    MARK_PREFIX,
    TIMER_AT_PREFIX,
    after,
    application_spans,
    decode_offset,
    encode_offset,
    journal_of,
    mark_key,
    require_bytes,
    require_writable,
)
from gazette.recoverylog.rocksdb.native import DEFAULT, load_rocksdict, map_errors, native_errors
from gazette.recoverylog.rocksdb.scan import Pinned, Scan, joined, no_family, spans
from gazette.runtime.tasks import OpFuture
from gazette.stores.double_buffer import DoubleBuffer
from gazette.stores.early_writes import wrote_too_early
from gazette.stores.rocksdb.follower import FollowedRocksDB
from gazette.stores.rocksdb.options import (
    Families,
    RocksDBOptions,
    check_recordable,
    named_families,
    options_to_open,
    require_count,
    require_options,
)
from gazette.stores.rocksdb.recording import RocksDBRecording
from gazette.stores.rocksdb.timers import RocksDBTimers
from gazette.stores.rocksdb.view import (
    FamilyCopy,
    FamilySnapshot,
    FamilyTransaction,
    FamilyView,
    MissingPart,
    RocksDBView,
)
from gazette.stores.rocksdb.write_buffer import Pending, PendingSavepoint, merged

_BATCH_OPS: Final = 8192
_STALL_FLUSHES: Final = 3
_INGESTED_TABLE_BYTES: Final = 64 << 20


class RocksDBStore(Store):
    """A store with its state in a RocksDB database: ordered keys and values, both bytes.

    ``column_families`` names the families beside the default one. A family that the application does
    not name any more stays, and is opened with its former options.

    ``get``, ``put``, ``delete``, ``delete_range`` and ``iterate`` belong to the shard's thread and
    to its running transaction. The transaction sees its own writes, which stay in memory until
    the commit. Other threads read by ``view``, which shows the last local commit.

    In the default column family a few keys are reserved: see `gazette.recoverylog.rocksdb.keys`. To
    write them raises ``Invalid``. Iterations leave them out, and ``delete_range`` keeps them.
    """

    _is_restored = False

    def __init__(
        self,
        recorder: Recorder | None,
        *,
        column_families: Mapping[str, RocksDBOptions] | Iterable[str] = (),
        options: RocksDBOptions | None = None,
        batch_bytes: int = 1 << 20,
    ) -> None:
        """Open the played-back database, or a new one.

        ``options`` are for the default family. A family without options gets those of the last opening, or
        else the defaults. A commit is written in batches of about ``batch_bytes``. No other thread of the
        process runs while a batch is written. Raise ``Invalid`` for wrong options, if the package is missing,
        and if the log has another store. Raise ``Corrupt`` for damaged files. For other errors of RocksDB see
        `native_errors`.
        """
        if recorder is None:
            raise Invalid(
                "RocksDBStore needs a recovery log",
                hint="Set recovery_log_prefix in the shard's specification.",
            )
        self._native = load_rocksdict("RocksDBStore")
        require_count("batch_bytes", batch_bytes)
        require_options("options", options)
        families = named_families(column_families)
        self._batch_bytes = batch_bytes
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        """The shard's thread: its views have the writes of the running transaction."""
        self._closed = False
        self._copy: FollowedRocksDB | None = None
        """The copy that a hot standby reads. None: this is the store of a primary."""
        self._views: weakref.WeakSet[RocksDBView] = weakref.WeakSet()
        self._scans: weakref.WeakSet[Scan] = weakref.WeakSet()
        self._marks: dict[str, int] = {}  # Offsets up to which sources were read, as stored.
        self._families: dict[str, Any] = {}
        self._handles: dict[str, Any] = {}
        self._table_options: dict[str, Any] = {}
        self._recorder = recorder
        self._path = str(recorder.directory)
        self._recording = RocksDBRecording(recorder)
        self._database: Any = None
        try:
            self._recording.adopt()
            self._open(options, families)
            self._pending = {name: Pending() for name in self._families}
            check_recordable(self._recording.options_text(), has_wal=self._recording.has_wal())
            database: Any = self._database
            self._recording.start(
                database.latest_sequence_number,
                lambda: [file["name"].lstrip("/") for file in database.live_files()],
            )
        except BaseException:
            self.destroy()
            raise

    def _open(self, options: RocksDBOptions | None, families: Families) -> None:
        with native_errors("open the database", self._path):
            opened = options_to_open(
                self._native, self._path, options, families, exists=self._recording.is_recorded
            )
            self._table_options = opened.families
            self._database = self._native.Rdict(self._path, opened.database, opened.families)
            self._families[DEFAULT] = self._database
            for name in opened.families.keys() - {DEFAULT}:
                self._families[name] = self._database.get_column_family(name)
                self._handles[name] = self._database.get_column_family_handle(name)

    @classmethod
    def standby_view(cls, directory: Path, *, cache_bytes: int = 64 << 20) -> StateView:
        """Return a view for `Application.new_view`.

        Queries on a standby get an object of this class that was made without ``__init__``. Methods that use
        only ``view`` work as on the primary; reading and writing in a transaction raise ``NotAllowed``.
        ``cache_bytes`` bounds the cache of uncompressed blocks of all column families. Raise ``Invalid`` for
        fewer than 1. Each of two copies holds the content of WALs in memory, about 64 MiB at most.
        """
        native = load_rocksdict("RocksDBStore")
        require_count("cache_bytes", cache_bytes)
        with native_errors("make a cache of blocks", str(directory)):
            cache = native.Cache(cache_bytes)
        copies = [FollowedRocksDB(native, directory / name, cache) for name in ("one", "two")]
        return DoubleBuffer(copies, lambda copy: cls._reading(native, copy))

    @classmethod
    def _reading(cls, native: Any, copy: FollowedRocksDB) -> Self:
        """Return a store that only reads ``copy``: queries on a hot standby get it."""
        store = cls.__new__(cls)
        store._native = native
        store._path = copy.path
        store._lock = threading.Lock()
        store._closed = False
        store._views = weakref.WeakSet()
        store._copy = copy
        nothing: Any = MissingPart()
        store._pending = store._recording = store._recorder = nothing
        return store

    def get(self, key: bytes, *, column_family: str = DEFAULT) -> bytes | None:
        """Return the value of a key in the running transaction; None if the key is absent.

        Raise ``Invalid`` if the key is no bytes or the column family is unknown, and ``Closed`` after
        `destroy`. For errors of RocksDB see `native_errors`.
        """
        if type(key) is not bytes:
            require_bytes(key=key)
        pending = self._pending_of(column_family)
        if key in pending.values:
            return pending.values[key]
        if pending.ranges and pending.in_deleted_range(key):
            return None
        try:
            value: bytes | None = self._families[column_family].get(key)
        except Exception as error:
            raise map_errors(error, "read a key", self._path) from error
        return value

    def put(self, key: bytes, value: bytes, *, column_family: str = DEFAULT) -> None:
        """Set a key. Raise as `get`, and ``Invalid`` for a reserved key, or a value that is not bytes."""
        require_writable(key, value, column_family == DEFAULT)
        self._pending_of(column_family).set(key, value)

    def delete(self, key: bytes, *, column_family: str = DEFAULT) -> None:
        """Remove a key, if it exists. Raise as `get`, and ``Invalid`` for a reserved key."""
        require_writable(key, b"", column_family == DEFAULT)
        self._pending_of(column_family).set(key, None)

    def delete_range(self, begin: bytes, end: bytes, *, column_family: str = DEFAULT) -> None:
        """Remove keys from ``begin`` up to, but without, ``end``. Keep reserved keys. Raise as `get`."""
        require_bytes(begin=begin, end=end)
        pending = self._pending_of(column_family)
        if begin >= end:
            return
        if column_family != DEFAULT:
            pending.delete_range(begin, end)
            return
        for low, high in application_spans(begin, end):
            assert high is not None
            pending.delete_range(low, high)

    def iterate(
        self,
        prefix: bytes = b"",
        *,
        begin: bytes | None = None,
        end: bytes | None = None,
        reverse: bool = False,
        column_family: str = DEFAULT,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of keys with ``prefix``, from ``begin`` up to ``end``, in order or ``reverse``.

        The content is as of this call in the running transaction, and undefined after the commit. Raise
        ``Invalid`` as `get`. Each step raises ``Closed`` after `destroy`, and ``Corrupt`` for a damaged file.
        """
        pending = self._pending_of(column_family)
        pinned = Pinned(self._native, self._families[column_family], self._path)

        def scan_span(low: bytes, high: bytes | None) -> Iterator[tuple[bytes, bytes]]:
            writes = pending.between(low, high, reverse=reverse)
            scan = Scan(pinned, low, high, reverse=reverse)
            self._scans.add(scan)
            if not writes and not pending.ranges:
                return scan
            return merged(scan, writes, Pending(dict(writes), list(pending.ranges)), reverse)

        return joined(spans(prefix, begin, end, column_family), scan_span, reverse=reverse)

    def timer_table(self, shard: Shard) -> TimerTable:
        return RocksDBTimers(self.get, self._pending_of(DEFAULT).set, self._scan_reserved)

    @property
    def holds_timers(self) -> bool:
        end = after(TIMER_AT_PREFIX)
        assert end is not None
        return next(self._scan_reserved(TIMER_AT_PREFIX, end), None) is not None

    def _scan_reserved(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield reserved keys from ``low`` up to ``high`` with their values in the running transaction."""
        pending = self._pending_of(DEFAULT)
        scan = Scan(Pinned(self._native, self._database, self._path), low, high, reverse=False)
        self._scans.add(scan)
        writes = pending.between(low, high, reverse=False)
        return merged(scan, writes, Pending(dict(writes)), False)

    def savepoint(self) -> PendingSavepoint:
        if self._closed:
            raise self._closed_error()
        return PendingSavepoint(self._pending.values())

    def classify_error(self, error: Exception) -> ErrorCause:
        """Return ``MESSAGE``: the store's own errors are `GazetteError`, which are not classified."""
        return ErrorCause.MESSAGE

    def _pending_of(self, column_family: str) -> Pending:
        """Return the transaction's writes to a family. Raise ``Closed`` after `destroy`, or `no_family`."""
        if self._closed:
            raise self._closed_error()
        try:
            return self._pending[column_family]
        except (KeyError, TypeError):  # TypeError: the value cannot be a key of a dict.
            raise no_family(column_family) from None

    @property
    def column_families(self) -> tuple[str, ...]:
        """Names of all column families, including those that the application does not name any more."""
        return tuple(self._families if self._copy is None else self._copy.families)

    def ingest(self, items: Iterable[tuple[bytes, bytes]], *, column_family: str = DEFAULT) -> int:
        """Write keys in ascending order, each once, as finished tables. Return their number.

        This is several times faster than ``put``. The tables take effect together at the end, outside any
        transaction: only a backfill may call it (``NotAllowed`` for a live store). Raise ``Invalid``
        for reserved keys, and for keys that are not in ascending order. After an error, no key is written.
        """
        self._pending_of(column_family)
        if not self._recorder.offline:
            raise NotAllowed(
                "ingest() is for building a state, and this store is live",
                hint="Use put(), which is part of the running transaction.",
            )
        family = self._families[column_family]
        count = 0
        last_key: bytes | None = None
        with tempfile.TemporaryDirectory(prefix="ingest-", dir=Path(self._path).parent) as scratch:
            tables: list[str] = []
            writer: Any = None
            size = 0
            with native_errors("ingest keys", self._path):
                for key, value in items:
                    require_writable(key, value, column_family == DEFAULT)
                    if last_key is not None and key <= last_key:
                        raise Invalid(
                            "keys must be in ascending order, each once",
                            key=key.hex(),
                            last=last_key.hex(),
                        )
                    if writer is None:
                        writer = self._native.SstFileWriter(self._table_options[column_family])
                        tables.append(f"{scratch}/{len(tables):06d}.sst")
                        writer.open(tables[-1])
                    writer[key] = value
                    last_key = key
                    count += 1
                    size += len(key) + len(value)
                    if size >= _INGESTED_TABLE_BYTES:
                        writer.finish()
                        writer, size = None, 0
                if writer is not None:
                    writer.finish()
                if tables:
                    options = self._native.IngestExternalFileOptions()
                    options.set_move_files(True)
                    family.ingest_external_file(tables, options)
        return count

    def view(self) -> RocksDBView:
        """Return a consistent view, for any thread. Use it as a context manager.

        On the shard's thread, the view has the writes of the running transaction so far. On another
        thread, it has the last local commit. Later writes do not change it. Wait while a
        commit is written. Raise ``Closed`` when the store was destroyed.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error()
            view = self._new_view()
            self._views.add(view)
            return view

    def _new_view(self) -> RocksDBView:
        native, path = self._native, self._path
        families: dict[str, FamilyView] = {}
        if self._copy is None:
            is_shard_thread = threading.get_ident() == self._thread
            for name, family in self._families.items():
                families[name] = FamilySnapshot(native, family, path)
                if is_shard_thread and (pending := self._pending[name]):
                    families[name] = FamilyTransaction(families[name], pending.copy())
        else:
            for name, followed in self._copy.families.items():
                families[name] = FamilyCopy(native, followed, path)
        return RocksDBView(families, path)

    @property
    def live_bytes(self) -> int:
        """Bytes of the database's files."""
        return self._recording.live_bytes

    def _closed_error(self) -> Closed:
        return Closed("the store was destroyed", path=self._path)

    def start_commit(
        self, shard: Shard, checkpoint: Checkpoint, wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        values = self._pending_of(DEFAULT).values
        values[CHECKPOINT_KEY] = checkpoint.to_bytes()
        for journal, source in checkpoint.sources.items():
            if self._marks.get(journal) != source.read_through:
                self._marks[journal] = source.read_through
                values[mark_key(journal)] = encode_offset(source.read_through)
        with self._lock, native_errors("write a commit", self._path):
            for batch in self._batches():
                self._write(batch)
        for pending in self._pending.values():
            pending.clear()
        return self._recording.ship(wait_for)

    def _batches(self) -> Iterator[list[_Write]]:
        """Yield the transaction's writes, in batches of about ``batch_bytes`` or `_BATCH_OPS` writes."""
        batch: list[_Write] = []
        size = 0
        for family, pending in self._pending.items():
            handle = self._handles.get(family)
            # Write ranges first: a key in `values` was set after each deletion of a range with this key.
            batch += [_Write(handle, begin, end, True) for begin, end in pending.ranges]
            for key, value in pending.values.items():
                batch.append(_Write(handle, key, value, False))
                size += len(key) + (0 if value is None else len(value))
                if size >= self._batch_bytes or len(batch) >= _BATCH_OPS:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _write(self, writes: list[_Write]) -> None:
        """Write one batch. If RocksDB would delay it, flush first and try again: a delayed write stops all
        threads of the process. After `_STALL_FLUSHES` flushes, accept the delay."""
        impatient = self._native.WriteOptions()
        impatient.no_slowdown = True
        for _ in range(_STALL_FLUSHES):
            try:
                self._database.write(self._batch(writes), impatient)
                return
            except Exception as error:  # "Incomplete" if RocksDB would delay the write.
                if "incomplete" not in str(error):
                    raise
            for family in self._families.values():
                family.flush(True)
        self._database.write(self._batch(writes))  # Accept a delay.

    def _batch(self, writes: list[_Write]) -> Any:
        batch = self._native.WriteBatch(raw_mode=True)
        for write in writes:
            if write.is_range:
                batch.delete_range(write.key, write.value, write.handle)
            elif write.value is None:
                batch.delete(write.key, write.handle)
            else:
                batch.put(write.key, write.value, write.handle)
        return batch

    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        if not self._is_restored and any(self._pending.values()):
            raise wrote_too_early(self, shard.id)
        self._is_restored = True
        for pending in self._pending.values():
            pending.clear()
        with native_errors("read the checkpoint", self._path):
            pinned = Pinned(self._native, self._database, self._path)
            scan = Scan(pinned, MARK_PREFIX, after(MARK_PREFIX), reverse=False)
            self._marks = marks = {journal_of(key): decode_offset(value) for key, value in scan}
            data: bytes | None = self._database.get(CHECKPOINT_KEY)
        if data is not None:
            return Checkpoint.from_bytes(data)
        return Checkpoint({journal: SourceCheckpoint(offset) for journal, offset in marks.items()})

    def close_reading(self) -> None:
        """End the views and iterations of a standby's store: they raise ``Closed``."""
        with self._lock:
            self._closed = True
            for view in list(self._views):
                view.close()

    def destroy(self) -> None:
        """Close the database. Views and iterations raise ``Closed`` from now on. Wait for running flushes and
        compactions, but not for the log."""
        with self._lock:
            self._closed = True
            for scan in list(self._scans):
                scan.close()
            for view in list(self._views):
                view.close()
        # RocksDB keeps its lock until the last of these objects is released.
        self._families.clear()
        self._handles.clear()
        self._recording.close()
        database, self._database = self._database, None
        if database is not None:
            database.cancel_all_background(True)
            try:
                database.close()
            except Exception as error:
                # To close, RocksDB flushes first. That flush may fail: the log has everything.
                if "Shutdown in progress" not in str(error):
                    raise


@dataclass(frozen=True, slots=True)
class _Write:
    handle: Any
    key: bytes
    value: bytes | None
    """The value, or None to delete the key; for a range, its end."""
    is_range: bool


__all__ = ["DEFAULT", "RocksDBOptions", "RocksDBStore", "RocksDBView"]
