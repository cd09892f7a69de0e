"""The place of the UUID: a publisher finds it, readers find it, and a value of others is never replaced."""

from __future__ import annotations

import random
import uuid as stdlib_uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_count import ngram_pb2

from gazette.client.append.appender import AppendParams
from gazette.errors import Invalid
from gazette.history.columns import ColumnDecoder, MessageFormat
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.codec import MsgspecCodec
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.frames import MalformedMessage
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import fixed_mapping
from gazette.message.message import CSVRecord, Message
from gazette.message.publisher import Appends, Publisher
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    Clock,
    ObjectForm,
    build_uuid,
    clock_at,
    other_producer,
    parse_uuid,
    uuid_text,
)
from gazette.runtime.tasks import OpFuture, resolved
from tests.facts import raises
from tests.fuzzing import examples

PRODUCER = b"\x01abcde"
START = clock_at(1_700_000_000 * 10**9)
PLACE = "_meta.uuid"
RANDOM = "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"


class Meta(msgspec.Struct):
    uuid: str = ""
    by: str = "me"


class Nested(msgspec.Struct):
    """A struct whose own field ``uuid`` is another thing."""

    uuid: int = 7
    meta: Meta | None = msgspec.field(default=None, name="_meta")


class Required(msgspec.Struct):
    n: int
    meta: Meta = msgspec.field(name="_meta")


class FrozenMeta(msgspec.Struct, frozen=True):
    uuid: str = ""


class Frozen(msgspec.Struct, frozen=True):
    n: int = 0
    meta: FrozenMeta = msgspec.field(name="_meta", default=FrozenMeta())


class WithDict(msgspec.Struct):
    n: int = 0
    meta: dict[str, Any] | None = msgspec.field(default=None, name="_meta")


class Named(msgspec.Struct):
    gazette_uuid: ClassVar[str] = PLACE
    uuid: str = "mine"
    meta: Meta | None = msgspec.field(default=None, name="_meta")


@dataclass
class DataMeta:
    uuid: str | None = None


@dataclass
class Data:
    n: int = 0
    _meta: DataMeta | None = None


@dataclass(frozen=True)
class FrozenData:
    n: int = 0
    _meta: FrozenMeta | None = None


class ModelMeta(pydantic.BaseModel):
    uuid: stdlib_uuid.UUID | None = None


class Model(pydantic.BaseModel):
    n: int = 0
    uuid: float = 1.5
    meta: ModelMeta | None = pydantic.Field(default=None, alias="_meta")


class FrozenModel(pydantic.BaseModel, frozen=True):
    n: int
    meta: ModelMeta = pydantic.Field(default=ModelMeta(), alias="_meta")


class Plain(msgspec.Struct):
    n: int = 0
    id: str = ""


class InMemory:
    """Appends that go to bytes in memory."""

    def __init__(self) -> None:
        self.journals: defaultdict[str, bytearray] = defaultdict(bytearray)

    def journal(self, params: AppendParams) -> _Journal:
        return _Journal(self.journals[params.journal])


class _Journal:
    def __init__(self, content: bytearray) -> None:
        self.content = content
        self.must_wait = False

    def enqueue(self, content: bytearray) -> OpFuture[None]:
        self.content += content
        return resolved(None)

    def in_place(self, write: Any, item: Any, flags: int, _length_max: int) -> OpFuture[None]:
        buffer = bytearray()
        write(item, flags, buffer)
        return self.enqueue(buffer)

    def await_room(self) -> None:
        raise AssertionError("there is always room")


def publisher_of(appends: InMemory) -> Publisher:
    return Publisher(cast("Appends", appends), producer=PRODUCER, clock=Clock(START))


def envelopes_of(content: bytes, kind: Any, place: str, content_type: str) -> list[Envelope[Any]]:
    decoder = EnvelopeDecoder("a/journal", framing_of(content_type, kind, place=place), 0)
    decoder.feed(content)
    found: list[Envelope[Any]] = []
    while batch := decoder.decode():
        found += batch
    decoder.finish()
    return found


def committed(envelopes: list[Envelope[Any]]) -> Iterator[Envelope[Any]]:
    sequencer: Sequencer[Any] = Sequencer({}, 64)
    for envelope in envelopes:
        sequencer.queue(envelope)
        while batch := sequencer.dequeue(9):
            yield from (one for one in batch if not one.is_ack)


