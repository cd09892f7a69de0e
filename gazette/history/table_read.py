"""Reads journals as a table: checks the options, and makes columns and batches. Needs pyarrow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, get_args

import pyarrow as pa

from gazette.client.flags import broker_flags_of
from gazette.errors import Invalid
from gazette.history.columns import Malformed, MessageFormat
from gazette.history.ddl import parse_columns
from gazette.history.in_order import PART_BYTES, every_row_in_order, fold_in_order, rows_in_order
from gazette.history.json_values import JsonRow
from gazette.history.loss_warnings import warn_of_loss
from gazette.history.merge import CommittedRun
from gazette.history.protobuf_rows import protobuf_row
from gazette.history.row_format import RowFormat, Value
from gazette.history.rows import Unfit
from gazette.history.snapshot import Snapshot
from gazette.history.snapshot_builder import Lost, Selection
from gazette.history.source import Access, OpenAccess, store_url
from gazette.history.table_columns import CONTENT_TYPE_OF, TableColumns, value_of_all
from gazette.history.table_options import TableOptions, Time
from gazette.history.times import unix_ns
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.uuid import clock_at
from gazette.message.uuid_place import names_of
from gazette.protocol.ids import JournalName, Offset, validate_journal_name
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.text.validation import within
from gazette.runtime.near_names import near_name

T = TypeVar("T")

_ANSWER_S: Final = 60.0
_ISOLATIONS: Final = ("read_committed", "read_uncommitted")
_MALFORMED: Final = get_args(Malformed)
_MISFIT_HINT: Final = (
    'Give the field another type in `fields`, or leave it out. value="text" shows the message. '
    'misfits="null" returns null instead, and misfits="skip" leaves such messages out.'
)


@dataclass(frozen=True, slots=True)
class TableRead(TableColumns):
    """A table, and the options for reading it."""

    part_bytes: int

    @classmethod
    def parse(cls, journals: str | Sequence[str], options: TableOptions) -> TableRead:
        """Check the options. Raise `Invalid`, with the name of the option, for a wrong option."""
        _require_known(options)
        names = _names(journals)
        selector = _selector(options.get("selector"))
        if bool(names) == (selector is not None):  # Both, or neither.
            raise Invalid(
                "give either names of journals, or a selector of them",
                path="journals",
                hint='Name one, as in read_table("words/part-000"), or several in a list; or give '
                'selector="prefix=words/".',
            )
        stores = _stores(options.get("store", ()))
        if selector is not None and stores:
            raise Invalid(
                "stores know only names of journals",
                path="selector",
                hint="Name the journals, or read through a broker.",
            )
        shape, value = _shape(options)
        begin_all, begin = _offsets("begin", options.get("begin", 0), names)
        end = options.get("end")
        end_all, ends = (None, {}) if end is None else _offsets("end", end, names)
        begin_ns, end_ns = _time("begin_time", options), _time("end_time", options)
        if begin_ns is not None and end_ns is not None and end_ns < begin_ns:
            raise Invalid("must not be before begin_time", path="end_time")
        return cls(
            access=_access(options, direct=bool(stores)),
            selection=Selection(
                journals=names,
                selector=selector,
                stores=stores,
                content_type=options.get("content_type", ""),
                shape=shape,
                path_postfix_template=options.get("path_postfix", ""),
                begin=begin,
                end=ends,
                begin_all=begin_all or 0,
                end_all=end_all,
                begin_time_s=(begin_ns or 0) / 1e9,
                lost=_choice("lost", options, get_args(Lost), "settled"),  # type: ignore[arg-type]
            ),
            value=value,
            fields=_fields(options.get("fields")),
            columns=_column_names(options.get("columns")),
            meta_prefix=options.get("meta_prefix", ""),
            committed=_choice("isolation", options, _ISOLATIONS, "read_committed")
            == "read_committed",
            acks=options.get("acks", False),
            clock_begin=clock_at(begin_ns) if begin_ns else 0,
            clock_end=None if end_ns is None else clock_at(end_ns),
            part_bytes=int(min(_positive("part_bytes", options, PART_BYTES), sys.maxsize)),
        )

    def batches(self) -> pa.RecordBatchReader:
        """Return a reader of the rows: see `read_batches`. For committed rows, do the first pass before."""
        with self.access.open() as opened:
            snapshot = self.snapshot(opened)
            warn_of_loss(snapshot)
            format = self._format(opened, snapshot)
            parts: dict[JournalName, list[CommittedRun]] = {}
            if self.committed:
                for part in fold_in_order(opened, snapshot, self.part_bytes):
                    parts.setdefault(part.run.journal, []).append(part)
        rows = self._rows(snapshot, parts, format)
        return pa.RecordBatchReader.from_batches(format.schema, rows)

    def _rows(
        self,
        snapshot: Snapshot,
        parts: Mapping[JournalName, list[CommittedRun]],
        format: RowFormat,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Open the access again: the reader is used after `batches` has returned."""
        with self.access.open() as opened:
            for journal in snapshot.journals:
                try:
                    if self.committed:
                        of_journal = parts.get(journal.journal, [])
                        yield from rows_in_order(opened, journal, of_journal, format)
                    else:
                        yield from every_row_in_order(opened, journal, format)
                except Unfit as error:
                    raise Unfit(error.message, hint=_MISFIT_HINT, **error.facts) from error

    def _format(self, access: OpenAccess, snapshot: Snapshot) -> RowFormat:
        """Return the format of rows. Raise `Invalid` for wrong columns. Other errors: see `infer_fields`."""
        value = value_of_all(self.value, snapshot.shapes)
        fields, _ = self.fields_of(access, snapshot, value)
        schema = self.schema(fields, snapshot.shapes)
        if value == "csv":
            self.require_leading(schema.names)
        format = RowFormat.of(
            value,
            schema,
            self.meta_prefix,
            acks=self.acks,
            clock_begin=self.clock_begin,
            clock_end=self.clock_end,
        )
        format.validate()
        _require_readable(format, self.selection.shape)
        return format


