"""Writer of files that works while more of their log is read."""

from __future__ import annotations

import asyncio
from typing import Final

from gazette.recoverylog.playback.playback import FileAction
from gazette.recoverylog.playback.staged_files import StagedFiles
from gazette.runtime.tasks import Pool, TaskScope

AHEAD_BYTES: Final = 4 << 20
"""Bytes of the log that are read ahead of the writer, before reading waits."""


class FileWriter:
    """Performs the file actions of play-back, in order, in ``pool``. Loop-bound.

    Tasks that write belong to the scope that is passed in. An error ends the scope, and the next
    wait raises it.
    """

    def __init__(self, files: StagedFiles, pool: Pool) -> None:
        self._files = files
        self._pool = pool
        self._gathered: list[FileAction] = []
        """Actions that are not begun yet, from ``_bytes`` bytes of the log."""
        self._bytes = 0
        self._writing: asyncio.Task[None] | None = None

    async def add(self, scope: TaskScope, actions: list[FileAction], length: int) -> None:
        """Add actions of ``length`` bytes of the log. If the writer is too far behind, wait for
        earlier actions.
        """
        self._gathered += actions
        self._bytes += length
        busy = self._writing is not None and not self._writing.done()
        if not busy or self._bytes >= AHEAD_BYTES:
            await self.begin(scope)

    async def begin(self, scope: TaskScope) -> None:
        """Begin to write the gathered actions, after those being written."""
        if not self._gathered:
            return
        if self._writing is not None:
            await self._writing
        actions, self._gathered, self._bytes = self._gathered, [], 0
        writing = self._pool.run(self._files.perform, actions)
        self._writing = scope.spawn(writing, name="write")

    async def settle(self, scope: TaskScope) -> None:
        """Wait until all added actions are written."""
        await self.begin(scope)
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def give_up(self) -> None:
        """Drop the gathered actions, and wait for those being written."""
        self._gathered, self._bytes = [], 0
        if self._writing is not None:
            await self._writing
            self._writing = None
