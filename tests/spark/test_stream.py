"""The stream reader, in this process: Spark's part is played by the tests."""

from __future__ import annotations

import itertools
import json
import pickle
import random

import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles

from gazette.errors import Corrupt
from gazette.message.message_uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, clock_at
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint
from gazette.spark.ddl import parse_columns
from gazette.spark.source import GazetteDataSource
from gazette.spark.stream import decode_offset, encode_offset
from gazette.testing.stored import json_line, write_fragment, write_journal

STORE = "file:///fragments/"
NOON = clock_at(1_700_000_000 * 10**9)
SCHEMA = from_arrow_schema(parse_columns("n long, offset long"), prefer_timestamp_ntz=False)


def line(producer: int, at: int, flags: int, **fields: object) -> bytes:
    return json_line(fields, build_uuid(bytes([1, 0, 0, 0, 0, producer]), NOON + at, flags))


class Journal:
    """A journal that grows, one fragment at a time."""

    def __init__(self, root, name: str) -> None:
        self.root, self.name, self.end = root, name, 0
        (root / "fragments").mkdir(exist_ok=True)

    def add(self, *lines: bytes) -> None:
        content = b"".join(lines)
        write_fragment(self.root, STORE, self.name, self.end, content)
        self.end += len(content)


class Query:
    """What Spark does with a stream: it logs offsets, and each batch is planned from two of them."""

    def __init__(self, options: dict[str, str], log: list[dict] | None = None) -> None:
        self.reader = GazetteDataSource(options).streamReader(SCHEMA)
        self.log = [] if log is None else log

    def step(self, limit=None) -> list[int] | None:
        """The next batch; None if there is nothing new."""
        if not self.log:
            self.log.append(self.reader.initialOffset())
        start = self.log[-1]
        limit = self.reader.getDefaultReadLimit() if limit is None else limit
        end = json.loads(json.dumps(self.reader.latestOffset(start, limit)))
        if json.dumps(end) == json.dumps(start):
            return None
        self.log.append(end)
        return self.batch(start, end)

    def batch(self, start: dict, end: dict) -> list[int]:
        rows = []
        for partition in self.reader.partitions(start, end):
            for batch in pickle.loads(pickle.dumps(self.reader)).read(partition):
                rows += batch.column("n").to_pylist()
        return rows


def options(root, **more: str) -> dict[str, str]:
    return {
        "store": f"file://{root}/fragments",
        "journal": "topic/a",
        "refresh": "0",
        "run_bytes": "1",
        **more,
    }


def test_messages_come_when_they_commit(tmp_path):
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


def test_a_batch_is_planned_again_after_a_restart(tmp_path):
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


def test_admission(tmp_path):
    for name in ("topic/a", "topic/b"):
        journal = Journal(tmp_path, name)
        for at in range(1, 4):
            journal.add(line(1, at, OUTSIDE_TXN, n=at))
    both = {"journal": "topic/a,topic/b"}
    query = Query(options(tmp_path, **both, max_fragments="2"))
    assert isinstance(query.reader.getDefaultReadLimit(), ReadMaxFiles)
    assert [query.step() for _ in range(4)] == [[1, 1], [2, 2], [3, 3], None]
    size = len(line(1, 1, OUTSIDE_TXN, n=1))
    query = Query(options(tmp_path, **both, max_bytes=str(3 * size)))
    assert isinstance(query.reader.getDefaultReadLimit(), ReadMaxBytes)
    assert [query.step() for _ in range(3)] == [[1, 2, 1], [3, 2, 3], None]
    # Whatever the options say, the trigger may want all.
    query = Query(options(tmp_path, **both, max_fragments="1"))
    assert query.step(ReadAllAvailable()) == [1, 2, 3] * 2


def test_available_now_ends(tmp_path):
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    journal.add(line(1, 2, OUTSIDE_TXN, n=2))
    query = Query(options(tmp_path, max_fragments="1"))
    query.reader.prepareForTriggerAvailableNow()
    assert query.step() == [1]
    journal.add(line(1, 3, OUTSIDE_TXN, n=3))
    assert query.step() == [2]
    assert query.step() is None
    again = Query(options(tmp_path, max_fragments="1"), query.log)
    again.reader.prepareForTriggerAvailableNow()
    assert [again.step(), again.step()] == [[3], None]


def test_where_a_query_begins(tmp_path):
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1))
    at = journal.end
    journal.add(line(1, 2, OUTSIDE_TXN, n=2))
    assert Query(options(tmp_path, begin=str(at))).step() == [2]
    latest = Query(options(tmp_path, starting="latest"))
    assert latest.step() is None
    journal.add(line(1, 3, OUTSIDE_TXN, n=3))
    assert latest.step() == [3]


def test_uncommitted(tmp_path):
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, CONTINUE_TXN, n=1), line(1, 1, CONTINUE_TXN, n=1))
    query = Query(options(tmp_path, isolation="read_uncommitted"))
    assert [query.step(), query.step()] == [[1, 1], None]
    assert decode_offset(query.log[-1])["topic/a"].producers == {}


def test_silent_producers_are_forgotten(tmp_path):
    """What a task that died has left pending must not be carried along for ever."""
    journal = Journal(tmp_path, "topic/a")
    second = 16 * 10**7
    journal.add(line(1, 1, CONTINUE_TXN, n=1), line(2, 1, OUTSIDE_TXN, n=2))
    query = Query(options(tmp_path, producer_horizon="60"))
    query.step()
    assert len(decode_offset(query.log[-1])["topic/a"].producers) == 2
    journal.add(line(2, 61 * second, OUTSIDE_TXN, n=3))
    assert query.step() == [3]
    assert len(decode_offset(query.log[-1])["topic/a"].producers) == 1


def test_offsets_are_texts_that_compare():
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
    for wrong in ({"a": 5}, {"a": {"at": 1}}, {"a": {"at": 1, "producers": {"zz": "1"}}}):
        with pytest.raises(Corrupt, match="offset of the stream cannot be read"):
            decode_offset(wrong)


def test_a_journal_that_was_made_anew(tmp_path):
    journal = Journal(tmp_path, "topic/a")
    journal.add(line(1, 1, OUTSIDE_TXN, n=1), line(1, 2, OUTSIDE_TXN, n=2))
    query = Query(options(tmp_path))
    query.step()
    for path in (tmp_path / "fragments" / "topic" / "a").iterdir():
        path.unlink()
    Journal(tmp_path, "topic/a").add(line(1, 1, OUTSIDE_TXN, n=1))
    with pytest.raises(Corrupt, match="cannot be read again"):
        Query(options(tmp_path), query.log).batch(*query.log[-2:])


@pytest.mark.parametrize("seed", range(6))
def test_any_batches_give_what_one_table_gives(tmp_path, seed):
    """Each committed message in one batch, whatever the batches, with restarts between them."""
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
    plain = {name: text for name, text in options(tmp_path).items() if name != "refresh"}
    table = GazetteDataSource(plain).reader(SCHEMA)
    want = [
        n
        for partition in table.partitions()
        for batch in table.read(partition)
        for n in batch.column("n").to_pylist()
    ]
    found: list[int] = []
    query = Query(options(tmp_path, max_fragments=str(rng.randint(1, 3))))
    while (batch := query.step()) is not None:
        found += batch
        if rng.random() < 0.5:
            query = Query(options(tmp_path, max_fragments=str(rng.randint(1, 3))), query.log)
            assert query.batch(*query.log[-2:]) == batch
    assert sorted(found) == sorted(want)
