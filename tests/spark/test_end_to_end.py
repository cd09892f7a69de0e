"""Spark itself, in one session: what only its processes together can show. All else is tested without it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.errors import Broken, Conflict, Invalid
from gazette.history.spark.backfill import SparkRunner
from gazette.history.spark.tasks import run_tasks
from gazette.history.summary_store import DIRECTORY
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, clock_at
from gazette.protocol.fragment import Codec
from gazette.protocol.label_set import LabelSet
from gazette.spark import LagListener, create_view, read, session, stream_lag
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.stored import json_line, write_fragment, write_journal
from tests.backfill.apps import Words, WordsBackfill
from tests.backfill.cluster import history, shard_settings, source
from tests.backfill.conftest import s3_proxy as s3_proxy
from tests.backfill.conftest import s3_target as s3_target
from tests.backfill.conftest import start as start
from tests.backfill.replays import Replay, Story
from tests.backfill.subjects import SUBJECTS
from tests.backfill.test_drive import expected
from tests.blobs.s3_endpoint import FaultProxy
from tests.facts import logged, raises
from tests.spark.backfills import (
    CombinedBackfill,
    FoldedBackfill,
    ListedBackfill,
    NoFrame,
    NoRows,
    NoTable,
    OtherShards,
    build_stored,
)
from tests.spark.test_state import LINES, SHARD, options, stored_in_s3

# Starting Java and Python's workers takes seconds on a machine that is free, and minutes on one that is not.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SOURCES = ("words/part-000", "words/part-001")
STORE = "file:///fragments/"
NOON = clock_at(1_700_000_000 * 10**9)
ALPHA = bytes([1, 0, 0, 0, 0, 1])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write two journals with three fragments each: a transaction in two of them, and one that is open."""
    root = tmp_path_factory.mktemp("store")

    def line(at: int, flags: int, **fields: object) -> bytes:
        return json_line(fields, build_uuid(ALPHA, NOON + at * 160, flags))

    write_journal(root, STORE, "topic/bad", [b"nonsense\n"])
    for name, codec, first in (("topic/a", Codec.GZIP, 0), ("topic/b", Codec.ZSTANDARD, 10)):
        contents = [
            line(1, CONTINUE_TXN, word="x", n=first) + line(1, CONTINUE_TXN, word="x", n=first),
            line(2, CONTINUE_TXN, word="y", n=first + 1) + line(3, ACK_TXN),
            line(4, CONTINUE_TXN, word="open", n=first + 2),
        ]
        write_journal(root, STORE, name, contents, codec)
    return {"store": f"file://{root}/fragments", "maxPartitionBytes": "1"}


def table(spark: Any, store: dict[str, str], **options: str) -> Any:
    # The format was not registered.
    return spark.read.format("gazette").options(**store, **options)


def test_tables(spark: Any, store: dict[str, str]) -> None:
    """Fields are inferred, filters apply, and both passes may be jobs of the executors."""
    journals = table(spark, store).load("topic/a,topic/b")
    assert [field.name for field in journals.schema][-2:] == ["word", "n"]
    rows = journals.where("journal = 'topic/b' and offset >= 0").orderBy("n").collect()
    assert [(row.word, row.n, row.flags) for row in rows] == [("x", 10, 1), ("y", 11, 1)]
    assert rows[0].timestamp.timestamp() == pytest.approx(1_700_000_000, abs=1)
    total = read(spark, **store, journal="topic/a", fields="n long").groupBy().sum("n").collect()
    assert total[0][0] == 1


