"""Reserved journal names: over HTTP, brokers serve routes under these names."""

from __future__ import annotations

from typing import Final

_NAMES: Final = frozenset({"metrics"})
_PREFIXES: Final = ("debug/", "v1/")


def is_reserved(journal: str) -> bool:
    """Return True if ``GET /journal`` is a route of brokers, or may become one."""
    return journal in _NAMES or journal.startswith(_PREFIXES)
