"""A timer, its time domain, and the table of a store's timers. Pure."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias

from gazette.errors import Invalid, InvalidValue
from gazette.message.keys import plain_text
from gazette.message.message_time import FIRST_US, LAST_US

KEY_BYTES_MAX: Final = 1 << 10
PAYLOAD_BYTES_MAX: Final = 64 << 10
DURATION_MAX: Final = timedelta(days=1_000_000)
"""Longest duration. Any time plus or minus this duration fits into 64 bits, in microseconds."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class TimeDomain(enum.Enum):
    """Clock by which a timer becomes due."""

    PROCESSING = 0
    """Clock of the member that runs the shard."""
    EVENT = 1
    """Watermark of the shard: it follows the times of messages."""


class Timer(NamedTuple):
    """A timer that is due: the argument of ``on_timer``."""

    key: str
    at: datetime
    """Time for which the timer was scheduled, in UTC and whole microseconds."""
    payload: bytes
    domain: TimeDomain


class TimerRow(NamedTuple):
    """A timer in a store. ``at_us`` is in Unix microseconds."""

    at_us: int
    key: str
    payload: bytes

    @property
    def position(self) -> Position:
        return self.at_us, self.key


Position: TypeAlias = tuple[int, str]
"""Place of a timer in the order of firing: time in Unix microseconds, then key."""

BEFORE_ALL: Final[Position] = (-(1 << 63), "")


@dataclass(frozen=True, slots=True)
class EventTime:
    """Rules by which an application derives its watermark from the times of messages.

    The time of a message is the time that its source declares by ``time=``. Without a declaration, the time
    is the clock of the message's UUID: the wall time of its publisher. Take the greatest time of each
    source. The watermark is the least of these times, minus ``lateness``. A message before it is late.

    A source holds the watermark back until it has had no message for ``idle_after``, and so is idle. Once
    all sources are idle, the greatest of their times counts. If ``idle_after`` is None, no source is ever
    idle."""

    lateness: timedelta = timedelta(0)
    idle_after: timedelta | None = None

    def __post_init__(self) -> None:
        duration_us("lateness", self.lateness)
        if self.idle_after is not None:
            duration_us("idle_after", self.idle_after, timedelta(milliseconds=1))


def duration_us(name: str, value: object, least: timedelta = timedelta(0)) -> int:
    """Return a duration in microseconds. Raise ``Invalid``, with the path ``name``, unless it is a duration
    from ``least`` to `DURATION_MAX`."""
    if not isinstance(value, timedelta):
        raise Invalid(
            f"{name} is of type {type(value).__name__}",
            path=name,
            hint="Use a datetime.timedelta, such as timedelta(seconds=10).",
        )
    if not least <= value <= DURATION_MAX:
        raise Invalid(f"invalid {name} ({value}; expected {least} to {DURATION_MAX})", path=name)
    return value // _MICROSECOND


class TimerTable(ABC):
    """Timers of one shard, in its store's running transaction. Used on the shard's thread.

    A change commits with the transaction, and a savepoint can undo it. At most one timer has a given
    domain and key. Timers are ordered by `Position`, in which keys are ordered by code points.
    """

    @abstractmethod
    def put(self, domain: TimeDomain, row: TimerRow) -> None:
        """Write a timer. Replace the timer of the same domain and key."""

    @abstractmethod
    def remove(self, domain: TimeDomain, key: str) -> None:
        """Remove a timer, if it exists."""

    @abstractmethod
    def take(
        self, domain: TimeDomain, after: Position, until_us: int, limit: int
    ) -> Sequence[TimerRow]:
        """Remove and return timers after ``after`` up to ``until_us``, in order, at most ``limit``."""

    @abstractmethod
    def first(self, domain: TimeDomain, after: Position) -> int | None:
        """Return the time of the first timer after ``after``, in Unix microseconds. None: no timer."""

    @abstractmethod
    def event_time(self) -> bytes | None:
        """Return the last value of `set_event_time`; None before its first call."""

    @abstractmethod
    def set_event_time(self, value: bytes) -> None:
        """Keep the state of the watermark."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all timers and the state of the watermark."""


def unix_us(at: object) -> int:
    """Return a time with a zone as Unix microseconds.

    Raise ``InvalidValue`` for any other value, and for a time outside of the years 1 to 9999 in UTC.
    """
    if not isinstance(at, datetime):
        raise InvalidValue(
            f"the time is of type {type(at).__name__}",
            path="at",
            hint="Use a datetime with a zone, such as shard.now + timedelta(minutes=30).",
        )
    if at.utcoffset() is None:
        raise InvalidValue(
            f"the time has no zone ({at})",
            path="at",
            hint="Use datetime.now(UTC), shard.now or envelope.time, and not datetime.utcnow().",
        )
    at_us = (at - _EPOCH) // _MICROSECOND
    if not FIRST_US <= at_us <= LAST_US:
        raise InvalidValue(
            f"the time is outside of the years 1 to 9999 in UTC ({at})",
            path="at",
            hint="Give a time of these years: its zone moves it out of them.",
        )
    return at_us


def time_at(at_us: int) -> datetime:
    """Return Unix microseconds as a time in UTC.

    For a watermark outside of the years 1 to 9999, return the nearest time within these years.
    """
    return _EPOCH + timedelta(microseconds=min(max(at_us, FIRST_US), LAST_US))


def check_key(key: object) -> str:
    """Return the key of a timer as a plain text. Raise ``InvalidValue`` unless it has 1 to 1,024 bytes."""
    if not isinstance(key, str):
        raise InvalidValue(
            f"the key of a timer is of type {type(key).__name__}",
            path="key",
            hint="Use a str, such as gazette.message.keys.canonical_key((user, day)).",
        )
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"the key of a timer is no Unicode text: {error.reason}",
            path="key",
            hint="Leave halves of surrogate pairs out, or write the text as bytes in the payload.",
        ) from error
    if not 0 < length <= KEY_BYTES_MAX:
        raise InvalidValue(
            f"the key of a timer has {length} bytes (expected 1 to {KEY_BYTES_MAX})",
            path="key",
            hint="Keep long values in the payload or in the store.",
        )
    return plain_text(key)


def check_payload(payload: object) -> bytes:
    """Return the payload of a timer. Raise ``InvalidValue`` unless it is bytes of at most 64 KiB."""
    if not isinstance(payload, bytes):
        raise InvalidValue(
            f"the payload of a timer is of type {type(payload).__name__}",
            path="payload",
            hint="Use bytes: encode a text, or a value as JSON.",
        )
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidValue(
            f"the payload of a timer has {len(payload)} bytes (at most {PAYLOAD_BYTES_MAX})",
            path="payload",
            hint="Keep it in the store, below the timer's key.",
        )
    return bytes(payload)


def check_domain(domain: Any) -> TimeDomain:
    """Return the domain of a timer. Raise ``Invalid`` for a value that is no `TimeDomain`."""
    if not isinstance(domain, TimeDomain):
        raise Invalid(
            f"the domain of a timer is of type {type(domain).__name__}",
            path="domain",
            hint="Use TimeDomain.PROCESSING or TimeDomain.EVENT.",
        )
    return domain
