"""What a journal's primary remembers of append sessions, to refuse late copies of their appends.

A session begins an append when the one before has succeeded. So, while the ledger is complete:

- a lower sequence than the session's last is of a late copy: refused;
- the last sequence, and it has committed: the same append again, which gets the same answer;
- the last sequence, not committed as far as is known, or a greater one: it goes on.

A session that the ledger does not know may have been here before, at another primary or before it was
forgotten. Its append goes on if it names this ledger: it was begun after the ledger was, and nothing has
been forgotten since. Otherwise it is refused with the name of the ledger. A live client repeats it with
that name at once; a late copy never names a ledger that is younger than itself.

A ledger is of one *tenure*, the revision at which its broker became primary of the journal. It has two
*generations*: when the newer is full, the older is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.errors import Conflict
from gazette.protocol.append_session import SessionAppend
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Revision

GENERATION_SESSIONS: Final = 1024
"""Sessions of a generation. A ledger of two takes up to 1 MB of memory."""


@dataclass(slots=True)
class _Last:
    """The last append of a session. ``commit`` is None unless it is known to have committed."""

    sequence: int
    commit: Fragment | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether an append goes on. It does not if there is a ``refusal``, or a ``commit``: then the same
    append has been committed as that."""

    refusal: Conflict | None = None
    commit: Fragment | None = None


ADMITTED: Final = Admission()


class SessionLedger:
    """The sessions of one journal. Asked while the journal's pipeline is held: one append at a time."""

    __slots__ = ("_generation", "_newer", "_older", "_tenure")

    def __init__(self) -> None:
        self._tenure: Revision = 0
        self._generation = 1
        self._newer: dict[str, _Last] = {}
        self._older: dict[str, _Last] = {}

    @property
    def name(self) -> str:
        return f"{self._tenure}.{self._generation}"

    def admit(self, append: SessionAppend, tenure: Revision) -> Admission:
        """Judge an append by the primary of ``tenure``, and remember it if it goes on."""
        if tenure > self._tenure:
            self._tenure, self._generation = tenure, 1
            self._newer, self._older = {}, {}
        last = self._newer.get(append.session) or self._older.get(append.session)
        if tenure < self._tenure or (last is None and not self._is_complete_since(append.ledger)):
            return Admission(
                Conflict(
                    "the append's session is not known to this primary of the journal",
                    hint="The client repeats it, with the ledger that it is told.",
                    ledger=self.name,
                )
            )
        if last is not None and append.sequence < last.sequence:
            return Admission(
                Conflict(
                    "a late copy of an append: a later one of its session came before it",
                    sequence=append.sequence,
                    last_sequence=last.sequence,
                )
            )
        if last is not None and append.sequence == last.sequence:
            return ADMITTED if last.commit is None else Admission(commit=last.commit)
        self._remember(append.session, _Last(append.sequence))
        return ADMITTED

    def committed(self, append: SessionAppend, tenure: Revision, commit: Fragment) -> None:
        """Note that an append which was admitted has committed."""
        last = self._newer.get(append.session) or self._older.get(append.session)
        if tenure == self._tenure and last is not None and last.sequence == append.sequence:
            last.commit = commit

    def _remember(self, session: str, last: _Last) -> None:
        self._older.pop(session, None)
        self._newer[session] = last
        if len(self._newer) >= GENERATION_SESSIONS:
            self._older, self._newer = self._newer, {}
            self._generation += 1

    def _is_complete_since(self, ledger: str) -> bool:
        """Whether no session has been forgotten since ``ledger`` was this ledger's name."""
        return ledger in (self.name, f"{self._tenure}.{self._generation - 1}")
