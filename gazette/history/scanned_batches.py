"""Messages of a run with some of their fields, found by one pass over its bytes. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

from gazette.history.columns import Columns
from gazette.history.field_arrays import ArrowColumns, FieldsBuilder
from gazette.history.read import Batch, read_columns
from gazette.history.row_format import RowFormat
from gazette.history.snapshot import Run
from gazette.history.source import OpenAccess


class ScannedBatch(NamedTuple):
    """Messages as columns, with their fields as arrays.

    ``batch`` holds the bytes if fields of some messages, or of all, are still to be parsed.
    """

    columns: Columns
    arrays: ArrowColumns | None
    batch: Batch | None

    def part(self, first: int, last: int) -> Self:
        """Return the messages from position ``first`` to before ``last``."""
        arrays = None if self.arrays is None else self.arrays.part(first, last)
        batch = None if self.batch is None else self.batch.part(first, last)
        return self._replace(columns=self.columns.part(first, last), arrays=arrays, batch=batch)


def scanned_batches(access: OpenAccess, run: Run, format: RowFormat) -> Iterator[ScannedBatch]:
    """Yield all messages of a run, with the fields of JSON that one pass finds.

    Raise what `read_columns` raises.
    """
    builder = FieldsBuilder(format.scanned, format.encode_variant)
    for batch in read_columns(access, run, builder.fields):
        yield scanned_batch(builder, batch)


def scanned_batch(builder: FieldsBuilder, batch: Batch) -> ScannedBatch:
    """Return a batch with its fields as arrays, if the pass that read it has found them."""
    arrays = None if batch.fields is None else builder.arrays(batch.fields)
    parsed = arrays is not None and arrays.rest is None
    return ScannedBatch(batch.columns, arrays, None if parsed else batch)