def test_rows_that_the_tasks_of_read_make_are_those_of_the_source(
    spark: Any, tmp_path: Path
) -> None:
    """For each kind of column, nested and null, in a zone that is not UTC; and without any message."""
    values = [
        {
            "n": 1,
            "d": 12.75,
            "b": "aGk=",
            "t": "2024-02-29T12:30:00.123456Z",
            "v": {"a": [1, None]},
        },
        {
            "m": {"k": "v"},
            "s": {"l": [{"x": 1}, None], "day": "2024-02-29"},
            "l": "2024-01-02T03:04:05",
        },
        {},
    ]
    lines = [
        json_line(value, build_uuid(ALPHA, NOON + at * 160, OUTSIDE_TXN))
        for at, value in enumerate(values)
    ]
    write_journal(tmp_path, STORE, "topic/kinds", lines, Codec.ZSTANDARD)
    given = {"store": f"file://{tmp_path}/fragments", "journal": "topic/kinds"}
    schema = (
        "n long, d decimal(10,2), b binary, t timestamp, l timestamp_ntz, v variant, "
        "m map<string,string>, s struct<l: array<struct<x: int>>, day: date>, "
        "offset long, timestamp timestamp"
    )
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        for more in ({}, {"isolation": "read_uncommitted"}, {"startingOffsets": str(1 << 40)}):
            made = read(spark, schema=schema, **given, **more)
            other = spark.read.format("gazette").options(**given, **more).schema(schema).load()
            assert made.schema == other.schema
            texts = [
                [row.asDict(recursive=True) for row in one.orderBy("offset").collect()]
                for one in (made.drop("v"), other.drop("v"))
            ]
            assert texts[0] == texts[1]
            assert len(texts[0]) == (0 if "startingOffsets" in more else 3)
            variants = [
                [row.v for row in one.orderBy("offset").selectExpr("to_json(v) AS v").collect()]
                for one in (made, other)
            ]
            assert variants[0] == variants[1] == ['{"a":[1,null]}', None, None][: len(texts[0])]
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_what_one_read_has_cached_does_not_stand_for_another(
    spark: Any, store: dict[str, str]
) -> None:
    """Spark takes equal plans for the same. A broker may have other bytes by now."""
    frames = [read(spark, **store, journal="topic/a", schema="n long") for _ in range(2)]
    frames[0].persist()
    try:
        plans = [frame._jdf.queryExecution().withCachedData().toString() for frame in frames]
        assert ["InMemoryRelation" in plan for plan in plans] == [True, False]
    finally:
        frames[0].unpersist()


def test_views_are_planned_by_each_query(spark: Any, tmp_path: Path) -> None:
    """With what was appended, and without what was pruned. Spark keeps the plan of a DataFrame instead."""

    def add(n: int) -> Path:
        content = json_line({"n": n}, build_uuid(ALPHA, NOON + n * 160, OUTSIDE_TXN))
        begin = (n - 1) * len(content)
        fragment = write_fragment(tmp_path, STORE, "topic/grows", begin, content)
        return tmp_path / "fragments" / fragment.content_path()

    def found() -> list[int]:
        return [row.n for row in spark.sql("SELECT n FROM above ORDER BY n").collect()]

    first = add(1)
    given = {"store": f"file://{tmp_path}/fragments", "journal": "topic/grows"}
    create_view(spark, "grows", **given)
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW above AS SELECT n, offset FROM grows WHERE n > 0")
    frame = spark.read.format("gazette").options(**given).load()
    assert (found(), frame.count()) == ([1], 1)
    add(2)
    assert (found(), frame.count()) == ([1, 2], 1)
    assert spark.sql("SELECT 1 FROM grows a JOIN grows b ON a.n = b.n").count() == 2
    first.unlink()
    add(3)
    assert found() == [2, 3]
    with pytest.raises(Exception, match="create_view") as raised:
        frame.select("n").collect()
    require_short(raised.value)
    # The same name with other columns, and a text that has to be escaped.
    create_view(spark, "grows", schema="n long, offset long", **given, fields="`n'\\` long")
    assert spark.table("grows").columns == ["n", "offset"]
    assert found() == [2, 3]
    with pytest.raises(Exception, match="create_view"):
        spark.sql("CREATE TABLE lost USING gazette OPTIONS (journal 'topic/grows')")
    with raises(Invalid, path="name"):
        create_view(spark, "a.b", **given)


