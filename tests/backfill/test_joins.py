"""Backfills of joins: what a replay joins, what it leaves, and what goes on from there."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import Application, Envelope, EventTime, Timer
from gazette.history.backfill.definition import Backfill
from gazette.labels import CONTENT_JSON_LINES
from gazette.stores.sqlite.store import SQLiteStore
from gazette.windows import JoinKind, StreamJoin, TableJoin
from tests.backfill.apps import Word
from tests.backfill.cluster import line
from tests.backfill.replays import JOURNALS, Replay, Story, Subject

RESULTS = "CREATE TABLE IF NOT EXISTS result (of TEXT, key TEXT, one TEXT, other TEXT);"
BOUND = timedelta(microseconds=30)


class Joins(Application[SQLiteStore]):
    """Joins the words of one journal with those of the other: as streams, and as a table."""

    message_type = Word
    event_time = EventTime(lateness=timedelta(microseconds=40))
    stream: StreamJoin[Any, Any] = StreamJoin("s", before=BOUND, after=BOUND, kind=JoinKind.OUTER)
    table: TableJoin[Any, Any] = TableJoin("t", wait=BOUND)

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, self.stream.schema + self.table.schema + RESULTS)

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Any
    ) -> None:
        word, at = envelope.message.word, envelope.time
        stream, table = self.stream, self.table
        if envelope.journal == JOURNALS[0]:
            self.note(store, stream.add_left(shard, store, word, at, 1).pairs)
            table.put(shard, store, word, at, str(at))
        else:
            self.note(store, stream.add_right(shard, store, word, at, 1).pairs)
            table.add(shard, store, word, at, 1)

    def on_timer(self, shard: Any, store: SQLiteStore, timer: Timer, publisher: Any) -> None:
        self.note(store, self.stream.on_timer(shard, store, timer))
        for one in self.table.on_timer(shard, store, timer):
            values = ("table", one.key, str(one.at), one.row)
            store.execute("INSERT INTO result VALUES (?, ?, ?, ?)", values)

    def note(self, store: SQLiteStore, pairs: Any) -> None:
        for one in pairs:
            values = ("stream", one.key, str(one.left_at), str(one.right_at))
            store.execute("INSERT INTO result VALUES (?, ?, ?, ?)", values)


class JoinsBackfill(Backfill):
    application = Joins

    def content(self, shard: Any, store: Any) -> Any:
        """Yield rows in an order that does not depend on how journals were interleaved."""
        for columns, table in (
            ("*", "result"),
            ("key, side, at, due", "s"),
            ("*", "t"),
            ("key, at, due", '"t.waiting"'),
            ("domain, key, at", "gazette_timer"),
        ):
            yield from sorted(store.execute(f"SELECT {columns} FROM {table}").fetchall(), key=repr)


JOINS = Subject(Joins, JoinsBackfill(), Word, CONTENT_JSON_LINES, lambda journal: line)
stories = st.builds(
    Story,
    seed=st.integers(0, 1 << 32),
    counts=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    per_fragment=st.integers(1, 30),
    lost=st.integers(0, 2),
    torn=st.booleans(),
    old=st.booleans(),
)


@settings(max_examples=12, report_multiple_bugs=False)
@given(story=stories)
def test_joins_that_were_backfilled_go_on_as_those_that_were_not(story: Story) -> None:
    """Check results, rows, timers and checkpoint, against a shard that consumed everything."""
    with tempfile.TemporaryDirectory(prefix="gazette-joins-") as directory:
        Replay(JOINS, story, Path(directory)).check()
