"""The content of a RocksDB store at one commit, for queries.

On the primary, the content is a snapshot. The shard's thread sees the writes of its running transaction over
the snapshot. On a hot standby, the content is tables and the writes over them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol, Self

from gazette.errors import Closed, NotAllowed
from gazette.recoverylog.rocksdb.keys import require_bytes
from gazette.recoverylog.rocksdb.native import DEFAULT, map_errors
from gazette.recoverylog.rocksdb.scan import Pinned, Scan, closed_error, joined, no_family, spans
from gazette.stores.rocksdb.batch import folded, lookup
from gazette.stores.rocksdb.follower import FollowedFamily
from gazette.stores.rocksdb.write_buffer import Pending, merged


class FamilyView(Protocol):
    """A column family at one commit."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(
        self, low: bytes, high: bytes | None, *, reverse: bool
    ) -> Iterator[tuple[bytes, bytes]]: ...

    def close(self) -> None:
        """End the view of the family, and its scans. Any thread."""
        ...


class _Pins:
    """One iterator, and the scans that share it."""

    def __init__(self, native: Any, family: Any, path: str) -> None:
        # An iterator of a rocksdict snapshot shows the present state, not the snapshot's. So scans share
        # an iterator that was made together with the view.
        self._pinned = Pinned(native, family, path)
        self._scans: weakref.WeakSet[Scan] = weakref.WeakSet()

    def scan(self, low: bytes, high: bytes | None, *, reverse: bool) -> Scan:
        scan = Scan(self._pinned, low, high, reverse=reverse)
        self._scans.add(scan)
        return scan

    def close(self) -> None:
        for scan in list(self._scans):
            scan.close()
        self._pinned.close()


class FamilySnapshot:
    """A column family of a database, as of one moment."""

    def __init__(self, native: Any, family: Any, path: str) -> None:
        """Create the snapshot. Raise a `GazetteError` for RocksDB's errors."""
        self._path = path
        try:
            self._snapshot = family.snapshot()
        except Exception as error:
            raise map_errors(error, "make a view", path) from error
        self._pins = _Pins(native, family, path)

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes = self._snapshot[key]
        except Exception as error:
            if str(error) == "key not found":
                return None
            raise map_errors(error, "read a key", self._path) from error
        return value

    def scan(self, low: bytes, high: bytes | None, *, reverse: bool) -> Scan:
        return self._pins.scan(low, high, reverse=reverse)

    def close(self) -> None:
        self._pins.close()


class FamilyCopy:
    """A column family of a standby's copy, which does not change while it is read."""

    def __init__(self, native: Any, family: FollowedFamily, path: str) -> None:
        """Create the view. Raise a `GazetteError` for RocksDB's errors."""
        self._family = family
        self._path = path
        self._pins = _Pins(native, family.tables, path)
        self._closed = False

    def get(self, key: bytes) -> bytes | None:
        is_written, written = lookup(self._family.layers, key)
        if is_written:
            return written
        try:
            value: bytes | None = self._family.tables.get(key)
        except Exception as error:
            raise map_errors(error, "read a key", self._path) from error
        return value

    def scan(
        self, low: bytes, high: bytes | None, *, reverse: bool
    ) -> Iterator[tuple[bytes, bytes]]:
        pending = folded(self._family.layers, low, high)
        writes = pending.between(low, high, reverse=reverse)
        return self._open(
            merged(self._pins.scan(low, high, reverse=reverse), writes, pending, reverse)
        )

    def _open(self, items: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the items. Raise ``Closed`` once the view is closed, even if all items are in memory."""
        for entry in items:
            if self._closed:
                raise closed_error()
            yield entry

    def close(self) -> None:
        self._closed = True
        self._pins.close()


class FamilyTransaction:
    """A snapshot, and the writes of a running transaction over it."""

    def __init__(self, below: FamilyView, written: Pending) -> None:
        self._below = below
        self._written = written

    def get(self, key: bytes) -> bytes | None:
        if key in self._written.values:
            return self._written.values[key]
        return None if self._written.in_deleted_range(key) else self._below.get(key)

    def scan(
        self, low: bytes, high: bytes | None, *, reverse: bool
    ) -> Iterator[tuple[bytes, bytes]]:
        writes = self._written.between(low, high, reverse=reverse)
        return merged(self._below.scan(low, high, reverse=reverse), writes, self._written, reverse)

    def close(self) -> None:
        self._below.close()


class RocksDBView:
    """The content of a store at one moment. One thread at a time may use it. Close it soon: RocksDB keeps
    overwritten values while a view needs them."""

    def __init__(self, families: Mapping[str, FamilyView], path: str) -> None:
        """Create the view: see `RocksDBStore.view`."""
        self._path = path
        self._families = dict(families)
        self._lock = threading.Lock()

    def _family(self, name: object) -> FamilyView:
        # A value of another type may be unhashable.
        family = self._families.get(name) if isinstance(name, str) else None
        if family is None:
            if self._families:
                raise no_family(name)
            raise Closed("the store was destroyed", path=self._path)
        return family

    def get(self, key: bytes, *, column_family: str = DEFAULT) -> bytes | None:
        """Return the value of a key, or None. Raise ``Closed`` after `close`, ``Corrupt`` for damage, and
        ``Invalid`` for an unknown column family or a key that is not bytes."""
        if type(key) is not bytes:
            require_bytes(key=key)
        return self._family(column_family).get(key)

    def iterate(
        self,
        prefix: bytes = b"",
        *,
        begin: bytes | None = None,
        end: bytes | None = None,
        reverse: bool = False,
        column_family: str = DEFAULT,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of keys with ``prefix``, from ``begin`` up to ``end``, in key order or in
        ``reverse``.

        Raise ``Closed`` once the view is closed, even between two keys. Raise ``Invalid`` for an unknown
        column family or a bound that is not bytes, and ``Corrupt`` for a damaged file.
        """
        key_spans = spans(prefix, begin, end, column_family)
        with self._lock:
            scan = partial(self._family(column_family).scan, reverse=reverse)
            return joined(key_spans, scan, reverse=reverse)

    @property
    def column_families(self) -> tuple[str, ...]:
        """The names of all column families; none after `close`."""
        return tuple(self._families)

    def close(self) -> None:
        """End the view, and its iterations. Any thread."""
        with self._lock:
            families, self._families = self._families, {}
            for family in families.values():
                family.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MissingPart:
    """Takes the place of the parts that a standby's store lacks: their use raises ``NotAllowed``."""

    def __getattr__(self, name: str) -> Any:
        raise _refused()

    def __getitem__(self, name: str) -> Any:
        raise _refused()


def _refused() -> NotAllowed:
    return NotAllowed(
        "a hot standby's state is read-only", hint="Use view(), or ask the shard's primary."
    )