def test_summaries_are_made_by_tasks_and_found_by_all(spark: Any, tmp_path: Path) -> None:
    """Without them, planning reads the fragments: here these are gone, and it fails or does not."""
    lines = [
        json_line({"word": "w", "n": n}, build_uuid(ALPHA, NOON + n * 160, OUTSIDE_TXN))
        for n in range(9)
    ]
    root = {
        "store": f"file://{tmp_path}/fragments",
        "journal": "topic/kept",
        "maxPartitionBytes": 1,
    }
    write_journal(tmp_path, STORE, "topic/kept", lines, Codec.ZSTANDARD)
    given = {**root, "schema": "n long, offset long"}
    none = read(spark, summaries="none", **given)
    assert not (tmp_path / "fragments" / DIRECTORY).exists()
    frame = read(spark, **given)
    assert len([*(tmp_path / "fragments" / DIRECTORY / "topic/kept").iterdir()]) == 9
    for one in (none, frame):
        assert [row.n for row in one.orderBy("n").collect()] == [*range(9)]
    for path in (tmp_path / "fragments").rglob("*.zst"):
        path.write_bytes(b"")
    read(spark, **given)
    with pytest.raises(Exception, match="journal=topic/kept"):
        read(spark, summaries="none", **given)


def test_a_bad_option_is_reported_with_what_to_do(spark: Any, store: dict[str, str]) -> None:
    with pytest.raises(Exception, match="option begining: ") as raised:
        table(spark, store, begining="5").load("topic/a")
    assert "What to do: " in str(raised.value)
    require_short(raised.value)


def require_short(error: BaseException, most: int = 12) -> None:
    """Require a few lines of error, of which the last of Python's are the message and the hint."""
    lines = [one for one in str(error).splitlines() if one.strip()]
    (hint,) = (number for number, one in enumerate(lines) if one.startswith("What to do: "))
    assert lines[hint - 1].startswith("gazette.")
    assert hint <= most, lines
    assert len(lines) <= hint + 2, lines


def test_errors_of_tasks_are_reported_as_short(spark: Any, store: dict[str, str]) -> None:
    """Those of the driver while it plans, of a task that reads, and of one that writes."""
    with pytest.raises(Exception, match="interval") as raised:
        table(spark, store).schema("n interval day to second").load("topic/a").collect()
    require_short(raised.value)
    failing = table(spark, store).option("mode", "FAILFAST")
    with pytest.raises(Exception, match="word: ") as raised:
        failing.schema("word long").load("topic/a").collect()
    require_short(raised.value)
    with pytest.raises(Exception, match="begin=") as raised:
        read(spark, **store, journal="topic/bad", fields="n long", mode="FAILFAST")
    # Those of a job have frames of Spark's own worker.
    require_short(raised.value, 30)
    rows = spark.createDataFrame([("p",)], "word string")
    writer = rows.write.format("gazette").mode("append").option("journal", "topic/a")
    with pytest.raises(Exception, match="nonsense") as raised:
        writer.option("broker.address", "nonsense").save()
    require_short(raised.value)


def test_there_is_one_master(spark: Any) -> None:
    with raises(Conflict, says="local[2,2]"):
        session("local[7]")
    assert session("local[2,2]") is not None


