"""The parts of a sink: a task's `publish`, and the driver's `commit` and `roll_back`.

Every attempt of every task is a producer, which leaves its messages pending. The attempt sends the driver
the acknowledgements that commit its messages or roll them back: only the driver knows which attempt has won.
The driver records acknowledgements before it appends them. So a repeated commit appends the same
acknowledgements. A second append of an acknowledgement has no effect.
"""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from gazette.blobs.file import write_durably
from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.errors import GazetteError, Invalid, Unavailable
from gazette.history.backfill.staging import decoded
from gazette.history.snapshot_builder import journal_specs
from gazette.history.source import OpenAccess
from gazette.history.spark.source.options import WriteOptions
from gazette.history.table_columns import CONTENT_TYPE_OF
from gazette.labels import (
    CONTENT_CSV,
    CONTENT_JSON_LINES,
    CONTENT_PROTO_FIXED,
    CONTENT_TYPE,
    MESSAGE_TIME,
    MESSAGE_UUID,
)
from gazette.message import mapping as mappings
from gazette.message.keys import no_key
from gazette.message.mapping import Partition, Partitions
from gazette.message.publisher import Publisher
from gazette.message.publishing.outputs import (
    Choice,
    MappingName,
    choice_by_labels,
    choice_of_named,
)
from gazette.message.uuid import ProducerId
from gazette.message.uuid_place import DEFAULT_PLACE
from gazette.protocol.ids import JournalName
from gazette.protocol.text.validation import within
from gazette.runtime.failpoints import hit, reach
from gazette.runtime.tasks import await_future

log = logging.getLogger(__name__)

_RECORDS_KEPT: Final = 100
"""Number of records that are kept for a query. Spark repeats only the last batch of a query."""

_NAMES_SHOWN: Final = 5
_OTHER_VALUES: Final = {
    CONTENT_JSON_LINES: "Set value to json.",
    CONTENT_CSV: "Set value to csv.",
    CONTENT_PROTO_FIXED: "Set message to the class of its messages, as module:Class.",
}

Message = Any
Keyed = tuple[Any, Message]
"""The value of the column that maps a message (None without such a column), and the message. With
``journalColumn``, the value is the name of the journal."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Messages that an attempt of a task has published: by journal, bytes that commit or roll them back."""

    producer: ProducerId
    commits: Mapping[JournalName, bytes]
    rolls_back: Mapping[JournalName, bytes]
    rows: int
    query: str = ""


def publish(
    access: OpenAccess, options: WriteOptions, batches: Iterable[Sequence[Keyed]], query: str = ""
) -> Attempt:
    """Publish messages as a new producer, pending. Return when they are in their journals.

    After a failure, roll back the messages, if possible, and raise the failure.
    """
    service = access.run(_service(access))
    try:
        partitions = access.run(_partitions(access, options))
        return _Publishing(access, service, options, partitions).run(batches, query)
    finally:
        access.run(service.close())


async def _service(access: OpenAccess) -> AppendService:
    return AppendService(await access.client())


async def _partitions(access: OpenAccess, options: WriteOptions) -> Partitions:
    """Return the journals of the options. Raise `Invalid` for a journal without a content type, or with
    another content type than the messages."""
    specs = await journal_specs(access, options.journals, options.selector)
    partitions = []
    ordered = sorted(specs, key=lambda spec: spec.name)
    for spec in ordered:
        content_type = (
            options.content_type
            or spec.labels.value_of(CONTENT_TYPE)
            or options.content_type_unlabelled
        )
        if not content_type:
            raise Invalid(
                f"journal {spec.name} has no label content-type",
                path="option contentType",
                hint="Label the journal, or set the option to application/x-ndjson.",
            )
        expected_type = CONTENT_TYPE_OF[options.value]
        if content_type != expected_type:
            raise Invalid(
                f"journal {spec.name} holds {content_type}, and not {expected_type}",
                path="option value",
                hint=_OTHER_VALUES.get(content_type, "Choose another journal."),
            )
        uuid, time = (spec.labels.value_of(name) or "" for name in (MESSAGE_UUID, MESSAGE_TIME))
        partition = Partition(spec.name, content_type, uuid=uuid, time=time)
        with within("option uuidField"):
            partitions.append(partition.with_uuid(options.shape.uuid_field))
    return Partitions(partitions, [spec.labels for spec in ordered])


