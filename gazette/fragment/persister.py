"""Stage 7 of the byte path: takes completed spools from `spool_file`, puts their bytes into the blob stores
of `blobs`.

Until then, local files of the brokers are the only copies of acknowledged appends. So a spool is held until
it is persisted, or until its journal does not need it: the journal is gone or has no store, or a later
primary gave its offsets out again. At its end, a broker gives up spools that it could not persist in time.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from gazette.blobs.registry import BlobStores
from gazette.errors import Bug, Closed, Corrupt, GazetteError, NotAllowed, Retryable, Unavailable
from gazette.fragment import metrics
from gazette.fragment.closing import Closing
from gazette.fragment.completed_spool import CompletedSpool
from gazette.fragment.refusals import Refusals
from gazette.fragment.upload import LimitOf, SpecOf, Unconfirmed, Upload, UploadContext
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset, Revision
from gazette.protocol.journal import JournalSpec
from gazette.runtime.clock import Clock
from gazette.runtime.latch import Latch
from gazette.runtime.tasks import TaskScope, first_of
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

_NAMED_MAX: Final = 5
_CLOSING_ATTEMPTS_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class PersisterSettings:
    """Settings of the persister. Times are in seconds.

    A follower leaves the upload to a primary that holds the same bytes. The follower looks for the object
    after ``replica_look_s``, then at intervals that double. After ``replica_delay_s``, the follower uploads
    its own bytes. Both times are extended at random by up to half.

    A failed attempt is repeated after ``backoff_min_s``. The time doubles with each failure, up to
    ``backoff_max_s`` (``finish_backoff_max_s`` while finishing). While a store is down, all its spools share
    one such schedule.
    """

    parallel: int = 32
    """Greatest number of attempts at a time, of each store."""
    replica_look_s: float = 10.0
    replica_delay_s: float = 120.0
    look_timeout_s: float = 10.0
    put_timeout_s: float = 300.0
    backoff_min_s: float = 1.0
    backoff_max_s: float = 120.0
    finish_backoff_max_s: float = 5.0
    refused_after_s: float = 60.0
    """Seconds for which a healthy store must have failed an upload before it counts as refusing it."""


@dataclass(slots=True)
class _Outage:
    """Failures of one store in a row, and the monotonic time from which to use the store again."""

    failures: int = 0
    retry_at: float = 0.0


async def _no_limit(journal: JournalName, life: Revision, tenure: Revision) -> Offset | None:
    del journal, life, tenure
    return None


class Persister:
    """Uploads completed spools, in the threads of their stores. Loop-bound.

    ``spec_of`` returns the stores of a journal's fragments as of *now*. Until a spool is persisted, changes
    of its journal's stores and path postfix apply to it. A spool of a deleted journal is dropped, even if a
    journal of the same name was created since.

    A journal may be deleted and created again during an upload. The object would become part of the new
    journal. So the object is removed again, unless the new journal relies on it. A replica of the new journal
    may have completed the same bytes at the same offsets. The replica may have found the object in the store,
    and released its own spool. ``relies_on`` returns True if the new journal may rely on the object.

    A broker that was paused or cut off may hold bytes at offsets that a later primary gave out again. The
    persister calls ``limit_of`` right before and after an upload, and uploads no byte beyond the limit. If
    the limit has changed in between, an object beyond the new limit is removed. The later primary cannot rely
    on that object: it would have to begin, and to complete the very same bytes at the same offsets, during
    this upload.

    While ``limit_of`` does not know the limit, a spool is kept. When the broker ends, the spool's bytes are
    stored aside: see `set_aside`.

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
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._settings = settings if settings is not None else PersisterSettings()
        self._uploads: dict[Upload, asyncio.Event] = {}
        """Waiting spools. Each has an event, set once a store has its bytes, as a fragment or aside."""
        self._slots: dict[str, asyncio.Semaphore] = {}
        """One semaphore for each store."""
        self._outages: dict[str, _Outage] = {}
        self._refusals = Refusals(blob_stores, clock, self._settings.refused_after_s)
        self._closings: set[Closing] = set()
        """Closings that may have to be put when the broker ends."""
        self._hurry = asyncio.Event()
        """Set when ``finish`` begins: from then on, no upload is left to a primary."""
        self._shared = UploadContext(
            blob_stores,
            spec_of,
            limit_of,
            relies_on,
            on_stored,
            clock,
            self._settings.look_timeout_s,
            self._settings.put_timeout_s,
            self._hurry,
        )
        self._idle = asyncio.Event()
        """Set when a spool or closing is done: ``finish`` then looks for others that are not done."""
        self._idle.set()
        self._closed = False  # True once `finish` has returned.
        self._failed = asyncio.Event()
        self._scope = TaskScope("persister", on_failure=self._on_broken)

    @property
    def unpersisted(self) -> int:
        """Number of spools that wait."""
        return len(self._uploads)

    def spool_complete(
        self,
        spool: CompletedSpool,
        *,
        life: Revision,
        tenure: Revision,
        reassigned: Latch | None = None,
        end: Offset | None = None,
    ) -> None:
        """Take over a spool of the journal that was created at revision ``life``. Begin to upload it.

        ``tenure`` is the creation revision of the assignment of the primary that appended the spool's bytes.

        With ``reassigned``, a primary is known to hold the very same bytes. The upload is left to the primary
        for a time (see `PersisterSettings`), at most until ``reassigned`` is set: the primary may be gone
        then. With an ``end`` within the fragment, only the bytes before it are uploaded. No effect for a
        spool without bytes. Raise ``Closed`` once ``finish`` has ended its wait.
        """
        if self._closed:
            raise Closed("persister has finished", journal=spool.fragment.journal)
        if not spool.fragment.length:
            return
        upload = Upload(self._shared, spool, life, tenure, reassigned, end)
        self._uploads[upload] = asyncio.Event()
        self._idle.clear()
        metrics.UNPERSISTED.inc()
        self._scope.spawn(self._persist(upload), name=spool.fragment.content_name())

    def close(self, closing: Closing, settled: asyncio.Event) -> None:
        """Put ``closing`` into its journal's store when the broker ends, unless ``settled`` is set by then.

        First upload all spools of the journal that wait now: the closing says that stores have their bytes.
        Give up, with a warning, after `_CLOSING_ATTEMPTS_MAX` attempts.
        """
        name = closing.name
        if self._closed:
            log.warning(
                "%(journal)s gets no closing: the broker has ended", {"journal": name.journal}
            )
            return
        uploads = [upload for upload in self._uploads if upload.is_of(name.journal, name.life)]
        # The first offset that no store has: the begin of the first spool that waits now, if one does.
        begin = min([closing.end, *(upload.spool.fragment.begin for upload in uploads)])
        closing = replace(closing, begin=begin)
        self._closings.add(closing)
        stored_events = [self._uploads[upload] for upload in uploads]
        self._scope.spawn(self._close(closing, settled, stored_events), name=name.path)

    async def serve(self) -> None:
        """Run as a daemon: never return, and raise if the persister fails. Uploads run without this call."""
        await self._failed.wait()
        raise Bug("persister failed") from self._scope.failure

    async def finish(self, deadline_s: float) -> None:
        """Persist all spools, including those that were left to a primary. Then put closings.

        Wait for running uploads and repeat failed ones, for at most ``deadline_s`` seconds. A spool that
        cannot be confirmed is stored aside at once, and counts as persisted: its bytes are in the store.

        Raise ``Unavailable``, which names the first spools that are not persisted, and why. Their bytes are
        lost if this was the journal's last broker. A cancelled call drops nothing: call ``finish`` again.
        """
        self._hurry.set()
        for outage in self._outages.values():
            outage.retry_at = 0.0
        try:
            async with timeout(deadline_s):
                while not self._is_finished() and self._scope.failure is None:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        self._closed = True
        await self._scope.stop()
        if self._scope.failure is not None:
            raise Bug("persister failed") from self._scope.failure
        for closing in self._closings:
            _warn_unclosed(closing, "the broker ended before its bytes were stored")
        lost = [upload for upload in self._uploads if upload.aside is None]
        for upload in self._uploads:
            fragment = upload.spool.fragment
            log.error(
                "%(fragment)s of %(journal)s was not persisted: %(error)s"
                if upload.aside is None
                else "%(fragment)s of %(journal)s is stored aside: %(error)s. A broker that reaches etcd "
                "makes a fragment of it, unless its offsets were given out again",
                {
                    "fragment": fragment.content_name(),
                    "journal": fragment.journal,
                    "error": upload.error,
                },
            )
        if lost:
            raise _unfinished(lost, deadline_s)

    def _on_broken(self, _: BaseException) -> None:
        self._failed.set()
        self._idle.set()

    async def _persist(self, upload: Upload) -> None:
        """Wait for the primary's upload if its object suffices. Else repeat attempts until one succeeds.

        Each spool has one such task, in the persister's scope."""
        if not await self._left_to_primary(upload):
            while not await self._attempt_in_turn(upload):
                await self._sleep(self._backoff(upload.failures))
        self._uploads.pop(upload).set()
        self._refusals.ended(upload)
        metrics.UNPERSISTED.dec()
        metrics.PERSISTED.inc()
        self._idle.set()

    async def _left_to_primary(self, upload: Upload) -> bool:
        """Wait for the primary's upload. Return True once the object was found, or the journal is gone.

        Return False when this broker has to upload its own bytes: it has waited enough, or the primary may be
        gone, or this broker ends.
        Meanwhile look for the object at intervals, to release the spool's file soon after the upload.
        """
        settings, now = self._settings, self._clock.monotonic
        spread = 1 + 0.5 * self._rng.random()
        look_s = settings.replica_look_s * spread
        due_at = now() + settings.replica_delay_s * spread
        while upload.may_wait() and (remaining_s := due_at - now()) > 0:
            await self._sleep(min(look_s, remaining_s), upload.reassigned)
            look_s *= 2
            may_wait = upload.may_wait() and now() < due_at
            if may_wait and await self._attempt_in_turn(upload, look=True):
                return True
        return False

    async def _attempt_in_turn(self, upload: Upload, *, look: bool = False) -> bool:
        """Wait until the spool's store has a free slot and is not known to be down. Then attempt the upload.
        With ``look``, only look for the object, and not while the store is known to be down. Return True if
        the spool is done."""
        while True:
            spec = upload.spec()
            if spec is None and upload.placed is None:
                return upload.drop()
            store = upload.first_store(spec)
            slots = self._slots.setdefault(store, asyncio.Semaphore(self._settings.parallel))
            async with slots:
                spec = upload.spec()
                if upload.first_store(spec) != store:
                    continue  # The store was replaced during the wait for the slot.
                if spec is None and upload.placed is None:
                    return upload.drop()
                outage = self._outages.setdefault(store, _Outage())
                wait_s = outage.retry_at - self._clock.monotonic()
                if wait_s <= 0:
                    return await self._attempt(upload, spec, outage, look=look)
            if look:
                return False
            await self._sleep(wait_s)

    async def _attempt(
        self, upload: Upload, spec: JournalSpec | None, outage: _Outage, *, look: bool
    ) -> bool:
        """Attempt an upload once; with ``look``, only look for the object. Return True if the spool is done.

        A failure is noted and logged, and not raised.
        """
        former_failures = outage.failures
        try:
            if spec is None:
                is_done = await upload.take_back()
            else:
                is_done = await upload.put(spec, look=look)
        except Unconfirmed as unconfirmed:
            await self._on_unconfirmed(upload, spec, unconfirmed.cause)
            return False
        except GazetteError as error:
            self._on_failure(upload, error)
            # Concurrent attempts find the same outage: count it once.
            if isinstance(error, Unavailable | NotAllowed) and outage.failures == former_failures:
                outage.failures += 1
                outage.retry_at = self._clock.monotonic() + self._backoff(outage.failures)
            return False
        except Exception as error:  # noqa: BLE001 - one spool's defect must not stop the others
            self._on_failure(upload, error)
            return False
        outage.failures = 0
        outage.retry_at = 0.0
        return is_done

    def _on_failure(self, upload: Upload, error: Exception) -> None:
        """Note, count and log a failed attempt to store the upload."""
        upload.failures += 1
        upload.error = str(error) or repr(error)
        metrics.PERSIST_FAILURES.inc()
        is_expected = isinstance(error, GazetteError)
        if not isinstance(error, Retryable | Closed):
            self._refusals.failed(upload)  # The error may last: the store may refuse this journal.
        is_grave = not is_expected or isinstance(error, Corrupt | Bug)
        log.log(
            logging.ERROR if is_grave else logging.WARNING,
            "failed to persist %(fragment)s of %(journal)s (will retry): %(error)s",
            {
                "fragment": upload.spool.fragment.content_name(),
                "journal": upload.spool.fragment.journal,
                "error": error if is_expected else upload.error,
            },
            exc_info=None if is_expected else error,
        )

    async def _on_unconfirmed(
        self, upload: Upload, spec: JournalSpec | None, error: GazetteError
    ) -> None:
        """Note and log the failure, and keep the spool. If the broker is ending, store its bytes aside."""
        upload.failures += 1
        upload.error = str(error)
        log.warning(
            "%(fragment)s of %(journal)s is not uploaded yet (will ask again): %(error)s",
            {
                "fragment": upload.spool.fragment.content_name(),
                "journal": upload.spool.fragment.journal,
                "error": error,
            },
            extra={"cause": f"unconfirmed uploads: {error.message}"},
        )
        if not self._hurry.is_set() or spec is None:
            return
        try:
            await upload.set_aside(spec)
            self._uploads[upload].set()
        except Exception as failure:  # noqa: BLE001 - as in `_attempt`
            self._on_failure(upload, failure)
        self._idle.set()

    async def _close(
        self, closing: Closing, settled: asyncio.Event, stored: list[asyncio.Event]
    ) -> None:
        """Put a closing when the broker ends and all of ``stored`` are set, unless ``settled`` is set.
        Give up after `_CLOSING_ATTEMPTS_MAX` attempts."""
        for event in (self._hurry, *stored):
            await first_of(event, settled)
        for failures in range(1, _CLOSING_ATTEMPTS_MAX + 1):
            if settled.is_set() or await self._put_closing(closing):
                break
            await self._sleep(self._backoff(failures))
        self._closings.remove(closing)
        self._idle.set()

    async def _put_closing(self, closing: Closing) -> bool:
        """Put a closing into the first store that permits it. Return False if no store has it now.

        Return True also if the journal has no store, or is gone.
        """
        name = closing.name
        spec = self._shared.spec_of(name.journal, name.life)
        for url in () if spec is None else spec.fragment.stores:  # None: the journal is gone.
            active = self._shared.blob_stores.get(url)
            content = io.BytesIO(closing.encode())
            try:
                await active.calls.run(active.store.put, name.path, content)
            except Exception as error:  # noqa: BLE001 - as in `_attempt`
                _warn_unclosed(closing, f"{url}: {error}")
                if not isinstance(error, NotAllowed):
                    return False
            else:
                log.info(
                    "%(path)s in %(store)s says where %(journal)s ends, as etcd did not answer",
                    {"path": name.path, "store": url, "journal": name.journal},
                )
                return True
        return spec is None or not spec.fragment.stores

    def _is_finished(self) -> bool:
        """Return True if all spools are persisted or stored aside, and closings are put."""
        return not self._closings and all(upload.aside is not None for upload in self._uploads)

    def _backoff(self, failures: int) -> float:
        """Return the seconds to wait after ``failures`` in a row, varied at random by up to a quarter."""
        settings = self._settings
        longest = settings.finish_backoff_max_s if self._hurry.is_set() else settings.backoff_max_s
        backoff = settings.backoff_min_s * 2.0 ** min(max(failures - 1, 0), 30)
        return min(backoff, longest) * (0.75 + 0.5 * self._rng.random())

    async def _sleep(self, seconds: float, reassigned: Latch | None = None) -> None:
        """Sleep until the time is over, ``finish`` begins, or ``reassigned`` is set. After the begin of
        ``finish``, only the time counts."""
        if self._hurry.is_set():
            await self._clock.sleep(seconds)
            return
        async with TaskScope("sleep") as scope:
            waits = {
                scope.spawn(self._clock.sleep(seconds), name="time"),
                scope.spawn(_wait_for(self._hurry), name="hurry"),
            }
            if reassigned is not None:
                waits.add(scope.spawn(_wait_for(reassigned), name="reassigned"))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            scope.cancel()


def _unfinished(lost: list[Upload], deadline_s: float) -> Unavailable:
    uploads = sorted(lost, key=lambda upload: upload.spool.fragment.journal)
    names = "; ".join(str(upload) for upload in uploads[:_NAMED_MAX])
    more = f"; and {len(uploads) - _NAMED_MAX} more" if len(uploads) > _NAMED_MAX else ""
    return Unavailable(
        f"{len(uploads)} fragments were not persisted in time: {names}{more}",
        hint="Repair the blob store, and start this broker again. Keep the other brokers running until "
        "then: their replicas may hold the only copy.",
        deadline_s=deadline_s,
    )


def _warn_unclosed(closing: Closing, reason: str) -> None:
    log.warning(
        "%(path)s could not be put: %(reason)s. Without it an operator has to confirm the head of "
        "%(journal)s",
        {"path": closing.name.path, "journal": closing.name.journal, "reason": reason},
        extra={"cause": f"closings not put: {reason}"},
    )


async def _wait_for(event: asyncio.Event | Latch) -> None:
    await event.wait()
