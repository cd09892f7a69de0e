"""The first pass over runs: their summaries, from kept ones or from their bytes."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from gazette.history.batch_split import BatchSplit, since_of
from gazette.history.columns import require_uuids
from gazette.history.json_lines import Field
from gazette.history.merge import FoldedSnapshot, fold_snapshot
from gazette.history.read import Batch, RunReader
from gazette.history.snapshot import RUN_BYTES, JournalSnapshot, Piece, Run, Snapshot
from gazette.history.source import OpenAccess
from gazette.history.summary import (
    ProducerSummary,
    State,
    Summariser,
    Summary,
    combine,
    first_beyond,
)
from gazette.history.summary_store import SummaryStore
from gazette.message.framing.frames import MalformedMessage
from gazette.protocol.ids import Offset

_THREADS: Final = min(8, os.cpu_count() or 1)
"""Default number of runs that a process reads at the same time."""


def summarise_run(access: OpenAccess, run: Run) -> Summary:
    """Return the summary of a run. Use kept summaries of its pieces, and read the other pieces.

    Raise what `RunReader.batches` raises, and `Invalid` if UUIDs are unknown. If ``run.sure`` is
    false, a malformed message may be the end of one that began before the run: then return a torn
    summary.
    """
    require_uuids(run.journal, run.shape)
    return summarise_messages(access, run)


def summarise_messages(access: OpenAccess, run: Run) -> Summary:
    """Do as `summarise_run`, also where UUIDs are unknown: then only the offsets are right."""
    kept = access.summaries(run.pieces)
    try:
        if kept is not None and not run.beyond:
            found = _of_pieces(access, run, kept)
            if found is not None:
                return found
        return _scanned(access, run)
    except MalformedMessage:
        if run.sure:
            raise
        return Summary.of_torn(run.pieces[0].begin)


def read_and_summarise(
    access: OpenAccess, run: Run, fields: Sequence[Field]
) -> Generator[tuple[Batch, BatchSplit], None, Summary | None]:
    """Yield all messages of a run without replays, and their split. Return and keep the summary.

    Return None if a message continues from one piece to the next. Raise what `RunReader.batches`
    raises, and `Invalid` if UUIDs are unknown.
    """
    require_uuids(run.journal, run.shape)
    kept = access.summaries(run.pieces)
    found = []
    for piece in run.pieces:
        summary = yield from _read(access, run, kept, piece, fields)
        found.append((piece, summary))
        if summary.reached != piece.end:
            break
    return _combined(access, run, kept, found)


def keep_summaries(access: OpenAccess, run: Run, portion_bytes: int | None = None) -> None:
    """Keep the summaries of the pieces of a run, for a later first pass.

    With ``portion_bytes``, keep the summaries of portions of a larger piece. A portion begins after
    the last message of the one before. It has ``portion_bytes``, or as many as one message has. Raise
    what `summarise_run` raises.
    """
    whole: list[Piece] = []
    for piece in run.pieces:
        if portion_bytes is None or piece.end - piece.begin <= portion_bytes:
            whole.append(piece)
        else:
            _keep_portions(access, run, piece, portion_bytes)
    if whole:
        summarise_run(access, replace(run, pieces=tuple(whole)))


def find_message(
    access: OpenAccess, journal: JournalSnapshot, piece: Piece, position: int
) -> tuple[int, Offset]:
    """Return ``position``, and the offset of the message at that position of a piece.

    If the piece has fewer messages, return their number and the end of the piece. Read no further
    than necessary: nothing if a kept summary shows that the piece has fewer messages.
    """
    kept = access.summaries([piece])
    summary = None if kept is None else kept.get(journal.journal, journal.shape, [piece])
    if summary is not None and summary.rows <= position:
        return summary.rows, piece.end
    run = Run(journal.journal, journal.shape, 0, (piece,), piece.begin, sure=False)
    seen = 0
    try:
        for batch in RunReader(access, run).batches():
            if seen + len(batch.columns) > position:
                return position, int(batch.columns.begins[position - seen])
            seen += len(batch.columns)
    except MalformedMessage:
        pass  # The first pass reads the piece too, and raises this if it is an error.
    return seen, piece.end


def resolver(access: OpenAccess) -> Callable[[Run, int, int], Offset]:
    """Return the function ``resolve`` for `fold`, which reads a run again in rare cases."""
    return partial(_first_beyond, access)


def fold_by_threads(
    access: OpenAccess,
    snapshot: Snapshot,
    *,
    run_bytes: int = RUN_BYTES,
    threads: int = _THREADS,
    summarise: Callable[[OpenAccess, Run], Summary] = summarise_run,
) -> FoldedSnapshot:
    """Do the whole first pass in this process, with ``threads`` runs at a time.

    Raise what ``summarise`` and `fold_snapshot` raise.
    """
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:

        def summarise_all(runs: Sequence[Run]) -> list[Summary]:
            return list(pool.map(partial(summarise, access), runs))

        return fold_snapshot(snapshot, summarise_all, resolver(access), run_bytes)


def _scanned(access: OpenAccess, run: Run) -> Summary:
    """Return the summary of a run from its bytes."""
    reader = RunReader(access, run)
    summariser = Summariser(run)
    for batch in reader.batches():
        summariser.add(batch.columns)
    return summariser.summary(reader.reached, clean=reader.clean)


def _of_pieces(access: OpenAccess, run: Run, kept: SummaryStore) -> Summary | None:
    """Return the summary of a run by `_combined`. Read the pieces without a kept summary."""
    if _counts_all(run) and (found := kept.get(run.journal, run.shape, run.pieces)) is not None:
        return found
    return _combined(access, run, kept, _parts(access, run, kept))


def _combined(
    access: OpenAccess,
    run: Run,
    kept: SummaryStore | None,
    parts: Iterable[tuple[Piece, Summary]],
) -> Summary | None:
    """Combine the summaries of the pieces of a run, and keep the result.

    Return None if a message continues from one piece to the next.
    """
    total: Summary | None = None
    for piece, summary in parts:
        if summary.reached != piece.end and piece.end != run.end:
            return None
        total = (
            summary
            if total is None
            else combine(total, summary, partial(_first_beyond, access, _part(run, piece)))
        )
    assert total is not None
    if kept is not None and _counts_all(run) and len(run.pieces) > 1 and not run.last:
        # Do not keep the last run's: the next fragment makes it another run.
        kept.put(run.journal, run.shape, run.pieces, total)
    return total


def _counts_all(run: Run) -> bool:
    return run.pieces[0].begin >= run.begin


def _parts(access: OpenAccess, run: Run, kept: SummaryStore) -> Iterator[tuple[Piece, Summary]]:
    """Yield the pieces of a run, with the summaries of the messages that count."""
    since = since_of(run)
    for piece in run.pieces:
        if piece.begin < run.begin:
            before = replace(piece, end=min(piece.end, run.begin))
            yield from _before(access, run, kept, before, since)
            if before.end == piece.end:
                continue
        after = replace(piece, begin=max(piece.begin, run.begin))
        yield after, _summary(access, run, kept, after)


def _before(
    access: OpenAccess, run: Run, kept: SummaryStore, piece: Piece, since: dict[int, Offset]
) -> Iterator[tuple[Piece, Summary]]:
    """Yield the summaries of a piece before ``run.begin``, only of producers that are replayed there."""
    whole = _pending_in(kept, run, piece, since)
    if whole is not None:
        yield piece, whole
        return
    inside = {at for at in since.values() if piece.begin < at < piece.end}
    for begin, end in pairwise([piece.begin, *sorted(inside), piece.end]):
        part = Piece(begin, end, piece.fragment)
        summary = _summary(access, run, kept, part)
        own = {p: s for p, s in summary.producers.items() if p in since and since[p] <= begin}
        yield part, replace(summary, producers=own)


def _pending_in(
    kept: SummaryStore, run: Run, piece: Piece, since: dict[int, Offset]
) -> Summary | None:
    """Return the summary of a piece before ``run.begin``, made from the kept one of its fragment.

    Return None if the latter does not say enough.
    """
    fragment = piece.fragment
    if fragment is None:
        return None
    whole = Piece(fragment.begin, fragment.end, fragment)
    found = kept.get(run.journal, run.shape, [whole]) if piece.end == fragment.end else None
    if found is None or not found.clean:
        # If it is not clean, the fragment may begin within a message.
        return None
    own = {}
    for producer, at in since.items():
        summary = found.producers.get(producer)
        if piece.begin == fragment.begin and at <= piece.begin:
            if summary is not None:
                own[producer] = summary
        elif at < piece.end:
            pending = None if summary is None else _pending_from(summary, at)
            if pending is None or at < piece.begin:
                return None
            own[producer] = pending
    return replace(found, producers=own)


def _pending_from(summary: ProducerSummary, at: Offset) -> ProducerSummary | None:
    """Return the part of a summary from the message at ``at`` on, if that is its first pending one.

    All later messages of the producer are pending, or repeat committed ones. So their greatest clock
    says everything about them.
    """
    states = (
        summary.after,
        summary.after_outside if summary.after is None else None,
        State(0, summary.pending_newest, summary.pending_begin) if summary.after is None else None,
    )
    for state in states:
        if state is not None and state.begin == at:
            return ProducerSummary(
                state.newest,
                at,
                pending=state.newest,
                pending_begin=at,
                pending_newest=state.newest,
            )
    return None


def _summary(access: OpenAccess, run: Run, kept: SummaryStore, piece: Piece) -> Summary:
    """Return the summary of a piece. All its messages count."""
    found = kept.get(run.journal, run.shape, [piece])
    if found is not None:
        return found
    reading = _read(access, run, kept, piece)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            made: Summary = end.value
            return made


def _read(
    access: OpenAccess,
    run: Run,
    kept: SummaryStore | None,
    piece: Piece,
    fields: Sequence[Field] = (),
) -> Generator[tuple[Batch, BatchSplit], None, Summary]:
    """Yield the messages of a piece, all of which count, and their split. Keep and return its summary."""
    part = _part(run, piece)
    digest = _digest(access, piece)
    reader = RunReader(access, part, fields, digest=digest)
    summariser = Summariser(part)
    for batch in reader.batches():
        yield batch, summariser.add(batch.columns)
    made = summariser.summary(reader.reached, clean=reader.clean)
    if kept is not None and _is_compared(piece, digest):
        kept.put(run.journal, run.shape, [piece], made)
    return made


def _digest(access: OpenAccess, piece: Piece) -> Any:
    """Return a digest for bytes from a broker. Other bytes are compared as they are decoded."""
    return None if access.is_direct(piece) else hashlib.sha1(usedforsecurity=False)


def _is_compared(piece: Piece, digest: Any) -> bool:
    """Return True if the bytes that were read match the SHA-1 of the fragment."""
    fragment = piece.fragment
    if fragment is None or piece.end != fragment.end:
        return False
    return digest is None or bool(digest.digest() == fragment.sum)


def _keep_portions(access: OpenAccess, run: Run, piece: Piece, portion_bytes: int) -> None:
    kept = access.summaries([piece])
    if kept is None:
        return
    digest = _digest(access, piece)
    reader = RunReader(access, _part(run, piece), digest=digest)
    found: list[tuple[Piece, Summary]] = []
    begin = end = piece.begin
    cut, rows = begin + portion_bytes, 0
    summariser = Summariser(_part(run, piece))
    try:
        for batch in reader.batches():
            columns = batch.columns
            while len(columns):
                count = int(np.searchsorted(columns.ends, cut, side="right"))
                if count:
                    summariser.add(columns.part(0, count))
                    end, rows = int(columns.ends[count - 1]), rows + count
                    columns = columns.part(count, len(columns))
                elif not rows:
                    # A message, or a malformed frame, is longer: double the size, as streams do.
                    cut = begin + 2 * (cut - begin)
                else:
                    portion = Piece(begin, cut, piece.fragment)
                    reached = min(int(columns.begins[0]), cut)
                    found.append((portion, summariser.summary(reached, clean=reader.clean)))
                    begin, cut, rows = end, end + portion_bytes, 0
                    summariser = Summariser(_part(run, replace(piece, begin=begin)))
    except MalformedMessage:
        return  # The first pass raises it later, if it is an error.
    cut = min(cut, piece.end)
    made = summariser.summary(min(reader.reached, cut), clean=reader.clean)
    found.append((Piece(begin, cut, piece.fragment), made))
    if _is_compared(piece, digest):
        for portion, summary in found:
            kept.put(run.journal, run.shape, [portion], summary)


def _part(run: Run, piece: Piece) -> Run:
    sure = run.sure and piece.begin == run.pieces[0].begin
    return Run(run.journal, run.shape, run.number, (piece,), piece.begin, sure=sure)


def _first_beyond(access: OpenAccess, run: Run, producer: int, clock: int) -> Offset:
    columns = (batch.columns for batch in RunReader(access, run).batches())
    return first_beyond(run, columns, producer, clock)
