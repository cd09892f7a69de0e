"""Lists the fragments of journals, and fixes a `Snapshot` of them."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

from gazette.blobs.registry import BlobStores
from gazette.client.client import Client
from gazette.client.journals import FragmentsParams
from gazette.client.new_journals import once_known
from gazette.client.read.reader import WRITE_HEAD, ReadParams
from gazette.errors import Corrupt, Invalid, NotFound, NotYet
from gazette.fragment.conflicts import FragmentCover
from gazette.fragment.cover_set import CoverSet
from gazette.fragment.listing import list_fragments
from gazette.fragment.unexplained import Unexplained, facts_of, problem_of
from gazette.history.columns import MessageFormat
from gazette.history.gaps import ConfirmedLosses, Gap, find_gaps, require_final
from gazette.history.snapshot import (
    GAP_HINT,
    STORE_GAP_HINT,
    Awaited,
    JournalSnapshot,
    Piece,
    Snapshot,
    cover,
)
from gazette.history.source import OpenAccess
from gazette.labels import CONTENT_TYPE, MESSAGE_UUID
from gazette.message.uuid import ProducerId
from gazette.message.uuid_place import DEFAULT_PLACE
from gazette.protocol import postfix_template
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset, validate_journal_name
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.journal_life import JournalLife, created_again
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.text.validation import within

Lost = Literal["settled", "fail", "skip", "wait"]

TIME_SLACK_S: Final = 60
"""Seconds by which the clocks of publishers may be ahead of a blob store's clock."""

_LISTS_AT_ONCE: Final = 16
_EARLIER: Final = 16
"""A listing begins this many fragments early: some of these may be stored late, joined, or in doubt."""
_WHOLE_S: Final = 600.0
"""Seconds after which a journal is listed from its begin again. New fragments in other directories
(a path postfix) may sort before the fragments that were listed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected journals, and the bounds of each.

    ``journals`` names the journals. Or they match ``selector``, which needs brokers. Without brokers,
    ``stores`` are searched for fragments. ``content_type`` takes precedence over the label of a journal.
    """

    journals: tuple[JournalName, ...] = ()
    selector: LabelSelector | None = None
    stores: tuple[str, ...] = ()
    content_type: str = ""
    shape: MessageFormat = MessageFormat()
    """Encoding of the messages. Its content type is ignored."""
    path_postfix_template: str = ""
    """Template of the paths of fragments in ``stores``."""
    begin: Mapping[JournalName, Offset] = field(default_factory=dict)
    """By journal: the offset at which to begin. ``end`` has the offsets at which to end."""
    end: Mapping[JournalName, Offset] = field(default_factory=dict)
    begin_all: Offset = 0
    """Offset at which to begin journals that ``begin`` does not name."""
    end_all: Offset | None = None
    """Offset at which to end journals that ``end`` does not name. None: at the head or last fragment."""
    sources: Mapping[JournalName, SourceCheckpoint] = field(default_factory=dict)
    """Checkpoint to resume from. It takes precedence over ``begin``."""
    lives: Mapping[JournalName, JournalLife] = field(default_factory=dict)
    """Lives of journals to which the offsets belong. If a journal has another life, raise ``Corrupt``."""
    begin_time_s: float = 0
    """Unix time in seconds. Fragments stored earlier are left out: their messages are older."""
    lost: Lost = "settled"
    """Treatment of missing bytes. ``skip`` and ``wait`` note skipped bytes in `JournalSnapshot.lost`.

    - ``settled`` skips bytes that will not come, as readers do. Else it raises ``NotYet``.
    - ``fail`` raises ``Corrupt`` for bytes that will not come, and ``NotYet`` for bytes that may still come.
    - ``skip`` skips missing bytes, even if they may still come.
    - ``wait`` skips bytes that will not come, and ends the snapshot before bytes that may still come.

    Each treatment skips, and notes, bytes that an operator has confirmed as lost.
    """

    def validate(self) -> None:
        """Raise `Invalid` for a wrong name or template, and if the options contradict each other."""
        if bool(self.journals) == (self.selector is not None):  # Both, or neither.
            raise Invalid("give either names of journals or a selector", path="journals")
        if self.selector is not None and self.stores:
            raise Invalid(
                "a selector needs a broker: stores know only names of journals", path="selector"
            )
        for name in self.journals:
            with within("journals"):
                validate_journal_name(name)
        # A template that is not supported would match all fragments.
        with within("path_postfix_template"):
            postfix_template.parse(self.path_postfix_template)


