"""The options of ``format("gazette")``: parsed from text, and checked. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from gazette.errors import Invalid
from gazette.history.columns import Malformed, MessageFormat
from gazette.history.ddl import parse_columns
from gazette.history.row_format import Value
from gazette.history.snapshot import RUN_BYTES
from gazette.history.snapshot_builder import Selection
from gazette.history.source import NO_SUMMARIES, Access, store_url
from gazette.history.spark.message_class import message_class
from gazette.history.spark.options import Options, credential_options
from gazette.history.table_columns import CONTENT_TYPE_OF, TableColumns
from gazette.history.times import unix_ns
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.uuid import clock_at
from gazette.message.uuid_place import names_of
from gazette.protocol.ids import validate_journal_name
from gazette.protocol.label_set import LabelSelector

T = TypeVar("T")

_COMMITTED: Final = "read_committed"
Isolation = Literal["read_committed", "read_uncommitted"]
MappingName = Literal["", "random", "modulo", "rendezvous"]

CONNECTION: Final[dict[str, str]] = {
    "broker.address": "address of a broker, or of several, separated by commas",
    **credential_options("broker"),
    "journal": "name of a journal, or several, separated by commas; also the path of load() and save()",
    "selector": "labels of journals, such as app.gazette.dev/message-type=Word or prefix=topic/",
    "contentType": "content type of journals that have no such label",
    "message": "class of protobuf messages, as module:Class",
    "value": "how to read a message: json, csv, protobuf, text or binary",
    "uuidField": "field of messages with the UUID; nested fields are joined by dots",
}
READ: Final[dict[str, str]] = {
    **CONNECTION,
    "store": "URL of a store to read fragments from without brokers; or several, separated by commas",
    "pathPostfix": "path_postfix_template of the journals in the store",
    "fileRoot": "directory of file:// stores",
    "fsspecProtocols": "protocols that fsspec+NAME:// stores may have, separated by commas",
    "direct": "true: open fragments in their store from here, even where brokers know them",
    "fields": "columns of messages, as in CREATE TABLE: `word string, n long`",
    "columns": "names of the columns to read, separated by commas",
    "metaPrefix": "prefix of the columns journal, offset, uuid, …, where messages have such fields",
    "isolation": "read_committed or read_uncommitted",
    "acks": "true: also give acknowledgements, as empty messages",
    "mode": (
        "what to do with messages that do not fit the columns: PERMISSIVE, DROPMALFORMED or "
        "FAILFAST"
    ),
    "columnNameOfCorruptRecord": "column for the text of such messages, if the schema has it",
    "startingOffsets": (
        "where to begin: earliest, an offset, or JSON with an offset for each journal; or latest, "
        "for streams"
    ),
    "endingOffsets": "where to end: latest, an offset, or JSON with an offset for each journal",
    "startingTimestamp": "time of the first messages: ISO 8601, or Unix seconds",
    "endingTimestamp": "time before which messages are read: ISO 8601, or Unix seconds",
    "failOnDataLoss": "false: continue behind bytes that the journal has lost, with a warning",
    "maxPartitionBytes": "number of bytes of a journal that one task reads; at least one fragment",
    "summaries": "URL of a store in which to keep summaries of fragments; none: keep none",
}
STREAM: Final[dict[str, str]] = {
    **READ,
    "maxBytesPerTrigger": "largest number of bytes of a batch; but at least a message is read",
    "maxRowsPerTrigger": "largest number of messages that a batch reads, committed or not",
    "refresh": "seconds between two looks for new messages",
    "producerHorizon": "seconds after which a silent producer is forgotten; 0: never",
}
WRITE: Final[dict[str, str]] = {
    **CONNECTION,
    "mapping": "how to spread messages over several journals: random, modulo or rendezvous",
    "key": "column by which messages are mapped to journals",
    "journalColumn": "column that names the journal of each row, among those of journal or selector",
    "commits": "directory of the records that keep a commit from being done twice",
    "commitId": "name of this write in commits; a repeated write has the same name",
    "checkpointLocation": (
        "location of the streaming query's checkpoint: commits are recorded there unless commits "
        "is set"
    ),
}
_IN_QUERIES: Final = (
    "Spark does not keep the options of CREATE TABLE: give them to queries, as in SELECT … FROM "
    "name WITH (`broker.address` = '…', journal = '…'), or use gazette.spark.create_view."
)
_NOT_NEEDED: Final = "Leave it out: it is not needed any more."
_RENAMED: Final[dict[str, str]] = {
    **{
        old: f"It is now {new}."
        for old, new in {
            "begin": "startingOffsets",
            "end": "endingOffsets",
            "begin_time": "startingTimestamp",
            "end_time": "endingTimestamp",
            "starting": "startingOffsets",
            "max_bytes": "maxBytesPerTrigger",
            "max_fragments": "maxBytesPerTrigger",
            "maxfilespertrigger": "maxBytesPerTrigger",
            "maxoffsetspertrigger": "maxRowsPerTrigger",
            "run_bytes": "maxPartitionBytes",
        }.items()
    },
    "gaps": "It is now failOnDataLoss: false for gaps=skip.",
    "infer_bytes": _NOT_NEEDED,
    "planning_threads": _NOT_NEEDED,
    "pushdown": "Leave it out: Spark applies filters after reading.",
}
"""Advice, by former name of an option, or by name of an option of Spark's other sources."""
Mode = Literal["permissive", "dropmalformed", "failfast"]
_MALFORMED: Final[dict[Mode, Malformed]] = {
    "permissive": "null",
    "dropmalformed": "skip",
    "failfast": "fail",
}
_CORRUPT: Final = "_corrupt_record"


