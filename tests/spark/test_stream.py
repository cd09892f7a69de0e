"""The stream reader, in this process: Spark's part is played by the tests."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import pickle
import random
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from gazette.blobs.blob_store import BlobInfo
from gazette.blobs.file import FileStore
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Corrupt, NotAllowed, NotFound
from gazette.history.ddl import parse_columns
from gazette.history.rows import Unfit
from gazette.history.snapshot import Snapshot
from gazette.history.snapshot_builder import take_snapshot
from gazette.history.spark.source import stream, stream_journals
from gazette.history.spark.source.options import StreamOptions
from gazette.history.spark.source.source import GazetteDataSource
from gazette.history.spark.source.stream import GazetteStreamReader
from gazette.history.spark.source.stream_offset import decode_offset, encode_offset
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.framing.frames import MalformedMessage
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, clock_at
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.spark import JournalLag, stream_lag
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.clock import ManualClock
from gazette.testing.stored import json_line, write_fragment, write_journal
from tests.confirmed_loss import LENGTH, holed_journal
from tests.facts import logged, raises
from tests.fuzzing import seeds
from tests.support.instant_clock import InstantClock

STORE = "file:///fragments/"
NOON = clock_at(1_700_000_000 * 10**9)
SCHEMA = from_arrow_schema(parse_columns("n long, offset long"), prefer_timestamp_ntz=False)


def line(producer: int, at: int, flags: int, **fields: object) -> bytes:
    return json_line(fields, build_uuid(bytes([1, 0, 0, 0, 0, producer]), NOON + at, flags))


class Journal:
    """A journal that grows, one fragment at a time."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name, self.end = root, name, 0
        (root / "fragments").mkdir(exist_ok=True)

    def add(self, *lines: bytes) -> None:
        content = b"".join(lines)
        write_fragment(self.root, STORE, self.name, self.end, content)
        self.end += len(content)


class Query:
    """What Spark does with a stream: it logs offsets, and each batch is planned from two of them."""

    def __init__(self, options: dict[str, str], log: list[dict[str, Any]] | None = None) -> None:
        self.reader = GazetteDataSource(options).streamReader(SCHEMA)
        self.log = [] if log is None else log

    def step(self, limit: Any = None) -> list[int] | None:
        """Return the next batch; None if there is nothing new."""
        if not self.log:
            self.log.append(self.reader.initialOffset())
        start = self.log[-1]
        limit = self.reader.getDefaultReadLimit() if limit is None else limit
        end = json.loads(json.dumps(self.reader.latestOffset(start, limit)))
        if json.dumps(end) == json.dumps(start):
            return None
        self.log.append(end)
        return self.batch(start, end)

    def batch(self, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
        rows = []
        for partition in self.reader.partitions(start, end):
            for batch in pickle.loads(pickle.dumps(self.reader)).read(partition):
                rows += batch.column("n").to_pylist()
        return rows


def options(root: Path, **more: str) -> dict[str, str]:
    return {
        "store": f"file://{root}/fragments",
        "journal": "topic/a",
        "refresh": "0",
        "maxPartitionBytes": "1",
        **more,
    }


def test_messages_come_when_they_commit(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, CONTINUE_TXN, n=1), line(2, 1, OUTSIDE_TXN, n=10))
    query = Query(options(tmp_path))
    assert query.step() == [10]
    assert query.step() is None
    journal.add(line(1, 2, CONTINUE_TXN, n=2), line(1, 2, CONTINUE_TXN, n=2))
    assert query.step() == []
    # What was pending for two batches, once.
    journal.add(line(1, 2, CONTINUE_TXN, n=2), line(1, 3, ACK_TXN), line(1, 3, OUTSIDE_TXN, n=3))
    assert query.step() == [1, 2]
    journal.add(line(1, 4, CONTINUE_TXN, n=4), line(1, 0, ACK_TXN), line(1, 4, OUTSIDE_TXN, n=5))
    assert query.step() == [5]
    assert query.step() is None


def test_a_batch_is_planned_again_after_a_restart(tmp_path: Path) -> None:
    """By another process, when the journal has grown, and its fragments were joined."""
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, CONTINUE_TXN, n=1))
    first = Query(options(tmp_path))
    assert first.step() == []
    lines = [line(1, 2, CONTINUE_TXN, n=2), line(1, 3, ACK_TXN)]
    journal.add(*lines)
    assert first.step() == [1, 2]
    journal.add(line(2, 9, OUTSIDE_TXN, n=9))
    content = line(1, 1, CONTINUE_TXN, n=1) + b"".join(lines) + line(2, 9, OUTSIDE_TXN, n=9)
    write_fragment(tmp_path, STORE, "topic/a", 0, content)
    second = Query(options(tmp_path), first.log)
    assert second.batch(first.log[1], first.log[2]) == [1, 2]
    assert second.step() == [9]


