"""The committed rows of a run, kept on a local disk by a first pass for the second one.

Both passes need a run decompressed, its messages found and their UUIDs read, and that is most of what they
take. So the first pass may make the rows as well, and write them down. It does not know yet which messages
have committed: that takes the states of producers before the run, and what became of what is pending at its
end. It takes for granted that the run repeats nothing of what was before it. Then

* all is decided but what is pending at the end. What lies behind the first such message is kept as it is,
  with producers and clocks, for the second pass to decide;
* whether it was right, the fold knows (`CommittedRun.fresh`).

A kept file is never needed. Whoever does not find one, or one that took the wrong thing for granted, reads
the run again: so there is no harm in a disk that is full, a file that is gone, or another host.

Needs pyarrow.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from gazette.errors import Broken
from gazette.history.access import OpenAccess
from gazette.history.columns import require_uuids
from gazette.history.combine import Combine, Combiner
from gazette.history.commit_filter import CommitFilter, settled
from gazette.history.fold import CommittedRun
from gazette.history.found import FoundBatch, found_batches
from gazette.history.rows import RowFormat, RowMaker, read_rows
from gazette.history.segments import Cut, cut
from gazette.history.snapshot import Run
from gazette.history.summary import RunSummary, Summariser

LOGGER: Final = logging.getLogger(__name__)

_UNDECIDED: Final = (("pending", pa.bool_()), ("producer", pa.uint64()), ("clock", pa.uint64()))
"""Columns of what is not decided, before those of rows."""
KEPT_NAME: Final = r"[0-9a-f]{32}\.arrow"
"""Names of kept files, as a regular expression. They cannot be guessed."""
_FREE_SHARE: Final = 0.1
"""Nothing is kept on a disk that would have less than this left …"""
_TAKEN_SHARE: Final = 0.25
"""… and no more than this of it is taken: then the oldest files go, of whatever pass they are."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a first pass is to keep: rows of a format, put together by ``combine`` if there is one."""

    format: RowFormat
    combine: Combine | None = None


def summarise_keeping(
    access: OpenAccess, run: Run, keeping: Keeping, directory: Path
) -> tuple[RunSummary, str]:
    """What `summarise_run` gives and raises; and the path of the file with the run's rows, if they were kept.

    A file that was begun is removed if this raises.
    """
    require_uuids(run.journal, run.shape)
    summariser = Summariser(run)
    with _Writer(run, keeping, directory) as writer:
        for found in found_batches(access, run, keeping.format.scanned):
            pieces = cut(found.columns, run)
            summariser.take(found.columns, pieces)
            writer.take(found, pieces)
        return summariser.summary(), writer.finish()


def read_keeping(
    access: OpenAccess, run: CommittedRun, keeping: Keeping, path: str
) -> Iterator[pa.RecordBatch]:
    """The committed rows of a run: from the file at ``path``, or else from its bytes.

    Rows of the file are bounded by the format that they were kept with. Raises what `read_rows` and a
    ``combine`` do; and ``Broken`` if the file cannot be read to its end, which removes it: whoever tries
    again reads the run's bytes.
    """
    schema = keeping.format.schema
    file = _open(path, schema) if path and run.fresh else None
    if file is not None:
        with file:
            yield from _whole(path, file, schema, run)
        return
    combiner = Combiner(keeping.combine, schema)
    for batch in read_rows(access, run, keeping.format):
        yield from combiner.take(batch)
    yield from combiner.finish()


