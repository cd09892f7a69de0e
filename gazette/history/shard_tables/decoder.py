"""Decodes bytes of a source to rows, by the compiled scanner or by the declared type. Needs pyarrow.

The decoder of the type is the specification. A row of the scanner counts only if that decoder would give
the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute

from gazette.history.columns import Columns
from gazette.history.commit_filter import Mask
from gazette.history.field_arrays import FieldsBuilder
from gazette.history.json_lines import FIELDS_MAX, LineScanner
from gazette.history.rows import ROW_ERRORS
from gazette.history.shard_tables.columns import Column
from gazette.history.shard_tables.rows import DecodedRows, TableForm
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.codec import MsgspecCodec
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.foreign_uuids import warn_of_foreign_uuids
from gazette.message.framing.frames import Frames, MalformedMessage
from gazette.message.uuid import ACK_TXN, FOREIGN_UUID, NIL_UUID, TextForm, parse_arrays
from gazette.message.value_types import is_customized
from gazette.protocol.ids import Offset
from gazette.runtime.decoders import type_info

_DOUBTFUL_PART: Final = 8
"""The type's decoder reads all messages if more than one in this number is doubtful."""
_DOUBTFUL_FREE: Final = 4


class _Cut(NamedTuple):
    """Decoded messages. ``stopped``: they end at a malformed frame."""

    columns: Columns
    fields: Sequence[pa.Array]
    consumed: int
    stopped: bool = False


class TableDecoder(EnvelopeDecoder[Any]):
    """A decoder whose batches are `DecodedRows`. Belongs to the shard's thread."""

    def __init__(self, form: TableForm, offset: Offset) -> None:
        super().__init__(form.journal, form.framing, offset)
        self._form = form
        self._builder = FieldsBuilder(form.message.schema)
        self._scanner: LineScanner | None = None
        place = form.framing.codec.place
        if place is not None and is_scanned(form):
            self._scanner = LineScanner(place.text, self._builder.fields)

    def _decode_buffer(self, buffer: bytes) -> tuple[Any, int, bool]:
        cut = self._scan(buffer)
        if cut is None:
            cut = self._decode_messages(buffer)
        if FOREIGN_UUID in cut.columns.uuids.flags:
            warn_of_foreign_uuids(self.journal)
        rows = DecodedRows(self._form, cut.columns, cut.fields, buffer, self.begin)
        return rows, cut.consumed, cut.stopped

    def _decode_messages(self, buffer: bytes) -> _Cut:
        """Decode a buffer by the decoder of the type, up to the first message that does not fit."""
        frames = self.framing.decode(buffer, self.begin)
        columns = _columns(frames)
        is_ack = columns.uuids.flags == ACK_TXN
        rows = np.flatnonzero(~is_ack)
        messages = frames.messages
        if len(rows) < len(messages):
            messages = [messages[row] for row in rows.tolist()]
        fields, count, misfit = self._form.message.fitting(messages)
        if is_ack.any():
            # Give acknowledgements, and messages from the misfit on, a row of nulls.
            index = np.cumsum(~is_ack) - 1
            fields = _taken(fields, pa.array(index, mask=is_ack | (index >= count)))
        if misfit is not None:
            row = int(rows[count])
            error = self._misfit(buffer, int(columns.begins[row]), int(columns.ends[row]), misfit)
            return self._cut(columns, fields, row, error)
        return _Cut(columns, fields, frames.consumed, frames.stopped)

    def _scan(self, buffer: bytes) -> _Cut | None:
        """Decode a buffer by the scanner. Return None if the decoder of the type must read all of it."""
        stop = buffer.rfind(b"\n") + 1
        scanned = self._scanner.scan(buffer, stop) if stop and self._scanner else None
        if scanned is None:
            return None
        begins = scanned.begins + self.begin
        columns = Columns(begins, np.append(begins[1:], self.begin + stop), scanned.uuids)
        # The decoder of the type reads doubtful messages again: it may read them differently, or refuse them.
        doubtful = columns.uuids.clocks == 0
        doubtful[scanned.fields.lenient] = True
        try:
            arrays, rest = self._builder.arrays(scanned.fields)
            fields = [
                _checked(array, column, doubtful, buffer)
                for array, column in zip(arrays, self._form.message.columns, strict=True)
            ]
        except ROW_ERRORS:  # A number is beyond the range of floats, for example.
            return None
        if rest is not None:
            doubtful |= rest
        doubtful &= columns.uuids.flags != ACK_TXN
        rows = np.flatnonzero(doubtful).tolist()
        if len(rows) > _DOUBTFUL_FREE + len(columns) // _DOUBTFUL_PART:
            return None
        return self._with_doubtful(buffer, _Cut(columns, fields, stop), rows)

    def _with_doubtful(self, buffer: bytes, cut: _Cut, rows: Sequence[int]) -> _Cut:
        """Return scanned messages. Take the messages at ``rows`` from the decoder of the type."""
        columns, fields = cut.columns, cut.fields
        messages: list[Any] = []
        read_rows: list[int] = []
        for row in rows:
            begin, end = int(columns.begins[row]), int(columns.ends[row])
            line = buffer[begin - self.begin : end - self.begin]
            try:
                frames = self.framing.decode(line, begin)
                for array, values in zip(columns.uuids, _columns(frames).uuids, strict=True):
                    array[row] = values[0]
                if columns.uuids.flags[row] != ACK_TXN:
                    self._form.message.arrays(frames.messages)
                    messages += frames.messages
                    read_rows.append(row)
            except MalformedMessage as error:
                cut = self._cut(columns, fields, row, error)
                break
            except ROW_ERRORS as misfit:
                cut = self._cut(columns, fields, row, self._misfit(buffer, begin, end, misfit))
                break
        if not messages:
            return cut
        # The messages that were read again are appended to the scanned ones. Order them by row.
        index = np.arange(len(columns))
        index[read_rows] = len(columns) + np.arange(len(messages))
        order = pa.array(index[: len(cut.columns)])
        read = self._form.message.arrays(messages)
        fields = [pa.concat_arrays(pair).take(order) for pair in zip(fields, read, strict=True)]
        return cut._replace(fields=fields)

    def _cut(
        self, columns: Columns, fields: Sequence[pa.Array], row: int, error: MalformedMessage
    ) -> _Cut:
        """Return the messages before ``row``, which is malformed. Raise its error if ``row`` is 0."""
        if not row:
            raise error
        consumed = int(columns.begins[row]) - self.begin
        fields = [field.slice(0, row) for field in fields]
        return _Cut(columns.part(0, row), fields, consumed, stopped=True)

    def _misfit(
        self, buffer: bytes, begin: Offset, end: Offset, error: BaseException
    ) -> MalformedMessage:
        malformed = MalformedMessage(
            f"message does not fit the columns of a table: {error}",
            begin=begin,
            end=end,
            raw=buffer[begin - self.begin : end - self.begin],
        )
        malformed.__cause__ = error
        return malformed


