"""Committed rows of a run, kept on a local disk by a first pass for the second pass.

Both passes decompress a run, find its messages and read their UUIDs, which takes most of their
time. So the first pass may also make the rows, and write them to a file. At that time it does not
know which messages have committed. That depends on the states of producers before the run, and on
the fates of messages that are pending at its end. The first pass assumes that the run holds no
duplicates of earlier messages. Then:

* All messages are decided but those that are pending at the end. From the first pending message on,
rows are kept with producers and clocks, for the second pass to decide.

* The fold knows if the assumption was right (`CommittedRun.fresh`).

A kept file is optional. If it is missing, or its assumption was wrong, the second pass reads the
run again. So a full disk, a lost file, or another host does no harm.

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
from gazette.history.batch_split import BatchSplit, split_batch
from gazette.history.columns import require_uuids
from gazette.history.combine import Combine, Combiner
from gazette.history.commit_filter import CommitFilter, committed_later
from gazette.history.merge import CommittedRun
from gazette.history.row_format import RowFormat
from gazette.history.rows import RowMaker, read_rows
from gazette.history.scanned_batches import ScannedBatch, scanned_batches
from gazette.history.snapshot import Run
from gazette.history.source import OpenAccess
from gazette.history.summary import RunSummary, Summariser

LOGGER: Final = logging.getLogger(__name__)

_UNDECIDED: Final = (("pending", pa.bool_()), ("producer", pa.uint64()), ("clock", pa.uint64()))
"""Columns of undecided messages, which precede the columns of rows."""
KEPT_NAME: Final = r"[0-9a-f]{32}\.arrow"
"""Pattern of the names of files with kept rows. A name is random, so that it cannot be guessed."""
_FREE_SHARE: Final = 0.1
"""Share of a disk that must stay free. Rows that would leave less are not kept."""
_TAKEN_SHARE: Final = 0.25
"""Greatest share of a disk that kept files occupy. Beyond it, the oldest files go, of any pass."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows that a first pass keeps: rows of a format, combined by ``combine`` if it is
    given.
    """

    format: RowFormat
    combine: Combine | None = None


def summarise_and_keep(
    access: OpenAccess, run: Run, kept_rows: KeptRows, directory: Path
) -> tuple[RunSummary, str]:
    """Summarise a run as `summarise_run` does. Return also the path of the file of kept rows, or
    "".

    If this raises, an incomplete file is removed.
    """
    require_uuids(run.journal, run.shape)
    summariser = Summariser(run)
    with _Writer(run, kept_rows, directory) as writer:
        for found in scanned_batches(access, run, kept_rows.format.scanned):
            pieces = split_batch(found.columns, run)
            summariser.add(found.columns, pieces)
            writer.add(found, pieces)
        return summariser.summary(), writer.finish()


def read_kept_rows(
    access: OpenAccess, run: CommittedRun, kept_rows: KeptRows, path: str
) -> Iterator[pa.RecordBatch]:
    """Yield the committed rows of a run, from the file at ``path`` or else from its bytes.

    The format at the time of writing bounds the rows of the file. Raise what `read_rows` and
    ``combine`` raise. Raise ``Broken`` if the file cannot be read to its end, and remove it. The
    next attempt then reads the run's bytes.
    """
    schema = kept_rows.format.schema
    file = _open(path, schema) if path and run.fresh else None
    if file is not None:
        with file:
            yield from _whole(path, file, schema, run)
        return
    combiner = Combiner(kept_rows.combine, schema)
    for batch in read_rows(access, run, kept_rows.format):
        yield from combiner.add(batch)
    yield from combiner.finish()


class _Writer:
    """Writer of the file of one run. The file gets its name when it is complete. For one thread.

    Decided rows are one stream of Arrow, undecided rows a second one. If the writer cannot
    continue, it gives up and logs the reason. Nothing fails.
    """

    def __init__(self, run: Run, kept_rows: KeptRows, directory: Path) -> None:
        format = kept_rows.format
        self._run = run
        self._schema = format.schema
        self._path = directory / f"{uuid.uuid4().hex}.arrow"
        self._partial = self._path.with_suffix(".partial")
        self._maker = RowMaker(run, format)
        self._combiner = Combiner(kept_rows.combine, format.schema)
        self._passes: CommitFilter[ScannedBatch] = CommitFilter(CommittedRun(run), acks=format.acks)
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

    def add(self, found: ScannedBatch, pieces: BatchSplit) -> None:
        """Add the next messages of the run, with their segments."""
        if self._file is None:
            return
        if found.arrays is None and len(self._maker.fields):
            self._give_up("the fast reader does not support the form of its messages")
            return
        self._passes.add(found.columns, found, pieces)
        with self._giving_up():
            for ready, mask in self._passes.ready():
                for batch in self._maker.rows(ready, mask):
                    self._write(self._combiner.add(batch))

    def finish(self) -> str:
        """Return the path of the file, or "" without one. The file is not synced, since it does not
        outlive its host.
        """
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
            "rows of a run are not kept; the second pass will read the run again",
            extra={"journal": self._run.journal, "number": self._run.number, "reason": reason},
        )
        # Drop the rows that the filter holds in memory.
        self._passes = CommitFilter(CommittedRun(self._run))
        self._remove()

    def _remove(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
            self._partial.unlink(missing_ok=True)


def _make_room(directory: Path, size: int) -> bool:
    """Remove the oldest files to make room for another one. Return True if there is room.

    A reader of a removed file continues to its end, and later readers read the run again. A session
    does not report its end to executors, so old files may be in use or not.
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
    """Return the file of a run, if it exists and has these columns."""
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
            # Some of its rows have been yielded and cannot be taken back, so the attempt must fail.
            Path(path).unlink(missing_ok=True)
            raise Broken(
                f"the kept rows of a run cannot be read: {error}",
                hint="Try again: the file was removed, and the run will be read from its fragments."
                " Check the disk.",
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
    """Yield the rows of the second stream that have committed, by the fates of pending messages."""
    with pa.ipc.open_stream(file) as stream:
        for batch in stream:
            pending, *uuids = (a.to_numpy(zero_copy_only=False) for a in batch.columns[:3])
            rows = pa.RecordBatch.from_arrays(batch.columns[3:], schema=schema)
            yield rows.filter(pa.array(~pending | committed_later(run, *uuids)))
