"""Publishers of journals with keys: a message goes to the partition of its key, or is refused."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

from gazette import CSVRecord, Message, Output, Source
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.consumer.declare.changes import changes_of
from gazette.consumer.declare.declaration import declaration_of
from gazette.consumer.declare.specs import DEVELOPMENT, partition_specs
from gazette.errors import Invalid
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.key_hash import fnv32a
from gazette.message.key_rule import KeyRule
from gazette.message.mapping import (
    Mapping,
    Partitions,
    PartitionsFunc,
    modulo_mapping,
    random_mapping,
    rendezvous_mapping,
)
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.message.publishing.outputs import choice_by_labels, choice_of_one
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.declare.test_specs import App
from tests.facts import raises
from tests.message.publishing.test_client_publisher import visible

COUNT = 4
WORDS = [f"word-{n}" for n in range(13)]


class Word(Message):
    word: str


class Number(Message):
    n: float


class Silent(Message):
    text: str


@dataclass
class Row:
    word: str
    uuid: str = ""


class Model(pydantic.BaseModel):
    id: str = pydantic.Field(alias="word")
    uuid: str = ""


SOURCE = Source("words", Word, partitions=COUNT, key="word")
EVERY = SOURCE.selector


def part(word: str) -> str:
    return f"words/part-{fnv32a(word.encode()) % COUNT:03d}"


def specs_of(declared: Any) -> list[JournalSpec]:
    """Return the journals as ``apply`` makes them, for a broker of tests."""
    kind: Any = type("Declared", (App,), {"declared": declared})
    declaration = declaration_of(kind())
    found = next(one for one in declaration.journals if one.name == declared.name)
    return [
        journal_spec(spec.name, labels=spec.labels) for spec in partition_specs(found, DEVELOPMENT)
    ]


def partitions_of(declared: Any) -> Partitions:
    return Partitions.of_specs(specs_of(declared))


def itself(partitions: Partitions) -> Partitions:
    return partitions


def word_of(message: Any) -> str:
    word: str = message.word
    return word


def by_word(partitions: PartitionsFunc) -> Mapping[Any]:
    return modulo_mapping(partitions, word_of)


def chosen(partitions: Partitions, message: Any, key: Any = None) -> str:
    choose = choice_by_labels(lambda: partitions, "modulo", random.Random(1))
    return choose(message, key).journal


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(*specs_of(SOURCE))
        yield broker


def test_the_key_is_derived_from_every_kind_of_message() -> None:
    partitions = partitions_of(SOURCE)
    for word in WORDS:
        for message in (Word(word=word), Row(word), Model(word=word), {"word": word}):
            assert chosen(partitions, message) == part(word)
            assert chosen(partitions, message, key=word) == part(word)
    csv = partitions_of(Source("words", CSVRecord, partitions=COUNT, key="1"))
    assert chosen(csv, CSVRecord(["", "word-3", "x"])) == part("word-3")


@pytest.mark.parametrize("value", [7, 7.0, "7", "7.0", True])
def test_a_value_of_json_is_read_as_the_declared_type(value: Any) -> None:
    partitions = partitions_of(Source("words", Number, partitions=COUNT, key="n"))
    expected = part("1" if value is True else "7")
    assert chosen(partitions, {"n": value}) == expected
    assert chosen(partitions, Number(n=7), key="7.00") == part("7")


@pytest.mark.parametrize(
    ("message", "key", "says"),
    [
        ({"text": "x"}, None, "'word'"),
        (Silent(text="x"), None, "'word'"),
        ({"word": None}, None, "None"),
        ({"word": ["x"]}, None, "list"),
        (Word(word="x"), "y", "'y'"),
        (CSVRecord(["", "x"]), None, "'word'"),
        (b"{}\n", None, "bytes"),
    ],
)
def test_a_message_without_its_key_is_refused_by_name(message: Any, key: Any, says: str) -> None:
    with raises(Invalid, says=says):
        chosen(partitions_of(SOURCE), message, key)


def test_the_key_of_a_function_has_to_be_given() -> None:
    function: Any = lambda message: message.word  # noqa: E731
    partitions = partitions_of(replace(SOURCE, key=function))
    with raises(Invalid, path="key", says="lambda"):
        chosen(partitions, Word(word="x"))
    assert chosen(partitions, Word(word="x"), key="x") == part("x")
    one = partitions_of(Source("words", Word, key=str))
    assert chosen(one, Word(word="x")) == "words/part-000"


def test_all_partitions_of_one_declaration_are_needed() -> None:
    whole = specs_of(SOURCE)
    others = specs_of(replace(SOURCE, name="texts"))
    plain = [journal_spec(f"words/part-{n:03d}") for n in range(COUNT)]
    for specs, says in (
        (whole[1:], "3 of 4"),
        ([*whole, *others], "one declaration"),
        ([*whole[1:], others[0]], "one declaration"),
        ([*whole[1:], plain[0]], "one declaration"),
        ([whole[0], *specs_of(replace(SOURCE, partitions=5))[1:4]], "one declaration"),
    ):
        partitions = Partitions.of_specs(specs)
        with raises(Invalid, path="output", says=says):
            chosen(partitions, Word(word="x"))
        with raises(Invalid, path="output", says=says):
            by_word(partial(itself, partitions))(Word(word="x"))


def test_mappings_of_applications_obey_the_labels() -> None:
    """By name: at random, and by rendezvous, keys would part."""
    partitions = partitions_of(SOURCE)
    assert by_word(lambda: partitions)(Word(word="x")).journal == part("x")
    for mapping in (
        random_mapping(lambda: partitions, random.Random(1)),
        rendezvous_mapping(lambda: partitions, word_of),
        replace(SOURCE, key=None).mapping(lambda: partitions),
    ):
        with raises(Invalid, path="mapping"):
            mapping(Word(word="x"))


def test_a_declaration_is_a_mapping_itself() -> None:
    """So publishers of applications take it as they take its mapping()."""
    for word in WORDS:
        assert SOURCE(Word(word=word)).journal == part(word)
    for declared in (Source("words", Word), Output("words", Word)):
        assert declared(Word(word="x")).journal == "words/part-000"


def test_a_named_partition_takes_only_its_keys() -> None:
    rule = KeyRule.of_labels(specs_of(SOURCE)[2].labels)
    assert rule is not None
    choose = choice_of_one(partitions_of(SOURCE).all[2], rule, 2)
    for word in WORDS:
        if part(word) == "words/part-002":
            assert choose(Word(word=word), None).journal == part(word)
        else:
            with raises(Invalid, path="output", journal="words/part-002", says=part(word)[-1]):
                choose(Word(word=word), None)


def test_labels_that_cannot_be_right_are_refused() -> None:
    for value in ("", "x", "0"):
        labels = LabelSet.of(("app.gazette.dev/message-key", "word"))
        labels = labels.with_value("app.gazette.dev/message-partitions", value)
        with raises(Invalid, path="app.gazette.dev/message-partitions"):
            KeyRule.of_labels(labels)
    unknown = [
        replace(spec, labels=spec.labels.with_value("app.gazette.dev/message-key-type", "later"))
        for spec in specs_of(SOURCE)
    ]
    with raises(Invalid, path="key", says="'later'"):
        chosen(Partitions.of_specs(unknown), Word(word="x"))


async def test_thirteen_messages_arrive_in_the_partitions_of_their_keys(
    broker: BrokerFixture,
) -> None:
    """Whichever output a publisher gives: a selector, a Source, an Output, or names."""
    output = Output("words", Word, partitions=COUNT, key="word")
    async with ClientPublisher(broker.client) as publisher:
        for one in (EVERY, SOURCE, output):
            async with publisher.transaction() as transaction:
                for word in WORDS:
                    await transaction.publish(one, Word(word=word))
        for word in WORDS:
            await publisher.publish(EVERY, {"word": word})
            await publisher.publish(part(word), {"word": word})
        with raises(Invalid, path="output", journal="words/part-001"):
            word = next(word for word in WORDS if part(word) != "words/part-001")
            await publisher.publish("words/part-001", {"word": word})
        with raises(Invalid, path="message", says="Silent"):
            await publisher.publish(SOURCE, Silent(text="x"))
        with raises(Invalid, path="key", says="'other'"):
            await publisher.publish(SOURCE, Word(word="x"), key="other")
    for journal in SOURCE.journals:
        expected = [word for word in WORDS if part(word) == journal] * 3
        expected += [word for word in WORDS if part(word) == journal for _ in range(2)]
        assert await visible(broker, journal) == expected


async def test_a_declaration_that_journals_do_not_have_is_refused(broker: BrokerFixture) -> None:
    async with ClientPublisher(broker.client) as publisher:
        for declared, says in (
            (replace(SOURCE, partitions=5), "4 of 5"),
            (replace(SOURCE, key="uuid"), "'uuid'"),
            (replace(SOURCE, key=None), "no key"),
        ):
            with raises(Invalid, path="output", says=says):
                await publisher.publish(declared, Word(word="x"))
        # Case: a partition is deleted while the publisher is open.
        word = next(word for word in WORDS if part(word) != "words/part-003")
        await publisher.publish(SOURCE, Word(word=word))
        await publisher.publish(EVERY, Word(word=word))
        await broker.client.apply_journals(
            [JournalChange(delete="words/part-003", expect_mod_revision=-1)]
        )
        for output in (SOURCE, EVERY):
            with raises(Invalid, path="output", says="3 of 4"):
                while True:  # Until it has heard of it.
                    await publisher.publish(output, Word(word=word))


def test_journals_without_labels_are_published_to_as_ever() -> None:
    plain = [
        journal_spec(f"words/part-{n:03d}", labels=LabelSet.of((CONTENT_TYPE, kind)))
        for n, kind in enumerate([CONTENT_JSON_LINES, CONTENT_CSV])
    ]
    partitions = Partitions.of_specs(plain)
    assert {chosen(partitions, Word(word=word)) for word in WORDS}
    assert chosen(partitions, Word(word="x"), key="y") == partitions.of_key("y").journal


def test_labels_are_what_apply_made() -> None:
    kind: Any = type("One", (App,), {"words": SOURCE})
    changes = changes_of(declaration_of(kind()), DEVELOPMENT, [], [])
    specs = [
        one.spec for one in changes.journals if EVERY.matches(LabelSet.of(("name", one.spec.name)))
    ]
    assert chosen(Partitions.of_specs(specs), {"word": "x"}) == part("x")
    assert msgspec.json.encode(SOURCE.key_rule)
    assert LabelSelector.parse(f"name:prefix={SOURCE.name}/part-") == EVERY
