"""The warning about UUIDs in a journal that other software made."""

from __future__ import annotations

import functools
import logging
from typing import Final

from gazette.protocol.ids import JournalName

log = logging.getLogger(__name__)

_JOURNALS_MAX: Final = 1 << 14


@functools.lru_cache(maxsize=_JOURNALS_MAX)
def warn_of_foreign_uuids(journal: JournalName) -> None:
    """Log a warning, once for each journal in this process (more often if there are very many journals)."""
    log.warning(
        "%(journal)s: in messages, the place of the UUID holds values of other software. They count like "
        "messages without a UUID: outside of transactions, never deduplicated, without a time. If the field "
        "is your own, name another place for UUIDs (docs/publishing.md).",
        {"journal": journal},
    )
