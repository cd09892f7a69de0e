"""The state of a summer in RocksDB, which is an extra of the package."""

from __future__ import annotations

import struct
from typing import Any, Final

from gazette.stores.rocksdb.store import RocksDBStore
from stream_sum.state import Partial, StreamState, Totals, changed_and_ended

STREAM: Final = b"stream/"
TOTALS: Final = b"totals"
_PAIR: Final = struct.Struct(">QQ")


class RocksDBState(StreamState, RocksDBStore):
    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder)

    def load(self, key: bytes) -> Partial | None:
        data = self.get(STREAM + key)
        return None if data is None else Partial(*_PAIR.unpack(data))

    def save(self, changes: dict[bytes, Partial | None], sums: int) -> int:
        changed, ended = changed_and_ended(changes)
        for key in ended:
            self.delete(STREAM + key)
        for key, partial in changed.items():
            self.put(STREAM + key, _PAIR.pack(*partial))
        transactions, total = _PAIR.unpack(self.get(TOTALS) or bytes(_PAIR.size))
        if sums:
            transactions += 1
            self.put(TOTALS, _PAIR.pack(transactions, total + sums))
        return int(transactions)

    def totals(self) -> Totals:
        with self.view() as view:
            open_streams = sum(1 for _ in view.iterate(STREAM))
            return Totals(open_streams, *_PAIR.unpack(view.get(TOTALS) or bytes(_PAIR.size)))
