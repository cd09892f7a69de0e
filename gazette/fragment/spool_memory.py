"""Stage 6 of the byte path: bounds the bytes of a broker's spools that are in memory and not yet in a file.

A spool file ends with its process, as memory does. So bytes in memory are as durable as bytes in the file,
and no append has to wait for the disk. Threads write later. Appends wait for the disk only once it is too
far behind, or has failed.
"""

from __future__ import annotations

import concurrent.futures
import logging
import weakref
from collections import deque
from collections.abc import Collection
from typing import Final, Protocol

from gazette.errors import Unavailable
from gazette.runtime.tasks import Pool

log = logging.getLogger(__name__)

LIMIT_BYTES: Final = 1 << 26
_WRITTEN_FROM: Final = 16
"""Threads begin to write when this fraction (one in so many) of the limit is in memory."""


class Unwritten(Protocol):
    """The bytes of one spool."""

    @property
    def unwritten(self) -> int:
        """Number of bytes that are in memory only."""
        ...

    def write(self) -> None:
        """Write them to the file. Blocks. Raise ``Unavailable`` if that is not possible."""
        ...


class SpoolMemory:
    """Counts bytes that are in memory only: at most ``limit``. Loop-bound, except where stated.

    ``pool`` runs what writes to the disk, one call at a time for all spools.
    """

    def __init__(self, pool: Pool, limit: int = LIMIT_BYTES) -> None:
        self.pool = pool
        self.limit = limit
        self.failing = False
        """True after a write that failed, until one succeeds. Threads set it."""
        self._unwritten = 0
        self._freed: deque[int] = deque()
        self._holders: weakref.WeakKeyDictionary[Unwritten, None] = weakref.WeakKeyDictionary()
        """All spools with bytes in memory, and some that had them."""
        self._writing: concurrent.futures.Future[None] | None = None

    @property
    def unwritten(self) -> int:
        """Number of bytes that are in memory only."""
        freed = self._freed
        while freed:
            self._unwritten -= freed.popleft()
        return self._unwritten

    @property
    def room(self) -> int:
        """Bytes that may be put into memory now, to be written later."""
        return 0 if self.failing else max(self.limit - self.unwritten, 0)

    def takes(self, length: int) -> bool:
        """Return True if ``length`` more bytes may be put into memory, to be written later."""
        return not self.failing and self.unwritten + length <= self.limit

    def grew(self, holder: Unwritten, length: int, *, first: bool) -> None:
        """Count ``length`` more bytes of ``holder``, or fewer if negative. ``first``: it had none before."""
        if first:
            self._holders[holder] = None
        self._unwritten += length
        if self.unwritten * _WRITTEN_FROM >= self.limit and not self._is_writing:
            holders = [one for one in self._holders if one.unwritten]
            self._holders = weakref.WeakKeyDictionary(dict.fromkeys(holders))
            self._writing = self.pool.submit(_write, holders)

    def free(self, length: int) -> None:
        """Count ``length`` fewer bytes. In any thread; also while the garbage collector runs."""
        self._freed.append(length)

    def failed(self, error: Unavailable) -> None:
        """Take nothing into memory until a write succeeds. Log the first failure. In any thread."""
        if not self.failing:
            log.warning(
                "appended bytes stay in memory, and appends are refused until one can be written: %(error)s",
                # Log the text only: a record with the error would keep a spool's bytes, by the traceback.
                {"error": str(error)},
            )
        self.failing = True

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()


def _write(holders: Collection[Unwritten]) -> None:
    """Write half of all bytes, those of the longest spools first. In a thread."""
    left = sum(one.unwritten for one in holders) // 2
    for holder in sorted(holders, key=lambda one: one.unwritten, reverse=True):
        if left <= 0:
            break
        left -= holder.unwritten
        try:
            holder.write()
        except Unavailable:
            break  # The spool has reported the failure. The next append tries again.
