"""The journals of a stream: listings, as few as possible, and the snapshot of each batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from gazette.errors import Corrupt, Invalid, NotFound
from gazette.fragment.index import JUMP_AGE_S
from gazette.history.loss_warnings import warn_of_loss
from gazette.history.snapshot import JournalSnapshot, Snapshot
from gazette.history.snapshot_builder import FragmentPlaces, require_stored, take_snapshot
from gazette.history.source import OpenAccess
from gazette.history.spark.source.options import StreamOptions
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.journal_life import JournalLife, created_again
from gazette.runtime.clock import Clock, SystemClock

LOGGER: Final = logging.getLogger(__name__)

Sources = Mapping[JournalName, SourceCheckpoint]
"""By journal: how far the query has read. An argument ``known`` has the sources before a batch."""

_LISTED_MAX: Final = 1000
_PER_FRAGMENT_S: Final = 0.0005
"""Seconds to wait before the next listing, for each fragment beyond `_LISTED_MAX`. To list a fragment takes
a tenth of this time."""
_ASK_BROKERS: Final = (
    ". Brokers know if an operator has confirmed that they are lost: read by the option broker.address, "
    "with direct=true instead of store"
)
_LAG_S: Final = 30.0
"""Seconds for which a broker that lags behind its peers may show fewer bytes than were read."""
_LAG_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Listed:
    """A listing of the journals."""

    again_s: float
    """Time of the monotonic clock at which to list again."""
    snapshot: Snapshot
    known: frozenset[JournalName]
    """Journals that the query had read at the time of the listing."""
    lives: Mapping[JournalName, JournalLife]
    """Lives of these journals, as of that time."""


class StreamJournals:
    """The journals of a stream, in one process of the driver. For one thread."""

    def __init__(self, options: StreamOptions, clock: Clock | None = None) -> None:
        self._options = options
        self.clock: Clock = clock or SystemClock()
        self._access: OpenAccess | None = None
        self._listed: _Listed | None = None
        self._target: dict[JournalName, Offset] | None = None
        """Ends of the journals at which the query ends. None: the query has no end."""
        self._places = FragmentPlaces()
        self._again: dict[JournalName, Offset] = {}
        """By journal that has lost bytes which the query had read: its end in the last listing."""
        self._lives: Mapping[JournalName, JournalLife] = {}
        """Lives of the journals that the query has read."""
        self._others: dict[JournalName, JournalLife] = {}
        """Lives that differ from the lives in ``_lives``, as of the last listing."""
        self._warned: set[tuple[JournalName, Offset]] = set()
        """Journals and ends of lost bytes that were reported."""
        self._awaited: set[tuple[JournalName, Offset]] = set()
        """Journals and ends of bytes that the stream waits for and that were reported."""
        # A begin time is for the journals of a new query, not for later journals.
        self._selection = replace(options.read.selection, begin_time_s=0.0)

    @property
    def access(self) -> OpenAccess:
        """The access of this process, opened at its first use."""
        if self._access is None:
            self._access = self._options.read.access.open(self.clock)
        return self._access

    def close(self) -> None:
        if self._access is not None:
            self._access.close()
            self._access = None

    def resume(self, lives: Mapping[JournalName, JournalLife]) -> None:
        """Set the lives to which the query's offsets belong. Call it before the other methods."""
        self._lives = lives

    @property
    def lives(self) -> dict[JournalName, JournalLife]:
        """Lives of the journals: changed lives, else lives that the query read, else listed lives."""
        lives = {} if self.recent is None else {j.journal: j.life for j in self.recent.journals}
        listed = {name: life for name, life in lives.items() if life is not None}
        return {**listed, **self._lives, **self._others}

    @property
    def recent(self) -> Snapshot | None:
        """The last listing, of any age."""
        return None if self._listed is None else self._listed.snapshot

    @property
    def has_target(self) -> bool:
        """True if the query ends at the ends that the journals had when it began."""
        return self._target is not None

    def fix_target(self) -> None:
        """Fix the ends of journals now, and leave out later journals."""
        self._target = {journal.journal: journal.end for journal in self._list({}).journals}

    def starts(self) -> dict[JournalName, SourceCheckpoint]:
        """Return the offsets at which a new query begins."""
        selection, latest = self._options.read.selection, self._options.latest
        journals = self._list({}).journals  # List in any case: `lives` needs a listing.
        if selection.begin_time_s or latest:
            selection = replace(selection, lost="skip")
            snapshot = take_snapshot(self.access, selection, self._places)
            require_stored(snapshot, selection)
            return {
                journal.journal: SourceCheckpoint(journal.end if latest else journal.begin)
                for journal in snapshot.journals
            }
        return {journal.journal: SourceCheckpoint(self.first(journal)) for journal in journals}

    def first(self, journal: JournalSnapshot) -> Offset:
        """Return the offset at which to begin a journal that the query has not read."""
        return self._selection.begin.get(journal.journal, self._selection.begin_all)

    def begin(self, journal: JournalSnapshot, known: Sources) -> Offset:
        """Return the offset up to which a journal was read."""
        source = known.get(journal.journal)
        return self.first(journal) if source is None else source.read_through

    def listing(self, known: Sources) -> list[JournalSnapshot]:
        """Return a recent listing; for a query with a target, only up to the target.

        Raise ``Corrupt`` for a journal that ends before read bytes, unless lost bytes are skipped.
        """
        journals = self._list(known).journals
        if self._target is None:
            return list(journals)
        return [_until(j, self._target[j.journal]) for j in journals if j.journal in self._target]

    def kept(self, known: Sources) -> Sources:
        """Return ``known`` without the journals to read from their begin again. These were created again, or
        have lost bytes that were read."""
        self._list(known)
        again = {
            name
            for name, end in self._again.items()
            if name in known and known[name].read_through > end
        } | (self._others.keys() & known.keys())
        return {n: source for n, source in known.items() if n not in again} if again else known

    def _list(self, known: Sources) -> Snapshot:
        """Return a recent listing: Spark may ask hundreds of times a second."""
        now = self.clock.monotonic()
        if (
            self._listed is None
            or now >= self._listed.again_s
            # The recent listing was not checked for losses of all journals in `known`.
            or not known.keys() <= self._listed.known
            or self._lives != self._listed.lives
        ):
            snapshot = self._take(known)
            count = sum(len(journal.pieces) for journal in snapshot.journals)
            pause_s = max(count - _LISTED_MAX, 0) * _PER_FRAGMENT_S
            again_s = now + max(self._options.refresh_s, pause_s)
            self._listed = _Listed(again_s, snapshot, frozenset(known), self._lives)
        return self._listed.snapshot

    def _take(self, known: Sources) -> Snapshot:
        """Return a new listing. Repeat the request while the broker that answers may lag behind its peers.
        Raise ``Corrupt`` if a journal ends before the read offset, and lost bytes are an error."""
        # Begin at the offset that was read, and end before bytes that may still come. Lost bytes are
        # checked in each batch.
        begin = {journal: source.read_through for journal, source in known.items()}
        selection = replace(self._selection, begin={**self._selection.begin, **begin}, lost="wait")
        self._again, self._others = {}, {}
        begin_s = self.clock.monotonic()
        while True:
            snapshot = take_snapshot(self.access, selection, self._places)
            require_stored(snapshot, selection, known)
            self._others = self._other_lives(snapshot, known)
            short = [journal for journal in snapshot.journals if self._is_short(journal, known)]
            if not short and not self._others:
                self._report_awaited(snapshot)
                return snapshot
            if not short:
                break
            if self.clock.monotonic() - begin_s >= _LAG_S:
                break
            self.access.run(self.clock.sleep(_LAG_POLL_S))
        for cut in short:
            facts = {"journal": cut.journal, "end": cut.begin, "read": begin[cut.journal]}
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
        self._again = {cut.journal: cut.begin for cut in short}
        to_reread = self._again.keys() | self._others.keys()
        begins_kept = {name: offset for name, offset in begin.items() if name not in to_reread}
        selection = replace(selection, begin={**self._selection.begin, **begins_kept})
        self._places = FragmentPlaces()
        return take_snapshot(self.access, selection, self._places)

    def _other_lives(self, snapshot: Snapshot, known: Sources) -> dict[JournalName, JournalLife]:
        """Return the lives of journals that were created again after the query had read them.

        Raise ``Corrupt`` for the first such journal, unless lost bytes are skipped.
        """
        other_lives = {}
        for journal in snapshot.journals:
            life, former = journal.life, self._lives.get(journal.journal)
            if (
                life is None
                or former is None
                or journal.journal not in known
                or not life.is_other(former)
            ):
                continue
            other_lives[journal.journal] = life
            if self._selection.lost == "fail":
                raise created_again(
                    journal.journal,
                    former.created,
                    life.created,
                    hint="Give the query another checkpointLocation to read it from its begin."
                    " failOnDataLoss=false does that for this journal alone.",
                )
            LOGGER.warning(
                "journal %(journal)s was deleted and created again: it is read from its begin",
                {"journal": journal.journal},
            )
        return other_lives

    def _report_awaited(self, snapshot: Snapshot) -> None:
        """Log each range of bytes that the stream waits for, once."""
        for journal in snapshot.journals:
            if journal.awaited is None or (journal.journal, journal.awaited.end) in self._awaited:
                continue
            begin, end, _ = journal.awaited
            self._awaited.add((journal.journal, end))
            LOGGER.warning(
                "journal %(journal)s has no bytes from %(begin)s to %(end)s yet, and has later ones: the "
                "stream waits for a broker to store them, until %(hours)s h after the next fragment was "
                "stored%(unknown)s",
                {
                    "journal": journal.journal,
                    "begin": begin,
                    "end": end,
                    "hours": JUMP_AGE_S // 3600,
                    "unknown": _ASK_BROKERS if self._selection.stores else "",
                },
            )

    def _is_short(self, journal: JournalSnapshot, known: Sources) -> bool:
        """Return True if a journal ends before the offset that was read."""
        source = known.get(journal.journal)
        # A snapshot begins at the journal's end if the end is before the wanted offset. A store without
        # fragments of a journal does not know the journal's end.
        is_end_known = journal.begin > 0 or not self._selection.stores
        return source is not None and is_end_known and journal.begin < source.read_through

    def snapshot(self, known: Sources, ends: Mapping[JournalName, Offset]) -> Snapshot:
        """Return the snapshot of a batch. List again, since fragments may have been joined or pruned.

        Raise ``Corrupt`` for lost bytes, unless they are skipped.
        """
        selection = replace(
            self._selection,
            journals=tuple(sorted(ends)),
            selector=None,
            end=dict(ends),
            sources={journal: known[journal] for journal in ends if journal in known},
            lives=self.lives,
        )
        try:
            snapshot = take_snapshot(self.access, selection, self._places)
        except (Invalid, NotFound) as error:
            raise Corrupt(
                f"a batch of the stream cannot be read again: {error}",
                hint="A journal was deleted or created again: give the query another "
                "checkpointLocation.",
            ) from error
        warn_of_loss(snapshot, self._warned)
        return snapshot


def _until(journal: JournalSnapshot, end: Offset) -> JournalSnapshot:
    """Return a journal cut at an earlier end."""
    if journal.end <= end:
        return journal
    pieces = [replace(p, end=min(p.end, end)) for p in journal.pieces if p.begin < end]
    return replace(journal, begin=min(journal.begin, end), end=end, pieces=tuple(pieces))
