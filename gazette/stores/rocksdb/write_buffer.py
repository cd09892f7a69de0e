"""Writes of a RocksDB store's running transaction, in memory until it commits. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import partial


class Pending:
    """Writes of the running transaction to one column family. A commit deletes ``ranges`` first, and then
    sets ``values``. The value None deletes a key."""

    __slots__ = ("ranges", "undo", "values")

    def __init__(
        self,
        values: dict[bytes, bytes | None] | None = None,
        ranges: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.values = {} if values is None else values
        self.ranges = [] if ranges is None else ranges
        self.undo: list[Callable[[], object]] | None = None
        """Functions that undo the changes since the savepoint, in reverse order. None without a savepoint."""

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

    def __bool__(self) -> bool:
        return bool(self.values or self.ranges)

    def copy(self) -> Pending:
        return Pending(dict(self.values), list(self.ranges))

    def in_deleted_range(self, key: bytes) -> bool:
        """Return True if a deleted range has the key. A write in ``values`` is later, and counts instead."""
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
        """Return the writes to keys from ``low`` up to ``high``, in the order of a scan."""
        entries = [
            (key, value)
            for key, value in self.values.items()
            if low <= key and (high is None or key < high)
        ]
        entries.sort(reverse=reverse)
        return entries


class PendingSavepoint:
    """A savepoint of `RocksDBStore.savepoint`. Savepoints nest: the last one ends first."""

    def __init__(self, pending: Iterable[Pending]) -> None:
        self._marks: list[tuple[Pending, list[Callable[[], object]] | None, int]] = []
        """Families, each with the undo functions that it had before this savepoint, and their number."""
        for family in pending:
            self._marks.append((family, family.undo, len(family.undo or ())))
            if family.undo is None:
                family.undo = []

    def release(self) -> None:
        """End the savepoint. Keep its changes, which an outer savepoint may still undo."""
        for family, outer, _ in self._marks:
            family.undo = outer

    def roll_back(self) -> None:
        """End the savepoint, and undo its changes."""
        for family, outer, length in self._marks:
            undo, family.undo = family.undo or [], None
            while len(undo) > length:
                undo.pop()()
            family.undo = outer


def merged(
    scan: Iterator[tuple[bytes, bytes]],
    ours: list[tuple[bytes, bytes | None]],
    pending: Pending,
    reverse: bool,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of ``scan`` as ``pending`` changes them. ``ours``: the writes of ``pending`` in the
    range of the scan, in the order of the scan."""
    values, ranges = pending.values, pending.ranges
    unchanged = (
        entry
        for entry in scan
        if entry[0] not in values and not (ranges and pending.in_deleted_range(entry[0]))
    )
    written = ((key, value) for key, value in ours if value is not None)
    return heapq.merge(unchanged, written, reverse=reverse)
