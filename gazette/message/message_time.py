"""The time of messages, from a field of their type: `MessageTime`. Pure.

A time is read once, when its message is decoded. If the time cannot be used, the envelope keeps the reason,
which becomes an error when the message is consumed. So a message that never commits causes no error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from gazette.errors import Corrupt, Invalid
from gazette.message.uuid import clock_unix_ns
from gazette.message.value_parts import shown
from gazette.protocol.ids import JournalName, Offset

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]

TIMESTAMP: Final = "google.protobuf.Timestamp"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
FIRST_US: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
"""Begin of the year 1 in UTC, in Unix microseconds."""
LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
"""Last microsecond of the year 9999 in UTC, in Unix microseconds."""
_UNIT_NS: Final = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
FUNCTION: Final = "--"
"""Suffix that marks the name of a function in the text of a time. No name of a field ends with it."""
_AHEAD: Final = timedelta(days=1)
_UNITS: Final = "s, ms, us or ns"
NO_UNIT: Final = f'Declare its unit ({_UNITS}): time=MessageTime("at", unit="ms").'
_NO_CLOCK: Final = (
    "Publish such messages with a Publisher or gazctl produce, or give them UUIDs by gazctl attach-uuids. Or"
    " declare where their time is: time= of the Source. To go on without this one, set the application's"
    " `poison_policy`."
)


class UnusableTime(Corrupt):
    """A message has no usable time: its declared time is missing or unusable, or it has no UUID with a clock.
    A `PoisonPolicy` may skip the message."""

    default_hint = (
        "Repair its producer, or skip the message by the application's `poison_policy`. A time that lies"
        " ahead on purpose needs a greater `ahead` of its MessageTime."
    )


@dataclass(frozen=True)
class MessageTime:
    """The time of the event that a message is about: a field of messages, or a function of them.

        Source("orders", Order, time="ordered_at")
        Source("clicks", Click, time=MessageTime("at", unit="ms"))

    The value is a ``datetime`` with a zone, or a protobuf ``Timestamp``. An ``int`` or ``float`` counts from
    1970 in UTC, and needs a ``unit``. Times have whole microseconds.
    """

    field: str | Callable[[Any], Any]
    """Name of the field, or a function from a message to its time."""
    _: KW_ONLY
    unit: TimeUnit | None = None
    """Unit of numbers: ``s``, ``ms``, ``us`` or ``ns``. None if the values are no numbers."""
    ahead: timedelta = _AHEAD
    """Longest duration by which the time of a message may be after its publication. A later time is an error
    of the message, since it would move the watermark forward, which never goes back."""

    def __post_init__(self) -> None:
        """Raise ``Invalid`` for a value of a field that is not as its docstring says."""
        field: Any = self.field
        if not callable(field) and not (isinstance(field, str) and field):
            raise Invalid(
                f"{field!r} is no field",
                path="time",
                hint="Give the name of a field, or a function of the message.",
            )
        if self.unit is not None and self.unit not in _UNIT_NS:
            raise Invalid(f"{self.unit!r} is no unit", path="time.unit", hint=f"Give {_UNITS}.")
        ahead: Any = self.ahead
        if not isinstance(ahead, timedelta) or ahead < timedelta(0):
            raise Invalid(
                f"{ahead!r} is no duration",
                path="time.ahead",
                hint="Give a timedelta that is not negative, such as timedelta(days=1).",
            )

    def __hash__(self) -> int:
        """Return a cheap hash: publishing hashes a partition with its time for each message."""
        return hash(self.field)

    @classmethod
    def of(cls, given: str | Callable[[Any], Any] | MessageTime | None) -> MessageTime | None:
        """Return the `MessageTime` of a field or function. Return a `MessageTime` or None as it is."""
        return given if given is None or isinstance(given, cls) else cls(given)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Name of the field or function."""
        if isinstance(self.field, str):
            return self.field
        return str(getattr(self.field, "__qualname__", type(self.field).__qualname__))

    @property
    def text(self) -> str:
        """Field or function, and unit, as a text. Declarations of equal meaning have equal texts."""
        text = _clean(self.name) if isinstance(self.field, str) else self.text_of_function
        return text if self.unit is None else f"{text}/{self.unit}"

    @property
    def text_of_function(self) -> str:
        """Name of the function in a label."""
        return _clean(f"{self.name}{FUNCTION}")

    @property
    def has_default_ahead(self) -> bool:
        """True if the declaration gives no ``ahead`` of its own."""
        return self.ahead == _AHEAD

    def require(self, message: Any, journal: JournalName, published_us: int) -> None:
        """Raise ``Invalid`` for a message to be published now, if readers could not use its time.

        ``published_us`` is the time of the clock in its UUID, in Unix microseconds.
        """
        time_or_reason = self.read_bounded(message, published_us)
        if isinstance(time_or_reason, str):
            raise Invalid(
                f"the time of the message ({self.name}) {time_or_reason}, and journal {journal} declares it",
                path=self._path,
                hint=self._hint,
                journal=journal,
            )

    @property
    def _path(self) -> str:
        return f"message.{self.field}" if isinstance(self.field, str) else "message"

    @property
    def _hint(self) -> str:
        return f"Set {self.name} before publishing."

    def read_bounded(self, message: Any, published_us: int) -> int | str:
        """Return the result of `read`. If the time is after ``published_us`` by more than ``ahead``, return
        that as a reason."""
        at_us = self.read(message)
        if isinstance(at_us, int) and at_us > published_us + self._ahead_us:
            excess = timedelta(microseconds=at_us - published_us)
            return f"lies ahead of the message's publication by {excess}, and may by {self.ahead}"
        return at_us

    @cached_property
    def _ahead_us(self) -> int:
        return self.ahead // _MICROSECOND

    def read(self, message: Any) -> int | str:
        """Return the time of a message in Unix microseconds, or the reason why it has no usable time."""
        try:
            value = self._value_of(message)
            at_us = self._unix_us(value)
        except Exception as error:  # noqa: BLE001 - a function of the application may raise anything.
            return f"raised {type(error).__name__}: {error}"
        if isinstance(at_us, int) and not FIRST_US <= at_us <= LAST_US:
            return f"is outside of the years 1 to 9999 ({shown(value)})"
        return at_us

    def _value_of(self, message: Any) -> Any:
        if not isinstance(self.field, str):
            return self.field(message)
        value = getattr(message, self.field)
        is_proto = getattr(message, "HasField", None) is not None
        return value_if_set(message, self.field) if is_proto else value

    def _unix_us(self, value: Any) -> int | str:
        """Return a value as a time in Unix microseconds, or the reason why it is no time."""
        if value is None:
            return "is missing"
        if isinstance(value, datetime):
            if value.utcoffset() is None:
                return f"has no zone ({value})"
            return (value - _EPOCH) // _MICROSECOND
        if _is_timestamp(value):
            return int(value.seconds * 10**6 + value.nanos // 1000)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"is of type {type(value).__name__}, which is no time"
        if self.unit is None:
            return f"is a number without a unit ({shown(value)})"
        if isinstance(value, int):
            return value * _UNIT_NS[self.unit] // 1000
        if not math.isfinite(value):
            return f"is not finite ({value})"
        return round(value * (_UNIT_NS[self.unit] / 1000))


class TimeReader:
    """Reads the times of messages of one journal. ``now`` returns the wall time in Unix seconds.

    A time may be at most ``ahead`` after the clock in the message's UUID: so every reading has the same
    bound. Without a UUID, a time may be at most ``ahead`` after ``now``.
    """

    def __init__(self, time: MessageTime, now: Callable[[], float]) -> None:
        self.time = time
        self._now = now
        self._ahead_us = time.ahead // _MICROSECOND

    def read_all(self, messages: Sequence[Any], clocks: Sequence[int]) -> list[int | str]:
        """Return for each message its time in Unix microseconds, or the reason why it has no usable time.

        ``clocks`` are the clocks in the messages' UUIDs, 0 for a message without a publisher's UUID.
        """
        return [self._bounded(*pair) for pair in zip(messages, clocks, strict=True)]

    def _bounded(self, message: Any, clock: int) -> int | str:
        # Check as `MessageTime.read_bounded` does, without its calls: this runs once for each message.
        at_us = self.time.read(message)
        if isinstance(at_us, str):
            return at_us
        published_us = clock_unix_ns(clock) // 1000 if clock else int(self._now() * 1e6)
        if at_us > published_us + self._ahead_us:
            return self.time.read_bounded(message, published_us)
        return at_us


def value_if_set(message: Any, attribute: str) -> Any:
    """Return a field of a protobuf message; None for a Timestamp that is not set, since it reads as 1970."""
    value = getattr(message, attribute)
    return None if _is_timestamp(value) and not message.HasField(attribute) else value


def _clean(name: str) -> str:
    return re.sub(r"[^\w\-+/.]", "-", name)


def _is_timestamp(value: Any) -> bool:
    """Return True for a protobuf ``Timestamp``, of any descriptor pool."""
    descriptor = getattr(value, "DESCRIPTOR", None)
    return getattr(descriptor, "full_name", "") == TIMESTAMP


def unusable(
    time: MessageTime, reason: str, journal: JournalName, begin: Offset, end: Offset
) -> UnusableTime:
    """Return the error of a message without a usable time. ``reason`` is what `MessageTime.read` returned."""
    return UnusableTime(
        f"the time of the message ({time.name}) {reason}",
        field=time.name,
        journal=journal,
        begin=begin,
        end=end,
    )


def no_clock(
    journal: JournalName, begin: Offset, end: Offset, place: str | None = None
) -> UnusableTime:
    """Return the error of a message without a UUID, whose time would be the clock in that UUID.

    ``place`` is the place of the UUID, if it is known.
    """
    field = {} if place is None else {"field": place}
    where = "" if place is None else f" in {place}"
    return UnusableTime(
        f"the message has no UUID of a publisher{where}, and so no time",
        hint=_NO_CLOCK,
        **field,
        journal=journal,
        begin=begin,
        end=end,
    )
