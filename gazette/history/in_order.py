"""Committed messages of journals, read by one thread from begin to end, in bounded memory.

Tasks of a cluster read runs, and a run ends where a fragment ends. A fragment may be larger than memory, and
an open transaction holds back all later messages of its run. Here one thread reads a whole journal twice, in
parts. A part may end at any message, even inside a fragment. So at most one part is held back. The fold and
the two passes treat a part as a run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from gazette.errors import Bug
from gazette.history.columns import require_uuids
from gazette.history.first_pass import resolver
from gazette.history.merge import CommittedRun, fold
from gazette.history.read import RunReader
from gazette.history.row_format import RowFormat
from gazette.history.rows import read_parts, read_rows
from gazette.history.snapshot import JournalSnapshot, Run, Snapshot, cover
from gazette.history.source import OpenAccess
from gazette.history.summary import Summariser, Summary
from gazette.protocol.ids import Offset

PART_BYTES: Final = 16 << 20
"""Bytes of a part. An open transaction holds back at most about as many bytes in memory."""


def fold_in_order(
    access: OpenAccess, snapshot: Snapshot, part_bytes: int = PART_BYTES
) -> tuple[CommittedRun, ...]:
    """Do the first pass over journals, one after the other. Return the parts of all journals.

    The snapshot must have no states of producers at its begin. Raise `Invalid` if UUIDs are unknown. Raise
    the errors of `RunReader.batches`.
    """
    parts: list[Run] = []
    summaries: list[Summary] = []
    for journal in snapshot.journals:
        if journal.producers:
            raise Bug("a snapshot that continues a checkpoint is not read in order")
        require_uuids(journal.journal, journal.shape)
    for journal in snapshot.journals:
        for part, summary in _summaries(access, journal, part_bytes):
            parts.append(replace(part, number=len(parts)))
            summaries.append(summary)
    return fold(snapshot, parts, summaries, resolver(access)).runs


def _summaries(
    access: OpenAccess, journal: JournalSnapshot, part_bytes: int
) -> Iterator[tuple[Run, Summary]]:
    """Yield the parts of a journal. Each part ends with a message, and the last one at the journal's end."""
    if not journal.pieces:
        return
    run = _whole(journal)
    begin, size = run.pieces[0].begin, 0
    summariser = Summariser(run)
    for batch in RunReader(access, run).batches():
        summariser.add(batch.columns)
        end = int(batch.columns.ends[-1])
        size += end - int(batch.columns.begins[0])
        if size >= part_bytes and end < run.end:
            yield _part(run, begin, end), summariser.summary()
            begin, size, summariser = end, 0, Summariser(run)
    yield _part(run, begin, run.end), summariser.summary()


def rows_in_order(
    access: OpenAccess,
    journal: JournalSnapshot,
    parts: Sequence[CommittedRun],
    format: RowFormat,
) -> Iterator[pa.RecordBatch]:
    """Do the second pass over all parts of a journal. Yield committed rows, by offset.

    Skip the first parts and the last parts that have no wanted message. Raise the errors of `read_rows`.
    """
    positions = [position for position, part in enumerate(parts) if format.selects(part)]
    if not positions:
        return
    parts = parts[positions[0] : positions[-1] + 1]
    # Join the pieces of parts again, so that each fragment is decompressed only once.
    pieces = cover(journal.pieces, parts[0].run.pieces[0].begin, parts[-1].run.end)
    run = replace(_whole(journal), pieces=pieces, last=parts[-1].run.last)
    yield from read_parts(access, run, parts, format)


def every_row_in_order(
    access: OpenAccess, journal: JournalSnapshot, format: RowFormat
) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a journal, committed or not, by offset. Raise the errors of `read_rows`."""
    if journal.pieces:
        yield from read_rows(access, _whole(journal), format)


def _whole(journal: JournalSnapshot) -> Run:
    """Return a journal's snapshot as one run."""
    return Run(journal.journal, journal.shape, 0, journal.pieces, journal.begin)


def _part(run: Run, begin: Offset, end: Offset) -> Run:
    """Return the part ``[begin, end)`` of a journal as a run. Bisect its pieces, which may be many."""
    first = bisect_right(run.pieces, begin, key=lambda piece: piece.end)
    last = bisect_left(run.pieces, end, key=lambda piece: piece.begin)
    pieces = cover(run.pieces[first:last], begin, end)
    return replace(run, pieces=pieces, last=end == run.end)
