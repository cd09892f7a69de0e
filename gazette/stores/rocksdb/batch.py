"""Content of a RocksDB WAL as a map, which hot standbys read instead of RocksDB's memory. Pure.

A record of a WAL is a batch of writes: a sequence number (8 bytes), a count (4), and the writes. A write is
a tag, the family's number (not for the default family), key and value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from gazette.errors import NotAllowed
from gazette.stores.rocksdb.manifest import RecordReader
from gazette.stores.rocksdb.wal import BATCH_HEADER
from gazette.stores.rocksdb.write_buffer import Pending

_DELETION, _VALUE, _LOG_DATA, _SINGLE_DELETION, _NOOP, _RANGE_DELETION = 0, 1, 3, 7, 13, 15
_OF_FAMILY: Final = {4: _DELETION, 5: _VALUE, 8: _SINGLE_DELETION, 14: _RANGE_DELETION}
"""By tag of a write to a numbered family: the tag of the same write to the default family."""


class Layer:
    """Writes to one column family in one WAL."""

    __slots__ = ("_order", "pending")

    def __init__(self) -> None:
        self.pending = Pending()
        self._order: list[bytes] | None = None

    def changed(self) -> Pending:
        """Return the writes for the caller to change. Forget the order of the keys."""
        self._order = None
        return self.pending

    def between(self, low: bytes, high: bytes | None) -> list[bytes]:
        """Return the written keys from ``low`` up to ``high``, in order."""
        order = self._order
        if order is None:
            order = self._order = sorted(self.pending.values)
        begin = bisect_left(order, low)
        end = len(order) if high is None else bisect_left(order, high)
        return order[begin:end]


class WrittenAhead:
    """Writes of one WAL, by the numbers of column families."""

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}

    def apply(self, batch: bytes) -> None:
        """Add a batch of writes. Raise ``Corrupt`` for a cut batch, ``NotAllowed`` for unknown writes."""
        reader = RecordReader(batch, BATCH_HEADER)
        while reader.left:
            tag = reader.byte()
            number = 0
            if tag in _OF_FAMILY:  # Otherwise the write is of the default family.
                number, tag = reader.number(), _OF_FAMILY[tag]
            if tag == _NOOP:
                continue
            key = reader.text()
            if tag == _LOG_DATA:
                continue
            layer = self.layers.get(number)
            if layer is None:
                layer = self.layers[number] = Layer()
            if tag == _VALUE:
                layer.changed().values[key] = reader.text()
            elif tag in (_DELETION, _SINGLE_DELETION):
                layer.changed().values[key] = None
            elif tag == _RANGE_DELETION:
                layer.changed().delete_range(key, reader.text())
            else:
                raise NotAllowed(
                    f"a hot standby cannot follow writes of this kind ({tag})",
                    hint="Stores write no merges, entities or prepared transactions; ask the "
                    "primary.",
                )


def lookup(layers: Sequence[Layer], key: bytes) -> tuple[bool, bytes | None]:
    """Return True if a layer has a write of the key, and the newest value (None: deleted). ``layers`` begins
    with the oldest layer."""
    for layer in reversed(layers):
        values = layer.pending.values
        if key in values:
            return True, values[key]
        if layer.pending.ranges and layer.pending.in_deleted_range(key):
            return True, None
    return False, None


def folded(layers: Sequence[Layer], low: bytes, high: bytes | None) -> Pending:
    """Return the writes of all layers to keys from ``low`` up to ``high``, as one layer."""
    combined = Pending()
    for layer in layers:
        for begin, end in layer.pending.ranges:
            if end > low and (high is None or begin < high):
                combined.delete_range(begin, end)
        values = layer.pending.values
        for key in layer.between(low, high):
            combined.values[key] = values[key]
    return combined