class FragmentPlaces:
    """Begins of fragments in former listings: later listings begin near them. Not thread-safe.

    Only a caller that takes snapshots repeatedly needs the places.
    """

    def __init__(self) -> None:
        self._begins: dict[JournalName, list[Offset]] = {}
        self._listed_at: dict[JournalName, float] = {}
        """Time of the last whole listing of each journal, by the machine's clock."""

    def begin_for(self, journal: JournalName, wanted: Offset, now_s: float) -> Offset:
        """Return the offset from which to list fragments, to find the bytes from ``wanted`` on.

        Return zero if at most `_EARLIER` known fragments begin at that offset or before, or if the last whole
        listing of the journal is old. Only a whole listing finds new fragments whose names sort before the
        known names.
        """
        begins = self._begins.get(journal, [])
        position = bisect_right(begins, wanted) - _EARLIER
        if position <= 0 or now_s - self._listed_at[journal] > _WHOLE_S:
            return 0
        return begins[position]

    def add(
        self, journal: JournalName, begin: Offset, pieces: Sequence[Piece], now_s: float
    ) -> None:
        """Remember a listing that began at ``begin``, in place of all fragments known from there on."""
        begins = self._begins.get(journal, []) if begin else []
        if not begin:
            self._listed_at[journal] = now_s
        del begins[bisect_left(begins, begin) :]
        begins += [piece.begin for piece in pieces]
        self._begins[journal] = begins


def take_snapshot(
    access: OpenAccess, selection: Selection, places: FragmentPlaces | None = None
) -> Snapshot:
    """Return a snapshot of the journals as of now. Blocks.

    The snapshot of a journal ends where ``selection`` says, or else at the last fragment or, with brokers, at
    the head: brokers serve bytes that are not stored yet. With ``places``, a listing begins near the wanted
    offset if a former listing has shown its fragment. If such a listing has a gap, the whole journal is
    listed.

    Missing bytes are lost if they are before the first fragment (pruned), before a fragment that was stored
    more than six hours ago, or confirmed as lost by an operator. Other missing bytes may still come, in a
    fragment that is not uploaded yet. ``selection.lost`` says how to treat missing bytes. Pruned bytes are no
    error if the snapshot begins at offset 0.

    Raise `Invalid` for a wrong ``selection``, an end beyond the known bytes, or stored files that nothing
    explains. Raise ``NotFound`` for a missing journal, and ``NotYet`` for bytes that may still come. Raise
    ``Corrupt`` for lost bytes, for a journal that was created again, or if stores alone do not show which
    bytes are right. Raise ``Unavailable`` if brokers or stores do not answer.
    """
    selection.validate()
    return access.run(_take(access, selection, places or FragmentPlaces()))


def require_stored(
    snapshot: Snapshot, selection: Selection, known: Collection[JournalName] = ()
) -> None:
    """Raise ``NotFound`` for a journal without any fragment in the listed stores.

    Its name may be mistyped: a store does not know journals, and lists nothing for a wrong name.
    The journals of ``known`` are no error: they had fragments before, which may all have been pruned.
    """
    for journal in snapshot.journals if selection.stores else ():
        end = selection.end.get(journal.journal, selection.end_all)
        is_known = journal.awaited is not None or journal.journal in known
        if not journal.end and end is None and not is_known:
            raise NotFound(
                "the stores have no fragment of the journal",
                hint="Check the name of the journal and its stores (`gazctl journals list "
                "--format yaml`). If nothing has been stored yet, read through a broker: it has "
                "the rest.",
                journal=journal.journal,
                stores=", ".join(selection.stores),
            )


async def _take(access: OpenAccess, selection: Selection, places: FragmentPlaces) -> Snapshot:
    """Do the work of `take_snapshot` on the loop. With brokers, list several journals at once."""
    now, now_s = access.clock.now(), access.clock.monotonic()
    limit = asyncio.Semaphore(_LISTS_AT_ONCE)
    client = None if selection.stores else await access.client()

    async def snapshot_of(spec: JournalSpec) -> JournalSnapshot:
        name = spec.name
        begin = 0
        # With a path postfix, fragments sort by the postfix first.
        if not selection.begin_time_s and not spec.fragment.path_postfix_template:
            begin = places.begin_for(name, _wanted(selection, name), now_s)
        while True:
            async with limit:
                fragments = await (
                    _stored(access.stores, spec, begin)
                    if client is None
                    else _brokered(access, client, spec, begin)
                )
            cover_set = CoverSet(fragments)
            least_end = _wanted(selection, name)
            if client is None:
                least_end = max(least_end, selection.end.get(name, selection.end_all or 0))
            if begin and not _reaches(cover_set, _wanted(selection, name), least_end):
                begin = 0  # The listing begins too late, or has a gap: list the whole journal.
                continue
            # Without a fragment, a piece is read through brokers: its bytes are not stored yet.
            pieces = [
                Piece(part.begin, part.end, part if part.backing_store and part.mod_time else None)
                for part in cover_set
            ]
            places.add(name, begin, pieces, now_s)
            # Ask for the head after the listing, so that it is not before the last fragment.
            async with limit:
                head = None if client is None else await _head(access, client, name)
            life = None if head is None else head.life
            _require_life(selection, name, life)
            return replace(_journal(spec, pieces, head, selection, now), life=life)

    if client is None:
        specs = [_spec_of(name, selection) for name in selection.journals]
        journals = [await snapshot_of(spec) for spec in specs]
    else:
        specs = await journal_specs(access, selection.journals, selection.selector)
        journals = list(await asyncio.gather(*map(snapshot_of, specs)))
    return Snapshot(tuple(sorted(journals, key=lambda journal: journal.journal)))


