"""States of shards as rows, without Spark's own processes: what its executors run."""

from __future__ import annotations

import asyncio
import base64
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.pandas.types import from_arrow_schema

from gazette.auth import KeyedAuth, StaticToken
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid, NotFound, Unavailable
from gazette.history.spark.state import state
from gazette.history.spark.state.source import GazetteStateDataSource
from gazette.history.spark.state.state import StateOptions, StateReader, _type_of
from gazette.protocol.fragment import Codec
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import log_spec
from tests.backfill.apps import Documents, Pairs, Words
from tests.backfill.cluster import Cluster, history, shard_settings, source
from tests.backfill.conftest import s3_proxy as s3_proxy
from tests.backfill.conftest import s3_target as s3_target
from tests.backfill.conftest import start as start
from tests.blobs.s3_endpoint import FaultProxy, store_url
from tests.facts import raises

SOURCE, SHARD = "words/part-000", "shard-000"
LINES = history(random.Random(2), 300)
"""What `stored_in_s3` has its shard consume."""


def options(cluster: Cluster, **given: str) -> dict[str, str]:
    return {
        "broker.address": cluster.broker.endpoint,
        "consumer.address": cluster.consumer.endpoint,
        **given,
    }


def read(given: dict[str, str], schema: pa.Schema) -> list[dict[str, Any]]:
    reader = StateReader(StateOptions.parse(given), from_arrow_schema(schema))
    return [
        row
        for partition in reader.partitions()
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


def state_of(application: Any) -> tuple[dict[str, str], pa.Schema]:
    """Return options that name what a shard of an application holds, and its columns."""
    shard = ("shard", pa.string())
    if application is Words:
        return {"table": "counts"}, pa.schema([shard, ("word", pa.string()), ("n", pa.int64())])
    if application is Pairs:
        return {}, pa.schema([shard, ("key", pa.binary()), ("value", pa.binary())])
    return {}, pa.schema([shard, ("document", pa.string())])


async def stored_in_s3(start: Any, endpoint: str, application: Any) -> Cluster:
    """Return a cluster with a shard whose log is in a bucket, in many fragments. It has ended."""
    cluster: Cluster = await start(application())
    await cluster.broker.create(
        source(SOURCE),
        log_spec(
            SHARD, stores=(store_url(endpoint, "/logs/"),), codec=Codec.ZSTANDARD, length=4096
        ),
    )
    await cluster.consumer.create(shard_settings(SHARD, SOURCE, disable=False))
    for begin in range(0, len(LINES), 60):
        await cluster.append(SOURCE, LINES[begin : begin + 60])
        await cluster.consumer.read_to_heads(SHARD)
    await cluster.disable(SHARD)
    return cluster


@pytest.mark.parametrize("application", [Words, Pairs, Documents])
async def test_a_state_is_a_table(start: Any, application: Any) -> None:
    """The rows of a live shard, as of now and as of an earlier checkpoint."""
    if application is Pairs:
        pytest.importorskip("rocksdict")
    cluster = await start(application())
    await cluster.broker.create(source(SOURCE))
    await cluster.create(shard_settings(SHARD, SOURCE, disable=False))
    await cluster.consumer.await_primary(SHARD)
    lines = history(random.Random(1), 150)
    sizes: list[int] = []
    for part in (lines[:100], lines[100:]):
        await cluster.append(SOURCE, part)
        sizes.append((await cluster.consumer.read_to_heads(SHARD))[SOURCE])
    store = cluster.consumer.store(SHARD)
    given = options(cluster)
    naming, schema = state_of(application)
    given |= naming
    if application is Words:
        expected = [
            {"shard": SHARD, "word": word, "n": n}
            for word, n in store.query("SELECT word, n FROM counts ORDER BY word")
        ]
        ddl = await asyncio.to_thread(GazetteStateDataSource(given).schema)
        assert ddl == "shard string, `word` string, `n` long"
        given["at"] = f"{SOURCE}={sizes[0]}"
        before = await asyncio.to_thread(read, given, schema)
        assert 0 < sum(row["n"] for row in before) < sum(row["n"] for row in expected)
        del given["at"]
    elif application is Pairs:
        with store.view() as view:
            expected = [{"shard": SHARD, "key": k, "value": v} for k, v in view.iterate()]
    else:
        expected = []
    found = await asyncio.to_thread(read, given, schema)
    if expected:
        assert found == expected
    else:
        assert len(found) == 1
        assert '"w1":' in found[0]["document"]


@pytest.mark.parametrize("application", [Words, Pairs])
async def test_a_log_whose_fragments_are_in_s3(
    start: Any, etcd: Etcd, s3_proxy: FaultProxy, tmp_path: Path, application: Any
) -> None:
    """And nowhere else: they were written by a broker that is gone."""
    if application is Pairs:
        pytest.importorskip("rocksdict")
    cluster = await stored_in_s3(start, s3_proxy.endpoint, application)
    given, schema = state_of(application)
    local = await asyncio.to_thread(read, options(cluster, **given), schema)
    async with await BrokerFixture.start(etcd, tmp_path, id="broker-two", lease_ttl_s=30.0) as two:
        await cluster.broker.stop()
        before = s3_proxy.count("GET", "/logs/")
        at_two = {**options(cluster, **given), "broker.address": two.endpoint}
        found = await asyncio.to_thread(read, at_two, schema)
        assert found == local
        assert len(str(found)) > 300
        assert s3_proxy.count("GET", "/logs/") > before


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(Invalid) as raised:
        StateOptions.parse({"tabel": "x"})
    assert raised.value.hint == "Did you mean table?"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"tabel": "x"}, "option tabel"),
        ({"broker.address": ""}, "option broker.address"),
        ({"path": "shard-000"}, "load()"),
        ({"at": "yesterday"}, "option at"),
        ({"selector": "a in ("}, "option selector"),
    ],
)
def test_bad_options(given: dict[str, str], path: str) -> None:
    addresses = {"broker.address": "http://b", "consumer.address": "http://c"}
    with raises(Invalid, path=path) as raised:
        StateOptions.parse({**addresses, **given})
    assert raised.value.hint


