"""Warnings about lost bytes of journals that a reader skips."""

from __future__ import annotations

import logging
from typing import Final

from gazette.history.snapshot import LostBytes, Snapshot
from gazette.protocol.ids import JournalName, Offset

LOGGER: Final = logging.getLogger(__name__)


def warn_of_loss(snapshot: Snapshot, warned: set[tuple[JournalName, Offset]] | None = None) -> None:
    """Log a warning for each range of lost bytes whose end is not in ``warned``. Add it to ``warned``."""
    already_warned = set() if warned is None else warned
    for journal in snapshot.journals:
        for lost in journal.missed:
            if (journal.journal, lost.end) not in already_warned:
                already_warned.add((journal.journal, lost.end))
                _warn(journal.journal, lost)


def _warn(journal: JournalName, lost: LostBytes) -> None:
    reason = "lost bytes are skipped"
    if lost.is_confirmed:
        reason = "an operator has confirmed the loss by `gazctl journals reset-head`"
    LOGGER.warning(
        "journal %(journal)s has lost its bytes from %(begin)s to %(end)s: reading continues behind them "
        "(%(reason)s)",
        {"journal": journal, "begin": lost.begin, "end": lost.end, "reason": reason},
    )
