"""Keeps the garbage collector away from objects that live long."""

from __future__ import annotations

import gc
from typing import Final

_FREEZE_AFTER: Final = 250
"""Objects between two freezes. Each object has some hundred parts: to visit them all takes the collector some
50 ms."""


class LongLived:
    """Counts long-lived objects, such as the replicas of a broker, and freezes them from time to time.

    A full collection visits every object that is not frozen, and the event loop waits meanwhile: for seconds,
    with 10,000 journals. A frozen object is still freed when its last reference goes, but a
    frozen cycle never is. So such an object must not refer to itself once it has ended.
    """

    def __init__(self) -> None:
        self._added = 0

    def add(self) -> None:
        """Count one more object."""
        self._added += 1
        if self._added >= _FREEZE_AFTER:
            self._added = 0
            gc.freeze()