def test_admission(tmp_path: Path) -> None:
    for name in ("topic/a", "topic/b"):
        journal = Journal(tmp_path, name)
        for at in range(1, 4):
            journal.add(line(1, at, OUTSIDE_TXN, n=at))
    both = {"journal": "topic/a,topic/b"}
    query = Query(options(tmp_path, **both, maxRowsPerTrigger="2"))
    assert isinstance(query.reader.getDefaultReadLimit(), ReadMaxRows)
    assert [query.step() for _ in range(4)] == [[1, 1], [2, 2], [3, 3], None]
    size = len(line(1, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path, **both, maxBytesPerTrigger=str(3 * size)))
    assert isinstance(query.reader.getDefaultReadLimit(), ReadMaxBytes)
    assert [query.step() for _ in range(3)] == [[1, 2, 1], [3, 2, 3], None]
    # Whatever the options say, the trigger may want all.
    query = Query(options(tmp_path, **both, maxRowsPerTrigger="1"))
    assert query.step(ReadAllAvailable()) == [1, 2, 3] * 2


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_a_batch_may_end_within_a_fragment(tmp_path: Path, isolation: str) -> None:
    """By bytes, or by messages. A batch is larger only if a message is, and then at most twice as large."""
    journal = Journal(tmp_path, "topic/a")
    long = line(1, 4, OUTSIDE_TXN, n=4, text="x" * 1000)
    lines = [line(1, n, OUTSIDE_TXN, n=n) for n in range(1, 4)]
    journal.add(*lines, long, line(1, 5, OUTSIDE_TXN, n=5))
    journal.add(line(1, 6, OUTSIDE_TXN, n=6))
    size = len(lines[0])
    for limit, want in [
        ({"maxRowsPerTrigger": "2"}, [[1, 2], [3, 4], [5, 6], None]),
        ({"maxBytesPerTrigger": str(2 * size + 5)}, [[1, 2], [3], [4, 5], [6], None]),
    ]:
        query = Query(options(tmp_path, isolation=isolation, **limit))
        assert [query.step() for _ in want] == want
        again = Query(options(tmp_path, isolation=isolation, **limit), query.log)
        assert [again.batch(a, b) for a, b in itertools.pairwise(query.log)] == want[:-1]


def test_a_batch_ends_where_a_fragment_does_if_it_can(tmp_path: Path) -> None:
    """To end within the second one would have both batches decompress it."""
    journal = Journal(tmp_path, "topic/a")
    for n in (1, 3):
        journal.add(line(1, n, OUTSIDE_TXN, n=n), line(1, n + 1, OUTSIDE_TXN, n=n + 1))
    size = journal.end // 4
    for limit in ({"maxRowsPerTrigger": "3"}, {"maxBytesPerTrigger": str(3 * size)}):
        query = Query(options(tmp_path, **limit))
        assert [query.step() for _ in range(3)] == [[1, 2], [3, 4], None]


def test_a_query_begins_at_a_time(tmp_path: Path) -> None:
    """At messages of that time, whatever commits them later; and so after a restart with other options."""
    journal = Journal(tmp_path, "topic/a")
    second = 16 * 10**7
    journal.add(line(1, 1, OUTSIDE_TXN, n=1), line(2, 2, CONTINUE_TXN, n=20))
    journal.add(
        line(1, second, OUTSIDE_TXN, n=2),
        line(2, second + 1, CONTINUE_TXN, n=21),
        line(1, 2 * second, OUTSIDE_TXN, n=3),
    )
    since = {"startingTimestamp": "1700000001"}
    query = Query(options(tmp_path, maxRowsPerTrigger="3", **since))
    assert query.step() == []
    # Of a transaction that has begun before, the messages of the time and later ones.
    assert query.step() == [2, 3]
    journal.add(line(2, second + 2, ACK_TXN), line(3, 5, OUTSIDE_TXN, n=30))
    for given in (since, {"startingTimestamp": "1"}, {}):
        again = Query(options(tmp_path, **given), [*query.log])
        assert again.step() == [21]
        assert again.batch(*query.log[-2:]) == [2, 3]
    # Fragments that were stored before are not opened.
    for path in (tmp_path / "fragments" / "topic" / "a").iterdir():
        os.utime(path, (path.stat().st_mtime - 9000,) * 2)
    at = journal.end
    now = SystemClock().now()
    late = Query(options(tmp_path, startingTimestamp=str(int(now) - 600)))
    assert late.step() is None
    assert decode_offset(late.log[0])["topic/a"].read_through == at
    later = clock_at(int(now * 1e9)) - NOON
    journal.add(line(1, later, OUTSIDE_TXN, n=40))
    assert late.step() == [40]


