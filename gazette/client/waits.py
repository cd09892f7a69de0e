"""Why calls of a client wait: the brokers' answers to their earlier attempts."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from gazette.client.rpc.errors import status_of
from gazette.errors import GazetteError, NotFound
from gazette.protocol.ids import split_journal_meta
from gazette.runtime.clock import Clock

LAG_S: Final = 2.0
"""Seconds for which a broker may not know a new journal yet: its view of etcd lags behind."""


class Waits:
    """The calls that a client repeats, each with its journal and the last answer. Loop-bound.

    Without ``end``, a call is forgotten when its object is collected.
    """

    def __init__(self) -> None:
        self._reasons: WeakKeyDictionary[object, tuple[str, str]] = WeakKeyDictionary()

    def note(self, call: object, journal: str, error: Exception) -> None:
        """Note that ``call`` about ``journal`` failed and is repeated."""
        self._reasons.pop(call, None)  # The newest answer comes last.
        self._reasons[call] = (split_journal_meta(journal)[0], reason_of(error))

    def end(self, call: object) -> None:
        """Forget ``call``: it has an answer, or was given up."""
        self._reasons.pop(call, None)

    def reason(self, journal: str) -> str:
        """Return the last answer to a repeated call about ``journal``; empty if no such call waits."""
        reasons = [reason for name, reason in self._reasons.values() if name == journal]
        return reasons[-1] if reasons else ""


class Grace:
    """The time for which a call is repeated although brokers answer that the journal does not exist."""

    __slots__ = ("_answers", "_clock", "_since", "_spent_s")

    def __init__(
        self, clock: Clock, answers: type[GazetteError] | tuple[type[GazetteError], ...] = NotFound
    ) -> None:
        """Begin before the first answer. ``answers`` are the errors of brokers that lag behind etcd."""
        self._clock = clock
        self._answers = answers
        self._since: float | None = None
        self._spent_s = 0.0
        """Seconds that had passed, since the first answer in a row, at the last `pause`."""

    def covers(self, error: Exception) -> bool:
        """Return True if ``error`` is one of ``answers``, and the first of them in a row came less than
        `LAG_S` seconds ago. Call this with each error of the call."""
        if not isinstance(error, self._answers):
            self.end()
            return False
        now = self._clock.monotonic()
        if self._since is None:
            self._since = now - self._spent_s
        return now - self._since < LAG_S

    def end(self) -> None:
        """Forget the answers so far."""
        self._since, self._spent_s = None, 0.0

    def pause(self) -> None:
        """Stop the time until the next answer: the call was cancelled, and may be made again."""
        if self._since is not None:
            self._spent_s = self._clock.monotonic() - self._since
            self._since = None


class RepeatedCall:
    """The key in `Waits` of a call that has no object."""


def reason_of(error: Exception) -> str:
    """Return the reason of a wait as a text: status of the broker, message of ``error``, and its hint."""
    if not isinstance(error, GazetteError):
        return str(error)
    status = status_of(error)
    text = f"{status}: {error.message}" if status else error.message
    return text if error.hint == error.default_hint else f"{text}. {error.hint}"
