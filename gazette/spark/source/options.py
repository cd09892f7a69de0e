"""The options of ``format("gazette")``: parsed from text, and checked. Pure."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from gazette.errors import Invalid
from gazette.history.columns import Malformed, MessageFormat
from gazette.history.snapshot import RUN_BYTES
from gazette.history.snapshot_builder import Selection
from gazette.history.source import NO_SUMMARIES, Access
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.uuid import clock_at
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.ids import validate_journal_name
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.numbers import parse_number
from gazette.spark.message_class import message_class
from gazette.spark.options import Options

T = TypeVar("T")

Isolation = Literal["read_committed", "read_uncommitted"]
Starting = Literal["earliest", "latest"]
Values = Literal["", "json", "csv", "protobuf", "text", "binary"]
MappingName = Literal["", "random", "modulo", "rendezvous"]

CONTENT_TYPE_OF: Final = {
    "json": CONTENT_JSON_LINES,
    "csv": CONTENT_CSV,
    "protobuf": CONTENT_PROTO_FIXED,
}
"""Encoding of messages, for each value that has messages."""

CONNECTION: Final[dict[str, str]] = {
    "broker.address": "address of a broker, or of several, separated by commas",
    "broker.auth_keys": "base64 keys to sign tokens with",
    "broker.auth_token": "token to present",
    "broker.trusted_ca_file": "certificates to verify brokers with (PEM)",
    "broker.cert_file": "certificate to present to brokers (PEM)",
    "broker.cert_key_file": "key of that certificate (PEM)",
    "journal": "name of a journal, or several, separated by commas; also the path of load() and save()",
    "selector": "labels of journals, such as app.gazette.dev/message-type=Word or prefix=topic/",
    "content_type": "content type of journals that have no such label",
    "message": "class of protobuf messages, as module:Class",
    "value": "how to read a message: json, csv, protobuf, text or binary",
}
READ: Final[dict[str, str]] = {
    **CONNECTION,
    "store": "URL of a store to read fragments from without brokers; or several, separated by commas",
    "path_postfix": "path_postfix_template of the journals in the store",
    "file_root": "directory of file:// stores",
    "fsspec_protocols": "protocols that fsspec+NAME:// stores may have, separated by commas",
    "direct": "true: open fragments in their store from here, even where brokers know them",
    "fields": "columns of messages, as in CREATE TABLE: `word string, n long`",
    "columns": "names of the columns to read, separated by commas",
    "meta_prefix": "prefix of the columns journal, offset, uuid, …, where messages have such fields",
    "uuid_field": "name of the JSON field with the UUID; nested fields are joined by dots",
    "isolation": "read_committed or read_uncommitted",
    "acks": "true: also give acknowledgements, as empty messages",
    "mode": (
        "what to do with messages that do not fit the columns: PERMISSIVE, DROPMALFORMED or "
        "FAILFAST"
    ),
    "columnnameofcorruptrecord": "column for the text of such messages, if the schema has it",
    "begin": 'offset to begin at; or of each journal: {"journal": offset}',
    "end": 'offset to end at; or of each journal: {"journal": offset}',
    "begin_time": "time of the first messages: ISO 8601, or Unix seconds",
    "end_time": "time before which messages are read",
    "gaps": "what to do where fragments may not have been stored yet: fail or skip",
    "run_bytes": "number of bytes of a journal that one task reads; at least one fragment",
    "infer_bytes": "number of bytes to read to infer the fields of JSON messages",
    "pushdown": "true: filters leave out fragments, of a DataFrame that is queried once (docs/spark.md)",
    "planning_threads": "number of runs that the driver reads at the same time",
    "summaries": "URL of a store in which to keep summaries of fragments; none: keep none",
    "plan": "made by gazette.spark.read",
}
STREAM: Final[dict[str, str]] = {
    **READ,
    "starting": "earliest or latest: where a new query begins, in journals that begin does not name",
    "max_bytes": "largest number of bytes of a batch; its last fragment may exceed it",
    "max_fragments": "largest number of fragments of a batch",
    "refresh": "seconds between two looks for new messages",
    "producer_horizon": "seconds after which a silent producer is forgotten; 0: never",
}
WRITE: Final[dict[str, str]] = {
    **CONNECTION,
    "mapping": "how to spread messages over several journals: random, modulo or rendezvous",
    "key": "column by which messages are mapped to journals",
    "commits": "directory of the records that keep a commit from being done twice",
    "commit_id": "name of this write in commits; a repeated write has the same name",
    "checkpointlocation": (
        "location of the streaming query's checkpoint: commits are recorded there unless commits "
        "is set"
    ),
}
Mode = Literal["permissive", "dropmalformed", "failfast"]
Gaps = Literal["fail", "skip"]
_MALFORMED: Final[dict[Mode, Malformed]] = {
    "permissive": "null",
    "dropmalformed": "skip",
    "failfast": "fail",
}
_CORRUPT: Final = "_corrupt_record"
_UNIX_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class SourceOptions(Options):
    """Options of journals: of reads, streams and writes."""

    def offsets(self, name: str) -> tuple[int | None, dict[str, int]]:
        """Return an offset for all journals, and offsets by journal."""
        text = self.text(name)
        if not text:
            return None, {}
        hint = 'Give one number, or JSON such as {"topic/part-0": 1024}.'
        try:
            value = json.loads(text)
        except ValueError:
            self.fail(name, "must be an offset, or a JSON object of them", hint)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value, {}
        if not isinstance(value, dict) or not all(
            isinstance(one, int) and not isinstance(one, bool) and one >= 0
            for one in value.values()
        ):
            self.fail(name, "must be an offset, or a JSON object of them", hint)
        return None, value

    def time_ns(self, name: str) -> int | None:
        """Return a time as Unix nanoseconds. One without a zone is UTC."""
        text = self.text(name)
        if not text:
            return None
        try:
            # Do not use floats: they are exact only to a quarter of a microsecond for times of today.
            parse_number(text)
            return int(decimal.Decimal(text) * 10**9)
        except (ArithmeticError, ValueError):
            # Texts that are not numbers, and infinity.
            pass
        try:
            time = datetime.datetime.fromisoformat(text)
        except ValueError:
            self.fail(name, "must be a time", "Give ISO 8601, as 2024-01-31T12:00:00Z, or seconds.")
        if time.tzinfo is None:
            time = time.replace(tzinfo=datetime.UTC)
        return (time - _UNIX_EPOCH) // datetime.timedelta(microseconds=1) * 1000

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
        value = self.choice("value", Values, "")
        message = self.text("message")
        if message and value not in ("", "protobuf", "binary"):
            self.fail("value", "must be protobuf if a message class is given")
        if value == "protobuf" and not message:
            self.fail("message", "must be given for value=protobuf")
        content_type = "protobuf" if message else value
        shape = MessageFormat(
            CONTENT_TYPE_OF.get(content_type, CONTENT_JSON_LINES),
            self.text("uuid_field", "uuid"),
            message,
            _MALFORMED[self.choice("mode", Mode, "permissive")],
        )
        if message:
            try:
                message_class(message)
            except Invalid as error:
                self.fail("message", error.message, error.hint)
        return shape

    def access(self, *, direct: bool) -> Access:
        address = self.text("broker.address")
        if not address and not direct:
            self.fail(
                "broker.address",
                "must be given, or else store" if "store" in self._known else "must be given",
                "Set broker.address, as http://localhost:8080; to read, the URL of a store will do.",
            )
        return Access.of(
            address,
            file_root=self.text("file_root") or ("/" if direct else None),
            auth_keys=self.text("broker.auth_keys"),
            auth_token=self.text("broker.auth_token"),
            trusted_ca_file=self.text("broker.trusted_ca_file"),
            cert_file=self.text("broker.cert_file"),
            cert_key_file=self.text("broker.cert_key_file"),
            direct=direct,
            fsspec_protocols=self.names("fsspec_protocols"),
            summaries=self._summaries(),
        )

    def _summaries(self) -> str:
        url = self.text("summaries")
        return url if url in ("", NO_SUMMARIES) else self.parsed("summaries", _store)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The bytes to read, and how to decode them."""

    access: Access
    selection: Selection
    value: str
    """Empty: as the content type of the journals says."""
    fields: str
    columns: tuple[str, ...]
    meta_prefix: str
    isolation: Isolation
    acks: bool
    clock_begin: int
    clock_end: int | None
    has_mode: bool
    corrupt: str
    """Name of the column for messages that do not fit the others."""
    run_bytes: int
    infer_bytes: int
    pushdown: bool
    threads: int
    plan: str

    @classmethod
    def parse(cls, options: Mapping[str, str], known: Mapping[str, str] = READ) -> ReadOptions:
        """Parse the options. Raise `Invalid`."""
        given = SourceOptions(options, known)
        names = given.names("store")
        stores = given.parsed("store", lambda _: tuple(map(_store, names)))
        direct = given.flag("direct", default=bool(stores))
        if stores and not direct:
            given.fail("direct", "must not be false if a store is given")
        journals, selector = given.journals(), given.selector()
        if bool(journals) == (selector is not None):
            given.fail(
                "journal",
                "give either names of journals, or a selector of them",
                "Set the option journal, or selector (of which brokers know the meaning).",
            )
        if selector is not None and stores:
            given.fail("selector", "is not known by stores: they need the option journal")
        begin_all, begin = given.offsets("begin")
        end_all, end = given.offsets("end")
        for name, by_journal in (("begin", begin), ("end", end)):
            if journals and (unknown := sorted(by_journal.keys() - set(journals))):
                given.fail(name, f"names journals that are not read: {', '.join(unknown)}")
        begin_ns, end_ns = given.time_ns("begin_time"), given.time_ns("end_time")
        if begin_ns is not None and end_ns is not None and end_ns < begin_ns:
            given.fail("end_time", "must not be before begin_time")
        shape = given.shape()
        return cls(
            access=given.access(direct=direct),
            selection=Selection(
                journals=journals,
                selector=selector,
                stores=stores,
                content_type=given.text("content_type"),
                shape=shape,
                path_postfix_template=given.text("path_postfix"),
                begin=begin,
                end=end,
                begin_all=begin_all or 0,
                end_all=end_all,
                begin_time_s=(begin_ns or 0) / 1e9,
                skip_gaps=given.choice("gaps", Gaps, "fail") == "skip",
            ),
            value=given.text("value") or ("protobuf" if shape.message else ""),
            fields=given.text("fields"),
            columns=given.names("columns"),
            meta_prefix=given.text("meta_prefix"),
            isolation=given.choice("isolation", Isolation, "read_committed"),
            acks=given.flag("acks"),
            clock_begin=clock_at(begin_ns) if begin_ns else 0,
            clock_end=None if end_ns is None else clock_at(end_ns),
            has_mode="mode" in given,
            corrupt=given.text("columnnameofcorruptrecord", _CORRUPT),
            run_bytes=given.number("run_bytes", RUN_BYTES, 1),
            infer_bytes=given.number("infer_bytes", 1 << 20, 1),
            pushdown=given.flag("pushdown"),
            threads=given.number("planning_threads", min(8, os.cpu_count() or 1), 1),
            plan=given.text("plan"),
        )

    def inferred(self) -> ReadOptions:
        """Return the options for a schema that was inferred from some of the messages.

        A message that does not fit is then an error, unless a mode is given. Spark infers from all
        messages: the columns would have been others.
        """
        if self.has_mode:
            return self
        shape = replace(self.selection.shape, malformed="fail")
        return replace(self, selection=replace(self.selection, shape=shape))


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Settings of a stream."""

    read: ReadOptions
    starting: Starting
    max_bytes: int | None
    max_fragments: int | None
    refresh_s: float
    horizon_ns: int

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """Parse the options. Raise `Invalid`."""
        given = SourceOptions(options, STREAM)
        for name in ("end", "begin_time", "end_time", "plan"):
            if given.text(name):
                given.fail(name, "is for tables, and not for streams")
        if given.text("max_bytes") and given.text("max_fragments"):
            given.fail("max_fragments", "must not be given with max_bytes")
        return cls(
            ReadOptions.parse(options, STREAM),
            given.choice("starting", Starting, "earliest"),
            given.number("max_bytes", None, 1),
            given.number("max_fragments", None, 1),
            given.number("refresh", 1.0, 0.0, float),
            int(given.number("producer_horizon", 86400.0, 0.0, float) * 1e9),
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Settings of a write."""

    access: Access
    journals: tuple[str, ...]
    selector: LabelSelector | None
    content_type: str
    content_type_unlabelled: str
    """For journals without a label: the content type of the given value, if any."""
    value: str
    message: str
    mapping: MappingName
    key: str
    commits: str
    commit_id: str

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """Parse the options. Raise `Invalid`."""
        given = SourceOptions(options, WRITE)
        journals, selector = given.journals(), given.selector()
        if bool(journals) == (selector is not None):
            given.fail("journal", "give either names of journals, or a selector of them")
        mapping = given.choice("mapping", MappingName, "")
        key = given.text("key")
        if mapping in ("modulo", "rendezvous") and not key:
            given.fail("key", f"must be given for mapping={mapping}")
        if key and mapping in ("", "random"):
            given.fail("mapping", "must be modulo or rendezvous if a key is given")
        commits = given.text("commits")
        checkpoint = given.text("checkpointlocation")
        if streaming and not commits:
            if not checkpoint or (re.match(r"\w+:", checkpoint) and not _is_file(checkpoint)):
                given.fail(
                    "commits",
                    "must be given, since commits cannot be recorded in the checkpoint location "
                    f"({checkpoint or 'which is not an option of this query'})",
                    "Give a directory that the driver has after a restart, too.",
                )
            commits = f"{checkpoint.rstrip('/')}/gazette-commits"
        commit_id = given.text("commit_id")
        if not streaming and bool(commits) != bool(commit_id):
            given.fail("commit_id", "goes together with commits")
        if commit_id and not re.fullmatch(r"[\w.-]+", commit_id):
            given.fail("commit_id", "must be letters, digits, and any of _.-")
        shape = given.shape()
        if given.text("value") in ("text", "binary"):
            given.fail("value", "must be json, csv or protobuf: what is written has a UUID")
        return cls(
            given.access(direct=False),
            journals,
            selector,
            given.text("content_type"),
            shape.content_type if given.text("value") or shape.message else "",
            given.text("value") or ("protobuf" if shape.message else "json"),
            shape.message,
            mapping,
            key,
            re.sub(r"^file:/*", "/", commits),
            commit_id,
        )


def _is_file(url: str) -> bool:
    return url.startswith("file:")


def _store(url: str) -> str:
    url = url if url.endswith("/") or "?" in url else f"{url}/"
    if url.startswith("/"):
        url = f"file://{url}"
    FragmentStoreUrl.parse(url)
    return url


def one_of(names: Iterable[str]) -> str:
    """Return names as text for an error."""
    return ", ".join(sorted(names)) or "none"
