"""Committed messages of journals as tables of Arrow: `read_table` and `read_batches`.

The packages of the extra ``tables`` are imported at the first call.
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

    ``journals`` is one name, or several; or give a ``selector``. The table has the messages that a
    consumer would have been given, once each, up to the heads as of the call. Journals ascend by
    name, and the messages of each by offset. `read_batches` has the errors, and does not hold all.
    """
    return read_batches(journals, **options).read_all()


def read_batches(
    journals: str | Sequence[str] = (), **options: Unpack[TableOptions]
) -> pa.RecordBatchReader:
    """Return the committed messages of journals as a stream of record batches, in bounded memory.

    This call reads the journals once, for what has committed. The reader then reads them again, as
    its batches are taken. It holds some megabytes, and at most ``part_bytes`` behind a transaction
    that is open. A reader is for one pass and one thread at a time.

    Blocks, also within a running event loop: call it by ``asyncio.to_thread`` there if others must
    go on. ``KeyboardInterrupt`` ends it at once.

    Raise ``Invalid`` for options that cannot be right, or without the extra ``tables``. Raise
    ``NotFound`` for a journal that does not exist. Raise ``Unavailable`` if brokers cannot be reached,
    or do not answer. Raise ``NotYet`` for a gap that may be filled. Raise ``Unfit`` or
    ``MalformedMessage`` for a message that does not fit.
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
