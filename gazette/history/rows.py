"""Makes rows of the messages of runs: Arrow record batches of fields and metadata. Needs pyarrow.

For JSON, one pass finds fields together with the UUIDs (`field_arrays`). Messages that this pass declines
are read one by one by the specification (`json_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute
from google.protobuf.message import DecodeError

from gazette.errors import Corrupt, Invalid
from gazette.history.columns import Columns, uuid_text_reader
from gazette.history.commit_filter import Mask
from gazette.history.field_arrays import FieldsBuilder
from gazette.history.json_values import JsonRow, value_reader
from gazette.history.merge import CommittedRun
from gazette.history.meta_columns import meta_array
from gazette.history.protobuf_rows import protobuf_row
from gazette.history.read import Batch, committed, read_columns
from gazette.history.row_format import RowFormat
from gazette.history.snapshot import Run
from gazette.history.source import OpenAccess
from gazette.message.framing.csv import parse_record
from gazette.message.framing.framing import fixed_payload
from gazette.message.uuid import ACK_TXN, FOREIGN_UUID

T = TypeVar("T")


class Unfit(Corrupt):
    """A message does not fit the columns of a table."""

    default_hint = (
        "Give the field another type, or leave it out. Read `value=text` to see the message. "
        "`mode=PERMISSIVE` returns null instead, `mode=DROPMALFORMED` drops such messages."
    )


def read_rows(
    access: OpenAccess, run: CommittedRun | Run, format: RowFormat
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a run, by offset: the committed rows of a `CommittedRun`, all rows of a `Run` from
    its ``begin`` on. Only rows within the bounds of the format count.

    Raise `Unfit` if a message does not fit its columns and malformed messages fail. Raise the errors of
    `read_columns`, and `Invalid` for a column that no message fits.
    """
    if isinstance(run, CommittedRun):
        yield from read_parts(access, run.run, (run,), format)
        return
    maker = RowMaker(run, format)
    for batch in maker.batches(access):
        wanted = batch.columns.begins >= run.begin
        if not format.acks:
            wanted &= batch.columns.uuids.flags != ACK_TXN
        yield from maker.rows(batch, wanted)


def read_parts(
    access: OpenAccess, run: Run, parts: Sequence[CommittedRun], format: RowFormat
) -> Iterator[pa.RecordBatch]:
    """Yield the committed rows of a run that was folded in parts, by offset. Errors: see `read_rows`."""
    maker = RowMaker(run, format)
    for batch, mask in committed(parts, maker.batches(access), acks=format.acks):
        yield from maker.rows(batch, mask)


class _Parsed(NamedTuple):
    """Messages as arrays: their rows in the batch, their fields, and the whole texts of misfits."""

    rows: Any
    fields: list[pa.Array]
    corrupt: pa.Array | None = None


ROW_ERRORS: Final = (
    ValueError,
    TypeError,
    ArithmeticError,
    msgspec.MsgspecError,
    Invalid,
    DecodeError,
    pa.ArrowException,
)
"""Errors that a message raises if it does not fit its columns."""


