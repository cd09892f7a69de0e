"""Publishers of journals with a declared time: a message whose time shards could not use is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gazette
from gazette import CSVRecord, Message, MessageTime, Output, Source
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid
from gazette.labels import CONTENT_JSON_LINES, MESSAGE_TIME
from gazette.message.envelope import TimedEnvelope, build_envelopes
from gazette.message.labelled_time import labelled_time
from gazette.message.mapping import Partitions, fixed_mapping, random_mapping
from gazette.message.message_time import TimeReader
from gazette.message.publisher import Publisher
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.message.uuid import OUTSIDE_TXN, Clock, build_uuid, clock_at
from gazette.testing.broker import BrokerFixture
from tests.facts import raises
from tests.message.publishing.test_keyed_outputs import partitions_of, specs_of
from tests.message.test_message_time import Proto
from tests.message.test_publisher import Refusing

PRODUCER = b"\x01abcde"
NOW = 1_700_000_000
CLOCK = clock_at(NOW * 10**9)
AT = datetime(2023, 1, 1, tzinfo=UTC)
ZONED = Annotated[datetime, msgspec.Meta(tz=True)]


class Order(Message, rename="camel"):
    placed_at: datetime | None = None


class Click(Message):
    ms: float | None = None


@dataclass
class Row:
    placedAt: datetime | None = None
    uuid: str = ""


class Model(pydantic.BaseModel):
    at: datetime | None = pydantic.Field(default=None, alias="placedAt")
    uuid: str = ""


class Other(Message):
    text: str = ""


ORDERS = Source("orders", Order, time="placed_at")
CLICKS = Source("clicks", Click, time=MessageTime("ms", unit="ms"))


def publisher() -> tuple[Publisher, Refusing]:
    appends: Any = Refusing()
    return Publisher(appends, producer=PRODUCER, clock=Clock(CLOCK)), appends


def publish(partitions: Partitions, message: Any) -> bool:
    """Publish a message in each way. Return False if each way refuses it, and then nothing is written."""
    one, appends = publisher()
    to: Any = fixed_mapping(*partitions.all[0])
    ways = (
        lambda: one.publish_committed(to, message),
        lambda: one.publish_uncommitted(to, message),
        lambda: one.publish_committed_batch(to, [message]),
    )
    refused = 0
    for way in ways:
        try:
            way()
        except Invalid as error:
            refused += bool(error.hint)
    one.flush()
    assert refused in (0, len(ways))
    assert bool(appends.journals) == (not refused)
    return not refused


def label_of(declared: Any) -> str:
    return specs_of(declared)[0].labels.value_of(MESSAGE_TIME) or ""


def test_the_time_is_read_in_every_kind_of_message() -> None:
    """By the name that messages hold."""
    partitions = partitions_of(ORDERS)
    message: Any
    for message in (
        Order(placed_at=AT), Row(AT), Model(placedAt=AT), {"placedAt": "2023-01-01T00:00:00+01:00"},
    ):  # fmt: skip
        assert publish(partitions, message)
    for message in (
        Order(),
        Row(),
        Model(),
        {},
        {"placed_at": "2023-01-01T00:00:00Z"},
        {"placedAt": 7},
        Other(text="x"),
    ):
        assert not publish(partitions, message)
    assert publish(partitions_of(CLICKS), {"ms": 7})
    assert not publish(partitions_of(CLICKS), {"ms": "7"})


texts = st.sampled_from(
    ["", "soon", "2023-01-01", "2023-01-01T00:00:00", "2023-01-01T00:00:00Z", "1970-01-01T00:00:00.5+23:59",
     "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+01:00", "2023-11-15T22:13:20Z", "2023-11-16T22:13:20Z"]
)  # fmt: skip
values = st.one_of(
    st.none(), st.booleans(), texts, st.integers(-(2**63), 2**64 - 1), st.floats(), st.lists(st.integers()),
    st.integers(NOW * 1000 - 10, NOW * 1000 + 2 * 86_400_000), st.datetimes().map(lambda at: at.isoformat()),
    st.datetimes(timezones=st.just(UTC)).map(lambda at: at.isoformat()),
)  # fmt: skip


@settings(max_examples=400)
@given(values, st.sampled_from([ORDERS, CLICKS]))
def test_what_a_label_lets_through_is_what_shards_use(value: Any, declared: Source[Any]) -> None:
    name = "placedAt" if declared is ORDERS else "ms"
    kind: Any = declared.message_type
    time = declared.message_time
    assert time is not None
    usable = False
    try:
        message = msgspec.json.decode(msgspec.json.encode({name: value}), type=kind)
        uuid = build_uuid(PRODUCER, CLOCK, OUTSIDE_TXN)
        (found,) = build_envelopes(
            "a/b", [0], [1], [message], uuid, TimeReader(time, lambda: float(NOW))
        )
        assert isinstance(found, TimedEnvelope)
        usable = found.unusable is None
    except msgspec.ValidationError:
        pass
    assert publish(partitions_of(declared), {name: value}) == usable


@pytest.mark.parametrize("declared", [ORDERS, Output("orders", Order, time="placed_at")])
def test_a_declaration_refuses_as_shards_do(declared: Any) -> None:
    """Times that lie too far ahead, too: readers compare them with the clock of the UUID."""
    now = datetime.fromtimestamp(NOW, UTC)
    one, appends = publisher()
    for at in (None, AT.replace(tzinfo=None), now + timedelta(days=1, seconds=1)):
        for output in (
            declared,
            declared.mapping(),
            declared.mapping(lambda: partitions_of(ORDERS)),
        ):
            with raises(
                Invalid, path="message.placed_at", says="orders/part-000", advises="placed_at"
            ):
                one.publish_committed(output, Order(placed_at=at))
    wrong: Any = CSVRecord(["", "x"])
    with raises(Invalid, path="message", says="Order"):
        one.publish_committed(declared, wrong)
    assert not appends.journals
    one.publish_committed(declared, Order(placed_at=now + timedelta(days=1)))
    assert appends.journals


def test_another_declaration_of_the_journals_does_not_hide_their_time() -> None:
    """An Output without a time, and mappings of an application, by the labels."""
    partitions = partitions_of(ORDERS)
    one, appends = publisher()
    for mapping in (
        Output("orders", Order).mapping(lambda: partitions),
        random_mapping(lambda: partitions, random.Random(1)),
    ):
        with raises(Invalid, path="message.placedAt"):
            one.publish_committed(mapping, Order())
    assert not appends.journals


def test_the_time_of_a_function_is_not_known_to_others() -> None:
    declared = replace(ORDERS, time=lambda message: message.placed_at)
    one, appends = publisher()
    for message in (Order(placed_at=AT), {"placedAt": AT}):
        with raises(Invalid, path="message", advises="Source"):
            one.publish_committed(
                random_mapping(lambda: partitions_of(declared), random.Random(1)), message
            )
    assert not appends.journals
    one.publish_committed(declared.mapping(lambda: partitions_of(declared)), Order(placed_at=AT))
    assert appends.journals


@pytest.mark.parametrize(
    "ahead", [timedelta(0), timedelta(days=1), timedelta(days=9), timedelta.max]
)
@pytest.mark.parametrize("unit", [None, "ms"])
def test_a_label_says_how_far_a_time_may_lie_ahead(ahead: timedelta, unit: Any) -> None:
    kind: Any = Order if unit is None else Click
    field = "placed_at" if unit is None else "ms"
    declared = Source("orders", kind, time=MessageTime(field, unit=unit, ahead=ahead))
    found = labelled_time(label_of(declared))
    assert (found.unit, found.ahead) == (unit, ahead)
    assert found.unbounded.ahead == timedelta.max


@pytest.mark.parametrize("text", ["at/s/x", "at/s/-1", "at/s/1/2", "at/days", "/s"])
def test_a_label_that_is_no_time_is_refused(text: str) -> None:
    one, appends = publisher()
    with raises(Invalid, says="a/journal"):
        one.publish_committed(fixed_mapping("a/journal", CONTENT_JSON_LINES, time=text), {"at": 1})
    assert not appends.journals


def test_a_timestamp_that_is_not_set_is_missing() -> None:
    """It reads as 1970."""
    kind: Any = Proto
    partitions = partitions_of(Source("stamps", kind, time="at"))
    assert not publish(partitions, kind())
    one = kind()
    one.at.seconds = NOW
    assert publish(partitions, one)


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(*specs_of(replace(ORDERS, partitions=2)))
        yield broker


async def test_publishers_hold_the_time_whatever_output_they_give(broker: BrokerFixture) -> None:
    """A name, a selector, a Source and an Output, with and without a time of its own."""
    source = replace(ORDERS, partitions=2)
    outputs: list[Any] = [
        "orders/part-001", ORDERS.selector, source, Output("orders", Order, partitions=2),
    ]  # fmt: skip
    async with ClientPublisher(broker.client) as publisher:
        for output in outputs:
            with raises(Invalid, says="orders/part-00"):
                await publisher.publish(output, Order())
            async with publisher.transaction() as transaction:
                await transaction.publish(output, Order(placed_at=AT))
                with raises(Invalid, says="orders/part-00"):
                    await transaction.publish(output, Order())
                # By the wall clock, after a publisher was made and has published.
                late = datetime.now(UTC) + timedelta(days=2)
                with raises(Invalid, says="ahead"):
                    await transaction.publish(output, Order(placed_at=late))
            await publisher.publish(output, Order(placed_at=AT))
    table = await asyncio.to_thread(
        gazette.read_table, source.journals, broker=broker.endpoint, fields="placedAt timestamp"
    )
    assert [at.replace(tzinfo=UTC) for at in table["placedAt"].to_pylist()] == [AT] * 8
