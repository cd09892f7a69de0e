"""Append sessions: metadata by which a broker recognizes a late copy of an earlier append.

An append service retries an append with an unknown outcome, often at another broker. The first attempt may
still be on its way: in a kernel that repeats its packets after a partition, or in a paused process. If that
attempt arrived after later appends, readers would take an old acknowledgement of a transaction for a
roll-back by its producer. They would lose or repeat messages.

So each append of a service carries this metadata, which older brokers and the original ignore:

- the *session*: a random name of the appends of one service to one journal;
- the *sequence*: one more for each append of the session, the same for all attempts of an append;
- the *ledger* of the journal's primary, as the session has learned its name; empty at first.

`gazette.broker.append.sessions` is the primary's part. A primary that names its ledger also gives the
revision at which the journal was created. If the journal was deleted and created again, the session ends:
its earlier appends are gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from gazette.errors import Invalid
from gazette.protocol.ids import Revision

SESSION_KEY: Final = "gazette-append-session"
"""Metadata key of an Append call. Its value: session, sequence and ledger, separated by spaces."""
LEDGER_KEY: Final = "gazette-append-ledger"
"""Key of the trailing metadata of an Append that was refused because its session is unknown."""
CREATED_KEY: Final = "gazette-journal-created"
"""Key beside `LEDGER_KEY`: the journal's CreateRevision, by which a session notices another life."""
_DIGITS_MAX: Final = 18

_SESSION: Final = re.compile(r"([0-9a-f]{32}) ([0-9]{1,18}) ([0-9]{1,18}\.[0-9]{1,18})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SessionAppend:
    """One append of a session."""

    session: str
    sequence: int
    ledger: str = ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the append as metadata of an Append call."""
        return ((SESSION_KEY, f"{self.session} {self.sequence} {self.ledger}"),)

    @classmethod
    def of(cls, metadata: Iterable[Any] | None) -> SessionAppend | None:
        """Return the session append in the metadata of a call, or None for a call without a session.

        Raise ``Invalid`` if the metadata does not have the form that ``metadata`` returns.
        """
        for key, value in metadata or ():
            if key == SESSION_KEY:
                match = _SESSION.fullmatch(value) if isinstance(value, str) else None
                if match is None:
                    raise Invalid(
                        f"{SESSION_KEY}: expected a session, a sequence and a ledger: {value!r:.100}",
                        hint="Do not set this metadata: the client library sets it.",
                    )
                return cls(match[1], int(match[2]), match[3] or "")
        return None


def introduction(ledger: str, created: Revision) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata by which a refused session learns of a ledger and the journal's life.

    Return no metadata for an empty ``ledger``.
    """
    if not ledger:
        return ()
    return (LEDGER_KEY, ledger), (CREATED_KEY, str(created))


def created_of(metadata: Iterable[Any] | None) -> Revision:
    """Return the CreateRevision in the trailing metadata of a refused append, or 0 if it is missing."""
    for key, value in metadata or ():
        is_number = isinstance(value, str) and value.isascii() and value.isdigit()
        if key == CREATED_KEY and is_number and len(value) <= _DIGITS_MAX:
            return int(value)
    return 0


def ledger_of(metadata: Iterable[Any] | None) -> str:
    """Return the ledger in the trailing metadata of a refused append, or "" if it is missing."""
    for key, value in metadata or ():
        if key == LEDGER_KEY and isinstance(value, str):
            return value
    return ""
