"""Messages of a source in columns: all decoded messages, and the committed messages. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute

from gazette.consumer.contract.array_pass import MessageRows
from gazette.errors import Bug
from gazette.history.columns import Array64, Columns, uuid_bytes
from gazette.history.meta_columns import META, meta_array
from gazette.history.shard_tables.columns import MessageColumns
from gazette.message.envelope import Envelope, build_envelopes
from gazette.message.framing.frames import Framing
from gazette.protocol.ids import JournalName, Offset

_RUN_MIN: Final = 32
"""Average length of runs of rows from which on it takes less time to copy runs than rows."""


class TableForm(NamedTuple):
    """The form of the tables of one source."""

    journal: JournalName
    framing: Framing[Any]
    message: MessageColumns
    meta: tuple[tuple[str, str], ...]
    """Columns of metadata, which come first: their names, and their keys in `META`."""

    @property
    def schema(self) -> pa.Schema:
        meta = [pa.field(name, META[key]) for name, key in self.meta]
        return pa.schema([*meta, *self.message.schema])

    def meta_arrays(self, columns: Columns, rows: Array64) -> list[pa.Array]:
        """Return the columns of metadata of some messages."""
        return [meta_array(key, self.journal, columns, rows) for _, key in self.meta]


class DecodedRows(Sequence[Envelope[Any]]):
    """Messages of a source as they were decoded, in its order. ``buffer`` begins at offset ``base``."""

    def __init__(
        self,
        form: TableForm,
        columns: Columns,
        arrays: Sequence[pa.Array],
        buffer: bytes,
        base: Offset,
    ) -> None:
        """Make the rows. The ``arrays`` have the fields of messages."""
        self.form = form
        self.columns = columns
        self.arrays = arrays
        self._buffer = buffer
        self._base = base
        self.number = 0
        """Number of the chunk in the order of sequencing."""

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> Envelope[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> DecodedRows: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            return self.part(begin, end)
        return self.envelopes(np.array([range(len(self))[index]]))[0]

    def part(self, begin: int, end: int) -> DecodedRows:
        """Return the messages from position ``begin`` to before ``end``."""
        if begin == 0 and end == len(self):
            return self
        arrays = [array.slice(begin, end - begin) for array in self.arrays]
        return DecodedRows(
            self.form, self.columns.part(begin, end), arrays, self._buffer, self._base
        )

    @property
    def begin(self) -> Offset:
        """Offset of the first message."""
        return int(self.columns.begins[0])

    @property
    def end(self) -> Offset:
        """Offset after the last message."""
        return int(self.columns.ends[-1])

    def arrays_at(self, rows: Array64) -> list[pa.Array]:
        """Return the columns of the table, of some messages."""
        return [*self.form.meta_arrays(self.columns, rows), *_taken(self.arrays, rows)]

    def envelopes(self, rows: Array64) -> Sequence[Envelope[Any]]:
        """Decode messages again, and return their envelopes."""
        part = self.columns.at(rows)
        begins, ends = part.begins.tolist(), part.ends.tolist()
        base, buffer = self._base, self._buffer
        frames = [
            buffer[begin - base : end - base] for begin, end in zip(begins, ends, strict=True)
        ]
        messages = self.form.framing.decode(b"".join(frames), 0).messages
        if len(messages) != len(rows):
            raise Bug("messages that were decoded do not decode again", journal=self.form.journal)
        return build_envelopes(self.form.journal, begins, ends, messages, uuid_bytes(part.uuids))


class Picked(NamedTuple):
    """Some rows of `DecodedRows`, and for each the position of the message that commits it."""

    source: DecodedRows
    rows: Array64
    commit_positions: Array64


class CommittedRows(MessageRows):
    """Committed messages, in the order in which they take effect.

    Message ``i`` is row ``row_numbers[i]`` of ``sources[source_numbers[i]]``. The message at position
    ``commit_positions[i]`` commits it; messages ascend by these positions.
    """

    def __init__(
        self,
        sources: Sequence[DecodedRows],
        source_numbers: Array64,
        row_numbers: Array64,
        commit_positions: Array64,
    ) -> None:
        self._sources = sources
        self._source_numbers = source_numbers
        self._row_numbers = row_numbers
        self.commit_positions = commit_positions
        self._envelopes: dict[int, Envelope[Any]] = {}
        """Envelopes that were asked for: mostly the first and the last."""

    @classmethod
    def of(cls, picked: Sequence[Picked]) -> CommittedRows:
        """Return the rows of all ``picked``, in the order in which they are committed. Rows that
        one message commits keep their order."""
        numbers: dict[int, int] = {}
        sources: list[DecodedRows] = []
        for part in picked:
            if id(part.source) not in numbers:
                numbers[id(part.source)] = len(sources)
                sources.append(part.source)
        if len(picked) == 1:
            (part,) = picked
            return cls(
                sources, np.zeros(len(part.rows), np.int64), part.rows, part.commit_positions
            )
        counts = [len(part.rows) for part in picked]
        source_numbers = np.repeat([numbers[id(part.source)] for part in picked], counts)
        rows = np.concatenate([part.rows for part in picked])
        positions = np.concatenate([part.commit_positions for part in picked])
        order = np.argsort(positions, kind="stable")
        return cls(sources, source_numbers[order], rows[order], positions[order])

    def __len__(self) -> int:
        return len(self._row_numbers)

    @overload
    def __getitem__(self, index: int) -> Envelope[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> CommittedRows: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, int):
            position = range(len(self))[index]
            if position not in self._envelopes:
                source = self._sources[self._source_numbers[position]]
                self._envelopes[position] = source.envelopes(self._row_numbers[[position]])[0]
            return self._envelopes[position]
        part = CommittedRows(
            self._sources,
            self._source_numbers[index],
            self._row_numbers[index],
            self.commit_positions[index],
        )
        if "table" in vars(self):  # The table is made already: share its columns.
            begin, end, _ = index.indices(len(self))
            part.table = self.table.slice(begin, max(0, end - begin))
        return part

    def __iter__(self) -> Iterator[Envelope[Any]]:
        envelopes: list[Any] = [None] * len(self)
        for number, source in enumerate(self._sources):
            places = np.flatnonzero(self._source_numbers == number)
            if len(places):
                decoded = source.envelopes(self._row_numbers[places])
                for place, envelope in zip(places.tolist(), decoded, strict=True):
                    envelopes[place] = envelope
        return iter(envelopes)

    def size_of(self, count: int) -> int:
        source_numbers, rows, size = self._source_numbers[:count], self._row_numbers[:count], 0
        for number, source in enumerate(self._sources):
            picked = rows[source_numbers == number]
            size += int((source.columns.ends[picked] - source.columns.begins[picked]).sum())
        return size

    def begin_of(self, position: int) -> Offset:
        """Return the offset of the message at a position."""
        source = self._sources[self._source_numbers[position]]
        return int(source.columns.begins[self._row_numbers[position]])

    def clock_of(self, position: int) -> int:
        """Return the clock of the message at a position."""
        source = self._sources[self._source_numbers[position]]
        return int(source.columns.uuids.clocks[self._row_numbers[position]])

    @cached_property
    def table(self) -> pa.RecordBatch:
        """The messages as a batch of Arrow."""
        places, parts = [], []
        for number, source in enumerate(self._sources):
            at = np.flatnonzero(self._source_numbers == number)
            if len(at):
                places.append(at)
                parts.append(source.arrays_at(self._row_numbers[at]))
        schema = self._sources[0].form.schema
        if len(parts) == 1:
            return pa.RecordBatch.from_arrays(parts[0], schema=schema)
        order = pa.array(np.argsort(np.concatenate(places)))
        arrays = [pa.concat_arrays(column).take(order) for column in zip(*parts, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def distinct(self, attribute: str) -> Sequence[Hashable] | None:
        form = self._sources[0].form
        for column in form.message.columns:
            if column.attribute == attribute and column.is_key:
                array = self.table.column(self.table.schema.get_field_index(column.name))
                values: list[Hashable] = pa.compute.unique(array).to_pylist()
                return values
        return None


def _taken(arrays: Sequence[pa.Array], rows: Array64) -> list[pa.Array]:
    """Return some rows of columns. Do not copy consecutive rows, and copy long runs of them at once."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    if not len(cuts):
        return [array.slice(int(rows[0]), len(rows)) for array in arrays]
    if len(cuts) * _RUN_MIN < len(rows):
        begins = [0, *cuts.tolist()]
        runs = [(int(rows[begin]), end - begin) for begin, end in pairwise([*begins, len(rows)])]
        return [pa.concat_arrays([array.slice(*run) for run in runs]) for array in arrays]
    index = pa.array(rows)
    return [array.take(index) for array in arrays]
