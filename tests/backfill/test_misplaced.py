"""Backfills of sources whose misplaced messages shards have republished: each message counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gazette import Source
from gazette.consumer.contract.key_check import Misplaced
from gazette.errors import Invalid
from gazette.history.backfill.build import ShardTask, run_task
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.local import LocalRunner
from gazette.history.backfill.plan import message_format_of, tasks_of
from gazette.history.backfill.settings import RunSettings
from gazette.history.snapshot import Snapshot
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.history.tables import read_table
from gazette.labels import CONTENT_JSON_LINES
from gazette.protocol.label_set import EVERYTHING
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.stored import write_journal
from tests.backfill.apps import SCHEMA, Word, Words, counted
from tests.backfill.cluster import shard_settings
from tests.facts import raises

STORE = "file:///fragments/"
WORDS = [f"word-{n:02d}" for n in range(13)]


class Republishing(Words):
    words = Source("words", Word, partitions=2, key="word", misplaced="republish")

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA)


class Failing(Republishing):
    words = Source("words", Word, partitions=2, key="word", misplaced="fail")


class Counting(Republishing):
    words = Source("words", Word, partitions=2, key="word")


PARTS = Republishing.words.journals


class Listing(Backfill):
    """Keeps what ``build`` gets."""

    application = Republishing

    def __init__(self) -> None:
        self.found: list[str] = []

    def build(self, shard: Any, store: Any, messages: Any) -> None:
        self.found += [word for word, n in counted(messages) for _ in range(n)]


class ListingAll(Listing):
    application = Counting


class ListingOrFailing(Listing):
    application = Failing


class Folding(Listing):
    fields = "word string"

    def fold(self, frame: Any) -> Any:
        return frame.groupBy("shard", "word").count()


class FoldingOrFailing(Folding):
    application = Failing


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Store journals in which a shard has moved words to the other partition."""
    with AppDriver(Republishing(), tmp_path / "shard", [PARTS[0]]) as driver:
        driver.publish(PARTS[0], *(Word(word=word) for word in WORDS))
        driver.run()
        for part in PARTS:
            write_journal(tmp_path, STORE, part, [driver.journals.content(part)])
    return tmp_path


def snapshot_of(root: Path) -> tuple[Access, Snapshot]:
    access = Access.of(file_root=root, direct=True)
    shape = message_format_of(CONTENT_JSON_LINES, Word, "uuid")
    selection = Selection(journals=PARTS, stores=(STORE,), shape=shape)
    with access.open() as opened:
        return access, take_snapshot(opened, selection)


def tasks(root: Path, backfill: Backfill) -> list[ShardTask]:
    access, snapshot = snapshot_of(root)
    folded = LocalRunner(1).fold(access, snapshot, lambda _: None, backfill)
    specs = [shard_settings(f"shard-{n:03d}", part) for n, part in enumerate(PARTS)]
    settings = RunSettings(EVERYTHING, str(root / "staging"), "run", scratch=root)
    return tasks_of(backfill, "", specs, folded, access, settings)


def test_a_build_gets_what_shards_consume(root: Path) -> None:
    """The message where it was published, and the one that it became, count once."""
    backfill = Listing()
    for task in tasks(root, backfill):
        run_task(task)
    assert sorted(backfill.found) == WORDS


def test_a_build_of_a_source_that_counts_gets_all(root: Path) -> None:
    backfill = ListingAll()
    for task in tasks(root, backfill):
        run_task(task)
    assert len(backfill.found) > len(WORDS)


def test_a_build_fails_where_the_shard_would(root: Path) -> None:
    with raises(Misplaced, journal=PARTS[0]):
        run_task(tasks(root, ListingOrFailing())[0])


@pytest.mark.parametrize("backfill", [Folding(), FoldingOrFailing()])
def test_a_fold_that_would_count_messages_twice_is_refused(root: Path, backfill: Backfill) -> None:
    """Before a session of Spark is begun."""
    pytest.importorskip("pyspark")
    from gazette.history.spark.backfill import SparkRunner

    access, snapshot = snapshot_of(root)
    with raises(Invalid, path=f"{type(backfill).__name__}.fold", says=PARTS[0], advises="build()"):
        SparkRunner(spark=object()).fold(access, snapshot, lambda _: None, backfill)


def test_rows_of_a_table_are_filtered_by_their_partitions(root: Path) -> None:
    """As the page on declarations does it: a table does not know what shards have moved."""
    table = read_table(PARTS, store=(root / "fragments").as_uri() + "/", fields="word string")
    assert table.num_rows > len(WORDS)
    source = Republishing.words
    own = [source.partition_of_key(row["word"]) == row["journal"] for row in table.to_pylist()]
    assert sorted(table.filter(own).column("word").to_pylist()) == WORDS