SAMPLES: list[tuple[Any, str]] = [
    (Nested(uuid=3), PLACE),
    (Nested(uuid=3, meta=Meta(by="you")), PLACE),
    (Required(5, Meta()), PLACE),
    (Frozen(4), PLACE),
    (WithDict(4), PLACE),
    (WithDict(4, {"by": "you"}), PLACE),
    (Named(), ""),
    (Named(), PLACE),
    (Data(4), PLACE),
    (FrozenData(4), PLACE),
    (Model(n=4), PLACE),
    (FrozenModel(n=4), PLACE),
    (Plain(4), "id"),
    ({"uuid": RANDOM, "n": 1}, PLACE),
    ({"uuid": {"x": 1}, "_meta": {"by": "you"}}, PLACE),
    ({"a": {"b": {}}}, "a.b.c.d"),
]


@pytest.mark.parametrize(("message", "place"), SAMPLES)
def test_a_transaction_commits_with_uuids_in_their_place(message: Any, place: str) -> None:
    appends = InMemory()
    publisher = publisher_of(appends)
    mapping = fixed_mapping("a/journal", CONTENT_JSON_LINES, uuid=place)
    kind = type(message)
    before = msgspec.to_builtins(message) if not isinstance(message, pydantic.BaseModel) else None
    publisher.publish_uncommitted(mapping, message)
    intents = publisher.build_ack_intents()
    publisher.publish_committed(mapping, message)
    content = bytes(appends.journals["a/journal"])
    lines = content.splitlines(keepends=True)
    history = lines[0] + intents["a/journal"] + lines[1]
    found = envelopes_of(history, kind, place, CONTENT_JSON_LINES)
    assert [(one.producer, (one.clock - START) // 160, one.flags) for one in found] == [
        (PRODUCER, 1, CONTINUE_TXN),
        (PRODUCER, 2, ACK_TXN),
        (other_producer(PRODUCER), 3, OUTSIDE_TXN),
    ]
    assert [one.begin for one in committed(found)] == [0, found[2].begin]
    # Tables find the same, and so does a reader that knows JSON only.
    columns = ColumnDecoder("a/journal", MessageFormat(uuid_field=place or PLACE)).decode(
        history, 0
    )
    assert columns.columns.uuids.flags.tolist() == [CONTINUE_TXN, ACK_TXN, OUTSIDE_TXN]
    generic = envelopes_of(history, dict, place or PLACE, CONTENT_JSON_LINES)
    assert [(one.clock, one.flags) for one in generic] == [(one.clock, one.flags) for one in found]
    if isinstance(before, dict) and kind is not dict:
        after = msgspec.to_builtins(found[0].message)
        assert {
            key: value for key, value in after.items() if "meta" not in key and key != "id"
        } == {key: value for key, value in before.items() if "meta" not in key and key != "id"}


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Nested, "_meta.id"),
        (Nested, "meta.uuid"),
        (Nested, "uuid.x"),
        (Nested, "uuid"),
        (Nested, ""),
        (Named, "meta.uuid"),
        (Model, "_meta.id"),
        (Model, "uuid"),
        (Data, "a..b"),
        (dict, "a."),
    ],
)
def test_a_place_that_a_type_does_not_have_is_refused_at_the_start(kind: Any, place: str) -> None:
    with raises(Invalid):
        framing_of(CONTENT_JSON_LINES, kind, place=place)


def test_places_that_cannot_be() -> None:
    with raises(Invalid, path="uuid", says=PLACE):
        framing_of(CONTENT_CSV, CSVRecord, place=PLACE)
    with raises(Invalid, path=PLACE, says="_meta"):
        framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount, place=PLACE)
    with raises(Invalid, path="n_gram", says="bytes"):
        framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount, place="n_gram")

    class Own(msgspec.Struct):
        @classmethod
        def gazette_codec(cls, content_type: str) -> Any:
            return MsgspecCodec(cls)

    with raises(Invalid, path="uuid", says=PLACE):
        framing_of(CONTENT_JSON_LINES, Own, place=PLACE)


class Inner(msgspec.Struct):
    n: int
    uuid: str = ""


class Outer(msgspec.Struct):
    meta: Inner | None = None


def test_a_null_object_without_defaults_is_refused_by_name() -> None:
    mapping = fixed_mapping("a/journal", CONTENT_JSON_LINES, uuid="meta.uuid")
    appends = InMemory()
    publisher = publisher_of(appends)
    with raises(Invalid, path="meta.uuid"):
        publisher.publish_committed(mapping, Outer())
    assert not appends.journals["a/journal"]
    publisher.publish_committed(mapping, Outer(Inner(3)))
    (found,) = envelopes_of(
        bytes(appends.journals["a/journal"]), Outer, "meta.uuid", CONTENT_JSON_LINES
    )
    assert found.message.meta.n == 3
    assert found.producer == PRODUCER


