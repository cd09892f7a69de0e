"""Names of files that are being written into a store, or that killed writers have left."""

from __future__ import annotations

from typing import Final

from gazette.runtime.clock import SystemClock

PARTIAL_PREFIX: Final = ".partial-"
"""Prefix of the name of a file that is being written, for stores that show files half written."""
_LEFT_OVER_S: Final = 3600.0


def is_left_over(mod_time: float) -> bool:
    """Return True if a file with ``PARTIAL_PREFIX`` was left by a writer that was killed.

    A writer that was paused for longer than `_LEFT_OVER_S` finds its file gone: its ``put`` fails, and is
    repeated.
    """
    return 0 < mod_time < SystemClock().now() - _LEFT_OVER_S
