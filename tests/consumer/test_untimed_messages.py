"""Messages without a UUID, of whose clock the application needs the time: errors of these messages alone."""

from __future__ import annotations

import json
import random
import struct
import tempfile
import uuid as foreign
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import (
    Application,
    CSVRecord,
    DeadLetter,
    Envelope,
    EventTime,
    Message,
    PoisonPolicy,
    Publisher,
    UnusableTime,
)
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.framing.framing import FIXED_MAGIC
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from gazette.protocol.journal import JournalSpec
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from tests.consumer.apps import CLOCK, PRODUCER, SOURCE
from tests.facts import raises
from tests.fuzzing import examples

DEAD: Final = "dead/letters"
SCHEMA: Final = "CREATE TABLE IF NOT EXISTS seen (n INTEGER)"


def proto_class(name: str, fields: Sequence[tuple[str, int]]) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=name, syntax="proto3")
    kind = file.message_type.add(name=name)
    for number, (field, type_number) in enumerate(fields, 1):
        kind.field.add(name=field, number=number, type=type_number, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{name}.{name}"))


class Numbered(Message):
    n: int = 0


class Meta(msgspec.Struct):
    id: str = ""


class Placed(msgspec.Struct):
    n: int = 0
    uuid: str = ""
    """A UUID of the producer's own."""
    meta: Meta | None = None


NumberedProto = proto_class("Numbered", [("uuid", 12), ("n", 5)])


class Form(NamedTuple):
    """One way to write messages: ``frame`` takes a number and 16 bytes of a UUID, or nothing."""

    content_type: str
    message_type: Any
    frame: Callable[[int, bytes], bytes]
    number: Callable[[Any], int]
    place: str = "uuid"


def text_of(raw: bytes) -> str:
    return str(foreign.UUID(bytes=raw))


def line(n: int, raw: bytes) -> bytes:
    return json.dumps({"n": n} | ({"uuid": text_of(raw)} if raw else {})).encode() + b"\n"


def placed_line(n: int, raw: bytes) -> bytes:
    meta = {"meta": {"id": text_of(raw)}} if raw else {}
    return json.dumps({"n": n, "uuid": "A-17"} | meta).encode() + b"\n"


def fixed(n: int, raw: bytes) -> bytes:
    payload: bytes = NumberedProto(uuid=raw, n=n).SerializeToString()
    return FIXED_MAGIC + struct.pack("<I", len(payload)) + payload


def row(n: int, raw: bytes) -> bytes:
    """Return a row. An empty text in the place of the UUID does not decode."""
    return f"{text_of(raw or bytes(16))},{n}\n".encode()


FORMS: Final = {
    "csv": Form(CONTENT_CSV, CSVRecord, row, lambda one: int(one[1])),
    "struct": Form(CONTENT_JSON_LINES, Numbered, line, lambda one: one.n),
    "dict": Form(CONTENT_JSON_LINES, dict, line, lambda one: one["n"]),
    "placed": Form(CONTENT_JSON_LINES, Placed, placed_line, lambda one: one.n, "meta.id"),
    "protobuf": Form(CONTENT_PROTO_FIXED, NumberedProto, fixed, lambda one: one.n),
}
NO_UUIDS: Final = (b"", bytes(16), foreign.UUID(int=7, version=4).bytes)
"""None, zeros, and one of other software: all are none of a publisher."""


def uuid_of(clock: int, flags: int = OUTSIDE_TXN) -> bytes:
    return build_uuid(PRODUCER, CLOCK + 160 * clock, flags)


class Timed(Application[Any]):
    """Notes the number of each message in its store, and asks for its time *then*."""

    def __init__(
        self, form: Form, policy: PoisonPolicy | None = None, kind: str = "sqlite"
    ) -> None:
        self.form, self.policy, self.kind = form, policy, kind

    def message_type_of(self, journal: JournalSpec) -> Any:
        return self.form.message_type

    def uuid_place_of(self, journal: JournalSpec) -> str:
        return "" if journal.name == DEAD or self.form.place == "uuid" else self.form.place

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return self.policy

    def new_store(self, shard: Any, recorder: Any) -> Any:
        if self.kind == "json":
            return JSONFileStore(recorder, list[int], list)
        return SQLiteStore(recorder, SCHEMA)

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Any], publisher: Publisher
    ) -> None:
        n = self.form.number(envelope.message)
        if self.kind == "json":
            store.state.append(n)
        else:
            store.execute("INSERT INTO seen VALUES (?)", (n,))
        assert envelope.time.year > 1990


class InBatches(Timed):
    def consume_messages(
        self, shard: Any, store: Any, batch: Sequence[Envelope[Any]], publisher: Publisher
    ) -> None:
        for envelope in batch:
            self.consume_message(shard, store, envelope, publisher)


class Following(Timed):
    event_time: ClassVar[EventTime | None] = EventTime()

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Publisher) -> None:
        pass


class FollowingInBatches(Following, InBatches):
    pass


