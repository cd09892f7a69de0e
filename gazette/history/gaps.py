"""The gaps in the bytes of a journal's snapshot, and whether their bytes may still come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gazette.errors import Corrupt, NotYet
from gazette.fragment.index import JUMP_AGE_S, SETTLED_S
from gazette.history.snapshot import (
    LOST_HINT,
    JournalSnapshot,
    LostBytes,
    Piece,
)
from gazette.protocol.ids import Offset


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of a snapshot that are in none of its pieces."""

    begin: Offset
    end: Offset
    pruned: bool
    """True if the gap is before the journal's first piece. The bytes were pruned or, if that piece is
    ``recent``, may still come."""
    settled: bool
    """True if the fragment after the gap is so old that the bytes will not come."""
    recent: bool
    """True if the fragment after the gap is so new that the bytes may still come."""
    confirmed: bool
    """True if an operator has confirmed that the bytes are lost."""

    @property
    def is_final(self) -> bool:
        """True if the bytes will not come."""
        return self.confirmed or (not self.recent if self.pruned else self.settled)

    @property
    def lost(self) -> LostBytes:
        return LostBytes(self.begin, self.end, self.confirmed)


@dataclass(frozen=True, slots=True)
class ConfirmedLosses:
    """Ranges of offsets that an operator has confirmed as lost. Brokers know them, stores do not."""

    ranges: tuple[tuple[Offset, Offset], ...] = ()

    def cover(self, begin: Offset, end: Offset) -> bool:
        """Return True if one range has all offsets from ``begin`` to ``end``."""
        return any(low <= begin and end <= high for low, high in self.ranges)

    def outside(self, begin: Offset, end: Offset) -> Iterator[Piece]:
        """Yield pieces, to read through brokers, for the offsets of [begin, end) that are in no range."""
        for low, high in sorted(self.ranges):
            if begin < min(low, end):
                yield Piece(begin, min(low, end))
            begin = max(begin, high)
        if begin < end:
            yield Piece(begin, end)


def find_gaps(
    journal: JournalSnapshot, pieces: Sequence[Piece], losses: ConfirmedLosses, now: float
) -> Iterator[Gap]:
    """Yield the gaps of a journal's snapshot, in order. ``pieces`` are all pieces of the journal, even after
    the snapshot."""
    offset = journal.pieces_begin
    pieces_behind = [piece for piece in pieces if piece.begin >= journal.end]
    # The last gap may reach to the end: the first piece after the end shows how old the next fragment is.
    for piece in [*journal.pieces, *pieces_behind[:1]]:
        if piece.begin > offset:
            fragment = piece.fragment
            end = min(piece.begin, journal.end)
            yield Gap(
                offset,
                end,
                pruned=piece.begin <= pieces[0].begin,
                settled=fragment is not None and fragment.mod_time < now - JUMP_AGE_S,
                recent=fragment is not None and fragment.mod_time > now - SETTLED_S,
                confirmed=losses.cover(offset, end),
            )
        offset = piece.end
        if offset >= journal.end:
            return
    if offset < journal.end and losses.cover(offset, journal.end):
        # The head was set after the lost bytes, and no byte was appended there yet.
        yield Gap(offset, journal.end, pruned=False, settled=False, recent=False, confirmed=True)


def require_final(gaps: Iterable[Gap], journal: JournalSnapshot, *, fails: bool, hint: str) -> None:
    """Raise ``NotYet`` with ``hint`` for the first gap whose bytes may still come.

    Bytes before the first piece count as pruned here, however new that piece is. If ``fails``, raise
    ``Corrupt`` for a gap of lost bytes, unless they were pruned and the snapshot does not ask for them. A gap
    that an operator has confirmed is no error.
    """
    for gap in gaps:
        if gap.confirmed:
            continue
        if not gap.pruned and not gap.settled:
            raise NotYet(
                f"the journal has no bytes from offset {gap.begin} to {gap.end}. The bytes after these are "
                "too recent to call these lost: a broker may not have stored them yet",
                hint=hint,
                journal=journal.journal,
            )
        if fails and not _is_harmless(gap, journal):
            raise Corrupt(
                "the journal has lost bytes before they were read"
                + (": they were pruned" if gap.pruned else ""),
                hint=LOST_HINT,
                journal=journal.journal,
                begin=max(gap.begin, journal.begin) if gap.pruned else gap.begin,
                end=gap.end,
            )


def _is_harmless(gap: Gap, journal: JournalSnapshot) -> bool:
    """Return True if the bytes were pruned, and the snapshot does not ask for them: it begins after them, or
    at offset 0.

    If messages that are pending at the begin were pruned, the fold raises an error once these commit.
    """
    return gap.pruned and (journal.begin >= gap.end or journal.begin == 0)
