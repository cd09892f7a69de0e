"""The columns of journals as a table: metadata, and fields that are given or inferred. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from gazette.errors import Invalid
from gazette.history.columns import MessageFormat
from gazette.history.infer import infer_json
from gazette.history.meta_columns import META
from gazette.history.protobuf_rows import protobuf_schema
from gazette.history.read import read_columns
from gazette.history.snapshot import JournalSnapshot, Run, Snapshot
from gazette.history.snapshot_builder import Selection, require_stored, take_snapshot
from gazette.history.source import Access, OpenAccess
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.framing.csv import parse_record
from gazette.message.uuid import ACK_TXN
from gazette.message.uuid_place import DEFAULT_PLACE

CONTENT_TYPE_OF: Final = {
    "json": CONTENT_JSON_LINES,
    "csv": CONTENT_CSV,
    "protobuf": CONTENT_PROTO_FIXED,
}
"""Content type of messages, for each form of a message that has fields."""
INFER_BYTES: Final = 1 << 20
"""Default number of bytes of messages that are read to infer columns."""
_INFER_JOURNALS: Final = 16
"""Greatest number of journals whose messages are read to infer columns."""
_INFER_PLACES: Final = 4
"""Number of fragments of each journal from which messages are read, beside its first fragment."""


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Journals to read as a table, and the columns to read them as."""

    access: Access
    selection: Selection
    value: str
    """Form of a message. Empty: the form of the journals' content type."""
    fields: pa.Schema | None
    """Fields of messages. None: the fields of their class, or fields inferred from a sample of messages."""
    columns: tuple[str, ...]
    """Names of the columns to return. Empty: all."""
    meta_prefix: str
    committed: bool
    """False to return every message, committed or not."""
    acks: bool
    clock_begin: int
    clock_end: int | None
    """Clocks of messages to return: ``[clock_begin, clock_end)``. None: without an end."""

    def snapshot(self, access: OpenAccess) -> Snapshot:
        """Return the journals as of now. Raise ``NotFound`` for a missing journal: see `take_snapshot`."""
        snapshot = take_snapshot(access, self.selection)
        require_stored(snapshot, self.selection)
        return snapshot

    def known_fields(self, value: str) -> pa.Schema | None:
        """Return the fields of messages: an empty schema if only metadata are wanted, None to infer them."""
        if self.fields is not None:
            return self.fields
        if self.columns and set(self.columns) <= {f"{self.meta_prefix}{key}" for key in META}:
            return pa.schema([])
        if value == "protobuf":
            return protobuf_schema(self.selection.shape.message_type())
        if value in ("text", "binary"):
            return pa.schema([("value", pa.string() if value == "text" else pa.binary())])
        return None

    def fields_of(
        self, access: OpenAccess, snapshot: Snapshot, value: str
    ) -> tuple[pa.Schema, bool]:
        """Return the fields of messages, and True if they are inferred (for errors: `infer_fields`)."""
        if (fields := self.known_fields(value)) is not None:
            return fields, False
        return infer_fields(access, self.selection, snapshot, value, INFER_BYTES), True

    def needs_labels(self, fields: pa.Schema) -> bool:
        """Return True if only labels of journals show whether a field is the UUID or the user's."""
        uuid_field = self.selection.shape.uuid_field
        return not uuid_field and not self.meta_prefix and DEFAULT_PLACE in fields.names

    def schema(self, fields: pa.Schema, shapes: Iterable[MessageFormat] = ()) -> pa.Schema:
        """Return the columns of the table: metadata and ``fields``, or only the columns in ``self.columns``.

        ``shapes`` are the formats of the journals' messages, if known. Raise `Invalid` for a column that does
        not exist, and for two columns of the same name.
        """
        meta = [pa.field(f"{self.meta_prefix}{name}", type_) for name, type_ in META.items()]
        # Leave out the field of the UUID: the metadata have it. If journals have their UUIDs in different
        # fields, leave out no field.
        uuid_fields = {shape.uuid_field for shape in shapes}
        uuid_fields = uuid_fields or {self.selection.shape.uuid_field or DEFAULT_PLACE}
        names = {field.name for field in meta} & uuid_fields if len(uuid_fields) == 1 else set()
        fields = pa.schema([field for field in fields if field.name not in names])
        clash = {field.name for field in meta} & set(fields.names)
        if clash:
            raise Invalid(
                f"messages have fields of the same names: {one_of(clash)}",
                path="meta_prefix",
                hint='Set meta_prefix to "_", so that these columns are _journal, _offset and so on.',
            )
        columns = [*meta, *fields]
        if not self.columns:
            return pa.schema(columns)
        by_name = {field.name: field for field in columns}
        if unknown := [name for name in self.columns if name not in by_name]:
            raise Invalid(
                f"there are no such columns: {one_of(unknown)} (there are {one_of(by_name)})",
                path="columns",
            )
        return pa.schema([by_name[name] for name in self.columns])

    def require_leading(self, columns: Sequence[str]) -> None:
        """Raise `Invalid` unless the fields in ``columns`` are the first ones of the CSV, whose fields have
        only positions."""
        meta_names = {f"{self.meta_prefix}{key}" for key in META}
        field_names = [name for name in columns if name not in meta_names]
        # Without given fields, the names are c1, c2 and so on.
        numbered = [f"c{position + 1}" for position in range(len(field_names))]
        names = numbered if self.fields is None else self.fields.names
        if self.columns and field_names != names[: len(field_names)]:
            raise Invalid(
                f"CSV fields are positional: name a prefix of the columns, not {', '.join(field_names)}",
                path="columns",
                hint="Name all fields before them, too, and in their order.",
            )


