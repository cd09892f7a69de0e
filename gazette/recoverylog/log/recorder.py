"""Stage 15 of the byte path: takes file operations of `stores/*`, gives appends to `client/append/service`.

A recorder turns a store's changes to its files into operations of the recovery log. All operations
of a *group* go into one append, which the broker applies completely or not at all. So a store's commit is
atomic in the log. (Commits split over appends were wrong at a few percent of cuts: see docs/consistency.md.)
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gazette.client.append.appender import AppendParams, AppendResult
from gazette.errors import Bug, Corrupt, GazetteError, Invalid, Unavailable
from gazette.protocol.hints import FSMHints
from gazette.protocol.label_set import EMPTY_LABELS, Label, LabelSelector, LabelSet
from gazette.recoverylog.log.fsm import Outcome, RecoveryFSM
from gazette.recoverylog.log.ops import (
    FENCE_LABEL,
    Action,
    Create,
    Link,
    RecordedOp,
    SetProperty,
    Unlink,
    Write,
    encode_op,
    fence_value,
)
from gazette.runtime import failpoints
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import OpFuture, Waiter, first_failure, wait_done

PROPERTY_PATHS = frozenset({"/IDENTITY"})
"""Files that are recorded as properties: RocksDB links them over existing files."""


class LogTxn(Protocol):
    """One open append: `gazette.client.append.service.AppendTxn`, or one to a file."""

    def write(self, content: bytes | bytearray | memoryview) -> None: ...

    def release(self) -> OpFuture[AppendResult]: ...

    def roll_back(self) -> None: ...


class LogAppends(Protocol):
    """Target of a recorder's appends: an append service, or a `LogFile`."""

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> LogTxn: ...


def fence(author: int) -> LabelSet:
    """Return the registers by which ``author`` owns a log."""
    return LabelSet.of((FENCE_LABEL, fence_value(author)))


def fence_check(author: int) -> LabelSelector:
    """Return the selector that appends of ``author`` require: no other author has taken the log over."""
    return LabelSelector(
        include=LabelSet((Label(FENCE_LABEL, fence_value(author)),)), exclude=EMPTY_LABELS
    )


def no_op(fsm: RecoveryFSM, author: int) -> bytes:
    """Return the frame of an operation that only uses the next sequence number."""
    frame, _ = encode_op(
        RecordedOp(seq_no=fsm.next_seq_no, checksum=fsm.next_checksum, author=author, action=None)
    )
    return frame


