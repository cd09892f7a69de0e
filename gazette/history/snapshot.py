"""What is read of some journals, fixed once and for all: `Snapshot`, and the `Run`s of its tasks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gazette.errors import Invalid
from gazette.history.columns import Shape
from gazette.message.message_uuid import ProducerId
from gazette.protocol.checkpoint import ProducerState
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset

RUN_BYTES: Final = 64 << 20
"""How much a task should read, in bytes of the journal: a task also holds about as much at worst."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[begin, end)`` of a journal, and the stored fragment that they are of.

    Without a ``fragment`` they are read through brokers.
    """

    begin: Offset
    end: Offset
    fragment: Fragment | None = None


@dataclass(frozen=True, slots=True)
class JournalSnapshot:
    """What is read of one journal.

    ``producers`` are the states of its producers at ``begin``, as of a checkpoint that has been read
    through to there; none, if reading begins from scratch. What those had pending is read again for
    the producers of ``replays`` only: most of what is pending for long never commits.
    """

    journal: JournalName
    shape: Shape
    begin: Offset
    end: Offset
    pieces: tuple[Piece, ...]
    """Ascending, without overlap, from where the first pending message begins. Between two that do not
    meet the journal has lost its bytes."""
    producers: Mapping[ProducerId, ProducerState] = field(default_factory=dict)
    replays: frozenset[ProducerId] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end:
            raise Invalid(
                f"invalid range of offsets ({self.begin} to {self.end})", path=self.journal
            )
        at = self.pieces_begin
        for piece in self.pieces:
            if not at <= piece.begin < piece.end <= self.end:
                raise Invalid(
                    f"invalid piece ({piece.begin} to {piece.end}, after {at})", path=self.journal
                )
            at = piece.end

    @property
    def pending(self) -> dict[ProducerId, Offset]:
        """Producers that had something pending at ``begin``, and where that begins."""
        return {
            producer: state.begin
            for producer, state in self.producers.items()
            if state.begin is not None and state.begin < self.begin
        }

    @property
    def pieces_begin(self) -> Offset:
        """Where pieces begin: at ``begin``, or before it at the first message that is pending there."""
        return min([self.begin, *self.pending.values()])

    @property
    def since(self) -> dict[ProducerId, Offset]:
        """From where on the messages of producers count that are to be replayed."""
        return {
            producer: begin for producer, begin in self.pending.items() if producer in self.replays
        }

    def runs(self, run_bytes: int, number: int) -> list[Run]:
        """What is to be read in runs of about that size; the first run has that number."""
        since = self.since
        groups: list[list[Piece]] = []
        size = 0
        for piece in cover(self.pieces, min([self.begin, *since.values()]), self.end):
            length = piece.end - piece.begin
            if not groups or size + length > run_bytes:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += length
        return [
            Run(
                journal=self.journal,
                shape=self.shape,
                number=number + at,
                pieces=tuple(group),
                begin=self.begin,
                since=since if group[0].begin < self.begin else {},
                last=at == len(groups) - 1,
            )
            for at, group in enumerate(groups)
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces of one journal, for one task."""

    journal: JournalName
    shape: Shape
    number: int
    """Its place among the runs of the snapshot."""
    pieces: tuple[Piece, ...]
    begin: Offset
    """From where on messages count; pieces may begin earlier."""
    since: Mapping[ProducerId, Offset] = field(default_factory=dict)
    """Those whose messages count from an earlier offset."""
    last: bool = True
    """Whether it ends its journal's snapshot: a message that is incomplete there is left for later."""

    @property
    def end(self) -> Offset:
        return self.pieces[-1].end

    @property
    def length(self) -> int:
        """Bytes of content."""
        return sum(piece.end - piece.begin for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is read of some journals."""

    journals: tuple[JournalSnapshot, ...]

    @property
    def length(self) -> int:
        """Bytes of content."""
        return sum(piece.end - piece.begin for journal in self.journals for piece in journal.pieces)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """How the messages of each journal lie in it."""
        return tuple(journal.shape for journal in self.journals)

    def runs(self, run_bytes: int = RUN_BYTES) -> tuple[Run, ...]:
        """Runs of whole fragments, of about ``run_bytes`` each: journal by journal, in order."""
        runs: list[Run] = []
        for journal in self.journals:
            runs += journal.runs(run_bytes, len(runs))
        return tuple(runs)

    def replaying(self, replays: Mapping[JournalName, frozenset[ProducerId]]) -> Snapshot:
        """The same, with what these producers had pending read again."""
        return Snapshot(
            tuple(
                replace(journal, replays=replays.get(journal.journal, frozenset()))
                for journal in self.journals
            )
        )


def cover(fragments: Iterable[Piece], begin: Offset, end: Offset) -> tuple[Piece, ...]:
    """Cut pieces that ascend by begin and end to what each adds to those before it.

    What is before ``begin`` or after ``end`` is left out.
    """
    pieces: list[Piece] = []
    at = begin
    for piece in fragments:
        low, high = max(at, piece.begin), min(end, piece.end)
        if low < high:
            pieces.append(Piece(low, high, piece.fragment))
            at = high
    return tuple(pieces)
