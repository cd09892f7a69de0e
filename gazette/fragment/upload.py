"""Stage 7 of the byte path, for one spool: puts its bytes into a store of its journal, or removes them again.

`persister` decides when. Between any two steps, the journal may be deleted or get another first store, or a
later primary may begin. So each step checks again, and an object that should not be there is removed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from gazette.blobs.blob_store import BlobStore
from gazette.blobs.registry import BlobStores
from gazette.blobs.thread_call import ended
from gazette.errors import GazetteError, Invalid, NotAllowed, NotFound, Unavailable
from gazette.fragment.completed_spool import CompletedSpool
from gazette.fragment.set_aside import SetAside
from gazette.protocol import postfix_template
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset, Revision
from gazette.protocol.journal import JournalSpec
from gazette.runtime import tracing
from gazette.runtime.clock import Clock
from gazette.runtime.latch import Latch

log = logging.getLogger(__name__)

SpecOf: TypeAlias = Callable[[JournalName, Revision], JournalSpec | None]
"""Returns the specification of a journal whose life began at the given revision; None if that life is
over."""

LimitOf: TypeAlias = Callable[[JournalName, Revision, Revision], Awaitable[Offset | None]]
"""Takes ``(journal, life, tenure)``. Returns the offset at which a primary later than ``tenure`` began to
give out offsets again.

Returns None if there is no later primary. Bytes beyond the offset are not the journal's any more. Raises
while the offset is not known, and ``NotFound`` for a deleted journal, even before `SpecOf` shows it.
"""

_NOTICE_S: Final = 1.0
"""Upper bound in seconds from a change of a journal's stores until an upload leaves a hung store."""


