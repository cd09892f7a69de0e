"""Messages of a run with some of their fields, found by one pass over its bytes. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from gazette.history.columns import Columns
from gazette.history.field_arrays import arrow_arrays, scannable
from gazette.history.read import Batch, read_columns
from gazette.history.snapshot import Run
from gazette.history.source import OpenAccess


class ScannedBatch(NamedTuple):
    """Messages as columns, with their fields as arrays, or with the bytes if these are still to be
    parsed.
    """

    columns: Columns
    arrays: list[pa.Array] | None
    batch: Batch | None


def scanned_batches(access: OpenAccess, run: Run, fields: pa.Schema) -> Iterator[ScannedBatch]:
    """Yield all messages of a run, with fields that are of plain types and lie plainly in JSON.

    Raise what `read_columns` raises.
    """
    # The scanner parses the UUID and does not return its text.
    wanted = () if run.shape.uuid_field in fields.names else scannable(fields)
    for batch in read_columns(access, run, wanted):
        arrays = None if batch.fields is None else arrow_arrays(batch.fields, fields)
        yield ScannedBatch(batch.columns, arrays, batch if arrays is None else None)
