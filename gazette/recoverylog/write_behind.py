"""Files are written while more of their log is read."""

from __future__ import annotations

import asyncio
from typing import Final

from gazette.recoverylog.playback import FileAction
from gazette.recoverylog.staged_files import StagedFiles
from gazette.tasks import Pool, TaskScope

AHEAD_BYTES: Final = 4 << 20
"""How much of the log is read on while files are written, before reading waits for that."""


class WriteBehind:
    """Performs what play-back says is to be done to files, in its order, in ``pool``. Loop-bound.

    Tasks that write belong to the scope that is passed in: an error of theirs ends it, and is raised here
    by whatever waits next.
    """

    def __init__(self, files: StagedFiles, pool: Pool) -> None:
        self._files = files
        self._pool = pool
        self._gathered: list[FileAction] = []
        """What was read of the log and is not written yet, of ``_bytes`` of it."""
        self._bytes = 0
        self._writing: asyncio.Task[None] | None = None

    async def add(self, scope: TaskScope, actions: list[FileAction], length: int) -> None:
        """Have actions performed, of ``length`` bytes of the log. Waits for those before, if that is too
        far ahead."""
        self._gathered += actions
        self._bytes += length
        busy = self._writing is not None and not self._writing.done()
        if not busy or self._bytes >= AHEAD_BYTES:
            await self.begin(scope)

    async def begin(self, scope: TaskScope) -> None:
        """Begin to write what was gathered, after what is being written."""
        if not self._gathered:
            return
        if self._writing is not None:
            await self._writing
        actions, self._gathered, self._bytes = self._gathered, [], 0
        writing = self._pool.run(self._files.perform, actions)
        self._writing = scope.spawn(writing, name="write")

    async def settle(self, scope: TaskScope) -> None:
        """Return when everything is written that was added."""
        await self.begin(scope)
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def give_up(self) -> None:
        """Write nothing more, and return when nothing is being written."""
        self._gathered, self._bytes = [], 0
        if self._writing is not None:
            await self._writing
            self._writing = None