class RowMaker:
    """Maker of the rows of one run."""

    def __init__(self, run: Run, format: RowFormat) -> None:
        """Make a maker. Raise `Invalid` for a type that no JSON value converts to, and for a wrong class."""
        self._run = run
        self._format = format
        self.fields = format.fields
        """The columns that are fields of messages."""
        self._meta = dict(format.meta)
        self._malformed = run.shape.malformed
        self._read_json = JsonRow(format.scanned, format.encode_variant).read
        self._builder = FieldsBuilder(format.scanned, format.encode_variant)
        self.scanned = self._builder.fields
        """The fields that the scanner looks for."""
        self._parse = self._parser()
        self._journals = pa.array([], pa.string())
        """The column ``journal``, as long as the longest batch so far."""

    def batches(self, access: OpenAccess) -> Iterator[Batch]:
        """Yield all messages of the run, for `rows`. Raise the errors of `read_columns`."""
        return map(self.with_arrays, read_columns(access, self._run, self.scanned))

    def with_arrays(self, batch: Batch) -> Batch:
        """Return a batch with its fields as arrays, if the first pass has found them."""
        if batch.fields is None:
            return batch
        arrays = self._builder.arrays(batch.fields)
        # A batch may wait long for an acknowledgement: keep its bytes only if they are still to be parsed.
        is_parsed = arrays.rest is None and not self._has_foreign_uuids(batch.columns)
        buffer = b"" if is_parsed else batch.buffer
        return batch._replace(buffer=buffer, fields=None, arrays=arrays)

    def rows(self, found: Batch, wanted: Mask) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the wanted messages that are within the bounds of the format."""
        fit, arrays = self.arrays(found, wanted)
        if len(fit):
            yield _batch(arrays, self._format.schema, len(fit))

    def arrays(self, found: Batch, wanted: Mask) -> tuple[Any, list[pa.Array]]:
        """Return the positions of the wanted messages that become rows, and their columns. Both are empty if
        no message becomes a row. Raise `Unfit` if a message does not fit and malformed messages fail."""
        columns = found.columns
        wanted = self._format.bounded(columns, wanted)
        if not wanted.any():
            return (), []
        parsed = self._parsed(found, wanted)
        fit = parsed.rows
        if not len(fit):
            return (), []
        arrays = {name: self._meta_array(key, found, fit) for name, key in self._meta.items()}
        arrays.update(zip(self.fields.names, parsed.fields, strict=True))
        if self._format.corrupt:
            arrays[self._format.corrupt] = (
                pa.nulls(len(fit), pa.string()) if parsed.corrupt is None else parsed.corrupt
            )
        return fit, [arrays[name] for name in self._format.schema.names]

    def _parsed(self, found: Batch, wanted: Mask) -> _Parsed:
        """Return the wanted messages. Parse only messages whose fields the first pass has not found."""
        if found.arrays is None:
            return self._parse(found, wanted)
        fields, unparsed = found.arrays
        mask = wanted if unparsed is None else wanted & ~unparsed
        if not mask.all():
            arrow_mask = pa.array(mask)
            fields = [array.filter(arrow_mask) for array in fields]
        parsed = _Parsed(np.flatnonzero(mask), fields)
        if unparsed is None or not (wanted & unparsed).any():
            return parsed
        return _merged(parsed, self._parse_each_json(found, wanted & unparsed))

    def _meta_array(self, key: str, found: Batch, rows: Any) -> pa.Array:
        if key != "journal":
            array = meta_array(key, self._run.journal, found.columns, rows)
            return self._with_foreign_uuids(array, found, rows) if key == "uuid" else array
        # All rows of the run have the same journal, so reuse its array.
        if len(self._journals) < len(rows):
            self._journals = meta_array(key, self._run.journal, found.columns, rows)
        return self._journals.slice(0, len(rows))

    def _has_foreign_uuids(self, columns: Columns) -> bool:
        return "uuid" in self._meta.values() and FOREIGN_UUID in columns.uuids.flags

    def _with_foreign_uuids(self, array: pa.Array, found: Batch, rows: Any) -> pa.Array:
        """Return the column of UUIDs. For UUIDs of other software, take the text in the message."""
        foreign = found.columns.uuids.flags[rows] == FOREIGN_UUID
        if not foreign.any():
            return array
        read_text = uuid_text_reader(self._run.shape)
        texts = [read_text(self._payload(found, row)) for row in rows[foreign].tolist()]
        return pa.compute.replace_with_mask(array, pa.array(foreign), pa.array(texts, pa.string()))

    def _parser(self) -> Callable[[Batch, Mask], _Parsed]:
        """Return the function that parses wanted messages of a batch. Raise `Invalid` for a column that the
        class of protobuf messages lacks."""
        if not len(self.fields) and not self._format.corrupt:
            return lambda _batch, wanted: _Parsed(np.flatnonzero(wanted), [])
        match self._format.value:
            case "text" | "binary":
                return self._parse_payloads
            case "json":
                return self._parse_each_json
            case "csv":
                return lambda batch, wanted: self._parse_each(batch, wanted, self._csv_row, _csv)
            case "protobuf":
                message_type = self._run.shape.message_type()
                row = protobuf_row(message_type, self.fields)
                return lambda batch, wanted: self._parse_each(
                    batch, wanted, lambda frame: row(_message(message_type, frame)), strict_array
                )

    def _payload(self, batch: Batch, row: int) -> bytes:
        return self._payload_of(self._frame(batch, row))

    def _payload_of(self, frame: bytes) -> bytes:
        """Return a frame without its line end or header, if it has one."""
        match self._run.shape.content_type:
            case "application/x-ndjson" | "text/csv":
                return frame[:-1]
            case "application/x-protobuf-fixed":
                payload = fixed_payload(frame)
                return frame if payload is None else payload
        return frame

    @staticmethod
    def _frame(batch: Batch, row: int) -> bytes:
        begin = int(batch.columns.begins[row]) - batch.base
        end = int(batch.columns.ends[row]) - batch.base
        return batch.buffer[begin:end]

    def _parse_payloads(self, batch: Batch, wanted: Mask) -> _Parsed:
        """Return the wanted rows' payloads as one column, of texts or of bytes."""
        rows = np.flatnonzero(wanted)
        column_type = self.fields.field(0).type
        payloads = [self._payload(batch, row) for row in rows.tolist()]
        if column_type == pa.string():
            texts = [payload.decode("utf-8", "replace") for payload in payloads]
            return _Parsed(rows, [pa.array(texts, column_type)])
        return _Parsed(rows, [pa.array(payloads, column_type)])

    def _parse_each_json(self, batch: Batch, wanted: Mask) -> _Parsed:
        """Read messages one by one by the specification."""
        types = [field.type for field in self.fields]
        kept_messages = self._kept(batch, wanted, self._read_json)
        rows, values, corrupt = zip(*kept_messages, strict=True) if kept_messages else ((), (), ())
        columns = zip(*values, strict=True) if values else [()] * len(types)
        arrays = [pa.array(column, type_) for column, type_ in zip(columns, types, strict=True)]
        return _Parsed(np.array(rows, np.int64), arrays, pa.array(corrupt, pa.string()))

    def _kept(
        self, batch: Batch, wanted: Mask, read: Callable[[bytes], tuple[T, list[str]]]
    ) -> list[tuple[int, T, str | None]]:
        """Return the position, the values and the corrupt text of each message that becomes a row.

        Raise `Unfit` at a message that does not fit its columns, if that is an error.
        """
        kept: list[tuple[int, T, str | None]] = []
        for row in np.flatnonzero(wanted).tolist():
            frame = self._frame(batch, row)
            values, misfits = read(frame)
            if not misfits:
                kept.append((row, values, None))
            elif self._malformed == "null":
                kept.append((row, values, self._payload_of(frame).decode("utf-8", "replace")))
            elif self._malformed == "fail":
                raise Unfit(
                    f"message does not fit its columns: {misfits[0]}",
                    journal=self._run.journal,
                    begin=int(batch.columns.begins[row]),
                    content=self._payload_of(frame)[:200],
                )
        return kept

    def _csv_row(self, frame: bytes) -> dict[str, Any]:
        record = parse_record(frame, 0)
        if record is None or record.error:
            raise Invalid("not one record")
        # The first value is the UUID. Missing values become null, and further values are ignored.
        names, uuid_field = self.fields.names, self._run.shape.uuid_field
        is_hidden = uuid_field and names[:1] != [uuid_field]
        return dict(zip(names, record.fields[1:] if is_hidden else record.fields, strict=False))

    def _parse_each(
        self,
        batch: Batch,
        wanted: Mask,
        decode: Callable[[bytes], dict[str, Any]],
        convert: Callable[[Sequence[Any], pa.DataType], pa.Array],
    ) -> _Parsed:
        """Read all messages together, or one by one if a message does not fit its columns."""
        rows = np.flatnonzero(wanted).tolist()
        try:
            dicts = [decode(self._frame(batch, row)) for row in rows]
            arrays = [
                convert([row.get(field.name) for row in dicts], field.type) for field in self.fields
            ]
            return _Parsed(np.array(rows), arrays)
        except ROW_ERRORS:
            pass  # At least one message does not fit: below, read each message separately.

        def read(frame: bytes) -> tuple[list[pa.Array], list[str]]:
            try:
                values = decode(frame)
            except ROW_ERRORS as error:
                return [pa.nulls(1, field.type) for field in self.fields], [_reason(error)]
            misfits: list[str] = []
            parts: list[pa.Array] = []
            for field in self.fields:
                try:
                    parts.append(convert([values.get(field.name)], field.type))
                except ROW_ERRORS as error:
                    misfits.append(f"{field.name}: {_reason(error)} (expected {field.type})")
                    parts.append(pa.nulls(1, field.type))
            return parts, misfits

        kept_messages = self._kept(batch, wanted, read)
        if not kept_messages:
            return _Parsed(np.array([], np.int64), [])
        kept_rows, parts, corrupt = zip(*kept_messages, strict=True)
        arrays = [pa.concat_arrays(column) for column in zip(*parts, strict=True)]
        return _Parsed(np.array(kept_rows, np.int64), arrays, pa.array(corrupt, pa.string()))


