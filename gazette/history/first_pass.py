"""The first pass over runs: it makes their summaries, from kept summaries or from the bytes of the runs."""

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

    Raise `Invalid` if UUIDs are unknown, and the errors of `RunReader.batches`. If ``run.sure`` is false, a
    malformed message may be the end of a message that began before the run: then return a torn summary.
    """
    require_uuids(run.journal, run.shape)
    return summarise_messages(access, run)


def summarise_messages(access: OpenAccess, run: Run) -> Summary:
    """Do the same as `summarise_run`, but permit unknown UUIDs. Without UUIDs, only the offsets are right."""
    store = access.summaries(run.pieces)
    try:
        if store is not None and not run.beyond:
            summary = _of_pieces(access, run, store)
            if summary is not None:
                return summary
        return _scanned(access, run)
    except MalformedMessage:
        if run.sure:
            raise
        return Summary.of_torn(run.pieces[0].begin)


def read_and_summarise(
    access: OpenAccess, run: Run, fields: Sequence[Field]
) -> Generator[tuple[Batch, BatchSplit], None, Summary | None]:
    """Yield all messages of a run, and their split. Return the summary; keep it if the bytes are checked.

    The run must not begin before ``run.begin``. Return None if a message continues from one piece to the
    next. Raise `Invalid` if UUIDs are unknown, and the errors of `RunReader.batches`.
    """
    require_uuids(run.journal, run.shape)
    store = access.summaries(run.pieces)
    summaries = []
    for piece in run.pieces:
        summary = yield from _read(access, run, store, piece, fields)
        summaries.append((piece, summary))
        if summary.reached != piece.end:
            break
    return _combined(access, run, store, summaries)


def keep_summaries(access: OpenAccess, run: Run, portion_bytes: int | None = None) -> None:
    """Keep the summaries of the pieces of a run, for a later first pass.

    With ``portion_bytes``, cut a larger piece into portions, and keep the summary of each portion. A portion
    begins after the last message of the portion before. Its size is ``portion_bytes``, doubled until a
    message ends in the portion. Keep no summary of a larger piece with a malformed message. Raise the errors
    of `summarise_run`: `Invalid`, and those of reading.
    """
    small_pieces: list[Piece] = []
    for piece in run.pieces:
        if portion_bytes is None or piece.end - piece.begin <= portion_bytes:
            small_pieces.append(piece)
        else:
            _keep_portions(access, run, piece, portion_bytes)
    if small_pieces:
        summarise_run(access, replace(run, pieces=tuple(small_pieces)))


def find_message(
    access: OpenAccess, journal: JournalSnapshot, piece: Piece, position: int
) -> tuple[int, Offset]:
    """Return ``position``, and the offset of the message at that position of a piece.

    If the piece has fewer messages, or a malformed one before that position, return the number of messages
    and the end of the piece. Stop reading at the message. Read nothing if a kept summary shows that the piece
    has fewer messages.
    """
    store = access.summaries([piece])
    summary = None if store is None else store.get(journal.journal, journal.shape, [piece])
    if summary is not None and summary.rows <= position:
        return summary.rows, piece.end
    run = Run(journal.journal, journal.shape, 0, (piece,), piece.begin, sure=False)
    count = 0
    try:
        for batch in RunReader(access, run).batches():
            if count + len(batch.columns) > position:
                return position, int(batch.columns.begins[position - count])
            count += len(batch.columns)
    except MalformedMessage:
        pass  # The first pass reads the piece too, and raises the error if messages must be well-formed.
    return count, piece.end


def resolver(access: OpenAccess) -> Callable[[Run, int, int], Offset]:
    """Return the argument ``resolve`` of `fold`: a function that reads a run again, in rare cases."""
    return partial(_first_beyond, access)


def fold_by_threads(
    access: OpenAccess,
    snapshot: Snapshot,
    *,
    run_bytes: int = RUN_BYTES,
    threads: int = _THREADS,
    summarise: Callable[[OpenAccess, Run], Summary] = summarise_run,
) -> FoldedSnapshot:
    """Do the whole first pass in this process, with ``threads`` runs at a time. Errors: `fold_snapshot`."""
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
    """Return the summary of a run. Read the pieces without a kept summary. None: see `_combined`."""
    if _counts_all(run) and (summary := kept.get(run.journal, run.shape, run.pieces)) is not None:
        return summary
    return _combined(access, run, kept, _parts(access, run, kept))


def _combined(
    access: OpenAccess,
    run: Run,
    kept: SummaryStore | None,
    parts: Iterable[tuple[Piece, Summary]],
) -> Summary | None:
    """Combine the summaries of the pieces of a run, and keep the result if a later reader may find the same
    run. Return None if a message continues from one piece to the next."""
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
        # Do not keep the summary of the last run: the next fragment of the journal makes it another run.
        kept.put(run.journal, run.shape, run.pieces, total)
    return total


def _counts_all(run: Run) -> bool:
    """Return True if all messages of a run count: no message is before ``run.begin``."""
    return run.pieces[0].begin >= run.begin


def _parts(access: OpenAccess, run: Run, kept: SummaryStore) -> Iterator[tuple[Piece, Summary]]:
    """Yield the pieces of a run, cut at ``run.begin``, with the summaries of their messages that count."""
    since = since_of(run)
    for piece in run.pieces:
        if piece.begin < run.begin:
            piece_before = replace(piece, end=min(piece.end, run.begin))
            yield from _before(access, run, kept, piece_before, since)
            if piece_before.end == piece.end:
                continue
        piece_after = replace(piece, begin=max(piece.begin, run.begin))
        yield piece_after, _summary(access, run, kept, piece_after)


def _before(
    access: OpenAccess, run: Run, kept: SummaryStore, piece: Piece, since: dict[int, Offset]
) -> Iterator[tuple[Piece, Summary]]:
    """Yield the summaries of a piece before ``run.begin``, only of producers that are replayed from it."""
    pending = _pending_in(kept, run, piece, since)
    if pending is not None:
        yield piece, pending
        return
    # Cut where the replay of a producer begins, since a summary counts all messages of a part.
    cuts = {offset for offset in since.values() if piece.begin < offset < piece.end}
    for begin, end in pairwise([piece.begin, *sorted(cuts), piece.end]):
        part = Piece(begin, end, piece.fragment)
        summary = _summary(access, run, kept, part)
        replayed = {p: s for p, s in summary.producers.items() if p in since and since[p] <= begin}
        yield part, replace(summary, producers=replayed)


def _pending_in(
    kept: SummaryStore, run: Run, piece: Piece, since: dict[int, Offset]
) -> Summary | None:
    """Return the summary of a piece before ``run.begin``, made from the kept summary of its fragment.

    The result has only the producers that are replayed. Return None if the kept summary does not say enough.
    """
    fragment = piece.fragment
    if fragment is None:
        return None
    whole = Piece(fragment.begin, fragment.end, fragment)
    stored = kept.get(run.journal, run.shape, [whole]) if piece.end == fragment.end else None
    if stored is None or not stored.clean:
        # If the summary is not clean, the fragment may begin within a message.
        return None
    replayed = {}
    for producer, offset in since.items():
        summary = stored.producers.get(producer)
        if piece.begin == fragment.begin and offset <= piece.begin:
            if summary is not None:
                replayed[producer] = summary
        elif offset < piece.end:
            pending = None if summary is None else _pending_from(summary, offset)
            if pending is None or offset < piece.begin:
                return None
            replayed[producer] = pending
    return replace(stored, producers=replayed)


def _pending_from(summary: ProducerSummary, at: Offset) -> ProducerSummary | None:
    """Return the part of a summary from offset ``at`` on. A checkpoint has messages from there as pending.

    Return None if the summary does not show that the pending messages begin there. All later messages of the
    producer are pending, or duplicates. So the part needs only their greatest clock.
    """
    # At its end, the run may leave one of these states. Which one depends on the state before the run, except
    # after an acknowledgement. The one with pending messages from `at` on is the state of the checkpoint.
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
    """Return the kept summary of a piece, or read the piece. All messages of the piece count."""
    kept_summary = kept.get(run.journal, run.shape, [piece])
    if kept_summary is not None:
        return kept_summary
    reading = _read(access, run, kept, piece)
    while True:  # Only the summary is wanted: drop the messages.
        try:
            next(reading)
        except StopIteration as end:
            summary: Summary = end.value
            return summary


def _read(
    access: OpenAccess,
    run: Run,
    kept: SummaryStore | None,
    piece: Piece,
    fields: Sequence[Field] = (),
) -> Generator[tuple[Batch, BatchSplit], None, Summary]:
    """Yield the messages of a piece, all of which count, and their split. Return its summary, and keep it if
    the bytes were compared with the fragment's SHA-1."""
    part = _part(run, piece)
    digest = _digest(access, piece)
    reader = RunReader(access, part, fields, digest=digest)
    summariser = Summariser(part)
    for batch in reader.batches():
        yield batch, summariser.add(batch.columns)
    summary = summariser.summary(reader.reached, clean=reader.clean)
    if kept is not None and _is_compared(piece, digest):
        kept.put(run.journal, run.shape, [piece], summary)
    return summary


