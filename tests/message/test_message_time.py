"""Times of messages: which values are times, and which declarations can be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st

from gazette import CSVRecord, Message, MessageTime, Output, Source
from gazette.consumer.declare.declaration import declaration_of
from gazette.errors import Invalid
from gazette.message.envelope import TimedEnvelope, build_envelopes
from gazette.message.message_time import TimeReader, UnusableTime
from gazette.message.uuid import ACK_TXN, NIL_UUID, OUTSIDE_TXN, build_uuid, clock_at
from tests.declare.test_declaration import Silent
from tests.facts import raises

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST, LAST = datetime(2, 1, 1), datetime(9998, 1, 1)  # noqa: DTZ001 - Hypothesis adds the zone
PUBLISHED = 1_700_000_000
UUID = build_uuid(b"\x01abcde", clock_at(PUBLISHED * 10**9), OUTSIDE_TXN)
FIRST_US, LAST_US = -62_135_596_800 * 10**6, 253_402_300_800 * 10**6 - 1
"""First and last microsecond of the years 1 to 9999."""
PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class Any_(Message):
    at: Any = None


class Row(CSVRecord):
    @property
    def at(self) -> datetime:
        return datetime.fromisoformat(self[1])


def read(value: Any, unit: Any = None) -> int | str:
    return MessageTime("at", unit=unit).read(Any_(at=value))


zones = st.one_of(
    st.just(UTC),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Asia/Kolkata"]).map(ZoneInfo),
    st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)


@given(st.datetimes(FIRST, LAST, timezones=zones))
def test_a_datetime_with_a_zone_is_its_instant(at: datetime) -> None:
    expected = (at - EPOCH) // timedelta(microseconds=1)
    assert read(at) == expected
    assert MessageTime(lambda message: message.at).read(Any_(at=at)) == expected
    stamp = timestamp_pb2.Timestamp()
    stamp.FromDatetime(at.astimezone(UTC).replace(tzinfo=None))
    assert read(stamp) == expected


def test_the_ends_of_the_calendar_are_times() -> None:
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    for at, expected in (first, FIRST_US), (last, LAST_US):
        assert read(at) == read(expected, "us") == expected
    for beyond in (FIRST_US - 1, LAST_US + 1):
        assert isinstance(read(beyond, "us"), str)
    for hours, at in (2, first), (-7, last):
        assert isinstance(read(at.replace(tzinfo=timezone(timedelta(hours=hours)))), str)


@given(st.integers(-(10**20), 10**20), st.sampled_from(sorted(PER_S)))
def test_a_number_counts_in_its_unit_or_is_refused(number: int, unit: str) -> None:
    expected = number * 10**6 // PER_S[unit]
    found = read(number, unit)
    assert found == expected or isinstance(found, str)
    assert isinstance(found, int) == (FIRST_US <= expected <= LAST_US)
    as_float = read(float(number), unit)
    if isinstance(found, int) and isinstance(as_float, int):
        assert math.isclose(as_float, found, rel_tol=1e-12, abs_tol=1)


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (None, None),
        (None, "s"),
        (datetime(2024, 1, 1), None),  # noqa: DTZ001
        (date(2024, 1, 1), None),
        ("2024-01-01T00:00:00Z", None),
        (1_700_000_000, None),
        (1.7e9, None),
        (True, "s"),
        (Decimal(1), "s"),
        (math.nan, "s"),
        (math.inf, "ms"),
        (10**30, "ns"),
        (-(10**30), "s"),
        (1e300, "us"),
        (timestamp_pb2.Timestamp(seconds=1 << 40), None),
        ([], "s"),
    ],
)
def test_what_is_no_time_has_a_reason(value: Any, unit: Any) -> None:
    assert isinstance(read(value, unit), str)


def test_what_a_function_raises_is_a_reason() -> None:
    assert "ZeroDivisionError" in str(MessageTime(lambda _: 1 // 0).read(Any_()))
    assert "AttributeError" in str(MessageTime("missing").read(Any_()))


def envelope(value: Any, time: MessageTime, uuid: bytes = UUID, now: float = PUBLISHED) -> Any:
    reader = TimeReader(time, lambda: now)
    (found,) = build_envelopes("a/journal", [7], [9], [Any_(at=value)], uuid, reader)
    return found


AHEAD = MessageTime("at", unit="s", ahead=timedelta(seconds=60))


@pytest.mark.parametrize("uuid", [UUID, NIL_UUID, b""], ids=["published", "nil", "no field"])
def test_a_time_ahead_of_publication_is_refused(uuid: bytes) -> None:
    """Without a UUID, the wall clock stands for the publication."""
    for seconds in (-PUBLISHED, 0, 60):
        found = envelope(PUBLISHED + seconds, AHEAD, uuid)
        assert found.time == EPOCH + timedelta(seconds=PUBLISHED + seconds)
        assert found.event_us == (PUBLISHED + seconds) * 10**6
    late = envelope(97_000_000_000, AHEAD, uuid)
    assert late.event_us is None
    with raises(UnusableTime, field="at", journal="a/journal", begin="7", end="9"):
        _ = late.time


def test_the_bound_does_not_depend_on_when_a_message_is_read() -> None:
    for now in (0.0, 1e10):
        assert envelope(PUBLISHED, AHEAD, now=now).event_us == PUBLISHED * 10**6
        assert envelope(PUBLISHED + 61, AHEAD, now=now).event_us is None


def test_an_acknowledgement_needs_no_time() -> None:
    uuid = build_uuid(b"\x01abcde", clock_at(PUBLISHED * 10**9), ACK_TXN)
    for zero in (None, 0, EPOCH):  # As a type without defaults has in its acknowledgements.
        found = envelope(zero, AHEAD, uuid)
        assert isinstance(found, TimedEnvelope)
        assert found.unusable is None
        assert found.event_us is None
        assert found.time == EPOCH + timedelta(seconds=PUBLISHED)


class Order(Message):
    naive: Annotated[datetime, msgspec.Meta(tz=False)]
    at: datetime
    aware: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    ms: int = 0
    seconds: float | None = None
    text: str = ""
    day: date | None = None
    either: int | str = 0
    anything: Any = None


@dataclass
class Plain:
    at: datetime
    ms: int
    uuid: str = ""


class Model(pydantic.BaseModel):
    at: pydantic.AwareDatetime
    ms: int
    text: str
    uuid: str = ""


def _proto() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="test_message_time.proto", package="test", syntax="proto3"
    )
    file.dependency.append("google/protobuf/timestamp.proto")
    made = file.message_type.add(name="Proto")
    kinds: list[tuple[str, Any, str]] = [
        ("uuid", 12, ""),
        ("at", 11, ".google.protobuf.Timestamp"),
        ("ms", 3, ""),
        ("text", 9, ""),
        ("other", 11, ".test.Proto"),
    ]
    for number, (name, kind, type_name) in enumerate(kinds, 1):
        field = made.field.add(name=name, number=number, type=kind, label=1)
        if type_name:
            field.type_name = type_name
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Proto"))


Proto = _proto()
MS: Any = MessageTime("ms", unit="ms")


@pytest.mark.parametrize(
    ("kind", "time"),
    [
        (Order, "at"),
        (Order, "aware"),
        (Order, MS),
        (Order, MessageTime("seconds", unit="s")),
        (Order, "anything"),
        (Order, lambda message: message.at),
        (Plain, "at"),
        (Plain, MS),
        (Model, "at"),
        (Model, MS),
        (Proto, "at"),
        (Proto, MS),
        (CSVRecord, lambda message: None),
        (Row, "at"),
    ],
)
def test_times_that_a_type_has_are_declared(kind: Any, time: Any) -> None:
    for declared in (Source, Output):
        assert declared("orders", kind, time=time).message_time is not None
    assert Source("orders", kind).message_time is None


@pytest.mark.parametrize(
    ("kind", "time", "path"),
    [
        (Order, "att", "time"),
        (Order, "naive", "time"),
        (Order, "ms", "time"),
        (Order, "seconds", "time"),
        (Order, "text", "time"),
        (Order, "day", "time"),
        (Order, MessageTime("either", unit="s"), "time"),
        (Order, MessageTime("at", unit="s"), "time"),
        (Plain, "ms", "time"),
        (Model, "text", "time"),
        (Proto, "ms", "time"),
        (Proto, "text", "time"),
        (Proto, "other", "time"),
        (Proto, MessageTime("at", unit="s"), "time"),
        (CSVRecord, "1", "time"),
        (Order, 7, "time"),
        (Order, "", "time"),
    ],
)
def test_times_that_a_type_cannot_have_are_refused(kind: Any, time: Any, path: str) -> None:
    with raises(Invalid, path=f"Source('orders').{path}"):
        Source("orders", kind, time=time)


def test_a_unit_and_a_bound_are_checked() -> None:
    with raises(Invalid, path="time.unit", advises="ms"):
        MessageTime("at", unit="minutes")  # type: ignore[arg-type]
    for ahead in (5, timedelta(seconds=-1)):
        with raises(Invalid, path="time.ahead"):
            MessageTime("at", ahead=ahead)  # type: ignore[arg-type]


def test_a_timestamp_that_is_not_set_is_missing() -> None:
    assert MessageTime("at").read(Proto()) == "is missing"
    at = EPOCH + timedelta(seconds=3, microseconds=4)
    assert MessageTime("at").read(Proto(at=at)) == 3_000_004


def test_the_label_says_field_and_unit() -> None:
    class Both(Silent):
        orders = Source("orders", Order, time=MS)
        plain = Source("plain", Plain, time="at")
        made = Source("made", Plain, time=lambda message: message.at)
        none = Source("none", Plain)

    found = [one.message_time for one in declaration_of(Both()).sources]
    assert found[:2] == ["ms/ms", "at"]
    assert found[2] not in ("", "at")
    assert found[3] == ""
    MessageTime("at", ahead=timedelta(days=9))
    assert MessageTime("at", ahead=timedelta(days=9)).text == "at"