class SourceOptions(Options):
    """Options of journals: of reads, streams and writes."""

    def __init__(self, options: Mapping[str, str], known: Mapping[str, str]) -> None:
        if "provider" in {name.lower() for name in options}:
            # Spark passes the table's properties when it infers columns for CREATE TABLE.
            raise Invalid(
                "CREATE TABLE takes columns, and no options", path="provider", hint=_IN_QUERIES
            )
        super().__init__(options, known, renamed=_RENAMED)
        self._empty = not options

    def offsets(self, name: str, every: str) -> tuple[int | None, dict[str, int]]:
        """Return an offset for all journals, and offsets by journal. The text ``every`` means no offset."""
        text = self.text(name)
        if text.lower() in ("", every):
            return None, {}
        hint = f'Give {every}, one number, or JSON such as {{"topic/part-0": 1024}}.'
        try:
            value = json.loads(text)
        except ValueError:
            self.fail(name, "must be an offset, or a JSON object of them", hint)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value, {}
        if not isinstance(value, dict) or not all(
            isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0
            for offset in value.values()
        ):
            self.fail(name, "must be an offset, or a JSON object of them", hint)
        return None, value

    def chosen(self) -> tuple[tuple[str, ...], LabelSelector | None]:
        """Return names of journals, or a selector. Raise `Invalid` if both are given, or neither."""
        journals, selector = self.journals(), self.selector()
        if bool(journals) == (selector is not None):  # Both, or neither.
            hint = "Set the option journal, or selector (of which brokers know the meaning)."
            self.fail(
                "journal",
                "give either names of journals, or a selector of them",
                _IN_QUERIES if self._empty else hint,
            )
        return journals, selector

    def time_ns(self, name: str) -> int | None:
        """Return a time as Unix nanoseconds. A time without a zone is UTC."""
        text = self.text(name)
        if not text:
            return None
        try:
            return unix_ns(text)
        except Invalid as error:
            self.fail(name, error.message, error.hint)

    def journals(self) -> tuple[str, ...]:
        if "journal" in self._values and "path" in self._values:
            self.fail("journal", f"is given twice: the path is {self._values['path']!r}")
        names = self.names("journal") or self.names("path")
        for name in names:
            try:
                validate_journal_name(name)
            except Invalid as error:
                self.fail("journal", f"{name!r} is not the name of a journal: {error.message}")
        if len(set(names)) < len(names):
            self.fail("journal", "names a journal twice")
        return names

    def shape(self) -> MessageFormat:
        """Return the encoding of messages. Raise `Invalid` if ``value`` and ``message`` do not fit, and for a
        class that cannot be imported."""
        value = self.choice("value", Value, "")
        message = self.text("message")
        if message and value not in ("", "protobuf", "binary"):
            self.fail("value", "must be protobuf if a message class is given")
        if value == "protobuf" and not message:
            self.fail("message", "must be given for value=protobuf")
        content_type = "protobuf" if message else value
        shape = MessageFormat(
            CONTENT_TYPE_OF.get(content_type, CONTENT_JSON_LINES),
            self._place(),
            message,
            _MALFORMED[self.choice("mode", Mode, "permissive")],
        )
        if message:
            try:
                message_class(message)
            except Invalid as error:
                self.fail("message", error.message, error.hint)
        return shape

    def _place(self) -> str:
        place = self.text("uuidField")
        try:
            return ".".join(names_of(place)) if place else ""
        except Invalid as error:
            self.fail("uuidField", error.message, error.hint)

    def access(self, *, direct: bool) -> Access:
        """Return the access. With ``direct``, no broker is needed. Without ``fileRoot``, ``file://`` stores
        may then be anywhere."""
        address = self.text("broker.address")
        if not address and not direct:
            self.fail(
                "broker.address",
                "must be given, or else store" if self.knows("store") else "must be given",
                "Set broker.address, as http://localhost:8080; to read, the URL of a store will do.",
            )
        return Access.of(
            address,
            file_root=self.text("fileRoot") or ("/" if direct else None),
            **self.credentials("broker"),
            direct=direct,
            fsspec_protocols=self.names("fsspecProtocols"),
            summaries=self._summaries(),
        )

    def _summaries(self) -> str:
        url = self.text("summaries")
        return url if url in ("", NO_SUMMARIES) else self.parsed("summaries", store_url)