def _message(kind: Any, frame: bytes) -> Any:
    """Return the message of Protobuf in a frame. Raise ``Invalid`` for bytes that are no frame."""
    payload = fixed_payload(frame)
    if payload is None:
        raise Invalid("no frame begins at this offset")
    return kind.FromString(payload)


def _batch(arrays: Sequence[pa.Array], schema: pa.Schema, count: int) -> pa.RecordBatch:
    """Return a batch of ``count`` rows, even if it has no columns."""
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    rows = pa.Array.from_buffers(pa.struct([]), count, [None], children=[])
    return pa.RecordBatch.from_struct_array(rows)


def _merged(one: _Parsed, other: _Parsed) -> _Parsed:
    """Return the messages of ``one`` and ``other``, in the order of their rows."""
    if not len(other.rows):
        return one
    rows = np.concatenate((one.rows, other.rows))
    order = np.argsort(rows)
    take = pa.array(order)
    corrupt = other.corrupt
    if corrupt is not None:
        corrupt = pa.concat_arrays([pa.nulls(len(one.rows), pa.string()), corrupt]).take(take)
    fields = [
        pa.concat_arrays(pair).take(take) for pair in zip(one.fields, other.fields, strict=True)
    ]
    return _Parsed(rows[order], fields, corrupt)


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def strict_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values of protobuf as an array. If the column does not hold a value as it is, convert it through
    its JSON. Raise one of `ROW_ERRORS` for a value that does not fit."""
    return pa.array(map(_fit(kind), values), kind)


def _fit(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return the function from a value of protobuf to its value for a column."""
    if pa.types.is_struct(kind):
        fits = [(field.name, _fit(field.type)) for field in kind]
        return lambda value: value and {name: fit(value[name]) for name, fit in fits}
    if pa.types.is_list(kind):
        fit = _fit(kind.value_type)
        return lambda value: value and list(map(fit, value))
    if pa.types.is_map(kind):
        fit = _fit(kind.item_type)
        return lambda value: value and [(key, fit(item)) for key, item in value]
    native = next((type_ for matches, type_ in _NATIVE if matches(kind)), None)
    read = value_reader(kind)
    return lambda value: value if value is None or type(value) is native else read(value)


_NATIVE: Final[tuple[tuple[Callable[[pa.DataType], bool], type], ...]] = (
    (pa.types.is_string, str),
    (pa.types.is_integer, int),
    (pa.types.is_decimal, int),
    (pa.types.is_floating, float),
    (pa.types.is_boolean, bool),
    (pa.types.is_binary, bytes),
)
"""Types of values that a column holds as they are."""


def _csv(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return texts as an array. An empty text is null, except in a column of strings. Times, decimals and
    bytes are read as in JSON. Raise ``Invalid`` for a hexadecimal integer."""
    if pa.types.is_string(kind):
        return pa.array(values, kind)
    if pa.types.is_integer(kind):
        # Arrow reads 0xFF, too: in a column of eight bits as -1.
        for value in values:
            if value and "x" in value.lower():
                raise Invalid(f"{value!r} is not an integer")
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or pa.types.is_binary(kind):
        read = value_reader(kind)
        return pa.array((read(value) if value else None for value in values), kind)
    return pa.array([value or None for value in values], pa.string()).cast(kind)