def value_of_all(value: str, shapes: Iterable[MessageFormat]) -> str:
    """Return the form of all journals' messages: ``value`` if given; without journals, ``json``. Raise
    `Invalid` if the forms differ."""
    values = {value or _value_of(shape.content_type) for shape in shapes}
    if len(values) > 1:
        raise Invalid(
            f"the journals are of several content types ({one_of(values)})",
            path="value",
            hint="Read them one type at a time, or set value to text or binary.",
        )
    return values.pop() if values else value or "json"


def _value_of(content_type: str) -> str:
    return {CONTENT_JSON_LINES: "json", CONTENT_CSV: "csv"}.get(content_type, "binary")


def infer_fields(
    access: OpenAccess, selection: Selection, snapshot: Snapshot, value: str, bytes_max: int
) -> pa.Schema:
    """Find the fields of messages of JSON or CSV in a sample of about ``bytes_max`` bytes.

    If the selection has no bytes, for example if it begins in the future, sample the whole journals. Raise
    `Invalid` if there are no messages, and the errors of `read_columns` and `take_snapshot`.
    """
    if not any(journal.pieces for journal in snapshot.journals):
        unbounded = replace(selection, begin={}, end={}, begin_all=0, end_all=None, begin_time_s=0)
        snapshot = take_snapshot(access, unbounded)
    lines: list[bytes] = []
    for journal in snapshot.journals[:_INFER_JOURNALS]:
        lines += _sample(access, journal, bytes_max)
    if value == "csv" and lines:
        record = parse_record(lines[0], 0)
        width = 0 if record is None else len(record.fields)  # The first field, c0, is the UUID.
        return pa.schema([(f"c{number}", pa.string()) for number in range(1, width)])
    fields = infer_json(lines)
    if not fields.names:
        raise Invalid(
            "there is no message to infer the fields from",
            path="fields",
            hint="Give the fields, as of CREATE TABLE, or a schema.",
        )
    return fields


def _sample(access: OpenAccess, journal: JournalSnapshot, bytes_max: int) -> list[bytes]:
    """Return messages of the first and the last fragment, and some between, of about ``bytes_max`` bytes."""
    pieces = journal.pieces
    positions = sorted(
        {round(step * (len(pieces) - 1) / _INFER_PLACES) for step in range(_INFER_PLACES + 1)}
    )
    lines: list[bytes] = []
    for position in positions if pieces else ():
        # A fragment may begin within a message. For JSON, keep malformed lines: a line that is no object
        # is skipped later, and a line with a malformed UUID has fields.
        is_json = journal.shape.content_type == CONTENT_JSON_LINES
        shape = replace(journal.shape, malformed="null" if is_json else "skip")
        run = Run(journal.journal, shape, 0, pieces[position : position + 1], 0, sure=False)
        lines += _first_messages(access, run, bytes_max // len(positions) + 1)
    return lines


def _first_messages(access: OpenAccess, run: Run, bytes_max: int) -> list[bytes]:
    """Return frames that are not acknowledgements, of about ``bytes_max`` bytes."""
    frames: list[bytes] = []
    size = 0
    for batch in read_columns(access, run):
        columns, buffer, base = batch.columns, batch.buffer, batch.base
        is_message = columns.uuids.flags != ACK_TXN
        begins, ends = columns.begins[is_message].tolist(), columns.ends[is_message].tolist()
        for begin, end in zip(begins, ends, strict=True):
            frames.append(buffer[begin - base : end - base])
            size += end - begin
            if size >= bytes_max:
                return frames
    return frames


def one_of(names: Iterable[str]) -> str:
    """Return names as the text of a choice, for an error."""
    return ", ".join(sorted(names)) or "none"
