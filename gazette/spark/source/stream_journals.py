"""The journals of a stream: listed no more often than needed, and the snapshot of each batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from gazette.errors import Corrupt, Invalid, NotFound
from gazette.history.snapshot import JournalSnapshot, Snapshot
from gazette.history.snapshot_builder import FragmentPlaces, require_stored, take_snapshot
from gazette.history.source import OpenAccess
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.runtime.clock import Clock, SystemClock
from gazette.spark.source.options import StreamOptions
from gazette.spark.source.table import warn_of_loss

LOGGER: Final = logging.getLogger(__name__)

Sources = Mapping[JournalName, SourceCheckpoint]

_LISTED_MAX: Final = 1000
_PER_FRAGMENT_S: Final = 0.0005
"""Back-off of listings: seconds for each fragment of one beyond `_LISTED_MAX`. A fragment takes a tenth
of that to list."""
_LAG_S: Final = 30.0
_LAG_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Listed:
    """A listing of the journals."""

    again_s: float
    """Time of the machine's clock from which on to list again."""
    snapshot: Snapshot
    known: frozenset[JournalName]
    """Journals of which something had been read when they were listed."""


class StreamJournals:
    """The journals of a stream. It belongs to one process of the driver, and to one thread."""

    def __init__(self, options: StreamOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._clock: Clock = clock or SystemClock()
        self._access: OpenAccess | None = None
        self._listed: _Listed | None = None
        self._target: dict[JournalName, Offset] | None = None
        self._places = FragmentPlaces()
        self._again: dict[JournalName, Offset] = {}
        """Journals that were created again, as the last listing has shown, and their ends there."""
        self._warned: set[tuple[JournalName, Offset]] = set()
        """Journals and ends of lost bytes that were reported."""
        # A time is about where a new query begins, and not about later journals.
        self._selection = replace(options.read.selection, begin_time_s=0.0)

    @property
    def access(self) -> OpenAccess:
        """The access of this process. It is opened when it is first used."""
        if self._access is None:
            self._access = self._options.read.access.open(self._clock)
        return self._access

    def close(self) -> None:
        if self._access is not None:
            self._access.close()
            self._access = None

    @property
    def recent(self) -> Snapshot | None:
        """The last listing, however old it is."""
        return None if self._listed is None else self._listed.snapshot

    @property
    def has_target(self) -> bool:
        """True if the query ends where the journals ended when it began."""
        return self._target is not None

    def fix_target(self) -> None:
        """Fix the ends of journals now, and leave out later journals."""
        self._target = {one.journal: one.end for one in self._list({}).journals}

    def starts(self) -> dict[JournalName, SourceCheckpoint]:
        """Return where a new query begins."""
        if self._options.read.selection.begin_time_s:
            given = replace(self._options.read.selection, lost="skip")
            snapshot = take_snapshot(self.access, given, self._places)
            require_stored(snapshot, given)
            return {one.journal: SourceCheckpoint(one.begin) for one in snapshot.journals}
        return {
            one.journal: SourceCheckpoint(one.end if self._options.latest else self.first(one))
            for one in self._list({}).journals
        }

    def first(self, journal: JournalSnapshot) -> Offset:
        """Return where to begin to read a journal of which nothing is known."""
        return self._selection.begin.get(journal.journal, self._selection.begin_all)

    def begin(self, journal: JournalSnapshot, known: Sources) -> Offset:
        """Return how far a journal was read."""
        source = known.get(journal.journal)
        return self.first(journal) if source is None else source.read_through

    def listing(self, known: Sources) -> list[JournalSnapshot]:
        """Return a recent listing; for a query that is to end, only up to its target.

        Raise ``Corrupt`` for a journal that ends before what was read of it, unless lost bytes are
        skipped.
        """
        listed = self._list(known).journals
        if self._target is None:
            return list(listed)
        return [
            _until(one, self._target[one.journal]) for one in listed if one.journal in self._target
        ]

    def kept(self, known: Sources) -> Sources:
        """Return ``known`` without the journals that were created again: they are read from their begin."""
        self._list(known)
        gone = {
            name
            for name, end in self._again.items()
            if name in known and known[name].read_through > end
        }
        return {name: one for name, one in known.items() if name not in gone} if gone else known

    def _list(self, known: Sources) -> Snapshot:
        """Return a recent listing: Spark may ask hundreds of times a second."""
        now = self._clock.monotonic()
        if (
            self._listed is None
            or now >= self._listed.again_s
            # The recent listing was not checked for journals that lost what was read of them.
            or not known.keys() <= self._listed.known
        ):
            snapshot = self._take(known)
            count = sum(len(journal.pieces) for journal in snapshot.journals)
            pause_s = max(count - _LISTED_MAX, 0) * _PER_FRAGMENT_S
            again_s = now + max(self._options.refresh_s, pause_s)
            self._listed = _Listed(again_s, snapshot, frozenset(known))
        return self._listed.snapshot

    def _take(self, known: Sources) -> Snapshot:
        """Return a new listing. Repeat it for as long as a broker that lags behind its peers may
        answer.
        """
        # Begin where each journal was read to. Each batch looks for bytes that are lost.
        begin = {journal: source.read_through for journal, source in known.items()}
        given = replace(self._selection, begin={**self._selection.begin, **begin}, lost="skip")
        self._again = {}
        began = self._clock.monotonic()
        while True:
            snapshot = take_snapshot(self.access, given, self._places)
            require_stored(snapshot, given, known)
            short = [one for one in snapshot.journals if self._is_short(one, known)]
            if not short:
                return snapshot
            if self._clock.monotonic() - began >= _LAG_S:
                break
            self.access.run(self._clock.sleep(_LAG_POLL_S))
        for one in short:
            facts = {"journal": one.journal, "end": one.begin, "read": begin[one.journal]}
            if self._selection.lost == "fail":
                raise Corrupt(
                    "a journal of the stream ends before what was read of it",
                    hint="It was deleted and created again, or has lost its end: give the query "
                    "another checkpointLocation to read it from its begin. "
                    "failOnDataLoss=false does that for this journal alone.",
                    **facts,
                )
            LOGGER.warning(
                "journal %(journal)s ends at %(end)s, before what was read of it (%(read)s): it is "
                "read from its begin",
                facts,
            )
        self._again = {one.journal: one.begin for one in short}
        kept = {name: at for name, at in begin.items() if name not in self._again}
        given = replace(given, begin={**self._selection.begin, **kept})
        self._places = FragmentPlaces()
        return take_snapshot(self.access, given, self._places)

    def _is_short(self, journal: JournalSnapshot, known: Sources) -> bool:
        source = known.get(journal.journal)
        # A snapshot begins at the journal's end if that is before the offset that was asked for. A
        # store without fragments of a journal does not know the journal's end.
        knows_end = journal.begin > 0 or not self._selection.stores
        return source is not None and knows_end and journal.begin < source.read_through

    def snapshot(self, known: Sources, ends: Mapping[JournalName, Offset]) -> Snapshot:
        """Return what a batch reads. List again, since fragments may have been joined or pruned.

        Raise ``Corrupt`` for lost bytes, unless they are skipped.
        """
        selection = replace(
            self._selection,
            journals=tuple(sorted(ends)),
            selector=None,
            end=dict(ends),
            sources={journal: known[journal] for journal in ends if journal in known},
        )
        try:
            found = take_snapshot(self.access, selection, self._places)
        except (Invalid, NotFound) as error:
            raise Corrupt(
                f"a batch of the stream cannot be read again: {error}",
                hint="A journal was deleted or created again: give the query another "
                "checkpointLocation.",
            ) from error
        warn_of_loss(found, self._warned)
        return found


def _until(journal: JournalSnapshot, end: Offset) -> JournalSnapshot:
    """Return a journal cut at an earlier end."""
    if journal.end <= end:
        return journal
    pieces = [replace(p, end=min(p.end, end)) for p in journal.pieces if p.begin < end]
    return replace(journal, begin=min(journal.begin, end), end=end, pieces=tuple(pieces))
