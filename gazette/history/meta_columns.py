"""Columns of the metadata of messages: journal, offset and UUID. Needs pyarrow. Pure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from gazette.errors import Invalid
from gazette.history.columns import Columns, uuid_bytes
from gazette.message.uuid import FOREIGN_UUID, PRODUCER_BYTES, clock_at
from gazette.protocol.ids import JournalName

META: Final[dict[str, pa.DataType]] = {
    "journal": pa.string(),
    "offset": pa.int64(),
    "uuid": pa.string(),
    "producer": pa.string(),
    "clock": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "flags": pa.int32(),
}
"""The columns, with their types."""

_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)
_TEXT_CHARS: Final = 36
_DIGITS: Final = np.array([index for index in range(_TEXT_CHARS) if index not in (8, 13, 18, 23)])
"""Positions of the digits in the text of a UUID."""
_UNIX_EPOCH: Final = clock_at(0)


def meta_array(key: str, journal: JournalName, columns: Columns, rows: Any) -> pa.Array:
    """Return a column of `META` for some rows of a journal's messages. Raise `Invalid` for an unknown key."""
    count = len(rows)
    match key:
        case "journal":
            name = journal.encode()
            bounds = np.arange(count + 1, dtype=np.int32) * np.int32(len(name))
            return pa.StringArray.from_buffers(
                count, pa.py_buffer(bounds), pa.py_buffer(name * count)
            )
        case "offset":
            return pa.array(columns.begins[rows])
        case "uuid":
            uuids = columns.at(rows).uuids
            return _uuid_array(uuid_bytes(uuids), uuids.clocks | uuids.producers)
        case "producer":
            numbers, indices = np.unique(columns.uuids.producers[rows], return_inverse=True)
            names = [int(number).to_bytes(PRODUCER_BYTES, "big").hex() for number in numbers]
            return pa.array(names, pa.string()).take(pa.array(indices))
        case "clock":
            return pa.array(columns.uuids.clocks[rows].astype(np.int64))
        case "timestamp":
            clocks = columns.uuids.clocks[rows]
            # Convert units of 100 ns since 1582, above four bits of sequence, to microseconds since 1970.
            micros = ((clocks >> np.uint64(4)).astype(np.int64) - (_UNIX_EPOCH >> 4)) // 10
            return pa.array(micros, META[key], mask=clocks == 0)
        case "flags":
            flags = columns.uuids.flags[rows]
            return pa.array(np.where(flags == FOREIGN_UUID, 0, flags).astype(np.int32))
    raise Invalid(f"unknown column of messages ({key})")


def _uuid_array(raw: bytes, present: npt.NDArray[np.uint64]) -> pa.Array:
    """Return the texts of UUIDs. Nil UUIDs become null."""
    octets = np.frombuffer(raw, np.uint8).reshape(-1, 16)
    count = len(octets)
    text = np.full((count, _TEXT_CHARS), ord("-"), np.uint8)
    text[:, _DIGITS[0::2]] = _HEX[octets >> 4]
    text[:, _DIGITS[1::2]] = _HEX[octets & 0xF]
    bounds = np.arange(count + 1, dtype=np.int32) * np.int32(_TEXT_CHARS)
    array = pa.StringArray.from_buffers(count, pa.py_buffer(bounds), pa.py_buffer(text.tobytes()))
    if bool((present != 0).all()):
        return array
    return pa.compute.if_else(pa.array(present != 0), array, pa.scalar(None, pa.string()))
