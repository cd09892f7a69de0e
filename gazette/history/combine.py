"""Combines rows of a run in the task that reads it: `Combiner`. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa

from gazette.errors import Invalid

Combine = Callable[[pa.Table], pa.Table]
"""Function that returns fewer, equivalent rows with the same columns, such as a sum for its summands.

The input is any rows of one journal, even results of earlier calls. There may be any number of calls.
"""

_ROWS: Final = 1 << 17
"""Number of collected rows at which rows are combined."""


class Combiner:
    """Combiner of the rows of one run. Without a function, rows pass unchanged."""

    def __init__(self, combine: Combine | None, schema: pa.Schema) -> None:
        self._combine = combine
        self._schema = schema
        self._held: list[pa.RecordBatch] = []
        """Rows that wait, to be combined together with later rows."""
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Add the next rows. Yield the rows that are not held back.

        Raise the errors of the function, and ``Invalid`` if it returns no table, or other columns.
        """
        if self._combine is None:
            yield batch
            return
        self._held.append(batch)
        self._rows += batch.num_rows
        if self._rows >= _ROWS:
            combined = self._together()
            if self._rows > _ROWS // 2:
                # The function removes few rows. Do not hold rows back: each call would process them again.
                yield from combined
                self._held, self._rows = [], 0

    def finish(self) -> Iterator[pa.RecordBatch]:
        """End the run, and yield the remaining rows."""
        if self._combine is not None and self._rows:
            yield from self._together()
        self._held, self._rows = [], 0

    def _together(self) -> list[pa.RecordBatch]:
        """Combine the rows that are held back. Hold back the result in their place, and return it."""
        assert self._combine is not None
        rows: Any = self._combine(pa.Table.from_batches(self._held, self._schema))
        if not isinstance(rows, pa.Table) or not rows.schema.equals(self._schema):
            actual = _columns(rows.schema) if isinstance(rows, pa.Table) else type(rows).__name__
            raise Invalid(
                f"combine() must return a table with the columns of its input, and not {actual}",
                hint=f"Return a pyarrow.Table with {_columns(self._schema)}, in this order.",
            )
        self._held = rows.combine_chunks().to_batches()
        self._rows = rows.num_rows
        return self._held


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
