"""Types of messages: where they keep their UUID, and what acknowledges them."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gazette.consumer.declare.source import Source
from gazette.errors import Invalid, InvalidValue
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.codec import has_validate
from gazette.message.framing.framing import framing_of
from gazette.message.message import Acknowledgement, CSVRecord, Message
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    NIL_UUID,
    Clock,
    UuidMint,
    build_uuid,
    clock_at,
    parse_uuid,
    uuid_text,
)
from gazette.protocol.pb import broker_pb2
from tests.facts import raises

START = clock_at(1_700_000_000 * 10**9)
PRODUCER = b"\x01abcde"
ACK = build_uuid(PRODUCER, START, ACK_TXN)


def proto_class(uuid_type: int, name: str = "Counted", n_label: int = 1) -> Any:
    """Return a class with the fields ``uuid`` and ``n``; with label 2, ``n`` is required."""
    file = descriptor_pb2.FileDescriptorProto(name=f"m{uuid_type}.proto", package=f"m{uuid_type}")
    message = file.message_type.add(name=name)
    message.field.add(name="uuid", number=1, type=uuid_type, label=1)
    message.field.add(name="n", number=2, type=4, label=n_label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"m{uuid_type}.{name}"))


Counted = proto_class(12)
Strict = proto_class(12, "Strict", n_label=2)


class Word(Message):
    word: str


class GoWord(msgspec.Struct, rename="pascal"):
    word: str
    uuid: str = msgspec.field(default="", name="UUID")


class FrozenWord(msgspec.Struct, frozen=True):
    word: str
    uuid: str = ""


class ObjectWord(msgspec.Struct):
    word: str
    uuid: UUID | None = None


class BytesWord(msgspec.Struct):
    word: str
    uuid: bytes = b""


class ArrayWord(msgspec.Struct, array_like=True, tag=True):
    uuid: str
    word: str
    count: int = 3


@dataclasses.dataclass
class DataWord:
    word: str
    uuid: str | None = None


@dataclasses.dataclass(frozen=True)
class FrozenDataWord:
    word: str
    uuid: str = ""


class ModelWord(pydantic.BaseModel):
    word: str
    uuid: str = ""


class ModelUuidWord(pydantic.BaseModel, frozen=True):
    word: str
    uuid: UUID | None = pydantic.Field(None, alias="UUID")


class Own:
    """A type that brings its codec, here that of another."""

    @classmethod
    def gazette_codec(cls, content_type: str) -> Any:
        return framing_of(content_type, Word).codec


def mint() -> UuidMint:
    return UuidMint(PRODUCER, Clock(START - 160))


CASES = [
    (Word("w"), CONTENT_JSON_LINES),
    (GoWord("w"), CONTENT_JSON_LINES),
    (FrozenWord("w"), CONTENT_JSON_LINES),
    (ObjectWord("w"), CONTENT_JSON_LINES),
    (ArrayWord("", "w"), CONTENT_JSON_LINES),
    (DataWord("w"), CONTENT_JSON_LINES),
    (FrozenDataWord("w"), CONTENT_JSON_LINES),
    (ModelWord(word="w"), CONTENT_JSON_LINES),
    (ModelUuidWord(word="w", UUID=None), CONTENT_JSON_LINES),
    ({"word": "w"}, CONTENT_JSON_LINES),
    (Counted(n=7), CONTENT_PROTO_FIXED),
    (Strict(n=7), CONTENT_PROTO_FIXED),
    (CSVRecord(["", "w", "x"]), CONTENT_CSV),
]
IDS = [f"{type(message).__name__}" for message, _ in CASES]


@pytest.mark.parametrize(("message", "content_type"), CASES, ids=IDS)
def test_a_published_message_is_read_with_its_uuid(message: Any, content_type: str) -> None:
    framing = framing_of(content_type, type(message))
    stamped = framing.codec.stamp(message, mint(), CONTINUE_TXN)
    frames = framing.decode(framing.encode(stamped), 100)
    assert frames.messages == [stamped]
    assert frames.begins == [100]
    assert parse_uuid(frames.uuids) == (PRODUCER, START, CONTINUE_TXN)


@pytest.mark.parametrize(("message", "content_type"), CASES, ids=IDS)
def test_its_acknowledgement_is_read_beside_it(message: Any, content_type: str) -> None:
    framing = framing_of(content_type, type(message))
    codec = framing.codec
    stamped = codec.stamp(message, mint(), CONTINUE_TXN)
    intent = framing.frame(codec.acknowledgement(stamped, "a/journal")(ACK))
    buffer = framing.encode(stamped) + intent + framing.encode(stamped)
    frames = framing.decode(buffer, 0)
    assert frames.consumed == len(buffer)
    assert frames.uuids[16:32] == ACK
    assert frames.messages[::2] == [stamped, stamped]


def test_a_message_that_lacks_a_required_field_is_refused() -> None:
    framing = framing_of(CONTENT_PROTO_FIXED, Strict)
    buffer = bytearray()
    with raises(InvalidValue, says="missing required fields: n"):
        framing.encode_into(Strict(), buffer)
    assert not buffer


def test_text_is_the_canonical_one_under_the_name_of_the_type() -> None:
    message = GoWord("w")
    framing = framing_of(CONTENT_JSON_LINES, GoWord)
    framing.codec.stamp(message, mint(), CONTINUE_TXN)
    text = uuid_text(build_uuid(PRODUCER, START, CONTINUE_TXN))
    assert message.uuid == text
    assert json.loads(framing.encode(message)) == {"Word": "w", "UUID": text}
    intent = framing.codec.acknowledgement(message, "a/journal")(ACK)
    assert json.loads(intent) == {"Word": "", "UUID": uuid_text(ACK)}


class OptionalBytesWord(msgspec.Struct):
    uuid: bytes | None = None


class AliasedBytesWord(msgspec.Struct):
    uuid: bytes = msgspec.field(default=b"", name="UUID")


class Meta(msgspec.Struct):
    uuid: bytes = b""


class NestedBytesWord(msgspec.Struct):
    gazette_uuid: ClassVar[str] = "meta.uuid"

    meta: Meta | None = None


class ModelMeta(pydantic.BaseModel):
    uuid: bytes = b""


class NestedModelWord(pydantic.BaseModel):
    gazette_uuid: ClassVar[str] = "meta.uuid"

    meta: ModelMeta | None = None


class ModelBytesWord(pydantic.BaseModel):
    uuid: bytes | None = None


@dataclasses.dataclass
class DataBytesWord:
    uuid: bytes = b""


@pytest.mark.parametrize(
    ("message_type", "place"),
    [
        (BytesWord, "uuid"),
        (OptionalBytesWord, "uuid"),
        (AliasedBytesWord, "uuid"),
        (NestedBytesWord, "meta.uuid"),
        (ModelBytesWord, "uuid"),
        (NestedModelWord, "meta.uuid"),
        (DataBytesWord, "uuid"),
    ],
)
def test_bytes_are_no_uuid_in_json(message_type: Any, place: str) -> None:
    """Base64 would stand there, which readers without the type take for no UUID."""
    with raises(Invalid, path=place, advises="uuid.UUID"):
        framing_of(CONTENT_JSON_LINES, message_type)
    with raises(Invalid, path="Source('words').message_type", advises="uuid.UUID"):
        Source("words", message_type)


def test_other_bytes_of_a_message_are_base64() -> None:
    """Only the place of the UUID is refused."""

    class Blob(msgspec.Struct):
        data: bytes
        uuid: str = ""

    codec = framing_of(CONTENT_JSON_LINES, Blob).codec
    assert codec.decode(codec.encode(Blob(b"\xff"))) == Blob(b"\xff")


@pytest.mark.parametrize(
    ("message", "content_type"),
    [
        (Word("w"), CONTENT_JSON_LINES),
        (ObjectWord("w"), CONTENT_JSON_LINES),
        (DataWord("w"), CONTENT_JSON_LINES),
        ({"word": "w"}, CONTENT_JSON_LINES),
        (Counted(n=7), CONTENT_PROTO_FIXED),
    ],
)
def test_no_uuid_is_the_nil_uuid(message: Any, content_type: str) -> None:
    framing = framing_of(content_type, type(message))
    assert framing.decode(framing.encode(message), 0).uuids == NIL_UUID


def test_frozen_messages_are_copied() -> None:
    message = FrozenWord("w")
    stamped = framing_of(CONTENT_JSON_LINES, FrozenWord).codec.stamp(message, mint(), 0)
    assert (message.uuid, stamped.word) == ("", "w")
    assert stamped.uuid


class Mood(Enum):
    GOOD = "good"


class Pair(NamedTuple):
    left: int
    right: str


class Typed(TypedDict):
    known: bool


class Inner(msgspec.Struct, tag="inner"):
    number: int


class Everything(Message, kw_only=True):
    flag: bool
    number: float
    text: str
    blob: bytes
    when: datetime
    price: Decimal
    many: list[int]
    some: tuple[int, str]
    pair: Pair
    typed: Typed
    mood: Mood
    which: Literal["b", "a"]
    inner: Inner
    maybe: Inner | None
    named: dict[str, int]
    renamed: int = msgspec.field(name="Renamed", default=3)


def test_an_acknowledgement_has_whatever_its_type_requires() -> None:
    message = Everything(
        flag=True,
        number=1.5,
        text="t",
        blob=b"b",
        when=datetime(2024, 1, 1, tzinfo=UTC),
        price=Decimal("1.5"),
        many=[1],
        some=(1, "s"),
        pair=Pair(1, "r"),
        typed={"known": True},
        mood=Mood.GOOD,
        which="a",
        inner=Inner(1),
        maybe=Inner(1),
        named={"a": 1},
    )
    framing = framing_of(CONTENT_JSON_LINES, Everything)
    intent = framing.frame(framing.codec.acknowledgement(message, "a/journal")(ACK))
    (empty,) = framing.decode(intent, 0).messages
    assert isinstance(empty, Everything)
    assert (empty.mood, empty.which, empty.maybe, empty.inner) == (Mood.GOOD, "a", None, Inner(0))
    assert (empty.some, empty.pair, empty.typed) == ((0, ""), Pair(0, ""), {"known": False})


class Constrained(Message):
    positive: Annotated[int, msgspec.Meta(gt=0)]


class ConstrainedArray(msgspec.Struct, array_like=True):
    uuid: str
    positive: Annotated[int, msgspec.Meta(gt=0)]


class Hooked(Message):
    positive: Annotated[int, msgspec.Meta(gt=0)]

    def new_acknowledgement(self, journal: str) -> Hooked:
        return Hooked(len(journal))


@pytest.mark.parametrize(
    ("message", "other"),
    [(Constrained(4), Constrained(5)), (ModelWord(word="w"), ModelWord(word="x"))],
)
def test_an_acknowledgement_that_its_type_refuses_is_only_a_uuid(message: Any, other: Any) -> None:
    framing = framing_of(CONTENT_JSON_LINES, type(message))
    intent = framing.frame(framing.codec.acknowledgement(message, "a/journal")(ACK))
    if isinstance(message, Constrained):
        assert json.loads(intent) == {"uuid": uuid_text(ACK)}
    buffer = framing.encode(message) + intent + framing.encode(other)
    frames = framing.decode(buffer, 0)
    first, ack, last = frames.messages
    assert (first, last) == (message, other)
    assert isinstance(ack, Acknowledgement)
    assert frames.uuids == NIL_UUID + ACK + NIL_UUID


def test_a_type_may_make_its_own_acknowledgement() -> None:
    framing = framing_of(CONTENT_JSON_LINES, Hooked)
    payload = framing.codec.acknowledgement(Hooked(4), "a/journal")(ACK)
    assert framing.codec.decode(payload) == Hooked(9, uuid=uuid_text(ACK))


def test_an_array_that_cannot_be_empty_must() -> None:
    framing = framing_of(CONTENT_JSON_LINES, ConstrainedArray)
    with pytest.raises(Invalid) as caught:
        framing.codec.acknowledgement(ConstrainedArray("", 4), "a/journal")
    assert "new_acknowledgement" in caught.value.hint


class Added(Message, tag=True):
    n: int


class Removed(Message, tag=True):
    n: int


class Untold(msgspec.Struct, tag=True):
    n: int
    uuid: str = msgspec.field(default="", name="id")


def test_a_journal_may_hold_several_types() -> None:
    framing = framing_of(CONTENT_JSON_LINES, Added | Removed)
    publish = framing_of(CONTENT_JSON_LINES, Removed)
    buffer = publish.encode(Removed(3)) + publish.frame(
        publish.codec.acknowledgement(Removed(3), "a/journal")(ACK)
    )
    frames = framing.decode(buffer, 0)
    assert frames.messages == [Removed(3), Removed(0, uuid=uuid_text(ACK))]
    with raises(Invalid, path="uuid"):
        framing_of(CONTENT_JSON_LINES, Added | Untold)


class NoUuid(msgspec.Struct):
    n: int


def test_types_without_a_uuid_take_no_part_in_transactions() -> None:
    for message, content_type in ((NoUuid(1), CONTENT_JSON_LINES), (b"raw", CONTENT_PROTO_FIXED)):
        framing = framing_of(content_type, type(message))
        assert framing.codec.stamp(message, mint(), 0) == message
        frames = framing.decode(framing.encode(message), 0)
        assert (frames.messages, frames.uuids) == ([message], b"")
        with raises(Invalid, says="uuid"):
            framing.codec.acknowledgement(message, "a/journal")


def test_raw_messages_are_payloads_of_any_framing() -> None:
    for content_type, payload in (
        (CONTENT_JSON_LINES, b"not json"),
        (CONTENT_PROTO_FIXED, b"any\nthing"),
        (CONTENT_CSV, b'a,"b\nc",d'),
    ):
        framing = framing_of(content_type, bytes)
        buffer = framing.encode(payload) * 3
        frames = framing.decode(buffer, 0)
        assert frames.messages == [payload] * 3
        assert frames.consumed == len(buffer)


class WrongUuid(msgspec.Struct):
    uuid: int


class WrongModel(pydantic.BaseModel):
    uuid: float


@pytest.mark.parametrize(
    ("kind", "content_type", "text"),
    [
        (Word, "application/x-other", "unrecognized content-type"),
        (Word, "", "unrecognized content-type"),
        (Word, CONTENT_PROTO_FIXED, "not a protobuf message class"),
        (Counted, CONTENT_JSON_LINES, "is a protobuf message"),
        (Word, CONTENT_CSV, "cannot be read from CSV"),
        (int, CONTENT_JSON_LINES, "cannot be a message type"),
        (Word | int, CONTENT_JSON_LINES, "cannot be a message type"),
        (WrongUuid, CONTENT_JSON_LINES, "field uuid must be"),
        (WrongModel, CONTENT_JSON_LINES, "field uuid must be"),
        (proto_class(9), CONTENT_PROTO_FIXED, "must be of type bytes"),
    ],
)
def test_types_that_do_not_fit_are_refused_with_advice(
    kind: type[Any], content_type: str, text: str
) -> None:
    with pytest.raises(Invalid, match=text) as caught:
        framing_of(content_type, kind)
    assert caught.value.hint


def test_protobuf_without_uuid_and_own_codecs() -> None:
    assert framing_of(CONTENT_PROTO_FIXED, broker_pb2.Label).codec.form is None
    assert framing_of(CONTENT_JSON_LINES, Own).codec.message_type is Word


class Validated(Message):
    def validate(self) -> None:
        raise ValueError("no")


def test_only_a_method_of_the_type_validates() -> None:
    assert has_validate(Validated)
    assert not has_validate(Word)
    assert not has_validate(ModelWord)
    assert not has_validate(Counted)