def _wanted(selection: Selection, journal: JournalName) -> Offset:
    """Return the first offset to read of a journal."""
    source = selection.sources.get(journal)
    if source is None:
        return selection.begin.get(journal, selection.begin_all)
    pending = [state.begin for state in source.producers.values() if state.begin is not None]
    return min([source.read_through, *pending])


def _reaches(fragments: CoverSet[Fragment], wanted: Offset, until: Offset) -> bool:
    """Return True if fragments have no gap from ``wanted`` to their end, and end at ``until`` or later."""
    if not len(fragments) or fragments.begin > wanted or fragments.end < until:
        return False
    return fragments.covers(wanted, fragments.end)


def _spec_of(name: JournalName, selection: Selection) -> JournalSpec:
    return JournalSpec(
        name,
        labels=LabelSet.of(),
        fragment=FragmentSpec(
            stores=selection.stores, path_postfix_template=selection.path_postfix_template
        ),
    )


async def journal_specs(
    access: OpenAccess, journals: Sequence[JournalName], selector: LabelSelector | None
) -> list[JournalSpec]:
    """Return the specifications of named journals, or of those that match. Call this on the loop.

    Raise ``NotFound`` for a journal that does not exist, and if no journal matches.
    """
    client = await access.client()

    async def matching(wanted: LabelSelector) -> list[JournalSpec]:
        async with access.answering():
            listing = await client.list_journals(wanted)
        if not listing.journals:
            raise NotFound(
                "no journal matches the selector",
                hint="See `gazctl journals list`. A label's value must be equal, or a prefix of the name.",
                selector=str(wanted),
            )
        return [journal.spec for journal in listing.journals]

    async def named(name: JournalName) -> JournalSpec:
        async with access.answering():
            return (await client.get_journal(name)).spec

    if selector is not None:
        return await once_known(client, str(selector), partial(matching, selector))
    return [await once_known(client, name, partial(named, name)) for name in journals]


async def _stored(stores: BlobStores, spec: JournalSpec, begin: Offset) -> list[Fragment]:
    """Return the fragments that stores list, from ``begin`` on.

    Raise ``Corrupt`` if the stores have two versions of some bytes: only brokers know which one is right. For
    other errors see `_require_explained`.
    """
    cover = await list_fragments(stores, spec, begin=begin)
    doubted = cover.doubted([aside.fragment for aside in cover.set_aside])
    if doubted:
        raise Corrupt(
            f"the stores hold two versions of some bytes of {spec.name}, and only its brokers know which "
            "one is right",
            hint="Read through a broker. A broker could not confirm this fragment when it ended: see "
            "`.unconfirmed-` in docs/operating.md.",
            fragment=doubted[0].content_path(),
            store=doubted[0].backing_store,
        )
    _require_explained(cover, spec, cover.begin if begin else 0)
    return list(cover)


def _require_explained(cover: FragmentCover, spec: JournalSpec, begin: Offset) -> None:
    """Raise ``Invalid`` if files with unknown names hold bytes from ``begin`` on that no fragment holds."""
    unexplained = [
        fragment
        for fragment in Unexplained.of(cover.unexplained).cover
        if not cover.covers(max(fragment.begin, begin), fragment.end)
    ]
    if unexplained:
        raise Invalid(
            problem_of(unexplained),
            hint="Read through a broker, which knows other journals. Or give the template that wrote them as "
            "the path postfix, beside the present one: `{{ if true }}ONE{{ else }}OTHER{{ end }}`.",
            journal=spec.name,
            **facts_of(unexplained),
        )


async def _brokered(
    access: OpenAccess, client: Client, spec: JournalSpec, begin: Offset
) -> list[Fragment]:
    """Return the fragments that brokers know, from ``begin`` on."""
    async with access.answering():
        stored = await client.list_fragments(FragmentsParams(spec.name, begin_offset=begin))
    return [listed.fragment for listed in stored]