def _require_readable(format: RowFormat, shape: MessageFormat) -> None:
    """Raise `Invalid` for a column that may not be null, or whose type would change values. Raise it, too,
    for a type that no JSON value converts to, and a field that the protobuf class lacks or cannot fill."""
    for field in format.fields:
        for path, kind in _parts(field.name, field.type):
            if nearest := _nearest(kind):
                raise Invalid(
                    f"messages are not read as {kind}",
                    path=path,
                    hint=f"Read it as {nearest}, and cast that.",
                )
        if not field.nullable:
            raise Invalid("columns of journals may be null", path=field.name)
    # Make the reader only for its errors.
    if format.value == "json":
        JsonRow(format.fields)
    elif format.value == "protobuf":
        protobuf_row(shape.message_type(), format.fields)


def _parts(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yield a type and all types within it, with their paths."""
    yield path, kind
    if pa.types.is_map(kind):
        yield from (*_parts(path, kind.key_type), *_parts(path, kind.item_type))
        return
    for position in range(kind.num_fields):
        child = kind.field(position)
        yield from _parts(f"{path}.{child.name}" if pa.types.is_struct(kind) else path, child.type)


def _nearest(kind: pa.DataType) -> str:
    """Return the type to use in place of a type that would change values; empty for any other type."""
    if pa.types.is_unsigned_integer(kind) or pa.types.is_float16(kind):
        return "int64, double or decimal"
    if pa.types.is_timestamp(kind) and kind.unit != "us":
        return "a timestamp of microseconds"
    return "a decimal of scale 0" if pa.types.is_decimal(kind) and kind.scale < 0 else ""


def _require_known(options: TableOptions) -> None:
    for name in options:
        if name not in TableOptions.__annotations__:
            names = list(TableOptions.__annotations__)
            near_match = near_name(name, names)
            raise Invalid(
                "there is no such option",
                path=name,
                hint=f"Did you mean {near_match}?" if near_match else f"Known: {', '.join(names)}.",
            )


def _names(journals: str | Sequence[str]) -> tuple[JournalName, ...]:
    names = (journals,) if isinstance(journals, str) and journals else tuple(journals)
    for name in names:
        if not isinstance(name, str):
            raise Invalid(
                f"not the name of a journal: {name!r}", path="journals", hint="Names are texts."
            )
        try:
            validate_journal_name(name)
        except Invalid as error:
            raise Invalid(
                f"{name!r} is not the name of a journal: {error}", path="journals", hint=error.hint
            ) from error
    if len(set(names)) < len(names):
        raise Invalid("a journal is named twice", path="journals")
    return names


def _selector(given: str | LabelSelector | None) -> LabelSelector | None:
    if given is None or isinstance(given, LabelSelector):
        return given
    with within("selector"):
        return LabelSelector.parse(given)


def _stores(given: str | Sequence[str]) -> tuple[str, ...]:
    urls = (given,) if isinstance(given, str) else tuple(given)
    with within("store"):
        return tuple(store_url(url) for url in urls)


def _access(options: TableOptions, *, direct: bool) -> Access:
    """Return the option ``access``; else stores without brokers, if ``direct``; else the brokers of the
    option or the environment. Raise ``Invalid`` for options that contradict each other."""
    answer_s = _positive("answer_s", options, _ANSWER_S)
    if (access := options.get("access")) is not None:
        if "broker" in options:
            raise Invalid("is given, and access has an address, too", path="broker")
        if direct and not access.direct:
            raise Invalid("an access with direct=True is needed to read a store", path="access")
        return replace(access, answer_s=answer_s)
    if direct:
        if "broker" in options:
            raise Invalid(
                "is given together with store, which is read without brokers",
                path="broker",
                hint="Give one of the two; or an access with direct=True, to open fragments in "
                "their store from here.",
            )
        return replace(Access.of(file_root="/", direct=True), answer_s=answer_s)
    brokers = broker_flags_of(os.environ, options.get("broker", ""))
    return Access(brokers, brokers.file_root, answer_s=answer_s)


def _shape(options: TableOptions) -> tuple[MessageFormat, str]:
    """Return the encoding of messages, and their form. Empty: the form follows from the content type. Raise
    ``Invalid`` for options that do not fit."""
    value = _choice("value", options, ("", *get_args(Value)), "")
    message = options.get("message")
    if message is not None and value not in ("", "protobuf", "binary"):
        raise Invalid('must be "protobuf" if a message class is given', path="value")
    if value == "protobuf" and message is None:
        raise Invalid('must be given for value="protobuf"', path="message")
    value = value or ("protobuf" if message else "")
    form = "protobuf" if message is not None else value
    if uuid_field := options.get("uuid_field", ""):
        with within("uuid_field"):
            names_of(uuid_field)
    shape = MessageFormat(
        CONTENT_TYPE_OF.get(form, CONTENT_JSON_LINES),
        uuid_field,
        "" if message is None else _importable(message),
        _choice("misfits", options, _MALFORMED, "fail"),  # type: ignore[arg-type]
    )
    return shape, value


def _importable(message: type[Any]) -> str:
    """Return ``module:Class`` of a class. Raise ``Invalid`` unless the class can be imported by this name."""
    if not hasattr(message, "DESCRIPTOR"):
        raise Invalid(
            f"not a generated class of protobuf: {message!r}",
            path="message",
            hint="Give a class of a module that protoc has made (`…_pb2`). JSON needs none.",
        )
    name = f"{message.__module__}:{message.__qualname__}"
    if MessageFormat(message=name).message_type() is not message:
        raise Invalid(f"the class cannot be imported as {name}", path="message")
    return name


def _fields(given: Any) -> pa.Schema | None:
    if given is None or isinstance(given, pa.Schema):
        return given
    if not isinstance(given, str):
        raise Invalid(f"not columns: {given!r}", path="fields", hint="Give a text or a schema.")
    return parse_columns(given)


def _column_names(given: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(given, str):
        raise Invalid("is one text", path="columns", hint=f"Give a list of names, as [{given!r}].")
    return tuple(given or ())


def _offsets(
    option: str, given: int | Mapping[str, int], journals: Sequence[str]
) -> tuple[Offset | None, dict[JournalName, Offset]]:
    """Return the offset for all journals, or None and offsets by journal.

    Raise ``Invalid`` for an invalid offset, or if a journal is not in ``journals`` (empty for a selector).
    """
    if not isinstance(given, Mapping):
        return _require_offset(option, given), {}
    by_journal = {journal: _require_offset(option, offset) for journal, offset in given.items()}
    if journals and (unknown := sorted(by_journal.keys() - set(journals))):
        raise Invalid(f"names journals that are not read: {', '.join(unknown)}", path=option)
    return None, by_journal


def _require_offset(option: str, offset: Any) -> Offset:
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise Invalid(
            f"not an offset: {offset!r}",
            path=option,
            hint='Give one number, or {"topic/part-0": 1024}.',
        )
    return offset


def _time(name: str, options: TableOptions) -> int | None:
    time: Time | None = options.get(name)  # type: ignore[assignment]
    if time is None:
        return None
    try:
        return unix_ns(time)
    except Invalid as error:
        raise Invalid(f"{error.message}, not {time!r}", path=name, hint=error.hint) from error


def _choice(name: str, options: TableOptions, choices: Sequence[str], default: str) -> str:
    value: Any = options.get(name, default)
    if value not in choices:
        names = ", ".join(choice for choice in choices if choice)
        raise Invalid(f"must be one of {names}, not {value!r}", path=name)
    return str(value)


def _positive(name: str, options: TableOptions, default: float) -> float:
    value: Any = options.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise Invalid(f"must be a number above 0, not {value!r}", path=name)
    return float(value)
