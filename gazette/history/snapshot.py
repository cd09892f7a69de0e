"""A fixed range of the history of journals: `Snapshot`, and the `Run`s of its tasks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from gazette.errors import Invalid
from gazette.history.columns import MessageFormat
from gazette.message.uuid import ProducerId
from gazette.protocol.checkpoint import ProducerState
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.journal_life import JournalLife

RUN_BYTES: Final = 64 << 20
"""Bytes of a journal that one task reads. A task holds at most about as many bytes in memory."""

GAP_HINT: Final = "Read again later, end before the gap, or skip lost bytes."
STORE_GAP_HINT: Final = (
    "Read through a broker: it knows if an operator has confirmed that these bytes are lost. Or read again "
    "later, end before the gap, or skip lost bytes."
)
"""Hint for a gap in stores, if no broker was asked."""
LOST_HINT: Final = "Begin behind these bytes, or skip lost bytes."
PLACE_HINT: Final = (
    "If the journal was deleted and created again, read it from its begin. If the offset was given, "
    "give one where a message begins."
)
READ_AGAIN_HINT: Final = "Read again: a new snapshot leaves these bytes out."

RUN_PIECES: Final = 256
"""Greatest number of pieces of a run: each piece costs a task some requests, even if it is small."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[begin, end)`` of a journal, and their stored fragment. Without a ``fragment``, the bytes are
    read through brokers."""

    begin: Offset
    end: Offset
    fragment: Fragment | None = None
    start: Offset | None = None
    """Begin of the piece before bytes were cut off there. None: no bytes were cut off."""


class Awaited(NamedTuple):
    """Bytes of a journal that are not stored yet, although later bytes are."""

    begin: Offset
    end: Offset
    known_end: Offset
    """End of the later bytes."""


class LostBytes(NamedTuple):
    """Lost bytes of a journal that a reader skips."""

    begin: Offset
    end: Offset
    is_confirmed: bool = False
    """True if an operator has confirmed the loss to the brokers."""


@dataclass(frozen=True, slots=True)
class JournalSnapshot:
    """The part of one journal that a snapshot reads.

    ``producers`` are the states of its producers at ``begin``, from a checkpoint with that offset; empty
    without a checkpoint. Messages that were pending at ``begin`` are read again only for the producers in
    ``replays``. Those of other producers are taken not to commit in the snapshot, since most never do. The
    fold finds the producers whose messages commit.
    """

    journal: JournalName
    shape: MessageFormat
    begin: Offset
    end: Offset
    pieces: tuple[Piece, ...]
    """Pieces in ascending order without overlap, from `pieces_begin` on. Bytes between them are missing."""
    producers: Mapping[ProducerId, ProducerState] = field(default_factory=dict)
    replays: frozenset[ProducerId] = frozenset()
    lost: tuple[LostBytes, ...] = ()
    """Missing bytes that a reader skips: bytes that ``Selection.lost`` notes, and all bytes that an operator
    has confirmed as lost."""
    life: JournalLife | None = None
    """The life of the journal, from its broker. Stores, and brokers of the original, do not know the life."""
    awaited: Awaited | None = None
    """Bytes from ``end`` on that may still come, if they are the reason why the snapshot ends there."""

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end:
            raise Invalid(
                f"invalid range of offsets ({self.begin} to {self.end})", path=self.journal
            )
        at = self.pieces_begin
        for piece in self.pieces:
            if not at <= piece.begin < piece.end <= self.end:
                raise Invalid(
                    f"invalid piece ({piece.begin} to {piece.end}, behind {at})", path=self.journal
                )
            at = piece.end

    @property
    def pending(self) -> dict[ProducerId, Offset]:
        """By producer with pending messages at ``begin``: the offset of the first one."""
        return {
            producer: state.begin
            for producer, state in self.producers.items()
            if state.begin is not None and state.begin < self.begin
        }

    @property
    def pieces_begin(self) -> Offset:
        """Offset from which bytes are wanted: ``begin``, or the first message that is pending at ``begin``.
        The first piece begins after that offset if these bytes are missing."""
        return min([self.begin, *self.pending.values()])

    @property
    def since(self) -> dict[ProducerId, Offset]:
        """By replayed producer: the offset from which its messages count."""
        return {
            producer: begin for producer, begin in self.pending.items() if producer in self.replays
        }

    @property
    def first(self) -> Offset:
        """Offset of the first byte that is read; ``end`` if no byte is read."""
        return self.pieces[0].begin if self.pieces else self.end

    @property
    def missed(self) -> tuple[LostBytes, ...]:
        """``lost`` bytes from ``begin`` on. If ``begin`` is 0, pruned bytes are not among them, unless an
        operator has confirmed the loss."""
        return tuple(
            lost._replace(begin=max(lost.begin, self.begin))
            for lost in self.lost
            if lost.end > self.begin and (self.begin or lost.is_confirmed or lost.end > self.first)
        )

    def runs(self, run_bytes: int, number: int) -> list[Run]:
        """Return runs of about ``run_bytes`` each. The first run has the number ``number``.

        A run has the pieces that begin between two multiples of ``run_bytes``, at most `RUN_PIECES` of them.
        So most runs stay the same if earlier bytes are pruned, and their summaries can be used again.
        """
        since = self.since
        groups: list[list[Piece]] = []
        last_window = -1
        for piece in cover(self.pieces, min([self.begin, *since.values()]), self.end):
            window = piece.begin // run_bytes
            if window != last_window or len(groups[-1]) == RUN_PIECES:
                groups.append([])
                last_window = window
            groups[-1].append(piece)
        return [
            Run(
                journal=self.journal,
                shape=self.shape,
                number=number + index,
                pieces=tuple(group),
                begin=self.begin,
                since=since if group[0].begin < self.begin else {},
                last=index == len(groups) - 1,
                # The run is the first one, or the bytes before it are lost: nothing continues into it.
                sure=index == 0 or groups[index - 1][-1].end < group[0].begin,
            )
            for index, group in enumerate(groups)
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces of one journal, for one task."""

    journal: JournalName
    shape: MessageFormat
    number: int
    """Position among the runs of the snapshot."""
    pieces: tuple[Piece, ...]
    begin: Offset
    """Offset from which messages count. The pieces may begin before this offset."""
    since: Mapping[ProducerId, Offset] = field(default_factory=dict)
    """By producer whose messages count from an earlier offset on: that offset."""
    last: bool = True
    """True for the last run of its journal. An incomplete message at the end of such a run is left out."""
    sure: bool = True
    """True if the first byte begins a message. Otherwise it may continue a message of the run before."""
    beyond: tuple[Piece, ...] = ()
    """Pieces after the run, if its last message ends there: read the message to its end."""

    @property
    def end(self) -> Offset:
        return self.pieces[-1].end

    @property
    def length(self) -> int:
        """Bytes of content."""
        return sum(piece.end - piece.begin for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A fixed range of the history of some journals."""

    journals: tuple[JournalSnapshot, ...]

    @property
    def length(self) -> int:
        """Bytes of content."""
        return sum(piece.end - piece.begin for journal in self.journals for piece in journal.pieces)

    @property
    def shapes(self) -> tuple[MessageFormat, ...]:
        """Encodings of the messages of the journals."""
        return tuple(journal.shape for journal in self.journals)

    def runs(self, run_bytes: int = RUN_BYTES) -> tuple[Run, ...]:
        """Return runs of whole pieces, of about ``run_bytes`` each: journal by journal, in order."""
        runs: list[Run] = []
        for journal in self.journals:
            runs += journal.runs(run_bytes, len(runs))
        return tuple(runs)

    def replaying(self, replays: Mapping[JournalName, frozenset[ProducerId]]) -> Snapshot:
        """Return the same snapshot, but with replays of these producers."""
        return Snapshot(
            tuple(
                replace(journal, replays=replays.get(journal.journal, frozenset()))
                for journal in self.journals
            )
        )


def cover(fragments: Iterable[Piece], begin: Offset, end: Offset) -> tuple[Piece, ...]:
    """Cut ``fragments``, which are sorted by begin and end: no piece overlaps the pieces before it. Leave out
    bytes before ``begin`` and after ``end``."""
    pieces: list[Piece] = []
    end_before = begin
    for piece in fragments:
        low, high = max(end_before, piece.begin), min(end, piece.end)
        if low < high:
            start = piece.begin if piece.start is None and low > piece.begin else piece.start
            pieces.append(Piece(low, high, piece.fragment, start))
            end_before = high
    return tuple(pieces)
