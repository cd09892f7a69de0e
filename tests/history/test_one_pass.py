"""Rows that are made before it is known what has committed: those that count are the committed ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gazette.history.columns import Malformed
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
from tests.history.test_histories import Item, histories, sequenced
from tests.history.test_summaries import Stored, opened

FORMAT: Final = RowFormat("json", pa.schema([("n", pa.int64())]))


class Once:
    """A history whose runs are read once, and those again that have to be."""

    def __init__(self, access: OpenAccess, format: RowFormat = FORMAT) -> None:
        self.access = access
        self.format = format
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
        reading = read_once(self.access, run, self.format, lambda rows: rows)
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


@settings(max_examples=examples(300), deadline=None)
@given(
    items=histories,
    middle=st.integers(0, 40),
    last=st.integers(0, 60),
    cuts=st.sets(st.integers(1, 60)),
    run_bytes=st.sampled_from([1, 300, 1000, 100_000]),
    summaries=st.sampled_from(["", NO_SUMMARIES]),
    torn=st.sampled_from([0.0, 0.0, 0.3]),
    malformed=st.sampled_from(["fail", "skip", "null"]),
    seed=st.integers(0, 2**32),
)
@example(
    # New by what was before the run, though below the first clock of the run.
    items=[Item(0, 1, 0), Item(0, 6, 1), Item(0, 9, 1), Item(0, 5, 0)],
    middle=0,
    last=60,
    cuts={2},
    run_bytes=1,
    summaries="",
    torn=0.0,
    malformed="fail",
    seed=1,
)
@example(
    # Two messages are pending where a run ends, of which the first one commits.
    items=[Item(0, 1, 1), Item(0, 2, 1), Item(0, 1, ACK_TXN)],
    middle=0,
    last=60,
    cuts={2},
    run_bytes=1,
    summaries="",
    torn=0.0,
    malformed="fail",
    seed=1,
)
def test_the_rows_that_count_have_committed(
    items: list[Item],
    middle: int,
    last: int,
    cuts: set[int],
    run_bytes: int,
    summaries: str,
    torn: float,
    malformed: Malformed,
    seed: int,
) -> None:
    """From any checkpoint to any end, over any runs: what one sequencer makes."""
    journal = Stored(items, cuts, random.Random(seed), torn)
    count = len(items)
    middle, last = min(middle, count), max(min(middle, count), min(last, count))
    begin = journal.envelopes[middle].begin if middle < count else journal.end
    end = max(begin, journal.envelopes[last - 1].end if last else 0)
    prior = sequenced(journal.envelopes, None, 0, begin)[1] if middle else None
    want, checkpoint = sequenced(journal.envelopes, prior, begin, end)
    with opened(journal.store, summaries) as access:
        once = Once(access)
        folded = once.fold(journal.snapshot(begin, end, prior, malformed), run_bytes)
        assert once.committed(folded) == sorted(e.message for e in want if not e.is_ack)
        # Their summaries are those of a first pass alone.
        assert folded.sources == {journal.envelopes[0].journal: checkpoint} if items else True
        assert folded == journal.folded(folded.snapshot, run_bytes, NO_SUMMARIES)


TRANSACTIONS: Final = [
    item
    for n in range(1, 41)
    for item in (Item(0, 3 * n, CONTINUE_TXN), Item(1, n, OUTSIDE_TXN), Item(0, 3 * n + 1, ACK_TXN))
]


@pytest.mark.parametrize(("repeated", "again"), [(False, 0), (True, 1)])
def test_only_a_run_that_repeats_is_read_again(repeated: bool, again: int) -> None:
    """Transactions that are open where runs end cost nothing, and neither do several producers."""
    items = list(TRANSACTIONS)
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
