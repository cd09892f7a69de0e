"""What acknowledges a transaction: the same lines, records and frames to readers of each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from word_count import ngram_pb2

import gazette
from gazette import Application, CSVRecord, PoisonPolicy
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.envelope_reader import CommittedReader
from gazette.message.framing.frames import MalformedMessage
from gazette.message.framing.framing import framing_of
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    build_uuid,
    uuid_text,
)
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.stores.json_file import JSONFileStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.stored import write_journal
from tests.facts import raises
from tests.support.instant_clock import InstantClock
from tests.support.stub_broker import StubBroker

JOURNAL, DEAD, STORE = "a/journal", "dead/letters", "file:///fragments/"
ALPHA, BETA = bytes([1, 0, 0, 0, 0, 1]), bytes([1, 0, 0, 0, 0, 2])
ACKNOWLEDGED = build_uuid(ALPHA, 2, ACK_TXN)


class OnlyUuid(msgspec.Struct):
    uuid: str = ""


class Precise(msgspec.Struct):
    uuid: str = ""
    n: float = 0.0


class Whole(msgspec.Struct):
    uuid: str = ""
    n: int = 0
    text: str = ""


@dataclasses.dataclass
class Plain:
    uuid: str = ""
    n: float = 0.0


class Model(pydantic.BaseModel):
    uuid: str = ""
    n: float = 0.0


LINES = [dict, OnlyUuid, Precise, Whole, Plain, Model]
WELL_FORMED = [
    b'{"uuid":"%b"}',
    b' {"text":7, "uuid" : "%b"}\t',
    b'{"uuid":"%b","n":{"deep":[1]}}',
    b'{"uuid":"%b","n":1e999}',
    b'{"uuid":"%b","text":"\xff"}',
    b'{"uuid":"no","uuid":"%b"}',
]
"""JSON by its standard, whatever the type of the messages is."""
DAMAGED = [
    b'{"uuid":"%b"',
    b'{"uuid":"%b",}',
    b'{"uuid":"%b","n":tru}',
    b'{"uuid":"%b","n":NaN}',
    b'{"uuid":"%b","n":-Infinity}',
    b'{"uuid":"%b"} {}',
    b'{"uuid":"%b","text":"\\ud800"}',
    b"{'uuid':'%b'}",
    b'\xef\xbb\xbf{"uuid":"%b"}',
    b'INFO {"uuid":"%b"}',
]
"""Lines that show the UUID of an acknowledgement. Spark reads some of them."""
RECORDS = [(b"%b,", True), (b"%b", False), (b'%b,a"', False), (b"%b,0,0", False)]


def frame_of(payload: bytes) -> bytes:
    return framing_of(CONTENT_PROTO_FIXED, bytes).frame(payload)


def gram(uuid: bytes, count: int = 0) -> bytes:
    return frame_of(ngram_pb2.NGramCount(uuid=uuid, count=count).SerializeToString())


def history_of(content_type: str, acknowledgement: bytes) -> tuple[bytes, bytes]:
    """Return a pending message with the number 1, and what is behind it: a message with 9 is last."""
    pending, later = build_uuid(ALPHA, 1, CONTINUE_TXN), build_uuid(BETA, 1, OUTSIDE_TXN)
    if content_type == CONTENT_PROTO_FIXED:
        return gram(pending, 1), acknowledgement + gram(later, 9)
    form = b'{"uuid":"%b","n":%b}\n' if content_type == CONTENT_JSON_LINES else b"%b,%b\n"
    one, other = (
        form % (uuid_text(uuid).encode(), n) for uuid, n in ((pending, b"1"), (later, b"9"))
    )
    return one, acknowledgement + b"\n" + other


CASES = [
    (CONTENT_JSON_LINES, kind, form % uuid_text(ACKNOWLEDGED).encode(), form in WELL_FORMED)
    for kind in LINES
    for form in (*WELL_FORMED, *DAMAGED)
]
CASES += [
    (CONTENT_CSV, CSVRecord, form % uuid_text(ACKNOWLEDGED).encode(), commits)
    for form, commits in RECORDS
]
CASES += [
    (CONTENT_PROTO_FIXED, ngram_pb2.NGramCount, frame_of(payload), commits)
    for payload, commits in [
        (b"\x0a\x10" + ACKNOWLEDGED, True),
        (b"\x0a\x10" + ACKNOWLEDGED + b"\x12\x01\xff", False),
        (b"\x0a\x10" + ACKNOWLEDGED + b"\x18", False),
        (b"\x12\x7f" + ACKNOWLEDGED, False),
    ]
]


@pytest.fixture
async def broker() -> AsyncIterator[StubBroker]:
    async with StubBroker() as broker:
        yield broker


def label(broker: StubBroker, content_type: str) -> None:
    labels = LabelSet.of((CONTENT_TYPE, content_type))
    spec = JournalSpec(JOURNAL, 1, labels, FragmentSpec(1024, Codec.NONE, (), 10**9, 0, 0, ""))

    def list_journals(_: broker_pb2.ListRequest) -> list[broker_pb2.ListResponse]:
        response = broker_pb2.ListResponse(header=broker.header().to_pb())
        route = broker.route_of(JOURNAL).to_pb()
        response.journals.add(spec=spec.to_pb(), mod_revision=1, create_revision=1, route=route)
        return [response]

    broker.answers["List"] = list_journals


@pytest.mark.parametrize(("content_type", "kind", "line", "commits"), CASES)
async def test_client_readers(
    broker: StubBroker, content_type: str, kind: Any, line: bytes, commits: bool
) -> None:
    """A client's reader delivers what was pending, or passes over the line, or fails there."""
    label(broker, content_type)
    pending, rest = history_of(content_type, line)
    broker.journal(JOURNAL).append(pending + rest)
    async with Client(broker.endpoint, zone="local", clock=InstantClock()) as client:
        malformed: list[MalformedMessage] = []
        reader: Any = CommittedReader(
            client, ReadParams(JOURNAL), kind, on_malformed=malformed.append
        )
        begins = [one.begin async for batch in reader.batches() for one in batch]
        later = len(pending + rest) - len(history_of(content_type, b"")[1].lstrip(b"\n"))
        assert begins == ([0, later] if commits else [later])
        assert [one.begin for one in malformed] == ([] if commits else [len(pending)])
        if not commits:
            strict: Any = CommittedReader(client, ReadParams(JOURNAL), kind)
            with raises(MalformedMessage, journal=JOURNAL, begin=len(pending)):
                async for _ in strict.batches():
                    pass


