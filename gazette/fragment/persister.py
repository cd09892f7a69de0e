"""Stage 7 of the byte path: takes completed spools from `spool_file`, puts their bytes
into the blob stores of `blobs`.

Until then, the only copies of acknowledged appends are local files of the brokers. So a spool is held until
it is persisted, or until its journal is gone. Nothing else lets it go.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from gazette.blobs.blob_store import BlobStore
from gazette.blobs.registry import BlobStores
from gazette.blobs.thread_call import ended
from gazette.errors import Bug, Closed, Corrupt, GazetteError, Invalid, NotAllowed, Unavailable
from gazette.fragment import metrics
from gazette.fragment.completed_spool import CompletedSpool
from gazette.fragment.set_aside import SetAside
from gazette.protocol import postfix_template
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset, Revision
from gazette.protocol.journal import JournalSpec
from gazette.runtime import tracing
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

SpecOf: TypeAlias = Callable[[JournalName, Revision], JournalSpec | None]
"""Returns the specification of a journal whose life began at that revision; None if that life is over."""

LimitOf: TypeAlias = Callable[[JournalName, Revision, Revision], Awaitable[Offset | None]]
"""``(journal, life, tenure)``: the offset at which a later primary than that of ``tenure`` began to give
out offsets again. None without a later primary. Bytes beyond that offset are not the journal's any more.
Raises while the offset is not known.
"""

_NAMED_MAX: Final = 5
_NOTICE_S: Final = 1.0
"""Seconds within which a change of stores ends the wait for a store that hangs."""


class _UnconfirmedError(Exception):
    """A later primary may have given the offsets of an upload out again: etcd
    did not answer, for ``cause``.
    """

    def __init__(self, cause: GazetteError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, slots=True)
class PersisterSettings:
    """Settings of the persister. Times are in seconds.

    A replica leaves the upload to a primary that holds the same bytes. It looks for the object after
    ``replica_look_s``, then at intervals that double, and uploads after ``replica_delay_s``. Both times are
    extended at random by up to half.

    A failed attempt is repeated after ``backoff_min_s``, doubling up to ``backoff_max_s``
    (``finish_backoff_max_s`` while finishing). While a store is down, all spools that go
    there share one such schedule.
    """

    parallel: int = 32
    """Most attempts at a time, of each store."""
    replica_look_s: float = 10.0
    replica_delay_s: float = 120.0
    look_timeout_s: float = 10.0
    put_timeout_s: float = 300.0
    backoff_min_s: float = 1.0
    backoff_max_s: float = 120.0
    finish_backoff_max_s: float = 5.0


@dataclass(slots=True)
class _Outage:
    """The time for which to keep away from one store."""

    failures: int = 0
    retry_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Entry:
    """A spool that is not persisted yet."""

    spool: CompletedSpool
    life: Revision
    """The revision at which the journal of these bytes was created."""
    tenure: Revision
    """Creation revision of the assignment of the primary that appended the last of these bytes."""
    reassigned: asyncio.Event | None
    """An event that is not set while a living primary holds the same bytes, and may
    upload them. None: do not wait.
    """
    cut: Offset | None = None
    """The offset at which to cut the spool before it is uploaded."""
    failures: int = 0
    error: str = "not attempted yet"
    call: concurrent.futures.Future[bool] | None = field(default=None)
    """The running thread of an attempt whose time was up."""
    placed: tuple[str, str] | None = None
    """Store and path of an object that this entry has put there, or may have put there."""
    is_put: bool = False
    """The object exists, and this entry has put it there."""
    aside: tuple[str, str] | None = None
    """Store and path of an object by which these bytes outlive this broker."""

    def __str__(self) -> str:
        fragment = self.spool.fragment
        end = fragment.end if self.cut is None else self.cut
        return f"{fragment.journal} [{fragment.begin}, {end}): {self.error}"


async def _no_limit(journal: JournalName, life: Revision, tenure: Revision) -> Offset | None:
    del journal, life, tenure
    return None


class Persister:
    """Uploads completed spools, in the threads of their stores. Loop-bound.

    ``spec_of`` returns the stores of a journal's fragments as of *now*. A spool follows changes of its
    journal's stores and path postfix until it is persisted. A spool of a deleted journal is dropped, also if
    a journal of the same name was created since.

    A journal may be deleted and created again during an upload. The object would become part of the new
    journal, so it is removed again, unless the new journal relies on it. A replica of the new journal may
    have completed exactly the same bytes at the same offsets. It then found the object in the store and let
    its own spool go. ``relies_on`` returns True where that may be so.

    A broker that was paused or cut off may hold bytes at offsets that a later primary gave out again. It
    calls ``limit_of`` right before and after an upload, and uploads nothing beyond. An object that got there
    in between is removed. The later primary cannot rely on that object. For that, it would have had to begin,
    and to complete the very same bytes at the same offsets, during this upload.

    While ``limit_of`` does not know, a spool is kept. At the end of the broker its bytes
    are set aside: see `set_aside`.

    ``on_stored`` is called with each fragment that was found in a store, or put there.
    """

    def __init__(
        self,
        blob_stores: BlobStores,
        spec_of: SpecOf,
        clock: Clock,
        *,
        limit_of: LimitOf = _no_limit,
        relies_on: Callable[[Fragment], bool] = lambda _: False,
        on_stored: Callable[[Fragment], None] = lambda _: None,
        rng: random.Random | None = None,
        settings: PersisterSettings | None = None,
    ) -> None:
        self._blob_stores = blob_stores
        self._spec_of = spec_of
        self._limit_of = limit_of
        self._relies_on = relies_on
        self._on_stored = on_stored
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._settings = settings if settings is not None else PersisterSettings()
        self._entries: set[_Entry] = set()
        self._slots: dict[str, asyncio.Semaphore] = {}
        """One semaphore for each store."""
        self._outages: dict[str, _Outage] = {}
        self._hurry = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._failed = asyncio.Event()
        self._scope = TaskScope("persister", on_failure=self._on_broken)

    @property
    def unpersisted(self) -> int:
        """Number of spools that wait."""
        return len(self._entries)

    def spool_complete(
        self,
        spool: CompletedSpool,
        *,
        life: Revision,
        tenure: Revision,
        reassigned: asyncio.Event | None = None,
        end: Offset | None = None,
    ) -> None:
        """Take over a spool of the journal that was created at revision ``life``. Upload it at once.

        ``tenure`` is the creation revision of the assignment of the primary that appended the spool's bytes.

        With ``reassigned``, a primary is known to hold the very same bytes. The upload is left to it until
        that event is set: the primary may be gone then. With an ``end`` within the fragment, only the bytes
        before it are uploaded. Raise ``Closed`` once ``finish`` has returned.
        """
        if self._closed:
            raise Closed("persister has finished", journal=spool.fragment.journal)
        if not spool.fragment.length:
            return
        entry = _Entry(spool, life, tenure, reassigned, end)
        self._entries.add(entry)
        self._idle.clear()
        metrics.UNPERSISTED.inc()
        self._scope.spawn(self._persist(entry), name=spool.fragment.content_name())

    async def serve(self) -> None:
        """Run as a daemon: never return, and raise if the persister fails. Uploads do not need it."""
        await self._failed.wait()
        raise Bug("persister failed") from self._scope.failure

    async def finish(self, deadline_s: float) -> None:
        """Persist all spools, also those that a replica would have left to its primary.

        Waits for running uploads and repeats failed ones, for at most ``deadline_s`` seconds. A spool that
        cannot be confirmed is set aside at once, and counts as persisted: its bytes are in the store.

        Raise ``Unavailable``, which names the spools that are not persisted, and why. Their bytes are lost
        if this was the last of the journal's brokers. Cancellation: nothing is dropped; call it again.
        """
        self._hurry.set()
        for outage in self._outages.values():
            outage.retry_at = 0.0
        try:
            async with asyncio.timeout(deadline_s):
                while not self._is_finished() and self._scope.failure is None:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        self._closed = True
        await self._scope.stop()
        if self._scope.failure is not None:
            raise Bug("persister failed") from self._scope.failure
        lost = [entry for entry in self._entries if entry.aside is None]
        for entry in self._entries:
            fragment = entry.spool.fragment
            log.error(
                "%(fragment)s of %(journal)s was not persisted: %(error)s"
                if entry.aside is None
                else "%(fragment)s of %(journal)s is stored aside: %(error)s. A broker that reaches etcd "
                "makes a fragment of it, unless its offsets were given out again",
                {
                    "fragment": fragment.content_name(),
                    "journal": fragment.journal,
                    "error": entry.error,
                },
            )
        if lost:
            raise _unfinished(lost, deadline_s)

    def _on_broken(self, _: BaseException) -> None:
        self._failed.set()
        self._idle.set()

    async def _persist(self, entry: _Entry) -> None:
        """Attempt until one attempt succeeds. One task per spool, in the persister's scope."""
        if not await self._left_to_primary(entry):
            while not await self._attempt_in_turn(entry):
                await self._sleep(self._backoff(entry.failures))
        self._entries.remove(entry)
        metrics.UNPERSISTED.dec()
        metrics.PERSISTED.inc()
        if not self._entries:
            self._idle.set()

    async def _left_to_primary(self, entry: _Entry) -> bool:
        """Wait for the primary's upload. Return False when this broker has to upload instead.

        Meanwhile look into the store at intervals, to let the spool's file go as
        soon as the fragment is there.
        """
        settings, now = self._settings, self._clock.monotonic
        spread = 1 + 0.5 * self._rng.random()
        look_s = settings.replica_look_s * spread
        due_at = now() + settings.replica_delay_s * spread
        while self._may_wait(entry) and (remaining_s := due_at - now()) > 0:
            await self._sleep(min(look_s, remaining_s), entry.reassigned)
            look_s *= 2
            waits = self._may_wait(entry) and now() < due_at
            if waits and await self._attempt_in_turn(entry, look=True):
                return True
        return False

    def _may_wait(self, entry: _Entry) -> bool:
        return (
            entry.reassigned is not None
            and not entry.reassigned.is_set()
            and not self._hurry.is_set()
        )

    async def _attempt_in_turn(self, entry: _Entry, *, look: bool = False) -> bool:
        """Attempt once the spool's store has a free slot and is not known to be down.

        With ``look``, upload nothing, and leave alone a store that is known to be down.
        """
        while True:
            spec = self._spec_of(entry.spool.fragment.journal, entry.life)
            if spec is None and entry.placed is None:
                return self._drop(entry)
            store = _first_store(entry, spec)
            slots = self._slots.setdefault(store, asyncio.Semaphore(self._settings.parallel))
            async with slots:
                spec = self._spec_of(entry.spool.fragment.journal, entry.life)
                if _first_store(entry, spec) != store:
                    continue  # The store has changed during the wait for the slot.
                if spec is None and entry.placed is None:
                    return self._drop(entry)
                outage = self._outages.setdefault(store, _Outage())
                wait = outage.retry_at - self._clock.monotonic()
                if wait <= 0:
                    return await self._attempt(entry, spec, outage, look=look)
            if look:
                return False
            await self._sleep(wait)

    def _drop(self, entry: _Entry) -> bool:
        fragment = entry.spool.fragment
        log.info(
            "dropping %(fragment)s of %(journal)s, created at revision %(life)d: that journal is gone",
            {
                "fragment": fragment.content_name(),
                "journal": fragment.journal,
                "life": entry.life,
            },
        )
        return True

    async def _attempt(
        self, entry: _Entry, spec: JournalSpec | None, outage: _Outage, *, look: bool
    ) -> bool:
        seen = outage.failures
        try:
            if spec is None:
                done = await self._take_back(entry)
            else:
                done = await self._upload(entry, spec, look=look)
        except _UnconfirmedError as unconfirmed:
            await self._on_unconfirmed(entry, spec, unconfirmed.cause)
            return False
        except GazetteError as error:
            self._on_failure(entry, error)
            # Concurrent attempts find the same outage: count it once.
            if isinstance(error, Unavailable | NotAllowed) and outage.failures == seen:
                outage.failures += 1
                outage.retry_at = self._clock.monotonic() + self._backoff(outage.failures)
            return False
        except Exception as error:  # noqa: BLE001 - one spool's defect must not stop the others
            self._on_failure(entry, error)
            return False
        outage.failures = 0
        outage.retry_at = 0.0
        return done

    def _on_failure(self, entry: _Entry, error: Exception) -> None:
        entry.failures += 1
        entry.error = str(error) or repr(error)
        metrics.PERSIST_FAILURES.inc()
        expected = isinstance(error, GazetteError)
        grave = not expected or isinstance(error, Corrupt | Bug)
        log.log(
            logging.ERROR if grave else logging.WARNING,
            "failed to persist %(fragment)s of %(journal)s (will retry): %(error)s",
            {
                "fragment": entry.spool.fragment.content_name(),
                "journal": entry.spool.fragment.journal,
                "error": error if expected else entry.error,
            },
            exc_info=None if expected else error,
        )

    async def _on_unconfirmed(
        self, entry: _Entry, spec: JournalSpec | None, error: GazetteError
    ) -> None:
        """Keep the spool. At the end of the broker, store its bytes aside."""
        entry.failures += 1
        entry.error = str(error)
        log.warning(
            "%(fragment)s of %(journal)s is not uploaded yet (will ask again): %(error)s",
            {
                "fragment": entry.spool.fragment.content_name(),
                "journal": entry.spool.fragment.journal,
                "error": error,
            },
            extra={"cause": f"unconfirmed uploads: {error.message}"},
        )
        if not self._hurry.is_set() or spec is None:
            return
        try:
            await self._set_aside(entry, spec)
        except GazetteError as failure:
            self._on_failure(entry, failure)
        if self._is_finished():
            self._idle.set()

    def _is_finished(self) -> bool:
        """Return True if all spools are persisted or stored aside."""
        return all(entry.aside is not None for entry in self._entries)

    async def _set_aside(self, entry: _Entry, spec: JournalSpec) -> None:
        await self._cut(entry, spec)
        await self._end_call(entry)
        if entry.aside is None:
            url = spec.fragment.stores[0]
            active = self._blob_stores.get(url)
            placed = _placed(entry.spool, spec, url)
            path = SetAside(placed, entry.life, entry.tenure).path
            await active.calls.run(_put, active.store, path, entry.spool)
            entry.aside = url, path
        # An object that was put before etcd fell silent stays: replicas of the same bytes may have found it,
        # and let their own spools go. The object aside marks it as unconfirmed.

    async def _upload(self, entry: _Entry, spec: JournalSpec, *, look: bool) -> bool:
        """Put the fragment into the journal's first store. Return True if it is there.

        While finishing, a store that refuses access makes way for the next one. Readers use that one as well,
        and there is no later attempt to wait for. Without stores, return True: there is nothing to do.
        """
        stores = spec.fragment.stores
        if stores and not look:
            await self._end_call(entry)
            is_superseded = await self._is_superseded(entry)
            if entry.cut is not None:
                await self._remove(entry)
            if is_superseded:
                return True
        await self._cut(entry, spec)
        fragment = entry.spool.fragment
        for at, url in enumerate(stores):
            try:
                with tracing.span(
                    "persist", journal=fragment.journal, begin=fragment.begin, end=fragment.end
                ):
                    return await self._upload_to(entry, spec, url, look=look)
            except NotAllowed:
                if not self._hurry.is_set() or at + 1 == len(stores):
                    raise
        return True

    async def _cut(self, entry: _Entry, spec: JournalSpec) -> None:
        if entry.cut is not None and spec.fragment.stores:
            calls = self._blob_stores.get(spec.fragment.stores[0]).calls
            entry.spool = await entry.spool.cut_to(entry.cut, calls)
            entry.cut = entry.aside = None

    async def _upload_to(self, entry: _Entry, spec: JournalSpec, url: str, *, look: bool) -> bool:
        await self._end_call(entry)
        fragment = entry.spool.fragment
        if self._spec_of(fragment.journal, entry.life) is None:
            return await self._take_back(entry)
        active = self._blob_stores.get(url)
        calls, store = active.calls, active.store
        placed = _placed(entry.spool, spec, url)
        path = placed.content_path()
        if look:
            found = await self._look(entry, url, calls.submit(store.exists, path))
            if found:
                self._note_stored(placed)
            return found
        if not (entry.is_put and entry.placed == (url, path)):
            entry.call = calls.submit(_put, store, path, entry.spool)
            entry.placed, entry.is_put = (url, path), False
            await self._end_call(entry)
        if self._spec_of(fragment.journal, entry.life) is None:
            return await self._take_back(entry)
        if not await self._is_beyond(entry, fragment.end):
            await self._remove_aside(entry)
            self._note_stored(placed)
            return True
        await self._remove(entry)
        return False  # The next attempt uploads the part that is left.

    def _note_stored(self, placed: Fragment) -> None:
        self._on_stored(replace(placed, mod_time=max(int(self._clock.now()), 1)))

    async def _look(self, entry: _Entry, url: str, call: concurrent.futures.Future[bool]) -> bool:
        """Return True if ``call`` soon finds the object.

        A store that hangs is not waited for. The look ends early if this broker must upload itself, or if the
        journal has other stores. It also ends when the time is up. Its thread changes nothing.
        """
        left_s = self._settings.look_timeout_s
        while not await ended(call, _NOTICE_S):
            left_s -= _NOTICE_S
            if left_s <= 0 or not self._may_wait(entry) or self._has_other_stores(entry, url):
                return False
        return call.result()

    async def _is_beyond(self, entry: _Entry, end: Offset) -> bool:
        limit = await self._limit(entry)
        return limit is not None and limit < end

    async def _limit(self, entry: _Entry) -> Offset | None:
        try:
            return await self._limit_of(entry.spool.fragment.journal, entry.life, entry.tenure)
        except GazetteError as error:
            raise _UnconfirmedError(error) from error

    async def _is_superseded(self, entry: _Entry) -> bool:
        """Cut the entry where a later primary has begun. Return True if nothing is left of it."""
        fragment = entry.spool.fragment
        end = fragment.end if entry.cut is None else entry.cut
        limit = await self._limit(entry)
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
                if entry.aside is None
                else f"; their bytes are in {''.join(entry.aside)}",
            },
        )
        entry.cut = limit
        return limit <= fragment.begin

    async def _remove(self, entry: _Entry) -> None:
        """Remove the object that this entry has put into its store, if there is one."""
        if entry.placed is None:
            return
        url, path = entry.placed
        active = self._blob_stores.get(url)
        await active.calls.run(active.store.remove, path)
        log.warning(
            "removed %(path)s from %(store)s: the journal has other bytes there, or was deleted",
            {"path": path, "store": url},
        )
        entry.placed, entry.is_put = None, False

    async def _remove_aside(self, entry: _Entry) -> None:
        """Remove the object that was stored aside: its fragment is in the store."""
        if entry.aside is not None:
            url, path = entry.aside
            active = self._blob_stores.get(url)
            await active.calls.run(active.store.remove, path)
            entry.aside = None

    async def _take_back(self, entry: _Entry) -> bool:
        """Remove an upload for a journal that was deleted meanwhile. Return True when done."""
        await self._end_call(entry)
        if entry.placed is not None:
            url, path = entry.placed
            if self._relies_on(entry.spool.fragment):
                log.error(
                    "%(path)s in %(store)s was uploaded for a journal that was deleted meanwhile. It "
                    "stays, as a new journal of the same name may hold the same bytes. Compare it with "
                    "`gazctl journals fragments`",
                    {"path": path, "store": url},
                )
            else:
                await self._remove(entry)
        return self._drop(entry)

    async def _end_call(self, entry: _Entry) -> None:
        """Wait for the entry's thread, if there is one. Raise what the thread raised."""
        if entry.call is not None:
            entry.is_put = await self._outlive(entry, entry.call)
            if not entry.is_put:
                entry.placed = None  # Another broker has put the object.

    async def _outlive(self, entry: _Entry, call: concurrent.futures.Future[bool]) -> bool:
        """Wait for a thread, and return its result.

        A thread whose time is up remains the entry's: two threads must not write the same object.
        """
        timeout_s = left_s = self._settings.put_timeout_s
        while not await ended(call, min(left_s, _NOTICE_S)):
            left_s -= _NOTICE_S
            if entry.placed is not None and self._has_other_stores(entry, entry.placed[0]):
                entry.call, entry.placed = None, None
                raise Unavailable("the upload was given up: the journal has other stores now")
            if left_s <= 0:
                raise Unavailable("the upload did not end in time", timeout_s=timeout_s)
        entry.call = None
        return call.result()

    def _has_other_stores(self, entry: _Entry, url: str) -> bool:
        """Return True if the entry's journal exists, and ``url`` is not one of its stores any more."""
        spec = self._spec_of(entry.spool.fragment.journal, entry.life)
        return spec is not None and url not in spec.fragment.stores

    def _backoff(self, failures: int) -> float:
        settings = self._settings
        longest = settings.finish_backoff_max_s if self._hurry.is_set() else settings.backoff_max_s
        backoff = settings.backoff_min_s * 2.0 ** min(max(failures - 1, 0), 30)
        return min(backoff, longest) * (0.75 + 0.5 * self._rng.random())

    async def _sleep(self, seconds: float, reassigned: asyncio.Event | None = None) -> None:
        """Sleep until the time is over, ``finish`` begins, or ``reassigned`` is set."""
        if self._hurry.is_set():
            await self._clock.sleep(seconds)
            return
        async with TaskScope("sleep") as scope:
            over = {
                scope.spawn(self._clock.sleep(seconds), name="time"),
                scope.spawn(_until(self._hurry), name="hurry"),
            }
            if reassigned is not None:
                over.add(scope.spawn(_until(reassigned), name="reassigned"))
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            scope.cancel()


