"""Chooses the ends of a stream's batches, by a limit of size. Pure, but for ``find_message``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes, ReadMaxRows

from gazette.history.snapshot import JournalSnapshot, Piece, cover
from gazette.protocol.ids import JournalName, Offset

FindMessage = Callable[[JournalSnapshot, Piece, int], tuple[int, Offset]]
"""Function from a journal, a piece and a limit to the number of messages of the piece, and the piece's end.
If the piece has more messages than the limit, it returns the limit, and the begin of the next message."""


@dataclass(slots=True)
class BatchAdmission:
    """Chooser of the ends of batches.

    Journals take turns, one fragment each. A batch ends where a fragment ends. If the first fragment is
    larger than the limit, the batch ends within that fragment.
    """

    find_message: FindMessage
    _served: JournalName = field(default="", init=False)
    """The last journal in the last batch."""

    def ends(
        self,
        journals: Sequence[JournalSnapshot],
        begins: Mapping[JournalName, Offset],
        limit: ReadLimit,
    ) -> dict[JournalName, Offset]:
        """Return the ends of the next batch, for the journals that it reads."""
        if isinstance(limit, ReadMaxBytes):
            budget, by_bytes = limit.max_bytes, True
        elif isinstance(limit, ReadMaxRows):
            budget, by_bytes = limit.max_rows, False
        else:
            return {j.journal: max(j.end, begins[j.journal]) for j in journals}
        ends: dict[JournalName, Offset] = {}
        # Begin after the last served journal. Otherwise the first journals could fill every batch.
        waiting = [
            (j, iter(cover(j.pieces, begins[j.journal], j.end)))
            for j in sorted(journals, key=lambda j: (j.journal <= self._served, j.journal))
        ]
        while waiting and budget > 0:
            journal, pieces = waiting.pop(0)
            piece = next(pieces, None)
            if piece is None:
                continue
            if by_bytes:
                cost, end = piece.end - piece.begin, piece.begin + budget
            else:
                cost, end = self.find_message(journal, piece, budget)
            if end < piece.end and ends:
                break  # The piece is too large for the rest. Only the first piece of a batch is cut.
            ends[journal.journal] = min(end, piece.end)
            self._served = journal.journal
            budget -= cost
            waiting.append((journal, pieces))
        return ends


def next_pieces(journal: JournalSnapshot, begin: Offset, limit: ReadLimit) -> Sequence[Piece]:
    """Return the pieces from ``begin`` on that the next batch may read, at least in part."""
    pieces = cover(journal.pieces, begin, journal.end)
    if not isinstance(limit, ReadMaxBytes):
        return pieces
    size = 0
    for count, piece in enumerate(pieces):
        if size >= limit.max_bytes:
            return pieces[:count]
        size += piece.end - piece.begin
    return pieces


def later_end(journal: JournalSnapshot, begin: Offset, end: Offset) -> Offset | None:
    """Return a later end of a batch, for a journal whose next message does not end before ``end``. Return
    None if the journal has no more bytes."""
    next_piece = next((piece for piece in journal.pieces if piece.end > end), None)
    if next_piece is None:
        return None
    return min(next_piece.end, max(begin + 2 * (end - begin), next_piece.begin + 1))
