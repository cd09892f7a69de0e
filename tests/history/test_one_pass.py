"""Rows that are made before it is known what has committed: those that count are the committed ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gazette.history.combine import Combine
from gazette.history.first_pass import resolver, summarise_run
from gazette.history.merge import FoldedSnapshot, fold_snapshot
from gazette.history.one_pass import OnePass, Part, read_once, select_parts
from gazette.history.row_format import RowFormat
from gazette.history.rows import Unfit, read_rows
from gazette.history.snapshot import Run, Snapshot
from gazette.history.source import NO_SUMMARIES, OpenAccess
from gazette.history.summary import Summary
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from tests.fuzzing import examples
from tests.history.test_histories import JOURNAL, Item
from tests.history.test_summaries import PUBLISHED, Reading, Stored, opened, readings

FORMAT: Final = RowFormat("json", pa.schema([("n", pa.int64())]))


class Once:
    """A history whose runs are read once, and those again that have to be."""

    def __init__(
        self,
        access: OpenAccess,
        format: RowFormat = FORMAT,
        combine: Combine = lambda rows: rows,
    ) -> None:
        self.access = access
        self.format = format
        self.combine = combine
        self.read: list[tuple[Run, OnePass]] = []
        self.rows: dict[tuple[int, int], list[int]] = {}
        self.again = 0

    def fold(self, snapshot: Snapshot, run_bytes: int) -> FoldedSnapshot:
        def summarise_all(runs: Sequence[Run]) -> list[Summary]:
            if self.read:
                return [summarise_run(self.access, run) for run in runs]
            self.read = [(run, self._once(at, run)) for at, run in enumerate(runs)]
            return [found.summary for _, found in self.read]

        return fold_snapshot(snapshot, summarise_all, resolver(self.access), run_bytes)

    def _once(self, at: int, run: Run) -> OnePass:
        reading = read_once(self.access, run, self.format, self.combine)
        while True:
            try:
                part: Part = next(reading)
            except StopIteration as end:
                found: OnePass = end.value
                return found
            self.rows.setdefault((at, part.number), []).extend(numbers(part.rows))

    def committed(self, folded: FoldedSnapshot) -> list[int]:
        wanted, again = select_parts(self.read, folded.runs)
        self.again = len(again)
        found = [number for part in wanted for number in self.rows.get(part, [])]
        for run in again:
            for rows in read_rows(self.access, run, self.format):
                found += numbers(rows)
        return sorted(found)


def numbers(rows: pa.RecordBatch) -> list[Any]:
    return list(rows.column(0).to_pylist())


def read_in_parts(items: list[Item]) -> Reading:
    """Return a reading of all messages, with a run for those from the third on."""
    return Reading(items, 0, 60, {2}, run_bytes=1, torn=0.0, malformed="fail", seed=1)


@settings(max_examples=examples(300), deadline=None)
@given(reading=readings, summaries=st.sampled_from(["", NO_SUMMARIES]))
@example(
    # New by what was before the run, though below the first clock of the run.
    reading=read_in_parts([Item(0, 1, 0), Item(0, 6, 1), Item(0, 9, 1), Item(0, 5, 0)]),
    summaries="",
)
@example(
    # Two messages are pending where a run ends, of which the first one commits.
    reading=read_in_parts([Item(0, 1, 1), Item(0, 2, 1), Item(0, 1, ACK_TXN)]),
    summaries="",
)
def test_the_rows_that_count_have_committed(reading: Reading, summaries: str) -> None:
    """From any checkpoint to any end, over any runs: what one sequencer makes."""
    journal, snapshot, messages, checkpoint = reading.expected(random.Random(reading.seed))
    with opened(journal.store, summaries) as access:
        once = Once(access)
        folded = once.fold(snapshot, reading.run_bytes)
        assert once.committed(folded) == sorted(e.message for e in messages)
        # Their summaries are those of a first pass alone.
        assert folded.sources == {JOURNAL: checkpoint}
        assert folded == journal.folded(folded.snapshot, reading.run_bytes, NO_SUMMARIES)


@pytest.mark.parametrize(("repeated", "again"), [(False, 0), (True, 1)])
def test_only_a_run_that_repeats_is_read_again(repeated: bool, again: int) -> None:
    """Transactions that are open where runs end cost nothing, and neither do several producers."""
    items = list(PUBLISHED)
    if repeated:
        items[60:60] = items[:3]
    journal = Stored(items, set(range(10, 120, 10)), random.Random(1), 0.0)
    fragments = [one.content_path() for one in journal.fragments]
    with opened(journal.store, "") as access:
        once = Once(access)
        folded = once.fold(journal.snapshot(0, journal.end, None), 1)
        assert journal.store.read == fragments
        journal.store.read.clear()
        assert len(once.committed(folded)) == 80
        assert once.again == again
        assert len(journal.store.read) == again
        # Later readers find the summaries.
        journal.store.read.clear()
        journal.folded(journal.snapshot(0, journal.end, None), 1)
        assert journal.store.read == []


def test_what_does_not_fit_is_an_error_if_it_commits() -> None:
    """And none if it is rolled back: then the run is read again."""
    format = RowFormat("json", pa.schema([("text", pa.int64())]))
    for clock, commits in ((1, False), (3, True)):
        items = [Item(0, 1, ACK_TXN), Item(0, 2, CONTINUE_TXN), Item(0, clock, ACK_TXN)]
        journal = Stored(items, {2}, random.Random(1), 0.0)
        with opened(journal.store, NO_SUMMARIES) as access:
            once = Once(access, format)
            folded = once.fold(journal.snapshot(0, journal.end, None), 1)
            if commits:
                with pytest.raises(Unfit):
                    once.committed(folded)
                assert once.again == 1
            else:
                assert once.committed(folded) == []
                # A roll-back repeats a clock of the run before.
                assert once.again == 2


def test_combine_may_refuse_what_does_not_commit() -> None:
    """Then the run is read again, and `combine` gets what has committed."""

    def combine(rows: pa.Table) -> pa.Table:
        if 1 in numbers(rows):
            raise ValueError("a message that was rolled back")
        return rows

    pending = [Item(0, 1, ACK_TXN), Item(0, 2, CONTINUE_TXN), Item(1, 1, OUTSIDE_TXN)]
    journal = Stored([*pending, Item(0, 1, ACK_TXN)], {3}, random.Random(1), 0.0)
    with opened(journal.store, NO_SUMMARIES) as access:
        once = Once(access, combine=combine)
        folded = once.fold(journal.snapshot(0, journal.end, None), 1)
        assert once.committed(folded) == [2]
        assert once.again == 2
