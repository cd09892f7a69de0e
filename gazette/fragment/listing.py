"""Stage 9 of the byte path: takes the objects of a journal in blob stores, gives the cover of its fragments
to `index`.

`protocol/fragment_owner` says which objects are the journal's. If it cannot decide, the objects are listed
apart: see `unexplained`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from gazette.blobs.blob_store import BlobInfo, BlobStore, list_after
from gazette.blobs.registry import BlobStores
from gazette.errors import Invalid
from gazette.fragment.closing import ClosingName
from gazette.fragment.conflicts import FragmentCover
from gazette.fragment.set_aside import SetAside
from gazette.protocol.fragment import Fragment
from gazette.protocol.fragment_owner import Attribution, FragmentOwner
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.journal import JournalSpec
from gazette.runtime.tasks import await_future

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Foreign:
    """Objects below a journal's directory that are not its fragments."""

    count: int = 0
    example: str = ""

    def and_one(self, path: str) -> Foreign:
        return Foreign(self.count + 1, self.example or path)


async def list_fragments(
    blob_stores: BlobStores,
    spec: JournalSpec,
    others: Collection[JournalName] = (),
    *,
    begin: Offset = 0,
) -> FragmentCover:
    """List all stores of a journal. If two stores have the same span, the later store wins.

    With ``begin``, leave out the objects that sort before a fragment of that begin. Directly in the
    journal's directory, these are all fragments that begin earlier.

    ``others`` are the journals below this journal: their names begin with its name and ``/``. Other names do
    no harm. Raise the error of any store: an incomplete index would permit appends at offsets that are taken.
    Objects that are not fragments of the journal are counted and logged. Unexplained fragments are listed
    beside the cover.

    Cancellation: the running listing of a store goes on in its thread; its result is dropped.
    """
    cover = FragmentCover()
    owner = FragmentOwner(spec, others)
    for url in spec.fragment.stores:
        active = blob_stores.get(url)
        # Wait without a deadline: the caller must not list a store again while a listing still runs.
        listing = active.calls.submit(list_into, cover, active.store, url, owner, begin)
        foreign = await await_future(listing)
        active.worked()
        if foreign.count:
            log.warning(
                "%(count)d objects in %(store)s below journal %(journal)s are not its fragments, for example "
                "%(example)r",
                {
                    "count": foreign.count,
                    "store": url,
                    "journal": spec.name,
                    "example": foreign.example,
                },
            )
    return cover


def list_into(
    cover: FragmentCover, store: BlobStore, url: str, owner: FragmentOwner, begin: Offset = 0
) -> Foreign:
    """List one store of a journal, as `list_fragments` does. Call it in a thread."""
    foreign = Foreign()
    prefix = f"{owner.journal}/"
    listing = list_after(store, prefix, f"{begin:016x}") if begin else store.list(prefix)
    for parsed in _parsed(listing, owner.journal):
        if parsed.closing is not None:
            cover.closings.append((url, parsed.closing))
            continue
        attribution = (
            Attribution.OTHER if parsed.fragment is None else owner.of(parsed.fragment.path_postfix)
        )
        if parsed.fragment is None or attribution is Attribution.OTHER:
            foreign = foreign.and_one(parsed.info.path)
            continue
        stored = _stored(parsed.fragment, url, parsed.info)
        if attribution is Attribution.UNKNOWN or parsed.is_misplaced:
            cover.unexplained.append(stored)
        elif parsed.aside is not None:
            cover.set_aside.append(replace(parsed.aside, fragment=stored))
        else:
            cover.add(stored)
    return foreign


def _stored(fragment: Fragment, url: str, info: BlobInfo) -> Fragment:
    # A time of zero would mean that the fragment is not persisted.
    return replace(fragment, backing_store=url, mod_time=max(info.mod_time, 1))


@dataclass(frozen=True, slots=True)
class _Parsed:
    """An object, as its name describes it: a fragment, perhaps stored aside; a closing; or neither."""

    info: BlobInfo
    fragment: Fragment | None
    aside: SetAside | None = None
    is_misplaced: bool = False
    """True if a fragment may not have such a path."""
    closing: ClosingName | None = None


def _parsed(listing: Iterator[BlobInfo], journal: JournalName) -> Iterator[_Parsed]:
    for info in listing:
        try:
            yield _Parsed(info, Fragment.parse(journal, info.path))
        except Invalid:
            closing = ClosingName.parse(journal, info.path)
            aside = SetAside.parse(journal, info.path)
            if closing is not None:
                yield _Parsed(info, None, closing=closing)
            elif aside is not None:
                yield _Parsed(info, aside.fragment, aside)
            else:
                yield _Parsed(info, _misplaced(journal, info.path), is_misplaced=True)


def _misplaced(journal: JournalName, path: str) -> Fragment | None:
    """Return the fragment of an object in a directory that a fragment's path cannot name; else None.

    Brokers of the original store fragments under any text that a template writes, such as one with a space.
    """
    postfix, _, name = path.rpartition("/")
    try:
        return replace(Fragment.parse(journal, name), path_postfix=postfix)
    except Invalid:
        return None
