"""Puts rows of a run together before they leave the task that reads it: `Combiner`. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa

from gazette.errors import Invalid

Combine = Callable[[pa.Table], pa.Table]
"""Gives fewer rows with the same columns, which mean the same: a sum for summands. It is given any rows of
one journal, any number of times, also such as it has given."""

_ROWS: Final = 1 << 17
"""So many rows are put together at once."""


class Combiner:
    """For the rows of one run. Without a function rows pass as they are."""

    def __init__(self, combine: Combine | None, schema: pa.Schema) -> None:
        self._combine = combine
        self._schema = schema
        self._held: list[pa.RecordBatch] = []
        self._rows = 0

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The next rows; gives what is not held. Raises ``Invalid``, and what the function does."""
        if self._combine is None:
            yield batch
            return
        self._held.append(batch)
        self._rows += batch.num_rows
        if self._rows >= _ROWS:
            together = self._together()
            if self._rows > _ROWS // 2:
                # It helps little: what is held would be gone through again and again.
                yield from together
                self._held, self._rows = [], 0

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The run has ended; gives what is left."""
        if self._combine is not None and self._rows:
            yield from self._together()
        self._held, self._rows = [], 0

    def _together(self) -> list[pa.RecordBatch]:
        assert self._combine is not None
        made: Any = self._combine(pa.Table.from_batches(self._held, self._schema))
        if not isinstance(made, pa.Table) or not made.schema.equals(self._schema):
            found = made.schema.to_string() if isinstance(made, pa.Table) else type(made).__name__
            raise Invalid(
                f"combine() gave something else than a table of the columns that it was given ({found})",
                hint=f"Give a pyarrow.Table with these columns, in this order: {self._schema.to_string()}",
            )
        self._held = made.combine_chunks().to_batches()
        self._rows = made.num_rows
        return self._held