def test_available_now_ends(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    journal.add(line(1, 2, OUTSIDE_TXN, n=2))
    query = Query(options(tmp_path, maxRowsPerTrigger="1"))
    query.reader.prepareForTriggerAvailableNow()
    assert query.step() == [1]
    journal.add(line(1, 3, OUTSIDE_TXN, n=3))
    assert query.step() == [2]
    assert query.step() is None
    again = Query(options(tmp_path, maxRowsPerTrigger="1"), query.log)
    again.reader.prepareForTriggerAvailableNow()
    assert [again.step(), again.step()] == [[3], None]


def test_where_a_query_begins(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    at = journal.end
    journal.add(line(1, 2, OUTSIDE_TXN, n=2))
    assert Query(options(tmp_path, startingOffsets=str(at))).step() == [2]
    latest = Query(options(tmp_path, startingOffsets="latest"))
    assert latest.step() is None
    journal.add(line(1, 3, OUTSIDE_TXN, n=3))
    assert latest.step() == [3]


def test_uncommitted(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, CONTINUE_TXN, n=1), line(1, 1, CONTINUE_TXN, n=1))
    query = Query(options(tmp_path, isolation="read_uncommitted"))
    assert [query.step(), query.step()] == [[1, 1], None]
    assert decode_offset(query.log[-1])["topic/a"].producers == {}


def test_silent_producers_are_forgotten(tmp_path: Path) -> None:
    """What a task that died has left pending must not be carried along for ever."""
    journal = Journal(tmp_path, "topic/a")
    second = 16 * 10**7
    journal.add(line(1, 1, CONTINUE_TXN, n=1), line(2, 1, OUTSIDE_TXN, n=2))
    query = Query(options(tmp_path, producerHorizon="60"))
    query.step()
    assert len(decode_offset(query.log[-1])["topic/a"].producers) == 2
    for n in range(3, 35):
        journal.add(line(2, 2 * (n - 3) * second + 2, OUTSIDE_TXN, n=n))
        assert query.step() == [n]
        remembered = len(decode_offset(query.log[-1])["topic/a"].producers)
        assert remembered == (2 if 2 * (n - 3) <= 58 else 1)


@pytest.mark.parametrize("ahead", [61, 2 * 10**10])
def test_the_clock_of_one_publisher_costs_no_message_of_others(ahead: int, tmp_path: Path) -> None:
    """It may be years ahead. A transaction stays open over batches in which it does not grow."""
    journal = Journal(tmp_path, "topic/a")
    second = 16 * 10**7
    journal.add(line(2, 1, OUTSIDE_TXN, n=0), line(2, ahead * second, OUTSIDE_TXN, n=1))
    journal.add(line(1, 1, CONTINUE_TXN, n=2), line(3, 1, CONTINUE_TXN, n=3))
    query = Query(options(tmp_path, producerHorizon="60"))
    assert query.step() == [0, 1]
    journal.add(line(2, ahead * second + 1, OUTSIDE_TXN, n=4))
    assert query.step() == [4]
    assert len(decode_offset(query.log[-1])["topic/a"].producers) == 3
    query = Query(options(tmp_path, producerHorizon="60"), query.log)
    journal.add(line(1, 2, ACK_TXN, n=5))
    assert query.step() == [2]
    # Case: all of them died, also the one with a transaction that is open.
    for n in range(6, 80):
        journal.add(line(4, 2 * n * second, OUTSIDE_TXN, n=n))
        assert query.step() == [n]
    assert len(decode_offset(query.log[-1])["topic/a"].producers) == 1


@pytest.mark.parametrize("at", [61, 119, 200])
def test_a_transaction_that_does_not_grow_is_as_young_as_its_last_message(
    at: int, tmp_path: Path
) -> None:
    """Its producer has committed nothing for longer than the horizon. The clock of another one may jump."""
    second = 16 * 10**7
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=0), line(2, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path, producerHorizon="60"))
    assert query.step() == [0, 1]
    journal.add(line(1, 55 * second, CONTINUE_TXN, n=2), line(2, 55 * second, OUTSIDE_TXN, n=3))
    assert query.step() == [3]
    journal.add(line(2, at * second, OUTSIDE_TXN, n=4))
    assert query.step() == [4]
    query = Query(options(tmp_path, producerHorizon="60"), query.log)
    journal.add(line(1, at * second, ACK_TXN, n=5))
    assert query.step() == [2]


def test_an_open_transaction_in_an_offset_of_version_0_1_0_is_young(tmp_path: Path) -> None:
    """Such an offset says of its producer only the last commit, which is a horizon ago."""
    second = 16 * 10**7
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=0), line(2, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path, producerHorizon="60"))
    query.step()
    journal.add(line(1, 59 * second, CONTINUE_TXN, n=2), line(2, 59 * second, OUTSIDE_TXN, n=3))
    query.step()
    del query.log[-1]["topic/a"]["seen"]
    journal.add(line(2, 65 * second, OUTSIDE_TXN, n=4))
    assert query.step() == [4]
    journal.add(line(1, 65 * second, ACK_TXN, n=5))
    assert query.step() == [2]


def test_offsets_are_texts_that_compare() -> None:
    sources = {
        "b": SourceCheckpoint(
            7, {b"\2" * 6: ProducerState(255, 3), b"\1" * 6: ProducerState(1, None)}
        ),
        "a": SourceCheckpoint(0),
    }
    offset = encode_offset(sources)
    assert json.dumps(offset) == json.dumps(
        {
            "a": {"at": 0, "producers": {}},
            "b": {"at": 7, "producers": {"010101010101": "1", "020202020202": "ff@3"}},
        }
    )
    assert decode_offset(json.loads(json.dumps(offset))) == sources
    # Case: what version 0.1.0 does not know has a key of its own, which that version ignores.
    states = {b"\1" * 6: ProducerState(1, None, 254), b"\2" * 6: ProducerState(255, 3, 254)}
    noted = encode_offset({"b": SourceCheckpoint(7, states)})
    assert noted["b"].pop("seen") == {"010101010101": "fe", "020202020202": "fe"}
    assert noted["b"] == offset["b"]
    for wrong in ({"a": 5}, {"a": {"at": 1}}, {"a": {"at": 1, "producers": {"zz": "1"}}}):
        with raises(Corrupt):
            decode_offset(wrong)


