"""Reads committed messages of journals as tables of Arrow: `read_table` and `read_batches`.

The first call imports the packages of the extra ``tables``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from gazette.errors import not_installed
from gazette.history.table_options import TableOptions

if TYPE_CHECKING:
    import pyarrow as pa


def read_table(journals: str | Sequence[str] = (), **options: Unpack[TableOptions]) -> pa.Table:
    """Return the committed messages of journals as a table of Arrow, in memory.

    ``journals`` is one name, or several names; or give a ``selector`` and no names. The table has the
    messages that a consumer would get, once each, up to the heads at the time of the call. Rows are in
    order of journal and offset. See `read_batches` for errors, and for journals larger than memory.
    """
    return read_batches(journals, **options).read_all()


def read_batches(
    journals: str | Sequence[str] = (), **options: Unpack[TableOptions]
) -> pa.RecordBatchReader:
    """Return the committed messages of journals as a stream of record batches, in bounded memory.

    This call reads the journals once, to find which messages have committed; not with ``read_uncommitted``.
    The reader reads the journals again while its batches are taken. It holds some megabytes, and at most
    ``part_bytes`` after an open transaction. A reader yields its batches once. Use it in one thread at a
    time.

    Blocks: on an event loop, call it by ``asyncio.to_thread``. ``KeyboardInterrupt`` ends the call at once.

    Raise ``Invalid`` for wrong options, or without the extra ``tables``. Raise ``NotFound`` for a missing
    journal. Raise ``Unavailable`` if brokers are not reached, or do not answer. Raise ``NotYet`` for missing
    bytes that may still come, and ``Corrupt`` for lost bytes that are not skipped. Raise ``Unfit`` or
    ``MalformedMessage`` for a message that does not fit. The reader, too, raises errors of reading.
    """
    return _implementation().TableRead.parse(journals, options).batches()


def _implementation() -> Any:
    try:
        from gazette.history import table_read
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "pyarrow":
            raise not_installed("reading journals as tables", "pyarrow", "tables") from error
        raise
    return table_read
