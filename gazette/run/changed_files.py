"""Waits until files change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gazette.runtime.clock import Clock

_POLL_S: Final = 0.25


class ChangedFiles:
    """The files of an application, with their states at the last change."""

    def __init__(self, files: Iterable[str]) -> None:
        self._files = tuple(files)
        self._states = states_of(self._files)

    async def wait(self, clock: Clock) -> list[str]:
        """Wait until files have changed, and change no more. Return their names. Look four times a second."""
        before, changed = self._states, list[str]()
        while True:
            await clock.sleep(_POLL_S)
            now = await asyncio.to_thread(states_of, self._files)
            if now == before:
                if changed:
                    self._states = now
                    return changed
                continue
            # An editor may write a file in steps: look again until nothing changes any more.
            changed = [name for name in self._files if now[name] != self._states[name]]
            before = now


def states_of(files: Iterable[str]) -> dict[str, tuple[int, int, int] | None]:
    """Return time of change, size and inode of each file; None for a file that is not there."""
    states: dict[str, tuple[int, int, int] | None] = {}
    for name in files:
        try:
            stat = Path(name).stat()
        except OSError:
            states[name] = None
        else:
            states[name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return states