def test_a_journal_that_was_created_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1), line(1, 2, OUTSIDE_TXN, n=2))
    query = Query(options(tmp_path))
    query.step()
    for path in (tmp_path / "fragments" / "topic" / "a").iterdir():
        path.unlink()
    Journal(tmp_path, "topic/a").add(line(1, 1, OUTSIDE_TXN, n=1))
    with raises(Corrupt, says="topic/a"):
        Query(options(tmp_path), query.log).batch(*query.log[-2:])


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("mode", ["FAILFAST", "PERMISSIVE", "DROPMALFORMED"])
def test_a_journal_that_was_created_again_and_is_longer_already(
    mode: str, isolation: str, tmp_path: Path
) -> None:
    """No message begins where the stream has read to: no mode makes a row of half a message."""
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    given = options(tmp_path, mode=mode, isolation=isolation, summaries="none")
    query = Query(given)
    assert query.step() == [1]
    for path in (tmp_path / "fragments" / "topic" / "a").iterdir():
        path.unlink()
    Journal(tmp_path, "topic/a").add(*(line(1, n, OUTSIDE_TXN, n=1000 + n) for n in range(1, 9)))
    with raises(
        Corrupt, says="no message begins at the offset where reading begins", begin=journal.end
    ) as raised:
        Query(given, query.log).step()
    assert "another checkpointLocation" in raised.value.__notes__[0]
    with raises(Corrupt, says="no message begins at the offset where reading begins", begin=3):
        Query({**given, "startingOffsets": "3"}).step()


def test_a_journal_that_was_created_again_with_another_fragment_there(tmp_path: Path) -> None:
    """The offset is the begin of a fragment, and what it holds is no message."""
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    given = options(tmp_path, mode="FAILFAST", summaries="none")
    query = Query(given)
    assert query.step() == [1]
    journal.add(line(1, 2, OUTSIDE_TXN, n=2)[5:])
    with raises(
        Corrupt,
        says="no message begins at the offset where the stream",
        begin=len(line(1, 1, 0, n=1)),
    ):
        Query(given, query.log).step()


def test_a_malformed_message_behind_others_is_what_it_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path, mode="FAILFAST"))
    assert query.step() == [1]
    journal.add(line(1, 2, OUTSIDE_TXN, n=2), b"nonsense\n")
    with raises(MalformedMessage, journal="topic/a"):
        query.step()


