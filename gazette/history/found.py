"""The messages of a run with some of their fields, found by one pass over its bytes. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from gazette.history.access import OpenAccess
from gazette.history.columns import Columns
from gazette.history.field_arrays import arrow_arrays, scannable
from gazette.history.read import Batch, read_columns
from gazette.history.snapshot import Run


class FoundBatch(NamedTuple):
    """Messages as columns, and their fields as arrays; or the bytes, if they are still to be parsed."""

    columns: Columns
    arrays: list[pa.Array] | None
    batch: Batch | None


def found_batches(access: OpenAccess, run: Run, fields: pa.Schema) -> Iterator[FoundBatch]:
    """All messages of a run, with those fields where they are of plain types, and lie in JSON plainly.

    Raises what `read_columns` does.
    """
    # The text of the UUID is not among what is found.
    wanted = () if run.shape.uuid_field in fields.names else scannable(fields)
    for batch in read_columns(access, run, wanted):
        arrays = None if batch.fields is None else arrow_arrays(batch.fields, fields)
        yield FoundBatch(batch.columns, arrays, batch if arrays is None else None)