def _with_place(message: Message, partition: Partition) -> Message:
    """Return the message of a row, with the UUID as the first field: there readers find it fastest."""
    if isinstance(message, dict) and partition.uuid in ("", DEFAULT_PLACE):
        return {DEFAULT_PLACE: "", **message}
    return message


class _Publishing:
    """One attempt of a task."""

    def __init__(
        self,
        access: OpenAccess,
        service: AppendService,
        options: WriteOptions,
        partitions: Partitions,
    ) -> None:
        self._access = access
        self._service = service
        self._publisher = Publisher.standalone(service, access.clock, random.SystemRandom())
        self._publisher.clock.update(int(access.clock.now() * 1e9))
        self._begin_clock = self._publisher.clock.value
        self._options = options
        self._partitions = partitions
        self._choose = choice_of(options, partitions)
        self._rolls_back: Mapping[JournalName, bytes] = {}

    def run(self, batches: Iterable[Sequence[Keyed]], query: str) -> Attempt:
        """Publish all messages, and wait until they are appended. After a failure, roll them back."""
        publisher, rows = self._publisher, 0
        try:
            for batch in batches:
                rows += len(batch)
                self._require_journals(batch)
                for key, message in batch:
                    partition = self._choose(message, key)
                    message = _with_place(message, partition)
                    publisher.publish_uncommitted(mappings.fixed_mapping(*partition), message)
            self._rolls_back = publisher.build_rollbacks(self._begin_clock)
            intents = publisher.build_ack_intents()
            self._access.run(self._appended())
            hit("sink.published", publisher.producer.hex())
        except BaseException:
            self._give_up()
            raise
        return Attempt(publisher.producer, intents, self._rolls_back, rows, query)

    def _require_journals(self, batch: Sequence[Keyed]) -> None:
        """Raise `Invalid` if a row names a journal that is not selected."""
        column = self._options.journal_column
        if not column:
            return
        selected = {partition.journal for partition in self._partitions.all}
        if unknown := {name for name, _ in batch} - selected:
            name = min(unknown, key=str)
            problem = "a row names no journal" if name is None else f"a row names journal {name!r}"
            raise Invalid(
                f"{problem} in the column {column}, and the options name {_some_of(selected)}",
                path="option journalColumn",
                hint="Correct the rows or leave them out, or name that journal by journal or selector.",
            )

    async def _appended(self) -> None:
        """Wait until all appends of the service are done. Raise the error of one that fails."""
        for future in self._service.pending_except(""):
            await await_future(future)

    def _give_up(self) -> None:
        """Roll back the messages. If that fails, too, only log it: the caller raises the first failure."""

        async def append() -> None:
            rolls_back = self._rolls_back or self._publisher.build_rollbacks(self._begin_clock)
            for journal, content in rolls_back.items():
                self._service.append(AppendParams(journal), content)
            await self._appended()

        try:
            self._access.run(append())
        except GazetteError as error:
            # Readers keep the messages pending until they forget the producer.
            log.warning(
                "messages of a failed task could not be rolled back: %(error)s", {"error": error}
            )


def choice_of(options: WriteOptions, partitions: Partitions) -> Choice:
    """Return the function from a message and the value of its mapping column to a partition.

    The journal is the one in ``journal_column``, or the only one. Otherwise it follows from the key: if a
    declaration has made the journals, their labels name the key. Without any key, the journal is random.
    Raise ``Invalid`` for a journal whose labels name a key, and whose name is not that of a partition.
    """
    if options.journal_column:
        by_name = {
            partition.journal: choice_of_named(partition, labels)
            for partition, labels in zip(partitions.all, partitions.labels, strict=True)
        }
        return lambda message, name: by_name[name](message, None)
    if len(partitions.all) == 1 and partitions.labels:
        choose = choice_of_named(partitions.all[0], partitions.labels[0])
    else:
        mapping: MappingName = "rendezvous" if options.mapping == "rendezvous" else "modulo"
        choose = choice_by_labels(lambda: partitions, mapping, random.Random())
    return partial(_choose_by_column, choose, options.key) if options.key else choose


def _choose_by_column(choose: Choice, column: str, message: Message, key: Any) -> Partition:
    if key is None:
        raise no_key(
            key, f"the column {column} is null", "Leave such rows out, or give them a key."
        )
    return choose(message, key)


def _some_of(names: Collection[str]) -> str:
    """Return some names, as text for an error."""
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
    hidden = len(names) - _NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown


# These functions run on the driver:


def commit(
    access: OpenAccess, attempts: Sequence[Attempt], commits: str = "", name: str = ""
) -> None:
    """Commit the messages of these attempts. Repeated calls have the same effect.

    With ``commits`` (a directory), first record the acknowledgements there as ``name``. An existing record
    is the decision: append its acknowledgements again, and roll back attempts that it lacks. Raise
    ``Unavailable`` if the record cannot be written or no broker answers: then call this function again.
    """
    attempts = [attempt for attempt in attempts if attempt.rows]
    acknowledgements = [dict(attempt.commits) for attempt in attempts]
    if commits:
        record = _Record(Path(commits), name)
        hit("sink.deciding", name)
        winners = record.decide({a.producer.hex(): dict(a.commits) for a in attempts})
        acknowledgements = list(winners.values())
        hit("sink.decided", name)
        roll_back(access, [a for a in attempts if a.producer.hex() not in winners])
    _append(access, _joined(acknowledgements))
    hit("sink.committed", name)


def abort(
    access: OpenAccess, attempts: Iterable[Attempt], commits: str = "", name: str = ""
) -> None:
    """Roll back the messages of these attempts, except those that the record ``name`` commits.

    Spark also aborts a write whose commit has failed. The next commit with that name then appends the
    acknowledgements of the record: they must find their messages pending. Errors: those of `commit`.
    """
    winners = (_Record(Path(commits), name).load() or {}) if commits else {}
    roll_back(access, [attempt for attempt in attempts if attempt.producer.hex() not in winners])


def batch_name(query: str, batch: int) -> str:
    """Return the name of the record of a query's batch."""
    return f"{query}-{batch}"


def tidy(commits: str, query: str, batch: int) -> None:
    """Remove old records of a query: Spark does not repeat the batches of these records."""
    for path in Path(commits).glob(f"{query}-*.json"):
        stem_query, _, number = path.stem.rpartition("-")
        if stem_query == query and number.isdecimal() and int(number) < batch - _RECORDS_KEPT:
            path.unlink(missing_ok=True)


def roll_back(access: OpenAccess, attempts: Iterable[Attempt]) -> None:
    """Roll back the messages of these attempts. Raise ``Unavailable`` if no broker answers an append."""
    _append(access, _joined([attempt.rolls_back for attempt in attempts if attempt.rows]))


def _joined(contents: Iterable[Mapping[JournalName, bytes]]) -> dict[JournalName, bytes]:
    joined: dict[JournalName, bytes] = {}
    for by_journal in contents:
        for journal, content in by_journal.items():
            joined[journal] = joined.get(journal, b"") + content
    return joined


def _append(access: OpenAccess, contents: Mapping[JournalName, bytes]) -> None:
    """Append the content of each journal, in one append."""

    async def append() -> None:
        client = await access.client()
        for journal, content in contents.items():
            await client.append(AppendParams(journal), content)
            await reach("sink.acknowledged", journal, access.clock)

    if contents:
        access.run(append())


@dataclass(slots=True)
class _Record:
    """The acknowledgements of one commit, as a file that is written once."""

    directory: Path
    name: str
    _path: Path = field(init=False)

    def __post_init__(self) -> None:
        self._path = self.directory / f"{self.name}.json"

    def decide(
        self, commits: Mapping[str, Mapping[JournalName, bytes]]
    ) -> dict[str, dict[JournalName, bytes]]:
        """Record the commits, unless there is a record already. Return the commits of the record. Raise
        ``Unavailable`` if the disk refuses, or the new record is gone."""
        if (recorded := self.load()) is not None:
            return recorded
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Do not replace the record of another driver.
            content = io.BytesIO(msgspec.json.encode(commits, order="sorted"))
            write_durably(str(self._path), content, replace=False)
        except OSError as error:
            raise Unavailable(
                f"a commit cannot be recorded in {self.directory}: {error.strerror}",
                hint="Set the option commits to a directory that can be written, and that stays.",
            ) from error
        recorded = self.load()
        if recorded is None:
            raise Unavailable("a commit that was recorded is gone", file=self._path)
        return recorded

    def load(self) -> dict[str, dict[JournalName, bytes]] | None:
        """Return the recorded commits; None without a record. Raise ``Unavailable`` if the disk refuses, and
        ``Corrupt`` for a damaged record."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"cannot read {self._path}: {error.strerror}") from error
        record_type = dict[str, dict[str, bytes]]
        return decoded(data, record_type, "the record of a commit", file=self._path)
