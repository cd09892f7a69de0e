"""Lists the fragments of journals, and fixes a `Snapshot` of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gazette.blobs.registry import BlobStores
from gazette.client.client import Client
from gazette.client.journals import FragmentsParams
from gazette.client.read.reader import WRITE_HEAD, ReadParams
from gazette.errors import Corrupt, Invalid, NotFound, NotYet
from gazette.fragment.cover_set import CoverSet
from gazette.fragment.index import JUMP_AGE_S
from gazette.fragment.listing import list_fragments
from gazette.history.columns import MessageFormat
from gazette.history.snapshot import JournalSnapshot, Piece, Snapshot, cover
from gazette.history.source import OpenAccess
from gazette.labels import CONTENT_TYPE
from gazette.message.uuid import ProducerId
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset, validate_journal_name
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.text.validation import within

TIME_SLACK_S: Final = 60
"""Seconds by which the clocks of publishers may be ahead of a blob store's clock."""

_LISTS_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected journals, and the bounds of each.

    Journals are named, or match ``selector``, which needs brokers. ``stores`` are searched for
    fragments without brokers. ``content_type`` takes precedence over the label of a journal.
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
    end: Mapping[JournalName, Offset] = field(default_factory=dict)
    begin_all: Offset = 0
    """Offset at which to begin journals that ``begin`` does not name."""
    end_all: Offset | None = None
    sources: Mapping[JournalName, SourceCheckpoint] = field(default_factory=dict)
    """Checkpoint to resume from. It takes precedence over ``begin``."""
    begin_time_s: float = 0
    """Unix time in seconds. Fragments that were stored earlier are left out: their messages are older."""
    skip_gaps: bool = False
    """True to skip missing fragments that may still appear."""

    def validate(self) -> None:
        """Raise `Invalid` if the options contradict each other."""
        if bool(self.journals) == (self.selector is not None):
            raise Invalid("give either names of journals or a selector", path="journals")
        if self.selector is not None and self.stores:
            raise Invalid(
                "a selector needs a broker: stores know only names of journals", path="selector"
            )
        for name in self.journals:
            with within("journals"):
                validate_journal_name(name)


def take_snapshot(access: OpenAccess, selection: Selection) -> Snapshot:
    """Return a snapshot of the journals as they are now. Blocks.

    It ends at the last fragment or, with brokers, at the head. Brokers serve the bytes that are not
    stored yet.

    Where a journal has lost bytes, reading continues behind them, as readers do. This applies at
    its begin, and if the next fragment was stored more than six hours ago. A younger gap may be a
    fragment that its broker has not uploaded yet. It raises ``NotYet`` unless ``skip_gaps``.

    Raise `Invalid`, ``NotFound`` for a missing journal, ``NotYet``, ``Corrupt`` if stores alone do not
    say which bytes are right, and what brokers and stores raise.
    """
    selection.validate()
    return access.run(_take(access, selection))


def require_stored(
    snapshot: Snapshot, selection: Selection, known: Collection[JournalName] = ()
) -> None:
    """Raise ``NotFound`` for a journal without any fragment in the listed stores.

    Its name may be mistyped: a store does not know journals, and lists nothing for a wrong name.
    Journals that are ``known`` existed before, and may have been pruned to their end.
    """
    for one in snapshot.journals if selection.stores else ():
        until = selection.end.get(one.journal, selection.end_all)
        if not one.end and until is None and one.journal not in known:
            raise NotFound(
                "the stores have no fragment of the journal",
                hint="Check the name of the journal and its stores (`gazctl journals list "
                "--format yaml`). If nothing has been stored yet, give broker.address to read what "
                "brokers hold.",
                journal=one.journal,
                stores=", ".join(selection.stores),
            )


async def _take(access: OpenAccess, selection: Selection) -> Snapshot:
    listed: list[JournalSnapshot]
    now = access.clock.now()
    if selection.stores:
        specs = [_spec_of(name, selection) for name in selection.journals]
        listed = [
            _journal(spec, await _stored(access.stores, spec), None, selection, now)
            for spec in specs
        ]
    else:
        client = await access.client()
        limit = asyncio.Semaphore(_LISTS_AT_ONCE)

        async def one(spec: JournalSpec) -> JournalSnapshot:
            async with limit:
                fragments, head = await _brokered(access, client, spec)
            return _journal(spec, fragments, head, selection, now)

        listed = list(await asyncio.gather(*map(one, await _specs(client, selection))))
    return Snapshot(tuple(sorted(listed, key=lambda journal: journal.journal)))


def _spec_of(name: JournalName, selection: Selection) -> JournalSpec:
    return JournalSpec(
        name,
        labels=LabelSet.of(),
        fragment=FragmentSpec(
            stores=selection.stores, path_postfix_template=selection.path_postfix_template
        ),
    )