@pytest.mark.parametrize(("content_type", "kind", "line", "commits"), CASES)
def test_shards(tmp_path: Path, content_type: str, kind: Any, line: bytes, commits: bool) -> None:
    """A shard does the same."""

    class Noting(Application[Any]):
        message_type = kind
        policy: PoisonPolicy | None = None

        def new_store(self, shard: Any, recorder: Any) -> Any:
            return JSONFileStore(recorder, dict, dict[str, int])

        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            begins.append(envelope.begin)

        def poison_policy(self, shard: Any) -> PoisonPolicy | None:
            return self.policy

    begins: list[int] = []
    pending, rest = history_of(content_type, line)

    def driver(name: str) -> AppDriver[Any]:
        types = {JOURNAL: content_type}
        made = AppDriver(Noting(), tmp_path / name, [JOURNAL], content_types=types)
        made.feed(JOURNAL, pending + rest)
        return made

    Noting.policy = PoisonPolicy(DEAD, malformed_only=True)
    with driver("skips") as skips:
        skips.run()
        assert len(begins) == 1 + commits
        assert skips.skipped == ([] if commits else [(JOURNAL, "malformed")])
    Noting.policy = None
    if not commits:
        with driver("fails") as fails:
            with raises(MalformedMessage, journal=JOURNAL, begin=len(pending)):
                fails.run()


TABLES: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]] = {
    CONTENT_JSON_LINES: ({"fields": "n double"}, lambda row: row["n"]),
    CONTENT_CSV: ({"value": "csv", "fields": "n double"}, lambda row: row["n"]),
    CONTENT_PROTO_FIXED: ({"message": ngram_pb2.NGramCount}, lambda row: row["count"]),
}


@pytest.mark.parametrize(
    ("content_type", "line", "commits"), sorted({(case[0], *case[2:]) for case in CASES})
)
def test_tables(tmp_path: Path, content_type: str, line: bytes, commits: bool) -> None:
    """A table does the same, and has a row of nulls for a damaged one if misfits are null."""
    pending, rest = history_of(content_type, line)
    write_journal(tmp_path, STORE, JOURNAL, [pending + rest])
    options, number = TABLES[content_type]

    def read(misfits: Any) -> list[Any]:
        table = gazette.read_table(
            JOURNAL, store=f"{tmp_path}/fragments", misfits=misfits, **options
        )
        return [(row["offset"], number(row)) for row in table.to_pylist()]

    later = len(pending + rest) - len(history_of(content_type, b"")[1].lstrip(b"\n"))
    if commits:
        for misfits in ("fail", "skip", "null"):
            assert read(misfits) == [(0, 1), (later, 9)]
        return
    assert read("skip") == [(later, 9)]
    damaged, *others = read("null")
    assert (damaged[0], others) == (len(pending), [(later, 9)])
    with raises(MalformedMessage, journal=JOURNAL, begin=len(pending)):
        read("fail")