def test_a_stream_waits_for_a_time_to_come(tmp_path: Path) -> None:
    """Its columns are inferred from what is there before that time."""
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1, word="x"))
    later = "4102444800"
    given = options(tmp_path, startingTimestamp=later)
    assert {"n", "word"} <= set(GazetteDataSource(given).schema().fieldNames())
    query = Query(given)
    assert query.step() in (None, [])
    at = clock_at(int(later) * 10**9)
    journal.add(json_line({"n": 2}, build_uuid(bytes([1, 0, 0, 0, 0, 1]), at, OUTSIDE_TXN)))
    assert query.step() == [2]


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("driver_bytes", [0, 1 << 18])
def test_any_batches_give_what_one_table_gives(
    tmp_path: Path, seed: int, driver_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each committed message in one batch, with restarts between them, read first by driver or tasks."""
    monkeypatch.setattr(stream, "_DRIVER_BYTES", driver_bytes)
    rng = random.Random(seed)
    lines: list[bytes] = []
    clock = itertools.count(1)
    for number in range(60):
        flags = rng.choice([OUTSIDE_TXN, CONTINUE_TXN, CONTINUE_TXN, CONTINUE_TXN, ACK_TXN])
        at = next(clock) - (rng.randint(0, 3) if rng.random() < 0.2 else 0)
        lines.append(line(rng.randint(1, 3), max(at, 1), flags, n=number))
    cuts = sorted({0, 60, *rng.sample(range(60), 12)})
    contents = [b"".join(lines[a:b]) for a, b in itertools.pairwise(cuts)]
    write_journal(tmp_path, STORE, "topic/a", contents)
    given = {**options(tmp_path), "summaries": "none"}
    plain = {name: text for name, text in given.items() if name != "refresh"}
    table = GazetteDataSource(plain).reader(SCHEMA)
    want = [
        n
        for partition in table.partitions()
        for batch in table.read(partition)
        for n in batch.column("n").to_pylist()
    ]
    found: list[int] = []

    def limited() -> dict[str, str]:
        limits = {
            "maxBytesPerTrigger": rng.randint(1, 2000),
            "maxRowsPerTrigger": rng.randint(1, 20),
        }
        name = rng.choice([*limits])
        return options(tmp_path, **{name: str(limits[name])})

    query = Query(limited())
    while (batch := query.step()) is not None:
        found += batch
        if rng.random() < 0.5:
            query = Query(limited(), query.log)
            assert query.batch(*query.log[-2:]) == batch
    assert sorted(found) == sorted(want)


def test_each_journal_has_its_turn(tmp_path: Path) -> None:
    """The first one always has more; and still the last one is read."""
    first, last = Journal(tmp_path, "topic/a"), Journal(tmp_path, "topic/b")
    last.add(line(1, 1, OUTSIDE_TXN, n=100))
    query = Query(options(tmp_path, journal="topic/a,topic/b", maxRowsPerTrigger="1"))
    found = []
    for at in range(1, 4):
        first.add(line(1, at, OUTSIDE_TXN, n=at))
        first.add(line(1, at, OUTSIDE_TXN, n=at))
        found += query.step() or []
    assert 100 in found
    assert 1 in found


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("mode", ["PERMISSIVE", "DROPMALFORMED", "FAILFAST"])
@pytest.mark.parametrize("limit", [{}, {"maxRowsPerTrigger": "1"}, {"maxBytesPerTrigger": "60"}])
def test_a_message_that_goes_on_in_other_fragments(
    tmp_path: Path, isolation: str, mode: str, limit: dict[str, str]
) -> None:
    """Its publisher appended it in parts: it is in the batch that has its end, and whole."""
    journal = Journal(tmp_path, "topic/a")
    long = line(1, 2, OUTSIDE_TXN, n=2, text="x" * 100)
    journal.add(line(1, 1, OUTSIDE_TXN, n=1), long[:50])
    journal.add(long[50:70])
    journal.add(long[70:], line(1, 3, OUTSIDE_TXN, n=3))
    begun = line(1, 4, OUTSIDE_TXN, n=4)
    journal.add(begun[:20])
    given = {"isolation": isolation, "mode": mode, "maxPartitionBytes": "1000", **limit}
    query = Query(options(tmp_path, **given))
    batches = [query.step() for _ in range(4)]
    assert batches[-1] is None
    assert [n for batch in batches for n in batch or ()] == [1, 2, 3]
    journal.add(begun[20:])
    again = Query(options(tmp_path, **given), query.log)
    assert [again.step(), again.step()] == [[4], None]


def test_a_journal_that_was_created_again_is_reported_before_more_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be read on from its middle as soon as it is long enough."""

    def patient(given: dict[str, str], log: list[dict[str, Any]]) -> Query:
        """Return a query for which no time passes while it waits for brokers that lag behind."""
        query = Query(given, log)
        query.reader = GazetteStreamReader(StreamOptions.parse(given), SCHEMA, InstantClock())
        return query

    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1), line(1, 2, OUTSIDE_TXN, n=2))
    query = Query(options(tmp_path))
    query.step()
    (path,) = (tmp_path / "fragments" / "topic" / "a").iterdir()
    path.unlink()
    # All was pruned from the store: nothing is known of its end.
    assert query.step() is None
    Journal(tmp_path, "topic/a").add(line(1, 1, OUTSIDE_TXN, n=1))
    for available_now in (False, True):
        query = patient(options(tmp_path), query.log)
        if available_now:
            query.reader.prepareForTriggerAvailableNow()
        with raises(Corrupt, journal="topic/a", end=54, read=108) as raised:
            query.step()
        assert "another checkpointLocation" in raised.value.__notes__[0]
    given = options(tmp_path, failOnDataLoss="false")
    query = patient(given, query.log)
    assert query.step() == [1]
    assert Query(given, query.log).batch(*query.log[-2:]) == [1]
    assert logged(caplog, journal="topic/a", end=54, read=108)
    assert query.step() is None
    # From then on it is a journal like others.
    again = Journal(tmp_path, "topic/a")
    again.end = 54
    for n in (5, 6, 7):
        again.add(line(1, n, OUTSIDE_TXN, n=n))
        assert query.step() == [n]


