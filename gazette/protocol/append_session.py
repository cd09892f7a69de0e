"""Append sessions: what tells a broker that an append is a late copy of an earlier one.

An append service retries an append whose outcome it does not know, often at another broker. The first
attempt may still be on its way: in a kernel that repeats its packets behind a partition, or in a process
that is paused. If it arrived after what was appended next, readers would take an old acknowledgement
of a transaction for a roll-back of its producer, and lose or repeat messages.

So each append of a service carries metadata, which brokers that do not know it ignore:

- the *session*: random, of one service and one journal;
- its *sequence*: one more for each append, the same for all attempts of an append;
- the *ledger* of the journal's primary that the session has been told of; empty at first.

See ``broker/append_sessions`` for what the primary makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from gazette.errors import Invalid

SESSION_KEY: Final = "gazette-append-session"
"""Metadata of an Append call: session, sequence and ledger, with spaces between."""
LEDGER_KEY: Final = "gazette-append-ledger"
"""Trailing metadata of an Append that was refused as its session is not known there."""

_SESSION: Final = re.compile(r"([0-9a-f]{32}) ([0-9]{1,18}) ([0-9]{1,18}\.[0-9]{1,18})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SessionAppend:
    """One append of a session."""

    session: str
    sequence: int
    ledger: str = ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return it as metadata of an Append call."""
        return ((SESSION_KEY, f"{self.session} {self.sequence} {self.ledger}"),)

    @classmethod
    def of(cls, metadata: Iterable[Any] | None) -> SessionAppend | None:
        """Return what the metadata of a call says; None if it says nothing of a session.

        Raises ``Invalid`` if that is not of the form which ``metadata`` gives.
        """
        for key, value in metadata or ():
            if key == SESSION_KEY:
                match = _SESSION.fullmatch(value) if isinstance(value, str) else None
                if match is None:
                    raise Invalid(
                        f"{SESSION_KEY}: not a session, a sequence and a ledger: {value!r:.100}",
                        hint="Leave this metadata to the client library.",
                    )
                return cls(match[1], int(match[2]), match[3] or "")
        return None


def ledger_of(metadata: Iterable[Any] | None) -> str:
    """Return the ledger that the trailing metadata of a refused append names; empty if none."""
    for key, value in metadata or ():
        if key == LEDGER_KEY and isinstance(value, str):
            return value
    return ""