@dataclass(frozen=True, slots=True)
class _Head:
    """Facts about a journal that only brokers know."""

    offset: Offset
    life: JournalLife | None
    losses: ConfirmedLosses


async def _head(access: OpenAccess, client: Client, journal: JournalName) -> _Head:
    """Return the head of a journal, as its broker says it."""
    reader = client.reader(ReadParams(journal, WRITE_HEAD, metadata_only=True))
    try:
        async with access.answering(), reader:
            await reader.open()
    except NotYet:
        pass  # The answer has the head, and no content yet.
    return _Head(reader.write_head, reader.life, ConfirmedLosses(reader.lost))


def _require_life(selection: Selection, journal: JournalName, life: JournalLife | None) -> None:
    """Raise ``Corrupt`` if the selection's offsets belong to another life. An unknown life (None) passes."""
    expected = selection.lives.get(journal)
    if expected is not None and life is not None and life.is_other(expected):
        raise created_again(journal, expected.created, life.created)


def _journal(
    spec: JournalSpec,
    pieces: list[Piece],
    head: _Head | None,
    selection: Selection,
    now: float,
) -> JournalSnapshot:
    """Return the snapshot of one journal: its range of offsets, its pieces, and its lost bytes. Raise
    ``Invalid`` if the end is beyond the known bytes, and the errors of `require_final`."""
    journal = spec.name
    source = selection.sources.get(journal)
    begin = selection.begin.get(journal, selection.begin_all)
    producers: Mapping[ProducerId, ProducerState] = {}
    if source is not None:
        begin, producers = source.read_through, source.producers
    losses = ConfirmedLosses() if head is None else head.losses
    listed_end = pieces[-1].end if pieces else 0
    known_end = max(listed_end, 0 if head is None else head.offset)
    # Bytes after the listed fragments were appended after the listing.
    pieces.extend(losses.outside(listed_end, known_end))
    end = selection.end.get(journal, selection.end_all)
    if end is None:
        # If lost bytes reach to the head, end before them: skip them only when later bytes exist.
        end = max(pieces[-1].end if pieces else 0, min(begin, known_end))
    if end > known_end:
        raise Invalid(
            f"the end of {journal} is beyond its known bytes ({end}; expected at most {known_end})",
            path="end",
            hint=None
            if head is not None
            else "Give a broker, to read bytes that are not stored yet.",
        )
    if source is None and selection.begin_time_s:
        begin = max(begin, _at_time(pieces, selection.begin_time_s))
    begin, end = min(begin, known_end) if source is None else begin, max(end, begin)
    shape = replace(
        selection.shape,
        content_type=selection.content_type
        or spec.labels.value_of(CONTENT_TYPE)
        or selection.shape.content_type,
        uuid_field=selection.shape.uuid_field
        or spec.labels.value_of(MESSAGE_UUID)
        or DEFAULT_PLACE,
    )
    empty = JournalSnapshot(journal, shape, begin, end, (), producers)
    snapshot = replace(empty, pieces=cover(pieces, empty.pieces_begin, end))
    gaps = list(find_gaps(snapshot, pieces, losses, now))
    if selection.lost == "wait":
        return _until_awaited(snapshot, gaps)
    if selection.lost != "skip":
        hint = STORE_GAP_HINT if head is None else GAP_HINT
        require_final(gaps, snapshot, fails=selection.lost == "fail", hint=hint)
        gaps = [gap for gap in gaps if gap.confirmed]
    return replace(snapshot, lost=tuple(gap.lost for gap in gaps))


def _until_awaited(journal: JournalSnapshot, gaps: Sequence[Gap]) -> JournalSnapshot:
    """Return the snapshot up to the first gap whose bytes may still come."""
    lost = tuple(gap.lost for gap in gaps)
    for position, gap in enumerate(gaps):
        if not gap.is_final:
            end = max(gap.begin, journal.begin)
            pieces = cover(journal.pieces, journal.pieces_begin, end)
            awaited = Awaited(end, gap.end, journal.end)
            return replace(journal, end=end, pieces=pieces, lost=lost[:position], awaited=awaited)
    return replace(journal, lost=lost)


def _at_time(pieces: Sequence[Piece], begin_time_s: float) -> Offset:
    """Return the begin of the first piece that may have a message of ``begin_time_s`` or later."""
    for piece in pieces:
        fragment = piece.fragment
        if fragment is None or fragment.mod_time >= begin_time_s - TIME_SLACK_S:
            return piece.begin
    return pieces[-1].end if pieces else 0