def _unfinished(lost: list[_Entry], deadline_s: float) -> Unavailable:
    entries = sorted(lost, key=lambda entry: entry.spool.fragment.journal)
    named = "; ".join(str(entry) for entry in entries[:_NAMED_MAX])
    more = f"; and {len(entries) - _NAMED_MAX} more" if len(entries) > _NAMED_MAX else ""
    return Unavailable(
        f"{len(entries)} fragments were not persisted in time: {named}{more}",
        hint="Repair the blob store, and start this broker again while other replicas live.",
        deadline_s=deadline_s,
    )


def _first_store(entry: _Entry, spec: JournalSpec | None) -> str:
    """Return the URL of the store that the entry needs now; empty if it needs none."""
    if spec is not None:
        return spec.fragment.stores[0] if spec.fragment.stores else ""
    return "" if entry.placed is None else entry.placed[0]


def _placed(spool: CompletedSpool, spec: JournalSpec, url: str) -> Fragment:
    """Return the fragment as the store will hold it.

    A template that fails must not keep the bytes out of the store: the fragment then gets no postfix.
    """
    context = postfix_template.PostfixContext(
        fragment=spool.fragment,
        first_append_time=spool.first_append_time,
        registers=spool.registers,
        spec=spec.template_data(),
    )
    try:
        postfix = postfix_template.parse(spec.fragment.path_postfix_template).evaluate(context)
    except Invalid as error:
        log.warning(
            "%(journal)s: fragment %(fragment)s is stored without a path postfix, because the "
            "path_postfix_template of the journal fails: %(error)s",
            {
                "journal": spec.name,
                "fragment": spool.fragment.content_name(),
                "error": error,
            },
        )
        postfix = ""
    return replace(spool.fragment, backing_store=url, path_postfix=postfix)


def _put(store: BlobStore, path: str, spool: CompletedSpool) -> bool:
    """Put the object if it is absent. Return True if this call put it. Runs in a thread.

    Usually all replicas but the first find the object.
    """
    if store.exists(path):
        return False
    with spool.open() as source:
        store.put(path, source, content_encoding=spool.content_encoding)
    return True


async def _until(event: asyncio.Event) -> None:
    await event.wait()
