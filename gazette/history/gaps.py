"""The gaps of a journal: bytes of a snapshot that are in none of its pieces."""

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
    """True if they are before the first fragment: they will not come."""
    settled: bool
    """True if the fragment behind them is too old for them to come."""
    recent: bool
    """True if the fragment behind them was stored so recently that those before may follow."""
    confirmed: bool
    """True if an operator has confirmed that they are lost."""

    @property
    def is_final(self) -> bool:
        """True if no fragment with these bytes may be expected any more."""
        return self.confirmed or (not self.recent if self.pruned else self.settled)

    @property
    def lost(self) -> LostBytes:
        return LostBytes(self.begin, self.end, self.confirmed)


@dataclass(frozen=True, slots=True)
class ConfirmedLosses:
    """Ranges of offsets that an operator has confirmed as lost, as brokers say. Stores do not know them."""

    ranges: tuple[tuple[Offset, Offset], ...] = ()

    def cover(self, begin: Offset, end: Offset) -> bool:
        """Return True if one of them has all offsets from ``begin`` to ``end``."""
        return any(low <= begin and end <= high for low, high in self.ranges)

    def outside(self, begin: Offset, end: Offset) -> Iterator[Piece]:
        """Yield pieces of brokers for the offsets from ``begin`` to ``end`` that are in none of them."""
        for low, high in sorted(self.ranges):
            if begin < min(low, end):
                yield Piece(begin, min(low, end))
            begin = max(begin, high)
        if begin < end:
            yield Piece(begin, end)


def find_gaps(
    journal: JournalSnapshot, pieces: Sequence[Piece], losses: ConfirmedLosses, now: float
) -> Iterator[Gap]:
    """Yield the gaps between the pieces of a snapshot, in order. ``pieces`` are all of its journal."""
    at = journal.pieces_begin
    behind = [piece for piece in pieces if piece.begin >= journal.end]
    # A piece that is not held ends a gap that reaches to the end.
    for piece in [*journal.pieces, *behind[:1]]:
        if piece.begin > at:
            fragment = piece.fragment
            end = min(piece.begin, journal.end)
            yield Gap(
                at,
                end,
                pruned=piece.begin <= pieces[0].begin,
                settled=fragment is not None and fragment.mod_time < now - JUMP_AGE_S,
                recent=fragment is not None and fragment.mod_time > now - SETTLED_S,
                confirmed=losses.cover(at, end),
            )
        at = piece.end
        if at >= journal.end:
            return
    if at < journal.end and losses.cover(at, journal.end):
        # The head is behind these bytes, and nothing was appended there yet.
        yield Gap(at, journal.end, pruned=False, settled=False, recent=False, confirmed=True)


def require_final(gaps: Iterable[Gap], journal: JournalSnapshot, *, fails: bool, hint: str) -> None:
    """Raise ``NotYet`` with ``hint`` for the first gap that may be filled. If ``fails``, raise ``Corrupt``
    for a gap of lost bytes.

    A gap that an operator has confirmed is no error.
    """
    for gap in gaps:
        if gap.confirmed:
            continue
        if not gap.pruned and not gap.settled:
            raise NotYet(
                f"the journal has no bytes from offset {gap.begin} to {gap.end}. The bytes behind them are "
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
    """Return True for pruned bytes that were not asked for, or were asked for by offset 0.

    If only messages that were pending at the begin are gone, the fold says so if they commit.
    """
    return gap.pruned and (not journal.begin < gap.end or not journal.begin)
