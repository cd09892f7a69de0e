"""Stage 8 of the byte path: the stores in use, by URL, with their health."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from gazette.blobs import extras, health, metrics
from gazette.blobs.blob_store import BlobStore
from gazette.blobs.file import FileStore
from gazette.blobs.fsspec import NamedStore
from gazette.blobs.path_limits import check_path
from gazette.blobs.thread_call import ended
from gazette.blobs.wrappers import InstrumentedStore, RetryingStore
from gazette.errors import GazetteError, Invalid, NotAllowed, Unavailable
from gazette.lazy import import_function
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.ids import JournalName, Revision
from gazette.runtime.clock import Clock
from gazette.runtime.store_calls import HUNG_AFTER_S, StoreCalls
from gazette.runtime.tasks import BlockingPool, Pool, PoolFactory, TaskScope, sleep_unless
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S: Final = 3600.0
THREADS: Final = 16
"""Greatest number of calls of one store at a time, by default."""

_WATCH_INTERVAL_S: Final = 1.0
_CHECK_AGAIN_S: Final = 1.0
"""Least seconds between two health checks, if a sign of recovery or failure asks for an early one."""
_SIGNING_HUNG_AFTER_S: Final = 15.0
_UNUSED_AT_ONCE: Final = 4
"""Greatest number of checks, at a time, of stores that are not in use. Checks that hang count, too."""
_SIGNED_AT_ONCE: Final = 16
"""Greatest number of URLs to sign in one step of the event loop: a step takes some milliseconds."""

_STORES: Final = {
    "s3": "gazette.blobs.s3.store:S3Store",
    "gs": "gazette.blobs.gs:GsStore",
    "azure": "gazette.blobs.azure:AzureStore",
    "azure-ad": "gazette.blobs.azure:AzureStore",
}
"""Classes of stores by scheme, which are imported when the first store is made."""

StoreConstructor: TypeAlias = Callable[[FragmentStoreUrl], BlobStore]
"""Makes the store of a URL, without a connection to the store. Raises ``Invalid`` or ``NotAllowed`` for a URL
that is wrong or forbidden."""


@dataclass(frozen=True, slots=True)
class BlobSettings:
    """The blob stores that a process may open.

    ``file_root`` is the root directory of ``file://`` stores; None forbids these stores. With ``file_only``,
    the stores of all other schemes are directories below ``file_root``, too: one directory for each bucket
    and prefix. (A store of fsspec has one directory, for its path.) This is for development with the
    specifications of production.

    ``fsspec_protocols`` are the protocols that ``fsspec+NAME://`` may name. The limit is needed: the author
    of a journal's specification chooses its stores, and so the file systems that this process opens.
    """

    file_root: Path | None = None
    file_only: bool = False
    fsspec_protocols: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """The latest result of a check, or of calls that hang: without an error, the store is healthy. ``checks``
    counts the results so far. The check began at the monotonic time ``began`` (-inf: there was no
    check)."""

    error: str | None
    checks: int
    began: float


@dataclass(frozen=True, slots=True)
class _Threads:
    """The threads for blocking calls of one store, in three kinds. No kind of call waits for another kind."""

    calls: StoreCalls
    signing: StoreCalls
    """One thread, for signatures that need the network or a file."""
    checks: Pool
    """One thread, for health checks."""

    def close(self) -> None:
        self.calls.close()
        self.signing.close()
        self.checks.close()


class ActiveStore:
    """A store that is in use, with its threads and its health; or the reason why it could not be made.

    Keep the URL, not this object: ``BlobStores.get`` is cheap, and marks the store as still in use.
    """

    def __init__(
        self,
        url: str,
        store: RetryingStore | GazetteError,
        clock: Clock,
        threads: _Threads | None = None,
    ) -> None:
        self.url = url
        self._clock = clock
        self._store = store
        self._threads = threads
        self._recheck = asyncio.Event()
        """Set by a sign that the store has recovered, or has failed."""
        self._hung = False  # True while calls are refused because of hung calls.
        is_broken = isinstance(store, GazetteError)
        self._health = HealthStatus(
            error=str(store) if is_broken else "first health check has not completed",
            checks=0,
            began=0.0,
        )
        self._final = is_broken  # True: no check follows.
        self._changed = asyncio.Event()
        self._marked = True
        """True if ``BlobStores.get`` has returned this store since the last sweep."""
        self._checking: tuple[float, concurrent.futures.Future[None]] | None = None
        """A check that has not ended, and the monotonic time at which it began."""
        self.refusals: dict[tuple[JournalName, Revision], str] = {}
        """Why the store refuses fragments again and again, by journal and life of the journal."""

    @property
    def store(self) -> BlobStore:
        """The store. Its methods block: run them in ``calls``. Raises ``Invalid`` or ``NotAllowed`` if the
        store could not be made."""
        return self._usable_store

    @property
    def calls(self) -> StoreCalls:
        """The threads for calls of ``store``. Raises the error with which the store could not be made."""
        _ = self._usable_store
        assert self._threads is not None
        return self._threads.calls

    @property
    def _usable_store(self) -> RetryingStore:
        if isinstance(self._store, GazetteError):
            raise self._store
        return self._store

    async def sign(self, paths: Sequence[str], ttl_s: float) -> list[str]:
        """Return ``BlobStore.sign_get`` of each path.

        If the store permits it, compute the URLs on the event loop: then a store that hangs does no harm.
        Otherwise use a separate thread. Raise ``Unavailable`` if this thread has not returned for 15 s.
        """
        store, urls = self._usable_store, list[str]()
        for path in paths:
            url = store.sign_now(path, ttl_s)
            if url is None:
                break
            urls.append(url)
            if len(urls) % _SIGNED_AT_ONCE == 0:
                await self._clock.sleep(0)
        remaining_paths = paths[len(urls) :]
        if remaining_paths:
            assert self._threads is not None
            urls += await self._threads.signing.run(
                lambda: [store.sign_get(path, ttl_s) for path in remaining_paths]
            )
        return urls

    def failed(self) -> None:
        """Record that a call has failed. If the store counts as healthy, have it checked soon."""
        if self._health.error is None:
            self._recheck.set()

    def worked(self) -> None:
        """Record that a call has succeeded. If the store counts as unhealthy, have it checked soon."""
        if self._health.error is not None:
            self._recheck.set()

    @property
    def health(self) -> HealthStatus:
        return self._health

    async def wait_health_change(self, seen: HealthStatus | None = None) -> HealthStatus:
        """Return once the status is another one than ``seen`` (default: the present status).

        Return at once for a store that is not checked any more: it could not be made, or was not used for
        long. Cancellation: no effect.
        """
        status = seen or self._health
        while not self._final and self._health is status:
            await self._changed.wait()
        return self._health

    async def wait_healthy(self) -> None:
        """Return once a check has found the store healthy; never, if the store is not checked any more.
        Cancellation: no effect."""
        while self._health.error is not None:
            # If no check follows, wait for an event that is never set.
            await (asyncio.Event() if self._final else self._changed).wait()

    @property
    def _is_calling(self) -> bool:
        threads = self._threads
        if threads is None:
            return False
        is_checking = self._checking is not None and not self._checking[1].done()
        return is_checking or threads.calls.in_progress > 0 or threads.signing.in_progress > 0

    def _trouble(self) -> Unavailable | None:
        """Return why calls are refused; None while calls are permitted."""
        trouble = "" if self._threads is None else self._threads.calls.trouble
        return Unavailable(trouble) if trouble else None

    def _watch(self) -> bool:
        """Watch for calls that hang. Return True if there are calls to watch."""
        threads = self._threads
        assert threads is not None
        threads.signing.watch()
        trouble = threads.calls.watch()
        in_progress = threads.calls.in_progress
        metrics.CALLS.labels(self.url).set(in_progress)
        metrics.HUNG_CALLS.labels(self.url).set(threads.calls.hung)
        if trouble and not self._hung:
            log.error(
                "blob store %(store)s does not answer: %(error)s; new calls are refused until a call returns",
                {"store": self.url, "error": trouble},
            )
            self.set_health(trouble)
        elif self._hung and not trouble:
            self._recheck.set()
        self._hung = bool(trouble)
        return in_progress > 0 or threads.signing.in_progress > 0

    def set_health(
        self, error: str | None, *, began: float = -math.inf, final: bool = False
    ) -> None:
        """Record the result of a check that began at ``began`` (monotonic). ``final``: no check follows."""
        self._health = HealthStatus(error, self._health.checks + 1, began)
        self._final = final
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class BlobStores:
    """The stores of a process. Loop-bound; each store has its own threads, made by ``pools``.

    At most ``threads`` calls of one store run at a time, in addition to one health check and one signature. A
    call hangs after ``hung_after_s`` without progress. ``constructors`` maps URL schemes to constructors of
    their stores; see ``default_constructors``.
    """

    def __init__(
        self,
        settings: BlobSettings,
        clock: Clock,
        *,
        threads: int = THREADS,
        pools: PoolFactory = BlockingPool,
        hung_after_s: float = HUNG_AFTER_S,
        rng: random.Random | None = None,
        constructors: Mapping[str, StoreConstructor] | None = None,
    ) -> None:
        self._threads = threads
        self._file_only = settings.file_only
        self._pools = pools
        self._hung_after_s = hung_after_s
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._constructors = (
            default_constructors(settings) if constructors is None else dict(constructors)
        )
        self._stores: dict[str, ActiveStore] = {}
        self._unchecked: list[ActiveStore] = []
        """Stores whose checks have not begun."""
        self._has_unchecked = asyncio.Event()
        """Set when there is a store whose checks have not begun."""
        self._busy = asyncio.Event()
        """Set while calls that must be watched are in progress."""
        self._closing = threading.Event()
        """Set by ``close``: it ends the pauses before repeated calls."""
        self._unused_pool = pools("checks of stores that are not in use", _UNUSED_AT_ONCE)
        self._unused_room = asyncio.Semaphore(_UNUSED_AT_ONCE)

    def get(self, url: str) -> ActiveStore:
        """Return the store of ``url``, made on first use. Never raise: see ``ActiveStore.store``.

        If a store could not be made, the next call tries again.
        """
        active = self._stores.get(url)
        if active is not None:
            active._marked = True
            return active
        try:
            store = self._make(url, counted=True)
        except GazetteError as error:
            return ActiveStore(url, error, self._clock)
        active = self._stores[url] = ActiveStore(url, store, self._clock, self._make_threads(url))
        self._unchecked.append(active)
        self._has_unchecked.set()
        metrics.ACTIVE.set(len(self._stores))
        return active

    def check_path(self, url: str, path: str) -> None:
        """Raise ``Invalid`` if the store of ``url`` can never have an object at ``path``."""
        store_url = FragmentStoreUrl.parse(url)
        check_path(_replacement_url(store_url) if self._file_only else store_url, path)

    def in_use(self, url: str) -> ActiveStore | None:
        """Return the store of ``url`` if ``get`` has made it, else None. This does not count as a use."""
        return self._stores.get(url)

    async def check_unused(self, url: str, delete_prefix: str | None, timeout_s: float) -> str:
        """Check a store that is not in use, once. Return its error; empty if it is healthy.

        With a ``delete_prefix``, also write and remove an object below it. No thread, metric or log entry of
        the store remains: a caller may name any number of stores. Raise ``Unavailable`` if too many such
        checks are in progress for ``timeout_s`` seconds. Cancellation: the check goes on, and counts.
        """
        try:
            store = self._make(url, counted=False)
        except GazetteError as error:
            return str(error)

        def check() -> None:
            health.check(store)
            if delete_prefix is not None:
                health.probe_delete(store, delete_prefix)

        try:
            async with timeout(timeout_s):
                await self._unused_room.acquire()
        except TimeoutError:
            raise Unavailable(
                "as many other stores are checked as may be at a time, and no check ends",
                store=url,
                at_once=_UNUSED_AT_ONCE,
                hint="Try again later, or ask another broker.",
            ) from None
        try:
            check_call = self._unused_pool.submit(check)
        except BaseException:
            self._unused_room.release()
            raise
        loop = asyncio.get_running_loop()

        def leave(_: concurrent.futures.Future[None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._unused_room.release)

        check_call.add_done_callback(leave)
        if not await ended(check_call, timeout_s):
            return f"health check failed: no outcome within {timeout_s:.0f} s"
        failure = check_call.exception()
        return "" if failure is None else _reason(failure)

    def sweep(self) -> int:
        """Forget the stores that were not used since the last sweep. Return their number.

        A store with calls in progress stays. If the store was made again, it would get new threads beside
        the threads that hang.
        """
        unused = [
            active
            for active in self._stores.values()
            if not active._marked and not active._is_calling
        ]
        for active in unused:
            del self._stores[active.url]
            for gauge in (metrics.CALLS, metrics.HUNG_CALLS):
                with suppress(KeyError):
                    gauge.remove(active.url)
            active.set_health("health checks have stopped", final=True)
        for active in self._stores.values():
            active._marked = False
        metrics.ACTIVE.set(len(self._stores))
        return len(unused)

    async def run_health(self) -> None:
        """Check all stores from their first use on, watch for calls that hang, and sweep hourly. Run this as
        a daemon: it never returns."""
        async with TaskScope("blob-stores") as scope:
            scope.daemon(self._sweep_hourly(), name="sweep")
            scope.daemon(self.watch_calls(), name="watch")
            while True:
                for active in self._unchecked:
                    scope.spawn(self._check_until_swept(active), name=active.url)
                self._unchecked.clear()
                await self._has_unchecked.wait()
                self._has_unchecked.clear()

    def close(self) -> None:
        """Refuse new calls. Let calls that wait for a repetition continue at once. Do not wait for calls."""
        self._closing.set()
        self._unused_pool.close()
        for active in self._stores.values():
            assert active._threads is not None
            active._threads.close()

    def _make_threads(self, url: str) -> _Threads:
        monotonic = self._clock.monotonic
        return _Threads(
            StoreCalls(
                url,
                self._pools(f"store {url}", self._threads),
                self._threads,
                monotonic,
                hung_after_s=self._hung_after_s,
                on_start=self._busy.set,
            ),
            StoreCalls(
                url,
                self._pools(f"signing {url}", 1),
                1,
                monotonic,
                hung_after_s=_SIGNING_HUNG_AFTER_S,
                on_start=self._busy.set,
            ),
            self._pools(f"check {url}", 1),
        )

    def _make(self, url: str, *, counted: bool) -> RetryingStore:
        """Make the store of ``url``. Failed calls are repeated; with ``counted``, metrics count all calls.

        Raise ``Invalid`` or ``NotAllowed`` for a URL that is wrong, forbidden, or needs an extra.
        """
        store_url = FragmentStoreUrl.parse(url)
        constructor = self._constructors.get(extras.kind_of(store_url.scheme))
        if constructor is None:
            raise extras.not_installed(store_url.scheme)
        store = constructor(store_url)
        if counted:
            store = InstrumentedStore(store, url, self._clock.monotonic)
        return RetryingStore(store, self._rng, self._closing.wait)

    async def _sweep_hourly(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_INTERVAL_S)
            self.sweep()

    async def watch_calls(self) -> None:
        """Look each second, while any call is in progress, for calls that hang. `run_health` does so, too."""
        while True:
            await self._busy.wait()
            await self._clock.sleep(_WATCH_INTERVAL_S)
            watched = [active._watch() for active in self._stores.values()]
            if not any(watched):
                self._busy.clear()

    async def _check_until_swept(self, active: ActiveStore) -> None:
        """Check a store at intervals, until ``sweep`` has forgotten it."""
        failures = 0
        while self._stores.get(active.url) is active:
            active._recheck.clear()
            began = self._clock.monotonic()
            error: BaseException | None = active._trouble()
            if error is None:
                began, check_error = await self._check(active)
                # Calls may have begun to hang during the check.
                error = active._trouble() or check_error
            if self._stores.get(active.url) is not active:
                return
            metrics.HEALTH_CHECKS.labels(active.url, "error" if error else "ok").inc()
            failures = failures + 1 if error else 0
            reason = None if error is None else _reason(error)
            if failures and (failures == 1 or reason != active.health.error):
                log.warning(
                    "blob store %(store)s is unhealthy: %(error)s",
                    {"store": active.url, "error": reason},
                )
            active.set_health(reason, began=began)
            checked_at, next_s = self._clock.monotonic(), health.next_check_s(failures, self._rng)
            if await sleep_unless(self._clock, next_s, active._recheck):
                # After a sign of recovery or failure, check early, but not at once.
                due_at = checked_at + min(next_s, _CHECK_AGAIN_S)
                await self._clock.sleep(due_at - self._clock.monotonic())

    async def _check(self, active: ActiveStore) -> tuple[float, BaseException | None]:
        """Return the begin and the error of one check. If the check hangs, return an error that says so, and
        wait for the same check in the next call."""
        assert active._threads is not None
        if active._checking is None:
            check_call = active._threads.checks.submit(health.check, active.store)
            active._checking = self._clock.monotonic(), check_call
        began, check_call = active._checking
        if not await ended(check_call, health.CHECK_TIMEOUT_S):
            loop = asyncio.get_running_loop()

            def recheck(_: concurrent.futures.Future[None]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(active._recheck.set)

            check_call.add_done_callback(recheck)
            return began, Unavailable(
                "the health check did not end in time", timeout_s=health.CHECK_TIMEOUT_S
            )
        active._checking = None
        return began, check_call.exception()


def _reason(error: BaseException) -> str:
    """Return the text of an error, which is never empty: an empty text would mean a healthy store."""
    return str(error) or repr(error)


def _replacement_url(url: FragmentStoreUrl) -> FragmentStoreUrl:
    """Return the URL of the files that replace the store of ``url`` in development. Keep URLs of files."""
    if url.scheme == "file":
        return url
    # Keep buckets apart: they may hold different histories of the same journal.
    return FragmentStoreUrl("file", "", f"/{url.scheme}/{url.host}{url.path}")


def _import_store(target: str, url: FragmentStoreUrl) -> BlobStore:
    store: BlobStore = import_function(target)(url)
    return store


def default_constructors(settings: BlobSettings) -> dict[str, StoreConstructor]:
    """Return the constructors of stores, by scheme (``fsspec`` for all that begin with ``fsspec+``).

    A constructor whose extra is not installed is included, and raises ``Invalid`` when a store is made.
    """

    def file(url: FragmentStoreUrl) -> FileStore:
        if settings.file_root is None:
            raise Invalid(
                "file:// stores need a root directory (--broker.file-root)", path="file-root"
            )
        return FileStore(settings.file_root, url)

    def replacement_store(url: FragmentStoreUrl) -> BlobStore:
        store = file(_replacement_url(url))
        try:
            store.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise NotAllowed(f"cannot make {store.directory}: {error.strerror}") from error
        return store

    def named(url: FragmentStoreUrl) -> NamedStore:
        return NamedStore(url, settings.fsspec_protocols)

    constructors: dict[str, StoreConstructor] = {
        "file": file,
        "fsspec": named,
        **{scheme: partial(_import_store, target) for scheme, target in _STORES.items()},
    }
    if settings.file_only:
        constructors |= dict.fromkeys(extras.EXTRAS, replacement_store)
    return constructors