class _Writer:
    """Writes the file of one run, which has its name only when it is whole. For one thread.

    Rows that are decided are one stream of Arrow, and those behind them a second one. Where it cannot go on
    it gives up, and says so in the log: nothing fails by it.
    """

    def __init__(self, run: Run, keeping: Keeping, directory: Path) -> None:
        format = keeping.format
        self._run = run
        self._schema = format.schema
        self._path = directory / f"{uuid.uuid4().hex}.arrow"
        self._partial = self._path.with_suffix(".partial")
        self._maker = RowMaker(run, format)
        self._combiner = Combiner(keeping.combine, format.schema)
        self._passes: CommitFilter[FoundBatch] = CommitFilter(CommittedRun(run), acks=format.acks)
        self._file: Any = None
        self._stream: Any = None

    def __enter__(self) -> Self:
        with self._giving_up():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not _make_room(self._path.parent, self._run.length):
                self._give_up("the disk is nearly full")
            else:
                self._file = pa.OSFile(str(self._partial), "wb")
                self._stream = pa.ipc.new_stream(self._file, self._schema)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def take(self, found: FoundBatch, pieces: Cut) -> None:
        """The next messages of the run, cut."""
        if self._file is None:
            return
        if found.arrays is None and len(self._maker.fields):
            self._give_up("its messages are not of the form that is quick to read")
            return
        self._passes.take(found.columns, found, pieces)
        with self._giving_up():
            for ready, mask in self._passes.ready():
                for batch in self._maker.rows(ready, mask):
                    self._write(self._combiner.take(batch))

    def finish(self) -> str:
        """The path of the file; empty, if there is none. It is not synced: it does not outlive its host."""
        if self._file is None:
            return ""
        with self._giving_up():
            self._write(self._combiner.finish())
            self._stream.close()
            self._write_undecided()
            self._file.close()
            self._partial.rename(self._path)
            self._file = None
            return str(self._path)
        return ""

    def _write(self, batches: Iterator[pa.RecordBatch]) -> None:
        for batch in batches:
            self._stream.write_batch(batch)

    def _write_undecided(self) -> None:
        schema = _undecided_schema(self._schema)
        with pa.ipc.new_stream(self._file, schema) as stream:
            for found, mask, pending in self._passes.undecided():
                fit, arrays = self._maker.arrays(found, mask | pending)
                if len(fit):
                    uuids = found.columns.uuids
                    own = (pending[fit], uuids.producers[fit], uuids.clocks[fit])
                    columns = [*map(pa.array, own), *arrays]
                    stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        LOGGER.info(
            "the rows of a run are not kept: it will be read twice",
            extra={"journal": self._run.journal, "number": self._run.number, "reason": reason},
        )
        # Nor are they held.
        self._passes = CommitFilter(CommittedRun(self._run))
        self._remove()

    def _remove(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
            self._partial.unlink(missing_ok=True)


def _make_room(directory: Path, size: int) -> bool:
    """Remove the oldest files, if it takes that, for another one; whether there is room for it then.

    Whoever reads one of them goes on to its end, and who has not begun reads the run again. The session that
    wrote them may be long done with them: nobody tells executors.
    """
    usage = shutil.disk_usage(directory)
    files = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            files.append((found.st_mtime_ns, found.st_size, path))
    taken = sum(length for _, length, _ in files)
    most, free_least = usage.total * _TAKEN_SHARE, usage.total * _FREE_SHARE
    excess = max(taken + size - most, size + free_least - usage.free)
    if excess > taken:
        return False
    for _, length, path in sorted(files):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= length
    return True


def _undecided_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([*(pa.field(name, kind) for name, kind in _UNDECIDED), *schema])


def _open(path: str, schema: pa.Schema) -> Any:
    """The file of a run, if it is there and has these columns."""
    try:
        file = pa.OSFile(path, "rb")
    except OSError:
        return None
    try:
        found = pa.ipc.read_schema(file)
        file.seek(0)
    except (OSError, pa.ArrowInvalid):
        found = None
    if found is None or not found.equals(schema):
        file.close()
        return None
    return file


def _whole(path: str, file: Any, schema: pa.Schema, run: CommittedRun) -> Iterator[pa.RecordBatch]:
    streams = itertools.chain(_decided(file), _undecided(file, schema, run))
    while True:
        try:
            batch = next(streams, None)
        except (OSError, pa.ArrowInvalid) as error:
            # Some of its rows have been given, which nobody can take back: the attempt fails.
            Path(path).unlink(missing_ok=True)
            raise Broken(
                f"what was kept of a run cannot be read: {error}",
                hint="Try again: the file was removed, and the run is read from its fragments then."
                " Look after the disk.",
                journal=run.run.journal,
                file=path,
            ) from error
        if batch is None:
            return
        yield batch


def _decided(file: Any) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(file) as stream:
        yield from stream


def _undecided(file: Any, schema: pa.Schema, run: CommittedRun) -> Iterator[pa.RecordBatch]:
    """Those rows of the second stream that have committed, by the fates of what was pending."""
    with pa.ipc.open_stream(file) as stream:
        for batch in stream:
            pending, *uuids = (a.to_numpy(zero_copy_only=False) for a in batch.columns[:3])
            rows = pa.RecordBatch.from_arrays(batch.columns[3:], schema=schema)
            yield rows.filter(pa.array(~pending | settled(run, *uuids)))
