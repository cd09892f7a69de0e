"""Stage 15 of the byte path: takes file operations from `stores/*`, gives appends to `client/append_service`.

A recorder turns what a store did to its files into operations of the recovery log. All operations of
a *group* go into one append, which the broker applies whole or not at all: that is what makes a
store's commit atomic in the log (splitting it opened wrong in a few percent of cuts, see
docs/consistency.md).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gazette.client.appender import AppendParams, AppendResult
from gazette.clock import Clock
from gazette.errors import Bug, Corrupt, GazetteError, Invalid, Unavailable
from gazette.failpoints import hit
from gazette.protocol.hints import FSMHints
from gazette.protocol.label_set import EMPTY_LABELS, Label, LabelSelector, LabelSet
from gazette.recoverylog.fsm import Outcome, RecoveryFSM
from gazette.recoverylog.ops import (
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
from gazette.tasks import OpFuture, Waiter, first_failure, wait_done

PROPERTY_PATHS = frozenset({"/IDENTITY"})
"""Files that are recorded as properties: RocksDB links them over what exists."""


class LogTxn(Protocol):
    """One append in the making: `gazette.client.append_txn.AppendTxn`, or one to a file."""

    def write(self, content: bytes | bytearray | memoryview) -> None: ...

    def release(self) -> OpFuture[AppendResult]: ...

    def roll_back(self) -> None: ...


class LogAppends(Protocol):
    """Where a recorder appends: an append service, or a `gazette.recoverylog.log_file.LogFile`."""

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> LogTxn: ...


def fence(author: int) -> LabelSet:
    """The registers by which ``author`` owns a log."""
    return LabelSet.of((FENCE_LABEL, fence_value(author)))


def fence_check(author: int) -> LabelSelector:
    """What every append of ``author`` requires: that nobody else has taken the log over."""
    return LabelSelector(
        include=LabelSet((Label(FENCE_LABEL, fence_value(author)),)), exclude=EMPTY_LABELS
    )


def no_op(fsm: RecoveryFSM, author: int) -> bytes:
    """The frame of an operation that does nothing but take the next sequence number."""
    frame, _ = encode_op(
        RecordedOp(seq_no=fsm.next_seq_no, checksum=fsm.next_checksum, author=author, action=None)
    )
    return frame


class Group:
    """Operations that become one append. Made by `Recorder.group`; paths are absolute in the log."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._chunks: list[bytes | bytearray | memoryview] = []
        self.bytes = 0
        self._future: OpFuture[AppendResult] | None = None

    @property
    def future(self) -> OpFuture[AppendResult]:
        """The append's outcome, once the group has ended."""
        if self._future is None:
            raise Bug("a group has no future before it ended")
        return self._future

    def _record(self, action: Action, data: bytes | bytearray | memoryview = b"") -> int:
        group_time = 0 if self._chunks else self._recorder._group_time()
        seq_no, frame = self._recorder._sequence(action, group_time)
        self._chunks.append(frame)
        self.bytes += len(frame)
        if len(data):
            self._chunks.append(data)
            self.bytes += len(data)
        return seq_no

    def fnode_of(self, path: str) -> int | None:
        """The live file at a path."""
        return self._recorder.fsm.links.get(clean_path(path))

    def create(self, path: str) -> int:
        """A new, empty file at ``path``; whatever was there is unlinked first. Its fnode."""
        path = clean_path(path)
        self.unlink(path, missing_ok=True)
        return self._record(Create(path))

    def write(self, fnode: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Bytes at an offset of a file. Empty data records nothing.

        ``data`` is kept until the group ends: it must not change before.
        """
        if fnode not in self._recorder.fsm.nodes:
            raise Bug("write to a file that is not recorded", fnode=fnode)
        if offset < 0:
            raise Invalid("a write needs an offset of zero or more", offset=offset)
        if len(data):
            self._record(Write(fnode, offset, len(data)), data)

    def unlink(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove a path; its file goes with the last one."""
        path = clean_path(path)
        fnode = self.fnode_of(path)
        if fnode is None:
            if missing_ok:
                return
            raise Bug("unlink of a path that is not recorded", path=path)
        self._record(Unlink(fnode, path))

    def link(self, source: str | int, target: str) -> None:
        """One more path for a file."""
        target = clean_path(target)
        fnode = source if isinstance(source, int) else self.fnode_of(clean_path(source))
        if fnode is None or fnode not in self._recorder.fsm.nodes:
            raise Bug("link of a file that is not recorded", source=source, target=target)
        self._record(Link(fnode, target))

    def rename(self, source: str, target: str) -> None:
        """Move a file over ``target``, as ``os.replace`` does; the local file has been moved already.

        A file that is moved to a property's path becomes one, and must be UTF-8 text.
        """
        source, target = clean_path(source), clean_path(target)
        if self.fnode_of(source) is None:
            raise Bug("rename of a path that is not recorded", source=source, target=target)
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
    """Records the files of one directory. Used from one thread, that of the shard.

    A recorder that failed once is broken for good: every later call raises its first error. The log
    then holds what was appended before, and the next owner recovers exactly that.
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
        """See `open`, which most callers want. Without a clock, groups have no times in the log."""
        if not directory.is_absolute():
            raise Invalid("a recorder needs an absolute directory", directory=str(directory))
        self.fsm = fsm
        self.author = author
        self.directory = directory
        self.log = log
        self.offline = offline
        """Whether nobody reads the log before all of it is published (see `log_file`): then commits on
        the way may be recorded later, all at once, which `at_end` is for."""
        self._at_end: list[Callable[[], None]] = []
        self._appends = appends
        self._clock = clock
        self._wait = wait
        self._write_head = write_head
        self._recent: OpFuture[AppendResult] | None = None
        self._broken: BaseException | None = None
        self._in_group = False
        self._oldest = fsm.oldest_offset()
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
        """Continue a log where ``fsm`` ends, which is at ``write_head``. ``wait`` blocks its thread.

        Without that, or for a log that ``fsm`` was not played from, blocks for one append to learn it.

        ``clock`` gives the times by which the state of a moment is found again (`open_at`).

        When the log is not the one that ``fsm`` was played from (a fork), a first operation fences it.
        Raises ``Unavailable`` when the log does not answer within ``deadline_s`` seconds.
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
        # Registers change only with content, so the no-op carries the fence. No check here: the new
        # log's registers are whatever they are.
        txn = self._appends.start_append(
            AppendParams(journal=self.log, union_registers=fence(self.author))
        )
        txn.write(frame)
        self._recent = txn.release()

    def _group_time(self) -> int:
        return 0 if self._clock is None else max(1, int(self._clock.now() * 1000))

    def _sequence(self, action: Action, group_time: int = 0) -> tuple[int, bytes]:
        """Give an operation the next sequence number; (its number, its frame)."""
        op = RecordedOp(
            seq_no=self.fsm.next_seq_no,
            checksum=self.fsm.next_checksum,
            author=self.author,
            action=action,
            first_offset=self._write_head,
            last_offset=0,
            log=self.log,
            group_time=group_time,
        )
        frame, payload = encode_op(op)
        outcome = self.fsm.apply(op, payload)
        if outcome is not Outcome.APPLIED:
            raise Bug(
                f"operation cannot be recorded: {outcome.value}", action=action, seq_no=op.seq_no
            )
        return op.seq_no, frame

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._in_group:
            raise Bug("groups of a recorder do not nest", log=self.log)
        recent = self._recent
        if recent is None or not recent.done():
            return
        if (error := first_failure((recent,))) is not None:
            self._broken = _translated(error, self.log)
            raise self._broken
        commit = recent.result().commit
        if commit.begin < self._write_head:
            self._broken = Corrupt(
                "an append to the recovery log was given an offset of the past",
                log=self.log,
                begin=commit.begin,
                write_head=self._write_head,
                hint="The journal was reset below its head, or two clusters write it.",
            )
            raise self._broken
        self._write_head = commit.end
        self._recent = None

    @contextmanager
    def group(self, wait_for: Collection[OpFuture[Any]] = ()) -> Iterator[Group]:
        """Operations that take effect together, after every future of ``wait_for`` succeeded.

        Nothing is appended when the body raises; the recorder is then broken, because the files may
        already differ from the log. Does not block; await ``group.future`` for the outcome.
        """
        self._check()
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
        try:
            hit("commit.recording", self.log)
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
        if self._recent is None:
            self._recent = future
        self._oldest = self.fsm.oldest_offset()
        return future

    def barrier(self, wait_for: Collection[OpFuture[Any]] = ()) -> OpFuture[AppendResult]:
        """A future of everything recorded so far, and of ``wait_for``."""
        self._check()
        return self._append((), wait_for)

    def flush(self, deadline_s: float = 60.0) -> None:
        """Block until everything recorded so far is in the log. Raises ``Unavailable``, ``Fenced``."""
        _await(self.barrier(), deadline_s, self.log, self._wait)

    def at_end(self, record: Callable[[], None]) -> None:
        """Have `end` call something that records what was left for later. Only of an offline log."""
        if not self.offline:
            raise Bug("commits of a log that others read are recorded at once", log=self.log)
        self._at_end.append(record)

    def end(self) -> FSMHints:
        """Record what was left for later, and give the hints of an offline log that is complete."""
        for record in self._at_end:
            record()
        return self.build_hints()

    def snapshot_hints(self) -> tuple[FSMHints, OpFuture[AppendResult]]:
        """Hints of the present files, and the future after which they may be stored.

        Storing them earlier could name operations that never reach the log.
        """
        flushed = self.barrier()
        return self.fsm.build_hints(self.log), flushed

    def build_hints(self, deadline_s: float = 60.0) -> FSMHints:
        """Hints that name committed operations only. Blocks."""
        hints, flushed = self.snapshot_hints()
        _await(flushed, deadline_s, self.log, self._wait)
        return hints

    @property
    def write_head(self) -> int:
        """A lower bound of the log's end, in bytes."""
        return self._write_head

    @property
    def horizon_bytes(self) -> int:
        """How much of the log a recovery from fresh hints reads."""
        oldest = self.fsm.oldest_offset()
        return 0 if oldest is None else max(0, self._write_head - oldest)

    @property
    def known_horizon_bytes(self) -> int:
        """`horizon_bytes` as of the last append that is known to be in the log. Any thread."""
        oldest, recent, end = self._oldest, self._recent, self._write_head
        if recent is not None and recent.done() and first_failure((recent,)) is None:
            end = max(end, recent.result().commit.end)
        return 0 if oldest is None else max(0, end - oldest)

    def live_paths(self) -> list[str]:
        return sorted(self.fsm.links)


def clean_path(path: str) -> str:
    """A path as logs spell it: absolute with respect to the directory, no doubled slashes."""
    relative = posixpath.normpath(path.lstrip("/"))
    if relative in (".", "") or relative == ".." or relative.startswith("../"):
        raise Invalid("not a path within the recorded directory", path=path)
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
            "the recovery log did not take an append in time", log=log, deadline_s=deadline_s
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
