"""Times of cases: of timers, and those that messages declare. See `tests.meaning.places`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
from google.protobuf import timestamp_pb2

from gazette import EventTime, Message, MessageTime, Source, TimeDomain
from gazette.message.labelled_time import label_of_time, labelled_time
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from tests.meaning import values as made
from tests.meaning.places import Writer, require_named
from tests.meaning.values import Case, odd, text

_BEGIN: Final = datetime(1, 1, 1)  # noqa: DTZ001 - the calendar itself, in any zone.
_EPOCH_US: Final = (datetime(1970, 1, 1) - _BEGIN) // timedelta(microseconds=1)  # noqa: DTZ001
_LAST: Final = datetime.max.replace(tzinfo=UTC)
_LAST_US: Final = (datetime.max - _BEGIN) // timedelta(microseconds=1) - _EPOCH_US  # noqa: DTZ901
_AHEAD: Final = timedelta(days=9000 * 366)
_PER_S: Final[dict[Any, int]] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_ZONES: Final = (UTC, *(timezone(timedelta(minutes=m)) for m in (120, -420, -90, 1439, -1439)))


def instant(at: Any) -> int | None:
    """Return the Unix microseconds of a time with a zone. None for another value, and outside of the
    years 1 to 9999 in UTC.
    """
    if not isinstance(at, datetime) or (offset := at.utcoffset()) is None:
        return None
    since = at.replace(tzinfo=None, fold=0) - _BEGIN - offset
    found = since // timedelta(microseconds=1) - _EPOCH_US
    return found if -_EPOCH_US <= found <= _LAST_US else None


def aware(rng: random.Random) -> datetime:
    """Return a time with a zone, often near the ends of the calendar."""
    at = datetime.combine(made.day(rng), made.clock_time(rng))
    return at.replace(tzinfo=rng.choice(_ZONES))


# -- timers


class Stamp(Message):
    index: int = 0
    at: datetime = datetime(1970, 1, 1, tzinfo=UTC)


class TimerWriter(Writer):
    """Sets a timer for each case, whose key, time, payload and domain a seed draws."""

    event_time: ClassVar[EventTime | None] = EventTime()
    stamps = Source("stamps", Stamp, time=MessageTime("at", ahead=_AHEAD))

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__(cases)
        self.wanted = [_timer_of(random.Random(case.seed)) for case in cases]
        self.fired: dict[str, tuple[datetime, bytes]] = {}

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        index = envelope.message.index
        if index < len(self.wanted):
            key, at, payload = self.wanted[index]
            domain = TimeDomain.EVENT if index % 2 else TimeDomain.PROCESSING
            self.write(index, lambda: shard.schedule(key, at, payload, domain=domain))

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        self.fired[timer.key] = timer.at, timer.payload


def _timer_of(rng: random.Random) -> tuple[Any, Any, Any]:
    parts: list[Any] = [f"{rng.getrandbits(60)}{text(rng)[:100]}", aware(rng), rng.randbytes(5)]
    if not rng.randrange(3):
        parts[rng.randrange(3)] = odd(rng)
    return parts[0], parts[1], parts[2]


def check_timers(cases: Sequence[Case], directory: Path) -> int:
    """Set timers, crash, and let all fire with what they were set with, by both clocks."""
    application = TimerWriter(cases)
    with AppDriver(application, directory, ["stamps"]) as driver:
        driver.publish("stamps", *[Stamp(index=n) for n in range(len(cases))])
        driver.run()
        driver.crash()
        driver.publish("stamps", Stamp(index=len(cases), at=_LAST))
        driver.run()
        driver.advance(_LAST.timestamp() - driver.clock.now())
    for index, case in enumerate(cases):
        key, at, payload = application.wanted[index]
        case = case._replace(type="timer", value=application.wanted[index], fits=False)
        if (error := application.refused.get(index)) is not None:
            require_named(case, error, "key", "at", "payload")
            continue
        found = application.fired.get(key)
        assert found is not None, f"{case}: never fires"
        assert (instant(found[0]), found[1]) == (instant(at), payload), f"{case}: fires as {found}"
        assert instant(at) is not None, f"{case}: is accepted"
    return len(cases) - len(application.refused)


# -- declared times


class TimeKind(NamedTuple):
    """A declared type of times, their unit, its values, and the instant of each; None for no time."""

    type: Any
    unit: Any
    make: made.Make
    instant: Callable[[Any], int | None]
    field: Any = "at"


def _count_of(unit: Any, kind: Any) -> TimeKind:
    """Return numbers that count from 1970."""

    def make(rng: random.Random) -> Any:
        at = instant(aware(rng)) or 0
        beyond = rng.choice((0, 0, 0, -1, 1)) * 10 * _LAST_US
        return kind((at + beyond) * _PER_S[unit] // 10**6 + rng.randrange(3))

    def read(value: Any) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            return None
        if value in (float("inf"), float("-inf")):
            return None
        us = Fraction(value) * 10**6 / _PER_S[unit]
        found = us.__floor__() if isinstance(value, int) else round(us)
        return found if -_EPOCH_US <= found <= _LAST_US else None

    return TimeKind(kind, unit, make, read)


def _stamp_of(message: Any) -> Any:
    if instant(message.at) is None:
        return message.at
    found = timestamp_pb2.Timestamp()
    found.FromDatetime(message.at.astimezone(UTC).replace(tzinfo=None))
    return found


_KINDS: Final = (
    TimeKind(datetime, None, aware, instant),
    TimeKind(datetime | None, None, aware, instant),
    TimeKind(datetime, None, aware, instant, field=lambda message: message.at),
    TimeKind(datetime, None, aware, instant, field=_stamp_of),
    *(_count_of(unit, kind) for unit in _PER_S for kind in (int, float)),
    *(_count_of(unit, int)._replace(type=Any) for unit in _PER_S),
)
_EACH: Final = 15
"""Cases of a type: `make test` draws each."""
NO_TIMES: Final = (str, date, bytes, bool, Decimal, list[datetime], timedelta)


def check_times(cases: Sequence[Case], directory: Path) -> int:
    """Publish messages with a declared time of each type, and let timers fire at the time of each."""
    accepted = 0
    for begin in range(0, len(cases), _EACH):
        kind = _KINDS[cases[begin].seed // _EACH % len(_KINDS)]
        accepted += _check_type(kind, cases[begin : begin + _EACH], directory / str(begin))
    return accepted


class TimedWriter(Writer):
    """Notes the time of each message, and sets a timer for it."""

    event_time: ClassVar[EventTime | None] = EventTime()

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__(cases)
        self.times: dict[int, datetime] = {}
        self.fired: dict[int, datetime] = {}

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        index = envelope.message.index
        self.times[index] = envelope.time
        shard.schedule(str(index), envelope.time, domain=TimeDomain.EVENT)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        self.fired[int(timer.key)] = timer.at


def _check_type(kind: TimeKind, cases: Sequence[Case], directory: Path) -> int:
    fields: Any = [("index", int), ("at", kind.type), ("uuid", str, "")]
    message: Any = msgspec.defstruct("Timed", fields)
    source: Any = Source(
        "timed", message, time=MessageTime(kind.field, unit=kind.unit, ahead=_AHEAD)
    )
    application = type("TimedBy", (TimedWriter,), {"timed": source})(cases)
    wanted: dict[int, int] = {}
    with AppDriver[Any](application, directory, ["timed"]) as driver:
        for index, case in enumerate(cases):
            rng = random.Random(case.seed)
            at = kind.make(rng) if rng.randrange(3) else odd(rng)
            expected = kind.instant(at)
            case = case._replace(type=(kind.type, kind.unit), value=at, fits=False)
            if _is_refused(case, source, driver, message(index, at)):
                continue
            assert expected is not None, f"{case}: is accepted"
            _require_same_by_label(case, source, message(index, at))
            wanted[index] = expected
        driver.run()
        driver.crash()
        driver.advance(60)
    for index, at in application.times.items():
        case = cases[index]._replace(type=(kind.type, kind.unit))
        assert _is_near(instant(at), wanted[index], kind), f"{case}: {wanted[index]} is {at}"
        assert application.fired.get(index, at) == at, f"{case}: fires at another time than {at}"
    assert application.times.keys() == wanted.keys(), f"{cases[0]}: {kind.type} are lost"
    return len(wanted)


def _is_refused(case: Case, source: Any, driver: AppDriver[Any], message: Any) -> bool:
    """Publish a message. Return True if the declaration of its source, or the type, refuses it."""
    try:
        partition = source.mapping()(message)
        partition.message_time.require(message, partition.journal, 0)
        driver.publish("timed", message)
    except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
        require_named(case, error, "message", "at")
        return True
    return False


def _require_same_by_label(case: Case, source: Any, message: Any) -> None:
    """Require the same time by the label of the journal, of the message and of its JSON."""
    time = source.message_time
    if not isinstance(time.field, str):
        return  # Only the application has the function.
    by_label = labelled_time(label_of_time(time, source.message_types))
    row = msgspec.json.decode(msgspec.json.encode(message))
    found = {
        one.read(each) for one, each in ((time, message), (by_label, message), (by_label, row))
    }
    assert len(found) == 1, f"{case}: times {found}"


def _is_near(found: int | None, wanted: int, kind: TimeKind) -> bool:
    """Return True for the same instant. Floats of a unit have the precision of their digits."""
    assert found is not None
    if kind.type is float:
        return abs(found - wanted) <= 1 + abs(wanted) // 2**51
    return found == wanted


__all__: Final = ["NO_TIMES", "check_timers", "check_times"]