def test_a_listing_that_lags_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every broker knows of an append at once."""
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path))
    assert query.step() == [1]
    lagging = iter([True])

    def take(access: Any, selection: Any, places: Any) -> Any:
        if next(lagging, False):
            selection = replace(selection, journals=("topic/lags",), begin={"topic/lags": 9})
            Journal(tmp_path, "topic/lags").add(b"{}\n")
            (one,) = take_snapshot(access, selection).journals
            return Snapshot((replace(one, journal="topic/a"),))
        return take_snapshot(access, selection, places)

    monkeypatch.setattr(stream_journals, "take_snapshot", take)
    assert query.step() is None
    assert next(lagging, None) is None


def aged(path: Path, age_s: float) -> None:
    """Let a fragment have been stored that long ago."""
    then = SystemClock().now() - age_s
    os.utime(path, (then, then))


class Late:
    """A journal of three fragments, of which one is stored late."""

    def __init__(self, root: Path, number: int) -> None:
        self.root = root
        self._contents = [line(1, at, OUTSIDE_TXN, n=at) for at in (1, 2, 3)]
        self._number = number
        for at in range(3):
            if at != number:
                self.store(at)

    def store(self, at: int) -> Path:
        begin = sum(map(len, self._contents[:at]))
        fragment = write_fragment(self.root, STORE, "topic/a", begin, self._contents[at])
        return self.root / "fragments" / fragment.content_path()

    def store_late(self) -> None:
        self.store(self._number)


def lag_of(query: Query) -> JournalLag:
    """Return how far a query is behind its journal, from a progress as Spark makes one."""
    source = {
        "endOffset": json.dumps(query.log[-1]),
        "latestOffset": json.dumps(query.reader.reportLatestOffset()),
    }
    (lag,) = stream_lag({"timestamp": "2026-01-01T00:00:00.000Z", "sources": [source]})
    return lag


@pytest.mark.parametrize("fails", ["true", "false"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_stream_waits_for_a_fragment_that_is_stored_late(
    tmp_path: Path, fails: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether lost bytes are errors or not: these are not lost."""
    journal = Late(tmp_path, number)
    length = len(line(1, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path, failOnDataLoss=fails))
    assert (query.step() or []) == [1][:number]
    assert query.step() is None
    assert logged(caplog, journal="topic/a")
    reports = len(caplog.records)
    assert query.step() is None
    assert len(caplog.records) == reports
    # What is behind the gap is not read yet, and the progress says why.
    lag = lag_of(query)
    assert lag.awaited == (length * number, length * (number + 1))
    assert (lag.offset, lag.end, lag.behind_bytes) == (
        length * number, length * 3, length * (3 - number)
    )  # fmt: skip
    # It waits after a restart, too, and ends there if it is to end.
    again = Query(options(tmp_path, failOnDataLoss=fails), query.log)
    again.reader.prepareForTriggerAvailableNow()
    assert again.step() is None
    journal.store_late()
    query = Query(options(tmp_path, failOnDataLoss=fails), query.log)
    assert query.step() == [1, 2, 3][number:]
    assert query.step() is None
    assert (lag_of(query).awaited, lag_of(query).behind_bytes) == (None, 0)


@pytest.mark.parametrize(("number", "age_s"), [(0, 120), (1, 7 * 3600)])
def test_bytes_that_stay_away_are_lost(tmp_path: Path, number: int, age_s: float) -> None:
    journal = Late(tmp_path, number)
    for at in {0, 1, 2} - {number}:
        aged(journal.store(at), age_s)
    query = Query(options(tmp_path))
    if number == 0:
        # To begin at offset 0 misses nothing that was pruned.
        assert query.step() == [2, 3]
        return
    with raises(Corrupt, journal="topic/a"):
        query.step()
    assert Query(options(tmp_path, failOnDataLoss="false")).step() == [1, 3]


def test_a_stream_of_what_is_new_begins_behind_what_is_awaited(tmp_path: Path) -> None:
    journal = Late(tmp_path, 1)
    query = Query(options(tmp_path, startingOffsets="latest"))
    assert query.step() is None
    journal.store_late()
    assert query.step() is None