def is_scanned(form: TableForm) -> bool:
    """Return True if the scanner reads messages of a form as the decoder of their type does."""
    codec, columns = form.framing.codec, form.message.columns
    if form.framing.content_type != CONTENT_JSON_LINES or type(codec) is not MsgspecCodec:
        return False
    info: Any = type_info(codec.message_type)
    return (
        isinstance(codec.form, TextForm)
        and not getattr(info, "array_like", False)
        and not getattr(info, "forbid_unknown_fields", False)
        and getattr(info, "tag", None) is None
        and not is_customized(info)
        and len(columns) <= FIELDS_MAX
        and all(column.is_plain for column in columns)
    )


def _checked(array: pa.Array, column: Column, doubtful: Mask, buffer: bytes) -> pa.Array:
    """Return a scanned column with the defaults of its field. Mark rows that the scanner does not decide."""
    if pa.types.is_floating(array.type):
        finite = pa.compute.is_finite(array).fill_null(True)
        doubtful |= ~finite.to_numpy(zero_copy_only=False)
    if not array.null_count:
        return array
    is_missing_null = column.default in (None, msgspec.UNSET)
    # The default is null. So each null is right if the type permits null, or if no message holds a null.
    if is_missing_null and (column.is_optional or b"null" not in buffer):
        return array
    # No message holds a null: a null in the column is a missing field. Replace it by the default.
    if not is_missing_null and column.default is not msgspec.NODEFAULT and b"null" not in buffer:
        return array.fill_null(pa.scalar(column.default, array.type))
    # Otherwise a null may be an error, or code makes the default: the decoder of the type decides.
    doubtful |= array.is_null().to_numpy(zero_copy_only=False)
    return array


def _columns(frames: Frames[Any]) -> Columns:
    uuids = parse_arrays(frames.uuids or NIL_UUID * len(frames))
    return Columns(np.array(frames.begins, np.int64), np.array(frames.ends, np.int64), uuids)


def _taken(arrays: Sequence[pa.Array], index: pa.Array) -> list[pa.Array]:
    return [array.take(index) for array in arrays]
