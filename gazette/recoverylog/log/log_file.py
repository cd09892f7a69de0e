"""A recovery log that is recorded into a local file, and appended to its journal later.

So a shard's state is built away from the shard: the store runs as always, and its recorder appends to a file.
The result is a *branch*: operations of a new author, with sequence numbers that no other branch of the log
has. A player with earlier hints skips the branch, like operations of any other author. A player with the
branch's hints reads only the branch, and the operations after it. So a branch that is appended, completely or
in part, has no effect until its hints are stored.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from gazette.client.append.appender import AppendParams, AppendResult
from gazette.errors import Bug
from gazette.protocol.fragment import Fragment
from gazette.protocol.hints import FnodeSegments, FSMHints
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.ops import RecordedOp, encode_op
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.private_files import write_private
from gazette.runtime.tasks import OpFuture, first_failure, resolved

BRANCH_SEQ_NO_MIN: Final = 1 << 48
"""Least sequence number of a branch. A log with one operation per microsecond reaches it in nine years."""
_BRANCH_BITS: Final = 46
_BRANCH_ALIGNMENT: Final = 1 << 16
_HEADER: Final = Header(ProcessId("local", "log-file"), EMPTY_ROUTE, EtcdHeader(1, 1, 1, 1))


@dataclass(frozen=True, slots=True)
class Branch:
    """Author of a branch, and its first sequence number."""

    author: int
    first_seq_no: int

    @classmethod
    def new(cls, rng: random.Random) -> Branch:
        """Return a new, unique branch."""
        distance = rng.getrandbits(_BRANCH_BITS) * _BRANCH_ALIGNMENT
        return cls(rng.randrange(1, (1 << 32) - 1), BRANCH_SEQ_NO_MIN + distance)

    def fsm(self, log: str) -> RecoveryFSM:
        """Return the FSM of an empty branch."""
        fsm = RecoveryFSM(FSMHints(log=log))
        fsm.next_seq_no = self.first_seq_no
        return fsm

    def opening(self, rng: random.Random, *, empty: bool) -> bytes:
        """Return the content to append before the branch, in an append that sets the branch's fence.

        Brokers change registers only with content. The content's operations apply for no reader. If the log
        is ``empty``, the first operation has another author: a reader without hints follows the first author,
        which must not be the branch's.
        """
        frames = b""
        if empty:
            another = self.author
            while another == self.author:
                another = rng.randrange(1, (1 << 32) - 1)
            frames, _ = encode_op(RecordedOp(seq_no=1, checksum=0, author=another, action=None))
        frame, _ = encode_op(
            RecordedOp(seq_no=self.first_seq_no - 1, checksum=0, author=self.author, action=None)
        )
        return frames + frame


class LogFile:
    """Local file of a log, with the append methods that recorders use. For one thread.

    ``ends`` are the offsets at which appends ended. A reader may cut a log only there.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, which must not exist."""
        self.path = path
        self.ends: list[int] = []
        self.end = 0
        write_private(path, b"", new=True)
        self._file: BinaryIO = path.open("r+b")
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """SHA-256 of all appended bytes, in hexadecimal."""
        return self._digest.hexdigest()

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> FileTxn:
        """Begin an append. Raise ``Bug`` if a future of ``dependencies`` is not done, or the error of one
        that failed."""
        if not all(future.done() for future in dependencies):
            raise Bug("an append to a log file cannot wait for dependencies", log=params.journal)
        if (error := first_failure(dependencies)) is not None:
            raise error
        return FileTxn(self, params.journal)

    def _append(self, journal: str, chunks: list[bytes]) -> OpFuture[AppendResult]:
        begin = self.end
        for chunk in chunks:
            self._file.write(chunk)
            self._digest.update(chunk)
            self.end += len(chunk)
        if self.end > begin:
            self.ends.append(self.end)
        return resolved(AppendResult(Fragment(journal, begin, self.end), EMPTY_LABELS, _HEADER))

    def close(self) -> None:
        """Write buffered bytes and close the file. Raise ``OSError`` if the disk is full."""
        self._file.close()


class FileTxn:
    """One append to a log file."""

    def __init__(self, file: LogFile, journal: str) -> None:
        self._file = file
        self._journal = journal
        self._chunks: list[bytes] = []

    def write(self, content: bytes | bytearray | memoryview) -> None:
        self._chunks.append(bytes(content))

    def release(self) -> OpFuture[AppendResult]:
        return self._file._append(self._journal, self._chunks)

    def roll_back(self) -> None:
        self._chunks.clear()


def offline_recorder(log: str, branch: Branch, directory: Path, file: LogFile) -> Recorder:
    """Return a recorder of a branch of ``log`` into a file. ``directory`` must exist and be empty."""
    return Recorder(branch.fsm(log), branch.author, directory, file, log, 0, offline=True)


def moved_hints(hints: FSMHints, base: int) -> FSMHints:
    """Return the hints of a branch whose file was appended to its journal at offset ``base``."""
    return replace(
        hints,
        live_nodes=tuple(
            FnodeSegments(
                node.fnode,
                tuple(
                    replace(
                        segment,
                        first_offset=segment.first_offset + base,
                        last_offset=segment.last_offset + base if segment.last_offset else 0,
                    )
                    for segment in node.segments
                ),
            )
            for node in hints.live_nodes
        ),
    )
