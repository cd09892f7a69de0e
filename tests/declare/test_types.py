"""Types of declarations: a journal gets messages of its declared types, by every publisher."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
import pytest
from word_count import ngram_pb2

from gazette import Application, CSVRecord, Message, Output, Source
from gazette.client.append.appender import AppendParams
from gazette.consumer.declare.declaration import declaration_of, message_type_label
from gazette.errors import GazetteError, Invalid
from gazette.message.codec import MsgspecCodec
from gazette.message.mapping import Mapping, Partition, Partitions, fixed_mapping
from gazette.message.publisher import Appends, Publisher
from gazette.message.publishing.outputs import KnownOutput, choice_by_labels
from gazette.protocol.journal import JournalSpec
from gazette.runtime.tasks import resolved
from gazette.stores.json_file import JSONFileStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.clock import ManualClock
from tests.facts import raises

T = TypeVar("T")


class B(Message):
    n: int = 0


class C(Message):
    z: int = 0


class Same(B):
    """Adds nothing."""


class More(B):
    more: str = ""


class Put(Message, tag=True):
    n: int = 0


class Delete(Message, tag=True):
    n: int = 0


class Box(Message, Generic[T]):
    n: T


@dataclass
class Plain:
    n: int = 0
    uuid: str = ""


class Row(CSVRecord):
    pass


class Own(msgspec.Struct):
    """Has a codec of its own, which decides what it decodes to."""

    n: int = 0
    uuid: str = ""

    @classmethod
    def gazette_codec(cls, content_type: str) -> MsgspecCodec[Any]:
        return MsgspecCodec(cls)


class OwnMore(Own):
    pass


MESSAGES: list[Any] = [
    B(),
    C(),
    Same(),
    More(),
    Put(),
    Delete(),
    Box(n=1),
    Plain(),
    Row(["", "1"]),
    CSVRecord(["", "1"]),
    ngram_pb2.NGramCount(),
    Own(),
    OwnMore(),
    {"n": 1},
    7,
    "text",
    None,
]
DECLARED: list[tuple[Output[Any], set[type]]] = [
    (Output("out", B), {B}),
    (Output("out", B, key="n"), {B}),
    (Output("out", B, key=lambda message: str(message.n), partitions=3), {B}),
    (Output("out", C, key="z"), {C}),
    (Output("out", More, key="more"), {More}),
    (Output[Put | Delete]("out", Put | Delete, key="n"), {Put, Delete}),
    (Output("out", Box[int], key="n"), {Box}),
    (Output("out", Plain, key="n", partitions=2), {Plain}),
    (Output("out", Row, key=lambda message: message[1]), {Row}),
    (Output("out", CSVRecord), {CSVRecord}),
    (Output("out", ngram_pb2.NGramCount), {ngram_pb2.NGramCount}),
    (Output("out", Own), {Own, OwnMore}),
]


class Kept:
    """Appends that are kept in memory."""

    must_wait = False

    def __init__(self) -> None:
        self.journals: defaultdict[str, bytearray] = defaultdict(bytearray)

    def journal(self, params: AppendParams) -> _KeptJournal:
        return _KeptJournal(self.journals[params.journal])


class _KeptJournal:
    must_wait = False

    def __init__(self, content: bytearray) -> None:
        self.content = content

    def enqueue(self, content: bytearray) -> Any:
        self.content += content
        return resolved(None)

    def in_place(self, write: Any, item: Any, flags: int, length_max: int) -> Any:
        write(item, flags, self.content)
        return resolved(None)

    def await_room(self) -> None:
        pass


def _same(partitions: Partitions) -> Partitions:
    return partitions


def _uncommitted(publisher: Publisher, mapping: Mapping[Any], message: Any) -> None:
    publisher.publish_uncommitted(mapping, message)
    publisher.build_ack_intents()


def _within_a_batch(publisher: Publisher, mapping: Mapping[Any], message: Any) -> None:
    publisher.publish_committed_batch(mapping, [message])


def known_output(partition: Partition, message_types: dict[str, str]) -> KnownOutput:
    partitions = Partitions([partition])
    choose = choice_by_labels(lambda: partitions, "modulo", random.Random(1))
    return KnownOutput(lambda: partitions, message_types, choose)


def _as_a_client(publisher: Publisher, mapping: Mapping[Any], message: Any) -> None:
    """Publish as publishers of programs that are no shards do."""
    partition = mapping(message)
    known = known_output(partition, {})
    publisher.publish_committed(fixed_mapping(*known.partition_of(message, None)), message)


WAYS: list[Callable[[Publisher, Mapping[Any], Any], Any]] = [
    Publisher.publish_committed,
    _uncommitted,
    _within_a_batch,
    _as_a_client,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("found", [False, True], ids=["declared partitions", "found partitions"])
def test_only_messages_of_the_declared_types_are_written(
    way: Callable[[Publisher, Mapping[Any], Any], Any], found: bool
) -> None:
    """Each type by each publisher: written if it is declared, and else refused before a byte is."""
    for output, accepted in DECLARED:
        there = Partitions(Partition(name, output.content_type) for name in output.journals)
        mapping = output.mapping(partial(_same, there) if found else None)
        for message in MESSAGES:
            kept = Kept()
            publisher = Publisher.standalone(
                cast(Appends, kept), ManualClock(1_700_000_000.0), random.Random(1)
            )
            if type(message) in accepted:
                way(publisher, mapping, message)
                assert len(kept.journals) == 1
                assert all(kept.journals.values())
                continue
            with pytest.raises(GazetteError) as raised:
                way(publisher, mapping, message)
            assert isinstance(raised.value, Invalid), (output, message, raised.value)
            assert raised.value.path == "message"
            assert type(message).__qualname__ in raised.value.message
            assert all(one.__qualname__ in raised.value.message for one in output.message_types)
            assert "out" in raised.value.message
            assert not any(kept.journals.values())


class Mixed(Application[JSONFileStore[list[Any]]]):
    """Publishes the wrong message, as an application may do by mistake."""

    ins = Source("ins", B, key="n")
    outs = Output("outs", B, key="n")

    def new_store(self, shard: Any, recorder: Any) -> JSONFileStore[list[Any]]:
        return JSONFileStore(recorder, list[Any], list)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        message: Any = envelope.message if envelope.message.n else C(z=5)
        publisher.publish_uncommitted(self.outs.mapping(), message)


def test_an_application_that_publishes_another_type_fails_and_writes_nothing(
    tmp_path: Path,
) -> None:
    driver = AppDriver(Mixed(), tmp_path, sources=["ins/part-000"])
    driver.publish("ins/part-000", B(n=1))
    driver.run()
    driver.publish("ins/part-000", B(n=0))
    with raises(Invalid, path="message", says="C"):
        driver.run()
    assert [one.n for one in driver.committed("outs/part-000", B)] == [1]


def test_a_subclass_that_adds_fields_is_named_in_the_advice() -> None:
    mapping: Mapping[Any] = Output("out", B, key="n").mapping()
    publisher = Publisher.standalone(cast(Appends, Kept()), ManualClock(1.0), random.Random(1))
    with raises(Invalid, path="message", says="not More", advises="subclass"):
        publisher.publish_committed(mapping, More(n=1, more="x"))


@pytest.mark.parametrize("kind", [dict, dict[str, Any], dict[str, int]])
def test_a_dict_is_no_type_of_a_source(kind: Any) -> None:
    for declared in (Source, Output):
        with raises(Invalid, path=f"{declared.__name__}('rows').message_type", advises="class Row"):
            declared("rows", kind)


def test_a_union_is_declared_by_its_members() -> None:
    class Both(Mixed):
        ins = Source[Put | Delete]("ins", Put | Delete, key="n")  # type: ignore[assignment]

    assert [one.message_type for one in declaration_of(Both()).sources] == ["Put+Delete"]
    assert message_type_label(Both.ins) == "Put+Delete"
    known = known_output(Partition("ins", Both.ins.content_type), {"ins": "Put+Delete"})
    assert known.partition_of(Delete(), None).journal == "ins"
    with raises(Invalid, path="message", says="not B"):
        known.partition_of(B(), None)
    with raises(Invalid, path="Source('ins').key", says="no field"):
        Source("ins", Put | Delete, key="x")


def test_type_checkers_know_the_type_of_an_output() -> None:
    """Without an error of mypy, the ignores here would be unused, which is an error too."""
    publisher = Publisher.standalone(cast(Appends, Kept()), ManualClock(1.0), random.Random(1))
    mapping = Output("out", B).mapping()
    for publish in (publisher.publish_uncommitted, publisher.publish_committed):
        publish(mapping, B())
    with pytest.raises(Invalid):
        publisher.publish_uncommitted(mapping, C())  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        publisher.publish_committed(mapping, 7)  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        publisher.publish_committed_batch(mapping, [C()])  # type: ignore[arg-type]


class Two(Mixed):
    words = Source("words", B)
    message_type = B


@pytest.mark.parametrize("application", [Two, Mixed])
def test_a_shard_of_a_journal_that_is_no_source_is_told_the_sources(
    application: type[Application[Any]], tmp_path: Path
) -> None:
    names = "ins, words" if application is Two else "ins"
    with raises(Invalid, path="sources", says="other/part-000", advises=names, sources=names):
        application().message_type_of(JournalSpec("other/part-000"))
    driver = AppDriver(application(), tmp_path, sources=["ins/part-000", "other/part-000"])
    with raises(Invalid, sources=names, advises=names):
        driver.run()
