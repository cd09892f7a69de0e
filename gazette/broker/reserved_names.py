"""Names that journals cannot be given: over HTTP, routes of brokers are served there."""

from __future__ import annotations

from typing import Final

_NAMES: Final = frozenset({"metrics"})
_PREFIXES: Final = ("debug/", "v1/")


def is_reserved(journal: str) -> bool:
    """Return True if ``GET /journal`` is a route of brokers, or may become one."""
    return journal in _NAMES or journal.startswith(_PREFIXES)
