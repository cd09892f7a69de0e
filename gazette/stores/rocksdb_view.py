"""What a RocksDB store held at one commit, for queries."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from gazette.errors import Closed, Invalid
from gazette.recoverylog.rocksdb_native import DEFAULT, translated
from gazette.recoverylog.rocksdb_scan import Pinned, Scan, bounds, no_family

Get = Callable[[bytes], bytes | None]


class RocksDBView:
    """What a store held at one commit. May be passed between threads, and used by one at a time.

    Close it soon: RocksDB keeps what was overwritten for as long as a view needs it.
    """

    def __init__(
        self, native: Any, families: Mapping[str, Any], path: str, *, changes: bool = True
    ) -> None:
        """See `RocksDBStore.view`. ``changes``: whether the database may while the view is open."""
        self._path = path
        self._gets: dict[str, Get] = {}
        self._pinned: dict[str, Pinned] = {}
        try:
            for name, family in families.items():
                self._gets[name] = _get_of(family.snapshot()) if changes else family.get
                # Iterators of rocksdict's snapshots are of the present state, not of the snapshot. One
                # that is made now is of now, so scans share it.
                self._pinned[name] = Pinned(native, family, path)
        except Exception as error:
            raise translated(error, "make a view", path) from error
        self._scans: weakref.WeakSet[Scan] = weakref.WeakSet()
        self._lock = threading.Lock()

    def _no_family(self, column_family: str) -> Invalid | Closed:
        if self._gets:
            return no_family(column_family)
        return Closed("the store was destroyed", path=self._path)

    def get(self, key: bytes, *, column_family: str = DEFAULT) -> bytes | None:
        """The value of a key. None: there is none. Raises ``Closed``, ``Corrupt``."""
        get = self._gets.get(column_family)
        if get is None:
            raise self._no_family(column_family)
        try:
            return get(key)
        except Exception as error:
            raise translated(error, "read a key", self._path) from error

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

        Raises ``Closed``, also while it goes on when the view is closed, and ``Corrupt``.
        """
        low, high = bounds(prefix, begin, end, column_family)
        with self._lock:
            pinned = self._pinned.get(column_family)
            if pinned is None:
                raise self._no_family(column_family)
            scan = Scan(pinned, low, high, reverse=reverse)
            self._scans.add(scan)
        return scan

    @property
    def column_families(self) -> tuple[str, ...]:
        """The names of all column families."""
        return tuple(self._gets)

    def close(self) -> None:
        """End it, and iterations of it. Any thread."""
        with self._lock:
            self._gets = {}
            for scan in list(self._scans):
                scan.close()
            for pinned in self._pinned.values():
                pinned.close()
            self._pinned = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _get_of(snapshot: Any) -> Get:
    """What `RocksDBView.get` does to a snapshot of rocksdict's, which raises for a missing key."""

    def get(key: bytes) -> bytes | None:
        try:
            value: bytes = snapshot[key]
        except Exception as error:
            if str(error) != "key not found":
                raise
            return None
        return value

    return get
