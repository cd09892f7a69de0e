"""``gazctl shards query``: SQL on the state of a shard, which is recovered for it."""

from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gazette import Application, Envelope, Publisher
from gazette.cluster.etcd.client import Etcd
from gazette.protocol.shard import ShardSpec
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import LOGS, ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import Word, append, frame, source_spec
from tests.gazctl.runner import Result, Runner

SHARD = "shard-one"
HOSTILE = "\x1b]0;owned\x07\u202e"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
WORDS = "SELECT word, n FROM counts ORDER BY word"


class Words(Application[SQLiteStore]):
    """Counts words in SQLite, and has a table with a value of each type."""

    message_type = Word

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        schema = """
            CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER);
            CREATE TABLE IF NOT EXISTS values_of_types (a, b, c, d);
            CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(body);
        """
        return SQLiteStore(recorder, schema)

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        word = envelope.message.word
        upsert = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
        store.execute(upsert, (word,)).fetchall()
        store.execute("INSERT INTO texts VALUES (?)", (word,)).fetchall()
        store.execute("DELETE FROM values_of_types").fetchall()
        row = (None, b"\x00\xff", 1.5, HOSTILE)
        store.execute("INSERT INTO values_of_types VALUES (?, ?, ?, ?)", row).fetchall()


@pytest.fixture
async def words(
    etcd: Etcd, broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> AsyncIterator[ConsumerFixture]:
    consumer = await ConsumerFixture.start(etcd, broker, Words(), tmp_path, lease_ttl_s=60.0)
    gazctl.environ["CONSUMER_ADDRESS"] = consumer.endpoint
    await broker.create(source_spec("a/source"), log_spec(SHARD))
    await consumer.create(shard_spec(SHARD, "a/source"))
    yield consumer
    await consumer.crash()


async def query(gazctl: Runner, sql: str, *more: str) -> Result:
    return await gazctl("shards", "query", SHARD, sql, *more)


async def test_the_newest_state_and_a_past_one_are_queried(
    broker: BrokerFixture, words: ConsumerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    first = await append(broker, frame("one"), frame("two"), frame("one"), journal="a/source")
    await words.read_to_heads(SHARD)
    await append(broker, frame("three"), journal="a/source")
    await words.read_to_heads(SHARD)
    scratch = tmp_path / "mine"
    scratch.mkdir()

    newest = await query(gazctl, WORDS, "--scratch-dir", str(scratch))
    assert newest.out.splitlines()[0].split() == ["word", "n"]
    assert newest.rows == [["one", "2"], ["three", "1"], ["two", "1"]]
    assert "the state at offset" in newest.err
    past = await query(gazctl, WORDS, "--at", f"a/source={first}", "--scratch-dir", str(scratch))
    assert past.rows == [["one", "2"], ["two", "1"]]
    assert list(scratch.iterdir()) == []

    # Case: a state before the first commit, and a time that cannot be read.
    nothing = await query(gazctl, WORDS, "--at", "1")
    assert (nothing.code, "no transaction was committed" in nothing.err) == (1, True)
    wrong = await query(gazctl, WORDS, "--at", "soon")
    assert (wrong.code, "--at" in wrong.err) == (2, True)
    away = await query(gazctl, WORDS, "--scratch-dir", str(tmp_path / "none"))
    assert (away.code, "cannot make a temporary directory" in away.err) == (1, True)


async def test_values_of_all_types_and_hostile_texts_are_shown_safely(
    broker: BrokerFixture, words: ConsumerFixture, gazctl: Runner
) -> None:
    await append(broker, frame("one"), frame("two"), journal="a/source")
    await words.read_to_heads(SHARD)
    sql = f'SELECT a, b, c, d AS "{HOSTILE}", 9e999 AS a FROM values_of_types'

    table = await query(gazctl, sql)
    assert ["NULL", "x'00ff'", "1.5", "\\x1b]0;owned\\x07\\u202e", "inf"] in table.rows
    assert not set(HOSTILE[-1] + "\x1b\x07") & set(table.out)

    document = json.loads((await query(gazctl, sql, "--format=json")).out)
    assert document["columns"] == ["a", "b", "c", HOSTILE, "a"]
    assert document["rows"] == [[None, {"hex": "00ff"}, 1.5, HOSTILE, "inf"]]
    assert (document["shard"], document["log"]) == (SHARD, f"{LOGS}/{SHARD}")
    assert document["truncated"] is False
    assert document["offset"] > 0

    rows = list(csv.reader((await query(gazctl, sql, "-o", "csv")).out.splitlines()))
    assert rows[1] == ["", "x'00ff'", "1.5", HOSTILE, "inf"]

    # Case: line ends within values, and a row that is empty.
    lines = "SELECT 'a' || char(13) || 'b' AS c UNION ALL SELECT NULL UNION ALL SELECT char(13, 10)"
    text = (await query(gazctl, lines, "-o", "csv")).out
    assert text == 'c\n"a\rb"\n""\n"\r\n"\n'

    # Case: full-text search reads, though its tables prepare writes.
    matches = await query(gazctl, "SELECT body FROM texts WHERE texts MATCH 'two'")
    assert matches.rows == [["two"]]
    # Case: no row. The columns are there.
    assert (await query(gazctl, "SELECT word FROM counts WHERE 0")).out == "word\n"


async def test_rows_and_time_are_bounded(
    broker: BrokerFixture, words: ConsumerFixture, gazctl: Runner
) -> None:
    await append(broker, frame("one"), frame("two"), frame("three"), journal="a/source")
    await words.read_to_heads(SHARD)
    some = await query(gazctl, WORDS, "--max-rows=2")
    assert some.rows == [["one", "1"], ["three", "1"]]
    assert "only the first 2 rows are shown" in some.err
    every = await query(gazctl, WORDS, "--max-rows=3", "-o", "json")
    assert (json.loads(every.out)["truncated"], "only the first" in every.err) == (False, False)

    endless = await query(gazctl, ENDLESS, "--timeout=2s")
    assert endless.code == 1
    assert "the query did not end within 2 s, and was interrupted" in endless.err
    large = await query(gazctl, "SELECT zeroblob(17000000)")
    assert (large.code, "more than 16.0 MiB" in large.err) == (2, True)
    blobs = "SELECT zeroblob(15000000) FROM (VALUES (1), (2), (3), (4), (5))"
    much = await query(gazctl, blobs)
    assert (much.code, "the result has more than 64.0 MiB" in much.err) == (2, True)
    wide = await query(gazctl, "SELECT zeroblob(1000000), 1 UNION ALL SELECT x'00', 2")
    assert (wide.code, len(wide.out) < 10_000) == (0, True)
    broken = await query(gazctl, "SELECT 'a\udcff'")
    assert (broken.code, "not UTF-8" in broken.err) == (2, True)
    commented = await query(gazctl, f"{WORDS}; -- by word", "--max-rows=1")
    assert (commented.code, commented.rows) == (0, [["one", "1"]])
    none = await query(gazctl, WORDS, "--max-rows=0")
    assert (none.code, "--max-rows" in none.err) == (2, True)


async def test_nothing_is_written(
    broker: BrokerFixture, words: ConsumerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    await append(broker, frame("one"), journal="a/source")
    await words.read_to_heads(SHARD)
    target = tmp_path / "target.db"
    for sql in (
        "DELETE FROM counts",
        "CREATE TABLE mine (a)",
        f"VACUUM INTO '{target}'",
        f"ATTACH 'file:{target}?mode=rwc' AS mine",
        "PRAGMA journal_mode = WAL",
        "BEGIN",
    ):
        result = await query(gazctl, sql)
        assert (result.code, result.out) == (2, ""), (sql, result)
        assert not target.exists()
    several = await query(gazctl, "SELECT 1; SELECT 2")
    assert (several.code, "one statement" in several.err) == (2, True)
    for sql, problem in (
        ("SELECT * FROM none", "no such table: none"),
        ("SELEC 1", "syntax error"),
        ("SELECT CAST(x'ff' AS TEXT)", "not UTF-8"),
        ("/* nothing */", "there is no statement that gives rows"),
    ):
        result = await query(gazctl, sql)
        assert (result.code, problem in result.err) == (2, True), result


async def test_a_state_without_sql_says_what_to_use(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner
) -> None:
    """Such as a state in a JSON file, or in a database of the user's own."""
    await broker.create(source_spec("a/source"), log_spec(SHARD))
    await consumer.create(shard_spec(SHARD, "a/source"))
    await append(broker, frame("one"), journal="a/source")
    await consumer.read_to_heads(SHARD)
    result = await query(gazctl, WORDS)
    assert result.code == 2
    assert f"{SHARD} has no SQLite database: its state is a JSON file" in result.err
    assert f"gazctl shards recover --id {SHARD}" in result.err

    await consumer.update(ShardSpec("shard-two", max_txn_duration_ns=1, disable=True))
    result = await gazctl("shards", "query", "shard-two", WORDS)
    assert (result.code, "Query that database itself" in result.err) == (2, True)
    result = await gazctl("shards", "query", "shard-none", WORDS)
    assert (result.code, "shard not found" in result.err) == (1, True)
    result = await gazctl("shards", "query", SHARD)
    assert (result.code, "ID SQL" in result.err) == (2, True)
