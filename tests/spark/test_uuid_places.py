"""Tables and sinks of journals whose messages have their UUID in another place than ``uuid``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import gazette
from gazette import Application, Source
from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.plan import plan_snapshot
from gazette.history.backfill.settings import HistoryEnd
from gazette.history.first_pass import fold_by_threads
from gazette.history.read import read_envelopes
from gazette.history.source import Access
from gazette.history.spark.source.options import STREAM, ReadOptions
from gazette.history.spark.source.schema import table_schema
from gazette.history.spark.source.source import GazetteDataSource
from gazette.labels import (
    CONTENT_CSV,
    CONTENT_JSON_LINES,
    CONTENT_PROTO_FIXED,
    CONTENT_TYPE,
    MESSAGE_UUID,
)
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, uuid_text
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import raises

PLACE = "_meta.uuid"
RANDOM = "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"
PRODUCER = b"\x01abcde"
LABELLED, PLAIN, ROWS, PROTO = "a/labelled", "a/plain", "a/rows", "a/proto"
NGRAM = "word_count.ngram_pb2:NGramCount"


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    json = (CONTENT_TYPE, CONTENT_JSON_LINES)
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(
            journal_spec(LABELLED, labels=LabelSet.of(json, (MESSAGE_UUID, PLACE))),
            journal_spec(PLAIN, labels=LabelSet.of(json)),
            journal_spec(ROWS, labels=LabelSet.of((CONTENT_TYPE, CONTENT_CSV))),
            journal_spec(PROTO, labels=LabelSet.of((CONTENT_TYPE, CONTENT_PROTO_FIXED))),
        )
        yield broker


def line(clock: int, flags: int, **fields: Any) -> bytes:
    uuid = uuid_text(build_uuid(PRODUCER, clock, flags))
    return msgspec.json.encode({**fields, "_meta": {"uuid": uuid}}) + b"\n"


HISTORY = [
    line(1, CONTINUE_TXN, uuid=RANDOM, n=1),
    line(1, CONTINUE_TXN, uuid=RANDOM, n=1),
    line(2, CONTINUE_TXN, uuid="A-17", n=2),
    line(3, ACK_TXN),
    line(4, CONTINUE_TXN, uuid=RANDOM, n=3),
]


async def append(broker: BrokerFixture, *journals: str) -> None:
    for journal in journals:
        for content in HISTORY:
            await broker.client.append(AppendParams(journal), content)


def writer(broker: BrokerFixture, schema: pa.Schema, **options: str) -> Any:
    options = {"broker.address": broker.endpoint, **options}
    return GazetteDataSource(options).writer(from_arrow_schema(schema), False)


def write(broker: BrokerFixture, data: pa.RecordBatch, **options: str) -> None:
    one = writer(broker, data.schema, **options)
    one.commit([one.write(iter([data]))])


async def test_tables_go_by_the_label_and_show_the_field_of_the_user(broker: BrokerFixture) -> None:
    await append(broker, LABELLED, PLAIN)

    def read(journal: str, **options: Any) -> list[Any]:
        options = {"fields": "uuid string, n long", "meta_prefix": "_", **options}
        table = gazette.read_table(journal, broker=broker.endpoint, **options)
        return [(row["uuid"], row["n"]) for row in table.to_pylist()]

    def play() -> None:
        assert read(LABELLED) == [(RANDOM, 1), ("A-17", 2)]
        assert read(PLAIN, uuid_field=PLACE) == [(RANDOM, 1), ("A-17", 2)]
        assert len(read(PLAIN, misfits="null")) == 5
        # Without a prefix there would be two columns of that name.
        with raises(Invalid, path="meta_prefix", says="uuid"):
            read(LABELLED, meta_prefix="")
        with raises(Invalid, path="uuid_field.uuid"):
            read(PLAIN, uuid_field="a..b")

    await asyncio.to_thread(play)


async def test_a_schema_of_spark_goes_by_the_label(broker: BrokerFixture) -> None:
    await append(broker, LABELLED, PLAIN)

    def schema(journal: str, **options: str) -> list[str]:
        options = {
            "broker.address": broker.endpoint,
            "journal": journal,
            "fields": "uuid string, n long",
            **options,
        }
        found, _ = table_schema(ReadOptions.parse(options, STREAM))
        names: list[str] = found.names
        return names

    def play() -> None:
        assert schema(LABELLED, metaPrefix="_")[-2:] == ["uuid", "n"]
        for journal, options in ((LABELLED, {}), (PLAIN, {"uuidField": PLACE})):
            with raises(Invalid, path="option metaPrefix", says="uuid"):
                schema(journal, **options)
        assert schema(PLAIN).count("uuid") == 1
        with raises(Invalid, path="option uuidField"):
            schema(PLAIN, uuidField="a..b")

    await asyncio.to_thread(play)


async def test_what_is_written_has_its_uuid_in_the_place(broker: BrokerFixture) -> None:
    data = pa.RecordBatch.from_pydict({"uuid": [RANDOM, "A-17", None], "n": [1, 2, 3]})

    def read(journal: str, **options: Any) -> list[Any]:
        table = gazette.read_table(
            journal,
            broker=broker.endpoint,
            meta_prefix="_",
            fields="uuid string, n long",
            **options,
        )
        rows = table.to_pylist()
        assert {row["_flags"] for row in rows} == {CONTINUE_TXN}
        return [(row["uuid"], row["n"]) for row in rows]

    def play() -> None:
        write(broker, data, journal=LABELLED)
        write(broker, data, journal=PLAIN, uuidField=PLACE)
        want = [(RANDOM, 1), ("A-17", 2), (None, 3)]
        assert read(LABELLED) == want
        assert read(PLAIN, uuid_field=PLACE) == want
        with raises(Invalid, says=PLACE):
            write(broker, data, journal=LABELLED, uuidField="id")

    await asyncio.to_thread(play)


async def test_a_column_uuid_of_others_is_refused(broker: BrokerFixture) -> None:
    data = pa.RecordBatch.from_pydict({"uuid": [None, RANDOM], "n_gram": ["x", "y"]})
    numbers = pa.RecordBatch.from_pydict({"uuid": [0, 7], "n_gram": ["x", "y"]})

    def play() -> None:
        for journal, options in (
            (PLAIN, {}),
            (ROWS, {"value": "csv"}),
            (PROTO, {"message": NGRAM}),
        ):
            for found in (data, numbers):
                one = writer(broker, found.schema, journal=journal, **options)
                with raises(Invalid, path="uuid"):
                    one.write(iter([found]))
        table = gazette.read_table(PLAIN, broker=broker.endpoint, fields="n_gram string")
        assert table.num_rows == 0

    await asyncio.to_thread(play)


class Meta(msgspec.Struct):
    uuid: str = ""


class Order(msgspec.Struct):
    n: int = 0
    uuid: int | str = 0
    meta: Meta | None = msgspec.field(default=None, name="_meta")


class Small(msgspec.Struct):
    """Has no field for a UUID, and decodes faster."""

    n: int = 0


class Orders(Application[Any]):
    orders = Source("a", Order, uuid=PLACE)

    def new_store(self, shard: Any, recorder: Any) -> Any:
        raise NotImplementedError

    def consume_message(self, *args: Any) -> None:
        raise NotImplementedError


class OfOrders(Backfill):
    application = Orders

    def build(self, shard: Any, store: Any, messages: Any) -> None:
        raise NotImplementedError


class OfSmall(OfOrders):
    def message_type_of(self, application: Any, journal: Any) -> type[Any]:
        return Small


@pytest.mark.parametrize("backfill", [OfOrders(), OfSmall()])
async def test_a_backfill_goes_by_the_declaration(
    broker: BrokerFixture, backfill: Backfill
) -> None:
    await append(broker, PLAIN)
    await broker.client.append(AppendParams(PLAIN), line(9, OUTSIDE_TXN, uuid="x", n=4))
    spec = ShardSpec("shard-000", sources=(ShardSource(PLAIN),))

    def play() -> None:
        access = Access.of(broker.endpoint, file_root=broker.file_root)
        with access.open() as opened:
            snapshot = plan_snapshot(opened, backfill, [spec], HistoryEnd())
            folded = fold_by_threads(opened, snapshot)
            kind = backfill.message_type_of(Orders(), journal_spec(PLAIN))
            found = [
                one
                for run in folded.runs
                for batch in read_envelopes(opened, run, kind)
                for one in batch
            ]
        assert [one.message.n for one in found] == [1, 2, 4]
        assert [one.clock for one in found] == [1, 2, 9]

    await asyncio.to_thread(play)