def test_credentials_of_brokers_and_of_members() -> None:
    files = {"trustedCaFile": "/ca.pem", "certFile": "/own.pem", "certKeyFile": "/own.key"}
    given = {
        "broker.address": "https://b",
        "consumer.address": "https://c",
        "broker.authKeys": base64.b64encode(bytes(32)).decode(),
        "consumer.authToken": "token",
        **{
            f"{group}.{name}": text
            for group in ("broker", "consumer")
            for name, text in files.items()
        },
    }
    options = StateOptions.parse(given)
    for flags in (options.brokers, options.consumers):
        assert (flags.trusted_ca_file, flags.cert_file, flags.cert_key_file) == tuple(
            files.values()
        )
    assert options.consumers.signer(SystemClock()) == StaticToken("token")
    assert isinstance(options.brokers.signer(SystemClock()), KeyedAuth)


async def test_columns_that_a_state_does_not_have(start: Any) -> None:
    """SQLite takes the name of a column that is not there for a text."""
    cluster = await start(Words())
    await cluster.broker.create(source(SOURCE))
    await cluster.create(shard_settings(SHARD, SOURCE, disable=False))
    await cluster.consumer.await_primary(SHARD)
    await cluster.append(SOURCE, history(random.Random(1), 50))
    await cluster.consumer.read_to_heads(SHARD)
    given = options(cluster, table="counts")
    shard = ("shard", pa.string())

    def look() -> None:
        only = read(given, pa.schema([shard]))
        assert len(only) > 5
        assert only[0] == {"shard": SHARD}
        with raises(Invalid, path="option fields", shard="shard-000", says="nope"):
            read({**given, "fields": "nope string"}, pa.schema([shard, ("nope", pa.string())]))
        with raises(NotFound, table="nothing", shard="shard-000"):
            read({**given, "table": "nothing"}, pa.schema([shard, ("word", pa.string())]))
        with raises(Invalid, path="option fields", says="w1"):
            read(given, pa.schema([shard, ("word", pa.int64())]))

    await asyncio.to_thread(look)


class Halves(Words):
    """Puts numbers with fractions into a column of integers, which SQLite permits."""

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        upsert = "INSERT INTO counts VALUES (?, 1.5) ON CONFLICT DO NOTHING"
        store.execute(upsert, (envelope.message.word,)).fetchall()


async def test_a_number_with_a_fraction_is_no_integer(start: Any) -> None:
    cluster = await start(Halves())
    await cluster.broker.create(source(SOURCE))
    await cluster.create(shard_settings(SHARD, SOURCE, disable=False))
    await cluster.consumer.await_primary(SHARD)
    await cluster.append(SOURCE, history(random.Random(1), 50))
    await cluster.consumer.read_to_heads(SHARD)
    given = options(cluster, table="counts")

    def look() -> None:
        for kind in (pa.int64(), pa.int8()):
            with raises(Invalid, path="option fields", says="1.5 is not an integer", column="n"):
                read(given, pa.schema([("shard", pa.string()), ("n", kind)]))
        with raises(Invalid, path="option fields", says="1.5 is not of type timestamp"):
            read(given, pa.schema([("shard", pa.string()), ("n", pa.timestamp("us", "UTC"))]))
        rows = read(given, pa.schema([("shard", pa.string()), ("n", pa.float64())]))
        assert {row["n"] for row in rows} == {1.5}

    await asyncio.to_thread(look)


class Odd(Words):
    """Has what SQLite permits, and few applications have."""

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        for statement in (
            "CREATE TABLE IF NOT EXISTS odd (`back``tick,` INTEGER, `text` TEXT, at INTEGER)",
            "INSERT INTO odd VALUES (7, CAST(x'41ff' AS TEXT), 1700000000)",
            "INSERT INTO odd VALUES (8, 'B', NULL)",
            "CREATE TABLE IF NOT EXISTS of_shards (n INTEGER, Shard TEXT)",
            "INSERT INTO of_shards VALUES (1, 'own')",
        ):
            store.execute(statement).fetchall()


