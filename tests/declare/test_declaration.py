"""Declarations: what a class says, and each way in which it can be wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gazette import Application, CSVRecord, Message, MessageProducer, Output, Source
from gazette.consumer.declare.declaration import Declaration, declaration_of, message_type_label
from gazette.errors import Invalid
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.mapping import Partition, Partitions
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.stores.json_file import JSONFileStore
from gazette.testing.app_driver import AppDriver


class Word(Message):
    word: str = ""


class User(Message):
    name: str = ""


@dataclass
class Plain:
    uuid: str = ""
    word: str = ""


class Silent(Application[Any]):
    """An application that declares nothing, and does nothing."""

    def new_store(self, shard: Any, recorder: Any) -> Any:
        raise NotImplementedError

    def consume_message(self, *args: Any) -> None:
        raise NotImplementedError


class Two(Silent):
    words = Source("words", Word, partitions=4, key="word")
    users = Source("users", User, partitions=4, key="name")
    counts = Output("counts", Word, key=lambda message: message.word)


def test_a_class_declares_its_attributes() -> None:
    declaration = declaration_of(Two())
    assert [one.name for one in declaration.sources] == ["words", "users"]
    assert [one.name for one in declaration.outputs] == ["counts"]
    assert declaration.shards == 4
    assert declaration.application.endswith("test_declaration.Two")
    assert declaration_of(Two(), name="shop: new").slug == "shop-new"


def test_a_subclass_adds_replaces_and_removes() -> None:
    class Three(Two):
        users = None  # type: ignore[assignment]
        words = Source("texts", Word, partitions=2)
        events = Source("events", Plain, partitions=2)

    assert [one.name for one in declaration_of(Three()).sources] == ["texts", "events"]


def test_partitions_have_names_in_order() -> None:
    source = Source("shop/orders", Word, partitions=1000)
    assert source.journals[0] == "shop/orders/part-000"
    assert list(source.journals) == sorted(source.journals)
    for journal in (source.journals[0], source.journals[-1]):
        named = LabelSet.of(("name", journal))
        assert source.selector.matches(named)
        assert not Source("shop/order", Word).selector.matches(named)


@pytest.mark.parametrize(
    ("kind", "content_type"),
    [
        (Word, CONTENT_JSON_LINES),
        (Plain, CONTENT_JSON_LINES),
        (CSVRecord, CONTENT_CSV),
        (broker_pb2.Label, CONTENT_PROTO_FIXED),
    ],
)
def test_the_framing_follows_from_the_type(kind: Any, content_type: str) -> None:
    assert Source("words", kind).content_type == content_type


def test_labels_name_the_type() -> None:
    assert message_type_label(Source("words", Word)) == "Word"
    assert message_type_label(Source("words", broker_pb2.Label)) == "protocol.Label"


@pytest.mark.parametrize(
    ("change", "says", "hint"),
    [
        ({"name": "a b"}, "name", "'a-b'"),
        ({"name": "words/"}, "name", "'words'"),
        ({"name": "/words"}, "name", "'words'"),
        ({"name": ""}, "name", "such as"),
        ({"name": "words;meta"}, "name", "'words-meta'"),
        ({"name": "recovery/words"}, "recovery logs", "another name"),
        ({"name": 3}, "3 is not text", "such as words"),
        ({"partitions": 0}, "0 partitions", "small multiple"),
        ({"partitions": 1001}, "1 to 1000", "small multiple"),
        ({"partitions": True}, "True partitions", "small multiple"),
        ({"key": "wrod"}, "Word has no field 'wrod'", "'word'"),
        ({"key": "zzz"}, "no field", "Its fields: uuid, word"),
        ({"key": 3}, "3 is no key", "function of the message"),
        ({"message_type": 3}, "message_type", ""),
        ({"message_type": CSVRecord, "content_type": CONTENT_JSON_LINES}, "message_type", ""),
        ({"content_type": "text/plain"}, "text/plain", "application/x-ndjson"),
        ({"retention": 30}, "30 is no positive duration", "timedelta(days=30)"),
        ({"retention": timedelta(0)}, "no positive duration", "None to keep"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_source_is_named(change: dict[str, Any], says: str, hint: str) -> None:
    given: dict[str, Any] = {"name": "words", "message_type": Word, **change}
    with pytest.raises(Invalid) as caught:
        Source(**given)
    assert str(caught.value).startswith(f"Source({given['name']!r})."), caught.value
    assert says in str(caught.value)
    assert hint in caught.value.hint


def _class(**attributes: Any) -> Any:
    return type("App", (Silent,), attributes)


class _Producer(Silent, MessageProducer):
    def start_reading(self, *args: Any) -> None: ...

    def replay(self, *args: Any) -> Any: ...


@pytest.mark.parametrize(
    ("build", "says", "hint"),
    [
        (Silent, "no source is declared", "words = Source("),
        (_Producer, "no source is declared", "as YAML"),
        (
            lambda: _class(a=Source("words", Word), b=Source("words", Word, partitions=2))(),
            "words is declared twice", "Remove one",
        ),
        (
            lambda: _class(a=Source("words", Word, partitions=2), b=Source("users", User))(),
            "words has 2 partitions, and users has 1", "the same number",
        ),
        (
            lambda: _class(a=Source("words", Word), b=Source("words/new", User))(),
            "words/new lies in the directory of words", "words-new",
        ),
        (
            lambda: _class(a=Source("words", Word), b=Output("words", Word, partitions=2))(),
            "a source with partitions 1, and an output with 2", "Declare both alike",
        ),
        (
            lambda: _class(a=Source("words", Word), message_type=User)(),
            "message_type is User, and sources declare Word", "Remove message_type",
        ),
        (
            lambda: _class(a=Source("words", Word), recovery_logs="no")(),
            "'no' is neither True nor False", "recovery_logs = False",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named(
    build: Callable[[], Any], says: str, hint: str
) -> None:
    with pytest.raises(Invalid) as caught:
        declaration_of(build())
    assert says in str(caught.value)
    assert hint in caught.value.hint


def test_a_source_that_is_an_output_too_is_declared_once() -> None:
    source, output = Source("again", Word, key="word"), Output("again", Word, key="word")
    declaration = declaration_of(_class(a=source, b=output, c=output)())
    assert [one.name for one in declaration.journals] == ["again"]
    assert declaration.sources == declaration.outputs
    decoded = msgspec.json.decode(msgspec.json.encode(declaration), type=Declaration)
    assert decoded == declaration


def test_messages_decode_to_the_type_of_their_source() -> None:
    """Without message_type, in an `AppDriver` too. A class that says more is left alone."""
    application = Two()
    for journal, kind in (("words/part-002", Word), ("users", User)):
        assert application.message_type_of(JournalSpec(journal)) is kind

    class Own(Two):
        def message_type_of(self, journal: JournalSpec) -> type[Any]:
            return Plain

    assert Own().message_type_of(JournalSpec("words/part-000")) is Plain


class Names(Application[JSONFileStore[list[str]]]):
    words = Source("words", Word)
    users = Source("users", User)

    def new_store(self, shard: Any, recorder: Any) -> JSONFileStore[list[str]]:
        return JSONFileStore(recorder, list[str], list)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        store.state.append(type(envelope.message).__name__)


def test_the_driver_decodes_each_source_to_its_type(tmp_path: Path) -> None:
    sources = [*Names.words.journals, *Names.users.journals]
    driver = AppDriver(Names(), tmp_path, sources=sources)
    driver.publish(sources[0], Word(word="to"))
    driver.publish(sources[1], User(name="ann"))
    driver.run()
    assert sorted(driver.store.state) == ["User", "Word"]


def test_equal_keys_of_two_sources_meet_in_one_shard() -> None:
    """Partition number N of both is read by shard number N."""

    def partitions_of(source: Source[Any]) -> Partitions:
        return Partitions(Partition(name, CONTENT_JSON_LINES) for name in source.journals)

    words = Two.words.mapping(lambda: partitions_of(Two.words))
    users = Two.users.mapping(lambda: partitions_of(Two.users))
    used = set()
    for number in range(200):
        first = words(Word(word=str(number))).journal
        second = users(User(name=str(number))).journal
        assert first.rpartition("/")[2] == second.rpartition("/")[2]
        used.add(first)
    assert used == set(Two.words.journals)


def test_a_mapping_chooses_among_the_declared_partitions_unless_others_are_given() -> None:
    declared = Two.words.mapping()
    one = Partitions([Partition("words/part-000", CONTENT_JSON_LINES)])
    given = Two.words.mapping(lambda: one)
    messages = [Word(word=str(number)) for number in range(100)]
    assert {declared(message).journal for message in messages} == set(Two.words.journals)
    assert {given(message).journal for message in messages} == {"words/part-000"}


def test_messages_without_a_key_are_spread() -> None:
    source = Source("words", Word, partitions=3)
    partitions = Partitions(Partition(name, CONTENT_JSON_LINES) for name in source.journals)
    mapping = source.mapping(lambda: partitions, random.Random(1))
    assert {mapping(Word()).journal for _ in range(100)} == set(source.journals)
    with pytest.raises(Invalid, match="no key is declared"):
        source.key_of(Word())