def test_fragments_that_were_joined_cut_and_pruned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The batches that are logged give the same rows, whatever of the journal is in which files."""
    journal = Journal(tmp_path, "topic/a")
    parts = [
        [line(1, 1, CONTINUE_TXN, n=1), line(2, 1, CONTINUE_TXN, n=11)],
        [line(1, 2, CONTINUE_TXN, n=2), line(2, 2, OUTSIDE_TXN, n=12)],
        [line(1, 3, ACK_TXN), line(2, 0, ACK_TXN), line(1, 4, OUTSIDE_TXN, n=4)],
    ]
    query = Query(options(tmp_path))
    batches = []
    for part in parts:
        journal.add(*part)
        batches.append(query.step())
    # The second producer's OUTSIDE message takes back what it had pending; its rollback changes nothing.
    assert batches == [[], [12], [1, 2, 4]]

    def replanned() -> list[Any]:
        again = Query(options(tmp_path), query.log)
        return [again.batch(a, b) for a, b in itertools.pairwise(query.log)]

    assert replanned() == batches
    directory = tmp_path / "fragments" / "topic" / "a"
    for path in directory.iterdir():
        path.unlink()
    whole = b"".join(itertools.chain(*parts))
    write_fragment(tmp_path, STORE, "topic/a", 0, whole)
    assert replanned() == batches
    for path in directory.iterdir():
        path.unlink()
    # Cut where no batch ends, and so that the first batch's are gone.
    cut = sum(map(len, parts[0])) + len(parts[1][0])
    write_journal(tmp_path, STORE, "topic/a", [whole[cut:]], begin=cut)
    again = Query(options(tmp_path), query.log)
    with raises(Corrupt, journal="topic/a", begin=sum(map(len, parts[0])), end=cut) as raised:
        again.batch(query.log[1], query.log[2])
    assert "failOnDataLoss=false" in raised.value.__notes__[0]
    with raises(Corrupt, journal="topic/a", producer="010000000001", begin=0):
        again.batch(query.log[2], query.log[3])
    # What is left of the transaction is read.
    again = Query(options(tmp_path, failOnDataLoss="false"), query.log)
    assert again.batch(query.log[1], query.log[2]) == [12]
    assert logged(caplog, journal="topic/a", end=cut)
    assert again.batch(query.log[2], query.log[3]) == [4]


def test_messages_whose_fields_change(tmp_path: Path) -> None:
    """New ones are not seen, missing ones are null; another type is null, or an error that names it."""
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path))
    assert query.step() == [1]
    journal.add(line(1, 2, OUTSIDE_TXN, n=2, more={"x": 1}), line(1, 3, OUTSIDE_TXN, m=3))
    assert query.step() == [2, None]
    journal.add(line(1, 4, OUTSIDE_TXN, n="many"), line(1, 5, OUTSIDE_TXN, n=5))
    before = [*query.log]
    with raises(Unfit, "begin", journal="topic/a", says='n: "many"'):
        Query(options(tmp_path, mode="FAILFAST"), [*before]).step()
    assert Query(options(tmp_path), [*before]).step() == [None, 5]
    assert Query(options(tmp_path, mode="DROPMALFORMED"), before).step() == [5]


async def test_journals_come_and_go(etcd: Etcd, tmp_path: Path) -> None:
    """Through a broker, by a selector: one is made in mid-query, one deleted, and named ones are missed."""
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        loop = asyncio.get_running_loop()

        def run(coro: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(coro, loop).result(30)

        def append(name: str, *lines: bytes) -> None:
            run(broker.client.append(AppendParams(name), b"".join(lines)))

        def play() -> None:
            given = {"broker.address": broker.endpoint, "refresh": "0"}
            with raises(NotFound, selector="prefix=topic/"):
                Query({**given, "selector": "prefix=topic/"}).step()
            run(broker.create(journal_spec("topic/a", labels=labels)))
            append("topic/a", line(1, 1, OUTSIDE_TXN, n=1))
            query = Query({**given, "selector": "prefix=topic/", "startingOffsets": "latest"})
            named = Query({**given, "journal": "topic/a"})
            assert query.step() is None
            assert named.step() == [1]
            run(broker.create(journal_spec("topic/b", labels=labels)))
            append("topic/b", line(1, 1, OUTSIDE_TXN, n=10))
            assert query.step() == [10]
            append("topic/a", line(1, 2, CONTINUE_TXN, n=2))
            assert query.step() == []
            run(
                broker.client.apply_journals(
                    [JournalChange(delete="topic/a", expect_mod_revision=-1)]
                )
            )
            append("topic/b", line(1, 2, OUTSIDE_TXN, n=20))
            assert query.step() == [20]
            again = Query({**given, "selector": "prefix=topic/"}, query.log)
            assert again.batch(*query.log[-2:]) == [20]
            with raises(Corrupt, says="journal=topic/a"):
                again.batch(*query.log[-3:-1])
            with raises(NotFound, journal="topic/a"):
                named.step()

        await asyncio.to_thread(play)


@pytest.mark.parametrize("fails", ["true", "false"])
async def test_a_stream_goes_on_behind_what_an_operator_has_confirmed(
    etcd: Etcd, tmp_path: Path, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In mid-query, whether lost bytes are errors or not: an operator has decided about them."""
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    lines = [line(1, at, OUTSIDE_TXN, n=at, pad="x" * LENGTH) for at in range(1, 6)]
    async with holed_journal(etcd, tmp_path, "topic/a", lines[:4], {1, 3}, labels) as holed:
        given = {"broker.address": holed.broker.endpoint, "refresh": "0", "journal": "topic/a"}
        given |= {"direct": "true", "fileRoot": str(holed.broker.file_root)}
        query = Query({**given, "failOnDataLoss": fails})
        assert await asyncio.to_thread(query.step) == [1]
        assert await asyncio.to_thread(query.step) is None
        assert lag_of(query).awaited == holed.lost[0]
        await holed.confirm()
        assert await asyncio.to_thread(query.step) == [3]
        assert await asyncio.to_thread(query.step) is None
        await holed.append(lines[4])
        assert await asyncio.to_thread(query.step) == [5]
        for begin, end in holed.lost:
            assert logged(caplog, "reason", journal="topic/a", begin=begin, end=end)
        # Case: of stores alone, which know nothing of it.
        store = Query(
            {**options(tmp_path / "root", failOnDataLoss=fails), "maxPartitionBytes": "1000000"}
        )
        assert await asyncio.to_thread(store.step) == [1]
        assert await asyncio.to_thread(store.step) is None
        for one in (query, store):
            one.reader.stop()