class Unconfirmed(Exception):
    """etcd did not say whether a later primary has given out the offsets of an upload again.

    ``cause`` is the error of the call to etcd.
    """

    def __init__(self, cause: GazetteError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Deleted(Exception):
    """The journal was deleted. The key space may not show it yet."""


@dataclass(frozen=True, slots=True)
class UploadContext:
    """The parts that all uploads of a persister share: see `persister.Persister`."""

    blob_stores: BlobStores
    spec_of: SpecOf
    limit_of: LimitOf
    relies_on: Callable[[Fragment], bool]
    on_stored: Callable[[Fragment], None]
    clock: Clock
    look_timeout_s: float
    put_timeout_s: float
    hurry: asyncio.Event
    """Set when the broker ends: then no upload is left to a primary any more."""


@dataclass(slots=True, eq=False)
class Upload:
    """A spool that is not persisted yet, and the objects that its attempts left in stores. Loop-bound."""

    _shared: UploadContext
    spool: CompletedSpool
    life: Revision
    """The revision at which the journal of these bytes was created."""
    tenure: Revision
    """Creation revision of the assignment of the primary that appended the last of these bytes."""
    reassigned: Latch | None
    """Not set while a living primary holds the same bytes, and may upload them. None: do not wait."""
    cut: Offset | None = None
    """The offset at which the spool is cut before its upload; None: it is not cut."""
    failures: int = 0
    error: str = "not attempted yet"
    _call: concurrent.futures.Future[bool] | None = None
    """The call in a thread that puts the object, until its result was taken. It may outlive an attempt."""
    placed: tuple[str, str] | None = None
    """Store and path of the object that this upload has put, or may have put."""
    is_put: bool = False
    """True if the object of ``placed`` exists, and this upload has put it."""
    aside: tuple[str, str] | None = None
    """Store and path of an object that keeps these bytes after the end of this broker."""

    def __str__(self) -> str:
        fragment = self.spool.fragment
        end = fragment.end if self.cut is None else self.cut
        return f"{fragment.journal} [{fragment.begin}, {end}): {self.error}"

    def is_of(self, journal: JournalName, life: Revision) -> bool:
        """Return True if these bytes are of that life of the journal."""
        return self.life == life and self.spool.fragment.journal == journal

    def spec(self) -> JournalSpec | None:
        """Return the specification of the journal now; None if the life of these bytes is over."""
        return self._shared.spec_of(self.spool.fragment.journal, self.life)

    def may_wait(self) -> bool:
        """Return True while a primary that is not known to be gone holds the same bytes, and this broker is
        not ending."""
        return (
            self.reassigned is not None
            and not self.reassigned.is_set
            and not self._shared.hurry.is_set()
        )

    def first_store(self, spec: JournalSpec | None) -> str:
        """Return the URL of the store that the upload needs now; empty if it needs no store."""
        if spec is not None:
            return spec.fragment.stores[0] if spec.fragment.stores else ""
        # The journal is gone: only the store of an object that is to be removed is needed.
        return "" if self.placed is None else self.placed[0]

    async def set_aside(self, spec: JournalSpec) -> None:
        """Store the bytes aside, unless that was done before. See `gazette.fragment.set_aside`.

        If a store refuses access, use the next store, as `put` does when the broker ends. Raise the error of
        the store, or of the spool's file. The call may then be repeated.
        """
        await self._cut(spec)
        await self._settle_call()
        stores = spec.fragment.stores
        for index, url in enumerate(stores):
            if self.aside is not None:
                break
            active = self._shared.blob_stores.get(url)
            placed = _placed(self._shared.blob_stores, self.spool, spec, url)
            path = SetAside(placed, self.life, self.tenure).path
            try:
                await active.calls.run(_put_object, active.store, path, self.spool)
                self.aside = url, path
            except NotAllowed:
                if index + 1 == len(stores):
                    raise
        # A fragment that was put before etcd fell silent stays. Replicas of the same bytes may have found it,
        # and released their own spools. The object aside marks that fragment as unconfirmed.

    async def put(self, spec: JournalSpec, *, look: bool) -> bool:
        """Put the fragment into the journal's first store; with ``look``, only look for it there.

        Return True if the fragment is there, or if there is nothing to do: the journal has no store or was
        deleted, or a later primary has given all offsets out again. Return False if another attempt is
        needed. When the broker ends, use the next store if a store refuses access: readers use the next store
        as well, and no later attempt follows. Raise the error of the store, or ``Unconfirmed``.
        """
        try:
            return await self._put(spec, look=look)
        except _Deleted:
            return await self.take_back()

    async def _put(self, spec: JournalSpec, *, look: bool) -> bool:
        """Do as ``put``, but raise ``_Deleted`` if etcd says that the journal was deleted."""
        stores = spec.fragment.stores
        if stores and not look:
            await self._settle_call()
            is_superseded = await self._is_superseded()
            if self.cut is not None:
                await self._remove()  # A former attempt has put bytes beyond the limit.
            if is_superseded:
                return True
        await self._cut(spec)
        fragment = self.spool.fragment
        for index, url in enumerate(stores):
            try:
                with tracing.span(
                    "persist", journal=fragment.journal, begin=fragment.begin, end=fragment.end
                ):
                    return await self._upload_to(spec, url, look=look)
            except NotAllowed:
                if not self._shared.hurry.is_set() or index + 1 == len(stores):
                    raise
        return True

    async def _cut(self, spec: JournalSpec) -> None:
        """Cut the spool at ``cut``, if ``cut`` is set. Read the spool to compute the digest of the bytes
        before ``cut``."""
        if self.cut is not None and spec.fragment.stores:
            calls = self._shared.blob_stores.get(spec.fragment.stores[0]).calls
            self.spool = await self.spool.cut_to(self.cut, calls)
            self.cut = self.aside = None  # An object aside has other bytes than the cut spool.

    async def _upload_to(self, spec: JournalSpec, url: str, *, look: bool) -> bool:
        """Put the object into store ``url``, or only look for it. Return True if nothing is left to do."""
        await self._settle_call()
        fragment = self.spool.fragment
        if self.spec() is None:
            return await self.take_back()
        active = self._shared.blob_stores.get(url)
        calls, store = active.calls, active.store
        placed = _placed(self._shared.blob_stores, self.spool, spec, url)
        path = placed.content_path()
        if look:
            exists = await self._look(url, calls.submit(store.exists, path))
            if exists:
                self._note_stored(placed)
            return exists
        if not (self.is_put and self.placed == (url, path)):
            self._call = calls.submit(_put_object, store, path, self.spool)
            self.placed, self.is_put = (url, path), False
            await self._settle_call()
        # The journal may have been deleted, or a later primary may have begun, during the upload.
        if self.spec() is None:
            return await self.take_back()
        if not await self._is_beyond(fragment.end):
            await self._remove_aside()
            self._note_stored(placed)
            return True
        await self._remove()
        return False  # The next attempt uploads the bytes before the limit.

    def _note_stored(self, placed: Fragment) -> None:
        self._shared.on_stored(replace(placed, mod_time=max(int(self._shared.clock.now()), 1)))

    async def _look(self, url: str, call: concurrent.futures.Future[bool]) -> bool:
        """Return True if ``call`` soon finds the object.

        Do not wait for a store that hangs. The look ends after ``look_timeout_s``, or earlier if this broker
        must upload the bytes, or if the journal has other stores. The thread of the look changes nothing.
        """
        remaining_s = self._shared.look_timeout_s
        while not await ended(call, _NOTICE_S):
            remaining_s -= _NOTICE_S
            if remaining_s <= 0 or not self.may_wait() or self._has_other_stores(url):
                return False
        return call.result()

    async def _is_beyond(self, end: Offset) -> bool:
        limit = await self._limit()
        return limit is not None and limit < end

    async def _limit(self) -> Offset | None:
        """Return the limit of the upload; None for no limit. Raise ``_Deleted`` or ``Unconfirmed``."""
        try:
            return await self._shared.limit_of(self.spool.fragment.journal, self.life, self.tenure)
        except NotFound as error:
            raise _Deleted from error
        except GazetteError as error:
            raise Unconfirmed(error) from error

    async def _is_superseded(self) -> bool:
        """Set ``cut`` to the offset at which a later primary has begun, if it is before the end. Return True
        if no byte is left to upload."""
        fragment = self.spool.fragment
        end = fragment.end if self.cut is None else self.cut
        if end <= fragment.begin:
            return True  # A former attempt found that, and could not remove its object.
        limit = await self._limit()
        if limit is None or limit >= end:
            return False
        log.error(
            "%(journal)s: not uploading [%(begin)d, %(end)d): another broker has led the journal since and "
            "gave these offsets out again. If this broker acknowledged them, those appends are lost%(aside)s",
            {
                "journal": fragment.journal,
                "begin": max(limit, fragment.begin),
                "end": end,
                "aside": ""
                if self.aside is None
                else f"; their bytes are in {''.join(self.aside)}",
            },
        )
        self.cut = limit
        return limit <= fragment.begin

    async def _remove(self) -> None:
        """Remove the object that this upload has put into its store, if there is one."""
        if self.placed is None:
            return
        url, path = self.placed
        active = self._shared.blob_stores.get(url)
        await active.calls.run(active.store.remove, path)
        log.warning(
            "removed %(path)s from %(store)s: the journal has other bytes there, or was deleted",
            {"path": path, "store": url},
        )
        self.placed, self.is_put = None, False

    async def _remove_aside(self) -> None:
        """Remove the object that was stored aside: its fragment is in the store."""
        if self.aside is not None:
            url, path = self.aside
            active = self._shared.blob_stores.get(url)
            await active.calls.run(active.store.remove, path)
            self.aside = None

    async def take_back(self) -> bool:
        """Remove an upload for a journal that was deleted meanwhile, unless a new journal may rely on it.
        Return True when done."""
        await self._settle_call()
        if self.placed is not None:
            url, path = self.placed
            if self._shared.relies_on(self.spool.fragment):
                log.error(
                    "%(path)s in %(store)s was uploaded for a journal that was deleted meanwhile. It "
                    "stays, as a new journal of the same name may hold the same bytes. Compare it with "
                    "`gazctl journals fragments`",
                    {"path": path, "store": url},
                )
            else:
                await self._remove()
        return self.drop()

    async def _settle_call(self) -> None:
        """Wait for the upload's thread, if there is one, and note whether it has put the object.

        Raise the error of the thread, or ``Unavailable`` if the thread is given up or takes too long.
        """
        if self._call is not None:
            self.is_put = await self._await_call(self._call)
            if not self.is_put:
                self.placed = None  # Another broker has put the object.

    async def _await_call(self, call: concurrent.futures.Future[bool]) -> bool:
        """Wait for a thread, and return its result.

        Raise ``Unavailable`` after ``put_timeout_s``, and keep the thread: two threads must not write the
        same object. Raise ``Unavailable``, and let the thread go, if the journal has other stores now.
        """
        timeout_s = remaining_s = self._shared.put_timeout_s
        while not await ended(call, min(remaining_s, _NOTICE_S)):
            remaining_s -= _NOTICE_S
            if self.placed is not None and self._has_other_stores(self.placed[0]):
                # Leave the thread and its object alone: the journal does not use this store any more.
                self._call, self.placed = None, None
                raise Unavailable("the upload was given up: the journal has other stores now")
            if remaining_s <= 0:
                raise Unavailable("the upload did not end in time", timeout_s=timeout_s)
        self._call = None
        return call.result()

    def _has_other_stores(self, url: str) -> bool:
        """Return True if the upload's journal exists, but ``url`` is not one of its stores any more."""
        spec = self.spec()
        return spec is not None and url not in spec.fragment.stores

    def drop(self) -> bool:
        """Log that the journal is gone. Return True: nothing is left to do."""
        fragment = self.spool.fragment
        log.info(
            "dropping %(fragment)s of %(journal)s, created at revision %(life)d: that journal is gone",
            {"fragment": fragment.content_name(), "journal": fragment.journal, "life": self.life},
        )
        return True


def _placed(stores: BlobStores, spool: CompletedSpool, spec: JournalSpec, url: str) -> Fragment:
    """Return the fragment as the store will hold it.

    If a template fails, or its postfix is too long for the store, the fragment gets no postfix. Such a
    template must not keep the bytes out of the store.
    """
    context = postfix_template.PostfixContext(
        fragment=spool.fragment,
        first_append_time=spool.first_append_time,
        registers=spool.registers,
        spec=spec.template_data(),
    )
    try:
        postfix = postfix_template.parse(spec.fragment.path_postfix_template).evaluate(context)
        placed = replace(spool.fragment, backing_store=url, path_postfix=postfix)
        stores.check_path(url, placed.content_path())
    except Invalid as error:
        log.warning(
            "%(journal)s: fragment %(fragment)s is stored without a path postfix, because the "
            "path_postfix_template of the journal fails: %(error)s",
            {"journal": spec.name, "fragment": spool.fragment.content_name(), "error": error},
        )
        return replace(spool.fragment, backing_store=url)
    return placed


def _put_object(store: BlobStore, path: str, spool: CompletedSpool) -> bool:
    """Put the object if it is absent. Return True if this call has put it. Call it in a thread.

    Usually the first replica puts the object, and all others find it.
    """
    if store.exists(path):
        return False
    with spool.open() as source:
        store.put(path, source, content_encoding=spool.content_encoding)
    return True
