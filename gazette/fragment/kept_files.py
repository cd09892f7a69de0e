"""Stage 9 of the byte path: how many local files of stored fragments stay open for readers.

A fragment that is stored is still read from its local file, until the next listing of its journal: that
is cheaper than its store. With many journals, and a refresh interval of minutes, these files would be as
many as fragments are completed in it. So the oldest ones are let go, of whichever journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class KeptFiles:
    """At most ``limit`` files of a broker. Loop-bound."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._releases: deque[Callable[[], None]] = deque()

    def keep(self, release: Callable[[], None]) -> None:
        """Keep one more file. ``release`` lets it go; it is called once there are too many."""
        self._releases.append(release)
        while len(self._releases) > self._limit:
            self._releases.popleft()()
