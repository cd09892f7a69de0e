"""Readers of runs: their messages as columns, their summaries, and committed messages as
envelopes.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from gazette.errors import Bug
from gazette.history.columns import Array64, ColumnDecoder, Columns, require_uuids, uuid_bytes
from gazette.history.commit_filter import CommitFilter, Mask
from gazette.history.json_lines import Field, FieldColumn
from gazette.history.merge import CommittedRun, FoldedSnapshot, fold_snapshot
from gazette.history.snapshot import RUN_BYTES, Run, Snapshot
from gazette.history.source import Access, OpenAccess
from gazette.history.summary import RunSummary, first_beyond, summarise
from gazette.message.envelope import Envelope, build_envelopes
from gazette.message.framing.frames import (
    FRAME_BYTES_MAX,
    Framing,
    MalformedMessage,
    TruncatedFrame,
)
from gazette.message.framing.framing import framing_of
from gazette.protocol.ids import JournalName, Offset

T = TypeVar("T")

_THREADS: Final = 2


class Batch(NamedTuple):
    """Messages as columns, with the bytes that hold them. The first byte is at offset ``base``.

    ``fields`` are the wanted fields, if the same pass found them.
    """

    columns: Columns
    buffer: bytes
    base: Offset
    fields: tuple[FieldColumn, ...] | None = None


def read_columns(access: OpenAccess, run: Run, fields: Sequence[Field] = ()) -> Iterator[Batch]:
    """Yield all messages of a run, in order, committed or not. Find ``fields`` in the same pass if
    possible.

    Raise what `OpenAccess.chunks` raises, and `MalformedMessage`. Raise `TruncatedFrame` for a
    message that continues in the next run: use larger runs then. An incomplete message at the end
    of the last run of a journal is left out.
    """
    decoder = ColumnDecoder(run.journal, run.shape, fields)
    rest, base = b"", run.pieces[0].begin
    for offset, data in access.chunks(run):
        if offset != base + len(rest):
            if rest:
                _cut(run, base, rest, offset)
            rest, base = b"", offset
        buffer = rest + data if rest else data
        columns, consumed, found = decoder.decode(buffer, base)
        if len(columns):
            yield Batch(columns, buffer, base, found if fields else None)
        rest, base = buffer[consumed:], base + consumed
        if len(rest) > FRAME_BYTES_MAX:
            raise MalformedMessage(
                "message is too long",
                begin=base,
                end=base + len(rest),
                raw=rest[:1024],
                journal=run.journal,
            )
    if rest and not run.last:
        try:
            decoder.finish(rest, base)
        except TruncatedFrame as error:
            raise TruncatedFrame(
                "a message continues in the next fragment, which another task reads "
                "(its publisher appended it in parts): let one task read the whole journal",
                begin=error.begin,
                end=error.end,
                raw=error.raw,
                journal=run.journal,
            ) from error


def _cut(run: Run, base: Offset, rest: bytes, offset: Offset) -> None:
    if run.shape.malformed == "fail":
        raise MalformedMessage(
            f"a message is cut off: the journal continues at offset {offset}",
            begin=base,
            end=base + len(rest),
            raw=rest,
            journal=run.journal,
        )


def summarise_run(access: OpenAccess, run: Run) -> RunSummary:
    """Do the first pass over one run. Raise what `read_columns` raises, and `Invalid` if UUIDs are
    unknown.
    """
    require_uuids(run.journal, run.shape)
    return summarise(run, (batch.columns for batch in read_columns(access, run)))


def resolver(access: OpenAccess) -> Callable[[Run, int, int], Offset]:
    """Return the function that `fold` calls in rare cases. It reads the run again."""

    def resolve(run: Run, producer: int, clock: int) -> Offset:
        columns = (batch.columns for batch in read_columns(access, run))
        found = first_beyond(run, columns, producer, clock)
        if found is None:
            raise Bug("a run differs from its first read", journal=run.journal, number=run.number)
        return found

    return resolve


def fold_locally(
    access: Access, snapshot: Snapshot, *, run_bytes: int = RUN_BYTES, threads: int = _THREADS
) -> FoldedSnapshot:
    """Do the whole first pass in this process, with ``threads`` runs at a time.

    Raise what `read_columns` and `fold_snapshot` raise.
    """
    with access.open() as opened, concurrent.futures.ThreadPoolExecutor(threads) as pool:

        def summarise_all(runs: Sequence[Run]) -> list[RunSummary]:
            return list(pool.map(lambda run: summarise_run(opened, run), runs))

        return fold_snapshot(snapshot, summarise_all, resolver(opened), run_bytes)


def read_committed(access: OpenAccess, run: CommittedRun) -> Iterator[tuple[Batch, Mask]]:
    """Do the second pass over one run. Yield its messages, with a mask of the committed ones of
    each batch.

    Batches without a committed message are left out. Raise what `read_columns` raises.
    """
    return committed(run, ((batch.columns, batch) for batch in read_columns(access, run.run)))


def committed(
    run: CommittedRun, batches: Iterable[tuple[Columns, T]], *, acks: bool = False
) -> Iterator[tuple[T, Mask]]:
    """Yield a mask of the committed messages of each batch. Leave out batches without one."""
    passes: CommitFilter[T] = CommitFilter(run, acks=acks)
    for columns, payload in batches:
        passes.add(columns, payload)
        yield from _with_any(passes.ready())
    passes.finish()
    yield from _with_any(passes.ready())


def _with_any(ready: Iterator[tuple[T, Mask]]) -> Iterator[tuple[T, Mask]]:
    return (found for found in ready if found[1].any())


def read_envelopes(
    access: OpenAccess, run: CommittedRun, message_type: Any
) -> Iterator[list[Envelope[Any]]]:
    """Yield the committed messages of a run as messages of an application, by offset, without
    acknowledgements.

    Raise what `read_columns` raises, and `MalformedMessage` for a message of another type.
    """
    framing = framing_of(run.run.shape.content_type, message_type)
    journal, skips = run.run.journal, run.run.shape.malformed == "skip"
    for batch, passed in read_committed(access, run):
        rows = np.flatnonzero(passed)
        messages = _decoded(framing, batch, rows)
        if messages is None:
            rows, messages = _decoded_each(framing, batch, rows, journal, skips=skips)
        columns = batch.columns
        uuids = columns.uuids
        envelopes = build_envelopes(
            journal,
            columns.begins[rows].tolist(),
            columns.ends[rows].tolist(),
            messages,
            uuid_bytes(
                uuids._replace(
                    producers=uuids.producers[rows],
                    clocks=uuids.clocks[rows],
                    flags=uuids.flags[rows],
                )
            ),
        )
        if envelopes:
            yield envelopes


def _decoded(framing: Framing[Any], batch: Batch, rows: Array64) -> list[Any] | None:
    """Decode the messages of some rows together. Return None if one is malformed: the caller finds
    which.
    """
    begins = batch.columns.begins[rows] - batch.base
    ends = batch.columns.ends[rows] - batch.base
    cuts = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts = begins[np.concatenate(([0], cuts))].tolist()
    lasts = ends[np.concatenate((cuts - 1, [len(rows) - 1]))].tolist()
    buffer = batch.buffer
    content = b"".join([buffer[begin:end] for begin, end in zip(firsts, lasts, strict=True)])
    try:
        frames = framing.decode(content, 0)
    except MalformedMessage:
        return None
    whole = frames.consumed == len(content) and len(frames) == len(rows)
    return frames.messages if whole else None


def _decoded_each(
    framing: Framing[Any], batch: Batch, rows: Array64, journal: JournalName, *, skips: bool
) -> tuple[Array64, list[Any]]:
    """Return the rows that are messages of the type, and their messages. Raise
    `MalformedMessage`.
    """
    kept: list[int] = []
    messages: list[Any] = []
    for row in rows.tolist():
        begin, end = int(batch.columns.begins[row]), int(batch.columns.ends[row])
        try:
            frames = framing.decode(batch.buffer[begin - batch.base : end - batch.base], begin)
        except MalformedMessage as error:
            if skips:
                continue
            raise error.of(journal) from error.__cause__
        kept.append(row)
        messages.append(frames.messages[0])
    return np.array(kept, np.int64), messages