async def test_odd_columns_and_values_are_read_as_they_are_or_refused(start: Any) -> None:
    cluster = await start(Odd())
    await cluster.broker.create(source(SOURCE))
    await cluster.create(shard_settings(SHARD, SOURCE, disable=False))
    await cluster.consumer.await_primary(SHARD)
    await cluster.append(SOURCE, history(random.Random(1), 50))
    await cluster.consumer.read_to_heads(SHARD)
    given, tick = options(cluster, table="odd"), "back`tick,"

    def values(**types: pa.DataType) -> list[tuple[Any, ...]]:
        rows = read(given, pa.schema([("shard", pa.string()), *types.items()]))
        return [tuple(row[name] for name in types) for row in rows][:2]

    def look() -> None:
        ddl = GazetteStateDataSource(given).schema()
        assert ddl == "shard string, `back``tick,` long, `text` string, `at` long"
        assert values(**{tick: pa.int64(), "at": pa.int64()}) == [(7, 1_700_000_000), (8, None)]
        with raises(Invalid, path="option fields", column="text", says="A") as raised:
            values(**{tick: pa.int64(), "text": pa.string()})
        assert "the type binary" in raised.value.hint
        assert values(text=pa.binary()) == [(b"A\xff",), (b"B",)]
        for kind in (pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.date32(), pa.duration("us")):
            with raises(Invalid, path="option fields", column="at", says="1700000000") as raised:
                values(at=kind)
            assert "timestamp_seconds" in raised.value.hint
        # Case: a column with the name that the shard has.
        given["table"] = "of_shards"
        with raises(Invalid, path="option fields", says="'Shard'"):
            GazetteStateDataSource(given).schema()
        assert values(n=pa.int64())[:1] == [(1,)]

    await asyncio.to_thread(look)


@pytest.mark.parametrize("application", [Pairs, Documents])
async def test_column_families_and_documents(start: Any, application: Any) -> None:
    if application is Pairs:
        pytest.importorskip("rocksdict")
    cluster = await start(application())
    await cluster.broker.create(source(SOURCE))
    await cluster.create(shard_settings(SHARD, SOURCE, disable=False))
    await cluster.consumer.await_primary(SHARD)
    given, wrong = options(cluster), pa.schema([("shard", pa.string()), ("k", pa.binary())])
    if application is Documents:
        # It has no file yet.
        assert await asyncio.to_thread(read, given, state_of(Documents)[1]) == []
        with raises(NotFound):
            await asyncio.to_thread(GazetteStateDataSource(given).schema)
        await cluster.append(SOURCE, history(random.Random(1), 20))
        await cluster.consumer.read_to_heads(SHARD)
    with raises(Invalid, path="option fields", shard="shard-000", says="columns: k") as raised:
        await asyncio.to_thread(read, given, wrong)
    assert ("key, value" if application is Pairs else "document") in str(raised.value)
    if application is Pairs:
        given["columnFamily"] = "nope"
        with raises(NotFound, column_family="nope") as family:
            await asyncio.to_thread(GazetteStateDataSource(given).schema)
        assert "One of default" in family.value.__notes__[0]


async def test_errors_name_the_option(start: Any) -> None:
    cluster = await start(Words())
    await cluster.broker.create(source(SOURCE))
    await cluster.create(shard_settings(SHARD, SOURCE, disable=False))
    await cluster.consumer.await_primary(SHARD)
    with raises(Invalid, path="option table"):
        await asyncio.to_thread(GazetteStateDataSource(options(cluster)).schema)
    with raises(NotFound, table="nothing"):
        await asyncio.to_thread(GazetteStateDataSource(options(cluster, table="nothing")).schema)
    with raises(NotFound, selector="id=other"):
        await asyncio.to_thread(
            GazetteStateDataSource(options(cluster, table="counts", selector="id=other")).schema
        )


@pytest.mark.parametrize("what", ["broker", "consumer"])
async def test_a_member_that_is_not_there_is_reported(
    what: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_CONNECT_S", 0.2)
    cluster = await start(Words())
    await cluster.broker.create(source(SOURCE))
    await cluster.create(shard_settings(SHARD, SOURCE, disable=False))
    await cluster.consumer.await_primary(SHARD)
    given = {**options(cluster, table="counts"), f"{what}.address": "http://127.0.0.1:1"}
    with raises(Unavailable, says=f"{what} at http://127.0.0.1:1") as raised:
        await asyncio.to_thread(GazetteStateDataSource(given).schema)
    assert f"correct {what}.address" in raised.value.__notes__[0]


def test_types_follow_sqlite() -> None:
    declared = ["INTEGER", "VARCHAR(10)", "text", "REAL", "DOUBLE", "BLOB", "", "NUMERIC"]
    assert [_type_of(one) for one in declared] == [
        "long",
        "string",
        "string",
        "double",
        "double",
        "binary",
        "binary",
        "double",
    ]
