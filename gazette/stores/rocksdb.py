"""Stage 14 of the byte path: keys and values of a shard in RocksDB, replicated to its recovery log.

Needs the extra ``gazette[rocksdb]``. Flushes and compactions go on in the background; each commit,
with its checkpoint, reaches the recovery log as one append.
"""

from __future__ import annotations

import contextlib
import heapq
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from gazette.consumer.application import Shard, Store
from gazette.errors import Broken, Closed, Corrupt, Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.recoverylog.recorder import Recorder
from gazette.recoverylog.rocksdb_keys import (
    CHECKPOINT_KEY,
    FIRST_USER_KEY,
    MARK_PREFIX,
    decode_offset,
    encode_offset,
    journal_of,
    mark_key,
)
from gazette.stores.rocksdb_recording import RocksDBRecording
from gazette.tasks import OpFuture

DEFAULT: Final = "default"
Compression = Literal["none", "snappy", "lz4", "lz4hc", "zlib", "zstd"]

MANIFEST_BYTES: Final = 128 << 10
WAL_BYTES: Final = 64 << 20
"""WALs are kept below this: it bounds what a new owner replays, beside the log's horizon."""
_BATCH_OPS: Final = 8192
_STALL_FLUSHES: Final = 3
_INGESTED_TABLE_BYTES: Final = 64 << 20

_RECORDABLE: Final = {
    "allow_mmap_writes": "false",
    "manual_wal_flush": "false",
    "recycle_log_file_num": "0",
    "two_write_queues": "false",
    "unordered_write": "false",
    "use_direct_io_for_flush_and_compaction": "false",
    "wal_compression": "kNoCompression",
}
"""What recording rests on, as RocksDB writes its options."""


@dataclass(frozen=True, slots=True)
class RocksDBOptions:
    """How a column family is kept. They are given at every opening, and may change between two.

    ``tune`` is called with the ``rocksdict.Options`` for what is not named here. What recording
    rests on is set after it, or refused (``Invalid``).
    """

    write_buffer_bytes: int = 16 << 20
    """A memtable is flushed when it is this large."""
    table_bytes: int = 16 << 20
    """How large tables get."""
    cache_bytes: int = 64 << 20
    """Of uncompressed blocks, of this column family."""
    compression: Compression = "lz4"
    bloom_bits_per_key: float = 10.0
    """0: no bloom filters."""
    min_blob_bytes: int | None = None
    """Values from this size on are kept in blob files. None: all are kept in tables."""
    background_jobs: int = 2
    """Threads for flushes and compactions. Only that of the default column family counts."""
    tune: Callable[[Any], None] | None = None


