"""Stage 8 of the byte path: the stores in use, by URL, with their health."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from gazette.blobs import extras, health, metrics
from gazette.blobs.azure import AzureStore
from gazette.blobs.blob_store import BlobStore
from gazette.blobs.file import FileStore
from gazette.blobs.fsspec_store import NamedStore
from gazette.blobs.gs import GsStore
from gazette.blobs.s3 import S3Store
from gazette.blobs.thread_call import ended
from gazette.blobs.wrappers import InstrumentedStore, RetryingStore
from gazette.clock import Clock
from gazette.errors import GazetteError, Invalid, NotAllowed, Unavailable
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.tasks import Pool, TaskScope

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S: Final = 3600.0

StoreConstructor: TypeAlias = Callable[[FragmentStoreUrl], BlobStore]
"""Makes a store of a URL. Raises ``Invalid`` or ``NotAllowed``; does not reach out for it."""


@dataclass(frozen=True, slots=True)
class BlobSettings:
    """``file_root`` is the directory below which ``file://`` stores are; None: there are none.

    With ``file_only`` the stores of every other scheme are directories below it too, one for each
    bucket and prefix: for development against the specifications of production.
    """

    file_root: Path | None = None
    file_only: bool = False


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """What the latest check said: no error is healthy. ``checks`` counts the checks so far."""

    error: str | None
    checks: int


class ActiveStore:
    """A store that is in use, or the reason why there is none.

    Keep the URL, not this object: ``BlobStores.get`` is cheap, and tells that the store is still
    in use.
    """

    def __init__(self, url: str, store: BlobStore | GazetteError) -> None:
        self.url = url
        self._store = store
        broken = isinstance(store, GazetteError)
        self._health = HealthStatus(
            error=str(store) if broken else "first health check has not completed", checks=0
        )
        self._final = broken
        self._changed = asyncio.Event()
        self._marked = True
        self._checking: concurrent.futures.Future[None] | None = None

    @property
    def store(self) -> BlobStore:
        """The store. Its methods block: run them in ``BlobStores.pool``.

        Raises the ``Invalid`` or ``NotAllowed`` with which it could not be made.
        """
        if isinstance(self._store, GazetteError):
            raise self._store
        return self._store

    @property
    def health(self) -> HealthStatus:
        return self._health

    async def wait_health_change(self, seen: HealthStatus | None = None) -> HealthStatus:
        """Return once a check has completed after ``seen`` (default: the status of now).

        Returns at once for a store that is not checked any more: one that could not be made, or
        that nobody used for long. Cancellation: no effect.
        """
        status = seen or self._health
        while not self._final and self._health is status:
            await self._changed.wait()
        return self._health

    def set_health(self, error: str | None, *, final: bool = False) -> None:
        """Record a check. ``final``: there will be no other."""
        self._health = HealthStatus(error, self._health.checks + 1)
        self._final = final
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class BlobStores:
    """The stores of a process. Loop-bound; the stores themselves run in ``pool``.

    ``constructors`` maps URL schemes to what makes their stores; see ``default_constructors``.
    """

    def __init__(
        self,
        settings: BlobSettings,
        clock: Clock,
        pool: Pool,
        *,
        rng: random.Random | None = None,
        constructors: Mapping[str, StoreConstructor] | None = None,
    ) -> None:
        self.pool = pool
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._constructors = (
            default_constructors(settings) if constructors is None else dict(constructors)
        )
        self._stores: dict[str, ActiveStore] = {}
        self._unchecked: list[ActiveStore] = []
        self._news = asyncio.Event()
        self._closing = threading.Event()

    def get(self, url: str) -> ActiveStore:
        """The store of ``url``, made on first use. Never raises: see ``ActiveStore.store``.

        A store that could not be made is tried again by the next call.
        """
        active = self._stores.get(url)
        if active is not None:
            active._marked = True
            return active
        try:
            store = self._make(url)
        except GazetteError as error:
            return ActiveStore(url, error)
        active = self._stores[url] = ActiveStore(url, store)
        self._unchecked.append(active)
        self._news.set()
        metrics.ACTIVE.set(len(self._stores))
        return active

    def sweep(self) -> int:
        """Forget stores that nobody asked for since the last sweep; gives their number."""
        unused = [active for active in self._stores.values() if not active._marked]
        for active in unused:
            del self._stores[active.url]
            active.set_health("health checks have stopped", final=True)
        for active in self._stores.values():
            active._marked = False
        metrics.ACTIVE.set(len(self._stores))
        return len(unused)

    async def run_health(self) -> None:
        """Check every store from its first use on, and sweep hourly. A daemon: never returns."""
        async with TaskScope("blob-stores") as scope:
            scope.daemon(self._sweep_hourly(), name="sweep")
            while True:
                for active in self._unchecked:
                    scope.spawn(self._check_until_swept(active), name=active.url)
                self._unchecked.clear()
                await self._news.wait()
                self._news.clear()

    def close(self) -> None:
        """Let calls that wait to be repeated go on at once. The pool belongs to its maker."""
        self._closing.set()

    def _make(self, url: str) -> BlobStore:
        parsed = FragmentStoreUrl.parse(url)
        constructor = self._constructors.get(extras.kind_of(parsed.scheme))
        if constructor is None:
            raise extras.not_installed(parsed.scheme)
        counted = InstrumentedStore(constructor(parsed), url, self._clock.monotonic)
        return RetryingStore(counted, self._rng, self._closing.wait)

    async def _sweep_hourly(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_INTERVAL_S)
            self.sweep()

    async def _check_until_swept(self, active: ActiveStore) -> None:
        failures = 0
        while self._stores.get(active.url) is active:
            error = await self._check(active)
            if self._stores.get(active.url) is not active:
                return
            metrics.HEALTH_CHECKS.labels(active.url, "error" if error else "ok").inc()
            failures = failures + 1 if error else 0
            if failures and (failures == 1 or str(error) != active.health.error):
                log.warning(
                    "blob store %(store)s is unhealthy: %(error)s",
                    {"store": active.url, "error": error},
                )
            active.set_health(str(error) if error else None)
            await self._clock.sleep(health.next_check_s(failures, self._rng))

    async def _check(self, active: ActiveStore) -> BaseException | None:
        """The error of one check. One that hangs is reported, and waited for before the next."""
        if active._checking is None:
            active._checking = self.pool.submit(health.check, active.store)
        if not await ended(active._checking, health.CHECK_TIMEOUT_S):
            return Unavailable("health check did not end in time", timeout_s=health.CHECK_TIMEOUT_S)
        checked, active._checking = active._checking, None
        return checked.exception()


def default_constructors(settings: BlobSettings) -> dict[str, StoreConstructor]:
    """What makes stores, by scheme (``fsspec`` for all that begin with ``fsspec+``).

    Those that need an extra are there without it too, and say so when one is made.
    """

    def file(url: FragmentStoreUrl) -> FileStore:
        if settings.file_root is None:
            raise Invalid(
                "file:// stores need a root directory (--broker.file-root)", path="file-root"
            )
        return FileStore(settings.file_root, url)

    def file_instead(url: FragmentStoreUrl) -> BlobStore:
        # Buckets stay apart: they may hold different histories of the same journal.
        store = file(FragmentStoreUrl("file", "", f"/{url.scheme}/{url.host}{url.path}"))
        try:
            store.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise NotAllowed(f"cannot make {store.directory}: {error.strerror}") from error
        return store

    constructors: dict[str, StoreConstructor] = {
        "file": file,
        "s3": S3Store,
        "gs": GsStore,
        "azure": AzureStore,
        "azure-ad": AzureStore,
        "fsspec": NamedStore,
    }
    if settings.file_only:
        constructors |= dict.fromkeys(extras.EXTRAS, file_instead)
    return constructors