class Seam:
    """Counts what is read of a store by the driver: not by tasks, which run in this process, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self.listed = 0
        self.on = True
        seam, plain_open, plain_list = self, FileStore.open, FileStore.list_after

        class Counted(io.BufferedReader):
            def read(self, size: int | None = -1, /) -> bytes:
                found = super().read(size)
                seam.bytes += len(found) if seam.on else 0
                return found

        def opening(store: FileStore, path: str) -> BinaryIO:
            with plain_open(store, path) as source:
                return Counted(io.BytesIO(source.read()))

        def listing(store: FileStore, prefix: str, after: str) -> Iterator[BlobInfo]:
            for info in plain_list(store, prefix, after):
                seam.listed += 1
                yield info

        monkeypatch.setattr(FileStore, "open", opening)
        monkeypatch.setattr(FileStore, "list_after", listing)


class SeamQuery(Query):
    """A query whose tasks read beside the seam."""

    def __init__(self, seam: Seam, *given: Any) -> None:
        super().__init__(*given)
        self._seam = seam

    def batch(self, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
        rows = []
        for partition in self.reader.partitions(start, end):
            self._seam.on = False
            for batch in pickle.loads(pickle.dumps(self.reader)).read(partition):
                rows += batch.column("n").to_pylist()
            self._seam.on = True
        return rows

    def all(self) -> list[int]:
        found: list[int] = []
        while (batch := self.step()) is not None:
            found += batch
        return found


def test_the_driver_reads_little_of_a_long_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads at most 1 MB of a journal of 30 MB: after the first batch, and after a restart."""
    journal = Journal(tmp_path, "topic/a")
    text, count = "x" * 9900, itertools.count(1)

    def grow(fragments: int) -> list[int]:
        written = []
        for _ in range(fragments):
            numbers = [next(count) for _ in range(50)]
            journal.add(*(line(1, n, OUTSIDE_TXN, n=n, text=text) for n in numbers))
            written += numbers
        return written

    seam = Seam(monkeypatch)
    want = grow(61)
    assert journal.end > 30_000_000
    given = options(tmp_path, maxBytesPerTrigger="5100000", maxPartitionBytes=str(4 << 20))
    query = SeamQuery(seam, given)
    first = query.step()
    assert first == want[:500]
    assert seam.bytes > 4_900_000
    seam.bytes = 0
    assert first + query.all() == want
    assert seam.bytes <= 1_000_000
    # After a restart, the last batch is planned again; others find the same summaries.
    seam.bytes = 0
    again = SeamQuery(seam, given, query.log)
    assert again.batch(*query.log[-2:]) == want[-50:]
    assert again.step() is None
    assert SeamQuery(seam, options(tmp_path)).all() == want
    assert seam.bytes <= 1_000_000
    # What is appended is summarised by the tasks of a batch of its own.
    seam.bytes = 0
    more = grow(3)
    assert again.step() == []
    assert again.all() == more
    assert seam.bytes <= 100_000
    # A run with a single batch does not wait.
    more = grow(1)
    assert SeamQuery(seam, given, query.log).step() == more


def test_the_driver_reads_little_of_a_long_fragment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task summarises all portions of a fragment at once, and each batch finds its own."""
    journal = Journal(tmp_path, "topic/a")
    text = "x" * 9900
    for least in (1, 301):
        journal.add(*(line(1, n, OUTSIDE_TXN, n=n, text=text) for n in range(least, least + 300)))
    seam = Seam(monkeypatch)
    query = SeamQuery(seam, options(tmp_path, maxBytesPerTrigger="500000"))
    first = query.step()
    assert first == [*range(1, 51)]
    seam.bytes = 0
    assert first + query.all() == [*range(1, 601)]
    assert len(query.log) > 12
    assert seam.bytes <= 200_000


def test_a_store_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is waited for in vain more than once."""
    monkeypatch.setattr(stream, "_DRIVER_BYTES", 0)

    def refusing(store: FileStore, path: str, *_: Any, **__: Any) -> None:
        raise NotAllowed("read only", file=path)

    monkeypatch.setattr(FileStore, "put", refusing)
    journal = Journal(tmp_path, "topic/a")
    size = len(line(1, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path, maxBytesPerTrigger=str(size)))
    for n in range(1, 5):
        journal.add(line(1, n, OUTSIDE_TXN, n=n))
    assert [query.step() for _ in range(5)] == [[1], [2], [3], [4], None]


def test_listings_begin_where_reading_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll lists about twenty of 1,200 fragments, unless it is time to list all of them."""
    clock = ManualClock()
    journal = Journal(tmp_path, "topic/a")
    for n in range(1, 1201):
        journal.add(line(1, n, OUTSIDE_TXN, n=n))

    def following(**more: str) -> Query:
        given = options(tmp_path, **more)
        query = Query(given)
        query.reader = GazetteStreamReader(StreamOptions.parse(given), SCHEMA, clock)
        return query

    # A listing of so many is not repeated at once.
    slow = following(maxRowsPerTrigger="1", isolation="read_uncommitted")
    assert slow.step() == [1]
    listed = slow.reader._journals._listed
    clock.advance(0.09)
    assert slow.step() == [2]
    assert slow.reader._journals._listed is listed
    clock.advance(0.02)
    assert slow.step() == [3]
    assert slow.reader._journals._listed is not listed

    seam = Seam(monkeypatch)
    query = following(startingOffsets="latest", refresh="1")
    assert query.step() is None
    assert seam.listed >= 1200
    seam.listed = 0
    for n in range(1201, 1205):
        journal.add(line(1, n, OUTSIDE_TXN, n=n))
        clock.advance(1.2)
        assert query.step() == [n]
    assert 0 < seam.listed < 4 * 3 * 25
    # A fragment of a directory of its own that sorts before is found all the same, in time.
    seam.listed = 0
    content = line(1, 1205, OUTSIDE_TXN, n=1205)
    write_fragment(tmp_path, STORE, "topic/a", journal.end, content, path_postfix="0-=0")
    clock.advance(1.2)
    assert query.step() is None
    clock.advance(600.0)
    assert query.step() == [1205]
    assert seam.listed > 1200