class RocksDBStore(Store):
    """A store whose state is a RocksDB database: ordered keys and values, bytes both.

    ``column_families`` names those beside the default one. Families that a former version of the
    application named, and that are not named any more, are opened with the options that they had,
    and kept.

    ``get``, ``put``, ``delete``, ``delete_range`` and ``iterate`` belong to the shard's thread and to
    its running transaction, which sees its own writes. They are held in memory until it commits.
    Other threads read by ``view``, which is of the last local commit.

    In the default column family, keys must not be empty nor begin with a zero byte (``Invalid``).
    """

    def __init__(
        self,
        recorder: Recorder | None,
        *,
        column_families: Mapping[str, RocksDBOptions] | Iterable[str] = (),
        options: RocksDBOptions | None = None,
        batch_bytes: int = 1 << 20,
    ) -> None:
        """Open the played-back database, or a new one.

        ``batch_bytes``: a commit is written to RocksDB in batches of about this size, since no other
        thread of the process runs during one.
        Raises ``Invalid``, among others when the package is missing or the log holds another store.
        """
        if recorder is None:
            raise Invalid(
                "RocksDBStore needs a recovery log",
                hint="Set recovery_log_prefix in the shard's specification.",
            )
        self._native = _rocksdict()
        self._batch_bytes = batch_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._views: weakref.WeakSet[RocksDBView] = weakref.WeakSet()
        self._scans: weakref.WeakSet[_Scan] = weakref.WeakSet()
        self._marks: dict[str, int] = {}
        self._families: dict[str, Any] = {}
        self._handles: dict[str, Any] = {}
        self._table_options: dict[str, Any] = {}
        self._recorder = recorder
        self._path = str(recorder.directory)
        self._recording = RocksDBRecording(recorder)
        self._database: Any = None
        if not isinstance(column_families, Mapping):
            column_families = dict.fromkeys(column_families, RocksDBOptions())
        if DEFAULT in column_families:
            raise Invalid("give the options of the default column family as `options`")
        try:
            self._recording.adopt()
            self._open(options or RocksDBOptions(), column_families)
            self._pending = {name: _Pending() for name in self._families}
            self._check_recordable()
            database: Any = self._database
            self._recording.start(database.latest_sequence_number)
        except BaseException:
            self.destroy()
            raise

    # -- opening

    def _open(self, options: RocksDBOptions, column_families: Mapping[str, RocksDBOptions]) -> None:
        native = self._native
        families = {name: self._options(value) for name, value in column_families.items()}
        with _native_errors("open the database", self._path):
            if self._recording.is_recorded:
                _, recorded = native.Options.load_latest(self._path)
                for name in native.Rdict.list_cf(self._path):
                    if name != DEFAULT and name not in families:
                        families[name] = recorded[name]
            self._table_options = {DEFAULT: self._options(options), **families}
            self._database = native.Rdict(self._path, self._database_options(options), families)
            self._families[DEFAULT] = self._database
            for name in families:
                self._families[name] = self._database.get_column_family(name)
                self._handles[name] = self._database.get_column_family_handle(name)

    def _options(self, options: RocksDBOptions) -> Any:
        native = self._native
        result = native.Options(raw_mode=True)
        result.set_write_buffer_size(options.write_buffer_bytes)
        # Writes that RocksDB holds up hold up the whole process: make that rare. They fail instead
        # (see `_write`) while memtables wait for their flush.
        result.set_max_write_buffer_number(6)
        result.set_level_zero_slowdown_writes_trigger(1 << 30)
        result.set_level_zero_stop_writes_trigger(128)
        result.set_soft_pending_compaction_bytes_limit(0)
        result.set_hard_pending_compaction_bytes_limit(0)
        result.set_target_file_size_base(options.table_bytes)
        result.set_compression_type(getattr(native.DBCompressionType, options.compression)())
        table = native.BlockBasedOptions()
        table.set_block_cache(native.Cache(options.cache_bytes))
        if options.bloom_bits_per_key:
            table.set_bloom_filter(options.bloom_bits_per_key, False)
        result.set_block_based_table_factory(table)
        if options.min_blob_bytes is not None:
            result.set_enable_blob_files(True)
            result.set_min_blob_size(options.min_blob_bytes)
            result.set_blob_file_size(options.table_bytes)
            result.set_enable_blob_gc(True)
        if options.tune is not None:
            options.tune(result)
        return result

    def _database_options(self, options: RocksDBOptions) -> Any:
        result = self._options(options)
        result.create_if_missing(True)
        result.create_missing_column_families(True)
        result.set_max_background_jobs(options.background_jobs)
        result.set_max_total_wal_size(WAL_BYTES)
        result.set_max_manifest_file_size(MANIFEST_BYTES)
        result.set_keep_log_file_num(1)
        result.set_recycle_log_file_num(0)
        result.set_wal_ttl_seconds(0)
        result.set_wal_size_limit_mb(0)
        result.set_wal_recovery_mode(self._native.DBRecoveryMode.point_in_time())
        result.set_allow_mmap_writes(False)
        result.set_use_direct_io_for_flush_and_compaction(False)
        result.set_unordered_write(False)
        return result

    def _check_recordable(self) -> None:
        """Refuse options under which files are not written as recording expects."""
        text = self._recording.options_text()
        actual = dict(line.strip().split("=", 1) for line in text.splitlines() if "=" in line)
        for name, value in _RECORDABLE.items():
            if actual.get(name, value) != value:
                raise Invalid(
                    f"a RocksDB with {name}={actual[name]} cannot be recorded",
                    hint=f"Leave {name} at {value} in RocksDBOptions.tune.",
                )
        if not self._recording.has_wal():
            raise Invalid(
                "RocksDB writes its WAL elsewhere, so it cannot be recorded",
                hint="Do not call set_wal_dir in RocksDBOptions.tune.",
            )

    # -- the running transaction

    def get(self, key: bytes, *, column_family: str = DEFAULT) -> bytes | None:
        """The value of a key, as of the running transaction. None: there is none."""
        pending = self._pending_of(column_family)
        if key in pending.values:
            return pending.values[key]
        if pending.ranges and pending.is_deleted(key):
            return None
        value: bytes | None = self._families[column_family].get(key)
        return value

    def put(self, key: bytes, value: bytes, *, column_family: str = DEFAULT) -> None:
        """Set a key. Raises ``Invalid`` for a reserved one."""
        self._check(key, value, column_family)
        self._pending_of(column_family).set(key, value)

    def delete(self, key: bytes, *, column_family: str = DEFAULT) -> None:
        """Remove a key, if there is one. Raises ``Invalid`` for a reserved one."""
        self._check(key, b"", column_family)
        self._pending_of(column_family).set(key, None)

    def delete_range(self, begin: bytes, end: bytes, *, column_family: str = DEFAULT) -> None:
        """Remove every key from ``begin`` up to, and without, ``end``."""
        self._check(begin, end, column_family)
        if begin < end:
            self._pending_of(column_family).delete_range(begin, end)

    def iterate(
        self,
        prefix: bytes = b"",
        *,
        begin: bytes | None = None,
        end: bytes | None = None,
        reverse: bool = False,
        column_family: str = DEFAULT,
    ) -> Iterator[tuple[bytes, bytes]]:
        """(key, value) in the order of keys, of those with ``prefix`` from ``begin`` up to ``end``.

        As of the running transaction when this is called; writes after that are not seen. It ends
        with the transaction: what is left of it after a commit is undefined.
        """
        low, high = _bounds(prefix, begin, end, column_family)
        pending = self._pending_of(column_family)
        ours = pending.between(low, high, reverse=reverse)
        scan = _Scan(self._native, self._families[column_family], low, high, reverse=reverse)
        self._scans.add(scan)
        if not ours and not pending.ranges:
            return scan
        return _merged(scan, ours, _Pending(dict(ours), list(pending.ranges)), reverse=reverse)

    def savepoint(self) -> _Savepoint:
        if self._closed:
            raise self._closed_error()
        return _Savepoint(self._pending.values())

    def _pending_of(self, column_family: str) -> _Pending:
        if self._closed:
            raise self._closed_error()
        try:
            return self._pending[column_family]
        except KeyError:
            raise _no_family(column_family) from None

    def _check(self, key: bytes, value: bytes, column_family: str) -> None:
        if type(key) is not bytes or type(value) is not bytes:
            raise Invalid(
                "keys and values are bytes", key=type(key).__name__, value=type(value).__name__
            )
        if column_family == DEFAULT and (not key or key[0] == 0):
            raise Invalid(
                "keys that are empty or begin with a zero byte are reserved",
                key=key.hex(),
                hint="Put a prefix before your keys, or use a column family of your own.",
            )

    @property
    def column_families(self) -> tuple[str, ...]:
        """The names of all column families, also of those that were only named formerly."""
        return tuple(self._families)

    # -- building a state

    def ingest(self, items: Iterable[tuple[bytes, bytes]], *, column_family: str = DEFAULT) -> int:
        """Take over keys in ascending order, each once, as finished tables; how many.

        Several times faster than ``put``, and only for a store that is being built by a backfill:
        tables take effect at once, outside of any transaction (``NotAllowed`` for a live one).
        Raises ``Invalid`` for reserved keys, and for those that are not in ascending order.
        """
        self._pending_of(column_family)
        if not self._recorder.offline:
            raise NotAllowed(
                "ingest() is for building a state, and this store is live",
                hint="Use put(), which is part of the running transaction.",
            )
        family = self._families[column_family]
        count = 0
        last: bytes | None = None
        with tempfile.TemporaryDirectory(prefix="ingest-", dir=Path(self._path).parent) as scratch:
            tables: list[str] = []
            writer: Any = None
            size = 0
            with _native_errors("ingest keys", self._path):
                for key, value in items:
                    self._check(key, value, column_family)
                    if last is not None and key <= last:
                        raise Invalid(
                            "keys must be in ascending order, each once",
                            key=key.hex(),
                            last=last.hex(),
                        )
                    if writer is None:
                        writer = self._native.SstFileWriter(self._table_options[column_family])
                        tables.append(f"{scratch}/{len(tables):06d}.sst")
                        writer.open(tables[-1])
                    writer[key] = value
                    last = key
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

    # -- reading beside it

    def view(self) -> RocksDBView:
        """A consistent view of the last local commit, for any thread. Use it as a context manager.

        Waits while a commit is being written. Raises ``Closed`` when the store was destroyed.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error()
            view = RocksDBView(self)
            self._views.add(view)
            return view

    @property
    def live_bytes(self) -> int:
        """The size of the database's files, in bytes."""
        return self._recording.live_bytes

    def _closed_error(self) -> Closed:
        return Closed("the store was destroyed", path=self._path)

    # -- the store's contract

    def start_commit(
        self, shard: Shard, checkpoint: Checkpoint, wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        ours = self._pending_of(DEFAULT).values
        ours[CHECKPOINT_KEY] = checkpoint.to_bytes()
        for journal, source in checkpoint.sources.items():
            if self._marks.get(journal) != source.read_through:
                self._marks[journal] = source.read_through
                ours[mark_key(journal)] = encode_offset(source.read_through)
        with self._lock, _native_errors("write a commit", self._path):
            for batch in self._batches():
                self._write(batch)
        for pending in self._pending.values():
            pending.clear()
        return self._recording.ship(wait_for)

    def _batches(self) -> Iterator[list[_Write]]:
        batch: list[_Write] = []
        size = 0
        for family, pending in self._pending.items():
            handle = self._handles.get(family)
            # Ranges first: what was set after one was deleted is among the values, and only that.
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
        """Write one batch. While RocksDB would make it wait, wait with the other threads running."""
        impatient = self._native.WriteOptions()
        impatient.no_slowdown = True
        for _ in range(_STALL_FLUSHES):
            try:
                self._database.write(self._batch(writes), impatient)
                return
            except Exception as error:
                if "incomplete" not in str(error):
                    raise
            for family in self._families.values():
                family.flush(True)
        self._database.write(self._batch(writes))

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
        for pending in self._pending.values():
            pending.clear()
        with _native_errors("read the checkpoint", self._path):
            marks = {
                journal_of(key): decode_offset(value)
                for key, value in _Scan(
                    self._native, self._database, MARK_PREFIX, _after(MARK_PREFIX), reverse=False
                )
            }
            data: bytes | None = self._database.get(CHECKPOINT_KEY)
        self._marks = marks
        if data is not None:
            return Checkpoint.from_bytes(data)
        return Checkpoint({journal: SourceCheckpoint(offset) for journal, offset in marks.items()})

    def destroy(self) -> None:
        """Ends views and iterations (``Closed``), and compactions. Waits for nothing of the log."""
        with self._lock:
            self._closed = True
            for scan in list(self._scans):
                scan.close()
            for view in list(self._views):
                view.close()
        # RocksDB keeps its lock until the last of these is gone.
        self._families.clear()
        self._handles.clear()
        self._recording.close()
        database, self._database = self._database, None
        if database is not None:
            database.cancel_all_background(True)
            try:
                database.close()
            except Exception as error:
                # It would flush first, for which there is no need: the log has everything.
                if "Shutdown in progress" not in str(error):
                    raise


class RocksDBView:
    """What a store held at one commit. May be passed between threads, and used by one at a time.

    Close it soon: RocksDB keeps what was overwritten for as long as a view needs it.
    """

    def __init__(self, store: RocksDBStore) -> None:
        """See `RocksDBStore.view`."""
        self._native = store._native
        self._store = store
        self._snapshots = {name: family.snapshot() for name, family in store._families.items()}
        # Iterators of rocksdict's snapshots are of the present state, not of the snapshot. One that
        # is made now is of now, so scans share it.
        self._pinned = {
            name: _Pinned(family.iter(_scan_options(self._native)))
            for name, family in store._families.items()
        }
        self._scans: weakref.WeakSet[_ViewScan] = weakref.WeakSet()
        self._lock = threading.Lock()

    def _snapshot(self, column_family: str) -> Any:
        snapshot = self._snapshots.get(column_family)
        if snapshot is None:
            raise _no_family(column_family) if self._snapshots else self._store._closed_error()
        return snapshot

    def get(self, key: bytes, *, column_family: str = DEFAULT) -> bytes | None:
        """The value of a key. None: there is none. Raises ``Closed``."""
        try:
            value: bytes = self._snapshot(column_family)[key]
        except Exception as error:
            # Raised as a plain Exception.
            if str(error) != "key not found":
                raise
            return None
        return value

    def iterate(
        self,
        prefix: bytes = b"",
        *,
        begin: bytes | None = None,
        end: bytes | None = None,
        reverse: bool = False,
        column_family: str = DEFAULT,
    ) -> Iterator[tuple[bytes, bytes]]:
        """(key, value) in the order of keys, of those with ``prefix`` from ``begin`` up to ``end``.

        Raises ``Closed``, also while it goes on when the view is closed.
        """
        low, high = _bounds(prefix, begin, end, column_family)
        with self._lock:
            self._snapshot(column_family)
            scan = _ViewScan(self._pinned[column_family], low, high, reverse=reverse)
            self._scans.add(scan)
        return scan

    def close(self) -> None:
        """End it, and iterations of it. Any thread."""
        with self._lock:
            self._snapshots = {}
            for scan in list(self._scans):
                scan.close()
            for pinned in self._pinned.values():
                pinned.close()
            self._pinned = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Write:
    handle: Any
    key: bytes
    value: bytes | None
    """Of a range, its end."""
    is_range: bool


class _Pending:
    """Writes of the running transaction to one column family.

    Invariant: ``ranges`` come first, then ``values``, of which None deletes.
    """

    __slots__ = ("ranges", "undo", "values")

    def __init__(
        self,
        values: dict[bytes, bytes | None] | None = None,
        ranges: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.values = {} if values is None else values
        self.ranges = [] if ranges is None else ranges
        self.undo: list[Callable[[], object]] | None = None
        """While there is a savepoint: what returns to it, the last first."""

    def set(self, key: bytes, value: bytes | None) -> None:
        if self.undo is not None:
            if key in self.values:
                self.undo.append(partial(self.values.__setitem__, key, self.values[key]))
            else:
                self.undo.append(partial(self.values.pop, key))
        self.values[key] = value

    def clear(self) -> None:
        self.values.clear()
        self.ranges.clear()

    def is_deleted(self, key: bytes) -> bool:
        return any(begin <= key < end for begin, end in self.ranges)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        deleted = {key: self.values[key] for key in self.values if begin <= key < end}
        for key in deleted:
            del self.values[key]
        self.ranges.append((begin, end))
        if self.undo is not None:
            self.undo.append(partial(self.values.update, deleted))
            self.undo.append(self.ranges.pop)

    def between(
        self, low: bytes, high: bytes | None, *, reverse: bool
    ) -> list[tuple[bytes, bytes | None]]:
        found = [
            (key, value)
            for key, value in self.values.items()
            if low <= key and (high is None or key < high)
        ]
        found.sort(reverse=reverse)
        return found


class _Savepoint:
    """Of `RocksDBStore.savepoint`."""

    def __init__(self, pending: Iterable[_Pending]) -> None:
        self._pending = list(pending)
        for one in self._pending:
            one.undo = []

    def release(self) -> None:
        for one in self._pending:
            one.undo = None

    def roll_back(self) -> None:
        for one in self._pending:
            undo, one.undo = one.undo or [], None
            for step in reversed(undo):
                step()


def _scan_options(native: Any) -> Any:
    options = native.ReadOptions()
    # Whatever prefix extractor the application tuned in: order is by whole keys.
    options.set_total_order_seek(True)
    return options


class _Pinned:
    """An iterator that stays at one state of a column family, and the scan that it was moved by last."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.owner: _ViewScan | None = None
        self.lock = threading.Lock()

    def close(self) -> None:
        with self.lock:
            self.native = None


class _ViewScan(Iterator[tuple[bytes, bytes]]):
    """Keys and values of a view between two bounds. Scans of a view may be interleaved."""

    def __init__(self, pinned: _Pinned, low: bytes, high: bytes | None, *, reverse: bool) -> None:
        self._pinned: _Pinned | None = pinned
        self._low, self._high, self._reverse = low, high, reverse
        self._last: bytes | None = None
        self._ended = False

    def __next__(self) -> tuple[bytes, bytes]:
        if self._ended:
            raise StopIteration
        pinned = self._pinned
        if pinned is None:
            raise Closed("the view, or the store, was closed")
        with pinned.lock:
            native = pinned.native
            if native is None:
                raise Closed("the view, or the store, was closed")
            self._advance(native, moved=pinned.owner is not self)
            pinned.owner = self
            if native.valid():
                key: bytes = native.key()
                if key >= self._low and (self._high is None or key < self._high):
                    self._last = key
                    return key, native.value()
        self._ended = True
        raise StopIteration

    def _advance(self, native: Any, *, moved: bool) -> None:
        """Go to the next key: from where the iterator is, or from anew if another scan moved it."""
        last = self._last
        if last is None:
            self._seek_first(native)
        elif self._reverse:
            if moved:
                native.seek_for_prev(last)
            native.prev()
        else:
            if moved:
                native.seek(last)
            native.next()

    def _seek_first(self, native: Any) -> None:
        if not self._reverse:
            native.seek(self._low)
        elif self._high is None:
            native.seek_to_last()
        else:
            native.seek_for_prev(self._high)
            if native.valid() and native.key() == self._high:
                native.prev()

    def close(self) -> None:
        """End it; it raises ``Closed`` from now on. Any thread."""
        self._pinned = None


class _Scan(Iterator[tuple[bytes, bytes]]):
    """Keys and values of one column family between two bounds.

    RocksDB keeps its lock for as long as an iterator exists: closing ends it, from any thread.
    """

    def __init__(
        self, native: Any, source: Any, low: bytes, high: bytes | None, *, reverse: bool
    ) -> None:
        options = _scan_options(native)
        # Bounds of these options are no use: rocksdict encodes them as if keys were not raw.
        start = (high if reverse else low) or None
        self._items: Any = source.items(backwards=reverse, from_key=start, read_opt=options)
        self._low, self._high, self._reverse = low, high, reverse

    def __next__(self) -> tuple[bytes, bytes]:
        while True:
            items = self._items
            if items is None:
                raise Closed("the view, or the store, was closed")
            item: tuple[bytes, bytes] = next(items)
            key = item[0]
            if self._high is not None and key >= self._high:
                if self._reverse:
                    continue  # Seeking found the bound itself, which is not included.
                break
            if key < self._low:
                break
            return item
        self._items = iter(())
        raise StopIteration

    def close(self) -> None:
        """End it; it raises ``Closed`` from now on. Any thread."""
        self._items = None


def _merged(
    scan: _Scan, ours: list[tuple[bytes, bytes | None]], pending: _Pending, *, reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    """What the database has, less what the transaction deleted or replaced, and what that wrote."""
    values, ranges = pending.values, pending.ranges
    kept = (
        item
        for item in scan
        if item[0] not in values and not (ranges and pending.is_deleted(item[0]))
    )
    written = ((key, value) for key, value in ours if value is not None)
    return heapq.merge(kept, written, reverse=reverse)


def _bounds(
    prefix: bytes, begin: bytes | None, end: bytes | None, column_family: str
) -> tuple[bytes, bytes | None]:
    low, high = prefix, _after(prefix)
    if column_family == DEFAULT:
        low = max(low, FIRST_USER_KEY)
    if begin is not None:
        low = max(low, begin)
    if end is not None:
        high = end if high is None else min(high, end)
    return low, high


def _after(prefix: bytes) -> bytes | None:
    """The least key that is greater than every key with a prefix; None: there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else None


def _no_family(name: str) -> Invalid:
    return Invalid(f"no column family {name!r}", hint="Name it in column_families of RocksDBStore.")


def _rocksdict() -> Any:
    try:
        import rocksdict
    except ImportError as error:
        raise Invalid(
            "RocksDBStore needs a package that is not installed (rocksdict)",
            hint="pip install 'gazette[rocksdb]'",
        ) from error
    return rocksdict


@contextlib.contextmanager
def _native_errors(what: str, path: str) -> Iterator[None]:
    """RocksDB's errors, which are plain Exceptions, as ours."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception and type(error).__module__ != "rocksdict":
            raise
        kind = Corrupt if "orruption" in str(error) else Broken
        raise kind(f"RocksDB could not {what}: {error}", path=path) from error
