"""Queries on a hot standby: editions of the shard's state, and their age.

A query names the largest age that its answer may have. An edition is the state at the end of the recovery
log at one moment; the log's primary broker says where the end is. A query that needs a newer edition has it
made, for all waiting queries. If an edition is older than half of the allowed age, the query has the next
edition made ahead of time. A standby without queries makes no editions.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from gazette.consumer.application import StateView
from gazette.errors import Closed, GazetteError, Moved, NotAllowed
from gazette.recoverylog.playback.staged_files import PlayedFiles
from gazette.recoverylog.private_files import make_private
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import Pool, TaskScope
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)


class Player(Protocol):
    """The part of ``recoverylog.player.Player`` that queries need."""

    def view(self, call: Callable[[PlayedFiles], Any]) -> Awaitable[Any]: ...


class ReadSnapshot:
    """An edition: the state at one moment. Loop-bound. Released once it is replaced and no query uses it, or
    at the end of the standby."""

    def __init__(self, reader: Any, as_of: float) -> None:
        self.reader = reader
        self.as_of = as_of
        """Time of the monotonic clock, in seconds. The edition has all commits before this time."""
        self.uses = 0
        """Number of queries that use the edition."""
        self.replaced = False
        """True once a newer edition was made."""


class StandbyReads:
    """The editions of one standby. Loop-bound."""

    def __init__(
        self,
        new_view: Callable[[Path], StateView | None],
        directory: Path,
        player: Player,
        clock: Clock,
        pool: Pool,
    ) -> None:
        self._new_view = new_view
        self._directory = directory
        self._player = player
        self._clock = clock
        self._pool = pool
        self._scope = TaskScope("standby reads")
        self._view: StateView | None = None
        """The application's view, made at the first query."""
        self._current: ReadSnapshot | None = None
        self._older: ReadSnapshot | None = None
        """The former edition, while a query uses it. Until it is released, no third edition is made."""
        self._refreshing: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._closed = False

    @property
    def staleness_s(self) -> float | None:
        """Age of the present edition in seconds; None if there is no edition."""
        return None if self._current is None else self.age_s(self._current)

    async def begin(self, max_staleness_s: float) -> ReadSnapshot:
        """Return an edition whose age is at most ``max_staleness_s``. The caller returns it by ``end``.

        Raise ``NotAllowed`` if the application has no view. Raise the error of a failed attempt to make
        an edition. Raise ``Moved`` if the standby has ended, or needs longer than ``max_staleness_s`` to
        make an edition. The caller bounds the wait.
        """
        asked_at = self._clock.monotonic()
        while True:
            if self._closed:
                raise Moved("the standby has ended")
            edition = self._current
            if edition is not None and self.age_s(edition) <= max_staleness_s:
                if 2 * self.age_s(edition) > max_staleness_s:
                    self._refresh()
                edition.uses += 1
                return edition
            if edition is not None and edition.as_of >= asked_at:
                # The edition made for this query is already too old, and the next would be too old as well.
                raise Moved(
                    "the standby cannot make an edition as fresh as the query needs",
                    staleness_s=self.age_s(edition),
                )
            refresh = self._refresh()
            # A cancellation of this call does not end the task, for which other queries may wait.
            await asyncio.wait({refresh})
            if refresh.cancelled():
                raise Moved("the standby has ended")
            refresh.result()

    def age_s(self, edition: ReadSnapshot) -> float:
        """Return the age of an edition in seconds. The edition has all commits older than this age."""
        return self._clock.monotonic() - edition.as_of

    def end(self, edition: ReadSnapshot) -> None:
        """Give back an edition that `begin` returned."""
        edition.uses -= 1
        if edition.uses == 0:
            self._released.set()
            if edition.replaced and not self._closed:
                self._drop(edition)

    def _refresh(self) -> asyncio.Task[None]:
        """Return the task that makes the next edition. Begin a task if none runs."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self._scope.spawn(self._make_edition(), name="edition")
            self._refreshing.add_done_callback(_retrieve_error)
        return self._refreshing

    async def _make_edition(self) -> None:
        """Make the next edition, which replaces the present one. For the errors see `begin`."""
        while self._older is not None:  # A long query still reads the former edition.
            self._released.clear()
            await self._released.wait()
        as_of = self._clock.monotonic()
        try:
            reader = await self._player.view(self._new_reader)
        except Closed as error:
            raise Moved("the standby has ended") from error
        former, self._current = self._current, ReadSnapshot(reader, as_of)
        if self._closed:
            self._release(self._current)
        if former is not None:
            former.replaced = True
            if former.uses:
                self._older = former
            else:
                self._drop(former)

    def _new_reader(self, files: PlayedFiles) -> Any:
        """Return the reader of a new edition. Called on a thread. Raise ``NotAllowed`` if the application
        makes no views."""
        if self._view is None:
            make_private(self._directory)
            self._view = self._new_view(self._directory)
        if self._view is None:
            raise NotAllowed(
                "the application answers no queries from hot standbys",
                hint="Override Application.new_view(), or ask without max_staleness.",
            )
        return self._view.refresh(files)

    def _drop(self, edition: ReadSnapshot) -> None:
        if self._older is edition:
            self._older = None
        self._released.set()
        self._release(edition)

    def _release(self, edition: ReadSnapshot) -> None:
        if self._view is not None:
            # Release the reader now, before the next refresh. This closes connections, and does not block.
            self._view.release(edition.reader)

    async def close(self, grace_s: float) -> None:
        """Refuse new queries, give running queries ``grace_s`` seconds, and release everything.

        The reads of a query that runs longer raise `Closed`. A second call returns at once.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await self._scope.stop()
            async with timeout(grace_s):
                while any(each is not None and each.uses for each in (self._current, self._older)):
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            log.warning("a standby's state is released although a query reads it")
        finally:
            try:
                await self._pool.run(self._close)
            except GazetteError as error:
                log.warning("a standby's view did not close: %(error)s", {"error": error})

    def _close(self) -> None:
        if self._view is not None:
            self._view.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve the task's error, so that Python does not warn of an error that was never retrieved."""
    if not task.cancelled():
        task.exception()