_ARGUMENTS: Final = {
    "columns": "columns",
    "fields": "fields",
    "meta_prefix": "metaPrefix",
    "value": "value",
}
"""By argument of `gazette.history`: the option with the same meaning, for errors."""


@contextmanager
def as_options() -> Iterator[None]:
    """Replace the name of an argument, in an ``Invalid`` of the block, by the name of the option."""
    try:
        yield
    except Invalid as error:
        if error.path not in _ARGUMENTS:
            raise
        name = _ARGUMENTS[error.path]
        raise Invalid(
            error.message,
            path=f"option {name}",
            hint=error.hint.replace(error.path, name),
            **error.facts,
        ) from error


@dataclass(frozen=True, slots=True)
class ReadOptions(TableColumns):
    """The bytes to read, and how to decode them."""

    has_mode: bool
    """True if the option ``mode`` is given."""
    corrupt: str
    """Name of the column for messages that do not fit the other columns."""
    run_bytes: int

    @classmethod
    def parse(cls, options: Mapping[str, str], known: Mapping[str, str] = READ) -> ReadOptions:
        """Parse the options. Raise `Invalid` for a wrong option, and if options contradict each other."""
        values = SourceOptions(options, known)
        names = values.names("store")
        stores = values.parsed("store", lambda _: tuple(map(store_url, names)))
        direct = values.flag("direct", default=bool(stores))
        if stores and not direct:
            values.fail("direct", "must not be false if a store is given")
        journals, selector = values.chosen()
        if selector is not None and stores:
            values.fail("selector", "is not known by stores: they need the option journal")
        latest = values.text("startingOffsets").lower() == "latest"
        if latest and known is READ:
            values.fail("startingOffsets", "must not be latest: that is for streams")
        begin_all, begin = (None, {}) if latest else values.offsets("startingOffsets", "earliest")
        end_all, end = values.offsets("endingOffsets", "latest")
        for name, by_journal in (("startingOffsets", begin), ("endingOffsets", end)):
            if journals and (unknown := sorted(by_journal.keys() - set(journals))):
                values.fail(name, f"names journals that are not read: {', '.join(unknown)}")
        begin_ns = values.time_ns("startingTimestamp")
        end_ns = values.time_ns("endingTimestamp")
        if begin_ns is not None and end_ns is not None and end_ns < begin_ns:
            values.fail("endingTimestamp", "must not be before startingTimestamp")
        shape = values.shape()
        with as_options():
            fields = parse_columns(text) if (text := values.text("fields")) else None
        return cls(
            access=values.access(direct=direct),
            selection=Selection(
                journals=journals,
                selector=selector,
                stores=stores,
                content_type=values.text("contentType"),
                shape=shape,
                path_postfix_template=values.text("pathPostfix"),
                begin=begin,
                end=end,
                begin_all=begin_all or 0,
                end_all=end_all,
                begin_time_s=(begin_ns or 0) / 1e9,
                lost="fail" if values.flag("failOnDataLoss", default=True) else "skip",
            ),
            value=values.text("value") or ("protobuf" if shape.message else ""),
            fields=fields,
            columns=values.names("columns"),
            meta_prefix=values.text("metaPrefix"),
            committed=values.choice("isolation", Isolation, _COMMITTED) == _COMMITTED,
            acks=values.flag("acks"),
            clock_begin=clock_at(begin_ns) if begin_ns else 0,
            clock_end=None if end_ns is None else clock_at(end_ns),
            has_mode="mode" in values,
            corrupt=values.text("columnNameOfCorruptRecord", _CORRUPT),
            run_bytes=values.number("maxPartitionBytes", RUN_BYTES, 1),
        )

    def inferred(self) -> ReadOptions:
        """Return the options for a schema that was inferred from some messages.

        Then a message that does not fit is an error, unless a mode is given. Spark's own sources infer
        columns from all messages, so that each message fits.
        """
        if self.has_mode:
            return self
        shape = replace(self.selection.shape, malformed="fail")
        return replace(self, selection=replace(self.selection, shape=shape))


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Settings of a stream."""

    read: ReadOptions
    latest: bool
    """True if a new query begins at the ends of the journals."""
    max_bytes: int | None
    max_rows: int | None
    refresh_s: float
    horizon_ns: int

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """Parse the options. Raise `Invalid` for a wrong option, or an option only for tables."""
        values = SourceOptions(options, STREAM)
        for name in ("endingOffsets", "endingTimestamp"):
            if values.text(name):
                values.fail(name, "is for tables, and not for streams")
        latest = values.text("startingOffsets").lower() == "latest"
        if latest and values.text("startingTimestamp"):
            values.fail("startingTimestamp", "must not be given with startingOffsets=latest")
        if values.text("maxBytesPerTrigger") and values.text("maxRowsPerTrigger"):
            values.fail("maxRowsPerTrigger", "must not be given with maxBytesPerTrigger")
        return cls(
            ReadOptions.parse(options, STREAM),
            latest,
            values.number("maxBytesPerTrigger", None, 1),
            values.number("maxRowsPerTrigger", None, 1),
            values.number("refresh", 1.0, 0.0, float),
            int(values.number("producerHorizon", 86400.0, 0.0, float) * 1e9),
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Settings of a write."""

    access: Access
    journals: tuple[str, ...]
    selector: LabelSelector | None
    content_type: str
    content_type_unlabelled: str
    """Content type for journals without a label, from the option ``value``; empty without this option."""
    value: str
    shape: MessageFormat
    """Class of protobuf messages, and place of the UUID."""
    mapping: MappingName
    key: str
    journal_column: str
    commits: str
    commit_id: str

    @property
    def message(self) -> str:
        """Class of protobuf messages, as module:Class."""
        return self.shape.message

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """Parse the options. Raise `Invalid` for a wrong option, and if options contradict each other."""
        values = SourceOptions(options, WRITE)
        journals, selector = values.chosen()
        mapping = values.choice("mapping", MappingName, "")
        key = values.text("key")
        if mapping in ("modulo", "rendezvous") and not key:
            values.fail("key", f"must be given for mapping={mapping}")
        if key and mapping in ("", "random"):
            values.fail("mapping", "must be modulo or rendezvous if a key is given")
        journal_column = values.text("journalColumn")
        if journal_column and mapping:
            values.fail(
                "mapping", "must not be given with journalColumn: that column is the mapping"
            )
        commits = values.text("commits")
        checkpoint = values.text("checkpointLocation")
        if streaming and not commits:
            if not checkpoint or (
                re.match(r"\w+:", checkpoint) and not checkpoint.startswith("file:")
            ):
                values.fail(
                    "commits",
                    "must be given, since commits cannot be recorded in the checkpoint location "
                    f"({checkpoint or 'which is not an option of this query'})",
                    "Give a directory that the driver has after a restart, too.",
                )
            commits = f"{checkpoint.rstrip('/')}/gazette-commits"
        commit_id = values.text("commitId")
        # One of the two options without the other.
        if not streaming and bool(commits) != bool(commit_id):
            values.fail("commitId", "goes together with commits")
        if commit_id and not re.fullmatch(r"[\w.-]+", commit_id):
            values.fail("commitId", "must be letters, digits, and any of _.-")
        shape = values.shape()
        if values.text("value") in ("text", "binary"):
            values.fail("value", "must be json, csv or protobuf: what is written has a UUID")
        return cls(
            values.access(direct=False),
            journals,
            selector,
            values.text("contentType"),
            shape.content_type if values.text("value") or shape.message else "",
            values.text("value") or ("protobuf" if shape.message else "json"),
            shape,
            mapping,
            key,
            journal_column,
            re.sub(r"^file:/*", "/", commits),
            commit_id,
        )
