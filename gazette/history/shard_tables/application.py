"""Applications whose shards consume tables of Arrow: `TableApplication`. Needs pyarrow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa

from gazette.consumer.application import Application, MessageProducer, Shard, Store
from gazette.consumer.contract.array_pass import ArrayPass
from gazette.consumer.contract.callbacks import require_none
from gazette.consumer.declare.message_types import content_type_of
from gazette.consumer.transaction.shard_timers import declared_times, defines_timers
from gazette.errors import Invalid, InvalidValue
from gazette.history.columns import Columns
from gazette.history.json_lines import kernel
from gazette.history.meta_columns import META
from gazette.history.row_format import require_distinct
from gazette.history.rows import ROW_ERRORS
from gazette.history.shard_tables.columns import MessageColumns
from gazette.history.shard_tables.decoder import TableDecoder
from gazette.history.shard_tables.rows import CommittedRows, TableForm
from gazette.history.shard_tables.sequencer import RING_MESSAGE_BYTES, TableSequencer
from gazette.message.envelope import Envelope
from gazette.message.framing.frames import Framing
from gazette.message.framing.framing import framing_of
from gazette.message.publisher import Publisher
from gazette.message.uuid import UuidArrays
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset, split_journal_meta
from gazette.protocol.journal import JournalSpec

StoreT = TypeVar("StoreT", bound=Store)


class TableApplication(Application[StoreT]):
    """An application whose shards consume tables: implement ``new_store`` and ``consume_table``.

    Messages become tables without one object for each message. All other callbacks, and all guarantees, are
    those of `Application`. Messages need a declared type with fields.
    """

    batch_callback = "consume_table"

    table_meta: ClassVar[Sequence[str]] = ("journal", "offset")
    """Columns of metadata: some of journal, offset, uuid, producer, clock, timestamp and flags."""
    meta_prefix: ClassVar[str] = ""
    """Prefix of these columns, such as ``_``, if messages have fields of the same names."""

    @abstractmethod
    def consume_table(
        self, shard: Shard, store: StoreT, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        """Handle some committed messages of one source, each of which is a row, in order.

        The columns are those of ``table_meta``, then the fields of the messages' type. A table is never
        empty. It has the messages that one read of the source committed: about 1 MiB, and pending ones. These
        have at most 4 KiB for each message of the shard's ``ring_buffer_size`` (32 MiB). Errors and
        ``DeferToNextTransaction`` have the meanings that they have in ``consume_messages``.
        """

    def consume_message(
        self, shard: Shard, store: StoreT, envelope: Envelope[Any], publisher: Publisher
    ) -> None:
        """Handle one message, as a table with one row."""
        self.consume_messages(shard, store, (envelope,), publisher)

    def consume_messages(
        self,
        shard: Shard,
        store: StoreT,
        batch: Sequence[Envelope[Any]],
        publisher: Publisher,
    ) -> None:
        """Call ``consume_table`` with the messages of each source."""
        if isinstance(batch, CommittedRows):
            tables = [batch.table]
        else:
            tables = [
                self._table(journal, list(envelopes))
                for journal, envelopes in groupby(batch, lambda envelope: envelope.journal)
            ]
        for table in tables:
            result: object = self.consume_table(shard, store, table, publisher)
            require_none("consume_table", result)

    def array_pass(self, shard: Shard) -> ArrayPass | None:
        """Return the pass over columns. None for timers, declared times and a `MessageProducer`: these need
        envelopes.

        Raise ``Invalid`` with ``deliver_acks``, since acknowledgements are no rows.
        """
        if self.deliver_acks:
            raise Invalid(
                f"{type(self).__name__} consumes tables, which have no acknowledgements",
                path="deliver_acks",
                hint="Leave deliver_acks out, or implement consume_messages of an Application.",
            )
        if defines_timers(self) or isinstance(self, MessageProducer):
            return None
        if declared_times(self, shard):
            return None
        return _ShardTables(self.table_meta, self.meta_prefix)

    def _table(self, journal: JournalName, envelopes: Sequence[Envelope[Any]]) -> pa.RecordBatch:
        """Return messages as a table. Raise ``InvalidValue`` for a value that is beyond its column."""
        spec = JournalSpec(split_journal_meta(journal)[0])
        message_type = self.message_type_of(spec)
        place = self.uuid_place_of(spec)
        framing = framing_of(content_type_of(message_type), message_type, place=place)
        form = _form(journal, framing, self.table_meta, self.meta_prefix)
        columns = Columns(
            np.array([envelope.begin for envelope in envelopes], np.int64),
            np.array([envelope.end for envelope in envelopes], np.int64),
            UuidArrays(
                *np.array(
                    [
                        (int.from_bytes(each.producer, "big"), each.clock, each.flags)
                        for each in envelopes
                    ],
                    np.uint64,
                ).T
            ),
        )
        try:
            fields = form.message.arrays([envelope.message for envelope in envelopes])
        except ROW_ERRORS as error:
            raise InvalidValue(f"a message does not fit the columns of a table: {error}") from error
        arrays = [*form.meta_arrays(columns, np.arange(len(columns))), *fields]
        return pa.RecordBatch.from_arrays(arrays, schema=form.schema)


class _ShardTables:
    """The array pass of an application's shards."""

    chunk_bytes = 1 << 20

    def __init__(self, meta: Sequence[str], prefix: str) -> None:
        self._meta = meta
        self._prefix = prefix

    def prepare(self) -> None:
        kernel()

    def new_decoder(
        self, journal: JournalName, framing: Framing[Any], offset: Offset
    ) -> TableDecoder:
        return TableDecoder(_form(journal, framing, self._meta, self._prefix), offset)

    def new_sequencer(
        self, sources: Mapping[JournalName, SourceCheckpoint], ring_size: int
    ) -> TableSequencer:
        return TableSequencer(sources, ring_size * RING_MESSAGE_BYTES)


def _form(
    journal: JournalName, framing: Framing[Any], meta: Sequence[str], prefix: str
) -> TableForm:
    """Return the form of a source's tables. Raise `Invalid` if its columns are unknown, or not distinct."""
    if unknown := set(meta) - META.keys():
        raise Invalid(
            f"there are no such columns of metadata: {', '.join(sorted(unknown))} "
            f"(there are {', '.join(META)})",
            path="table_meta",
        )
    form = TableForm(
        journal, framing, MessageColumns(framing), tuple((f"{prefix}{key}", key) for key in meta)
    )
    require_distinct(form.schema)
    return form
