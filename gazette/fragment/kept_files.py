"""Stage 9 of the byte path: limits the local files of stored fragments that stay open for readers.

A stored fragment is still read from its local file until the next listing of its journal: that is cheaper
than its store. With many journals, and a refresh interval of minutes, there could be as many files as
fragments completed in that interval. So the oldest files are let go, of all journals.
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
