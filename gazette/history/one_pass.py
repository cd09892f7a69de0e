"""Does both passes over a run in one reading, for rows that are combined. Needs pyarrow.

Other runs decide which messages of a run have committed. But a run seldom repeats messages of an earlier
run. So `read_once` assumes that a run repeats none. Rows that are pending at the end of the run are kept
apart. When all summaries are folded, `select_parts` returns which rows count, and which runs must be read
again. Until then, only combined rows are kept, which are few.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa

from gazette.history.combine import Combine, Combiner
from gazette.history.commit_filter import CommitFilter, Mask, PendingProducer
from gazette.history.first_pass import read_and_summarise, summarise_run
from gazette.history.merge import CommittedRun
from gazette.history.read import Batch
from gazette.history.row_format import RowFormat
from gazette.history.rows import RowMaker, Unfit
from gazette.history.snapshot import Run
from gazette.history.source import OpenAccess
from gazette.history.summary import Summary
from gazette.message.framing.frames import MalformedMessage

LOGGER: Final = logging.getLogger(__name__)

COMMITTED: Final = -1
"""Number of the part with the rows that committed within the run. Other parts have numbers of producers."""
_PENDING_MAX: Final = 64
"""Greatest number of producers whose pending rows are kept apart. With more, the run is read again."""


class Part(NamedTuple):
    """Some combined rows of a run, and the number of their part."""

    number: int
    rows: pa.RecordBatch


class OnePass(NamedTuple):
    """Result of reading a run once."""

    summary: Summary
    pending: tuple[PendingProducer, ...] | None
    """Producers whose rows are pending at the end. None if the run must be read again."""


def read_once(
    access: OpenAccess, run: Run, format: RowFormat, combine: Combine
) -> Generator[Part, None, OnePass]:
    """Yield the combined rows of a run, as if it repeated no messages of earlier runs. Return its summary.

    If the result says that the run must be read again, ignore the rows. It says so if ``combine`` raises, and
    for more than `_PENDING_MAX` producers with pending rows. It also says so if a message is malformed or
    does not fit: the second reading shows whether such a message commits, or ends a message of the run
    before. A run with replayed messages is not read here: the result says so, too. Raise the errors of
    `summarise_run`.
    """
    result = None
    if run.pieces[0].begin >= run.begin:  # Pieces before the run would have replayed messages.
        try:
            result = yield from _read(access, run, format, partial(_guarded, combine))
        except (MalformedMessage, Unfit):
            pass  # The second reading raises the error again if the message commits.
        except _NotCombined as error:
            LOGGER.warning(
                "combine() has raised %(error)r for rows that may not commit: the rows of %(journal)s from "
                "offset %(begin)s on are read again",
                {"error": error.__cause__, "journal": run.journal, "begin": run.pieces[0].begin},
            )
    return OnePass(summarise_run(access, run), None) if result is None else result


def select_parts(
    read: Sequence[tuple[Run, OnePass]], runs: Iterable[CommittedRun]
) -> tuple[list[tuple[int, int]], list[CommittedRun]]:
    """Return which rows count, as pairs of a position in ``read`` and a part's number. Also return the folded
    runs that must be read again."""
    positions = {run.number: position for position, (run, _) in enumerate(read)}
    selected: list[tuple[int, int]] = []
    to_reread: list[CommittedRun] = []
    for committed in runs:
        parts = None
        position = positions.get(committed.run.number)
        # The fold may have moved the begin or the end of the run: then the rows of `read` are others.
        if position is not None and read[position][0] == committed.run:
            parts = _parts_that_count(committed, read[position][1])
        if position is None or parts is None:
            to_reread.append(committed)
        else:
            selected += [(position, part) for part in parts]
    return selected, to_reread


def _parts_that_count(run: CommittedRun, found: OnePass) -> set[int] | None:
    """Return the parts of a run whose rows have committed. Return None if the run must be read again."""
    if found.pending is None:
        return None
    for producer, (_, newest) in run.known.items():
        summary = found.summary.producers.get(producer)
        if summary is None:
            continue
        if summary.first_clock <= newest:
            return None  # The run may repeat messages of earlier runs.
        if summary.outside is not None and summary.pending == summary.first_clock:
            # A message outside of transactions may be new, although its clock is below the first clock:
            # `read_once` took the message for a duplicate.
            return None
    parts = {COMMITTED}
    for pending in found.pending:
        fate = run.fates.get(pending.producer)
        if fate is None or fate < pending.first:
            continue
        if fate < pending.newest:
            return None  # Only some of the pending rows have committed.
        parts.add(pending.producer)
    return parts


def _read(
    access: OpenAccess, run: Run, format: RowFormat, combine: Combine
) -> Generator[Part, None, OnePass | None]:
    """Do the work of `read_once`. Return None if the run must be read again."""
    rows = _Rows(run, format, combine)
    commit_filter: CommitFilter[Batch] = CommitFilter(CommittedRun(run), acks=format.acks)
    reading = read_and_summarise(access, run, rows.maker.scanned)
    while True:
        try:
            batch, split = next(reading)
        except StopIteration as end:
            summary: Summary | None = end.value
            break
        commit_filter.add(batch.columns, rows.maker.with_arrays(batch), split)
        yield from rows.add(COMMITTED, commit_filter.ready())
    pending = commit_filter.pending()
    if summary is None or len(pending) > _PENDING_MAX:
        return None
    for producer, masks in pending.items():
        yield from rows.add(producer.producer, iter(masks))
    commit_filter.finish()
    yield from rows.add(COMMITTED, commit_filter.ready())
    yield from rows.finish()
    return OnePass(summary, tuple(pending))


class _NotCombined(Exception):
    """``combine`` has raised an error, which is the cause of this one."""


def _guarded(combine: Combine, rows: pa.Table) -> pa.Table:
    """Call ``combine``. Raise its error as the cause of `_NotCombined`."""
    try:
        return combine(rows)
    except Exception as error:
        raise _NotCombined from error


class _Rows:
    """Maker of the rows of one run, which combines the rows of each part separately."""

    def __init__(self, run: Run, format: RowFormat, combine: Combine) -> None:
        self.maker = RowMaker(run, format)
        self._format = format
        self._combine = combine
        self._combiners: dict[int, Combiner] = {}

    def add(self, part: int, found: Iterator[tuple[Batch, Mask]]) -> Iterator[Part]:
        """Add the messages in the masks to a part. Yield its rows that are not held back."""
        combiner = self._combiners.get(part)
        if combiner is None:
            combiner = self._combiners[part] = Combiner(self._combine, self._format.schema)
        for batch, mask in found:
            for rows in self.maker.rows(batch, mask) if mask.any() else ():
                yield from (Part(part, combined) for combined in combiner.add(rows))

    def finish(self) -> Iterator[Part]:
        for part, combiner in self._combiners.items():
            yield from (Part(part, combined) for combined in combiner.finish())
