"""A primary's memory of append sessions, by which it refuses late copies of their appends.

A session begins an append when its last append has succeeded. So, while the ledger is complete:

- a lower sequence than the session's last is a late copy: it is refused;
- the last sequence, known as committed, is a repeated append: it gets the same answer;
- the last sequence, while another attempt of the append runs, is refused until that attempt has ended;
- the last sequence, not known as committed, is admitted, as is a greater sequence.

A session may be unknown to the ledger because it was at another primary, or was forgotten. Its append is
admitted if the append names this ledger, in its present or last generation. Such an append began after
the ledger got this name, and no session that appended since then has been forgotten. Any other append is
refused, and the refusal names the ledger. A live client repeats its append with that name at once. A late
copy never names a ledger that is younger than the copy.

A ledger belongs to one *tenure*, the revision at which its broker became primary of the journal. It has two
*generations*: when the newer is full, the older is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.errors import Conflict, GazetteError, Unavailable
from gazette.protocol.append_session import SessionAppend
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Revision

GENERATION_SESSIONS: Final = 1024
"""Sessions of a generation. The two generations of a ledger take up to 1 MB of memory."""


@dataclass(slots=True)
class _Last:
    """The last append of a session. ``attempt`` is its running attempt; None if the attempt has ended.
    ``commit`` is None unless the append is known to have committed."""

    sequence: int
    attempt: object | None
    commit: Fragment | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision about an append: it is admitted unless ``refusal`` or ``commit`` is set. ``commit`` is the
    commit of an earlier attempt of the same append."""

    refusal: GazetteError | None = None
    commit: Fragment | None = None


ADMITTED: Final = Admission()


class SessionLedger:
    """The sessions of one journal. Call ``admit`` only while you hold the journal's pipeline: one append at a
    time. Any append may call the other methods."""

    __slots__ = ("_generation", "_life", "_newer", "_older", "_tenure")

    def __init__(self, life: Revision) -> None:
        """Create the ledger of a journal that was created at revision ``life``."""
        self._life = life
        self._tenure: Revision = 0  # Tenure of the sessions; 0 before the first append.
        self._generation = 1
        self._newer: dict[str, _Last] = {}
        self._older: dict[str, _Last] = {}

    @property
    def name(self) -> str:
        return self._name_of(self._tenure, self._generation)

    def admit(self, append: SessionAppend, tenure: Revision, attempt: object) -> Admission:
        """Judge an attempt of an append by the primary of ``tenure``. Remember an attempt that is admitted.

        A tenure later than the ledger's begins the ledger again. An attempt of an earlier tenure is refused.
        Call ``ended`` when the attempt has ended. Until then, the attempt may be judged again.
        """
        if tenure > self._tenure:
            self._tenure, self._generation = tenure, 1
            self._newer, self._older = {}, {}
        last_append = self._newer.get(append.session) or self._older.get(append.session)
        if tenure < self._tenure or (
            last_append is None and not self._is_complete_since(append.ledger, tenure)
        ):
            return Admission(self._unknown(self.name))
        if last_append is not None and append.sequence < last_append.sequence:
            return Admission(
                Conflict(
                    "a late copy of an append: a later one of its session came before it",
                    sequence=append.sequence,
                    last_sequence=last_append.sequence,
                )
            )
        if last_append is not None and append.sequence == last_append.sequence:
            if last_append.commit is not None:
                return Admission(commit=last_append.commit)
            if last_append.attempt is not None and last_append.attempt is not attempt:
                refusal = Unavailable(
                    "an earlier attempt of this append waits for its acknowledgements"
                )
                return Admission(refusal)
            last_append.attempt = attempt
            return ADMITTED
        self._remember(append.session, _Last(append.sequence, attempt))
        return ADMITTED

    def refusal_of(self, append: SessionAppend, tenure: Revision) -> Conflict | None:
        """Return the error by which the primary of ``tenure`` refuses an append of an unknown session.

        Return None if ``admit`` may still admit the append. An append calls this before its turn: an unknown
        session would wait in line only to be refused and repeated. In its turn, the append also calls
        ``admit``.
        """
        is_known = append.session in self._newer or append.session in self._older
        if tenure == self._tenure and is_known:
            return None
        if tenure >= self._tenure and self._is_complete_since(append.ledger, tenure):
            return None
        return self._unknown(self.name if tenure <= self._tenure else self._name_of(tenure))

    def ended(self, append: SessionAppend, attempt: object, commit: Fragment | None) -> None:
        """Record that an admitted attempt has ended. ``commit`` is set if the append has surely committed."""
        last_append = self._newer.get(append.session) or self._older.get(append.session)
        if last_append is not None and last_append.attempt is attempt:
            last_append.attempt, last_append.commit = None, commit

    def _unknown(self, ledger: str) -> Conflict:
        return Conflict(
            "the append's session is not known to this primary of the journal",
            hint="No action: the client library repeats the append with this ledger.",
            ledger=ledger,
            created=self._life,
        )

    def _remember(self, session: str, last: _Last) -> None:
        """Keep the last append of a session. If the newer generation is then full, forget the older one."""
        self._older.pop(session, None)
        self._newer[session] = last
        if len(self._newer) >= GENERATION_SESSIONS:
            # Keep an append whose attempt runs: its caller may repeat it. The line bounds such appends.
            running = {
                name: append for name, append in self._older.items() if append.attempt is not None
            }
            self._older, self._newer = running | self._newer, {}
            self._generation += 1

    def _is_complete_since(self, ledger: str, tenure: Revision) -> bool:
        """Return True if the ledger of ``tenure`` has forgotten no session that appended since the ledger got
        the name ``ledger``."""
        if tenure > self._tenure:
            return ledger == self._name_of(tenure)  # The tenure's first append begins the ledger.
        return ledger in (self.name, self._name_of(self._tenure, self._generation - 1))

    def _name_of(self, tenure: Revision, generation: int = 1) -> str:
        """Return the name of the ledger of a tenure.

        A journal may be created again before the allocator sees its deletion. The assignment then stays, and
        both lives of the journal have the same tenure. So the name has the revision at which this life began.
        """
        return f"{max(tenure, self._life)}.{generation}"
