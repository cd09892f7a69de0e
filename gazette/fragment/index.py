"""Stage 9 of the byte path: takes commits from `spool_file` and listings from `listing`. Finds, for
`broker/api/read`, the fragment from which to read an offset.

The index of one replica joins the fragments of blob stores with fragments that only the local spool has.
Readers wait here at the head of a journal.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from gazette.errors import Closed
from gazette.fragment.conflicts import FragmentConflict, conflicts_with
from gazette.fragment.cover_set import CoverSet, Span, uncovered
from gazette.fragment.local_file import LocalFragment
from gazette.fragment.unexplained import NONE, Unexplained, undecided
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.status import Status
from gazette.runtime.clock import Clock
from gazette.runtime.latch import Latch

AT_WRITE_HEAD: Final = -1
"""Offset in a read request that stands for the head of the journal."""

JUMP_AGE_S: Final = 6 * 60 * 60
"""Readers jump a hole once the fragment after the hole was persisted this many seconds ago. Before that, a
former broker of the journal may still upload the missing fragment."""

SETTLED_S: Final = 60
"""Readers jump to the first fragment once a listing began this many seconds after the fragment was stored.

Fragments may be stored out of order, so an earlier fragment may appear a little later.
"""

_FORGOTTEN_MAX: Final = 256
"""Number of cancelled waits that a heap keeps, in addition to one for each wait that goes on."""


@dataclass(frozen=True, slots=True)
class IndexResult:
    """Where to read. ``status`` is OK, with a fragment, or OFFSET_NOT_YET_AVAILABLE.

    ``offset`` is the requested offset, or a later one if offsets are to be skipped. ``local`` is set if the
    fragment's bytes are in a spool of this broker, in memory or in its file.
    """

    status: Status
    offset: Offset
    write_head: Offset
    fragment: Fragment | None = None
    local: LocalFragment | None = None


_Waiter: TypeAlias = "tuple[Offset, int, asyncio.Future[None]]"


class Index:
    """The readable fragments of one journal. Loop-bound.

    Readers that wait at the head are in a heap, by offset: a commit wakes only the readers that it serves.
    Each refresh wakes all readers that wait in a hole.

    Readers at a primary get a commit once all replicas have it: see `show`. If readers got it earlier and the
    primary was lost, the next primary might have other bytes at these offsets.
    """

    def __init__(self, journal: JournalName, clock: Clock) -> None:
        self.journal = journal
        self._clock = clock
        self._set: CoverSet[Fragment | LocalFragment] = CoverSet()
        self._local: CoverSet[LocalFragment] = CoverSet()
        self._shown_to: Offset | None = None
        """End of the commits that readers get; None: readers get each commit at once."""
        self._hidden: deque[LocalFragment] = deque()
        """Commits after ``_shown_to``, in order."""
        self._stored: list[Fragment] = []
        """Fragments whose local files were released since the last listing, in their stored form."""
        self._listed_at = 0.0
        """Time at which the last listing began, in Unix seconds."""
        self.first_refresh = Latch()
        """Set once the blob stores were listed."""
        self._closed = False
        self._at_head: list[_Waiter] = []
        """Heap of the waits at the head: each has its offset, its number, and the waiter to wake."""
        self._in_holes: dict[asyncio.Future[None], None] = {}
        self._waits = 0  # Number of waits so far. It orders the waits at one offset.
        self.conflicts: tuple[FragmentConflict, ...] = ()
        """The conflicts of the last listing: pairs of fragments with the same offsets and different bytes."""
        self.unexplained = NONE
        """Stored fragments that may or may not be the journal's, as of the last listing."""
        self.unexplained_to: Offset = 0
        """End of the unexplained fragments; zero if there are none."""
        self._known_head: Offset = 0
        """An offset that the journal has reached. The fragments here may end earlier."""
        self._lost: tuple[tuple[Offset, Offset], ...] = ()
        self._waiting_at_head: set[asyncio.Future[None]] = set()
        """The waiters in the heap whose query was not cancelled."""
        self.on_change: Callable[[], None] | None = None
        """Called when there may be more bytes for readers, and when the index closes."""
        self.on_hole: Callable[[], None] | None = None
        """Called when a commit leaves a hole before it that is not known to be lost."""

    @property
    def begin_offset(self) -> Offset:
        """Begin of the first fragment, shown to readers or not; zero for no fragment."""
        return self._hidden[0].begin if self._hidden and not len(self._set) else self._set.begin

    @property
    def end_offset(self) -> Offset:
        """End of the last fragment, shown to readers or not; zero for no fragment."""
        return max(self._set.end, self._hidden[-1].end if self._hidden else 0)

    @property
    def write_head(self) -> Offset:
        """Head of the journal for readers, as far as this broker knows."""
        return max(self._set.end, self._known_head)

    @property
    def last_mod_time(self) -> int:
        """Unix seconds at which the last fragment was persisted; 0 if it was not, or if there are no
        fragments."""
        if self._hidden or not len(self._set):
            return 0
        return _fragment(self._set[-1]).mod_time

    @property
    def has_hole(self) -> bool:
        """True if a fragment that may soon be uploaded is missing, between others or before the first."""
        if not len(self._set):
            return False
        first = self._set[0]
        holes = self.holes(self._set[-1].begin)
        if first.begin and self._is_settled(first):
            holes = holes[1:]  # No fragment before the first can be missing any more.
        return not all(self._is_lost(*hole) for hole in holes)

    @property
    def waiting(self) -> int:
        """Number of queries that wait."""
        return len(self._waiting_at_head) + len(self._in_holes)

    @property
    def local(self) -> list[LocalFragment]:
        """Fragments whose bytes this broker has, and no store is known to have."""
        return self._local[0:]

    def fragments(self, begin: Offset = 0) -> list[Fragment]:
        """Return the fragments of the cover set that readers get, and that begin at ``begin`` or later."""
        return [_fragment(span) for span in self._set[self._set.index_at(begin) :]]

    def holes(self, end: Offset) -> list[tuple[Offset, Offset]]:
        """Return the offsets before ``end`` that no fragment has, shown to readers or not."""
        holes, covered_to = [], 0
        for span in (*self._set, *self._hidden):
            if span.begin >= end:
                break
            if covered_to < span.begin:
                holes.append((covered_to, span.begin))
            covered_to = max(covered_to, span.end)
        return [*holes, (covered_to, end)] if covered_to < end else holes

    def lacks(self, begin: Offset, end: Offset) -> list[tuple[Offset, Offset]]:
        """Return the offsets of ``[begin, end)`` that no fragment has, except offsets known as lost."""
        clipped = ((max(begin, hole[0]), hole[1]) for hole in self.holes(end) if hole[1] > begin)
        return [hole for hole in clipped if not self._is_lost(*hole)]

    @property
    def lost(self) -> tuple[tuple[Offset, Offset], ...]:
        """Offsets that are known as lost: see ``adopt_head``."""
        return self._lost

    def adopt_head(self, known_head: Offset, lost: tuple[tuple[Offset, Offset], ...]) -> None:
        """Adopt an offset that the journal has reached, and the offsets that are lost."""
        self._known_head = known_head
        if lost != self._lost:
            self._lost = lost
            self._wake_holes()

    def has(self, fragment: Fragment) -> bool:
        """Return True if there is exactly ``fragment``, shown to readers or not."""
        hidden = (commit.fragment for commit in self._hidden)
        return any(
            (other.begin, other.end, other.sum) == (fragment.begin, fragment.end, fragment.sum)
            for other in (*self.fragments(fragment.begin), *hidden)
        )

    def spool_commit(self, local: LocalFragment) -> None:
        """Add a fragment that the spool has committed, and wake the readers of its offsets. The fragment
        replaces the shorter one of the same spool. A commit beyond ``_shown_to`` waits for `show`.
        """
        if self._shown_to is None or local.end <= self._shown_to:
            self._add(local)
        else:
            self._hidden.append(local)

    def show(self, end: Offset) -> None:
        """Let readers have all commits up to ``end``. Later commits wait for another call."""
        if self._shown_to is not None and end <= self._shown_to:
            return
        self._shown_to = end
        while self._hidden and self._hidden[0].end <= end:
            self._add(self._hidden.popleft())

    def _add(self, local: LocalFragment) -> None:
        """Let readers have a commit. Report a hole before it, or wake readers in a hole that it fills."""
        if self._set.grow_last(local):  # The same spool has grown.
            if not self._local.grow_last(local):
                self._local.add(local)
            self._wake_head()
            return
        former_end = self._set.end
        if not self._set.add(local):
            return
        self._local.add(local)
        if local.begin < former_end:
            self._wake_holes()
        elif local.begin > former_end:
            self._note_hole(former_end, local.begin)
        self._wake_head()

    def _note_hole(self, begin: Offset, end: Offset) -> None:
        if self.on_hole is not None and self.first_refresh.is_set and not self._is_lost(begin, end):
            self.on_hole()

    def stored(self, fragment: Fragment) -> None:
        """Release the local file of exactly ``fragment``, if the index still has the file: a store has the
        bytes."""
        begin, end = fragment.begin, fragment.end
        local = self._local.equal(begin, end)
        if local is None or local.fragment.sum != fragment.sum:
            return
        self._local = CoverSet(other for other in self._local if other is not local)
        self._stored.append(fragment)
        if self._set.equal(begin, end) is local:
            self._set.add(fragment)

    def replace_remote(
        self,
        remote: CoverSet[Fragment],
        conflicts: Iterable[FragmentConflict] = (),
        *,
        unexplained: Unexplained = NONE,
        listed_at: float | None = None,
    ) -> None:
        """Adopt the latest listing of the blob stores, with its conflicts and unexplained fragments.

        The listing began at ``listed_at`` (Unix seconds; None: now). End the wait for the first refresh.
        Release local fragments that the listing covers; a file is closed once its last reader has finished.
        The other local fragments stay.
        """
        self._listed_at = self._clock.now() if listed_at is None else listed_at
        self.conflicts = (*conflicts, *conflicts_with(remote, self._local))
        self.unexplained, self.unexplained_to = unexplained, unexplained.end
        self._local = CoverSet(uncovered(self._local, remote))
        self._set = CoverSet(remote)
        # These fragments may have been stored after this listing began. The next listing begins later.
        stored, self._stored = self._stored, []
        for fragment in uncovered(stored, remote):
            self._set.add(fragment)
        for local in self._local:
            self._set.add(local)
        self.first_refresh.set()
        self._wake_holes()
        self._wake_head()

    async def wait_first_refresh(self) -> None:
        """Return once stores were listed. Raise ``Closed`` if the index closes. May be cancelled."""
        await self.first_refresh.wait()
        self._check_open()

    def find(self, offset: Offset, begin_mod_time: int = 0) -> IndexResult:
        """Find the fragment from which to read ``offset`` now, as ``query`` does without ``block``."""
        self._check_open()
        return self._find(offset, begin_mod_time)

    async def query(
        self, offset: Offset, block: bool = False, begin_mod_time: int = 0
    ) -> IndexResult:
        """Find the fragment from which to read ``offset``; ``AT_WRITE_HEAD`` is the present head.

        If no fragment covers the offset, and the gap is known as lost, jump to the next fragment. Jump to the
        next persisted fragment in two more cases: it is the journal's first and has settled (`SETTLED_S`), or
        it was persisted long ago (`JUMP_AGE_S`). Skip persisted fragments older than ``begin_mod_time`` (Unix
        seconds). If no fragment is left, return OFFSET_NOT_YET_AVAILABLE or, with ``block``, wait for one.

        Raise ``Closed`` when the index closes. Raise ``Unavailable`` if only unexplained fragments have the
        offset, or offsets that a jump would pass over. Cancellation: no effect; the caller owns the deadline.
        """
        position = self.write_head if offset == AT_WRITE_HEAD else offset
        while True:
            result = self.find(position, begin_mod_time)
            if result.status is Status.OK or not block:
                return result
            position = result.offset
            await self._changed(position)

    def close(self) -> None:
        """Fail present and future waits with ``Closed``, and release local files."""
        self._closed = True
        self._local = CoverSet()
        self._set = CoverSet()
        self._hidden.clear()
        self.first_refresh.set()
        self._wake_holes()
        for _, _, waiter in self._at_head:
            _wake(waiter)
        self._at_head.clear()
        self._waiting_at_head.clear()
        self._report_change()
        # These functions refer to the replica, which refers to this index.
        self.on_change = self.on_hole = None

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("index was closed", journal=self.journal)

    def _find(self, offset: Offset, begin_mod_time: int) -> IndexResult:
        """Find the fragment of ``offset``, or the first later fragment that readers may skip to."""
        while True:
            index, is_readable = self._set.longest_overlapping(offset)
            if not is_readable:
                self._require_explained(offset, index)
            if not is_readable and self._may_jump(offset, index):
                offset, is_readable = self._set[index].begin, True
            if not is_readable:
                return IndexResult(Status.OFFSET_NOT_YET_AVAILABLE, offset, self.write_head)
            span = self._set[index]
            fragment = _fragment(span)
            if fragment.mod_time and fragment.mod_time < begin_mod_time:
                offset = fragment.end
                continue
            local = span if isinstance(span, LocalFragment) else None
            return IndexResult(Status.OK, offset, self.write_head, fragment, local)

    def require_explained(self) -> None:
        """Raise ``Unavailable`` while stored fragments may be the journal's, at offsets that it lacks."""
        fragments = self.undecided()
        if fragments:
            raise undecided(self.journal, fragments)

    def undecided(self) -> list[Fragment]:
        """Return the unexplained fragments with offsets that no fragment of the journal has."""
        if not self.unexplained_to:
            return []
        return self.unexplained.outside(CoverSet[Span]([*self._set, *self._hidden]))

    def _require_explained(self, offset: Offset, at: int) -> None:
        """Raise ``Unavailable`` if unexplained fragments have bytes from ``offset`` to span ``at``. If there
        is no such span, look from the end of all fragments on."""
        if at < len(self._set):
            self.unexplained.check(self.journal, offset, self._set[at].begin)
        else:
            self.unexplained.check(self.journal, max(offset, self.end_offset))

    def _may_jump(self, offset: Offset, at: int) -> bool:
        """Return True if a reader at ``offset``, in the hole before span ``at``, may jump to that span.

        The hole's offsets must be lost, or the span be old (`JUMP_AGE_S`). The first span need only be
        settled (`SETTLED_S`).
        """
        if at == len(self._set):
            return False
        if self._is_lost(offset, self._set[at].begin):
            return True
        if at == 0:
            return self._is_settled(self._set[0])
        mod_time = _fragment(self._set[at]).mod_time
        return 0 < mod_time < int(self._clock.now()) - JUMP_AGE_S

    def _is_lost(self, begin: Offset, end: Offset) -> bool:
        return any(lost[0] <= begin and end <= lost[1] for lost in self._lost)

    def _is_settled(self, first: Fragment | LocalFragment) -> bool:
        """Return True if no fragment before the first can be missing: the last listing would show it."""
        return 0 < _fragment(first).mod_time <= self._listed_at - SETTLED_S

    async def _changed(self, offset: Offset) -> None:
        """Wait for a change that may matter for ``offset``, which no fragment covers now."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if offset < self._set.end:
            self._in_holes[waiter] = None
            try:
                await waiter
            finally:
                self._in_holes.pop(waiter, None)
            return
        self._waits += 1
        heapq.heappush(self._at_head, (offset, self._waits, waiter))
        self._waiting_at_head.add(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._forget(waiter)
            raise

    def _forget(self, waiter: asyncio.Future[None]) -> None:
        """Forget a cancelled waiter. Its entry stays in the heap until it is due, or most are cancelled."""
        self._waiting_at_head.discard(waiter)
        if len(self._at_head) > 2 * len(self._waiting_at_head) + _FORGOTTEN_MAX:
            self._at_head = [entry for entry in self._at_head if entry[2] in self._waiting_at_head]
            heapq.heapify(self._at_head)

    def _wake_head(self) -> None:
        end = self._set.end
        while self._at_head and self._at_head[0][0] < end:  # The offset of the first entry.
            _, _, waiter = heapq.heappop(self._at_head)
            self._waiting_at_head.discard(waiter)
            _wake(waiter)
        self._report_change()

    def _report_change(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _wake_holes(self) -> None:
        for waiter in self._in_holes:
            _wake(waiter)
        self._in_holes.clear()


def _fragment(span: Fragment | LocalFragment) -> Fragment:
    return span.fragment if isinstance(span, LocalFragment) else span


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
