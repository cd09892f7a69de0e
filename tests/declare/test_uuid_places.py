"""A declared place of UUIDs holds in shards, for publishers by label, and when it is applied again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from gazette import Application, Message, Output, Source
from gazette.consumer.declare.changes import changes_of
from gazette.consumer.declare.declaration import Declaration, declaration_of
from gazette.consumer.declare.specs import SpecSettings, journal_specs
from gazette.errors import Invalid, NotAllowed
from gazette.labels import MESSAGE_TYPE, MESSAGE_UUID
from gazette.message.mapping import Partition, Partitions
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.stores.json_file import JSONFileStore
from gazette.testing.app_driver import AppDriver
from tests.facts import raises

PLACE = "_meta.uuid"
RANDOM = "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"
SETTINGS = SpecSettings(stores=("s3://bucket/prefix/",))


class Meta(msgspec.Struct):
    uuid: str = ""


class Order(msgspec.Struct):
    """Its field ``uuid`` is the user's own."""

    uuid: str = ""
    meta: Meta | None = msgspec.field(default=None, name="_meta")


class Marked(msgspec.Struct):
    gazette_uuid: ClassVar[str] = PLACE
    uuid: int = 0
    meta: Meta | None = msgspec.field(default=None, name="_meta")


class Renamed(msgspec.Struct):
    uuid: str = msgspec.field(default="", name="UUID")


class Bare(Message):
    n: int = 0


class Copy(Application[Any]):
    orders = Source("orders", Order, uuid=PLACE)
    copies = Output("copies", Order, uuid=PLACE)

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return JSONFileStore(recorder, dict[str, int], dict)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        uuid = envelope.message.uuid
        store.state[uuid] = store.state.get(uuid, 0) + 1
        publisher.publish_uncommitted(self.copies.mapping(), envelope.message)


def test_a_shard_reads_and_publishes_by_the_declared_place(tmp_path: Path) -> None:
    source, out = Copy.orders.journals[0], Copy.copies.journals[0]
    with AppDriver(Copy(), sources=[source], directory=tmp_path) as driver:
        driver.publish(source, Order(RANDOM))
        driver.publish_pending(source, Order("A-17"))
        driver.run()
        assert driver.store.state == {RANDOM: 1}
        driver.acknowledge()
        driver.run()
        # Lines as other software wrote them, which no publisher touched.
        driver.feed(source, b'{"uuid":"%s"}\n' % RANDOM.encode() * 2)
        driver.run()
        assert driver.store.state == {RANDOM: 3, "A-17": 1}
        copies = driver.committed(out, Order)
        assert [one.uuid for one in copies] == [RANDOM, "A-17", RANDOM, RANDOM]
        assert len({one.meta.uuid for one in copies}) == 4


def declared(**attributes: Any) -> Declaration:
    kind: Any = type("Shop", (Copy,), {"orders": 1, "copies": 1, **attributes})
    return declaration_of(kind())


def labels_of(declaration: Declaration) -> set[str]:
    specs = journal_specs(declaration, SETTINGS)
    return {spec.labels.value_of(MESSAGE_UUID) or "" for spec in specs}


@pytest.mark.parametrize(
    ("source", "label"),
    [
        (Source("a", Order, uuid=PLACE), PLACE),
        (Source("a", Marked), PLACE),
        (Source("a", Renamed), "UUID"),
        (Source("a", Bare), ""),
        (Source("a", Bare, uuid="uuid"), ""),
    ],
)
def test_journals_of_a_declaration_have_the_place_as_their_label(source: Any, label: str) -> None:
    assert labels_of(declared(a=source)) == {label}


def test_a_place_that_cannot_be_is_refused_where_it_is_declared() -> None:
    with raises(Invalid, path="Source('a').uuid", says="_meta"):
        Source("a", Bare, uuid=PLACE)
    with raises(Invalid, path="Output('a').uuid"):
        Output("a", Marked, uuid="uuid")
    with raises(Invalid, path="Source('a').uuid"):
        Source("a", Order, uuid="a..b")

    class Odd(msgspec.Struct):
        uuid: str = msgspec.field(default="", name="a b")

    with raises(Invalid, path="Source('a').uuid.Value", says="a b"):
        declared(a=Source("a", Odd, uuid="a b"))
    with raises(Invalid, says="uuid"):
        declared(a=Source("a", Order, uuid=PLACE), b=Output("a", Order))


@dataclass(frozen=True)
class Listed:
    spec: Any
    mod_revision: int = 7


def existing(declaration: Declaration, *labels: tuple[str, str]) -> Sequence[Listed]:
    """Return the journals that a declaration made, with these labels in place of its own."""
    return [
        Listed(replace(spec, labels=LabelSet.of(*labels)) if labels else spec)
        for spec in journal_specs(declaration, SETTINGS)
    ]


CONTENT = ("content-type", "application/x-ndjson")
TYPE = (MESSAGE_TYPE, "Order")


@pytest.mark.parametrize(
    ("labels", "source"),
    [
        ([CONTENT, TYPE], Source("a", Order, uuid=PLACE)),
        ([CONTENT, TYPE], Source("a", Marked)),
        ([CONTENT, TYPE, (MESSAGE_UUID, "id")], Source("a", Order, uuid=PLACE)),
        ([CONTENT, TYPE, (MESSAGE_UUID, PLACE)], Source("a", Bare)),
    ],
)
def test_another_place_than_that_of_messages_that_are_there_is_refused(
    labels: list[tuple[str, str]], source: Any
) -> None:
    declaration = declared(a=source)
    with raises(NotAllowed, says="a/part-000", advises=MESSAGE_UUID):
        changes_of(declaration, SETTINGS, existing(declaration, *labels), [])


@pytest.mark.parametrize(
    ("labels", "source", "changed"),
    [
        ([CONTENT], Source("a", Order, uuid=PLACE), True),
        ([CONTENT, TYPE, (MESSAGE_UUID, PLACE)], Source("a", Order, uuid=PLACE), False),
        ([CONTENT, (MESSAGE_TYPE, "Renamed")], Source("a", Renamed), True),
        ([CONTENT, (MESSAGE_TYPE, "Bare")], Source("a", Bare), False),
    ],
)
def test_the_same_place_is_applied(
    labels: list[tuple[str, str]], source: Any, changed: bool
) -> None:
    declaration = declared(a=source)
    changes = changes_of(declaration, SETTINGS, existing(declaration, *labels), [])
    own = [one for one in changes.journals if one.spec.name == "a/part-000"]
    found = {one.spec.labels.value_of(MESSAGE_UUID) for one in own}
    assert found == ({declaration.sources[0].uuid} if changed else set())


def test_an_output_goes_by_its_declaration_and_notices_another_label() -> None:
    there = Partitions([Partition("copies/part-000", CONTENT[1])])
    assert Copy.copies.mapping(lambda: there)(Order()).uuid == PLACE
    other = Partitions([Partition("copies/part-000", CONTENT[1], uuid="id")])
    with raises(Invalid, path="uuid", says=PLACE):
        Copy.copies.mapping(lambda: other)(Order())


def test_partitions_have_the_place_of_their_labels() -> None:
    spec = JournalSpec("a/b", 1, LabelSet.of(CONTENT, (MESSAGE_UUID, PLACE)))
    assert Partitions.of_specs([spec]).all[0].uuid == PLACE
