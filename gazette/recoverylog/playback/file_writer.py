"""Writer of a play-back's files: it writes while the player reads more of the log."""

from __future__ import annotations

import asyncio
from typing import Final

from gazette.recoverylog.playback.playback import FileAction
from gazette.recoverylog.playback.staged_files import StagedFiles
from gazette.runtime.tasks import Pool, TaskScope

AHEAD_BYTES: Final = 4 << 20
"""Bytes of the log that may be read ahead of the writer."""


class FileWriter:
    """Performs the file actions of play-back, in order, in ``pool``. Loop-bound.

    A task that writes belongs to the ``scope`` of the call. An error of the task ends the scope. The next
    method that waits for the task raises the error, too.
    """

    def __init__(self, files: StagedFiles, pool: Pool) -> None:
        self._files = files
        self._pool = pool
        self._gathered: list[FileAction] = []
        """Actions that have not begun. Their operations take ``_bytes`` bytes of the log."""
        self._bytes = 0
        self._writing: asyncio.Task[None] | None = None
        """The task that performs actions. None, or done: no action is running."""

    async def add(self, scope: TaskScope, actions: list[FileAction], length: int) -> None:
        """Add actions of ``length`` bytes of the log. Begin them at once if no action is running.

        If `AHEAD_BYTES` are gathered, wait for the running actions, and begin the gathered ones.
        """
        self._gathered += actions
        self._bytes += length
        busy = self._writing is not None and not self._writing.done()
        if not busy or self._bytes >= AHEAD_BYTES:
            await self.begin(scope)

    async def begin(self, scope: TaskScope) -> None:
        """Begin to perform the gathered actions, once the running ones are done."""
        if not self._gathered:
            return
        if self._writing is not None:
            await self._writing
        actions, self._gathered, self._bytes = self._gathered, [], 0
        writing = self._pool.run(self._files.perform, actions)
        self._writing = scope.spawn(writing, name="write")

    async def settle(self, scope: TaskScope) -> None:
        """Wait until all added actions are done."""
        await self.begin(scope)
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def give_up(self) -> None:
        """Drop the gathered actions, and wait for the running ones."""
        self._gathered, self._bytes = [], 0
        if self._writing is not None:
            await self._writing
            self._writing = None