OURS = uuid_text(build_uuid(PRODUCER, START, CONTINUE_TXN))
NOT_OURS: list[Any] = [
    RANDOM,
    str(stdlib_uuid.uuid3(stdlib_uuid.NAMESPACE_DNS, "x")),
    "A-17",
    "7",
    " ",
    # Of version 1, with a sequence of another software in the place of flags.
    "f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
]
FREE = ["", OURS, OURS.upper(), f"{{{OURS}}}", "00000000-0000-0000-0000-000000000000"]


class Text(Message):
    n: int = 0


class Standard(msgspec.Struct):
    uuid: stdlib_uuid.UUID | None = None


class Pydantic(pydantic.BaseModel):
    uuid: str = ""


def refused(message: Any, content_type: str = CONTENT_JSON_LINES, place: str = "uuid") -> None:
    appends = InMemory()
    publisher = publisher_of(appends)
    mapping = fixed_mapping("a/journal", content_type, uuid="" if place == "uuid" else place)
    for publish in (
        publisher.publish_committed,
        publisher.publish_uncommitted,
        lambda to, one: publisher.publish_committed_batch(to, [one]),
    ):
        with raises(Invalid, path=place):
            publish(mapping, message)
    assert not publisher.build_ack_intents()
    assert not appends.journals["a/journal"]


@pytest.mark.parametrize("value", NOT_OURS)
@pytest.mark.parametrize("kind", [Text, Pydantic, dict])
def test_a_text_of_others_is_refused_and_kept(kind: Any, value: str) -> None:
    message = kind(uuid=value)
    refused(message)
    assert (message["uuid"] if kind is dict else message.uuid) == value


@pytest.mark.parametrize("value", [0, 1, False, [], {}, {"a": 1}, 1.5])
def test_other_values_of_a_dict_are_refused(value: Any) -> None:
    refused({"uuid": value})
    refused({"_meta": {"uuid": value}}, place=PLACE)


def test_other_forms_are_refused_alike() -> None:
    one = stdlib_uuid.UUID(RANDOM)
    refused(Standard(one))
    refused(CSVRecord(["a", "b"]), CONTENT_CSV)
    refused(ngram_pb2.NGramCount(uuid=one.bytes), CONTENT_PROTO_FIXED)
    refused(Nested(meta=Meta(RANDOM)), place=PLACE)


@pytest.mark.parametrize("value", [7, "text", [1]])
def test_an_object_on_the_way_that_is_another_value_is_refused(value: Any) -> None:
    appends = InMemory()
    mapping = fixed_mapping("a/journal", CONTENT_JSON_LINES, uuid=PLACE)
    with raises(Invalid, path="uuid", says="uuid"):
        publisher_of(appends).publish_committed(mapping, {"_meta": value})
    assert not appends.journals["a/journal"]
    line = msgspec.json.encode({"_meta": value}) + b"\n"
    with raises(MalformedMessage, begin=0):
        framing_of(CONTENT_JSON_LINES, dict, place=PLACE).decode(line, 0)


@pytest.mark.parametrize("value", FREE)
@pytest.mark.parametrize("kind", [Text, Pydantic, dict])
def test_what_was_consumed_is_published_again(kind: Any, value: str) -> None:
    appends = InMemory()
    publisher_of(appends).publish_committed(
        fixed_mapping("a/journal", CONTENT_JSON_LINES), kind(uuid=value)
    )
    (found,) = envelopes_of(bytes(appends.journals["a/journal"]), kind, "", CONTENT_JSON_LINES)
    assert (found.producer, found.flags) == (PRODUCER, OUTSIDE_TXN)


@pytest.mark.parametrize("value", [7, 1.5, [1], {"a": 1}, b"bytes", stdlib_uuid.UUID(RANDOM)])
def test_another_value_than_the_type_says_is_refused(value: Any) -> None:
    message = Text(n=1)
    message.uuid = value
    refused(message)
    assert message.uuid == value


