"""Keys and values of a RocksDB column family between two bounds, in their order.

RocksDB keeps its lock, and what was overwritten, for as long as an iterator exists: closing ends it, from
any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from gazette.errors import Closed, Invalid
from gazette.recoverylog.rocksdb_keys import FIRST_USER_KEY
from gazette.recoverylog.rocksdb_native import DEFAULT, translated


def bounds(
    prefix: bytes, begin: bytes | None, end: bytes | None, column_family: str
) -> tuple[bytes, bytes | None]:
    """From where up to where to scan: (the first key, the key behind the last), without reserved keys."""
    low, high = prefix, after(prefix)
    if column_family == DEFAULT:
        low = max(low, FIRST_USER_KEY)
    if begin is not None:
        low = max(low, begin)
    if end is not None:
        high = end if high is None else min(high, end)
    return low, high


def after(prefix: bytes) -> bytes | None:
    """The least key that is greater than every key with a prefix; None: there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else None


def no_family(name: str) -> Invalid:
    return Invalid(f"no column family {name!r}", hint="Name it in column_families of RocksDBStore.")


class Pinned:
    """An iterator, which stays at the state of when it was made, and the scan that moved it last."""

    def __init__(self, native: Any, family: Any, path: str) -> None:
        options = native.ReadOptions()
        # Whatever prefix extractor the application tuned in: order is by whole keys. Bounds of these
        # options are no use: rocksdict encodes them as if keys were not raw.
        options.set_total_order_seek(True)
        self.path = path
        self.owner: Scan | None = None
        self.lock = threading.Lock()
        try:
            self.iterator: Any = family.iter(options)
        except Exception as error:
            raise translated(error, "read keys", path) from error

    def close(self) -> None:
        with self.lock:
            self.iterator = None


class Scan(Iterator[tuple[bytes, bytes]]):
    """What an iterator has between two bounds. Several of one iterator may be interleaved."""

    def __init__(self, pinned: Pinned, low: bytes, high: bytes | None, *, reverse: bool) -> None:
        self._pinned: Pinned | None = pinned
        self._low, self._high, self._reverse = low, high, reverse
        self._last: bytes | None = None
        self._ended = False

    def __next__(self) -> tuple[bytes, bytes]:
        if self._ended:
            raise StopIteration
        pinned = self._pinned
        if pinned is None:
            raise closed_error()
        with pinned.lock:
            iterator = pinned.iterator
            if iterator is None:
                raise closed_error()
            try:
                self._advance(iterator, moved=pinned.owner is not self)
                pinned.owner = self
                if iterator.valid():
                    key: bytes = iterator.key()
                    if key >= self._low and (self._high is None or key < self._high):
                        self._last = key
                        return key, iterator.value()
                else:
                    iterator.status()  # A damaged file looks like the end, but for this.
            except Exception as error:
                raise translated(error, "read keys", pinned.path) from error
        self._ended = True
        self._pinned = None
        raise StopIteration

    def _advance(self, iterator: Any, *, moved: bool) -> None:
        """Go to the next key: from where the iterator is, or from anew if another scan moved it."""
        last = self._last
        if last is None:
            self._seek_first(iterator)
        elif self._reverse:
            if moved:
                iterator.seek_for_prev(last)
            iterator.prev()
        else:
            if moved:
                iterator.seek(last)
            iterator.next()

    def _seek_first(self, iterator: Any) -> None:
        if not self._reverse:
            iterator.seek(self._low)
        elif self._high is None:
            iterator.seek_to_last()
        else:
            iterator.seek_for_prev(self._high)
            if iterator.valid() and iterator.key() == self._high:
                iterator.prev()

    def close(self) -> None:
        """End it; it raises ``Closed`` from now on. Any thread."""
        self._pinned = None


def closed_error() -> Closed:
    return Closed("the view, or the store, was closed")
