"""Keys and values of a RocksDB column family between two bounds, in order.

While an iterator exists, RocksDB keeps its lock and all overwritten values. Any thread may close an iterator.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from gazette.errors import Closed, Invalid
from gazette.recoverylog.rocksdb.keys import (
    RESERVED_END,
    Span,
    after,
    application_spans,
    require_bytes,
)
from gazette.recoverylog.rocksdb.native import DEFAULT, map_errors

Items: TypeAlias = Iterator[tuple[bytes, bytes]]


def spans(prefix: bytes, begin: bytes | None, end: bytes | None, column_family: str) -> list[Span]:
    """Return the spans of an application's keys with a prefix between two bounds, in order. Raise ``Invalid``
    for a bound that is not bytes."""
    if type(prefix) is not bytes or begin is not None or end is not None:
        bounds = {"begin": begin, "end": end}
        require_bytes(prefix=prefix, **{name: v for name, v in bounds.items() if v is not None})
    low, high = prefix, after(prefix)
    if begin is not None:
        low = max(low, begin)
    if end is not None:
        high = end if high is None else min(high, end)
    if low >= RESERVED_END or column_family != DEFAULT:
        return [(low, high)]
    return list(application_spans(low, high))


def joined(
    found: list[Span], scan: Callable[[bytes, bytes | None], Items], *, reverse: bool
) -> Items:
    """Return the items of several spans, one after the other. Open all scans now: they show one moment."""
    if len(found) == 1:
        return scan(*found[0])
    ordered = reversed(found) if reverse else found
    return itertools.chain.from_iterable([scan(low, high) for low, high in ordered])


def no_family(name: object) -> Invalid:
    return Invalid(
        f"no column family {name!r:.80}",
        path="column_family",
        hint="List it in column_families of RocksDBStore.",
    )


class Pinned:
    """An iterator over the state as of its creation, and its ``owner``: the scan that moved it last."""

    def __init__(self, native: Any, family: Any, path: str) -> None:
        options = native.ReadOptions()
        # Order by whole keys, even if the application configured a prefix extractor. Do not set bounds
        # in these options: rocksdict encodes them as if keys were not raw.
        options.set_total_order_seek(True)
        self.path = path
        self.owner: Scan | None = None
        self.lock = threading.Lock()
        try:
            # None: closed.
            self.iterator: Any = family.iter(options)
        except Exception as error:
            raise map_errors(error, "read keys", path) from error

    def close(self) -> None:
        with self.lock:
            self.iterator = None


class Scan(Iterator[tuple[bytes, bytes]]):
    """Scan of an iterator between two bounds. Several scans may take turns with one iterator."""

    def __init__(self, pinned: Pinned, low: bytes, high: bytes | None, *, reverse: bool) -> None:
        self._pinned: Pinned | None = pinned
        self._low, self._high, self._reverse = low, high, reverse
        self._last: bytes | None = None
        """Key that was returned last; None before the first key."""
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
                    iterator.status()  # Without this check, a damaged file would look like the end.
            except Exception as error:
                raise map_errors(error, "read keys", pinned.path) from error
        self._ended = True
        self._pinned = None
        raise StopIteration

    def _advance(self, iterator: Any, *, moved: bool) -> None:
        """Move to the next key. Seek first if another scan has moved the iterator."""
        last_key = self._last
        if last_key is None:
            self._seek_first(iterator)
        elif self._reverse:
            if moved:
                iterator.seek_for_prev(last_key)
            iterator.prev()
        else:
            if moved:
                iterator.seek(last_key)
            iterator.next()

    def _seek_first(self, iterator: Any) -> None:
        """Move to the first key of the scan: in reverse, to the last one below ``high``."""
        if not self._reverse:
            iterator.seek(self._low)
        elif self._high is None:
            iterator.seek_to_last()
        else:
            iterator.seek_for_prev(self._high)
            if iterator.valid() and iterator.key() == self._high:
                iterator.prev()

    def close(self) -> None:
        """End the scan: its next step raises ``Closed``. Any thread may call this."""
        self._pinned = None


def closed_error() -> Closed:
    return Closed("the view or its store was closed")