class Group:
    """Operations that become one append: see `Recorder.group`. Paths are absolute in the log."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._chunks: list[bytes | bytearray | memoryview] = []
        self.bytes = 0
        self._future: OpFuture[AppendResult] | None = None

    @property
    def future(self) -> OpFuture[AppendResult]:
        """Future of the append, once the group has ended."""
        if self._future is None:
            raise Bug("the future of a group is not available before the group has ended")
        return self._future

    def _record(self, action: Action, data: bytes | bytearray | memoryview = b"") -> int:
        seq_no, frame = self._recorder._sequence(action, is_first=not self._chunks)
        self._chunks.append(frame)
        self.bytes += len(frame)
        if len(data):
            self._chunks.append(data)
            self.bytes += len(data)
        return seq_no

    def fnode_of(self, path: str) -> int | None:
        """Return the live file at a path, or None."""
        return self._recorder.fsm.links.get(clean_path(path))

    def create(self, path: str) -> int:
        """Create an empty file at ``path``. Return its fnode. Unlink an existing file first."""
        path = clean_path(path)
        self.unlink(path, missing_ok=True)
        return self._record(Create(path))

    def write(self, fnode: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes at an offset of a file. Do not change ``data`` until the group ends. Empty data records
        no operation. Raise ``Invalid`` for a negative offset."""
        if fnode not in self._recorder.fsm.nodes:
            raise Bug("cannot write to a file that is not recorded", fnode=fnode)
        if offset < 0:
            raise Invalid("the offset of a write must not be negative", offset=offset)
        if len(data):
            self._record(Write(fnode, offset, len(data)), data)

    def unlink(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove a path. A file without a path is deleted."""
        path = clean_path(path)
        fnode = self.fnode_of(path)
        if fnode is None:
            if missing_ok:
                return
            raise Bug("cannot unlink a path that is not recorded", path=path)
        self._record(Unlink(fnode, path))

    def link(self, source: str | int, target: str) -> None:
        """Add the path ``target`` to a file. ``source`` is the file's fnode, or a path of it."""
        target = clean_path(target)
        fnode = source if isinstance(source, int) else self.fnode_of(clean_path(source))
        if fnode is None or fnode not in self._recorder.fsm.nodes:
            raise Bug("cannot link a file that is not recorded", source=source, target=target)
        self._record(Link(fnode, target))

    def rename(self, source: str, target: str) -> None:
        """Record that the local file ``source`` was moved over ``target``, as by ``os.replace``.

        A file that moves to a property's path becomes a property, and must be UTF-8 text.
        """
        source, target = clean_path(source), clean_path(target)
        if self.fnode_of(source) is None:
            raise Bug("cannot rename a path that is not recorded", source=source, target=target)
        if source == target:
            return
        self.unlink(target, missing_ok=True)
        if target in PROPERTY_PATHS:
            self.property(target, (self._recorder.directory / target[1:]).read_text("utf-8"))
        else:
            self.link(source, target)
        self.unlink(source)

    def property(self, path: str, content: str) -> None:
        """Set a property file, such as RocksDB's identity."""
        self._record(SetProperty(clean_path(path), content))


class Recorder:
    """Records the files of one directory. Use it only on the shard's thread.

    Once a group or an append has failed, a recorder is broken: every later group or append raises that error.
    The log then has the earlier appends, and the next owner recovers exactly these.
    """

    def __init__(
        self,
        fsm: RecoveryFSM,
        author: int,
        directory: Path,
        appends: LogAppends,
        log: str,
        write_head: int,
        *,
        offline: bool = False,
        clock: Clock | None = None,
        wait: Waiter = wait_done,
    ) -> None:
        """Make a recorder. Most callers use `open`. Without a clock, groups have no times in the log. Raise
        ``Invalid`` for a relative directory."""
        if not directory.is_absolute():
            raise Invalid("the directory of a recorder must be absolute", directory=str(directory))
        self.fsm = fsm
        self.author = author
        self.directory = directory
        self.log = log
        self.offline = offline
        """True if readers see only the complete log (see `log_file`). So `at_end` may postpone changes."""
        self._at_end: list[Callable[[], None]] = []
        self._appends = appends
        self._clock = clock
        self._wait = wait
        self._write_head = write_head
        self._watched_append: OpFuture[AppendResult] | None = None
        """The first append since `_require_unbroken` last noted an outcome: its outcome is noted next. None:
        no append was made since then."""
        self._broken: BaseException | None = None
        self._in_group = False
        self._oldest_offset = fsm.oldest_offset()
        """``oldest_offset`` of the FSM as of the last append, which any thread may read."""
        self._params = AppendParams(journal=log, check_registers=fence_check(author))

    @classmethod
    def open(
        cls,
        log: str,
        fsm: RecoveryFSM,
        author: int,
        directory: Path,
        appends: LogAppends,
        *,
        clock: Clock | None = None,
        write_head: int | None = None,
        deadline_s: float = 60.0,
        wait: Waiter = wait_done,
    ) -> Recorder:
        """Continue a log that was played into ``fsm`` up to ``write_head``.

        Without ``write_head``, or if ``fsm`` was played from another log (a fork), block for one append
        to learn the head. In a fork, another append sets the fence. ``wait`` blocks the thread until a
        future is done. `open_at` finds states by the times of ``clock``.

        Raise ``Unavailable`` if the log does not answer within ``deadline_s`` seconds.
        """
        forks = fsm.last_log != log
        if write_head is None or forks:
            barrier = appends.start_append(AppendParams(journal=log)).release()
            write_head = _await(barrier, deadline_s, log, wait).commit.end
        recorder = cls(fsm, author, directory, appends, log, write_head, clock=clock, wait=wait)
        if forks:
            recorder._fence_fork()
        return recorder

    def _fence_fork(self) -> None:
        _, frame = self._sequence(None)
        # A broker changes registers only with content, so a no-op carries the fence. Its append checks no
        # registers, since the registers of the new log are unknown.
        txn = self._appends.start_append(
            AppendParams(journal=self.log, union_registers=fence(self.author))
        )
        txn.write(frame)
        self._watched_append = txn.release()
        self._oldest_offset = self.fsm.oldest_offset()

    def _sequence(self, action: Action, *, is_first: bool = False) -> tuple[int, bytes]:
        """Give an operation the next sequence number. Return the number and the frame. The first operation of
        a group has the time of the clock. Raise ``Bug`` if the FSM refuses the action."""
        clock = self._clock if is_first else None
        op = RecordedOp(
            seq_no=self.fsm.next_seq_no,
            checksum=self.fsm.next_checksum,
            author=self.author,
            action=action,
            first_offset=self._write_head,
            last_offset=0,
            log=self.log,
            group_time=0 if clock is None else max(1, int(clock.now() * 1000)),
        )
        frame, payload = encode_op(op)
        outcome = self.fsm.apply(op, payload)
        if outcome is not Outcome.APPLIED:
            raise Bug(
                f"the operation cannot be recorded: {outcome.value}",
                action=action,
                seq_no=op.seq_no,
            )
        return op.seq_no, frame

    def _require_unbroken(self) -> None:
        """Raise the error that broke the recorder, or ``Bug`` within a group. If the noted append is done,
        raise its error, or note its end: the log reaches at least that far."""
        if self._broken is not None:
            raise self._broken
        if self._in_group:
            raise Bug("groups of a recorder cannot be nested", log=self.log)
        recent = self._watched_append
        if recent is None or not recent.done():
            return
        if (error := first_failure((recent,))) is not None:
            self._broken = _translated(error, self.log)
            raise self._broken
        commit = recent.result().commit
        if commit.begin < self._write_head:
            self._broken = Corrupt(
                "an append to the recovery log began before the known end of the log",
                log=self.log,
                begin=commit.begin,
                write_head=self._write_head,
                hint="The journal was reset below its head, or two clusters write it.",
            )
            raise self._broken
        self._write_head = commit.end
        self._watched_append = None

    @contextmanager
    def group(self, wait_for: Collection[OpFuture[Any]] = ()) -> Iterator[Group]:
        """Record operations that take effect together, once every future of ``wait_for`` has succeeded.

        If the body raises, append nothing. The recorder is then broken, because the files may differ from the
        log. The block does not wait for the append: wait for ``group.future``.
        """
        self._require_unbroken()
        group = Group(self)
        self._in_group = True
        try:
            yield group
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._in_group = False
        group._future = self._append(group._chunks, wait_for)

    def _append(
        self,
        chunks: Collection[bytes | bytearray | memoryview],
        wait_for: Collection[OpFuture[Any]],
    ) -> OpFuture[AppendResult]:
        """Begin an append after ``wait_for``. Return its future. An error breaks the recorder."""
        try:
            if failpoints.armed_points:
                failpoints.hit("commit.recording", self.log)
            txn = self._appends.start_append(self._params, wait_for)
            try:
                for chunk in chunks:
                    txn.write(chunk)
                future = txn.release()
            except BaseException:
                txn.roll_back()
                raise
        except BaseException as error:
            self._broken = error
            raise
        if self._watched_append is None:
            self._watched_append = future
        self._oldest_offset = self.fsm.oldest_offset()
        return future

    def barrier(self, wait_for: Collection[OpFuture[Any]] = ()) -> OpFuture[AppendResult]:
        """Return a future that succeeds once all records so far are in the log, and all futures of
        ``wait_for`` have succeeded."""
        self._require_unbroken()
        return self._append((), wait_for)

    def flush(self, deadline_s: float = 60.0) -> None:
        """Block until all records are in the log. Raise ``Unavailable`` after ``deadline_s`` seconds, and
        ``Fenced`` if another author has taken the log over."""
        _await(self.barrier(), deadline_s, self.log, self._wait)

    def at_end(self, record: Callable[[], None]) -> None:
        """Call ``record`` in `end`, to record changes that were postponed. Only for an offline log."""
        if not self.offline:
            raise Bug("only an offline recorder may record commits later", log=self.log)
        self._at_end.append(record)

    def end(self) -> FSMHints:
        """Record the postponed changes. Return the hints of the offline log, which is then complete."""
        for record in self._at_end:
            record()
        return self.build_hints()

    def snapshot_hints(self) -> tuple[FSMHints, OpFuture[AppendResult]]:
        """Return hints of the present files, and the future after which they may be stored.

        Hints that are stored earlier could name operations that never reach the log.
        """
        flushed = self.barrier()
        return self.fsm.build_hints(self.log), flushed

    def build_hints(self, deadline_s: float = 60.0) -> FSMHints:
        """Return hints that name only committed operations. Block as `flush` does, with the same errors."""
        hints, flushed = self.snapshot_hints()
        _await(flushed, deadline_s, self.log, self._wait)
        return hints

    @property
    def write_head(self) -> int:
        """Lower bound of the log's end, in bytes."""
        return self._write_head

    @property
    def horizon_bytes(self) -> int:
        """Bytes from the begin of the oldest live file to the known end of the log. A recovery with present
        hints reads about so many bytes; after a fork, bytes of the former log, too."""
        oldest = self.fsm.oldest_offset()
        return 0 if oldest is None else max(0, self._write_head - oldest)

    @property
    def known_horizon_bytes(self) -> int:
        """`horizon_bytes` as of the last append that is known to be in the log. For any thread."""
        oldest, recent, end = self._oldest_offset, self._watched_append, self._write_head
        if recent is not None and recent.done() and first_failure((recent,)) is None:
            end = max(end, recent.result().commit.end)
        return 0 if oldest is None else max(0, end - oldest)

    def live_paths(self) -> list[str]:
        return sorted(self.fsm.links)


def clean_path(path: str) -> str:
    """Return a path in the form of logs: ``/`` is the directory, and slashes are single. Raise ``Invalid``
    unless the path is below the directory."""
    relative = posixpath.normpath(path.lstrip("/"))
    if relative in (".", "") or relative == ".." or relative.startswith("../"):
        raise Invalid("the path leaves the recorded directory, or is the directory", path=path)
    return "/" + relative


def _translated(error: BaseException, log: str) -> BaseException:
    if isinstance(error, GazetteError):
        return error
    return Bug(f"append to the recovery log failed: {error!r}", log=log)


def _await(
    future: OpFuture[AppendResult], deadline_s: float, log: str, wait: Waiter
) -> AppendResult:
    if not wait(future, deadline_s):
        raise Unavailable(
            "an append to the recovery log did not finish in time", log=log, deadline_s=deadline_s
        )
    return future.result()


__all__ = [
    "PROPERTY_PATHS",
    "Group",
    "Recorder",
    "clean_path",
    "fence",
    "fence_check",
    "no_op",
]
