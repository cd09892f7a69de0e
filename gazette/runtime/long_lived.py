"""Keeps the garbage collector away from objects that live long."""

from __future__ import annotations

import gc
from typing import Final

_FREEZE_AFTER: Final = 250
"""Things of some hundred objects each. To visit those of so many takes some 50 ms."""


class LongLived:
    """Counts things that live long, such as the replicas of a broker, and freezes them from time to time.

    A full collection visits every object that is not frozen, and the event loop stands still meanwhile: for
    seconds, with 10,000 journals. Objects that are frozen are still freed when their last reference goes.
    So such a thing must not refer to itself once it has ended.
    """

    def __init__(self) -> None:
        self._added = 0

    def add(self) -> None:
        """Count one more thing."""
        self._added += 1
        if self._added >= _FREEZE_AFTER:
            self._added = 0
            gc.freeze()