def seen(driver: AppDriver[Any]) -> list[int]:
    if isinstance(driver.store, JSONFileStore):
        return list(driver.store.state)
    return [n for (n,) in driver.store.query("SELECT n FROM seen ORDER BY rowid")]


def driven(application: Timed, directory: Path) -> AppDriver[Any]:
    types = {SOURCE: application.form.content_type}
    return AppDriver(application, directory, [SOURCE], content_types=types)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.sampled_from([Timed, InBatches, Following, FollowingInBatches]),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_messages_without_a_uuid_are_skipped_wherever_they_stand(
    name: str, cls: type[Timed], malformed_only: bool, seed: int
) -> None:
    """Check what is consumed, what is skipped and the offsets, over transactions and crashes."""
    rng, form = random.Random(seed), FORMS[name]
    # What an application without event time did before it asked is undone by a savepoint.
    malformed_only = malformed_only and issubclass(cls, Following)
    policy = PoisonPolicy(DEAD, malformed_only=malformed_only, errors=(KeyError,))
    kind = rng.choice(["json", "sqlite"]) if malformed_only else "sqlite"
    good: list[int] = []
    bad: list[bytes] = []
    waiting: list[int] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        driven(cls(form, policy, kind), Path(directory)) as driver,
    ):
        clock = 0
        for _ in range(rng.randrange(1, 4)):
            for _ in range(rng.randrange(1, 30)):
                clock += 1
                match rng.choice(["none", "none", "outside", "outside", "within", "ack", "again"]):
                    case "none":
                        bad.append(form.frame(clock, rng.choice(NO_UUIDS)))
                        driver.feed(SOURCE, bad[-1])
                    case "within":
                        waiting.append(clock)
                        driver.feed(SOURCE, form.frame(clock, uuid_of(clock, CONTINUE_TXN)))
                    case "ack":
                        good, waiting = good + waiting, []
                        driver.feed(SOURCE, form.frame(0, uuid_of(clock, ACK_TXN)))
                    case "again":
                        driver.feed(SOURCE, form.frame(99, uuid_of(0)))
                    case _ if not waiting:
                        good.append(clock)
                        driver.feed(SOURCE, form.frame(clock, uuid_of(clock)))
            driver.run()
            if rng.random() < 0.5:
                driver.crash()
        good, waiting = good + waiting, []
        driver.feed(SOURCE, form.frame(0, uuid_of(clock + 1, ACK_TXN)))
        driver.run()
        found = [n for n in seen(driver) if n != 99]
        letters = driver.committed(DEAD, DeadLetter)
        content = driver.journals.content(SOURCE)
        assert found == good
        assert [one.raw for one in letters] == bad
        assert [content[one.begin : one.end] for one in letters] == bad
        assert {(one.reason, one.message_uuid, one.journal) for one in letters} <= {
            ("time", "", SOURCE)
        }
        assert driver.read_through == {SOURCE: len(content)}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("cls", [Timed, InBatches, Following, FollowingInBatches])
@pytest.mark.parametrize("missing", NO_UUIDS, ids=["absent", "zeros", "foreign"])
def test_without_a_policy_the_error_names_the_message(
    tmp_path: Path, name: str, cls: type[Timed], missing: bytes
) -> None:
    form = FORMS[name]
    before, it = form.frame(1, uuid_of(1)), form.frame(2, missing)
    facts = {"field": form.place} if issubclass(cls, Following) else {}
    with driven(cls(form), tmp_path) as driver:
        driver.feed(SOURCE, before)
        driver.run()
        driver.feed(SOURCE, it + form.frame(3, uuid_of(3)))
        begin, end = len(before), len(before + it)
        with raises(
            UnusableTime, journal=SOURCE, begin=begin, end=end, advises="poison_policy", **facts
        ):
            driver.run()


def test_malformed_only_cannot_undo_what_an_application_did_before_it_asked(tmp_path: Path) -> None:
    """Fail: without event time, the runtime does not know that the application needs the time."""
    form = FORMS["struct"]
    policy = PoisonPolicy(DEAD, malformed_only=True)
    with driven(Timed(form, policy, "json"), tmp_path) as driver:
        driver.feed(SOURCE, form.frame(1, b""))
        with raises(UnusableTime, journal=SOURCE, begin=0):
            driver.run()


class Bare(msgspec.Struct):
    n: int = 0


class Untimed(Following):
    """Has event time, and messages of a type that has no UUIDs. It asks some for their time."""

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        store.execute("INSERT INTO seen VALUES (?)", (envelope.message.n,))
        assert envelope.message.n < 2 or envelope.time


BARE: Final = Form(CONTENT_JSON_LINES, Bare, line, lambda one: one.n)


def test_messages_of_a_type_without_uuids_need_none_until_they_are_asked(tmp_path: Path) -> None:
    with driven(Untimed(BARE, PoisonPolicy(DEAD)), tmp_path) as driver:
        driver.feed(SOURCE, line(0, b"") + line(1, b"") + line(2, b"") + line(1, b""))
        driver.run()
        assert seen(driver) == [0, 1, 1]
        assert [one.raw for one in driver.committed(DEAD, DeadLetter)] == [line(2, b"")]