def _digest(access: OpenAccess, piece: Piece) -> Any:
    """Return a hash for bytes from a broker. Return None for stored bytes: `chunks` checks their SHA-1."""
    return None if access.is_direct(piece) else hashlib.sha1(usedforsecurity=False)


def _is_compared(piece: Piece, digest: Any) -> bool:
    """Return True if the bytes that were read match the SHA-1 of the fragment."""
    fragment = piece.fragment
    if fragment is None or piece.end != fragment.end:
        return False
    return digest is None or bool(digest.digest() == fragment.sum)


def _keep_portions(access: OpenAccess, run: Run, piece: Piece, portion_bytes: int) -> None:
    """Keep the summaries of the portions of one piece: see `keep_summaries`."""
    store = access.summaries([piece])
    if store is None:
        return
    digest = _digest(access, piece)
    reader = RunReader(access, _part(run, piece), digest=digest)
    portions: list[tuple[Piece, Summary]] = []
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
                    # A message, or a malformed frame, is longer: double the portion, as streams do.
                    cut = begin + 2 * (cut - begin)
                else:
                    portion = Piece(begin, cut, piece.fragment)
                    reached = min(int(columns.begins[0]), cut)
                    portions.append((portion, summariser.summary(reached, clean=reader.clean)))
                    begin, cut, rows = end, end + portion_bytes, 0
                    summariser = Summariser(_part(run, replace(piece, begin=begin)))
    except MalformedMessage:
        return  # The first pass raises the error later, if messages must be well-formed.
    cut = min(cut, piece.end)
    last_summary = summariser.summary(min(reader.reached, cut), clean=reader.clean)
    portions.append((Piece(begin, cut, piece.fragment), last_summary))
    if _is_compared(piece, digest):
        for portion, summary in portions:
            store.put(run.journal, run.shape, [portion], summary)


def _part(run: Run, piece: Piece) -> Run:
    """Return one piece of a run as a run, all of whose messages count."""
    sure = run.sure and piece.begin == run.pieces[0].begin
    return Run(run.journal, run.shape, run.number, (piece,), piece.begin, sure=sure)


def _first_beyond(access: OpenAccess, run: Run, producer: int, clock: int) -> Offset:
    """Read a run again for `first_beyond`: find the producer's first pending message above ``clock``."""
    columns = (batch.columns for batch in RunReader(access, run).batches())
    return first_beyond(run, columns, producer, clock)