def test_streams_go_on_where_they_stopped(
    spark: Any, store: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And say how far behind they are."""
    listener = LagListener()
    spark.streams.addListener(listener)
    caplog.set_level("INFO", "gazette")

    def run() -> list[int]:
        stream = (
            spark.readStream.format("gazette")
            .options(**store, fields="word string, n long", maxRowsPerTrigger="3")
            .load("topic/a,topic/b")
        )
        query = (
            stream.writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert query.exception() is None
        progress.extend(map(stream_lag, query.recentProgress))
        return sorted(row.n for row in spark.read.parquet(str(tmp_path / "out")).collect())

    progress: list[Any] = []
    try:
        assert run() == [0, 1, 10, 11]
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    finally:
        spark.streams.removeListener(listener)
    assert [one.journal for one in progress[0]] == ["topic/a", "topic/b"]
    assert progress[0][1].behind_bytes > progress[-1][1].behind_bytes == 0
    assert progress[0][0].read_until.timestamp() == pytest.approx(1_700_000_000, abs=1)
    assert progress[0][0].behind_s > 1e6
    assert logged(caplog, "query", "bytes", journals=2)
    assert run() == [0, 1, 10, 11]


async def test_writing_to_journals(
    spark: Any, store: dict[str, str], etcd: Etcd, tmp_path: Path
) -> None:
    """A table, a stream twice over, and what was written is read through the broker."""
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(
            journal_spec("out/a", labels=labels), journal_spec("out/b", labels=labels)
        )
        target = {
            "broker.address": broker.endpoint,
            "selector": "prefix=out/",
            "mapping": "modulo",
            "key": "word",
        }

        def written() -> list[tuple[str, int]]:
            back = spark.read.format("gazette").options(
                **{"broker.address": broker.endpoint}, selector="prefix=out/"
            )
            rows = back.schema("word string, n long").load().collect()
            return sorted((row.word, row.n) for row in rows)

        def play() -> None:
            rows = spark.createDataFrame([("p", 1), ("q", 2)], "word string, n long")
            rows.write.format("gazette").options(**target).mode("append").save()
            assert written() == [("p", 1), ("q", 2)]
            for _ in range(2):
                stream = (
                    spark.readStream.format("gazette")
                    .options(**store, fields="word string, n long")
                    .load("topic/a")
                    .select("word", "n")
                )
                query = (
                    stream.writeStream.format("gazette")
                    .options(**target)
                    .option("checkpointLocation", str(tmp_path / "checkpoint"))
                    .trigger(availableNow=True)
                    .start()
                )
                query.awaitTermination()
                assert query.exception() is None
            assert written() == [("p", 1), ("q", 2), ("x", 0), ("y", 1)]
            assert list((tmp_path / "checkpoint" / "gazette-commits").iterdir())

        await asyncio.to_thread(play)


@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_bytes_are_counted_while_tasks_run_and_repeat(
    adaptive: str, spark: Any, tmp_path: Path
) -> None:
    """The last task goes on when progress was reported, and fails once: its bytes count once, too."""
    seen, failed = tmp_path / "seen", tmp_path / "failed"
    read: list[int] = []

    def work(items: Any) -> Any:
        for item in items:
            while item == 2 and not seen.exists():
                threading.Event().wait(0.05)
            if item == 2 and not failed.exists():
                failed.touch()
                raise OSError("the first attempt fails")
            yield item * 10

    def on_read(count: int) -> None:
        read.append(count)
        seen.touch()

    context = spark.sparkContext
    context.setLocalProperty("spark.jobGroup.id", "a group of the caller")
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", adaptive)
    try:
        assert run_tasks(spark, range(3), work, 3, length=100, on_read=on_read) == [0, 10, 20]
        assert context.getLocalProperty("spark.jobGroup.id") == "a group of the caller"
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", before)
        context.setLocalProperty("spark.jobGroup.id", None)
    assert failed.exists()
    assert sum(read) == 100
    assert read[0] in (33, 66)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Write the words of two journals, with a fragment for each word, and return their names."""
    texts = {"topic/a": ["alpha", "beta", "alpha"], "topic/b": ["gamma", "delta"]}
    for name, own in texts.items():
        lines = [
            json_line({"word": word}, build_uuid(ALPHA, NOON + at * 160, OUTSIDE_TXN))
            for at, word in enumerate(own)
        ]
        write_journal(tmp_path, STORE, name, lines)
    return list(texts)


def test_rows_that_spark_loses_are_made_again(spark: Any, words: list[str], tmp_path: Path) -> None:
    """Or the backfill ends, if `combine` raises then: rows are not left out."""
    gate = tmp_path / "gate"
    backfill = ListedBackfill(gate)
    runner = SparkRunner(spark=spark, run_bytes=1)

    def lose(opens: bool) -> None:
        for rows in dict(spark._jsc.getPersistentRDDs()).values():
            rows.unpersist(True)
        if opens:
            gate.touch()

    build_stored(tmp_path, words, backfill, runner, between=lambda: lose(False))
    assert backfill.found == [(0, "alpha", 2), (0, "beta", 1), (1, "delta", 1), (1, "gamma", 1)]
    with raises(Broken, says="combine() has raised for rows that it had combined before"):
        build_stored(tmp_path, words, backfill, runner, between=lambda: lose(True))
    runner.stop()


def test_a_fold_without_rows_builds_empty_states(
    spark: Any, words: list[str], tmp_path: Path
) -> None:
    """Adaptive execution finds that there are no rows, and leaves out the tasks that load them."""
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        runner = SparkRunner(spark=spark, run_bytes=1)
        built = build_stored(tmp_path, words, NoRows(), runner)
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", before)
    assert [(one.shard, one.built.messages) for one in built] == [("shard-0", 0), ("shard-1", 0)]


def test_what_fold_and_combine_may_not_return(spark: Any, words: list[str], tmp_path: Path) -> None:
    runner = SparkRunner(spark=spark, run_bytes=1)
    with raises(Broken, says="combine() must return a table") as raised:
        build_stored(tmp_path, words, NoTable(), runner)
    assert "Return a pyarrow.Table with word: string, count: int64" in str(raised.value.hint)
    with raises(Broken, says="fold() has returned rows of other shards than there are"):
        build_stored(tmp_path, words, OtherShards(), runner)
    with raises(Invalid, says="fold() of NoFrame must return a DataFrame with the column shard"):
        build_stored(tmp_path, words, NoFrame(), runner)
    runner.stop()


@pytest.mark.long
async def test_states_are_those_of_the_local_runner(start: Any, spark: Any) -> None:
    """Built by a task per shard, or by a DataFrame."""
    cluster = await start(Words())
    await cluster.broker.create(*map(source, SOURCES))
    for name in SOURCES:
        await cluster.append(name, history(random.Random(name), 100))
    kinds: list[tuple[str, Any, Any]] = [
        ("local", WordsBackfill(), None),
        ("tasks", WordsBackfill(), SparkRunner(spark=spark)),
        ("folded", FoldedBackfill(), SparkRunner(spark=spark)),
        ("combined", CombinedBackfill(), SparkRunner(spark=spark)),
    ]
    states: list[Any] = []
    for kind, backfill, runner in kinds:
        # The second shard has all of it, and the third nothing: its source is empty.
        await cluster.broker.create(source(f"empty/{kind}"))
        await cluster.create(
            shard_settings(f"{kind}-1", SOURCES[1]),
            shard_settings(f"{kind}-2", *SOURCES),
            shard_settings(f"{kind}-3", f"empty/{kind}"),
        )
        names = [f"{kind}-{number}" for number in (1, 2, 3)]
        await cluster.backfill(
            backfill, shards=f"id in ({', '.join(names)})", run_id=kind, runner=runner, enable=True
        )
        for name in names:
            await cluster.consumer.await_primary(name)
        found = [await cluster.state(name, WordsBackfill()) for name in names[:2]]
        states.append(found)
        assert (await cluster.state(names[2], WordsBackfill()))[0] == []
    assert states[1] == states[0]
    assert states[2] == states[0]
    assert states[3] == states[0]
    assert len(states[0][1][0]) > 20


@pytest.mark.long
async def test_states_are_tables(s3_proxy: FaultProxy, start: Any, spark: Any) -> None:
    """Whose logs are in a bucket, from which executors read them."""
    # The bucket first: the broker stores what it still has as it ends.
    cluster = await stored_in_s3(start, s3_proxy.endpoint, Words)
    given = options(cluster, table="counts")
    before = s3_proxy.count("GET", "/logs/")

    def look() -> list[tuple[str, str, int]]:
        frame = spark.read.format("gazette-state").options(**given).load()
        return [tuple(row) for row in frame.orderBy("word").collect()]

    found = await asyncio.to_thread(look)
    assert found == [(SHARD, word, n) for _, (word, n) in expected(LINES)]
    assert len(found) > 20
    assert s3_proxy.count("GET", "/logs/") > before


@pytest.mark.long
@pytest.mark.parametrize("subject", ["word_count", "bike_share"])
def test_states_folded_by_spark_and_their_tails_are_full_replays(
    subject: str, spark: Any, tmp_path: Path
) -> None:
    """Of the examples: duplicates, roll-backs, open transactions, several producers, lost fragments."""
    replay = Replay(SUBJECTS[subject], Story(3, (150, 150), run_bytes=2000), tmp_path)
    replay.check(SparkRunner(spark=spark, run_bytes=2000))
    assert len(replay.open_producers) > 1


def test_the_error_of_a_worker_that_crashed_says_where(spark: Any) -> None:
    def crash(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        os.kill(os.getpid(), signal.SIGSEGV)
        yield from batches

    frame = spark.range(1).mapInArrow(crash, "id long")
    with pytest.raises(Exception, match=r"Segmentation fault(?s:.)*in crash"):
        frame.collect()