async def _specs(client: Client, selection: Selection) -> list[JournalSpec]:
    if selection.selector is not None:
        found = await client.list_journals(selection.selector)
        if not found.journals:
            raise NotFound(
                "no journal matches the selector",
                hint="See `gazctl journals list`. A label's value must be equal, or a prefix of the name.",
                selector=str(selection.selector),
            )
        return [listed.spec for listed in found.journals]
    return [(await client.get_journal(name)).spec for name in selection.journals]


async def _stored(stores: BlobStores, spec: JournalSpec) -> list[Fragment]:
    """Return the fragments that stores list. Raise ``Corrupt`` where only brokers know if one is right."""
    cover = await list_fragments(stores, spec)
    doubted = cover.doubted([aside.fragment for aside in cover.set_aside])
    if doubted:
        raise Corrupt(
            f"the stores hold two versions of some bytes of {spec.name}, and only its brokers know which "
            "one is right",
            hint="Give broker.address. A broker could not confirm this fragment when it ended: see "
            "`.unconfirmed-` in docs/operating.md.",
            fragment=doubted[0].content_path(),
            store=doubted[0].backing_store,
        )
    return list(cover)


async def _brokered(
    access: OpenAccess, client: Client, spec: JournalSpec
) -> tuple[list[Fragment], Offset]:
    """Return the fragments that brokers know, and the head of the journal."""
    stored = await client.list_fragments(FragmentsParams(spec.name))
    fragments = [one.fragment for one in stored]
    return fragments, await _head(client, spec.name)


async def _head(client: Client, journal: JournalName) -> Offset:
    reader = client.reader(ReadParams(journal, WRITE_HEAD, metadata_only=True))
    try:
        async with reader:
            await reader.open()
    except NotYet:
        pass
    return reader.write_head


def _journal(
    spec: JournalSpec,
    fragments: Sequence[Fragment],
    head: Offset | None,
    selection: Selection,
    now: float,
) -> JournalSnapshot:
    journal = spec.name
    source = selection.sources.get(journal)
    begin = selection.begin.get(journal, selection.begin_all)
    producers: Mapping[ProducerId, ProducerState] = {}
    if source is not None:
        begin, producers = source.read_through, source.producers
    pieces = [
        Piece(one.begin, one.end, one if one.backing_store and one.mod_time else None)
        for one in CoverSet(fragments)
    ]
    known = max([head or 0, *(piece.end for piece in pieces)])
    if pieces and known > pieces[-1].end:
        # These bytes were written after the fragments were listed.
        pieces.append(Piece(pieces[-1].end, known))
    elif head and not pieces:
        pieces.append(Piece(0, head))
    end = selection.end.get(journal, selection.end_all)
    end = known if end is None else end
    if end > known:
        raise Invalid(
            f"the end of {journal} is beyond its known bytes ({end}; expected at most {known})",
            path="end",
            hint=None
            if head is not None
            else "Give a broker, to read bytes that are not stored yet.",
        )
    if source is None and selection.begin_time_s:
        begin = max(begin, _at_time(pieces, selection.begin_time_s))
    begin, end = min(begin, known) if source is None else begin, max(end, begin)
    shape = replace(
        selection.shape,
        content_type=selection.content_type
        or spec.labels.value_of(CONTENT_TYPE)
        or selection.shape.content_type,
    )
    empty = JournalSnapshot(journal, shape, begin, end, (), producers)
    held = cover(pieces, empty.pieces_begin, end)
    if not selection.skip_gaps:
        _check_gaps(journal, held, empty.pieces_begin, pieces, now)
    return replace(empty, pieces=held)


def _at_time(pieces: Sequence[Piece], begin_time_s: float) -> Offset:
    """Return the begin of the first piece that may hold a message of that time, or of a later one."""
    for piece in pieces:
        fragment = piece.fragment
        if fragment is None or fragment.mod_time >= begin_time_s - TIME_SLACK_S:
            return piece.begin
    return pieces[-1].end if pieces else 0


def _check_gaps(
    journal: JournalName,
    held: Sequence[Piece],
    begin: Offset,
    pieces: Sequence[Piece],
    now: float,
) -> None:
    at = begin
    for number, piece in enumerate(held):
        gap = piece.begin > at
        # No bytes exist before it: they were pruned and will not come.
        pruned = number == 0 and piece.begin <= pieces[0].begin
        fragment = piece.fragment
        settled = fragment is not None and fragment.mod_time < now - JUMP_AGE_S
        if gap and not pruned and not settled:
            raise NotYet(
                f"the journal has no bytes from offset {at} to {piece.begin}. The bytes behind them are "
                "too recent to call these lost: a broker may not have stored them yet",
                hint="Read again later, end before the gap, or skip gaps.",
                journal=journal,
            )
        at = piece.end
