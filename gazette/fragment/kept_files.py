"""Stage 9 of the byte path: limits the local files of stored fragments that stay open for readers.

A stored fragment is still read from its local file until the next listing of its journal: that is cheaper
than to read from the store. There may be many journals, with refresh intervals of minutes. Without a limit,
each fragment that is completed in an interval would keep a file. So the oldest files are released.
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
        """Keep one more file. ``release`` closes the file, and is called once there are too many."""
        self._releases.append(release)
        while len(self._releases) > self._limit:
            self._releases.popleft()()