@pytest.mark.parametrize("value", [7, RANDOM, b"0123456789abcdef", [1]])
def test_another_value_than_a_uuid_is_refused_where_a_source_is_read(value: Any) -> None:
    """Messages of a codec of the user, say, whose objects hold what its types do not say."""
    with raises(Invalid, path="uuid", says="is not a UUID"):
        ObjectForm().join([None, stdlib_uuid.UUID(RANDOM), value])


def test_a_value_of_others_is_refused_behind_those_of_publishers() -> None:
    """Also once the publisher knows how UUIDs of publishers end."""
    appends = InMemory()
    publisher, mapping = publisher_of(appends), fixed_mapping("a/journal", CONTENT_JSON_LINES)
    for number in range(5000):
        ours = uuid_text(build_uuid(number.to_bytes(6, "big"), START + number, OUTSIDE_TXN))
        publisher.publish_committed(mapping, Text(uuid=ours))
    for value in NOT_OURS:
        with raises(Invalid, path="uuid"):
            publisher.publish_committed(mapping, Text(uuid=value))
    found = envelopes_of(bytes(appends.journals["a/journal"]), Text, "", CONTENT_JSON_LINES)
    assert len(found) == 5000
    assert {one.producer for one in found} == {PRODUCER}


def test_the_same_object_is_published_twice() -> None:
    appends, message = InMemory(), Text(n=1)
    publisher = publisher_of(appends)
    for _ in range(2):
        publisher.publish_committed(fixed_mapping("a/journal", CONTENT_JSON_LINES), message)
    assert (
        len(envelopes_of(bytes(appends.journals["a/journal"]), Text, "", CONTENT_JSON_LINES)) == 2
    )


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.uuids().map(str),
    st.uuids(version=1).map(str),
    st.sampled_from(["", OURS, RANDOM]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
objects = st.fixed_dictionaries(
    {},
    optional={
        "uuid": values,
        "_meta": st.one_of(
            values, st.fixed_dictionaries({}, optional={"uuid": values, "by": values})
        ),
        "n": values,
        "": values,
    },
)


def without_place(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a message without its UUID, and without the object that was only made for it."""
    first, *rest = place.split(".")
    if first not in message:
        return message
    if not rest:
        return {key: value for key, value in message.items() if key != first}
    inner = without_place(message[first], ".".join(rest)) if message[first] else {}
    return {**{key: value for key, value in message.items() if key != first}, first: inner or None}


def refusal(publish: Callable[[Any, Any], Any], mapping: Any, message: Any) -> Invalid | None:
    try:
        publish(mapping, message)
    except Invalid as error:
        return error
    return None


@settings(max_examples=examples(400), deadline=None)
@given(message=objects, place=st.sampled_from(["", PLACE, "a.b"]), in_transaction=st.booleans())
def test_what_is_published_reads_back_equal_or_is_refused_by_name(
    message: dict[str, Any], place: str, in_transaction: bool
) -> None:
    appends = InMemory()
    publisher = publisher_of(appends)
    mapping = fixed_mapping("a/journal", CONTENT_JSON_LINES, uuid=place)
    given_bytes = msgspec.json.encode(message)
    publish = publisher.publish_uncommitted if in_transaction else publisher.publish_committed
    error = refusal(publish, mapping, message)
    if error is not None:
        assert error.path in ("uuid", place)
        assert error.hint
        assert msgspec.json.encode(message) == given_bytes
        assert not appends.journals["a/journal"]
        return
    intents = publisher.build_ack_intents()
    content = bytes(appends.journals["a/journal"]) + b"".join(intents.values())
    found = envelopes_of(content, dict, place, CONTENT_JSON_LINES)
    (read,) = committed(found)
    assert read.producer == PRODUCER
    at = place or "uuid"
    original = msgspec.json.decode(given_bytes)
    assert without_place(read.message, at) == without_place(
        {**original, at.split(".")[0]: original.get(at.split(".")[0])}, at
    )
    columns = ColumnDecoder("a/journal", MessageFormat(uuid_field=at)).decode(content, 0).columns
    assert columns.uuids.clocks.tolist() == [one.clock for one in found]
    assert columns.uuids.flags.tolist() == [one.flags for one in found]


def test_random_uuids_of_version_1_are_mostly_told_apart() -> None:
    """Publishers write three flags of 1024, so one of some hundred foreign values looks like ours."""
    rng = random.Random(4)
    looks_ours = sum(
        parse_uuid(stdlib_uuid.uuid1(rng.getrandbits(48), rng.getrandbits(14)).bytes).flags
        <= ACK_TXN
        for _ in range(2000)
    )
    assert looks_ours < 20
